# SPDX-License-Identifier: BSD-3-Clause
"""The operators in a build without a compiled library, and the functions of ``_C``.

It does what csrc/schemas.cpp, autograd.cpp and bindings.cpp do. Importing it defines the operators
under the names and schemas that the library gives them. Their results come from _fallback.py.

The derivatives are one ``torch.autograd.Function``, which the dispatcher calls as it calls the C++
nodes: for one level of autograd. Where functions are transformed (:mod:`torch.func`), other levels
are below. So the Function calls the operator again for them, and switches on what PyTorch switches
off inside of a Function. docs/design.md tells what fails otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from . import _checks, _library
from ._checks import Ints, Window
from ._layout import empty_in_layout, layout_of

# As in csrc/schemas.cpp.
_SCHEMAS = (
    "max_unpool(Tensor input, Tensor indices, SymInt[] output_size, SymInt[] kernel_size, "
    "SymInt[] stride, SymInt[] padding, str reduce) -> Tensor",
    "max_unpool_backward(Tensor grad_output, Tensor indices, SymInt[] output_size, "
    "SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, str reduce) -> Tensor",
    "max_pool(Tensor input, SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool ceil_mode, ScalarType index_dtype) -> (Tensor, Tensor)",
)
# The operators exist as long as this object.
_make_library: Any = torch.library.Library  # untyped in some releases
_LIBRARY = _make_library("maxunpool_cuda", "DEF")
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_MAX_UNPOOL = torch.ops.maxunpool_cuda.max_unpool.default
_MAX_UNPOOL_BACKWARD = torch.ops.maxunpool_cuda.max_unpool_backward.default
_MAX_POOL = torch.ops.maxunpool_cuda.max_pool.default


def _fake_unpool(is_forward: bool, values: Tensor, indices: Tensor, *arguments: Any) -> Tensor:
    """Check a call, and return an undefined result of the right shape and layout."""
    output_size, kernel_size, stride, padding, reduce = arguments
    window = Window("max_unpool", kernel_size, stride, padding)
    unpooled = _checks.unpooled_shape(
        values, indices, output_size, window, reduce, is_forward=is_forward
    )
    layout = layout_of(values, indices, window.rank)
    shape = unpooled if is_forward else indices.shape
    return empty_in_layout(values, shape, layout, values.dtype)


def _fake_pool(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Check a call, and return undefined results of the right shape and layout."""
    *numbers, ceil_mode, index_dtype = arguments
    window = Window("max_pool", *numbers)
    shape = _checks.pooled_shape(input, window, ceil_mode, index_dtype)
    layout = layout_of(input, input, window.rank)
    values = empty_in_layout(input, shape, layout, input.dtype)
    return values, empty_in_layout(input, shape, layout, index_dtype)


class _Linear(_SingleLevelFunction):
    """One call of an operator, which is a linear map of its first tensor.

    There is a subclass for each operator, with the name that the C++ node has. What they share is
    in functions: compiled autograd traces ``backward``, but no other methods.
    """

    operator: Any
    # Compiled autograd asks a torch.autograd.Function for this.
    _compiled_autograd_key: Any = torch.autograd.Function._compiled_autograd_key


