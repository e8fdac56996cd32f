"""The rules for the form of arguments: what each may be, and what it is by default.

They are Python, as torch.nn's are, so that traced calls raise what eager ones do. What operators
need for their own safety they check themselves.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Ints = tuple[int, ...]
IntOrInts = int | Sequence[int]
Reduce = Literal["last", "sum", "mean"]
INDEX_DTYPES = (torch.int64, torch.int32, torch.uint8)
Result = TypeVar("Result")

_CONSTANT = (int, bool, str, type(None), torch.dtype)  # whose objects never change
_TOO_LARGE = 2**63
_LARGE_WINDOW = 2**31  # with smaller ones, no sizes that fit a memory overflow


def remembered(
    make: Callable[..., Result], rule: Callable[..., Any], arguments: tuple[Any, ...]
) -> Result | None:
    """``make(*rule(*arguments))``, worked out once for arguments of the same types and values.

    None where it is not to be remembered: where Dynamo or torch.jit.trace should see it at work,
    where a list or a tensor could change, for symbolic ints, and where ``rule`` raises a TypeError.
    What is remembered holds no symbolic int.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return None
    leaves: tuple[Any, ...] = ()  # their types tell (2.0, 2.0) from (2, 2); a torch.Size has ints
    for argument in arguments:
        if type(argument) is tuple:
            leaves += argument
    try:
        result: Result = _answer(make, rule, *arguments, *leaves)
    except TypeError:
        return None
    return result


@functools.lru_cache(maxsize=4096, typed=True)
def _answer(make: Callable[..., Any], rule: Callable[..., Any], *values: Any) -> Any:
    arguments = values[: rule.__code__.co_argcount]
    if not all(map(_is_constant, arguments)):
        raise TypeError  # which is not remembered, as no exception is
    return make(*rule(*arguments))


def _is_constant(argument: object) -> bool:
    if isinstance(argument, tuple):
        return type(argument) in (tuple, torch.Size) and all(type(leaf) is int for leaf in argument)
    return type(argument) in _CONSTANT


