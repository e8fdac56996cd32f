"""captum's and shap's DeepLIFT: attributions add up to the difference of outputs."""

import re
from collections.abc import Callable
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

ROOT = Path(__file__).parent.parent
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
# Kernel size, stride and, if there is any, padding: windows overlap.
WINDOWS = [(4, 2), (10, 5), (3, 1), (3, 2), (3, 2, 1)]


def deep_lift(net: nn.Module, x: Tensor, baselines: Tensor) -> Tensor:
    each = [attr.DeepLift(net).attribute(x, baseline[None], target=0) for baseline in baselines]
    return torch.stack(each).mean(0)


def deep_lift_shap(net: nn.Module, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.DeepLiftShap(net).attribute(x, baselines, target=0)


def deep_explainer(net: nn.Module, x: Tensor, baselines: Tensor) -> Tensor:
    explainer = shap.DeepExplainer(net, baselines)
    return torch.from_numpy(explainer.shap_values(x, check_additivity=False))


TOOLS = (deep_lift, deep_lift_shap, deep_explainer)
CAPTUM = TOOLS[:2]
Tool = Callable[[nn.Module, Tensor, Tensor], Tensor]


def case(dims: int, window: tuple[int, ...], relu: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, an input and two baselines. Values are fixed, and differ within a tensor.

    Every weight is positive and the input lies above the baselines, so every window adds to the
    output's difference. The input's maximum lies in the first two windows of each dimension.
    """
    kernel, stride, padding = (*window, 0)[:3]
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](1, 2, 1, dtype=torch.float64)
    torch.nn.init.constant_(convolution.weight, 0.5)
    torch.nn.init.constant_(convolution.bias, 0.25)
    last = nn.LazyLinear(1, dtype=torch.float64)
    middle = [nn.ReLU()] * relu
    net = nn.Sequential(convolution, *middle, POOLS[dims - 1](*window), nn.Flatten(), last)
    shape = (1, *[kernel + 2 * stride] * dims)
    x, *baselines = (
        (torch.arange(shape[1] ** dims, dtype=torch.float64) * step).sin().view(shape) + offset
        for step, offset in ((1, 3.0), (2, 0.0), (3, 0.5))
    )
    x[(0, *[kernel - padding - 1] * dims)] = 5
    net(x[None])
    torch.nn.init.constant_(last.weight, 1.0)
    return net, x[None], torch.stack(baselines)


def error(tool: Tool, net: nn.Module, x: Tensor, baselines: Tensor) -> float:
    """How far the sum of the attributions is from the difference of the outputs."""
    with torch.no_grad():
        difference = (net(x) - net(baselines)).mean()
    return abs(float(tool(net, x, baselines).sum() - difference))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("tool", TOOLS)
def test_attributions_add_up(tool: Any, dims: int, window: tuple[int, ...], relu: bool) -> None:
    """They add up inside patched alone. If they do outside too, the tool has been mended."""
    net, *given = case(dims, window, relu)
    assert error(tool, net, *given) > 0.1
    if relu and tool in CAPTUM:  # captum misses its rule for a pool that follows a ReLU
        with maxunpool_cuda.patched(reduce="sum"):
            assert error(tool, net, *given) > 0.1
        net[2].register_forward_pre_hook(lambda _, inputs: inputs[0].clone())
        assert error(tool, net, *given) > 0.1
    with maxunpool_cuda.patched(reduce="sum"):
        assert error(tool, net, *given) < 1e-9


def test_converted_pools() -> None:
    """captum has no rule for these classes and takes their gradient. shap knows the class names."""
    net, *given = case(2, (3, 2), relu=False)
    maxunpool_cuda.replace_max_pooling(net)
    with maxunpool_cuda.patched(reduce="sum"):
        assert error(deep_lift, net, *given) > 0.1
        assert error(deep_explainer, net, *given) < 1e-9
        assert error(deep_lift, maxunpool_cuda.restore_max_pooling(net), *given) < 1e-9


def test_the_lines_of_the_readme() -> None:
    (lines,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(lines, names)
    model, x, baseline = (names[name] for name in ("model", "x", "baseline"))
    difference = (model(x) - model(baseline)).item()
    assert names["attributions"].sum().item() == pytest.approx(difference, rel=1e-4, abs=1e-5)
