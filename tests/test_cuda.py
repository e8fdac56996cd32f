# SPDX-License-Identifier: BSD-3-Clause
"""What only a GPU can show: streams, graphs, errors that come late, calls that do not wait."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import failures
import pytest
import torch
from cases import OPERATORS, draw, same

import maxunpool_cuda
import maxunpool_cuda.functional as F

pytestmark = pytest.mark.cuda
Patch = pytest.MonkeyPatch
INVALID = "Found an invalid max index: 108;"


@pytest.fixture(autouse=True)
def nothing_pending(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setattr(failures, "device", "cuda")
    yield
    maxunpool_cuda.check_errors()


def cells(index: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Ones, and indices into a plane of 4x4, of which one is given."""
    x = torch.ones(1, 1, 2, 2, device="cuda")
    return x, torch.tensor([[[[0, 2], [index, 10]]]], device="cuda")


def test_a_bad_call_raises_once() -> None:
    """One of the next calls raises, though the kernel may find more such indices afterwards."""
    x = torch.ones(16, 64, 256, 256, device="cuda")  # 1.5 GiB with its indices and its output
    indices = torch.full(x.shape, 2**20, dtype=torch.int32, device="cuda")
    good = cells()
    for _ in range(5):
        F.max_unpool2d(x, indices, 2)
        raised = 0
        for _ in range(20_000):
            try:
                F.max_unpool2d(*good, 2)
            except RuntimeError:
                raised += 1
        maxunpool_cuda.check_errors()
        assert raised == 1


@pytest.mark.skipif(
    os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", reason="CUDA_LAUNCH_BLOCKING=1: every call waits"
)
@pytest.mark.parametrize("checks", [False, True], ids=["errors later", "errors at once"])
def test_a_call_waits_only_to_raise_errors(checks: bool, rng: Random, monkeypatch: Patch) -> None:
    calls = [draw(rng, operator).moved("cuda") for operator in OPERATORS * 10]
    for call in calls:
        call.on()  # the first call loads the kernels and allocates
    torch.cuda.synchronize()
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", str(int(checks)))
    torch.cuda._sleep(2_000_000_000)  # about a second
    awake = torch.cuda.Event()
    awake.record()
    for call in calls:
        call.on()
    assert awake.query() == checks
    if checks:
        with pytest.raises(RuntimeError, match=INVALID):
            F.max_unpool2d(*cells(108), 2)


FORK = """
import os, maxunpool_cuda
maxunpool_cuda.check_errors()
if (child := os.fork()) == 0:
    import torch
    os._exit(int(torch.ones(2, device="cuda").sum() != 2))
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_that_only_asked_for_errors_can_fork() -> None:
    """A process that has used CUDA cannot fork, so asking may not use it."""
    # Not from the root, where the package may have no compiled extension.
    subprocess.run([sys.executable, "-c", FORK], check=True, cwd=Path(__file__).parent)


def test_a_capture_raises_nothing(monkeypatch: Patch) -> None:
    """Errors of earlier calls are raised after the capture, errors of a replay after the replay."""
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "0")
    bad, good = cells(108), cells()
    F.max_unpool2d(*good, 2)
    F.max_unpool2d(*bad, 2)
    torch.cuda.synchronize()
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = F.max_unpool2d(*good, 2)
        maxunpool_cuda.check_errors()
        F.max_unpool2d(*bad, 2)
    with pytest.raises(RuntimeError, match=INVALID):
        maxunpool_cuda.check_errors()
    for _ in range(3):
        graph.replay()
        with pytest.raises(RuntimeError, match=INVALID):
            maxunpool_cuda.check_errors()
        maxunpool_cuda.check_errors()
        assert output.sum() == 4


def test_replays_after_out_of_window_indices() -> None:
    """A launch of so many blocks has a word of its own in a graph (csrc/cuda/launch.cuh)."""
    x = torch.rand(1, 1, 2048, 2056, device="cuda", dtype=torch.float64)
    values, near = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    far, indices = near.flip(-1), near.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = F.max_unpool2d(values, indices, 2)
    for replayed in (near, far, near):
        F.max_unpool2d(values, far, 2)  # another launch
        indices.copy_(replayed)
        graph.replay()
        assert same(output, F.max_unpool2d(values, replayed, 2))


def test_a_training_step_in_graphs() -> None:
    """Pooling, unpooling and both gradients, replayed on other values."""

    def step(x: torch.Tensor) -> torch.Tensor:
        pooled, offsets = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        return F.max_unpool2d(pooled, offsets, 3, 2, 1, output_size=(12, 16))

    weight = torch.rand(2, 8, 12, 16, device="cuda")
    sample = torch.rand_like(weight, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(step, (sample,))
    for _ in range(2):
        x = torch.rand_like(weight, requires_grad=True)
        outputs = graphed(x), step(x)
        assert same(*outputs)
        assert same(*(torch.autograd.grad(output, x, weight)[0] for output in outputs))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gpus_that_are_not_the_current_one(operator: str, rng: Random) -> None:
    for index in range(torch.cuda.device_count()):
        draw(rng, operator).check(f"cuda:{index}")
