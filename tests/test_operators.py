"""What every operator computes: the reference's values, of every dtype, layout, size and window."""

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import (
    INDEX_DTYPES,
    LAYOUTS,
    MOVABLE,
    OPERATORS,
    POOLED,
    REDUCES,
    WAYS,
    WINDOWS,
    Call,
    Case,
    Geometry,
    Window,
    aimed_case,
    distinct,
    laid_out,
    pool_call,
    position_of,
    random_case,
    random_indices,
    random_offsets,
    random_pool,
    random_values,
    same,
    some,
    unpool_call,
    with_whole_numbers,
)
from reference import default_output_size
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


@pytest.mark.parametrize("leading", [(0, 3), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_and_single_batches(
    device: str, operator: str, leading: tuple[int, ...], rng: random.Random
) -> None:
    for _ in range(some(25)):
        OPERATORS[operator](rng, leading=leading).check(device)


@pytest.mark.parametrize("operator", OPERATORS)
def test_large_planes_agree_with_the_reference(
    device: str, operator: str, rng: random.Random
) -> None:
    """Larger than what a kernel takes at once."""
    for _ in range(some(6)):
        longest = rng.choice((20, 100, 4000))
        OPERATORS[operator](rng, most_cells=4000, longest=longest).check(device)


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
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_in_any_order(reduce: str, rng: random.Random) -> None:
    """By atomics, without deterministic algorithms: whole numbers add up all the same."""
    torch.use_deterministic_algorithms(False)
    for _ in range(some(100)):
        check(with_whole_numbers(random_case(rng, reduce=reduce), rng), "cuda")


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
        values, grads = (
            random_values(rng, (*leading, *sizes), torch.float32) for sizes in (pooled, output)
        )
        for indices in (
            random_indices(rng, geometry, leading, "wrapped window"),
            random_offsets(rng, geometry, leading),
        ):
            for layout in ("contiguous", "channels_last"):
                tensors = (laid_out(t, layout, 2) for t in (values, indices, grads))
                check(Case(geometry, "last", *tensors), device)


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


def test_ties_nan_and_nothing(device: str) -> None:
    nan, inf = math.nan, math.inf
    for row, value, index in (
        ([1.0, 3, 3, 2], 3.0, 1),
        ([-inf] * 4, -inf, 0),
        ([nan, 9, nan, inf], nan, 2),
        ([-0.0, 0.0, 0.0, -1], -0.0, 0),
    ):
        x = torch.tensor([row], device=device)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            values, indices = F.max_pool1d(x.to(dtype), 4, return_indices=True)
            assert same(values, x.to(dtype)[:, index : index + 1])
            assert repr(values.item()) == repr(value)
            assert indices.tolist() == [[index]]
    # What lies in the padding is not there.
    x = torch.full((1, 20), -inf, device=device)
    _, indices = F.max_pool1d(x, 4, 1, 2, return_indices=True)
    assert indices.tolist() == [[0, 0, 0, *range(1, 19)]]
    _, offsets = F.max_pool1d(x, 4, 1, 2, return_indices=True, index_dtype=torch.uint8)
    assert offsets.tolist() == [[2, 1, *[0] * 19]]
    # Dilation may step over the whole input: there is no maximum, and PyTorch's index.
    x = torch.ones(1, 1, 4, device=device)
    values, indices = F.max_pool1d(x, 2, 1, 1, 5, return_indices=True)
    assert values.tolist() == [[[-inf]]]
    assert indices.tolist() == [[[4]]]


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


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_are_fresh_memory(device: str, operator: str) -> None:
    """Also of windows that change nothing."""
    window = ((1, 1), (1, 1), (0, 0))
    x = torch.rand(1, 1, 2, 2, device=device)
    if operator == "pool":
        call = pool_call(x, Window((2, 2), *window, (1, 1), False), torch.int64)
    else:
        indices = torch.arange(4, device=device).reshape(1, 1, 2, 2)
        indices = (indices * 0).byte() if "offsets" in operator else indices
        geometry = Geometry((2, 2), *window, (2, 2))
        call = unpool_call(Case(geometry, "last", x, indices, x), operator.startswith("unpool"))
    (values, *_) = call.on()
    assert same(values, x)
    assert values.data_ptr() != x.data_ptr()


# Properties


@pytest.mark.parametrize("reduce", ["last", "sum"])
def test_operators_are_each_others_transpose(reduce: str, rng: random.Random) -> None:
    """<A x, y> == <x, A^T y>, exactly: integers wrap on both sides."""
    for _ in range(some(100)):
        case = random_case(rng, reduce=reduce, dtypes=(torch.int64,))
        x, y = case.input, case.grad_output
        unpool, gradient = (unpool_call(case, forward).values for forward in (True, False))
        assert (unpool(x) * y).sum() == (x * gradient(y)).sum(), case


def test_a_gather_after_a_scatter_changes_nothing_more(rng: random.Random) -> None:
    """Scattered, gathered and scattered again: what was there is there, bit for bit."""
    for _ in range(some(150)):
        case = random_case(rng, reduce="last")
        unpool, gradient = (unpool_call(case, forward).values for forward in (True, False))
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
def test_no_index_dtype_makes_a_difference(
    device: str, dtype: torch.dtype, rng: random.Random
) -> None:
    for _ in range(some(60)):
        x, window = random_pool(rng, dtype, most_cells=64)
        if torch.uint8 not in window.index_dtypes():
            continue
        reduce = rng.choice(REDUCES)
        first, *others = (round_trip(x.to(device), window, reduce, t) for t in INDEX_DTYPES)
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert same(a, b), (window, reduce)
                assert a.stride() == b.stride()


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_unpooling_keeps_the_maxima(index_dtype: torch.dtype, rng: random.Random) -> None:
    """unpool(pool(x)) is x at the maxima and zero elsewhere."""
    for _ in range(some(60)):
        x, window = random_pool(rng, torch.float64)
        if index_dtype in window.index_dtypes() and max(window.dilation) == 1:
            x = distinct(x) + 1
            _, positions = _ops.max_pool(x, *window.arguments, torch.int64)
            dims = len(window.sizes)
            maxima = torch.zeros(x.shape, dtype=torch.bool).flatten(-dims)
            maxima = maxima.scatter(-1, positions.flatten(-dims), True).reshape(x.shape)
            _, output, *_ = round_trip(x, window, "last", index_dtype)
            assert same(output, torch.where(maxima, x, 0.0)), window


# Threads and memory


def large_call(operator: str, leading: tuple[int, int], layout: str, reduce: str) -> Call:
    """More than one thread is given, of windows that overlap."""
    window, cells, size = ((3, 3), (2, 2), (0, 0)), 240, 481
    grad_output = laid_out(torch.rand(*leading, size, size), layout, 2)
    if operator == "pool":
        return pool_call(grad_output, Window((size,) * 2, *window, (1, 1), True), torch.int32)
    x = torch.rand(*leading, cells, cells)
    indices = torch.randint(0, size * size, x.shape)
    if "offsets" in operator:
        indices = indices.remainder(9).byte()
    x, indices = laid_out(x, layout, 2), laid_out(indices, layout, 2)
    case = Case(Geometry((cells,) * 2, *window, (size,) * 2), reduce, x, indices, grad_output)
    return unpool_call(case, operator.startswith("unpool"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_threads_do_not_matter(operator: str) -> None:
    before = torch.get_num_threads()
    try:
        # Fewer slabs than threads, and more.
        for leading in ((1, 1), (3, 10)):
            for layout in ("contiguous", "channels_last"):
                for reduce in REDUCES[:1] if operator == "pool" else REDUCES:
                    call = large_call(operator, leading, layout, reduce)
                    found = []
                    for threads in (1, 2, 7):
                        torch.set_num_threads(threads)
                        found.append(call.on())
                    for results in found[1:]:
                        assert all(map(same, results, found[0])), (leading, layout, reduce)
    finally:
        torch.set_num_threads(before)


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
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (1, 3, 0)], ids=str)
@pytest.mark.parametrize("shape", [(35000,), (170, 210), (33, 31, 35)], ids=str)
def test_few_planes_are_shared_among_threads(
    shape: tuple[int, ...], window: tuple[int, int, int], rng: random.Random
) -> None:
    """Each thread reads the indices whose windows reach its part, and all if one lies elsewhere."""
    kernel, stride, padding = ((n,) * len(shape) for n in window)
    pool = getattr(torch.nn.functional, f"max_pool{len(shape)}d")
    pooled, regular = pool(torch.randn(1, 1, *shape), *window, return_indices=True)
    geometry = Geometry(tuple(pooled.shape[2:]), kernel, stride, padding, shape)
    astray = regular.clone()
    astray.view(-1)[rng.randrange(astray.numel())] = rng.randrange(math.prod(shape))
    grad_output = torch.randn(1, 1, *shape)
    for indices in (regular, astray, regular.flip(-1).int()):
        check(Case(geometry, rng.choice(REDUCES), pooled, indices, grad_output))


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
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert int(done.stdout) < 8 << 20, done.stdout  # a byte for each output would be 16 MiB


def test_large_results_are_right() -> None:
    """They are given huge pages, where there are some."""
    values = torch.randn(1, 2, 600, 600)
    indices = torch.arange(600 * 600).mul(4).flip(0).reshape(1, 1, 600, 600).repeat(1, 2, 1, 1)
    output = _ops.max_unpool(values, indices, (1200, 1200), (2, 2), (2, 2), (0, 0), "last")
    assert output.nbytes > 4 << 20
    expected = torch.zeros(2, 1200 * 1200)
    expected[:, ::4] = values.flatten(2)[0].flip(-1)
    assert torch.equal(output.flatten(2)[0], expected)


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


@pytest.mark.parametrize("forward", [True, False])
def test_offsets_that_lead_elsewhere_are_bad(forward: bool, rng: random.Random) -> None:
    """Beyond the window, or in it, but outside the plane; also where they would wrap into it."""
    for _ in range(some(60)):
        case = random_case(rng, dtypes=(torch.float32,), most_cells=24, offsets=True)
        geometry = case.geometry
        cell = rng.randrange(math.prod(geometry.pooled))
        bad = [at for at in range(256) if position_of(geometry, cell, at) is None]
        in_window = [at for at in bad if at < math.prod(geometry.kernel)]
        offset = rng.choice(in_window or bad)
        planes = case.indices.flatten(-geometry.dims).flatten(0, -2).clone()
        plane = rng.randrange(len(planes))
        planes[plane, cell] = offset
        layout = rng.choice(LAYOUTS)
        indices = laid_out(planes.reshape(case.indices.shape), layout, geometry.dims)
        words = rf"max index: {offset} \(an offset .* position {cell} of plane {plane}$"
        with pytest.raises(RuntimeError, match=words):
            unpool_call(replace(case, indices=indices), forward).on()
