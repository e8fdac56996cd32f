"""The ways in which published models pool and unpool, each in a small network written anew.

The sources are named by repository and file. What is kept is how indices go from pool to unpool;
channels are few, blocks short, and every norm is a BatchNorm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.pooling import _MaxUnpoolNd


def convolved(inputs: int, outputs: int, dims: int = 2) -> nn.Sequential:
    """A convolution that keeps the sizes, a norm and ReLU, in place."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    return nn.Sequential(
        convolution(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(inplace=True)
    )


class FastSurferBlock(nn.Module):
    """Competitive: what goes round a convolution competes with what comes out of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv0, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv1, self.bn2 = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)
        self.prelu = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.maximum(self.bn1(self.conv0(self.prelu(x))), x)
        return self.bn2(self.conv1(self.prelu(x)))


class FastSurferEncoder(FastSurferBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.maxpool = nn.MaxPool2d(kernel_size=2, stride=2, return_indices=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        skip = super().forward(x)
        out, indices = self.maxpool(skip)
        return out, skip, indices


class FastSurferDecoder(FastSurferBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.unpool = nn.MaxUnpool2d(kernel_size=2, stride=2)

    def forward(self, x: Tensor, skip: Tensor, indices: Tensor) -> Tensor:
        return super().forward(torch.maximum(self.unpool(x, indices), skip))


class FastSurfer(nn.Module):
    """Deep-MI/FastSurfer, FastSurferCNN/models/{sub_module,networks}.py.

    Blocks return triples with the indices, and are called by their forward, without hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.encode1, self.encode2 = FastSurferEncoder(4), FastSurferEncoder(4)
        self.bottleneck = FastSurferBlock(4)
        self.decode2, self.decode1 = FastSurferDecoder(4), FastSurferDecoder(4)

    def forward(self, x: Tensor) -> Tensor:
        x, skip1, indices1 = self.encode1.forward(self.first(x))
        x, skip2, indices2 = self.encode2.forward(x)
        x = self.decode2.forward(self.bottleneck(x), skip2, indices2)
        return self.decode1.forward(x, skip1, indices1)


class QuickNATBlock(nn.Module):
    """Dense, of all its children but those that pool, unpool or drop out."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first, self.second = convolved(inputs, width), convolved(inputs + width, width)

    def forward(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        for child in self.children():
            if isinstance(child, (nn.MaxPool2d, nn.MaxUnpool2d, nn.Dropout2d)):
                continue
            out = child(x)
            x = torch.cat((x, out), 1)
        return out, indices


class QuickNATEncoder(QuickNATBlock):
    def __init__(self, inputs: int, width: int, max_pool: nn.Module) -> None:
        super().__init__(inputs, width)
        self.max_pool = max_pool

    def forward(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x, indices = self.max_pool(x)
        return super().forward(x)[0], indices


class QuickNATDecoder(QuickNATBlock):
    def __init__(self, inputs: int, width: int, un_pool: nn.Module) -> None:
        super().__init__(inputs, width)
        self.un_pool = un_pool

    def forward(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.un_pool(super().forward(x)[0], indices), None


class QuickNATBottleneck(QuickNATBlock):
    def __init__(self, inputs: int, max_pool: nn.Module, un_pool: nn.Module) -> None:
        super().__init__(inputs, inputs)
        self.max_pool, self.un_pool = max_pool, un_pool

    def forward(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x, own = self.max_pool(x)
        return self.un_pool(super().forward(x)[0], own), indices


class QuickNATSequential(nn.Sequential):
    def forward(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        for module in self:
            x, indices = module(x, indices)
        return x, indices


class QuickNATSkip(nn.Module):
    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return torch.cat((x, self.submodule(x, indices)[0]), 1), indices


class QuickNAT(nn.Module):
    """Project-MONAI/MONAI, monai/networks/nets/quicknat.py.

    One pool in ceil mode and one unpool, which are children of many blocks, that leave them out of
    their children by what they are instances of.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        pool = nn.MaxPool2d(kernel_size=2, stride=2, return_indices=True, ceil_mode=True)
        unpool = nn.MaxUnpool2d(kernel_size=2, stride=2)
        inner = QuickNATBottleneck(width, pool, unpool)
        middle = QuickNATSequential(
            QuickNATEncoder(width, width, pool),
            QuickNATSkip(inner),
            QuickNATDecoder(2 * width, width, unpool),
        )
        outer = QuickNATBlock(3, width), QuickNATSkip(middle), QuickNATBlock(2 * width, width)
        self.model = QuickNATSequential(*outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, None)[0]


class MattingEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = self._make_layer(3, 4), self._make_layer(4, 5)

    def _make_layer(self, inputs: int, outputs: int) -> nn.Sequential:
        pool = nn.MaxPool2d(kernel_size=2, stride=2, return_indices=True)
        return nn.Sequential(*convolved(inputs, outputs), pool)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out, max_idx_1 = self.layer1(x)
        out, max_idx_2 = self.layer2(out)
        return {"out": out, "max_idx_1": max_idx_1, "max_idx_2": max_idx_2}


