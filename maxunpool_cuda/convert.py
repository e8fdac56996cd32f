# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of models to the modules of this package, in place, and back to :mod:`torch.nn`'s.

It exchanges the class of a module, which keeps its hooks, its training mode and its compiled code.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd, _MaxUnpoolNd

from . import modules
from ._arguments import Reduce, check_index_dtype, check_reduce, fits_uint8, per_dim
from ._ops import Ints

Model = TypeVar("Model", bound=torch.nn.Module)

_NAMES = [f"{of}{n}d" for of in ("MaxPool", "AdaptiveMaxPool", "MaxUnpool") for n in (1, 2, 3)]
_OURS: dict[Any, Any] = {getattr(torch.nn, name): getattr(modules, name) for name in _NAMES}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_KNOWN = {*_OURS, *_THEIRS}
_LEAF: Any = modules._Leaf  # the base of all modules of this package
_KINDS = (_MaxPoolNd, _AdaptiveMaxPoolNd, _MaxUnpoolNd)
_ADDED = ("index_dtype", "reduce")  # the attributes that torch.nn's modules lack


def replace_max_pooling(
    model: torch.nn.Module, index_dtype: torch.dtype = torch.int64, reduce: Reduce | None = None
) -> dict[str, str]:
    """Make all max pooling modules of a model this package's, in place.

    These are torch.nn's MaxPool1d/2d/3d, AdaptiveMaxPool1d/2d/3d and MaxUnpool1d/2d/3d. Each stays
    the same object, wherever else it is used. By default pools return flat int64 indices, and
    results and gradients of the model stay the same, except that torch.nn's gradient of unpooling
    is wrong where windows overlap.

    Smaller indices suit models that hand them to unpools and do nothing else with them. This is not
    checked, so compare the model before and after. A pool keeps the indices that it has unless the
    modules of the model allow the smaller ones: uint8 needs a window that a byte can name and an
    unpool with the same window, int32 needs an unpool, and an unpool that is left alone rules out
    both. Adaptive pools have no uint8 indices.

    Args:
        model: any module.
        index_dtype: of the indices that pools return: int64 or int32, flat positions in the input
            plane, or uint8, row-major offsets in the window.
        reduce: of every unpool, also those that are of this package already. By default these keep
            theirs, and the others get ``"last"``.

    Returns:
        By name, why a pool returns other indices, or why it, or an unpool, is left alone.

    Raises:
        TypeError, ValueError: an argument is none of those allowed.

    Warns:
        UserWarning: names what looks like max pooling but is left alone (subclasses, scripted
            modules, modules whose ``forward`` is set on the instance), or if nothing is replaced.

    Example:
        >>> pools = [torch.nn.MaxPool2d(size, return_indices=True) for size in (2, 17)]
        >>> model = torch.nn.ModuleList([*pools, torch.nn.MaxUnpool2d(2)])
        >>> replace_max_pooling(model, torch.uint8)
        {'1': 'kernel_size (17, 17) has more than 256 elements'}
    """
    return _convert("replace_max_pooling", model, index_dtype, reduce, stacklevel=3)


def _convert(
    name: str, model: torch.nn.Module, index_dtype: torch.dtype, reduce: Any, stacklevel: int
) -> dict[str, str]:
    """The body of :func:`replace_max_pooling`; ``stacklevel`` is that of the warning."""
    _check_model(name, model)
    check_index_dtype(name, index_dtype)
    check_reduce(name, "last" if reduce is None else reduce)
    named: list[tuple[str, Any]] = [*model.named_modules()]
    asked = ([m for _, m in named if isinstance(m, _MaxUnpoolNd)], index_dtype)
    left = {path: why for path, m in named if (why := _why_left(m))}
    reasons = {path: why for path, m in named if (why := _why_not(m, reduce, *asked))}
    for path, module in named:
        if type(module) in _OURS and path not in left:
            module.__class__ = _OURS[type(module)]
        if type(module) not in _THEIRS or path in reasons:
            continue
        if getattr(module, "return_indices", False):
            module.index_dtype = index_dtype
        elif isinstance(module, _MaxUnpoolNd) and reduce is not None:
            module.reduce = reduce
    if left or not any(isinstance(module, _LEAF) for _, module in named):
        warnings.warn(
            f"{name}: expected to replace all max pooling of the model but got "
            f"{type(model).__name__} with {left or 'none among its modules'}. What is not seen: "
            "functions that a forward calls, and scripted modules whose class has another name.",
            stacklevel=stacklevel,
        )
    return reasons


