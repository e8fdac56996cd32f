# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of models to the modules of this package, in place, and back to :mod:`torch.nn`'s.

A module is converted by ``module.__class__ = maxunpool_cuda.MaxPool2d``, say. So it stays the same
object, and keeps its hooks, its training mode and its compiled code. The only attributes that this
package's modules have beside torch.nn's are ``index_dtype`` (pools) and ``reduce`` (unpools).

For example, torch.nn's ``Sequential(MaxPool2d(2, return_indices=True), MaxUnpool2d(2))`` becomes
this package's with ``convert_max_pooling(model, index_dtype=torch.uint8)``, and the pool gets the
attribute ``index_dtype = torch.uint8``, because an unpool with the same window takes its indices.

Only modules of exactly torch.nn's nine classes, or of the nine here, are converted, and only if
their ``forward`` is that of their class: nobody knows what a subclass does. Most functions below
return a reason as text, or None if there is none.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd, _MaxUnpoolNd

from . import modules
from ._arguments import Ints, Reduce, pool_window
from ._checks import check_index_dtype, check_reduce, fits_uint8, is_dilated

Model = TypeVar("Model", bound=torch.nn.Module)

_KINDS = ("MaxPool", "AdaptiveMaxPool", "MaxUnpool")
_CLASS_NAMES = [f"{kind}{dims}d" for kind in _KINDS for dims in (1, 2, 3)]
# From torch.nn's class to the class of that name here, and back.
_TO_OURS: dict[Any, Any] = {
    getattr(torch.nn, name): getattr(modules, name) for name in _CLASS_NAMES
}
_TO_TORCH = {ours: of_torch for of_torch, ours in _TO_OURS.items()}
_CONVERTIBLE = {*_TO_OURS, *_TO_TORCH}
# The bases of all modules that look like max pooling or unpooling, and of this package's.
_TORCH_BASES = (_MaxPoolNd, _AdaptiveMaxPoolNd, _MaxUnpoolNd)
_OUR_BASE: Any = modules._Leaf


def convert_max_pooling(
    model: Model, *, index_dtype: torch.dtype | None = None, reduce: Reduce | None = None
) -> Model:
    """Make all max pooling modules of a model this package's, in place, and return the model.

    These are torch.nn's MaxPool1d/2d/3d, AdaptiveMaxPool1d/2d/3d and MaxUnpool1d/2d/3d. Each stays
    the same object, wherever else it is used. Results of the model stay the same. Two gradients
    differ where windows overlap: torch.nn's of unpooling is wrong there, and those of pooling in
    float16 and bfloat16 are rounded once here, and after each addition by torch.nn.

    Smaller indices suit models that hand them to unpools and do nothing else with them. This is not
    checked, so compare the model before and after. A pool gets smaller indices only if the modules
    of the model allow it: uint8 needs a window of at most 256 elements and an unpool with the same
    window; int32 needs an unpool; and an unpool that is not converted rules out both. Adaptive
    pools have no uint8 indices. Pools that return no indices keep their dtype.

    Args:
        model: any module.
        index_dtype: of the indices that pools return: int64 or int32, flat positions in the input
            plane, or uint8, row-major offsets in the window. By default each pool keeps its own;
            that of torch.nn's is int64.
        reduce: of every unpool. By default each keeps its own; that of torch.nn's is ``"last"``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed.

    Warns:
        UserWarning: has for the name of a module why it is left alone (a subclass, scripted, or a
            ``forward`` that is set on the instance), why a pool keeps its indices, or that no
            module of the model takes them; or the model has no max pooling. :class:`patched`
            reaches functions, and subclasses that call them.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.AdaptiveMaxPool2d(1))
        >>> convert_max_pooling(model)[1]
        maxunpool_cuda.AdaptiveMaxPool2d(output_size=1, index_dtype=torch.int64)
    """
    name = "convert_max_pooling"
    check_model(name, model)
    if index_dtype is not None:
        check_index_dtype(name, index_dtype)
    if reduce is not None:
        check_reduce(name, reduce)
    named: list[tuple[str, Any]] = [*model.named_modules()]
    reasons = _reasons(named, index_dtype, reduce)
    if reasons or not any(isinstance(module, _TORCH_BASES) for _, module in named):
        # Before anything changes: where warnings are errors, the model stays as it is.
        warnings.warn(
            f"{name}: expected to convert all max pooling of the model as asked but got "
            f"{type(model).__name__} with {reasons or 'none among its modules'}; to reach "
            "functions and subclasses, run the forward inside maxunpool_cuda.patched()",
            stacklevel=2,
        )
    for path, module in named:
        if type(module) in _TO_OURS and _is_convertible(module):
            module.__class__ = _TO_OURS[type(module)]
        if type(module) in _TO_TORCH:
            fits = index_dtype == torch.int64 or path not in reasons
            asked_for = _asked_for(module, index_dtype if fits else None, reduce)
            if asked_for is not None:
                setattr(module, module._own_argument, asked_for)
    return model


