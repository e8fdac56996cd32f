# SPDX-License-Identifier: BSD-3-Clause
"""Turns arguments as torch.nn's functions take them into those of the operators.

For images ``kernel_size=2`` becomes ``(2, 2)``, and an output size that is not given is computed.
Only what PyTorch's users may write in several ways is checked here. The operators check the rest
(shapes, dtypes, signs), for every caller.

Every ``name`` below is that of the public function or class, with which an error begins.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch

from . import _checks

Ints: TypeAlias = tuple[int, ...]  # one for each spatial dimension; under tracing also symbolic
IntOrInts = int | Sequence[int]
IntsOrNones = int | None | Sequence[int | None]
Reduce = Literal["last", "sum"]
_INT = (int, torch.SymInt)


def check_ceil_mode(name: str, ceil_mode: object) -> None:
    """Raise a TypeError unless it is a bool."""
    if not isinstance(ceil_mode, bool):
        raise TypeError(f"{name}: expected ceil_mode to be a bool but got {ceil_mode!r}")


def smallest_index_dtype(shape: Ints, kernel_size: Ints, dilation: Ints) -> torch.dtype:
    """The smallest dtype for the indices of a pool that returns none: its backward needs them.

    Comparing a symbolic size would bound or fix it in the graph that is being traced, also one that
    a window has, as in ``max_pool1d(x, x.size(2))``. A product with such a size is symbolic, too.
    """
    if is_known_int(math.prod(kernel_size)) and _checks.fits_uint8(kernel_size, dilation):
        return torch.uint8
    plane = math.prod(shape[-len(kernel_size) :])
    if is_known_int(plane) and plane < 2**31:
        return torch.int32
    return torch.int64


def check_fits_int32(name: str, spatial: Ints) -> None:
    """Raise a ValueError if a plane of these sizes has more positions than int32 can count."""
    if _surely(math.prod(spatial) >= 2**31):
        raise _checks.large_plane_error(name, spatial)


def per_dim(name: str, argument: str, value: IntOrInts, dims: int) -> Ints:
    """One int for each of ``dims`` dimensions, from one for all of them or a sequence of ints.

    Plain ints and tuples, which most calls have, return early.
    """
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
            f"{name}: expected {argument} to be {_count(dims, 'int')} but got {value!r}"
        )
    return result * dims if len(result) == 1 else result


def _count(dims: int, noun: str) -> str:
    """How many numbers an argument may have, in words: "one int" or "one or 2 ints"."""
    return f"one {noun}" if dims == 1 else f"one or {dims} {noun}s"


def pool_window(
    name: str,
    dims: int,
    kernel_size: IntOrInts,
    stride: IntOrInts | None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
) -> tuple[Ints, Ints, Ints, Ints]:
    """The four arguments of a pool's window, each with one int for each dimension."""
    kernel = per_dim(name, "kernel_size", kernel_size, dims)
    # torch.nn's pools take (), [] and None for no stride.
    if stride is None or (isinstance(stride, (tuple, list)) and not stride):
        steps = kernel
    else:
        steps = per_dim(name, "stride", stride, dims)
    pads = per_dim(name, "padding", padding, dims)
    return kernel, steps, pads, per_dim(name, "dilation", dilation, dims)


def adaptive_size(name: str, output_size: IntsOrNones, dims: int) -> tuple[Any, ...]:
    """The size of the output in each of ``dims`` dimensions; None is that of the input.

    As in torch.nn, signals have no None, and a size may be 0.
    """
    if type(output_size) is int and output_size >= 0:  # which most calls have
        return (output_size,) * dims
    numbers: Any = output_size if is_sequence(output_size) else (output_size,)
    expected = "output_size to be an int or a sequence of ints"
    as_size = _as_int
    if dims > 1:
        expected, as_size = f"{expected} or Nones", _as_int_or_none
    sizes = _ints(name, expected, output_size, numbers, as_size)
    if len(sizes) not in (1, dims):
        raise RuntimeError(
            f"{name}: expected output_size to be {_count(dims, 'size')} but got {output_size!r}"
        )
    if any(type(size) is int and size < 0 for size in sizes):
        raise RuntimeError(f"{name}: expected no negative output_size but got {output_size!r}")
    return sizes * dims if len(sizes) == 1 else sizes


