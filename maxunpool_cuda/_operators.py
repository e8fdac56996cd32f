# SPDX-License-Identifier: BSD-3-Clause
"""The operators: schemas, derivatives, rules for vmap, and how a call gets to a kernel.

PyTorch's dispatcher takes a call of ``torch.ops.maxunpool_cuda.max_unpool`` through these, one
after the other, each if the tensors or the moment ask for it:

- vmap: ``_call_under_vmap`` makes one call of all calls of a batch;
- Autograd: ``_differentiable`` gives the results their derivatives, by an autograd Function;
- Meta, where a call is traced: _layout.py checks it, and returns results without data;
- CPU and CUDA: the compiled library computes (csrc). Its guard refuses a call that does not fit,
  in the words of ``_explain_max_unpool``;
- a device that has no compiled kernel: _fallback.py computes.

``call`` is what _call.py and the derivatives use. If nothing but autograd has to see a call, it
applies the Function itself, and calls a kernel by the operator's short form.

The Functions are for one level of autograd, as kernels of the dispatcher are. Where functions are
transformed (:mod:`torch.func`), other levels are below. So a Function calls the operator again for
them, and switches on what PyTorch switches off inside of a Function. docs/design.md tells what
fails otherwise.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_map

from . import _checks, _fallback, _layout, _library
from ._checks import Ints, Window

_library.load()  # or an ImportError

_UNPOOLING = (
    "Tensor indices, SymInt[] output_size, SymInt[] kernel_size, SymInt[] stride, "
    "SymInt[] padding, str reduce"
)
# Of each operator its arguments and its result.
#
# - Each list has a number for each spatial axis; output_size has the spatial sizes alone.
# - max_unpool_backward is the gradient of max_unpool, with the same indices and numbers.
# - max_pool returns values and indices. int64 and int32 ones are flat positions in the input plane,
#   uint8 ones are window offsets. Its gradient is max_unpool with "sum".
SCHEMAS = {
    "max_unpool": (f"Tensor input, {_UNPOOLING}", "Tensor"),
    "max_unpool_backward": (f"Tensor grad_output, {_UNPOOLING}", "Tensor"),
    "max_pool": (
        "Tensor input, SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, "
        "SymInt[] dilation, bool ceil_mode, ScalarType index_dtype",
        "(Tensor, Tensor)",
    ),
}
# After its tensors unpooling takes output_size, kernel_size, stride, padding, reduce.
UnpoolArguments: TypeAlias = tuple[Ints, Ints, Ints, Ints, str]
# Pooling takes kernel_size, stride, padding, dilation, ceil_mode, index_dtype.
PoolArguments: TypeAlias = tuple[Ints, Ints, Ints, Ints, bool, torch.dtype]


def define(namespace: str) -> Any:
    """Define the operators in a namespace of ``torch.ops``.

    Each has a short form, as each list costs a tiny call a microsecond: ``_max_pool`` takes one
    list in place of the four of ``max_pool``, with their numbers one after the other.

    Returns:
        The library that they are in; they exist as long as it.
    """
    make_library: Any = torch.library.Library  # untyped in some releases
    library = make_library(namespace, "DEF")
    for name, (arguments, results) in SCHEMAS.items():
        library.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
        short = re.sub(r"SymInt\[\].*SymInt\[\] \w+", "int[] numbers", arguments)
        library.define(f"_{name}({short}) -> {results}")
        library.define(f"_explain_{name}({arguments.replace('SymInt', 'int')}) -> str")
    library.define("_explain_empty(Tensor like, int[] size, int element_size) -> str")
    return library


_LIBRARY = define("maxunpool_cuda")
max_unpool: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool.default
max_unpool_backward: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool_backward.default
max_pool: Callable[..., tuple[Tensor, Tensor]] = torch.ops.maxunpool_cuda.max_pool.default


class _Linear(_SingleLevelFunction):
    """One call of an operator, which is a linear map of its first tensor.

    There is a subclass for each operator. ``compute``, an argument of ``forward``, computes the
    results of the arguments after it. Compiled autograd traces ``backward`` and cannot follow it
    into other methods, so what the subclasses share is in functions.
    """

    apply: Any
    # Compiled autograd asks a torch.autograd.Function for this.
    _compiled_autograd_key: Any = torch.autograd.Function._compiled_autograd_key


def _keep(ctx: Any, indices: Tensor, arguments: UnpoolArguments) -> None:
    """Keep what the derivatives need beside the values: indices and arguments of an unpooling."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(indices)
    ctx.save_for_forward(indices)
    ctx.arguments = arguments