def check_tensor(name: str, argument: str, value: object) -> None:
    """Raise a TypeError that begins with ``name`` unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected {argument} to be a Tensor but got {type(value).__name__}"
        )


def check_reduce(name: str, reduce: str) -> None:
    """Raise a ValueError that begins with ``name`` unless ``reduce`` is a :data:`Reduce`."""
    if reduce not in ("last", "sum", "mean"):
        raise ValueError(
            f"{name}: expected reduce to be 'last', 'sum' or 'mean' but got {reduce!r}"
        )


def check_index_dtype(name: str, index_dtype: torch.dtype) -> None:
    """Raise a ValueError that begins with ``name`` unless indices can be of this dtype."""
    if index_dtype not in INDEX_DTYPES:
        raise ValueError(
            f"{name}: expected index_dtype to be torch.int64, torch.int32 or torch.uint8 "
            f"but got {index_dtype!r}"
        )


def fits_uint8(kernel_size: Ints, dilation: Ints = ()) -> bool:
    """Whether uint8 can name the cells of a window."""
    return math.prod(kernel_size) <= 256 and all(step == 1 for step in dilation)


def check_fits_uint8(name: str, kernel_size: Ints, dilation: Ints | None = None) -> None:
    """Raise a ValueError that begins with ``name`` unless uint8 can name the cells of a window.

    The operators say so too, but Dynamo makes a RuntimeError of their ValueErrors.

    Args:
        name: of the function.
        kernel_size: of the window.
        dilation: of the window, if indices are made rather than taken.
    """
    if fits_uint8(kernel_size, dilation or ()):
        return
    if dilation is None:
        raise ValueError(
            f"{name}: expected kernel_size of at most 256 elements for uint8 indices, which are "
            "offsets in the window (int32 ones are not), but got "
            f"kernel_size={list(kernel_size)}"
        )
    raise ValueError(
        f"{name}: expected a window of at most 256 elements and dilation 1 for index_dtype uint8, "
        f"which counts them, but got kernel_size={list(kernel_size)}, dilation={list(dilation)}; "
        "use int32"
    )


def unpool_arguments(
    dims: int,
    shape: Ints,
    kernel_size: IntOrInts,
    stride: IntOrInts | None,
    padding: IntOrInts,
    output_size: Iterable[int] | None,
    reduce: Reduce,
) -> tuple[Ints, Ints, Ints, Ints, Reduce]:
    """What the operator takes after an input of ``shape`` and its indices, in order."""
    name = f"max_unpool{dims}d"
    check_reduce(name, reduce)
    kernel = _per_dim(name, "kernel_size", kernel_size, dims)
    steps = kernel if stride is None else _per_dim(name, "stride", stride, dims)
    padded = _per_dim(name, "padding", padding, dims)
    # torch.jit.trace makes tensors of sizes.
    shape = _ints(name, "input.shape", shape, sizes=True)
    sizes = _spatial_output_size(name, shape, kernel, steps, padded, output_size)
    return sizes, kernel, steps, padded, reduce


def pool_arguments(
    dims: int,
    shape: Ints,
    kernel_size: IntOrInts,
    stride: IntOrInts | None,
    padding: IntOrInts,
    dilation: IntOrInts,
    ceil_mode: bool,
    return_indices: bool,
    index_dtype: torch.dtype,
) -> tuple[Ints, Ints, Ints, Ints, bool, torch.dtype]:
    """What the operator takes after an input of ``shape``, in order."""
    name = f"max_pool{dims}d"
    if not isinstance(ceil_mode, bool):
        raise TypeError(
            f"{name}: expected ceil_mode to be a bool but got {ceil_mode!r} "
            f"(argument 'ceil_mode' must be bool, not {type(ceil_mode).__name__})"
        )
    check_index_dtype(name, index_dtype)
    if stride is None or (isinstance(stride, Sequence) and not stride):
        stride = kernel_size
    kernel = _pool_per_dim(name, "kernel_size", kernel_size, dims)
    steps = _pool_per_dim(name, "stride", stride, dims)
    padded = _pool_per_dim(name, "padding", padding, dims)
    spread = _pool_per_dim(name, "dilation", dilation, dims)
    if not return_indices:
        index_dtype = _smallest_index_dtype(shape, kernel, spread)
    elif torch.compiler.is_compiling() and index_dtype == torch.uint8:
        check_fits_uint8(name, kernel, spread)
    return kernel, steps, padded, spread, ceil_mode, index_dtype


def _smallest_index_dtype(shape: Ints, kernel_size: Ints, dilation: Ints) -> torch.dtype:
    """Of indices that nobody but the backward will see."""
    if fits_uint8(kernel_size, dilation):
        return torch.uint8
    spatial = shape[-len(kernel_size) :]
    # A size that is still open, in a graph that is being traced, is left open.
    if all(type(size) is int for size in spatial) and math.prod(spatial) < 2**31:
        return torch.int32
    return torch.int64


def _index(value: int) -> int:
    if isinstance(value, int | torch.SymInt):
        return value
    # Asked first, for Dynamo does not let the TypeError of a float be caught.
    return operator.index(value) if hasattr(value, "__index__") else _TOO_LARGE


def _ints(name: str, argument: str, values: Iterable[int], *, sizes: bool = False) -> Ints:
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


def _in_tuple(value: IntOrInts) -> Iterable[int]:
    """Several ints as they are, and one in a tuple: an int, or a tensor or an array of no dims."""
    several = isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
    return value if several else (value,)  # type: ignore[return-value]  # of several, or one


def _per_dim(name: str, argument: str, value: IntOrInts, dims: int) -> Ints:
    """One int per spatial dimension, from one int for all or a sequence of them."""
    values = _in_tuple(value)
    result = _ints(name, argument, values)
    if values is not value:
        return result * dims
    if len(result) != dims:
        raise ValueError(
            f"{name}: expected {argument} to be an int or {dims} ints but got {value!r}"
        )
    return result


def _pool_per_dim(name: str, argument: str, value: IntOrInts, dims: int) -> Ints:
    """As :func:`_per_dim`, by torch.nn's rules for pooling: one int in a sequence does for all."""
    result = _ints(name, argument, _in_tuple(value))
    if len(result) not in (1, dims):
        raise RuntimeError(
            f"{name}: expected {argument} to be an int or {dims} ints but got {value!r} "
            f"({argument} must either be a single int, or a tuple of {dims} ints)"
        )
    return result * dims if len(result) == 1 else result


def _holds(condition: bool) -> bool:
    """Whether a condition on sizes is met; what a trace leaves open, for want of data, is."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_true  # which imports SymPy

        return guard_or_true(condition)
    return condition


def _spatial_output_size(
    name: str,
    shape: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    output_size: Iterable[int] | None,
) -> Ints:
    """The spatial sizes of the output for an input of ``shape``.

    ``output_size`` holds them alone, or after two others, or for an unbatched input one, which may
    be anything, as for torch.nn. They differ from the default, the formula that torch.nn documents,
    by less than a stride. An input or a window that makes no sense is left to the operator.
    """
    dims = len(kernel_size)
    default = shape[-dims:]
    if len(default) == dims:
        each = zip(default, kernel_size, stride, padding, strict=True)
        default = tuple((n - 1) * s - 2 * p + k for n, k, s, p in each)
    sane = all(_holds(n > 0) for n in (*shape[-dims:], *kernel_size, *stride))
    sane = sane and len(default) == dims and all(p >= 0 for p in padding)
    if output_size is None:
        sizes = default
    else:
        sizes = _spatial_part(name, len(shape) - dims, dims, output_size)
        for dim, (size, middle, step) in enumerate(zip(sizes, default, stride, strict=False)):
            if sane and not (_holds(middle - step < size) and _holds(size < middle + step)):
                raise ValueError(
                    f"{name}: expected output_size within a stride of the default "
                    f'{list(default)} but got an invalid output_size "{list(sizes)}" '
                    f"(dim {dim} must be between {middle - step} and {middle + step})"
                )
    if sane and not all(_holds(size > 0) for size in sizes):
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
    return _ints(name, "output_size", sizes[-dims:], sizes=True)
