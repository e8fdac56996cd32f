# SPDX-License-Identifier: BSD-3-Clause
"""What exact_attributions does to a model, seen without captum and shap."""

import contextlib
import copy
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import all_same
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import maxunpool_cuda
from maxunpool_cuda import exact_attributions


def state(model: nn.Module) -> list[Any]:
    """All that exact_attributions may change in a model."""
    return [
        (type(m), {**vars(m)}, [*m._forward_pre_hooks.values(), *m._forward_hooks.values()])
        for m in model.modules()
    ]


def network(pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(inplace=True), pool, nn.Flatten())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "pool", [maxunpool_cuda.MaxPool1d(5, 2), nn.AdaptiveMaxPool1d(4)], ids=["own", "adaptive"]
)
def test_nothing_is_left_afterwards(pool: nn.Module, fails: bool) -> None:
    """The model has another state inside, the same output, and its old state afterwards."""
    model = network(pool)
    model[1].register_forward_pre_hook(lambda module, inputs: None)
    x = torch.randn(3, 1, 26)
    before, expected = state(model), model(x)
    error = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with error, exact_attributions(model) as same:
        assert same is model
        assert type(model[2]) is nn.MaxPool1d
        assert not model[1].inplace
        assert [len(module._forward_pre_hooks) for module in model[1:]][0::2] == [2, 1]
        assert torch.equal(model(x), expected)
        if fails:
            raise ZeroDivisionError
    assert state(model) == before
    assert repr(model) == repr(network(pool))
    assert torch.equal(model(x), expected)


def test_torchs_unpooling_adds_up_inside() -> None:
    """Also a model's own. Unpools of this package keep their ``reduce``."""
    pooled, indices = torch.tensor([[[2.0, 3]]]), torch.tensor([[[1, 1]]])
    unpools = nn.ModuleList([nn.MaxUnpool1d(2, 1), maxunpool_cuda.MaxUnpool1d(2, 1)])
    with exact_attributions(nn.Sequential(network(nn.MaxPool1d(3, 1)), unpools)):
        inside = nn.functional.max_unpool1d(pooled, indices, 2, 1)
        of_modules = [unpool(pooled, indices).tolist() for unpool in unpools]
    assert inside.tolist() == [[[0, 5, 0]]]
    assert of_modules == [[[[0, 5, 0]]], [[[0, 3, 0]]]]


