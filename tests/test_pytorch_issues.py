"""PyTorch's issues about max unpooling and pooling, each replayed on torch.nn and on this package.

ISSUES replays each report on the functions it is given, and says what came of it, in words.
docs/pytorch-issues.md has the words for this package; `python tests/test_pytorch_issues.py` prints
its table anew.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import maxunpool_cuda.functional
import maxunpool_cuda.onnx

THEIRS, OURS = torch.nn.functional, maxunpool_cuda.functional
PAGE = Path(__file__).parent.parent / "docs" / "pytorch-issues.md"
# Of each issue: what was wrong there, and what is said here.
ROWS = {
    int(number): (fault, here)
    for number, fault, here in re.findall(
        r"^\| \[(\d+)\]\(.*\) \| (.*) \| .* \| (.*) \|$", PAGE.read_text(), re.M
    )
}


def outcome(call: Callable[..., object], *arguments: object) -> str:
    """What a call returns, or the exception it raises."""
    try:
        result = call(*arguments)
    except Exception as error:
        return type(error).__name__
    return str(result)


def each(unpool: Callable[..., Tensor], shape: tuple[int, ...], *many: tuple) -> list[str]:
    """What unpooling comes to, from indices of zero, with each of these arguments."""
    x, indices = zeros(*shape)
    return [outcome(unpool, x, indices, *arguments) for arguments in many]


def refused(outcomes: list[str], what: str, error: str = "Error") -> str:
    return f"{sum(word.endswith(error) for word in outcomes)} of {len(outcomes)} {what}"


def distinct(outcomes: list[str]) -> str:
    return ", ".join(sorted(set(outcomes)))


@contextlib.contextmanager
def four_threads(*, deterministic: bool = False) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


def unpools(F: ModuleType) -> tuple[Callable[..., Tensor], ...]:
    return F.max_unpool1d, F.max_unpool2d, F.max_unpool3d


def pooled(dims: int, x: Tensor, *window: int, **named: int) -> tuple[Tensor, Tensor]:
    pool = (THEIRS.max_pool1d, THEIRS.max_pool2d, THEIRS.max_pool3d)[dims - 1]
    return pool(x, *window, **named, return_indices=True)


def zeros(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.rand(shape), torch.zeros(shape, dtype=torch.int64)


def overlapping(F: ModuleType, dims: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Unpooling to where maxima of overlapping windows were, some of several; and their values."""
    x = torch.rand(1, 2, *[5] * dims, dtype=torch.float64, generator=torch.manual_seed(0))
    values, indices = pooled(dims, x, 3, 1)
    return lambda x: unpools(F)[dims - 1](x, indices, 3, 1), values.requires_grad_()


def derivatives(F: ModuleType, dims: int, *checks: Callable[..., bool]) -> str:
    arguments = overlapping(F, dims)
    passed = {check.__name__: outcome(check, *arguments) == "True" for check in checks}
    return ", ".join(f"{name} {'passes' if good else 'fails'}" for name, good in passed.items())


def transposed(F: ModuleType) -> str:
    """<J v, w> == <v, J^T w>, with J v by forward and J^T w by backward differentiation."""
    function, values = overlapping(F, 2)
    output = function(values)
    v, w = torch.rand_like(values), torch.rand_like(output)
    (back,) = torch.autograd.grad(output, values, w)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(values.detach(), v))).tangent
    agree = torch.isclose((tangent * w).sum(), (v * back).sum())
    return f"forward and backward derivatives {'agree' if agree else 'differ'}"


def out_of_range(F: ModuleType) -> str:
    found = []
    for dims, unpool in enumerate(unpools(F), start=1):
        x, indices = zeros(1, 1, *[2] * dims)
        for bad in (-27538, -1, 4**dims):
            indices.view(-1)[-1] = bad
            found.append(outcome(unpool, x, indices, 2))
    return distinct(found)


def race(F: ModuleType) -> str:
    x = torch.tensor([[[[0.8725, 0.3154], [0.7132, 0.8304]]]])
    indices = torch.tensor([[[[1, 6], [1, 5]]]])
    with four_threads():
        values = {round(float(F.max_unpool2d(x, indices, 2)[0, 0, 0, 1]), 4) for _ in range(5000)}
    with four_threads(deterministic=True):
        strict = outcome(lambda: "runs" if F.max_unpool2d(x, indices, 2).any() else "")
    return f"{sorted(values)}; deterministic mode: {strict}"


def repeated_gradients(F: ModuleType) -> str:
    """Where windows overlap, gradients add up, and in another order to other sums."""
    x = torch.rand(2, 4, 9, 9, 9, generator=torch.manual_seed(0), requires_grad=True)
    with four_threads(deterministic=True):
        values = F.max_pool3d(x, 3, 1)
        weight = torch.rand_like(values)
        gradients = [
            torch.autograd.grad(values, x, weight, retain_graph=True)[0] for _ in range(50)
        ]
    return f"runs; equal gradients: {all(map(gradients[0].equal, gradients))}"


