# SPDX-License-Identifier: BSD-3-Clause
"""What leaves Python: tables for exporters, which say what becomes of this package's operators.

:func:`decompositions` makes them PyTorch's own operators, which every exporter takes.
:func:`onnx_translation_table` makes them ONNX's MaxPool and MaxUnpool: the rest of the file.

:func:`torch.onnx.export` calls a translation for each operator of this package, with tensors of the
ONNX graph. The translation writes ONNX's nodes and returns their results. It is written once for
the three dimensions, and has to bridge three differences:

- ONNX counts flat positions over the whole tensor: in ``(N, C, 4, 4)`` the element 5 of plane 2 is
  at 2 * 16 + 5 = 37. This package counts in the plane: 5.
- ONNX has no window offsets. They become positions, or are made of positions, coordinate by
  coordinate: offset 3 in a 2x2 window that begins at row 2 and column 0 is (1, 1) in the window,
  (3, 1) in a plane of 4x4, and so position 3 * 4 + 1 = 13.
- ONNX's tensors have a batch, and its MaxUnpool takes its output size from the window alone.

Sizes are ints if they are fixed, and else dynamic, of another type.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _decompositions, _operators
from ._decompositions import Ints

__all__ = ["decompositions", "onnx_translation_table"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """A table for :meth:`torch.export.ExportedProgram.run_decompositions`.

    The program it returns calls PyTorch's operators alone: it runs where this package is not
    installed. A runtime has to have these operators. OpenVINO and CoreML lack the scatter that flat
    indices from outside of the program need. The program's values are bit-equal to those of the
    operators, except that PyTorch adds up duplicates of flat indices in any order on CUDA. Results
    are contiguous, whatever the layout of the input.

    Pooling becomes slices and comparisons. So does unpooling of uint8 indices, and of flat ones
    that a pool in the same program returns for the same windows (of at most 64 elements) of the
    same plane. Unpooling of other flat indices becomes a scatter and a gather, or a scatter that
    adds. PyTorch lacks these for float8, complex32, uint16, uint32 and uint64, and until 2.11
    comparisons for the last three. A flat index outside the output is an error of that scatter. A
    value whose uint8 index names no output is lost without an error.

    Returns:
        For each operator, a function that takes its arguments and calls PyTorch's operators.

    Example:
        >>> import torch, maxunpool_cuda
        >>> pool = maxunpool_cuda.MaxPool2d(2, return_indices=True)
        >>> x = torch.rand(1, 3, 8, 8)
        >>> program = torch.export.export(pool, (x,))
        >>> decomposed = program.run_decompositions(maxunpool_cuda.export.decompositions())
        >>> "maxunpool_cuda" in str(program.graph), "maxunpool_cuda" in str(decomposed.graph)
        (True, False)
        >>> all(map(torch.equal, decomposed.module()(x), pool(x)))
        True
    """
    return {
        _operators.max_pool: _decompositions.max_pool,
        _operators.max_unpool: _decompositions.max_unpool,
        _operators.max_unpool_backward: _decompositions.max_unpool_backward,
    }


def onnx_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` of :func:`torch.onnx.export`; needs the package onnxscript.

    Max pooling becomes ONNX's MaxPool, and max unpooling becomes its MaxUnpool. ONNX Runtime and
    ONNX's own evaluator then return the results of eager mode, for every dtype of indices and every
    output size, with the exceptions below. A ValueError names the other way to ONNX,
    :func:`decompositions`, for "sum", dtypes that the two operators do not take, ``ceil_mode`` with
    dynamic sizes, and dilated windows that hold no element of the input or reach a kernel_size
    beyond its end.

    - ONNX Runtime's MaxPool returns a NaN only if it is the first of its window, and without
      indices may give the lowest finite number for minus infinity.
    - ONNX's evaluator returns wrong indices for pools whose strides and dilations are all one.
    - An index outside the output is no error.

    Returns:
        For each operator, the function that writes its nodes.

    Example:
        >>> import torch, maxunpool_cuda
        >>> table = maxunpool_cuda.export.onnx_translation_table()
        >>> # torch.onnx.export(model, inputs, dynamo=True, custom_translation_table=table)
        >>> torch.ops.maxunpool_cuda.max_unpool.default in table
        True
    """
    return {_operators.max_pool: _max_pool, _operators.max_unpool: _max_unpool}