class UnpoolForOnnx(_MaxUnpoolNd):
    """None of torch.nn's three, and so may want int64 indices."""

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = self.stride = (kernel_size, kernel_size)
        self.padding = (0, 0)

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, self.kernel_size, self.stride, self.padding)


class Matting(nn.Module):
    """open-mmlab/mmagic, encoders/vgg.py and decoders/plain_decoder.py.

    The indices come in a dict, and beside torch.nn's unpool there is one for the exporter alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = MattingEncoder()
        self.deconv2, self.deconv1 = nn.Conv2d(5, 4, 5, padding=2), nn.Conv2d(4, 1, 5, padding=2)
        self.deconv3, self.relu = nn.Conv2d(5, 5, 1), nn.ReLU(inplace=True)
        self.max_unpool2d_for_onnx = UnpoolForOnnx(2)
        self.max_unpool2d = nn.MaxUnpool2d(kernel_size=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.encoder(x)
        unpool = self.max_unpool2d
        if torch.onnx.is_in_onnx_export():
            unpool = self.max_unpool2d_for_onnx
        out = unpool(self.relu(self.deconv3(inputs["out"])), inputs["max_idx_2"])
        out = unpool(self.relu(self.deconv2(out)), inputs["max_idx_1"])
        return self.deconv1(out)


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


class PhotoWCTEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = convolved(3, 4), convolved(4, 5), convolved(5, 6)
        self.maxpool1 = nn.MaxPool2d(kernel_size=2, stride=2, return_indices=True)
        self.maxpool2 = nn.MaxPool2d(kernel_size=2, stride=2, return_indices=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, torch.Size, Tensor, torch.Size]:
        pool1 = self.conv1(x)
        out, indices1 = self.maxpool1(pool1)
        pool2 = self.conv2(out)
        out, indices2 = self.maxpool2(pool2)
        return self.conv3(out), indices1, pool1.size(), indices2, pool2.size()


class PhotoWCTDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv3, self.conv2, self.conv1 = convolved(6, 5), convolved(5, 4), nn.Conv2d(4, 3, 1)
        self.unpool2 = nn.MaxUnpool2d(kernel_size=2, stride=2)
        self.unpool1 = nn.MaxUnpool2d(kernel_size=2, stride=2)

    def forward(
        self, x: Tensor, indices1: Tensor, size1: torch.Size, indices2: Tensor, size2: torch.Size
    ) -> Tensor:
        out = self.unpool2(self.conv3(x), indices2, output_size=size2)
        return self.conv1(self.unpool1(self.conv2(out), indices1, output_size=size1))


class PhotoWCT(nn.Module):
    """NVIDIA/FastPhotoStyle, models.py: two models, of which one takes what the other returns."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = PhotoWCTEncoder(), PhotoWCTDecoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(*self.encoder(x))


