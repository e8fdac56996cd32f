# SPDX-License-Identifier: BSD-3-Clause
"""Max unpooling, max pooling and adaptive max pooling as functions, in place of torch.nn's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import (
    handle_torch_function,
    has_torch_function_unary,
    has_torch_function_variadic,
)

from . import _arguments, _ops
from ._arguments import IntOrInts, IntsOrNones, Reduce, per_dim

# What pooling returns, a tensor or two, as return_indices says. Any, as torch.nn has it.
Pooled = Any
# What most calls have, for checks in the way of every call.
_LAST: Reduce = "last"
_INT64 = torch.int64


def _is_foreign(
    name: str, input: Tensor, index_dtype: torch.dtype = torch.int64, reduce: Reduce = "last"
) -> bool:
    """Whether no kernel of this package takes ``input``, so that the call is torch.nn's.

    An error if the call asks for indices or a ``reduce`` that torch.nn lacks, or if the input is
    nested. The library refuses sparse tensors: Dynamo may not look at a layout.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: expected input to be a Tensor but got {type(input).__name__}")
    if input.is_nested:
        raise _not_dense(name, input)
    known = input.is_cpu or input.is_cuda or input.is_meta
    if known and not (input.is_quantized or input.is_mkldnn):
        return False
    if reduce == "last" and index_dtype == torch.int64:
        return True
    what = f"reduce={reduce!r}" if reduce != "last" else f"{index_dtype} indices"
    raise NotImplementedError(
        f"{name}: expected a plain tensor on a CPU or CUDA device for {what}, which torch.nn "
        f"lacks, but got a {_kind(input)} tensor on {input.device.type}"
    )


def _kind(tensor: Tensor) -> str:
    """One word for how ``tensor`` keeps its elements."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_mkldnn:
        return "mkldnn"
    return "plain" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _not_dense(name: str, input: Tensor) -> NotImplementedError:
    """The error of an input that neither this package nor torch.nn takes."""
    return NotImplementedError(
        f"{name}: expected input to be a dense tensor but got a {_kind(input)} tensor"
    )


def _max_unpool(
    function: Callable[..., Tensor], dims: int, arguments: tuple[Any, ...], reduce: Reduce
) -> Tensor:
    """Max unpooling over ``dims`` dimensions: ``function``, and its arguments as torch.nn's."""
    input, indices, kernel_size, stride, padding, output_size = arguments
    if has_torch_function_variadic(input, indices):
        tensors = (input, indices)
        overridden: Tensor = handle_torch_function(function, tensors, *arguments, reduce=reduce)
        return overridden
    name = function.__name__
    if not isinstance(indices, Tensor):
        raise TypeError(f"{name}: expected indices to be a Tensor but got {type(indices).__name__}")
    if reduce is not _LAST:  # the usual one costs no call
        _arguments.check_reduce(name, reduce)
    if _is_foreign(name, input, indices.dtype, reduce):
        if input.is_quantized or input.is_mkldnn:  # which torch.nn pools but does not unpool
            raise _not_dense(name, input)
        theirs: Callable[..., Tensor] = getattr(torch.nn.functional, name)
        return theirs(*arguments)
    kernel = per_dim(name, "kernel_size", kernel_size, dims)
    steps = kernel if stride is None else per_dim(name, "stride", stride, dims)
    pads = per_dim(name, "padding", padding, dims)
    sizes = _arguments.unpooled_size(name, input.shape, kernel, steps, pads, output_size)
    return _ops.call_max_unpool((input, indices, sizes, kernel, steps, pads, reduce))


def max_unpool1d(
    input: Tensor,
    indices: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    output_size: Sequence[int] | None = None,
    *,
    reduce: Reduce = "last",
) -> Tensor:
    """Scatter pooled signals, ``(N, C, L)`` or ``(C, L)``, back to where ``indices`` say.

    All else is as in :func:`max_unpool2d`.

    Example:
        >>> pooled = torch.tensor([[2.0, 4.0]])
        >>> max_unpool1d(pooled, torch.tensor([[1, 3]]), 2)
        tensor([[0., 2., 0., 4.]])
    """
    arguments = (input, indices, kernel_size, stride, padding, output_size)
    return _max_unpool(max_unpool1d, 1, arguments, reduce)


