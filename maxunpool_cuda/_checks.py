# SPDX-License-Identifier: BSD-3-Clause
"""The checks of the operators, with the words of their errors.

The guard of compiled kernels (csrc/guard.h) asks the same questions without words. It hands a call
that it refuses to ``unpooled_shape`` or ``pooled_shape``, which raise the error. The types of the
errors are torch.nn's.

A size may be symbolic. If a trace leaves a condition on sizes open, the condition counts as met:
the later call, which has numbers, is checked again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _decompositions

Ints = Sequence[int]
LIMIT = 2**60  # of the numbers of a window, as in csrc/guard.h
MOST_OFFSETS = 256  # positions of a window that uint8 can count
INDEX_DTYPES: tuple[torch.dtype, ...] = (torch.int64, torch.int32, torch.uint8)
ORDERED_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
ARITHMETIC_DTYPES = (*ORDERED_DTYPES, torch.complex64, torch.complex128)


class Window(NamedTuple):
    """The arguments that say where windows lie, with a number for each spatial axis."""

    op: str  # as messages name it, without its rank: "max_pool" or "max_unpool"
    kernel_size: Ints
    stride: Ints
    padding: Ints
    dilation: Ints = ()  # empty for unpooling

    @property
    def rank(self) -> int:
        """The number of spatial axes: if the lists differ in length, that of ``padding``."""
        return len(self.padding)

    @property
    def name(self) -> str:
        """How messages begin: max_pool2d."""
        return f"{self.op}{self.rank}d"

    def __str__(self) -> str:
        """The numbers: ``kernel_size=[3, 3], stride=[2, 2], padding=[1, 1]``."""
        shown = self._fields[1:] if self.dilation else self._fields[1:-1]
        return ", ".join(f"{name}={[*getattr(self, name)]}" for name in shown)


def holds(condition: Any) -> bool:
    """Whether a condition on sizes is met; an open one counts as met."""
    if isinstance(condition, bool):
        return condition
    # An import at the top would import SymPy.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def check_reduce(name: str, reduce: str) -> None:
    """Check that ``reduce`` is one of the two; errors begin with ``name``."""
    if not isinstance(reduce, str) or reduce not in ("last", "sum"):
        raise ValueError(f"{name}: expected reduce to be 'last' or 'sum' but got {reduce!r}")


def check_index_dtype(name: str, index_dtype: torch.dtype, is_adaptive: bool = False) -> None:
    """Raise a ValueError unless a pool can return indices of this dtype."""
    if is_adaptive:
        allowed = INDEX_DTYPES[:2]
        expected = (
            "torch.int64 or torch.int32, as adaptive windows, of many sizes, have no offsets,"
        )
    else:
        allowed = INDEX_DTYPES
        expected = "torch.int64, torch.int32 or torch.uint8"
    if index_dtype not in allowed:
        raise ValueError(f"{name}: expected index_dtype to be {expected} but got {index_dtype!r}")


def fits_uint8(kernel_size: Ints, dilation: Ints = ()) -> bool:
    """Whether a byte can count the elements of a window, and the window has no dilation."""
    return math.prod(kernel_size) <= MOST_OFFSETS and not is_dilated(dilation)


def large_plane_error(name: str, spatial: Ints) -> ValueError:
    """The error of a plane of these sizes, which has more positions than int32 can count."""
    return ValueError(
        f"{name}: expected a plane of fewer than 2^31 positions for int32 indices but got spatial "
        f"sizes {[*spatial]}; use int64"
    )


def check_window(window: Window) -> None:
    """Check each number of a window by itself."""
    for argument, numbers in zip(window._fields[1:], window[1:], strict=True):
        if not _fit_64_bits(numbers):
            name = f"{window.op}{len(numbers)}d"
            raise TypeError(f"{name}: expected {argument} to be 64-bit ints but got {numbers}")
    for numbers, least, wanted in (
        (window.kernel_size, 1, "kernel_size greater than zero"),
        (window.stride, 1, "stride greater than zero"),
        (window.dilation, 1, "dilation greater than zero"),
        (window.padding, 0, "no negative padding"),
    ):
        if not all(number >= least for number in numbers):
            raise RuntimeError(f"{window.name}: expected {wanted} but got {window}")
    for numbers in window[1:]:
        if not all(_number(number, 0) < LIMIT for number in numbers):
            raise RuntimeError(
                f"{window.name}: expected sizes that do not overflow but got {window}"
            )


def check_pool_window(window: Window) -> None:
    """Check each number of a pool's window, and that its padding is at most half of its kernel."""
    check_window(window)
    for padding, kernel in zip(window.padding, window.kernel_size, strict=True):
        if not padding <= kernel // 2:
            raise RuntimeError(
                f"{window.name}: expected padding of at most half of kernel_size but got {window}"
            )


def is_dilated(dilation: Ints) -> bool:
    """Whether the elements of a window do not lie side by side."""
    return tuple(dilation) != (1,) * len(dilation)


