# SPDX-License-Identifier: BSD-3-Clause
"""The networks that are timed, and those whose training is measured.

They have the layers and the widths that were published, and random weights.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512, 512)  # channels of VGG's stages, and of the encoder of SegNet
DEPTHS = (2, 2, 3, 3, 3)  # convolutions of each, in VGG-16


def stage(*widths: int, norm: bool = True) -> nn.Sequential:
    """A convolution from each width to the next, with ReLU, and batch normalization before it."""
    layers = nn.Sequential()
    for inputs, outputs in pairwise(widths):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not norm))
        if norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU(inplace=True))
    return layers


class SegNet(nn.Module):
    """Badrinarayanan, Kendall and Cipolla, 2015: VGG16's encoder, and its mirror image.

    ``(N, 3, H, W)`` to scores, ``(N, 12, H, W)``, of any sizes from 32 on.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, depths: Sequence[int] = DEPTHS) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        for (before, width), depth in zip(pairwise((3, *widths)), depths, strict=True):
            self.encoder.append(stage(before, *[width] * depth))
        for (before, width), depth in zip(pairwise((widths[0], *widths)), depths, strict=True):
            self.decoder.append(stage(*[width] * depth, before))
        self.pools = nn.ModuleList(nn.MaxPool2d(2, return_indices=True) for _ in widths)
        self.unpools = nn.ModuleList(nn.MaxUnpool2d(2) for _ in widths)
        self.scores = nn.Conv2d(widths[0], 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage, pool in zip(self.encoder, self.pools, strict=True):
            x = stage(x)
            size = x.shape[-2:]
            x, indices = pool(x)
            kept.append((indices, size))
        for stage, unpool in zip(reversed(self.decoder), reversed(self.unpools), strict=True):
            indices, size = kept.pop()
            x = stage(unpool(x, indices, output_size=size))
        return self.scores(x)


def vgg_stages(depths: Sequence[int], norm: bool) -> nn.Sequential:
    """The convolutions of VGG (Simonyan and Zisserman, 2014), and five pools of 2x2."""
    network = nn.Sequential()
    for (before, width), depth in zip(pairwise((3, *WIDTHS)), depths, strict=True):
        network.extend([*stage(before, *[width] * depth, norm=norm), nn.MaxPool2d(2)])
    return network


def vgg11() -> nn.Sequential:
    """VGG-11 with batch normalization, and one linear layer."""
    network = vgg_stages((1, 1, 2, 2, 2), norm=True)
    return network.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 1000)])


def vgg16(hidden: int = 4096) -> nn.Sequential:
    """VGG-16. Images are 224x224."""
    network = vgg_stages(DEPTHS, norm=False).extend([nn.AdaptiveAvgPool2d(7), nn.Flatten()])
    for inputs, outputs in pairwise((WIDTHS[-1] * 7 * 7, hidden, hidden)):
        network.extend([nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout()])
    return network.append(nn.Linear(hidden, 1000))


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
