# SPDX-License-Identifier: BSD-3-Clause
"""The memory of a training step, with torch.nn's max pooling and after ``convert_max_pooling``.

Two figures for each network. Saved: the bytes of all tensors that the forward saves for the
backward, each storage once, without parameters and buffers; this is exact on every device. Peak:
the most bytes that forward and backward hold at once beside those held before, as the device's
allocator counts them. Both depend on sizes alone, so one step gives each.

Example: a pool of 2x2 windows, after a convolution with 100 float32 outputs. torch.nn saves these
400 bytes, and 25 int64 indices: 600 bytes. This package saves 25 bytes if the pool returns no
indices, or uint8 ones.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import maxunpool_cuda

from . import architectures, networks, report
from .contenders import OURS, TORCH

# Returns the output and the parameters' gradients, and how many bytes were saved.
Step = Callable[[], tuple[tuple[Tensor, ...], int]]


class Training(NamedTuple):
    """A network that is trained for a step."""

    network: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of the images, with their number
    index_dtype: torch.dtype = torch.int64  # that convert_max_pooling is asked for


TRAININGS = (
    Training("SegNet", architectures.SegNet, (1, 3, 360, 480), torch.uint8),
    Training("VGG-16", architectures.vgg16, (8, 3, 224, 224)),
)


def step_of(training: Training, dtype: str, pooling: str, device: str) -> Step:
    """Forward and backward of a network that has the same weights and images for each pooling."""
    torch.manual_seed(0)
    options = {"device": device, "dtype": getattr(torch, dtype)}
    model = training.make().to(**options)
    images = torch.randn(training.shape).to(**options)
    if pooling != TORCH:
        maxunpool_cuda.convert_max_pooling(model, index_dtype=training.index_dtype)

    def step() -> tuple[tuple[Tensor, ...], int]:
        torch.manual_seed(1)  # for dropout
        with counted_savings(model) as saved:
            output = model(images)
        gradients = torch.autograd.grad(output.sum(), [*model.parameters()])
        return (output.detach(), *gradients), sum(saved.values())

    return step


@contextmanager
def counted_savings(model: nn.Module) -> Iterator[dict[int, int]]:
    """Counts the bytes that are saved for a backward, by the address of their storage.

    Nothing that is saved is freed inside, so no address stands for two storages.
    """
    saved: dict[int, int] = {}
    of_model = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_model:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """The most bytes that the call holds at once beside those held before."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or some releases print two lines
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    changes.sort(key=itemgetter(0))
    return max(accumulate(size for _, size in changes))  # negative where some are freed


def rows_of(training: Training, dtype: str, device: str) -> Iterator[report.Row]:
    """The figures of each pooling. Results that differ from torch.nn's are an error."""
    expected: tuple[Tensor, ...] = ()
    for pooling in (TORCH, OURS):
        step = step_of(training, dtype, pooling, device)
        results, saved = step()  # the first call allocates what is allocated once
        expected = expected or results
        if not all(map(torch.equal, results, expected)):
            raise RuntimeError(f"{pooling} does not return torch.nn's result of {training.network}")
        figures = {"saved": saved, "peak": peak_bytes(step, device)}
        network = {"network": training.network, "activation": "ReLU", "shape": training.shape}
        yield {**network, "pooling": pooling, "dtype": dtype, **figures}


def measure(device: str) -> report.Report:
    """The memory of all networks' training steps."""
    rows: list[report.Row] = []
    for training, dtype in product(TRAININGS, ("float32", "bfloat16")):
        print(f"{training.network}, {dtype}", flush=True)
        with networks.reproducible_convolutions():
            rows += rows_of(training, dtype, device)
    return {"facts": report.facts(device), "rows": rows}
