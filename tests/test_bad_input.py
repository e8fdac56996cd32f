# SPDX-License-Identifier: BSD-3-Clause
"""Bad input: exceptions of the types that torch.nn raises, and messages that name the values."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cases import OPERATORS, Call, all_same, draw, scaled
from conftest import needs_library
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F

# Rows of the tables: a call, the exception, and a pattern of the value in its place in the message.
# A call is text, as it also names its test. ``function_of`` and ``tensors_of`` say what it is of.
Row = tuple[str, type[Exception] | None, str]
# Instead of the exception: that of torch.nn, which refuses the call in 1, 2 and 3 dimensions.
AS_TORCH = None
# These are also compiled and called under vmap.
IN_GRAPHS: list[Row] = [
    ("unpool(x, (indices - 1).int(), 2)", RuntimeError, "but got -1 at position 0 of plane 0 "),
    ("unpool(x[0, 0], indices[0, 0], 2)", RuntimeError, r"but got shape \[2, 2\]"),
    ("unpool(x, indices, 2, reduce='max')", ValueError, "reduce .* but got '?max'?"),
    (
        "unpool(x[0], indices[0], 2, output_size=[7, 4, 9])",
        ValueError,
        r"output_size .* but got \[7, 4, 9\] for stride=\[2, 2\]",
    ),
]
BAD_CALLS: list[Row] = [
    *IN_GRAPHS,
    # Tensors
    ("unpool([1.0], indices, 2)", TypeError, "input to be a Tensor but got list$"),
    ("ops.max_pool(None, *[[2, 2]] * 4, False, torch.int64)", TypeError, "tensors but got None$"),
    ("unpool(x, indices.to('meta'), 2)", AS_TORCH, "but got cpu and meta$"),
    ("unpool(x, indices.short(), 2)", AS_TORCH, "but got Short$"),
    ("unpool(x.bool(), indices, 2, reduce='sum')", NotImplementedError, "'sum' but got Bool$"),
    ("pool(image * 1j, 2)", AS_TORCH, "but got ComplexFloat$"),
    ("unpool(x[0, 0], indices[0, 0], 2)", AS_TORCH, r"but got shape \[2(, 2)*\]$"),
    ("unpool(x[:, :0], indices[:, :0], 2)", AS_TORCH, r"but got shape \[1, 0(, 2)*\]$"),
    ("pool(image[None], 2)", AS_TORCH, r"but got shape \[1, 1, 1(, 8)+\]$"),
    ("unpool(x, indices[..., :1], 2)", AS_TORCH, r"the input.s shape, .*, but got \[1, .*1\]$"),
    # Indices
    ("unpool(x, indices + 100, 2)", AS_TORCH, r"100 at .*\(Found an invalid max index: 100; "),
    ("unpool(x, offsets, 17)", ValueError, r"at most 256 .* got kernel_size=\[17, 17\], .*int32"),
    # Forms of arguments
    ("unpool(x, indices, True)", TypeError, "kernel_size .* but got True$"),
    ("unpool(x, indices, 2, {2})", TypeError, r"stride .* but got \{2\}$"),
    ("unpool(x, indices, 2, 2, 2**63)", TypeError, rf"padding .* but got \({2**63}, {2**63}\)$"),
    ("pool(image, b'22')", AS_TORCH, "kernel_size .* but got b'22'$"),
    ("pool(image, 2, ceil_mode=1)", AS_TORCH, "ceil_mode .* but got 1$"),
    ("unpool(x, indices, 2, reduce='\\ud800')", ValueError, r"reduce .* but got '\\ud800'$"),
    ("maxunpool_cuda.MaxUnpool2d(2, reduce='amax')", ValueError, "reduce .* but got 'amax'$"),
    # Windows
    ("unpool(x, indices, 0)", RuntimeError, r"but got kernel_size=\[0, 0\], stride"),
    ("unpool(x, indices, 2, 2, -1)", RuntimeError, r"padding .*but got .*padding=\[-1, -1\]"),
    ("unpool(x, indices, 2, 2**62)", AS_TORCH, rf"but got .*stride=\[{2**62}.*\], padding"),
    # The stride is blamed before the output_size.
    ("unpool(x, indices, 2, 0, 0, [4, 4])", RuntimeError, r"but got .*stride=\[0, 0\], padding"),
    ("pool(image, 2, 2, 2)", AS_TORCH, r"but got .*padding=\[2.*\], dilation"),
    ("pool(image, 3, 1, 1, 0)", AS_TORCH, r"but got .*dilation=\[0(, 0)*\]$"),
    ("pool(image, 9)", AS_TORCH, r"but got .*kernel_size=\[9.*\], stride"),
    # PyTorch would refuse these numbers in its own words, if they were not checked before.
    ("pool(image, -(2**63))", AS_TORCH, rf"but got kernel_size=\[-{2**63}.*\], stride"),
    (
        "ops.max_pool(image, [-(2**63)] * 2, [2, 2], [0, 0], [1, 1], False, torch.int64)",
        RuntimeError,
        rf"but got kernel_size=\[-{2**63}, -{2**63}\], stride",
    ),
    # Output sizes
    ("unpool(x, indices, 2, output_size=[6] * x.dim())", AS_TORCH, r"got \[6.*\] for stride"),
    ("unpool(x, indices, 2, output_size=[2] * x.dim())", AS_TORCH, r"got \[2.*\] for stride"),
    ("unpool(x, indices, 2, output_size=[])", AS_TORCH, r"output_size .* but got \[\]$"),
    ("unpool(x, indices, 2, output_size=4)", AS_TORCH, "output_size .* but got 4$"),
    ("unpool(x, indices, 2, output_size=[4.0, 4.0])", TypeError, r"but got \[4\.0, 4\.0\]$"),
    # All of the output would be padding.
    ("unpool(x[:0], indices[:0], 2, 2, 2)", ValueError, r"output_size.* but got \[0, 0\] for "),
    ("unpool(x, indices, 2**31)", RuntimeError, rf"shape \[1, 1, {2**32}, {2**32}\]"),
    (
        "unpool(*[x.new_empty(1, 2**20, 1, device='meta')] * 2, 1, 2**50)",
        RuntimeError,
        rf"but got output_size=.*stride=\({2**50}, {2**50}\), padding",
    ),
    # Dtypes of indices
    ("pool(image, 2, index_dtype=None)", ValueError, "index_dtype .* but got None$"),
    ("maxunpool_cuda.MaxPool2d(2, index_dtype='int64')", ValueError, "but got 'int64'$"),
    (
        "pool(image, 2, 2, 0, (1, 2), index_dtype=torch.uint8)",
        ValueError,
        r"no dilation, .* but got .*dilation=\[1, 2\]; use int32",
    ),
    (
        "pool(image[..., :1, :1].expand(1, 1, 2**16, 2**15), 2, index_dtype=torch.int32)",
        ValueError,
        rf"int32 indices but got spatial sizes \[{2**16}, {2**15}\]; use int64$",
    ),
    ("adaptive_pool(image, 2, index_dtype=torch.uint8)", ValueError, "but got torch.uint8$"),
    (
        "maxunpool_cuda.AdaptiveMaxPool2d(2, index_dtype=torch.uint8)",
        ValueError,
        "have no offsets, but got torch.uint8$",
    ),
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


def rows(table: list[Row], *, as_torch: bool = False) -> list[Any]:
    return [
        pytest.param(call, exception, message, id=call)
        for call, exception, message in table
        if (exception is AS_TORCH) == as_torch
    ]


@pytest.mark.parametrize(("call", "exception", "message"), rows(BAD_CALLS))
def test_bad_calls(device: str, call: str, exception: type[Exception], message: str) -> None:
    with pytest.raises(exception, match=NAMING % message) as caught:
        function_of(call)(*tensors_of(device=device))
    assert caught.type is exception


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("call", "exception", "message"), rows(BAD_CALLS, as_torch=True))
def test_bad_calls_raise_what_torch_raises(
    call: str, exception: None, message: str, dims: int
) -> None:
    tensors = tensors_of(dims)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        function_of(call, torch.nn.functional, dims)(*tensors)
    with pytest.raises(theirs.type, match=NAMING % message) as ours:
        function_of(call, F, dims)(*tensors)
    assert ours.type is theirs.type, theirs.value


@pytest.mark.parametrize("transform", ["vmap", "compile"])
@pytest.mark.parametrize(("call", "exception", "message"), rows(IN_GRAPHS))
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


# torch.nn's pooling takes quantized and mkldnn tensors, and this package's hands them on.
@pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|Sparse|sparse|nested)")
@pytest.mark.parametrize(
    ("call", "got"),
    [
        ("unpool(x.to_sparse(), indices, 2)", "input .* a sparse_coo"),
        ("unpool(x, offsets.to_sparse_csr(), 2)", "indices .* a sparse_csr"),
        ("unpool(torch.quantize_per_tensor(x, 0.5, 0, torch.quint8), indices, 2)", "a quantized"),
        ("pool(torch.nested.nested_tensor([image[0]]), 2)", "input .* a nested"),
        ("adaptive_pool(image.to_sparse(), 3)", "input .* a sparse_coo"),
    ],
)
def test_tensors_that_are_not_dense(call: str, got: str) -> None:
    # Adaptive pooling may name max_pool, which does its work.
    with pytest.raises(NotImplementedError, match=rf"\A\w+2d: expected .*{got} tensor\Z"):
        function_of(call)(*tensors_of())


@needs_library
@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.11", reason="PyTorch 2.10 prints the error and goes on")
def test_a_call_of_a_package_that_does_not_fit(tmp_path: Path) -> None:
    """AOTInductor's code calls a kernel itself. It gives every error the same type."""
    x, indices = torch.rand(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    batch = {0: torch.export.Dim("batch", min=2, max=9)}
    unpool = maxunpool_cuda.MaxUnpool2d(2)
    program = torch.export.export(unpool, (x, indices), dynamic_shapes=(batch, batch))
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{tmp_path}/m.pt2")
    compiled = torch._inductor.aoti_load_package(path)
    assert torch.equal(compiled(x, indices), unpool(x, indices))
    with pytest.raises(RuntimeError, match="max_unpool2d: expected indices of the input's shape"):
        compiled(x[:1], indices)


def test_the_largest_window_that_uint8_counts(device: str) -> None:
    y = torch.arange(64.0, device=device).reshape(1, 1, 8, 8)  # every window has the last element
    pooled, offsets = F.max_pool2d(y, 16, 1, 8, return_indices=True, index_dtype=torch.uint8)
    assert offsets.flatten()[0] == 255
    assert F.max_unpool2d(pooled, offsets, 16, 1, 8).sum() == 63


LARGE = [2**25] * 2  # sides of a plane: its float32 are 2^52 bytes, more than a machine addresses


@pytest.mark.parametrize("operator", ["max_unpool", "max_unpool_backward", "max_pool"])
def test_too_little_memory_is_the_error_of_pytorch(operator: str) -> None:
    """Of results of unpooling, and of the copies of tensors that the others make."""
    cell = torch.zeros(1, 1, 1, 1)
    plane = cell.expand(1, 1, *LARGE)
    arguments = {
        "max_unpool": (cell, cell.long(), LARGE, [2, 2], [2, 2], [0, 0], "last"),
        "max_unpool_backward": (plane, cell.long(), LARGE, [2, 2], [2, 2], [0, 0], "last"),
        "max_pool": (plane, [1, 1], [1, 1], [0, 0], [1, 1], False, torch.int64),
    }
    with pytest.raises(RuntimeError) as theirs:
        torch.empty(1, 1, *LARGE)
    with pytest.raises(RuntimeError) as ours:
        getattr(torch.ops.maxunpool_cuda, operator)(*arguments[operator])
    assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))