def _reasons(
    named: list[tuple[str, Any]], index_dtype: torch.dtype | None, reduce: Reduce | None
) -> dict[str, str]:
    """For names of modules, why each of them is not converted as asked, or is not enough."""
    unpools = [module for _, module in named if isinstance(module, _MaxUnpoolNd)]
    reasons: dict[str, str] = {}
    for path, module in named:
        reason = _why_left_alone(module, index_dtype, reduce)
        if not reason and _returns_indices(module):
            reason = _why_not_these_indices(module, index_dtype, unpools)
        if reason:
            reasons[path] = reason
    return reasons


def _asked_for(module: Any, index_dtype: torch.dtype | None, reduce: Reduce | None) -> Any:
    """What a module of this package shall have of these; None if it keeps what it has."""
    if isinstance(module, _MaxUnpoolNd):
        return reduce
    return index_dtype if _returns_indices(module) else None


def restore_max_pooling(model: Model) -> Model:
    """Make all modules of this package in a model torch.nn's, in place.

    Modules keep their hooks, and become torch.nn's even if they never were. Pools that returned
    smaller indices return int64 ones. Subclasses of this package's classes are left alone.

    Three kinds of tools need this: those that look up ``type(module)``, :func:`torch.jit.script`
    (which takes no unpool at all), and pickles that are loaded without this package.

    Args:
        model: any module.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an unpool adds values with the same index, a subclass returns uint8 or int32
            indices, or a ``forward`` is set on an instance. Nothing is restored then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.MaxPool2d(2))
        >>> model = convert_max_pooling(model)
        >>> type(restore_max_pooling(model)[0])
        <class 'torch.nn.modules.pooling.MaxPool2d'>
    """
    check_model("restore_max_pooling", model)
    reasons: dict[str, str] = {}
    for path, module in model.named_modules():
        reason = _why_not_restored(module)
        if reason:
            reasons[path] = reason
    if reasons:
        raise ValueError(f"restore_max_pooling: expected what torch.nn has too but got {reasons}")
    for module in model.modules():
        kind: Any = type(module)
        if kind in _TO_TORCH:
            vars(module).pop(kind._own_argument, None)
            module.__class__ = _TO_TORCH[kind]
    return model


def check_model(name: str, model: object) -> None:
    """Raise a TypeError that begins with ``name`` unless ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: expected model to be a Module but got {type(model).__name__}")


def _torch_class_name(module: torch.nn.Module) -> str:
    """The name of the first class of torch.nn's pooling that ``module`` is an instance of."""
    classes = type(module).__mro__
    return next(each.__name__ for each in classes if each.__module__ == _MaxPoolNd.__module__)


def _returns_indices(module: Any) -> bool:
    """Whether it is a pool that returns indices. An unpool has no such attribute."""
    return isinstance(module, _TORCH_BASES) and getattr(module, "return_indices", False)


