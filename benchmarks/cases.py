"""What is timed, as data: no tensors, no PyTorch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

Direction = Literal["forward", "backward", "both"]
Operation = Literal["unpool", "pool", "round-trip"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
LAYOUTS = ("contiguous", "channels_last")
DTYPES = ("float32", "bfloat16")
INDEX_DTYPES = ("int64", "int32", "uint8")
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class Case:
    """One call that is timed.

    Attributes:
        family: what the case is compared and averaged with.
        layer: where the shape is from, its size in words: the beginning of the name.
        shape: ``(N, C, *S)`` of the tensor that was pooled, which is the output of unpooling.
        kernel_size: of the pooling window, the same in every dimension; so are stride and padding.
        dilation: of the pooling; unpooling has none, so its indices leave their windows.
        direction: the call, its gradient, or one after the other through autograd.
        operation: unpooling of indices that are there, pooling that returns them, or both.
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
    layout: str = "contiguous"
    direction: Direction = "forward"
    operation: Operation = "unpool"

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
    def extent(self) -> int:
        """Of a window, from its first element to its last."""
        return self.dilation * (self.kernel_size - 1) + 1

    @property
    def pooled(self) -> tuple[int, ...]:
        """``(N, C, *S)`` of the input of unpooling."""
        sizes = ((n + 2 * self.padding - self.extent) // self.stride + 1 for n in self.shape[2:])
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
        return self.extent > self.stride


# Name, shape, and as far as they are not 2, 2, 0, 1: kernel_size, stride, padding, dilation.
Layer = tuple[Any, ...]
LAYERS: tuple[Layer, ...] = (
    ("segnet-224x64-b8", (8, 64, 224, 224)),
    ("segnet-224x64-b32", (32, 64, 224, 224)),
    ("segnet-28x512-b8", (8, 512, 28, 28)),
    ("enet-256x512x16-b10", (10, 16, 256, 512)),  # its input is 512x1024
    ("enet-128x256x64-b10", (10, 64, 128, 256)),
    ("quicknat-256x64-b4", (4, 64, 256, 256)),
    ("volume-128x16-b1", (1, 16, 128, 128, 128)),
    ("signal-1048576x16-b1", (1, 16, 2**20)),
)
# What networks have at their bottom: many channels of planes of a few cells, 7x7 and 7x10 pooled.
# Of fifteen rows no window holds the last.
BOTTOMS: tuple[Layer, ...] = (
    ("bottom-14x512-b64", (64, 512, 14, 14)),
    ("bottom-15x20x256-b32", (32, 256, 15, 20)),
)
WINDOWS: dict[str, Layer] = {
    "2x2/2": ("image-112x64-b16", (16, 64, 112, 112), 2, 2, 0),
    "3x3/2 padding 1": ("image-112x64-b16", (16, 64, 112, 112), 3, 2, 1),
    "4x4/4": ("image-112x64-b16", (16, 64, 112, 112), 4, 4, 0),
    "2x2x2/2": ("volume-48x32-b4", (4, 32, 48, 48, 48), 2, 2, 0),
}
EXTREMES: dict[str, Layer] = {
    "dilated pool": ("dilated-111x64-b8", (8, 64, 111, 111), 3, 3, 1, 2),
    "3x3/1 padding 1": ("duplicates-112x64-b4", (4, 64, 112, 112), 3, 1, 1),
    "tiny": ("tiny-16x8-b2", (2, 8, 16, 16)),
}

Call = tuple[Operation, Direction]
UNPOOLING: tuple[Call, ...] = tuple(("unpool", direction) for direction in DIRECTIONS)
POOLING: tuple[Call, ...] = (("pool", "forward"), ("pool", "backward"), ("round-trip", "both"))


ALL = {"dtype": DTYPES, "index_dtype": INDEX_DTYPES, "layout": LAYOUTS}
USUAL = {name: values[:1] for name, values in ALL.items()}


def _each(
    family: str, layer: Layer, calls: Sequence[Call], **among: Sequence[str]
) -> Iterator[Case]:
    """Every combination; {operation} and {index_dtype} stand for what they are in the family."""
    names = (*ALL, "operation", "direction")
    for *chosen, call in product(*(ALL | among).values(), calls):
        options: dict[str, Any] = dict(zip(names, (*chosen, *call), strict=True))
        yield Case(family.format(**options), *layer, **options)


def _all() -> Iterator[Case]:
    """What says most comes first, for a run may be stopped before its end."""
    for layer in LAYERS:
        yield from _each("networks", layer, UNPOOLING, **USUAL)
    yield from _each("2x2/2", WINDOWS["2x2/2"], UNPOOLING, **USUAL | {"layout": LAYOUTS})
    for layer in BOTTOMS:
        yield from _each("bottom", layer, UNPOOLING[:2])
        yield from _each("round-trip, bottom", layer, POOLING[2:], layout=LAYOUTS[:1])
    for family, layer in WINDOWS.items():
        yield from _each(family, layer, UNPOOLING)
    for layer in WINDOWS.values():
        yield from _each("{operation}, {index_dtype}", layer, POOLING)
    for layer in LAYERS:
        options = USUAL | {"index_dtype": INDEX_DTYPES}
        yield from _each("round-trip, {index_dtype}", layer, POOLING[2:], **options)
    for family, layer in EXTREMES.items():
        options = USUAL | {"layout": LAYOUTS}
        yield from _each(family, layer, UNPOOLING, **options)
        options["index_dtype"] = ("int32" if family == "dilated pool" else "uint8",)
        yield from _each(f"{{operation}}, {family}", layer, POOLING, **options)
    for exponent in range(10, 29):  # output elements: 16 planes that grow to 256x256, then more
        plane = min(exponent - 4, 16)
        height, width = 2 ** (plane // 2), 2 ** (plane - plane // 2)
        shape = (2 ** (exponent - plane - 4), 16, height, width)
        yield from _each("sweep", (f"sweep-{2**exponent}", shape), UNPOOLING[:1], **USUAL)


CASES: tuple[Case, ...] = tuple(dict.fromkeys(_all()))
BY_NAME = {case.name: case for case in CASES}
# For a first look: of each family and direction the first case, and the sweep up to 2^22 outputs.
_FIRST = {(case.family, case.direction): case for case in reversed(CASES)}
QUICK = [
    case
    for case in CASES
    if case in _FIRST.values() or (case.family == "sweep" and case.outputs <= 2**22)
]
