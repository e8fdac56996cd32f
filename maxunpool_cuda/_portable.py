"""The operators in terms of PyTorch's own, for every device, rank and dtype.

Each function takes what the operator of its name takes, already checked, and returns its results.
Their strides are whatever PyTorch's operators make of them.

Window offsets need no scatter. Cut the padded output into blocks of one stride: a window begins
with a block, and reaches ``ceil(kernel_size / stride)`` of them. So an output is a choice between
the few elements whose windows begin with its block, or so many blocks before it. All of that is
elementwise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

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
    """The operator. A bad window offset names no output; a bad flat index is the scatter's."""
    values = _movable(input) if reduce == "last" else _summable(input)
    if indices.dtype == torch.uint8:
        result = _chosen(values, indices, kernel_size, stride, reduce)
        result = _resized(result, [-p for p in padding], output_size)
    else:
        positions = indices.long().flatten(-len(kernel_size))
        result = _scattered(values.flatten(-len(kernel_size)), positions, output_size, reduce)
    return _of_dtype(result, input.dtype)


def max_unpool_backward(
    grad_output: Tensor,
    indices: Tensor,
    output_size: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    reduce: str,
) -> Tensor:
    """The operator. A bad index is the gather's."""
    dims = len(kernel_size)
    pooled, plane = indices.shape[-dims:], math.prod(output_size)
    offsets = indices.dtype == torch.uint8
    if offsets:
        positions, _ = positions_of(indices, output_size, kernel_size, stride, padding)
    else:
        positions = indices.long()
    flat = positions.flatten(-dims)
    values = _summable(grad_output) if reduce == "mean" else _movable(grad_output)
    result = values.flatten(-dims).gather(-1, flat).reshape(indices.shape)
    if reduce == "last" and offsets:
        lost = torch.zeros_like(positions, dtype=torch.bool)
        for distance in _neighbors(pooled, kernel_size, stride):
            if distance > (0,) * dims:
                lost = lost | (_moved(positions, distance) == positions)
        result = torch.where(lost, 0, result)
    elif reduce == "last":
        order = torch.arange(1, flat.shape[-1] + 1, device=flat.device)
        kept = _last(flat, plane).gather(-1, flat) == order
        result = torch.where(kept.reshape(indices.shape), result, 0)
    elif reduce == "mean" and offsets:
        counts = torch.zeros_like(positions, dtype=torch.int32)
        for distance in _neighbors(pooled, kernel_size, stride):
            counts = counts + (_moved(positions, distance) == positions)
        result = _divided(result, counts)
    elif reduce == "mean":
        counts = _counts(flat, plane).gather(-1, flat)
        result = _divided(result, counts.reshape(indices.shape))
    return _of_dtype(result, grad_output.dtype)


