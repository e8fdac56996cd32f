# SPDX-License-Identifier: BSD-3-Clause
"""Which CUDA kernels a call launches: the two tables at the head of csrc/cuda/dispatch.cuh.

The calls below are all combinations of some values for each column of the tables. Each runs on the
emulated GPU, and the kernels that it launched are compared with the first row that fits the call.
"""

import functools
import itertools
import math
import re
import subprocess
from dataclasses import dataclass, replace
from random import Random

import cases
import emulation
import pytest
import torch
from reference import Sizes

Row = dict[str, str]  # of a table, by column
Patch = pytest.MonkeyPatch

# What the tables call windows, by kernel, stride and padding in height and width.
WINDOWS = {
    (2, 2, 0): "2x2",
    (3, 2, 1): "3x3",
    (3, 2, 0): "3x3",
    (4, 4, 0): "4x4",
    (3, 1, 1): "3x3/1",
    (5, 1, 2): "5x5/1",
}
OTHER_WINDOWS = ((3, 3, 0), (2, 2, 1), (3, 1, 0), (2, 1, 0), (5, 3, 1), (6, 5, 0))
# The windows of the dimensions before the width; None stands for the window in height.
SHAPES: dict[str, tuple[Sizes | None, ...]] = {
    "row": (),
    "plane": (None,),
    "volume": ((2, 2, 0), None),
    "volume of windows that overlap": ((2, 1, 0), None),
}
LAYOUTS = ("rows", "uneven rows", "unaligned rows", "channels", "uneven channels")
DTYPES = (
    *(torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int16),
    *(torch.float32, torch.int32, torch.float64, torch.complex64, torch.complex128),
)


def tables() -> tuple[list[Row], list[Row]]:
    """The table of fast kernels, and that of fix-up kernels."""
    text = (emulation.CSRC / "cuda" / "dispatch.cuh").read_text()
    found = []
    for table in re.findall(r"^//   call .*\n(?://   .*\n)+", text, re.M):
        head, *rows = (re.split(r"  +", line[5:]) for line in table.splitlines())
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    fast, fixup = found
    return fast, fixup


FAST, FIXUP = tables()


@dataclass(frozen=True)
class Case:
    """The call that these values make."""

    direction: str  # "forward" or "backward"
    reduce: str
    window: Sizes  # in height and width
    shape: str
    layout: str
    dtype: torch.dtype
    index: torch.dtype

    @property
    def windows(self) -> list[Sizes]:
        """Kernel, stride and padding of every dimension."""
        return [window or self.window for window in (*SHAPES[self.shape], None)]

    @property
    def overlaps(self) -> bool:
        return any(kernel > stride for kernel, stride, _ in self.windows)

    @property
    def is_near(self) -> bool:
        """In a row or a plane: whether a window overlaps its neighbours alone, and is small.

        That is, at most 32 elements.
        """
        kernels = [kernel for kernel, _, _ in self.windows]
        near = all(kernel <= 2 * stride for kernel, stride, _ in self.windows)
        return near and len(kernels) < 3 and math.prod(kernels) <= 32

    @property
    def usual_window(self) -> str:
        if self.shape == "volume of windows that overlap":
            return "other"
        if self.shape != "plane" and self.window[1] == 1:
            return "other"
        if self.window == (5, 1, 2) and self.index != torch.uint8:
            return "other"
        if self.shape == "row" and self.window[2] == 1 and self.index == torch.uint8:
            return "other"
        return WINDOWS.get(self.window, "other")

    @property
    def values(self) -> dict[str, set[str]]:
        """What the tables may call this call, by column."""
        sums = self.reduce == "sum"
        moves = not sums or not (self.overlaps or self.dtype.is_complex)
        gathers = sums or not self.overlaps
        kind = {
            "forward": "move" if moves else "add",
            "backward": "all" if gathers else "last",
        }[self.direction]
        return {
            "call": {f"{self.direction}, {kind}", f"{self.direction}, {self.reduce}"},
            "windows": {self.usual_window, "near" if self.is_near else "far"},
            "layout": {self.layout},
            "elements": {name_of(self.dtype), str(self.dtype.itemsize)},
            "indices": {name_of(self.index)},
        }

    def fits(self, row: Row) -> bool:
        return all(
            row[column] == "any" or names & alternatives(column, row[column])
            for column, names in self.values.items()
            if column in row
        )

    def expected(self) -> list[str]:
        """The kernels in the tables."""
        fast = next(row for row in FAST if self.fits(row))
        fixup = next(row for row in FIXUP if self.fits(row))
        kernels = [
            self.slots("own") if fast["fast kernel"] == "slots" else fast["fast kernel"],
            self.slots("any") if fixup["fix-up kernel"] == "slots" else "none",
        ]
        return [kernel for kernel in kernels if kernel != "none"]

    def slots(self, sums: str) -> str:
        """The kernel of slots.cuh, which for the sums of a forward depends on whose they are."""
        if self.direction == "forward" and self.reduce == "sum":
            return f"forward_{sums}_sum_slots"
        return f"{self.direction}_{self.reduce}_slots"

    def draw(self, rng: Random) -> cases.Call:
        is_uneven = self.layout == "uneven rows"
        columns = 5 if is_uneven else 16
        pooled = (*(2 for _ in SHAPES[self.shape]), columns)
        *output, width = (n * window[1] for n, window in zip(pooled, self.windows, strict=True))
        output = (*output, width + 1 if is_uneven else width)
        geometry = cases.Geometry(pooled, *zip(*self.windows, strict=True), output)
        call = cases.draw(
            rng,
            {"forward": "unpool", "backward": "gradient"}[self.direction]
            + (" from offsets" if self.index == torch.uint8 else ""),
            self.dtype,
            reduce=self.reduce,
            kind="own window",
            geometry=geometry,
            leading=(2, 5 if self.layout == "uneven channels" else 16),
            layout="contiguous",
        )
        layout = {"channels": "channels_last", "unaligned rows": "unaligned"}.get(
            self.layout.removeprefix("uneven "), "contiguous"
        )
        values, indices = call.tensors
        tensors = (values, indices.to(self.index))
        return replace(call, tensors=tuple(cases.laid_out(t, layout, call.dims) for t in tensors))


