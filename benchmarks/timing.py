"""One case: check every result, then time everyone in rounds, since the machine's state drifts."""

import ctypes
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import contenders, data, networks
from .cases import Case
from .contenders import CLONE, TORCH, Call

FEWEST_ROUNDS, MOST_ROUNDS, WARM_UP = 10, 200, 2


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


def cuda_clock(call: Call, with_host: bool = False) -> float:
    """Seconds between CUDA events around the call.

    Without the host the device sleeps first, so that the host has queued the call when the device
    begins. With it the device is idle first, so that the host's work on the call counts.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if with_host:
        torch.cuda.synchronize()
    else:
        torch.cuda._sleep(500_000)  # cycles: 0.25 ms at 2 GHz
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def interleave(
    calls_of: Mapping[str, Sequence[Call]], clock: Callable[[Call], float], seconds: float
) -> dict[str, list[float]]:
    """The quartiles of everyone's seconds, in rounds that take about ``seconds`` for each."""
    found: dict[str, list[float]] = {name: [] for name in calls_of}
    names = list(calls_of)
    deadline = time.monotonic() + seconds * len(names)
    gc.disable()  # it may not run inside a timed call
    try:
        for turn in range(WARM_UP + MOST_ROUNDS):
            if turn >= WARM_UP + FEWEST_ROUNDS and time.monotonic() >= deadline:
                break
            for name in names:
                found[name].append(clock(calls_of[name][turn % len(calls_of[name])]))
            names.append(names.pop(0))
    finally:
        gc.enable()
    quartiles = functools.partial(statistics.quantiles, n=4, method="inclusive")
    return {name: quartiles(seconds[WARM_UP:]) for name, seconds in found.items()}


def calls(case: Case, device: str) -> dict[str, list[Call]]:
    """Everyone's calls of an operator, on data that rotate; each has returned the right result."""
    rotation = data.rotation(case, device)
    made: dict[str, list[Call]] = {}
    for name, function in contenders.functions(case, device).items():
        # torch.nn takes and makes flat int64 indices, and its gradient goes to losers too.
        given = [one._replace(indices=one.flat) if name == TORCH else one for one in rotation]
        made[name] = [contenders.call_of(case, function, one) for one in given]
        pairs = zip(made[name][0](), data.definition(case, given[0], name == TORCH), strict=True)
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
            raise RuntimeError(f"{name} does not return the definition's result of {case.name}")
    return made | {CLONE: [contenders.clone(case, one) for one in rotation]}


def run(case: Case, device: str, seconds: float) -> dict[str, Any]:
    """Check and time everyone: ``results`` has the quartiles of everyone's seconds."""
    calls_of = networks.calls if case.operation == "network" else calls
    on_cuda = functools.partial(cuda_clock, with_host=case.layer.startswith("tiny"))
    clock = on_cuda if device == "cuda" else cpu_clock
    found = interleave(calls_of(case, device), clock, seconds).items()
    rounded = {name: {"quartiles": [float(f"{x:.5g}") for x in three]} for name, three in found}
    return {"name": case.name, "results": rounded}
