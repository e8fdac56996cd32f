"""What every operator computes: the reference's values, of every dtype, layout, size and window."""

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    INDEX_DTYPES,
    MOVABLE,
    OPERATORS,
    POOLED,
    REDUCES,
    WAYS,
    WINDOWS,
    Case,
    Geometry,
    Window,
    aimed_case,
    case_of,
    laid_out,
    pool_call,
    random_case,
    random_pool,
    same,
    some,
    unpool_call,
    with_a_bad_index,
    with_whole_numbers,
)
from reference import default_output_size, pooled_size
from torch import Tensor

import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

DTYPES = [
    pytest.param(operator, dtype, marks=[pytest.mark.sanitized] if operator == "pool" else [])
    for operator in OPERATORS
    for dtype in (POOLED if operator == "pool" else MOVABLE)
]


def check(case: Case, device: str = "cpu") -> None:
    for forward in (True, False):
        unpool_call(case, forward).check(device)


@pytest.mark.parametrize(("operator", "dtype"), DTYPES, ids=str)
def test_agrees_with_the_reference(
    device: str, operator: str, dtype: torch.dtype, rng: random.Random
) -> None:
    for _ in range(some(25)):
        OPERATORS[operator](rng, dtype).check(device)


LARGE = [{"most_cells": 4000, "longest": longest} for longest in (20, 100, 4000)]