def _gradient(transpose: Operator, ctx: Any, grad: Tensor | None) -> Tensor | None:
    """The gradient of the values. There is none if nothing depends on the result."""
    (indices,) = ctx.saved_tensors
    return None if grad is None else call(transpose, (grad, indices), ctx.arguments)


def _tangent(operator: Operator, ctx: Any, tangent: Tensor) -> Tensor:
    """The derivative in forward mode: the map itself, of the tangent of the values."""
    (indices,) = ctx.saved_tensors
    result: Tensor = call(operator, (tangent, indices), ctx.arguments)
    return result


class _Unpooling(_Linear):
    """A call of max_unpool or of max_unpool_backward."""

    @staticmethod
    def forward(
        ctx: Any, compute: Any, values: Tensor, indices: Tensor, arguments: UnpoolArguments
    ) -> Any:
        _keep(ctx, indices, arguments)
        return compute(values, indices, arguments)


class MaxUnpool(_Unpooling):
    """A call of max_unpool."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return None, _gradient(MAX_UNPOOL_BACKWARD, ctx, grad), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *_others: None) -> Any:
        return _tangent(MAX_UNPOOL, ctx, tangent)


class MaxUnpoolBackward(_Unpooling):
    """A call of max_unpool_backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return None, _gradient(MAX_UNPOOL, ctx, grad), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *_others: None) -> Any:
        return _tangent(MAX_UNPOOL_BACKWARD, ctx, tangent)


class MaxPool(_Linear):
    """A call of max_pool, which is linear as long as it picks the same elements of its input.

    Then its values are ``max_unpool_backward(input, indices, ..., "sum")``.
    """

    @staticmethod
    def forward(ctx: Any, compute: Any, input: Tensor, arguments: PoolArguments) -> Any:
        values, indices = compute(input, arguments)
        kernel_size, stride, padding, dilation = ctx.window = arguments[:4]
        spatial, extent = input.shape[-len(padding) :], kernel_size
        if _checks.is_dilated(dilation):
            extent = _extent(kernel_size, dilation)
            if ctx.needs_input_grad[1]:
                _checks.check_no_empty_window(Window("max_pool", *ctx.window), spatial)
        _keep(ctx, indices, (spatial, extent, stride, padding, "sum"))
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _grad_of_indices: None) -> tuple[Any, ...]:
        return None, _gradient(MAX_UNPOOL, ctx, grad), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *_others: None) -> Any:
        _checks.check_no_empty_window(Window("max_pool", *ctx.window), ctx.arguments[0])
        return _tangent(MAX_UNPOOL_BACKWARD, ctx, tangent), None


def _extent(kernel_size: Ints, dilation: Ints) -> Ints:
    """The kernel size of the unpooling that is the gradient of a pooling.

    A dilated window reaches to its outermost elements: 5 for 3 elements with dilation 2.
    """
    pairs = zip(kernel_size, dilation, strict=True)
    return tuple([step * (kernel - 1) + 1 for kernel, step in pairs])


def _compute(short: Any, *arguments: Any) -> Any:
    """The results of a short form, of tensors and a tuple of all others."""
    *tensors, (first, second, third, fourth, *others) = arguments
    return short(*tensors, (*first, *second, *third, *fourth), *others)


class Operator(NamedTuple):
    """An operator, and what does its work."""

    overload: Any  # of torch.ops
    compute: Callable[..., Any]  # its results by a kernel, of tensors and a tuple of all others
    function: type[_Linear]  # its derivatives
    result: Callable[..., Any]  # checks a call, and returns results without data
    fallback: Callable[..., Any]  # the kernel for devices that have no compiled one
    tensor_count: int  # the tensors come first among its arguments

    @property
    def name(self) -> str:
        """Such as "max_unpool"."""
        return str(self.overload._schema.name).removeprefix("maxunpool_cuda::")

    @property
    def argument_names(self) -> list[str]:
        """Those of all arguments, the tensors' first."""
        return [argument.name for argument in self.overload._schema.arguments]


