"""Whole networks: the times of SqueezeNet and VGG, and what SegNet's training holds in memory."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import maxunpool_cuda

from . import report
from .cases import Case
from .contenders import INDUCTOR, OURS, TORCH, Call

WIDTHS = (64, 128, 256, 512, 512)  # channels of the encoder's stages
DEPTHS = (2, 2, 3, 3, 3)  # convolutions of each
CAMVID = (1, 3, 360, 480)  # one of its images, as SegNet's authors cut them


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


NETWORKS = {"segnet": SegNet, "squeezenet": squeezenet, "vgg": vgg}


def call_of(case: Case, device: str, name: str) -> Call:
    """The network's output, and in training the gradients of its parameters, as the name says."""
    torch.manual_seed(0)
    model = NETWORKS[case.layer.partition("-")[0]]().train(case.direction == "training")
    image = torch.randn(case.shape)
    layout = torch.channels_last if case.layout == "channels_last" else torch.contiguous_format
    options = {"device": device, "dtype": getattr(torch, case.dtype), "memory_format": layout}
    model, image = model.to(**options), image.to(**options)
    if OURS in name:
        maxunpool_cuda.replace_max_pooling(model, getattr(torch, case.index_dtype))
    forward = torch.compile(model, dynamic=False) if INDUCTOR in name else model

    def call() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(model.training):
            output = forward(image)
        grads = torch.autograd.grad(output.sum(), [*model.parameters()]) if model.training else ()
        return output.detach(), *grads

    return call


@contextmanager
def reproducible_convolutions() -> Iterator[None]:
    """Inside, cuDNN computes a gradient to the same bits each time. Its other settings stay.

    ``torch.backends.cudnn.flags`` would set all of them, and has others in each release.
    """
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def calls(case: Case, device: str) -> dict[str, list[Call]]:
    """Everyone's call. Eager results must be equal; in compiled ones rounding moves some maxima."""
    torch.compiler.reset()  # after eight compilations of a module's forward all others stay eager
    made = {TORCH: [call_of(case, device, TORCH)]}
    with reproducible_convolutions():
        all_expected = made[TORCH][0]()
    for name in (OURS, INDUCTOR, f"{OURS}, {INDUCTOR}"):
        made[name] = [call_of(case, device, name)]
        is_eager = INDUCTOR not in name
        with reproducible_convolutions() if is_eager else nullcontext():
            results = made[name][0]()
        for result, expected in zip(results, all_expected, strict=True):
            allowed = 0 if is_eager else 0.05 * expected.norm()
            if not (result - expected).norm() <= allowed:
                raise RuntimeError(f"{name} does not return torch.nn's result of {case.name}")
    return made


def peak_bytes(call: Call, device: str) -> int:
    """The most bytes that the call holds at once beside those held before."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or some releases print two lines
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes)))  # negative where some are freed


def measure(device: str) -> report.Report:
    """The peaks of SegNet's training steps, whose outputs must not depend on the pooling."""
    rows, outputs = [], {}
    for dtype, pooling in product(("float32", "bfloat16"), (TORCH, "int32", "uint8")):
        name, index_dtype = (TORCH, "int64") if pooling == TORCH else (OURS, pooling)
        options = {"dtype": dtype, "index_dtype": index_dtype, "direction": "training"}
        call = call_of(Case("", "segnet", CAMVID, **options), device, name)
        output = call()[0]  # the first call allocates what is allocated once
        if not torch.equal(output, outputs.setdefault(dtype, output)):
            raise RuntimeError(f"SegNet in {dtype} has another output with {pooling}")
        rows.append({"contender": pooling, "dtype": dtype, "peak": peak_bytes(call, device)})
    return {"facts": report.facts(device), "training": {"shape": CAMVID}, "rows": rows}
