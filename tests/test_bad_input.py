"""Bad input: a clear error of the type that torch.nn raises, in every way, and nothing else.

Every call runs in a child process, so that a crash or a hang is a failed test and no more.
"""

import contextlib
import functools
import importlib
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _arguments, _ops

PATIENCE = 120  # seconds

# expression, exception, what its text says (in parts, in any order). U is max_unpool2d; x and i, or
# the offsets o, fit each other and a 4x4 output; backward(g, i) is the operator for the same
# geometry. P is max_pool2d, and y is 8x8; byte and int32 ask for such indices. op and pool are the
# operators alone. What torch.nn refuses alike is in AS_TORCH.
BAD_CALLS = [
    # indices outside the plane
    ("U(x, (i - 1).int(), 2)", RuntimeError, "Found an invalid max index: -1 "),
    ("U(x, i + 16, 2, reduce='sum')", RuntimeError, "Found an invalid max index: 16 "),
    ("backward(g, i + 2**32)", RuntimeError, "Found an invalid max index: 4294967296 "),
    ("backward(g, i - 1, 'sum')", RuntimeError, "Found an invalid max index: -1 "),
    ("F.max_unpool1d(x[0], i[0] + 4, 2)", RuntimeError, "max index: 4 ... of size 4)"),
    ("F.max_unpool3d(x[None], i[None] + 99, 2)", RuntimeError, "max index: ... of size 2x4x4)"),
    # dtypes, shapes, devices
    ("U(x, i.short(), 2)", RuntimeError, "but got: Short"),
    ("U(x, i[0], 2)", RuntimeError, "Expected shape of indices to be same as"),
    ("U(x, i.to('meta'), 2)", RuntimeError, "on the same device but got cpu and meta"),
    ("backward(g[..., :3], i)", RuntimeError, "expected grad_output of shape [1, 1, 4, 4]"),
    ("backward(g, i[0])", RuntimeError, "with as many dimensions"),
    ("backward(g.repeat(2, 1, 1, 1), i)", RuntimeError, "expected grad_output of shape"),
    ("U(x.sum(), i.sum(), 2)", RuntimeError, "but got 0"),
    ("U(x[0, :, :, :0], i[0, :, :, :0], 2)", RuntimeError, "with dimension 2 being empty"),
    ("U(x.bool(), i, 2, reduce='sum')", NotImplementedError, "not implemented for: Bool"),
    ("U(x.to(torch.float8_e5m2), i, 2, reduce='sum')", NotImplementedError, "Float8_e5m2"),
    ("U([1.0], i, 2)", TypeError, "expected input to be a Tensor but got list"),
    ("U(x, None, 2)", TypeError, "expected indices to be a Tensor but got NoneType"),
    # output_size
    ("U(x, i, 2, output_size=[4])", ValueError, "containing 2 or 4 elements"),
    ("U(x[0], i[0], 2, output_size=[4])", ValueError, "containing 2, 3 or 4 elements"),
    ("U(x, i, 2, output_size=[9, 9, 4, 9])", ValueError, "(dim 1 must be between 2 and 6)"),
    ("U(x[0], i[0], 2, output_size=[7, 4, 9])", ValueError, "(dim 1 must be between 2 and 6)"),
    ("U(x, i, 2, output_size=[1, 1, None, 4])", TypeError, "but got [None, 4]"),
    ("U(x, i, 2, output_size=[-1, 4])", ValueError, 'invalid output_size "[-1, 4]"'),
    ("U(x, i, 2, output_size=[2, 4])", ValueError, "(dim 0 must be between 2 and 6)"),
    ("U(x, i, 2, output_size=[2**62, 4])", ValueError, "invalid output_size"),
    ("U(x, i, 2, output_size=[4.0, 4.0])", TypeError, "[4.0, 4.0]"),
    ("U(x, i, 2, output_size='ab')", TypeError, "'ab'"),
    ("U(x, i, 2, output_size=[2**64, 4])", TypeError, "64-bit ints"),
    # kernel_size, stride, padding
    ("U(x, i, 0)", RuntimeError, "expected kernel_size greater than zero but got"),
    ("U(x, i, -1)", RuntimeError, "kernel_size=[-1, -1]"),
    ("U(x, i, 2, 0)", RuntimeError, "strides should be greater than zero"),
    ("U(x, i, 2, (2, -3))", RuntimeError, "stride=[2, -3]"),
    ("U(x, i, 2, 2, -1)", RuntimeError, "non-negative but got padding=[-1, -1]"),
    ("U(x, i, 2, 2, 5)", ValueError, "positive spatial dimensions but got [-6, -6]"),
    ("U(x[:0], i[:0], 2, 2, 2)", ValueError, "positive spatial dimensions but got [0, 0]"),
    ("U(x, i, 2**31)", RuntimeError, "does not overflow"),
    ("U(x, i, 2**62)", RuntimeError, "does not overflow"),
    ("U(x, i, 2, 2**62)", RuntimeError, "does not overflow"),
    ("U(x, i, 2, 2, 2**62)", ValueError, "positive spatial dimensions"),
    ("U(x, i, 2**63 - 1, 2**63 - 1)", RuntimeError, "does not overflow"),
    ("U(x, i, 2**40, 2**40, 2**39)", RuntimeError, "does not overflow"),
    ("U(x, i, 2**22)", RuntimeError, "allocate"),
    ("U(x, i, 2**64)", TypeError, "64-bit ints"),
    ("U(x, i, 'a')", TypeError, "expected kernel_size"),
    ("U(x, i, (2, 2, 2))", ValueError, "expected kernel_size to be an int or 2 ints"),
    ("U(x, i, 2, (2,))", ValueError, "expected stride to be an int or 2 ints but got (2,)"),
    ("U(x, i, 2, 2, ())", ValueError, "expected padding to be an int or 2 ints but got ()"),
    # offsets in the window
    ("U(x, o + 4, 2)", RuntimeError, "Found an invalid max index: 4 (an offset in its window)"),
    ("U(x, o + 255, 16, 2, 8, (2, 2))", RuntimeError, "max index: 255 (an offset in its window)"),
    ("backward(g, o + 255, 'sum')", RuntimeError, "max index: 255 (an offset in its window)"),
    ("backward(g[..., :2, :2], o, padding=1)", RuntimeError, "max index: 0 (an offset in its"),
    ("U(x, o, 17)", ValueError, "kernel_size of at most 256 elements for uint8 indices"),
    ("U(x, o, (1, 257))", ValueError, "(int32 ones are not), but got kernel_size=[1, 257]"),
    ("U(x, o, 2**40)", ValueError, "kernel_size of at most 256 elements for uint8 indices"),
    ("F.max_unpool3d(x[None], o[None], 7)", ValueError, "kernel_size of at most 256 elements"),
    ("U(x, o[:, :, :1], 2)", RuntimeError, "Expected shape of indices to be same as"),
    ("U(x, o.to('meta'), 2)", RuntimeError, "on the same device but got cpu and meta"),
    ("U(x, o.to(torch.int8), 2)", RuntimeError, "of type int64, int32 or uint8"),
    # reduce
    ("U(x, i, 2, reduce='max')", ValueError, "expected reduce to be 'last'"),
    ("maxunpool_cuda.MaxUnpool2d(2, reduce='amax')", ValueError, "but got 'amax'"),
    # the operator alone
    ("op(x, i, [], [2] * 4, [2] * 4, [0] * 4, 'last')", ValueError, "1, 2 or 3 elements"),
    ("op(x, i, [], [], [], [], 'last')", ValueError, "expected kernel_size of 1, 2 or 3"),
    ("op(x, i, [4, 4], [2, 2], [2], [0, 0], 'last')", ValueError, "stride=[2]"),
    ("op(x, i, [4], [2, 2], [2, 2], [0, 0], 'last')", ValueError, "of 2 spatial sizes but got"),
    # pooling
    ("P(y, 17, **byte)", ValueError, "at most 256 elements and dilation 1"),
    ("P(y, (1, 257), 1, (0, 128), **byte)", ValueError, "kernel_size=[1, 257]"),
    ("F.max_pool1d(y[0], 257, **byte)", ValueError, "dilation=[1]; use int32"),
    ("F.max_pool3d(y[None], (1, 16, 17), **byte)", ValueError, "; use int32"),
    ("P(y, 2, 2, 0, (1, 2), **byte)", ValueError, "dilation=[1, 2]; use int32"),
    ("P(y[..., :1, :1].expand(1, 1, 2**16, 2**15), 2, **int32)", ValueError, "fewer than 2^31"),
    ("P(y, 2**40, 1, 2**39, **byte)", ValueError, "at most 256 elements and dilation 1"),
    ("pool(y, *[[2, 2]] * 2, [0, 0], [1, 1], False, torch.int16)", ValueError, "but got Sho"),
    ("maxunpool_cuda.MaxPool2d(2, index_dtype='int64')", ValueError, "but got 'int64'"),
    ("pool(y, [], [], [], [], False, i.dtype)", ValueError, "kernel_size of 1, 2 or 3 elements"),
    ("pool(y, [2, 2], [2], [0] * 2, [1] * 2, False, i.dtype)", ValueError, "and dilation of 2"),
    ("F.max_pool1d(y[0], 0)", RuntimeError, "expected kernel_size greater than zero"),
    ("P(y, (2, 0))", RuntimeError, "kernel size should be greater than zero"),
    ("F.max_pool3d(y[None], -1)", RuntimeError, "expected kernel_size greater than zero"),
    ("P(y, torch.tensor(2.0))", TypeError, "expected kernel_size to be 64-bit ints"),
    ("P(y, 2**62, 1, 2**61)", RuntimeError, "expected sizes that do not overflow"),
    ("P(y, 2, 2**62)", RuntimeError, "expected sizes that do not overflow"),
    ("P(y, 2**31, 1, 2**30, 2**31)", RuntimeError, "expected sizes that do not overflow"),
    ("P(y, 3, 1, 1, 2**60)", RuntimeError, "expected sizes that do not overflow"),
    ("P(y.new_empty(0, *[2**20] * 3), 2)", RuntimeError, "expected sizes that do not overflow"),
    ("P(y, 2, 2**63 - 1, ceil_mode=True)", RuntimeError, "expected sizes that do not overflow"),
    ("P(y, 3, 1, 1, 2**63 - 1)", RuntimeError, "expected sizes that do not overflow"),
    ("P(y, 2**63)", TypeError, "expected kernel_size to be 64-bit ints"),
    ("P(y, 2, -2**64)", TypeError, "expected stride to be 64-bit ints"),
    ("P(y, 2, ceil_mode=1)", TypeError, "must be bool, not int"),
    ("P(y, 2, index_dtype=torch.int16)", ValueError, "but got torch.int16"),
    ("P(y, 2, return_indices=True, index_dtype=None)", ValueError, "but got None"),
    ("maxunpool_cuda.MaxPool2d(2, index_dtype=torch.int8)", ValueError, "but got torch.int8"),
    ("maxunpool_cuda.MaxPool2d(17, **byte)(y)", ValueError, "; use int32"),
]

