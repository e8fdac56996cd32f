"""What is timed, as data: no tensors, no PyTorch.

A :class:`Case` names a max-pooling layer, and which of pooling and unpooling is called. ``CASES``
holds all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward", "both"]
Layout = Literal["contiguous", "channels_last"]
Operation = Literal["unpool", "pool", "round-trip"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
LAYOUTS: tuple[Layout, ...] = ("contiguous", "channels_last")
DTYPES = ("float32", "bfloat16")
INDEX_DTYPES = ("int64", "int32", "uint8")
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
SWEEP_EXPONENTS = range(10, 29)
QUICK_SWEEP_EXPONENTS = range(10, 23)


@dataclass(frozen=True)
class Case:
    """One call that is timed.

    Attributes:
        family: what the case is compared and averaged with.
        layer: where the shape is from, its size in words: the beginning of the name.
        shape: ``(N, C, *S)`` of the tensor that was pooled, which is the output of unpooling.
        kernel_size: of the pooling window, the same in every dimension.
        stride: of the window.
        padding: of the pooling and of the unpooling.
        dilation: of the pooling; unpooling has none, so its indices leave their windows.
        dtype: of the values.
        index_dtype: of the indices.
        layout: of every tensor.
        direction: the call, its gradient, or one after the other through autograd.
        operation: what is called: unpooling of indices that are there, pooling that returns them,
            or one after the other.
        quick: whether ``--quick`` keeps it.
    """

    family: str
    layer: str
    shape: tuple[int, ...]
    kernel_size: int = 2
    stride: int = 2
    padding: int = 0
    dilation: int = 1
    dtype: str = "float32"
    index_dtype: str = "int64"
    layout: Layout = "contiguous"
    direction: Direction = "forward"
    operation: Operation = "unpool"
    quick: bool = False

    @property
    def name(self) -> str:
        window = "x".join([str(self.kernel_size)] * self.rank)
        if self.stride != self.kernel_size:
            window += f"s{self.stride}"
        if self.padding:
            window += f"p{self.padding}"
        if self.dilation != 1:
            window += f"d{self.dilation}"
        parts = (self.layer, window, self.dtype, self.index_dtype, self.layout, self.direction)
        return "-".join(parts if self.operation == "unpool" else (self.operation, *parts))

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
    def cells(self) -> int:
        """The number of pooled elements."""
        return math.prod(self.pooled)

    @property
    def outputs(self) -> int:
        """The number of output elements."""
        return math.prod(self.shape)

    @property
    def overlapping(self) -> bool:
        """Whether two windows can hold the same index."""
        return self.dilation * (self.kernel_size - 1) + 1 > self.stride

    @property
    def with_gradient(self) -> bool:
        return self.direction != "forward"


LAYERS = (
    ("segnet-224x64-b8", (8, 64, 224, 224), 2, True),
    ("segnet-224x64-b32", (32, 64, 224, 224), 2, False),
    ("segnet-28x512-b8", (8, 512, 28, 28), 2, False),
    ("enet-256x512x16-b10", (10, 16, 256, 512), 2, False),  # its input is 512x1024
    ("enet-128x256x64-b10", (10, 64, 128, 256), 2, False),
    ("quicknat-256x64-b4", (4, 64, 256, 256), 2, False),
    ("volume-128x16-b1", (1, 16, 128, 128, 128), 2, False),
    ("signal-1048576x16-b1", (1, 16, 2**20), 2, False),
)
# What networks have at their bottom: many channels of planes of a few cells, 7x7 and 7x10 pooled.
# Of fifteen rows no window holds the last.
BOTTOMS = (
    ("bottom-14x512-b64", (64, 512, 14, 14)),
    ("bottom-15x20x256-b32", (32, 256, 15, 20)),
)
WINDOWS = (
    ("2x2/2", "image-112x64-b16", (16, 64, 112, 112), 2, 2, 0),
    ("3x3/2 padding 1", "image-112x64-b16", (16, 64, 112, 112), 3, 2, 1),
    ("4x4/4", "image-112x64-b16", (16, 64, 112, 112), 4, 4, 0),
    ("2x2x2/2", "volume-48x32-b4", (4, 32, 48, 48, 48), 2, 2, 0),
)


# Pooling alone, and with unpooling after it, there and back.
POOLINGS: tuple[tuple[Operation, Direction], ...] = (
    ("pool", "forward"),
    ("pool", "backward"),
    ("round-trip", "both"),
)


def _networks() -> Iterator[Case]:
    for (layer, shape, kernel, quick), direction in itertools.product(LAYERS, DIRECTIONS):
        yield Case("networks", layer, shape, kernel, kernel, direction=direction, quick=quick)


def _grid() -> Iterator[Case]:
    for window, dtype, index_dtype, layout, direction in itertools.product(
        WINDOWS, DTYPES, INDEX_DTYPES, LAYOUTS, DIRECTIONS
    ):
        family, *what = window
        plain = (dtype, index_dtype, layout) == (DTYPES[0], INDEX_DTYPES[0], LAYOUTS[0])
        yield Case(
            family,
            *what,
            dtype=dtype,
            index_dtype=index_dtype,
            layout=layout,
            direction=direction,
            quick=plain,
        )


def _bottom() -> Iterator[Case]:
    directions: tuple[Direction, ...] = ("forward", "backward")
    for (layer, shape), dtype, index_dtype in itertools.product(BOTTOMS, DTYPES, INDEX_DTYPES):
        for layout, direction in itertools.product(LAYOUTS, directions):
            quick = (layout, direction) == (LAYOUTS[0], "forward") and index_dtype != "int32"
            yield Case(
                "bottom",
                layer,
                shape,
                dtype=dtype,
                index_dtype=index_dtype,
                layout=layout,
                direction=direction,
                quick=quick,
            )
        yield Case(
            "round-trip, bottom",
            layer,
            shape,
            dtype=dtype,
            index_dtype=index_dtype,
            direction="both",
            operation="round-trip",
        )


def _poolings() -> Iterator[Case]:
    for index_dtype, (operation, direction) in itertools.product(INDEX_DTYPES, POOLINGS):
        family = f"{operation}, {index_dtype}"
        for window, dtype, layout in itertools.product(WINDOWS, DTYPES, LAYOUTS):
            _, *what = window
            yield Case(
                family,
                *what,
                dtype=dtype,
                index_dtype=index_dtype,
                layout=layout,
                direction=direction,
                operation=operation,
                quick=(window, layout) == (WINDOWS[0], LAYOUTS[0]),
            )
    for (layer, shape, kernel, quick), index_dtype in itertools.product(LAYERS, INDEX_DTYPES):
        yield Case(
            f"round-trip, {index_dtype}",
            layer,
            shape,
            kernel,
            kernel,
            index_dtype=index_dtype,
            direction="both",
            operation="round-trip",
            quick=quick,
        )


def _extremes() -> Iterator[Case]:
    dilated = ("dilated pool", "dilated-111x64-b8", (8, 64, 111, 111), 3, 3, 1, 2)
    duplicates = ("3x3/1 padding 1", "duplicates-112x64-b4", (4, 64, 112, 112), 3, 1, 1, 1)
    tiny = ("tiny", "tiny-16x8-b2", (2, 8, 16, 16), 2, 2, 0, 1)
    for what, layout, direction in itertools.product(
        (dilated, duplicates, tiny), LAYOUTS, DIRECTIONS
    ):
        quick = layout == LAYOUTS[0]
        yield Case(*what, layout=layout, direction=direction, quick=quick)
    for (family, *what), layout in itertools.product((dilated, duplicates, tiny), LAYOUTS):
        index_dtype = "int32" if family == "dilated pool" else "uint8"
        for operation, direction in POOLINGS:
            yield Case(
                f"{operation}, {family}",
                *what,
                index_dtype=index_dtype,
                layout=layout,
                direction=direction,
                operation=operation,
            )


def _sweep() -> Iterator[Case]:
    """2^10 to 2^28 output elements: 16 planes that grow to 256x256, then more planes."""
    for exponent in SWEEP_EXPONENTS:
        plane = min(exponent - 4, 16)
        height, width = 2 ** (plane // 2), 2 ** (plane - plane // 2)
        shape = (2 ** (exponent - plane - 4), 16, height, width)
        quick = exponent in QUICK_SWEEP_EXPONENTS
        yield Case("sweep", f"sweep-{2**exponent}", shape, quick=quick)


def _in_order() -> Iterator[Case]:
    """What says most comes first, for a run may be stopped before its end."""
    grid = tuple(_grid())
    plain = len(LAYOUTS) * len(DIRECTIONS)  # 2x2/2, float32, int64
    yield from _networks()
    yield from grid[:plain]
    yield from _bottom()
    yield from grid[plain:]
    yield from _poolings()
    yield from _extremes()
    yield from _sweep()


CASES: tuple[Case, ...] = tuple(_in_order())
