# SPDX-License-Identifier: BSD-3-Clause
"""What is timed, as data: no tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

OPERATIONS = {
    "unpool": "unpooling",  # of given indices
    "pool": "pooling with indices",
    "values": "pooling",  # without indices
    "adaptive": "adaptive pooling",  # the same, by adaptive pooling
    "round-trip": "pooling and unpooling",
    "network": "network",
}


@dataclass(frozen=True)
class Case:
    """One call that is timed."""

    layer: str  # where the shape is from; the name begins with it
    shape: tuple[int, ...]  # (N, C, *S) of what was pooled, which is the output of unpooling
    kernel_size: int = 2  # equal in all dimensions, as are the next three
    stride: int = 2
    padding: int = 0
    dilation: int = 1  # of the pooling; unpooling has none, so its indices leave their windows
    # Kernel size, stride and padding of the unpooling, if they are not those of the pooling. Then
    # indices leave their windows, too.
    unpooled_by: tuple[int, ...] = ()
    dtype: str = "float32"
    index_dtype: str = "int64"
    layout: str = "contiguous"  # or channels_last
    operation: str = "unpool"  # one of OPERATIONS
    direction: str = "forward"  # or backward; or both, through autograd; or a network's
    device: str = ""  # the only device that times the case; or "", which is every device

    @property
    def name(self) -> str:
        """Such as "values-image-112x64-b16-3x3s2p1-float32-contiguous-both"."""
        window = "x".join([str(self.kernel_size)] * self.rank)
        window += f"s{self.stride}" * (self.stride != self.kernel_size)
        window += f"p{self.padding}" * (self.padding > 0)
        window += f"d{self.dilation}" * (self.dilation > 1)
        window += "".join("-in-" + "x".join([str(n)] * self.rank) for n in self.unpooled_by[:1])
        parts = (self.layer, window, self.dtype, self.index_dtype, self.layout, self.direction)
        if self.returns_values:
            parts = (self.layer, window, self.dtype, self.layout, self.direction)
        if self.operation == "network":
            parts = (self.layer, self.layout, self.direction)
        return "-".join(parts if self.operation == "unpool" else (self.operation, *parts))

    @property
    def call(self) -> str:
        """Such as "pooling 3x3/2 padding 1, 16x64x112x112, and backward", for tables: no dtypes."""
        what = OPERATIONS[self.operation]
        shape = "x".join(map(str, self.shape))
        layout = f", {self.layout}" * (self.layout != "contiguous")
        direction = {"backward": ", backward", "both": ", and backward"}.get(self.direction, "")
        return f"{what} {self.window}, {shape}{layout}{direction}"

    @property
    def window(self) -> str:
        """Such as "3x3/2 padding 1": its size, stride, padding and dilation, for tables."""
        size = "x".join([str(self.kernel_size)] * self.rank)
        more = f" padding {self.padding}" * (self.padding > 0)
        more += f" dilation {self.dilation}" * (self.dilation > 1)
        more += "".join(f" in windows of {kernel_size}" for kernel_size in self.unpooled_by[:1])
        return f"{size}/{self.stride}{more}"

    @property
    def pools(self) -> bool:
        """Whether it pools, and no more."""
        return self.operation == "pool" or self.returns_values

    @property
    def returns_values(self) -> bool:
        """Whether it pools and returns no indices."""
        return self.operation in ("values", "adaptive")

    @property
    def has_indices(self) -> bool:
        """Whether its data have indices. Pooling that returns none needs them for its backward."""
        return not self.returns_values or self.direction != "forward"

    @property
    def rank(self) -> int:
        """The number of spatial dimensions."""
        return len(self.shape) - 2

    @property
    def pooled(self) -> tuple[int, ...]:
        """``(N, C, *S)`` of the input of unpooling."""
        extent = self.dilation * (self.kernel_size - 1) + 1
        sizes = ((n + 2 * self.padding - extent) // self.stride + 1 for n in self.shape[2:])
        return (*self.shape[:2], *sizes)

    @property
    def operators(self) -> int:
        """The number of poolings and unpoolings in the call; a gradient counts as one."""
        return (1 + (self.operation == "round-trip")) * (1 + (self.direction == "both"))

    @property
    def useful_bytes(self) -> int:
        """For each operator the size of the pooled values, the indices and the unpooled side."""
        item, index = (getattr(torch, t).itemsize for t in (self.dtype, self.index_dtype))
        index *= not self.returns_values
        pooled, unpooled = math.prod(self.pooled), math.prod(self.shape)
        return self.operators * (pooled * (item + index) + unpooled * item)

    @property
    def is_tiny(self) -> bool:
        """Whether what the call costs in Python is most of its time."""
        return self.layer.startswith(("tiny", "small"))

    def is_timed_on(self, device: str) -> bool:
        """Whether a run on the device has the case."""
        return self.device in ("", device)


# Of networks: name and shape. Below, the numbers after these are kernel_size, stride, padding,
# dilation and unpooled_by, in this order, as far as they are not those of Case.
LAYERS = (
    ("segnet-224x64-b8", (8, 64, 224, 224)),
    ("segnet-224x64-b32", (32, 64, 224, 224)),
    ("segnet-28x512-b8", (8, 512, 28, 28)),
    ("enet-256x512x16-b10", (10, 16, 256, 512)),  # of an input of 512x1024
    ("enet-128x256x64-b10", (10, 64, 128, 256)),
    ("quicknat-256x64-b4", (4, 64, 256, 256)),
    ("volume-128x16-b1", (1, 16, 128, 128, 128)),
    ("signal-1048576x16-b1", (1, 16, 2**20)),
    ("bottom-14x512-b64", (64, 512, 14, 14)),
    ("bottom-15x20x256-b32", (32, 256, 15, 20)),  # no window holds the last row
)
IMAGE = ("image-112x64-b16", (16, 64, 112, 112))
# These are timed with every dtype and layout. EVERY_DTYPE has their names.
WINDOWS = (
    IMAGE,
    (*IMAGE, 3, 2, 1),
    (*IMAGE, 4, 4),
    ("volume-48x32-b4", (4, 32, 48, 48, 48)),
)
EVERY_DTYPE = {layer for layer, *_ in WINDOWS}
DILATED = ("dilated-111x64-b8", (8, 64, 111, 111), 3, 3, 1, 2)
DUPLICATES = (
    ("duplicates-112x64-b4", (4, 64, 112, 112), 3, 1, 1),
    ("sppf-20x256-b16", (16, 256, 20, 20), 5, 1, 2),  # YOLO's, of an input of 640x640
)
# What a call costs at the least, and planes so small that this cost is most of their time.
TINY = ("tiny-16x8-b2", (2, 8, 16, 16))
SMALL = (
    ("small-4x64-b1", (1, 64, 4, 4)),
    ("small-7x64-b1", (1, 64, 7, 7), 3),
    ("small-8x64-b1", (1, 64, 8, 8)),
    ("small-14x64-b1", (1, 64, 14, 14)),
)
# The sizes before and after, and channels.
ADAPTIVE = ((28, 14, 256), (7, 1, 512), (56, 7, 128), (56, 1, 128), (224, 1, 16))

# Planes of more than 2 million outputs. A call on the CPU takes a second, so only a GPU has these.
LARGE = (
    ("volume-256x8-b1", (1, 8, 256, 256, 256)),
    ("image-2048x64-b1", (1, 64, 2048, 2048)),
)
# Indices of 3x3/2 windows with padding 1, given to 2x2/2 ones: many are out of window, which the
# fast kernels do not do. On the CPU these calls take long, too.
OUT_OF_WINDOW = (
    ("image-1024x64-b1", (1, 64, 1024, 1024), 3, 2, 1, 1, (2, 2, 0)),
    ("volume-256x8-b1", (1, 8, 256, 256, 256), 3, 2, 1, 1, (2, 2, 0)),
)
# The three problems of KernelBench, level 1, that are max pooling, with its numbers. Each takes
# 8 to 17 GB, so only a GPU has these.
KERNELBENCH = (
    ("kernelbench-41", (64, 192, 65536), 8, 1, 4, 3),
    ("kernelbench-42", (32, 64, 512, 512), 4, 1, 1),
    ("kernelbench-43", (16, 32, 128, 128, 128), 3, 2, 1, 3),
)

UNPOOLING = (("unpool", "forward"), ("unpool", "backward"), ("unpool", "both"))
VALUES = (("values", "forward"), ("values", "both"))
POOLING = (("pool", "forward"), ("pool", "backward"), ("round-trip", "both"))
ALL = {
    "dtype": ("float32", "bfloat16"),
    "index_dtype": ("int64", "int32", "uint8"),
    "layout": ("contiguous", "channels_last"),
}
LAYOUTS = {"layout": ALL["layout"]}


def _each(layer: Any, calls: Any, device: str = "", **some: Sequence[str]) -> Iterator[Case]:
    """Every combination of some options."""
    among = {name: values[:1] for name, values in ALL.items()} | some
    for *chosen, (operation, direction) in product(*among.values(), calls):
        options = dict(zip(among, chosen, strict=True), operation=operation, direction=direction)
        yield Case(*layer, device=device, **options)


def _without_indices() -> Iterator[Case]:
    """Pools that return values alone."""
    for layer in (IMAGE, WINDOWS[1], WINDOWS[3], (*WINDOWS[3], 3, 2, 1), *DUPLICATES):
        yield from _each(layer, VALUES, dtype=ALL["dtype"], **LAYOUTS)
    for layer in (TINY, *SMALL):
        yield from _each(layer, VALUES)
    for before, after, channels in ADAPTIVE:
        shape = (8, channels, before, before)
        layer = (f"{before}x{channels}-b8", shape, before // after, before // after)
        yield from _each(layer, (("adaptive", "forward"), ("adaptive", "both")), **LAYOUTS)


def _on_gpus() -> Iterator[Case]:
    """The cases that are too large for the CPU."""
    options = {"dtype": ALL["dtype"], "index_dtype": ("int64", "uint8")}
    for layer in LARGE:
        yield from _each(layer, UNPOOLING[:2], device="cuda", **options)
    for layer in OUT_OF_WINDOW:
        yield from _each(layer, UNPOOLING[:2], device="cuda")
    for layer in KERNELBENCH:
        yield from _each(layer, (("values", "forward"),), device="cuda")


def _all() -> Iterator[Case]:
    """The most telling cases first, since a run may be stopped before its end."""
    for layer in LAYERS:
        yield from _each(layer, UNPOOLING)
    for layer in WINDOWS:
        yield from _each(layer, UNPOOLING, **ALL)
    for layer in WINDOWS:
        yield from _each(layer, POOLING, **ALL)
    for layer in LAYERS:
        yield from _each(layer, POOLING[2:], index_dtype=ALL["index_dtype"])
    for layer in (DILATED, *DUPLICATES, TINY):
        yield from _each(layer, UNPOOLING, **LAYOUTS)
        index_dtype = "int32" if layer == DILATED else "uint8"
        yield from _each(layer, POOLING, index_dtype=(index_dtype,), **LAYOUTS)
    yield from _without_indices()
    yield from _on_gpus()
    for network, batch in product(("squeezenet", "vgg"), (1, 8)):
        layer = (f"{network}-b{batch}", (batch, 3, 224, 224))
        yield from _each(layer, (("network", "inference"), ("network", "training")), **LAYOUTS)


CASES = tuple(_all())
BY_NAME = {case.name: case for case in CASES}
# The first case of each call with each window, of those that every device times.
_FIRST = {(c.operation, c.direction, c.window): c for c in CASES[::-1] if not c.device}
QUICK = tuple(case for case in CASES if case in _FIRST.values())
