"""What the operators' own derivatives (csrc/autograd.cpp) leave out: forward mode and torch.func.

For given indices and sizes, max_unpool is a linear map of its first argument and
max_unpool_backward is the transposed map. So the backward of either is the other, and the forward
derivative of either is itself, which gives derivatives of every order. Planes are independent, so
to batch either is to give it more of them. Near its input, max_pool is such a gather too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops
from ._geometry import Ints

_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize


class _Unpool(torch.autograd.Function):
    """max_unpool, whose backward is :class:`_Gather`. Its forward names what Dynamo must see."""

    @staticmethod
    def forward(
        input: Tensor,
        indices: Tensor,
        output_size: Ints,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        reduce: str,
    ) -> Tensor:
        return _ops.max_unpool(input, indices, output_size, kernel_size, stride, padding, reduce)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, indices, *ctx.geometry = inputs
        ctx.save_for_backward(indices)
        ctx.save_for_forward(indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return gather(grad, indices, *ctx.geometry), None, *(None for _ in ctx.geometry)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        return _batched(unpool, info, in_dims, *arguments)


class _Gather(torch.autograd.Function):
    """max_unpool_backward, whose backward is :class:`_Unpool`."""

    @staticmethod
    def forward(
        grad_output: Tensor,
        indices: Tensor,
        output_size: Ints,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        reduce: str,
    ) -> Tensor:
        return _ops.max_unpool_backward(
            grad_output, indices, output_size, kernel_size, stride, padding, reduce
        )

    setup_context = staticmethod(_Unpool.setup_context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return unpool(grad, indices, *ctx.geometry), None, *(None for _ in ctx.geometry)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        return _batched(gather, info, in_dims, *arguments)


class _UnpoolWithJvp(_Unpool):
    """Dynamo takes no Function that has a ``jvp``; forward mode takes only those."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (indices,) = ctx.saved_tensors
        return unpool(tangent, indices, *ctx.geometry)


class _GatherWithJvp(_Gather):
    """As :class:`_UnpoolWithJvp`."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (indices,) = ctx.saved_tensors
        return gather(tangent, indices, *ctx.geometry)


class _Pool(torch.autograd.Function):
    """max_pool: a gather by the indices it finds, so its backward is max_unpool's "sum"."""

    @staticmethod
    def forward(
        input: Tensor,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        ceil_mode: bool,
        index_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        return _ops.max_pool(input, kernel_size, stride, padding, dilation, ceil_mode, index_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        input, kernel_size, stride, padding, *_ = inputs
        _, indices = output
        ctx.geometry = (input.shape[-len(kernel_size) :], kernel_size, stride, padding, "sum")
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.save_for_forward(indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return unpool(grad, indices, *ctx.geometry), *(None for _ in range(6))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, *arguments: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _pooled_batch(pool, info, in_dims, *arguments)


class _PoolWithJvp(_Pool):
    """As :class:`_UnpoolWithJvp`."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return gather(tangent, indices, *ctx.geometry), None


def _batched(
    operator: Callable[..., Tensor],
    info: Any,
    in_dims: tuple[int | None, ...],
    values: Tensor,
    indices: Tensor,
    *geometry: Any,
) -> tuple[Tensor, int]:
    """The rule for vmap: the batch joins that of the tensors, or becomes it."""
    values, indices = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((values, indices), in_dims[:2], strict=True)
    )
    kernel_size = geometry[1]
    if indices.dim() <= len(kernel_size) + 2:  # of an unbatched tensor, or one that is refused
        return operator(values, indices, *geometry), 0
    batch = indices.shape[:2]
    result = operator(values.flatten(0, 1), indices.flatten(0, 1), *geometry)
    return result.reshape(*batch, *result.shape[1:]), 0


def _pooled_batch(
    operator: Callable[..., tuple[Tensor, Tensor]],
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    kernel_size: Ints,
    *rest: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """As :func:`_batched`, of an operator with two results and no indices to begin with."""
    input = input.movedim(in_dims[0] or 0, 0)
    if input.dim() <= len(kernel_size) + 2:
        values, indices = operator(input, kernel_size, *rest)
        return (values, indices), (0, 0)
    batch = input.shape[:2]
    values, indices = operator(input.flatten(0, 1), kernel_size, *rest)
    shape = (*batch, *values.shape[1:])
    return (values.reshape(shape), indices.reshape(shape)), (0, 0)


def unpool(input: Tensor, indices: Tensor, *geometry: Any) -> Tensor:
    """The operator max_unpool, differentiable in ``input``.

    ``geometry`` is as in its schema: output_size, kernel_size, stride, padding and reduce.
    """
    call: Callable[..., Tensor] = _ops.max_unpool
    if torch.compiler.is_compiling():
        call = _Unpool.apply
    elif _needs_function():
        call = _UnpoolWithJvp.apply
    return call(input, indices, *geometry)


def gather(grad_output: Tensor, indices: Tensor, *geometry: Any) -> Tensor:
    """The operator max_unpool_backward, differentiable in ``grad_output``."""
    call: Callable[..., Tensor] = _ops.max_unpool_backward
    if torch.compiler.is_compiling():
        call = _Gather.apply
    elif _needs_function():
        call = _GatherWithJvp.apply
    return call(grad_output, indices, *geometry)


def pool(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator max_pool, differentiable in ``input``.

    ``arguments`` are as in its schema: kernel_size, stride, padding, dilation, ceil_mode and
    index_dtype.
    """
    call: Callable[..., tuple[Tensor, Tensor]] = _ops.max_pool
    if torch.compiler.is_compiling():
        call = _Pool.apply
    elif _needs_function():
        call = _PoolWithJvp.apply
    return call(input, *arguments)


def _needs_function() -> bool:
    """Whether a derivative may be asked for that the operators themselves do not have."""
    if torch._C._are_functorch_transforms_active():
        return torch._C._functorch.peek_interpreter_stack().key() != _FUNCTIONALIZE
    return forward_ad._current_level >= 0


for _name in ("max_unpool", "max_unpool_backward"):
    _rule = functools.partial(_batched, getattr(_ops, _name))
    torch.library.register_vmap(f"maxunpool_cuda::{_name}", _rule)
torch.library.register_vmap(
    "maxunpool_cuda::max_pool", functools.partial(_pooled_batch, _ops.max_pool)
)