# As expressions of P, y, U, x and i for each rank: what torch.nn refuses with the same exception,
# and what both say.
AS_TORCH = [
    ("P(y, 0)", ""),
    ("P(y, -1, 1)", ""),
    ("P(y, 2, 0)", "stride should not be zero"),
    ("P(y, 2, -1)", "stride should be greater than zero"),
    ("P(y, 2, 2, -1)", "pad must be non-negative"),
    ("P(y, 2, 2, 2)", "pad should be at most half of effective kernel"),
    ("P(y, 2, 2, 0, 0)", "dilation should be greater than zero"),
    ("P(y, 9)", "Output size is too small"),
    ("P(y.bool(), 2)", "not implemented for 'Bool'"),
    ("P(y * 1j, 2)", "not implemented for 'ComplexFloat'"),
    ("P(y, (2,) * 4)", ""),
    ("P(y, 2.5)", ""),
    ("P(y[0, 0], 2)", ""),
    ("P(y[None], 2)", ""),
    ("P(y[:, :0], 2)", ""),
    ("P(y[..., :0], 2)", ""),
    ("P(y[:0, 0], 2)", ""),
    ("U(x, i + 100, 2)", "Found an invalid max index: 1"),
    ("U(x, i.float(), 2)", "elements in indices should be type int64"),
    ("U(x, i[..., :1], 2)", "Expected shape of indices to be same as"),
    ("U(x[0, 0], i[0, 0], 2)", "Input to max_unpooling"),
    ("U(x[None], i[None], 2)", "Input to max_unpooling"),
    ("U(x[:, :0], i[:, :0], 2)", "non-zero size for non-batch dimensions"),
    ("U(x, i, 2, output_size=[9] * x.dim())", "invalid output_size"),
    ("U(x, i, 2, output_size=[])", "but it has a length of '0'"),
    ("U(x, i, 2, output_size=[4.0] * x.dim())", ""),
    ("U(x, i, 2, output_size=4)", ""),
    ("U(x, i, 2.0)", ""),
    ("U(x, i, None)", ""),
]


