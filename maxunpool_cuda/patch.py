"""For a while, torch.nn.functional's max pooling and max unpooling are this package's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from . import functional
from ._arguments import IntOrInts, Reduce, check_index_dtype, check_reduce
from .functional import Pooled

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _with_indices(pool: Callable[..., Pooled]) -> Callable[..., Pooled]:
    """``pool`` as torch.nn has it twice: this one returns indices, whatever ``return_indices``."""

    def pool_with_indices(
        input: Tensor,
        kernel_size: IntOrInts,
        stride: IntOrInts | None = None,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
        *,
        index_dtype: torch.dtype,
    ) -> Pooled:
        window = (kernel_size, stride, padding, dilation)
        return pool(input, *window, ceil_mode, True, index_dtype=index_dtype)

    return pool_with_indices


# What is called for each of PyTorch's functions.
_POOLS: dict[Callable[..., Any], Callable[..., Pooled]] = {}
_UNPOOLS: dict[Callable[..., Any], Callable[..., Tensor]] = {}
for _dims in (1, 2, 3):
    _name = f"max_pool{_dims}d"
    for _place in (torch, torch.nn.functional):
        _POOLS[getattr(_place, _name)] = getattr(functional, _name)
        if hasattr(_place, f"{_name}_with_indices"):
            _theirs = getattr(_place, f"{_name}_with_indices")
            _POOLS[_theirs] = _with_indices(getattr(functional, _name))
    _name = f"max_unpool{_dims}d"
    _UNPOOLS[getattr(torch.nn.functional, _name)] = getattr(functional, _name)


# Since PyTorch 2.13: a call that this mode does not see, and what is called in it does.
_redispatch: Any = getattr(torch.overrides, "redispatch_function", None)
_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad) if _redispatch else ()


class patched:  # noqa: N801  # as torch.no_grad is written
    """Inside, max pooling and max unpooling of :mod:`torch.nn.functional` are this package's.

    A context manager, and a decorator for functions. It concerns ``max_pool1d/2d/3d``,
    ``max_pool1d/2d/3d_with_indices`` and ``max_unpool1d/2d/3d`` of torch.nn.functional, by
    whatever name they were imported, ``torch.max_pool1d/2d/3d``, and so the modules of torch.nn,
    which call them. They take what torch.nn's take. This package's own functions and modules do
    what they are told, not what is told here.

    It holds in this thread, until its end, however that comes about; the innermost one counts. One
    object may be used many times, within itself too. torch.compile, torch.export, ``make_fx``,
    ``torch.fx.symbolic_trace`` and ``torch.jit.trace`` see what is called, around a call of a
    compiled function and inside of it. A derivative is that of what was called, wherever backward
    runs.

    What PyTorch runs elsewhere or later is not reached: TorchScript; other threads, such as those
    of :class:`torch.nn.DataParallel`; and what :func:`torch.utils.checkpoint.checkpoint` computes
    again in a backward that does not run inside (before PyTorch 2.13: in any). There, decorate
    ``forward``, or the function that is checkpointed. With ``fullgraph=True`` Dynamo refuses it
    within what is checkpointed and within a branch of ``torch.cond``, but takes it around these;
    and, in some releases, a ``with`` of an object that was made outside of what is compiled.

    Args:
        index_dtype: of the indices that pooling returns where it is asked for them: int64 and
            int32, flat positions, or uint8, offsets in the window, which only unpooling with the
            same window takes. See :func:`maxunpool_cuda.functional.max_pool2d`.
        reduce: what becomes of values with the same index. See
            :func:`maxunpool_cuda.functional.max_unpool2d`.

    Raises:
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed.
        TypeError: what is decorated is no function, or one that only begins its work when it is
            called: a generator or a coroutine.

    Example:
        >>> import torch
        >>> from torch.nn.functional import max_pool2d, max_unpool2d
        >>> image = torch.tensor([[[1.0, 2.0], [4.0, 3.0]]])
        >>> with patched(torch.uint8):
        ...     max_pool2d(image, 2, return_indices=True)
        (tensor([[[4.]]]), tensor([[[2]]], dtype=torch.uint8))
        >>> @patched()
        ... def round_trip(image):
        ...     return max_unpool2d(*max_pool2d(image, 2, return_indices=True), 2)
        >>> round_trip(image)
        tensor([[[0., 0.],
                 [4., 0.]]])
    """

    def __init__(self, index_dtype: torch.dtype = torch.int64, *, reduce: Reduce = "last") -> None:
        check_index_dtype("patched", index_dtype)
        check_reduce("patched", reduce)
        # This is none itself: Dynamo leaves modes on where a graph breaks inside of them.
        self._mode: Any = _Mode(index_dtype, reduce)

    def __enter__(self) -> patched:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        begins_only = (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        )
        if begins_only or isinstance(function, type) or not callable(function):
            raise TypeError(
                "patched: expected a function that is done when it returns but got "
                f"{function!r}; use `with patched():`"
            )
        return functools.wraps(function)(_inside(self._mode, function))


class _Mode(TorchFunctionMode):
    """What PyTorch calls instead of its functions while this is on."""

    def __init__(self, index_dtype: torch.dtype, reduce: Reduce) -> None:
        super().__init__()
        self.index_dtype, self.reduce = index_dtype, reduce

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # PyTorch has taken this mode from its stack meanwhile.
        kwargs = kwargs or {}
        if func not in _POOLS and func not in _UNPOOLS:
            return self._call_other(func, types, args, kwargs)
        # Dynamo names subclasses also where it is not their turn any more.
        if torch._C._is_torch_function_enabled():
            subclasses = [t for t in types if t is not Tensor and issubclass(t, Tensor)]
            if subclasses:
                with self:  # what they call comes here, as their turn is over then
                    return _call_subclasses(func, subclasses, args, kwargs)
        if func in _POOLS:
            return _POOLS[func](*args, **kwargs, index_dtype=self.index_dtype)
        return _UNPOOLS[func](*args, **kwargs, reduce=self.reduce)

    def _call_other(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """``func``, with this mode on in what it calls of the user's."""
        if isinstance(func, HigherOrderOperator):
            with self:  # Dynamo lets code that is traced in there do so, if it was done out here
                pass
            args = tuple(_inside(self, arg) if _is_code(arg) else arg for arg in args)
        elif func in _BACKWARDS and not torch.compiler.is_compiling():
            with self:  # on in hooks, and in checkpoints that are computed again
                return _redispatch(func, types, args, kwargs)
        return func(*args, **kwargs)


def _inside(mode: _Mode, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    def inside(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with mode:
            return function(*args, **kwargs)

    return inside


def _is_code(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, (Tensor, type))


def _call_subclasses(
    func: Callable[..., Any],
    subclasses: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the first of ``subclasses``, of Tensor, makes of ``func``, if it takes it."""
    for subclass in subclasses:
        result = subclass.__torch_function__(func, subclasses, args, kwargs)
        if result is not NotImplemented:
            return result
    names = [subclass.__name__ for subclass in subclasses]
    raise TypeError(
        f"{func.__name__}: expected a subclass of Tensor that implements it but got {names}"
    )
