"""What every operator computes: the reference's values, of every dtype, layout, size and window."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cases import (
    ARITHMETIC,
    INDEX_DTYPES,
    LAYOUTS,
    MOVABLE,
    OPERATORS,
    POOLED,
    REDUCES,
    UNPOOLING,
    WAYS,
    WINDOWS,
    Call,
    Geometry,
    aimed,
    draw,
    geometry_of,
    laid_out,
    position_of,
    positions_of,
    random_values,
    same,
    scaled,
    windows_of,
    with_a_bad_index,
    with_whole_numbers,
)
from reference import Sizes, max_unpool, max_unpool_backward
from torch import Tensor

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

every_operator = pytest.mark.parametrize("operator", OPERATORS)
every_unpooling = pytest.mark.parametrize("operator", UNPOOLING)
TABLE = [
    pytest.param(operator, dtype, marks=[pytest.mark.sanitized] if operator == "pool" else [])
    for operator in OPERATORS
    for dtype in (POOLED if operator == "pool" else MOVABLE)
]


@pytest.mark.parametrize(("operator", "dtype"), TABLE, ids=str)
def test_operators_equal_the_reference(
    device: str, operator: str, dtype: torch.dtype, rng: Random
) -> None:
    for _ in range(scaled(25)):
        draw(rng, operator, dtype).check(device)


SIZES = [{"leading": (0, 3)}, *({"most_cells": 4000, "longest": n} for n in (20, 100, 4000))]


@pytest.mark.parametrize("chosen", SIZES, ids=str)
@every_operator
def test_empty_batches_and_large_planes(
    device: str, operator: str, chosen: dict[str, Any], rng: Random
) -> None:
    for _ in range(scaled(4)):
        draw(rng, operator, **chosen).check(device)


@pytest.mark.sanitized
@pytest.mark.parametrize("window", WINDOWS)
@every_operator
def test_usual_windows(device: str, operator: str, window: str, rng: Random) -> None:
    for way in WAYS * scaled(8):
        dtype = rng.choice((torch.uint8, torch.float32, torch.float16, torch.float64))
        draw(rng, operator, dtype, **aimed(rng, operator, way, window)).check(device)


PLANES = [  # sizes of the batch and the channels, and of the pooled planes
    *(((2, 1), (34, 31)), ((2, 33), (5, 40)), ((1, 1100), (2, 4)), ((1, 1100), (1, 1))),
    *(((1, 2), (1101,)), ((1, 2), (2, 601))),
    pytest.param((1, 1), (17000,), marks=pytest.mark.slow),
    pytest.param((1, 1), (85, 105), marks=pytest.mark.slow),
    pytest.param((1, 1), (17, 16, 18), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("window", [(3, 2, 1), (2, 1, 0), (4, 2, 2), (2, 2, 0), (1, 3, 0)], ids=str)
@pytest.mark.parametrize(("leading", "pooled"), PLANES, ids=str)
@every_unpooling
def test_planes_cut_among_threads_and_blocks(
    device: str, operator: str, leading: Sizes, pooled: Sizes, window: Sizes, rng: Random
) -> None:
    """Windows overlap at the cuts, and an index may lie far from its window."""
    chosen = {"geometry": geometry_of(pooled, window), "leading": leading}
    for layout in LAYOUTS[:2]:
        for kind in ("one stray", "wrapped window")[: 1 if "offsets" in operator else 2]:
            draw(rng, operator, torch.float32, kind=kind, layouts=(layout,), **chosen).check(device)


@pytest.mark.parametrize("depth", [1, 3])
@every_unpooling
def test_rows_in_a_volume(device: str, operator: str, depth: int, rng: Random) -> None:
    """Windows of one row, whose offsets count from slice to slice."""
    geometry = Geometry((4, 1, 3), (depth, 1, 2), (depth, 1, 2), (0, 0, 0), (4 * depth, 1, 6))
    draw(rng, operator, torch.float32, geometry=geometry, kind="own window").check(device)


@pytest.mark.parametrize("offsets", [False, True], ids=["flat", "offsets"])
@pytest.mark.parametrize("window", ["3x3/2 padded", "3x3/1 padded", "2x2/1"])
def test_every_pair_of_neighbours(device: str, window: str, offsets: bool, rng: Random) -> None:
    """Two cells name one output: its gradient goes to the later one, wherever both lie."""
    g = geometry_of((4, 4), WINDOWS[window])
    call = draw(rng, "gradient", torch.float32, reduce="last", geometry=g, leading=(1, 2))
    windows = [
        {at: p for at in range(9) if (p := position_of(g, cell, at)) is not None}
        for cell in range(16)
    ]
    for i, (a, b) in enumerate(itertools.combinations(range(16), 2)):
        for shared in sorted(set(windows[a].values()) & set(windows[b].values())):
            chosen = [
                next(at for at, position in own.items() if (position == shared) == (cell in (a, b)))
                for cell, own in enumerate(windows)
            ]
            named = torch.tensor(chosen, dtype=torch.uint8).reshape(4, 4).repeat(1, 2, 1, 1)
            indices = named if offsets else positions_of(named, g)
            case = replace(call, tensors=(call.tensors[0], indices))
            case.laid_out(LAYOUTS[i % 2]).check(device)


@pytest.mark.parametrize("pooled", [(6,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("window", ["2x2/2", "3x3/3", "3x3/4"])
def test_every_index_in_the_window_of_another(
    device: str, window: str, pooled: Sizes, rng: Random
) -> None:
    """Windows do not overlap, and all other indices lie in their own."""
    g = geometry_of(pooled, WINDOWS[window])
    chosen = {"geometry": g, "leading": (1, 1), "layouts": ("contiguous",)}
    gradient = draw(rng, "gradient", torch.float32, reduce="last", **chosen)
    single = draw(rng, "unpool", torch.float16, reduce="sum", **chosen)
    positions, _ = windows_of(g)
    for cell, owner in itertools.permutations(range(len(positions)), 2):
        for position in positions[owner]:
            indices = positions[:, 0].clone()
            indices[[cell, owner]] = position
            for call in (gradient, single):
                tensors = (call.tensors[0], indices.reshape(1, 1, *pooled))
                replace(call, tensors=tensors).check(device)


@every_unpooling
def test_outputs_on_huge_pages(operator: str, rng: Random) -> None:
    geometry = geometry_of((3000,), (250, 400, 0), (1_200_000,))
    draw(rng, operator, torch.float32, geometry=geometry, leading=(1, 2)).check()


@pytest.mark.sanitized
def test_sums_in_any_order(gpu: str, rng: Random) -> None:
    """Atomics add in any order if algorithms may be nondeterministic: whole numbers do not mind."""
    torch.use_deterministic_algorithms(False)
    for _ in range(scaled(100)):
        operator = rng.choice(UNPOOLING)
        with_whole_numbers(draw(rng, operator, reduce="sum"), rng).check(gpu)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("operator", UNPOOLING[:2])
def test_operators_are_each_others_transpose(operator: str, reduce: str, rng: Random) -> None:
    """<A x, y> == <x, A^T y>, exactly: integers wrap on both sides."""
    for _ in range(scaled(50)):
        call = draw(rng, operator, torch.int64, reduce=reduce)
        x, indices = call.tensors
        (output,) = call.results()
        y = random_values(rng, tuple(output.shape), torch.int64)
        transposed = replace(call, operator=_ops.max_unpool_backward, tensors=(y, indices))
        assert (output * y).sum() == (x * transposed.results()[0]).sum(), call


# Bits


FLOATS = {  # with integers of the same size
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_keeps_its_bits(device: str, dtype: torch.dtype, layout: str) -> None:
    """Pooled and unpooled, quiet and signalling ones; beside negative zeros, which stay so."""
    integer = FLOATS[dtype]
    nans = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype).view(integer) | 5
    for nan in nans.tolist():
        x = torch.full((1, 16, 24, 24), -0.0, dtype=dtype)
        x.view(integer)[..., ::2, 1::2] = nan
        x = laid_out(x, layout, 2).to(device)
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        assert bool((pooled.view(integer) == nan).all())
        assert same(F.max_unpool2d(pooled, indices, 2), x.where(x.isnan(), 0))
        zeros = torch.full_like(pooled, -0.0)
        assert F.max_unpool2d(zeros, indices, 2).signbit().equal(x.isnan())


# Layouts


def layout_of(tensor: Tensor, dims: int) -> str:
    """The layout of a batch: contiguous, channels_last, or neither."""
    batch = tensor if tensor.dim() == dims + 2 else tensor[None]
    if batch.is_contiguous():
        return "contiguous"
    format = torch.channels_last if dims == 2 else torch.channels_last_3d
    return "channels_last" if batch.is_contiguous(memory_format=format) else "neither"


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "some channels": lambda x: x[:, ::2],
    "a chunk of channels": lambda x: x.chunk(2, 1)[1],
    "a crop": lambda x: x[..., 1:8, 1:],
    "some images": lambda x: x[::2],
    "one channel": lambda x: x[:, :1],
    "transposed": lambda x: x.transpose(-1, -2),
    "without a batch": lambda x: x[0],
    "some channels without a batch": lambda x: x[0, ::2],
    "expanded": lambda x: x[:, :1, ..., :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dims", [2, 3])
def test_the_layout_is_the_one_that_strides_suggest(
    device: str, dims: int, layout: str, part: str
) -> None:
    """All results and gradients have the layout that torch.nn's pooling gives its values."""
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    whole = torch.rand(4, 8, *[8] * dims, device=device)
    x = PARTS[part](laid_out(whole, layout, dims)).detach().requires_grad_()
    kept = layout_of(getattr(torch.nn.functional, f"max_pool{dims}d")(x, 2), dims)
    assert kept == layout or part != "whole"
    for dtype in INDEX_DTYPES:
        values, indices = pool(x, 2, return_indices=True, index_dtype=dtype)
        output = unpool(values, indices, 2, output_size=x.shape[-dims:])
        # An expanded gradient has no layout of its own.
        for grad_output in (torch.rand_like(output), output.new_ones(()).expand_as(output)):
            grads = torch.autograd.grad(output, (values, x), grad_output, retain_graph=True)
            results = (values, indices, output, *grads)
            assert [layout_of(each, dims) for each in results] == [kept] * 5
        # The layout of an output is that of the values, not of the indices.
        output = unpool(values.contiguous(), indices, 2, output_size=x.shape[-dims:])
        assert layout_of(output, dims) == "contiguous"
    traced = pool(torch.empty_strided(x.shape, x.stride(), device="meta"), 2)
    assert traced.stride() == pool(x.detach(), 2).stride() == values.stride()


