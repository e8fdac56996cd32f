# SPDX-License-Identifier: BSD-3-Clause
"""Max unpooling, max pooling and adaptive max pooling as functions, in place of torch.nn's.

Here are the signatures, with their types and documents. Each function hands its arguments to a
function for one, two and three dimensions, in _call.py or _adaptive.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ._adaptive import adaptive_max_pool as _adaptive_pool
from ._arguments import IntOrInts, IntsOrNones, Reduce
from ._call import Pooled
from ._call import max_pool as _max_pool
from ._call import max_unpool as _max_unpool

__all__ = [
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_unpool1d",
    "max_unpool2d",
    "max_unpool3d",
]


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

    For each plane, with ``j`` in row-major order of the pooled plane,
    ``output[indices[j]] = input[j]``. If windows overlap, several ``j`` may have the same index:

    - ``reduce="last"``: the last ``j`` wins, on every device and with any number of threads;
    - ``reduce="sum"``: their values add up.

    The gradient is the exact transpose: under ``"last"`` the winner receives it and the others
    receive zero, under ``"sum"`` each receives it.

    Args:
        input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``, of any dtype; for ``"sum"`` one
            that adds up. A channels_last input gives a channels_last output.
        indices: of the shape of ``input``. int64 and int32: flat positions in the output plane, as
            :func:`torch.nn.functional.max_pool2d` returns them. uint8: row-major offsets, each in
            the window that was pooled to this element; a window has at most 256 positions.
        kernel_size: size of the pooling window.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding that the pooling added on both sides.
        output_size: ``(H_out, W_out)``, each within a stride of the default, which is
            ``(in - 1) * stride - 2 * padding + kernel_size``. Numbers before these two are ignored,
            as in torch.nn: two of them, or for an unbatched input one or two.
        reduce: ``"last"`` or ``"sum"``.

    Returns:
        ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, of the dtype of ``input``.

    Raises:
        RuntimeError: shapes, devices or the dtype of ``indices`` do not fit; a plane is empty;
            ``kernel_size`` or ``stride`` is not positive, ``padding`` is negative, or one of them
            has neither one number nor one for each dimension; sizes overflow; an index lies outside
            its output plane (on CUDA the next unpooling raises this error, or
            :func:`maxunpool_cuda.check_errors`).
        ValueError: ``output_size`` or ``reduce`` is not one of those allowed; the window leaves no
            output, or has too many elements for uint8 indices.
        TypeError: ``input`` or ``indices`` is no tensor; a size is no 64-bit int. A bool is none.
        NotImplementedError: the dtype does not add up; or a tensor is not dense.

    Warning:
        The dtype of ``indices`` decides what they mean. ``indices.to(torch.uint8)`` does not make
        offsets of flat positions, and ``indices.long()`` does not make positions of offsets.

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


@overload
def max_pool1d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Tensor: ...
@overload
def max_pool1d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: Literal[True] = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]: ...
@overload
def max_pool1d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: bool = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled: ...
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
    """Take the largest element of each window of a signal, ``(N, C, L)`` or ``(C, L)``.

    All else is as in :func:`max_pool2d`.

    Example:
        >>> max_pool1d(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), 2, return_indices=True)
        (tensor([[3., 2.]]), tensor([[1, 2]]))
    """
    arguments = (input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return _max_pool(max_pool1d, 1, arguments, index_dtype)


@overload
def max_pool2d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Tensor: ...
@overload
def max_pool2d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: Literal[True] = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]: ...
@overload
def max_pool2d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: bool = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled: ...
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
    """Take the largest element of each window, as :func:`torch.nn.functional.max_pool2d` does.

    Results are equal to torch.nn's, bit for bit. Ties go to the first element in row-major order. A
    NaN wins over every number, and the last of several NaN over the others. It keeps its bits
    (PyTorch may change them for float16 and bfloat16).

    The indices say where the largest elements are. int64 and int32 indices are flat positions in
    the input plane; the int64 ones are PyTorch's. uint8 indices take an eighth of their memory:
    each is the offset of the element in its window, row-major. It counts the padding, too.

    Args:
        input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``, of floating-point numbers, integers or
            bools. A channels_last input gives channels_last results. Quantized and mkldnn tensors
            go to torch.nn's function, as do those of other devices where it can.
        kernel_size: size of the window.
        stride: stride of the window; default: ``kernel_size``.
        padding: elements of minus infinity on both sides; at most half of ``kernel_size``.
        dilation: distance between the elements of a window.
        ceil_mode: whether a last window may reach beyond the padding, if it begins before it.
        return_indices: whether to return the indices, too.
        index_dtype: int64, int32 (for planes of fewer than 2^31 positions) or uint8 (for windows
            of at most 256 elements, without dilation).

    Returns:
        ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, or two such tensors, values and indices.

    Raises:
        RuntimeError: no pooling takes the shape of the input, or the window.
        ValueError: ``index_dtype`` is none of those allowed, or too small for the plane (int32) or
            the window (uint8).
        TypeError: ``input`` is no tensor, ``ceil_mode`` no bool, or a size no 64-bit int. A bool is
            no size.
        NotImplementedError: the dtype does not compare; ``input`` is sparse or nested; a derivative
            is needed, but dilation leaves a window without an element of the input; ``input`` goes
            to torch.nn's function, which lacks ``index_dtype``.

    Warning:
        With ``index_dtype=torch.uint8`` the indices are no positions in the plane. Only this
        package's unpooling understands them, and only with the window that they were made with.

    Example:
        >>> image = torch.tensor([[[1.0, 2.0, 7.0, 5.0], [4.0, 3.0, 6.0, 8.0]]])
        >>> max_pool2d(image, 2, return_indices=True)
        (tensor([[[4., 8.]]]), tensor([[[4, 7]]]))
        >>> max_pool2d(image, 2, return_indices=True, index_dtype=torch.uint8)
        (tensor([[[4., 8.]]]), tensor([[[2, 3]]], dtype=torch.uint8))
    """
    arguments = (input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return _max_pool(max_pool2d, 2, arguments, index_dtype)


@overload
def max_pool3d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Tensor: ...
@overload
def max_pool3d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: Literal[True] = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]: ...
@overload
def max_pool3d(
    input: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: bool = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled: ...
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
    """Take the largest element of each window of a volume, ``(N, C, D, H, W)`` or ``(C, D, H, W)``.

    All else is as in :func:`max_pool2d`.

    Example:
        >>> volume = torch.arange(8.0).reshape(1, 2, 2, 2)
        >>> max_pool3d(volume, 2, return_indices=True, index_dtype=torch.int32)
        (tensor([[[[7.]]]]), tensor([[[[7]]]], dtype=torch.int32))
    """
    arguments = (input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return _max_pool(max_pool3d, 3, arguments, index_dtype)


@overload
def adaptive_max_pool1d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: Literal[False] = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Tensor: ...
@overload
def adaptive_max_pool1d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: Literal[True] = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]: ...
@overload
def adaptive_max_pool1d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled: ...
def adaptive_max_pool1d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Pool a signal, ``(N, C, L)`` or ``(C, L)``, to a given size.

    ``output_size`` is one int. All else is as in :func:`adaptive_max_pool2d`.

    Example:
        >>> adaptive_max_pool1d(torch.tensor([[1.0, 3.0, 2.0]]), 2, return_indices=True)
        (tensor([[3., 3.]]), tensor([[1, 1]]))
    """
    return _adaptive_pool(adaptive_max_pool1d, 1, (input, output_size, return_indices), index_dtype)


