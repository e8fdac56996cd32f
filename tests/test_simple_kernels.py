# SPDX-License-Identifier: BSD-3-Clause
"""Fast CUDA kernels against the simple ones: equal results, of calls too large for a reference too.

``MAXUNPOOL_CUDA_SIMPLE_KERNELS=1`` sends unpooling and its gradient to the simple kernels alone.
"""

import itertools
import math
from dataclasses import replace
from random import Random

import cases
import emulation
import failures
import pytest
import torch
from cases import DENSE, REDUCES, UNPOOLING, Call, all_same, draw, geometry_of, scaled
from conftest import EMULATED, GPUS, skip_without_memory
from failures import check_each
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
        emulation.forget_launches()
        simple_results = there.on()
        launched = [signature for signature, _, _ in emulation.launches()]
        assert bool(launched) == emulation.is_on
        assert all("_slots<" in signature for signature in launched)
        call.compare(simple_results)
        assert all_same(fast_results, simple_results)

    calls = (draw(rng, operator, reduce=reduce, any_bits=n % 3 == 0) for n in range(scaled(60)))
    check_each(calls, check)


# Planes so small that a block does several, in the emulation too, whose blocks have 128 slots or
# fewer.
SMALL_PLANES = {
    "3x3/1": geometry_of((3, 4), (3, 1, 1)),
    "9x9/1, of sets of three words": geometry_of((4, 4), (9, 1, 4)),
    "3x3x3/2": geometry_of((2, 2, 2), (3, 2, 1)),
    "windows that cover no output": geometry_of((3, 3), (2, 3, 1), (2, 4)),
}


@on_gpus
@pytest.mark.parametrize("window", SMALL_PLANES)
@every_unpooling
def test_several_small_planes_of_a_block(
    device: str, operator: str, window: str, rng: Random, monkeypatch: Patch
) -> None:
    """Of 35 planes, or of 2 images of 33 channels, the last block has fewer than the others."""
    geometry = SMALL_PLANES[window]
    if "offsets" in operator and geometry.has_empty_window:
        pytest.skip("a window without outputs has no offset")
    choose(monkeypatch, simple=True)
    calls = (
        draw(
            rng,
            operator,
            torch.float32,
            geometry=geometry,
            layout=rng.choice(DENSE),
            kind=rng.choice(("maxima", "one out of window", "few")),
            leading=rng.choice(((5, 7), (2, 32), (2, 33))),
        )
        for _ in range(scaled(24))
    )
    check_each(calls, lambda call: call.verify(device))


@on_gpus
@every_unpooling
def test_simple_kernels_name_bad_indices(
    device: str, operator: str, rng: Random, monkeypatch: Patch
) -> None:
    """Also of small planes, which are counted in the whole call, not in those of the block."""
    choose(monkeypatch, simple=True)
    drawn = [draw(rng, operator, rng.choice(cases.ARITHMETIC)) for _ in range(scaled(60))]
    for layout in DENSE:
        chosen = {"geometry": SMALL_PLANES["3x3/1"], "leading": (5, 8), "layout": layout}
        drawn.append(draw(rng, operator, torch.float32, **chosen))
    calls = [cases.with_invalid_index(call, rng) for call in drawn]
    if "offsets" in operator:  # no offset of an empty window is valid
        geometry = SMALL_PLANES["windows that cover no output"]
        call = draw(rng, operator, torch.float32, geometry=geometry, leading=(2, 3))
        calls.append(replace(call, error=r"^max_unpool2d: .*invalid max index"))
    check_each(calls, lambda call: call.verify_error(device))


@pytest.mark.parametrize("operator", ["unpool", "gradient"])
@on_emulation
def test_the_fix_up_kernel_looks_at_the_flags_of_all_images_of_a_block(
    device: str, operator: str, rng: Random
) -> None:
    """The fast kernel of 2x2 windows has other blocks, so each image has flags of its own."""
    chosen = {"kind": "one out of window", "layout": "contiguous", "leading": (4, 10)}
    chosen |= {"geometry": geometry_of((2, 3), (2, 2, 0)), "reduce": "last"}
    check_each((draw(rng, operator, torch.float32, **chosen) for _ in range(8)), Call.verify)


