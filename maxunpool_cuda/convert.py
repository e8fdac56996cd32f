"""Put these modules where a model has those of :mod:`torch.nn`, in place.

A module is given the other class, and stays the object it is: with its hooks, its training mode,
what was compiled of it, and whoever else refers to it, by whatever name or list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from .functional import Reduce, check_reduce
from .modules import MaxUnpool1d, MaxUnpool2d, MaxUnpool3d

Model = TypeVar("Model", bound=torch.nn.Module)

# Of one, two and three dimensions.
_UNPOOLS: Sequence[type] = (MaxUnpool1d, MaxUnpool2d, MaxUnpool3d)
_THEIR_UNPOOLS: Sequence[type] = (torch.nn.MaxUnpool1d, torch.nn.MaxUnpool2d, torch.nn.MaxUnpool3d)


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