@overload
def adaptive_max_pool2d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: Literal[False] = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Tensor: ...
@overload
def adaptive_max_pool2d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: Literal[True] = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]: ...
@overload
def adaptive_max_pool2d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled: ...
def adaptive_max_pool2d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Pool to a given size, as :func:`torch.nn.functional.adaptive_max_pool2d` does.

    Of an axis of size n that is pooled to size m, window i holds the elements from
    ``floor(i * n / m)`` to before ``ceil((i + 1) * n / m)``, as PyTorch defines it. Values and
    indices are PyTorch's, on every device. The gradient is deterministic under
    :func:`torch.use_deterministic_algorithms`, and there are gradients of every order.

    Args:
        input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``, of float16 to float64 or bfloat16.
        output_size: ``(H_out, W_out)``, or one size for both; None keeps the size of the input.
        return_indices: whether to return the indices, too.
        index_dtype: int64 or int32, of flat positions in the input plane. Windows of different
            sizes have no offsets in common, so uint8 is refused.

    Returns:
        ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, or two such tensors, values and indices.

    Raises:
        ValueError: ``index_dtype`` is none of those allowed, or too small for the plane.
        RuntimeError: the number of sizes is wrong, or one is negative; or torch.nn's function
            raises it, in its own words, for shapes.
        TypeError: ``input`` is no tensor, or a size is no int.
        NotImplementedError: ``input`` is sparse or nested; torch.nn's function does not take the
            dtype; or ``input`` goes to that function, which lacks ``index_dtype``.

    Example:
        >>> image = torch.tensor([[[1.0, 2.0, 7.0], [4.0, 3.0, 6.0]]])
        >>> adaptive_max_pool2d(image, (None, 2), return_indices=True)
        (tensor([[[2., 7.],
                 [4., 6.]]]), tensor([[[1, 2],
                 [3, 5]]]))
    """
    return _adaptive_pool(adaptive_max_pool2d, 2, (input, output_size, return_indices), index_dtype)


@overload
def adaptive_max_pool3d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: Literal[False] = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Tensor: ...
@overload
def adaptive_max_pool3d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: Literal[True] = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]: ...
@overload
def adaptive_max_pool3d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = ...,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled: ...
def adaptive_max_pool3d(
    input: Tensor,
    output_size: IntsOrNones,
    return_indices: bool = False,
    *,
    index_dtype: torch.dtype = torch.int64,
) -> Pooled:
    """Pool a volume, ``(N, C, D, H, W)`` or ``(C, D, H, W)``, to a given size.

    All else is as in :func:`adaptive_max_pool2d`.

    Example:
        >>> adaptive_max_pool3d(torch.arange(8.0).reshape(1, 2, 2, 2), 1, index_dtype=torch.int32)
        tensor([[[[7.]]]])
    """
    return _adaptive_pool(adaptive_max_pool3d, 3, (input, output_size, return_indices), index_dtype)
