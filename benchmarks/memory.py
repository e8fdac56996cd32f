"""How much memory a call takes, how much there is, and what becomes of what is freed."""

import ctypes
import gc
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Some releases of PyTorch print two lines for each use of the profiler. Read at its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most bytes that the call holds at once.

    On CUDA from the caching allocator's statistics, above what was held before. On the CPU from
    the allocations of PyTorch's allocator that the profiler saw, in order: what a library
    allocates on its own is not seen. Memory of before the call is no part of it: the call may
    free some, such as gradients, or a model that waited for the garbage collector.
    """
    if device == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    allocations = [event for event in events if event.get("name") == "[memory]"]
    allocations.sort(key=lambda event: event["ts"])
    held: dict[int, int] = {}
    now = peak = 0
    for event in allocations:
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            held[address] = size
            now += size
            peak = max(peak, now)
        else:
            now -= held.pop(address, 0)
    return peak


def keep_pages() -> bool:
    """Have malloc keep what is freed, however large, as the caching allocator of CUDA does.

    Otherwise glibc maps a tensor above 32 MiB anew for each call, and page faults take most of
    the time. False where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mmap_max, trim_threshold = -4, -1  # of glibc's malloc.h
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def available_bytes(device: str) -> int:
    """What can still be allocated on the device, once allocators gave back what they keep."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
    (kilobytes,) = re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    return int(kilobytes) * 2**10


def cache_bytes(device: str) -> int:
    """The size of the last cache before the memory; 32 MiB where it is not known."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")  # such as 32768K
    sizes = (int(cache.read_text().rstrip("K\n")) * 2**10 for cache in caches)
    return max(sizes, default=32 * 2**20)
