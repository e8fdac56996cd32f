# SPDX-License-Identifier: BSD-3-Clause
"""What exact_attributions does to a model, seen without captum and shap."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from cases import all_same
from torch import Tensor, nn
from torch.utils import _python_dispatch

import maxunpool_cuda
from maxunpool_cuda import exact_attributions


def with_hooks(model: nn.Module) -> list[Any]:
    """All that exact_attributions may change in a model: classes, attributes and hooks."""
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
    before, expected = with_hooks(model), model(x)
    with suppress(ZeroDivisionError), exact_attributions(model) as same:
        assert same is model
        assert type(model[2]) is nn.MaxPool1d
        assert not model[1].inplace
        assert torch.equal(model(x), expected)
        raise ZeroDivisionError
    assert with_hooks(model) == before
    assert torch.equal(model(x), expected)


def test_torchs_unpooling_adds_up_inside() -> None:
    """Also a model's own. Unpools of this package keep their ``reduce``."""
    pooled, indices = torch.tensor([[[2.0, 3]]]), torch.tensor([[[1, 1]]])
    theirs, ours = nn.MaxUnpool1d(2, 1), maxunpool_cuda.MaxUnpool1d(2, 1)
    with exact_attributions(nn.Sequential(nn.MaxPool1d(3, 1), theirs, ours)):
        assert nn.functional.max_unpool1d(pooled, indices, 2, 1).tolist() == [[[0, 5, 0]]]
        assert theirs(pooled, indices).tolist() == [[[0, 5, 0]]]
        assert ours(pooled, indices).tolist() == [[[0, 3, 0]]]


class Pair(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> bool:
        return one is other


def test_modules_with_several_inputs_get_them() -> None:
    """As they are: attention takes a faster way if they are one tensor."""
    model = nn.Sequential(Pair(), nn.MaxPool1d(2))
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
        pytest.param(nn.ReLU(), "none", id="no pool"),
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
    """A part and a pool. Its ``forward`` is a function of the part and of a copy of its input."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Any], part: nn.Module) -> None:
        super().__init__()
        self.part, self.pool, self._forward = part, nn.MaxPool1d(2), forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self.part, x * 1)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def forgets(part: nn.Module, x: Tensor) -> Tensor:
    part(x)
    return x


def reads_both(part: nn.Module, x: Tensor) -> Tensor:
    return part(x) + x


def adds(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x)
    y += 1
    return y.sum() + x


def multiplies_out(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x)
    torch.mul(y, 2, out=y)
    return y.sum() + x


# What two tensors hold that are one memory outside and two inside.
RESTS_ON_CHANGES_IN_PLACE = [
    pytest.param(forgets, relu(), id="a result that is dropped"),
    pytest.param(reads_both, nn.Sequential(nn.Identity(), relu()), id="a shortcut in a row"),
    pytest.param(adds, nn.Flatten(), id="a view is changed"),
    pytest.param(multiplies_out, nn.Identity(), id="out is changed"),
]


@pytest.mark.parametrize(("forward", "part"), RESTS_ON_CHANGES_IN_PLACE)
def test_outputs_that_rest_on_changes_in_place_raise(
    forward: Callable[[nn.Module, Tensor], Any], part: nn.Module
) -> None:
    """The error names the module. Nothing is left of the call."""
    model = Network(forward, part)
    with exact_attributions(model):
        with pytest.raises(RuntimeError, match=r"^exact_attributions: .*'part(\.\w+)?' \(\w+\)"):
            model(torch.randn(2, 3, 4))
        assert _python_dispatch._get_current_dispatch_mode() is None


def nonnegative(part: nn.Module, x: Tensor) -> Tensor:
    return reads_both(part, x.abs())


def reads_the_shape(part: nn.Module, x: Tensor) -> Tensor:
    return part(x).view(x.flatten().shape)


def residual(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x.sin())
    y += x
    return part(y)


@pytest.mark.parametrize("forward", [nonnegative, reads_the_shape, residual])
def test_changes_in_place_that_nobody_reads(forward: Callable[[nn.Module, Tensor], Any]) -> None:
    """ReLU changes nothing of what is not negative."""
    model = Network(forward, relu())
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


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_ends_the_watch(error: type[BaseException]) -> None:
    """At the latest with the context: PyTorch runs no hook after a KeyboardInterrupt."""

    def fails(part: nn.Module, x: Tensor) -> Tensor:
        raise error

    model = Network(fails, relu())
    with pytest.raises(error), exact_attributions(model):
        model(torch.randn(1, 1, 4))
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
    model = nn.MaxPool1d(4)
    with exact_attributions(model), pytest.raises(RuntimeError, match=r"^exact_attributions: "):
        pickle.dumps(model)
    pickle.dumps(model)


def test_contexts_are_left_in_reverse_order() -> None:
    """Otherwise an error is raised, and all is undone."""
    model = network(maxunpool_cuda.AdaptiveMaxPool1d(4))
    before, unpool = with_hooks(model), nn.functional.max_unpool1d
    first = exact_attributions(model)
    first.__enter__()
    refusal = pytest.raises(ValueError, match=r"^exact_attributions: .* Sequential ")
    with exact_attributions(model), refusal:
        first.__exit__(None, None, None)
    assert with_hooks(model) == before
    assert nn.functional.max_unpool1d is unpool
