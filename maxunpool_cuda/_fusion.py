"""What torch.compile traces instead of an operator, so that it fuses with what is around it.

To Inductor the operators are opaque. A call that is compiled may therefore become PyTorch's own
operators: always where Inductor's max pooling is as good, and elsewhere by :func:`set_fusion`.
Exported programs keep the operators.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _ops, _portable
from ._arguments import Ints

_enabled = False
_INDUCTORS_WINDOW = 25  # elements of the largest window whose pooling it compiles by itself


def set_fusion(enabled: bool) -> None:
    """Choose what :func:`torch.compile` makes of compiled calls from now on.

    Without fusion, the default, compiled graphs call this package's kernels, but for 2d pooling
    without indices and without a gradient. With fusion they hold PyTorch's own operators wherever
    that needs no scatter: for unpooling from uint8 indices whose windows do not overlap, and for 2d
    pooling with windows of at most 25 elements. Inductor then fuses these with what is around them,
    backward as well. Results are equal, and gradients but for the order of sums. A uint8 index that
    names no cell of its window raises no error then: its element is dropped. Exported programs and
    subclasses of Tensor are as without fusion.

    Without fusion is the default because it was faster on the CPU wherever the two differed. On a
    GPU neither was measured. What was compiled before is compiled anew when it is called again.

    Args:
        enabled: whether to fuse.

    Raises:
        TypeError: ``enabled`` is not a bool.

    Example:
        >>> set_fusion(True)
        >>> set_fusion(False)
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise TypeError(
            f"set_fusion: expected enabled to be a bool but got {type(enabled).__name__}"
        )
    _enabled = enabled


def _compiled(input: Tensor) -> bool:
    """Subclasses keep the operators: DTensor, say, can shard these better than what they become."""
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return compiled and type(input) in (Tensor, torch.nn.Parameter)


def max_unpool(input: Tensor, indices: Tensor, arguments: tuple[Any, ...]) -> Tensor | None:
    """The operator's result in PyTorch's operators; None where the operator is to be called."""
    if not (_enabled and _compiled(input) and indices.dtype == torch.uint8):
        return None
    _, kernel_size, stride, _, _ = arguments
    if any(k > s for k, s in zip(kernel_size, stride, strict=True)):
        return None
    like = _ops.max_unpool(input, indices, *arguments)  # which checks, and is never run
    return _laid_out_as(like, _portable.max_unpool(input, indices, *arguments))


def max_pool(
    input: Tensor, arguments: tuple[Any, ...], return_indices: bool
) -> tuple[Tensor, Tensor] | None:
    """As :func:`max_unpool`.

    Inference without indices has no use for what the kernels are better at.
    """
    kernel_size, stride, padding, dilation, ceil_mode, index_dtype = arguments
    if not _compiled(input) or not input.dtype.is_floating_point:
        return None
    if len(kernel_size) != 2 or math.prod(kernel_size) > _INDUCTORS_WINDOW:
        return None
    if not _enabled and (return_indices or (torch.is_grad_enabled() and input.requires_grad)):
        return None
    values, indices = _ops.max_pool(input, *arguments)  # which check, and are never run
    # Not torch.nn's function, which may be this package's: see patched.
    pooled, positions = torch.ops.aten.max_pool2d_with_indices(
        input, kernel_size, stride, padding, dilation, ceil_mode
    )
    if not return_indices:
        return _laid_out_as(values, pooled), indices
    if index_dtype == torch.uint8:
        positions = _offsets(positions, input.shape[-2:], kernel_size, stride, padding)
    return _laid_out_as(values, pooled), _laid_out_as(indices, positions.to(index_dtype))


def _offsets(
    positions: Tensor, sizes: Ints, kernel_size: Ints, stride: Ints, padding: Ints
) -> Tensor:
    """Window offsets of flat positions, each of which lies in its window."""
    dims = len(kernel_size)
    offsets, rest, step = torch.zeros_like(positions), positions, 1
    for axis in reversed(range(dims)):
        count = positions.shape[axis - dims]
        shape = [count if each == axis else 1 for each in range(dims)]
        begin = torch.arange(count, device=positions.device).view(shape) * stride[axis]
        offsets = offsets + (rest % sizes[axis] - begin + padding[axis]) * step
        rest = rest.div(sizes[axis], rounding_mode="floor")
        step *= kernel_size[axis]
    return offsets


def _laid_out_as(like: Tensor, result: Tensor) -> Tensor:
    if result.stride() == like.stride():
        return result.to(like.dtype)
    shape, stride = like.shape, like.stride()  # not empty_like, which would have `like` computed
    laid_out = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
    return laid_out.copy_(result)
