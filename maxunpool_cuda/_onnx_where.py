"""The portable form (see :mod:`._portable`) in ONNX: no MaxUnpool, no indices of MaxPool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._onnx_writer import Writer

_END = 2**31 - 1  # of a Slice: as far as there is


def max_pool(
    input: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    index_dtype: int,
) -> Any:
    """The translation of the operator."""
    to = Writer("max_pool", input, len(kernel_size))
    window = (kernel_size, stride, padding, dilation)
    taken, values, _ = to.pooled(input, *window, ceil_mode)
    compared, dtype = taken, to.computed(input)
    if dtype in (to.types.INT8, to.types.UINT8):  # which not every runtime pads
        dtype = to.types.FLOAT
        compared = to.op.Cast(taken, to=dtype)
    indices = _offsets(to, compared, dtype, values, *window)
    if index_dtype != to.types.UINT8:
        sizes = [to.size(taken, axis) for axis in to.axes]
        begins = [to.row(values, 2 + d, -padding[d], stride[d]) for d in range(to.dims)]
        indices = to.moved(indices, kernel_size, sizes, begins, dilation)
    return to.given(values, input.dtype), to.given(indices, index_dtype)


def _offsets(
    to: Writer,
    compared: Any,
    dtype: Any,
    values: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Any:
    """int64 offsets in its window of the first largest element, for the pooled ``values``."""
    op, axes = to.op, to.axes
    after = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
    padded = op.Pad(compared, [0, 0, *padding, 0, 0, *after], to.number(-math.inf, dtype))
    last = [(to.size(values, axis) - 1) * s for axis, s in zip(axes, stride, strict=True)]
    elements = []
    for element in itertools.product(*map(range, kernel_size)):
        begins = [i * d for i, d in zip(element, dilation, strict=True)]
        ends = [n + (i + 1) for n, i in zip(last, begins, strict=True)]
        window = op.Slice(padded, begins, ends, axes, list(stride))
        elements.append(op.Unsqueeze(window, [2 + to.dims]))
    return op.ArgMax(op.Concat(*elements, axis=-1), axis=-1, keepdims=0)


def max_unpool(
    input: Any,
    indices: Any,
    output_size: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    reduce: str,
) -> Any:
    """The translation of the operator."""
    to = Writer("max_unpool", input, len(kernel_size))
    op, axes = to.op, to.axes
    flat = indices.dtype != to.types.UINT8
    if flat and reduce != "last":
        raise ValueError(
            f"{to.name}: expected reduce='last' of flat indices for ONNX but got {reduce!r} "
            "(uint8 indices, which are window offsets, can be reduced)"
        )
    values = to.taken(input, "FLOAT", "FLOAT16", "DOUBLE")
    dtype, number = to.computed(input), to.types.FLOAT
    if reduce != "last" and dtype == to.types.FLOAT16:
        dtype = number
        values = op.Cast(values, to=dtype)
    # What an element names is a number of its window: its offset there or, for flat indices, its
    # distance from where the window begins in the plane.
    sizes = output_size if flat else kernel_size
    units: list[Any] = [math.prod(sizes[d + 1 :]) for d in range(to.dims)]
    extent = sum((k - 1) * unit for k, unit in zip(kernel_size, units, strict=True))
    if isinstance(extent, int) and extent >= 2**24:  # which FLOAT does not count one by one
        raise ValueError(
            f"{to.name}: expected windows that span fewer than 2^24 positions of the plane for "
            f"ONNX but got output_size={list(output_size)}, kernel_size={list(kernel_size)}"
        )
    names = to.taken(indices)
    if flat:
        names = op.Cast(names, to=to.types.INT64)
        for axis, unit, p, s in zip(axes, units, padding, stride, strict=True):
            names = op.Sub(names, to.row(values, axis, -p * unit, s * unit))
    names = op.Cast(names, to=number)  # the type that every runtime pads and compares
    more = [(k - 1) // s for k, s in zip(kernel_size, stride, strict=True)]
    blocks = [to.size(values, axis) + m for axis, m in zip(axes, more, strict=True)]
    zero, one = to.number(0, dtype), to.number(1, dtype)
    # Rows are as long as the output's, for runtimes are slow where a short axis broadcasts. Along
    # the other axes, `between` is where the outputs of a block go.
    between = [axis + 1 + i for i, axis in enumerate(axes[:-1])]
    nearby = []
    for tensor, nothing in ((values, zero), (names, to.number(-1, number))):
        padded = op.Pad(tensor, [0, 0, *more] * 2, nothing) if any(more) else tensor
        repeated = op.Expand(op.Unsqueeze(padded, [-1]), [1] * (2 + to.dims) + [stride[-1]])
        nearby.append(op.Reshape(repeated, [0] * (1 + to.dims) + [-1]))
    result, counts = zero, zero
    for begin in itertools.product(*(range(n + 1) for n in more)):
        begins = [*begin[:-1], begin[-1] * stride[-1]]
        ends = [first - m or _END for first, m in zip(begin, more, strict=True)]
        ends[-1] = (begin[-1] - more[-1]) * stride[-1] or _END
        value, name = (
            op.Unsqueeze(sliced, between) if between else sliced
            for sliced in (op.Slice(tensor, begins, ends, axes) for tensor in nearby)
        )
        back = [m - first for m, first in zip(more, begin, strict=True)]
        named = op.Equal(name, _cells(to, back, blocks[-1], kernel_size, stride, units))
        if reduce == "last":
            result = op.Where(named, value, result)
        else:
            result = op.Add(result, op.Where(named, value, zero))
            counts = op.Add(counts, op.Where(named, one, zero))
    if reduce == "mean":
        result = op.Div(result, op.Max(counts, one))
    joined = [n * s for n, s in zip(blocks, stride, strict=True)]
    result = op.Reshape(result, [to.size(values, 0), to.size(values, 1), *joined])
    behind = []
    for d, (size, s, p) in enumerate(zip(output_size, stride, padding, strict=True)):
        pooled = input.shape[len(input.shape) - to.dims + d]
        known = isinstance(pooled, int) and isinstance(size, int)
        # An output within a stride of the default ends at most so much behind the blocks.
        behind.append(max(0, size + p - (pooled + more[d]) * s) if known else max(s, p))
    if any(behind):
        result = op.Pad(result, [0] * (4 + to.dims) + behind, zero)
    ends = [size + p for size, p in zip(output_size, padding, strict=True)]
    result = op.Slice(result, list(padding), ends, axes)
    return to.given(result, input.dtype)


def _cells(
    to: Writer,
    back: Sequence[int],
    blocks: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    units: Sequence[Any],
) -> Any:
    """The numbers of a block's outputs in a window that began ``back`` blocks before it.

    ``units``: the number's step along each axis. In rows of ``blocks``.
    """
    cells = None
    for d, (n, k, s, unit) in enumerate(zip(back, kernel_size, stride, units, strict=True)):
        at = np.arange(n * s, n * s + s, dtype=np.float32)
        at[at >= k] = -(2.0**30)  # in no window, and nothing's number
        if isinstance(unit, int):
            at, unit = at * np.float32(unit), None
        behind = max(0, 2 * (to.dims - d) - 3)  # axes
        row = to.op.Constant(value=to.tensor(at.reshape([-1] + [1] * behind)))
        if unit is not None:
            row = row * to.op.Cast(unit, to=to.types.FLOAT)
        if d == to.dims - 1:
            row = to.op.Tile(row, [blocks])
        cells = row if cells is None else cells + row
    return cells
