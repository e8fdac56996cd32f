# SPDX-License-Identifier: BSD-3-Clause
"""The host code of csrc/cuda as nvcc compiled it, in PyTorch's CUDA build, without a GPU.

Other tests without a GPU call the host code that g++ compiled. nvcc makes other code of it:
of a call from the host to a __device__ function, exit(1). emulation/runtime.py says how there is a
device "cuda" here. Each test runs in a process of its own that has the device.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable
from random import Random

import cases
import emulation
import failures
import pytest
import test_dispatch
import torch
from cases import Call, all_same, draw
from emulation import runtime
from failures import check_each
from test_emulation import calls_of_every_kernel
from torch import Tensor

import maxunpool_cuda
import maxunpool_cuda.functional as F

# make check-cuda, which is there for these tests, does not accept that without a GPU none can run.
IS_REQUIRED = os.environ.get("MAXUNPOOL_HOST_CODE") == "1" and not torch.cuda.is_available()
OBSTACLE = "" if runtime.IS_ON or IS_REQUIRED else runtime.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)]
Patch = pytest.MonkeyPatch


def on_the_stand_in(caches_memory: bool = False) -> Callable[..., Callable[..., None]]:
    """Start a process that has the device, and there the test.

    Unless PyTorch caches memory there, each tensor has its own, which is filled with a pattern. A
    graph needs the cache, which keeps the memory of its calls.
    """

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        if runtime.IS_ON:
            return test

        @functools.wraps(test)
        def start(*args: object, **fixtures: object) -> None:
            name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].rpartition(" ")[0]
            done = runtime.run_test(f"{__file__}::{name}", caches_memory)
            # exit(1) prints nothing.
            assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}"
            assert "1 passed" in done.stdout

        return start

    return decorated


@pytest.fixture(autouse=True)
def connected(rng: Random, monkeypatch: Patch) -> None:
    if runtime.IS_ON:
        monkeypatch.setattr(failures, "device", "cuda")
        monkeypatch.setattr(emulation, "is_on", True)
        runtime.connect()
        emulation.library().configure(rng.getrandbits(31), "")


def needs_no_copy(call: Call) -> bool:
    """Else PyTorch makes tensors contiguous by a kernel of its own, which does not run here."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(call.tensors[0].dim())
    formats = [torch.contiguous_format, *filter(None, [last])]
    return any(all(t.is_contiguous(memory_format=f) for t in call.tensors) for f in formats)


@pytest.mark.parametrize("simple", [False, True], ids=["fast kernels", "simple kernels"])
@on_the_stand_in()
def test_results(simple: bool, rng: Random, monkeypatch: Patch) -> None:
    """Of calls that reach every family of kernels."""
    monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", str(int(simple)))
    reached = set()

    def check(call: Call) -> None:
        call.verify("cuda")
        reached.update(family_of(signature) for signature, _, _ in emulation.launches())

    check_each(filter(needs_no_copy, calls_of_every_kernel(rng)), check)
    families = {*map(family_of, emulation.kernels().values())}
    if simple:
        families = {each for each in families if re.search("_slots|pool_", each)}
    assert reached == families


def family_of(signature: str) -> str:
    return signature.partition("<")[0]


@on_the_stand_in()
def test_kernels_are_those_of_the_tables(rng: Random) -> None:
    """In the emulation they are compared with limits that are far below a GPU's."""
    for row in test_dispatch.ROWS:
        test_dispatch.check_row(row, rng, "cuda")


@on_the_stand_in()
def test_an_out_of_bounds_index_is_named(rng: Random, monkeypatch: Patch) -> None:

    def check(call: Call) -> None:
        monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")
        call.verify_error("cuda")
        monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "0")
        call.results("cuda")
        with pytest.raises(RuntimeError, match="Found an invalid max index"):
            maxunpool_cuda.check_errors()
        maxunpool_cuda.check_errors()  # it is raised once

    drawn = [draw(rng, operator) for operator in ("unpool", "gradient") * 20]
    calls = [cases.with_invalid_index(call, rng) for call in drawn]
    check_each(filter(needs_no_copy, calls), check)


