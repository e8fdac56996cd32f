"""captum's and shap's DeepLIFT: attributions add up to the difference of outputs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxunpool_cuda

attr = pytest.importorskip("captum.attr", reason="captum is in the extra attribution")
shap = pytest.importorskip("shap", reason="shap is in the extra attribution")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of the tools about their hooks
    pytest.mark.usefixtures("single_threaded_torch"),  # they call torch.nn's unpooling
]


def deep_lift(net: nn.Module, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.DeepLift(net).attribute(x.expand_as(baselines), baselines, target=0).mean(0)


def deep_lift_shap(net: nn.Module, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.DeepLiftShap(net).attribute(x, baselines, target=0)


def deep_explainer(net: nn.Module, x: Tensor, baselines: Tensor) -> Tensor:
    explainer = shap.DeepExplainer(net, baselines)
    return torch.from_numpy(explainer.shap_values(x, check_additivity=False))


def case(dims: int, window: tuple[int, ...], relu: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, an input and two baselines. Values are fixed, and differ within a tensor.

    Every weight is positive and the input lies above the baselines, so every window adds to the
    output's difference. Windows overlap: the first two of each dimension share the maximum.
    """
    kernel, stride, padding = window
    convolution, pool = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "MaxPool"))
    layers = [convolution(1, 2, 1), *[nn.ReLU()] * relu, pool(*window), nn.Flatten()]
    net = nn.Sequential(*layers, nn.LazyLinear(1)).double()
    shape = (1, *[kernel + 2 * stride] * dims)
    x, *baselines = (
        (torch.arange(shape[1] ** dims, dtype=torch.float64) * step).sin().view(shape) + offset
        for step, offset in ((1, 3.0), (2, 0.0), (3, 0.5))
    )
    x[(0, *[kernel - padding - 1] * dims)] = 5
    net(x[None])
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    return net, x[None], torch.stack(baselines)


def error(tool: Any, net: nn.Module, x: Tensor, baselines: Tensor) -> float:
    """How far the sum of the attributions is from the difference of the outputs."""
    with torch.no_grad():
        difference = (net(x) - net(baselines)).mean()
    return abs(float(tool(net, x, baselines).sum() - difference))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("window", [(4, 2, 0), (3, 1, 0), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("tool", [deep_lift, deep_lift_shap, deep_explainer])
def test_attributions_add_up(tool: Any, dims: int, window: tuple[int, ...], relu: bool) -> None:
    """They add up inside patched alone. If they do outside too, the tool has been mended."""
    net, *given = case(dims, window, relu)
    assert error(tool, net, *given) > 0.1
    if relu and tool is not deep_explainer:
        # captum misses its rule for a pool that follows a ReLU.
        with maxunpool_cuda.patched(reduce="sum"):
            assert error(tool, net, *given) > 0.1
        net[2].register_forward_pre_hook(lambda _, inputs: inputs[0].clone())
        assert error(tool, net, *given) > 0.1
    with maxunpool_cuda.patched(reduce="sum"):
        assert error(tool, net, *given) < 1e-9


def test_the_lines_of_the_readme() -> None:
    readme, names = Path(__file__).parent.parent / "README.md", dict[str, Any]()
    (lines,) = re.findall(r"^```py\n(.*?)^```", readme.read_text(), re.M | re.S)
    exec(lines, names)
    model, x, baseline = (names[name] for name in ("model", "x", "baseline"))
    difference = (model(x) - model(baseline)).item()
    assert names["attributions"].sum().item() == pytest.approx(difference, rel=1e-4, abs=1e-5)
