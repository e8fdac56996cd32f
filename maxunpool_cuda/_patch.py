# SPDX-License-Identifier: BSD-3-Clause
"""For a while, torch.nn.functional's max pooling and max unpooling are this package's.

PyTorch lets a *mode* (:class:`torch.overrides.TorchFunctionMode`) see every call of its functions,
and answer in their place. Inside ``with patched(index_dtype=torch.uint8):`` there is such a mode.
It answers ``torch.nn.functional.max_pool2d(x, 2)`` by ``functional.max_pool2d(x, 2,
index_dtype=torch.uint8)``, and lets all calls pass that are not in the table below.

PyTorch takes a mode off while it answers. So ``with mode:`` below puts it back on, for code of
others that is called from there and may pool, too: hooks, subclasses of Tensor, branches of
:func:`torch.cond`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.nn.functional as torch_F
from torch.overrides import TorchFunctionMode

from . import functional
from ._arguments import IntOrInts, Reduce
from ._checks import check_index_dtype, check_reduce

Function = TypeVar("Function", bound=Callable[..., Any])


def _max_pool_with_indices(
    max_pool: Callable[..., Any],
    input: Any,
    kernel_size: IntOrInts,
    stride: IntOrInts | None = None,
    padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    ceil_mode: bool = False,
    return_indices: bool = True,
    **options: Any,
) -> Any:
    """``max_pool`` with indices, whatever ``return_indices`` says: as torch.nn's of this name."""
    window = (kernel_size, stride, padding, dilation, ceil_mode)
    return max_pool(input, *window, return_indices=True, **options)


def _adaptive_max_pool_with_indices(
    adaptive_max_pool: Callable[..., Any],
    input: Any,
    output_size: Any,
    return_indices: bool = True,
    **options: Any,
) -> Any:
    """``adaptive_max_pool`` with indices, whatever ``return_indices`` says."""
    return adaptive_max_pool(input, output_size, return_indices=True, **options)


_max_pool1d_with_indices = functools.partial(_max_pool_with_indices, functional.max_pool1d)
_max_pool2d_with_indices = functools.partial(_max_pool_with_indices, functional.max_pool2d)
_max_pool3d_with_indices = functools.partial(_max_pool_with_indices, functional.max_pool3d)
_adaptive_max_pool1d_with_indices = functools.partial(
    _adaptive_max_pool_with_indices, functional.adaptive_max_pool1d
)
_adaptive_max_pool2d_with_indices = functools.partial(
    _adaptive_max_pool_with_indices, functional.adaptive_max_pool2d
)
_adaptive_max_pool3d_with_indices = functools.partial(
    _adaptive_max_pool_with_indices, functional.adaptive_max_pool3d
)

# For each function of PyTorch, the function that answers in its place, and the kind of its options.
_REPLACEMENTS: dict[Any, tuple[Callable[..., Any], str]] = {
    torch.max_pool1d: (functional.max_pool1d, "max_pool"),
    torch.max_pool2d: (functional.max_pool2d, "max_pool"),
    torch.max_pool3d: (functional.max_pool3d, "max_pool"),
    torch.max_pool1d_with_indices: (_max_pool1d_with_indices, "max_pool"),
    torch_F.max_pool1d: (functional.max_pool1d, "max_pool"),
    torch_F.max_pool2d: (functional.max_pool2d, "max_pool"),
    torch_F.max_pool3d: (functional.max_pool3d, "max_pool"),
    torch_F.max_pool1d_with_indices: (_max_pool1d_with_indices, "max_pool"),
    torch_F.max_pool2d_with_indices: (_max_pool2d_with_indices, "max_pool"),
    torch_F.max_pool3d_with_indices: (_max_pool3d_with_indices, "max_pool"),
    # This one of torch returns indices, unlike the one of torch.nn.functional.
    torch.adaptive_max_pool1d: (_adaptive_max_pool1d_with_indices, "adaptive_max_pool"),
    torch_F.adaptive_max_pool1d: (functional.adaptive_max_pool1d, "adaptive_max_pool"),
    torch_F.adaptive_max_pool2d: (functional.adaptive_max_pool2d, "adaptive_max_pool"),
    torch_F.adaptive_max_pool3d: (functional.adaptive_max_pool3d, "adaptive_max_pool"),
    torch_F.adaptive_max_pool1d_with_indices: (
        _adaptive_max_pool1d_with_indices,
        "adaptive_max_pool",
    ),
    torch_F.adaptive_max_pool2d_with_indices: (
        _adaptive_max_pool2d_with_indices,
        "adaptive_max_pool",
    ),
    torch_F.adaptive_max_pool3d_with_indices: (
        _adaptive_max_pool3d_with_indices,
        "adaptive_max_pool",
    ),
    torch_F.max_unpool1d: (functional.max_unpool1d, "max_unpool"),
    torch_F.max_unpool2d: (functional.max_unpool2d, "max_unpool"),
    torch_F.max_unpool3d: (functional.max_unpool3d, "max_unpool"),
}


