# SPDX-License-Identifier: BSD-3-Clause
"""Bad input: exceptions of the types that torch.nn raises, and messages that name the values."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from cases import OPERATORS, Call, draw, scaled
from conftest import GPUS, needs_library
from failures import check_each
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F

# PyTorch's own, of tensors that are not dense.
pytestmark = pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|Sparse|nested)")

# Rows of the tables: a call, the exception, and a pattern of the value in its place in the message.
# A call is text, as it also names its test. ``function_of`` and ``tensors_of`` say what it is of.
# These are also compiled and called under vmap.
IN_GRAPHS: list[tuple[str, type[Exception], str]] = [
    ("unpool(x, (indices - 1).int(), 2)", RuntimeError, "but got -1 at position 0 of plane 0 "),
    ("unpool(x[0, 0], indices[0, 0], 2)", RuntimeError, r"but got shape \[2, 2\]"),
    ("unpool(x, indices, 2, reduce='max')", ValueError, "reduce .* but got '?max'?"),
    ("unpool(x[0], indices[0], 2, output_size=[7, 4, 9])", ValueError, r"got \[7, 4, 9\] for str"),
]
BAD_CALLS = [
    *IN_GRAPHS,
    # Tensors
    ("unpool([1.0], indices, 2)", TypeError, "input to be a Tensor but got list$"),
    ("ops.max_pool(None, *[[2, 2]] * 4, False, torch.int64)", TypeError, "tensors but got None$"),
    (
        "unpool(x.bool(), indices, 2, reduce='sum')",
        NotImplementedError,
        "'sum' but got torch.bool$",
    ),
    # Tensors that are not dense. torch.nn pools quantized ones, and so does this package.
    ("unpool(x.to_sparse(), indices, 2)", NotImplementedError, "input .* a sparse_coo tensor$"),
    (
        "unpool(torch.quantize_per_tensor(x, 0.5, 0, torch.quint8), indices, 2)",
        NotImplementedError,
        "input .* a quantized tensor$",
    ),
    ("pool(torch.nested.nested_tensor([image[0]]), 2)", NotImplementedError, "a nested tensor$"),
    ("adaptive_pool(image.to_sparse(), 3)", NotImplementedError, "input .* a sparse_coo tensor$"),
    # Too few dimensions for an output size
    ("unpool(x[0, 0, 0, 0], indices, 2)", RuntimeError, r"input of 3 or 4 dim.* got shape \[\]$"),
    ("unpool(x[0, 0, 0], indices, 2)", RuntimeError, r"input of 3 or 4 dim.* got shape \[2\]$"),
    # Forms of arguments
    ("unpool(x, indices, True)", TypeError, "kernel_size .* but got True$"),
    ("unpool(x, indices, 2, 2, 2**63)", TypeError, rf"padding .* but got \({2**63}, {2**63}\)$"),
    ("adaptive_pool(image, [2, 3.0])", TypeError, r"output_size .* but got \[2, 3.0\]$"),
    ("adaptive_pool(image, (2, 2, 2))", RuntimeError, r"one or 2 sizes but got \(2, 2, 2\)$"),
    ("adaptive_pool(image, (None, -1))", RuntimeError, r"negative .* but got \(None, -1\)$"),
    # Constructors. torch.nn's class keeps (2.0, 2.0) for 2.0, or checks nothing.
    ("maxunpool_cuda.MaxUnpool2d(2.0)", TypeError, "kernel_size .* but got 2.0$"),
    ("maxunpool_cuda.MaxUnpool3d((2.0,) * 3)", TypeError, r"kernel_size .* but got \(2.0, 2.0, 2"),
    ("maxunpool_cuda.MaxUnpool2d(2, reduce='amax')", ValueError, "reduce .* but got 'amax'$"),
    (
        "maxunpool_cuda.MaxUnpool1d(2, 0)",
        RuntimeError,
        r"stride .* but got .*stride=\[0\], padding",
    ),
    ("maxunpool_cuda.MaxPool2d(2.0)", TypeError, "kernel_size .* but got 2.0$"),
    ("maxunpool_cuda.MaxPool1d('2')", TypeError, "kernel_size .* but got '2'$"),
    ("maxunpool_cuda.MaxPool2d((2, 2, 2))", RuntimeError, r"one or 2 ints but got \(2, 2, 2\)$"),
    ("maxunpool_cuda.MaxPool1d((2, 2))", RuntimeError, r"one int but got \(2, 2\)$"),
    (
        "maxunpool_cuda.MaxPool3d(2, padding=2)",
        RuntimeError,
        r"at most half .* padding=\[2, 2, 2\]",
    ),
    ("maxunpool_cuda.MaxPool2d(2, ceil_mode=1)", TypeError, "ceil_mode .* but got 1$"),
    ("maxunpool_cuda.AdaptiveMaxPool1d(None)", TypeError, "output_size .* but got None$"),
    ("maxunpool_cuda.AdaptiveMaxPool2d('2')", TypeError, "output_size .* but got '2'$"),
    # Windows
    ("unpool(x, indices, 0)", RuntimeError, r"but got kernel_size=\[0, 0\], stride"),
    ("unpool(x, indices, 2, 2, -1)", RuntimeError, r"padding .*but got .*padding=\[-1, -1\]"),
    # The stride is blamed before the output_size.
    ("unpool(x, indices, 2, 0, 0, [4, 4])", RuntimeError, r"but got .*stride=\[0, 0\], padding"),
    # PyTorch would refuse this number in its own words, if it were not checked before.
    (
        "ops.max_pool(image, [-(2**63)], [2], [0], [1], False, torch.int64)",
        RuntimeError,
        rf"but got kernel_size=\[-{2**63}\], stride",
    ),
    # Output sizes
    ("unpool(x, indices, 2, output_size=[4.0, 4.0])", TypeError, r"but got \[4\.0, 4\.0\]$"),
    # All of the output would be padding.
    ("unpool(x[:0], indices[:0], 2, 2, 2)", ValueError, r"output_size.* but got \[0, 0\] for "),
    # Half of the kernel, and not of its dilated extent of 5, is the bound.
    ("pool(image, 3, 1, 2, 2)", RuntimeError, r"at most half of kernel_size but got kernel_size="),
    ("unpool(x, indices, 2**31)", RuntimeError, rf"shape \[1, 1, {2**32}, {2**32}\]"),
    # Dtypes of indices
    ("unpool(x, offsets, 17)", ValueError, r"at most 256 .* got kernel_size=\[17, 17\], .*int32"),
    ("pool(image, 2, index_dtype=None)", ValueError, "index_dtype .* but got None$"),
    ("maxunpool_cuda.MaxPool2d(2, index_dtype='int64')", ValueError, "but got 'int64'$"),
    (
        "maxunpool_cuda.MaxPool2d(17, index_dtype=torch.uint8)",
        ValueError,
        r"at most 256 .* got kernel_size=\[17, 17\], .*int32",
    ),
    ("pool(image, 2, 2, 0, 3, index_dtype=torch.uint8)", ValueError, r"dilation=\[3, 3\]; use int"),
    (
        "pool(image[..., :1, :1].expand(1, 1, 2**16, 2**15), 2, index_dtype=torch.int32)",
        ValueError,
        rf"int32 indices but got spatial sizes \[{2**16}, {2**15}\]; use int64$",
    ),
    ("adaptive_pool(image, 2, index_dtype=torch.uint8)", ValueError, "no offsets, but got torch.u"),
    ("maxunpool_cuda.AdaptiveMaxPool2d(2, index_dtype='int64')", ValueError, "but got 'int64'$"),
]
# torch.nn refuses these in 1, 2 and 3 dimensions. The exception is that of torch.nn.
AS_TORCH = [
    # Tensors
    ("unpool(x, indices.to('meta'), 2)", "but got cpu and meta$"),
    ("unpool(x, indices.short(), 2)", "but got torch.int16$"),
    ("pool(image * 1j, 2)", "but got torch.complex64$"),
    ("unpool(x[:, :0], indices[:, :0], 2)", r"but got shape \[1, 0(, 2)*\]$"),
    ("pool(image[None], 2)", r"but got shape \[1, 1, 1(, 8)+\]$"),
    ("unpool(x, indices[..., :1], 2)", r"the input.s shape, .*, but got \[1, .*1\]$"),
    # Indices
    ("unpool(x, indices + 100, 2)", r"100 at .*\(Found an invalid max index: 100; "),
    # Forms of arguments
    ("pool(image, 2, ceil_mode=1)", "ceil_mode .* but got 1$"),
    # Windows
    ("unpool(x, indices, 2, 2**62)", rf"but got .*stride=\[{2**62}.*\], padding"),
    ("pool(image, 2, 2, 2)", r"but got .*padding=\[2.*\], dilation"),
    ("pool(image, 3, 1, 1, 0)", r"but got .*dilation=\[0(, 0)*\]$"),
    ("pool(image, 9)", r"but got .*kernel_size=\[9.*\], stride"),
    # Output sizes
    ("unpool(x, indices, 2, output_size=[6] * x.dim())", r"got \[6.*\] for stride"),
    ("unpool(x, indices, 2, output_size=[2] * x.dim())", r"got \[2.*\] for stride"),
    ("unpool(x, indices, 2, output_size=[])", r"output_size .* but got \[\]$"),
    ("unpool(x, indices, 2, output_size=4)", "output_size .* but got 4$"),
]
# Each message begins with the function, the module or the operator.
NAMING = r"(?i)^(maxunpool_cuda::)?(adaptive_?)?max_?(un)?pool(\dd)?: expected .*(%s)"


def function_of(call: str, module: Any = F, dims: int = 2) -> Callable[..., Any]:
    """A call of a table as a function of ``tensors_of``, with the functions of a module."""
    names = {
        "unpool": getattr(module, f"max_unpool{dims}d"),
        # Without indices, torch.nn's pooling of signals has another kernel, with other errors.
        "pool": partial(getattr(module, f"max_pool{dims}d"), return_indices=True),
        "adaptive_pool": getattr(module, f"adaptive_max_pool{dims}d"),
        "ops": torch.ops.maxunpool_cuda,
        "maxunpool_cuda": maxunpool_cuda,
        "torch": torch,
    }
    function: Callable[..., Any] = eval(f"lambda x, indices, offsets, image: {call}", names)
    return function


def tensors_of(dims: int = 2, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right input: values and indices to unpool with kernel_size=2, offsets, an image to pool."""
    x, image = (torch.rand(1, 1, *[size] * dims, device=device) for size in (2, 8))
    indices = torch.arange(0, 2 * x.numel(), 2, device=device).reshape(x.shape)
    return x, indices, torch.zeros_like(indices).byte(), image


