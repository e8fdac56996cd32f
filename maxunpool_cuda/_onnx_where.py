"""The portable form (see :mod:`._portable`) in ONNX: no MaxUnpool, no indices of MaxPool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._onnx_writer import Writer

_END = 2**31 - 1  # of a Slice: as far as there is


def window_offsets(
    to: Writer,
    input: Any,
    values: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Any:
    """int64 offsets in its window of the first largest element, for the pooled ``values``."""
    op, axes = to.op, to.axes
    small = input.dtype in (to.types.INT8, to.types.UINT8)
    taken = to.taken(input)
    taken = op.Cast(taken, to=to.types.FLOAT) if small or to.narrow(input) else taken
    after = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
    lowest = to.number(-math.inf, to.types.FLOAT if small else to.computed(input))
    padded = op.Pad(taken, [0, 0, *padding, 0, 0, *after], lowest)
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
    dtype = to.computed(input)
    if reduce != "last" and dtype == to.types.FLOAT16:
        dtype = to.types.FLOAT
        values = op.Cast(values, to=dtype)
    name_dtype = to.types.INT64 if flat else to.types.INT32
    names = op.Cast(to.taken(indices), to=name_dtype)
    more = [(k - 1) // s for k, s in zip(kernel_size, stride, strict=True)]
    blocks = [to.size(values, axis) + m for axis, m in zip(axes, more, strict=True)]
    zero, one = to.number(0, dtype), to.number(1, dtype)
    # Rows are as long as the output's, for runtimes are slow where a short axis broadcasts. Along
    # the other axes, `between` is where the outputs of a block go.
    between = [axis + 1 + i for i, axis in enumerate(axes[:-1])]
    nearby = []
    for tensor, nothing in ((values, zero), (names, to.number(-1, name_dtype))):
        tensor = op.Pad(tensor, [0, 0, *more] * 2, nothing)
        repeated = op.Expand(op.Unsqueeze(tensor, [-1]), [1] * (2 + to.dims) + [stride[-1]])
        nearby.append(op.Reshape(repeated, [0] * (1 + to.dims) + [-1]))
    here = _positions(to, output_size, blocks, stride, padding) if flat else None
    result, counts = zero, zero
    for begin in itertools.product(*(range(n + 1) for n in more)):
        begins, ends = (
            list(begin),
            [first - m or _END for first, m in zip(begin, more, strict=True)],
        )
        begins[-1] *= stride[-1]
        ends[-1] = (begin[-1] - more[-1]) * stride[-1] or _END
        value, name = (
            op.Unsqueeze(sliced, between) if between else sliced
            for sliced in (op.Slice(tensor, begins, ends, axes) for tensor in nearby)
        )
        back = [m - first for m, first in zip(more, begin, strict=True)]
        cells = here if flat else _cells(to, back, blocks[-1], kernel_size, stride)
        named = op.Equal(name, cells)
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
    to: Writer, back: Sequence[int], blocks: Any, kernel_size: Sequence[int], stride: Sequence[int]
) -> Any:
    """Cells that outputs are, of a window that began ``back`` blocks before them; -2 for none.

    For one block, but rows of ``blocks``.
    """
    cells, inside = np.zeros((), np.int32), np.ones((), bool)
    for n, k, s in zip(back, kernel_size, stride, strict=True):
        at = np.arange(n * s, n * s + s, dtype=np.int32)
        cells = np.expand_dims(cells, (-2, -1)) * k + at
        inside = np.expand_dims(inside, (-2, -1)) & (at < k)
    cells = np.where(inside, cells, np.int32(-2)).squeeze(-2)
    return to.op.Tile(to.op.Constant(value=to.tensor(cells)), [1] * (cells.ndim - 1) + [blocks])


def _positions(
    to: Writer,
    output_size: Sequence[Any],
    blocks: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Any:
    """Flat positions of the outputs in blocks. Those outside the plane are cut off afterwards."""
    positions, step = None, 1
    for d in reversed(range(to.dims)):
        row = to.op.Range(-padding[d], blocks[d] * stride[d] - padding[d], 1) * step
        if positions is None:
            positions = row
        else:
            behind = 2 * (to.dims - d) - 3  # axes
            positions = to.op.Reshape(row, [-1, stride[d]] + [1] * behind) + positions
        step = step * output_size[d]
    return positions
