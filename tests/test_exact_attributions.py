# SPDX-License-Identifier: BSD-3-Clause
"""What exact_attributions does to a model, seen without captum and shap."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import all_same
from torch import Tensor, nn
from torch.utils import _python_dispatch

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


def test_nothing_is_left_afterwards() -> None:
    """The model has another state inside, the same output, and its old state after an exception."""
    model = network(maxunpool_cuda.AdaptiveMaxPool1d(4))
    model[1].register_forward_pre_hook(lambda module, inputs: None)
    x = torch.randn(3, 1, 26)
    before, expected = state(model), model(x)
    interrupted = pytest.raises(ZeroDivisionError)
    with interrupted, exact_attributions(model) as same:
        assert same is model
        assert type(model[2]) is nn.MaxPool1d
        assert not model[1].inplace
        assert torch.equal(model(x), expected)
        raise ZeroDivisionError
    assert state(model) == before
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


class Pair(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> bool:
        return one is other


def test_modules_with_several_inputs_get_them() -> None:
    """As they are: attention takes a faster way if they are one tensor."""
    model = nn.ModuleList([Pair(), nn.MaxPool1d(2)])
    x = torch.zeros(2)
    with exact_attributions(model):
        assert model[0](x, x)
        assert model[0](x, other=x)
        assert model[0](one=x, other=x)


def test_modules_with_parameters_get_their_input() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(2))
    x = torch.randn(1, 4)
    with exact_attributions(model):
        model[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(x)
    assert seen[0] is x


def test_adaptive_windows_of_many_sizes_raise() -> None:
    message = r"^exact_attributions: expected AdaptiveMaxPool2d .* got \[2, 3\] for \[7, 6\]"
    pool = nn.AdaptiveMaxPool2d((2, 3))
    with exact_attributions(pool), pytest.raises(ValueError, match=message):
        pool(torch.randn(1, 7, 6))


class Subclass(nn.MaxPool2d):
    pass


@pytest.mark.parametrize(
    ("model", "named"),
    [
        pytest.param(nn.Sequential(nn.ReLU()), "none", id="no pool"),
        pytest.param(nn.FractionalMaxPool2d(2, 3), "{'': 'FractionalMaxPool2d'}", id="fractional"),
        pytest.param(nn.Sequential(nn.MaxPool2d(2), Subclass(2)), "{'1': 'Subclass'}", id="own"),
    ],
)
def test_pools_without_a_rule_are_named(model: nn.Module, named: str) -> None:
    message = f"^exact_attributions: expected .* but got {type(model).__name__} with {named}"
    with pytest.warns(UserWarning, match=message) as warned, exact_attributions(model):
        pass
    assert warned[0].filename == __file__


def test_models_are_modules() -> None:
    message = "^exact_attributions: expected model to be a Module but got function"
    with pytest.raises(TypeError, match=message), exact_attributions(lambda x: x):
        pass


class Network(nn.Module):
    """A part and a pool. Its ``forward`` is a function of itself and of a copy of its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], part: nn.Module) -> None:
        super().__init__()
        self.part, self.pool, self._forward = part, nn.MaxPool1d(2), forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x * 1)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


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


def adds(net: Any, x: Tensor) -> Tensor:
    y = net.part(x)
    y += 1
    return y.sum() + x


def multiplies_out(net: Any, x: Tensor) -> Tensor:
    y = net.part(x)
    torch.mul(y, 2, out=y)
    return y.sum() + x


# What two tensors hold that are one memory outside and two inside.
RESTS_ON_CHANGES_IN_PLACE = [
    pytest.param(forgets, relu(), id="a result that is dropped"),
    pytest.param(forgets_by_keyword, relu(), id="by keyword"),
    pytest.param(forgets_and_copies, relu(), id="a reshape that copies"),
    pytest.param(reads_both, nn.Sequential(nn.Identity(), relu()), id="a shortcut in a row"),
    pytest.param(reads_both, Nests(returns_input=True), id="a module that returns its input"),
    pytest.param(adds, nn.Flatten(), id="a view is changed"),
    pytest.param(adds, nn.Dropout(inplace=True), id="dropout changed nothing"),
    pytest.param(multiplies_out, nn.Identity(), id="out is changed"),
]


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.inference_mode], ids=["grad", "inference"]
)
@pytest.mark.parametrize(("forward", "part"), RESTS_ON_CHANGES_IN_PLACE)
def test_outputs_that_rest_on_changes_in_place_raise(
    forward: Callable[[Any, Tensor], Any], part: nn.Module, mode: Any
) -> None:
    """The error names the module. Nothing is left of the call, and the model is as before."""
    model = Network(forward, part).eval()
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