def _max_pool(
    input: Any,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    index_dtype: int,
) -> Any:
    """Writes max pooling: the values, and the indices of this dtype."""
    graph = _Graph("max_pool", input, len(kernel_size))
    padding_behind = _padding_behind(
        graph, input, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode
    )
    x = graph.with_batch(input, dtypes=("FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8"))
    values, positions = graph.op.MaxPool(
        x,
        pads=[*padding, *padding_behind],
        kernel_shape=kernel_size,
        strides=stride,
        dilations=dilation,
    )
    plane = [graph.size(x, 2 + d) for d in range(graph.dims)]
    if index_dtype == graph.types.UINT8:
        # A coordinate in the window is one in the plane minus where the window begins.
        shifts = [
            graph.arange_along(values, 2 + d, start=padding[d], step=-stride[d])
            for d in range(graph.dims)
        ]
        indices = graph.translate(positions, plane, kernel_size, shifts)
    else:
        indices = positions % math.prod(plane)  # without the planes before it
    return graph.as_result(values, input.dtype), graph.as_result(indices, index_dtype)


def _padding_behind(
    graph: _Graph,
    input: Any,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    *,
    ceil_mode: bool,
) -> list[int]:
    """The padding behind the input with which MaxPool, in floor mode, has the same windows.

    Raises:
        ValueError: there is none that ONNX Runtime takes.
    """
    sizes = list(input.shape[-graph.dims :])
    paddings = []
    axes = zip(sizes, kernel_size, stride, padding, dilation, strict=True)
    for size, kernel, step, pad, gap in axes:
        is_fixed = isinstance(size, int)
        behind = pad
        if is_fixed and ceil_mode:
            extent = gap * (kernel - 1) + 1  # of a window
            # The number of the last window. It begins before the padding behind the input.
            last = min(-((extent - size - 2 * pad) // step), (size + pad - 1) // step)
            behind = max(0, last * step + extent - size - pad)
        # The first element of the first window that is not before the input is at -pad % gap.
        may_be_empty = -pad % gap >= size if is_fixed else ceil_mode
        # ONNX Runtime takes less padding than kernel, and gives a finite value to empty windows.
        if behind >= kernel or may_be_empty:
            window = f"{kernel_size=}, {stride=}, {padding=}, {dilation=}, {ceil_mode=}"
            raise graph.error(f"{window} for spatial sizes {sizes}")
        paddings.append(behind)
    return paddings


class _UnpoolAxis(NamedTuple):
    """MaxUnpool along one spatial axis."""

    kernel: int
    stride: int
    padding: int
    size: Any  # of its output


def _max_unpool(
    input: Any,
    indices: Any,
    output_size: Any,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    reduce: str,
) -> Any:
    """Writes max unpooling of flat indices or offsets, as ``indices.dtype`` says."""
    graph = _Graph("max_unpool", input, len(kernel_size))
    if reduce != "last":
        raise graph.error(f"{reduce=}")
    x = graph.with_batch(input, dtypes=("FLOAT", "FLOAT16", "DOUBLE"))
    axes = _unpool_axes(graph, input, x, output_size, kernel_size, stride, padding)
    box = [axis.size for axis in axes]
    is_larger = not all(isinstance(n, int) for n in (*input.shape[-graph.dims :], *output_size))
    positions = graph.op.Cast(graph.with_batch(indices), to=graph.types.INT64)
    if indices.dtype == graph.types.UINT8:
        # A coordinate in the plane is one in the window plus where the window begins.
        shifts = [
            graph.arange_along(x, 2 + d, start=-padding[d], step=stride[d])
            for d in range(graph.dims)
        ]
        positions = graph.translate(positions, kernel_size, box, shifts)
    elif is_larger:
        positions = graph.translate(positions, output_size, box, [0] * graph.dims)
    batch, channels, plane = graph.size(x, 0), graph.size(x, 1), math.prod(box)
    positions += graph.arange_along(x, 0, start=0, step=channels * plane)
    positions += graph.arange_along(x, 1, start=0, step=plane)
    output = graph.op.MaxUnpool(
        x,
        positions,
        [batch, channels, *box],
        kernel_shape=[axis.kernel for axis in axes],
        strides=[axis.stride for axis in axes],
        pads=[axis.padding for axis in axes] * 2,
    )
    if is_larger:
        begins = [0] * graph.dims
        output = graph.op.Slice(output, begins, list(output_size), list(range(2, 2 + graph.dims)))
    return graph.as_result(output, input.dtype)


def _unpool_axes(
    graph: _Graph,
    input: Any,
    x: Any,
    output_size: Any,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
) -> list[_UnpoolAxis]:
    """The windows from which MaxUnpool infers the output size.

    If the sizes are fixed it is this output size; if it is not the window's default, another window
    stands in, which has it. If they are dynamic, no one window does, so the output is a box that
    holds every possible output size. ONNX Runtime takes less padding than kernel.
    """
    axes = []
    sizes = zip(input.shape[-graph.dims :], output_size, kernel_size, stride, padding, strict=True)
    for d, (pooled, size, kernel, step, pad) in enumerate(sizes):
        if not (isinstance(pooled, int) and isinstance(size, int)):
            box_kernel = max(1, kernel - 2 * pad + step - 1)
            box_size = (graph.size(x, 2 + d) - 1) * step + box_kernel
            axes.append(_UnpoolAxis(box_kernel, step, 0, box_size))
        elif pad >= kernel or (pooled - 1) * step - 2 * pad + kernel != size:
            axes.append(_UnpoolAxis(1 + abs(size - pooled), 1, max(0, pooled - size), size))
        else:
            axes.append(_UnpoolAxis(kernel, step, pad, size))
    return axes


class _Graph:
    """Writes what both translations need into the ONNX graph. Sizes of tensors are scalars."""

    def __init__(self, operator: str, input: Any, dims: int) -> None:
        """``operator`` is for errors."""
        onnxscript: Any = importlib.import_module("onnxscript")
        self.op = onnxscript.opset18
        self.types = onnxscript.ir.DataType
        self.name = f"{operator}{dims}d"
        self.dims = dims
        self.has_batch = len(input.shape) > dims + 1

    def error(self, what: str) -> ValueError:
        """The error of a call that has no such translation."""
        way_out = (
            "run_decompositions(maxunpool_cuda.export.decompositions()) of the exported program"
        )
        return ValueError(f"{self.name}: ONNX cannot express {what}; use {way_out}")

    def with_batch(self, tensor: Any, dtypes: tuple[str, ...] = ()) -> Any:
        """An argument as ONNX's operators take it: with a batch, and of one of ``dtypes``.

        Without ``dtypes`` all are allowed. bfloat16 becomes float32, which has all its values.
        """
        if dtypes and tensor.dtype == self.types.BFLOAT16:
            tensor = self.op.Cast(tensor, to=self.types.FLOAT)
        elif dtypes and tensor.dtype.name not in dtypes:
            raise self.error(f"input of type {tensor.dtype.name}")
        return tensor if self.has_batch else self.op.Unsqueeze(tensor, [0])

    def as_result(self, tensor: Any, dtype: int) -> Any:
        """A result as this package's operators return it: with a batch if the input had one."""
        tensor = self.op.Cast(tensor, to=dtype)
        return tensor if self.has_batch else self.op.Squeeze(tensor, [0])

    def size(self, tensor: Any, axis: int) -> Any:
        """The size of an axis, as a scalar."""
        return self.op.Squeeze(self.op.Shape(tensor, start=axis, end=axis + 1))

    def arange_along(self, tensor: Any, axis: int, *, start: int, step: Any) -> Any:
        """``start``, ``start + step`` and so on along an axis of a tensor, to be added to it."""
        numbers = self.op.Range(start, self.size(tensor, axis) * step + start, step)
        return self.op.Reshape(numbers, [-1] + [1] * (self.dims + 1 - axis))

    def translate(self, positions: Any, sizes: Any, other_sizes: Any, shifts: Any) -> Any:
        """Positions in a box of ``sizes`` become those in a box of ``other_sizes``.

        Both are row-major. Each coordinate is shifted: position 5 in 2x3 is (1, 2), and with shifts
        of 0 and 1 in 4x4 it is (1, 3), so 7.
        """
        result, step = 0, 1
        for size, other, shift in reversed(list(zip(sizes, other_sizes, shifts, strict=True))):
            result = (positions % size + shift) * step + result
            positions = self.op.Div(positions, size)
            step *= other
        return result
