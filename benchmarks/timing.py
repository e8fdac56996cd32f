"""Clocks, and rounds in which everyone is called once.

Host and device states drift (clock speed, other processes, the allocator), so contenders are
interleaved: a round calls each once, and who is first rotates. torch.utils.benchmark.Timer times
one statement to the end before the next, warms each up with what is timed, and sees no device
alone. Each call's result is fresh and is freed before the next call, outside the time.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
Clock = Callable[[Call], float]  # the seconds that the call takes
FEWEST_ROUNDS, MOST_ROUNDS, WARM_UP = 10, 200, 2
# About 0.25 ms at 2 GHz: the host queues a call and its events meanwhile.
HEAD_START_CYCLES = 500_000


def cpu_clock(call: Call) -> float:
    """The host's."""
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def cuda_clock(call: Call, with_host: bool = False) -> float:
    """CUDA events around the call.

    Without the host: the device sleeps first, so that the host has queued the call when it begins
    and the time is the device's alone, as in a network that keeps its device busy. With it: the
    device is idle first, so that the time the host takes shows.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if with_host:
        torch.cuda.synchronize()
    else:
        torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    result = call()
    end.record()
    del result
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def interleave(
    contenders: Mapping[str, Sequence[Call]], clock: Clock, seconds: float
) -> dict[str, list[float]]:
    """The quartiles of everyone's seconds; the nth round takes everyone's nth call, in turns.

    It ends when everyone had so many seconds, after :data:`FEWEST_ROUNDS` at the least and
    :data:`MOST_ROUNDS` at the most.
    """
    for calls in contenders.values():
        for turn in range(WARM_UP):
            clock(calls[turn % len(calls)])
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.monotonic() + seconds * len(names)
    gc.disable()  # it may not run inside a timed call
    try:
        for turn in range(MOST_ROUNDS):
            if turn >= FEWEST_ROUNDS and time.monotonic() >= deadline:
                break
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(clock(contenders[name][turn % len(contenders[name])]))
    finally:
        gc.enable()
    return {name: statistics.quantiles(s, n=4, method="inclusive") for name, s in found.items()}
