"""Max unpooling as functions, with the arguments of :mod:`torch.nn.functional`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import _ops
from ._geometry import IntOrInts, ints, per_dim, spatial_output_size

Reduce = Literal["last", "sum", "mean"]


def check_reduce(name: str, reduce: str) -> None:
    """Raise a ValueError that begins with ``name`` unless ``reduce`` is a :data:`Reduce`."""
    if reduce not in ("last", "sum", "mean"):
        raise ValueError(
            f"{name}: expected reduce to be 'last', 'sum' or 'mean' but got {reduce!r}"
        )


def _max_unpool(
    function: Callable[..., Tensor],
    dims: int,
    input: Tensor,
    indices: Tensor,
    kernel_size: IntOrInts,
    stride: IntOrInts | None,
    padding: IntOrInts,
    output_size: Sequence[int] | None,
    reduce: Reduce,
) -> Tensor:
    """Max unpooling over ``dims`` spatial dimensions: the body of the public ``function``.

    Most calls end in the first lines. What follows takes every other argument there is, or says
    what is wrong with it, in Python: so that traced calls raise what eager ones do.
    """
    if not torch.compiler.is_compiling():
        result = _ops.call_if_plain(
            dims, input, indices, kernel_size, stride, padding, output_size, reduce
        )
        if result is not None:
            return result
    if has_torch_function((input, indices)):
        overridden: Tensor = handle_torch_function(
            function,
            (input, indices),
            input,
            indices,
            kernel_size,
            stride=stride,
            padding=padding,
            output_size=output_size,
            reduce=reduce,
        )
        return overridden
    name = f"max_unpool{dims}d"
    for argument, value in (("input", input), ("indices", indices)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}: expected {argument} to be a Tensor but got {type(value).__name__}"
            )
    check_reduce(name, reduce)
    kernel = per_dim(name, "kernel_size", kernel_size, dims)
    steps = kernel if stride is None else per_dim(name, "stride", stride, dims)
    padded = per_dim(name, "padding", padding, dims)
    # torch.jit.trace makes tensors of sizes.
    shape = ints(name, "input.shape", input.shape, sizes=True)
    sizes = spatial_output_size(name, shape, kernel, steps, padded, output_size)
    return _ops.max_unpool(input, indices, sizes, kernel, steps, padded, reduce)


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
    """Scatter pooled signals back to where ``indices`` say; see :func:`max_unpool2d`.

    Args:
        input: ``(N, C, L_in)`` or ``(C, L_in)``.
        indices: as ``input``; flat positions in the output's ``L_out``.
        kernel_size: size of the pooling window.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding the pooling added.
        output_size: ``(L_out,)``, or with the leading sizes of the input before it.
        reduce: ``"last"``, ``"sum"`` or ``"mean"``.

    Returns:
        ``(N, C, L_out)`` or ``(C, L_out)``.

    Example:
        >>> import torch
        >>> pooled = torch.tensor([[2.0, 4.0]])
        >>> max_unpool1d(pooled, torch.tensor([[1, 3]]), 2)
        tensor([[0., 2., 0., 4.]])
    """
    return _max_unpool(
        max_unpool1d, 1, input, indices, kernel_size, stride, padding, output_size, reduce
    )


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
    - ``reduce="sum"``: they add up;
    - ``reduce="mean"``: they are averaged (integers round toward minus infinity).

    The gradient is the exact transpose: under ``"last"`` the winner receives it and the others
    receive zero.

    By default an output size is ``(in - 1) * stride - 2 * padding + kernel_size``, the formula
    of :class:`torch.nn.MaxUnpool2d`. Pooling maps several sizes to the same one, and
    ``output_size`` says which was meant.

    Args:
        input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``, of any dtype; for ``"sum"`` and
            ``"mean"`` one that adds up. A channels_last input gives a channels_last output.
        indices: as ``input``. int64 or int32: flat positions in the output plane, as
            :func:`torch.nn.functional.max_pool2d` returns them. uint8: row-major offsets in the
            window of each element, which has at most 256 positions.
        kernel_size: size of the pooling window.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding the pooling added.
        output_size: ``(H_out, W_out)``, or with the leading sizes of the input before them; within
            a stride of the default.
        reduce: ``"last"``, ``"sum"`` or ``"mean"``.

    Returns:
        ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``.

    Raises:
        RuntimeError: shapes, devices or index dtype do not fit; an index lies outside its output
            plane (on CUDA: raised by the next call or by :func:`maxunpool_cuda.check_errors`).
        ValueError: ``output_size`` or ``reduce`` is not one of those allowed.
        NotImplementedError: the dtype does not add up, or the device has no kernels.

    Example:
        >>> import torch
        >>> pool = torch.nn.MaxPool2d(2, return_indices=True)
        >>> pooled, indices = pool(torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]))
        >>> max_unpool2d(pooled, indices, 2)
        tensor([[[0., 0.],
                 [4., 0.]]])
    """
    return _max_unpool(
        max_unpool2d, 2, input, indices, kernel_size, stride, padding, output_size, reduce
    )


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
    """Scatter pooled volumes back to where ``indices`` say; see :func:`max_unpool2d`.

    Args:
        input: ``(N, C, D_in, H_in, W_in)`` or ``(C, D_in, H_in, W_in)``.
        indices: as ``input``; flat positions in the output's ``(D_out, H_out, W_out)``.
        kernel_size: size of the pooling window.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding the pooling added.
        output_size: ``(D_out, H_out, W_out)``, or with the leading sizes of the input before them.
        reduce: ``"last"``, ``"sum"`` or ``"mean"``.

    Returns:
        ``(N, C, D_out, H_out, W_out)`` or ``(C, D_out, H_out, W_out)``.

    Example:
        >>> import torch
        >>> pooled = torch.tensor([[[[5.0]]]])
        >>> max_unpool3d(pooled, torch.tensor([[[[6]]]]), 2).flatten()
        tensor([0., 0., 0., 0., 0., 0., 5., 0.])
    """
    return _max_unpool(
        max_unpool3d, 3, input, indices, kernel_size, stride, padding, output_size, reduce
    )