def named(table: list[Any]) -> list[Any]:
    """The rows of a table as parameters of a test, named after their calls."""
    return [pytest.param(*row, id=row[0]) for row in table]


@pytest.mark.parametrize(("call", "exception", "message"), named(BAD_CALLS))
def test_bad_calls(device: str, call: str, exception: type[Exception], message: str) -> None:
    with pytest.raises(exception, match=NAMING % message) as caught:
        function_of(call)(*tensors_of(device=device))
    assert caught.type is exception


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("call", "message"), named(AS_TORCH))
def test_bad_calls_raise_what_torch_raises(call: str, message: str, dims: int) -> None:
    tensors = tensors_of(dims)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        function_of(call, torch.nn.functional, dims)(*tensors)
    with pytest.raises(theirs.type, match=NAMING % message) as ours:
        function_of(call, F, dims)(*tensors)
    assert ours.type is theirs.type, theirs.value


@pytest.mark.parametrize("transform", ["vmap", "compile"])
@pytest.mark.parametrize(("call", "exception", "message"), named(IN_GRAPHS))
def test_bad_calls_in_graphs(
    device: str, call: str, exception: type[Exception], message: str, transform: str
) -> None:
    function, tensors = function_of(call), tensors_of(device=device)
    exceptions: tuple[type[Exception], ...] = (exception,)
    if transform == "vmap":
        function, tensors = torch.vmap(function), tuple(tensor[None] for tensor in tensors)
    else:
        function = torch.compile(function, backend="aot_eager")
        exceptions += (RuntimeError,)  # Dynamo makes it of an operator's ValueError
    with pytest.raises(exceptions, match=f"expected .*({message})"):
        function(*tensors)