@pytest.mark.parametrize("operator", OPERATORS)
def test_cpu_tensors_for_cuda_kernels(operator: str, rng: Random) -> None:
    """In a build without such kernels, test_fallback.py calls those that are there instead."""
    if not maxunpool_cuda.build_info()["cuda"]:
        pytest.skip("this build has no CUDA kernels")
    call, keys = draw(rng, operator), torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="expected a call that a kernel can do"):
        call.operator.redispatch(keys, *call.tensors, *call.arguments)


STRANGE: tuple[Any, ...] = (
    *(0, -1, True, 2.5, math.nan, 2**40, -(2**40), 2**62, 2**63, -(2**63), [2**62]),
    *(None, "max", b"2", object(), torch.int64, torch.tensor(2), torch.tensor([2.5, 2.5])),
    *((), [], [[2, 2]], (2, None), {2: 2}, range(2), torch.Size([2, 2]), (2, 1), [3, 3, 3]),
)
# Some are impossible for some tensors, and raise errors.
CHANGES: tuple[Callable[[Random, Tensor], Any], ...] = (
    lambda rng, t: t.to(rng.choice((torch.int16, torch.uint8, torch.bool, torch.bfloat16))),
    lambda rng, t: t + rng.choice((1, -1, 2**31, 2**32, -(2**40), 2**62)),
    lambda rng, t: t[(slice(None),) * rng.randrange(t.dim()) + (rng.choice((0, slice(0, -1))),)],
    lambda rng, t: t.movedim(0, -1),
    lambda rng, t: t.expand(2, *t.shape),
    lambda rng, t: rng.choice((t.to("meta"), t.to_sparse(), t.reshape(-1)[0], t.numpy())),
    lambda rng, t: t.flip(-1).conj(),
    lambda rng, t: torch.as_strided(t, t.shape, [0] * t.dim()),
    lambda rng, t: torch.nested.nested_tensor([t, t]),
    lambda rng, t: rng.choice(STRANGE),
)