# What 32 bits count on a GPU, and what the emulation allows in place of it: elements.
MOST = {"cuda": 2**31, "emulated": 2**17}
# The way, the window, and the dtypes of indices and of elements. There are fast kernels for sums of
# overlapping windows, and for windows that are 1 apart, of bfloat16, but not of uint8.
LARGE = [
    ("even rows", (2, 2, 0), torch.int32, torch.uint8),
    ("channels", (2, 2, 0), torch.uint8, torch.uint8),
    ("uneven rows", (3, 2, 1), torch.int32, torch.bfloat16),
    ("channels", (3, 2, 1), torch.uint8, torch.bfloat16),
    ("uneven rows", (3, 1, 1), torch.int32, torch.bfloat16),
]
# Shares of the elements that 32 bits count. Calls of more are cut into launches that fit.
SHARES = [pytest.param((0.9, 0.99), id="below"), pytest.param((1.01, 1.2), id="above")]


def large_input(way: str, elements: int, most: int, device: str) -> Tensor:
    """Of roughly so many elements: 500 planes, which are the larger, the larger ``most`` is."""
    side = math.isqrt(most // 512)
    channels = 16 if way == "channels" else 2
    width = side - 1 if way == "uneven rows" else side
    shape = (elements // (channels * side * width), channels, side, width)
    x = torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 100)
    return x.contiguous(memory_format=torch.channels_last) if way == "channels" else x


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("way", "window", "index_dtype", "dtype"), LARGE, ids=str)
@pytest.mark.parametrize(
    "device",
    [pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.slow]), EMULATED],
    indirect=True,
)
def test_fast_kernels_near_the_limit_of_32_bits(
    device: str,
    way: str,
    window: Sizes,
    index_dtype: torch.dtype,
    dtype: torch.dtype,
    share: tuple[float, float],
    rng: Random,
    monkeypatch: Patch,
) -> None:
    """Forward and backward, on indices that pooling found. A reference would take minutes."""
    most = MOST[failures.device]
    elements = int(most * rng.uniform(*share))
    if device == "cuda":
        pooled = elements // window[1] ** 2
        outputs = 3 * elements * dtype.itemsize  # the pooled input and two results
        comparison = elements  # a bool for each
        bytes_of_cell = dtype.itemsize + index_dtype.itemsize
        skip_without_memory(outputs + comparison + pooled * bytes_of_cell)
    x = large_input(way, elements, most, device).to(dtype)
    windows = tuple((n, n) for n in window)
    values, indices = _operators.max_pool(x, *windows, (1, 1), False, index_dtype)
    calls = ((_operators.max_unpool, values), (_operators.max_unpool_backward, x))
    for (operator, tensor), reduce in itertools.product(calls, REDUCES):
        choose(monkeypatch, simple=False)
        fast = operator(tensor, indices, x.shape[2:], *windows, reduce)
        choose(monkeypatch, simple=True)
        simple = operator(tensor, indices, x.shape[2:], *windows, reduce)
        assert torch.equal(fast, simple), (operator, reduce)
        assert fast.any()
        del fast, simple  # there may be room for two results alone
    maxunpool_cuda.check_errors()


@on_emulation
@every_unpooling
def test_a_bad_index_of_a_call_that_is_cut_is_named(
    device: str, operator: str, rng: Random
) -> None:
    """Its plane is counted in the whole call."""
    geometry = geometry_of((24, 24), (2, 2, 0))
    chosen = {"kind": "own window", "geometry": geometry, "leading": (10, 16)}
    assert math.prod((*chosen["leading"], *geometry.output)) > 2 * MOST["emulated"]
    drawn = (
        draw(rng, operator, torch.uint8, layout=layout, **chosen) for layout in DENSE * scaled(12)
    )
    calls = (cases.with_invalid_index(call, rng) for call in drawn)
    check_each(calls, Call.verify_error)
