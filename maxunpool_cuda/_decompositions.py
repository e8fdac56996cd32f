# SPDX-License-Identifier: BSD-3-Clause
"""The operators in terms of PyTorch's own: exported programs take them in place of the operators.

The arguments of the three functions are those of the operators, which have checked them. The table
of them is ``decompositions()`` in export.py. The fallback computes with some of them, too.

Converters know few of PyTorch's operators. OpenVINO and CoreML take no ``scatter_reduce`` from an
exported program. CoreML makes floating-point numbers of integers that are divided, and has tensors
of at most five axes. So here are slices, comparisons, ``where``, ``stack`` and tables. ExecuTorch
makes int64 of an int32 tensor of no axes beside a number. So a tensor of one element has an axis.

Pooling compares, for all windows at once, their first elements, then their second ones, and so on:
first along the last axis, then along the one before it. For windows of 2 with stride 2 these are
``x[..., 0::2]`` and ``x[..., 1::2]``.

Unpooling of flat indices is a scatter, if nobody knows which window they come from. If a pool in
the same graph has made them, its window offsets take their place. Unpooling of window offsets needs
no scatter. Cut the padded output into blocks of one stride. Each window begins with a block, and
reaches ``ceil(kernel_size / stride)`` blocks. So each output is in the windows that begin with its
own block, or one before it, and so on, and it takes the value of the window whose offset leads to
it. For windows of 3 with stride 2 (blocks of 2; window w begins with block w, and reaches two):

    block b                     0    | 1    | 2    | 3
    output                      0  1 | 2  3 | 4  5 | 6  7
    its offset in window b      0  1 | 0  1 | 0  1 | 0  1
    its offset in window b - 1       | 2  - | 2  - | 2  -    (a window has only three elements)

So output 2 gets the value of window 1 if that has the offset 0, and of window 0 if that has 2. The
outputs at the same place of all blocks (0, 2, 4, 6, and 1, 3, 5, 7) are computed at once, and then
interleaved.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Ints = Sequence[int]


def max_unpool(
    input: Tensor,
    indices: Tensor,
    output_size: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    reduce: str,
) -> Tensor:
    """The operator of this name."""
    dims = len(kernel_size)
    values = input
    if reduce == "sum" and input.dtype in (torch.float16, torch.bfloat16):
        values = input.float()  # so that a sum is rounded once
    unpooling = (output_size, kernel_size, stride, padding)
    origin: _Origin | None = getattr(indices, _ORIGIN, None)
    if indices.dtype == torch.uint8:
        result = unpool_window_offsets(values, indices, *unpooling, reduce)
    elif origin is not None and origin.fits(*unpooling):
        result = unpool_window_offsets(values, origin.offsets, *unpooling, reduce)
    else:
        positions = indices.long().flatten(-dims)
        result = unpool_positions(values.flatten(-dims), positions, output_size, reduce)
    return result.to(input.dtype).contiguous()


def max_unpool_backward(grad_output: Tensor, indices: Tensor, *geometry: Any) -> Any:
    """The operator of this name, for flat indices and "sum", as adaptive pooling calls it.

    Other calls are NotImplemented, which leaves the operator in the graph. A symbolic kernel_size
    is of adaptive windows, which change with the sizes of the input.
    """
    output_size, kernel_size, *_, reduce = geometry
    if reduce != "sum" or indices.dtype == torch.uint8:
        return NotImplemented
    if any(isinstance(size, torch.SymInt) for size in kernel_size):
        warnings.warn(
            "adaptive max pooling: this program is right for all its spatial sizes in PyTorch, but "
            "torch.onnx.export writes the windows of the example's sizes; fix them for ONNX",
            stacklevel=2,
        )
    dims = len(output_size)
    planes = grad_output.flatten(-dims)
    positions = indices.long().flatten(-dims)
    return _gather(planes, positions).reshape(indices.shape)


class Axis(NamedTuple):
    """Pooling along one spatial axis."""

    size: Any  # of the input; symbolic under tracing, as the next two may be
    pooled: Any  # the number of windows
    extent: Any  # from the start of the first window to the end of the last one
    kernel: int
    stride: int
    padding: int
    dilation: int


def max_pool(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The operator of this name."""
    dims = len(kernel_size)
    window = zip(input.shape[-dims:], kernel_size, stride, padding, dilation, strict=True)
    axes = [pooled_axis(*numbers, ceil_mode=ceil_mode) for numbers in window]
    lowest = -math.inf if input.dtype.is_floating_point else torch.iinfo(input.dtype).min
    padded = _resize(input, padding, [axis.extent for axis in axes], lowest)
    zero = torch.full((1,), 0, dtype=torch.int32, device=input.device)
    best = _Best(padded, zero)
    # Of a window in which nothing is larger than the lowest value, the first element in the input.
    first = _Best(padded.new_full((1,), lowest), zero)
    step = 1  # between the offsets of neighbours along the axis
    for number, axis in reversed([*enumerate(axes)]):
        if axis.padding > 0:
            before = _elements_before(axis, number, dims, zero)
            first = first._replace(offsets=first.offsets + before * step)
        best = _pool_along(best, first, axis, number - dims, step)
        step *= axis.kernel
    values, offsets = best.values.contiguous(), best.offsets.expand(best.values.shape)
    if math.prod(kernel_size) == 1:
        values = values.clone()  # no result may be a view of the input
    if index_dtype == torch.uint8:
        return values, offsets.to(torch.uint8).contiguous()
    indices = _positions_of(offsets, axes).to(index_dtype).contiguous()
    if torch.compiler.is_compiling():  # a graph, in which no tensor changes in place
        setattr(indices, _ORIGIN, _Origin(axes, offsets))
    return values, indices


