# SPDX-License-Identifier: BSD-3-Clause
"""What a GPU shows: calls that do not wait, errors that come late, several GPUs.

emulation/host_code.py has captures and replays, which need no GPU.
"""

import os
from collections.abc import Iterator
from random import Random

import failures
import pytest
import torch
from cases import OPERATORS, draw

import maxunpool_cuda
import maxunpool_cuda.functional as F

pytestmark = pytest.mark.cuda
Patch = pytest.MonkeyPatch


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
        with pytest.raises(RuntimeError, match="Found an invalid max index: 108;"):
            F.max_unpool2d(*cells(108), 2)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gpus_that_are_not_the_current_one(operator: str, rng: Random) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    for index in range(torch.cuda.device_count()):
        draw(rng, operator).check(f"cuda:{index}")
