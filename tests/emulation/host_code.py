# SPDX-License-Identifier: BSD-3-Clause
"""Tests of nvcc's host code, in a process that has a device "cuda" without a GPU.

../test_host_code.py starts that process.
"""

from random import Random

import cases
import failures
import pytest
import test_dispatch
import torch
from cases import Call, draw
from failures import check_each, layout_of
from test_emulation import calls_of_every_kernel
from torch import Tensor

import emulation
import maxunpool_cuda
import maxunpool_cuda.functional as F
from emulation import runtime

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def connected(rng: Random, monkeypatch: Patch) -> None:
    monkeypatch.setattr(failures, "device", "cuda")
    monkeypatch.setattr(emulation, "is_on", True)
    runtime.connect()
    emulation.library().configure(rng.getrandbits(31), "")


def needs_no_copy(call: Call) -> bool:
    """Else PyTorch makes tensors contiguous by a kernel of its own, which does not run here."""
    layouts = {layout_of(tensor, call.dims) for tensor in call.tensors}
    return layouts == {"channels_last"} or layouts <= {"contiguous", "unaligned"}


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.max_pool2d(x, 2, return_indices=True)


# No other test comes before this one.
def test_the_first_calls_of_a_process_may_be_captured(monkeypatch: Patch) -> None:
    """They make the record of errors, which CUDA refuses while others capture, and do not wait.

    A capture raises nothing, even if an error is pending. A replay has errors of its own.
    """
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")
    x = torch.rand(2, 3, 16, 16)
    there = x.cuda()
    one, beyond = torch.ones(1, 1, 1, 1).cuda(), torch.full((1, 1, 1, 1), 108).cuda()
    for n in range(2):  # then there is an error of the first graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = F.max_unpool2d(*pooled(there), 2)
            maxunpool_cuda.check_errors()
            F.max_unpool2d(one, beyond, 2)
        there.copy_(x + n)  # what was computed before the replay would be of other values
        graph.replay()
        assert torch.equal(output.cpu(), F.max_unpool2d(*pooled(x + n), 2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Found an invalid max index: 108;"):
            maxunpool_cuda.check_errors()
        maxunpool_cuda.check_errors()  # it is raised once
        graph.replay()
    with pytest.raises(RuntimeError, match="Found an invalid max index: 108;"):
        maxunpool_cuda.check_errors()


def test_replays_after_out_of_window_indices() -> None:
    """A graph keeps the number of a launch; others get larger ones (csrc/cuda/launch.cuh)."""
    # So many blocks that the launch has a word of its own in the graph.
    values, indices = pooled(torch.rand(1, 1, 2048, 1028, dtype=torch.float64))
    there = values.cuda(), indices.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = F.max_unpool2d(*there, 2)
    small, near = pooled(torch.rand(1, 1, 8, 8))
    other = small.cuda(), near.flip(-1).cuda()
    for replayed in (indices, indices.flip(-1), indices):
        F.max_unpool2d(*other, 2)
        there[1].copy_(replayed)
        graph.replay()
        assert torch.equal(output.cpu(), F.max_unpool2d(values, replayed, 2))


def test_too_little_memory_is_the_error_of_pytorch() -> None:
    cell = torch.zeros(1, 1, 1).cuda()
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\."):
        F.max_unpool1d(cell, cell.long(), 2**50)


@pytest.mark.parametrize("simple", [False, True], ids=["fast kernels", "simple kernels"])
def test_results(simple: bool, rng: Random, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", str(int(simple)))
    calls = filter(needs_no_copy, calls_of_every_kernel(rng))
    check_each(calls, lambda call: call.verify("cuda"))


def test_kernels_are_those_of_the_tables(rng: Random) -> None:
    """In the emulation they are compared with limits that are far below a GPU's."""
    for row in test_dispatch.ROWS:
        test_dispatch.check_row(row, rng, "cuda")


def test_deterministic_mode_fills_nothing(rng: Random) -> None:
    """A call allocates and launches its own kernels alone."""
    assert torch.are_deterministic_algorithms_enabled()
    cell = torch.zeros(1, 1, 1)
    F.max_unpool1d(cell.cuda(), cell.long().cuda(), 2)  # makes the device's error record

    def check(call: Call) -> None:
        there = call.moved("cuda")
        runtime.take_history()
        there.on()
        history = runtime.take_history()
        assert history
        assert all(line == "cudaMalloc" or "maxunpool_cuda" in line for line in history)

    drawn = (draw(rng, operator, layout="contiguous") for operator in cases.OPERATORS * 20)
    check_each(drawn, check)