def test_the_largest_window_that_uint8_counts(device: str) -> None:
    y = torch.arange(64.0, device=device).reshape(1, 1, 8, 8)  # every window has the last element
    pooled, offsets = F.max_pool2d(y, 16, 1, 8, return_indices=True, index_dtype=torch.uint8)
    assert offsets.flatten()[0] == 255
    assert F.max_unpool2d(pooled, offsets, 16, 1, 8).sum() == 63


def test_too_little_memory_is_the_error_of_pytorch() -> None:
    """For a result, and for the copy of a tensor that a kernel needs."""
    cell = torch.zeros(1, 1, 1, 1)
    plane = cell.expand(1, 1, 2**25, 2**25)  # a copy has 2^52 bytes: more than a machine addresses
    with pytest.raises(RuntimeError) as theirs:
        torch.empty(plane.shape)
    for call in (
        partial(F.max_unpool2d, cell, cell.long(), kernel_size=2**25),
        partial(F.max_pool2d, plane, kernel_size=1, stride=2**25),
    ):
        with pytest.raises(RuntimeError) as ours:
            call()
        assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))


# Tensors whose storage was freed, as FSDP and offloading do, or is too short

# A call, and which of its tensors is freed.
OF_FREED = [
    ("maxunpool_cuda.MaxPool2d(2)(image)", "image"),
    ("pool(image, 2, index_dtype=torch.uint8)", "image"),
    ("adaptive_pool(image, 4)", "image"),
    ("adaptive_pool(image, 3)", "image"),
    ("ops.max_pool(image, *[[2, 2]] * 2, [0, 0], [1, 1], False, torch.int32)", "image"),
    ("unpool(x, indices, 2)", "x"),
    ("unpool(x, indices, 2)", "indices"),
    ("unpool(x, offsets, 2, reduce='sum')", "offsets"),
    ("ops.max_unpool(x, offsets, *[[4, 4]] * 3, [0, 0], 'last')", "offsets"),
    ("ops.max_unpool_backward(image, indices, [8, 8], *[[4, 4]] * 2, [0, 0], 'last')", "image"),
    ("ops.max_unpool_backward(image, indices, [8, 8], *[[4, 4]] * 2, [0, 0], 'last')", "indices"),
]
# Where the elements of such a tensor are: the last two are not at the begin of the storage, or not
# in the order in which kernels take them.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.expand(2, 3, -1, -1).contiguous(memory_format=torch.channels_last),
    "second": lambda t: torch.stack([t, t])[1],
    "transposed": lambda t: t.transpose(2, 3),
}


