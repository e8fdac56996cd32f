# SPDX-License-Identifier: BSD-3-Clause
"""Inside a context, captum's and shap's attributions by DeepLIFT add up.

The module imports neither of them and changes nothing of them. While one of them runs a model for
DeepLIFT, each max pool and each activation gets a copy of its input, and a ``forward`` whose output
is connected with the input itself::

    x --> a copy --> hooks of the tool --> forward --> output
    '------------ gradient: our rule <-----------------'

The tools ask for gradients of inputs alone, so none reaches the hooks by which they would apply a
rule of their own. A run is known by these hooks. shap has them on every module, captum on classes
that it knows. So captum is shown a *listener* beside each module: a Sigmoid, which nobody calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from ._convert import check_model
from ._deep_lift import Call, Uncopied, with_multiplier

Model = TypeVar("Model", bound=nn.Module)

# With their subclasses, this package's among them.
_POOLS = (_MaxPoolNd, _AdaptiveMaxPoolNd)
# Their windows are random, others for each example, so that no difference is that of the inputs.
_RANDOM_POOLS = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
# Those of torch.nn that compute each element of their output from the same one of the input.
_ACTIVATIONS = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.ReLU,
    nn.RReLU,
    nn.SELU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
# Where captum's and shap's hooks for DeepLIFT are defined, and those for other methods are not.
_DEEP_LIFT = {"captum.attr._core.deep_lift", "shap.explainers._deep.deep_pytorch"}
# An input and a baseline. Attributions by the network of _adds_up have the right sum by our rule
# alone.
_PROBE = (
    (3, 0, 8, -2, -1, 1, -1, 6, -3, 9, 9, 3, 0, 3, 2, -1),
    (5, 9, 3, 8, 4, 7, -2, 4, -2, 1, 1, 8, 4, 0, 0, 4),
)


@contextlib.contextmanager
def exact_attributions(model: Model) -> Iterator[Model]:
    """Inside, the attributions of captum and shap by DeepLIFT's rule add up.

    They add up to the difference between the model's outputs for the input and for the baseline.
    These are captum's ``DeepLift`` and ``DeepLiftShap``, their ``Layer`` and ``Neuron`` variants,
    and shap's ``DeepExplainer``. The rule for max pools and for torch.nn's activations of single
    elements is then this package's. It adds up the contributions of overlapping windows, and no
    difference is too small to count. All other methods, and all other calls of the model, are as
    outside, and so are the outputs. docs/attributions.md has the reasons.

    Args:
        model: any module, with max pools of torch.nn or of this package, or without.

    Yields:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: attributions by the release of captum or shap that is imported do not add up;
            or the model reads what a module changes in place, as the input of ``self.relu(x)``;
            or it is copied or pickled inside; or a run of shap that failed has left hooks on it.
        ValueError: a pool returns indices, or gets a batch that cannot be halved, or is a subclass
            whose contributions do not add up, as it does more than to take maxima; on exit, a later
            context of one of these modules is still open.

    Warns:
        UserWarning: no module of the model is a max pool, or some are scripted or fractional.
            Functions that a forward calls are not seen.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.MaxPool1d(3, 1))
        >>> with exact_attributions(model) as same:  # captum.attr.DeepLift(model) and so on in here
        ...     same is model
        True
    """
    check_model("exact_attributions", model)
    _check_releases()
    for path, module in model.named_modules():
        if _tools(module):
            raise _hooks_error(_name_of(path, module))
    _warn_of_pools(model)
    with _left_in_order(model), _with_rule(model):
        yield model
    _check_releases()  # of what was imported inside


# For each context that is open, in the order of entry, the modules that it may have changed.
_open_contexts: list[list[nn.Module]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def _left_in_order(model: nn.Module) -> Iterator[None]:
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
                "exact_attributions: expected contexts to be left in the reverse order but got one "
                f"of {type(model).__name__} inside which another is open"
            )


def _warn_of_pools(model: nn.Module) -> None:
    """Warn of scripted pools, which take no hooks, of random ones, and of models without a pool."""
    others: dict[str, str] = {}  # the class of each
    for path, module in model.named_modules():
        class_name = getattr(module, "original_name", type(module).__name__)  # of a ScriptModule
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        if isinstance(module, _RANDOM_POOLS) or (is_scripted and "MaxPool" in class_name):
            others[path] = class_name
    if others or not any(isinstance(module, _POOLS) for module in model.modules()):
        warnings.warn(
            "exact_attributions: expected max pools that are modules but got "
            f"{type(model).__name__} with {others or 'none'}. Scripted and fractional ones keep "
            "their gradient, as do functions that a forward calls: docs/attributions.md makes "
            "modules of these.",
            stacklevel=4,
        )


@contextlib.contextmanager
def _with_rule(model: nn.Module) -> Iterator[None]:
    """Inside, all max pools and activations of ``model`` have our rule."""
    served = [_Served(path, module) for path, module in model.named_modules() if _is_served(module)]
    with contextlib.ExitStack() as undo:
        _watch_changes_in_place(model, [each for each in served if each.works_in_place], undo)
        for each in served:
            each.register(undo)
        yield


def _watch_changes_in_place(
    model: nn.Module, in_place: list[_Served], undo: contextlib.ExitStack
) -> None:
    """In a run of a tool, watch what reads the inputs of modules that work in place outside."""
    if not in_place:
        return
    # Only now, as a release of PyTorch may move the private names that the watch needs.
    from ._in_place import WatchedCalls

    calls = WatchedCalls(lambda: any(each.is_run() for each in in_place))
    undo.callback(calls.end_all)
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            undo.callback(module.register_forward_pre_hook(calls.begin).remove)
            end = module.register_forward_hook(calls.end, prepend=True, always_call=True)
            undo.callback(end.remove)
    for each in in_place:
        each.overwrite = calls.overwrite


class _Served(Uncopied):
    """A max pool or an activation that has our rule.

    :meth:`before` is a hook of each call, and :meth:`forward` is what it calls at last. Hooks of
    captum and shap come in between.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self._name = _name_of(path, module)
        self._module: Any = module
        self._forward = module.forward
        self._inputs: dict[int, Tensor] = {}  # by thread, that of a call which has begun
        self._listener = nn.Sigmoid()
        self._captums = {"input", "output"} - vars(module).keys()  # attributes that captum sets
        self.works_in_place = bool(getattr(module, "inplace", False))
        self.overwrite: Callable[[str, Tensor, Tensor], None] | None = None

    def register(self, undo: contextlib.ExitStack) -> None:
        module = self._module
        undo.callback(self._forget, None)
        undo.callback(module.register_forward_pre_hook(self.before, with_kwargs=True).remove)
        for name in ("apply", "forward"):
            if name in vars(module):  # most have that of their class
                undo.callback(setattr, module, name, vars(module)[name])
            undo.callback(delattr, module, name)
            setattr(module, name, getattr(self, name))

    def apply(self, function: Callable[[nn.Module], None]) -> Any:
        """As :meth:`torch.nn.Module.apply`, by which captum puts its hooks on modules.

        It looks for the classes that it knows. So it finds the listener, too.
        """
        if str(getattr(function, "__module__", "")).startswith("captum."):
            function(self._listener)
        return type(self._module).apply(self._module, function)

    def is_run(self) -> bool:
        """Whether captum or shap run the model, with inputs and baselines, for DeepLIFT."""
        return bool(_tools(self._listener, self._module))

    def before(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """In such a run, hand a copy of the only input to the tool's hooks."""
        tools = _tools(self._listener, self._module)
        if not tools:
            return None
        if len(tools) > 1:
            raise _hooks_error(self._name)
        self._inputs.pop(threading.get_ident(), None)  # of a call that a hook has ended
        x, *others = args = _by_position(self._forward, args, kwargs)
        if others:
            raise ValueError(
                f"exact_attributions: expected {self._name} to get one tensor but got {len(args)}"
            )
        if not (x.requires_grad and torch.is_grad_enabled()):
            return args, {}
        self._inputs[threading.get_ident()] = x
        return (x.detach().clone().requires_grad_(),), {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. In a run, it is a function of the input with our rule."""
        x = self._inputs.pop(threading.get_ident(), None) if self.is_run() else None
        if x is None:
            return self._forward(*args, **kwargs)
        (given,) = args  # what the tool's hooks have made of the copy; they may have a hook on it
        leaf = given.detach().requires_grad_()
        # A module that works in place changes a copy. It stays as it is: it is every thread's.
        works_in_place = getattr(self._module, "inplace", False)
        output = self._forward(leaf.clone() if works_in_place else leaf)
        if isinstance(output, tuple):
            raise ValueError(
                f"exact_attributions: expected pools that return no indices but got {self._name}; "
                "what is unpooled by them does not add up"
            )
        call = Call(self._name, leaf, output, is_pool=isinstance(self._module, _POOLS))
        result = with_multiplier(x, given, call)
        x.register_hook(self._forget)  # type: ignore[no-untyped-call]
        if self.overwrite and works_in_place:
            self.overwrite(self._name, x, result)
        return result

    def _forget(self, grad: Tensor | None) -> None:
        """Remove what captum's hook removes in a backward. No gradient reaches that hook."""
        for name in self._captums:
            vars(self._module).pop(name, None)


def _name_of(path: str, module: nn.Module) -> str:
    """Such as "'relu' (ReLU)"."""
    return f"{path!r} ({type(module).__name__})"


def _tools(*modules: nn.Module) -> set[str]:
    """The tools, captum or shap, whose hooks for DeepLIFT are on modules."""
    hooks = [hook for module in modules for hook in module._forward_hooks.values()]
    return _DEEP_LIFT.intersection(getattr(hook, "__module__", None) for hook in hooks)


def _hooks_error(name: str) -> RuntimeError:
    """The error of a model with hooks of a run that has ended: any call would look like a run."""
    return RuntimeError(
        "exact_attributions: expected a model without hooks of earlier runs but got such hooks on "
        f"{name}: a run of shap that fails leaves its hooks on a model. Load its weights into a "
        "new one"
    )


def _is_served(module: nn.Module) -> bool:
    """Whether it is a max pool, or an activation with torch.nn's ``forward``; both without a rule.

    A context outside of this one may have added one.
    """
    hooks = module._forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), _Served) for hook in hooks):
        return False
    return isinstance(module, _POOLS) or (
        isinstance(module, _ACTIVATIONS)
        and any(type(module).forward is activation.forward for activation in _ACTIVATIONS)
    )


