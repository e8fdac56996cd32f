"""Bad input: an exception of the type that torch.nn raises, and a message that names the values.

Every call runs in a child process, so that a crash or a hang is a failed test and no more.
"""

import importlib
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

PATIENCE = 120  # seconds

# U and P are max_unpool and max_pool of as many dimensions as x and y have, i are indices and o
# offsets for x, and g is a gradient. The pattern is of values that the message names.
#
# What torch.nn refuses too, with the same type of exception, in one, two and three dimensions.
REFUSED_BY_TORCH = [
    ("U(x, i + 100, 2)", "100 .* at position 0 of plane 0"),
    ("U(x, -1 - i, 2)", "-1 .* at position 0 of plane 0"),
    ("U(x, i.short(), 2)", "Short"),
    ("U(x, i[..., :1], 2)", r"2\].*1\]"),
    ("U(x, i.to('meta'), 2)", "cpu and meta"),
    ("U(x[0, 0], i[0, 0], 2)", r"\d"),
    ("U(x[None], i[None], 2)", r"\d"),
    ("U(x[:, :0], i[:, :0], 2)", r"\[1, 0, 2"),
    ("U(x, i, 2, output_size=[9] * x.dim())", "9"),
    ("U(x, i, 2, output_size=[2] * x.dim())", "2"),
    ("U(x, i, 2, output_size=[2**62] * x.dim())", str(2**62)),
    ("U(x, i, 2, output_size=[])", r"\[\]"),
    ("U(x, i, 2, output_size=[4.0] * x.dim())", r"4\.0"),
    ("U(x, i, 2, output_size='a' * x.dim())", "a"),
    ("U(x, i, 2, output_size=4)", "4"),
    ("U(x, i, 2.0)", r"2\.0"),
    ("U(x, i, None)", "None"),
    ("U(x, i, 2, 0)", "0"),
    ("U(x, i, 2, 2**62)", str(2**62)),
    ("P(y, 0)", "0"),
    ("P(y, 2, -1)", "-1"),
    ("P(y, 2, 2, -1)", "-1"),
    ("P(y, 2, 2, 2)", "2"),
    ("P(y, 2, 2, 0, 0)", "0"),
    ("P(y, 9)", "9"),
    ("P(y.bool(), 2)", "Bool"),
    ("P(y * 1j, 2)", "ComplexFloat"),
    ("P(y, (2,) * 4)", r"\(2, 2, 2, 2\)"),
    ("P(y, 2.5)", r"2\.5"),
    ("P(y, 2, ceil_mode=1)", "1"),
    ("P(y[0, 0], 2)", "8"),
    ("P(y[None], 2)", "8"),
    ("P(y[:, :0], 2)", "0"),
    ("P(y[:0, 0], 2)", "0"),
    ("P(y, 2**62, 1, 2**61)", str(2**62)),
    ("P(y, 3, 1, 1, 2**63 - 1)", str(2**63 - 1)),
]
COUNT = (ValueError, RuntimeError)  # for a number of ints that differs from that of dimensions
TOO_LARGE = (TypeError, ValueError, RuntimeError)  # for ints that 64 bits do not hold
# Also compiled and under vmap, which take too long for all. torch.nn takes these, or lacks them.
SAMPLE: list[tuple[str, Any, str]] = [
    ("U(x, (i - 1).int(), 2)", RuntimeError, "-1 "),
    ("U(x, o + 4, 2)", RuntimeError, r"4 \(an offset"),
    ("U(x, o, 17)", ValueError, "256 .*17, 17"),
    ("U(x, i, 2, 2, -1)", RuntimeError, "-1"),
    ("U(x, i, 2, reduce='max')", ValueError, "'?max'?"),
    ("U(x[0], i[0], 2, output_size=[7, 4, 9])", ValueError, r"\[4, 9\]"),
    ("backward(g[..., :3], i)", RuntimeError, r"\[1, 1, 4, 4\] .*\[1, 1, 4, 3\]"),
    ("P(y, 2, 2, 0, (1, 2), **byte)", ValueError, "1, 2"),
]
REFUSED_HERE: list[tuple[str, Any, str]] = [
    *SAMPLE,
    ("U([1.0], i, 2)", TypeError, "list"),
    ("U(x, None, 2)", TypeError, "NoneType"),
    ("U(x, i[0], 2)", RuntimeError, r"\[1, 2, 2\]"),
    ("U(x, i, 2, 2, 5)", ValueError, "-6"),  # in torch.nn a RuntimeError until PyTorch 2.13
    ("U(x, i, 0)", RuntimeError, "0"),
    ("U(x, i, 2, (2, -3))", RuntimeError, "-3"),
    ("U(x[:0], i[:0], 2, 2, 2)", ValueError, "0, 0"),
    ("U(x, i, (2, 2, 2))", COUNT, r"\(2, 2, 2\)"),
    ("U(x, i, 2, 2, ())", COUNT, r"\(\)"),
    ("U(x, i, 2**31)", RuntimeError, str(2**32)),
    ("U(x, i, 2**40, 2**40, 2**39)", RuntimeError, str(2**40)),
    ("U(x, i, 2**22)", RuntimeError, ""),  # more than there is memory
    *((f"U(x, i, {n})", TOO_LARGE, "") for n in ("2**62", "2**64", "2**63 - 1", "2, 2, 2**62")),
    ("U(x, i, 2, output_size=[2**64, 4])", TOO_LARGE, ""),
    *((f"P(y, {window})", TOO_LARGE, "") for window in ("2**63", "2, -2**64", "2, 2, 2**64")),
    ("P(y, 2, 2**63 - 1, ceil_mode=True)", TOO_LARGE, ""),
    ("P(y.new_empty(0, *[2**20] * 3), 2)", RuntimeError, str(2**20)),
    ("U(x, i + 16, 2, reduce='sum')", RuntimeError, "16 "),
    ("U(x.bool(), i, 2, reduce='sum')", NotImplementedError, "Bool"),
    ("U(x.to(torch.float8_e5m2), i, 2, reduce='sum')", NotImplementedError, "Float8_e5m2"),
    ("maxunpool_cuda.MaxUnpool2d(2, reduce='amax')", ValueError, "'amax'"),
    ("maxunpool_cuda.MaxPool2d(2, index_dtype='int64')", ValueError, "'int64'"),
    ("U(x, o.to(torch.int8), 2)", RuntimeError, "Char"),
    ("U(x, o + 255, 16, 2, 8, (2, 2))", RuntimeError, r"255 \(an offset"),
    ("F.max_unpool3d(x[None], o[None], 7)", ValueError, "256 .*7, 7, 7"),
    ("P(y, 17, **byte)", ValueError, "256 .*17, 17"),
    ("F.max_pool1d(y[0], 257, **byte)", ValueError, "256 .*257"),
    ("P(y, 2**40, 1, 2**39, **byte)", ValueError, f"256 .*{2**40}"),
    ("P(y[..., :1, :1].expand(1, 1, 2**16, 2**15), 2, **int32)", ValueError, str(2**16)),
    ("P(y, 2, return_indices=True, index_dtype=torch.int16)", ValueError, "Short|int16"),
    ("P(y, 2, return_indices=True, index_dtype=None)", (TypeError, ValueError), "None"),
    # the operators alone
    ("op(x, i, [], [2] * 4, [2] * 4, [0] * 4, 'last')", COUNT, r"\[2, 2, 2, 2\]"),
    ("op(x, i, [], [], [], [], 'last')", COUNT, r"\[\]"),
    ("op(x, i, [4, 4], [2, 2], [2], [0, 0], 'last')", COUNT, r"\[2\]"),
    ("op(x, i, [4], [2, 2], [2, 2], [0, 0], 'last')", COUNT, r"\[4\]"),
    ("pool(y, [], [], [], [], False, i.dtype)", COUNT, r"\[\]"),
    ("pool(y, [2, 2], [2], [0] * 2, [1] * 2, False, i.dtype)", COUNT, r"\[2\]"),
    ("pool(y, *[[2, 2]] * 2, [0, 0], [1, 1], False, torch.int16)", ValueError, "Short"),
    ("backward(g, i + 2**32)", RuntimeError, f"{2**32} "),
    ("backward(g, i - 1, 'sum')", RuntimeError, "-1 "),
    ("backward(g[..., :2, :2], o, padding=1)", RuntimeError, r"0 \(an offset"),
    ("backward(g.repeat(2, 1, 1, 1), i)", RuntimeError, r"\[2, 1, 4, 4\]"),
    ("backward(g, i[0])", RuntimeError, r"\[1, 1, 4, 4\]"),
]
WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda call, *tensors: call(*tensors),
    "vmap": lambda call, *tensors: torch.vmap(call)(*(tensor[None] for tensor in tensors)),
    "compiled": lambda call, *tensors: torch.compile(call, backend="aot_eager")(*tensors),
}