@pytest.mark.parametrize("pool_comes_first", [False, True])
def test_a_module_is_handed_another_tensor(pool_comes_first: bool) -> None:
    """Hooks that are registered inside see two tensors, whichever of the two comes first."""
    seen: list[Tensor] = []
    layers = [nn.ReLU(), nn.MaxPool1d(2)]
    model = nn.Sequential(*(reversed(layers) if pool_comes_first else layers))
    with exact_attributions(model):
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        model[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(torch.randn(1, 1, 4))
    assert seen[0] is not seen[1]
    assert torch.equal(*seen)


class Pair(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> bool:
        return one is other


class OnlyByKeyword(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return x


def test_modules_with_several_inputs_get_them() -> None:
    """As they are: attention takes a faster way if they are one tensor."""
    model = nn.ModuleList([Pair(), OnlyByKeyword(), nn.MaxPool1d(2)])
    x = torch.zeros(2)
    with exact_attributions(model):
        assert model[0](x, x)
        assert model[0](x, other=x)
        assert model[0](one=x, other=x)
        assert model[1](x=x) is x


def test_modules_with_parameters_get_their_input() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(2))
    x = torch.randn(1, 4)
    with exact_attributions(model):
        model[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(x)
    assert seen[0] is x


@pytest.mark.parametrize(("dims", "output_size"), [(1, 3), (2, 1), (3, (2, None, 3))])
@pytest.mark.parametrize("place", [nn, maxunpool_cuda])
def test_a_max_pool_stands_in(dims: int, output_size: Any, place: Any) -> None:
    """For an adaptive one, in whatever sizes the inputs come."""
    pool = getattr(place, f"AdaptiveMaxPool{dims}d")(output_size, return_indices=True)
    with exact_attributions(nn.Sequential(pool)):
        assert "kernel_size=None" in repr(pool)
        assert type(pool) is getattr(nn, f"MaxPool{dims}d")
        inputs = [torch.randn(2, *[6 * n] * dims) for n in (1, 2)]
        inside = [pool(x) for x in inputs]
    assert all_same(inside, [pool(x) for x in inputs])


@pytest.mark.parametrize(("output_size", "wanted"), [((2, 3), [2, 3]), (14, [14, 14])])
def test_adaptive_windows_of_many_sizes_raise(output_size: Any, wanted: list[int]) -> None:
    message = re.escape(f"got {wanted} for [7, 6]")
    pool = nn.AdaptiveMaxPool2d(output_size)
    refusal = pytest.raises(
        ValueError, match=f"^exact_attributions: expected AdaptiveMaxPool2d .*{message}"
    )
    with exact_attributions(pool), refusal:
        pool(torch.randn(1, 7, 6))
    assert type(pool) is nn.AdaptiveMaxPool2d


class Subclass(nn.MaxPool2d):
    pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    SCRIPTED = torch.jit.script(nn.Sequential(nn.MaxPool2d(2)))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.ReLU()), "none"),
        (nn.FractionalMaxPool2d(2, 3), "{'': 'FractionalMaxPool2d'}"),
        (nn.Sequential(nn.MaxPool2d(2), Subclass(2)), "{'1': 'Subclass'}"),
        (SCRIPTED, "{'0': 'MaxPool2d'}"),
    ],
    ids=["no pool", "fractional", "a subclass", "scripted"],
)
def test_pools_without_a_rule_are_named(model: nn.Module, named: str) -> None:
    warns = pytest.warns(UserWarning, match="^exact_attributions: expected ")
    with warns as warned, exact_attributions(model):
        pass
    (warning,) = warned
    assert f"but got {type(model).__name__} with {named}. captum" in str(warning.message)
    assert warning.filename == __file__


def test_models_are_modules() -> None:
    message = "^exact_attributions: expected model to be a Module but got function"
    with pytest.raises(TypeError, match=message), exact_attributions(lambda x: x):
        pass


