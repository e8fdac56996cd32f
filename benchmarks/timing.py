"""Clocks, and rounds in which everyone is called once.

Host and device states drift (clock speed, other processes, the allocator), so that contenders are
interleaved: a round calls each once, and who is first rotates. Each call's result is fresh and is
freed before the next call, outside the time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
# About 0.25 ms at 2 GHz: the host queues a call and its events meanwhile.
HEAD_START_CYCLES = 500_000


@dataclass(frozen=True)
class Budget:
    """When to stop.

    Attributes:
        seconds: for each contender.
        fewest_rounds: whatever they take.
        most_rounds: however short they are.
        warm_up: calls of each that are not counted.
    """

    seconds: float = 0.5
    fewest_rounds: int = 10
    most_rounds: int = 200
    warm_up: int = 2


@dataclass(frozen=True)
class Times:
    """Seconds of a call: median, quartiles, and of how many rounds."""

    median: float
    first_quartile: float
    third_quartile: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, first, third, len(seconds))


class Clock(Protocol):
    """Measures calls one after the other."""

    def time(self, call: Call) -> None:
        """Make the call."""

    def collect(self) -> list[float]:
        """The seconds of each call since the last time this was asked."""


class CpuClock:
    """The host's monotonic clock."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def time(self, call: Call) -> None:
        start = time.perf_counter_ns()
        result = call()
        self._seconds.append((time.perf_counter_ns() - start) * 1e-9)
        del result

    def collect(self) -> list[float]:
        seconds, self._seconds = self._seconds, []
        return seconds


class CudaClock:
    """CUDA events around each call.

    ``with_host=False``: the device sleeps first, so that the host has queued the call when it
    begins and the time is the device's alone, as in a network that keeps its device busy.
    ``with_host=True``: the device is idle first, so that the time the host takes shows.
    """

    def __init__(self, with_host: bool) -> None:
        self._with_host = with_host
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, call: Call) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._with_host:
            torch.cuda.synchronize()
        else:
            torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        result = call()
        end.record()
        del result
        self._events.append((start, end))

    def collect(self) -> list[float]:
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return [start.elapsed_time(end) * 1e-3 for start, end in events]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector from running inside a timed call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def interleave(
    contenders: dict[str, Sequence[Call]], clock: Clock, budget: Budget
) -> dict[str, Times]:
    """Time everyone in rounds; the nth round takes everyone's nth call, from the start again."""
    for calls in contenders.values():
        for turn in range(budget.warm_up):
            clock.time(calls[turn % len(calls)])
    clock.collect()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.monotonic() + budget.seconds * len(names)
    with no_garbage_collection():
        for turn in range(max(budget.most_rounds, budget.fewest_rounds)):
            if turn >= budget.fewest_rounds and time.monotonic() >= deadline:
                break
            first = turn % len(names)
            order = names[first:] + names[:first]
            for name in order:
                calls = contenders[name]
                clock.time(calls[turn % len(calls)])
            for name, elapsed in zip(order, clock.collect(), strict=True):
                seconds[name].append(elapsed)
    return {name: Times.of(elapsed) for name, elapsed in seconds.items()}


def cache_bytes(device: str) -> int:
    """The size of the last cache before the memory; 32 MiB where it is not known."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = (cache.read_text().strip() for cache in caches)
    sizes = [int(text[:-1]) * 2**10 for text in texts if text.endswith("K")]
    return max(sizes, default=32 * 2**20)
