# SPDX-License-Identifier: BSD-3-Clause
"""Fast CUDA kernels against the simple ones: equal results, of calls too large for a reference too.

``MAXUNPOOL_CUDA_SIMPLE_KERNELS=1`` sends unpooling and its gradient to the simple kernels alone.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import cases
import emulation
import pytest
import torch
from cases import LAYOUTS, REDUCES, UNPOOLING, Call, Geometry, all_same, draw, geometry_of, scaled
from conftest import GPUS
from failures import check_each
from gpu_tests import skip_without_memory
from reference import Sizes
from torch import Tensor

import maxunpool_cuda
from maxunpool_cuda import _operators

Patch = pytest.MonkeyPatch
every_unpooling = pytest.mark.parametrize("operator", UNPOOLING)
on_gpus = pytest.mark.parametrize("device", GPUS, indirect=True)
on_emulation = pytest.mark.parametrize("device", ["emulated"], indirect=True)


def choose(monkeypatch: Patch, simple: bool) -> None:
    """Unpooling that is called from now on runs the simple kernels alone, or any."""
    monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", str(int(simple)))


@on_gpus
@pytest.mark.parametrize("reduce", REDUCES)
@every_unpooling
def test_simple_kernels_give_the_same_results(
    device: str, operator: str, reduce: str, rng: Random, monkeypatch: Patch
) -> None:

    def check(call: Call) -> None:
        there = call.moved(device)
        choose(monkeypatch, simple=False)
        fast_results = there.on()
        choose(monkeypatch, simple=True)
        simple_results = there.on()
        call.compare(simple_results)
        assert all_same(fast_results, simple_results)

    calls = (draw(rng, operator, reduce=reduce, any_bits=n % 3 == 0) for n in range(scaled(60)))
    check_each(calls, check)


@on_gpus
@every_unpooling
def test_simple_kernels_name_bad_indices(
    device: str, operator: str, rng: Random, monkeypatch: Patch
) -> None:
    choose(monkeypatch, simple=True)
    drawn = (draw(rng, operator, rng.choice(cases.ARITHMETIC)) for _ in range(scaled(60)))
    calls = (cases.with_invalid_index(call, rng) for call in drawn)
    check_each(calls, lambda call: call.verify_error(device))


def take_launched() -> set[str]:
    """The symbols of the emulated kernels that ran since the last call."""
    return {*emulation.library().take_launched()}


def is_fast(kernel: str) -> bool:
    """Whether a symbol is that of a fast kernel of unpooling or of its gradient."""
    return re.search(r"\d(forward|forward_strips|backward)I", kernel) is not None


@on_emulation
@pytest.mark.parametrize("way", cases.WAYS)
@every_unpooling
def test_the_variable_chooses_simple_kernels(
    device: str, operator: str, way: str, rng: Random, monkeypatch: Patch
) -> None:
    """It is read at each call. Other values than 1, and none, leave the choice to the call."""

    def launched_with(value: str | None, call: Call) -> set[str]:
        monkeypatch.delenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", raising=False)
        if value is not None:
            monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", value)
        take_launched()
        call.on()
        return take_launched()

    def check(call: Call) -> None:
        for value, is_simple in (("1", True), ("0", False), ("1", True), (None, False)):
            launched = launched_with(value, call)
            assert launched, value
            assert all("_slots" in kernel for kernel in launched) == is_simple, (value, launched)
            assert any(map(is_fast, launched)) != is_simple, (value, launched)

    aims = [cases.aimed(rng, operator, way, window, dims=2) for window in ((2, 2, 0), (3, 2, 1))]
    check_each((draw(rng, operator, torch.float32, **aim) for aim in aims), check)


# What 32 bits count on a GPU, and what the emulation allows in place of it: elements.
MOST = {"cuda": 2**31, "emulated": 2**17}


@dataclass(frozen=True)
class Large:
    """A kind of call whose output has a given number of elements, roughly."""

    way: str  # one of WAYS
    window: Sizes
    index_dtype: torch.dtype
    dtype: torch.dtype = torch.uint8

    def shape(self, elements: int, most: int) -> Sizes:
        """Of the output: some 500 planes, which are the larger, the larger ``most`` is."""
        side = math.isqrt(most // 512)
        channels = 16 if self.way == "channels" else 2
        width = side - 1 if self.way == "uneven rows" else side
        return (elements // (channels * side * width), channels, side, width)

    def bytes(self, elements: int) -> int:
        """The memory that check_large() needs at most."""
        pooled = elements // self.window[1] ** 2
        outputs = 3 * elements * self.dtype.itemsize  # the pooled input and two results
        comparison = elements  # a bool for each
        return outputs + comparison + pooled * (self.dtype.itemsize + self.index_dtype.itemsize)


LARGE = [
    Large(way, window, index_dtype)
    for way in cases.WAYS
    for window in ((2, 2, 0), (3, 2, 1))
    for index_dtype in (torch.uint8, torch.int32)
]
# Sums of overlapping windows have fast kernels for floating-point numbers alone.
LARGE += [Large(way, (3, 2, 1), torch.uint8, torch.bfloat16) for way in cases.WAYS]
# Windows that are 1 apart have fast kernels for numbers of 2 and 4 bytes.
LARGE += [
    Large("uneven rows", (3, 1, 1), index, torch.bfloat16) for index in (torch.uint8, torch.int32)
]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Like cases.same, but on the device, and without a copy of either."""
    bits = {1: torch.uint8, 2: torch.int16}[a.itemsize]
    return a.stride() == b.stride() and torch.equal(a.view(bits), b.view(bits))


