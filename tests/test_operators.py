"""Both operators against the reference: every rank, dtype, index dtype, layout and geometry."""

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import (
    ARITHMETIC,
    LAYOUTS,
    MOVABLE,
    WAYS,
    WINDOWS,
    Case,
    Geometry,
    aimed_case,
    laid_out,
    position_of,
    random_case,
    random_indices,
    random_offsets,
    random_values,
    same,
    some,
    with_whole_numbers,
)
from reference import default_output_size, max_unpool, max_unpool_backward

from maxunpool_cuda import _ops


def both(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = case.geometry.arguments(case.reduce)
    indices = case.indices.to(device)
    return (
        _ops.max_unpool(case.input.to(device), indices, *arguments),
        _ops.max_unpool_backward(case.grad_output.to(device), indices, *arguments),
    )


def check(case: Case, device: str) -> None:
    output, grad_input = both(case, device)
    spatial = case.geometry.output
    assert same(output, max_unpool(case.input, case.positions, spatial, case.reduce)), case
    expected = max_unpool_backward(case.grad_output, case.positions, spatial, case.reduce)
    assert same(grad_input, expected), case


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
def test_last_agrees_with_the_reference(
    device: str, dtype: torch.dtype, rng: random.Random
) -> None:
    for _ in range(some(20)):
        check(random_case(rng, reduce="last", dtypes=(dtype,)), device)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ARITHMETIC, ids=str)
def test_sums_agree_with_the_reference(
    device: str, dtype: torch.dtype, reduce: str, rng: random.Random
) -> None:
    for _ in range(some(20)):
        check(random_case(rng, reduce=reduce, dtypes=(dtype,)), device)


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
        case = random_case(rng, reduce=reduce, dtypes=ARITHMETIC)
        check(with_whole_numbers(case, rng), "cuda")


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


@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
def test_threads_do_not_matter(reduce: str, rng: random.Random) -> None:
    before = torch.get_num_threads()
    try:
        # Larger than what one thread is given, with fewer slabs than threads and with more.
        for leading in ((1, 1), (3, 10)):
            input = torch.rand(*leading, 300, 300)
            indices = torch.randint(0, 600 * 600, input.shape)
            arguments = ((600, 600), (2, 2), (2, 2), (0, 0), reduce)
            for layout in ("contiguous", "channels_last"):
                x, i = laid_out(input, layout, 2), laid_out(indices, layout, 2)
                results = []
                for threads in (1, 2, 7):
                    torch.set_num_threads(threads)
                    output = _ops.max_unpool(x, i, *arguments)
                    results.append((output, _ops.max_unpool_backward(output, i, *arguments)))
                for output, grad_input in results[1:]:
                    assert same(output, results[0][0])
                    assert same(grad_input, results[0][1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (1, 3, 0)], ids=str)
@pytest.mark.parametrize("shape", [(35000,), (170, 210), (33, 31, 35)], ids=str)
def test_few_planes_are_shared_among_threads(
    shape: tuple[int, ...], window: tuple[int, int, int], rng: random.Random
) -> None:
    """Each thread reads the indices whose windows reach its part, and all if one lies elsewhere."""
    kernel, stride, padding = ((n,) * len(shape) for n in window)
    pool = getattr(F, f"max_pool{len(shape)}d")
    pooled, regular = pool(torch.randn(1, 1, *shape), *window, return_indices=True)
    geometry = Geometry(tuple(pooled.shape[2:]), kernel, stride, padding, shape)
    astray = regular.clone()
    astray.view(-1)[rng.randrange(astray.numel())] = rng.randrange(math.prod(shape))
    grad_output = torch.randn(1, 1, *shape)
    for indices in (regular, astray, regular.flip(-1).int()):
        reduce = rng.choice(("last", "sum", "mean"))
        check(Case(geometry, reduce, pooled, indices, grad_output), "cpu")


def test_large_planes_agree_with_the_reference(device: str, rng: random.Random) -> None:
    """Larger than the runs that a kernel takes at once."""
    for _ in range(some(6)):
        check(
            random_case(rng, reduce="last", most_cells=4000, longest=rng.choice((20, 100, 4000))),
            device,
        )


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


