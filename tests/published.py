# SPDX-License-Identifier: BSD-3-Clause
"""The ways in which published models pool and unpool, each in a small network written anew.

The sources are named by repository and file. What is kept is how indices go from pool to unpool.
All parameters and inputs are small whole numbers, and no more than four convolutions of at most
four channels follow one another. So all sums are exact in any order, in float32 too: what
compilers, runtimes and devices return is equal to the definition, whatever the seed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolved(inputs: int, outputs: int, dims: int = 2) -> nn.Sequential:
    """A convolution that keeps the sizes, and ReLU, in place."""
    convolution = getattr(nn, f"Conv{dims}d")(inputs, outputs, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(inplace=True))


class Encoder(nn.Module):
    """Returns pooled values, the values before pooling, and the indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = convolved(3, 4), nn.MaxPool2d(2, 2, return_indices=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        skip = self.conv(x)
        out, indices = self.pool(skip)
        return out, skip, indices


class Decoder(nn.Module):
    """The unpooled values compete with the skip connection's, as the larger one goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.unpool, self.conv = nn.MaxUnpool2d(2, 2), convolved(4, 3)

    def forward(self, x: Tensor, skip: Tensor, indices: Tensor) -> Tensor:
        return self.conv(torch.maximum(self.unpool(x, indices, output_size=skip.size()), skip))


class PhotoWCT(nn.Module):
    """NVIDIA/FastPhotoStyle, models.py: two models; the second takes the results of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(*self.encoder(x))


class SegResNet(nn.Module):
    """yassouali/pytorch-segmentation, models/segnet.py.

    The windows of the pool overlap, those of the unpooling do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.MaxPool2d(3, 2, 1))
        self.first[1].return_indices = True  # in torchvision's ResNet
        self.last = convolved(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, indices = self.first(x)
        return self.last(F.max_unpool2d(x, indices, kernel_size=2, stride=2))


class InceptionTime(nn.Module):
    """TheMrGhostman/InceptionTime-Pytorch, inception.py: windows overlap, a list keeps indices."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = nn.ModuleList(nn.MaxPool1d(3, 1, 1, return_indices=True) for _ in range(2))
        self.unpools = nn.ModuleList(nn.MaxUnpool1d(3, 1, 1) for _ in range(2))
        self.convs = nn.ModuleList(convolved(2, 2, dims=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        every: list[Tensor] = []
        for conv, pool in zip(self.convs[:2], self.pools, strict=True):
            pooled, indices = pool(x)
            x = conv(x) + pooled
            every.append(indices)
        for conv, unpool in zip(self.convs[2:], self.unpools, strict=True):
            x = conv(x) + unpool(x, every.pop())
        return x


class UNet3d(nn.Module):
    """A 3d U-Net that unpools. All levels share one pool and one unpool."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = convolved(2, 3, dims=3), convolved(3, 3, dims=3)
        self.pool, self.unpool = nn.MaxPool3d(2, 2, return_indices=True), nn.MaxUnpool3d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        x, indices1 = self.pool(skip1)
        skip2 = self.down2(x)
        x, indices2 = self.pool(skip2)
        x = self.unpool(x, indices2, output_size=skip2.size())
        return torch.cat((skip1, self.unpool(x, indices1, output_size=skip1.size())), 1)


ALONE = "there is no MaxUnpool2d to take the indices"


class Published(NamedTuple):
    """A model, and the shape of its input.

    reasons: the dict that explain_conversion(model, index_dtype=torch.uint8) returns. parts: the
    submodules that are converted, each by itself.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    reasons: dict[str, str] | None = None
    parts: tuple[str, ...] = ("",)


PUBLISHED = {
    "PhotoWCT": Published(PhotoWCT, (2, 3, 9, 14), {"pool": ALONE}, ("encoder", "decoder")),
    "SegResNet": Published(SegResNet, (2, 3, 16, 24), {"first.1": ALONE}),
    "InceptionTime": Published(InceptionTime, (2, 2, 17)),
    "UNet3d": Published(UNet3d, (2, 2, 5, 8, 7)),
}

Results = dict[str, Tensor]


def results(model: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None) -> Results:
    """The output, and the gradients of the input and, by name, of every parameter.

    call: a function that is called in the model's place, and uses its parameters.
    """
    x = x.detach().clone().requires_grad_()
    out = (call or model)(x)
    weight = torch.arange(out.numel(), dtype=out.dtype, device=out.device).remainder(7).sub(2)
    (out * weight.view_as(out)).sum().backward()
    found = {"output": out.detach(), "input": x.grad}
    found |= {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return {name: tensor.cpu() for name, tensor in found.items()}


def defined(unpool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.nn's unpooling, but each output comes from the cell that the definition says."""

    def function(input: Tensor, indices: Tensor, *window: Any, **named: Any) -> Tensor:
        size = tuple(unpool(input.detach(), indices, *window, **named).shape[2:])
        cells = torch.ones_like(indices).flatten(2).cumsum(2).view_as(indices)  # from one on
        sources = reference.max_unpool(cells, indices, size, "last")
        return F.pad(input.flatten(2), (1, 0)).gather(2, sources.flatten(2)).view_as(sources)

    return function


def drawn(published: Published) -> tuple[nn.Module, Tensor, Results]:
    """A model of torch.nn, a random input, and the expected results, each of them not all zeros.

    They come from torch.nn's pooling, whose gradient is right, and from unpooling by definition.
    """
    while True:
        model = published.make().double().eval()
        x = torch.randint(-3, 4, published.shape, dtype=torch.float64)
        for parameter in model.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("max_unpool1d", "max_unpool2d", "max_unpool3d"):
                patch.setattr(F, name, defined(getattr(F, name)))
            expected = results(model, x)
        if all(bool(tensor.any()) for tensor in expected.values()):
            return model, x, expected


def pooling_in(module: torch.fx.GraphModule) -> set[str]:
    """The operators that pool and unpool, in all graphs of a module."""
    graphs = (m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule))
    called = (node for graph in graphs for node in graph.nodes if node.op == "call_function")
    return {target for target in (str(node.target) for node in called) if "pool" in target}


OPERATORS = {"maxunpool_cuda.max_pool.default", "maxunpool_cuda.max_unpool.default"}