def test_results_are_fresh_memory(device: str) -> None:
    """Also those of windows of one element, which equal the input."""
    x = torch.rand(1, 1, 2, 2, device=device)
    for index_dtype in INDEX_DTYPES:
        pooled, indices = F.max_pool2d(x, 1, return_indices=True, index_dtype=index_dtype)
        backward = _ops.max_unpool_backward(x, indices, (2, 2), (1, 1), (1, 1), (0, 0), "last")
        for values in (pooled, F.max_unpool2d(x, indices, 1), backward):
            assert same(values, x)
            assert values.data_ptr() != x.data_ptr()


# Threads


@every_operator
def test_threads_do_not_matter(operator: str, rng: Random) -> None:
    """Windows overlap, and planes are fewer than threads, or more."""
    geometry = geometry_of((240, 240), WINDOWS["3x3/2"])
    before = torch.get_num_threads()
    for leading, layout, reduce in itertools.product(((1, 1), (2, 4)), LAYOUTS[:2], REDUCES):
        chosen = {"geometry": geometry, "leading": leading, "layouts": (layout,)}
        call = draw(rng, operator, torch.float32, reduce=reduce, kind="anywhere", **chosen)
        found = []
        try:
            for threads in (1, 2, 7):
                torch.set_num_threads(threads)
                found.append(call.results())
        finally:
            torch.set_num_threads(before)
        for results in found[1:]:
            assert all(map(same, results, found[0])), (leading, layout, reduce)


