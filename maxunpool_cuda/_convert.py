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

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd, _MaxUnpoolNd

from . import modules
from ._arguments import (
    Ints,
    Reduce,
    check_index_dtype,
    has_no_stride,
    per_dim,
)
from ._checks import check_reduce, fits_uint8

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
# The attributes that torch.nn's modules lack.
_OUR_ATTRIBUTES = ("index_dtype", "reduce")


def convert_max_pooling(
    model: Model, *, index_dtype: torch.dtype = torch.int64, reduce: Reduce | None = None
) -> Model:
    """Make all max pooling modules of a model this package's, in place, and return the model.

    These are torch.nn's MaxPool1d/2d/3d, AdaptiveMaxPool1d/2d/3d and MaxUnpool1d/2d/3d. Each stays
    the same object, wherever else it is used. By default pools return flat int64 indices. Results
    of the model stay the same. So do gradients, but for two where windows overlap: torch.nn's
    gradient of unpooling is wrong there. That of pooling in float16 and bfloat16 is rounded once
    here, and after each addition there.

    Smaller indices suit models that hand them to unpools and do nothing else with them. This is not
    checked, so compare the model before and after. A pool gets smaller indices only if the modules
    of the model allow it: uint8 needs a window of at most 256 elements and an unpool with the same
    window; int32 needs an unpool; and an unpool that is not converted rules out both. Adaptive
    pools have no uint8 indices. A pool that returns no indices yet keeps int64, in case its
    ``return_indices`` is switched on later.

    Args:
        model: any module.
        index_dtype: of the indices that pools return: int64 or int32, flat positions in the input
            plane, or uint8, row-major offsets in the window.
        reduce: of every unpool, also of those that are this package's already. By default these
            keep theirs, and the others get ``"last"``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed.

    Warns:
        UserWarning: has what :func:`explain_conversion` returns, if that is anything; or says that
            the model has no max pooling.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.MaxPool2d(2))
        >>> model = convert_max_pooling(model)
        >>> type(model[1])
        <class 'maxunpool_cuda.modules.MaxPool2d'>
    """
    _convert("convert_max_pooling", model, index_dtype, reduce, stacklevel=3)
    return model


def explain_conversion(
    model: torch.nn.Module, *, index_dtype: torch.dtype = torch.int64, reduce: Reduce | None = None
) -> dict[str, str]:
    """Tell what :func:`convert_max_pooling` would not convert as asked. This changes nothing.

    Args:
        model: any module.
        index_dtype: as of :func:`convert_max_pooling`.
        reduce: as of :func:`convert_max_pooling`.

    Returns:
        For names of modules, why this pool would return other indices than those asked for, or why
        what looks like max pooling would be left alone: subclasses, scripted modules, and modules
        of torch.nn whose ``forward`` is set on the instance.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed.

    Example:
        >>> pools = [torch.nn.MaxPool2d(size, return_indices=True) for size in (2, 17)]
        >>> model = torch.nn.ModuleList([*pools, torch.nn.MaxUnpool2d(2)])
        >>> explain_conversion(model, index_dtype=torch.uint8)
        {'1': 'kernel_size (17, 17) has more than 256 elements'}
    """
    return _explain("explain_conversion", model, index_dtype, reduce)


def _convert(
    name: str, model: torch.nn.Module, index_dtype: torch.dtype, reduce: Any, stacklevel: int
) -> None:
    """The body of :func:`convert_max_pooling`; ``stacklevel`` is that of the warning."""
    reasons = _explain(name, model, index_dtype, reduce)
    named: list[tuple[str, Any]] = [*model.named_modules()]
    if reasons or not any(isinstance(module, _TORCH_BASES) for _, module in named):
        # Before anything changes: where warnings are errors, the model stays as it is.
        warnings.warn(
            f"{name}: expected to convert all max pooling of the model as asked but got "
            f"{type(model).__name__} with {reasons or 'none among its modules'}. What is not seen: "
            "functions that a forward calls, and scripted modules whose class has another name.",
            stacklevel=stacklevel,
        )
    for path, module in named:
        if type(module) in _TO_OURS and _is_convertible(module):
            module.__class__ = _TO_OURS[type(module)]
        if type(module) in _TO_TORCH and path not in reasons:
            _set_arguments(module, index_dtype, reduce)


def _explain(
    name: str, model: torch.nn.Module, index_dtype: torch.dtype, reduce: Any
) -> dict[str, str]:
    """The body of :func:`explain_conversion`, for a public function of this name."""
    check_model(name, model)
    check_index_dtype(name, index_dtype)
    check_reduce(name, "last" if reduce is None else reduce)
    unpools = [module for module in model.modules() if isinstance(module, _MaxUnpoolNd)]
    reasons: dict[str, str] = {}
    for path, module in model.named_modules():
        left_alone = _why_left_alone(module)
        reason = left_alone or _why_not_as_asked(module, index_dtype, reduce, unpools)
        if reason:
            reasons[path] = reason
    return reasons