def _name_of_torch(module: str, name: str) -> Any:
    """A name of PyTorch that only one feature needs; None in a release that lacks it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


# Calls a function without showing the call to the mode, but shows it the calls inside of that
# function. PyTorch 2.11 lacks it, and the mode is off in hooks and checkpoints there.
_redispatch = _name_of_torch("torch.overrides", "redispatch_function")
# Functions that run code of others, to be called in this way. The last one is torch.func's.
_RUN_OTHERS_CODE = (
    torch.Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
    _name_of_torch("torch._functorch.autograd_function", "custom_function_call"),
)
# What the branches and loop bodies of torch.cond, torch.scan and so on are arguments of. Without
# the name, the mode is off in these.
_HIGHER_ORDER: Any = _name_of_torch("torch._ops", "HigherOrderOperator") or ()
# Its argument is a compiled region (nested_compile_region).
_NESTED_REGION = _name_of_torch(
    "torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder"
)
# What a call returns that has only begun the work.
_ONLY_BEGUN = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class patched:  # noqa: N801  # as torch.no_grad is written
    """Inside, max pooling and max unpooling of :mod:`torch.nn.functional` are this package's.

    A context manager, and a decorator for functions. It covers ``max_pool``, ``adaptive_max_pool``
    and ``max_unpool``, in 1d, 2d and 3d, by all their names, and so torch.nn's modules. It holds in
    this thread, and nests. Compilers and tracers see it. docs/pytorch.md says what it misses.

    Args:
        index_dtype: of the indices that pooling returns if asked for them: int64 and int32, flat
            positions, or uint8, offsets in the window. Adaptive pooling, whose windows have many
            sizes, returns int64 in place of uint8, and warns.
        reduce: what becomes of values with the same index, ``"last"`` or ``"sum"``.

    Raises:
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed.
        TypeError: an argument is positional; the decorated object is no function, or a generator
            or coroutine function, or it returns a generator or a coroutine.

    Warns:
        UserWarning: inside, an adaptive pool returns int64 indices where uint8 ones were asked for.

    Example:
        >>> with patched(index_dtype=torch.uint8):
        ...     torch.nn.functional.max_pool2d(torch.eye(2)[None], 2, return_indices=True)
        (tensor([[[1.]]]), tensor([[[0]]], dtype=torch.uint8))
    """

    def __init__(
        self,
        *positional: NoReturn,
        index_dtype: torch.dtype = torch.int64,
        reduce: Reduce = "last",
    ) -> None:
        if positional:
            raise TypeError(
                "patched: expected index_dtype and reduce as keywords, and a function to decorate "
                f"after them, as in patched()(function), but got {positional[0]!r}"
            )
        check_index_dtype("patched", index_dtype)
        check_reduce("patched", reduce)
        # patched wraps a mode instead of being one: at a graph break inside it, Dynamo would leave
        # the mode switched on.
        self._mode: Any = _Mode()
        adaptive_dtype = torch.int64 if index_dtype == torch.uint8 else index_dtype
        self._mode.options = {
            "max_pool": {"index_dtype": index_dtype},
            "adaptive_max_pool": {"index_dtype": adaptive_dtype},
            "max_unpool": {"reduce": reduce},
        }

    def __enter__(self) -> patched:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)

    def __call__(self, function: Function) -> Function:
        is_function = callable(function) and not isinstance(function, type)
        if not is_function or _only_begins(function):
            raise _unfinished_error(function)
        call_with_mode = _with_mode(self._mode, function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = call_with_mode(*args, **kwargs)
            # _only_begins does not see a function that returns what another one has begun.
            if isinstance(result, _ONLY_BEGUN):
                raise _unfinished_error(function)
            return result

        return cast(Function, call)


class _Mode(TorchFunctionMode):
    """What PyTorch calls instead of its functions while this is on."""

    options: dict[str, dict[str, Any]]  # for each kind of function, the arguments that are added

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch has taken this mode off its stack meanwhile; `with self` puts it back.
        kwargs = kwargs or {}
        if func in _REPLACEMENTS:
            subclasses = [t for t in types if t is not torch.Tensor and issubclass(t, torch.Tensor)]
            # Dynamo names subclasses also if it is not their turn any more.
            if subclasses and torch._C._is_torch_function_enabled():
                with self:
                    return _call_subclasses(func, subclasses, args, kwargs)
            return self._replace(func, args, kwargs)
        if _redispatch and func in _RUN_OTHERS_CODE:
            with self:  # on in hooks, and in checkpoints that are computed again
                return _redispatch(func, types, args, kwargs)
        # Branches and loop bodies get the mode. A compiled region (nested_compile_region) does not:
        # Dynamo looks it up by its code, and every wrapper has the same code.
        if isinstance(func, _HIGHER_ORDER) and func is not _NESTED_REGION:
            with self:  # Dynamo allows this to the code that it traces if it has been done here
                pass
            args = tuple(_with_mode(self, arg) for arg in args)
        return func(*args, **kwargs)

    def _replace(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of this package's function in place of ``func``."""
        replacement, kind = _REPLACEMENTS[func]
        results = replacement(*args, **kwargs, **self.options[kind])
        has_indices = isinstance(results, tuple)
        wants_offsets = self.options["max_pool"]["index_dtype"] == torch.uint8
        if kind == "adaptive_max_pool" and has_indices and wants_offsets:
            _warn_of_flat_indices(func.__name__)
        return results


