# SPDX-License-Identifier: BSD-3-Clause
"""For a while, torch.nn.functional's max pooling and max unpooling are this package's."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._functorch.autograd_function import custom_function_call
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from . import functional
from ._arguments import Reduce, check_index_dtype, check_reduce

Function = TypeVar("Function", bound=Callable[..., Any])


def _both(pool: Any, before: int, *args: Any, return_indices: Any = True, **kwargs: Any) -> Any:
    """``pool`` with indices, whatever ``return_indices``, before which are ``before`` arguments."""
    return pool(*args[:before], return_indices=True, **kwargs)


# For each of PyTorch's functions, the one to call, and whose options it gets.
_OURS: dict[Any, tuple[Callable[..., Any], str]] = {}
_KINDS = {"max_pool": 6, "adaptive_max_pool": 2, "max_unpool": 0}  # and arguments before indices
for _dims, (_kind, _before) in itertools.product((1, 2, 3), _KINDS.items()):
    _ours = getattr(functional, f"{_kind}{_dims}d")
    _ends = {"": _ours, "_with_indices": functools.partial(_both, _ours, _before)}
    for _place, _end in itertools.product((torch, torch.nn.functional), _ends):
        if _theirs := getattr(_place, f"{_kind}{_dims}d{_end}", None):
            _OURS[_theirs] = _ends[_end], _kind
_OURS[torch.adaptive_max_pool1d] = _OURS[torch.nn.functional.adaptive_max_pool1d_with_indices]

# Calls a function unseen by the mode, which sees what is called in there. Not in PyTorch 2.11.
_redispatch: Any = getattr(torch.overrides, "redispatch_function", None)
_SHOWN = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad, custom_function_call)


class patched:  # noqa: N801  # as torch.no_grad is written
    """Inside, max pooling and max unpooling of :mod:`torch.nn.functional` are this package's.

    A context manager, and a decorator for functions. It covers ``max_pool``, ``adaptive_max_pool``
    and ``max_unpool``, in 1d, 2d and 3d, by whatever name, and so torch.nn's modules. It holds in
    this thread, and nests. Compilers and tracers see it. docs/pytorch.md says what it misses.

    Args:
        index_dtype: of the indices that pooling returns if asked for them: int64 and int32, flat
            positions, or uint8, offsets in the window (and int64 of adaptive pooling).
        reduce: what becomes of values with the same index, ``"last"`` or ``"sum"``.

    Raises:
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed.
        TypeError: the decorated object is no function, or a generator or coroutine function.

    Example:
        >>> with patched(torch.uint8):
        ...     torch.nn.functional.max_pool2d(torch.eye(2)[None], 2, return_indices=True)
        (tensor([[[1.]]]), tensor([[[0]]], dtype=torch.uint8))
    """

    def __init__(self, index_dtype: torch.dtype = torch.int64, *, reduce: Reduce = "last") -> None:
        check_index_dtype("patched", index_dtype)
        check_reduce("patched", reduce)
        # patched wraps a mode instead of being one: at a graph break inside it, Dynamo would leave
        # the mode switched on.
        flat = {"index_dtype": torch.int64 if index_dtype == torch.uint8 else index_dtype}
        pools = {"max_pool": {"index_dtype": index_dtype}, "adaptive_max_pool": flat}
        self._mode: Any = _Mode()
        self._mode.options = {**pools, "max_unpool": {"reduce": reduce}}

    def __enter__(self) -> patched:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)

    def __call__(self, function: Function) -> Function:
        if isinstance(function, type) or not callable(function) or _begins_only(function):
            done = "a function that is done when it returns"
            raise TypeError(f"patched: expected {done} but got {function!r}")
        return cast(Function, functools.wraps(function)(_inside(self._mode, function)))


class _Mode(TorchFunctionMode):
    """What PyTorch calls instead of its functions while this is on."""

    options: dict[str, dict[str, Any]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch has taken this mode off its stack meanwhile; `with self` puts it back.
        kwargs = kwargs or {}
        if func in _OURS:
            subclasses = [t for t in types if t is not torch.Tensor and issubclass(t, torch.Tensor)]
            # Dynamo names subclasses also where it is not their turn any more.
            if subclasses and torch._C._is_torch_function_enabled():
                with self:
                    return _call_subclasses(func, subclasses, args, kwargs)
            ours, kind = _OURS[func]
            return ours(*args, **kwargs, **self.options[kind])
        if _redispatch and func in _SHOWN:
            with self:  # on in hooks, and in checkpoints that are computed again
                return _redispatch(func, types, args, kwargs)
        # Not for a region, which Dynamo looks up by its code: every wrapper has the same.
        if isinstance(func, HigherOrderOperator) and func is not invoke_subgraph_placeholder:
            with self:  # Dynamo lets code that is traced in there do so, if it was done out here
                pass
            args = tuple(_inside(self, arg) for arg in args)
        return func(*args, **kwargs)


def _begins_only(function: Any) -> bool:
    """Whether a call only begins the work, as that of a generator or coroutine function does."""
    while isinstance(function, functools.partial):
        function = function.func
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    # A module's __call__ runs its forward.
    bodies = [function, type(function).__call__, getattr(function, "forward", None)]
    return any(is_kind(body) for is_kind in kinds for body in bodies)


def _inside(mode: _Mode, function: Any) -> Any:
    """``function`` with ``mode`` on; whatever is no code stays as it is."""
    if not callable(function) or isinstance(function, (torch.Tensor, type)):
        return function
    if isinstance(function, functools.partial):  # which torch.scan insists on
        return functools.partial(_inside(mode, function.func), *function.args, **function.keywords)

    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return inside


def _call_subclasses(func: Any, subclasses: list[Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What the first of ``subclasses``, of torch.Tensor, makes of ``func``, if it takes it."""
    for subclass in subclasses:
        result = subclass.__torch_function__(func, subclasses, args, kwargs)
        if result is not NotImplemented:
            return result
    names = [t.__name__ for t in subclasses]
    raise TypeError(f"{func.__name__}: expected subclasses that implement it but got {names}")