def outcome(
    expression: str, way: str = "eager", dims: int = 2, of: str = F.__name__
) -> tuple[list[str], str]:
    """In the child: the names of the exception's classes, and its text."""
    functions = importlib.import_module(of)

    def backward(g: Tensor, i: Tensor, reduce: str = "last", padding: int = 0) -> Tensor:
        size, window = (4 - 2 * padding,) * 2, ((2, 2), (2, 2), (padding,) * 2)
        return _ops.max_unpool_backward(g, i, size, *window, reduce)

    names = {
        "torch": torch,
        "maxunpool_cuda": maxunpool_cuda,
        "F": functions,
        "U": getattr(functions, f"max_unpool{dims}d"),
        "P": getattr(functions, f"max_pool{dims}d"),
        "op": _ops.max_unpool,
        "pool": _ops.max_pool,
        "byte": {"return_indices": True, "index_dtype": torch.uint8},
        "int32": {"return_indices": True, "index_dtype": torch.int32},
        "backward": backward,
    }
    if of != F.__name__:  # without indices, torch.nn's 1d has another kernel, with other errors
        names["P"] = partial(names["P"], return_indices=True)
    tensors = (
        torch.rand(1, 1, *[2] * dims),
        torch.tensor([0, 2, 8, 10] * (dims // 2 + 1))[: 2**dims].reshape(1, 1, *[2] * dims),
        torch.rand(1, 1, *[4] * dims),
        torch.zeros(1, 1, *[2] * dims, dtype=torch.uint8),
        torch.rand(1, 1, *[8] * dims),
    )
    torch._dynamo.reset()
    try:
        value = WAYS[way](eval(f"lambda x, i, g, o, y: {expression}", names), *tensors)
    except Exception as error:
        return [each.__name__ for each in type(error).__mro__], str(error)
    return ["no exception"], repr(value)


class Child:
    """A process for the calls, and another one after a call that crashed or hung."""

    pool: ProcessPoolExecutor | None = None

    def run(self, *arguments: Any) -> tuple[list[str], str]:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            return self.pool.submit(outcome, *arguments).result(timeout=PATIENCE)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            for process in list(self.pool._processes.values()):
                process.kill()
            self.pool.shutdown(cancel_futures=True)
            self.pool = None


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    process = Child()
    yield process
    process.close()


def names_the_values(message: str, values: str) -> bool:
    start = r"^(max_(un)?pool(\dd)?|Max(Unp|P)ool2d): expected "
    return not values or re.search(f"{start}.*({values})", message, re.IGNORECASE) is not None


@pytest.mark.parametrize(
    ("expression", "exception", "values"), REFUSED_HERE, ids=[row[0] for row in REFUSED_HERE]
)
def test_bad_calls(child: Child, expression: str, exception: Any, values: str) -> None:
    allowed = {each.__name__ for each in (exception if type(exception) is tuple else (exception,))}
    (raised, *_), message = child.run(expression)
    assert raised in allowed, message
    assert names_the_values(message, values), message
    for way in ("vmap", "compiled") if (expression, exception, values) in SAMPLE else ():
        classes, message = child.run(expression, way)
        # Dynamo makes a RuntimeError of an operator's ValueError.
        assert {"RuntimeError", *allowed} & {*classes}, (way, message)
        assert re.search(f"expected .*({values})", message), (way, message)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("expression", "values"), REFUSED_BY_TORCH, ids=[row[0] for row in REFUSED_BY_TORCH]
)
def test_bad_calls_raise_what_torch_raises(
    child: Child, expression: str, values: str, dims: int
) -> None:
    (theirs, *_), said = child.run(expression, "eager", dims, "torch.nn.functional")
    assert theirs != "no exception"
    (ours, *_), message = child.run(expression, "eager", dims)
    assert ours == theirs, (message, said)
    assert names_the_values(message, values), message


def test_valid_calls_succeed(child: Child) -> None:
    for expression, value in {
        "U(x, i, 2).shape": "torch.Size([1, 1, 4, 4])",
        "U(x, i, (2,), [2], (0,)).shape": "torch.Size([1, 1, 4, 4])",
        "backward(g, i).shape": "torch.Size([1, 1, 2, 2])",
        "len(P(y, 2, **byte))": "2",
        "len(P(y, 16, 1, 8, **byte))": "2",
        "len(P(y, 17, 1, 8, **int32))": "2",
        "U(x, o + 3, 2).count_nonzero()": "tensor(4)",
        "U(x, o + 4, 3, 2, 1).count_nonzero()": "tensor(4)",
        "U(x, o + 255, 16, 1).count_nonzero()": "tensor(4)",
    }.items():
        for way in ("eager", "compiled"):
            assert child.run(expression, way) == (["no exception"], value)


@pytest.mark.parametrize("operator", ["max_unpool", "max_unpool_backward", "max_pool"])
def test_cpu_tensors_for_cuda_kernels(operator: str) -> None:
    """Whether this build has such kernels, or not."""
    x, indices = torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    window = ((1, 1), (1, 1), (0, 0))
    arguments = (x, *window, (1, 1), False, torch.int64)
    if operator != "max_pool":
        arguments = (x, indices, (2, 2), *window, "last")
    exception, words = NotImplementedError, "FORCE_CUDA=1 pip install"
    if maxunpool_cuda.build_info()["cuda"]:
        exception, words = RuntimeError, "expected CUDA tensors but got tensors on cpu"
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(exception, match=words):
        getattr(_ops, operator).redispatch(keys, *arguments)