def _call_below(operator: Any, keys: Any, arguments: tuple[Any, ...]) -> Any:
    """The operator's results, without this level of autograd.

    ``keys`` are what the dispatcher still has to do for this call.
    """
    with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def _keep(ctx: Any, indices: Tensor, arguments: tuple[Any, ...]) -> None:
    """Keep what the derivatives need beside the values: indices and arguments of an unpooling."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(indices)
    ctx.save_for_forward(indices)
    ctx.arguments = arguments


def _gradients(transpose: Any, ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    """The gradients of what ``forward`` takes: that of the values, the second, and no other."""
    (indices,) = ctx.saved_tensors
    gradient = None if grad is None else transpose(grad, indices, *ctx.arguments)
    return None, gradient, *([None] * (len(ctx.needs_input_grad) - 2))


def _tangent(operator: Any, ctx: Any, tangent: Tensor) -> Any:
    """The derivative in forward mode: the map, of the tangent of the values."""
    (indices,) = ctx.saved_tensors
    return operator(tangent, indices, *ctx.arguments)


class MaxUnpool(_Linear):
    """A call of max_unpool."""

    operator = _MAX_UNPOOL

    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
        _keep(ctx, arguments[1], arguments[2:])
        return _call_below(_MAX_UNPOOL, keys, arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return _gradients(_MAX_UNPOOL_BACKWARD, ctx, grad)

    @staticmethod
    def jvp(ctx: Any, _keys: Any, tangent: Tensor, *_: Any) -> Any:
        return _tangent(_MAX_UNPOOL, ctx, tangent)


class MaxUnpoolBackward(_Linear):
    """A call of max_unpool_backward."""

    operator = _MAX_UNPOOL_BACKWARD

    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
        _keep(ctx, arguments[1], arguments[2:])
        return _call_below(_MAX_UNPOOL_BACKWARD, keys, arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return _gradients(_MAX_UNPOOL, ctx, grad)

    @staticmethod
    def jvp(ctx: Any, _keys: Any, tangent: Tensor, *_: Any) -> Any:
        return _tangent(_MAX_UNPOOL_BACKWARD, ctx, tangent)


class MaxPool(_Linear):
    """A call of max_pool, which is linear as long as it picks the same elements of its input.

    Then its values are ``max_unpool_backward(input, indices, "sum")``.
    """

    operator = _MAX_POOL

    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
        values, indices = _call_below(_MAX_POOL, keys, arguments)
        input, *numbers = arguments[:5]
        ctx.window = Window("max_pool", *numbers)
        spatial = input.shape[-ctx.window.rank :]
        if ctx.needs_input_grad[1]:
            _checks.check_no_empty_window(ctx.window, spatial)
        _keep(ctx, indices, (spatial, *_unpooled_window(ctx.window), "sum"))
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _grad_of_indices: None) -> tuple[Any, ...]:
        return _gradients(_MAX_UNPOOL, ctx, grad)

    @staticmethod
    def jvp(ctx: Any, _keys: Any, tangent: Tensor, *_: Any) -> Any:
        _checks.check_no_empty_window(ctx.window, ctx.arguments[0])
        return _tangent(_MAX_UNPOOL_BACKWARD, ctx, tangent), None


def _unpooled_window(window: Window) -> tuple[Ints, Ints, Ints]:
    """Kernel size, stride and padding of the unpooling that is the gradient of a pooling.

    A dilated window has the extent of its outermost elements: 5 for 3 elements with dilation 2.
    """
    pairs = zip(window.kernel_size, window.dilation, strict=True)
    extent = [dilation * (kernel - 1) + 1 for kernel, dilation in pairs]
    return extent, window.stride, window.padding


def _differentiable(function: type[_Linear], keys: Any, *arguments: Any) -> Any:
    """The kernel of an operator for the key Autograd."""
    with enable_single_level_autograd_function():
        return function.apply(keys, *arguments)  # type: ignore[attr-defined]


for _function, _fake in (
    (MaxUnpool, functools.partial(_fake_unpool, True)),
    (MaxUnpoolBackward, functools.partial(_fake_unpool, False)),
    (MaxPool, _fake_pool),
):
    torch.library.register_fake(_function.operator, _fake, lib=_LIBRARY)
    _kernel = functools.partial(_differentiable, _function)
    _LIBRARY.impl(_function.operator._schema.name, _kernel, "Autograd", with_keyset=True)


def max_unpool(*arguments: Any) -> Tensor:
    """The operator, after checks of what Python may give in place of tensors and ints."""
    _check_tensor("max_unpool", len(arguments[-2]), "input", arguments[0])
    _check_tensor("max_unpool", len(arguments[-2]), "indices", arguments[1])
    output_size, *window = arguments[2:6]
    if not _are_usual(window):
        check_window("max_unpool", *window)
    if not _fit_64_bits(output_size):
        raise RuntimeError(
            f"max_unpool{len(window[2])}d: expected sizes that do not overflow but got "
            f"output_size={output_size}, kernel_size={window[0]}, stride={window[1]}, "
            f"padding={window[2]}"
        )
    result: Tensor = _MAX_UNPOOL(*arguments)
    return result


def max_pool(*arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The operator, after the same checks; the last argument is ``return_indices``."""
    *arguments_of_operator, return_indices = arguments
    window = arguments[1:5]
    _check_tensor("max_pool", len(window[2]), "input", arguments[0])
    if not _are_usual(window):
        check_window("max_pool", *window)
    index_dtype = arguments_of_operator[-1]
    if not isinstance(index_dtype, torch.dtype):
        raise TypeError(
            f"max_pool: expected index_dtype to be a torch.dtype but got "
            f"{type(index_dtype).__name__}"
        )
    results: tuple[Tensor, Tensor] = _MAX_POOL(*arguments_of_operator)
    return results if return_indices else results[0]


def check_window(
    op: str, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints = ()
) -> None:
    """Raise ``op``'s error if no call can have these numbers, which need not fit 64 bits."""
    window = Window(op, kernel_size, stride, padding, dilation)
    for name, numbers in zip(window._fields[1:], window[1:], strict=True):
        if not _fit_64_bits(numbers):
            raise TypeError(
                f"{op}{len(numbers)}d: expected {name} to be 64-bit ints but got {numbers}"
            )
    _checks.check_window(window)


def build_info() -> dict[str, bool | str | None]:
    """What ``_C.build_info`` returns."""
    return {
        "cuda": False,
        "cuda_version": None,
        "nvcc_version": None,
        "arch_list": "",
        "compiler": "",
        "torch_version": torch.__version__,
        "note": _library.built_for()["note"],
        "kernels": "none",
    }


def check_errors() -> None:
    """Nothing to do: every call raises its errors at once."""


def _check_tensor(op: str, rank: int, name: str, value: object) -> None:
    """Raise an error unless the argument of this name is a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{op}{rank}d: expected {name} to be a Tensor but got {type(value).__name__}"
        )
    kind = _checks.storage_kind(value)
    if kind != "plain":
        raise NotImplementedError(
            f"{op}{rank}d: expected {name} to be a dense tensor but got a {kind} tensor"
        )


def _are_usual(lists: Any) -> bool:
    """Whether all numbers may be those of a window; symbolic ones are checked by the operator."""
    return all(0 <= n < 2**60 for numbers in lists for n in numbers if type(n) is int)


def _fit_64_bits(numbers: Ints) -> bool:
    return all(-(2**63) <= n < 2**63 for n in numbers if type(n) is int)
