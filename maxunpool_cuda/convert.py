"""Conversion of models to the modules of this package, in place, and back to :mod:`torch.nn`'s.

Conversion exchanges the class of a module. The module stays the same object, with its hooks, its
training mode and its compiled code, wherever else it is used.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.nn.modules.pooling import _MaxPoolNd, _MaxUnpoolNd

from . import modules
from ._arguments import Ints, Reduce, check_index_dtype, check_reduce, fits_uint8, per_dim

Model = TypeVar("Model", bound=torch.nn.Module)

# In order of dimensions.
_POOLS: tuple[Any, ...] = (torch.nn.MaxPool1d, torch.nn.MaxPool2d, torch.nn.MaxPool3d)
_UNPOOLS: tuple[Any, ...] = (torch.nn.MaxUnpool1d, torch.nn.MaxUnpool2d, torch.nn.MaxUnpool3d)
_OURS: dict[Any, Any] = {their: getattr(modules, their.__name__) for their in _POOLS + _UNPOOLS}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_KNOWN = {*_OURS, *_THEIRS}
_OUR_CLASSES: tuple[Any, ...] = tuple(_THEIRS)
_ADDED = ("index_dtype", "reduce")  # the attributes that torch.nn's modules lack


def replace_max_pooling(
    model: torch.nn.Module, index_dtype: torch.dtype = torch.int64, reduce: Reduce | None = None
) -> dict[str, str]:
    """Make every torch.nn.MaxPool1d/2d/3d and MaxUnpool1d/2d/3d of this package, in place.

    Every module stays the same object, wherever else it is used. By default pools return flat int64
    indices, as torch.nn's do, and results and gradients of the model stay the same, except where
    torch.nn's gradient of unpooling is wrong: where windows overlap.

    Smaller indices take less memory. They suit models that hand indices to unpools and do nothing
    else with them. This is not checked, so compare the model before and after, as in the example.
    A pool keeps the indices that it has unless the modules of the model allow the smaller ones:
    uint8 needs a window that a byte can name and an unpool with the same window, int32 needs an
    unpool, and an unpool that is left alone rules out both.

    Args:
        model: any module.
        index_dtype: of the indices that pools return: int64 or int32, flat positions in the input
            plane, or uint8, row-major offsets in the window.
        reduce: of every unpool, also those that are of this package already. By default these keep
            theirs, and the others get ``"last"``.

    Returns:
        By name, why a module is not as asked: a pool that returns indices of another dtype, or a
        pool with indices or an unpool that is left alone, as subclasses of these classes are.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed.

    Warns:
        UserWarning: nothing in ``model`` was replaced, or is of this package already.

    Example:
        >>> class Model(torch.nn.Sequential):
        ...     def forward(self, x):
        ...         return self[1](*self[0](x))
        >>> pool, wide = (torch.nn.MaxPool2d(size, return_indices=True) for size in (2, 17))
        >>> model, x = Model(pool, torch.nn.MaxUnpool2d(2), wide), torch.randn(1, 8, 8)
        >>> before = model(x)
        >>> replace_max_pooling(model, torch.uint8)
        {'2': 'kernel_size (17, 17) has more than 256 elements'}
        >>> torch.equal(model(x), before)
        True
    """
    return _convert("replace_max_pooling", model, index_dtype, reduce, stacklevel=3)


def _convert(
    name: str, model: torch.nn.Module, index_dtype: torch.dtype, reduce: Any, stacklevel: int
) -> dict[str, str]:
    """The body of :func:`replace_max_pooling`; ``stacklevel`` is that of the warning."""
    _check_model(name, model)
    check_index_dtype(name, index_dtype)
    if reduce is not None:
        check_reduce(name, reduce)
    named: list[tuple[str, Any]] = [*model.named_modules()]
    unpools = [module for _, module in named if isinstance(module, _MaxUnpoolNd)]
    whys = [(path, _why_not(module, unpools, index_dtype, reduce)) for path, module in named]
    reasons = {path: why for path, why in whys if why is not None}
    for path, module in named:
        if type(module) in _OURS:
            module.__class__ = _OURS[type(module)]
        if type(module) not in _THEIRS or path in reasons:
            continue
        if getattr(module, "return_indices", False):
            module.index_dtype = index_dtype
        elif isinstance(module, _MaxUnpoolNd) and reduce is not None:
            module.reduce = reduce
    if not any(isinstance(module, _OUR_CLASSES) for _, module in named):
        warnings.warn(
            f"{name}: expected a model with torch.nn's MaxPool1d/2d/3d or MaxUnpool1d/2d/3d among "
            f"its modules but got {type(model).__name__} without. Subclasses of these are left "
            "alone; functions that a forward calls, and scripted modules, are not seen.",
            stacklevel=stacklevel,
        )
    return reasons


def restore_max_pooling(model: Model) -> Model:
    """Make every MaxPool1d/2d/3d and MaxUnpool1d/2d/3d of this package torch.nn's, in place.

    This undoes :func:`replace_max_pooling`: every module stays the same object, with its hooks and
    its training mode, and has the class and the attributes of torch.nn's. Modules that were this
    package's from the start become torch.nn's, too. Subclasses of them are left alone.

    Tools that look up ``type(module)`` need this, TorchScript (which takes no unpool of torch.nn's
    either) and pickles that are loaded without this package. The function returns ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an unpool adds values with the same index, which torch.nn's cannot, or a
            subclass would still return uint8 or int32 indices. Nothing is restored then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.MaxPool2d(2))
        >>> replace_max_pooling(model)
        {}
        >>> type(restore_max_pooling(model)[0])
        <class 'torch.nn.modules.pooling.MaxPool2d'>
    """
    _check_model("restore_max_pooling", model)
    whys = [(path, _why_not_back(module)) for path, module in model.named_modules()]
    if reasons := {path: why for path, why in whys if why is not None}:
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

    Arguments, warnings and errors are those of :func:`replace_max_pooling`. The end, however it
    comes about, undoes what the beginning did: modules that were this package's before are so
    afterwards, with the indices and the ``reduce`` that they had. Modules that were not in
    ``model`` at the beginning are left alone. If a module has been given another class meanwhile,
    as FSDP2's ``fully_shard`` does, the end raises a ValueError and undoes nothing.

    Example:
        >>> pool, image = torch.nn.MaxPool2d(2, return_indices=True), torch.eye(2)[None]
        >>> with converted(torch.nn.ModuleList([pool, torch.nn.MaxUnpool2d(2)]), torch.uint8):
        ...     pool(image)[1]
        tensor([[[0]]], dtype=torch.uint8)
        >>> pool(image)[1]
        tensor([[[0]]])
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


def _base(module: torch.nn.Module) -> type:
    """The class of torch.nn that ``module`` is an instance of."""
    return next(kind for kind in type(module).__mro__ if kind.__module__ == _MaxPoolNd.__module__)


def _described(module: torch.nn.Module) -> str:
    return f"{type(module).__name__}, a subclass of {_base(module).__name__},"


def _why_not(
    module: Any, unpools: list[Any], index_dtype: torch.dtype, reduce: Reduce | None
) -> str | None:
    """Why ``module`` is not converted, or cannot return ``index_dtype``; None if it is neither."""
    is_unpool = isinstance(module, _MaxUnpoolNd)
    is_pool = isinstance(module, _MaxPoolNd) and getattr(module, "return_indices", False)
    if type(module) in _KNOWN:
        fine = not is_pool or index_dtype in (torch.int64, getattr(module, "index_dtype", None))
        return None if fine else _why_not_smaller(module, unpools, index_dtype)
    if isinstance(module, _OUR_CLASSES):  # subclasses that do already what was asked for
        is_unpool = is_unpool and reduce not in (None, module.reduce)
        is_pool = is_pool and module.index_dtype != index_dtype
    return f"{_described(module)} is left alone" if is_unpool or is_pool else None


def _why_not_smaller(pool: Any, unpools: list[Any], index_dtype: torch.dtype) -> str | None:
    """What speaks against uint8 or int32 indices of ``pool``, as far as modules show it."""
    dims = _POOLS.index(_base(pool)) + 1
    kernel_size, stride, padding = window = _window(pool, dims)
    if index_dtype == torch.uint8:
        dilation = per_dim(type(pool).__name__, "dilation", pool.dilation, dims)
        if not fits_uint8(kernel_size):
            return f"kernel_size {kernel_size} has more than 256 elements"
        if not fits_uint8((), dilation):
            return f"dilation {dilation} is not 1"
    taker = _UNPOOLS[dims - 1]
    for unpool in unpools:
        if type(unpool) not in _KNOWN and _base(unpool) in (taker, _MaxUnpoolNd):
            return f"{_described(unpool)} may want int64 indices"
    windows = [_window(unpool, dims) for unpool in unpools if isinstance(unpool, taker)]
    if not windows:
        return f"there is no {taker.__name__} to take the indices"
    if index_dtype == torch.uint8 and window not in windows:
        sizes = f"kernel_size {kernel_size}, stride {stride} and padding {padding}"
        return f"no {taker.__name__} has {sizes}"
    return None


def _why_not_back(module: Any) -> str | None:
    """Why a model with ``module`` cannot be restored, if it cannot."""
    if not isinstance(module, _OUR_CLASSES):
        return None
    if isinstance(module, _MaxUnpoolNd):
        return None if module.reduce == "last" else f"torch.nn has no reduce={module.reduce!r}"
    if type(module) in _THEIRS or not module.return_indices or module.index_dtype == torch.int64:
        return None
    return f"{_described(module)} would still return {module.index_dtype} indices"


def _window(module: Any, dims: int) -> tuple[Ints, Ints, Ints]:
    """The kernel size, stride and padding of a pool or an unpool."""
    name, stride = type(module).__name__, module.stride or module.kernel_size  # None or [] in pools
    kernel_size = per_dim(name, "kernel_size", module.kernel_size, dims)
    padding = per_dim(name, "padding", module.padding, dims)
    return kernel_size, per_dim(name, "stride", stride, dims), padding
