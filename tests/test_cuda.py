"""What only a GPU can show: streams, graphs, errors that come late, calls that do not wait."""

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from cases import OPERATORS, draw, same

import maxunpool_cuda
import maxunpool_cuda.functional as F

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    maxunpool_cuda.check_errors()
    yield
    maxunpool_cuda.check_errors()


def cells(index: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Ones, and indices into a plane of 4x4, of which one is given."""
    x = torch.ones(1, 1, 2, 2, device="cuda")
    return x, torch.tensor([[[[0, 2], [index, 10]]]], device="cuda")


def raises() -> contextlib.AbstractContextManager:
    return pytest.raises(RuntimeError, match="Found an invalid max index: 108 ")


def test_a_bad_call_raises_once() -> None:
    """One of the next calls raises, though the kernel may find more bad indices afterwards."""
    x = torch.ones(64, 64, 256, 256, device="cuda")
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


@pytest.mark.parametrize("checks", [False, True], ids=["errors later", "errors at once"])
def test_a_call_waits_only_to_raise_errors_at_once(
    checks: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [draw(rng, operator) for operator in OPERATORS * 10]
    inputs = [[tensor.cuda() for tensor in call.tensors] for call in calls]
    for call, tensors in zip(calls, inputs, strict=True):
        call.on(*tensors)  # the first call loads the kernels and allocates
    torch.cuda.synchronize()
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", str(int(checks)))
    torch.cuda._sleep(2_000_000_000)  # about a second
    awake = torch.cuda.Event()
    awake.record()
    for call, tensors in zip(calls, inputs, strict=True):
        call.on(*tensors)
    assert awake.query() == checks
    if checks:
        with raises():
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
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_capture_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with raises():
        maxunpool_cuda.check_errors()
    for _ in range(3):
        graph.replay()
        with raises():
            maxunpool_cuda.check_errors()
        maxunpool_cuda.check_errors()
        assert output.sum() == 4


def test_a_training_step_in_a_graph() -> None:
    """Pooling, unpooling and both gradients, replayed on other values."""
    x = torch.rand(2, 8, 12, 16, device="cuda", requires_grad=True)
    weight = torch.rand_like(x)

    def step() -> tuple[torch.Tensor, ...]:
        pooled, offsets = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        output = F.max_unpool2d(pooled, offsets, 3, 2, 1, output_size=(12, 16))
        return output.detach(), torch.autograd.grad(output, x, weight)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # makes the allocations that are made once
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.rand_like(x))
        graph.replay()
        assert all(map(same, results, step()))


def test_every_gpu(rng: random.Random) -> None:
    """GPUs that are not the current one, too."""
    for index in range(torch.cuda.device_count()):
        for operator in OPERATORS:
            draw(rng, operator).check(f"cuda:{index}")
