# SPDX-License-Identifier: BSD-3-Clause
"""For a while, captum and shap compute DeepLIFT's attributions that add up.

The module imports neither of them. It changes a model, and what :mod:`torch.nn.functional` does.
For each change :func:`contextlib.ExitStack.callback` gets what undoes it.

captum and shap know a rule for DeepLIFT by the class of a module. captum's rules are for exactly
torch.nn's ``MaxPool1d/2d/3d``. So ``Sequential(ReLU(), AdaptiveMaxPool1d(2))``, for example,
becomes ``Sequential(ReLU(), MaxPool1d(...))``, whose window is found when the input comes, and both
modules get a hook that clones their input. docs/attributions.md has the reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from . import functional, modules
from ._convert import check_model, left_in_order
from ._patch import patched

if TYPE_CHECKING:
    from ._in_place import Calls

Model = TypeVar("Model", bound=torch.nn.Module)

# The classes that captum has a rule for, by name. It has none for their subclasses.
_POOLS_WITH_RULE: dict[str, type] = {
    f"MaxPool{dims}d": getattr(torch.nn, f"MaxPool{dims}d") for dims in (1, 2, 3)
}
# For each pool without a rule, the class that stands in for it.
_STAND_INS: dict[type, type] = {
    modules.MaxPool1d: torch.nn.MaxPool1d,
    modules.MaxPool2d: torch.nn.MaxPool2d,
    modules.MaxPool3d: torch.nn.MaxPool3d,
    modules.AdaptiveMaxPool1d: torch.nn.MaxPool1d,
    modules.AdaptiveMaxPool2d: torch.nn.MaxPool2d,
    modules.AdaptiveMaxPool3d: torch.nn.MaxPool3d,
    torch.nn.AdaptiveMaxPool1d: torch.nn.MaxPool1d,
    torch.nn.AdaptiveMaxPool2d: torch.nn.MaxPool2d,
    torch.nn.AdaptiveMaxPool3d: torch.nn.MaxPool3d,
}
# The bases of all max pools. One has no rule unless its class is one of those above.
_MAX_POOL_BASES = (
    _MaxPoolNd,
    _AdaptiveMaxPoolNd,
    torch.nn.FractionalMaxPool2d,
    torch.nn.FractionalMaxPool3d,
)
# torch.nn's, which come back however contexts are left.
_UNPOOLING = {f"max_unpool{n}d": getattr(torch.nn.functional, f"max_unpool{n}d") for n in (1, 2, 3)}
# The attributes that an adaptive pool lacks. _fit_window sets those that are None.
_WINDOW = {"kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}


@contextlib.contextmanager
def exact_attributions(model: Model) -> Iterator[Model]:
    """Inside, the attributions of captum and shap by DeepLIFT's rule add up.

    They add up to the difference between the model's outputs for the input and for the baseline.
    These are captum's ``DeepLift`` and ``DeepLiftShap``, their ``Layer`` and ``Neuron`` variants,
    and shap's ``DeepExplainer``, for models whose windows of max pooling overlap or whose pools
    follow or precede an activation. The weights stay the same, and so do the outputs of the model,
    unless it calls torch.nn's max unpooling where windows overlap: inside, that adds up.

    Inside, torch.nn's max unpooling adds up, as in :class:`patched` with ``reduce="sum"``; every
    module without children and parameters is handed a clone of its input; modules do nothing in
    place; and a MaxPool of torch.nn stands in for those of this package and for adaptive max pools.
    Unpools of this package keep their ``reduce``. On exit, also by an exception, all of it is
    undone. A call whose outputs would change by clones, or by modules that do nothing in place,
    raises an error. docs/attributions.md has the reasons.

    Args:
        model: any module.

    Yields:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the sizes of an adaptive max pool's output do not divide those of its input; on
            exit, a later context of one of these modules is still open, or one has a third class.
        RuntimeError: the model reads what a module has changed in place, as the input of
            ``self.relu(x)``; or it is copied or pickled inside.

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
    # Only now, as a release of PyTorch may move the private names that the watch needs.
    from ._in_place import Calls

    check_model("exact_attributions", model)
    _warn_of_pools(model)
    with contextlib.ExitStack() as undo:
        undo.enter_context(left_in_order("exact_attributions", model))
        undo.enter_context(patched(reduce="sum"))
        if torch.__version__ < "2.13":
            _replace_unpooling(undo)
        calls = Calls()
        undo.callback(calls.end_all)
        for path, module in model.named_modules():
            _isolate(f"{path!r} ({type(module).__name__})", module, calls, undo)
            _let_stand_in(path, module, undo)
        yield model


def _replace_unpooling(undo: contextlib.ExitStack) -> None:
    """Let torch.nn's max unpooling add up in a backward, where captum and shap call it.

    Before PyTorch 2.13 ``patched`` does not reach a backward. A replaced function does, but it is
    replaced for all threads.
    """
    for name, theirs in _UNPOOLING.items():
        undo.callback(setattr, torch.nn.functional, name, theirs)
        setattr(torch.nn.functional, name, _adds_up(getattr(functional, name)))


def _adds_up(unpool: Callable[..., Any]) -> Callable[..., Any]:
    """The function of this package, in the place of torch.nn's of the same name.

    Not a ``partial``: torch.compile of PyTorch 2.10 refuses that.
    """

    @wraps(unpool)
    def unpool_sum(*args: Any, **kwargs: Any) -> Any:
        return unpool(*args, **kwargs, reduce="sum")

    return unpool_sum