def check_large(large: Large, elements: int, most: int, device: str, patch: Patch) -> None:
    """Compare fast and simple kernels, forward and backward, on indices that pooling found.

    There is no reference, as a CPU would take minutes.
    """
    shape = large.shape(elements, most)
    x = torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 100).to(large.dtype)
    if large.way == "channels":
        x = x.contiguous(memory_format=torch.channels_last)
    window = tuple((n, n) for n in large.window)
    values, indices = _operators.max_pool(x, *window, (1, 1), False, large.index_dtype)
    wrong = []
    for reduce in REDUCES:
        for operator, tensor in (
            (_operators.max_unpool, values),
            (_operators.max_unpool_backward, x),
        ):
            results = []
            for simple in (False, True):
                choose(patch, simple)
                results.append(operator(tensor, indices, shape[2:], *window, reduce))
            if not (same_bits(*results) and results[0].any()):
                wrong.append((operator, reduce))
            del results
    maxunpool_cuda.check_errors()
    assert wrong == []


# Shares of the elements that 32 bits count. Calls of more are cut into launches that fit.
SHARES = [pytest.param((0.9, 0.99), id="below"), pytest.param((1.01, 1.2), id="above")]


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_fast_kernels_near_the_limit_of_32_bits(
    large: Large, share: tuple[float, float], rng: Random, monkeypatch: Patch
) -> None:
    most = MOST["cuda"]
    elements = int(most * rng.uniform(*share))
    skip_without_memory(large.bytes(elements))
    check_large(large, elements, most, "cuda", monkeypatch)


@on_emulation
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_emulated_kernels_near_the_limit_of_32_bits(
    device: str, large: Large, share: tuple[float, float], rng: Random, monkeypatch: Patch
) -> None:
    """The test above, with the emulation's limit. Where there are fast kernels, they are run."""
    most = MOST["emulated"]
    take_launched()
    check_large(large, int(most * rng.uniform(*share)), most, device, monkeypatch)
    assert any(map(is_fast, take_launched()))


@on_emulation
@pytest.mark.parametrize("layout", cases.LAYOUTS[:2])
@every_unpooling
def test_a_bad_index_of_a_call_that_is_cut_is_named(
    device: str, layout: str, operator: str, rng: Random
) -> None:
    """Its plane is counted in the whole call."""
    geometry = cases.geometry_of((24, 24), (2, 2, 0))
    chosen = {"geometry": geometry, "leading": (10, 16), "layout": layout}
    assert math.prod((*chosen["leading"], *geometry.output)) > 2 * MOST["emulated"]
    drawn = (
        draw(rng, operator, torch.uint8, kind="own window", **chosen) for _ in range(scaled(12))
    )
    calls = (cases.with_invalid_index(call, rng) for call in drawn)
    check_each(calls, Call.verify_error)


def counted_in(kernels: Iterable[str]) -> set[int]:
    """The bits of the numbers that these kernels of slots.cuh count in, by their symbols."""
    bits = {"own_sum_slotsI": 32, "any_sum_slotsI": 64, "last_slotsIj": 32, "last_slotsIm": 64}
    return {next(bits[word] for word in bits if word in kernel) for kernel in kernels}


