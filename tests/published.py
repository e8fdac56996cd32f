"""The ways in which published models pool and unpool, each in a small network written anew.

The sources are named by repository and file. What is kept is how indices go from pool to unpool;
channels are few, blocks short, and every norm is a BatchNorm. All parameters and inputs are small
whole numbers, so every sum of products is exact in any order: what compilers, runtimes and devices
return is equal to the definition, whatever the seed.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent))  # last, as in test_benchmarks

from benchmarks.segnet import SegNet


def convolved(inputs: int, outputs: int, dims: int = 2) -> nn.Sequential:
    """A convolution that keeps the sizes, a norm and ReLU, in place."""
    convolution, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "BatchNorm"))
    layers = convolution(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(inplace=True)
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """Returns what is pooled, what it is pooled from, and the indices."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = convolved(inputs, outputs)
        self.maxpool = nn.MaxPool2d(kernel_size=2, stride=2, return_indices=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        skip = self.conv(x)
        out, indices = self.maxpool(skip)
        return out, skip, indices


class FastSurferDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unpool = nn.MaxUnpool2d(kernel_size=2, stride=2)
        self.conv = convolved(4, 4)

    def forward(self, x: Tensor, skip: Tensor, indices: Tensor) -> Tensor:
        return self.conv(torch.maximum(self.unpool(x, indices), skip))


class FastSurfer(nn.Module):
    """Deep-MI/FastSurfer, FastSurferCNN/models/{sub_module,networks}.py.

    Blocks return triples with the indices, and are called by their forward, without hooks. What is
    unpooled competes with the skip connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encode1, self.encode2, self.last = Encoder(3, 4), Encoder(4, 4), convolved(4, 4)
        self.decode2, self.decode1 = FastSurferDecoder(), FastSurferDecoder()

    def forward(self, x: Tensor) -> Tensor:
        x, skip1, indices1 = self.encode1.forward(x)
        x, skip2, indices2 = self.encode2.forward(x)
        x = self.decode2.forward(self.last(x), skip2, indices2)
        return self.decode1.forward(x, skip1, indices1)


class QuickNATBlock(nn.Module):
    """All its children but those that pool or unpool, between a pool and an unpool."""

    def __init__(self, inside: nn.Module, max_pool: nn.Module, un_pool: nn.Module) -> None:
        super().__init__()
        self.first, self.inside, self.last = convolved(4, 4), inside, convolved(4, 4)
        self.max_pool, self.un_pool = max_pool, un_pool

    def forward(self, x: Tensor) -> Tensor:
        x, indices = self.max_pool(x)
        for child in self.children():
            if not isinstance(child, (nn.MaxPool2d, nn.MaxUnpool2d)):
                x = child(x)
        return self.un_pool(x, indices)


class QuickNAT(nn.Module):
    """Project-MONAI/MONAI, monai/networks/nets/quicknat.py.

    One pool in ceil mode and one unpool, which are children of many blocks, that leave them out of
    their children by what they are instances of.
    """

    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(kernel_size=2, stride=2, return_indices=True, ceil_mode=True)
        unpool = nn.MaxUnpool2d(kernel_size=2, stride=2)
        inner = QuickNATBlock(nn.Dropout2d(), pool, unpool)
        self.first, self.outer = convolved(3, 4), QuickNATBlock(inner, pool, unpool)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.cat((x, self.outer(x)), 1)


class SegResNet(nn.Module):
    """yassouali/pytorch-segmentation, models/segnet.py.

    The pool is the one of torchvision's ResNet, told to return indices once it is made. Its windows
    overlap; those of the unpool, which is a function's call, do not.
    """

    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.first_conv = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), *convolved(4, 4)[1:], pool)
        pool.return_indices = True
        self.encoder, self.decoder = convolved(4, 6), convolved(6, 4)
        self.last_conv = nn.ConvTranspose2d(4, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, indices = self.first_conv(x)
        x = F.max_unpool2d(self.decoder(self.encoder(x)), indices, kernel_size=2, stride=2)
        return self.last_conv(x)


class PhotoWCTDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv2, self.conv1 = convolved(4, 4), nn.Conv2d(4, 3, 1)
        self.unpool = nn.MaxUnpool2d(kernel_size=2, stride=2)

    def forward(self, x: Tensor, skip: Tensor, indices: Tensor) -> Tensor:
        return self.conv1(self.unpool(self.conv2(x), indices, output_size=skip.size()))


class PhotoWCT(nn.Module):
    """NVIDIA/FastPhotoStyle, models.py: two models, of which one takes what the other returns."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(3, 4), PhotoWCTDecoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(*self.encoder(x))


class InceptionTime(nn.Module):
    """TheMrGhostman/InceptionTime-Pytorch, inception.py, as an autoencoder.

    The windows of its pools and unpools, of stride one, overlap; indices are kept in a list.
    """

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
    """A U-Net that unpools, with one pool and one unpool for all levels, as many volumes' have."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = convolved(2, 3, dims=3), convolved(3, 3, dims=3)
        self.pool, self.unpool = nn.MaxPool3d(2, 2, return_indices=True), nn.MaxUnpool3d(2, 2)
        self.up1 = convolved(6, 2, dims=3)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        x, indices1 = self.pool(skip1)
        skip2 = self.down2(x)
        x, indices2 = self.pool(skip2)
        x = self.unpool(x, indices2, output_size=skip2.size())
        x = self.unpool(x, indices1, output_size=skip1.size())
        return self.up1(torch.cat((skip1, x), 1))


class FunctionalSegNet(nn.Module):
    """delta-onera/segnet_pytorch, segnet.py: all pooling and unpooling is functions' calls."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = convolved(3, 4), convolved(4, 5)
        self.up2, self.up1 = convolved(5, 4), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, id1 = F.max_pool2d(self.down1(x), kernel_size=2, stride=2, return_indices=True)
        x, id2 = F.max_pool2d(self.down2(x), kernel_size=2, stride=2, return_indices=True)
        x = self.up2(F.max_unpool2d(x, id2, kernel_size=2, stride=2))
        return self.up1(F.max_unpool2d(x, id1, kernel_size=2, stride=2))


ALONE = "there is no MaxUnpool2d to take the indices"


@dataclasses.dataclass(frozen=True)
class Published:
    """A model, and what is to be expected of it.

    reasons: of replace_max_pooling, for uint8. parts: those that are converted, each by itself.
    modules, functions: whether modules, and whether functions that a forward calls, pool or unpool.
    overlaps: whether windows do, where torch.nn's gradient is wrong. strays: whether indices lie
    outside the windows of the unpool, so that offsets mean nothing to it.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] = ("",)
    modules: bool = True
    functions: bool = False
    overlaps: bool = False
    strays: bool = False


PUBLISHED = {
    "SegNet": Published(lambda: SegNet(widths=(4, 5), depths=(1, 2)), (2, 3, 9, 14)),
    "FastSurfer": Published(FastSurfer, (2, 3, 8, 12)),
    "QuickNAT": Published(QuickNAT, (2, 3, 8, 12)),
    "SegResNet": Published(
        SegResNet,
        (2, 3, 16, 24),
        {"first_conv.3": ALONE},
        functions=True,
        overlaps=True,
        strays=True,
    ),
    "PhotoWCT": Published(PhotoWCT, (2, 3, 9, 14), {"maxpool": ALONE}, ("encoder", "decoder")),
    "InceptionTime": Published(InceptionTime, (2, 2, 17), overlaps=True),
    "UNet3d": Published(UNet3d, (2, 2, 5, 8, 7)),
    "functional SegNet": Published(FunctionalSegNet, (2, 3, 8, 12), modules=False, functions=True),
}

Results = dict[str, Tensor]


def results(
    model: nn.Module, x: Tensor, called: Callable[[Tensor], Tensor] | None = None
) -> Results:
    """The output, and the gradients of the input and, by name, of every parameter.

    called: instead of the model, whose parameters it has.
    """
    x = x.detach().clone().requires_grad_()
    out = (called or model)(x)
    weight = torch.arange(out.numel(), dtype=out.dtype, device=out.device).remainder(7).sub(2)
    (out * weight.view_as(out)).sum().backward()
    found = {"output": out.detach(), "input": x.grad}
    found |= {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return {name: tensor.cpu() for name, tensor in found.items()}


def whole(shape: tuple[int, ...], fewest: int, most: int) -> Tensor:
    return torch.randint(fewest, most + 1, shape, dtype=torch.float64)


def with_whole_numbers(model: nn.Module) -> nn.Module:
    """In eval mode. Half of the weights of convolutions, or more, are zero: sums stay small."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 2.0**-60  # 1 + this is 1
            module.running_mean = whole(module.running_mean.shape, -1, 1)
    for name, parameter in model.double().named_parameters():
        if parameter.dim() > 1:
            values = whole(parameter.shape, -1, 1) * whole(parameter.shape, 0, 1)
        elif name.endswith("bias"):
            values = whole(parameter.shape, -2, 1)
        else:  # of norms
            values = whole(parameter.shape, 0, 1) * 2 - 1
        parameter.data = values
    return model.eval()


def defined(unpool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.nn's unpooling, with every output from the cell that the reference takes it from."""

    def function(input: Tensor, indices: Tensor, *window: Any, **named: Any) -> Tensor:
        size = tuple(unpool(input.detach(), indices, *window, **named).shape[2:])
        cells = torch.ones_like(indices).flatten(2).cumsum(2).view_as(indices)  # from one on
        sources = reference.max_unpool(cells, indices, size, "last")
        return F.pad(input.flatten(2), (1, 0)).gather(2, sources.flatten(2)).view_as(sources)

    return function


def drawn(published: Published) -> tuple[nn.Module, Tensor, Results]:
    """A model of torch.nn, its input and what is expected; no part of it is cut off by zeros.

    Expected is what torch.nn's pooling gives, whose gradient is right, and unpooling by definition.
    """
    for _ in range(50):
        model, x = with_whole_numbers(published.make()), whole(published.shape, -3, 3)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("max_unpool1d", "max_unpool2d", "max_unpool3d"):
                patch.setattr(F, name, defined(getattr(F, name)))
            expected = results(model, x)
        parts = [tensor for tensor in expected.values() if tensor.dim() > 1]
        # Far below 2^24, in steps far above its inverse: nothing was rounded.
        small = all(float(tensor.abs().max()) < 2**20 for tensor in expected.values())
        if small and all(bool(tensor.any()) for tensor in parts):
            break
    else:
        pytest.fail("every model that was drawn has parts without a gradient, or large numbers")
    assert not any(bool((tensor * 2**10).frac().any()) for tensor in expected.values())
    return model, x, expected


def pooling_in(module: torch.fx.GraphModule) -> set[str]:
    """The operators that pool and unpool, in all graphs of a module."""
    graphs = (m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule))
    called = (node for graph in graphs for node in graph.nodes if node.op == "call_function")
    return {target for target in (str(node.target) for node in called) if "pool" in target}


OPERATORS = {"maxunpool_cuda.max_pool.default", "maxunpool_cuda.max_unpool.default"}
