"""PyTorch's issues about max unpooling and pooling, replayed on torch.nn and on this package.

ISSUES holds, for each number, a function that replays the report with the functions of a module and
returns what happened, in words. docs/pytorch-issues.md has these words;
`python tests/test_pytorch_issues.py` prints its table for the PyTorch that is installed.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vjp

import maxunpool_cuda.functional
import maxunpool_cuda.onnx

THEIRS, OURS = torch.nn.functional, maxunpool_cuda.functional
PAGE = (Path(__file__).parent.parent / "docs" / "pytorch-issues.md").read_text()
# For each issue, the page's words on what was wrong, on torch.nn and on this package.
ROWS = {
    int(number): cells
    for number, *cells in re.findall(r"^\| \[(\d+)\]\(.*\) \| (.*) \| (.*) \| (.*) \|$", PAGE, re.M)
}
RACES = (78249, 132041)  # torch.nn's result varies from run to run


def outcome(call: Callable[..., Any], *arguments: object, **named: object) -> str:
    """What a call returns, a tensor's shape instead of it, or the exception it raises."""
    try:
        result = call(*arguments, **named)
    except Exception as error:
        return type(error).__name__
    return str((*result.shape,) if isinstance(result, Tensor) else result)


def pooled(dims: int, x: Tensor, *window: int, **named: int) -> tuple[Tensor, Tensor]:
    return getattr(THEIRS, f"max_pool{dims}d")(x, *window, **named, return_indices=True)


def derivatives(F: ModuleType, *checks: Callable[..., bool], **options: bool) -> str:
    """Whether derivative checks pass for unpooling to maxima that windows share."""
    x = torch.rand(1, 2, 5, 5, dtype=torch.float64, generator=torch.manual_seed(0))
    values, indices = pooled(2, x, 3, 1)
    unpool = partial(F.max_unpool2d, indices=indices, kernel_size=3, stride=1)
    found = [outcome(check, unpool, values.requires_grad_(), **options) for check in checks]
    verdicts = ["passes" if each == "True" else "fails" for each in found]
    return ", ".join(f"{c.__name__} {verdict}" for c, verdict in zip(checks, verdicts, strict=True))


def race(F: ModuleType) -> str:
    x = torch.tensor([[[[0.8725, 0.3154], [0.7132, 0.8304]]]])
    indices = torch.tensor([[[[1, 6], [1, 5]]]])
    values = {round(float(F.max_unpool2d(x, indices, 2)[0, 0, 0, 1]), 4) for _ in range(5000)}
    torch.use_deterministic_algorithms(True)
    return f"{sorted(values)}; deterministic mode: {outcome(F.max_unpool2d, x, indices, 2)}"


def first_outputs(F: ModuleType) -> list[float]:
    values, indices = torch.tensor([[[[-2.0, -3], [-4, -5]]]]), torch.tensor([[[[1, 0], [1, 0]]]])
    return F.max_unpool2d(values, indices, 2).flatten()[:3].tolist()


def pooled_integers(F: ModuleType) -> str:
    """The ranks in which pooling takes integer tensors."""
    planes = {dims: torch.arange(2 * 4**dims).view(1, 2, *[4] * dims) for dims in (1, 2, 3)}
    found = {n: outcome(getattr(F, f"max_pool{n}d"), x, 2) for n, x in planes.items()}
    return ", ".join(f"{n}d" for n, result in found.items() if not result.endswith("Error"))


