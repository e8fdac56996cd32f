"""Put these modules where a model has those of :mod:`torch.nn`, in place, and put those back.

A module is given the other class, and stays the object it is: with its hooks, its training mode,
what was compiled of it, and whoever else refers to it, by whatever name or list.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.modules.pooling import _MaxUnpoolNd

from ._arguments import IntOrInts, Ints, Reduce, check_index_dtype, check_reduce, fits_uint8
from .modules import MaxPool1d, MaxPool2d, MaxPool3d, MaxUnpool1d, MaxUnpool2d, MaxUnpool3d

Model = TypeVar("Model", bound=torch.nn.Module)

# Of one, two and three dimensions.
_POOLS: tuple[type, ...] = (MaxPool1d, MaxPool2d, MaxPool3d)
_THEIR_POOLS: tuple[type, ...] = (torch.nn.MaxPool1d, torch.nn.MaxPool2d, torch.nn.MaxPool3d)
_UNPOOLS: tuple[type, ...] = (MaxUnpool1d, MaxUnpool2d, MaxUnpool3d)
_THEIR_UNPOOLS: tuple[type, ...] = (
    torch.nn.MaxUnpool1d,
    torch.nn.MaxUnpool2d,
    torch.nn.MaxUnpool3d,
)
_OURS, _THEIRS = _POOLS + _UNPOOLS, _THEIR_POOLS + _THEIR_UNPOOLS
_ADDED = ("index_dtype", "reduce")  # attributes


def _check_model(name: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: expected model to be a Module but got {type(model).__name__}")


def _warn_of_nothing(
    name: str, model: torch.nn.Module, looked_for: str, stacklevel: int = 3
) -> None:
    warnings.warn(
        f"{name}: expected a model with modules to replace but got {type(model).__name__} with "
        f"none: it looked for {looked_for} in model.modules(). Subclasses of these are left alone; "
        "functions that a forward calls, and scripted modules, are not seen.",
        stacklevel=stacklevel,
    )


def replace_max_unpool(model: Model, *, reduce: Reduce | None = None) -> Model:
    """Make every torch.nn.MaxUnpool1d/2d/3d in ``model`` one of this package, in place.

    Every module stays the same object, with its hooks and its training mode, wherever else it is
    used. Subclasses of the torch.nn modules are left alone: they may do something else.

    Args:
        model: any module.
        reduce: given to every module that is replaced, and to those that are of this package
            already. By default these keep theirs, and the others get ``"last"``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``reduce`` is not one of those allowed.

    Warns:
        UserWarning: nothing in ``model`` was replaced, or is of this package already.

    Example:
        >>> import torch
        >>> replace_max_unpool(torch.nn.Sequential(torch.nn.MaxUnpool2d(2)))
        Sequential(
          (0): MaxUnpool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0))
        )
    """
    name = "replace_max_unpool"
    _check_model(name, model)
    if reduce is not None:
        check_reduce(name, reduce)
    _replace(model.modules(), _THEIR_UNPOOLS, _UNPOOLS)
    for module in model.modules():
        if reduce is not None and type(module) in _UNPOOLS:
            unpool: Any = module
            unpool.reduce = reduce
    if not any(isinstance(module, _UNPOOLS) for module in model.modules()):
        _warn_of_nothing(name, model, "torch.nn.MaxUnpool1d/2d/3d")
    return model


def _replace(modules: Iterable[Any], theirs: tuple[type, ...], ours: tuple[type, ...]) -> None:
    for module in modules:
        if type(module) in theirs:
            module.__class__ = ours[theirs.index(type(module))]


def replace_max_pooling(
    model: torch.nn.Module,
    index_dtype: torch.dtype = torch.uint8,
    *,
    plain_pools: bool = False,
) -> dict[str, str]:
    """Make torch.nn.MaxPool1d/2d/3d with indices and MaxUnpool1d/2d/3d of this package, in place.

    The pools that return indices then return them as ``index_dtype``, those of this package
    included, where the model shows that this is safe; the others keep the indices that they have,
    torch.nn's flat int64 ones. An unpool takes indices of every dtype.

    As with :func:`replace_max_unpool`, modules stay the same objects, and subclasses are left
    alone. The model's results and gradients do not change, wherever torch.nn's are right:

    - Flat indices are positions in a plane as wide as the one that was pooled, so an unpool must
      be told this size as its ``output_size``. Offsets in the window are right for every size.
    - Where windows overlap, torch.nn's gradient of unpooling is wrong.

    What a model does with indices besides is not seen. uint8 ones mean nothing but to an unpool
    with the window of their pool, so it is asked that there be one; for int32 ones, that there be
    an unpool at all; for both, that every unpool be of torch.nn's classes or of this package's:
    subclasses, and others with their base ``_MaxUnpoolNd``, may want int64. A model that takes
    indices to another place as well, or casts them before an unpool, wants
    ``pool.index_dtype = torch.int64`` for this pool.

    Three lines show that a conversion changes nothing::

        before = model.eval()(x)
        replace_max_pooling(model)
        assert torch.equal(model(x), before)

    Args:
        model: any module.
        index_dtype: uint8, row-major offsets in the window; or int32 or int64, flat positions in
            the input plane.
        plain_pools: whether to replace pools that return no indices, too. Their backward keeps a
            byte per output, for the usual windows, rather than eight.

    Returns:
        Why a pool in ``model`` that returns indices does not return ``index_dtype``, under the name
        of its module. Empty if all do, also where there is none: of what is no module of its own,
        the functions that a forward calls and what is in a scripted module, nothing is said.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``index_dtype`` is none of those allowed.

    Warns:
        UserWarning: nothing in ``model`` was replaced, or is of this package already.

    Example:
        >>> import torch
        >>> model = torch.nn.ModuleDict({
        ...     "pool": torch.nn.MaxPool2d(2, return_indices=True),
        ...     "wide": torch.nn.MaxPool2d(17, return_indices=True),
        ...     "unpool": torch.nn.MaxUnpool2d(2),
        ... })
        >>> replace_max_pooling(model)
        {'wide': 'kernel_size (17, 17) has more than 256 elements'}
        >>> model["pool"](torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]))
        (tensor([[[4.]]]), tensor([[[2]]], dtype=torch.uint8))
    """
    return _convert("replace_max_pooling", model, index_dtype, plain_pools, stacklevel=4)


def _convert(
    name: str,
    model: torch.nn.Module,
    index_dtype: torch.dtype,
    plain_pools: bool,
    stacklevel: int,
) -> dict[str, str]:
    """The body of :func:`replace_max_pooling`; ``stacklevel`` is that of a warning."""
    _check_model(name, model)
    check_index_dtype(name, index_dtype)
    pools: dict[str, Any] = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _THEIR_POOLS) and getattr(module, "return_indices", False)
    }
    unpools = [module for module in model.modules() if isinstance(module, _MaxUnpoolNd)]
    reasons = {}
    wanted = {}
    for path, pool in pools.items():
        has = getattr(pool, "index_dtype", torch.int64)
        reason = None if has == index_dtype else _why_not(pool, unpools, index_dtype)
        if reason is not None:
            reasons[path] = reason
        elif type(pool) in _POOLS + _THEIR_POOLS:
            wanted[path] = index_dtype

    _replace(model.modules(), _THEIR_UNPOOLS, _UNPOOLS)
    _replace(model.modules() if plain_pools else pools.values(), _THEIR_POOLS, _POOLS)
    for path, dtype in wanted.items():
        pools[path].index_dtype = dtype
    if not any(isinstance(module, _POOLS + _UNPOOLS) for module in model.modules()):
        looked_for = "torch.nn.MaxUnpool1d/2d/3d and MaxPool1d/2d/3d with return_indices=True"
        if any(type(module) in _THEIR_POOLS for module in model.modules()):
            looked_for += " (there are some without, which plain_pools=True replaces)"
        _warn_of_nothing(name, model, looked_for, stacklevel)
    return {path: reasons[path] for path in pools if path in reasons}


def restore_max_pooling(model: Model) -> Model:
    """Make every MaxPool1d/2d/3d and MaxUnpool1d/2d/3d of this package torch.nn's, in place.

    This undoes :func:`replace_max_pooling` and :func:`replace_max_unpool`: every module stays the
    same object, with its hooks and its training mode, and has the class and the attributes of
    torch.nn's. Modules that were this package's from the start become torch.nn's, too. Pools then
    return torch.nn's indices, flat int64 ones, and torch.nn's gradient of unpooling is wrong where
    windows overlap. Subclasses of this package's modules are left alone.

    What looks up ``type(module)`` takes the model then, and so do TorchScript (which takes no
    unpool of torch.nn's either) and pickles for where this package is not installed.

    Args:
        model: any module.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an unpool adds or averages values with the same index, as none of torch.nn does;
            nothing is restored then.

    Example:
        >>> import torch
        >>> pool = torch.nn.MaxPool2d(2, return_indices=True)
        >>> model = torch.nn.ModuleList([pool, torch.nn.MaxUnpool2d(2)])
        >>> replace_max_pooling(model)
        {}
        >>> type(restore_max_pooling(model)[0])
        <class 'torch.nn.modules.pooling.MaxPool2d'>
    """
    name = "restore_max_pooling"
    _check_model(name, model)
    reduces = {
        path: module.reduce
        for path, module in model.named_modules()
        if type(module) in _UNPOOLS and module.reduce != "last"
    }
    if reduces:
        raise ValueError(
            f"{name}: expected MaxUnpool1d/2d/3d with reduce='last', as torch.nn has it, "
            f"but got {reduces}"
        )
    for module in model.modules():
        if type(module) in _OURS:
            _put_back(module, (_THEIRS[_OURS.index(type(module))], {}))
    return model


@contextlib.contextmanager
def converted(
    model: Model,
    index_dtype: torch.dtype = torch.uint8,
    *,
    plain_pools: bool = False,
) -> Iterator[Model]:
    """Inside, ``model`` is as :func:`replace_max_pooling` makes it; afterwards, as it was.

    What is undone at the end, however that comes about, is what was done at the beginning: modules
    that were this package's before are so afterwards, and return the indices that they did.
    Modules that were not in ``model`` at the beginning are left alone.

    Args:
        model: any module.
        index_dtype: see :func:`replace_max_pooling`.
        plain_pools: see :func:`replace_max_pooling`.

    Returns:
        A context manager, which gives ``model``.

    Raises:
        TypeError: as :func:`replace_max_pooling` does.
        ValueError: as :func:`replace_max_pooling` does.

    Warns:
        UserWarning: nothing in ``model`` was replaced, or is of this package already.

    Example:
        >>> import torch
        >>> pool = torch.nn.MaxPool2d(2, return_indices=True)
        >>> model = torch.nn.ModuleList([pool, torch.nn.MaxUnpool2d(2)])
        >>> with converted(model):
        ...     pool(torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]))
        (tensor([[[4.]]]), tensor([[[2]]], dtype=torch.uint8))
        >>> pool(torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]))
        (tensor([[[4.]]]), tensor([[[2]]]))
    """
    _check_model("converted", model)
    before = [(module, _state(module)) for module in model.modules()]
    _convert("converted", model, index_dtype, plain_pools, stacklevel=5)
    changed = [(module, state) for module, state in before if _state(module) != state]
    try:
        yield model
    finally:
        for module, state in changed:
            if type(module) in _OURS:
                _put_back(module, state)


def _state(module: torch.nn.Module) -> tuple[type, dict[str, Any]]:
    """What conversion may change: the class, and the attributes that torch.nn's do not have."""
    return type(module), {name: vars(module)[name] for name in _ADDED if name in vars(module)}