class Network(nn.Module):
    """Modules with a ``forward`` that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


class Doubles(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.mul_(2).sum()


class Nests(nn.Module):
    """Works in place by a child, and returns what the child has changed or what it got itself."""

    def __init__(self, *, returns_input: bool) -> None:
        super().__init__()
        self.inplace, self.child, self.returns_input = True, relu(), returns_input

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        return x if self.returns_input else y


def forgets(net: Any, x: Tensor) -> Tensor:
    net.part(x)
    return x


def forgets_by_keyword(net: Any, x: Tensor) -> Tensor:
    net.part(input=x)
    return 2 * x


def forgets_and_copies(net: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    net.part(x)
    return x.reshape(-1)


def reads_both(net: Any, x: Tensor) -> Tensor:
    return torch.cat([net.part(x).flatten(), x.flatten()])


def changes_the_input(net: Any, x: Tensor) -> Tensor:
    y = net.part(x)
    x[0] = 0
    return y


def changes_by(change: Callable[[Tensor], object]) -> Callable[[Any, Tensor], Tensor]:
    def changes_the_result(net: Any, x: Tensor) -> Tensor:
        y = net.part(x)
        change(y)
        return y.sum() + x

    return changes_the_result


def add_one(y: Tensor) -> None:
    y += 1


# What two tensors hold that are one memory outside and two inside.
RESTS_ON_CHANGES_IN_PLACE = {
    "a result that is dropped": (forgets, relu()),
    "by keyword": (forgets_by_keyword, relu()),
    "a reshape that copies": (forgets_and_copies, relu()),
    "a shortcut in a row": (reads_both, nn.Sequential(nn.Identity(), relu())),
    "a module with children": (reads_both, Nests(returns_input=False)),
    "a module that returns its input": (reads_both, Nests(returns_input=True)),
    "a module that writes to its input": (forgets_by_keyword, Doubles()),
    "a view is changed": (changes_by(add_one), nn.Flatten()),
    "what a view is of is changed": (changes_the_input, nn.Flatten()),
    "dropout changed nothing": (changes_by(add_one), nn.Dropout(inplace=True)),
    "a list is changed": (changes_by(lambda y: torch._foreach_add_([y], 1)), nn.Identity()),
    "out is changed": (changes_by(lambda y: torch.mul(y, 2, out=y)), nn.Identity()),
}


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.inference_mode], ids=["grad", "inference"]
)
@pytest.mark.parametrize("kind", RESTS_ON_CHANGES_IN_PLACE)
def test_outputs_that_rest_on_changes_in_place_raise(kind: str, mode: Any) -> None:
    """The error names the module. Nothing is left of the call, and the model is as before."""
    forward, part = RESTS_ON_CHANGES_IN_PLACE[kind]
    model = Network(lambda net, x: forward(net, x * 1), part=part, pool=nn.MaxPool1d(2)).eval()
    x = torch.randn(2, 3, 4)
    before = state(model)
    kinds = "|".join(type(module).__name__ for module in part.modules())
    message = rf"^exact_attributions: .*'part(\.\w+)?' \(({kinds})\)"
    with mode():
        expected = model(x)
        with exact_attributions(model):
            with pytest.raises(RuntimeError, match=message):
                model(x)
            assert _python_dispatch._get_current_dispatch_mode() is None
        assert torch.equal(model(x), expected)
    assert state(model) == before


def clones_by_a_hook() -> nn.Module:
    part = relu()
    part.register_forward_hook(lambda module, inputs, output: output.clone())
    return part


def residual(net: Any, x: Tensor) -> Tensor:
    y = net.part(x.sin())
    y += x
    return net.part(y)


HANDED_ON = Network(lambda net, x: (x, net.relu(x)), relu=relu())
NOBODY_READS = {
    "dropout changes nothing": (reads_both, nn.Dropout(inplace=True)),
    "ReLU changes nothing": (lambda net, x: reads_both(net, x.abs()), relu()),
    "with children": (lambda net, x: net.part(x), Nests(returns_input=False)),
    "shapes": (lambda net, x: net.part(x).view(x.flatten().shape), relu()),
    "a view is changed": (lambda net, x: net.part(x).add_(1), nn.Flatten()),
    "handed on": (lambda net, x: net.part(x)[1], HANDED_ON),
    "residual": (residual, relu()),
    "dense": (lambda net, x: torch.cat([x, net.part(x.sin())]), relu()),
    # But for the hook, a change of the result would change the input, as ReLU changes nothing.
    "a hook returns a clone": (
        lambda net, x: changes_by(add_one)(net, x.abs()),
        clones_by_a_hook(),
    ),
}


@pytest.mark.parametrize("kind", NOBODY_READS)
def test_changes_in_place_that_nobody_reads(kind: str) -> None:
    """A model may also change what it gets, and get it again: each call is watched alone."""
    forward, part = NOBODY_READS[kind]
    model = Network(lambda net, x: forward(net, x * 1), part=part, pool=nn.MaxPool1d(2)).eval()
    x = torch.randn(2, 3, 4)
    expected = model(x)
    with exact_attributions(model):
        assert torch.equal(model(x), expected)
        assert _python_dispatch._get_current_dispatch_mode() is None


def test_each_call_is_watched_alone() -> None:
    """A model may change what it gets, and get it again."""
    model = Network(lambda net, x: net.relu(x), relu=relu(), pool=nn.MaxPool1d(2))
    x = torch.randn(2, 3)
    with exact_attributions(model):
        assert all_same([model(x), model(x)], [x.relu()] * 2)


def test_threads_are_watched_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins a call, then each ends its own."""
    # A flag of the process says that a mode is on. If the thread that begins first also ends first,
    # the flag stays set, and PyTorch 2.10 compiles nothing from then on.
    flag = "_is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(_python_dispatch, flag, False)
    barrier = threading.Barrier(2)

    def forward(net: Any, x: Tensor) -> Tensor:
        barrier.wait(60)
        x = net.relu(x)
        barrier.wait(60)
        return x

    def call(x: Tensor) -> Tensor:
        result: Tensor = model(x)
        assert _python_dispatch._get_current_dispatch_mode() is None
        return result

    model = Network(forward, relu=relu(), pool=nn.MaxPool1d(2))
    inputs = [*torch.randn(2, 3, 4)]
    expected = [x.relu() for x in inputs]
    with exact_attributions(model), ThreadPoolExecutor(2) as threads:
        assert all_same([*threads.map(call, inputs)], expected)


