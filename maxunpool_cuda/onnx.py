# SPDX-License-Identifier: BSD-3-Clause
"""Export to ONNX: max pooling and unpooling as ONNX's MaxPool and MaxUnpool."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from . import _ops
from ._portable import Ints


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` of :func:`torch.onnx.export`; needs the package onnxscript.

    Max pooling becomes ONNX's MaxPool, and max unpooling becomes its MaxUnpool. ONNX Runtime and
    ONNX's own evaluator then return the results of eager mode, for every dtype of indices and every
    output size. A ValueError names the other way to ONNX, :func:`maxunpool_cuda.decompositions`,
    for "sum", dtypes that the two operators do not take, ``ceil_mode`` with dynamic sizes, and
    dilated windows that hold no element of the input or reach a kernel_size beyond its end.

    ONNX Runtime's MaxPool takes a NaN only where it is the first of its window, and without indices
    may give the lowest finite number for minus infinity. ONNX's evaluator gets the indices of pools
    with strides of one wrong. An index outside the output is no error.

    Example:
        >>> import torch, maxunpool_cuda
        >>> table = maxunpool_cuda.onnx.translation_table()
        >>> # torch.onnx.export(model, inputs, dynamo=True, custom_translation_table=table)
        >>> torch.ops.maxunpool_cuda.max_unpool.default in table
        True
    """
    return {_ops.max_pool: _max_pool, _ops.max_unpool: _max_unpool}


def _max_pool(
    input: Any,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    index_dtype: int,
) -> Any:
    to = _Writer("max_pool", input, len(kernel_size))
    sizes, after = list(input.shape[-to.dims :]), list(padding)
    axes = zip(sizes, kernel_size, stride, padding, dilation, strict=True)
    for d, (size, kernel, step, pad, spread) in enumerate(axes):
        fixed = isinstance(size, int)
        if fixed and ceil_mode:  # written in floor mode, in which ONNX has the same windows
            extent = spread * (kernel - 1) + 1
            last = min(-((extent - size - 2 * pad) // step), (size + pad - 1) // step)
            after[d] = max(0, last * step + extent - size - pad)
        # ONNX Runtime takes less padding than kernel, and gives a finite value to empty windows.
        if after[d] >= kernel or (-pad % spread >= size if fixed else ceil_mode):
            window = f"{kernel_size=}, {stride=}, {padding=}, {dilation=}, {ceil_mode=}"
            raise to.refused(f"{window} for spatial sizes {sizes}")
    taken = to.taken(input, "FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8")
    attributes = {"kernel_shape": kernel_size, "strides": stride, "dilations": dilation}
    values, positions = to.op.MaxPool(taken, pads=[*padding, *after], **attributes)
    plane = [to.size(taken, 2 + d) for d in range(to.dims)]
    if index_dtype == to.types.UINT8:
        begins = [to.row(values, 2 + d, padding[d], -stride[d]) for d in range(to.dims)]
        indices = to.moved(positions, plane, kernel_size, begins)
    else:
        indices = positions % math.prod(plane)
    return to.given(values, input.dtype), to.given(indices, index_dtype)


def _max_unpool(
    input: Any,
    indices: Any,
    output_size: Any,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    reduce: str,
) -> Any:
    to = _Writer("max_unpool", input, len(kernel_size))
    if reduce != "last":
        raise to.refused(f"{reduce=}")
    taken = to.taken(input, "FLOAT", "FLOAT16", "DOUBLE")
    # The size must be what is inferred from the window: another fixed size has another window, and
    # dynamic sizes a box that holds every output_size. ONNX Runtime takes less padding than kernel.
    windows, cut = [], False
    axes = zip(input.shape[-to.dims :], output_size, kernel_size, stride, padding, strict=True)
    for d, (pooled, size, kernel, step, pad) in enumerate(axes):
        if not (isinstance(pooled, int) and isinstance(size, int)):
            kernel, pad, cut = max(1, kernel - 2 * pad + step - 1), 0, True
            size = (to.size(taken, 2 + d) - 1) * step + kernel
        elif pad >= kernel or (pooled - 1) * step - 2 * pad + kernel != size:
            kernel, step, pad = 1 + abs(size - pooled), 1, max(0, pooled - size)
        windows.append((kernel, step, pad, size))
    kernels, strides, pads, box = zip(*windows, strict=True)
    positions = to.op.Cast(to.taken(indices), to=to.types.INT64)
    if indices.dtype == to.types.UINT8:
        begins = [to.row(taken, 2 + d, -padding[d], stride[d]) for d in range(to.dims)]
        positions = to.moved(positions, kernel_size, box, begins)
    elif cut:
        positions = to.moved(positions, output_size, box, [0] * to.dims)
    batch, channels, plane = to.size(taken, 0), to.size(taken, 1), math.prod(box)
    positions += to.row(taken, 0, 0, channels * plane) + to.row(taken, 1, 0, plane)
    attributes = {"kernel_shape": kernels, "strides": strides, "pads": pads * 2}
    output = to.op.MaxUnpool(taken, positions, [batch, channels, *box], **attributes)
    if cut:
        output = to.op.Slice(output, [0] * to.dims, list(output_size), list(range(2, 2 + to.dims)))
    return to.given(output, input.dtype)


class _Writer:
    """Writes what both translations need, for tensors with a batch; sizes are scalars."""

    def __init__(self, operator: str, input: Any, dims: int) -> None:
        onnxscript: Any = importlib.import_module("onnxscript")
        self.op, self.types = onnxscript.opset18, onnxscript.ir.DataType
        self.name, self.dims, self.batched = f"{operator}{dims}d", dims, len(input.shape) > dims + 1

    def refused(self, what: str) -> ValueError:
        way_out = "run_decompositions(maxunpool_cuda.decompositions()) of the exported program"
        return ValueError(f"{self.name}: ONNX cannot express {what}; use {way_out}")

    def taken(self, tensor: Any, *dtypes: str) -> Any:
        """As ONNX's operators take it: of one of ``dtypes``, if there are any."""
        if dtypes and tensor.dtype == self.types.BFLOAT16:
            tensor = self.op.Cast(tensor, to=self.types.FLOAT)
        elif dtypes and tensor.dtype.name not in dtypes:
            raise self.refused(f"input of type {tensor.dtype.name}")
        return tensor if self.batched else self.op.Unsqueeze(tensor, [0])

    def given(self, tensor: Any, dtype: int) -> Any:
        """As this package's operators return it."""
        tensor = self.op.Cast(tensor, to=dtype)
        return tensor if self.batched else self.op.Squeeze(tensor, [0])

    def size(self, tensor: Any, axis: int) -> Any:
        return self.op.Squeeze(self.op.Shape(tensor, start=axis, end=axis + 1))

    def row(self, tensor: Any, axis: int, first: int, step: Any) -> Any:
        """``first``, ``first + step`` and so on along an axis of a tensor, to be added to it."""
        row = self.op.Range(first, self.size(tensor, axis) * step + first, step)
        return self.op.Reshape(row, [-1] + [1] * (self.dims + 1 - axis))

    def moved(self, positions: Any, sizes: Any, into: Any, by: Any) -> Any:
        """Row-major positions in planes of ``sizes``, moved ``by`` distances, in another plane."""
        moved, unit = 0, 1
        for size, other, distance in reversed(list(zip(sizes, into, by, strict=True))):
            moved = (positions % size + distance) * unit + moved
            positions, unit = self.op.Div(positions, size), unit * other
        return moved