def restore_max_pooling(model: Model) -> Model:
    """Make all modules of this package in a model torch.nn's, in place.

    Modules keep their hooks and get the class and the attributes of torch.nn's, also those that
    were this package's from the start. Subclasses of this package's classes are left alone.

    Tools that look up ``type(module)`` need this, TorchScript (which takes no unpool at all), and
    pickles that are loaded without this package. The function returns ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an unpool adds values with the same index, a subclass returns uint8 or int32
            indices, or a ``forward`` is set on an instance. Nothing is restored then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.MaxPool2d(2))
        >>> replace_max_pooling(model)
        {}
        >>> type(restore_max_pooling(model)[0])
        <class 'torch.nn.modules.pooling.MaxPool2d'>
    """
    _check_model("restore_max_pooling", model)
    if reasons := {path: why for path, m in model.named_modules() if (why := _why_not_back(m))}:
        raise ValueError(f"restore_max_pooling: expected what torch.nn has too but got {reasons}")
    for module in model.modules():
        if type(module) in _THEIRS:
            _put_back(module, (_THEIRS[type(module)], {}))
    return model


@contextlib.contextmanager
def converted(
    model: Model, index_dtype: torch.dtype = torch.int64, reduce: Reduce | None = None
) -> Iterator[Model]:
    """Inside, ``model`` is as :func:`replace_max_pooling` makes it; afterwards, as it was.

    Arguments, warnings and errors are the same. The end, however it comes about, undoes what the
    beginning did, and nothing else: what was this package's before is so afterwards, as it was. If
    a module has been given another class meanwhile, as FSDP2's ``fully_shard`` does, the end raises
    a ValueError and undoes nothing.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.MaxPool2d(2))
        >>> with converted(model):
        ...     model[0].__module__
        'maxunpool_cuda.modules'
    """
    _check_model("converted", model)
    before = [(path, module, _state(module)) for path, module in model.named_modules()]
    _convert("converted", model, index_dtype, reduce, stacklevel=4)
    changed = [entry for entry in before if _state(entry[1]) != entry[2]]
    try:
        yield model
    finally:
        if unknown := {path: type(m).__name__ for path, m, _ in changed if type(m) not in _KNOWN}:
            raise ValueError(f"converted: expected the classes that it gave but got {unknown}")
        for _, module, state in changed:
            if type(module) in _THEIRS:  # else restored meanwhile
                _put_back(module, state)


