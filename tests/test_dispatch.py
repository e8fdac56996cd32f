# SPDX-License-Identifier: BSD-3-Clause
"""Which CUDA kernels a call of unpooling launches: those of the table in csrc/cuda/dispatch.cuh.

The table is read here, with its words. A call on the emulated GPU launches the kernel of the first
row that fits it.
"""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import cases
import emulation
import pytest
import torch

Window = tuple[int, int, int]  # kernel size, stride and padding, of height and width alike
TABLE = Path(__file__).parents[1] / "csrc" / "cuda" / "dispatch.cuh"
NAMES: dict[Window, str] = {
    (2, 2, 0): "2x2",
    (3, 2, 0): "3x3",
    (3, 2, 1): "3x3",
    (4, 4, 0): "4x4",
    (3, 1, 1): "3x3/1",
    (5, 1, 2): "5x5/1",
}
OTHER_WINDOWS = [(2, 2, 1), (3, 3, 0), (2, 1, 0), (5, 3, 1), (6, 5, 0), (3, 1, 0), (17, 1, 0)]
# Sizes of a pooled tensor, and the layout of its memory. `unaligned` begins at an address that does
# not divide into vectors; the rows or channels of `odd` ones do not. Windows overlap in depth in
# `overlapping`, and not in `volumes`.
SHAPES = {
    "rows": ((2, 16, 2, 16), "contiguous"),
    "odd rows": ((2, 16, 2, 5), "contiguous"),
    "unaligned": ((2, 16, 2, 16), "unaligned"),
    "channels": ((2, 16, 2, 16), "channels_last"),
    "odd channels": ((2, 5, 2, 16), "channels_last"),
    "lines": ((2, 16, 16), "contiguous"),
    "volumes": ((2, 16, 2, 2, 16), "contiguous"),
    "overlapping": ((2, 16, 2, 2, 16), "contiguous"),
}
DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.float64)
DTYPES += (torch.complex64, torch.complex128)
FORMS = ("cells", "channels", "column")  # of what a thread owns, numbered as in cells.cuh
ORDERS = ("last", "sum", "gradient")  # numbered as in combine.cuh