@on_the_stand_in(caches_memory=True)
def test_too_little_memory_is_the_error_of_pytorch() -> None:
    side = 2**25  # of a plane of 2^52 bytes
    cell = torch.zeros(1, 1, 1, 1, device="cuda")
    index = torch.zeros(1, 1, 1, 1, device="cuda", dtype=torch.int64)
    said = r"^CUDA out of memory\. Tried to allocate "
    with pytest.raises(torch.OutOfMemoryError, match=said + r"4194304\.00 GiB"):
        F.max_unpool2d(cell, index, side)
    # From now on there is room for what is cached alone, in blocks of 512 bytes. The first one that
    # is freed is for the result, the second one for the flags of the fix-up kernel.
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / 2**33)
    blocks = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            blocks.append(torch.empty(512, dtype=torch.uint8, device="cuda"))
    del blocks[-1]
    with pytest.raises(torch.OutOfMemoryError, match=said + r"2\.00 MiB"):
        F.max_unpool2d(cell, index, 2)
    del blocks[-1]
    assert F.max_unpool2d(cell, index, 2).shape == (1, 1, 2, 2)


@on_the_stand_in()
def test_deterministic_mode_fills_nothing(rng: Random) -> None:
    """A call allocates and launches its own kernels alone: one, and a fix-up for flat indices."""
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    cell = torch.zeros(1, 1, 1)
    F.max_unpool1d(cell.cuda(), cell.long().cuda(), 2)  # makes the device's error record

    def check(call: Call) -> None:
        there = call.moved("cuda")
        runtime.take_log()
        results = there.on()
        log = runtime.take_log()
        kernels = [symbol for symbol in log if "maxunpool_cuda" in symbol]
        is_flat = call.name != "max_pool" and call.tensors[1].dtype != torch.uint8
        has_fixup = is_flat and (call.name == "max_unpool" or call.arguments[-1] == "last")
        assert len(kernels) == 1 + has_fixup
        assert sorted(log) == sorted(["cudaMalloc"] * (len(results) + has_fixup) + kernels)

    drawn = (draw(rng, operator, layout="contiguous") for operator in cases.OPERATORS * 20)
    check_each(filter(needs_no_copy, drawn), check)
    runtime.take_log()
    torch.empty(5, device="cuda")
    allocation, fill = runtime.take_log()
    assert allocation == "cudaMalloc"
    assert "maxunpool_cuda" not in fill  # but PyTorch's own


def pooled(*shape: int) -> tuple[Tensor, Tensor]:
    return F.max_pool2d(torch.rand(shape, dtype=torch.float64), 2, return_indices=True)


@on_the_stand_in(caches_memory=True)
def test_the_first_call_of_a_process_may_be_captured() -> None:
    values, indices = pooled(2, 3, 16, 16)
    there = values.cuda(), indices.cuda()
    graph = torch.cuda.CUDAGraph()
    runtime.take_log()
    with torch.cuda.graph(graph):
        output = F.max_unpool2d(*there, 2)
    assert not any("maxunpool_cuda" in name for name in runtime.take_log())
    graph.replay()
    assert torch.equal(output.cpu(), F.max_unpool2d(values, indices, 2))


@on_the_stand_in(caches_memory=True)
def test_replays_after_out_of_window_indices() -> None:
    """A graph keeps the number of a launch; others get larger ones (csrc/cuda/launch.cuh)."""
    values, indices = pooled(1, 1, 2048, 1028)
    there = values.cuda(), indices.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = F.max_unpool2d(*there, 2)

    def replays_with_barriers() -> int:
        """How many a block of the fix-up kernel met: after one it knows whether it has work."""
        graph.replay()
        barriers = emulation.library().most_barriers()
        assert torch.equal(output.cpu(), F.max_unpool2d(values, there[1].cpu(), 2))
        return barriers

    assert replays_with_barriers() == 1
    small, places = pooled(1, 1, 8, 8)
    F.max_unpool2d(small.cuda(), places.flip(-1).cuda(), 2)  # indices out of their windows
    assert emulation.library().most_barriers() > 1
    assert replays_with_barriers() == 1
    there[1].copy_(indices.flip(-1))
    assert replays_with_barriers() > 1
    there[1].copy_(indices)
    assert replays_with_barriers() == 1
    maxunpool_cuda.check_errors()


@on_the_stand_in()
def test_gradients_on_another_stream() -> None:
    x, weight = torch.rand(2, 2, 3, 12, 16)

    def results(device: str) -> tuple[Tensor, ...]:
        x_there = x.to(device).requires_grad_()
        values, indices = F.max_pool2d(x_there, 3, 2, 1, return_indices=True)
        output = F.max_unpool2d(values, indices, 3, 2, 1, output_size=(12, 16), reduce="sum")
        return output, *torch.autograd.grad(output, x_there, weight.to(device))

    with torch.cuda.stream(torch.cuda.Stream()):
        assert all_same(results("cuda"), results("cpu"))