def _set_arguments(module: Any, index_dtype: torch.dtype, reduce: Any) -> None:
    """Give a pool or an unpool of this package what it can have of these."""
    if getattr(module, "return_indices", False):
        module.index_dtype = index_dtype
    elif isinstance(module, _MaxUnpoolNd) and reduce is not None:
        module.reduce = reduce


def restore_max_pooling(model: Model) -> Model:
    """Make all modules of this package in a model torch.nn's, in place.

    Modules keep their hooks and get the class and the attributes of torch.nn's, also those that
    were this package's from the start. Pools that returned smaller indices return int64 ones.
    Subclasses of this package's classes are left alone.

    Three kinds of tools need this: those that look up ``type(module)``, TorchScript (which takes no
    unpool at all), and pickles that are loaded without this package.

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
        if type(module) in _TO_TORCH:
            _set_state(module, _State(_TO_TORCH[type(module)], {}))
    return model


@contextlib.contextmanager
def converted(
    model: Model, *, index_dtype: torch.dtype = torch.int64, reduce: Reduce | None = None
) -> Iterator[Model]:
    """Inside, ``model`` is as :func:`convert_max_pooling` makes it; afterwards, as it was.

    On exit, also by an exception, the modules that were converted on entry are as before. Others
    stay as they are: what was this package's before remains so. One thread at a time does this to a
    model, and of several contexts the last one entered is left first.

    Args:
        model: any module.
        index_dtype: as of :func:`convert_max_pooling`.
        reduce: as of :func:`convert_max_pooling`.

    Yields:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``index_dtype`` or ``reduce`` is none of those allowed; on exit, another
            library has changed the class of a converted module meanwhile, as FSDP2's
            ``fully_shard`` does (nothing is restored then), or a later context of one of these
            modules is still open.

    Warns:
        UserWarning: as :func:`convert_max_pooling`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.MaxPool2d(2))
        >>> with converted(model):
        ...     model[0].__module__
        'maxunpool_cuda.modules'
    """
    check_model("converted", model)
    with left_in_order("converted", model):
        before = [(path, module, _state_of(module)) for path, module in model.named_modules()]
        _convert("converted", model, index_dtype, reduce, stacklevel=4)
        changed = [entry for entry in before if _state_of(entry[1]) != entry[2]]
        try:
            yield model
        except BaseException:
            with contextlib.suppress(ValueError):  # what was raised inside says more
                _undo(changed)
            raise
        _undo(changed)


def _undo(changed: list[tuple[str, Any, _State]]) -> None:
    """Give modules, which have paths, the states that they had before ``converted``."""
    other_classes = {
        path: type(module).__name__
        for path, module, _ in changed
        if type(module) not in _CONVERTIBLE
    }
    if other_classes:
        raise ValueError(f"converted: expected the classes that it gave but got {other_classes}")
    for _, module, state in changed:
        if type(module) in _TO_TORCH:  # not if restore_max_pooling was called meanwhile
            _set_state(module, state)


# For each context that is open, in the order of entry, the modules that it may have changed.
_open_contexts: list[list[torch.nn.Module]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def left_in_order(name: str, model: torch.nn.Module) -> Iterator[None]:
    """Raise a ValueError on exit if a later context that shares a module with it is still open.

    After an exception inside, that is raised.
    """
    changed = [*model.modules()]
    has_failed = True
    with _lock:
        _open_contexts.append(changed)
    try:
        yield
        has_failed = False
    finally:
        with _lock:
            place = [each is changed for each in _open_contexts].index(True)
            later = {module for each in _open_contexts[place + 1 :] for module in each}
            del _open_contexts[place]
        if later.intersection(changed) and not has_failed:
            raise ValueError(
                f"{name}: expected contexts to be left in the reverse order but got one of "
                f"{type(model).__name__} inside which another is open"
            )


class Uncopied:
    """For hooks of a context: a copy of the model would keep them."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "exact_attributions: expected a model that is copied or pickled outside but got a copy "
            "inside, which would stay as the model is inside"
        )


def check_model(name: str, model: object) -> None:
    """Raise a TypeError that begins with ``name`` unless ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: expected model to be a Module but got {type(model).__name__}")


class _State(NamedTuple):
    """What conversion may change of a module."""

    kind: type
    attributes: dict[str, Any]  # those of the instance that torch.nn's modules lack


def _state_of(module: torch.nn.Module) -> _State:
    attributes = vars(module)
    return _State(
        type(module), {name: attributes[name] for name in _OUR_ATTRIBUTES if name in attributes}
    )


def _set_state(module: torch.nn.Module, state: _State) -> None:
    module.__class__ = state.kind
    for name in _OUR_ATTRIBUTES:
        vars(module).pop(name, None)
    vars(module).update(state.attributes)


def _torch_class_name(module: torch.nn.Module) -> str:
    """The name of the first class of torch.nn's pooling that ``module`` is an instance of."""
    classes = type(module).__mro__
    return next(each.__name__ for each in classes if each.__module__ == _MaxPoolNd.__module__)