def gradient_of_losers(F: ModuleType) -> str:
    x = torch.tensor([[[0.6418, 0.0359, 0.6088, 0.9408]]], requires_grad=True)
    output = F.max_unpool1d(x, torch.tensor([[[0, 1, 2, 1]]]), 1, 2)
    output.backward(torch.arange(1.0, 8).reshape(1, 1, 7))
    return f"gradient {[int(v) for v in x.grad.flatten()]}"


def duplicates_in_volumes(F: ModuleType) -> str:
    x, indices = zeros(2, 3, 2, 2, 2)
    output = F.max_unpool3d(x, indices + 1, 2, 2).flatten(2)
    return f"the last value wins: {torch.equal(output[:, :, 1], x.flatten(2)[:, :, -1])}"


def duplicates_in_planes(F: ModuleType) -> list[int]:
    x = torch.tensor([[[[-2, -3], [-4, -5]]]], dtype=torch.float32)
    output = F.max_unpool2d(x, torch.tensor([[[[1, 0], [1, 0]]]]), 2)
    return [int(v) for v in output[0, 0, 0]]


def sizes_of_bad_indices(F: ModuleType) -> str:
    x = torch.rand(1, 1, 4)
    return ", ".join(
        outcome(lambda i=i: tuple(F.max_unpool1d(x, torch.tensor([[i]]), 3).shape))
        for i in ([-5, 0, 1, 2], [0, 1, 2, 12], [0, 1, 2, 11])
    )


def error_on_a_worker(F: ModuleType) -> Tensor:
    x, indices = zeros(1, 2, 4, 6, 3)
    with four_threads():
        return F.max_unpool3d(x, indices - 1, 3, (2, 1, 2), 1, (6, 6, 5))


def dtypes(F: ModuleType) -> str:
    x, indices = torch.ones(1, 1, 2, 2), torch.arange(4).reshape(1, 1, 2, 2)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool)
    results = {t: outcome(F.max_unpool2d, x.to(t), indices, 2) for t in dtypes}
    works = [t for t, result in results.items() if result != "NotImplementedError"]
    return ", ".join(str(t).removeprefix("torch.") for t in works)


def compiled(
    function: Callable[..., Tensor], backend: str = "aot_eager_decomp_partition"
) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend)


def compiled_errors(F: ModuleType) -> str:
    """An output of size 0, and an index of the next plane, both eager and compiled."""
    x, indices = zeros(1, 2, 2)
    bad = torch.tensor([[[0, 1], [2, 4]]])
    words = []
    for function in (
        lambda: F.max_unpool1d(x[..., :1], indices[..., :1], 2, 2, 1).sum(),
        lambda: F.max_unpool1d(x, bad, 2).sum(),
    ):
        eager, traced = outcome(function), outcome(compiled(function))
        both_raise = eager.endswith("Error") and traced.endswith("Error")
        words.append("alike" if eager == traced or both_raise else "not alike")
    return "eager and compiled: " + ", ".join(words)


def compiled_padding(F: ModuleType) -> str:
    call = lambda x, i: F.max_unpool2d(x, i, 1, 5, (3, 4))  # noqa: E731
    eager, traced = (outcome(f, *zeros(1, 1, 2, 2)) for f in (call, compiled(call, "aot_eager")))
    return f"eager {eager}, compiled {'raises' if traced.endswith('Error') else 'runs'}"


def compiled_strides(F: ModuleType) -> str:
    x = torch.rand(1, 2, 3, 6).contiguous(memory_format=torch.channels_last)
    tensors = pooled(2, x, 3, padding=1)
    call = lambda x, i: F.max_unpool2d(x, i, 3, 3, 1, (3, 6))  # noqa: E731
    same = call(*tensors).stride() == compiled(call)(*tensors).stride()
    return f"strides of eager and compiled {'agree' if same else 'differ'}"


def malformed(F: ModuleType, *shapes: tuple[int, ...]) -> str:
    found = []
    for shape in shapes:
        x, i = zeros(*shape)
        calls = ((i, ()), (i, (2,)), (i[:0], 2), (i.float(), 2), (i + 2**62, 2))
        found += [outcome(F.max_unpool2d, x, *call) for call in calls]
    return distinct(found)


def huge_indices(F: ModuleType) -> str:
    x, indices = zeros(1, 1, 2, 2)
    found = []
    for bad in (2**32 + 3, 2**63 - 1):
        indices[0, 0, 1, 1] = bad
        try:
            F.max_unpool2d(x, indices, 2)
        except RuntimeError as error:
            found.append(re.findall(r"max index: (\d+)", str(error)) == [str(bad)])
    return f"{sum(found)} of 2 huge indices named"


class SegNetStage(torch.nn.Module):
    def __init__(self, F: ModuleType, with_size: bool) -> None:
        super().__init__()
        self.unpool, self.with_size = F.max_unpool2d, with_size

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*pooled(2, x, 2), 2, output_size=x.shape if self.with_size else None)