def alternatives(column: str, text: str) -> set[str]:
    """What fits a row: "1, 2 bytes" are elements of "1" or "2" bytes. A call is no list."""
    return {text} if column == "call" else set(text.removesuffix(" bytes").split(", "))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def every_case() -> list[Case]:
    columns = (
        ("forward", "backward"),
        cases.REDUCES,
        (*WINDOWS, *OTHER_WINDOWS),
        SHAPES,
        LAYOUTS,
        DTYPES,
        cases.INDEX_DTYPES,
    )
    every = itertools.starmap(Case, itertools.product(*columns))
    adds_up = (case for case in every if case.reduce == "last" or case.dtype in cases.ARITHMETIC)
    # A few calls of other shapes than planes will do.
    return [
        case
        for case in adds_up
        if case.shape == "plane" or (case.layout == "rows" and case.dtype == torch.float32)
    ]


CASES = every_case()


@functools.cache
def kernel_of(symbol: str) -> str:
    """A symbol in the words of the tables."""
    demangled = subprocess.check_output(["c++filt", symbol], text=True)
    signature = rf"void {emulation.NAMESPACE}::(\w+)<(.*?)>\({emulation.NAMESPACE}"
    name, arguments = re.match(signature, demangled).groups()
    if name == "forward":
        source = (emulation.CSRC / "cuda" / "forward_tile.cuh").read_text()
        elements = re.search(r"enum class Elements \{(.*?)\}", source, re.S)[1]
        names = re.findall(r"\w+", re.sub("//.*", "", elements))
        number = int(re.search(r"Elements\)(\d+)", arguments)[1])
        return f"forward, {names[number]}"
    if name == "backward":
        return "backward, drops losers" if arguments.endswith("true") else "backward"
    return name


def launched(call: cases.Call) -> list[str]:
    """The kernels that a call launches, in their order."""
    library = emulation.library()
    library.take_launched()
    call.on()
    return [kernel_of(symbol) for symbol in library.take_launched()]


def differences(chosen: list[Case], rng: Random) -> list[str]:
    """The cases that launch other kernels than the tables say, and which."""
    found = []
    with emulation.emulated_gpu(rng):
        for case in chosen:
            kernels, expected = launched(case.draw(rng)), case.expected()
            if kernels != expected:
                found.append(f"{case} launched {kernels} but the tables say {expected}")
    return found


def first_row(case: Case) -> int:
    return next(n for n, row in enumerate(FAST) if case.fits(row))


@pytest.mark.parametrize(
    "number", [pytest.param(n, id=" | ".join(row.values())) for n, row in enumerate(FAST)]
)
def test_a_row_of_the_table(number: int, rng: Random) -> None:
    """Every call that it is the first to fit launches its kernel, and then the fix-up kernel.

    Of the many calls of planes a part is drawn.
    """
    chosen = [case for case in CASES if first_row(case) == number]
    planes = [case for case in chosen if case.shape == "plane"]
    others = [case for case in chosen if case.shape != "plane"]
    assert planes
    found = differences(others + rng.sample(planes, min(len(planes), cases.scaled(600))), rng)
    assert not found, "\n".join(found)


def test_the_tables_have_no_row_without_a_call() -> None:
    met = {next(n for n, row in enumerate(FIXUP) if case.fits(row)) for case in CASES}
    assert met == {*range(len(FIXUP))}
    assert {first_row(case) for case in CASES} == {*range(len(FAST))}


# Sizes of two images of 2x2 windows, of which the emulation's 32 bits count one, both, or not one.
LARGE = {"one fits": ((24, 1024), 2), "both fit": ((12, 1024), 1), "none fits": ((40, 1024), 1)}


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("operator", ["unpool", "gradient"])
def test_large_calls_are_cut(operator: str, size: str, rng: Random) -> None:
    """Each part launches both kernels. If not even one image fits, `slots` does all at once."""
    pooled, parts = LARGE[size]
    geometry = cases.geometry_of(pooled, (2, 2, 0))
    call = cases.draw(
        rng,
        operator,
        torch.float32,
        reduce="last",
        kind="own window",
        geometry=geometry,
        leading=(2, 1),
        layout="contiguous",
    )
    direction = {"unpool": "forward", "gradient": "backward"}[operator]
    slots = f"{direction}_last_slots"
    fast = {"forward": "forward, cells", "backward": "backward"}[direction]
    expected = [slots if size == "none fits" else fast, slots] * parts
    with emulation.emulated_gpu(rng):
        assert launched(call) == expected
