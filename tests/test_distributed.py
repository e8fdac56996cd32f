"""Several processes train a model as one does. How DTensors are refused: docs/pytorch.md."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from published import PUBLISHED, drawn
from torch import Tensor, distributed, nn

import maxunpool_cuda

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("no gloo", allow_module_level=True)

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh


def train_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Whole parameters and gradients after one step. All sums are exact in any order."""
    # A batch and a rate that are powers of two: the mean over processes is exact as well.
    model(x).sum().div(len(x)).backward()
    torch.optim.SGD(model.parameters(), lr=0.25).step()
    tensors = [tensor for p in model.parameters() for tensor in (p.detach(), p.grad)]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def train(rank: int, parallel: Callable[[nn.Module], nn.Module], folder: Path) -> None:
    """The work of one of two processes, on half of the batch."""
    store = f"file://{folder}/store"
    timeout = timedelta(minutes=10)
    distributed.init_process_group("gloo", store, timeout, world_size=2, rank=rank)
    model, x = torch.load(folder / "start.pt", weights_only=False)
    torch.save(train_step(parallel(model), x[rank::2]), folder / f"{rank}.pt")
    distributed.destroy_process_group()
    # PyTorch aborts now and then as such a process ends, with torch.nn's unpooling too.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("parallel", [nn.parallel.DistributedDataParallel, sharded])
def test_two_processes_train_as_one(
    parallel: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model, x, _ = drawn(PUBLISHED["InceptionTime"])
    assert maxunpool_cuda.replace_max_pooling(model, torch.uint8) == {}
    torch.save((model, x), tmp_path / "start.pt")
    torch.multiprocessing.spawn(train, (parallel, tmp_path), nprocs=2)
    expected = train_step(model, x)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        # A zero of either sign is a zero.
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert any(p.grad.any() for p in model.parameters())
