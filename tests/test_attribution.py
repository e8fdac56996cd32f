# SPDX-License-Identifier: BSD-3-Clause
"""captum's and shap's DeepLIFT: attributions add up to the difference of outputs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exact_attributions import USUAL, usual_network
from torch import Tensor, nn

import maxunpool_cuda

attr = pytest.importorskip("captum.attr", reason="captum is in the extra attribution")
rules = pytest.importorskip("captum.attr._utils.lrp_rules", reason="a part of captum 0.9.0")
shap = pytest.importorskip("shap", reason="shap is in the extra attribution")

Tool = Callable[[nn.Sequential, Tensor, Tensor], Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of the tools about their hooks
    pytest.mark.usefixtures("single_threaded_torch", "gelu"),  # they call torch.nn's unpooling
]


@pytest.fixture
def gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """captum 0.9.0 lacks a rule for GELU; docs/attributions.md adds it in this way."""
    captum = pytest.importorskip("captum.attr._core.deep_lift", reason="a part of captum 0.9.0")
    monkeypatch.setitem(captum.SUPPORTED_NON_LINEAR, nn.GELU, captum.nonlinear)


# Each tool takes a network, one input and several baselines. Its attributions, summed, are the mean
# difference of the outputs of the input and of the baselines.


def deep_lift(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.DeepLift(net).attribute(x.expand_as(baselines), baselines, target=0).mean(0)


def deep_lift_shap(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.DeepLiftShap(net).attribute(x, baselines, target=0)


def deep_explainer(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    explainer = shap.DeepExplainer(net, baselines)
    return torch.from_numpy(explainer.shap_values(x, check_additivity=False))


def neuron_deep_lift(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    """Of the only neuron of the last layer, which is the output."""
    method = attr.NeuronDeepLift(net, net[-1])
    return method.attribute(x.expand_as(baselines), (0,), baselines).mean(0)


def neuron_deep_lift_shap(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    return attr.NeuronDeepLiftShap(net, net[-1]).attribute(x, (0,), baselines)


def layer_deep_lift(layer: int, to_input: bool) -> Tool:
    def attribute(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
        given = (x.expand_as(baselines), baselines)
        method = attr.LayerDeepLift(net, net[layer])
        return method.attribute(*given, target=0, attribute_to_layer_input=to_input).mean(0)

    return attribute


def layer_deep_lift_shap(layer: int, to_input: bool) -> Tool:
    def attribute(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
        method = attr.LayerDeepLiftShap(net, net[layer])
        return method.attribute(x, baselines, target=0, attribute_to_layer_input=to_input)

    return attribute


TOOLS = [deep_lift, deep_lift_shap, deep_explainer]


def case(
    dims: int, window: tuple[int, ...], before: type[nn.Module]
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network, an input and two baselines. Values are fixed, and differ within a tensor.

    Every weight is positive and the input lies above the baselines, so every window adds to the
    output's difference. Windows overlap: the first two of each dimension share the maximum.
    """
    kernel, stride, padding = window
    convolution, pool = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "MaxPool"))
    layers = [convolution(1, 2, 1), before(), pool(*window), nn.Flatten()]
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


def error(tool: Tool, net: nn.Sequential, x: Tensor, baselines: Tensor) -> float:
    """How far the sum of the attributions is from the difference of the outputs."""
    with torch.no_grad():
        difference = (net(x) - net(baselines)).mean()
    return abs(float(tool(net, x, baselines).sum() - difference))