def unpooled_size(
    name: str,
    shape: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    output_size: Iterable[int] | None,
) -> Ints:
    """The spatial sizes of the result of unpooling an input of ``shape``.

    By default these are ``(in - 1) * stride - 2 * padding + kernel_size``, the formula of
    :class:`torch.nn.MaxUnpool2d`: 8 pooled by windows of 2 is 4, and ``(4 - 1) * 2 - 0 + 2`` is 8
    again. ``output_size`` replaces them if it differs by less than a stride.
    """
    # torch.jit.trace makes sizes tensors.
    pooled = _ints(name, "input.shape to hold ints", shape, shape[-len(kernel_size) :])
    if len(pooled) < len(kernel_size):
        window = _checks.Window("max_unpool", kernel_size, stride, padding)
        raise _checks.shape_error(window, "input", shape)
    axes = zip(pooled, kernel_size, stride, padding, strict=False)
    default = tuple([(n - 1) * s - 2 * p + k for n, k, s, p in axes])
    if output_size is None:
        return default
    sizes = _last_sizes(name, output_size, len(kernel_size), len(shape))
    for size, middle, step in zip(sizes, default, stride, strict=False):
        if _surely(size <= middle - step) or _surely(size >= middle + step):
            if not torch.compiler.is_compiling():
                # An impossible window is blamed before the sizes that were computed from it.
                _checks.check_window(_checks.Window("max_unpool", kernel_size, stride, padding))
            raise ValueError(
                f"{name}: expected output_size within a stride of {list(default)}, the default, "
                f"but got {output_size!r} for stride={list(stride)}"
            )
    if is_exporting() and len(default) == len(sizes):  # else the operator refuses the shape
        _assert_within_a_stride(name, sizes, default, stride)
    return sizes


def _last_sizes(name: str, output_size: Iterable[int], dims: int, input_dims: int) -> Ints:
    """The last ``dims`` numbers of ``output_size``. Those before are ignored, as in torch.nn.

    torch.nn takes none or two before them. An unbatched input may also have one, of its channels.
    """
    expected = "output_size to be a sequence of ints"
    if not is_sequence(output_size):
        raise TypeError(f"{name}: expected {expected} but got {output_size!r}")
    sizes = tuple(output_size)
    lengths = (dims, dims + 2) if input_dims != dims + 1 else (dims, dims + 1, dims + 2)
    if len(sizes) not in lengths:
        numbers = " or ".join(map(str, lengths))
        raise ValueError(f"{name}: expected output_size of {numbers} ints but got {output_size!r}")
    return _ints(name, expected, output_size, sizes[-dims:])


def is_sequence(value: object) -> bool:
    """Whether ``value`` holds numbers in an order: a sequence, or an array of one dimension.

    Text and bytes do not count as numbers.
    """
    if isinstance(value, (tuple, list)):
        return True
    if isinstance(value, Sequence):
        return not isinstance(value, (str, bytes, bytearray, memoryview))
    return getattr(value, "ndim", 0) == 1


def _as_int(value: Any) -> Any:
    """``value`` as an int, if its type is another one that counts: NumPy's, or a tensor."""
    if isinstance(value, bool):
        raise TypeError
    return value if isinstance(value, _INT) else operator.index(value)


def _as_int_or_none(value: Any) -> Any:
    return None if value is None else _as_int(value)


def _ints(
    name: str,
    expected: str,
    argument: object,
    values: Iterable[int],
    as_int: Callable[[Any], Any] = _as_int,
) -> Ints:
    """``values`` as ints; symbolic ones stay symbolic.

    If one of them is no int, a TypeError names what was expected, and the ``argument`` that they
    are of. A bool is no int here: it is a flag in a wrong place.
    """
    try:
        return tuple([v if type(v) in _INT else as_int(v) for v in values])
    except TypeError:
        raise TypeError(f"{name}: expected {expected} but got {argument!r}") from None


def is_exporting() -> bool:
    """Whether torch.export traces the call."""
    return torch.compiler.is_exporting()


# Dynamo calls this function instead of tracing it: PyTorch 2.11 traces is_exporting as True.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_known_int(size: object) -> bool:
    """Whether ``size`` is an int, and not symbolic."""
    if not torch.compiler.is_compiling():
        return type(size) is int
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which imports SymPy

    return isinstance(size, int) and has_static_value(size)


def is_symbolic(size: object) -> bool:
    """Whether torch.export or Dynamo leaves a size open."""
    return torch.compiler.is_compiling() and not is_known_int(size)


def _surely(condition: bool) -> bool:
    """Whether a condition on sizes holds. False also if tracing cannot decide it.

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
        expected = f"{name}: expected output_size within a stride of the default"
        torch.ops.aten._assert_async.msg(distance < step, expected)
