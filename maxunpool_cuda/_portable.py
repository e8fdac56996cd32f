# SPDX-License-Identifier: BSD-3-Clause
"""The operators in terms of PyTorch's own: exported programs take them in place of the operators.

Window offsets need no scatter. Cut the padded output into blocks of one stride: a window begins
with a block, and reaches ``ceil(kernel_size / stride)`` of them. So an output is a choice between
the few elements whose windows begin with its block, or so many blocks before it. All of that is
elementwise. Flat indices need a scatter.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops

Ints = Sequence[int]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """A table for :meth:`torch.export.ExportedProgram.run_decompositions`.

    The program it returns calls PyTorch's operators alone: it runs where this package is not
    installed, and in every runtime that takes exported programs. Its values are bit-equal to those
    of the operators, except that PyTorch adds up duplicates of flat indices in any order on CUDA.
    Results are contiguous, whatever the layout of the input.

    Pooling, and unpooling of uint8 indices, become elementwise operators. Unpooling of flat indices
    becomes a scatter and a gather, or a scatter that adds. PyTorch lacks these for float8,
    complex32, uint16, uint32 and uint64, and until 2.11 elementwise operators for the last three. A
    flat index outside the output is an error of that scatter. A value whose uint8 index names no
    output is lost without an error.

    Example:
        >>> import torch, maxunpool_cuda
        >>> pool = maxunpool_cuda.MaxPool2d(2, return_indices=True)
        >>> x = torch.rand(1, 3, 8, 8)
        >>> program = torch.export.export(pool, (x,))
        >>> portable = program.run_decompositions(maxunpool_cuda.decompositions())
        >>> "maxunpool_cuda" in str(program.graph), "maxunpool_cuda" in str(portable.graph)
        (True, False)
        >>> all(map(torch.equal, portable.module()(x), pool(x)))
        True
    """
    return {_ops.max_pool: max_pool, _ops.max_unpool: max_unpool, _ops.max_unpool_backward: taken}


def max_unpool(
    input: Tensor,
    indices: Tensor,
    output_size: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    reduce: str,
) -> Tensor:
    """The operator of this name, for arguments that it has checked."""
    dims, values = len(kernel_size), input
    if reduce == "sum" and input.dtype in (torch.float16, torch.bfloat16):
        values = input.float()
    if indices.dtype == torch.uint8:
        padded = _chosen(values, indices, kernel_size, stride, reduce)
        result = _resized(padded, [-p for p in padding], output_size)
    else:
        positions = indices.long().flatten(-dims)
        result = _scattered(values.flatten(-dims), positions, output_size, reduce)
    return result.to(input.dtype).contiguous()


def taken(grad_output: Tensor, indices: Tensor, *geometry: Any) -> Any:
    """The operator max_unpool_backward, as adaptive pooling calls it: it takes elements."""
    dims, reduce = len(geometry[0]), geometry[-1]
    if reduce != "sum" or indices.dtype == torch.uint8:
        return NotImplemented  # which leaves the operator in the graph
    planes, positions = grad_output.flatten(-dims), indices.long().flatten(-dims)
    return _gathered(planes, positions).reshape(indices.shape)


def max_pool(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The operator of this name, of arguments that it has checked."""
    dims = len(kernel_size)
    sizes = input.shape[-dims:]
    pooled, extent = [], []
    for n, k, s, p, d in zip(sizes, kernel_size, stride, padding, dilation, strict=True):
        reach = d * (k - 1)
        last: Any = (n + 2 * p - reach - 1 + (s - 1 if ceil_mode else 0)) // s
        if ceil_mode and p + s - 1 > reach:  # else every window begins before the input's end
            last = torch.sym_min(last, (n + p - 1) // s)
        pooled.append(last + 1)
        extent.append(last * s + reach + 1)
    real = input.dtype.is_floating_point
    lowest = -math.inf if real else torch.iinfo(input.dtype).min
    padded = _resized(input, padding, extent, lowest)
    values = input.new_full((*input.shape[:-dims], *pooled), lowest)
    # A window of lowest values alone has the index of its first cell that is not left of the input.
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
        return values.contiguous(), offsets.to(torch.uint8).contiguous()
    rest, positions, step = offsets.long(), torch.zeros_like(offsets, dtype=torch.int64), 1
    for axis in reversed(range(dims)):
        k, d = kernel_size[axis], dilation[axis]
        begin = _along(axis, dims, pooled[axis], input.device) * stride[axis] - padding[axis]
        positions, step = positions + (rest % k * d + begin) * step, step * sizes[axis]
        rest = rest.div(k, rounding_mode="floor")
    return values.contiguous(), positions.to(index_dtype).contiguous()


def _chosen(
    values: Tensor, offsets: Tensor, kernel_size: Ints, stride: Ints, reduce: str
) -> Tensor:
    """The padded output, of whole blocks, for window offsets."""
    dims, leading = len(kernel_size), values.dim() - len(kernel_size)
    reached = [-(-k // s) for k, s in zip(kernel_size, stride, strict=True)]  # blocks, by a window
    more = [n - 1 for n in reached]
    blocks = [n + m for n, m in zip(values.shape[leading:], more, strict=True)]
    around = [m for m in reversed(more) for _ in ("before", "after")]
    values = torch.constant_pad_nd(values, around)
    offsets = torch.constant_pad_nd(offsets.to(torch.int32), around, -1)
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    result = zero  # in blocks: (*leading, blocks, stride), with the last two for each axis
    for begin in itertools.product(*map(range, reached)):  # in row-major order of the elements
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
        if reduce == "last":
            result = torch.where(named, nearby[0], result)
        else:
            result = result + torch.where(named, nearby[0], zero)
    for axis in range(dims):
        result = result.flatten(-axis - 2, -axis - 1)
    return result


def _resized(tensor: Tensor, before: Ints, sizes: Ints, value: float = 0) -> Tensor:
    """With ``before`` places more before each spatial axis (negative: fewer), ``sizes`` in all.

    Places are cut off by slices: ONNX's evaluator refuses a Pad with negative numbers. Where the
    sizes are symbolic, nobody knows the sign of what to add at the end. There the tensor gets at
    least one place more than ``sizes``: of a slice up to the very end, tracing would note that the
    end is always the end.
    """
    leading = tensor.dim() - len(sizes)
    pads: list[Any] = []
    cuts: list[tuple[int, int, int]] = []  # an axis, where to begin, the new size
    axes = zip(before, sizes, tensor.shape[leading:], strict=True)
    for axis, (more, size, now) in reversed([*enumerate(axes, leading)]):
        after = size - now - more
        fixed = isinstance(after, int)
        pads += max(0, more), max(0, after) if fixed else torch.sym_max(0, after) + 1
        if more < 0 or not fixed or after < 0:
            cuts.append((axis, max(0, -more), size))
    if any(not isinstance(count, int) or count > 0 for count in pads):
        tensor = torch.constant_pad_nd(tensor, pads, value)
    for axis, begin, size in cuts:
        tensor = tensor.narrow(axis, begin, size)
    return tensor


def _along(axis: int, dims: int, count: int, device: torch.device) -> Tensor:
    """0, 1 ... along one of ``dims`` axes."""
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    return numbers.view([count if each == axis else 1 for each in range(dims)])


def _scattered(values: Tensor, positions: Tensor, output_size: Ints, reduce: str) -> Tensor:
    """The output for flat indices; values and positions are of flattened planes."""
    shape = (*values.shape[:-1], math.prod(output_size))
    if reduce == "last":
        # Of each output, the last element that names it, from 1: the same in any order of writing.
        order = torch.arange(1, positions.shape[-1] + 1, device=values.device).expand_as(positions)
        last = positions.new_zeros(shape).scatter_reduce(-1, positions, order, "amax")
        result = _gathered(torch.constant_pad_nd(values, [1, 0]), last)
    else:
        result = values.new_zeros(shape).scatter_add(-1, positions, values)
    return result.reshape(*values.shape[:-1], *output_size)


def _gathered(planes: Tensor, positions: Tensor) -> Tensor:
    """The elements of flattened planes at positions in these planes: ``planes.gather``.

    One row of all planes becomes ONNX's Gather. A gather of planes would become its GatherElements,
    of which ONNX's evaluator takes at most 64 elements a plane.
    """
    leading, size = planes.shape[:-1], planes.shape[-1]
    begins = torch.arange(math.prod(leading), device=planes.device).reshape(*leading, 1) * size
    row = planes.reshape(-1).index_select(0, (positions + begins).reshape(-1))
    return row.reshape(positions.shape)