@pytest.mark.filterwarnings("error")  # PyTorch warns of a hook that fails, too
@pytest.mark.parametrize("in_a_hook", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_ends_the_watch(error: type[BaseException], in_a_hook: bool) -> None:
    """Of a forward, or of a hook that runs before those of the context."""

    def fails(net: Any, x: Any) -> Tensor:
        raise error

    model = nn.Sequential(nn.MaxPool1d(2), nn.Identity() if in_a_hook else Network(fails))
    if in_a_hook:
        model.register_forward_pre_hook(fails)
    before = state(model)
    with pytest.raises(error), exact_attributions(model):
        model(torch.randn(1, 1, 4))
    assert state(model) == before
    assert _python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda model, x: torch.vmap(model)(x[:, None])[:, 0], id="vmap"),
        pytest.param(lambda model, x: torch.export.export(model, (x,)).module()(x), id="export"),
        pytest.param(lambda model, x: torch.jit.trace(model, x)(x), id="trace"),
        pytest.param(lambda model, x: torch.compile(model, backend="eager")(x), id="compile"),
        pytest.param(lambda model, x: checkpoint(model, x, use_reentrant=False), id="checkpoint"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_makes_a_program_of_a_model_may_be_called_inside(call: Any) -> None:
    model = network(nn.MaxPool1d(3, 2)).eval()
    x = torch.randn(2, 1, 20)
    expected = model(x)
    with exact_attributions(model):
        torch.testing.assert_close(call(model, x), expected)


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied_inside(copies: Callable[[nn.Module], object]) -> None:
    """A copy would stay as the model is inside."""
    model = network(nn.AdaptiveMaxPool1d(4))
    with exact_attributions(model), pytest.raises(RuntimeError, match=r"^exact_attributions: "):
        copies(model)
    copies(model)


def test_contexts_are_left_in_reverse_order() -> None:
    """If they share a module. Otherwise an error is raised, and all is undone."""
    model = network(maxunpool_cuda.AdaptiveMaxPool1d(4))
    before, unpool = state(model), nn.functional.max_unpool1d
    with exact_attributions(model), exact_attributions(model):
        pass
    assert state(model) == before
    for other, names_it in ((model, True), (nn.MaxPool1d(2), False)):
        first = exact_attributions(model)
        first.__enter__()
        refusal = pytest.raises(ValueError, match=r"^exact_attributions: .* Sequential ")
        with exact_attributions(other), refusal if names_it else contextlib.nullcontext():
            first.__exit__(None, None, None)
        assert state(model) == before
        assert nn.functional.max_unpool1d is unpool


def test_a_pool_that_is_converted_inside_is_named() -> None:
    """A stand-in is, for an adaptive pool, which would not be one afterwards."""
    model = network(nn.AdaptiveMaxPool1d(4))
    refusal = pytest.raises(ValueError, match=r"^exact_attributions: expected '2' .*\.MaxPool1d;")
    with refusal, exact_attributions(model):
        maxunpool_cuda.convert_max_pooling(model)
    assert type(model[2]) is nn.AdaptiveMaxPool1d
    assert not model[2]._forward_pre_hooks
