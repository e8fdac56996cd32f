# SPDX-License-Identifier: BSD-3-Clause
"""From the arguments of torch.nn's functions to those of the operators.

Ints become tuples, and what was not given gets its default. The operators check the rest, for every
caller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from . import _ops

Ints = tuple[int, ...]
IntOrInts = int | Sequence[int]
IntsOrNones = int | None | Sequence[int | None]
Reduce = Literal["last", "sum"]
INDEX_DTYPES = (torch.int64, torch.int32, torch.uint8)
_INT = (int, torch.SymInt)


def check_reduce(name: str, reduce: str) -> None:
    """Raise a ValueError that begins with ``name`` unless ``reduce`` is a :data:`Reduce`."""
    if not isinstance(reduce, str) or reduce not in ("last", "sum"):
        raise ValueError(f"{name}: expected reduce to be 'last' or 'sum' but got {reduce!r}")


def check_index_dtype(name: str, index_dtype: torch.dtype, offsets: bool = True) -> None:
    """Raise a ValueError that begins with ``name`` unless indices can be of this dtype.

    ``offsets``: whether they may be offsets in a window.
    """
    if index_dtype not in INDEX_DTYPES or (index_dtype == torch.uint8 and not offsets):
        flat = "torch.int64 or torch.int32, as adaptive windows, of many sizes, have no offsets,"
        wanted = "torch.int64, torch.int32 or torch.uint8" if offsets else flat
        raise ValueError(f"{name}: expected index_dtype to be {wanted} but got {index_dtype!r}")


def fits_uint8(kernel_size: Ints, dilation: Ints = ()) -> bool:
    """Whether uint8 can name the elements of a window."""
    return math.prod(kernel_size) <= 256 and all(step == 1 for step in dilation)


def smallest_index_dtype(shape: Ints, kernel_size: Ints, dilation: Ints) -> torch.dtype:
    """The dtype of indices that only the backward of a pool sees."""
    if fits_uint8(kernel_size, dilation):
        return torch.uint8
    spatial = shape[-len(kernel_size) :]
    # Comparing a symbolic size would fix it in the graph that is being traced.
    if all(type(size) is int for size in spatial) and math.prod(spatial) < 2**31:
        return torch.int32
    return torch.int64


def check_fits_int32(name: str, spatial: Ints) -> None:
    """Raise a ValueError that begins with ``name`` unless int32 can name every position."""
    if _surely(math.prod(spatial) >= 2**31):
        raise ValueError(
            f"{name}: expected a plane of fewer than 2^31 positions for int32 indices but got "
            f"spatial sizes {list(spatial)}; use int64"
        )


def per_dim(name: str, argument: str, value: IntOrInts, dims: int) -> Ints:
    """One int per spatial dimension, from one int for all of them, or a sequence of one or each."""
    if type(value) is int:
        return (value,) * dims
    if type(value) is tuple and len(value) == dims:
        for number in value:
            if type(number) is not int:
                break
        else:  # all are plain ints
            return value
    numbers: Any = value if is_sequence(value) else (value,)
    result = _ints(name, f"{argument} to be an int or a sequence of ints", value, numbers)
    if len(result) not in (1, dims):
        raise RuntimeError(
            f"{name}: expected {argument} to be one or {dims} ints but got {value!r}"
        )
    return result * dims if len(result) == 1 else result


def unpooled_size(
    name: str,
    shape: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    output_size: Iterable[int] | None,
) -> Ints:
    """The spatial sizes that unpooling an input of ``shape`` gives.

    By default these are ``(in - 1) * stride - 2 * padding + kernel_size``, the formula of
    :class:`torch.nn.MaxUnpool2d`. ``output_size`` replaces them, if it differs by less than a
    stride: all sizes, or the spatial ones alone. Those before are ignored, as in torch.nn.
    """
    dims = len(kernel_size)
    # torch.jit.trace makes sizes tensors.
    pooled = _ints(name, "input.shape to hold ints", shape, shape[-dims:])
    axes = zip(pooled, kernel_size, stride, padding, strict=False)
    default = tuple([(n - 1) * s - 2 * p + k for n, k, s, p in axes])
    if output_size is None:
        return default
    wanted = "output_size to be a sequence of ints"
    if not is_sequence(output_size):
        raise TypeError(f"{name}: expected {wanted} but got {output_size!r}")
    sizes = tuple(output_size)
    lengths = (dims, dims + 2) if len(shape) != dims + 1 else (dims, dims + 1, dims + 2)
    if len(sizes) not in lengths:
        numbers = " or ".join(map(str, lengths))
        raise ValueError(f"{name}: expected output_size of {numbers} ints but got {list(sizes)}")
    sizes = _ints(name, wanted, output_size, sizes[-dims:])
    for size, middle, step in zip(sizes, default, stride, strict=False):
        if _surely(size <= middle - step) or _surely(size >= middle + step):
            if not _ops.is_traced():
                _ops.check_window("max_unpool", kernel_size, stride, padding)
            raise ValueError(
                f"{name}: expected output_size within a stride of {list(default)}, the default, "
                f"but got {list(sizes)} for stride={list(stride)}"
            )
    if is_exporting():
        _assert_within_a_stride(name, sizes, default, stride)
    return sizes


def is_sequence(value: object) -> bool:
    """Whether ``value`` holds numbers in an order: a sequence, or an array of one dimension.

    Text and bytes do not count as numbers.
    """
    if isinstance(value, (tuple, list)):
        return True
    if isinstance(value, Sequence):
        return not isinstance(value, (str, bytes, bytearray, memoryview))
    return getattr(value, "ndim", 0) == 1


def _ints(name: str, wanted: str, given: object, values: Iterable[int]) -> Ints:
    """``values``, which the caller has ``given``, as ints; symbolic ones stay symbolic.

    A TypeError says that ``wanted`` was expected if one of them is no int. A bool is none: it is
    a flag in a wrong place.
    """
    try:
        return tuple([v if type(v) in _INT else _index(v) for v in values])
    except TypeError:
        raise TypeError(f"{name}: expected {wanted} but got {given!r}") from None


def _index(value: Any) -> Any:
    """``value`` as an int, if it is of another type that counts: NumPy's, or a tensor."""
    if isinstance(value, bool):
        raise TypeError
    return value if isinstance(value, _INT) else operator.index(value)


