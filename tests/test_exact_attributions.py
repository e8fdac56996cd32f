# SPDX-License-Identifier: BSD-3-Clause
"""What exact_attributions does to a model, seen without captum and shap."""

import contextlib
import re
import warnings
from typing import Any

import pytest
import torch
from cases import all_same
from torch import Tensor, nn

import maxunpool_cuda
from maxunpool_cuda import exact_attributions


def state(model: nn.Module) -> list[Any]:
    """All that exact_attributions may change in a model."""
    hooks = [[*module._forward_pre_hooks.values()] for module in model.modules()]
    return [(type(m), {**vars(m)}, own) for m, own in zip(model.modules(), hooks, strict=True)]


def network(pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(inplace=True), pool, nn.Flatten())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(nn.MaxPool1d(5, 2), id="torch.nn"),
        pytest.param(maxunpool_cuda.MaxPool1d(5, 2), id="this package"),
        pytest.param(nn.AdaptiveMaxPool1d(4), id="adaptive"),
        pytest.param(maxunpool_cuda.AdaptiveMaxPool1d(4), id="this package, adaptive"),
    ],
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


@pytest.mark.parametrize("order", [(nn.ReLU, nn.MaxPool1d), (nn.MaxPool1d, nn.ReLU)])
def test_a_module_is_handed_another_tensor(order: tuple[type, type]) -> None:
    """Hooks that are registered inside see two tensors, whichever of the two comes first."""
    seen: list[Tensor] = []
    model = nn.Sequential(*(kind(*[2] * (kind is nn.MaxPool1d)) for kind in order))
    with exact_attributions(model):
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        model[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(torch.randn(1, 1, 4))
    assert seen[0] is not seen[1]
    assert torch.equal(*seen)


def test_modules_with_several_inputs_get_them() -> None:
    """As they are: attention takes a faster way if they are one tensor."""

    class Pair(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> bool:
            return one is other

    model = nn.ModuleList([Pair(), nn.MaxPool1d(2)])
    with exact_attributions(model):
        assert model[0](*[torch.zeros(2)] * 2)
        assert model[0](torch.zeros(2), other=torch.zeros(2)) is False


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("output_size", [1, 3, "mixed"])
@pytest.mark.parametrize("place", [nn, maxunpool_cuda])
def test_a_max_pool_stands_in(dims: int, output_size: Any, place: Any) -> None:
    """For an adaptive one, in whatever sizes the inputs come."""
    output_size = (2, None, 3)[:dims] if output_size == "mixed" else output_size
    pool = getattr(place, f"AdaptiveMaxPool{dims}d")(output_size, return_indices=True)
    with exact_attributions(nn.Sequential(pool)):
        assert "kernel_size=None" in repr(pool)
        assert type(pool) is getattr(nn, f"MaxPool{dims}d")
        inputs = [torch.randn(2, *[6 * n] * dims) for n in (1, 2)]
        inside = [pool(x) for x in inputs]
    assert all_same(inside, [pool(x) for x in inputs])


@pytest.mark.parametrize(("output_size", "wanted"), [((2, 3), [2, 3]), (14, [14, 14])])
def test_adaptive_windows_of_many_sizes_raise(output_size: Any, wanted: list[int]) -> None:
    message = (
        f"^exact_attributions: expected AdaptiveMaxPool2d .*{re.escape(f'got {wanted} for [7, 6]')}"
    )
    pool = nn.AdaptiveMaxPool2d(output_size)
    with exact_attributions(pool), pytest.raises(ValueError, match=message):
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
        pytest.param(nn.Sequential(nn.ReLU()), "none", id="no pool"),
        pytest.param(nn.FractionalMaxPool2d(2, 3), "{'': 'FractionalMaxPool2d'}", id="fractional"),
        pytest.param(
            nn.Sequential(nn.MaxPool2d(2), Subclass(2)), "{'1': 'Subclass'}", id="a subclass"
        ),
        pytest.param(SCRIPTED, "{'0': 'MaxPool2d'}", id="scripted"),
    ],
)
def test_pools_without_a_rule_are_named(model: nn.Module, named: str) -> None:
    with (
        pytest.warns(UserWarning, match="^exact_attributions: expected ") as warned,
        exact_attributions(model),
    ):
        pass
    (warning,) = warned
    assert f"but got {type(model).__name__} with {named}. captum" in str(warning.message)
    assert warning.filename == __file__


def test_models_are_modules() -> None:
    message = "^exact_attributions: expected model to be a Module but got function"
    with pytest.raises(TypeError, match=message), exact_attributions(lambda x: x):
        pass


def test_it_nests() -> None:
    model = network(maxunpool_cuda.MaxPool1d(3))
    before = state(model)
    with exact_attributions(model), exact_attributions(model):
        pass
    assert state(model) == before