def shrink(tensor: Tensor, to: int = 0) -> None:
    tensor.untyped_storage().resize_(to)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("call", "freed"), OF_FREED)
def test_a_freed_tensor_is_refused(device: str, call: str, freed: str, place: str) -> None:
    """It may also lack its last element alone. torch.nn reads beyond the end then."""
    for is_short, inference in ((False, False), (False, True), (True, False)):
        if is_short and call == "adaptive_pool(image, 3)":
            continue  # torch.nn's function computes that
        tensors = [PLACES[place](tensor) for tensor in tensors_of(device=device)]
        tensor = tensors[("x", "indices", "offsets", "image").index(freed)]
        shrink(tensor, (tensor.untyped_storage().nbytes() - 1) * is_short)
        with torch.inference_mode(inference), pytest.raises(RuntimeError) as error:
            function_of(call)(*tensors)
        # torch.nn's function of adaptive pooling has other words.
        assert re.search("in memory but got|its data is not allocated yet", str(error.value))


def test_a_backward_refuses_indices_that_were_freed(device: str) -> None:
    x = torch.rand(1, 1, 8, 8, device=device, requires_grad=True)
    pooled, indices = F.max_pool2d(x, 2, return_indices=True)
    unpooled = F.max_unpool2d(pooled, indices, 2)
    shrink(indices)
    for result in (unpooled, pooled):
        with pytest.raises(RuntimeError, match=NAMING % "indices in memory"):
            torch.autograd.grad(result.sum(), x, retain_graph=True)


