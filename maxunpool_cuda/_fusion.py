"""What torch.compile traces instead of an operator, so that it fuses with what is around it.

To Inductor the operators are opaque. A call that is compiled may therefore become PyTorch's own
operators: pooling without indices in inference, which Inductor does as well; and unpooling, where
:func:`set_fusion` says so. Exported programs keep the operators.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _ops, _portable

_enabled = False
_INDUCTORS_WINDOW = 25  # elements of the largest window whose pooling it compiles by itself


def set_fusion(enabled: bool) -> None:
    """Choose what :func:`torch.compile` makes of compiled calls from now on.

    Without fusion, the default, compiled graphs call this package's kernels, but for 2d pooling
    without indices and without a gradient. With fusion, unpooling from uint8 indices whose windows
    do not overlap is made of PyTorch's own operators, none of which is a scatter. Inductor fuses
    these with what is before and behind them, backward as well. Results and gradients are equal. A
    uint8 index that names no cell of its window raises no error then: its element is dropped.
    Exported programs and subclasses of Tensor are as without fusion.

    On the CPU fusion was faster for channels_last tensors with something elementwise behind the
    unpool, and slower for contiguous ones in most networks. On a GPU neither was measured. What was
    compiled before is compiled anew when it is called again.

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


def _exporting() -> bool:
    return torch.compiler.is_exporting()


# As in _sharding.py: Dynamo calls it. What it traces there instead, in PyTorch 2.11, is True.
_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _compiled(input: Tensor) -> bool:
    """Subclasses keep the operators: DTensor, say, can shard these better than what they become."""
    plain = type(input) in (Tensor, torch.nn.Parameter)
    return plain and torch.compiler.is_compiling() and not _exporting()


def max_unpool(input: Tensor, indices: Tensor, arguments: tuple[Any, ...]) -> Tensor | None:
    """The operator's result in PyTorch's operators; None where the operator is to be called."""
    if not (_enabled and _compiled(input) and indices.dtype == torch.uint8):
        return None
    _, kernel_size, stride, _, _ = arguments
    if any(k > s for k, s in zip(kernel_size, stride, strict=True)):
        return None
    like = _ops.max_unpool(input, indices, *arguments)  # which checks, and is never run
    return _laid_out_as(like, _portable.max_unpool(input, indices, *arguments))


def max_pool(input: Tensor, arguments: tuple[Any, ...], return_indices: bool) -> Tensor | None:
    """As :func:`max_unpool`, without indices.

    Inference without indices has no use for what the kernels are better at.
    """
    kernel_size, stride, padding, dilation, ceil_mode, _ = arguments
    if not _compiled(input) or not input.dtype.is_floating_point or len(kernel_size) != 2:
        return None
    if return_indices or (torch.is_grad_enabled() and input.requires_grad):
        return None
    if math.prod(kernel_size) > _INDUCTORS_WINDOW:
        return None
    like, _ = _ops.max_pool(input, *arguments)  # which checks, and is never run
    # Not torch.nn's function, which may be this package's: see patched.
    pooled, _ = torch.ops.aten.max_pool2d_with_indices(
        input, kernel_size, stride, padding, dilation, ceil_mode
    )
    return _laid_out_as(like, pooled)


def _laid_out_as(like: Tensor, result: Tensor) -> Tensor:
    """``result`` with the strides of ``like``, which need not be computed where this is traced."""
    shape, stride = like.shape, like.stride()
    if result.stride() == stride:
        return result
    laid_out = torch.empty_strided(shape, stride, dtype=result.dtype, device=result.device)
    return laid_out.copy_(result)
