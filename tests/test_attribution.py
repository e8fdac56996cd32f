# SPDX-License-Identifier: BSD-3-Clause
"""captum's and shap's DeepLIFT: attributions add up to the difference of outputs."""

import re
from collections.abc import Callable
from pathlib import Path

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


def deep_explainer(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    explainer = shap.DeepExplainer(net, baselines)
    return torch.from_numpy(explainer.shap_values(x, check_additivity=False))


def layer_deep_lift_shap(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    """Of the output of the second module."""
    return attr.LayerDeepLiftShap(net, net[1]).attribute(x, baselines, target=0)


def error(tool: Tool, net: nn.Sequential, x: Tensor, baselines: Tensor) -> float:
    """How far the sum of the attributions is from the difference of the outputs."""
    with torch.no_grad():
        difference = (net(x) - net(baselines)).mean()
    return abs(float(tool(net, x, baselines).mean(0).sum() - difference))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("tool", [deep_lift, deep_explainer, layer_deep_lift_shap])
def test_attributions_add_up(tool: Tool, dims: int) -> None:
    """They add up inside alone. If they do outside too, the tool has been mended.

    All windows share the input's largest element. Every weight is positive and the input lies above
    the baselines, so every window adds to the output's difference.
    """
    convolution, pool = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "MaxPool"))
    layers = [convolution(1, 2, 1), nn.ReLU(), pool(3, 1), nn.Flatten(), nn.LazyLinear(1)]
    net = nn.Sequential(*layers).double()
    x, *baselines = torch.rand(3, 1, 1, *[5] * dims, dtype=torch.float64)
    x += 3
    x[(0, 0, *[2] * dims)] = 5
    net(x)
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    given = (net, x, torch.cat(baselines))
    assert error(tool, *given) > 0.1
    with exact_attributions(net):
        assert error(tool, *given) < 1e-9
    assert error(tool, *given) > 0.1


class SkipByKeyword(nn.Sequential):
    """Its input goes on beside its output."""

    def forward(self, input: Tensor) -> Tensor:
        output = input
        for layer in self:
            output = layer(input=output)
        return torch.cat([input, output], 1)


def pools_in_a_row() -> tuple[nn.Module, ...]:
    return (
        nn.Conv1d(4, 6, 3),
        nn.BatchNorm1d(6),
        nn.ReLU(inplace=True),
        maxunpool_cuda.MaxPool1d(3, 1),
        nn.AdaptiveMaxPool1d(18),
        nn.ReLU(inplace=True),
        nn.MaxPool1d(5, 2),
    )


def a_skip_connection() -> tuple[nn.Module, ...]:
    return nn.Conv1d(4, 6, 3), SkipByKeyword(nn.MaxPool1d(3, 1, 1), nn.ReLU(inplace=True))


@pytest.mark.parametrize(("size", "layers"), [(40, pools_in_a_row), (10, a_skip_connection)])
@pytest.mark.parametrize("tool", [deep_lift, deep_explainer])
def test_attributions_of_usual_networks_add_up(
    tool: Tool, size: int, layers: Callable[[], tuple[nn.Module, ...]]
) -> None:
    """Modules work in place, for which shap raises an error outside."""
    x, *baselines = torch.randn(4, 1, 4, size, dtype=torch.float64)
    net = nn.Sequential(*layers(), nn.Flatten(), nn.LazyLinear(1)).double().eval()
    net(x)
    with exact_attributions(net):
        assert error(tool, net, x, torch.cat(baselines)) < 1e-9


def test_the_lines_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """They print what they say."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (lines,) = re.findall(r"^```py\n(.*?)^```", readme, re.M | re.S)
    exec(lines, {})
    printed = [float(line) for line in capsys.readouterr().out.splitlines()]
    said = [float(number) for number in re.findall(r"print\(.*\)  # (-?[.\d]+)", lines)]
    assert printed == pytest.approx(said, abs=5e-4)
