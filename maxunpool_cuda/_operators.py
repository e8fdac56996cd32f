# SPDX-License-Identifier: BSD-3-Clause
"""The operators: schemas, shapes of results, derivatives, rules for vmap. Here they are defined.

PyTorch's dispatcher takes a call of ``torch.ops.maxunpool_cuda.max_unpool`` through these, as far
as the tensors and the moment ask for it:

- vmap: ``_call_under_vmap`` makes one call of all calls of a batch;
- Autograd: ``_differentiable`` gives the result its derivatives, by a ``torch.autograd.Function``;
- Meta: _layout.py checks a call that is traced, and returns a result that has a shape alone;
- CPU, CUDA: the compiled library computes (csrc). Its guard refuses calls that do not fit, and has
  ``_explain_max_unpool`` say why;
- without compiled kernels, and on other devices: _fallback.py computes.

Eager calls of functional.py take a short way: ``call_max_unpool`` goes to the kernel at once, or
through the same Function where a derivative is needed.

The Functions are for one level of autograd, as the dispatcher's kernels are. Where functions are
transformed (:mod:`torch.func`), other levels are below. So a Function calls the operator again for
them, and switches on what PyTorch switches off inside of a Function. docs/design.md tells what
fails otherwise.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_map

from . import _checks, _fallback, _library
from ._checks import Ints, Window
from ._layout import pooled, unpooled, unpooled_backward

# Raises ImportError if the library was built for another PyTorch; must run before it is loaded.
BUILT_FOR = _library.built_for()
_library.load(BUILT_FOR)

_UNPOOLING = "Tensor indices, SymInt[] output_size, SymInt[] kernel_size, SymInt[] stride, "
_UNPOOLING += "SymInt[] padding, str reduce"
_POOLING = "Tensor input, SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, "
_POOLING += "SymInt[] dilation, bool ceil_mode, ScalarType index_dtype"
# Of each operator its arguments and its result.
#
# - Each list has a number for each spatial axis; output_size has the spatial sizes alone.
# - max_unpool_backward is the gradient of max_unpool, with the same indices and numbers.
# - max_pool returns values and indices. int64 and int32 ones are flat positions in the input plane,
#   uint8 ones are window offsets. Its gradient is max_unpool with "sum".
SCHEMAS = {
    "max_unpool": (f"Tensor input, {_UNPOOLING}", "Tensor"),
    "max_unpool_backward": (f"Tensor grad_output, {_UNPOOLING}", "Tensor"),
    "max_pool": (_POOLING, "(Tensor, Tensor)"),
}


def define(namespace: str) -> Any:
    """Define the operators, with their short forms, in a namespace of ``torch.ops``.

    The short form of ``max_pool``, ``_max_pool``, has one list of numbers in place of four, which
    are one after the other in it. A list costs a tiny call a microsecond.

    Returns:
        The library that they are in; they exist as long as it.
    """
    make_library: Any = torch.library.Library  # untyped in some releases
    library = make_library(namespace, "DEF")
    for name, (arguments, results) in SCHEMAS.items():
        library.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
        short = re.sub(r"SymInt\[\].*SymInt\[\] \w+", "int[] numbers", arguments)
        library.define(f"_{name}({short}) -> {results}")
        library.define(f"_explain_{name}({arguments.replace('SymInt', 'int')}) -> ()")
    return library


_LIBRARY = define("maxunpool_cuda")
max_unpool: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool.default
max_unpool_backward: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool_backward.default
max_pool: Callable[..., tuple[Tensor, Tensor]] = torch.ops.maxunpool_cuda.max_pool.default
_SHORT_MAX_UNPOOL = torch.ops.maxunpool_cuda._max_unpool.default
_SHORT_MAX_UNPOOL_BACKWARD = torch.ops.maxunpool_cuda._max_unpool_backward.default
_SHORT_MAX_POOL = torch.ops.maxunpool_cuda._max_pool.default

# The arguments of unpooling after the tensors: output_size, kernel_size, stride, padding, reduce;
UnpoolArguments: TypeAlias = tuple[Ints, Ints, Ints, Ints, str]
# those of pooling: kernel_size, stride, padding, dilation, ceil_mode, index_dtype.
PoolArguments: TypeAlias = tuple[Ints, Ints, Ints, Ints, bool, torch.dtype]
# What a Function has compute its results: tensors, and the operator's other arguments.
_Compute: TypeAlias = Callable[..., Any]


# Derivatives


class _Linear(_SingleLevelFunction):
    """One call of an operator, which is a linear map of its first tensor.

    There is a subclass for each operator. What they share is in functions: compiled autograd traces
    ``backward``, but no other methods.
    """

    # Compiled autograd asks a torch.autograd.Function for this.
    _compiled_autograd_key: Any = torch.autograd.Function._compiled_autograd_key


def _keep(ctx: Any, indices: Tensor, arguments: UnpoolArguments) -> None:
    """Keep what the derivatives need beside the values: indices and arguments of an unpooling."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(indices)
    ctx.save_for_forward(indices)
    ctx.arguments = arguments