def printed(script: str, folder: Path) -> int:
    """The number that another process prints, in a folder from which it imports what we do."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_are_used(tmp_path: Path) -> None:
    script = """
import os, torch
from maxunpool_cuda import _ops
torch.set_num_threads(1)
x = torch.ones(4, 1, 300, 300)
indices = torch.zeros(x.shape, dtype=torch.int64)
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
_ops.max_unpool(x, indices, (600, 600), (2, 2), (2, 2), (0, 0), "last")
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert printed(script, tmp_path) == 2


# Sizes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures memory in /proc")
@pytest.mark.parametrize("channels", [16, 64, 2048])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1)], ids=str)
def test_gradients_of_pooled_tensors_need_no_other_memory(
    channels: int, window: tuple[int, int, int], tmp_path: Path
) -> None:
    """If indices lie in their windows, however a tensor is cut up."""
    script = f"""
import torch
from maxunpool_cuda import _ops

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10

torch.set_num_threads(2)
side = int((2**24 // {channels}) ** 0.5) & ~1
grad = torch.ones(1, {channels}, side, side, dtype=torch.uint8)
grad = grad.contiguous(memory_format=torch.channels_last)
kernel, stride, padding = ((n, n) for n in {window})
_, indices = _ops.max_pool(grad, kernel, stride, padding, (1, 1), False, torch.int32)
open("/proc/self/clear_refs", "w").write("5")
before = peak()
assert _ops.max_unpool_backward(grad, indices, (side, side), kernel, stride, padding, "last").any()
print(peak() - before - indices.numel())
"""
    assert printed(script, tmp_path) < 8 << 20  # a byte for each output would be 16 MiB