class _Origin(NamedTuple):
    """The pooling that flat indices come from."""

    axes: list[Axis]
    offsets: Tensor  # of the same elements, in their windows

    def fits(self, output_size: Ints, kernel_size: Ints, stride: Ints, padding: Ints) -> bool:
        """Whether an unpooling puts values back into the windows that were pooled, of this plane.

        Then it may take the offsets, if its graph does not get too large.
        """
        if math.prod(kernel_size) > MOST_ELEMENTS:
            return False
        pairs = []
        sizes = zip(self.axes, output_size, kernel_size, stride, padding, strict=True)
        for axis, size, kernel, step, pad in sizes:
            pairs += [(axis.size, size), (axis.kernel, kernel), (axis.dilation, 1)]
            pairs += [(axis.stride, step), (axis.padding, pad)]
        # An import at the top would import SymPy.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return all(statically_known_true(pooled == unpooled) for pooled, unpooled in pairs)


_ORIGIN = "_maxunpool_cuda_origin"  # an attribute of flat indices in a graph that is decomposed
# Of a window whose flat indices are unpooled as offsets. Each has two nodes of the graph.
MOST_ELEMENTS = 64


class _Best(NamedTuple):
    """The largest element of each window, among those along the axes that are pooled so far."""

    values: Tensor
    # int32, in the part of the window along these axes: of each, or one element that all share. The
    # latter has one axis. Values have more: a channel's and a spatial one.
    offsets: Tensor


def _pool_along(best: _Best, first: _Best, axis: Axis, dim: int, step: int) -> _Best:
    """The largest elements along one more axis: rows of a window are pooled before its columns.

    Args:
        best: along the axes behind this one.
        first: what stays where nothing is larger.
        axis: to be pooled.
        dim: its dimension, counted from the last one: -1 is the last.
        step: between the offsets of neighbours along it.
    """
    result = first
    for element in range(axis.kernel):
        # This element of all windows.
        place = (..., _elements(axis, element), *[slice(None)] * (-dim - 1))
        values, offsets = best.values[place], best.offsets
        offsets = (offsets if offsets.dim() == 1 else offsets[place]) + element * step
        if element == 0 and axis.padding == 0:  # then every window begins in the input
            result = _Best(values, offsets)
            continue
        is_better = values > result.values
        if values.dtype.is_floating_point:
            is_better = torch.logical_or(is_better, values != values)  # NaN wins
        result = _Best(
            torch.where(is_better, values, result.values),
            torch.where(is_better, offsets, result.offsets),
        )
    return result