def exported(F: ModuleType, *, with_size: bool = True, dynamic: bool = False) -> str:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the export is run by ONNX Runtime")
    pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")
    model, x = SegNetStage(F, with_size), torch.rand(2, 3, 4, 6)
    table = maxunpool_cuda.onnx.translation_table() if F is OURS else None
    sizes = {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)} if dynamic else {}
    program = torch.onnx.export(
        model, (x,), dynamo=True, custom_translation_table=table, verbose=False, **sizes
    )
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    fed = torch.rand(5, 3, 4, 6) if dynamic else x
    (result,) = session.run(None, {session.get_inputs()[0].name: fed.numpy()})
    equal = torch.equal(torch.from_numpy(result), model(fed))
    nodes = {node.op_type for node in program.model.graph}
    node = "MaxUnpool" if "MaxUnpool" in nodes else "other nodes"
    return f"exported as {node}, results {'equal' if equal else 'differ'}"


def exported_and_traced(F: ModuleType) -> str:
    module = (maxunpool_cuda if F is OURS else torch.nn).MaxUnpool2d(2)
    given = pooled(2, torch.rand(1, 2, 4, 4), 2)
    traced = outcome(lambda: torch.jit.trace(module, given)(*given).equal(module(*given)))
    return f"{outcome(exported, F)}; jit.trace: {traced}"


SQUARE = (1, 1, 2, 2)
WRONG_LENGTHS = ((2, (2,)), (2, 2, (0,)), (2, ()), (2, (2, 2, 2)), (2, 2, (0, 0, 0)))
ISSUES: dict[int, Callable[[ModuleType], object]] = {
    67657: lambda F: derivatives(F, 1, gradcheck),
    67660: lambda F: derivatives(F, 2, gradcheck, gradgradcheck),
    68337: lambda F: (
        *F.max_unpool1d(*pooled(1, torch.rand(5, 7), 3), 3, output_size=(5, 7)).shape,
    ),
    68420: lambda F: F.max_unpool1d(
        *pooled(1, torch.tensor([[5.0, 1, 9, 2, 0]]), 2, 1, dilation=2), 2, 1
    ).tolist(),
    68727: out_of_range,
    73154: lambda F: refused(
        each(F.max_unpool2d, SQUARE, (-1, 1), (1, -1), (0, 1), (2, 0), (2, 2, -1)),
        "impossible windows refused",
    ),
    78126: lambda F: F.max_unpool3d(torch.tensor(1.0), torch.tensor(0), 2),
    78249: race,
    80204: gradient_of_losers,
    80827: transposed,
    85425: repeated_gradients,
    83229: lambda F: refused(
        each(F.max_unpool3d, (2, 2, 5, 4, 3), (-3, 2), (0, 2), (-1, 2)), "kernels below 1 refused"
    ),
    88032: lambda F: ", ".join(
        each(F.max_unpool3d, (1, 1, 2, 2, 2), ((42, 6), 2), ((2,), 2), ((2, 2, 2, 2), 2))
    ),
    89409: sizes_of_bad_indices,
    114055: duplicates_in_volumes,
    132041: duplicates_in_planes,
    91555: error_on_a_worker,
    106702: lambda F: refused(
        each(F.max_unpool2d, SQUARE, *WRONG_LENGTHS), "wrong lengths named", "ValueError"
    ),
    107539: lambda F: distinct(
        each(F.max_unpool2d, SQUARE, (2, (-78819, -23458)), (2, 2**31), (2, 2**40), (2, 2**62))
    ),
    133774: dtypes,
    144836: compiled_errors,
    152804: lambda F: malformed(F, (2, 3, 2, 2)),
    152913: lambda F: malformed(F, (2, 2, 2, 1, 9, 3), (2, 2, 1, 9, 3), (9, 3), (3,)),
    178483: compiled_padding,
    187173: compiled_strides,
    197409: huge_indices,
    25088: lambda F: exported(F, with_size=False),
    43367: lambda F: exported(F, dynamic=True),
    85388: exported_and_traced,
}


def replay(number: int, F: ModuleType) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(ISSUES[number], F)


@pytest.fixture(autouse=True)
def as_users_have_it() -> None:
    """Without deterministic algorithms, under which torch.nn's unpooling only raises."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("number", ISSUES)
def test_issue(number: int, record_property: Callable[[str, object], None]) -> None:
    record_property("torch.nn", replay(number, THEIRS))
    assert replay(number, OURS) == ROWS[number][1]


def test_every_row_of_the_page_is_replayed() -> None:
    assert list(ROWS) == list(ISSUES)


if __name__ == "__main__":
    print(f"| issue | about | torch.nn {torch.__version__} | here |\n|---|---|---|---|")
    for number, (fault, here) in ROWS.items():
        link = f"[{number}](https://github.com/pytorch/pytorch/issues/{number})"
        print(f"| {link} | {fault} | {replay(number, THEIRS)} | {here} |")
