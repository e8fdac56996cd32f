"""PyTorch's issues about max unpooling and pooling, each replayed on torch.nn and on this package.

A function per issue, named by its number: it replays the report on the functions it is given and
says what came of it, in words. EXPECTED has the words for this package. `python
tests/test_pytorch_issues.py` prints the table of the README.
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
README = Path(__file__).parent.parent / "README.md"
POOLS = (THEIRS.max_pool1d, THEIRS.max_pool2d, THEIRS.max_pool3d)


def unpools(F: ModuleType) -> tuple[Callable[..., Tensor], ...]:
    return F.max_unpool1d, F.max_unpool2d, F.max_unpool3d


def outcome(call: Callable[[], object]) -> str:
    """What a call returns, or the exception it raises."""
    try:
        result = call()
    except Exception as error:
        return type(error).__name__
    return str(result)


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


def passes(check: Callable[..., bool], *arguments: object) -> str:
    return "passes" if outcome(lambda: check(*arguments)) == "True" else "fails"


def zeros(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.rand(shape), torch.zeros(shape, dtype=torch.int64)


def overlapping(dims: int) -> tuple[Tensor, Tensor]:
    """The maxima of overlapping windows, some of them the maximum of several."""
    x = torch.rand(1, 2, *[5] * dims, dtype=torch.float64, generator=torch.manual_seed(0))
    pooled, indices = POOLS[dims - 1](x, 3, 1, return_indices=True)
    return pooled.requires_grad_(), indices


def issue_67657(F: ModuleType) -> str:
    pooled, indices = overlapping(1)
    return f"gradcheck {passes(gradcheck, lambda x: F.max_unpool1d(x, indices, 3, 1), pooled)}"


def issue_67660(F: ModuleType) -> str:
    pooled, indices = overlapping(2)
    function = lambda x: F.max_unpool2d(x, indices, 3, 1)  # noqa: E731
    return (
        f"gradcheck {passes(gradcheck, function, pooled)}, "
        f"gradgradcheck {passes(gradgradcheck, function, pooled)}"
    )


def issue_68337(F: ModuleType) -> str:
    def call() -> tuple[int, ...]:
        x = torch.rand(5, 7)
        pooled, indices = POOLS[0](x, 3, return_indices=True)
        return tuple(F.max_unpool1d(pooled, indices, 3, output_size=x.size()).shape)

    return outcome(call)


def issue_68420(F: ModuleType) -> str:
    x = torch.tensor([[5.0, 1, 9, 2, 0]])
    pooled, indices = POOLS[0](x, 2, 1, dilation=2, return_indices=True)
    return outcome(lambda: F.max_unpool1d(pooled, indices, 2, 1).tolist())


def issue_68727(F: ModuleType) -> str:
    results = set()
    for dims, unpool in enumerate(unpools(F), start=1):
        x, indices = zeros(1, 1, *[2] * dims)
        for bad in (-27538, -1, 4**dims):
            indices.view(-1)[-1] = bad
            results.add(outcome(lambda u=unpool, x=x, i=indices: u(x, i, 2)))
    return ", ".join(sorted(results))


def issue_73154(F: ModuleType) -> str:
    x, indices = zeros(1, 1, 2, 2)
    calls = ((-1, 1, 0), (1, -1, 0), (0, 1, 0), (2, 0, 0), (2, 2, -1))
    refused = [outcome(lambda a=a: F.max_unpool2d(x, indices, *a)).endswith("Error") for a in calls]
    return f"{sum(refused)} of {len(calls)} impossible windows refused"


def issue_78126(F: ModuleType) -> str:
    return outcome(lambda: F.max_unpool3d(torch.tensor(1.0), torch.tensor(0), 2))


def issue_78249(F: ModuleType) -> str:
    x = torch.tensor([[[[0.8725, 0.3154], [0.7132, 0.8304]]]])
    indices = torch.tensor([[[[1, 6], [1, 5]]]])
    with four_threads():
        values = {round(float(F.max_unpool2d(x, indices, 2)[0, 0, 0, 1]), 4) for _ in range(5000)}
    with four_threads(deterministic=True):
        strict = outcome(lambda: "runs" if F.max_unpool2d(x, indices, 2).any() else "")
    return f"{sorted(values)}; deterministic mode: {strict}"


def issue_85425(F: ModuleType) -> str:
    """Where windows overlap, gradients add up, and in another order to other sums."""
    x = torch.rand(2, 4, 9, 9, 9, generator=torch.manual_seed(0), requires_grad=True)
    with four_threads(deterministic=True):
        pooled = F.max_pool3d(x, 3, 1)
        weight = torch.rand_like(pooled)
        gradients = [
            torch.autograd.grad(pooled, x, weight, retain_graph=True)[0] for _ in range(50)
        ]
    return f"runs; equal gradients: {all(map(gradients[0].equal, gradients))}"


def issue_80204(F: ModuleType) -> str:
    x = torch.tensor([[[0.6418, 0.0359, 0.6088, 0.9408]]], requires_grad=True)
    output = F.max_unpool1d(x, torch.tensor([[[0, 1, 2, 1]]]), 1, 2)
    output.backward(torch.arange(1.0, 8).reshape(1, 1, 7))
    return f"gradient {[int(v) for v in x.grad.flatten()]}"


def issue_80827(F: ModuleType) -> str:
    """<J v, w> == <v, J^T w>, with J v by forward and J^T w by backward differentiation."""
    pooled, indices = overlapping(2)
    function = lambda x: F.max_unpool2d(x, indices, 3, 1)  # noqa: E731
    output = function(pooled)
    v, w = torch.rand_like(pooled), torch.rand_like(output)
    (transposed,) = torch.autograd.grad(output, pooled, w)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(pooled.detach(), v))).tangent
    agree = torch.isclose((tangent * w).sum(), (v * transposed).sum())
    return f"forward and backward derivatives {'agree' if agree else 'differ'}"


def issue_83229(F: ModuleType) -> str:
    x, indices = zeros(2, 2, 5, 4, 3)
    refused = [outcome(lambda k=k: F.max_unpool3d(x, indices, k, 2)) for k in (-3, 0, -1)]
    return f"{sum(r.endswith('Error') for r in refused)} of 3 kernels below 1 refused"


def issue_88032(F: ModuleType) -> str:
    x, indices = zeros(1, 1, 2, 2, 2)
    return ", ".join(
        outcome(lambda k=k: F.max_unpool3d(x, indices, k, 2)) for k in ((42, 6), (2,), (2, 2, 2, 2))
    )


def issue_89409(F: ModuleType) -> str:
    x = torch.rand(1, 1, 4)
    return ", ".join(
        outcome(lambda i=i: tuple(F.max_unpool1d(x, torch.tensor([[i]]), 3).shape))
        for i in ([-5, 0, 1, 2], [0, 1, 2, 12], [0, 1, 2, 11])
    )


def issue_114055(F: ModuleType) -> str:
    x, indices = zeros(2, 3, 2, 2, 2)
    output = F.max_unpool3d(x, indices + 1, 2, 2).flatten(2)
    return f"the last value wins: {torch.equal(output[:, :, 1], x.flatten(2)[:, :, -1])}"


def issue_132041(F: ModuleType) -> str:
    x = torch.tensor([[[[-2, -3], [-4, -5]]]], dtype=torch.float32)
    output = F.max_unpool2d(x, torch.tensor([[[[1, 0], [1, 0]]]]), 2)
    return str([int(v) for v in output[0, 0, 0]])


def issue_91555(F: ModuleType) -> str:
    x, indices = zeros(1, 2, 4, 6, 3)
    with four_threads():
        return outcome(lambda: F.max_unpool3d(x, indices - 1, 3, (2, 1, 2), 1, (6, 6, 5)))


def issue_106702(F: ModuleType) -> str:
    x, indices = zeros(1, 1, 2, 2)
    calls = (((2,), 0), ((2, 2), (0,)), ((), 0), ((2, 2, 2), 0), ((2, 2), (0, 0, 0)))
    refused = [outcome(lambda s=s, p=p: F.max_unpool2d(x, indices, (2, 2), s, p)) for s, p in calls]
    named = [r for r in refused if r == "ValueError"]
    return f"{len(named)} of {len(calls)} wrong lengths named"


def issue_107539(F: ModuleType) -> str:
    x, indices = zeros(1, 1, 2, 2)
    strides = ((-78819, -23458), 2**31, 2**40, 2**62)
    return ", ".join(
        sorted({outcome(lambda s=s: F.max_unpool2d(x, indices, 2, s)) for s in strides})
    )


def issue_133774(F: ModuleType) -> str:
    x, indices = torch.ones(1, 1, 2, 2), torch.arange(4).reshape(1, 1, 2, 2)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool)
    results = {t: outcome(lambda t=t: F.max_unpool2d(x.to(t), indices, 2)) for t in dtypes}
    works = [t for t, result in results.items() if result != "NotImplementedError"]
    return ", ".join(str(t).removeprefix("torch.") for t in works)


def issue_144836(F: ModuleType) -> str:
    """An output of size 0, and an index of the next plane, both eager and compiled."""
    x, indices = zeros(1, 2, 2)
    bad = torch.tensor([[[0, 1], [2, 4]]])
    words = []
    for function in (
        lambda: F.max_unpool1d(x[..., :1], indices[..., :1], 2, 2, 1).sum(),
        lambda: F.max_unpool1d(x, bad, 2).sum(),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager_decomp_partition")
        eager, traced = outcome(function), outcome(compiled)
        both_raise = eager.endswith("Error") and traced.endswith("Error")
        words.append("alike" if eager == traced or both_raise else "not alike")
    return "eager and compiled: " + ", ".join(words)


def malformed(F: ModuleType, shapes: tuple[tuple[int, ...], ...]) -> str:
    results = set()
    for shape in shapes:
        x, indices = zeros(*shape)
        for call in (
            lambda x=x, i=indices: F.max_unpool2d(x, i, ()),
            lambda x=x, i=indices: F.max_unpool2d(x, i, (2,)),
            lambda x=x, i=indices: F.max_unpool2d(x, i[:0], 2),
            lambda x=x, i=indices: F.max_unpool2d(x, i.float(), 2),
            lambda x=x, i=indices: F.max_unpool2d(x, i + 2**62, 2),
        ):
            results.add(outcome(call))
    return ", ".join(sorted(results))


def issue_152804(F: ModuleType) -> str:
    return malformed(F, ((2, 3, 2, 2),))


def issue_152913(F: ModuleType) -> str:
    return malformed(F, ((2, 2, 2, 1, 9, 3), (2, 2, 1, 9, 3), (9, 3), (3,)))


def issue_178483(F: ModuleType) -> str:
    x, indices = zeros(1, 1, 2, 2)
    call = lambda x, i: F.max_unpool2d(x, i, 1, 5, (3, 4))  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager")
    return f"eager {outcome(lambda: call(x, indices))}, compiled " + (
        "raises" if outcome(lambda: compiled(x, indices)).endswith("Error") else "runs"
    )


def issue_187173(F: ModuleType) -> str:
    x = torch.rand(1, 2, 3, 6).contiguous(memory_format=torch.channels_last)
    pooled, indices = POOLS[1](x, 3, padding=1, return_indices=True)
    call = lambda x, i: F.max_unpool2d(x, i, 3, 3, 1, (3, 6))  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager_decomp_partition")
    same = call(pooled, indices).stride() == compiled(pooled, indices).stride()
    return f"strides of eager and compiled {'agree' if same else 'differ'}"


def issue_197409(F: ModuleType) -> str:
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
        pooled, indices = POOLS[1](x, 2, return_indices=True)
        return self.unpool(pooled, indices, 2, output_size=x.shape if self.with_size else None)


def exported(F: ModuleType, *, with_size: bool, dynamic: bool) -> str:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the export is run by ONNX Runtime")
    pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")
    model, x = SegNetStage(F, with_size), torch.rand(2, 3, 4, 6)
    table = maxunpool_cuda.onnx.translation_table() if F is OURS else None
    sizes = {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)} if dynamic else {}
    file = io.BytesIO()

    def call() -> str:
        program = torch.onnx.export(
            model, (x,), dynamo=True, custom_translation_table=table, verbose=False, **sizes
        )
        program.save(file)
        session = onnxruntime.InferenceSession(file.getvalue())
        fed = torch.rand(5, 3, 4, 6) if dynamic else x
        (result,) = session.run(None, {session.get_inputs()[0].name: fed.numpy()})
        nodes = {node.op_type for node in program.model.graph}
        equal = torch.equal(torch.from_numpy(result), model(fed))
        node = "MaxUnpool" if "MaxUnpool" in nodes else "other nodes"
        return f"exported as {node}, results {'equal' if equal else 'differ'}"

    return outcome(call)


def issue_25088(F: ModuleType) -> str:
    return exported(F, with_size=False, dynamic=False)


def issue_43367(F: ModuleType) -> str:
    return exported(F, with_size=True, dynamic=True)


def issue_85388(F: ModuleType) -> str:
    modules = maxunpool_cuda if F is OURS else torch.nn
    pooled, indices = POOLS[1](torch.rand(1, 2, 4, 4), 2, return_indices=True)
    module = modules.MaxUnpool2d(2)
    traced = outcome(
        lambda: torch.equal(
            torch.jit.trace(module, (pooled, indices))(pooled, indices), module(pooled, indices)
        )
    )
    return f"{exported(F, with_size=True, dynamic=False)}; jit.trace: {traced}"


# number: (what was wrong there, what is said here)
EXPECTED: dict[int, tuple[str, str]] = {
    67657: ("1d: wrong gradient of overlapping windows", "gradcheck passes"),
    67660: ("2d: the same", "gradcheck passes, gradgradcheck passes"),
    68337: ("`output_size=(C, L)` of an unbatched input refused", "(5, 7)"),
    68420: ("indices of a dilated pool, default size", "[[0.0, 0.0, 9.0, 2.0]]"),
    68727: ("CUDA: an index out of range goes unnoticed", "RuntimeError"),
    73154: ("negative sizes from negative arguments", "5 of 5 impossible windows refused"),
    78126: ("crash on an input without dimensions", "RuntimeError"),
    78249: ("duplicates: a race", "[0.7132]; deterministic mode: runs"),
    80204: ("duplicates: the gradient goes to losers too", "gradient [1, 0, 3, 2]"),
    80827: ("duplicates: derivatives disagree", "forward and backward derivatives agree"),
    85425: ("CUDA: no deterministic backward of max pooling", "runs; equal gradients: True"),
    83229: ("3d: kernels below 1 accepted", "3 of 3 kernels below 1 refused"),
    88032: (
        "3d: a kernel_size of 2 numbers read past its end",
        "ValueError, ValueError, ValueError",
    ),
    89409: ("1d: CPU and CUDA differ on bad indices", "RuntimeError, RuntimeError, (1, 1, 12)"),
    114055: ("3d: CPU and CUDA differ on duplicates", "the last value wins: True"),
    132041: ("2d: the same", "[-5, -4, 0, 0]"),
    91555: ("an error on a worker thread ends the process", "RuntimeError"),
    106702: ("stride or padding too short or too long", "5 of 5 wrong lengths named"),
    107539: ("sizes that overflow", "RuntimeError"),
    133774: ("dtypes", "bfloat16, float16, float32, int64, bool"),
    144836: (
        "empty planes and bad indices, eager and compiled",
        "eager and compiled: alike, alike",
    ),
    152804: ("crash on malformed arguments", "RuntimeError, ValueError"),
    152913: ("crash on tensors of other ranks", "RuntimeError, ValueError"),
    178483: ("padding makes a negative size", "eager ValueError, compiled raises"),
    187173: ("channels_last: compiled strides", "strides of eager and compiled agree"),
    197409: ("CUDA: indices beyond 2^32 wrap", "2 of 2 huge indices named"),
    25088: ("ONNX export", "exported as MaxUnpool, results equal"),
    43367: ("ONNX export, dynamic batch", "exported as MaxUnpool, results equal"),
    85388: ("ONNX export, jit.trace", "exported as MaxUnpool, results equal; jit.trace: True"),
}


def replay(number: int, F: ModuleType) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        return globals()[f"issue_{number}"](F)


@pytest.fixture(autouse=True)
def as_users_have_it() -> None:
    """Without deterministic algorithms, under which torch.nn's unpooling only raises."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("number", EXPECTED)
def test_issue(number: int, record_property: Callable[[str, object], None]) -> None:
    record_property("torch.nn", outcome(lambda: replay(number, THEIRS)))
    assert replay(number, OURS) == EXPECTED[number][1]


def test_the_readme_says_what_is_said_here() -> None:
    rows = re.findall(r"^\| \[(\d+)\]\(.*\) \| (.*) \| .* \| (.*) \|$", README.read_text(), re.M)
    assert {int(n): (fault, here) for n, fault, here in rows} == EXPECTED


if __name__ == "__main__":
    print(f"| issue | about | torch.nn {torch.__version__} | here |\n|---|---|---|---|")
    for number, (fault, here) in EXPECTED.items():
        link = f"[{number}](https://github.com/pytorch/pytorch/issues/{number})"
        print(f"| {link} | {fault} | {outcome(lambda n=number: replay(n, THEIRS))} | {here} |")
