# SPDX-License-Identifier: BSD-3-Clause
"""What the operators return: shape, dtype and layout of the results of a call.

A layout is a memory format of PyTorch: contiguous, channels_last (2d) or channels_last_3d. A call
has one, and its result gets it: that of the values if their strides tell it, else the one that the
strides of the indices suggest. csrc/layout.h has a table of examples, and chooses it for the
compiled kernels, whose calls may not come from Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._checks import Ints, Window

_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def unpooled(values: Tensor, indices: Tensor, *arguments: Any, device: str | None = None) -> Tensor:
    """Check a call of max_unpool, and return an undefined result.

    Args:
        values: the operator's first argument.
        indices: the operator's second.
        *arguments: its others.
        device: where the result is; by default where the values are.
    """
    return _unpooling(values, indices, arguments, device, is_forward=True)


def unpooled_backward(
    values: Tensor, indices: Tensor, *arguments: Any, device: str | None = None
) -> Tensor:
    """The same for max_unpool_backward."""
    return _unpooling(values, indices, arguments, device, is_forward=False)


def pooled(input: Tensor, *arguments: Any, device: str | None = None) -> tuple[Tensor, Tensor]:
    """The same for max_pool."""
    *numbers, ceil_mode, index_dtype = arguments
    window = Window("max_pool", *numbers)
    shape = _checks.pooled_shape(input, window, ceil_mode, index_dtype)
    layout = _layout_of(input, input, window.rank)
    values, indices = (
        _empty(shape, layout, dtype, device or input.device) for dtype in (input.dtype, index_dtype)
    )
    return values, indices


def _unpooling(
    values: Tensor,
    indices: Tensor,
    arguments: tuple[Any, ...],
    device: str | None,
    *,
    is_forward: bool,
) -> Tensor:
    output_size, kernel_size, stride, padding, reduce = arguments
    window = Window("max_unpool", kernel_size, stride, padding)
    shape = _checks.unpooled_shape(
        values, indices, output_size, window, reduce, is_forward=is_forward
    )
    layout = _layout_of(values, indices, window.rank)
    result_shape = shape if is_forward else indices.shape
    return _empty(result_shape, layout, values.dtype, device or values.device)


def _layout_of(values: Tensor, indices: Tensor, rank: int) -> torch.memory_format:
    """The layout of a call with windows of this rank."""
    return _suggested_layout(values if _tells_layout(values, rank) else indices, rank)


def _empty(
    shape: Ints, layout: torch.memory_format, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """An undefined tensor, dense in the layout.

    PyTorch knows channels_last_3d for 5 dimensions alone. That of a volume without a batch has the
    same strides but the first.
    """
    if len(shape) == 4 and layout is torch.channels_last_3d:
        channels, _, height, width = shape
        strides = (1, channels * width * height, channels * width, channels)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device, memory_format=layout)


def _suggested_layout(tensor: Tensor, rank: int) -> torch.memory_format:
    """The layout that a tensor's strides suggest; it need not be dense.

    Without a batch a tensor is contiguous, except for a volume that is channels_last_3d if a batch
    of 1 is put before it, as in PyTorch's pooling.
    """
    channels_last = _CHANNELS_LAST.get(rank, torch.contiguous_format)
    if _has_batch(tensor, rank):
        return channels_last if _suggests_channels_last(tensor) else torch.contiguous_format
    is_volume = rank == 3 and tensor.dim() == 4 and not _is_dense(tensor, channels_last=False)
    if is_volume and _is_dense(tensor.unsqueeze(0), channels_last=True):
        return channels_last
    return torch.contiguous_format


def _tells_layout(tensor: Tensor, rank: int) -> bool:
    """Whether a tensor's strides tell its layout.

    They do not if they suggest contiguous, and the tensor is not dense, such as an expanded
    gradient, or is dense in channels_last as well.
    """
    if _suggested_layout(tensor, rank) is not torch.contiguous_format:
        return True
    may_be_channels_last = _has_batch(tensor, rank) and _is_dense(tensor, channels_last=True)
    return _is_dense(tensor, channels_last=False) and not may_be_channels_last


def _has_batch(tensor: Tensor, rank: int) -> bool:
    """Whether the tensor has a batch, and a layout other than contiguous may be asked for."""
    return rank >= 2 and tensor.dim() == rank + 2


def _is_true(condition: Any) -> bool:
    """Whether a condition on sizes holds. False also if tracing cannot decide it."""
    if isinstance(condition, bool):
        return condition
    # An import at the top would import SymPy.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _inner_to_outer(tensor: Tensor, *, channels_last: bool) -> list[int]:
    """The dimensions in the order of their strides, smallest first."""
    last_to_first = [*range(tensor.dim() - 1, -1, -1)]
    return [1, *last_to_first[:-2], 0] if channels_last else last_to_first


def _is_dense(tensor: Tensor, *, channels_last: bool) -> bool:
    """Whether the tensor has no gaps, and its elements are in that order."""
    if _is_true(tensor.numel() == 0):
        return True
    expected: Any = 1
    for dim in _inner_to_outer(tensor, channels_last=channels_last):
        size = tensor.shape[dim]
        if _is_true(size == 1):
            continue
        if not _is_true(tensor.stride(dim) == expected):
            return False
        expected = expected * size
    return True


def _suggests_channels_last(tensor: Tensor) -> bool:
    """PyTorch's rule, c10::is_channels_last_strides_2d and _3d, for the memory format of a tensor.

    Strides grow from the channels over the columns to the batch. If that leaves open which it is,
    as for sizes of 1 everywhere else, it is contiguous.
    """
    if _is_true(tensor.stride(1) == 0):
        return False
    smallest: Any = 0
    for dim in _inner_to_outer(tensor, channels_last=True):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if _is_true(size == 0) or not _is_true(stride >= smallest):
            return False
        if dim == 0 and _is_true(smallest == tensor.stride(1)):
            return False
        smallest = stride * size if _is_true(size > 1) else stride
    return True