def check_no_empty_window(window: Window, spatial: Ints) -> None:
    """Check that every window holds an element of the input, as a derivative needs.

    The value of an empty window comes from nowhere. A window is empty if it begins in the left
    padding and its dilation steps over the whole input: with dilation 3 and padding 1, the first
    window of 2 elements has the coordinates -1 and 2, and an input of 2 elements ends before 2. The
    padding is at most half of the kernel, so no later window is empty.
    """
    if not is_dilated(window.dilation):
        return
    for size, padding, dilation in zip(spatial, window.padding, window.dilation, strict=True):
        first_inside = -padding % dilation  # of the first window
        if not holds(first_inside < size):
            raise NotImplementedError(
                f"{window.name}: expected every window to hold an element of the input, for its "
                f"derivative, but got spatial sizes {[*spatial]}, {window}"
            )


def unpooled_shape(
    values: Tensor,
    indices: Tensor,
    output_size: Ints,
    window: Window,
    reduce: str,
    *,
    is_forward: bool,
) -> tuple[int, ...]:
    """Check a call of ``max_unpool``, or else of its backward; return the unpooled shape."""
    name = window.name
    check_reduce(name, reduce)
    if not (1 <= window.rank <= 3 and len({*map(len, window[1:4])}) == 1):
        raise ValueError(
            f"{name}: expected kernel_size, stride and padding of one length, 1, 2 or 3, but got "
            f"{window}"
        )
    check_window(window)
    _check_tensors(values, indices, window, reduce)
    _check_shape(window, "input" if is_forward else "indices", (values if is_forward else indices))
    if is_forward and not _same_sizes(values.shape, indices.shape):
        raise RuntimeError(
            f"{name}: expected indices of the input's shape, {[*values.shape]}, but got "
            f"{[*indices.shape]}"
        )
    if len(output_size) != window.rank:
        raise ValueError(
            f"{name}: expected output_size of {window.rank} spatial sizes but got {[*output_size]}"
        )
    for size in output_size:
        if not holds(size > 0):
            raise ValueError(
                f"{name}: expected output_size, or its default, to contain positive spatial "
                f"dimensions but got {[*output_size]} for {window}"
            )
    unpooled = (*indices.shape[: -window.rank], *output_size)
    _check_overflow(window, indices.shape, unpooled)
    if not is_forward and not _same_sizes(values.shape, unpooled):
        raise RuntimeError(
            f"{name}: expected grad_output of shape {[*unpooled]} but got {[*values.shape]}"
        )
    return unpooled


def pooled_shape(
    input: Tensor, window: Window, ceil_mode: bool, index_dtype: torch.dtype
) -> tuple[int, ...]:
    """Check a call of ``max_pool``; return the pooled shape."""
    name = window.name
    if not (1 <= window.rank <= 3 and len({*map(len, window[1:])}) == 1):
        raise RuntimeError(
            f"{name}: expected kernel_size, stride, padding and dilation of one length, 1, 2 or 3, "
            f"but got {window}"
        )
    check_pool_window(window)
    if input.dtype not in ORDERED_DTYPES:
        raise NotImplementedError(
            f"{name}: expected a dtype whose elements compare but got {input.dtype}"
        )
    _check_shape(window, "input", input)
    _check_overflow(window, input.shape, input.shape)
    spatial = input.shape[-window.rank :]
    _check_indices_fit(window, spatial, index_dtype)
    axes = [
        _decompositions.pooled_axis(*numbers, ceil_mode=ceil_mode)
        for numbers in zip(spatial, *window[1:], strict=True)
    ]
    if not all(holds(axis.pooled > 0) for axis in axes):
        raise RuntimeError(
            f"{name}: expected windows that fit the padded input but got input of shape "
            f"{[*input.shape]}, {window}"
        )
    return (*input.shape[: -window.rank], *(axis.pooled for axis in axes))


def check_as_written(operator: str, arguments: dict[str, Any]) -> None:
    """After a failed call: raise our error, if PyTorch refused an argument before a kernel saw it.

    Args:
        operator: its name.
        arguments: by their names, with tuples for lists. Numbers need not fit 64 bits.
    """
    lists = {name: value for name, value in arguments.items() if isinstance(value, tuple)}
    output_size = lists.pop("output_size", ())
    window = Window(operator.removesuffix("_backward"), **lists)
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and storage_kind(tensor) != "plain":
            raise not_dense_error(window.name, name, tensor)
    check_window(window)
    if not _fit_64_bits(output_size):
        raise RuntimeError(
            f"{window.name}: expected sizes that do not overflow but got {output_size=}, "
            f"kernel_size={window.kernel_size}, stride={window.stride}, padding={window.padding}"
        )


def check_kinds(operator: str, *tensors: Tensor | None) -> None:
    """Check what only callers of torch.ops can give: no tensor, or one that is not dense."""
    for tensor in tensors:
        if tensor is None:
            raise TypeError(f"maxunpool_cuda::{operator}: expected tensors but got None")
        kind = storage_kind(tensor)
        if kind != "plain":
            raise NotImplementedError(
                f"maxunpool_cuda::{operator}: expected dense tensors but got a {kind} tensor"
            )