@on_emulation
@pytest.mark.parametrize(("width", "bits"), [(510, 32), (513, 64)])
@pytest.mark.parametrize(
    ("operator", "reduce"),
    [("unpool", "last"), ("unpool from offsets", "sum"), ("gradient", "last")],
)
def test_slots_count_in_32_bits_where_these_suffice(
    device: str, operator: str, reduce: str, width: int, bits: int, rng: Random
) -> None:
    """Of a plane that is a little smaller, or larger, than 32 bits count in the emulation."""
    geometry = geometry_of((256, width), (3, 1, 1))
    assert (math.prod(geometry.output) < MOST["emulated"]) == (bits == 32)
    chosen = {"kind": "one out of window", "layout": "contiguous", "leading": (1, 1)}
    call = draw(rng, operator, torch.float64, reduce=reduce, geometry=geometry, **chosen)
    take_launched()
    call.check()
    assert counted_in(take_launched()) == {bits}


# Planes so small that a block does several, in the emulation too, whose blocks have 128 slots or
# fewer. Of 35 planes, or of 2 images of 33 channels, the last block has fewer than the others.
SMALL_PLANES = {
    "3x3/1": geometry_of((3, 4), (3, 1, 1)),
    "5x5/1": geometry_of((2, 5), (5, 1, 2)),
    "9x9/1, of sets of three words": geometry_of((4, 4), (9, 1, 4)),
    "3x3/3": geometry_of((2, 2), (3, 3, 0)),
    "3x3x3/2": geometry_of((2, 2, 2), (3, 2, 1)),
    "windows that cover no output": geometry_of((3, 3), (2, 3, 1), (2, 4)),
    "windows above the only slice": Geometry(
        (1, 3, 3), kernel=(1, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1), output=(1, 3, 3)
    ),
}


@on_gpus
@pytest.mark.parametrize("leading", [(5, 7), (2, 32), (2, 33)], ids=str)
@pytest.mark.parametrize("window", SMALL_PLANES)
@every_unpooling
def test_several_small_planes_of_a_block(
    device: str, operator: str, window: str, leading: Sizes, rng: Random, monkeypatch: Patch
) -> None:
    """Indices are in their own windows, or one is not, or all may lie anywhere."""
    if "offsets" in operator and SMALL_PLANES[window].has_empty_window:
        pytest.skip("a window without outputs has no offset")
    choose(monkeypatch, simple=True)
    geometry = SMALL_PLANES[window]
    aims = itertools.product(LAYOUTS[:2], REDUCES, ("maxima", "one out of window", "few"))
    calls = (
        draw(
            rng,
            operator,
            torch.float32,
            reduce=reduce,
            geometry=geometry,
            layout=layout,
            kind=kind,
            leading=leading,
        )
        for layout, reduce, kind in aims
    )
    check_each(calls, lambda call: call.verify(device))


@on_gpus
def test_offsets_of_windows_above_the_only_slice_are_out_of_bounds(
    device: str, rng: Random, monkeypatch: Patch
) -> None:
    choose(monkeypatch, simple=True)
    chosen = {"geometry": SMALL_PLANES["windows above the only slice"], "leading": (2, 3)}
    for reduce in REDUCES:
        call = draw(rng, "unpool from offsets", torch.float32, reduce=reduce, **chosen)
        with pytest.raises(RuntimeError, match=r"^max_unpool3d: .*invalid max index"):
            call.results(device)


@pytest.mark.parametrize("operator", ["unpool", "gradient"])
@on_emulation
def test_the_fix_up_kernel_looks_at_the_flags_of_all_images_of_a_block(
    device: str, operator: str, rng: Random
) -> None:
    """The fast kernel of 2x2 windows has other blocks, so each image has flags of its own."""
    chosen = {"kind": "one out of window", "layout": "contiguous", "leading": (4, 10)}
    chosen |= {"geometry": geometry_of((2, 3), (2, 2, 0)), "reduce": "last"}
    check_each((draw(rng, operator, torch.float32, **chosen) for _ in range(8)), Call.verify)


@on_gpus
@every_unpooling
def test_a_bad_index_of_a_small_plane_is_named(
    device: str, operator: str, rng: Random, monkeypatch: Patch
) -> None:
    """Its plane is counted in the whole call, not in those of the block."""
    choose(monkeypatch, simple=True)
    for layout in LAYOUTS[:2]:
        chosen = {"geometry": SMALL_PLANES["3x3/1"], "leading": (5, 8), "layout": layout}
        call = draw(rng, operator, torch.float32, **chosen)
        cases.with_invalid_index(call, rng).verify_error(device)