def max_unpool2d(
    input: Tensor,
    indices: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    output_size: Sequence[int] | None = None,
    *,
    reduce: Reduce = "last",
) -> Tensor:
    """Scatter pooled images back to where ``indices`` say; all other outputs are zero.

    Per plane, with ``j`` in row-major order of the pooled plane,
    ``output[indices[j]] = input[j]``. Windows that overlap may hold the same index more than once:

    - ``reduce="last"``: the last ``j`` wins, on every device and with any number of threads;
    - ``reduce="sum"``: they add up.

    The gradient is the exact transpose: under ``"last"`` the winner receives it and the others
    receive zero.

    Args:
        input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``, of any dtype; for ``"sum"`` one
            that adds up. A channels_last input gives a channels_last output.
        indices: as ``input``. int64 or int32: flat positions in the output plane, as
            :func:`torch.nn.functional.max_pool2d` returns them. uint8: row-major offsets in the
            window of each element, which has at most 256 positions.
        kernel_size: size of the pooling window.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding the pooling added.
        output_size: ``(H_out, W_out)``, within a stride of torch.nn's default, which is
            ``(in - 1) * stride - 2 * padding + kernel_size``; or with two sizes before them (for an
            unbatched input, or with one), which are ignored, as torch.nn ignores them.
        reduce: ``"last"`` or ``"sum"``.

    Returns:
        ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``.

    Raises:
        RuntimeError: shapes, devices or index dtype do not fit; a plane is empty; ``kernel_size``
            or ``stride`` is not positive, ``padding`` is negative, sizes overflow, or there are
            neither one nor as many numbers as dimensions; an index lies outside its output plane
            (on CUDA the next unpooling does, or :func:`maxunpool_cuda.check_errors`).
        ValueError: ``output_size`` or ``reduce`` is not one of those allowed; the window leaves no
            output, or has too many elements for uint8 indices.
        TypeError: ``input`` or ``indices`` is no tensor; a size is no 64-bit int, as a bool is
            none.
        NotImplementedError: the dtype does not add up; a tensor is not dense; or ``input`` is of a
            device that only torch.nn takes, and the call asks for what torch.nn lacks.

    Example:
        >>> pool = torch.nn.MaxPool2d(2, return_indices=True)
        >>> pooled, indices = pool(torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]))
        >>> max_unpool2d(pooled, indices, 2)
        tensor([[[0., 0.],
                 [4., 0.]]])
    """
    arguments = (input, indices, kernel_size, stride, padding, output_size)
    return _max_unpool(max_unpool2d, 2, arguments, reduce)


def max_unpool3d(
    input: Tensor,
    indices: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    output_size: Sequence[int] | None = None,
    *,
    reduce: Reduce = "last",
) -> Tensor:
    """Scatter pooled volumes, ``(N, C, D, H, W)`` or ``(C, D, H, W)``, to where ``indices`` say.

    All else is as in :func:`max_unpool2d`.

    Example:
        >>> pooled = torch.tensor([[[[5.0]]]])
        >>> max_unpool3d(pooled, torch.tensor([[[[6]]]]), 2).flatten()
        tensor([0., 0., 0., 0., 0., 0., 5., 0.])
    """
    arguments = (input, indices, kernel_size, stride, padding, output_size)
    return _max_unpool(max_unpool3d, 3, arguments, reduce)


