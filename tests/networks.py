"""Networks that pool and unpool, small, with the modules of torch.nn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent))  # last, as in test_benchmarks

from benchmarks.segnet import SegNet


class Down(nn.Module):
    """ENet's bottleneck that halves: the skip branch is pooled, and padded with channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.main = nn.Sequential(
            nn.Conv2d(inputs, inputs, 2, 2, bias=False),
            nn.BatchNorm2d(inputs),
            nn.PReLU(),
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        main = self.main(x)
        skip, indices = self.pool(x)
        zeros = skip.new_zeros(len(x), main.shape[1] - x.shape[1], *skip.shape[2:])
        return self.act(main + torch.cat((skip, zeros), 1)), indices


class Up(nn.Module):
    """ENet's bottleneck that doubles: the skip branch is unpooled."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.skip = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.unpool = nn.MaxUnpool2d(2)
        self.narrow = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.ReLU())
        self.widen = nn.ConvTranspose2d(outputs, outputs, 2, 2)
        self.act = nn.PReLU()

    def forward(self, x: Tensor, indices: Tensor, size: torch.Size) -> Tensor:
        skip = self.unpool(self.skip(x), indices, output_size=size)
        return self.act(self.widen(self.narrow(x), output_size=size) + skip)


class ENet(nn.Module):
    """Paszke et al., 2016, of any sizes from 8 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, 2, 1)
        self.first_pool = nn.MaxPool2d(2, ceil_mode=True)  # beside the convolution; no indices
        self.down1, self.down2 = Down(8, 12), Down(12, 16)
        self.up2, self.up1 = Up(16, 12), Up(12, 8)
        self.last = nn.ConvTranspose2d(8, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        x = torch.cat((self.first(x), self.first_pool(x)), 1)
        size1 = x.shape[-2:]
        x, indices1 = self.down1(x)
        size2 = x.shape[-2:]
        x, indices2 = self.down2(x)
        x = self.up1(self.up2(x, indices2, size2), indices1, size1)
        return self.last(x, output_size=size)


class Dense(nn.Module):
    """QuickNAT's block: each convolution sees what all before it saw and made."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels), nn.PReLU(), nn.Conv2d(channels, width, kernel, padding=p)
            )
            for channels, kernel, p in ((inputs, 5, 2), (inputs + width, 5, 2), (width, 1, 0))
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        x = torch.cat((x, first(x)), 1)
        return last(second(x))


class QuickNAT(nn.Module):
    """Guha Roy et al., 2019, of sizes that 16 divides: the unpools are not told any."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Dense(n, width) for n in (1, width, width, width))
        self.pools = nn.ModuleList(nn.MaxPool2d(2, 2, return_indices=True) for _ in range(4))
        self.middle = nn.Sequential(nn.Conv2d(width, width, 5, padding=2), nn.BatchNorm2d(width))
        self.unpools = nn.ModuleList(nn.MaxUnpool2d(2, 2) for _ in range(4))
        self.decoder = nn.ModuleList(Dense(2 * width, width) for _ in range(4))
        self.scores = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for dense, pool in zip(self.encoder, self.pools, strict=True):
            skip = dense(x)
            x, indices = pool(skip)
            kept.append((skip, indices))
        x = self.middle(x)
        for dense, unpool in zip(self.decoder, self.unpools, strict=True):
            skip, indices = kept.pop()
            x = dense(torch.cat((skip, unpool(x, indices)), 1))
        return self.scores(x)


class PoolAndUnpool(nn.Module):
    """As little as has both between convolutions, in any number of dimensions."""

    def __init__(self, dims: int, pool: nn.Module, unpool: nn.Module) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.middle, self.last = (convolution(3, 3, 3, padding=1) for _ in range(3))
        self.pool, self.unpool = pool, unpool

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pooled, indices = self.pool(x)
        return self.last(self.unpool(self.middle(pooled), indices, output_size=x.shape[2:]))


# How to make each, and the shape of an input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "SegNet": (lambda: SegNet(widths=(6, 8, 10), depths=(2, 1, 2)), (2, 3, 37, 42)),
    "ENet": (ENet, (2, 3, 45, 38)),
    "QuickNAT": (QuickNAT, (2, 1, 32, 48)),
    "1d": (
        lambda: PoolAndUnpool(1, nn.MaxPool1d(3, return_indices=True), nn.MaxUnpool1d(3)),
        (2, 3, 50),
    ),
    "3d": (
        lambda: PoolAndUnpool(3, nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)),
        (2, 3, 7, 8, 9),
    ),
}