@pytest.mark.parametrize("before", [nn.ReLU, nn.GELU, nn.Identity])
@pytest.mark.parametrize(
    "window",
    [
        pytest.param((3, 1, 0), id="3/1/0"),
        pytest.param((3, 2, 1), id="3/2/1", marks=pytest.mark.slow),
        pytest.param((4, 2, 0), id="4/2/0", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("tool", TOOLS)
def test_attributions_add_up(
    tool: Tool, dims: int, window: tuple[int, ...], before: type[nn.Module]
) -> None:
    """They add up inside alone. If they do outside too, the tool has been mended."""
    net, *given = case(dims, window, before)
    assert error(tool, net, *given) > 0.1
    with maxunpool_cuda.exact_attributions(net):
        assert error(tool, net, *given) < 1e-9
    assert error(tool, net, *given) > 0.1


# The layers of `case` are a convolution, an activation, a pool, Flatten and a linear layer.
@pytest.mark.parametrize("before", [nn.ReLU, nn.GELU, nn.Identity])
@pytest.mark.parametrize(
    "dims", [1, *(pytest.param(dims, marks=pytest.mark.slow) for dims in (2, 3))]
)
@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(neuron_deep_lift, id="NeuronDeepLift"),
        pytest.param(neuron_deep_lift_shap, id="NeuronDeepLiftShap"),
        pytest.param(layer_deep_lift(0, to_input=True), id="convolution's input"),
        pytest.param(layer_deep_lift(0, to_input=False), id="convolution"),
        pytest.param(layer_deep_lift(1, to_input=False), id="activation"),
        pytest.param(layer_deep_lift_shap(0, to_input=True), id="convolution's input, Shap"),
        pytest.param(layer_deep_lift_shap(0, to_input=False), id="convolution, Shap"),
        pytest.param(layer_deep_lift_shap(1, to_input=False), id="activation, Shap"),
    ],
)
def test_attributions_of_layers_and_neurons_add_up(
    tool: Tool, dims: int, before: type[nn.Module]
) -> None:
    net, *given = case(dims, (3, 1, 0), before)
    assert error(tool, net, *given) > 0.1
    with maxunpool_cuda.exact_attributions(net):
        assert error(tool, net, *given) < 1e-9


@pytest.mark.parametrize("variant", [layer_deep_lift, layer_deep_lift_shap])
def test_attributions_of_the_layer_of_a_pool(variant: Callable[..., Tool]) -> None:
    """Those of its output add up; for those of its input captum 0.9.0 takes the gradient."""
    net, *given = case(1, (3, 1, 0), nn.ReLU)
    with maxunpool_cuda.exact_attributions(net):
        assert error(variant(2, to_input=False), net, *given) < 1e-9
        assert error(variant(2, to_input=True), net, *given) > 0.1


@pytest.mark.skipif(torch.__version__ < "2.13", reason="patched does not reach a backward there")
def test_both_halves_are_needed_after_a_relu() -> None:
    """For captum sums alone are not enough, and neither are clones."""
    net, *given = case(1, (3, 1, 0), nn.ReLU)
    with maxunpool_cuda.patched(reduce="sum"):
        assert error(deep_lift, net, *given) > 0.1
    net[2].register_forward_pre_hook(lambda _, inputs: inputs[0].clone())
    assert error(deep_lift, net, *given) > 0.1
    with maxunpool_cuda.patched(reduce="sum"):
        assert error(deep_lift, net, *given) < 1e-9


def pool(dims: int, *window: int) -> nn.Module:
    return getattr(nn, f"MaxPool{dims}d")(*window)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def stage(dims: int, *layers: nn.Module, channels: int = 4) -> list[nn.Module]:
    """A convolution, a BatchNorm and these layers."""
    convolution, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "BatchNorm"))
    return [convolution(channels, 6, 3), norm(6), *layers]


def network(layers: list[nn.Module], x: Tensor) -> nn.Sequential:
    """A network with these layers and two linear ones, with random weights, for inputs like x."""
    head = [nn.Flatten(), nn.LazyLinear(32), relu(), nn.Linear(32, 1)]
    net = nn.Sequential(*layers, *head).double()
    net(torch.randn(8, *x.shape[1:], dtype=x.dtype))  # statistics of the BatchNorm
    return net.eval()


def baselines_of(kind: str, x: Tensor) -> Tensor:
    """Three baselines for ``x``, of shape (1, 4, *sizes)."""
    baselines = torch.randn(3, *x.shape[1:], dtype=x.dtype)
    half = x.shape[2] // 2
    if kind == "half shared":
        baselines[:, :, half:] = x[:, :, half:]
    if kind == "one mutation":
        mutated = x.expand_as(baselines).clone()
        mutated[:, :, half] = baselines[:, :, half]
        return mutated
    return baselines