def _max_pool(
    function: Callable[..., Pooled], dims: int, arguments: tuple[Any, ...], index_dtype: torch.dtype
) -> Pooled:
    """Max pooling over ``dims`` dimensions: ``function``, and its arguments as torch.nn's."""
    input, kernel_size, stride, padding, dilation, ceil_mode, return_indices = arguments
    if has_torch_function_unary(input):
        return handle_torch_function(function, (input,), *arguments, index_dtype=index_dtype)
    name = function.__name__
    if index_dtype is not _INT64:  # the usual one costs no call
        _arguments.check_index_dtype(name, index_dtype)
    if _is_foreign(name, input, index_dtype if return_indices else torch.int64):
        return getattr(torch.nn.functional, name)(*arguments)
    if not isinstance(ceil_mode, bool):
        raise TypeError(f"{name}: expected ceil_mode to be a bool but got {ceil_mode!r}")
    kernel = per_dim(name, "kernel_size", kernel_size, dims)
    no_stride = stride is None or (isinstance(stride, (tuple, list)) and len(stride) == 0)
    steps = kernel if no_stride else per_dim(name, "stride", stride, dims)
    pads = per_dim(name, "padding", padding, dims)
    spread = per_dim(name, "dilation", dilation, dims)
    if not return_indices:
        if _fuses(input, kernel):
            window = (kernel, steps, pads, spread)
            return torch.ops.aten.max_pool2d_with_indices(input, *window, ceil_mode)[0]
        index_dtype = _arguments.smallest_index_dtype(input.shape, kernel, spread)
    arguments = (input, kernel, steps, pads, spread, ceil_mode, index_dtype)
    return _ops.call_max_pool(arguments, bool(return_indices))


def _fuses(input: Tensor, kernel_size: tuple[int, ...]) -> bool:
    """Whether Inductor is compiling a plain pool that it fuses with what is around it.

    Such a pool is PyTorch's operator, as fast as this package's kernels. Inductor compiles 2d
    windows of at most 25 elements itself; a gradient would need the indices that it then keeps.
    Subclasses of Tensor and exported programs keep this package's operator.
    """
    return (
        torch.compiler.is_compiling()
        and not _arguments.is_exporting()
        and len(kernel_size) == 2
        and math.prod(kernel_size) <= 25
        and input.dtype.is_floating_point
        and type(input) in (Tensor, torch.nn.Parameter)
        and not (torch.is_grad_enabled() and input.requires_grad)
    )


