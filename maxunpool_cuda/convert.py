"""Put these modules where a model has those of :mod:`torch.nn`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from .functional import Reduce
from .modules import MaxUnpool1d, MaxUnpool2d, MaxUnpool3d

Model = TypeVar("Model", bound=torch.nn.Module)

_REPLACEMENTS: dict[type[torch.nn.Module], Any] = {
    torch.nn.MaxUnpool1d: MaxUnpool1d,
    torch.nn.MaxUnpool2d: MaxUnpool2d,
    torch.nn.MaxUnpool3d: MaxUnpool3d,
}


def replace_max_unpool(model: Model, *, reduce: Reduce = "last") -> Model:
    """Replace every torch.nn.MaxUnpool1d/2d/3d in ``model`` by the one of this package, in place.

    A module used in several places stays one module, and hooks and the training mode are kept.
    Subclasses of the torch.nn modules are left alone: they may do something else.

    Args:
        model: any module.
        reduce: given to every replacement.

    Returns:
        ``model``, or where it is itself a ``torch.nn.MaxUnpoolNd`` its replacement.

    Example:
        >>> import torch
        >>> replace_max_unpool(torch.nn.Sequential(torch.nn.MaxUnpool2d(2)))
        Sequential(
          (0): MaxUnpool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0))
        )
    """
    replaced: dict[torch.nn.Module, Any] = {}
    for module in model.modules():
        if type(module) in _REPLACEMENTS:
            old: Any = module
            new = _REPLACEMENTS[type(module)](
                old.kernel_size, old.stride, old.padding, reduce=reduce
            )
            new.__dict__.update(vars(module))  # hooks, training mode, and what users attached
            replaced[module] = new
    for module in model.modules():
        for name, child in module._modules.items():
            if child in replaced:
                module._modules[name] = replaced[child]
    result: Model = replaced.get(model, model)
    return result
