# SPDX-License-Identifier: BSD-3-Clause
"""Training under deterministic algorithms, and in less memory than torch.nn takes."""

from pathlib import Path

import pytest
import torch
from cases import all_same, same
from published import PUBLISHED, drawn, results
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves as leaves

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
    # The windows of the first overlap, those of the adaptive pool have several sizes.
    layers = (nn.Conv3d(6, 6, 3), nn.MaxPool3d(3, 2, 1), nn.AdaptiveMaxPool3d((5, 4, 2)))
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
    for name, right in expected.items():
        assert same(patched[name], right), name
        assert same(converted[name], right), name


@pytest.mark.parametrize(("dims", "return_indices"), [(1, True), (2, False), (2, True), (3, False)])
def test_the_input_of_a_pool_is_freed(device: str, dims: int, return_indices: bool) -> None:
    """After the forward, unless something else needs it. torch.nn keeps it for the backward."""
    x = torch.rand(2, 3, *[9] * dims, device=device)
    scale = torch.ones((), device=device, requires_grad=True)
    is_freed = []
    for of in (nn, maxunpool_cuda):
        pool = getattr(of, f"MaxPool{dims}d")(3, 2, 1, return_indices=return_indices)
        product = scale * x  # its backward needs both factors, and not the product
        values = leaves(pool(product))[0]
        memory = StorageWeakRef(product.untyped_storage())
        del product
        is_freed.append(memory.expired())
    assert is_freed == [False, True]
    (gradient,) = torch.autograd.grad(values.sum(), scale)
    # The maxima are proportional to the scale, which is 1.
    torch.testing.assert_close(gradient, values.sum())


@pytest.mark.usefixtures("single_threaded_torch")
def test_sharded_training(tmp_path: Path) -> None:
    """A step under FSDP2, here of one process, is the step without it."""
    model, x, _ = drawn(PUBLISHED["PhotoWCT"])
    maxunpool_cuda.convert_max_pooling(model, index_dtype=torch.uint8)
    loss = model(x).sum()
    expected = torch.autograd.grad(loss, [*model.parameters()])
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        sharded(x).sum().backward()
        found = tuple(parameter.grad.full_tensor() for parameter in sharded.parameters())
    finally:
        distributed.destroy_process_group()
    assert all_same(found, expected)