def _by_position(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The arguments of ``pool(input=x)`` as those of ``pool(x)``.

    Hooks of captum and shap get positional arguments alone.
    """
    bound = inspect.signature(forward).bind(*args, **kwargs)
    return (*bound.args, *bound.kwargs.values())


def _check_releases() -> None:
    """Raise a RuntimeError if captum or shap are imported and do not take our rule."""
    for name in ("captum", "shap"):
        tool: Any = sys.modules.get(name)
        version = getattr(tool, "__version__", "no version")
        cause: Exception | None = None
        try:
            is_right = tool is None or _adds_up(name, version)
        except Exception as error:
            is_right, cause = False, error
        if not is_right:
            raise RuntimeError(
                f"exact_attributions: expected a release of {name} whose attributions by DeepLIFT "
                f"add up with this package's rule but got {version}, where they do not"
            ) from cause


@functools.cache
def _adds_up(name: str, version: str) -> bool:
    """Whether the attributions of a small network add up, computed by captum or shap.

    It has what makes them wrong without our rule: overlapping windows, some of them of other sizes,
    a pool behind an activation, an element that equals the baseline behind others that do not, and
    small differences.
    """
    layers = [nn.MaxPool1d(2), nn.AvgPool1d(2), nn.ReLU(), nn.MaxPool1d(2, 1)]
    net = nn.Sequential(*layers, nn.AdaptiveMaxPool1d(2), nn.AvgPool1d(2), nn.Flatten())
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numbers = torch.tensor(_PROBE, dtype=torch.float64, device="cpu") / 1e8
        x, baseline = numbers.unsqueeze(1).chunk(2)
        with _with_rule(net):
            attributions = _ATTRIBUTE[name](net, x, baseline)
        difference = net(x) - net(baseline)
        return bool((attributions.sum() - difference).abs() <= 1e-9 * difference.abs())


def _by_captum(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
    attributions: Tensor = sys.modules["captum"].attr.DeepLift(net).attribute(x, baseline)
    return attributions


def _by_shap(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
    explainer = sys.modules["shap"].DeepExplainer(net, baseline)
    return torch.from_numpy(explainer.shap_values(x, check_additivity=False))


_ATTRIBUTE = {"captum": _by_captum, "shap": _by_shap}