class Drawn(NamedTuple):
    """What tells a call's row."""

    operator: str
    reduce: str
    window: Window
    shape: str
    dtype: torch.dtype
    index_dtype: torch.dtype

    @property
    def windows(self) -> list[Window]:
        """In depth, if there is one, in height and in width."""
        depth = {"volumes": [(2, 2, 0)], "overlapping": [(2, 1, 0)]}.get(self.shape, [])
        return depth + [self.window] * (1 if self.shape == "lines" else 2)

    @property
    def is_possible(self) -> bool:
        """uint8 counts the elements of a window."""
        elements = math.prod(kernel for kernel, _, _ in self.windows)
        return elements <= 256 or self.index_dtype != torch.uint8

    @property
    def is_disjoint(self) -> bool:
        return all(kernel <= stride for kernel, stride, _ in self.windows)

    @property
    def call(self) -> str:
        if self.operator == "gradient":
            return "backward, all" if self.reduce == "sum" or self.is_disjoint else "backward, last"
        moves = self.reduce == "last" or (self.is_disjoint and not self.dtype.is_complex)
        return "forward, move" if moves else "forward, add"

    def is_of(self, name: str) -> bool:
        """Whether the window has this name; "any", "covering" and "near" are such, too."""
        kernel, stride, padding = self.window
        has_offsets = self.index_dtype == torch.uint8
        is_flat = len(self.windows) < 3
        if name == "any":
            return True
        if name == "covering":
            covering = math.prod(-(-kernel // stride) for kernel, stride, _ in self.windows)
            return self.reduce == "last" or covering <= 256
        if name == "near":
            return is_flat and kernel <= 2 * stride and kernel ** len(self.windows) <= 32
        if NAMES.get(self.window) != name or (self.shape == "lines" and padding and has_offsets):
            return False
        if name.endswith("/1"):
            return is_flat and (has_offsets or name == "3x3/1")
        return self.shape != "overlapping"

    def has_layout(self, name: str) -> bool:
        rows = self.shape in ("rows", "lines", "volumes", "overlapping")
        has_offsets = self.index_dtype == torch.uint8
        fits = {"rows": rows, "offsets": rows and has_offsets, "planes": self.shape != "lines"}
        return fits.get(name, name in ("any", self.shape))

    def has_elements(self, words: str) -> bool:
        if words.endswith("bytes"):
            return str(self.dtype.itemsize) in re.findall("[0-9]+", words)
        return words == "any" or str(self.dtype).removeprefix("torch.") in words.split(", ")

    def fits(self, row: tuple[str, ...]) -> bool:
        call, windows, layout, elements, _ = row
        is_called = call == "any" or call in (self.call, self.call.split(",")[0] + ", any")
        is_windowed = any(self.is_of(name) for name in windows.split(", "))
        return is_called and is_windowed and self.has_layout(layout) and self.has_elements(elements)

    def made(self, rng: Random) -> cases.Call:
        sizes, layout = SHAPES[self.shape]
        leading, pooled = sizes[:2], sizes[2:]
        output = [n * stride for n, (_, stride, _) in zip(pooled, self.windows, strict=True)]
        output[-1] += self.shape == "odd rows"
        geometry = cases.Geometry(pooled, *zip(*self.windows, strict=True), tuple(output))
        operator = self.operator + " from offsets" * (self.index_dtype == torch.uint8)
        chosen = {"geometry": geometry, "leading": leading, "layout": layout, "kind": "own window"}
        call = cases.draw(rng, operator, self.dtype, reduce=self.reduce, **chosen)
        values, indices = call.tensors
        return replace(call, tensors=(values, indices.to(self.index_dtype)))

    @property
    def launches(self) -> list[str]:
        """The kernels that the table names: that of the first row, and the fix-up kernel."""
        row = next(row for row in ROWS if self.fits(row))
        order = "gradient" if self.operator == "gradient" else self.reduce
        kernel, _, form = row[-1].partition(", ")
        first = {"forward": f"forward {form}", "backward": f"{self.call} {form}"}
        ordered = f"ordered {order}"
        if kernel == "ordered":
            return [ordered]
        may_leave_window = self.operator == "unpool" or self.reduce == "last"
        is_fixed_up = may_leave_window and self.index_dtype != torch.uint8
        return [first.get(kernel, f"{kernel} {order}"), *[ordered] * is_fixed_up]


ROWS = re.findall(
    r"^//   ((?:forward|backward|any)(?:, \w+)?) +(\w.*?)  +(\w.*?)  +(\w.*?)  +(\w.*)$",
    TABLE.read_text(),
    re.MULTILINE,
)
WINDOWS = [*NAMES, *OTHER_WINDOWS]
COLUMNS = (("unpool", "gradient"), cases.REDUCES, WINDOWS, SHAPES, DTYPES, cases.INDEX_DTYPES)
ALL = [
    drawn for drawn in itertools.starmap(Drawn, itertools.product(*COLUMNS)) if drawn.is_possible
]


def name_of(signature: str) -> str:
    """A kernel as `launches` names it."""
    name = re.match(r"void emulated::(\w+)<", signature)[1]
    if form := re.search(r"([\w>]+), \(emulated::Form\)(\d)>", signature):
        losers = {"true": ", last", "false": ", all"}.get(form[1], "") * (name == "backward")
        return f"{name}{losers} {FORMS[int(form[2])]}"
    order = re.search(r"\(emulated::Order\)(\d)>", signature)
    return f"{name} {ORDERS[int(order[1])]}"


def check_row(row: tuple[str, ...], rng: Random, device: str = "cpu") -> None:
    """Compare what calls of a row launch, of which there have to be some."""
    of_row = [drawn for drawn in ALL if next(each for each in ROWS if drawn.fits(each)) == row]
    for drawn in rng.sample(of_row, min(len(of_row), 16)):
        call = drawn.made(rng).moved(device)
        emulation.forget_launches()
        call.on()
        assert [name_of(name) for name, _, _ in emulation.launches()] == drawn.launches, drawn
    assert of_row


@pytest.mark.parametrize("row", ROWS, ids=" | ".join)
def test_calls_of_a_row_launch_its_kernel(row: tuple[str, ...], rng: Random) -> None:
    with emulation.emulated_gpu(rng):
        check_row(row, rng)
