# SPDX-License-Identifier: BSD-3-Clause
"""captum's and shap's DeepLIFT: attributions add up to the difference of outputs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxunpool_cuda
from maxunpool_cuda import exact_attributions

attr = pytest.importorskip("captum.attr", reason="captum is in the extra attribution")
shap = pytest.importorskip("shap", reason="shap is in the extra attribution")

# Takes a network, one input and several baselines, and returns attributions for each baseline, or
# their mean.
Tool = Callable[[nn.Sequential, Tensor, Tensor], Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of the tools about their hooks
    pytest.mark.usefixtures("single_threaded_torch"),  # they call torch.nn's unpooling
]


def deep_lift(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.DeepLift(net).attribute(x.expand_as(baselines), baselines, target=0)


def deep_lift_shap(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.DeepLiftShap(net).attribute(x, baselines, target=0)


def deep_explainer(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    explainer = shap.DeepExplainer(net, baselines)
    return torch.from_numpy(explainer.shap_values(x, check_additivity=False))


each_tool = pytest.mark.parametrize("tool", [deep_lift, deep_lift_shap, deep_explainer])


def error(tool: Tool, net: nn.Sequential, x: Tensor, baselines: Tensor) -> float:
    """How far the sum of the attributions is from the difference of the outputs."""
    with torch.no_grad():
        difference = (net(x) - net(baselines)).mean()
    return abs(float(tool(net, x, baselines).mean(0).sum() - difference))


def case(dims: int, before: type[nn.Module]) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network whose windows share the input's largest element, an input and two baselines.

    Every weight is positive and the input lies above the baselines, so every window adds to the
    output's difference.
    """
    convolution, pool = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "MaxPool"))
    layers = [convolution(1, 2, 1), before(), pool(3, 1), nn.Flatten(), nn.LazyLinear(1)]
    net = nn.Sequential(*layers).double()
    x, *baselines = torch.rand(3, 1, 1, *[5] * dims, dtype=torch.float64)
    x += 3
    x[(0, 0, *[2] * dims)] = 5
    net(x)
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    return net, x, torch.cat(baselines)


@pytest.mark.parametrize("before", [nn.ReLU, nn.Identity])
@pytest.mark.parametrize("dims", [1, 2, 3])
@each_tool
def test_attributions_add_up(tool: Tool, dims: int, before: type[nn.Module]) -> None:
    """They add up inside alone. If they do outside too, the tool has been mended."""
    given = case(dims, before)
    assert error(tool, *given) > 0.1
    with exact_attributions(given[0]):
        assert error(tool, *given) < 1e-9
    assert error(tool, *given) > 0.1


def neuron_deep_lift(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    """Of the only neuron of the last layer, which is the output."""
    return attr.NeuronDeepLift(net, net[-1]).attribute(x.expand_as(baselines), (0,), baselines)


def layer_deep_lift_shap(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    """Of the output of the module before the pool."""
    return attr.LayerDeepLiftShap(net, net[1]).attribute(x, baselines, target=0)


@pytest.mark.parametrize("tool", [neuron_deep_lift, layer_deep_lift_shap])
def test_attributions_of_layers_and_neurons_add_up(tool: Tool) -> None:
    given = case(1, nn.ReLU)
    assert error(tool, *given) > 0.1
    with exact_attributions(given[0]):
        assert error(tool, *given) < 1e-9


class Skip(nn.Sequential):
    """Its input goes on beside its output."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([input, super().forward(input)], 1)


class ByKeyword(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = layer(input=input)
        return input


def stage(dims: int, *layers: nn.Module, channels: int = 4) -> list[nn.Module]:
    """A convolution, a BatchNorm and these layers."""
    convolution, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "BatchNorm"))
    return [convolution(channels, 6, 3), norm(6), *layers]


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def three_stages() -> list[nn.Module]:
    first = stage(1, relu(), nn.MaxPool1d(5, 2))
    second = stage(1, nn.MaxPool1d(3, 2, 1), relu(), channels=6)
    return [*first, *second, *stage(1, relu(), nn.MaxPool1d(3, 1), nn.MaxPool1d(2, 1), channels=6)]


def own_and_adaptive() -> list[nn.Module]:
    return stage(1, relu(), maxunpool_cuda.MaxPool1d(3, 1), nn.AdaptiveMaxPool1d(9))


# The sizes of an input of four channels, and the layers before the head.
NETWORKS: dict[str, tuple[list[int], Callable[[], list[nn.Module]]]] = {
    "three stages": ([90], three_stages),
    "own and adaptive pools": ([40], own_and_adaptive),
    "a global pool of volumes": ([8, 8, 8], lambda: stage(3, relu(), nn.AdaptiveMaxPool3d(1))),
    "a skip connection": ([9, 9], lambda: stage(2, relu(), Skip(nn.MaxPool2d(3, 1, 1), relu()))),
    "by keyword": ([40], lambda: [ByKeyword(*stage(1, relu(), nn.MaxPool1d(3, 1)))]),
}


def network(layers: list[nn.Module], x: Tensor) -> nn.Sequential:
    """A network with these layers and two linear ones, with random weights, for inputs like x."""
    net = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(32), relu(), nn.Linear(32, 1)).double()
    net(torch.randn(8, *x.shape[1:], dtype=x.dtype))  # statistics of the BatchNorm
    return net.eval()


@pytest.mark.parametrize("kind", NETWORKS)
@each_tool
def test_attributions_of_usual_networks_add_up(tool: Tool, kind: str) -> None:
    """Modules work in place, for which shap raises an error outside."""
    sizes, layers = NETWORKS[kind]
    x, *baselines = torch.randn(4, 1, 4, *sizes, dtype=torch.float64)
    net = network(layers(), x)
    with exact_attributions(net):
        assert error(tool, net, x, torch.cat(baselines)) < 1e-9


@pytest.mark.parametrize("method", [attr.Saliency, attr.GuidedBackprop])
def test_methods_without_rules_of_deep_lift_give_the_same_numbers(method: Any) -> None:
    """To rounding: torch.nn's gradient of pooling may add up in another order."""
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    net = network(stage(1, nn.ReLU(), nn.MaxPool1d(3, 2), nn.ReLU(), nn.MaxPool1d(2, 1)), x)
    net[-2].inplace = False
    outside = method(net).attribute(x)
    with exact_attributions(net):
        inside = method(net).attribute(x)
    assert outside.abs().max() > 1e-6
    torch.testing.assert_close(inside, outside, rtol=1e-12, atol=1e-14)


def test_the_lines_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """They print what they say."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (lines,) = re.findall(r"^```py\n(.*?)^```", readme, re.M | re.S)
    exec(lines, {})
    printed = [float(line) for line in capsys.readouterr().out.splitlines()]
    said = [float(number) for number in re.findall(r"print\(.*\)  # (-?[.\d]+)", lines)]
    assert printed == pytest.approx(said, abs=5e-4)
    assert abs(printed[1]) < 1e-12
    assert f"error from {-said[0]} to 0" in " ".join(readme.split())
