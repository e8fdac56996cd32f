# SPDX-License-Identifier: BSD-3-Clause
"""How many sets of data a case rotates through: computed from its sizes, before any is made.

A set is what one call is given. If a set were used again while a part of it is in the cache, the
call would be timed with less traffic than it has in a network. So a rotation reads more than the
cache holds before it begins anew. Example: float32 values of 8x64x14x14 take 3.2 MB; an H100's
cache has 50 MiB; so a rotation has 1 + 128 MiB // 3.2 MB = 42 sets.
"""

import gc
import math
from typing import NamedTuple

import torch

from .cases import Case

CACHE_BYTES = 2**27  # more than the last cache of most CPUs, and than twice that of most GPUs
MOST_BYTES = 2**32  # of a case, so that a small GPU does them all, but for KernelBench's
CHUNK = 2**22  # indices, 32 MiB as int64, that are made offsets at a time
MOST_SETS = {"cpu": 32, "cuda": 512}  # making one on the CPU takes up to 0.1 s


class TooLargeError(Exception):
    """The device has too little free memory for a case."""


class Sizes(NamedTuple):
    """Bytes of the tensors of a case."""

    pooled: int  # values
    unpooled: int  # values
    indices: int  # in the case's dtype
    flat: int  # the same as int64


def sizes(case: Case) -> Sizes:
    """The bytes of the case's tensors."""
    item, index = (getattr(torch, name).itemsize for name in (case.dtype, case.index_dtype))
    cells, outputs = math.prod(case.pooled), math.prod(case.shape)
    return Sizes(cells * item, outputs * item, cells * index, cells * 8)


def cache_bytes(device: str) -> int:
    """What a rotation has to exceed. A GPU's cache counts twice, as results take places in it."""
    if device == "cpu":
        return CACHE_BYTES
    return max(CACHE_BYTES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)


def free_bytes(device: str) -> float:
    """The memory that can be had: of a GPU what no process holds, of the CPU all there is."""
    if device == "cpu":
        return math.inf
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def inputs_of(case: Case) -> tuple[int, int]:
    """The bytes of a set's input and, for a gradient, its grad_output."""
    size = sizes(case)
    given = size.pooled if case.operation == "unpool" else size.unpooled
    gradient = size.pooled if case.pools else size.unpooled
    return given, gradient * (case.direction != "forward")


def bytes_of_set(case: Case) -> int:
    """What a set holds: its tensors, and what everyone's graph keeps for the gradient alone."""
    size = sizes(case)
    if not case.has_indices:
        return size.unpooled
    indices = size.indices + size.flat * (case.index_dtype != "int64")
    kept = (size.indices + size.flat) * (case.operation == "pool" and case.direction == "backward")
    return sum(inputs_of(case)) + indices + kept


def bytes_of_source(case: Case) -> int:
    """What a clone reads: half the useful bytes of an operator, in words of four bytes."""
    return -(-case.useful_bytes // (8 * case.operators)) * 4


def sources(case: Case, device: str) -> int:
    """How many tensors the clone reads in turn."""
    return min(MOST_SETS[device], 1 + cache_bytes(device) // bytes_of_source(case))


def bytes_of_results(case: Case) -> int:
    """The most that a call makes."""
    size = sizes(case)
    there, back = {
        "unpool": (size.unpooled, size.pooled),
        "pool": (size.pooled + size.flat, size.unpooled),
        "values": (size.pooled + size.flat, size.unpooled),
        "round-trip": (size.unpooled + size.pooled + size.flat, size.unpooled + size.pooled),
    }[case.operation]
    return there * (case.direction != "backward") + back * (case.direction != "forward")


def bytes_to_check(case: Case) -> int:
    """The most that is held beside the sets while one is made, or a result is compared."""
    size, results = sizes(case), bytes_of_results(case)
    if not case.has_indices:  # the definition is put together of its samples
        return max(results, 3 * size.pooled) + size.pooled
    # The definition finds the last of equal indices in int32, then makes the results again.
    copies = size.pooled + size.flat * (case.layout == "channels_last")
    order = (4 * math.prod(case.shape) + size.flat) * (not case.pools)
    # Equality is a bool for each; for bfloat16 PyTorch's CPU kernels add in float32.
    compared = results + math.prod(case.shape) * (1 if case.dtype == "float32" else 5)
    temporary = 6 * min(size.flat, 8 * CHUNK) * (case.index_dtype == "uint8")
    making = size.unpooled + size.flat + temporary
    return max(making, results + copies + max(order, compared))


def bytes_needed(case: Case, device: str, number: int) -> int:
    """What the case holds at most with this number of sets."""
    clones = (sources(case, device) + case.operators) * bytes_of_source(case)
    beside = max(bytes_to_check(case), clones + bytes_of_results(case))
    return number * bytes_of_set(case) + beside


def sets(case: Case, device: str) -> int:
    """How many sets exceed the cache; fewer if they would not fit the memory.

    Raises:
        TooLargeError: Not even one fits.
    """
    free = free_bytes(device)
    least = bytes_needed(case, device, 1)
    if least > free:
        raise TooLargeError(f"needs {least / 2**30:.1f} GiB, but {free / 2**30:.1f} are free")
    given, gradient = inputs_of(case)
    read = min(given, sizes(case).indices + (gradient or given))
    wanted = min(MOST_SETS[device], 1 + cache_bytes(device) // read)
    more = (min(MOST_BYTES, free) - least) // bytes_of_set(case)
    return max(1, min(wanted, 1 + int(more)))
