"""Parts of networks under torch.compile: those of torch.nn, and converted, without and with fusion.

    python -m benchmarks.compiled [--quick]

prints how many times longer compiled torch.nn takes than the compiled model converted to indices of
one byte. All three are called in turns, in one process, on the CPU; the shortest counts. One thread
is used, and its own time is taken, so that a busy machine does little to the figures.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import maxunpool_cuda

from .memory import keep_pages
from .segnet import SegNet
from .show import show

CHANNELS = 64
SHAPE = (4, CHANNELS, 64, 64)


class Skip(nn.Module):
    """As FastSurfer's blocks: what is unpooled competes with what came before the pool."""

    def __init__(self, *window: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.pool = nn.MaxPool2d(*window, return_indices=True)
        self.unpool = nn.MaxUnpool2d(*window)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        pooled, indices = self.pool(self.norm(x).relu())
        return torch.maximum(self.unpool(pooled, indices, output_size=x.shape), skip)


class Plain(nn.Module):
    """A pool without indices behind a norm and an activation."""

    def __init__(self, *window: int) -> None:
        super().__init__()
        self.norm, self.pool = nn.BatchNorm2d(CHANNELS), nn.MaxPool2d(*window)

    def forward(self, x: Tensor, _: Tensor) -> Any:
        return self.pool(self.norm(x).relu())


class Shallow(nn.Module):
    """SegNet of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Conv2d(CHANNELS, 3, 1), SegNet((16, 32), (1, 1))

    def forward(self, x: Tensor, _: Tensor) -> Any:
        return self.net(self.first(x))


class Bottlenecks(nn.Module):
    """As ENet's: a branch that pools, added to convolutions, and one that unpools."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.down = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 2, 2), nn.BatchNorm2d(CHANNELS))
        self.up = nn.Sequential(
            nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2), nn.BatchNorm2d(CHANNELS)
        )
        self.activation = nn.PReLU()

    def forward(self, x: Tensor, _: Tensor) -> Any:
        pooled, indices = self.pool(x)
        middle = self.activation(self.down(x) + pooled)
        return self.activation(self.unpool(middle, indices) + self.up(middle))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unpool and maximum, 2x2": lambda: Skip(2),
    "unpool and maximum, 3x3, stride 2": lambda: Skip(3, 2, 1),
    "pool without indices, 2x2": lambda: Plain(2),
    "pool without indices, 3x3, stride 2": lambda: Plain(3, 2, 1),
    "SegNet of two stages": Shallow,
    "ENet's bottlenecks": Bottlenecks,
}
LAYOUTS = ("contiguous_format", "channels_last")
CONTENDERS = ("torch.nn", "kernels", "fusion")


def call_of(contender: str, make: Callable[[], nn.Module], layout: str, training: bool) -> Any:
    """A call of the compiled model, which was made: of inference, or of forward and backward."""
    torch.manual_seed(0)
    model = make().train(training)
    if contender != "torch.nn":
        maxunpool_cuda.replace_max_pooling(model, torch.uint8, plain_pools=True)
    memory_format: Any = getattr(torch, layout)
    model = model.to(memory_format=memory_format)
    tensors = [torch.randn(SHAPE).contiguous(memory_format=memory_format) for _ in range(2)]
    tensors[0].requires_grad_(training)
    compiled = torch.compile(model)

    def call() -> None:
        maxunpool_cuda.set_fusion(contender == "fusion")
        tensors[0].grad = None
        with torch.set_grad_enabled(training):
            output = compiled(*tensors)
        if training:
            output.backward(output.detach())

    call()
    return call


def measure(make: Callable[[], nn.Module], layout: str, training: bool, rounds: int) -> list[float]:
    """How many times longer torch.nn takes than each of the others."""
    torch._dynamo.reset()
    calls = {name: call_of(name, make, layout, training) for name in CONTENDERS}
    shortest = dict.fromkeys(calls, float("inf"))
    for _, (name, call), _ in product(range(rounds), calls.items(), range(3)):
        begin = time.thread_time()
        call()
        shortest[name] = min(shortest[name], time.thread_time() - begin)
    maxunpool_cuda.set_fusion(False)
    return [shortest["torch.nn"] / shortest[name] for name in CONTENDERS[1:]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one model, and once")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    keep_pages()
    rounds = 1 if quick else 20
    rows = []
    for name, layout in product(list(MODELS)[: 1 if quick else None], LAYOUTS):
        row = [name, layout.removesuffix("_format")]
        for training in (False, True):
            figures = measure(MODELS[name], layout, training, rounds)
            row += [f"{figure:.2f}" for figure in figures]
        print(*row, flush=True)
        rows.append(row)
    heads = ["model", "layout", "inference", "with fusion", "training", "with fusion"]
    show(f"PyTorch {torch.__version__}, one thread:", heads, rows, texts=2)


if __name__ == "__main__":
    main()
