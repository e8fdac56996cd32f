"""For a while, torch.nn.functional's max pooling and max unpooling are this package's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from . import functional
from ._arguments import Reduce, check_index_dtype, check_reduce

Function = TypeVar("Function", bound=Callable[..., Any])


def _with_indices(pool: Any, *args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
    """``pool`` as torch.nn has it twice: this one returns indices, whatever ``return_indices``."""
    return pool(*args[:6], return_indices=True, **kwargs)  # the seventh is return_indices


# For each of PyTorch's functions, the one to call, and the options of patched that it takes.
_OURS: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {}
for _dims in (1, 2, 3):
    _pool, _unpool = (getattr(functional, f"{name}{_dims}d") for name in ("max_pool", "max_unpool"))
    for _place in (torch, torch.nn.functional):
        _OURS[getattr(_place, f"max_pool{_dims}d")] = _pool, ("index_dtype",)
        if _theirs := getattr(_place, f"max_pool{_dims}d_with_indices", None):
            _OURS[_theirs] = functools.partial(_with_indices, _pool), ("index_dtype",)
    _OURS[getattr(torch.nn.functional, f"max_unpool{_dims}d")] = _unpool, ("reduce",)

# Calls a function unseen by the mode, which sees what is called in there. Not in PyTorch 2.11.
_redispatch: Any = getattr(torch.overrides, "redispatch_function", None)
_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad) if _redispatch else ()


class patched:  # noqa: N801  # as torch.no_grad is written
    """Inside, max pooling and max unpooling of :mod:`torch.nn.functional` are this package's.

    A context manager, and a decorator for functions. It covers ``max_pool1d/2d/3d``,
    ``max_pool1d/2d/3d_with_indices`` and ``max_unpool1d/2d/3d`` by whatever name, and so torch.nn's
    modules. It holds in this thread, and nests. torch.compile, torch.export, ``make_fx``,
    ``torch.fx.symbolic_trace`` and ``torch.jit.trace`` see it. Backward may run anywhere.

    It does not reach TorchScript, the threads of :class:`torch.nn.DataParallel`, and a checkpoint
    that is computed again in a backward outside (PyTorch 2.11: in any). There, decorate ``forward``
    or the checkpointed function. With ``fullgraph=True`` Dynamo takes ``patched`` around
    :func:`torch.utils.checkpoint.checkpoint` and ``torch.cond``, but not within.

    Args:
        index_dtype: of the indices that pooling returns if asked for them: int64 and int32, flat
            positions, or uint8, offsets in the window, for unpooling with the same window.
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
        self._mode: Any = _Mode(index_dtype=index_dtype, reduce=reduce)

    def __enter__(self) -> patched:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)

    def __call__(self, function: Function) -> Function:
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction)
        begins_only = any(is_kind(function) for is_kind in (*kinds, inspect.isasyncgenfunction))
        if begins_only or isinstance(function, type) or not callable(function):
            wanted = "a function that is done when it returns"
            raise TypeError(f"patched: expected {wanted} but got {function!r}")
        return cast(Function, functools.wraps(function)(_inside(self._mode, function)))


class _Mode(TorchFunctionMode):
    """What PyTorch calls instead of its functions while this is on."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch has taken this mode off its stack meanwhile; `with self` puts it back.
        kwargs = kwargs or {}
        if func in _OURS:
            subclasses = [t for t in types if t is not Tensor and issubclass(t, Tensor)]
            # Dynamo names subclasses also where it is not their turn any more.
            if subclasses and torch._C._is_torch_function_enabled():
                with self:
                    return _call_subclasses(func, subclasses, args, kwargs)
            ours, names = _OURS[func]
            return ours(*args, **kwargs, **{name: self.options[name] for name in names})
        if isinstance(func, HigherOrderOperator):
            with self:  # Dynamo lets code that is traced in there do so, if it was done out here
                pass
            args = tuple(_inside(self, arg) for arg in args)
        elif func in _BACKWARDS and not torch.compiler.is_compiling():
            with self:  # on in hooks, and in checkpoints that are computed again
                return _redispatch(func, types, args, kwargs)
        return func(*args, **kwargs)


def _inside(mode: _Mode, function: Any) -> Any:
    """``function`` with ``mode`` on; whatever is no code stays as it is."""
    if not callable(function) or isinstance(function, (Tensor, type)):
        return function

    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return inside


def _call_subclasses(func: Any, subclasses: list[Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What the first of ``subclasses``, of Tensor, makes of ``func``, if it takes it."""
    for subclass in subclasses:
        result = subclass.__torch_function__(func, subclasses, args, kwargs)
        if result is not NotImplemented:
            return result
    names = [subclass.__name__ for subclass in subclasses]
    raise TypeError(f"{func.__name__}: expected subclasses that implement it but got {names}")
