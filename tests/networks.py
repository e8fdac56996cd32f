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


# How to make each, and the shape of an input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "SegNet": (lambda: SegNet(widths=(6, 8, 10), depths=(2, 1, 2)), (2, 3, 37, 42)),
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
