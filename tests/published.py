# SPDX-License-Identifier: BSD-3-Clause
"""The ways in which published models pool and unpool, each in a small network written anew.

What is kept is how indices go from pool to unpool.
All parameters and inputs are small whole numbers. No more than four convolutions follow one
another that add up 36 products each, or two of 81. So all sums are exact in any order, in float32
too: what compilers, runtimes and devices return is equal to what is expected, whatever the seed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from reference import Sizes, default_output_size
from torch import Tensor, nn


def convolved(inputs: int, outputs: int, kernel: Sizes = (3, 3)) -> nn.Sequential:
    """A convolution of odd sizes that keeps the plane's, and ReLU, in place."""
    padding = tuple(size // 2 for size in kernel)
    convolution = getattr(nn, f"Conv{len(kernel)}d")(inputs, outputs, kernel, padding=padding)
    return nn.Sequential(convolution, nn.ReLU(inplace=True))


class PhotoWCT(nn.Module):
    """NVIDIA/FastPhotoStyle, models.py: the decoder takes the encoder's indices and sizes.

    The unpooled values compete with the skip connection's, as the larger one goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = convolved(3, 4), convolved(4, 3)
        self.pool, self.unpool = nn.MaxPool2d(2, 2, return_indices=True), nn.MaxUnpool2d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.encoder(x)
        pooled, indices = self.pool(skip)
        unpooled = self.unpool(pooled, indices, output_size=skip.size())
        return self.decoder(torch.maximum(unpooled, skip))


class PointNet(nn.Module):
    """charlesq34/pointnet: a window of all points. Each point gets the maxima beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = convolved(2, 3, (3,)), nn.MaxPool1d(17)

    def forward(self, x: Tensor) -> Tensor:
        own = self.conv(x)
        return torch.cat((own, self.pool(own).expand_as(own)), 1)


class UNet3d(nn.Module):
    """A 3d U-Net that unpools. All levels share one pool and one unpool."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = convolved(2, 3, (3, 3, 3)), convolved(3, 3, (3, 3, 3))
        self.pool, self.unpool = nn.MaxPool3d(2, 2, return_indices=True), nn.MaxUnpool3d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        x, indices1 = self.pool(skip1)
        skip2 = self.down2(x)
        x, indices2 = self.pool(skip2)
        x = self.unpool(x, indices2, output_size=skip2.size())
        return torch.cat((skip1, self.unpool(x, indices1, output_size=skip1.size())), 1)


class TASEDNet(nn.Module):
    """MichiganCOG/TASED-Net, model.py: side pools give their indices, and no values.

    They pool in time first, as the decoder has fewer frames than the encoder. Windows overlap, and
    what is unpooled comes from deeper layers: values with one index are not equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = convolved(2, 3, (1, 3, 3)), convolved(3, 4, (1, 3, 3))
        self.up1, self.up2 = convolved(4, 4, (1, 3, 3)), convolved(4, 3, (1, 3, 3))
        overlapping = {"kernel_size": (1, 3, 3), "stride": (1, 2, 2), "padding": (0, 1, 1)}
        self.main1, self.main2 = nn.MaxPool3d(**overlapping), nn.MaxPool3d(3, 2, 1)
        self.main3 = nn.MaxPool3d((1, 2, 2), return_indices=True)
        self.time1, self.time2, self.time3 = (nn.MaxPool3d((n, 1, 1)) for n in (4, 4, 2))
        self.side1 = nn.MaxPool3d(**overlapping, return_indices=True)
        self.side2 = nn.MaxPool3d(**overlapping, return_indices=True)
        self.unpool1, self.unpool2 = nn.MaxUnpool3d(**overlapping), nn.MaxUnpool3d(**overlapping)
        self.unpool3 = nn.MaxUnpool3d((1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down1(x)
        x, wide = self.main1(wide), self.time1(wide)
        _, indices1 = self.side1(wide)
        narrow = self.down2(x)
        x, narrow = self.main2(narrow), self.time2(narrow)
        _, indices2 = self.side2(narrow)
        x = self.unpool3(*self.main3(self.time3(x)))
        x = self.unpool2(self.up1(x), indices2, narrow.size())
        return self.unpool1(self.up2(x), indices1, wide.size())


class Published(NamedTuple):
    """A model, and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


PUBLISHED = {
    "PhotoWCT": Published(PhotoWCT, (2, 3, 9, 14)),
    "PointNet": Published(PointNet, (2, 2, 17)),
    "UNet3d": Published(UNet3d, (2, 2, 5, 8, 7)),
    "TASEDNet": Published(TASEDNet, (2, 2, 8, 15, 13)),
}

Results = dict[str, Tensor]


def results(model: nn.Module, x: Tensor) -> Results:
    """The output, and the gradients of the input and, by name, of every parameter."""
    x = x.detach().clone().requires_grad_()
    out = model(x)
    weight = torch.arange(out.numel(), dtype=out.dtype, device=out.device).remainder(7).sub(2)
    (out * weight.view_as(out)).sum().backward()
    found = {"output": out.detach(), "input": x.grad}
    found |= {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return {name: tensor.cpu() for name, tensor in found.items()}


def plain_unpool(
    input: Tensor,
    indices: Tensor,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    output_size: Sizes | None = None,
) -> Tensor:
    """Unpooling in operators whose gradients are right: values that are not written are dropped."""
    dims = input.dim() - 2
    default = default_output_size(input.shape[2:], kernel, stride, padding)
    size = default if output_size is None else output_size[-dims:]
    values, places = input.flatten(2), indices.flatten(2)
    order = torch.arange(values.shape[2]).expand_as(places)
    zeros = values.new_zeros(*values.shape[:2], math.prod(size))
    last = zeros.long().scatter_reduce(2, places, order, "amax")
    is_last = last.gather(2, places) == order
    return zeros.scatter_add(2, places, values.where(is_last, 0)).unflatten(2, size)


def drawn(published: Published) -> tuple[nn.Module, Tensor, Results]:
    """A model of torch.nn, a random input, and the expected results, each of them not all zeros.

    They come from torch.nn's pools, and from plain operators in place of its unpools, whose
    gradients are wrong where windows overlap.
    """
    plain = {f"max_unpool{dims}d": plain_unpool for dims in (1, 2, 3)}
    while True:
        model = published.make().double().eval()
        x = torch.randint(-3, 4, published.shape, dtype=torch.float64)
        for parameter in model.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, dtype=torch.float64)
        with mock.patch.multiple(nn.functional, **plain):
            expected = results(model, x)
        if all(bool(tensor.any()) for tensor in expected.values()):
            return model, x, expected


def program_of(function: Callable[..., Any], *inputs: Tensor, shapes: Any = None) -> Any:
    """The exported program. ``shapes`` has the dynamic dimensions of each input."""
    module = nn.Module()
    module.forward = function
    return torch.export.export(module, inputs, dynamic_shapes=shapes)


def pooling_in(module: torch.fx.GraphModule) -> set[str]:
    """The operators that pool and unpool, in all graphs of a module."""
    graphs = (m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule))
    called = (node for graph in graphs for node in graph.nodes if node.op == "call_function")
    return {target for target in (str(node.target) for node in called) if "pool" in target}
