"""The rules for sizes that belong to the functions rather than the operators: no tensors here.

They are Python, as torch.nn's are, so that traced calls raise what eager ones do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

Ints = tuple[int, ...]
IntOrInts = int | Sequence[int]

_TOO_LARGE = 2**63
_LARGE_WINDOW = 2**31  # with smaller ones, no sizes that fit a memory overflow


def _index(value: int) -> int:
    if isinstance(value, int | torch.SymInt):
        return value
    # Asked first, for Dynamo does not let the TypeError of a float be caught.
    return operator.index(value) if hasattr(value, "__index__") else _TOO_LARGE


def ints(name: str, argument: str, values: Iterable[int], *, sizes: bool = False) -> Ints:
    """``values`` as ints, symbolic or plain.

    ``sizes``: they are those of tensors, which a trace may leave open. To compare them with a bound
    would impose it, so traced ones are left to the operator.
    """
    try:
        result = tuple(_index(v) for v in values)
    except TypeError:
        result = (_TOO_LARGE,)
    open_ended = sizes and torch.compiler.is_compiling()
    if not open_ended and any(isinstance(v, int) and abs(v) >= _TOO_LARGE for v in result):
        raise TypeError(f"{name}: expected {argument} to be 64-bit ints but got {values!r}")
    return result


def in_tuple(value: IntOrInts) -> Iterable[int]:
    """Several ints as they are, and one in a tuple: an int, or a tensor or an array of no dims."""
    several = isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
    return value if several else (value,)  # type: ignore[return-value]  # of several, or one


def per_dim(name: str, argument: str, value: IntOrInts, dims: int) -> Ints:
    """One int per spatial dimension, from one int for all or a sequence of them."""
    values = in_tuple(value)
    result = ints(name, argument, values)
    if values is not value:
        return result * dims
    if len(result) != dims:
        raise ValueError(
            f"{name}: expected {argument} to be an int or {dims} ints but got {value!r}"
        )
    return result


def holds(condition: bool) -> bool:
    """Whether a condition on sizes is met; what a trace leaves open, for want of data, is."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_true  # which imports SymPy

        return guard_or_true(condition)
    return condition


def default_output_size(pooled: Ints, kernel_size: Ints, stride: Ints, padding: Ints) -> Ints:
    """Per dimension ``(in - 1) * stride - 2 * padding + kernel_size``, as torch.nn documents it."""
    dims = zip(pooled, kernel_size, stride, padding, strict=True)
    return tuple((n - 1) * s - 2 * p + k for n, k, s, p in dims)


def spatial_output_size(
    name: str,
    shape: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    output_size: Iterable[int] | None,
) -> Ints:
    """The spatial sizes of the output for an input of ``shape``.

    ``output_size`` holds them alone, or after two others, or for an unbatched input one, which may
    be anything, as for torch.nn. They differ from the default by less than a stride. An input or a
    window that makes no sense is left to the operator.
    """
    dims = len(kernel_size)
    default = shape[-dims:]
    if len(default) == dims:
        default = default_output_size(default, kernel_size, stride, padding)
    sane = all(holds(n > 0) for n in (*shape[-dims:], *kernel_size, *stride))
    sane = sane and len(default) == dims and all(p >= 0 for p in padding)
    if output_size is None:
        sizes = default
    else:
        sizes = _spatial_part(name, len(shape) - dims, dims, output_size)
        for dim, (size, middle, step) in enumerate(zip(sizes, default, stride, strict=False)):
            if sane and not (holds(middle - step < size) and holds(size < middle + step)):
                raise ValueError(
                    f"{name}: expected output_size within a stride of the default "
                    f'{list(default)} but got an invalid output_size "{list(sizes)}" '
                    f"(dim {dim} must be between {middle - step} and {middle + step})"
                )
    if sane and not all(holds(size > 0) for size in sizes):
        raise ValueError(
            f"{name}: expected output_size to contain positive spatial dimensions "
            f"but got {list(sizes)}"
        )
    window = (*kernel_size, *stride, *padding)
    open_ended = torch.compiler.is_compiling() and all(n < _LARGE_WINDOW for n in window)
    if not open_ended and any(isinstance(n, int) and abs(n) >= _TOO_LARGE for n in sizes):
        raise RuntimeError(
            f"{name}: expected an output size that does not overflow but got {list(sizes)}"
        )
    return sizes


def _spatial_part(name: str, leading: int, dims: int, output_size: Iterable[int]) -> Ints:
    if not isinstance(output_size, Iterable):
        raise TypeError(
            f"{name}: expected output_size to be a sequence of ints but got {output_size!r}"
        )
    sizes = output_size if isinstance(output_size, Sequence) else tuple(output_size)
    unbatched = leading == 1
    if len(sizes) not in (dims, dims + 2, *([dims + 1] if unbatched else ())):
        lengths = f"{dims}, {dims + 1} or {dims + 2}" if unbatched else f"{dims} or {dims + 2}"
        raise ValueError(
            f"{name}: expected an output_size of {lengths} elements but got {sizes} "
            f"(output_size should be a sequence containing {lengths} elements, "
            f"but it has a length of '{len(sizes)}')"
        )
    return ints(name, "output_size", sizes[-dims:], sizes=True)
