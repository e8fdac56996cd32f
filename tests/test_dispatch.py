# SPDX-License-Identifier: BSD-3-Clause
"""Which CUDA kernels a call of unpooling launches.

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

# A row stands for every combination of one word from each of its columns. The last column is the
# first kernel that such a call launches. Of the others,
#
#   3/2+1       is a window in height and width, of kernel 3, stride 2 and padding 1
#   rows        are contiguous, and divide into a kernel's vectors; odd-rows do not divide
#   unaligned   are such rows, at an address that does not divide
#   channels    of channels_last tensors divide into vectors; odd-channels do not
#   lines       are rows in one dimension, volumes in three, where windows do not overlap in depth;
#               in deep-overlap they do
#   any         stands for all dtypes of indices
TABLE = """
unpool last    2/2 3/2 3/2+1  rows                bool float16 int32  any    forward cells
unpool last    2/2 3/2+1      channels            uint8 int16 int32   any    forward channels
unpool last    2/2 3/2+1      odd-rows unaligned  bool float16 int32  any    forward column
unpool last    2/2 3/2 3/2+1  rows channels       float64 complex64   any    forward column
unpool last    4/4            rows                float16 float32     any    forward cells
unpool last    3/1+1          rows                int16 float32       uint8  forward cells
unpool last    3/1+1          rows lines          int16 float32       int64  forward column
unpool last    3/1+1          unaligned channels  int16 float32       any    forward column
unpool last    5/1+2          rows                float16 float32     uint8  forward cells
unpool last    5/1+2          channels odd-rows   float16 float32     uint8  forward column
unpool last    5/1+2          rows                float32             int64  forward_last_slots
unpool last    4/4            channels unaligned  float32             any    forward_last_slots
unpool last    4/4 3/1+1      rows                bool float64        any    forward_last_slots
unpool last    2/2 3/2 4/4    rows                complex128          any    forward_last_slots
unpool last    2/2+1 3/1      rows                float32             any    forward_last_slots
unpool last    2/2 4/4        lines volumes       float32             any    forward cells
unpool last    3/2+1          lines               float32             int64  forward cells
unpool last    3/2+1 3/1+1    lines               float32             uint8  forward_last_slots
unpool last    3/1+1          volumes             float32             any    forward_last_slots
unpool last    2/2            deep-overlap        float32             any    forward_last_slots
unpool sum     2/2            rows                bfloat16 int32      any    forward cells
unpool sum     3/2 3/2+1      rows                float16 float32     any    forward cells
unpool sum     3/2+1          channels            bfloat16 float32    any    forward channels
unpool sum     3/2+1          odd-channels        float16 bfloat16    any    forward column
unpool sum     3/1+1          rows                bfloat16 float32    uint8  forward cells
unpool sum     3/1+1          rows                bfloat16 float32    int64  forward column
unpool sum     3/1+1          channels            bfloat16 float32    any    forward column
unpool sum     2/2            rows                complex64           any    forward_own_sum_slots
unpool sum     3/2+1 3/1+1    rows                int32 float64       any    forward_own_sum_slots
gradient last  2/2 2/2+1 3/3  rows lines          bool float32        any    backward cells
gradient last  2/2 2/2+1 3/3  odd-channels        bool complex64      any    backward column
gradient last  2/1 3/2+1      rows                bool float32        any    backward last cells
gradient last  2/1 3/2+1      channels            uint8 float32       any    backward last channels
gradient last  3/2+1 5/3+1    odd-rows            uint8 complex64     any    backward last column
gradient last  3/1 6/5        rows                float32             any    backward_last_slots
gradient last  2/2 3/2+1      deep-overlap        float32             any    backward_last_slots
gradient last  2/2 3/2+1      rows                complex128          any    backward_last_slots
gradient sum   5/1+2 6/5      channels            uint8 float16       any    backward channels
gradient sum   5/1+2 6/5      unaligned volumes   complex64           any    backward column
gradient sum   2/2 3/2+1      rows                complex128          any    backward_sum_slots
"""
ROWS = [re.split("  +", line) for line in TABLE.strip().splitlines()]
# The second kernel of a call with flat indices. Offsets cannot leave their window.
FIXUP = {
    "unpool last": ["ordered unpool"],
    "unpool sum": ["forward_any_sum_slots"],
    "gradient last": ["ordered gradient"],
    "gradient sum": [],  # it reads the gradient wherever an index leads
}
FORMS = ("cells", "channels", "column")  # of what a thread owns, numbered as in cells.cuh


def name_of(signature: str) -> str:
    """A kernel as the tables name it."""
    name = re.match(r"void emulated::(\w+)<", signature)[1]
    if form := re.search(r"(, true)?, \(emulated::Form\)(\d)>", signature):
        drops_losers = name == "backward" and form[1]
        name += " last" * bool(drops_losers) + f" {FORMS[int(form[2])]}"
    if name == "ordered":
        name += " unpool" if ", true>(" in signature else " gradient"
    return name


def launched(call: cases.Call) -> list[str]:
    """The kernels that a call launches, in their order."""
    emulation.forget_launches()
    call.on()
    return [name_of(signature) for signature, _, _ in emulation.launches()]


def draw(
    rng: Random, function: str, window: str, layout: str, dtype: str, index_dtype: torch.dtype
) -> cases.Call:
    """A call as the table describes it."""
    operator, reduce = function.split()
    if index_dtype == torch.uint8:
        operator += " from offsets"
    numbers = [int(n) for n in re.findall("[0-9]+", window)]
    flat = (*numbers, 0)[:3]  # without padding if there are two numbers
    deep = (2, 1, 0) if layout == "deep-overlap" else (2, 2, 0)
    dims = {"lines": 1, "volumes": 3, "deep-overlap": 3}.get(layout, 2)
    # In depth, height and width, of which a plane has the last two, and a line the last.
    windows = (deep, flat, flat)[-dims:]
    pooled = (2, 2, 5 if layout == "odd-rows" else 16)[-dims:]
    output = [n * stride for n, (_, stride, _) in zip(pooled, windows, strict=True)]
    output[-1] += layout == "odd-rows"
    if "channels" in layout:
        memory = "channels_last"
    else:
        memory = "unaligned" if layout == "unaligned" else "contiguous"
    call = cases.draw(
        rng,
        operator,
        getattr(torch, dtype),
        reduce=reduce,
        kind="own window",
        geometry=cases.Geometry(pooled, *zip(*windows, strict=True), tuple(output)),
        leading=(2, 5 if layout == "odd-channels" else 16),
        layout=memory,
    )
    values, indices = call.tensors
    return replace(call, tensors=(values, indices.to(index_dtype)))


@pytest.mark.parametrize("row", ROWS, ids=" | ".join)
def test_calls_of_a_row_launch_its_kernel(row: list[str], rng: Random) -> None:
    with emulation.emulated_gpu(rng):
        check_row(row, rng)


def check_row(row: list[str], rng: Random, device: str = "cpu") -> None:
    """Compare what all calls of a row launch."""
    function, windows, layouts, dtypes, indices, kernel = row
    index_dtypes = cases.INDEX_DTYPES if indices == "any" else [getattr(torch, indices)]
    words = itertools.product(windows.split(), layouts.split(), dtypes.split(), index_dtypes)
    for each in words:
        call = draw(rng, function, *each).moved(device)
        fixup = [] if each[-1] == torch.uint8 else FIXUP[function]
        assert launched(call) == [kernel, *fixup], each