MAX_UNPOOL = Operator(
    overload=max_unpool,
    compute=partial(_compute, torch.ops.maxunpool_cuda._max_unpool.default),
    function=MaxUnpool,
    result=_layout.unpooled,
    fallback=_fallback.max_unpool,
    tensor_count=2,
)
MAX_UNPOOL_BACKWARD = Operator(
    overload=max_unpool_backward,
    compute=partial(_compute, torch.ops.maxunpool_cuda._max_unpool_backward.default),
    function=MaxUnpoolBackward,
    result=_layout.unpooled_backward,
    fallback=_fallback.max_unpool_backward,
    tensor_count=2,
)
MAX_POOL = Operator(
    overload=max_pool,
    compute=partial(_compute, torch.ops.maxunpool_cuda._max_pool.default),
    function=MaxPool,
    result=_layout.pooled,
    fallback=_fallback.max_pool,
    tensor_count=1,
)
OPERATORS = (MAX_UNPOOL, MAX_UNPOOL_BACKWARD, MAX_POOL)


# What the dispatcher calls


def _compute_below(operator: Operator, keys: Any, *arguments: Any) -> Any:
    """The results of an operator, without this level of autograd.

    ``keys`` are what the dispatcher still has to do for this call.
    """
    *tensors, others = arguments
    keys_below = keys & torch._C._after_autograd_keyset
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.overload.redispatch(keys_below, *tensors, *others)
    except RuntimeError as error:
        if (ours := _typed(error, operator, *tensors, *others)) is None:
            raise
        raise ours from None


def _compute_in_function(operator: Operator, keys: Any, *arguments: Any) -> Any:
    """The same inside of a Function, where PyTorch has switched off gradients of other levels."""
    with torch.enable_grad(), _set_fwd_grad_enabled(True):
        return _compute_below(operator, keys, *arguments)


def _differentiable(operator: Operator, keys: Any, *arguments: Any) -> Any:
    """The kernel of an operator for the key Autograd."""
    tensors = arguments[: operator.tensor_count]
    others = [
        tuple(each) if isinstance(each, list) else each
        for each in arguments[operator.tensor_count :]
    ]
    lists = (numbers for numbers in others if isinstance(numbers, tuple))
    has_negative = any(type(each) is int and each < 0 for numbers in lists for each in numbers)
    if has_negative and (error := _refusal(operator, *arguments)):
        raise error  # PyTorch refuses numbers below -2^62 itself, in other words
    if _autograd_alone_sees_calls() and not (tensors[0] is None or _needs_derivative(tensors[0])):
        return _compute_below(operator, keys, *tensors, others)
    compute = partial(_compute_in_function, operator, keys)
    with enable_single_level_autograd_function():
        return operator.function.apply(compute, *tensors, tuple(others))


def _refusal(operator: Operator, *arguments: Any) -> Exception | None:
    """The error of a call that the guard of kernels refuses (csrc/guard.h)."""
    tensors = arguments[: operator.tensor_count]
    try:
        _checks.check_kinds(operator.name, *tensors)
        operator.result(*arguments, device="meta")  # which checks the call
        rank = len(arguments[operator.tensor_count])
        name = f"{operator.name.removesuffix('_backward')}{rank}d"
        _checks.check_allocated(name, **dict(zip(operator.argument_names, tensors, strict=False)))
    except Exception as error:
        return error
    return None


def _typed(error: Exception, operator: Operator, *arguments: Any) -> Exception | None:
    """The error of a kernel in its proper type. Kernels can raise RuntimeError alone."""
    words = str(error)
    if words.startswith("CUDA out of memory"):
        return torch.OutOfMemoryError(words)
    refusal = _refusal(operator, *arguments)
    return refusal if str(refusal) == words else None


def _explain(operator: Operator, *arguments: Any) -> str:
    """The words of the refusal, for a kernel, which raises them as a RuntimeError."""
    otherwise = f"maxunpool_cuda::{operator.name}: expected a call that a kernel can do"
    return str(_refusal(operator, *arguments) or otherwise)