def _check_model(name: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: expected model to be a Module but got {type(model).__name__}")


def _state(module: torch.nn.Module) -> tuple[type, dict[str, Any]]:
    """What conversion may change: the class, and the attributes that torch.nn's do not have."""
    return type(module), {name: vars(module)[name] for name in _ADDED if name in vars(module)}


def _put_back(module: torch.nn.Module, state: tuple[type, dict[str, Any]]) -> None:
    module.__class__, attributes = state
    for name in _ADDED:
        vars(module).pop(name, None)
    vars(module).update(attributes)


def _base(module: torch.nn.Module) -> str:
    """The class of torch.nn that ``module`` is an instance of."""
    kinds = type(module).__mro__
    return next(kind.__name__ for kind in kinds if kind.__module__ == _MaxPoolNd.__module__)


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether the class of ``module`` is one that conversion knows, and says what it does."""
    return type(module) in _KNOWN and "forward" not in vars(module)


def _described(module: torch.nn.Module) -> str:
    known, own_forward = type(module) in _KNOWN, "whose forward is set on the instance"
    return f"{type(module).__name__}, {own_forward if known else f'a subclass of {_base(module)}'},"


def _why_left(module: Any) -> str | None:
    """Why a module that looks like max pooling, and is not this package's, is left alone."""
    if getattr(module, "original_name", None) in _NAMES:  # of a ScriptModule
        return f"{module.original_name}, in TorchScript, is left alone"
    if not isinstance(module, _KINDS) or isinstance(module, _LEAF) or _is_plain(module):
        return None
    return f"{_described(module)} is left alone"


def _why_not(module: Any, reduce: Any, unpools: list[Any], index_dtype: torch.dtype) -> str | None:
    """Why ``module`` is left alone, or cannot return ``index_dtype``; None if it has no indices."""
    is_unpool = isinstance(module, _MaxUnpoolNd)
    is_pool = isinstance(module, _KINDS) and getattr(module, "return_indices", False)
    if _is_plain(module) or type(module) in _THEIRS:
        wider = is_pool and index_dtype not in (torch.int64, getattr(module, "index_dtype", None))
        return _why_not_smaller(module, unpools, index_dtype) if wider else None
    if isinstance(module, _LEAF):  # subclasses that do already what was asked for
        is_unpool = is_unpool and reduce not in (None, module.reduce)
        is_pool = is_pool and module.index_dtype != index_dtype
    return f"{_described(module)} is left alone" if is_unpool or is_pool else None


def _why_not_smaller(pool: Any, unpools: list[Any], index_dtype: torch.dtype) -> str | None:
    """What speaks against uint8 or int32 indices of ``pool``, as far as modules show it."""
    name, offsets = type(pool).__name__, index_dtype == torch.uint8
    dims = int(_base(pool)[-2])
    if offsets:
        if isinstance(pool, _AdaptiveMaxPoolNd):
            return "adaptive windows, of many sizes, have no offsets"
        kernel_size, stride, padding = window = _window(pool, dims)
        dilation = per_dim(name, "dilation", pool.dilation, dims)
        if not fits_uint8(kernel_size):
            return f"kernel_size {kernel_size} has more than 256 elements"
        if not fits_uint8((), dilation):
            return f"dilation {dilation} is not 1"
    taker = f"MaxUnpool{dims}d"
    takers = [unpool for unpool in unpools if _base(unpool) in (taker, _MaxUnpoolNd.__name__)]
    if others := [unpool for unpool in takers if not _is_plain(unpool)]:
        return f"{_described(others[0])} may want int64 indices"
    if not takers:
        return f"there is no {taker} to take the indices"
    if offsets and window not in [_window(unpool, dims) for unpool in takers]:
        return f"no {taker} has kernel_size {kernel_size}, stride {stride} and padding {padding}"
    return None


def _why_not_back(module: Any) -> str | None:
    """Why a model with ``module`` cannot be restored, if it cannot."""
    if not isinstance(module, _LEAF):
        return None
    if getattr(module, "reduce", "last") != "last":
        return f"torch.nn has no reduce={module.reduce!r}"
    if type(module) in _THEIRS:
        return None if _is_plain(module) else f"{_described(module)} may call this package's"
    if getattr(module, "return_indices", False) and module.index_dtype != torch.int64:
        return f"{_described(module)} would still return {module.index_dtype} indices"
    return None


def _window(module: Any, dims: int) -> tuple[Ints, Ints, Ints]:
    """The kernel size, stride and padding of a pool or an unpool."""
    name, stride = type(module).__name__, module.stride or module.kernel_size  # None or [] in pools
    kernel_size = per_dim(name, "kernel_size", module.kernel_size, dims)
    padding = per_dim(name, "padding", module.padding, dims)
    return kernel_size, per_dim(name, "stride", stride, dims), padding
