"""Put these modules where a model has those of :mod:`torch.nn`, in place.

A module is given the other class, and stays the object it is: with its hooks, its training mode,
what was compiled of it, and whoever else refers to it, by whatever name or list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from ._geometry import IntOrInts, Ints
from .functional import Reduce, bytes_do, check_index_dtype, check_reduce
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


def _check_model(name: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: expected model to be a Module but got {type(model).__name__}")


def replace_max_unpool(model: Model, *, reduce: Reduce = "last") -> Model:
    """Make every torch.nn.MaxUnpool1d/2d/3d in ``model`` one of this package, in place.

    Every module stays the same object, with its hooks and its training mode, wherever else it is
    used. Subclasses of the torch.nn modules are left alone: they may do something else.

    Args:
        model: any module.
        reduce: given to every module that is replaced.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``reduce`` is not one of those allowed.

    Example:
        >>> import torch
        >>> replace_max_unpool(torch.nn.Sequential(torch.nn.MaxUnpool2d(2)))
        Sequential(
          (0): MaxUnpool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0))
        )
    """
    _check_model("replace_max_unpool", model)
    check_reduce("replace_max_unpool", reduce)
    for module in model.modules():
        if type(module) in _THEIR_UNPOOLS:
            unpool: Any = module
            unpool.__class__ = _UNPOOLS[_THEIR_UNPOOLS.index(type(module))]
            unpool.reduce = reduce
    return model


def replace_max_pooling(
    model: torch.nn.Module, index_dtype: torch.dtype = torch.uint8
) -> dict[str, str]:
    """Make every torch.nn.MaxPool1d/2d/3d and MaxUnpool1d/2d/3d one of this package, in place.

    The pools that return indices then return them as ``index_dtype``, those of this package
    included, where the model shows that this is safe; the others keep the indices that they have,
    torch.nn's flat int64 ones. An unpool takes indices of every dtype. A pool that returns none
    has its backward keep a byte per output, for the usual windows, rather than eight.

    As with :func:`replace_max_unpool`, modules stay the same objects, and subclasses are left
    alone. The model's results and gradients do not change, wherever torch.nn's are right:

    - Flat indices are positions in a plane as wide as the one that was pooled, so an unpool must
      be told this size as its ``output_size``. Offsets in the window are right for every size.
    - Where windows overlap, torch.nn's gradient of unpooling is wrong.

    What a model does with indices besides is not seen. uint8 ones mean nothing but to an unpool
    with the window of their pool, so it is asked that there be one; for int32 ones, that there be
    an unpool at all; for both, that none be a subclass, which may want others. A model that takes
    them to another place as well wants ``pool.index_dtype = torch.int64`` for this pool.

    Args:
        model: any module.
        index_dtype: uint8, row-major offsets in the window; or int32 or int64, flat positions in
            the input plane.

    Returns:
        Why a pool that returns indices does not return ``index_dtype``, under its name in
        ``model``. Empty if all do.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``index_dtype`` is none of those allowed.

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
    _check_model("replace_max_pooling", model)
    check_index_dtype("replace_max_pooling", index_dtype)
    replace_max_unpool(model)
    unpools = [module for module in model.modules() if isinstance(module, _THEIR_UNPOOLS)]
    reasons = {}
    for name, module in model.named_modules():
        pool: Any = module
        if type(pool) in _THEIR_POOLS:
            pool.__class__ = _POOLS[_THEIR_POOLS.index(type(pool))]
        if not isinstance(module, _THEIR_POOLS) or not pool.return_indices:
            continue
        if getattr(pool, "index_dtype", torch.int64) == index_dtype:
            continue
        reason = _why_not(pool, unpools, index_dtype)
        if reason is None:
            pool.index_dtype = index_dtype
        else:
            reasons[name] = reason
    return reasons


def _why_not(
    pool: Any, all_unpools: Sequence[torch.nn.Module], index_dtype: torch.dtype
) -> str | None:
    """What keeps ``pool`` from handing out ``index_dtype``, if anything."""
    if type(pool) not in _POOLS:
        return f"{type(pool).__name__}, a subclass, is left alone"
    if index_dtype == torch.int64:
        return None
    dims = 1 + _POOLS.index(type(pool))
    kernel_size, stride, padding = window = _window(pool, dims)
    if index_dtype == torch.uint8:
        dilation = _per_dim(pool.dilation, dims)
        if not bytes_do(kernel_size, ()):
            return f"kernel_size {kernel_size} has more than 256 elements"
        if not bytes_do((), dilation):
            return f"dilation {dilation} is not 1"
    ours, theirs = _UNPOOLS[dims - 1], _THEIR_UNPOOLS[dims - 1]
    unpools = [unpool for unpool in all_unpools if isinstance(unpool, theirs)]
    for unpool in unpools:
        if type(unpool) is not ours:
            return f"{type(unpool).__name__}, a subclass of {ours.__name__}, may want int64 indices"
    if not unpools:
        return f"there is no {ours.__name__} to take the indices"
    if index_dtype == torch.uint8 and all(_window(unpool, dims) != window for unpool in unpools):
        return (
            f"no {ours.__name__} has kernel_size {kernel_size}, stride {stride} "
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