def again(call: Callable[..., Any], *tensors: Tensor) -> Any:
    """What an error leaves remembered, if anything, must not matter."""
    with contextlib.suppress(Exception):
        call(*tensors)
    return call(*tensors)


def unremembered(call: Callable[..., Any], *tensors: Tensor) -> Any:
    with mock.patch.object(_arguments, "remembered", return_value=None):
        return call(*tensors)


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda call, *tensors: call(*tensors),
    "again": again,
    "unremembered": unremembered,
    "meta": lambda call, *tensors: call(*(tensor.to("meta") for tensor in tensors)),
    "vmap": lambda call, *tensors: vmap(call)(*(tensor[None] for tensor in tensors)),
    "grad": lambda call, *tensors: grad(lambda *t: first(call(*t)).sum(), (0, 2, 4))(*tensors),
    "compiled": lambda call, *tensors: torch.compile(call, backend="aot_eager")(*tensors),
    "whole": lambda call, *t: torch.compile(call, backend="aot_eager", fullgraph=True)(*t),
}

# Where PyTorch has a say before the operator has, or has no words for what it says.
OTHERS = {
    "meta": (
        "i.to('meta')",
        "o.to('meta')",
        *("2**22", "new_empty"),  # which needs no memory
        *("U(x, i, 2**31)", "U(x, i, 2, 2**62)", "U(x, i, 2**40, 2**40, 2**39)"),
    ),
    "vmap": ("U(x, i[0], 2)", "backward(g, i[0])", "U(x[0, :, :, :0], i[0, :, :, :0], 2)"),
    "whole": ("",),  # what raises breaks the graph
    # Dynamo makes a RuntimeError of an operator's ValueError.
    "compiled": (
        *("U(x, i.to('meta'), 2)", "U(x, o.to('meta'), 2)"),  # in PyTorch 2.11
        *("op(", "pool(", "2**16, 2**15), 2, **int32)"),
        "P(y.new_empty",  # is PyTorch's pooling there, and empty
        *("U(x, i, 2**31)", "U(x, i, 2, 2**62)", "U(x, i, 2**40, 2**40, 2**39)"),
    ),
}


