"""Networks that pool and unpool, small, with the modules of torch.nn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent))  # last, as in test_benchmarks

from benchmarks.segnet import SegNet

# Of one, two and three dimensions.
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
UNPOOLS = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)


class Down(nn.Module):
    """ENet's bottleneck that halves: the skip branch is pooled, and padded with channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.main = nn.Sequential(nn.Conv2d(inputs, outputs, 2, 2), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        main = self.main(x)
        skip, indices = self.pool(x)
        zeros = skip.new_zeros(len(x), main.shape[1] - x.shape[1], *skip.shape[2:])
        return torch.relu(main + torch.cat((skip, zeros), 1)), indices


class Up(nn.Module):
    """ENet's bottleneck that doubles: the skip branch is unpooled."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.skip = nn.Conv2d(inputs, outputs, 1)
        self.unpool = nn.MaxUnpool2d(2)
        self.main = nn.ConvTranspose2d(inputs, outputs, 2, 2)

    def forward(self, x: Tensor, indices: Tensor, size: torch.Size) -> Tensor:
        skip = self.unpool(self.skip(x), indices, output_size=size)
        return torch.relu(self.main(x, output_size=size) + skip)


class ENet(nn.Module):
    """The pools and unpools of Paszke et al., 2016, of any sizes from 8 on."""

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


class PoolAndUnpool(nn.Module):
    """A pool and an unpool between convolutions, in any number of dimensions.

    middle: what is between the two, a convolution or such a network again.
    """

    def __init__(self, dims: int, *window: int, middle: nn.Module | None = None) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.last = (convolution(3, 3, 3, padding=1) for _ in range(2))
        self.pool = POOLS[dims - 1](*window, return_indices=True)
        self.middle = middle or convolution(3, 3, 3, padding=1)
        self.unpool = UNPOOLS[dims - 1](*window)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pooled, indices = self.pool(x)
        out = self.unpool(self.middle(pooled), indices, output_size=x.shape)
        return self.last(out)


class Shared(nn.Module):
    """One pool and one unpool, each used twice and known by other names as well."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.again = nn.MaxPool2d(2, return_indices=True)
        self.deep = nn.ModuleDict({"unpool": nn.MaxUnpool2d(2)})
        self.listed = [self.pool, self.deep["unpool"]]

    def forward(self, x: Tensor) -> Tensor:
        once, inner = self.pool(x)
        twice, outer = self.again(once)
        unpool = self.listed[1]
        once = self.deep["unpool"](twice, outer, output_size=once.shape)
        return unpool(once, inner, output_size=x.shape)


# How to make each, and the shape of an input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "SegNet": (lambda: SegNet(widths=(6, 8, 10), depths=(2, 1, 2)), (2, 3, 37, 42)),
    "ENet": (ENet, (2, 3, 45, 38)),
    "1d": (lambda: PoolAndUnpool(1, 3), (2, 3, 50)),
    "3d": (lambda: PoolAndUnpool(3, 2), (2, 3, 7, 8, 9)),
}


def results(
    model: nn.Module, x: Tensor, called: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter.

    called: instead of the model, whose parameters it has, unless it is a module itself.
    """
    called = model if called is None else called
    model = called if isinstance(called, nn.Module) else model
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = called(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=x.dtype, device=x.device)
    (out * weight.view_as(out)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in (x, *model.parameters()))]


def returned_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Of the indices of every pool in a model that returns any, by the name of the pool."""
    return {
        name: module(torch.rand(1, *[20] * dims))[1].dtype
        for name, module in model.named_modules()
        for dims, pool in enumerate(POOLS, 1)
        if isinstance(module, pool) and module.return_indices
    }