def is_exporting() -> bool:
    """Whether torch.export traces the call."""
    return torch.compiler.is_exporting()


# Dynamo calls this function instead of tracing it: PyTorch 2.11 traces is_exporting as True.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _surely(condition: bool) -> bool:
    """True if the condition on sizes holds, false also if tracing cannot decide it.

    Under torch.compile a condition on symbolic sizes becomes a guard. torch.export refuses guards
    on named dimensions, so there the condition must hold for every size.
    """
    if torch.compiler.is_compiling():
        # An import at the top would import SymPy.
        from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

        decide = statically_known_true if is_exporting() else guard_or_false
        return decide(condition)
    return condition


def _assert_within_a_stride(name: str, sizes: Ints, default: Ints, stride: Ints) -> None:
    """Make the exported program check symbolic sizes when it runs, without a guard on them.

    The assertions are on tensors: torch.export would evaluate one on symbolic sizes, as a guard.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # as in _surely

    for size, middle, step in zip(sizes, default, stride, strict=True):
        is_above = statically_known_true(size > middle - step)
        is_below = statically_known_true(size < middle + step)
        if is_above and is_below:
            continue
        distance = torch.scalar_tensor(size - middle, dtype=torch.int64, device="cpu").abs()
        wanted = f"{name}: expected output_size within a stride of the default"
        torch.ops.aten._assert_async.msg(distance < step, wanted)
