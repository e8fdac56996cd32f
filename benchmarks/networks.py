"""Whole networks: with the max pooling of torch.nn and of this package, eager and compiled."""

from itertools import pairwise

import torch
from torch import Tensor, nn

import maxunpool_cuda

from .cases import Case
from .contenders import OURS, TORCH, Call
from .segnet import WIDTHS, stage


class Fire(nn.Module):
    """SqueezeNet's module: few channels, then eight times as many."""

    def __init__(self, inputs: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1 = nn.Conv2d(squeezed, 4 * squeezed, 1)
        self.expand3 = nn.Conv2d(squeezed, 4 * squeezed, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat((self.expand1(x), self.expand3(x)), 1).relu()


def squeezenet() -> nn.Sequential:
    """SqueezeNet 1.1 (Iandola et al., 2016), without dropout: three pools of 3x3, stride 2."""
    network, channels = nn.Sequential(nn.Conv2d(3, 64, 3, stride=2), nn.ReLU()), 64
    for squeezes in ((16, 16), (32, 32), (48, 48, 64, 64)):
        network.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        for squeezed in squeezes:
            network.append(Fire(channels, squeezed))
            channels = 8 * squeezed
    return network.extend([nn.Conv2d(channels, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)])


def vgg() -> nn.Sequential:
    """VGG-11 (Simonyan and Zisserman, 2014) with one linear layer: five pools of 2x2."""
    network = nn.Sequential()
    for (before, width), depth in zip(pairwise((3, *WIDTHS)), (1, 1, 2, 2, 2), strict=True):
        network.extend([stage(before, *[width] * depth), nn.MaxPool2d(2)])
    return network.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 1000)])


NETWORKS = {"squeezenet": squeezenet, "vgg": vgg}


def _call(case: Case, device: str, name: str) -> Call:
    """The network's output, and in training the gradients of its parameters, as the name says."""
    torch.manual_seed(0)
    model = NETWORKS[case.family]().to(device).train(case.direction == "training")
    image = torch.randn(case.shape, device=device)
    if case.layout == "channels_last":
        model, image = (x.to(memory_format=torch.channels_last) for x in (model, image))
    if OURS in name:
        maxunpool_cuda.replace_max_pooling(model)
    forward = torch.compile(model, dynamic=False) if "compile" in name else model

    def call() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(model.training):
            output = forward(image)
        grads = torch.autograd.grad(output.sum(), [*model.parameters()]) if model.training else ()
        return output.detach(), *grads

    return call


def calls(case: Case, device: str) -> dict[str, list[Call]]:
    """Everyone's call. Eager results must be equal; compiled ones are rounded in other places."""
    made: dict[str, list[Call]] = {}
    for name in (TORCH, OURS, "torch.compile", f"{OURS}, torch.compile"):
        made[name] = [_call(case, device, name)]
        for result, expected in zip(made[name][0](), made[TORCH][0](), strict=True):
            allowed = 1e-3 * ("compile" in name) * expected.abs().max()
            if not (result - expected).abs().max() <= allowed:
                raise RuntimeError(f"{name} does not return torch.nn's result of {case.name}")
    return made