def pooled_axis(
    size: Any, kernel: int, stride: int, padding: int, dilation: int, *, ceil_mode: bool
) -> Axis:
    """The axis with its number of windows, as torch.nn counts them."""
    reach = dilation * (kernel - 1)  # from a window's first element to its last one
    rounding = stride - 1 if ceil_mode else 0
    last: Any = (size + 2 * padding - reach - 1 + rounding) // stride  # number of the last window
    # It must begin before the padding behind the input. It always does if the condition is false.
    if ceil_mode and padding + stride - 1 > reach:
        last = torch.sym_min(last, (size + padding - 1) // stride)
    extent = last * stride + reach + 1
    return Axis(size, last + 1, extent, kernel, stride, padding, dilation)


def _elements(axis: Axis, element: int) -> Any:
    """The slice of the padded input that has this element of all windows."""
    first = element * axis.dilation
    return slice(first, first + (axis.pooled - 1) * axis.stride + 1, axis.stride)


def _elements_before(axis: Axis, number: int, dims: int, zero: Tensor) -> Tensor:
    """How many elements each window has before the input, along the axis of this number.

    ``zero`` has their dtype and device.
    """
    # Later windows begin in the input, as this one does: int32 may not hold where. (A minimum,
    # written with the maximum that ONNX's runtimes have.)
    last = axis.padding // axis.stride + 1
    windows = arange_along(number, dims, axis.pooled, zero.device)
    windows = last - torch.maximum(last - windows, zero)
    begins = windows * axis.stride - axis.padding
    elements_before = torch.maximum(axis.dilation - 1 - begins, zero)
    # CoreML makes floating-point numbers of a quotient, and has no dilation.
    return elements_before if axis.dilation == 1 else elements_before // axis.dilation


def _positions_of(offsets: Tensor, axes: list[Axis]) -> Tensor:
    """Flat positions in the input plane for the offsets in each window."""
    sizes = [axis.size for axis in axes]
    begins, places = [], []
    for axis in axes:
        windows = torch.arange(axis.pooled, device=offsets.device)
        begins.append(windows * axis.stride - axis.padding)
        places.append(torch.arange(axis.kernel, device=offsets.device) * axis.dilation)
    # A position is that where the window begins, and a step that depends on the offset alone. A
    # table has it, as a division may become one of floating-point numbers.
    steps = all_positions(places, sizes).index_select(0, offsets.flatten())
    pooled = [axis.pooled for axis in axes]
    return all_positions(begins, sizes).view(pooled) + steps.view(offsets.shape)


def all_positions(coordinates: Sequence[Tensor], sizes: Ints) -> Tensor:
    """Flat positions in a plane, for all combinations of coordinates along its axes.

    For the coordinates [0, 1] and [0, 2] in a plane of 4x4 these are [0, 2, 4, 6].
    """
    positions = coordinates[0]
    for along, size in zip(coordinates[1:], sizes[1:], strict=True):
        positions = (positions.unsqueeze(-1) * size + along).flatten()
    return positions


def unpool_window_offsets(
    values: Tensor,
    offsets: Tensor,
    output_size: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    reduce: str,
) -> Tensor:
    """The output for window offsets."""
    padded = _unpool_blocks(values, offsets, kernel_size, stride, reduce)
    return _resize(padded, [-pad for pad in padding], output_size)


def _unpool_blocks(
    values: Tensor, offsets: Tensor, kernel_size: Ints, stride: Ints, reduce: str
) -> Tensor:
    """The padded output, of whole blocks, for window offsets. The head of this file explains it."""
    dims = len(kernel_size)
    leading = values.shape[:-dims]
    # One axis of all planes: CoreML has five axes at most, and interleaving adds one.
    values, offsets = values.flatten(0, -dims - 1), offsets.flatten(0, -dims - 1).to(torch.int32)
    reaches = _reaches(kernel_size, stride)
    if max(reaches) > 1:
        # Blocks near the ends lack some windows: before and behind are windows that hold nothing.
        around = [reach - 1 for reach in reversed(reaches) for _ in ("before", "behind")]
        values = torch.constant_pad_nd(values, around)
        offsets = torch.constant_pad_nd(offsets, around, -1)
    windows = [
        _Windows(before, *(_shifted(before, reaches, each) for each in (values, offsets)))
        for before in itertools.product(*[range(reach - 1, -1, -1) for reach in reaches])
    ]
    places = [min(kernel, step) for kernel, step in zip(kernel_size, stride, strict=True)]
    outputs = [
        _unpool_place(windows, place, kernel_size, stride, reduce)
        for place in itertools.product(*map(range, places))
    ]
    output = _interleave(outputs, places, stride)
    return output.reshape(*leading, *output.shape[1:])


def _reaches(kernel_size: Ints, stride: Ints) -> list[int]:
    """How many blocks of a stride a window reaches along each axis, the last one maybe in part."""
    return [-(-kernel // step) for kernel, step in zip(kernel_size, stride, strict=True)]


class _Windows(NamedTuple):
    """For each block, the window that begins so many blocks before it, along each axis."""

    blocks_before: tuple[int, ...]
    values: Tensor
    offsets: Tensor


def _shifted(blocks_before: Ints, reaches: Ints, padded: Tensor) -> Tensor:
    """For each block, what the window holds that begins so many blocks before it."""
    for dim, (blocks, reach) in enumerate(zip(blocks_before, reaches, strict=True), 1):
        if reach > 1:
            padded = padded.narrow(dim, reach - 1 - blocks, padded.shape[dim] - (reach - 1))
    return padded


def _unpool_place(
    windows: list[_Windows], place: Ints, kernel_size: Ints, stride: Ints, reduce: str
) -> Tensor:
    """The outputs at one place of all blocks. The windows are in row-major order."""
    zero = torch.full((1,), 0, dtype=windows[0].values.dtype, device=windows[0].values.device)
    result = zero
    for blocks_before, values, offsets in windows:
        element = [n + b * step for n, b, step in zip(place, blocks_before, stride, strict=True)]
        if any(e >= kernel for e, kernel in zip(element, kernel_size, strict=True)):
            continue  # the windows end before this place
        offset = 0
        for e, kernel in zip(element, kernel_size, strict=True):
            offset = offset * kernel + e
        if reduce == "last":
            result = torch.where(offsets == offset, values, result)
        else:
            result = result + torch.where(offsets == offset, values, zero)
    return result


def _interleave(parts: list[Tensor], places: Ints, stride: Ints) -> Tensor:
    """Blocks from the outputs at each of their places, in row-major order; zeros at the others.

    Places 0 and 1 of blocks of three: [a, b] and [c, d] become [a, c, 0, b, d, 0].
    """
    for dim, (count, step) in enumerate(reversed([*zip(places, stride, strict=True)]), 1):
        stacked = [torch.stack(parts[n : n + count], -dim) for n in range(0, len(parts), count)]
        if step > count:
            behind = [0, 0] * (dim - 1) + [0, step - count]
            stacked = [torch.constant_pad_nd(tensor, behind) for tensor in stacked]
        parts = [tensor.flatten(-dim - 1, -dim) for tensor in stacked]
    (output,) = parts
    return output


def _resize(tensor: Tensor, before: Ints, sizes: Ints, value: float = 0) -> Tensor:
    """The tensor with ``before`` more elements before each spatial axis, and ``sizes`` in all.

    The new elements have this value. Negative numbers cut elements off, by slices: ONNX's evaluator
    refuses a Pad with negative numbers. Where the sizes are symbolic, nobody knows the sign of what
    to add at the end. There the tensor gets at least one element more than ``sizes``, and is cut:
    of a slice up to the very end, tracing would note that the end is always the end.
    """
    leading = tensor.dim() - len(sizes)
    pads: list[Any] = []
    cuts: list[tuple[int, int, int]] = []  # an axis, where to begin, the new size
    axes = zip(before, sizes, tensor.shape[leading:], strict=True)
    for dim, (added, size, present) in reversed([*enumerate(axes, leading)]):
        behind = size - present - added
        is_known = isinstance(behind, int)
        pads += [max(0, added), max(0, behind) if is_known else torch.sym_max(0, behind) + 1]
        if added < 0 or not is_known or behind < 0:
            cuts.append((dim, max(0, -added), size))
    if any(not isinstance(count, int) or count > 0 for count in pads):
        tensor = torch.constant_pad_nd(tensor, pads, value)
    for dim, begin, size in cuts:
        tensor = tensor.narrow(dim, begin, size)
    return tensor


def arange_along(number: int, dims: int, count: int, device: torch.device) -> Tensor:
    """0, 1 ... ``count`` - 1 along one of ``dims`` axes; the others have the size 1."""
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    return numbers.view([count if each == number else 1 for each in range(dims)])


def unpool_positions(values: Tensor, positions: Tensor, output_size: Ints, reduce: str) -> Tensor:
    """The output for flat indices; values and positions are of flattened planes."""
    shape = (*values.shape[:-1], math.prod(output_size))
    if reduce == "last":
        # For each output the largest number, from 1, of the elements that lead to it. This is the
        # same in any order of writing. An output with 0 takes the zero before all values.
        numbers = torch.arange(1, positions.shape[-1] + 1, device=values.device)
        numbers = numbers.expand_as(positions)
        last = positions.new_zeros(shape).scatter_reduce(-1, positions, numbers, "amax")
        result = _gather(torch.constant_pad_nd(values, [1, 0]), last)
    else:
        result = values.new_zeros(shape).scatter_add(-1, positions, values)
    return result.reshape(*values.shape[:-1], *output_size)


def _gather(planes: Tensor, positions: Tensor) -> Tensor:
    """The elements of flattened planes at positions in these planes: ``planes.gather``.

    One row of all planes becomes ONNX's Gather. A gather of planes would become its GatherElements,
    of which ONNX's evaluator takes at most 64 elements a plane.
    """
    leading, size = planes.shape[:-1], planes.shape[-1]
    begins = torch.arange(math.prod(leading), device=planes.device).reshape(*leading, 1) * size
    row = planes.reshape(-1).index_select(0, (positions + begins).reshape(-1))
    return row.reshape(positions.shape)