@pytest.mark.parametrize("chosen", [{"leading": (0, 3)}, *LARGE], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_batches_and_large_planes(
    device: str, operator: str, chosen: dict[str, Any], rng: random.Random
) -> None:
    """Nothing, or more than a kernel takes at once."""
    for _ in range(some(4)):
        OPERATORS[operator](rng, **chosen).check(device)


@pytest.mark.sanitized
@pytest.mark.parametrize("offsets", [False, True], ids=["flat indices", "offsets"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("way", WAYS)
def test_what_kernels_are_made_for(
    device: str, way: str, window: str, offsets: bool, rng: random.Random
) -> None:
    for _ in range(some(16)):
        dtype = rng.choice((torch.uint8, torch.float32, torch.float16, torch.float64))
        check(aimed_case(rng, way, window, offsets, dtype), device)


@pytest.mark.cuda
@pytest.mark.sanitized
def test_sums_in_any_order(rng: random.Random) -> None:
    """By atomics, without deterministic algorithms: whole numbers add up all the same."""
    torch.use_deterministic_algorithms(False)
    for _ in range(some(100)):
        check(with_whole_numbers(random_case(rng, reduce="sum"), rng), "cuda")


@pytest.mark.parametrize("window", [(3, 2, 1), (2, 1, 0), (4, 2, 2), (3, 3, 0)], ids=str)
@pytest.mark.parametrize("leading", [(3, 33), (2, 1), (1, 1100)], ids=str)
def test_windows_shared_by_distant_elements(
    device: str, leading: tuple[int, int], window: tuple[int, int, int], rng: random.Random
) -> None:
    """A row further on, in a slab that a kernel cuts up."""
    kernel, stride, padding = ((n, n) for n in window)
    for pooled in {1: [(41, 40)], 33: [(7, 40)], 1100: [(2, 4), (1, 4), (1, 1)]}[leading[1]]:
        default = default_output_size(pooled, kernel, stride, padding)
        output = tuple(max(size, 1) for size in default)
        geometry = Geometry(pooled, kernel, stride, padding, output)
        for kind in ("wrapped window", "offset"):
            case = case_of(rng, geometry, leading, torch.float32, kind)
            for layout in ("contiguous", "channels_last"):
                check(case.laid_out(layout), device)


def test_results_of_many_bytes(rng: random.Random) -> None:
    """They are given huge pages, where there are some."""
    geometry = Geometry((3000,), (400,), (400,), (0,), (1_200_000,))
    check(case_of(rng, geometry, (1, 2), torch.float32, "anywhere"))


def test_windows_far_larger_than_the_planes() -> None:
    """Their extents exceed 64 bits: the last of the duplicates gets the gradient all the same."""
    grad_output = torch.ones(1, 1, 1, 1, 2**20, dtype=torch.uint8)
    indices = torch.zeros(1, 2**17, 1, 1, dtype=torch.int64)
    arguments = ((1, 1, 2**20), (1, 1, 1), (2**27, 1, 1), (0, 0, 0), "last")
    grad_input = _ops.max_unpool_backward(grad_output, indices.unsqueeze(0), *arguments)
    assert grad_input.flatten().tolist() == [0] * (2**17 - 1) + [1]
    x = torch.rand(1, 1, 8, 8)  # all of the padding is around one window
    assert F.max_pool2d(x, 2**40, 2**39, 2**39).flatten()[0] == x.max()


# Bits


def test_negative_zero_and_nan_are_moved_as_they_are() -> None:
    bits = torch.tensor([0x80000000, 0x7FC12345, 0xFF800000], dtype=torch.uint32)
    x = bits.view(torch.float32).reshape(1, 3)
    output = _ops.max_unpool(x, torch.tensor([[1, 2, 4]]), (6,), (2,), (2,), (0,), "last")
    assert output.view(torch.uint32).tolist() == [[0, *bits[:2].tolist(), 0, int(bits[2]), 0]]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("dtype", "integer", "bits"),
    [
        (torch.float16, torch.int16, (0x7E12, 0x7C12, -0x1EE)),
        (torch.bfloat16, torch.int16, (0x7FC5, 0x7F85, -0x3B)),
        (torch.float32, torch.int32, (0x7FC12345, 0x7F812345, -0x3EDCBB)),
        (torch.float64, torch.int64, (0x7FF8 << 48 | 5, 0x7FF0 << 48 | 5, -7)),
    ],
    ids=str,
)
def test_a_nan_is_pooled_as_it_is(
    device: str, dtype: torch.dtype, integer: torch.dtype, bits: tuple[int, ...], layout: str
) -> None:
    for nan in bits:
        x = torch.zeros(1, 16, 24, 24, dtype=integer)
        x[..., ::2, 1::2] = nan
        x = laid_out(x.view(dtype), layout, 2).to(device)
        assert x.isnan().any()
        assert bool((F.max_pool2d(x, 2).view(integer) == nan).all())


# Layouts


def layout_of(tensor: Tensor, dims: int) -> str:
    """As a batch: contiguous, channels_last, or neither."""
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
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_the_layout_is_the_one_that_strides_suggest(
    device: str, dims: int, channels_last: bool, part: str
) -> None:
    """Of pooling, of unpooling and of their gradients: that of torch.nn's pooling."""
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    x = torch.rand(4, 8, *[8] * dims, device=device)
    x = PARTS[part](laid_out(x, "channels_last" if channels_last else "contiguous", dims)).detach()
    expected = getattr(torch.nn.functional, f"max_pool{dims}d")(x, 2, return_indices=True)
    kept = layout_of(expected[0], dims)
    kept_parts = ("whole", "some channels", "a chunk of channels", "a crop", "some images")
    kept_parts += ("without a batch",) if dims == 3 else ()
    assert kept == ("channels_last" if channels_last and part in kept_parts else "contiguous")
    for dtype in INDEX_DTYPES:
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        for input in (x, leaf) if leaf.stride() == x.stride() else (x,):
            values, indices = pool(input, 2, return_indices=True, index_dtype=dtype)
            output = unpool(values, indices, 2, output_size=x.shape[-dims:])
            assert [layout_of(t, dims) for t in (values, indices, output)] == [kept] * 3
            assert same(values.detach(), expected[0])
            # The values' layout is the output's, whatever that of the indices.
            other = unpool(values.contiguous(), indices, 2, output_size=x.shape[-dims:])
            assert layout_of(other, dims) == "contiguous"
        if output.requires_grad:
            # An expanded gradient has no layout of its own.
            for grad_output in (torch.rand_like(output), output.new_ones(()).expand_as(output)):
                grads = torch.autograd.grad(output, (values, leaf), grad_output, retain_graph=True)
                assert [layout_of(grad, dims) for grad in grads] == [kept] * 2
    compiled = torch.compile(pool, backend="aot_eager", fullgraph=True)
    assert compiled(x, 2).stride() == values.stride()


def test_results_are_fresh_memory(device: str) -> None:
    """Also of windows that change nothing."""
    x = torch.rand(1, 1, 2, 2, device=device)
    geometry = Geometry((2, 2), (1, 1), (1, 1), (0, 0), (2, 2))
    calls = [pool_call(x, Window((2, 2), (1, 1), (1, 1), (0, 0), (1, 1), False), torch.int64)]
    for indices in (torch.arange(4), torch.zeros(4, dtype=torch.uint8)):
        case = Case(geometry, "last", x, indices.reshape(1, 1, 2, 2).to(device), x)
        calls += [unpool_call(case, forward) for forward in (True, False)]
    for call in calls:
        values = call.values(x)
        assert same(values, x)
        assert values.data_ptr() != x.data_ptr()


# Properties


def both_ways(case: Case) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return unpool_call(case, True).values, unpool_call(case, False).values


@pytest.mark.parametrize("reduce", ["last", "sum"])
def test_operators_are_each_others_transpose(reduce: str, rng: random.Random) -> None:
    """<A x, y> == <x, A^T y>, exactly: integers wrap on both sides."""
    for _ in range(some(100)):
        case = random_case(rng, reduce=reduce, dtypes=(torch.int64,))
        unpool, gradient = both_ways(case)
        x, y = case.input, case.grad_output
        assert (unpool(x) * y).sum() == (x * gradient(y)).sum(), case


def test_a_gather_after_a_scatter_changes_nothing_more(rng: random.Random) -> None:
    """Scattered, gathered and scattered again: what was there is there, bit for bit."""
    for _ in range(some(150)):
        case = random_case(rng, reduce="last")
        unpool, gradient = both_ways(case)
        output = unpool(case.input)
        gathered = gradient(output)
        assert same(unpool(gathered), output), case
        assert same(gradient(output), gathered), case


def round_trip(x: Tensor, window: Window, reduce: str, index_dtype: torch.dtype) -> list[Tensor]:
    """All that pooling and unpooling make of x, but the indices."""
    dims = len(window.sizes)
    generator = torch.Generator().manual_seed(0)
    x = x.detach().requires_grad_(x.dtype.is_floating_point)
    pooled, indices = getattr(F, f"max_pool{dims}d")(
        x, *window.arguments, return_indices=True, index_dtype=index_dtype
    )
    output = getattr(F, f"max_unpool{dims}d")(
        pooled, indices, *window.arguments[:3], x.shape, reduce=reduce
    )
    if not x.requires_grad:
        return [pooled, output]
    weight = torch.randn(output.shape, generator=generator).to(output)
    grads = torch.autograd.grad(output, (x, pooled), weight, create_graph=True)
    weight = torch.randn(pooled.shape, generator=generator).to(pooled)
    return [pooled, output, *grads, *torch.autograd.grad(pooled, x, weight)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16], ids=str
)
def test_round_trips(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    """Alike for every dtype of indices; the maxima stay where they were, all else is zero."""
    for _ in range(some(60)):
        x, window = random_pool(rng, dtype, most_cells=64)
        if torch.uint8 not in window.index_dtypes():
            continue
        x, reduce, dims = x.to(device), rng.choice(REDUCES), len(window.sizes)
        first, *others = (round_trip(x, window, reduce, t) for t in INDEX_DTYPES)
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert same(a, b), (window, reduce)
                assert a.stride() == b.stride()
        if reduce == "last":
            _, positions = _ops.max_pool(x, *window.arguments, torch.int64)
            maxima = torch.zeros(x.shape, dtype=torch.bool, device=device).flatten(-dims)
            maxima = maxima.scatter(-1, positions.flatten(-dims), True).reshape(x.shape)
            assert same(first[1].detach(), x.where(maxima, 0)), window


# Threads and memory


@pytest.mark.parametrize("operator", OPERATORS)
def test_threads_do_not_matter(operator: str, rng: random.Random) -> None:
    """Of windows that overlap: fewer slabs than threads, and more."""
    geometry = Geometry((240, 240), (3, 3), (2, 2), (0, 0), (481, 481))
    window = Window((481, 481), (3, 3), (2, 2), (0, 0), (1, 1), True)
    before = torch.get_num_threads()
    try:
        for leading in ((1, 1), (2, 4)):
            kind = "offset" if "offsets" in operator else "anywhere"
            drawn = case_of(rng, geometry, leading, torch.float32, kind)
            for layout, reduce in itertools.product(("contiguous", "channels_last"), REDUCES):
                case = replace(drawn, reduce=reduce).laid_out(layout)
                call = unpool_call(case, operator.startswith("unpool"))
                if operator == "pool":
                    call = pool_call(case.grad_output, window, rng.choice(INDEX_DTYPES))
                found = []
                for threads in (1, 2, 7):
                    torch.set_num_threads(threads)
                    found.append(call.on())
                for results in found[1:]:
                    assert all(map(same, results, found[0])), (leading, layout, reduce)
    finally:
        torch.set_num_threads(before)


def printed(script: str, folder: Path) -> str:
    """By another process, in a folder where the installed package is the one to import."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
    assert printed(script, tmp_path) == "2"


@pytest.mark.slow
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (1, 3, 0)], ids=str)
@pytest.mark.parametrize("shape", [(35000,), (170, 210), (33, 31, 35)], ids=str)
def test_few_planes_are_shared_among_threads(
    shape: tuple[int, ...], window: tuple[int, int, int], rng: random.Random
) -> None:
    """Each thread reads the indices whose windows reach its part, and all if one lies elsewhere."""
    sizes = tuple(pooled_size(n, *window, dilation=1, ceil=False) for n in shape)
    geometry = Geometry(sizes, *((n,) * len(shape) for n in window), shape)
    reduce = rng.choice(REDUCES)
    regular = case_of(rng, geometry, (1, 1), torch.float32, "own window", reduce)
    stray = regular.indices.clone()
    stray.view(-1)[rng.randrange(stray.numel())] = rng.randrange(math.prod(shape))
    for indices in (regular.indices, stray, regular.indices.flip(-1)):
        check(replace(regular, indices=indices))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures memory in /proc")
@pytest.mark.parametrize(
    "pooled", [(64, 256, 256), (16, 512, 512), (2048, 40, 50), (8, 4096, 8, 16)], ids=str
)
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1)], ids=str)
def test_gradients_of_pooled_tensors_need_no_other_memory(
    pooled: tuple[int, ...], window: tuple[int, int, int], tmp_path: Path
) -> None:
    """Of indices that lie in their windows, however a tensor is cut up."""
    if len(pooled) > 3 and window[0] > 2:
        pytest.skip("in a volume, these windows share an output with too many others")
    script = f"""
import torch
from maxunpool_cuda import _ops

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10

torch.set_num_threads(2)
kernel, stride, padding = {window}
channels, *spatial = {pooled}
dims = len(spatial)
format = torch.channels_last if dims == 2 else torch.channels_last_3d
size = [n * 2 for n in spatial]
flat = torch.arange(torch.Size(size).numel(), dtype=torch.int32).reshape(size)
indices = flat[(slice(None, None, 2),) * dims].expand(1, channels, *spatial)
indices = indices.contiguous(memory_format=format)
grad = torch.ones(1, channels, *size, dtype=torch.uint8).contiguous(memory_format=format)
arguments = (size, [kernel] * dims, [stride] * dims, [padding] * dims, "last")
assert grad.all()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
assert _ops.max_unpool_backward(grad, indices, *arguments).all()
print(peak() - before - indices.numel())
"""
    assert int(printed(script, tmp_path)) < 8 << 20  # a byte for each output would be 16 MiB


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 16])
def test_more_than_two_to_the_31_elements(device: str, channels: int) -> None:
    """In one plane (more than an int32 can count), and in a channels-last slab."""
    cells = 2**28 // channels + 1
    shape = (1, channels, 1, cells)
    x = torch.ones(shape, dtype=torch.uint8, device=device)
    last = cells * 8 - 1
    indices = torch.arange(7, cells * 8, 8, device=device).expand(shape)
    format = torch.channels_last if channels > 1 else torch.contiguous_format
    x, indices = x.contiguous(memory_format=format), indices.contiguous(memory_format=format)
    arguments = ((1, cells * 8), (1, 8), (1, 8), (0, 0), "last")
    output = _ops.max_unpool(x, indices, *arguments)
    assert output.numel() > 2**31
    for channel in (0, channels - 1):
        assert output[0, channel, 0, last] == 1
    assert int(output.count_nonzero()) == x.numel()
    assert bool((output[..., 7::8] == 1).all())
    grad = _ops.max_unpool_backward(output, indices, *arguments)
    assert bool((grad == 1).all())


@pytest.mark.slow
def test_pooling_more_than_two_to_the_31_positions(device: str) -> None:
    x = torch.zeros(1, 1, 2**31 + 64, dtype=torch.uint8, device=device)
    x[..., -3:] = 1
    values, indices = F.max_pool1d(x, 64, return_indices=True)
    assert values.flatten()[-2:].tolist() == [0, 1]
    assert indices.flatten()[-2:].tolist() == [2**31 - 64 + 0, 2**31 + 61]
    _, offsets = F.max_pool1d(x, 64, return_indices=True, index_dtype=torch.uint8)
    assert offsets.flatten()[-2:].tolist() == [0, 61]
    with pytest.raises(ValueError, match=r"fewer than 2\^31 positions for index_dtype int32"):
        F.max_pool1d(x, 64, return_indices=True, index_dtype=torch.int32)


# Bad indices


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "pool"])
def test_bad_indices_are_named(operator: str, rng: random.Random) -> None:
    for _ in range(some(60)):
        case: Any = OPERATORS[operator](rng, torch.float32, most_cells=24).of
        bad, words = with_a_bad_index(case, rng)
        with pytest.raises(RuntimeError, match=words):
            unpool_call(bad, operator.startswith("unpool")).on()