def _gradient(transpose: Any, ctx: Any, grad: Tensor | None) -> Tensor | None:
    """The gradient of the values. There is none if nothing depends on the result."""
    (indices,) = ctx.saved_tensors
    return None if grad is None else transpose(grad, indices, ctx.arguments)


class MaxUnpool(_Linear):
    """A call of max_unpool."""

    @staticmethod
    def forward(
        ctx: Any, compute: _Compute, input: Tensor, indices: Tensor, arguments: UnpoolArguments
    ) -> Any:
        _keep(ctx, indices, arguments)
        return compute(input, indices, arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return None, _gradient(call_max_unpool_backward, ctx, grad), None, None

    @staticmethod
    def jvp(ctx: Any, _compute: None, tangent: Tensor, *_: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return call_max_unpool(tangent, indices, ctx.arguments)


class MaxUnpoolBackward(_Linear):
    """A call of max_unpool_backward."""

    @staticmethod
    def forward(
        ctx: Any, compute: _Compute, grad: Tensor, indices: Tensor, arguments: UnpoolArguments
    ) -> Any:
        _keep(ctx, indices, arguments)
        return compute(grad, indices, arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return None, _gradient(call_max_unpool, ctx, grad), None, None

    @staticmethod
    def jvp(ctx: Any, _compute: None, tangent: Tensor, *_: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return call_max_unpool_backward(tangent, indices, ctx.arguments)


class MaxPool(_Linear):
    """A call of max_pool, which is linear as long as it picks the same elements of its input.

    Then its values are ``max_unpool_backward(input, indices, ..., "sum")``.
    """

    @staticmethod
    def forward(ctx: Any, compute: _Compute, input: Tensor, arguments: PoolArguments) -> Any:
        values, indices = compute(input, arguments)
        ctx.window = Window("max_pool", *arguments[:4])
        spatial = input.shape[-ctx.window.rank :]
        if ctx.needs_input_grad[1]:
            _checks.check_no_empty_window(ctx.window, spatial)
        _keep(ctx, indices, (spatial, *_unpooled_window(ctx.window), "sum"))
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _grad_of_indices: None) -> tuple[Any, ...]:
        return None, _gradient(call_max_unpool, ctx, grad), None

    @staticmethod
    def jvp(ctx: Any, _compute: None, tangent: Tensor, *_: Any) -> Any:
        _checks.check_no_empty_window(ctx.window, ctx.arguments[0])
        (indices,) = ctx.saved_tensors
        return call_max_unpool_backward(tangent, indices, ctx.arguments), None


def _unpooled_window(window: Window) -> tuple[Ints, Ints, Ints]:
    """Kernel size, stride and padding of the unpooling that is the gradient of a pooling.

    A dilated window has the extent of its outermost elements: 5 for 3 elements with dilation 2.
    """
    pairs = zip(window.kernel_size, window.dilation, strict=True)
    extent = tuple([dilation * (kernel - 1) + 1 for kernel, dilation in pairs])
    return extent, window.stride, window.padding


# Calls that take the dispatcher's way


def _compute_below(operator: Any, keys: Any, *arguments: Any) -> Any:
    """The operator's results, without this level of autograd.

    ``keys`` are what the dispatcher still has to do for this call.
    """
    *tensors, others = arguments
    with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *tensors, *others)


def _differentiable(operator: Any, keys: Any, *arguments: Any) -> Any:
    """The kernel of an operator for the key Autograd."""
    definition = _DEFINITIONS[operator]
    tensors, others = arguments[: definition.tensor_count], arguments[definition.tensor_count :]
    lists = (numbers for numbers in others if isinstance(numbers, list))
    if any(type(number) is int and number < 0 for numbers in lists for number in numbers):
        # Before PyTorch refuses numbers below -2^62 in words of its own.
        _explain(definition.result, *arguments)
    compute = functools.partial(_compute_below, operator, keys)
    with enable_single_level_autograd_function():
        return definition.function.apply(compute, *tensors, others)


def _call_under_vmap(
    operator: Callable[..., Any],
    tensor_count: int,
    info: Any,
    in_dims: tuple[int | None, ...],
    *arguments: Any,
) -> tuple[Any, Any]:
    """The rule of an operator for :func:`torch.vmap`: one call for all calls of the batch.

    Planes do not depend on each other. So B calls with tensors ``(C, H, W)`` are one call with
    ``(B, C, H, W)``, and B calls with ``(N, C, H, W)`` are one with ``(B * N, C, H, W)``.

    Args:
        operator: takes ``arguments``.
        tensor_count: how many of them are tensors; the next one has a number for each spatial
            dimension.
        info: has the size B of the batch.
        in_dims: for each argument, the dimension of the batch, or None if it has none.
        *arguments: the operator's.

    Returns:
        The results, and where each has the batch: in front.
    """
    tensors = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(arguments[:tensor_count], in_dims[:tensor_count], strict=True)
    ]
    others = arguments[tensor_count:]
    unbatched_rank = len(others[0]) + 1  # of (C, *plane)
    batch_shape = tensors[-1].shape[:2]  # (B, N), if the calls have an N
    calls_have_n = tensors[-1].dim() - 1 > unbatched_rank
    if tensors[0].dim() - 1 not in (unbatched_rank, unbatched_rank + 1):
        # No call takes such a tensor: the operator shall name the shape of one call in its error.
        tensors = [tensor.new_empty(tensor.shape[1:]) for tensor in tensors]
    elif calls_have_n:
        tensors = [tensor.flatten(0, 1) for tensor in tensors]
    results = operator(*tensors, *others)
    if calls_have_n:
        results = tree_map(lambda result: result.reshape(*batch_shape, *result.shape[1:]), results)
    return results, tree_map(lambda _: 0, results)


def _explain(result: Callable[..., Any], *arguments: Any) -> None:
    """Raise the error of a call that the guard of a compiled kernel has refused (csrc/guard.h)."""
    result(*arguments, device="meta")


def _in_full(operator: Any, tensor_count: int, *arguments: Any) -> Any:
    """The kernel of a short form for devices without compiled kernels: the operator's."""
    tensors, numbers, others = (
        arguments[:tensor_count],
        arguments[tensor_count],
        arguments[tensor_count + 1 :],
    )
    rank = len(numbers) // 4
    lists = (numbers[begin : begin + rank] for begin in range(0, 4 * rank, rank))
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*tensors, *lists, *others)