def _warn_of_flat_indices(name: str) -> None:
    warnings.warn(
        f"patched: expected windows of one size for torch.uint8 indices but got {name}, which "
        "returns torch.int64 ones",
        stacklevel=4,
    )


# Dynamo calls this function instead of tracing it: it does not trace warnings.
_warn_of_flat_indices._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _unfinished_error(function: object) -> TypeError:
    """The error of what cannot be decorated: after its call, the mode would be off too early."""
    return TypeError(
        f"patched: expected a function that is done when it returns but got {function!r}"
    )


def _only_begins(function: Any) -> bool:
    """Whether a call only begins the work, as that of a generator or coroutine function does."""
    while isinstance(function, functools.partial):
        function = function.func
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    # A module's __call__ runs its forward.
    bodies = [function, type(function).__call__, getattr(function, "forward", None)]
    return any(is_kind(body) for is_kind in kinds for body in bodies)


def _with_mode(mode: _Mode, argument: Any) -> Any:
    """A function that calls ``argument`` with ``mode`` on; ``argument`` itself if it is no code."""
    if not callable(argument) or isinstance(argument, (torch.Tensor, type)):
        return argument
    if isinstance(argument, functools.partial):  # which torch.scan insists on
        called = _with_mode(mode, argument.func)
        return functools.partial(called, *argument.args, **argument.keywords)

    def call_with_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return argument(*args, **kwargs)

    return call_with_mode


def _call_subclasses(func: Any, subclasses: list[Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of ``func`` from the first of these subclasses of torch.Tensor that has one."""
    for subclass in subclasses:
        result = subclass.__torch_function__(func, subclasses, args, kwargs)
        if result is not NotImplemented:
            return result
    names = [subclass.__name__ for subclass in subclasses]
    raise TypeError(f"{func.__name__}: expected subclasses that implement it but got {names}")
