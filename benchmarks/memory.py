"""How much memory a call takes, how much there is, and what becomes of what is freed."""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Some releases of PyTorch print two lines for each use of the profiler. Read at its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most bytes held at once during the call, above what was held before it.

    On CUDA from the caching allocator's statistics. On the CPU from the allocations of PyTorch's
    allocator that the profiler saw, in order: what a library allocates on its own is not seen.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def _glibc(function: str, *arguments: int) -> bool:
    """Call a function of glibc's malloc; False where there is another one, or it refuses."""
    found = getattr(ctypes.CDLL(None), function, None)
    return found is not None and found(*arguments) == 1


def keep_pages() -> bool:
    """Have malloc keep what is freed, however large, as the caching allocator of CUDA does.

    Otherwise glibc maps a tensor above 32 MiB anew for each call, and page faults take most of
    the time. Returns whether that could be done.
    """
    return _glibc("mallopt", _M_MMAP_MAX, 0) and _glibc("mallopt", _M_TRIM_THRESHOLD, 2**31 - 1)


def available_bytes(device: str) -> int:
    """What can still be allocated on the device, once allocators gave back what they keep."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    _glibc("malloc_trim", 0)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 2**10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