def _is_convertible(module: torch.nn.Module) -> bool:
    """Whether ``module`` does what its class says, one of torch.nn's nine or of the nine here."""
    return type(module) in _CONVERTIBLE and "forward" not in vars(module)


def _description(module: torch.nn.Module) -> str:
    """What keeps ``module`` from being convertible, as the beginning of a sentence."""
    what = "whose forward is set on the instance"
    if type(module) not in _CONVERTIBLE:
        what = f"a subclass of {_torch_class_name(module)}"
    return f"{type(module).__name__}, {what},"


def _why_left_alone(
    module: Any, index_dtype: torch.dtype | None, reduce: Reduce | None
) -> str | None:
    """Why what looks like max pooling is not converted, or a subclass of ours is not as asked."""
    if getattr(module, "original_name", None) in _CLASS_NAMES:  # of a ScriptModule
        return f"{module.original_name}, in TorchScript, is left alone, by patched() too"
    if not isinstance(module, _TORCH_BASES) or type(module) in _TO_TORCH:
        return None
    is_as_asked = _is_convertible(module)
    if isinstance(module, _OUR_BASE):  # a subclass
        asked_for = _asked_for(module, index_dtype, reduce)
        is_as_asked = asked_for in (None, getattr(module, module._own_argument))
    return None if is_as_asked else f"{_description(module)} is left alone"


def _why_not_these_indices(
    pool: Any, index_dtype: torch.dtype | None, unpools: list[Any]
) -> str | None:
    """What speaks against the indices asked for, or against any, as far as modules show it."""
    dims = int(_torch_class_name(pool)[-2])
    unpool_name = f"MaxUnpool{dims}d"
    is_smaller = index_dtype not in (None, torch.int64, getattr(pool, "index_dtype", None))
    takes_offsets = is_smaller and index_dtype == torch.uint8
    if takes_offsets and (reason := _why_no_offsets(pool, dims)):
        return reason
    same_dims = (unpool_name, _MaxUnpoolNd.__name__)
    takers = [unpool for unpool in unpools if _torch_class_name(unpool) in same_dims]
    if not takers:
        return f"there is no {unpool_name} to take the indices"
    for unpool in takers:
        if is_smaller and not _is_convertible(unpool):
            return f"{_description(unpool)} may want int64 indices"
    if takes_offsets and _window(pool, dims) not in [_window(unpool, dims) for unpool in takers]:
        kernel_size, stride, padding, _ = _window(pool, dims)
        window = f"kernel_size {kernel_size}, stride {stride} and padding {padding}"
        return f"no {unpool_name} has {window}"
    return None


def _why_no_offsets(pool: Any, dims: int) -> str | None:
    """Why uint8 cannot hold the offsets in a window of ``pool``."""
    if isinstance(pool, _AdaptiveMaxPoolNd):
        return "adaptive windows, of many sizes, have no offsets"
    kernel_size, _, _, dilation = _window(pool, dims)
    if not fits_uint8(kernel_size):
        return f"kernel_size {kernel_size} has more than 256 elements"
    if is_dilated(dilation):
        return f"dilation {dilation} is not 1"
    return None


def _why_not_restored(module: Any) -> str | None:
    """Why a model with ``module`` cannot be restored, if it cannot."""
    if not isinstance(module, _OUR_BASE):
        return None
    if getattr(module, "reduce", "last") != "last":
        return f"torch.nn has no reduce={module.reduce!r}"
    if type(module) in _TO_TORCH:
        if _is_convertible(module):
            return None
        return f"{_description(module)} may call this package's"
    if _returns_indices(module) and module.index_dtype != torch.int64:
        return f"{_description(module)} would still return {module.index_dtype} indices"
    return None


def _window(module: Any, dims: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The window of a pool or an unpool, each argument for all dimensions."""
    numbers = (module.kernel_size, module.stride, module.padding, getattr(module, "dilation", 1))
    return pool_window(type(module).__name__, dims, *numbers)