def changed(rng: Random, call: Call) -> Call:
    """The call with other tensors and arguments, most of them wrong."""
    arguments = [rng.choice(STRANGE) if rng.random() < 0.09 else each for each in call.arguments]
    tensors = list(call.tensors)
    for number, tensor in enumerate(tensors):
        if rng.random() < 0.15:
            with contextlib.suppress(Exception):
                tensors[number] = rng.choice(CHANGES)(rng, tensor)
    return replace(call, tensors=tuple(tensors), arguments=tuple(arguments))


def outcome(call: Call, dims: int, by_function: bool) -> str:
    """Call the public function or else the operator.

    Returns "right value", "value" if the reference tells none, or the name of the exception.
    """
    function, arguments = call.operator, call.arguments
    *sizes, last = arguments
    if by_function and call.name == "max_unpool":
        output_size, *window = sizes
        function = partial(getattr(F, f"max_unpool{dims}d"), reduce=last)
        arguments = (*window, output_size)
    elif by_function and call.name == "max_pool":
        function = partial(getattr(F, f"max_pool{dims}d"), return_indices=True, index_dtype=last)
        arguments = sizes
    try:
        results = leaves(function(*call.tensors, *arguments))
    except Exception as error:
        return type(error).__name__
    is_plain = isinstance(last, (str, torch.dtype)) and all(
        isinstance(each, tuple) and len(each) == dims for each in sizes[:4]
    )
    if not is_plain or results[0].is_meta or results[0].numel() == 0:
        return "value"
    assert all_same(results, call.reference()), call
    return "right value"


@pytest.mark.sanitized
@pytest.mark.filterwarnings("ignore")
def test_random_arguments(device: str, rng: Random) -> None:
    """Most are wrong. A call gives the reference's value or an exception, and never crashes."""
    count, outcomes = scaled(4000), Counter[str]()
    for _ in range(count):
        call = draw(rng, rng.choice(OPERATORS), most_cells=12, longest=6).moved(device)
        outcomes[outcome(changed(rng, call), call.dims, rng.random() < 0.5)] += 1
    frequent = {"RuntimeError", "TypeError", "ValueError", "right value"}
    assert outcomes.keys() <= {*frequent, "NotImplementedError", "value"}, outcomes
    assert outcomes["right value"] > count / 10, outcomes
    assert all(outcomes[name] > count / 40 for name in frequent), outcomes