def max_pool1d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Take the largest of each window of a signal, ``(N, C, L)`` or ``(C, L)``.

    All else is as in :func:`max_pool2d`.

    Example:
        >>> max_pool1d(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), 2, return_indices=True)
        (tensor([[3., 2.]]), tensor([[1, 2]]))
    """
    arguments = (input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return _max_pool(max_pool1d, 1, arguments, index_dtype)


def max_pool2d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Take the largest of each window, as :func:`torch.nn.functional.max_pool2d` does, bit for bit.

    Of equal elements the first is taken, in row-major order. A NaN is taken before every number,
    and of several NaN the last. It keeps its bits, where PyTorch may write another NaN for float16
    and bfloat16.

    The indices say where. int64 and int32 ones are flat positions in the input plane, and int64
    ones those of PyTorch. uint8 ones take an eighth of the memory: the row-major offset inside the
    window, which counts the cells in the padding as well.

    Args:
        input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``, of floating-point numbers or
            integers. A channels_last input gives channels_last results. torch.nn's function pools
            quantized and mkldnn tensors, and those of devices other than CPU and CUDA.
        kernel_size: size of the window.
        stride: stride of the window; default: ``kernel_size``.
        padding: cells of minus infinity on both sides; at most half of ``kernel_size``.
        dilation: distance between the cells of a window.
        ceil_mode: whether a last window may reach beyond the padding, if it begins before it.
        return_indices: whether to return where the maxima are, too.
        index_dtype: int64, int32 (of planes below 2^31 positions) or uint8 (of windows of at most
            256 cells, without dilation).

    Returns:
        ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, or two such tensors: values and indices.

    Raises:
        RuntimeError: the input's shape, or the window, is none that can be pooled.
        ValueError: ``index_dtype`` is none of those allowed, or cannot name all there is to name.
        TypeError: ``input`` is no tensor, ``ceil_mode`` no bool, or a size no 64-bit int, as a
            bool is none.
        NotImplementedError: the dtype does not compare; ``input`` is sparse or nested; a derivative
            is needed where dilation leaves a window without an element of the input; torch.nn has
            to pool ``input``, but lacks ``index_dtype``.

    Example:
        >>> image = torch.tensor([[[1.0, 2.0, 7.0, 5.0], [4.0, 3.0, 6.0, 8.0]]])
        >>> max_pool2d(image, 2, return_indices=True)
        (tensor([[[4., 8.]]]), tensor([[[4, 7]]]))
        >>> max_pool2d(image, 2, return_indices=True, index_dtype=torch.uint8)
        (tensor([[[4., 8.]]]), tensor([[[2, 3]]], dtype=torch.uint8))
    """
    arguments = (input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return _max_pool(max_pool2d, 2, arguments, index_dtype)


def max_pool3d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Take the largest of each window of a volume, ``(N, C, D, H, W)`` or ``(C, D, H, W)``.

    All else is as in :func:`max_pool2d`.

    Example:
        >>> volume = torch.arange(8.0).reshape(1, 2, 2, 2)
        >>> max_pool3d(volume, 2, return_indices=True, index_dtype=torch.int32)
        (tensor([[[[7.]]]]), tensor([[[[7]]]], dtype=torch.int32))
    """
    arguments = (input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return _max_pool(max_pool3d, 3, arguments, index_dtype)


def _is_known(size: object) -> bool:
    """Whether this is an int, and no symbolic one."""
    if not torch.compiler.is_compiling():
        return type(size) is int
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which imports SymPy

    return isinstance(size, int) and has_static_value(size)


# What torch.nn's adaptive pooling takes.
_ADAPTIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _one_window(input: Tensor, output_size: object, dims: int) -> tuple[int, ...] | None:
    """The window of the max pooling that is this adaptive pooling, or None if there is none.

    Such windows lie side by side. All sizes are multiples of ``output_size``, and known: a question
    about a symbolic size would fix it in the graph that is being traced. Exported programs have
    none, since their portable form has nodes for each element of a window. Empty inputs have none,
    and neither have arguments that only torch.nn's function can refuse.
    """
    asked = (output_size,) * dims if type(output_size) is int else output_size
    if not isinstance(asked, (tuple, list)) or len(asked) != dims:
        return None
    shape, kernel = input.shape, []
    if len(shape) - dims not in (1, 2) or input.dtype not in _ADAPTIVE_DTYPES:
        return None
    if any(_is_known(n) and n == 0 for n in shape):
        return None
    if _ops.is_traced() and _arguments.is_exporting():
        return None
    for n, m in zip(shape[-dims:], asked, strict=True):
        pooled = n if m is None and dims > 1 else m  # torch.nn's function has no None in 1d
        if not (_is_known(n) and _is_known(pooled) and pooled > 0 and n % pooled == 0):
            return None
        kernel.append(n // pooled)
    return tuple(kernel)


def _pool_one_window(
    function: Callable[..., Pooled],
    arguments: tuple[Any, ...],
    window: tuple[int, ...],
    index_dtype: torch.dtype,
) -> Pooled:
    """Adaptive pooling, ``function``, by max pooling with this window, side by side."""
    (input, _, return_indices), dims = arguments, len(window)
    if index_dtype == torch.int32:
        _arguments.check_fits_int32(function.__name__, input.shape[-dims:])
    pooling = (input, window, window, 0, 1, False, return_indices)
    results = _max_pool(function, dims, pooling, index_dtype)
    if dims < 3:
        return results
    # Of volumes, torch.nn's function returns contiguous tensors alone.
    return tuple(map(Tensor.contiguous, results)) if return_indices else results.contiguous()


def _adaptive(
    function: Callable[..., Pooled], dims: int, arguments: tuple[Any, ...], index_dtype: torch.dtype
) -> Pooled:
    """Adaptive pooling over ``dims`` dimensions: ``function``, and its arguments as torch.nn's.

    If all windows have one size, this package's max pooling does it. Else torch.nn's function finds
    the maxima, and on a CPU its gradient is deterministic. Elsewhere, and in what is compiled or
    exported, an operator of this package takes them, for its gradient. That also has the
    forward-mode derivatives that torch.nn's lacks under PyTorch's older vmap.
    """
    input, output_size, return_indices = arguments
    if has_torch_function_unary(input):
        return handle_torch_function(function, (input,), *arguments, index_dtype=index_dtype)
    name = function.__name__
    _arguments.check_index_dtype(name, index_dtype, offsets=False)
    foreign = _is_foreign(name, input, index_dtype if return_indices else torch.int64)
    window = None if foreign else _one_window(input, output_size, dims)
    if window is not None:
        return _pool_one_window(function, arguments, window, index_dtype)
    eager = not _ops.is_traced() and torch.autograd.forward_ad._current_level < 0
    if eager and not foreign and input.layout is not torch.strided:
        raise _not_dense(name, input)
    theirs = foreign or (input.is_cpu and eager)
    find = getattr(torch.nn.functional, f"{name}_with_indices")
    values, indices = find(input if theirs else input.detach(), output_size)
    if index_dtype == torch.int32:
        _arguments.check_fits_int32(name, input.shape[-dims:])
        indices = indices.int()
    if not theirs and 0 not in indices.shape[-dims:]:
        # Window i begins at floor(i * n / m) and ends at ceil((i + 1) * n / m), of sizes n and m. A
        # window near it makes the gradient fast; the result is right for any window.
        sizes, pooled = input.shape[-dims:], indices.shape[-dims:]
        kernel = [2 * -(-n // m) - n // m for n, m in zip(sizes, pooled, strict=True)]
        # PyTorch 2.8 compiles torch.sym_max of symbolic sizes alone.
        known = all(map(_is_known, (*sizes, *pooled)))
        largest: Callable[..., Any] = max if known else torch.sym_max
        stride = [largest(1, n // m) for n, m in zip(sizes, pooled, strict=True)]
        values = _ops.max_unpool_backward(input, indices, sizes, kernel, stride, [0] * dims, "sum")
        # Of volumes, torch.nn's function returns contiguous tensors alone.
        values = values.contiguous() if dims == 3 else values
    return (values, indices) if return_indices else values


def adaptive_max_pool1d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Pool a signal, ``(N, C, L)`` or ``(C, L)``, to the size that is asked for.

    ``output_size`` is one int. All else is as in :func:`adaptive_max_pool2d`.

    Example:
        >>> adaptive_max_pool1d(torch.tensor([[1.0, 3.0, 2.0]]), 2, return_indices=True)
        (tensor([[3., 3.]]), tensor([[1, 1]]))
    """
    return _adaptive(adaptive_max_pool1d, 1, (input, output_size, return_indices), index_dtype)


def adaptive_max_pool2d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Pool to the size that is asked for, as :func:`torch.nn.functional.adaptive_max_pool2d` does.

    Along an axis of size n that is pooled to size m, window i holds the elements from
    ``floor(i * n / m)`` to before ``ceil((i + 1) * n / m)``, as PyTorch defines it. Values and
    indices are PyTorch's, on every device. The gradient is deterministic under
    :func:`torch.use_deterministic_algorithms`, and there are gradients of every order.

    Args:
        input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``, of float16 to float64 or bfloat16.
        output_size: ``(H_out, W_out)``, or one int for both; None keeps the size of the input.
        return_indices: whether to return where the maxima are, too.
        index_dtype: int64 or int32, of flat positions in the input plane. Windows of different
            sizes have no offsets in common, so uint8 is refused.

    Returns:
        ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, or two such tensors: values and indices.

    Raises:
        ValueError: ``index_dtype`` is none of those allowed, or cannot name all there is to name.
        RuntimeError, TypeError, NotImplementedError: torch.nn's function raises it, in its own
            words, for shapes, sizes or dtypes; ``input`` is sparse or nested; or torch.nn has to
            pool it, but lacks ``index_dtype``.

    Example:
        >>> image = torch.tensor([[[1.0, 2.0, 7.0], [4.0, 3.0, 6.0]]])
        >>> adaptive_max_pool2d(image, (None, 2), return_indices=True)
        (tensor([[[2., 7.],
                 [4., 6.]]]), tensor([[[1, 2],
                 [3, 5]]]))
    """
    return _adaptive(adaptive_max_pool2d, 2, (input, output_size, return_indices), index_dtype)


def adaptive_max_pool3d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Pool a volume, ``(N, C, D, H, W)`` or ``(C, D, H, W)``, to the size that is asked for.

    All else is as in :func:`adaptive_max_pool2d`.

    Example:
        >>> adaptive_max_pool3d(torch.arange(8.0).reshape(1, 2, 2, 2), 1, index_dtype=torch.int32)
        tensor([[[[7.]]]])
    """
    return _adaptive(adaptive_max_pool3d, 3, (input, output_size, return_indices), index_dtype)
