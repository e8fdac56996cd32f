# SPDX-License-Identifier: BSD-3-Clause
"""The networks that are timed, and those whose training is measured.

They have the layers and the widths that were published, and random weights.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512, 512)  # channels of the encoder's stages
DEPTHS = (2, 2, 3, 3, 3)  # convolutions of each


def stage(*widths: int) -> nn.Sequential:
    """A convolution from each width to the next, with batch normalization and ReLU."""
    layers = nn.Sequential()
    for inputs, outputs in pairwise(widths):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        layers.extend([convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)])
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


def vgg16(hidden: int = 4096) -> nn.Sequential:
    """VGG-16 (Simonyan and Zisserman, 2014): five pools of 2x2. Images are 224x224."""
    network = nn.Sequential()
    for (before, width), depth in zip(pairwise((3, *WIDTHS)), DEPTHS, strict=True):
        for inputs, outputs in pairwise((before, *[width] * depth)):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
            network.extend([convolution, nn.ReLU(inplace=True)])
        network.append(nn.MaxPool2d(2))
    network.extend([nn.AdaptiveAvgPool2d(7), nn.Flatten()])
    for inputs, outputs in pairwise((WIDTHS[-1] * 7 * 7, hidden, hidden)):
        network.extend([nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout()])
    return network.append(nn.Linear(hidden, 1000))


class UNet3d(nn.Module):
    """A U-Net with the layers of MONAI's ``BasicUNet``: four pools of 2x2x2.

    ``(N, 1, D, H, W)`` to scores, ``(N, 2, D, H, W)``, of sizes that 16 divides. MONAI's has its
    activations in place.
    """

    def __init__(
        self, widths: Sequence[int] = (32, 32, 64, 128, 256), in_place: bool = False
    ) -> None:
        super().__init__()
        self.in_place = in_place
        self.pool = nn.MaxPool3d(2)
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        self.upsamplings = nn.ModuleList()
        for before, width in pairwise((1, *widths)):
            self.encoder.append(self.stage(before, width))
        for below, width in pairwise(reversed(widths)):
            self.upsamplings.append(nn.ConvTranspose3d(below, width, 2, stride=2))
            self.decoder.append(self.stage(2 * width, width))
        self.scores = nn.Conv3d(widths[0], 2, 1)

    def stage(self, inputs: int, outputs: int) -> nn.Sequential:
        """Two convolutions with instance normalization and LeakyReLU."""
        layers = nn.Sequential()
        for before, width in pairwise((inputs, outputs, outputs)):
            convolution = nn.Conv3d(before, width, 3, padding=1)
            norm = nn.InstanceNorm3d(width, affine=True)
            layers.extend([convolution, norm, nn.LeakyReLU(0.1, self.in_place)])
        return layers

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for stage in self.encoder[:-1]:
            x = stage(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.encoder[-1](x)
        for upsample, stage in zip(self.upsamplings, self.decoder, strict=True):
            x = stage(torch.cat((skipped.pop(), upsample(x)), 1))
        return self.scores(x)


def airbench(widths: Sequence[int] = (64, 256, 256)) -> nn.Sequential:
    """airbench94 (Jordan, 2024) for 32x32 images: three pools of 2x2 and one of 3x3, and GELU.

    Its pools come right after convolutions. Here all of its weights are trained.
    """
    network = nn.Sequential(nn.Conv2d(3, 24, 2), nn.GELU())
    for inputs, outputs in pairwise((24, *widths)):
        first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        network.extend([first, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.GELU()])
        network.extend([second, nn.BatchNorm2d(outputs), nn.GELU()])
    return network.extend([nn.MaxPool2d(3), nn.Flatten(), nn.Linear(widths[-1], 10, bias=False)])


def normed(inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """A convolution with batch normalization."""
    padding = kernel_size // 2
    convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, of which the outer ones have 1x1 windows."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        narrow = normed(inputs, width, 1).append(nn.ReLU(inplace=True))
        spatial = normed(width, width, 3, stride).append(nn.ReLU(inplace=True))
        self.layers = nn.Sequential(narrow, spatial, normed(width, 4 * width, 1))
        self.shortcut: nn.Module = nn.Identity()
        if inputs != 4 * width:
            self.shortcut = normed(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).add_(self.shortcut(x)).relu_()


def resnet50(depths: Sequence[int] = (3, 4, 6, 3)) -> nn.Sequential:
    """ResNet-50 (He et al., 2015), whose blocks stride as torchvision's do: one pool of 3x3."""
    network = normed(3, 64, 7, 2).extend([nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)])
    channels = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            network.append(Bottleneck(channels, 64 * 2**stage, stride))
            channels = 4 * 64 * 2**stage
    return network.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)])
