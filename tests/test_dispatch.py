# SPDX-License-Identifier: BSD-3-Clause
"""Which CUDA kernels a call of unpooling launches, and that calls too large for 32 bits are cut.

csrc/cuda/dispatch.cuh has the rules. Here are calls on both sides of each.
"""

import itertools
import re
from dataclasses import replace
from random import Random

import cases
import emulation
import pytest
import torch
from reference import Sizes

# Kernel, stride and padding in height and width. A name has the kernel, the stride after "/" where
# it is not 2 (or not 4, of 4x4), and the padding after "+".
WINDOWS = {
    "2x2": (2, 2, 0),
    "3x3": (3, 2, 0),
    "3x3+1": (3, 2, 1),
    "4x4": (4, 4, 0),
    "3x3/1+1": (3, 1, 1),
    "5x5/1+2": (5, 1, 2),
    # These have no kernel of their own.
    "2x2+1": (2, 2, 1),
    "3x3/3": (3, 3, 0),
    "2x2/1": (2, 1, 0),
    "3x3/1": (3, 1, 0),
    "5x5/3": (5, 3, 1),
    "6x6/5": (6, 5, 0),
}
# The windows of the dimensions before the width; None stands for the window in height.
SHAPES: dict[str, tuple[Sizes | None, ...]] = {
    "lines": (),
    "volumes": ((2, 2, 0), None),
    "deep-overlap": ((2, 1, 0), None),
}
PLANES: tuple[Sizes | None, ...] = (None,)
INDICES = {
    "any": cases.INDEX_DTYPES,
    "flat": (torch.int64, torch.int32),
    "uint8": (torch.uint8,),
}
# A row stands for every combination of one word from each of its columns; the last column is the
# first kernel that such a call launches. "rows" divide into vectors, "uneven-rows" do not; "lines",
# "volumes" and "deep-overlap" are of other dimensions than two (SHAPES).
TABLE = """
unpool last    2x2 3x3 3x3+1  rows               bool float16 int32    any    forward cells
unpool last    2x2 3x3+1      channels           uint8 int16 float32   any    forward channels
unpool last    2x2 3x3        uneven-rows        bool float16 float32  any    forward planes
unpool last    3x3+1          unaligned          uint8 float32         any    forward planes
unpool last    2x2 3x3 3x3+1  rows channels      float64 complex64     any    forward planes
unpool last    4x4            rows               float16 float32       any    forward cells
unpool last    3x3/1+1        rows unaligned     int16 float32         any    forward_strips
unpool last    5x5/1+2        rows channels      float16 float32       uint8  forward_strips
unpool last    2x2 3x3 4x4    rows               complex128            any    forward_last_slots
unpool last    4x4            channels unaligned  float32              any    forward_last_slots
unpool last    4x4 3x3/1+1    rows               bool float64          any    forward_last_slots
unpool last    5x5/1+2        rows               float32               flat   forward_last_slots
unpool last    5x5/1+2        rows               uint8 complex64       uint8  forward_last_slots
unpool last    2x2+1 3x3/1    rows channels      float32               any    forward_last_slots
unpool last    2x2 4x4        lines volumes      float32               any    forward cells
unpool last    3x3+1          volumes            float32               any    forward cells
unpool last    3x3+1          lines              float32               flat   forward cells
unpool last    3x3+1          lines              float32               uint8  forward_last_slots
unpool last    3x3/1+1        lines volumes      float32               any    forward_last_slots
unpool last    2x2 3x3        deep-overlap       float32               any    forward_last_slots
unpool sum     2x2 4x4        rows               bfloat16 int32        any    forward cells
unpool sum     2x2            channels           uint8 float32         any    forward channels
unpool sum     2x2            rows uneven-rows   float64 int64         any    forward planes
unpool sum     3x3 3x3+1      rows               float16 float32       any    forward cells
unpool sum     3x3 3x3+1      channels           bfloat16 float32      any    forward channels
unpool sum     3x3+1          uneven-channels    float16 bfloat16      any    forward planes
unpool sum     3x3/1+1        rows channels      bfloat16 float32      any    forward_strips
unpool sum     5x5/1+2        rows channels      float16 float32       uint8  forward_strips
unpool sum     2x2            rows               complex64 complex128  any    forward_own_sum_slots
unpool sum     3x3+1 3x3/1+1  rows channels      int32 float64         any    forward_own_sum_slots
gradient last  2x2 4x4 3x3/3  uneven-channels    bool float16 float64  any    backward
gradient last  2x2+1          unaligned lines    float32 complex64     any    backward
gradient last  3x3 2x2/1      uneven-rows lines  uint8 complex64       any    backward drops losers
gradient last  3x3+1 5x5/3    rows               float32               any    backward drops losers
gradient last  3x3/1 6x6/5    rows channels      float32               any    backward_last_slots
gradient last  3x3+1          volumes            float32               any    backward_last_slots
gradient last  2x2            deep-overlap       float32               any    backward_last_slots
gradient last  2x2 3x3+1      rows               complex128            any    backward_last_slots
gradient sum   5x5/1+2 6x6/5  channels volumes   uint8 complex64       any    backward
gradient sum   2x2 3x3+1      rows               complex128            any    backward_sum_slots
"""
ROWS = [re.split("  +", line) for line in TABLE.strip().splitlines()]
# The second kernel of a call with flat indices. Offsets cannot leave their window.
FIXUP = {
    "unpool last": ["forward_last_slots"],
    "unpool sum": ["forward_any_sum_slots"],
    "gradient last": ["backward_last_slots"],
    "gradient sum": [],  # it reads the gradient wherever an index leads
}
ELEMENTS = ("planes", "channels", "cells")  # of a thread, numbered as in forward_tile.cuh


