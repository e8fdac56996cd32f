# SPDX-License-Identifier: BSD-3-Clause
"""The simple CUDA kernel, and fast ones where planes are small, windows empty or calls large.

``MAXUNPOOL_CUDA_SIMPLE_KERNELS=1`` sends unpooling and its gradient to the simple kernel alone.
"""

import itertools
import math
from random import Random

import cases
import emulation
import failures
import pytest
import torch
from cases import DENSE, REDUCES, UNPOOLING, Call, Geometry, draw, geometry_of, scaled
from conftest import EMULATED, GPUS, skip_without_memory
from failures import check_each
from reference import Sizes

import maxunpool_cuda
from maxunpool_cuda import _operators

Patch = pytest.MonkeyPatch
every_unpooling = pytest.mark.parametrize("operator", UNPOOLING)
on_gpus = pytest.mark.parametrize("device", GPUS, indirect=True)
on_emulation = pytest.mark.parametrize("device", ["emulated"], indirect=True)


@pytest.fixture
def simple_kernels(monkeypatch: Patch) -> None:
    monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", "1")


# Planes so small that a block of slots.cuh does several, in the emulation too, where it has 128
# slots or fewer. A sum of windows of 9x9 keeps sets of three words; the last windows cover no
# output.
SMALL_PLANES = [
    geometry_of((3, 4), (3, 1, 1)),
    geometry_of((4, 4), (9, 1, 4)),
    geometry_of((2, 2, 2), (3, 2, 1)),
    geometry_of((3, 3), (2, 3, 1), (2, 4)),
]


@on_gpus
@pytest.mark.parametrize("reduce", REDUCES)
@every_unpooling
def test_simple_kernels_give_the_same_results(
    device: str, operator: str, reduce: str, rng: Random, simple_kernels: None
) -> None:
    calls = [draw(rng, operator, reduce=reduce, any_bits=n % 3 == 0) for n in range(scaled(60))]
    # Planes that are few, and not small. The emulation has 8 processors: several blocks share one.
    large = itertools.product((torch.float32, torch.float16), (1, 2, 6), DENSE)
    for dtype, channels, layout in large:
        chosen = {"geometry": geometry_of((11, 17), (3, 2, 1)), "leading": (1, channels)}
        calls.append(draw(rng, operator, dtype, reduce=reduce, layout=layout, **chosen))

    def check(call: Call) -> None:
        call.verify(device)
        launched = [signature for signature, _, _ in emulation.launches()]
        assert bool(launched) == emulation.is_on
        assert all("ordered<" in each for each in launched)

    check_each(calls, check)


@on_gpus
@pytest.mark.parametrize("simple", [False, True], ids=["fast", "simple"])
@pytest.mark.parametrize("reduce", REDUCES)
@every_unpooling
def test_small_planes(
    device: str, operator: str, reduce: str, simple: bool, rng: Random, monkeypatch: Patch
) -> None:
    """Of 35 planes, or of 2 images of 33 channels, the last block has fewer than the others."""
    monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", str(int(simple)))
    calls = []
    for geometry in SMALL_PLANES:
        if "offsets" in operator and geometry.has_empty_window:
            continue  # a window without outputs has no offset
        for leading, layout in itertools.product(((5, 7), (2, 33)), DENSE * scaled(8)):
            chosen = {"geometry": geometry, "leading": leading, "layout": layout}
            calls.append(draw(rng, operator, torch.float32, reduce=reduce, **chosen))
    check_each(calls, lambda call: call.verify(device))


# Of the windows, the first or the last ones cover no output.
EMPTY_WINDOWS = [
    geometry_of((20, 12), (2, 4, 0), (70, 47)),
    Geometry((20, 12), (2, 2), (4, 4), (2, 0), (75, 46)),
]


@on_gpus
@pytest.mark.parametrize("operator", ["unpool", "gradient"])
@pytest.mark.parametrize("geometry", EMPTY_WINDOWS, ids=["behind the outputs", "in the padding"])
def test_windows_without_outputs(
    device: str, geometry: Geometry, operator: str, rng: Random
) -> None:
    """Their cells have no output in the plane, so their indices are out of window, and seen."""
    calls = []
    for kind, layout in itertools.product(("own window", "maxima"), DENSE * scaled(8)):
        chosen = {"geometry": geometry, "leading": (3, 2), "layout": layout, "kind": kind}
        calls.append(draw(rng, operator, torch.float32, reduce="last", **chosen))
    check_each(calls, lambda call: call.verify(device))