class Inception(nn.Module):
    def __init__(self, inputs: int, filters: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(inputs, filters, 5, padding=2, bias=False)
        self.max_pool = nn.MaxPool1d(kernel_size=3, stride=1, padding=1, return_indices=True)
        self.conv_from_maxpool = nn.Conv1d(inputs, filters, 1, bias=False)
        self.batch_norm = nn.BatchNorm1d(2 * filters)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled, indices = self.max_pool(x)
        out = torch.cat((self.convolution(x), self.conv_from_maxpool(pooled)), 1)
        return torch.relu(self.batch_norm(out)), indices


class InceptionTranspose(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.ConvTranspose1d(inputs, outputs, 5, padding=2, bias=False)
        self.conv_to_maxpool = nn.Conv1d(inputs, outputs, 1, bias=False)
        self.max_unpool = nn.MaxUnpool1d(kernel_size=3, stride=1, padding=1)
        self.batch_norm = nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        unpooled = self.max_unpool(self.conv_to_maxpool(x), indices)
        return torch.relu(self.batch_norm(self.convolution(x) + unpooled))


class InceptionTime(nn.Module):
    """TheMrGhostman/InceptionTime-Pytorch, inception.py, as an autoencoder.

    The windows of its pools and unpools, of strides one, overlap; indices are returned in a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList((Inception(2, 2), Inception(4, 2)))
        self.decoder = nn.ModuleList((InceptionTranspose(4, 4), InceptionTranspose(4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        every: list[Tensor] = []
        for block in self.encoder:
            x, indices = block(x)
            every.append(indices)
        for block in self.decoder:
            x = block(x, every.pop())
        return x


class UNet3d(nn.Module):
    """A U-Net that unpools, with one pool and one unpool for all levels, as many volumes' have."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = (
            convolved(*widths, dims=3) for widths in ((2, 3), (3, 4), (4, 4))
        )
        self.up2, self.up1 = convolved(8, 3, dims=3), nn.Conv3d(6, 2, 1)
        self.pool, self.unpool = nn.MaxPool3d(2, 2, return_indices=True), nn.MaxUnpool3d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        x, indices1 = self.pool(skip1)
        skip2 = self.down2(x)
        x, indices2 = self.pool(skip2)
        x = self.unpool(self.down3(x), indices2, output_size=skip2.size())
        x = self.up2(torch.cat((skip2, x), 1))
        x = self.unpool(x, indices1, output_size=skip1.size())
        return self.up1(torch.cat((skip1, x), 1))


class PadMaxPool3d(nn.Module):
    def __init__(self, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.pool = nn.MaxPool3d(kernel_size, stride, return_indices=False)

    def set_new_return(self) -> None:
        self.pool.return_indices = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        depth, height, width = (-size % self.stride for size in x.shape[2:])
        padding = (width, 0, height, 0, depth, 0)
        return *self.pool(F.pad(x, padding)), padding


class CropMaxUnpool3d(nn.Module):
    def __init__(self, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.unpool = nn.MaxUnpool3d(kernel_size, stride)

    def forward(self, x: Tensor, indices: Tensor, padding: tuple[int, ...]) -> Tensor:
        return self.unpool(x, indices)[:, :, padding[4] :, padding[2] :, padding[0] :]


class ClinicaDL(nn.Module):
    """aramis-lab/clinicadl, clinicadl/utils/network/network_utils.py.

    Wrapped pools pad odd sizes at their beginning, and wrapped unpools crop; the model finds either
    by its class, in a Sequential, and makes the pools return indices.
    """

    def __init__(self) -> None:
        super().__init__()
        pools = PadMaxPool3d(2, 2), PadMaxPool3d(2, 2)
        self.encoder = nn.Sequential(*convolved(1, 3, 3), pools[0], *convolved(3, 4, 3), pools[1])
        unpools = CropMaxUnpool3d(2, 2), CropMaxUnpool3d(2, 2)
        last = nn.ConvTranspose3d(3, 1, 3, padding=1)
        self.decoder = nn.Sequential(unpools[0], *convolved(4, 3, 3), unpools[1], last)
        for pool in pools:
            pool.set_new_return()

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Any] = []
        for layer in self.encoder:
            if isinstance(layer, PadMaxPool3d):
                x, *indices_and_padding = layer(x)
                kept.append(indices_and_padding)
            else:
                x = layer(x)
        for layer in self.decoder:
            x = layer(x, *kept.pop()) if isinstance(layer, CropMaxUnpool3d) else layer(x)
        return x


class FunctionalSegNet(nn.Module):
    """delta-onera/segnet_pytorch, segnet.py: all pooling and unpooling is functions' calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.conv2d, self.bn2d = nn.Conv2d(5, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv1d = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = F.relu(self.bn1(self.conv1(x)))
        x1p, id1 = F.max_pool2d(x1, kernel_size=2, stride=2, return_indices=True)
        x2 = F.relu(self.bn2(self.conv2(x1p)))
        x2p, id2 = F.max_pool2d(x2, kernel_size=2, stride=2, return_indices=True)
        x2d = F.max_unpool2d(x2p, id2, kernel_size=2, stride=2)
        x1p = F.relu(self.bn2d(self.conv2d(x2d)))
        x1d = F.max_unpool2d(x1p, id1, kernel_size=2, stride=2)
        return self.conv1d(x1d)


MATTING_POOLS = ("encoder.layer1.3", "encoder.layer2.3")
PRIVATE = "UnpoolForOnnx, a subclass of _MaxUnpoolNd, may want int64 indices"
ALONE = "there is no MaxUnpool2d to take the indices"


@dataclasses.dataclass(frozen=True)
class Published:
    """A model, and what is to be expected of it.

    reasons: of replace_max_pooling, for uint8. parts: those that are converted, each by itself.
    modules, functions: whether modules, and whether functions that a forward calls, pool or unpool.
    overlaps: whether windows do, where torch.nn's gradient is wrong. strays: whether indices lie
    outside the windows of the unpool.
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
    "FastSurfer": Published(FastSurfer, (2, 3, 8, 12)),
    "QuickNAT": Published(QuickNAT, (2, 3, 8, 12)),
    "mmagic": Published(Matting, (2, 3, 8, 12), dict.fromkeys(MATTING_POOLS, PRIVATE)),
    "SegResNet": Published(
        SegResNet,
        (2, 3, 16, 24),
        {"first_conv.3": ALONE},
        functions=True,
        overlaps=True,
        strays=True,
    ),
    "PhotoWCT": Published(
        PhotoWCT, (2, 3, 9, 14), {"maxpool1": ALONE, "maxpool2": ALONE}, ("encoder", "decoder")
    ),
    "InceptionTime": Published(InceptionTime, (2, 2, 17), overlaps=True),
    "UNet3d": Published(UNet3d, (2, 2, 5, 8, 7)),
    "ClinicaDL": Published(ClinicaDL, (2, 1, 5, 6, 7)),
    "functional SegNet": Published(FunctionalSegNet, (2, 3, 8, 12), modules=False, functions=True),
}