def max_pool(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The operator."""
    dims = len(kernel_size)
    sizes = input.shape[-dims:]
    pooled, extent = [], []
    for n, k, s, p, d in zip(sizes, kernel_size, stride, padding, dilation, strict=True):
        last = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s
        pooled.append((min(last, (n + p - 1) // s) if ceil_mode else last) + 1)
        extent.append((pooled[-1] - 1) * s + d * (k - 1) + 1)
    real = input.dtype.is_floating_point
    lowest = -math.inf if real else torch.iinfo(input.dtype).min
    padded = _resized(input, padding, extent, lowest)
    values = input.new_full((*input.shape[:-dims], *pooled), lowest)
    # Where no element is taken, as none is above the lowest: the first that is not left of the
    # input.
    offsets = torch.zeros(pooled, dtype=torch.int32, device=input.device)
    for axis, (k, s, p, d) in enumerate(zip(kernel_size, stride, padding, dilation, strict=True)):
        left = p - _along(axis, dims, pooled[axis], input.device) * s
        offsets = offsets * k + (left + d - 1).clamp(min=0).div(d, rounding_mode="floor")
    for offset, element in enumerate(itertools.product(*map(range, kernel_size))):
        axes = zip(element, pooled, stride, dilation, strict=True)
        window: Any = (slice(i * d, i * d + (n - 1) * s + 1, s) for i, n, s, d in axes)
        value = padded[(..., *window)]
        taken = (value > values) | value.isnan() if real else value > values
        values = torch.where(taken, value, values)
        offsets = torch.where(taken, offset, offsets)
    if index_dtype == torch.uint8:
        return values, offsets.to(torch.uint8)
    positions, _ = positions_of(offsets, sizes, kernel_size, stride, padding, dilation)
    return values, positions.to(index_dtype)


def laid_out_as(like: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides of ``like``, which need not be computed where this is traced."""
    shape, stride = like.shape, like.stride()
    if result.stride() == stride:
        return result
    laid_out = torch.empty_strided(shape, stride, dtype=result.dtype, device=result.device)
    return laid_out.copy_(result)


def positions_of(
    offsets: Tensor,
    sizes: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """Flat int64 positions that window offsets name in a plane of ``sizes``; if they lie in it."""
    dims = len(kernel_size)
    rest = offsets.long()
    positions, step = torch.zeros_like(rest), 1
    inside = rest < math.prod(kernel_size)
    for axis in reversed(range(dims)):
        begin = _along(axis, dims, offsets.shape[axis - dims], rest.device) * stride[axis]
        at = rest % kernel_size[axis] * (dilation[axis] if dilation else 1) + begin - padding[axis]
        inside = inside & (at >= 0) & (at < sizes[axis])
        positions, step = positions + at * step, step * sizes[axis]
        rest = rest.div(kernel_size[axis], rounding_mode="floor")
    return positions, inside


def _chosen(
    values: Tensor, offsets: Tensor, kernel_size: Ints, stride: Ints, reduce: str
) -> Tensor:
    """The padded output, of whole blocks, for window offsets."""
    result = torch.zeros((), dtype=values.dtype, device=values.device)
    counts = torch.zeros((), dtype=torch.int32, device=values.device)
    for named, value in _candidates(values, offsets, kernel_size, stride):
        if reduce == "last":
            result = torch.where(named, value, result)
        else:
            result = result + torch.where(named, value, 0)
            counts = counts + named
    result = _divided(result, counts) if reduce == "mean" else result
    for axis in range(len(kernel_size)):
        result = result.flatten(-axis - 2, -axis - 1)
    return result


def _candidates(
    values: Tensor, offsets: Tensor, kernel_size: Ints, stride: Ints
) -> Iterator[tuple[Tensor, Tensor]]:
    """Elements that may name the outputs, in row-major order: whether they do, and their values.

    Both are of a shape that broadcasts to that of the padded output in blocks, ``(*leading,
    blocks, stride)``, with the last two once for each axis.
    """
    dims = len(kernel_size)
    leading = values.dim() - dims
    reached = [-(-k // s) for k, s in zip(kernel_size, stride, strict=True)]  # blocks, by a window
    more = [n - 1 for n in reached]
    blocks = [n + m for n, m in zip(values.shape[leading:], more, strict=True)]
    around = [n + m for n, m in zip(blocks, more, strict=True)]
    values = _resized(values, more, around)
    offsets = _resized(offsets.to(torch.int32), more, around, -1)
    for begin in itertools.product(*map(range, reached)):
        # The windows begin `back` blocks before the output.
        cells = torch.zeros((), dtype=torch.int32, device=values.device)
        bounds = []  # of the windows, where they end within a block
        nearby = [values, offsets]
        for axis, (first, m, k, s) in enumerate(zip(begin, more, kernel_size, stride, strict=True)):
            dim, back = leading + 2 * axis, m - first
            at = _along(2 * axis + 1, 2 * dims, s, values.device) + back * s
            cells = cells * k + at
            bounds += [at < k] if (back + 1) * s > k else []
            nearby = [each.narrow(dim, first, blocks[axis]).unsqueeze(dim + 1) for each in nearby]
        named = functools.reduce(torch.logical_and, bounds, nearby[1] == cells)
        yield named, nearby[0]


def _neighbors(pooled: Ints, kernel_size: Ints, stride: Ints) -> Iterator[tuple[int, ...]]:
    """Distances between two windows that may share positions, in elements along each axis."""
    axes = zip(pooled, kernel_size, stride, strict=True)
    reached = (min(count - 1, (k - 1) // s) for count, k, s in axes)
    return itertools.product(*(range(-n, n + 1) for n in reached))


def _moved(positions: Tensor, distance: tuple[int, ...]) -> Tensor:
    """At each place what is so far behind it; -1 where nothing is."""
    return _resized(positions, [-n for n in distance], positions.shape[-len(distance) :], -1)


def _resized(tensor: Tensor, before: Ints, sizes: Ints, value: float = 0) -> Tensor:
    """With ``before`` places more before each spatial axis (negative: fewer), ``sizes`` in all."""
    pads: list[int] = []
    axes = zip(before, sizes, tensor.shape[tensor.dim() - len(sizes) :], strict=True)
    for more, size, now in reversed(list(axes)):
        pads += more, size - now - more
    return torch.constant_pad_nd(tensor, pads, value)


def _along(axis: int, dims: int, count: int, device: torch.device) -> Tensor:
    """0, 1 ... along one of ``dims`` axes."""
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    return numbers.view([count if each == axis else 1 for each in range(dims)])


def _scattered(values: Tensor, positions: Tensor, output_size: Ints, reduce: str) -> Tensor:
    """The output for flat indices; values and positions are of flattened planes."""
    plane = math.prod(output_size)
    if reduce == "last":
        last = _last(positions, plane)
        result = torch.where(last > 0, values.gather(-1, (last - 1).clamp(min=0)), 0)
    else:
        result = values.new_zeros(*values.shape[:-1], plane).scatter_add(-1, positions, values)
        result = _divided(result, _counts(positions, plane)) if reduce == "mean" else result
    return result.reshape(*values.shape[:-1], *output_size)


def _last(positions: Tensor, plane: int) -> Tensor:
    """Of each position in the plane, the last element that names it, from 1; 0: none does.

    The largest, which is the same in whatever order a device takes them.
    """
    order = torch.arange(1, positions.shape[-1] + 1, device=positions.device)
    last = positions.new_zeros(*positions.shape[:-1], plane)
    return last.scatter_reduce(-1, positions, order.expand_as(positions), "amax")


def _counts(positions: Tensor, plane: int) -> Tensor:
    """Of each position in the plane, how many elements name it."""
    counts = positions.new_zeros(*positions.shape[:-1], plane)
    return counts.scatter_add(-1, positions, torch.ones_like(positions))


def _divided(sums: Tensor, counts: Tensor) -> Tensor:
    """Means; integers round toward minus infinity."""
    counts = counts.clamp(min=1)
    if sums.is_complex():
        return torch.view_as_complex(torch.view_as_real(sums) / counts.unsqueeze(-1))
    return sums / counts if sums.is_floating_point() else sums.div(counts, rounding_mode="floor")


def _summable(tensor: Tensor) -> Tensor:
    """In the type that sums are taken in."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.long()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCARCE = (torch.complex32, torch.uint16, torch.uint32, torch.uint64)


def _movable(tensor: Tensor) -> Tensor:
    """In a type of the same size that PyTorch's operators move on every device."""
    scarce = tensor.dtype in _SCARCE or tensor.dtype.itemsize == 1
    return tensor.view(_BITS[tensor.dtype.itemsize]) if scarce else tensor


def _of_dtype(result: Tensor, dtype: torch.dtype) -> Tensor:
    """What _movable and _summable made of a tensor, as a tensor of its own dtype."""
    moved = dtype in _SCARCE or dtype.itemsize == 1
    same_size = result.dtype.itemsize == dtype.itemsize
    return result.view(dtype) if moved and same_size else result.to(dtype)