def _explain_empty(like: Tensor, size: Ints, element_size: int) -> str:
    """The words of PyTorch's error of a tensor that a kernel has no memory for (csrc/layout.h)."""
    try:
        torch.empty((*size, element_size), dtype=torch.uint8, device=like.device)
    except RuntimeError as error:
        return str(error)
    kind = like.device.type.upper()
    # Memory has come free since the kernel asked.
    return f"{kind} out of memory: expected room for a tensor of shape {size} but got none"


def _in_full(operator: Operator, *arguments: Any) -> Any:
    """The kernel of a short form for devices that have no compiled one."""
    count = operator.tensor_count
    tensors, numbers, others = arguments[:count], arguments[count], arguments[count + 1 :]
    rank = len(numbers) // 4
    first, second = numbers[:rank], numbers[rank : 2 * rank]
    third, fourth = numbers[2 * rank : 3 * rank], numbers[3 * rank :]
    with torch._C._AutoDispatchBelowAutograd():
        return operator.overload(*tensors, first, second, third, fourth, *others)


def _trace(operator: Operator, *arguments: Any) -> Any:
    """The results without data of a call that is traced."""
    if torch.compiler.is_exporting() and _is_kept_by_exporter(operator):
        _warn_of_exporters(operator, UserWarning)
    return operator.result(*arguments)


def _is_kept_by_exporter(operator: Operator) -> bool:
    """Whether an exporter takes the call from one program into the next, without a translation.

    torch.export traces code of this package. Exporters trace the program that comes out; PyTorch's
    ``proxy_call`` decomposes an operator or, as here, asks for its results.
    """
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    for frame in frames:
        if frame.f_code is torch.onnx.export.__code__:
            table = frame.f_locals.get("custom_translation_table")
            if operator.overload in (table or ()):
                return False
    callers = {frame.f_code for frame in frames}
    return call.__code__ not in callers and "proxy_call" in {code.co_name for code in callers}


_TracerWarning: type[Warning] = getattr(torch.jit, "TracerWarning", UserWarning)


def _warn_of_exporters(operator: Operator, category: type[Warning]) -> None:
    """Say what to do where an exporter meets the operator. Its own error would not."""
    warnings.warn(
        f"maxunpool_cuda: this program calls {operator.overload}, which only processes that import "
        "this package have. For other runtimes use "
        "program.run_decompositions(maxunpool_cuda.export.decompositions()), for ONNX "
        "maxunpool_cuda.export.onnx_translation_table(), or "
        "maxunpool_cuda.restore_max_pooling(model) before the export; see docs/export.md",
        category,
        stacklevel=2,
    )


def _call_under_vmap(
    operator: Operator,
    info: Any,
    in_dims: tuple[int | None, ...],
    *arguments: Any,
) -> tuple[Any, Any]:
    """The rule of an operator for :func:`torch.vmap`: one call for all calls of the batch.

    Planes do not depend on each other. So B calls with tensors ``(C, H, W)`` are one call with
    ``(B, C, H, W)``, and B calls with ``(N, C, H, W)`` are one with ``(B * N, C, H, W)``.

    Args:
        operator: takes ``arguments``. The first one after the tensors has a number for each
            spatial dimension.
        info: has the size B of the batch.
        in_dims: for each argument, the dimension of the batch, or None if it has none.
        *arguments: the operator's.

    Returns:
        The results, and where each has the batch: in front.
    """
    count = operator.tensor_count
    tensors = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(arguments[:count], in_dims[:count], strict=True)
    ]
    others = arguments[count:]
    unbatched_rank = len(others[0]) + 1  # of (C, *plane)
    batch_shape = tensors[-1].shape[:2]  # (B, N), if the calls have an N
    calls_have_n = tensors[-1].dim() - 1 > unbatched_rank
    if tensors[0].dim() - 1 not in (unbatched_rank, unbatched_rank + 1):
        # No call takes such a tensor: the operator shall name the shape of one call in its error.
        tensors = [tensor.new_empty(tensor.shape[1:]) for tensor in tensors]
    elif calls_have_n:
        tensors = [tensor.flatten(0, 1) for tensor in tensors]
    results = operator.overload(*tensors, *others)
    if calls_have_n:
        results = tree_map(lambda result: result.reshape(*batch_shape, *result.shape[1:]), results)
    return results, tree_map(lambda _: 0, results)


