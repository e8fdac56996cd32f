"""Export to ONNX: what the exporter of PyTorch needs to know of max unpooling."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from . import _ops


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` of :func:`torch.onnx.export`.

    ``max_unpool`` with ``reduce="last"`` becomes ONNX's MaxUnpool, whose indices are flat over the
    whole tensor: the offsets of the planes are added to them. ONNX has no word for ``"sum"`` and
    ``"mean"``, so exporting these raises a ValueError.

    Needs the package onnxscript.

    Example:
        >>> import torch, maxunpool_cuda.onnx
        >>> table = maxunpool_cuda.onnx.translation_table()
        >>> # torch.onnx.export(model, inputs, dynamo=True, custom_translation_table=table)
        >>> torch.ops.maxunpool_cuda.max_unpool.default in table
        True
    """
    return {_ops.max_unpool: _max_unpool}


def _max_unpool(
    input: Any,
    indices: Any,
    output_size: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    reduce: str,
) -> Any:
    op: Any = importlib.import_module("onnxscript").opset18
    dims = len(kernel_size)
    if reduce != "last":
        raise ValueError(f"max_unpool{dims}d: expected reduce='last' for ONNX but got {reduce!r}")
    batched = len(input.shape) == dims + 2
    if not batched:
        first = op.Constant(value_ints=[0])
        input, indices = op.Unsqueeze(input, first), op.Unsqueeze(indices, first)

    def ints(values: Sequence[int]) -> Any:
        return op.Constant(value_ints=list(values))

    sizes = (ints([s]) if isinstance(s, int) else op.Reshape(s, ints([1])) for s in output_size)
    spatial = op.Concat(*sizes, axis=0)
    leading = op.Shape(input, end=2)
    plane = op.ReduceProd(spatial, keepdims=0)
    planes = op.ReduceProd(leading, keepdims=0)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    offsets = op.Mul(op.Range(zero, planes, one), plane)
    shape = op.Concat(leading, ints([1] * dims), axis=0)
    flat = op.Add(op.Cast(indices, to=7), op.Reshape(offsets, shape))
    output = op.MaxUnpool(
        input,
        flat,
        op.Concat(leading, spatial, axis=0),
        kernel_shape=list(kernel_size),
        pads=[*padding, *padding],
        strides=list(stride),
    )
    return output if batched else op.Squeeze(output, ints([0]))
