# SPDX-License-Identifier: BSD-3-Clause
"""One case: check every result, then time everyone in rounds, since the machine's state drifts."""

import ctypes
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from . import contenders, data, networks
from .cases import Case
from .contenders import CLONE, OURS, TORCH, Call

FEWEST_ROUNDS, MOST_ROUNDS, WARM_UP = 10, 200, 2
SLEEP = 500_000  # cycles of the device, 0.25 ms at 2 GHz: most calls are queued in that time
DOUBLINGS = 7  # of SLEEP: 32 ms, more than the host takes for a training step's launches

Clock = Callable[[Call], float]


def keep_pages() -> bool:
    """Have malloc keep what is freed, however large, as the caching allocator of CUDA does.

    Otherwise glibc maps every tensor above 32 MiB anew, and page faults take most of a call's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mmap_max, trim_threshold = -4, -1  # of glibc's malloc.h
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def cpu_clock(call: Call) -> float:
    """Seconds by the host's clock; the result is freed after the time was taken."""
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


class CudaClock:
    """Seconds between CUDA events around a call, without the time that the host takes to queue it.

    The device sleeps first. If it was awake again before the host had queued the call, the time
    has gaps in which the device waited. Then the call is repeated after twice the sleep, which the
    later calls keep. At 32 ms it gives up: the time is counted as one with gaps, and if most are
    such, the call is host-bound.
    """

    def __init__(self) -> None:
        self.cycles = SLEEP
        self.host_bound = 0  # of the times returned, those with gaps
        self.returned = 0

    def __call__(self, call: Call) -> float:
        seconds, has_gaps = self.measure(call)
        while has_gaps and self.cycles < SLEEP << DOUBLINGS:
            self.cycles *= 2
            seconds, has_gaps = self.measure(call)
        self.host_bound += has_gaps
        self.returned += 1
        return seconds

    def measure(self, call: Call) -> tuple[float, bool]:
        """The seconds, and whether the call began before the host had queued all of it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self.cycles)
        start.record()
        call()
        end.record()
        has_gaps = start.query()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3, has_gaps

    @property
    def is_host_bound(self) -> bool:
        """Whether most of the times that were returned have gaps."""
        return 2 * self.host_bound > self.returned


def idle_cuda_clock(call: Call) -> float:
    """Seconds between CUDA events around a call on an idle device: the host's work counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def clocks_of(case: Case, device: str, names: Iterable[str]) -> dict[str, Clock]:
    """A clock for each contender. Those for tiny tensors count the host, which bounds them."""
    if device == "cpu":
        return dict.fromkeys(names, cpu_clock)
    if case.is_tiny:
        return dict.fromkeys(names, idle_cuda_clock)
    return {name: CudaClock() for name in names}


def interleave(
    calls_of: Mapping[str, Sequence[Call]], clocks: Mapping[str, Clock], seconds: float
) -> dict[str, list[float]]:
    """The quartiles of everyone's seconds, in rounds that take about ``seconds`` for each.

    In a round everyone takes another set of data, as far from the others' as can be: otherwise one
    would find in the cache what another has read.
    """
    found: dict[str, list[float]] = {name: [] for name in calls_of}
    names = list(calls_of)
    first = {name: -(-i * len(calls_of[name]) // len(names)) for i, name in enumerate(names)}
    deadline = time.monotonic() + seconds * len(names)
    gc.disable()  # it may not run inside a timed call
    try:
        for turn in range(WARM_UP + MOST_ROUNDS):
            if turn >= WARM_UP + FEWEST_ROUNDS and time.monotonic() >= deadline:
                break
            for name in names:
                call = calls_of[name][(first[name] + turn) % len(calls_of[name])]
                found[name].append(clocks[name](call))
            names.append(names.pop(0))
    finally:
        gc.enable()
    quartiles = functools.partial(statistics.quantiles, n=4, method="inclusive")
    return {name: quartiles(seconds[WARM_UP:]) for name, seconds in found.items()}


def check(name: str, call: Call, case: Case, one: data.Data) -> None:
    """Raise a RuntimeError unless the call returns the definition's results, which are freed here.

    PyTorch's gradient goes to losers, too.
    """
    results = call()
    expected = data.definition(case, one, to_losers=name == TORCH)
    pairs = zip(results, expected, strict=True)
    if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
        raise RuntimeError(f"{name} does not return the definition's result of {case.name}")


def calls(case: Case, device: str) -> tuple[dict[str, list[Call]], str]:
    """Everyone's calls of an operator, on data that rotate; each has returned the right result.

    Returns:
        The calls, and who is left out of the case and why: one that fails, or is wrong.
    """
    rotation = data.rotation(case, device)
    made: dict[str, list[Call]] = {}
    left_out = ""
    for name, function in contenders.functions(case, device).items():
        # torch.nn takes and makes flat int64 indices.
        given = [one._replace(indices=one.flat) if name == TORCH else one for one in rotation]
        made[name] = [contenders.call_of(case, function, one) for one in given]
        try:
            check(name, made[name][0], case, given[0])
        except Exception as error:
            if name in (OURS, TORCH):
                raise
            del made[name]
            left_out = f"{name}: {error}"
    source = case.useful_bytes // (2 * case.operators)  # bytes
    number = data.sets(held=source, read=source, device=device)
    return made | {CLONE: [contenders.clone(case, device) for _ in range(number)]}, left_out


def run(case: Case, device: str, seconds: float) -> dict[str, Any]:
    """Check and time everyone.

    Returns:
        ``results`` has the quartiles of everyone's seconds; ``host-bound``, if it is there, the
        names of those whose time has gaps in which the device waited for the host; ``left out``,
        if it is there, who else is missing, and why.

    Raises:
        RuntimeError: A result is wrong, or a call failed.
        torch.OutOfMemoryError: The device has too little free memory.
    """
    prepare = networks.calls if case.operation == "network" else calls
    calls_of, left_out = prepare(case, device)
    clocks = clocks_of(case, device, calls_of)
    found = interleave(calls_of, clocks, seconds).items()
    rounded = {name: {"quartiles": [float(f"{x:.5g}") for x in three]} for name, three in found}
    bound = [name for name, clock in clocks.items() if getattr(clock, "is_host_bound", False)]
    row = {"name": case.name, "results": rounded}
    row |= {"host-bound": bound} if bound else {}
    return row | ({"left out": left_out} if left_out else {})