# Random calls that are wrong


def with_innermost(dim: int, tensor: Tensor) -> Tensor:
    """A copy whose elements along a dimension are neighbours: dim 1 is PyTorch's channels_last."""
    return tensor.movedim(dim, -1).clone(memory_format=torch.contiguous_format).movedim(-1, dim)


# A tensor of other strides, another shape or another dtype.
CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t[:1, :1].expand(t.shape),
    lambda t: t.contiguous().as_strided(t.shape, [1] * t.dim()),
    lambda t: with_innermost(0, t),
    lambda t: with_innermost(1, t),
    lambda t: t.transpose(0, -1),
    lambda t: t[..., :1],
    lambda t: t.flatten(0, 1),
    lambda t: t[None],
    lambda t: t[:, :0],
    lambda t: t.to(torch.bool),
)
NUMBERS = (-1, 0, 1, 2, 17, 256, 2**31, 2**58, 2**60, 2**61)


def changed(rng: Random, call: Call) -> Call:
    """The call with other tensors and arguments, or as it is. ``error``: how the checks refuse it.

    They are in Python, and are called here as a trace calls them.
    """
    tensors, arguments = list(call.tensors), list(call.arguments)
    for place, tensor in enumerate(tensors):
        if rng.random() < 0.2:
            tensors[place] = rng.choice(CHANGES)(tensor)
    for place, numbers in enumerate(arguments):
        if isinstance(numbers, tuple) and rng.random() < 0.2:
            others = (rng.choice((n, n + 1, rng.choice(NUMBERS))) for n in numbers)
            arguments[place] = numbers[1:] if rng.random() < 0.2 else tuple(others)
    if rng.random() < 0.05:
        arguments[-1] = torch.int16 if call.name == "max_pool" else "max"
    error = ""
    try:
        call.definition.result(*tensors, *arguments, device="meta")
    except Exception as refusal:
        error = f"^{re.escape(str(refusal))}"
    return replace(call, tensors=tuple(tensors), arguments=tuple(arguments), error=error)


@needs_library  # PyTorch's operators do not take such large numbers
@pytest.mark.sanitized
@pytest.mark.parametrize("device", ["cpu", *GPUS], indirect=True)
@pytest.mark.parametrize("operator", OPERATORS)
def test_random_arguments(device: str, operator: str, rng: Random) -> None:
    """Kernels refuse what the checks refuse, whoever calls them. Else they do as the trace says."""

    def check(call: Call) -> None:
        call = call.moved(device)
        kernel = partial(call.operator, *call.tensors, *call.arguments)
        if call.error:
            # Without autograd, whose kernel is in Python. Compiled kernels raise RuntimeErrors.
            with torch.inference_mode(), pytest.raises(Exception, match=call.error):
                kernel()
            return
        expected = leaves(call.definition.result(*call.tensors, *call.arguments, device="meta"))
        if expected[0].numel() > 2**18:
            return  # it would take long
        try:
            results = leaves(kernel())
        except RuntimeError as error:
            if "expected indices in the output plane" in str(error):
                return  # the numbers fit, but not these indices
            raise
        assert [each.stride() for each in results] == [each.stride() for each in expected]
        if math.prod(call.geometry.kernel) < 2**16:  # else the reference would take long, too
            call.compare(results)

    # Where a size is 0 or 1, strides may fit two layouts. A volume has two without a batch, too.
    leadings = ((2, 3), (0, 3), (3, 1), (3,))
    calls = [
        changed(rng, draw(rng, operator, leading=rng.choice(leadings), most_cells=12, longest=4))
        for _ in range(scaled(4000))
    ]
    # Without the values, so these are kinds of errors.
    refused = {call.error.split(re.escape(" but got "))[0] for call in calls}
    assert len(refused) > 5
    check_each(calls, check)