def says(message: str, text: str) -> bool:
    return all(part in message for part in text.split("..."))


def first(results: Any) -> Tensor:
    return results[0] if isinstance(results, tuple) else results


def ways_of(expression: str, text: str) -> list[str]:
    """Those that say the same: without data, no index is bad."""
    of_data = "max index" in text
    ways = [way for way in WAYS if not (way == "meta" and of_data)]
    return [way for way in ways if not any(part in expression for part in OTHERS.get(way, ()))]


def outcome(
    expression: str, way: str, dims: int = 2, of: str = F.__name__
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
    if of != F.__name__:  # without indices, its 1d has other words
        names["P"] = functools.partial(names["P"], return_indices=True)
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
    """A process for the calls, and a new one where a call took the last with it."""

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None

    def run(self, *arguments: Any) -> tuple[list[str], str]:
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(max_workers=1, mp_context=context)
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


@pytest.mark.parametrize(
    ("expression", "exception", "text"), BAD_CALLS, ids=[call[0] for call in BAD_CALLS]
)
def test_bad_call(child: Child, expression: str, exception: type[Exception], text: str) -> None:
    eager = child.run(expression, "eager")
    for way in ways_of(expression, text):
        names, message = child.run(expression, way)
        assert exception.__name__ in names, (way, message)
        assert says(message, text.split(" but got")[0]), (way, message)
        if way in ("eager", "again", "unremembered"):
            assert (names, message) == eager
            assert names[0] == exception.__name__
            assert says(message, text), message
            if exception is not TypeError and "allocate" not in message:
                starts = ("max_unpool", "MaxUnpool", "max_pool", "MaxPool")
                assert message.startswith(starts), message


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("expression", "text"), AS_TORCH, ids=[call[0] for call in AS_TORCH])
def test_errors_are_torchs(child: Child, expression: str, text: str, dims: int) -> None:
    (theirs, *_), said = child.run(expression, "eager", dims, "torch.nn.functional")
    assert text in said
    begin = f"max_pool{dims}d: expected .* but got" if "P(" in expression else f"max_unpool{dims}d:"
    for way in ways_of(expression, text) if dims == 2 else ["eager"]:
        names, message = child.run(expression, way, dims)
        assert theirs in names, (way, message, said)
        if way in ("eager", "again", "unremembered"):
            assert theirs == names[0], (way, message, said)
            assert re.match(begin, message), message
            assert text in message


