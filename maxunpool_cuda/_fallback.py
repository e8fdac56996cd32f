# SPDX-License-Identifier: BSD-3-Clause
"""The operators' kernels where there are no compiled ones: in PyTorch's operators.

They serve tensors of every device for which the compiled library has no kernels: CUDA tensors in a
build without CUDA kernels, Apple's and Intel's GPUs, and in a build without a library all tensors.
A kernel has _layout.py check the arguments. It checks the indices itself, computes, and brings the
result into the call's layout.

On the CPU PyTorch's scatter takes the elements of a plane one after the other, so the last of equal
indices stays, and sums have one order. On other devices the order is open. There unpooling goes the
ways of _decompositions.py, which no order changes.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _decompositions, _library
from ._checks import MOST_OFFSETS, Ints, check_allocated, check_kinds
from ._layout import pooled, unpooled, unpooled_backward

# By the bytes of an element, the dtype by which it is moved: PyTorch's operators take these all.
_MOVED_AS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
# The smallest dtype of floating-point numbers that has all of an integer dtype.
_REAL = {
    torch.uint8: torch.float32,
    torch.int8: torch.float32,
    torch.int16: torch.float32,
    torch.int32: torch.float64,
}


class _Unpooling(NamedTuple):
    """Where the windows of an unpooling lie."""

    output_size: Ints
    kernel_size: Ints
    stride: Ints
    padding: Ints

    @property
    def rank(self) -> int:
        return len(self.output_size)

    @property
    def plane(self) -> int:
        """The positions of an output plane."""
        return math.prod(self.output_size)

    def fit_blocks(self, pooled: Ints) -> bool:
        """Whether blocks of a stride for each window take little more room than the plane.

        _decompositions.py unpools window offsets in such blocks. They do not if a stride is far
        larger than the plane.
        """
        blocks = [
            (cells + kernel // step) * step
            for cells, kernel, step in zip(pooled, self.kernel_size, self.stride, strict=True)
        ]
        return math.prod(blocks) <= 16 * self.plane

    def are_disjoint(self) -> bool:
        """Whether no two windows share a position."""
        return all(k <= s for k, s in zip(self.kernel_size, self.stride, strict=True))


def _without_views(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel below the keys of autograd, where PyTorch's own run: its results are no views.

    What ``reshape`` returns is one elsewhere, and autograd refuses to change a view in place that a
    torch.autograd.Function returns. Below, nobody would notice a result in the memory of an input:
    no kernel may return one.
    """

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return kernel(*arguments)

    return call


@_without_views
def max_unpool(input: Tensor, indices: Tensor, *arguments: Any) -> Tensor:
    """The operator of this name."""
    _check_kinds("max_unpool", input, indices)
    empty = unpooled(input, indices, *arguments, device="meta")
    check_allocated(f"max_unpool{len(arguments[0])}d", input=input, indices=indices)
    if empty.numel() == 0:
        return _empty(empty, input.device)
    *sizes, reduce = arguments
    unpooling = _Unpooling(*sizes)
    positions = _positions(indices, unpooling, _has_channels_last(empty))
    values = input if reduce == "sum" else _moved(input)
    if reduce == "sum" and input.dtype in (torch.float16, torch.bfloat16):
        values = input.float()  # so that a sum is rounded once
    planes = values.flatten(-unpooling.rank)
    if _has_order(input):
        output = planes.new_zeros(*planes.shape[:-1], unpooling.plane)
        write = output.scatter_add_ if reduce == "sum" else output.scatter_
        result = write(-1, positions, planes).reshape(empty.shape)
    elif indices.dtype == torch.uint8 and unpooling.fit_blocks(indices.shape[-unpooling.rank :]):
        result = _decompositions.unpool_window_offsets(values, indices, *unpooling, reduce)
    elif reduce == "last":
        result = _decompositions.unpool_positions(planes, positions, unpooling.output_size, "last")
    else:
        result = _sums(planes, positions, unpooling.plane).reshape(empty.shape)
    result = result.to(input.dtype) if reduce == "sum" else result.view(input.dtype)
    return _laid_out(result, empty)


