# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a case, and the results that a call of it must have."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import Case

CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
CACHE_BYTES = 2**27  # more than the last cache of most CPUs, and than twice that of most GPUs
MOST_BYTES = 2**32  # of a rotation, so that it fits a small GPU
MOST_SETS = {"cpu": 32, "cuda": 512}  # making one on the CPU takes up to 0.1 s
FEW = 2**20  # elements. In fewer a processor learns where the maxima are, if planes alone move
CHUNK = 2**22  # indices, 32 MiB as int64, that are made offsets at a time


class Data(NamedTuple):
    """What one call is given."""

    input: Tensor  # random values, for unpooling as PyTorch's max pooling selects them
    indices: Tensor  # where PyTorch finds the maxima, in the case's dtype; empty if not needed
    flat: Tensor  # the same as flat int64 indices: the same tensor if that is the case's dtype
    grad_output: Tensor | None = None  # random whole numbers, whose sums are exact


def make(case: Case, device: str, seed: int = 0) -> Data:
    """Pool random values; the same seed gives the same ones."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    unpooled = torch.empty(case.shape, dtype=dtype, device=device).normal_(generator=generator)
    if not case.has_indices:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return Data(laid_out(unpooled, case), none, none)
    values, flat = pooling(case)(unpooled, return_indices=True)
    tensors = [values if case.operation == "unpool" else unpooled, indices_of(case, flat), flat]
    if case.direction != "forward":
        result = values if case.pools else unpooled
        tensors.append(torch.empty_like(result).random_(-8, 9, generator=generator))
    tensors = [laid_out(tensor, case) for tensor in tensors]
    if case.index_dtype == "int64":
        tensors[2] = tensors[1]
    return Data(*tensors)


def laid_out(tensor: Tensor, case: Case) -> Tensor:
    """The tensor in the case's layout."""
    if case.layout == "contiguous":
        return tensor
    return tensor.contiguous(memory_format=CHANNELS_LAST[case.rank])


def pooling(case: Case) -> Callable[..., Any]:
    """PyTorch's max pooling with the case's windows."""
    pool = getattr(torch.nn.functional, f"max_pool{case.rank}d")
    options = {name: getattr(case, name) for name in ("kernel_size", "stride", "padding")}
    return functools.partial(pool, dilation=case.dilation, **options)


def cache_bytes(device: str) -> int:
    """What a rotation has to exceed. A GPU's cache counts twice, as results take places in it."""
    if device == "cpu":
        return CACHE_BYTES
    return max(CACHE_BYTES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)


def sets(held: int, read: int, device: str) -> int:
    """How many sets a rotation has: it reads more than the cache holds before it begins anew.

    Example: float32 values of 8x512x14x14 take 3.2 MB; an H100's cache has 50 MiB; so a rotation
    has 1 + 128 MiB // 3.2 MB = 42 sets.

    Args:
        held: The bytes of a set.
        read: Those that a call reads at the least.
        device: Where they are.
    """
    fitting = max(1, MOST_BYTES // held)
    return min(MOST_SETS[device], 1 + cache_bytes(device) // read, fitting)


def rotation(case: Case, device: str) -> list[Data]:
    """Data that exceed a cache, if not tiny. Their values differ, as processors learn branches.

    Small tensors are drawn anew. Large ones, for which that takes longer, have the same planes in
    another order.
    """
    first, channels = make(case, device), case.shape[1]
    given = first.input.nbytes
    gradient = 0 if first.grad_output is None else first.grad_output.nbytes
    kept = first.indices.nbytes
    flat = 0 if first.flat is first.indices else first.flat.nbytes
    number = sets(given + gradient + kept + flat, min(given, kept + (gradient or given)), device)
    if math.prod(case.shape) < FEW:
        return [first, *(make(case, device, seed) for seed in range(1, number))]
    return [first, *(moved(first, case, 1 + turn % (channels - 1)) for turn in range(number - 1))]


def moved(data: Data, case: Case, channels: int) -> Data:
    """The same planes, each so many channels further on; the last come first."""

    def move(tensor: Tensor) -> Tensor:
        # On CUDA torch.roll makes it contiguous.
        return laid_out(torch.roll(tensor, channels, dims=1), case) if tensor.numel() else tensor

    indices = move(data.indices)
    flat = indices if data.flat is data.indices else move(data.flat)
    gradient = None if data.grad_output is None else move(data.grad_output)
    return Data(move(data.input), indices, flat, gradient)


def indices_of(case: Case, flat: Tensor) -> Tensor:
    """Flat int64 indices in the case's dtype; for uint8 the place in each index's window."""
    if case.index_dtype != "uint8":
        return flat.to(getattr(torch, case.index_dtype))
    planes = flat.flatten(0, 1)
    chunks = planes.split(max(1, CHUNK // planes[0].numel()))
    return torch.cat([_offsets(case, chunk) for chunk in chunks]).view_as(flat)


def _offsets(case: Case, flat: Tensor) -> Tensor:
    """The places in their windows, as uint8, of flat indices ``(planes, *S)``."""
    offsets = torch.zeros_like(flat)
    for dim, place in enumerate(torch.unravel_index(flat, case.shape[2:])):
        begin = torch.arange(flat.shape[1 + dim], device=flat.device) * case.stride - case.padding
        begin = begin.view(-1, *[1] * (case.rank - 1 - dim))
        offsets = offsets * case.kernel_size + place - begin
    return offsets.byte()


def _is_last(case: Case, indices: Tensor) -> Tensor:
    """Whether no later value, in row-major order, has the same index: flat, ``(N, C, cells)``."""
    cells = torch.arange(indices.shape[-1], dtype=torch.int32, device=indices.device)
    order = cells.expand_as(indices)
    last = order.new_zeros(*case.shape[:2], math.prod(case.shape[2:]))
    last.scatter_reduce_(-1, indices, order, "amax")
    return (last.gather(-1, indices) == order).reshape(case.pooled)


def definition(case: Case, data: Data, to_losers: bool = False) -> tuple[Tensor, ...]:
    """What every call must return, given where the maxima are: results, the gradient, or both.

    If values share an index, unpooling keeps the last in row-major order. With ``to_losers`` its
    gradient goes to all of them, as PyTorch's does.
    """
    if not case.has_indices:
        return (torch.cat([pooling(case)(one) for one in data.input.split(1)]),)
    indices = data.flat.flatten(2)
    is_last = None if case.pools else _is_last(case, indices)

    def gather(unpooled: Tensor) -> Tensor:
        return unpooled.flatten(2).gather(-1, indices).reshape(case.pooled)

    def scatter(pooled: Tensor) -> Tensor:
        zeros = pooled.new_zeros(*case.shape[:2], math.prod(case.shape[2:]))
        return zeros.scatter_add_(-1, indices, pooled.flatten(2)).reshape(case.shape)

    results: tuple[Tensor, ...] = ()
    if case.direction != "backward":
        values = data.input if case.operation == "unpool" else gather(data.input)
        if is_last is not None:
            values = scatter(values * is_last)
        results = (values, data.indices) if case.operation == "pool" else (values,)
    if data.grad_output is not None:
        gradient = data.grad_output
        if is_last is not None:
            gradient = gather(gradient) * (is_last | to_losers)
        results += (gradient if case.operation == "unpool" else scatter(gradient),)
    return results
