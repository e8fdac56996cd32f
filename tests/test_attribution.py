# SPDX-License-Identifier: BSD-3-Clause
"""Inside exact_attributions, what captum and shap compute by DeepLIFT adds up.

The difference of a model's outputs decides, and no number of captum or shap.
"""

import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

import maxunpool_cuda
from maxunpool_cuda import exact_attributions

captum = pytest.importorskip("captum", reason="captum is in the extra attribution")
attr = pytest.importorskip("captum.attr", reason="as captum")
rules = pytest.importorskip("captum.attr._utils.lrp_rules", reason="as captum")
shap = pytest.importorskip("shap", reason="shap is in the extra attribution")
deep_pytorch = pytest.importorskip("shap.explainers._deep.deep_pytorch", reason="as shap")

# Takes a network, inputs and as many baselines, and returns attributions.
Tool = Callable[[nn.Module, Tensor, Tensor], Tensor]

TESTS = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the tools about their hooks


def deep_lift(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
    return attr.DeepLift(net).attribute(x, baseline)


def deep_lift_shap(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
    """Of one input and two baselines, which are the same."""
    pairs = zip(x.split(1), baseline.split(1), strict=True)
    by_input = [attr.DeepLiftShap(net).attribute(one, torch.cat([b, b])) for one, b in pairs]
    return torch.cat(by_input)


def deep_explainer(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
    pairs = zip(x.split(1), baseline.split(1), strict=True)
    explained = [
        shap.DeepExplainer(net, b).shap_values(one, check_additivity=False) for one, b in pairs
    ]
    return torch.cat([torch.from_numpy(values) for values in explained])


TOOLS = (deep_lift, deep_lift_shap, deep_explainer)


def error(tool: Tool, net: nn.Module, x: Tensor, baseline: Tensor) -> float:
    """How far the sum of attributions is from the difference of outputs, as a part of that.

    The worst one of a batch of inputs, each with its baseline. The network has one output. It is 0
    if nothing differs, as behind a ReLU that lets nothing through.
    """
    with torch.no_grad():
        difference = (net(x) - net(baseline)).flatten()
    distance = tool(net, x, baseline).detach().flatten(1).sum(1) - difference
    return float(torch.where(distance == 0, 0, distance / difference).abs().max())


def of_class(name: str, dims: int) -> Any:
    """The class of torch.nn, or of this package after ``our``."""
    package = maxunpool_cuda if name.startswith("our ") else nn
    return getattr(package, f"{name.removeprefix('our ')}{dims}d")


class Padded(nn.MaxPool2d):
    """A subclass, as they are made for models that come from other frameworks."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(input, (0, 1, 0, 1)))


class Twice(nn.Module):
    """It calls its modules twice, by keyword, and its input goes on beside its output."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in [*self.layers, *self.layers]:
            y = layer(input=y)
        return torch.cat([x.flatten(1), y.flatten(1)], 1)


class Residual(nn.Module):
    """A residual block that adds in place."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x) * 1
        y += x
        return y


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def layers_of(dims: int) -> dict[str, list[nn.Module]]:
    """Those between a convolution of 3 channels, of 8 in each dimension, and a linear layer."""
    pool, our_pool = of_class("MaxPool", dims), of_class("our MaxPool", dims)
    adaptive, ours = of_class("AdaptiveMaxPool", dims), of_class("our AdaptiveMaxPool", dims)
    convolution = of_class("Conv", dims)(3, 3, 3, padding=1, bias=False)
    residual = Residual(nn.ReLU(), convolution, pool(3, 1, 1))
    return {
        "a ReLU before": [relu(), pool(3, 1)],
        "a ReLU behind": [pool(3, 2, 1), relu()],
        "a usual network": [relu(), pool(3, 2, 1), convolution, pool(2), relu(), adaptive(1)],
        "pools in a row": [our_pool(3, 1), pool(2, 1), adaptive(3)],
        "adaptive": [relu(), adaptive(5), relu(), ours((3, 2, 3)[:dims]), nn.SiLU(True)],
        "dilated": [nn.GELU(), our_pool(2, 1, dilation=2), pool(2, ceil_mode=True, dilation=2)],
        "activations": [nn.Tanh(), nn.LeakyReLU(), nn.ELU(inplace=True), pool(2), nn.PReLU(3)],
        "calls twice": [Twice(pool(3, 1, 1), relu())],
        "residual": [nn.Hardtanh(-1e-8, 1e-8), residual, pool(2)],
    }


def network_of(dims: int, layers: list[nn.Module]) -> tuple[nn.Sequential, Tensor, Tensor]:
    """With two inputs and their baselines. It has no bias, so that scaling them scales outputs."""
    first = of_class("Conv", dims)(2, 3, 2, bias=False)
    net = nn.Sequential(first, *layers, nn.Flatten(), nn.LazyLinear(1, bias=False)).double().eval()
    x, baseline = torch.randn(2, 2, 2, *[9] * dims, dtype=torch.float64)
    net(x)
    return net, x, baseline


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", layers_of(1))
@pytest.mark.parametrize("scale", [1, 1e-6, 1e-8])
def test_attributions_add_up(scale: float, kind: str, dims: int) -> None:
    net, x, baseline = network_of(dims, layers_of(dims)[kind])
    with exact_attributions(net):
        for tool in TOOLS:
            assert error(tool, net, x * scale, baseline * scale) < 1e-9


@pytest.mark.parametrize("tool", TOOLS)
def test_an_eeg_in_volts(tool: Tool) -> None:
    """To the rounding of the outputs, which have biases."""
    layers = [nn.Conv1d(8, 16, 7), nn.MaxPool1d(3, 2), nn.Flatten(), nn.LazyLinear(1)]
    net = nn.Sequential(*layers).double()
    x, baseline = 2e-6 * torch.randn(2, 1, 8, 250, dtype=torch.float64)
    difference = float(net(x) - net(baseline))
    with exact_attributions(net):
        assert abs(float(tool(net, x, baseline).sum()) - difference) < 1e-15


@pytest.mark.parametrize("tool", TOOLS)
def test_subclasses_of_pools_add_up(tool: Tool) -> None:
    net, x, baseline = network_of(2, [nn.ReLU(), Padded(3, 1)])
    with exact_attributions(net):
        assert error(tool, net, x, baseline) < 1e-9


@pytest.mark.usefixtures("single_threaded_torch")  # the tools call torch.nn's unpooling
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("tool", TOOLS)
def test_attributions_do_not_add_up_outside(tool: Tool, dims: int) -> None:
    """If they do, the tool has been mended.

    All windows share the input's largest element. Every weight is positive and the input lies above
    the baselines, so every window adds to the output's difference.
    """
    net, x, baseline = network_of(dims, [nn.ReLU(), of_class("MaxPool", dims)(3, 1)])
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    x = x.abs() + 3
    x[(slice(None), slice(None), *[4] * dims)] = 9
    baseline = baseline.clamp(0, 1)
    assert error(tool, net, x, baseline) > 1e-6
    with exact_attributions(net):
        assert error(tool, net, x, baseline) < 1e-9
    assert error(tool, net, x, baseline) > 1e-6


@pytest.mark.parametrize("tool", TOOLS)
def test_an_example_and_its_baseline_have_one_multiplier(tool: Tool) -> None:
    """Otherwise attributions add up to 1.

    The inputs of the second pool equal those of the baseline in one place, where those of the first
    do not.
    """
    convolution = nn.Conv1d(1, 1, 2, stride=2, bias=False)
    nn.init.ones_(convolution.weight)
    net = nn.Sequential(nn.MaxPool1d(2), convolution, nn.MaxPool1d(2), nn.Flatten()).double()
    numbers = [[[5.0, 0, 1, 0, 4, 0, 0, 0]], [[1, 0, 5, 0, 7, 0, 2, 0]]]
    x, baseline = torch.tensor(numbers, dtype=torch.float64).split(1)
    with exact_attributions(net):
        assert abs(tool(net, x, baseline).sum() + 3) < 1e-12


def test_multipliers_of_a_batch() -> None:
    """An element that equals the baseline has the gradient of its own example."""
    net = nn.Sequential(nn.MaxPool1d(2), nn.Flatten())
    x = torch.tensor([[[1.0, 2]], [[3, 0]]])
    with exact_attributions(net):
        multipliers = attr.DeepLift(net, multiply_by_inputs=False).attribute
        assert multipliers(x, torch.zeros_like(x)).tolist() == [[[0, 1]], [[1, 0]]]
        assert multipliers(x, x.clone()).tolist() == [[[0, 1]], [[1, 0]]]


def test_multipliers_of_neighbours() -> None:
    """Where input and baseline differ by rounding, an activation's multiplier is its gradient."""
    net = nn.Sequential(nn.Sigmoid(), nn.MaxPool1d(1))
    x = torch.rand(1, 1, 1, dtype=torch.float64)
    slope = torch.sigmoid(x) * torch.sigmoid(-x)
    with exact_attributions(net):
        multipliers = attr.DeepLift(net, multiply_by_inputs=False).attribute
        assert torch.allclose(multipliers(x, torch.nextafter(x, x + 1)), slope, rtol=1e-9)


def test_outputs_that_are_changed_in_place_add_up() -> None:
    """captum takes such models, shap does not."""

    def doubles(part: nn.Module, x: Tensor) -> Tensor:
        y = part(x)
        y *= 2
        return y

    model = Network(doubles, nn.MaxPool1d(3, 1))
    x, baseline = torch.randn(2, 1, 3, 8, dtype=torch.float64)
    with exact_attributions(model):
        assert error(deep_lift, model, x, baseline) < 1e-9


@pytest.mark.parametrize("place", range(1, 6))
def test_layers_and_neurons_add_up(place: int) -> None:
    """Their inputs and outputs, as captum's Layer and Neuron classes and shap's pairs have them."""
    layers = [nn.ReLU(), nn.MaxPool1d(3, 1), nn.ELU(), maxunpool_cuda.AdaptiveMaxPool1d(5)]
    net, x, baseline = network_of(1, layers)
    layer = net[place]

    def of_layer(net: nn.Module, x: Tensor, baseline: Tensor, **options: bool) -> Tensor:
        return attr.LayerDeepLift(net, layer).attribute(x, baseline, **options)

    def of_layers_input(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
        return of_layer(net, x, baseline, attribute_to_layer_input=True)

    def of_layer_shap(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
        return attr.LayerDeepLiftShap(net, layer).attribute(x, torch.cat([baseline, baseline]))

    def explained(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
        explainer = shap.DeepExplainer((net, layer), baseline)
        return torch.from_numpy(explainer.shap_values(x, check_additivity=False))

    first = net[: place + 1]
    neuron = (0,) * (first(x).dim() - 1)
    with exact_attributions(net):
        for tool in (of_layer, of_layers_input):
            assert error(tool, net, x, baseline) < 1e-9
        for tool in (of_layer_shap, explained):
            assert error(tool, net, x[:1], baseline[:1]) < 1e-9
        difference = (first(x) - first(baseline))[(slice(None), *neuron)]
        for method, times in ((attr.NeuronDeepLift, 1), (attr.NeuronDeepLiftShap, 2)):
            baselines = baseline[:1].repeat(times, 1, 1)
            attributions = method(net, layer).attribute(x[:1], neuron, baselines)
            assert abs(attributions.sum() - difference[0]) < 1e-9


def lrp(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
    """captum 0.9.0 has no default rule for some layers."""
    for layer in net:
        if isinstance(layer, (nn.Conv1d, nn.Flatten, nn.AdaptiveMaxPool1d, nn.GELU)):
            layer.rule = rules.EpsilonRule()
    return attr.LRP(net).attribute(x)


def gradient_explainer(net: nn.Module, x: Tensor, baseline: Tensor) -> Tensor:
    """shap 0.51.0 makes float32 of all inputs."""
    explainer = shap.GradientExplainer(net.float(), baseline.float())
    return torch.from_numpy(explainer.shap_values(x.float(), nsamples=5, rseed=1))


METHODS: dict[str, Tool] = {
    "Saliency": lambda net, x, _: attr.Saliency(net).attribute(x),
    "InputXGradient": lambda net, x, _: attr.InputXGradient(net).attribute(x),
    "IntegratedGradients": lambda net, x, b: attr.IntegratedGradients(net).attribute(x, b),
    "GradCAM": lambda net, x, _: attr.LayerGradCam(net, net[1]).attribute(x),
    "GuidedGradCam": lambda net, x, _: attr.GuidedGradCam(net, net[1]).attribute(x),
    "GuidedBackprop": lambda net, x, _: attr.GuidedBackprop(net).attribute(x),
    "Deconvolution": lambda net, x, _: attr.Deconvolution(net).attribute(x),
    "LRP": lrp,
    "Occlusion": lambda net, x, _: attr.Occlusion(net).attribute(x, (2, 3)),
    "GradientExplainer": gradient_explainer,
}


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_give_the_same_numbers(name: str) -> None:
    layers = [nn.ReLU(), nn.MaxPool1d(3, 1), nn.AdaptiveMaxPool1d(4), nn.GELU(), nn.ReLU()]
    net, x, baseline = network_of(1, layers)
    net[-1].weight.data.abs_()  # GradCAM drops what speaks against an output
    outside = METHODS[name](net, x, baseline)
    with exact_attributions(net):
        inside = METHODS[name](net, x, baseline)
    assert outside.abs().max() > 1e-6
    assert torch.equal(inside, outside)


def test_deterministic_mode_has_attributions() -> None:
    """Outside, captum calls torch.nn's unpooling, which raises an error."""
    net, x, baseline = network_of(1, [nn.ReLU(), nn.MaxPool1d(3, 1)])
    with pytest.raises(RuntimeError, match="deterministic"):
        deep_lift(net, x, baseline)
    with exact_attributions(net):
        assert error(deep_lift, net, x, baseline) < 1e-9


def with_hooks(model: nn.Module) -> list[Any]:
    """All that exact_attributions may change in a model: attributes, children and hooks."""
    return [
        (m, {**vars(m)}, {**m._modules}, {**m._forward_pre_hooks}, {**m._forward_hooks})
        for m in model.modules()
    ]


def test_nothing_is_left_afterwards() -> None:
    """Nor after an exception inside."""
    net, x, baseline = network_of(1, [nn.GELU(), nn.AdaptiveMaxPool1d(4), relu()])
    net[3].register_forward_pre_hook(lambda module, inputs: None)
    before = with_hooks(net)
    with pytest.raises(ZeroDivisionError), exact_attributions(net) as same:  # noqa: PT012
        assert same is net
        assert with_hooks(net) != before
        deep_lift(net, x, baseline)
        raise ZeroDivisionError
    assert with_hooks(net) == before


class Network(nn.Module):
    """A part and a pool. Its ``forward`` is a function of the part and of a copy of its input."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Any], part: nn.Module) -> None:
        super().__init__()
        self.part, self.pool, self._forward = part, nn.MaxPool1d(2), forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self.part, x * 1).flatten(1).sum(1, keepdim=True)


def forgets(part: nn.Module, x: Tensor) -> Tensor:
    part(x)
    return x


def forgets_a_view(part: nn.Module, x: Tensor) -> Tensor:
    part(x.flatten(1))
    return x.sin()


def reads_both(part: nn.Module, x: Tensor) -> Tensor:
    return part(x) + x


def multiplies_out(part: nn.Module, x: Tensor) -> Tensor:
    """The part changes nothing, but what it returns is its input outside."""
    x = x.abs() + 1
    y = part(part(x))
    with torch.no_grad():
        torch.mul(y, 2, out=y)
    return x * 2


class Returns(nn.Module):
    """What it gets, after a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.pool = relu(), nn.MaxPool1d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :1] * 1
        self.part(x)
        return x


RESTS_ON_CHANGES_IN_PLACE = [
    Network(forgets, relu()),
    Network(forgets_a_view, relu()),
    Network(reads_both, nn.Sequential(nn.Identity(), relu())),
    Network(multiplies_out, relu()),
    Returns(),
]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("model", RESTS_ON_CHANGES_IN_PLACE)
def test_models_that_rest_on_changes_in_place_are_refused(model: nn.Module, tool: Tool) -> None:
    """DeepLIFT raises an error, which names the module. All else is as outside.

    The module may work in another way from then on, as the error says.
    """
    x, baseline = -torch.rand(2, 1, 3, 4) - 1
    expected = model(x)
    message = r"^exact_attributions: .*'part(\.\w+)?' \(\w+\)"
    with exact_attributions(model):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                tool(model, x, baseline)
            assert _python_dispatch._get_current_dispatch_mode() is None
            assert torch.equal(model(x), expected)
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
        tool(model, x, baseline)
        assert not any(getattr(module, "inplace", False) for module in model.modules())
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True


def reads_the_shape(part: nn.Module, x: Tensor) -> Tensor:
    return part(x).view(x.flatten(1).shape)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("forward", "lowest"), [(reads_both, 0), (reads_the_shape, -1)])
def test_changes_in_place_that_nobody_reads(
    lowest: int, forward: Callable[[nn.Module, Tensor], Any], tool: Tool
) -> None:
    """ReLU changes nothing of what is not negative."""
    model = Network(forward, relu())
    x, baseline = torch.rand(2, 1, 3, 4, dtype=torch.float64) + lowest / 2
    with exact_attributions(model):
        assert error(tool, model, x, baseline) < 1e-9
    assert _python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_ends_the_watch(kind: type[BaseException]) -> None:
    """At the latest with the context: PyTorch runs no hook after a KeyboardInterrupt."""

    def fails(part: nn.Module, x: Tensor) -> Tensor:
        part(x)
        raise kind

    model = Network(fails, relu())
    x, baseline = torch.randn(2, 1, 1, 4)
    with pytest.raises(kind), exact_attributions(model):
        deep_lift(model, x, baseline)
    assert model.part.inplace
    assert _python_dispatch._get_current_dispatch_mode() is None


def test_a_module_that_works_in_place_stays_so_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may call it meanwhile."""
    net, x, baseline = network_of(1, [relu(), nn.MaxPool1d(3, 1)])
    in_place = []

    def watched(input: Tensor, inplace: bool) -> Tensor:
        in_place.append(net[1].inplace)
        return torch.relu_(input) if inplace else torch.relu(input)

    monkeypatch.setattr(nn.functional, "relu", watched)
    with exact_attributions(net):
        for tool in TOOLS:
            assert error(tool, net, x, baseline) < 1e-9
    assert {*in_place} == {True}


def test_hooks_that_a_failed_run_has_left_are_named() -> None:
    """shap leaves them. captum meets them, and every later context does."""

    def fails(part: nn.Module, x: Tensor) -> Tensor:
        if x.requires_grad:  # not in shap's constructor, which has set no hooks yet
            raise ZeroDivisionError
        return part(x)

    model = Network(fails, nn.Sequential(nn.ReLU()))
    x, baseline = torch.randn(2, 1, 3, 4)
    message = r"^exact_attributions: .* hooks on 'part.0' \(ReLU\): a run of shap that fails "
    with exact_attributions(model):
        with pytest.raises(ZeroDivisionError):
            deep_explainer(model, x, baseline)
        model._forward = reads_both
        with pytest.raises(RuntimeError, match=message):
            deep_lift(model, x, baseline)
    with pytest.raises(RuntimeError, match=message), exact_attributions(model):
        pass


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_makes_a_program_of_a_model_may_be_called_inside() -> None:
    model, x, _ = network_of(1, [relu(), nn.MaxPool1d(3, 2)])
    expected = model(x)
    with exact_attributions(model):
        assert torch.equal(torch.jit.trace(model, x)(x), expected)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        pytest.param(nn.ReLU(), "ReLU with none", id="no pool"),
        pytest.param(
            nn.Sequential(nn.MaxPool2d(2), nn.FractionalMaxPool2d(2, 3)),
            "Sequential with {'1': 'FractionalMaxPool2d'}",
            id="fractional",
        ),
        pytest.param(
            nn.Sequential(torch.jit.trace(nn.MaxPool2d(2), torch.ones(1, 2, 2))),
            "Sequential with {'0': 'MaxPool2d'}",
            id="scripted",
        ),
    ],
)
def test_pools_without_a_rule_are_named(model: nn.Module, named: str) -> None:
    message = f"^exact_attributions: expected .* but got {named}"
    with pytest.warns(UserWarning, match=message) as warned, exact_attributions(model):
        pass
    assert warned[0].filename == __file__


def test_models_are_modules() -> None:
    message = "^exact_attributions: expected model to be a Module but got function"
    with pytest.raises(TypeError, match=message), exact_attributions(lambda x: x):
        pass


def test_an_odd_batch_raises() -> None:
    """A model may make another batch of it, whose halves nobody knows."""
    to_three, to_two = (nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (n, -1))) for n in (3, 2))
    net, x, baseline = network_of(1, [to_three, nn.MaxPool1d(2), to_two])
    message = r"^exact_attributions: expected '2' \(MaxPool1d\) .* a tensor of shape \[3, 16\]"
    with exact_attributions(net), pytest.raises(ValueError, match=message):
        deep_lift(net, x[:1], baseline[:1])


class Gated(nn.Module):
    """A network beside a part that does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net, *_ = network_of(1, [nn.MaxPool1d(3, 1)])
        self.gate, self.soft = nn.Parameter(torch.zeros(())), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.soft(self.gate)


@pytest.mark.parametrize("tool", TOOLS)
def test_what_does_not_depend_on_the_input_has_no_halves(tool: Tool) -> None:
    net = Gated().double()
    x, baseline = torch.randn(2, 2, 2, 9, dtype=torch.float64)
    with exact_attributions(net):
        assert error(tool, net, x, baseline) < 1e-9


@pytest.mark.parametrize("tool", TOOLS)
def test_elements_that_a_mask_has_made_minus_infinity(tool: Tool) -> None:
    mask = torch.tensor([0, 0, -torch.inf, 0])
    model = Network(lambda part, x: part(x + mask), nn.MaxPool1d(2, 1))
    x, baseline = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    with exact_attributions(model):
        assert error(tool, model, x, baseline) < 1e-9


@pytest.mark.parametrize("tool", TOOLS)
def test_pools_that_return_indices(tool: Tool) -> None:
    """What is unpooled by them would not add up."""
    model = Network(lambda part, x: part(x)[0], maxunpool_cuda.MaxPool1d(2, return_indices=True))
    x, baseline = torch.randn(2, 1, 3, 4)
    message = r"^exact_attributions: expected .* no indices but got 'part' \(MaxPool1d\)"
    with exact_attributions(model), pytest.raises(ValueError, match=message):
        tool(model, x, baseline)


class Mixed(nn.MaxPool1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + nn.functional.avg_pool1d(input, 2)


class MinPool(nn.MaxPool1d):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(-input)


@pytest.mark.parametrize("kind", [Mixed, MinPool])
def test_subclasses_that_are_no_max_pools(kind: type[nn.MaxPool1d]) -> None:
    net = nn.Sequential(kind(2), nn.Flatten())
    x, baseline = torch.tensor([[[0.0, 5, 3, 8]]]), torch.tensor([[[0.0, -1, 3, 8]]])
    message = rf"^exact_attributions: expected '0' \({kind.__name__}\) to be a max pool"
    with exact_attributions(net), pytest.raises(ValueError, match=message):
        attr.DeepLift(net).attribute(x, baseline, target=0)


class GEGLU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        x, gate = input.chunk(2, 1)
        return x * super().forward(gate)


def test_activations_of_other_elements_have_no_rule() -> None:
    net = nn.Sequential(GEGLU(), nn.Flatten())
    x, baseline = torch.randn(2, 1, 2, 1)
    outside = deep_lift(net, x, baseline)
    with exact_attributions(net):
        assert torch.equal(deep_lift(net, x, baseline), outside)


def test_modules_with_a_backward_hook() -> None:
    """captum passes over them."""
    net, x, baseline = network_of(1, [nn.ReLU(), nn.MaxPool1d(3, 1)])
    for layer in net[1:3]:
        layer.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    with exact_attributions(net):
        assert error(deep_lift, net, x, baseline) < 1e-9


def test_a_model_may_be_converted_inside() -> None:
    net, x, baseline = network_of(1, [nn.MaxPool1d(3, 1)])
    with exact_attributions(net):
        maxunpool_cuda.convert_max_pooling(net)
        assert error(deep_lift, net, x, baseline) < 1e-9


def test_a_model_is_not_copied_inside() -> None:
    """A copy would stay as the model is inside. Nor is a part of it."""
    model = nn.Sequential(nn.Linear(2, 2), relu(), nn.MaxPool1d(4))
    with exact_attributions(model):
        for each in (model, *model):
            with pytest.raises(RuntimeError, match=r"^exact_attributions: "):
                pickle.dumps(each)
    pickle.dumps(model)


def test_contexts_in_contexts() -> None:
    net, x, baseline = network_of(1, [nn.ReLU(), nn.MaxPool1d(3, 1), nn.GELU()])
    with exact_attributions(net), exact_attributions(net[1:]):
        assert error(deep_lift, net, x, baseline) < 1e-9


def test_contexts_are_left_in_reverse_order() -> None:
    """Otherwise an error is raised, and all is undone."""
    net, _, _ = network_of(1, [nn.AdaptiveMaxPool1d(4), relu()])
    before = with_hooks(net)
    first = exact_attributions(net)
    first.__enter__()
    refusal = pytest.raises(ValueError, match=r"^exact_attributions: .* Sequential ")
    with exact_attributions(net), refusal:
        first.__exit__(None, None, None)
    assert with_hooks(net) == before


def test_an_exception_inside_is_the_one_that_is_raised() -> None:
    """And not that of the order, which is wrong, too."""
    net, _, _ = network_of(1, [nn.AdaptiveMaxPool1d(4), relu()])
    first = exact_attributions(net)
    first.__enter__()
    with exact_attributions(net):
        assert not first.__exit__(ZeroDivisionError, ZeroDivisionError(), None)


@pytest.mark.parametrize(
    ("tool", "changed"),
    [
        (captum, (attr.DeepLift, "_can_register_hook", lambda self, module: False)),
        (shap, (deep_pytorch.PyTorchDeep, "add_handles", lambda self, *args: [])),
    ],
    ids=["captum", "shap"],
)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_release_that_does_not_take_the_rule_is_refused(
    when: str, tool: Any, changed: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no hooks in the places that are known. One that is imported inside is told later."""
    monkeypatch.setattr(*changed)
    monkeypatch.setattr(tool, "__version__", f"99 ({when})")
    message = rf"^exact_attributions: expected a release of {tool.__name__} .* but got 99"
    model = nn.MaxPool1d(2)
    if when == "before":
        with pytest.raises(RuntimeError, match=message), exact_attributions(model):
            pass
        return
    monkeypatch.delitem(sys.modules, tool.__name__)
    context = exact_attributions(model)
    context.__enter__()
    monkeypatch.setitem(sys.modules, tool.__name__, tool)
    with pytest.raises(RuntimeError, match=message):
        context.__exit__(None, None, None)


def errors_outside(layers: str, seed: int) -> list[float]:
    """Those of a row of docs/attributions.md, for one of the seeds. Inside there is none."""
    torch.manual_seed(seed)
    first, pipeline = nn.Conv1d(2, 4, 3, bias=False), eval(f"[{layers}]", vars(nn))
    net = nn.Sequential(first, *pipeline, nn.Flatten(), nn.LazyLinear(1, bias=False)).double()
    x, baseline = torch.randn(2, 1, 2, 40, dtype=torch.float64)
    net(x)
    cases = [(tool, scale) for scale in (1, 1e-8) for tool in (deep_lift, deep_explainer)]
    errors = [error(tool, net, scale * x, scale * baseline) for tool, scale in cases]
    with exact_attributions(net):
        for tool, scale in cases:
            assert error(tool, net, scale * x, scale * baseline) < 1e-9
    return errors


@pytest.mark.usefixtures("single_threaded_torch")  # outside, the tools call torch.nn's unpooling
def test_the_table_of_errors() -> None:
    page = (TESTS.parent / "docs/attributions.md").read_text()
    rows = re.findall(r"^\| `(.*)` \| (.*) \| below 1e-9 \|$", page, re.M)
    assert len(rows) == 6
    for layers, said in rows:
        errors = [errors_outside(layers, seed) for seed in range(10)]
        medians = [statistics.median(each) for each in zip(*errors, strict=True)]
        assert said == " | ".join(f"{median:.1%}" for median in medians)


def of_pull_request_1847(folder: Path) -> None:
    """captum's: where an input equals its baseline, each half of the batch has its own gradient."""
    file = folder / "captum/attr/_core/deep_lift.py"
    text = file.read_text()
    assert text.count("grad_input[0], unpool_grad_out_delta") == 1
    file.write_text(text.replace("grad_input[0], unpool", "grad_input, unpool"))


def of_upstream_page(folder: Path) -> None:
    """The patches of docs/upstream.md."""
    page = (TESTS.parent / "docs/upstream.md").read_text()
    patches = "".join(re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S))
    command = ["patch", "--strip=1", "--fuzz=0", "--directory", folder]
    subprocess.run(command, input=patches, text=True, check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("patch") is None, reason="the program patch is not installed")
@pytest.mark.parametrize("change", [of_pull_request_1847, of_upstream_page])
def test_changed_releases(change: Callable[[Path], None], tmp_path: Path) -> None:
    """With copies of captum and shap, tests of this file pass; so do examples of the page.

    With its patches they give the numbers that stand behind "patched:".
    """
    for package in (captum, shap):
        shutil.copytree(Path(package.__file__).parent, tmp_path / package.__name__)
    change(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = "(add_up or multiplier) and not outside"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", words, __file__]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    if change is of_upstream_page:
        page = (TESTS.parent / "docs/upstream.md").read_text()
        patched, count = re.subn(r"(# patched: (.*)\n).*", r"\1\2", page)
        assert count == 5
        (tmp_path / "upstream.md").write_text(patched)
        command = [sys.executable, str(TESTS / "test_docs.py"), str(tmp_path / "upstream.md")]
        subprocess.run(command, env=environment, check=True)