def _is_convertible(module: torch.nn.Module) -> bool:
    """Whether ``module`` does what its class says, one of torch.nn's nine or of the nine here."""
    return type(module) in _CONVERTIBLE and "forward" not in vars(module)


def _description(module: torch.nn.Module) -> str:
    """What keeps ``module`` from being convertible, as the beginning of a sentence."""
    what = "whose forward is set on the instance"
    if type(module) not in _CONVERTIBLE:
        what = f"a subclass of {_torch_class_name(module)}"
    return f"{type(module).__name__}, {what},"


def _why_left_alone(module: Any) -> str | None:
    """Why a module that looks like torch.nn's max pooling is not converted."""
    if getattr(module, "original_name", None) in _CLASS_NAMES:  # of a ScriptModule
        return f"{module.original_name}, in TorchScript, is left alone"
    if not isinstance(module, _TORCH_BASES) or isinstance(module, _OUR_BASE):
        return None
    return None if _is_convertible(module) else f"{_description(module)} is left alone"


def _why_not_as_asked(
    module: Any, index_dtype: torch.dtype, reduce: Any, unpools: list[Any]
) -> str | None:
    """Why ``module``, unless ``_why_left_alone`` tells, keeps its indices or its ``reduce``."""
    if not isinstance(module, _TORCH_BASES):
        return None
    returns_indices = getattr(module, "return_indices", False)
    # This package's get the attributes also if their forward is set on the instance.
    if type(module) in _CONVERTIBLE:
        asked_for_others = index_dtype not in (torch.int64, getattr(module, "index_dtype", None))
        if returns_indices and asked_for_others:
            return _why_not_smaller_indices(module, index_dtype, unpools)
        return None
    # A subclass of this package's classes, which may do already what is asked for.
    has_other_indices = returns_indices and module.index_dtype != index_dtype
    has_other_reduce = isinstance(module, _MaxUnpoolNd) and reduce not in (None, module.reduce)
    if has_other_indices or has_other_reduce:
        return f"{_description(module)} is left alone"
    return None


def _why_not_smaller_indices(pool: Any, index_dtype: torch.dtype, unpools: list[Any]) -> str | None:
    """What speaks against uint8 or int32 indices of ``pool``, as far as modules show it."""
    dims = int(_torch_class_name(pool)[-2])
    unpool_name = f"MaxUnpool{dims}d"
    takes_offsets = index_dtype == torch.uint8
    if takes_offsets:
        reason = _why_no_offsets(pool, dims)
        if reason:
            return reason
    same_dims = (unpool_name, _MaxUnpoolNd.__name__)
    takers = [unpool for unpool in unpools if _torch_class_name(unpool) in same_dims]
    for unpool in takers:
        if not _is_convertible(unpool):
            return f"{_description(unpool)} may want int64 indices"
    if not takers:
        return f"there is no {unpool_name} to take the indices"
    if takes_offsets and _window(pool, dims) not in [_window(unpool, dims) for unpool in takers]:
        kernel_size, stride, padding = _window(pool, dims)
        window = f"kernel_size {kernel_size}, stride {stride} and padding {padding}"
        return f"no {unpool_name} has {window}"
    return None


def _why_no_offsets(pool: Any, dims: int) -> str | None:
    """Why uint8 cannot hold the offsets in a window of ``pool``."""
    if isinstance(pool, _AdaptiveMaxPoolNd):
        return "adaptive windows, of many sizes, have no offsets"
    kernel_size = _window(pool, dims)[0]
    dilation = per_dim(type(pool).__name__, "dilation", pool.dilation, dims)
    if not fits_uint8(kernel_size):
        return f"kernel_size {kernel_size} has more than 256 elements"
    if max(dilation) > 1:
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
    if getattr(module, "return_indices", False) and module.index_dtype != torch.int64:
        return f"{_description(module)} would still return {module.index_dtype} indices"
    return None


def _window(module: Any, dims: int) -> tuple[Ints, Ints, Ints]:
    """The kernel size, stride and padding of a pool or an unpool, each for all dimensions."""
    name = type(module).__name__
    kernel_size = per_dim(name, "kernel_size", module.kernel_size, dims)
    stride = module.kernel_size if has_no_stride(module.stride) else module.stride
    padding = per_dim(name, "padding", module.padding, dims)
    return kernel_size, per_dim(name, "stride", stride, dims), padding