def test_windows_far_larger_than_the_planes() -> None:
    """Their extents exceed 64 bits: the last of the duplicates gets the gradient all the same."""
    grad_output = torch.ones(1, 1, 1, 1, 2**20, dtype=torch.uint8)
    indices = torch.zeros(1, 1, 2**17, 1, 1, dtype=torch.int64)
    arguments = ((1, 1, 2**20), (1, 1, 1), (2**27, 1, 1), (0, 0, 0), "last")
    grad_input = _ops.max_unpool_backward(grad_output, indices, *arguments)
    assert grad_input.flatten().tolist() == [0] * (2**17 - 1) + [1]
    x = torch.rand(1, 1, 8, 8)  # all of the padding is around one window
    assert F.max_pool2d(x, 2**40, 2**39, 2**39).flatten()[0] == x.max()


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 16])
def test_more_than_two_to_the_31_elements(real_device: str, channels: int) -> None:
    """In one plane (more than an int32 can count), and in all channels of a channels-last image."""
    cells = 2**28 // channels + 1
    shape = (1, channels, 1, cells)
    format = torch.channels_last if channels > 1 else torch.contiguous_format
    x = torch.ones(shape, dtype=torch.uint8, device=real_device).contiguous(memory_format=format)
    indices = torch.arange(7, cells * 8, 8, device=real_device).expand(shape)
    indices = indices.contiguous(memory_format=format)
    arguments = ((1, cells * 8), (1, 8), (1, 8), (0, 0), "last")
    output = _ops.max_unpool(x, indices, *arguments)
    assert output.numel() > 2**31
    assert int(output.count_nonzero()) == x.numel()
    assert bool((output[..., 7::8] == 1).all())
    grad = _ops.max_unpool_backward(output, indices, *arguments)
    assert bool((grad == 1).all())


@pytest.mark.slow
def test_pooling_more_than_two_to_the_31_positions(real_device: str) -> None:
    x = torch.zeros(1, 1, 2**31 + 64, dtype=torch.uint8, device=real_device)
    x[..., -3:] = 1
    for index_dtype, expected in ((torch.int64, [2**31 - 64, 2**31 + 61]), (torch.uint8, [0, 61])):
        values, indices = F.max_pool1d(x, 64, return_indices=True, index_dtype=index_dtype)
        assert values.flatten()[-2:].tolist() == [0, 1]
        assert indices.flatten()[-2:].tolist() == expected


# Bad indices


def draw_bad(operator: str, rng: Random) -> tuple[Call, str, Tensor]:
    """A call with a bad index, a pattern of the error, and flat planes of the result without it.

    The reference gets planes that are one position larger, and that position for the index.
    """
    call = draw(rng, operator, rng.choice(ARITHMETIC), most_cells=24)
    bad, words, cell, plane = with_a_bad_index(call, rng)
    size, reduce = math.prod(call.geometry.output), call.arguments[-1]
    flat = call.positions.long().flatten(-call.dims).contiguous().clone()
    flat.view(-1, flat.shape[-1])[plane, cell] = size
    values = call.tensors[0].flatten(-call.dims)
    if call.operator is _ops.max_unpool:
        return bad, words, max_unpool(values, flat, (size + 1,), reduce)[..., :size]
    wide = torch.nn.functional.pad(values, (0, 1))
    return bad, words, max_unpool_backward(wide, flat, (size + 1,), reduce)


@every_unpooling
def test_bad_indices_are_named(device: str, operator: str, rng: Random) -> None:
    for _ in range(scaled(60)):
        call, words, _ = draw_bad(operator, rng)
        with pytest.raises(RuntimeError, match=words):
            call.results(device)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 3, 1)], ids=str)
@pytest.mark.parametrize("operator", ["unpool from offsets", "gradient from offsets"])
def test_every_offset_outside_the_plane_is_bad(
    device: str, operator: str, window: Sizes, layout: str, rng: Random
) -> None:
    """Of the output sizes a window allows, some cut a row and a column off it, or two."""
    kernel, stride, _ = window
    default = geometry_of((4,), window).output[0]
    for size in range(default - stride + 1, default + stride):
        g = geometry_of((4, 4), window, (size, size))
        if g.has_empty_window:
            continue
        call = draw(rng, operator, torch.float32, geometry=g, leading=(1, 8), layouts=(layout,))
        call.check(device)
        for cell, at in itertools.product(range(16), range(kernel**2 + 1)):
            if position_of(g, cell, at) is None:
                indices, plane = call.tensors[1].clone(), rng.randrange(8)
                indices[0, plane, cell // 4, cell % 4] = at
                bad = replace(call, tensors=(call.tensors[0], indices))
                words = f"invalid max index: {at} .* at position {cell} of plane {plane}"
                with pytest.raises(RuntimeError, match=words):
                    bad.results(device)


@pytest.mark.sanitized
@every_unpooling
def test_bad_indices_are_dropped_and_named_later(gpu: str, operator: str, rng: Random) -> None:
    for _ in range(scaled(120)):
        call, words, expected = draw_bad(operator, rng)
        (result,) = call.results(gpu)
        with pytest.raises(RuntimeError, match=words):
            maxunpool_cuda.check_errors()
        assert same(result.flatten(-call.dims), expected)