def three_stages() -> list[nn.Module]:
    first = stage(1, relu(), pool(1, 5, 2))
    second = stage(1, relu(), pool(1, 3, 2, 1), channels=6)
    return [*first, *second, *stage(1, relu(), pool(1, 3, 1), channels=6)]


@pytest.mark.parametrize(
    "kind",
    [
        "random",
        pytest.param("half shared", marks=pytest.mark.slow),
        pytest.param("one mutation", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        pytest.param([40], lambda: stage(1, relu(), pool(1, 5, 2)), id="one stage"),
        pytest.param([90], three_stages, id="three stages"),
        pytest.param([40], lambda: stage(1, relu(), pool(1, 5, 2), pool(1, 3, 1)), id="two pools"),
        pytest.param([40], lambda: stage(1, pool(1, 5, 2), relu()), id="a pool before ReLU"),
        pytest.param(
            [40],
            lambda: stage(1, relu(), maxunpool_cuda.MaxPool1d(5, 2)),
            id="this package's pool",
        ),
        pytest.param(
            [40],
            lambda: stage(1, relu(), pool(1, 3, 1), nn.AdaptiveMaxPool1d(9)),
            id="an adaptive pool",
        ),
        pytest.param([12, 12], lambda: stage(2, relu(), pool(2, 3, 2, 1)), id="images"),
        pytest.param([12, 12], lambda: stage(2, pool(2, 3, 2), relu()), id="images, pool first"),
        pytest.param([8, 8, 8], lambda: stage(3, relu(), pool(3, 3, 1)), id="volumes"),
        pytest.param(
            [8, 8, 8],
            lambda: stage(3, relu(), pool(3, 2, 1), nn.AdaptiveMaxPool3d(1)),
            id="volumes, global pool",
        ),
    ],
)
@pytest.mark.parametrize("tool", TOOLS)
def test_attributions_of_usual_networks_add_up(
    tool: Tool, sizes: list[int], layers: Callable[[], list[nn.Module]], kind: str
) -> None:
    """Their ReLUs work in place, for which shap raises an error outside."""
    x = torch.randn(1, 4, *sizes, dtype=torch.float64)
    given = (network(layers(), x), x, baselines_of(kind, x))
    if tool is deep_explainer:
        with pytest.raises(RuntimeError, match="is being modified inplace"):
            error(tool, *given)
    else:
        assert error(tool, *given) > 1e-5
    with maxunpool_cuda.exact_attributions(given[0]):
        assert error(tool, *given) < 1e-9


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("tool", TOOLS)
def test_attributions_of_networks_with_branches_add_up(tool: Tool, kind: str) -> None:
    """Modules work in place and are called by keyword. shap refuses ``+=``, also outside."""
    net = usual_network(kind)
    x, *baselines = torch.randn(4, 1, 4, 8, 8, dtype=torch.float64)
    with maxunpool_cuda.exact_attributions(net):
        if (tool, kind) == (deep_explainer, "ResNet"):
            with pytest.raises(RuntimeError, match="is being modified inplace"):
                error(tool, net, x, torch.cat(baselines))
        else:
            assert error(tool, net, x, torch.cat(baselines)) < 1e-9


@pytest.mark.parametrize("tool", TOOLS)
def test_pools_whose_inputs_equal_those_of_the_baseline(tool: Tool) -> None:
    """The second pool's do in one place. An example and its baseline need one multiplier there."""
    convolution = nn.Conv1d(1, 1, 2, stride=2, bias=False)
    nn.init.ones_(convolution.weight)
    layers = [nn.MaxPool1d(2), convolution, nn.MaxPool1d(2), nn.Flatten()]
    x, baseline = torch.tensor([[[5.0, 0, 1, 0, 4, 0, 0, 0]], [[1, 0, 5, 0, 7, 0, 2, 0]]]).split(1)
    with maxunpool_cuda.exact_attributions(nn.Sequential(*layers)) as net:
        assert tool(net, x, baseline.repeat(2, 1, 1)).sum().item() == pytest.approx(-3)


Method = Callable[[nn.Sequential, Tensor, Tensor], Tensor]


def lrp(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    """captum 0.9.0 has no default rule for some layers."""
    for layer in net:
        if isinstance(layer, (nn.Conv1d, nn.BatchNorm1d, nn.Flatten)):
            layer.rule = rules.EpsilonRule()
    return attr.LRP(net).attribute(x)


def gradient_explainer(net: nn.Sequential, x: Tensor, baselines: Tensor) -> Tensor:
    """shap 0.51.0 makes float32 of all inputs."""
    net, x, baselines = net.float(), x.float(), baselines.float()
    values = shap.GradientExplainer(net, baselines).shap_values(x, nsamples=5, rseed=1)
    return torch.from_numpy(values)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(lambda net, x, _: attr.Saliency(net).attribute(x), id="Saliency"),
        pytest.param(lambda net, x, _: attr.InputXGradient(net).attribute(x), id="InputXGradient"),
        pytest.param(
            lambda net, x, baselines: attr.IntegratedGradients(net).attribute(x, baselines[:1]),
            id="IntegratedGradients",
        ),
        pytest.param(lambda net, x, _: attr.LayerGradCam(net, net[0]).attribute(x), id="GradCAM"),
        pytest.param(
            lambda net, x, _: attr.GuidedGradCam(net, net[0]).attribute(x), id="GuidedGradCam"
        ),
        pytest.param(lambda net, x, _: attr.GuidedBackprop(net).attribute(x), id="GuidedBackprop"),
        pytest.param(lambda net, x, _: attr.Deconvolution(net).attribute(x), id="Deconvolution"),
        pytest.param(lrp, id="LRP"),
        pytest.param(
            lambda net, x, _: attr.Occlusion(net).attribute(x, (4, *[3] * (x.ndim - 2))),
            id="Occlusion",
        ),
        pytest.param(
            gradient_explainer,
            id="GradientExplainer",
        ),
    ],
)
def test_other_methods_give_the_same_numbers(method: Method, dims: int) -> None:
    """To rounding: torch.nn's gradient of pooling may add up in another order."""
    x, *baselines = torch.randn(4, 1, 4, *[16] * dims, dtype=torch.float64)
    layers = [*stage(dims, nn.ReLU(), pool(dims, 3, 2)), nn.ReLU(), pool(dims, 2, 1)]
    net = network(layers, x)
    net[-2].inplace = False
    outside = method(net, x, torch.cat(baselines))
    with maxunpool_cuda.exact_attributions(net):
        inside = method(net, x, torch.cat(baselines))
    assert outside.abs().max() > 1e-6
    torch.testing.assert_close(inside, outside, rtol=1e-12, atol=1e-14)


