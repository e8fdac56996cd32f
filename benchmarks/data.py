"""The tensors of a case, and the results that a call of it must have."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Case

MOST_IN_ROTATION = 32
CACHE_BYTES = 2**27  # more than the last cache of most machines
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class Data(NamedTuple):
    """What one call is given."""

    input: Tensor  # random values, for unpooling as PyTorch's max pooling selects them
    indices: Tensor  # where PyTorch finds the maxima, in the case's dtype
    flat: Tensor  # the same as flat int64 indices
    grad_output: Tensor | None = None  # random whole numbers, whose sums are exact


def make(case: Case, device: str, seed: int = 0) -> Data:
    """Pool random values, which are the same for each seed."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    unpooled = torch.empty(case.shape, dtype=dtype, device=device).normal_(generator=generator)
    pool = getattr(torch.nn.functional, f"max_pool{case.rank}d")
    window = (case.kernel_size, case.stride, case.padding, case.dilation)
    values, flat = pool(unpooled, *window, return_indices=True)
    tensors = [values if case.operation == "unpool" else unpooled, indices_of(case, flat), flat]
    if case.direction != "forward":
        result = values if case.operation == "pool" else unpooled
        tensors.append(torch.empty_like(result).random_(-8, 9, generator=generator))
    if case.layout == "channels_last":
        layout = CHANNELS_LAST[case.rank]
        tensors = [tensor.contiguous(memory_format=layout) for tensor in tensors]
    return Data(*tensors)


def rotation(case: Case, device: str) -> list[Data]:
    """Data that exceed a cache, if not tiny. Their values differ, as processors learn branches."""
    data = make(case, device)
    read = data.input if data.grad_output is None else data.grad_output
    count = 1 + CACHE_BYTES // min(data.input.nbytes, data.indices.nbytes + read.nbytes)
    return [data, *(make(case, device, seed) for seed in range(1, min(MOST_IN_ROTATION, count)))]


def indices_of(case: Case, flat: Tensor) -> Tensor:
    """Flat int64 indices in the case's dtype; for uint8 the place in each index's window."""
    if case.index_dtype != "uint8":
        return flat.to(getattr(torch, case.index_dtype))
    offsets = torch.zeros_like(flat)
    for dim, place in enumerate(torch.unravel_index(flat, case.shape[2:])):
        begin = torch.arange(flat.shape[2 + dim], device=flat.device) * case.stride - case.padding
        begin = begin.view(-1, *[1] * (case.rank - 1 - dim))
        offsets = offsets * case.kernel_size + place - begin
    return offsets.byte()


def definition(case: Case, data: Data, to_losers: bool = False) -> tuple[Tensor, ...]:
    """What every call must return, given where the maxima are: results, the gradient, or both.

    If values share an index, unpooling keeps the last in row-major order. With ``to_losers`` its
    gradient goes to all of them, as PyTorch's does.
    """
    indices = data.flat.flatten(2)
    zeros = data.input.new_zeros(*case.shape[:2], math.prod(case.shape[2:]))
    order = torch.arange(indices.shape[-1], device=indices.device).expand_as(indices)
    last = torch.zeros_like(zeros, dtype=torch.int64).scatter_reduce_(-1, indices, order, "amax")
    kept = (last.gather(-1, indices) == order).reshape(case.pooled)

    def gather(unpooled: Tensor) -> Tensor:
        return unpooled.flatten(2).gather(-1, indices).reshape(case.pooled)

    def scatter(pooled: Tensor) -> Tensor:
        return zeros.scatter_add(-1, indices, pooled.flatten(2)).reshape(case.shape)

    results: tuple[Tensor, ...] = ()
    if case.direction != "backward":
        values = data.input if case.operation == "unpool" else gather(data.input)
        results = (values, data.indices) if case.operation == "pool" else (scatter(values * kept),)
    if data.grad_output is not None:
        gradient = data.grad_output
        if case.operation != "pool":
            gradient = gather(gradient) * (kept | to_losers)
        results += (gradient if case.operation == "unpool" else scatter(gradient),)
    return results