# Registration


def fallback_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The kernels for devices that have no compiled ones, by the names of operators."""
    for operator in OPERATORS:
        yield operator.name, operator.fallback
        yield f"_{operator.name}", partial(_in_full, operator)


def _register() -> None:
    """Register all kernels that are not compiled."""
    _LIBRARY.impl("_explain_empty", _explain_empty, "CompositeExplicitAutograd")
    for name, kernel in fallback_kernels():
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    for operator in OPERATORS:
        name = operator.name
        _LIBRARY.impl(name, partial(_differentiable, operator), "Autograd", with_keyset=True)
        _LIBRARY.impl(f"_{name}", torch.library.fallthrough_kernel, "Autograd")
        _LIBRARY.impl(f"_explain_{name}", partial(_explain, operator), "CompositeExplicitAutograd")
        torch.library.register_fake(operator.overload, partial(_trace, operator), lib=_LIBRARY)
        rule = partial(_call_under_vmap, operator)
        torch.library.register_vmap(operator.overload, rule, lib=_LIBRARY)


_register()


# The way of a call


# Private names of PyTorch that tell what has to see a call beside autograd. If a release lacks one
# of these, every call goes through the dispatcher.
_QUESTIONS: Any = (
    getattr(torch._C, "_are_functorch_transforms_active", None),
    getattr(torch._C, "_len_torch_dispatch_stack", None),
    getattr(torch._C, "_is_tracing", None),  # by torch.jit.trace
)
has_short_way = None not in _QUESTIONS
_is_transformed, _mode_count, _is_jit_tracing = _QUESTIONS
_PLAIN = {Tensor, torch.nn.Parameter}  # another subclass may override what a call does
is_traced = torch.compiler.is_compiling  # whether Dynamo or torch.export has to see a call
is_jit_tracing: Callable[[], bool] = _is_jit_tracing or (lambda: False)


def call(operator: Operator, tensors: tuple[Tensor, ...], arguments: Any) -> Any:
    """The results of an operator.

    Args:
        operator: one of ``OPERATORS``.
        tensors: its first arguments.
        arguments: its others, with tuples for lists, each with a number for each spatial dimension.
    """
    if is_traced():
        return operator.overload(*tensors, *arguments)
    try:
        if not takes_short_way(tensors):
            if is_jit_tracing():
                _warn_of_exporters(operator, _TracerWarning)
            return operator.overload(*tensors, *arguments)
        if _needs_derivative(tensors[0]):
            return operator.function.apply(operator.compute, *tensors, arguments)
        return operator.compute(*tensors, arguments)
    except Exception as error:
        if (ours := _error_in_words(error, operator, tensors, arguments)) is None:
            raise
        raise ours from None


def takes_short_way(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nothing but autograd has to see a call with these tensors."""
    return _autograd_alone_sees_calls() and _PLAIN.issuperset(map(type, tensors))


def _autograd_alone_sees_calls() -> bool:
    return has_short_way and not (_is_transformed() or _mode_count() or _is_jit_tracing())


def _needs_derivative(tensor: Tensor) -> bool:
    """Whether autograd, backward or forward, has to know a call with this tensor.

    A transform or a graph may have tangents that PyTorch's counter of levels does not know. So this
    is asked where autograd alone sees calls.
    """
    return in_forward_mode() or (tensor.requires_grad and torch.is_grad_enabled())


def in_forward_mode() -> bool:
    """Whether forward mode is on, or a release of PyTorch does not tell."""
    level: int = getattr(forward_ad, "_current_level", 0)  # -1 outside of forward mode
    return level >= 0


def _error_in_words(
    error: Exception, operator: Operator, tensors: tuple[Tensor, ...], arguments: Any
) -> Exception | None:
    """Our error for that of a call that failed, if PyTorch or a kernel has refused an argument."""
    named = dict(zip(operator.argument_names, (*tensors, *arguments), strict=True))
    try:
        _checks.check_as_written(operator.name, named)
    except (TypeError, RuntimeError) as ours:
        return ours
    return _typed(error, operator, *tensors, *arguments)
