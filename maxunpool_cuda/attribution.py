# SPDX-License-Identifier: BSD-3-Clause
"""For a while, captum and shap compute DeepLIFT's attributions that add up.

The module imports neither of them. It changes a model, and what :mod:`torch.nn.functional` does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from . import modules
from .convert import check_model
from .patch import patched

Model = TypeVar("Model", bound=torch.nn.Module)

# The classes that captum has a rule for. It has none for their subclasses.
_POOLS: dict[str, type] = {
    f"MaxPool{dims}d": getattr(torch.nn, f"MaxPool{dims}d") for dims in (1, 2, 3)
}
# For each pool without a rule, the class that stands in for it.
_STAND_INS: dict[type, type] = {
    getattr(place, f"{kind}{name}"): pool
    for name, pool in _POOLS.items()
    for place, kind in ((modules, ""), (modules, "Adaptive"), (torch.nn, "Adaptive"))
}
# What is max pooling, and has no rule unless its class is one of those above.
_MAX_POOLING = (
    _MaxPoolNd,
    _AdaptiveMaxPoolNd,
    torch.nn.FractionalMaxPool2d,
    torch.nn.FractionalMaxPool3d,
)
# What a max pool has and an adaptive one lacks. The sizes of the input give it the window.
_WINDOW = {"kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}


@contextlib.contextmanager
def exact_attributions(model: Model) -> Iterator[Model]:
    """Inside, the attributions of captum and shap by DeepLIFT's rule add up to the difference.

    These are captum's ``DeepLift`` and ``DeepLiftShap``, their ``Layer`` and ``Neuron`` variants,
    and shap's ``DeepExplainer``, for models whose windows of max pooling overlap or whose pools
    follow or precede an activation. The weights and outputs of the model stay the same.

    Inside, max unpooling adds up, as in :class:`patched` with ``reduce="sum"``; every module
    without children and parameters is handed a clone of its input; modules do nothing in place;
    and a MaxPool of torch.nn stands in for those of this package and for adaptive max pools. The
    end undoes all of it, however it comes about. docs/attributions.md has the reasons.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the sizes of an adaptive max pool's output do not divide those of its input.

    Warns:
        UserWarning: no module of the model is a max pool, or some are for which captum has no rule:
            subclasses, fractional and scripted ones. Functions that a forward calls are not seen.

    Example:
        >>> from maxunpool_cuda import MaxPool1d
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), MaxPool1d(3, 1))
        >>> with exact_attributions(model):  # captum.attr.DeepLift(model) and so on belong in here
        ...     type(model[1])
        <class 'torch.nn.modules.pooling.MaxPool1d'>
    """
    check_model("exact_attributions", model)
    _warn_of_pools(model)
    with contextlib.ExitStack() as undo:
        undo.enter_context(patched(reduce="sum"))
        for module in model.modules():
            _stand_in(module, undo)
            _prepare(module, undo)
        yield model


def _warn_of_pools(model: torch.nn.Module) -> None:
    """Warn of max pools that captum has no rule for, and of models without a pool."""
    known = {*_POOLS.values(), *_STAND_INS}
    others: dict[str, str] = {}
    for path, module in model.named_modules():
        scripted = getattr(module, "original_name", type(module).__name__)
        if type(module) not in known and (isinstance(module, _MAX_POOLING) or scripted in _POOLS):
            others[path] = scripted
    if others or not any(type(module) in known for module in model.modules()):
        warnings.warn(
            "exact_attributions: expected the MaxPool and AdaptiveMaxPool modules of torch.nn or "
            f"of this package but got {type(model).__name__} with {others or 'none'}. captum and "
            "shap have no rule for subclasses and for fractional and scripted pools, and none for "
            "functions that a forward calls: docs/attributions.md makes modules of those.",
            stacklevel=4,
        )


def _stand_in(module: Any, undo: contextlib.ExitStack) -> None:
    """Give a pool that captum has no rule for the class of one that it has a rule for."""
    kind = type(module)
    if kind not in _STAND_INS:
        return
    undo.callback(setattr, module, "__class__", kind)
    module.__class__ = _STAND_INS[kind]
    if issubclass(kind, _AdaptiveMaxPoolNd):
        undo.callback(_remove_window, module)
        vars(module).update(_WINDOW)
        undo.callback(module.register_forward_pre_hook(_fit_window).remove)


def _remove_window(module: torch.nn.Module) -> None:
    for name in _WINDOW:
        vars(module).pop(name, None)


def _fit_window(module: Any, inputs: tuple[Any, ...]) -> None:
    """Give a max pool the window with which it does what the adaptive one does for this input."""
    dims = int(type(module).__name__[-2])
    sizes = inputs[0].shape[-dims:]
    asked = module.output_size
    asked = asked if isinstance(asked, (tuple, list)) else (asked,) * dims
    outputs = [size if n is None else n for size, n in zip(sizes, asked, strict=True)]
    if any(n < 1 or size % n for size, n in zip(sizes, outputs, strict=True)):
        raise ValueError(
            f"exact_attributions: expected Adaptive{type(module).__name__} with output_size that "
            f"divides the input's but got {outputs} for {list(sizes)}, whose windows differ in "
            "size; captum and shap have no rule for them"
        )
    windows = tuple(size // n for size, n in zip(sizes, outputs, strict=True))
    module.kernel_size = module.stride = windows


def _prepare(module: Any, undo: contextlib.ExitStack) -> None:
    """Keep ``module`` from writing to its input, and the hooks of two modules on two tensors."""
    if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
        return
    if getattr(module, "inplace", None) is True:
        undo.callback(setattr, module, "inplace", True)
        module.inplace = False
    if not [*module.children(), *module.parameters()]:
        undo.callback(module.register_forward_pre_hook(_clone_input).remove)


def _clone_input(module: torch.nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor | None:
    """A clone of the only input of a module; None, for no change, if it has others.

    The output of one module is the input of the next. Where both have a rule, captum sets two hooks
    on this tensor, and the first reads the gradient before the second has changed it.
    """
    if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
        return inputs[0].clone()
    return None