@on_gpus
@every_unpooling
def test_simple_kernels_name_bad_indices(
    device: str, operator: str, rng: Random, simple_kernels: None
) -> None:
    """Also of small planes, which are counted in the whole call, not in those of the block."""
    calls = [draw(rng, operator, rng.choice(cases.ARITHMETIC)) for _ in range(scaled(60))]
    for layout in DENSE:
        chosen = {"geometry": SMALL_PLANES[0], "leading": (5, 8), "layout": layout}
        calls.append(draw(rng, operator, torch.float32, **chosen))
    bad = (cases.with_invalid_index(call, rng) for call in calls)
    check_each(bad, lambda call: call.verify_error(device))


@pytest.mark.parametrize("window", [(2, 2, 0), (4, 3, 1)])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("operator", ["unpool", "gradient"])
@on_emulation
def test_the_fix_up_kernel_does_the_flagged_images(
    device: str, operator: str, reduce: str, window: Sizes, rng: Random
) -> None:
    """Several share a chunk of a kernel's items, or a part of slots.cuh."""
    chosen = {"kind": "one out of window", "layout": "contiguous", "leading": (4, 10)}
    chosen |= {"geometry": geometry_of((2, 3), window), "reduce": reduce}
    check_each((draw(rng, operator, torch.float32, **chosen) for _ in range(8)), Call.verify)


# What 32 bits count on a GPU, and what the emulation allows in place of it: elements.
MOST = {"cuda": 2**31, "emulated": 2**17}
# The layout, the window, and the dtypes of indices and of elements. There are fast kernels for sums
# of overlapping windows, and for windows that are 1 apart, of bfloat16, but not of uint8.
LARGE = [
    ("even rows", (2, 2, 0), torch.int32, torch.uint8),
    ("channels_last", (2, 2, 0), torch.uint8, torch.uint8),
    ("uneven rows", (3, 2, 1), torch.int32, torch.bfloat16),
    ("uneven rows", (3, 1, 1), torch.int32, torch.bfloat16),
]
# Of a pooling's input, two results and a comparison; of values and indices, which are a quarter as
# many as these or, of bfloat16, up to as many.
BYTES_OF_ELEMENT = {torch.uint8: 6, torch.bfloat16: 13}


@pytest.mark.parametrize("share", [0.95, 1.1])  # of the elements that 32 bits count
@pytest.mark.parametrize(("layout", "window", "index_dtype", "dtype"), LARGE, ids=str)
@pytest.mark.parametrize(
    "device",
    [pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.slow]), EMULATED],
    indirect=True,
)
def test_fast_kernels_near_the_limit_of_32_bits(
    device: str,
    layout: str,
    window: Sizes,
    index_dtype: torch.dtype,
    dtype: torch.dtype,
    share: float,
    monkeypatch: Patch,
) -> None:
    """Forward and backward, on indices that pooling found. A reference would take minutes.

    Calls of more elements are cut into launches that 32 bits can count.
    """
    most = MOST[failures.device]
    elements = int(most * share)
    if device == "cuda":
        skip_without_memory(elements * BYTES_OF_ELEMENT[dtype])
    side = math.isqrt(most // 512)  # so there are about 500 planes
    channels = 16 if layout == "channels_last" else 2
    width = side - 1 if layout == "uneven rows" else side
    images = elements // (channels * side * width)
    x = torch.empty(images, channels, side, width, dtype=torch.uint8, device=device)
    x = cases.laid_out(x.random_(0, 100), layout, dims=2).to(dtype)
    windows = tuple((n, n) for n in window)
    values, indices = _operators.max_pool(x, *windows, (1, 1), False, index_dtype)
    calls = ((_operators.max_unpool, values), (_operators.max_unpool_backward, x))
    for (operator, tensor), reduce in itertools.product(calls, REDUCES):
        monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", "0")
        emulation.forget_launches()
        fast = operator(tensor, indices, x.shape[2:], *windows, reduce)
        assert all("ordered<" not in name for name, _, _ in emulation.launches()[:1])
        monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", "1")
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
