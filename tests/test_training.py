# SPDX-License-Identifier: BSD-3-Clause
"""Training under deterministic algorithms, and by several processes that train as one does."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import same
from published import PUBLISHED, drawn, results
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import maxunpool_cuda

# Operators that, on CUDA in some release from 2.10 to 2.15, raise or silently add up in any order.
NONDETERMINISTIC = {
    "aten::max_pool3d_with_indices_backward",
    "aten::adaptive_max_pool3d_backward",
    "aten::max_unpool3d",
}


@pytest.mark.usefixtures("composed", "single_threaded_torch")
def test_training_step() -> None:
    """Results equal torch.nn's bit for bit, as its sums have the same order on the CPU."""
    # The windows of the first overlap, those of adaptive pools have many sizes.
    pools = (nn.MaxPool3d(3, 2, 1), nn.AdaptiveMaxPool3d((5, 6, 4)), nn.AdaptiveMaxPool3d(2))
    layers = [layer for pool in pools for layer in (nn.Conv3d(6, 6, 3, padding=1), pool)]
    model = nn.Sequential(PUBLISHED["UNet3d"].make(), *layers).double()
    x = torch.rand(2, 2, 13, 14, 15, dtype=torch.float64)
    with torch.profiler.profile() as theirs:
        expected = results(model, x)
    assert {event.name for event in theirs.events()} >= NONDETERMINISTIC
    torch.use_deterministic_algorithms(True)
    with torch.profiler.profile() as ours:
        with maxunpool_cuda.patched():
            patched = results(model, x)
        maxunpool_cuda.convert_max_pooling(model)
        converted = results(model, x)
    assert not {event.name for event in ours.events()} & NONDETERMINISTIC
    for name in expected:
        assert same(patched[name], expected[name]), name
        assert same(converted[name], expected[name]), name


@pytest.mark.parametrize(("dims", "return_indices"), [(1, True), (2, False), (2, True), (3, False)])
def test_the_input_of_a_pool_is_freed(device: str, dims: int, return_indices: bool) -> None:
    """After the forward, unless something else needs it. torch.nn keeps it for the backward."""
    x = torch.rand(2, 3, *[9] * dims, device=device)
    scale = torch.ones((), device=device, requires_grad=True)

    def pooled(of: Any) -> tuple[Tensor, StorageWeakRef]:
        """The largest values, and what tells whether the pool's input is freed."""
        pool = getattr(of, f"MaxPool{dims}d")(3, 2, 1, return_indices=return_indices)
        product = scale * x  # its backward needs both factors, and not the product
        result = pool(product)
        return result[0] if return_indices else result, StorageWeakRef(product.untyped_storage())

    values_of_torch_nn, theirs = pooled(nn)
    assert not theirs.expired()
    del values_of_torch_nn
    assert theirs.expired()
    values, ours = pooled(maxunpool_cuda)
    assert ours.expired()
    (gradient,) = torch.autograd.grad(values.sum(), scale)
    torch.testing.assert_close(gradient, values.sum())  # as the maxima grow with the scale, 1


def train_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Whole parameters and gradients after one step. All sums are exact in any order."""
    # A batch and a rate that are powers of two: the mean over processes is exact as well.
    model(x).sum().div(len(x)).backward()
    torch.optim.SGD(model.parameters(), lr=0.25).step()
    tensors = [tensor for p in model.parameters() for tensor in (p.detach(), p.grad)]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def train(rank: int, is_sharded: bool, folder: Path) -> None:
    """The work of one of two processes, on half of the batch."""
    distributed.init_process_group("gloo", f"file://{folder}/store", world_size=2, rank=rank)
    model, x = torch.load(folder / "start.pt", weights_only=False)
    if is_sharded:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    torch.save(train_step(model, x[rank::2]), folder / f"{rank}.pt")
    distributed.destroy_process_group()
    # PyTorch aborts now and then as such a process ends, with torch.nn's unpooling too.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_two_processes_train_as_one(is_sharded: bool, tmp_path: Path) -> None:
    model, x, _ = drawn(PUBLISHED["InceptionTime"])
    maxunpool_cuda.convert_max_pooling(model, index_dtype=torch.uint8)
    torch.save((model, x), tmp_path / "start.pt")
    torch.multiprocessing.spawn(train, (is_sharded, tmp_path), nprocs=2)
    expected = train_step(model, x)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    torch.testing.assert_close(found, [expected] * 2, rtol=0, atol=0)
    assert any(p.grad.any() for p in model.parameters())