def test_a_good_call_is_none_of_these(child: Child) -> None:
    expressions = {
        "U(x, i, 2).shape": "torch.Size([1, 1, 4, 4])",
        "backward(g, i).shape": "torch.Size([1, 1, 2, 2])",
        "len(P(y, 2, **byte))": "2",
        "len(P(y, 16, 1, 8, **byte))": "2",
        "len(P(y, 17, 1, 8, **int32))": "2",
        "U(x, o + 3, 2).count_nonzero()": "tensor(4)",
        "U(x, o + 4, 3, 2, 1).count_nonzero()": "tensor(4)",
        "U(x, o + 255, 16, 1).count_nonzero()": "tensor(4)",
    }
    for expression, value in expressions.items():
        for way in ("eager", "whole"):
            assert child.run(expression, way) == (["no exception"], value)


CALLS = {
    "max_unpool": (2, ((4, 4), (2, 2), (2, 2), (0, 0), "last")),
    "max_unpool_backward": (2, ((2, 2), (1, 1), (1, 1), (0, 0), "last")),
    "max_pool": (1, ((2, 2), (2, 2), (0, 0), (1, 1), False, torch.int64)),
}


@pytest.mark.parametrize("operator", CALLS)
def test_cpu_tensors_for_cuda_kernels(operator: str) -> None:
    """Whether there are any, or not."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    count, arguments = CALLS[operator]
    tensors = (torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64))[:count]
    exception, words = NotImplementedError, "FORCE_CUDA=1 pip install"
    if maxunpool_cuda.build_info()["cuda"]:
        exception, words = RuntimeError, "expected CUDA tensors but got tensors on cpu"
    with pytest.raises(exception, match=words):
        getattr(_ops, operator).redispatch(keys, *tensors, *arguments)
