"""SegNet (Badrinarayanan, Kendall and Cipolla, 2015): VGG16's encoder, and its mirror image.

Every pool hands its indices to the unpool across from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512, 512)  # channels of the encoder's stages
DEPTHS = (2, 2, 3, 3, 3)  # convolutions of each


def _stage(widths: Sequence[int]) -> nn.Sequential:
    def layers() -> Iterator[nn.Module]:
        for inputs, outputs in itertools.pairwise(widths):
            yield nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            yield nn.BatchNorm2d(outputs)
            yield nn.ReLU(inplace=True)

    return nn.Sequential(*layers())


class SegNet(nn.Module):
    """``(N, channels, H, W)`` to scores, ``(N, classes, H, W)``, of any sizes from 32 on."""

    def __init__(
        self,
        channels: int = 3,
        classes: int = 12,
        widths: Sequence[int] = WIDTHS,
        depths: Sequence[int] = DEPTHS,
    ) -> None:
        super().__init__()
        inputs = (channels, *widths)
        self.encoder = nn.ModuleList(
            _stage((before, *(width,) * depth))
            for before, width, depth in zip(inputs, widths, depths, strict=False)
        )
        self.decoder = nn.ModuleList(
            _stage((*(width,) * depth, after))
            for after, width, depth in zip((widths[0], *widths), widths, depths, strict=False)
        )
        self.pools = nn.ModuleList(nn.MaxPool2d(2, return_indices=True) for _ in widths)
        self.unpools = nn.ModuleList(nn.MaxUnpool2d(2) for _ in widths)
        self.scores = nn.Conv2d(widths[0], classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage, pool in zip(self.encoder, self.pools, strict=True):
            x = stage(x)
            size = x.shape
            x, indices = pool(x)
            kept.append((indices, size))
        for stage, unpool in zip(reversed(self.decoder), reversed(self.unpools), strict=True):
            indices, size = kept.pop()
            x = stage(unpool(x, indices, output_size=size[-2:]))
        scores: Tensor = self.scores(x)
        return scores