def residual(net: Any, x: Tensor) -> Tensor:
    y = net.part(x.sin())
    y += x
    return net.part(y)


HANDED_ON = Network(lambda net, x: (x, net.part(x)), relu())
NOBODY_READS = [
    pytest.param(lambda net, x: reads_both(net, x.abs()), relu(), id="ReLU changes nothing"),
    pytest.param(lambda net, x: net.part(x), Nests(returns_input=False), id="with children"),
    pytest.param(lambda net, x: net.part(x).view(x.flatten().shape), relu(), id="shapes"),
    pytest.param(lambda net, x: net.part(x)[1], HANDED_ON, id="handed on"),
    pytest.param(residual, relu(), id="residual"),
]


@pytest.mark.parametrize(("forward", "part"), NOBODY_READS)
def test_changes_in_place_that_nobody_reads(
    forward: Callable[[Any, Tensor], Any], part: nn.Module
) -> None:
    model = Network(forward, part).eval()
    x = torch.randn(2, 3, 4)
    expected = model(x)
    with exact_attributions(model):
        assert torch.equal(model(x), expected)
        assert _python_dispatch._get_current_dispatch_mode() is None


def test_each_call_is_watched_alone() -> None:
    """A model may change what it gets, and get it again."""
    model = nn.Sequential(relu(), nn.MaxPool1d(1))
    x = torch.randn(2, 3)
    with exact_attributions(model):
        assert all_same([model(x), model(x)], [x.relu()] * 2)


def test_threads_are_watched_each_alone() -> None:
    """What a call returns in a thread is checked, while a call of another thread goes on."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(net.part, x).result()
        return x

    model = Network(forward, Network(forgets, relu()))
    with exact_attributions(model), pytest.raises(RuntimeError, match=r"^exact_attributions: "):
        model(torch.randn(2, 3))


@pytest.mark.filterwarnings("error")  # PyTorch warns of a hook that fails, too
@pytest.mark.parametrize("in_a_hook", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_ends_the_watch(error: type[BaseException], in_a_hook: bool) -> None:
    """Of a forward, or of a hook that runs before those of the context."""

    def fails(net: Any, x: Any) -> Tensor:
        raise error

    model = nn.Sequential(nn.MaxPool1d(2), nn.Identity() if in_a_hook else Network(fails, relu()))
    if in_a_hook:
        model.register_forward_pre_hook(fails)
    before = state(model)
    with pytest.raises(error), exact_attributions(model):
        model(torch.randn(1, 1, 4))
    assert state(model) == before
    assert _python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_makes_a_program_of_a_model_may_be_called_inside() -> None:
    model = network(nn.MaxPool1d(3, 2)).eval()
    x = torch.randn(2, 1, 20)
    expected = model(x)
    with exact_attributions(model):
        assert torch.equal(torch.jit.trace(model, x)(x), expected)
        assert torch.equal(torch.compile(model, backend="eager")(x), expected)


def test_a_model_is_not_copied_inside() -> None:
    """A copy would stay as the model is inside."""
    model = network(nn.AdaptiveMaxPool1d(4))
    with exact_attributions(model), pytest.raises(RuntimeError, match=r"^exact_attributions: "):
        pickle.dumps(model)
    pickle.dumps(model)


def test_contexts_are_left_in_reverse_order() -> None:
    """Otherwise an error is raised, and all is undone."""
    model = network(maxunpool_cuda.AdaptiveMaxPool1d(4))
    before, unpool = state(model), nn.functional.max_unpool1d
    first = exact_attributions(model)
    first.__enter__()
    refusal = pytest.raises(ValueError, match=r"^exact_attributions: .* Sequential ")
    with exact_attributions(model), refusal:
        first.__exit__(None, None, None)
    assert state(model) == before
    assert nn.functional.max_unpool1d is unpool