def name_of(signature: str) -> str:
    """A kernel as the tables name it."""
    name = re.match(r"void emulated::(\w+)<", signature)[1]
    if elements := re.search(r"\(emulated::Elements\)(\d)>", signature):
        name += f" {ELEMENTS[int(elements[1])]}"
    if name == "backward" and ", true>(" in signature:
        name += " drops losers"
    if "_last_slots<unsigned long," in signature:
        name += " in 64 bits"
    return name


def launched(call: cases.Call) -> list[str]:
    """The kernels that a call launches, in their order."""
    emulation.forget_launches()
    call.on()
    return [name_of(signature) for signature, _, _ in emulation.launches()]


def draw(
    rng: Random, function: str, window: str, layout: str, dtype: torch.dtype, index: torch.dtype
) -> cases.Call:
    """A call as the table describes it."""
    operator, reduce = function.split()
    if index == torch.uint8:
        operator += " from offsets"
    windows = [each or WINDOWS[window] for each in (*SHAPES.get(layout, PLANES), None)]
    columns = 5 if layout == "uneven-rows" else 16
    pooled = (*(2 for _ in windows[1:]), columns)
    *output, width = (n * stride for n, (_, stride, _) in zip(pooled, windows, strict=True))
    output = (*output, width + (layout == "uneven-rows"))
    call = cases.draw(
        rng,
        operator,
        dtype,
        reduce=reduce,
        kind="own window",
        geometry=cases.Geometry(pooled, *zip(*windows, strict=True), output),
        leading=(2, 5 if layout == "uneven-channels" else 16),
        layout="contiguous",
    )
    place = {"channels": "channels_last", "unaligned": "unaligned"}
    place = place.get(layout.removeprefix("uneven-"), "contiguous")
    values, indices = call.tensors
    tensors = (values, indices.to(index))
    return replace(call, tensors=tuple(cases.laid_out(each, place, call.dims) for each in tensors))


@pytest.mark.parametrize("row", ROWS, ids=" | ".join)
def test_calls_of_a_row_launch_its_kernel(row: list[str], rng: Random) -> None:
    with emulation.emulated_gpu(rng):
        check_row(row, rng)


def check_row(row: list[str], rng: Random, device: str = "cpu") -> None:
    """Compare what all calls of a row launch."""
    function, windows, layouts, dtypes, indices, kernel = row
    calls = itertools.product(windows.split(), layouts.split(), dtypes.split(), INDICES[indices])
    for window, layout, dtype, index in calls:
        call = draw(rng, function, window, layout, getattr(torch, dtype), index)
        fixup = [] if index == torch.uint8 else FIXUP[function]
        assert launched(call.moved(device)) == [kernel, *fixup], (window, layout, dtype, index)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        pytest.param(12, 1, id="both fit"),
        pytest.param(24, 2, id="one fits"),
        pytest.param(40, 0, id="none fits"),
    ],
)
@pytest.mark.parametrize("operator", ["unpool", "gradient"])
def test_large_calls_are_cut(operator: str, rows: int, parts: int, rng: Random) -> None:
    """Of two images the emulation's 32 bits count one, both, or not one.

    Each part launches both kernels. If not even one image fits, there are no parts, and the simple
    one does all.
    """
    call = cases.draw(
        rng,
        operator,
        torch.float32,
        reduce="last",
        kind="own window",
        geometry=cases.geometry_of((rows, 1024), WINDOWS["2x2"]),
        leading=(2, 1),
        layout="contiguous",
    )
    fast = {"unpool": "forward cells", "gradient": "backward"}[operator]
    slots = {"unpool": "forward_last_slots", "gradient": "backward_last_slots"}[operator]
    kernels = [f"{slots} in 64 bits"] * 2 if parts == 0 else [fast, slots] * parts
    with emulation.emulated_gpu(rng):
        assert launched(call) == kernels
