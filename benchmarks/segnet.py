"""SegNet (Badrinarayanan, Kendall and Cipolla, 2015): VGG16's encoder, and its mirror image."""

from collections.abc import Sequence
from itertools import pairwise

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
    """``(N, 3, H, W)`` to scores, ``(N, 12, H, W)``, of any sizes from 32 on."""

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