def check_allocated(name: str, **tensors: Tensor) -> None:
    """Check that all elements lie in their storage, which somebody may have freed meanwhile.

    FSDP and offloading do that, by ``tensor.untyped_storage().resize_(0)``.
    """
    for argument, tensor in tensors.items():
        if not _is_allocated(tensor):
            raise RuntimeError(
                f"{name}: expected {argument} in memory but got a tensor of shape "
                f"{[*tensor.shape]} in a storage of {tensor.untyped_storage().nbytes()} bytes"
            )


def _is_allocated(tensor: Tensor) -> bool:
    """Whether all elements lie in the storage. A tensor that :mod:`torch.func` wraps has none."""
    try:
        room: int = tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return True
    last = tensor.storage_offset()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return bool(tensor.numel() == 0 or (last + 1) * tensor.element_size() <= room)


def not_dense_error(name: str, argument: str, tensor: Tensor) -> NotImplementedError:
    """The error of a tensor that neither this package nor torch.nn takes."""
    return NotImplementedError(
        f"{name}: expected {argument} to be a dense tensor but got a {storage_kind(tensor)} tensor"
    )


def storage_kind(tensor: Tensor) -> str:
    """One word for how ``tensor`` keeps its elements: "plain" if it is dense."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_mkldnn:
        return "mkldnn"
    return "plain" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _fit_64_bits(numbers: Ints) -> bool:
    return all(-(2**63) <= number < 2**63 for number in numbers if type(number) is int)


def _number(size: Any, otherwise: int) -> int:
    """The size, or another number if it is symbolic."""
    return size if type(size) is int else otherwise


def _same_sizes(sizes: Ints, others: Ints) -> bool:
    return len(sizes) == len(others) and all(
        holds(size == other) for size, other in zip(sizes, others, strict=True)
    )


def _check_tensors(values: Tensor, indices: Tensor, window: Window, reduce: str) -> None:
    """Check devices and dtypes."""
    if values.device != indices.device:
        raise RuntimeError(
            f"{window.name}: expected values and indices on the same device but got "
            f"{values.device} and {indices.device}"
        )
    if indices.dtype not in INDEX_DTYPES:
        raise RuntimeError(
            f"{window.name}: expected indices of torch.int64, torch.int32 or torch.uint8 but got "
            f"{indices.dtype}"
        )
    if indices.dtype == torch.uint8:
        check_fits_uint8(window)
    if reduce == "sum" and values.dtype not in ARITHMETIC_DTYPES:
        raise NotImplementedError(
            f"{window.name}: expected a dtype that adds up for reduce='sum' but got {values.dtype}"
        )


def _check_shape(window: Window, argument: str, tensor: Tensor) -> None:
    """Check a shape: [batch, channels, spatial sizes...], or without a batch."""
    least, shape = window.rank + 1, tensor.shape
    if not (len(shape) in (least, least + 1) and all(holds(size > 0) for size in shape[-least:])):
        raise shape_error(window, argument, shape)


def shape_error(window: Window, argument: str, shape: Ints) -> RuntimeError:
    """The error of an argument that has not the dimensions of a call, or an empty one."""
    least = window.rank + 1
    return RuntimeError(
        f"{window.name}: expected {argument} of {least} or {least + 1} dimensions, of which only a "
        f"batch may be empty, but got shape {[*shape]}"
    )


def check_fits_uint8(window: Window) -> None:
    if not fits_uint8(window.kernel_size, window.dilation):
        raise ValueError(
            f"{window.name}: expected kernel_size of at most {MOST_OFFSETS} elements, and no "
            f"dilation, for uint8 indices, which are offsets in the window, but got {window}; use "
            "int32"
        )


def _check_indices_fit(window: Window, spatial: Ints, index_dtype: torch.dtype) -> None:
    check_index_dtype(window.name, index_dtype)
    if index_dtype == torch.uint8:
        check_fits_uint8(window)
    elif index_dtype == torch.int32 and not holds(math.prod(spatial) < 2**31):
        raise large_plane_error(window.name, spatial)


def _check_overflow(window: Window, cells: Ints, unpooled: Ints) -> None:
    """Check that no number overflows that is computed from these: csrc/guard.h explains the terms.

    They are floats as there, where 2^60 - 1 is 2^60. A symbolic size counts as 1.
    """
    leading = len(unpooled) - window.rank
    sizes = [float(_number(size, 1)) for size in unpooled]
    fits = 16 * math.prod(max(size, 1) + 1 for size in sizes) < 4 * LIMIT
    for number in range(window.rank):
        apart = 1.0  # of two elements of a window in memory, at most
        if window.dilation:
            apart = _number(window.dilation[number], 1) * math.prod(sizes[leading - 1 :])
        cell_count = float(_number(cells[leading + number], 1))
        fits = (
            fits
            and _number(window.kernel_size[number], 1) * apart < LIMIT
            and _number(window.stride[number], 1) * cell_count < LIMIT
            and float(_number(window.padding[number], 1)) < LIMIT
        )
    if not fits:
        raise RuntimeError(
            f"{window.name}: expected sizes that do not overflow but got an unpooled shape "
            f"{[*unpooled]}, {window}"
        )