def test_windows_far_larger_than_the_planes() -> None:
    """Their extents exceed 64 bits: the last of the duplicates gets the gradient all the same."""
    grad_output = torch.ones(1, 1, 1, 1, 2**20, dtype=torch.uint8)
    indices = torch.zeros(1, 2**17, 1, 1, dtype=torch.int64)
    arguments = ((1, 1, 2**20), (1, 1, 1), (2**27, 1, 1), (0, 0, 0), "last")
    grad_input = _ops.max_unpool_backward(grad_output, indices.unsqueeze(0), *arguments)
    assert grad_input.flatten().tolist() == [0] * (2**17 - 1) + [1]


def test_large_results_are_right() -> None:
    """They are given huge pages, where there are some."""
    values = torch.randn(1, 2, 600, 600)
    indices = torch.arange(600 * 600).mul(4).flip(0).reshape(1, 1, 600, 600).repeat(1, 2, 1, 1)
    output = _ops.max_unpool(values, indices, (1200, 1200), (2, 2), (2, 2), (0, 0), "last")
    assert output.nbytes > 4 << 20
    expected = torch.zeros(2, 1200 * 1200)
    expected[:, ::4] = values.flatten(2)[0].flip(-1)
    assert torch.equal(output.flatten(2)[0], expected)


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_stays(device: str, dims: int) -> None:
    format = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.rand(2, 5, *[3] * dims, device=device).contiguous(memory_format=format)
    indices = torch.zeros_like(x, dtype=torch.int64)
    arguments = ((6,) * dims, *[(2,) * dims] * 2, (0,) * dims, "last")
    output = _ops.max_unpool(x, indices, *arguments)
    assert output.is_contiguous(memory_format=format)
    grad = _ops.max_unpool_backward(output, indices, *arguments)
    assert grad.is_contiguous(memory_format=format)
    # An expanded gradient has no layout of its own; the indices' is kept.
    expanded = torch.ones((), device=device).expand(output.shape)
    grad = _ops.max_unpool_backward(expanded, indices, *arguments)
    assert grad.is_contiguous(memory_format=format)
    assert _ops.max_unpool(x.contiguous(), indices, *arguments).is_contiguous()


def test_results_are_fresh_memory(device: str) -> None:
    x = torch.rand(1, 1, 2, 2, device=device)
    indices = torch.arange(4, device=device).reshape(1, 1, 2, 2)
    output = _ops.max_unpool(x, indices, (2, 2), (1, 1), (1, 1), (0, 0), "last")
    assert same(output, x)
    assert output.data_ptr() != x.data_ptr()


def test_offsets_that_lead_elsewhere_are_bad(rng: random.Random) -> None:
    """Beyond the window, or in it, but outside the plane; also where they would wrap into it."""
    for _ in range(some(60)):
        case = random_case(rng, dtypes=(torch.float32,), most_cells=24, offsets=True)
        geometry, arguments = case.geometry, case.geometry.arguments(case.reduce)
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
        for operator, values in (
            (_ops.max_unpool, case.input),
            (_ops.max_unpool_backward, case.grad_output),
        ):
            with pytest.raises(RuntimeError, match=words):
                operator(values, indices, *arguments)


@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
def test_empty_batch(device: str, reduce: str) -> None:
    x = torch.rand(0, 3, 2, 2, device=device)
    indices = torch.zeros(0, 3, 2, 2, dtype=torch.int64, device=device)
    arguments = ((4, 4), (2, 2), (2, 2), (0, 0), reduce)
    output = _ops.max_unpool(x, indices, *arguments)
    assert output.shape == (0, 3, 4, 4)
    assert _ops.max_unpool_backward(output, indices, *arguments).shape == x.shape


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


def test_negative_zero_and_nan_are_moved_as_they_are() -> None:
    bits = torch.tensor([0x80000000, 0x7FC12345, 0xFF800000], dtype=torch.uint32)
    x = bits.view(torch.float32).reshape(1, 3)
    output = _ops.max_unpool(x, torch.tensor([[1, 2, 4]]), (6,), (2,), (2,), (0,), "last")
    assert output.view(torch.uint32).tolist() == [[0, *bits[:2].tolist(), 0, int(bits[2]), 0]]