def test_the_lines_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """They print what they say."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (lines,) = re.findall(r"^```py\n(.*?)^```", readme, re.M | re.S)
    names: dict[str, Any] = {}
    exec(lines, names)
    printed = [float(line) for line in capsys.readouterr().out.splitlines()]
    said = [float(number) for number in re.findall(r"print\(.*\)  # (-?[.\d]+)", lines)]
    assert printed[0] == pytest.approx(said[0], abs=5e-4)
    assert abs(printed[1]) < 1e-12
    assert said[1] == 0
    model, x, baseline = (names[name] for name in ("model", "x", "baseline"))
    sentence = " ".join(readme.split())
    assert f"outputs differ by {(model(x) - model(baseline)).item():.3f}" in sentence
    assert f"error from {-said[0]} to 0" in sentence


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("patch") is None, reason="the program patch is not installed")
def test_the_patches_of_the_upstream_page(tmp_path: Path) -> None:
    """In copies of captum and shap, examples give the numbers that stand behind "patched:"."""
    tests = Path(__file__).parent
    page = (tests.parent / "docs" / "upstream.md").read_text()
    for package in (sys.modules["captum"], shap):
        shutil.copytree(Path(package.__file__).parent, tmp_path / package.__name__)
    patches = "".join(re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S))
    command = ["patch", "--strip=1", "--fuzz=0", "--directory", tmp_path]
    subprocess.run(command, input=patches, text=True, check=True)
    patched, count = re.subn(r"(# patched: (.*)\n).*", r"\1\2", page)
    assert count == 5
    (tmp_path / "upstream.md").write_text(patched)
    command = [sys.executable, tests / "test_docs.py", tmp_path / "upstream.md"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)