def _warn_of_pools(model: torch.nn.Module) -> None:
    """Warn of max pools that captum has no rule for, and of models without a pool."""
    supported = {*_POOLS_WITH_RULE.values(), *_STAND_INS}
    others: dict[str, str] = {}  # the class of each other max pool
    for path, module in model.named_modules():
        class_name = getattr(module, "original_name", type(module).__name__)  # of a ScriptModule
        looks_like_a_pool = isinstance(module, _MAX_POOL_BASES) or class_name in _POOLS_WITH_RULE
        if type(module) not in supported and looks_like_a_pool:
            others[path] = class_name
    if others or not any(type(module) in supported for module in model.modules()):
        warnings.warn(
            "exact_attributions: expected the MaxPool and AdaptiveMaxPool modules of torch.nn or "
            f"of this package but got {type(model).__name__} with {others or 'none'}. captum and "
            "shap have no rule for subclasses and for fractional and scripted pools, and none for "
            "functions that a forward calls: docs/attributions.md makes modules of those.",
            stacklevel=4,
        )


def _let_stand_in(path: str, module: Any, undo: contextlib.ExitStack) -> None:
    """Give a pool without a rule the class of one with a rule."""
    original_class = type(module)
    if original_class not in _STAND_INS:
        return
    undo.callback(_restore_class, path, module, original_class)
    module.__class__ = _STAND_INS[original_class]
    if issubclass(original_class, _AdaptiveMaxPoolNd):
        undo.callback(_remove_window, module)
        vars(module).update(_WINDOW)
        undo.callback(module.register_forward_pre_hook(_fit_window).remove)


def _restore_class(path: str, module: Any, original_class: type) -> None:
    """Raise a ValueError if it has got a third class meanwhile, as ``converted`` gives one."""
    found = type(module)
    module.__class__ = original_class
    if found not in (original_class, _STAND_INS[original_class]):
        raise ValueError(
            f"exact_attributions: expected {path!r} to have the class that it gave but got "
            f"{found.__module__}.{found.__name__}; contexts are left in the reverse order"
        )


def _remove_window(module: torch.nn.Module) -> None:
    for name in _WINDOW:
        vars(module).pop(name, None)


def _fit_window(module: Any, inputs: tuple[Any, ...]) -> None:
    """Give a max pool the window with which it does what the adaptive one does for this input.

    It is a hook that runs before the module. For a size of 6 and an output of 3 the window is 2.
    """
    dims = int(type(module).__name__[-2])
    sizes = inputs[0].shape[-dims:]
    output_size = module.output_size
    if not isinstance(output_size, (tuple, list)):
        output_size = (output_size,) * dims
    outputs = [size if n is None else n for size, n in zip(sizes, output_size, strict=True)]
    if any(n < 1 or size % n for size, n in zip(sizes, outputs, strict=True)):
        raise ValueError(
            f"exact_attributions: expected Adaptive{type(module).__name__} with output_size that "
            f"divides the input's but got {outputs} for {list(sizes)}, whose windows differ in "
            "size; captum and shap have no rule for them"
        )
    windows = tuple(size // n for size, n in zip(sizes, outputs, strict=True))
    module.kernel_size = module.stride = windows


def _isolate(name: str, module: Any, calls: Calls, undo: contextlib.ExitStack) -> None:
    """Let ``module`` share no tensor with its neighbours: out of place, and on a cloned input."""
    if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
        return
    works_in_place = getattr(module, "inplace", None) is True
    if works_in_place:
        undo.callback(setattr, module, "inplace", True)
        module.inplace = False
    gets_clones = not [*module.children(), *module.parameters()]
    hooks = _Hooks(name, works_in_place, gets_clones, calls)
    before = module.register_forward_pre_hook(hooks.before, with_kwargs=True)
    undo.callback(before.remove)
    # The first one: it gets what the module itself returns.
    after = module.register_forward_hook(hooks.after, prepend=True, always_call=True)
    undo.callback(after.remove)


@dataclasses.dataclass(frozen=True, eq=False)
class _Hooks:
    """What runs before and after each call of a module."""

    name: str
    works_in_place: bool  # outside
    gets_clones: bool
    calls: Calls

    def before(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A clone of the only input, if the module gets clones, as its first positional argument.

        The output of one module is the input of the next. If both have a rule, captum sets two
        hooks on this tensor, and the first reads the gradient before the second has changed it.
        """
        if self.works_in_place or self.gets_clones:
            args, kwargs = _by_position(module, args, kwargs)
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        is_watched = not _is_traced()
        if is_watched:
            self.calls.begin(self.name, overwritten=x if self.works_in_place else None)
        if self.gets_clones and x is not None and len(args) + len(kwargs) == 1:
            args = (x.clone(),)
            if is_watched:
                self.calls.watch.share(self.name, (x, args))
        return args, kwargs

    def after(self, module: Any, args: Any, output: Any) -> None:
        if not _is_traced():
            self.calls.end(self.name, output)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "exact_attributions: expected a model that is copied or pickled outside but got a copy "
            "inside, which would stay as the model is inside"
        )


def _is_traced() -> Any:
    """Whether the call makes a program of a model: values are not known then."""
    jit: Any = torch.jit
    return torch.compiler.is_compiling() or jit.is_tracing()


def _by_position(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of ``pool(input=x)`` as those of ``pool(x)``.

    Hooks of captum and shap get positional arguments alone.
    """
    if not args and kwargs:
        first = next(iter(inspect.signature(module.forward).parameters.values()), None)
        if first and first.kind is first.POSITIONAL_OR_KEYWORD and first.name in kwargs:
            others = {name: value for name, value in kwargs.items() if name != first.name}
            return (kwargs[first.name],), others
    return args, kwargs
