"""Export to ONNX: what the exporter of PyTorch needs to know of max pooling and unpooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from . import _onnx_where, _ops
from ._onnx_writer import Writer


def translation_table(
    max_unpool: Literal["MaxUnpool", "where"] = "MaxUnpool",
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` of :func:`torch.onnx.export`.

    With ``max_unpool="MaxUnpool"``, ``max_pool`` becomes ONNX's MaxPool, and ``max_unpool`` with
    ``reduce="last"`` its MaxUnpool. ONNX's indices are flat over the whole tensor: integer
    arithmetic makes those of this package, of each dtype, from them, and them from those.
    ONNX Runtime and ONNX's own evaluator give the same, whatever the output size. Where neither the
    sizes nor a stride of one give it away, as with dynamic ones, MaxUnpool fills a little more and
    Slice takes what was asked for. Of pools with strides of one the evaluator gets indices wrong.

    With ``"where"``, they become operators that every runtime has: MaxPool without indices, ArgMax,
    Pad, Slice, Equal, Where and integer arithmetic. All three reductions of window offsets, and
    ``"last"`` of flat indices that lie in their own windows, as those of pooling do. An index that
    does not lie in its window is lost. Such a window spans fewer than 2^24 positions of the plane;
    others are refused, unless dynamic sizes hide them.

    "Every runtime" is TensorRT (docs/operators.md of onnx-tensorrt at 96e7811, 2024-06-17),
    OpenVINO (src/frontends/onnx/docs/supported_ops.md at 0ae60f0) and the CUDA provider of ONNX
    Runtime (docs/OperatorKernels.md at 001d12d): these lists have the operators.

    bfloat16 is cast to float32 and back, exactly.

    A ValueError is raised for what ONNX has no word for: ``reduce="sum"`` and ``"mean"`` (of flat
    indices, under ``"where"``), dtypes that its operators do not take, and some windows: those that
    hold no element of the input (only dilated ones do, and dynamic sizes hide them) and, in ceil
    mode with dilation or dynamic sizes, those shorter than their stride.

    ONNX does not say which of equal elements MaxPool takes, nor what it makes of NaN and of windows
    that hold minus infinity alone. ONNX Runtime takes the first of equal ones, as this package
    does. It takes a NaN only where that is the first of its window, and, where nobody asks for
    indices, may give the lowest finite number for minus infinity. An index outside the output is
    no error in ONNX.

    Needs the package onnxscript.

    Args:
        max_unpool: the form: ``"MaxUnpool"`` or ``"where"``.

    Example:
        >>> import torch, maxunpool_cuda
        >>> table = maxunpool_cuda.onnx.translation_table()
        >>> # torch.onnx.export(model, inputs, dynamo=True, custom_translation_table=table)
        >>> torch.ops.maxunpool_cuda.max_unpool.default in table
        True
    """
    if max_unpool == "where":
        return {
            _ops.max_pool: _onnx_where.max_pool,
            _ops.max_unpool: _onnx_where.max_unpool,
        }
    if max_unpool != "MaxUnpool":
        raise ValueError(
            "translation_table: expected max_unpool to be 'MaxUnpool' or 'where' "
            f"but got {max_unpool!r}"
        )
    return {_ops.max_pool: _max_pool, _ops.max_unpool: _max_unpool}


def _max_pool(
    input: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    index_dtype: int,
) -> Any:
    to = Writer("max_pool", input, len(kernel_size))
    taken, values, positions = to.pooled(input, kernel_size, stride, padding, dilation, ceil_mode)
    sizes = [to.size(taken, axis) for axis in to.axes]
    if index_dtype == to.types.UINT8:
        less = [to.row(values, 2 + d, padding[d], -stride[d]) for d in range(to.dims)]
        indices = to.moved(positions, sizes, kernel_size, less)
    else:
        indices = positions % math.prod(sizes)
    return to.given(values, input.dtype), to.given(indices, index_dtype)


def _max_unpool(
    input: Any,
    indices: Any,
    output_size: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    reduce: str,
) -> Any:
    to = Writer("max_unpool", input, len(kernel_size))
    if reduce != "last":
        raise ValueError(f"{to.name}: expected reduce='last' for ONNX but got {reduce!r}")
    taken = to.taken(input, "FLOAT", "FLOAT16", "DOUBLE")
    # ONNX says that the given shape counts, but ONNX Runtime refuses one below what it infers from
    # the window, and ONNX's evaluator places the elements in what it infers. So the two are equal:
    # by another window where they differ by a constant, else by a box that holds every
    # output_size, from which this is cut. ONNX Runtime wants less padding than kernel.
    windows, box, cut = [], [], False
    axes = zip(input.shape[-to.dims :], output_size, kernel_size, stride, padding, strict=True)
    for d, (pooled, size, kernel, step, pad) in enumerate(axes):
        known = isinstance(pooled, int) and isinstance(size, int)
        if known or step == 1:
            more = size - pooled if known else kernel - 2 * pad - 1
            if pad >= kernel or (known and (pooled - 1) * step - 2 * pad + kernel != size):
                kernel, step, pad = 1 + abs(more), 1, max(0, -more)
        else:
            kernel, pad, cut = max(1, kernel - 2 * pad + step - 1), 0, True
            size = (to.size(taken, 2 + d) - 1) * step + kernel
        windows.append((kernel, step, pad))
        box.append(size)
    positions = to.op.Cast(to.taken(indices), to=to.types.INT64)
    if indices.dtype == to.types.UINT8:
        more = [to.row(taken, 2 + d, -padding[d], stride[d]) for d in range(to.dims)]
        positions = to.moved(positions, kernel_size, box, more)
    elif cut:
        positions = to.moved(positions, output_size, box, [0] * to.dims)
    batch, channels = to.size(taken, 0), to.size(taken, 1)
    plane = math.prod(box)
    planes = to.row(taken, 0, 0, channels * plane) + to.row(taken, 1, 0, plane)
    kernels, strides, pads = zip(*windows, strict=True)
    output = to.op.MaxUnpool(
        taken,
        positions + planes,
        [batch, channels, *box],
        kernel_shape=kernels,
        pads=[*pads, *pads],
        strides=strides,
    )
    if cut:
        output = to.op.Slice(output, [0] * to.dims, list(output_size), to.axes)
    return to.given(output, input.dtype)