@_without_views
def max_unpool_backward(grad_output: Tensor, indices: Tensor, *arguments: Any) -> Tensor:
    """The operator of this name."""
    _check_kinds("max_unpool_backward", grad_output, indices)
    empty = unpooled_backward(grad_output, indices, *arguments, device="meta")
    name = f"max_unpool{len(arguments[0])}d"
    check_allocated(name, grad_output=grad_output, indices=indices)
    if empty.numel() == 0:
        return _empty(empty, grad_output.device)
    *sizes, reduce = arguments
    unpooling = _Unpooling(*sizes)
    positions = _positions(indices, unpooling, _has_channels_last(empty))
    gradient = _moved(grad_output).flatten(-unpooling.rank).gather(-1, positions)
    have_own = indices.dtype == torch.uint8 and unpooling.are_disjoint()
    if reduce == "last" and not have_own:
        gradient.masked_fill_(~_are_last(positions, unpooling.plane), 0)
    return _laid_out(gradient.view(grad_output.dtype).reshape(indices.shape), empty)


@_without_views
def max_pool(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator of this name."""
    _check_kinds("max_pool", input)
    empty = pooled(input, *arguments, device="meta")
    check_allocated(f"max_pool{len(arguments[0])}d", input=input)
    if empty[0].numel() == 0:
        values, indices = (_empty(each, input.device) for each in empty)
        return values, indices
    if not _pools_as_torch(input):
        values, indices = _decompositions.max_pool(input, *arguments)
        return _laid_out(values, empty[0]), _laid_out(indices, empty[1])
    *window, ceil_mode, index_dtype = arguments
    values, positions = _pool_as_torch(input, window, ceil_mode)
    if index_dtype == torch.uint8:
        kernel_size, stride, padding, _ = window
        unpooling = _Unpooling(input.shape[-len(padding) :], kernel_size, stride, padding)
        positions = _offsets(positions, unpooling)
    return _laid_out(values, empty[0]), _laid_out(positions.to(index_dtype), empty[1])


def _check_kinds(operator: str, *tensors: Tensor) -> None:
    """Refuse tensors that are not dense, and warn of CUDA tensors."""
    check_kinds(operator, *tensors)
    if tensors[0].is_cuda:
        _warn_of_cuda()


_has_warned = False


def _warn_of_cuda() -> None:
    """Warn, once a process, that CUDA tensors have no kernels, and say how to get them."""
    global _has_warned
    if _has_warned or torch.version.hip:
        return
    _has_warned = True
    way_out = (
        '`pip install "cuda-toolkit[nvcc,cccl]==13.*"` installs nvcc for a PyTorch with '
        "CUDA 13; `FORCE_CUDA=1 pip install --no-build-isolation .` in the source tree builds again"
    )
    if sys.platform != "linux":
        way_out = "CUDA kernels need Linux"
    warnings.warn(
        "maxunpool_cuda: CUDA tensors run PyTorch's operators, which is slower, as this build has "
        f"{_library.build_info()['note']}: {way_out}",
        stacklevel=2,
    )


def _has_order(tensor: Tensor) -> bool:
    """Whether PyTorch's scatter takes the elements of a plane in their order on this device."""
    return tensor.is_cpu


def _pools_as_torch(input: Tensor) -> bool:
    """Whether torch.nn's operator pools such a tensor, and its results are known."""
    return (input.is_cpu or input.is_cuda) and input.dtype != torch.int64


def _moved(tensor: Tensor) -> Tensor:
    """The same bytes as a dtype that PyTorch's operators take."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(_MOVED_AS[tensor.element_size()])


def _laid_out(result: Tensor, empty: Tensor) -> Tensor:
    """The result with the strides of ``empty``."""
    if result.stride() == empty.stride() and result.is_contiguous():
        return result
    return _empty(empty, result.device).copy_(result)


def _empty(like: Tensor, device: torch.device) -> Tensor:
    """An undefined tensor with the shape and the strides of one that has no data.

    ``torch.empty_like`` takes other strides of 5 dimensions where a size is 1.
    """
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _begins(unpooling: _Unpooling, pooled: Ints, device: torch.device) -> list[Tensor]:
    """For each axis the coordinates where windows begin; they broadcast to a pooled plane."""
    rank = unpooling.rank
    return [
        _decompositions.arange_along(number, rank, pooled[number], device).long()
        * unpooling.stride[number]
        - unpooling.padding[number]
        for number in range(rank)
    ]


def _flat(coordinates: Sequence[Tensor], sizes: Ints) -> Tensor:
    """The flat position of coordinates in a plane of these sizes."""
    position = coordinates[0]
    for coordinate, size in zip(coordinates[1:], sizes[1:], strict=True):
        position = position * size + coordinate
    return position


def _has_channels_last(empty: Tensor) -> bool:
    """Whether the channels come last in the layout of a call; with one channel it is either."""
    return empty.stride(-1) != 1


def _positions(indices: Tensor, unpooling: _Unpooling, channels_last: bool) -> Tensor:
    """Flat positions, int64, in flattened planes. One outside its plane is an error.

    A window offset is the position of its window's begin, and a step that a table has.
    """
    rank = unpooling.rank
    positions = indices.long()
    if indices.dtype != torch.uint8:
        _check_inside(indices, [(positions, 0, unpooling.plane)], unpooling, channels_last)
        return positions.flatten(-rank)
    places: list[Tensor] = []  # in the window, by offset, for each axis
    remaining = torch.arange(MOST_OFFSETS, device=indices.device)
    for kernel in reversed(unpooling.kernel_size):
        places.insert(0, remaining % kernel)
        remaining = remaining // kernel
    pooled = indices.shape[-rank:]
    begins = _begins(unpooling, pooled, indices.device)
    checked = [(indices, 0, math.prod(unpooling.kernel_size))]
    axes = zip(begins, places, pooled, *unpooling, strict=True)
    for begin, place, cells, size, kernel, stride, padding in axes:
        if padding > 0 or (cells - 1) * stride - padding + kernel > size:  # windows are clipped
            checked.append((begin + place[positions], 0, size))
    _check_inside(indices, checked, unpooling, channels_last)
    steps = _flat(places, unpooling.output_size)
    return (steps[positions] + _flat(begins, unpooling.output_size)).flatten(-rank)


# Numbers, their smallest value, and the end of their range.
_Range = tuple[Tensor, int, int]


def _check_inside(
    indices: Tensor, ranges: Sequence[_Range], unpooling: _Unpooling, channels_last: bool = False
) -> None:
    """Raise the error of the first index of which a number is out of its range, if there is one.

    The first one has the least place in the memory of the call's layout, as in csrc/cpu/walk.h.
    This waits for the device. While a CUDA graph is captured nothing can wait, so there the graph
    fails when it runs.
    """
    if indices.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(_are_inside(ranges).all())
        return
    extremes = [(*torch.aminmax(numbers), begin, end) for numbers, begin, end in ranges]
    if all(begin <= int(least) and int(most) < end for least, most, begin, end in extremes):
        return
    rank = unpooling.rank
    outside, elements = ~_are_inside(ranges), torch.arange(indices.numel(), device=indices.device)
    elements = elements.view(indices.shape)
    if channels_last:
        outside, elements = (each.movedim(-rank - 1, -1) for each in (outside, elements))
    element = int(elements[outside][0])
    plane, position = divmod(element, math.prod(indices.shape[-rank:]))
    index = int(indices.flatten()[element])
    in_window = ", an offset in its window," if indices.dtype == torch.uint8 else ""
    raise RuntimeError(
        f"max_unpool{rank}d: expected indices in the output plane but got {index}{in_window} at "
        f"position {position} of plane {plane} (Found an invalid max index: {index}; output "
        f"volumes are of size {'x'.join(map(str, unpooling.output_size))})"
    )


def _are_inside(ranges: Sequence[_Range]) -> Tensor:
    """For each element whether all of its numbers are in their ranges."""
    inside = [(numbers >= begin) & (numbers < end) for numbers, begin, end in ranges]
    return functools.reduce(torch.logical_and, inside)


def _are_last(positions: Tensor, plane: int) -> Tensor:
    """Whether each element is the last of its plane, in row-major order, with its position."""
    count = positions.shape[-1]
    dtype = torch.int32 if count < 2**31 else torch.int64
    numbers = torch.arange(count, device=positions.device, dtype=dtype).expand_as(positions)
    shape = (*positions.shape[:-1], plane)
    if _has_order(positions):
        # What is not written is not read.
        last = numbers.new_empty(shape).scatter_(-1, positions, numbers)
    else:
        last = numbers.new_zeros(shape).scatter_reduce(-1, positions, numbers, "amax")
    return last.gather(-1, positions) == numbers


def _sums(planes: Tensor, positions: Tensor, plane: int) -> Tensor:
    """The sums of the elements with one position, by an operator that sorts the positions."""
    count = math.prod(planes.shape[:-1])
    result = planes.new_zeros(count * plane)
    begins = torch.arange(count, device=planes.device).unsqueeze(-1) * plane
    targets = (positions.reshape(count, -1) + begins).flatten()
    return result.index_put_((targets,), planes.flatten(), accumulate=True)


def _pool_as_torch(input: Tensor, window: Sequence[Ints], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """Values and flat positions, by torch.nn's operator for floating-point numbers.

    That for integers takes the wrong one of equal elements in some layouts.
    """
    dtype = input.dtype
    # It takes strides of 32 bits. One that is larger than an axis, padded, leaves it one window.
    kernel_size, stride, padding, dilation = window
    lengths = zip(input.shape[-len(padding) :], padding, strict=True)
    most = [max(size + before, 2**31 - 1) for size, before in lengths]
    window = [kernel_size, [*map(min, stride, most)], padding, dilation]
    if not dtype.is_floating_point:
        # -inf, the value of a window without an element, becomes the smallest integer.
        values, positions = _pool_real(input.to(_REAL[dtype]), window, ceil_mode)
        return values.clamp(min=torch.iinfo(dtype).min).to(dtype), positions
    values, positions = _pool_real(input, window, ceil_mode)
    if dtype in (torch.float16, torch.bfloat16):  # of which PyTorch may change a NaN's bits
        elements = _moved(input).flatten(-len(window[0]))
        flat = positions.reshape(*elements.shape[:-1], -1).clamp(0, elements.shape[-1] - 1)
        found = elements.gather(-1, flat).reshape(values.shape)
        values = torch.where(values.isnan(), found, values.view(found.dtype)).view(dtype)
    return values, positions


def _pool_real(input: Tensor, window: Sequence[Ints], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """torch.nn's operator of the window's rank. It has none for 1d.

    That for volumes in channels_last_3d gives a window of nothing but -inf the index 0. Volumes of
    one channel may be dense in both layouts. A view gives them the strides of the contiguous one.
    """
    if len(window[0]) == 3:
        pool = torch.ops.aten.max_pool3d_with_indices
        contiguous = input.contiguous().flatten().view(input.shape)
        results = pool(contiguous, *window, ceil_mode)
        return results[0], results[1]
    pool = torch.ops.aten.max_pool2d_with_indices
    if len(window[0]) == 2:
        results = pool(input, *window, ceil_mode)
        return results[0], results[1]
    in_2d = [(of_row, *numbers) for of_row, numbers in zip((1, 1, 0, 1), window, strict=True)]
    values, positions = pool(input.unsqueeze(-2), *in_2d, ceil_mode)
    return values.squeeze(-2), positions.squeeze(-2)


def _offsets(positions: Tensor, unpooling: _Unpooling) -> Tensor:
    """The offset of each position in its window."""
    # Half as wide numbers are divided in half the time.
    remaining = positions.int() if unpooling.plane < 2**31 else positions
    coordinates: list[Tensor] = []
    for size in reversed(unpooling.output_size[1:]):
        quotient = remaining.div(size, rounding_mode="trunc")
        coordinates.insert(0, remaining - quotient * size)
        remaining = quotient
    coordinates.insert(0, remaining)
    begins = _begins(unpooling, positions.shape[-unpooling.rank :], positions.device)
    places = [at - begin.to(at.dtype) for at, begin in zip(coordinates, begins, strict=True)]
    return _flat(places, unpooling.kernel_size)