class _Definition(NamedTuple):
    """What the dispatcher calls of an operator, beside compiled kernels."""

    function: type[_Linear]
    fallback: Callable[..., Any]
    result: Callable[..., Any]  # checks a call, and returns results without data
    tensor_count: int  # the tensors come first among the arguments


_DEFINITIONS = {
    max_unpool: _Definition(MaxUnpool, _fallback.max_unpool, unpooled, 2),
    max_unpool_backward: _Definition(
        MaxUnpoolBackward, _fallback.max_unpool_backward, unpooled_backward, 2
    ),
    max_pool: _Definition(MaxPool, _fallback.max_pool, pooled, 1),
}


def fallback_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The kernels for devices that have no compiled ones, by the names of operators."""
    for operator, definition in _DEFINITIONS.items():
        name = operator._schema.name.removeprefix("maxunpool_cuda::")
        yield name, definition.fallback
        yield f"_{name}", functools.partial(_in_full, operator, definition.tensor_count)


def _register() -> None:
    """Register all kernels that are not compiled."""
    partial, impl = functools.partial, _LIBRARY.impl
    for name, kernel in fallback_kernels():
        impl(name, kernel, "CompositeExplicitAutograd")
    for operator, definition in _DEFINITIONS.items():
        name = operator._schema.name.removeprefix("maxunpool_cuda::")
        impl(name, partial(_differentiable, operator), "Autograd", with_keyset=True)
        impl(f"_{name}", torch.library.fallthrough_kernel, "Autograd")
        impl(f"_explain_{name}", partial(_explain, definition.result), "CompositeExplicitAutograd")
        torch.library.register_fake(operator, definition.result, lib=_LIBRARY)
        rule = partial(_call_under_vmap, operator, definition.tensor_count)
        torch.library.register_vmap(operator, rule, lib=_LIBRARY)


_register()


# Calls of functional.py


# Private names of PyTorch that the short way asks whether anything would miss the dispatcher's
# other keys. If a release lacks one, all calls go the dispatcher's way.
_QUESTIONS = (
    getattr(torch._C, "_are_functorch_transforms_active", None),
    getattr(torch._C, "_len_torch_dispatch_stack", None),
    getattr(torch._C, "_is_tracing", None),  # by torch.jit.trace
)
has_short_way = None not in _QUESTIONS and hasattr(forward_ad, "_current_level")
_is_transformed, _mode_count, _is_jit_tracing = _QUESTIONS
_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced() -> bool:
    """Whether Dynamo or torch.export has to see a call."""
    return torch.compiler.is_compiling()


def _takes_short_way(*tensors: Tensor) -> bool:
    """Whether a kernel can be called at once: nothing but autograd has to see the call."""
    return not (
        not has_short_way
        or _is_transformed()
        or _mode_count()
        or _is_jit_tracing()
        or any(type(tensor) not in _PLAIN for tensor in tensors)
    )


def _needs_derivative(tensor: Tensor) -> bool:
    """Whether a call with this tensor has to be known to autograd, backward or forward."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def _unpool(tensor: Tensor, indices: Tensor, arguments: UnpoolArguments) -> Tensor:
    output_size, kernel_size, stride, padding, reduce = arguments
    numbers = (*output_size, *kernel_size, *stride, *padding)
    return _SHORT_MAX_UNPOOL(tensor, indices, numbers, reduce)