def _put_back(module: torch.nn.Module, state: tuple[type, dict[str, Any]]) -> None:
    module.__class__, attributes = state
    for name in _ADDED:
        if name in attributes:
            setattr(module, name, attributes[name])
        elif name in vars(module):
            delattr(module, name)


def _why_not(
    pool: Any, all_unpools: Sequence[torch.nn.Module], index_dtype: torch.dtype
) -> str | None:
    """What keeps ``pool`` from handing out ``index_dtype``, if anything."""
    if type(pool) not in _POOLS + _THEIR_POOLS:
        return f"{type(pool).__name__}, a subclass, is left alone"
    if index_dtype == torch.int64:
        return None
    dims = next(d for d, theirs in enumerate(_THEIR_POOLS, 1) if isinstance(pool, theirs))
    kernel_size, stride, padding = window = _window(pool, dims)
    if index_dtype == torch.uint8:
        dilation = _per_dim(pool.dilation, dims)
        if not fits_uint8(kernel_size, ()):
            return f"kernel_size {kernel_size} has more than 256 elements"
        if not fits_uint8((), dilation):
            return f"dilation {dilation} is not 1"
    theirs = _THEIR_UNPOOLS[dims - 1]
    for unpool in all_unpools:
        base = next((rank for rank in _THEIR_UNPOOLS if isinstance(unpool, rank)), _MaxUnpoolNd)
        known = type(unpool) in _UNPOOLS + _THEIR_UNPOOLS
        if not known and base in (theirs, _MaxUnpoolNd):  # of any rank, if of none of the three
            return f"{type(unpool).__name__}, a subclass of {base.__name__}, may want int64 indices"
    unpools = [unpool for unpool in all_unpools if isinstance(unpool, theirs)]
    if not unpools:
        return f"there is no {theirs.__name__} to take the indices"
    if index_dtype == torch.uint8 and all(_window(unpool, dims) != window for unpool in unpools):
        return (
            f"no {theirs.__name__} has kernel_size {kernel_size}, stride {stride} "
            f"and padding {padding}"
        )
    return None


def _window(module: Any, dims: int) -> tuple[Ints, Ints, Ints]:
    """The kernel size, stride and padding of a pool or an unpool."""
    kernel_size = _per_dim(module.kernel_size, dims)
    stride = () if module.stride is None else _per_dim(module.stride, dims)
    return kernel_size, stride or kernel_size, _per_dim(module.padding, dims)


def _per_dim(value: IntOrInts, dims: int) -> Ints:
    """One int per dimension. A wrong number of them is left for the module's call to refuse."""
    ints = tuple(value) if isinstance(value, Iterable) else (value,)
    return ints * dims if len(ints) == 1 else ints