def channels_last_3d(F: ModuleType) -> str:
    """The results that keep the input's layout, channels_last_3d."""
    x = torch.rand(2, 3, 6, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    values, indices = F.max_pool3d(x, 2, return_indices=True)
    made = {"pooled": values, "indices": indices, "unpooled": F.max_unpool3d(values, indices, 2)}
    kept = [n for n, t in made.items() if t.is_contiguous(memory_format=torch.channels_last_3d)]
    return ", ".join(kept)


def dtypes(F: ModuleType) -> str:
    x, indices = torch.ones(1, 1, 2, 2), torch.arange(4).reshape(1, 1, 2, 2)
    names = ("bfloat16", "float16", "float32", "int64", "bool")
    found = {t: outcome(F.max_unpool2d, x.to(getattr(torch, t)), indices, 2) for t in names}
    return ", ".join(t for t, result in found.items() if result != "NotImplementedError")


def compiled_strides(F: ModuleType) -> str:
    x = torch.rand(1, 3, 6, 2).movedim(-1, 1)  # channels_last
    given = (*pooled(2, x, 3, padding=1), 3, 3, 1, (3, 6))
    compiled = torch.compile(F.max_unpool2d, backend="aot_eager_decomp_partition")
    return f"equal: {compiled(*given).stride() == F.max_unpool2d(*given).stride()}"


def impossible_windows(F: ModuleType) -> str:
    x, indices = torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    windows = ((-1, 1), (1, -1), (0, 1), (2, 0), (2, 2, -1))
    return ", ".join(sorted({outcome(F.max_unpool2d, x, indices, *window) for window in windows}))


class Stage(torch.nn.Module):
    def __init__(self, F: ModuleType) -> None:
        super().__init__()
        self.unpool = F.max_unpool2d

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*pooled(2, x, 2), 2, output_size=x.shape)


def exported(F: ModuleType) -> str:
    """How a stage of SegNet is exported to ONNX, and whether ONNX Runtime agrees."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="PyTorch exports with one and runs with the other")
    model, x = Stage(F), torch.rand(2, 3, 4, 6)
    table = maxunpool_cuda.onnx.translation_table() if F is OURS else None
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    program = torch.onnx.export(program, custom_translation_table=table, verbose=False)
    other = torch.rand(5, 3, 4, 6)
    unpools = any(node.op_type == "MaxUnpool" for node in program.model.graph)
    node = "MaxUnpool" if unpools else "other nodes"
    return f"exported as {node}, results equal: {program(other)[0].equal(model(other))}"


def traced(F: ModuleType) -> str:
    module = (maxunpool_cuda if F is OURS else torch.nn).MaxUnpool2d(2)
    given = pooled(2, torch.rand(1, 2, 4, 4), 2)
    return f"results equal: {torch.jit.trace(module, given)(*given).equal(module(*given))}"


ISSUES: dict[int, Callable[[ModuleType], object]] = {
    67660: lambda F: derivatives(F, gradcheck, gradgradcheck),
    68337: lambda F: F.max_unpool1d(*pooled(1, torch.rand(5, 7), 3), 3, output_size=(5, 7)),
    73154: impossible_windows,
    78249: race,
    80204: lambda F: vjp(
        lambda x: F.max_unpool1d(x, torch.tensor([[[0, 1, 2, 1]]]), 1, 2), torch.rand(1, 1, 4)
    )[1](torch.arange(1.0, 8).reshape(1, 1, 7))[0].tolist(),
    80827: lambda F: derivatives(F, gradcheck, check_forward_ad=True),
    132041: first_outputs,
    133774: dtypes,
    107412: pooled_integers,
    187173: compiled_strides,
    59168: channels_last_3d,
    43367: exported,
    85388: traced,
}


def replay(number: int, F: ModuleType) -> str:
    """The outcome on four threads. torch.nn's unpooling needs nondeterministic algorithms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    torch.use_deterministic_algorithms(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return outcome(ISSUES[number], F)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("number", ISSUES)
def test_issue(number: int) -> None:
    _, theirs, ours = ROWS[number]
    assert replay(number, OURS) == ours
    found = replay(number, THEIRS)
    if f"torch.nn {torch.__version__} |" in PAGE and number not in RACES:
        assert found == theirs


def test_every_row_of_the_page_is_replayed() -> None:
    assert list(ROWS) == list(ISSUES)


if __name__ == "__main__":
    print(f"| issue | about | torch.nn {torch.__version__} | here |\n|---|---|---|---|")
    for number, (fault, _, here) in ROWS.items():
        link = f"[{number}](https://github.com/pytorch/pytorch/issues/{number})"
        print(f"| {link} | {fault} | {replay(number, THEIRS)} | {here} |")