def _unpool_backward(tensor: Tensor, indices: Tensor, arguments: UnpoolArguments) -> Tensor:
    output_size, kernel_size, stride, padding, reduce = arguments
    numbers = (*output_size, *kernel_size, *stride, *padding)
    return _SHORT_MAX_UNPOOL_BACKWARD(tensor, indices, numbers, reduce)


def _pool(input: Tensor, arguments: PoolArguments) -> tuple[Tensor, Tensor]:
    kernel_size, stride, padding, dilation, ceil_mode, index_dtype = arguments
    numbers = (*kernel_size, *stride, *padding, *dilation)
    return _SHORT_MAX_POOL(input, numbers, ceil_mode, index_dtype)


def call_max_unpool(input: Tensor, indices: Tensor, arguments: UnpoolArguments) -> Tensor:
    """The result of ``max_unpool``."""
    if is_traced():
        return max_unpool(input, indices, *arguments)
    try:
        if not _takes_short_way(input, indices):
            return max_unpool(input, indices, *arguments)
        if _needs_derivative(input):
            return MaxUnpool.apply(_unpool, input, indices, arguments)
        return _unpool(input, indices, arguments)
    except Exception as error:
        tensors = {"input": input, "indices": indices}
        window = Window("max_unpool", *arguments[1:4])
        raise _in_our_words(error, tensors, window, arguments[0]) from None


def call_max_unpool_backward(grad: Tensor, indices: Tensor, arguments: UnpoolArguments) -> Tensor:
    """The result of ``max_unpool_backward``."""
    if is_traced() or not _takes_short_way(grad, indices):
        return max_unpool_backward(grad, indices, *arguments)
    if _needs_derivative(grad):
        return MaxUnpoolBackward.apply(_unpool_backward, grad, indices, arguments)
    return _unpool_backward(grad, indices, arguments)


def call_max_pool(input: Tensor, arguments: PoolArguments) -> tuple[Tensor, Tensor]:
    """The results of ``max_pool``."""
    if is_traced():
        return max_pool(input, *arguments)
    try:
        if not _takes_short_way(input):
            return max_pool(input, *arguments)
        if _needs_derivative(input):
            return MaxPool.apply(_pool, input, arguments)
        return _pool(input, arguments)
    except Exception as error:
        raise _in_our_words(error, {"input": input}, Window("max_pool", *arguments[:4])) from None


def _in_our_words(error: Exception, *arguments: Any) -> Exception:
    """The error of :func:`_checks.check_as_written` if there is one, or else ``error``."""
    try:
        _checks.check_as_written(*arguments)
    except (TypeError, RuntimeError) as ours:
        return ours
    return error
