"""What a training step of SegNet holds in memory: with pooling of torch.nn, and of this package."""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import maxunpool_cuda

from . import report
from .segnet import SegNet

# Without it some releases of PyTorch print two lines at each use of the profiler.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
CONTENDERS = ("torch.nn", "int32", "uint8")  # the last two are this package's indices
DTYPES = ("float32", "bfloat16")
SHAPE = (1, 3, 360, 480)  # of an image of CamVid, as the network's authors cut them


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most bytes of new tensors that the call holds at once."""
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
    held, peak = {}, 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("name") == "[memory]":
            held[event["args"]["Addr"]] = max(0, event["args"]["Bytes"])  # negative: freed
            peak = max(peak, sum(held.values()))
    return peak


def step(contender: str, dtype: str, device: str) -> dict[str, Any]:
    """The loss, the bytes of the pools' results, and the peak, of the same network and data."""
    torch.manual_seed(0)
    model = SegNet().to(device, getattr(torch, dtype))
    if contender != "torch.nn":
        maxunpool_cuda.replace_max_pooling(model, getattr(torch, contender))
    input = torch.randn(SHAPE, dtype=getattr(torch, dtype), device=device)
    labels = torch.randint(12, (SHAPE[0], *SHAPE[2:]), device=device)
    row: dict[str, Any] = {"contender": contender, "dtype": dtype}

    def weigh(_: nn.Module, __: Any, results: tuple[Tensor, Tensor]) -> None:
        for what, result in zip(("values", "indices"), results, strict=True):
            row[what] += result.nbytes

    for pool in model.pools:
        pool.register_forward_hook(weigh)

    def train() -> None:
        row.update(values=0, indices=0)
        model.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(input).float(), labels)
        loss.backward()
        row["loss"] = loss.item()

    train()  # allocates what is allocated once
    row["peak"] = peak_bytes(train, device)
    return row


def measure(device: str) -> report.Report:
    """A row for each dtype and contender. All losses of one dtype have to be equal."""
    rows = [step(contender, dtype, device) for dtype, contender in product(DTYPES, CONTENDERS)]
    if len({(row["dtype"], row["loss"]) for row in rows}) != len(DTYPES):
        raise RuntimeError(f"expected one loss of each dtype but got {rows}")
    return {"facts": report.facts(device), "training": {"shape": SHAPE}, "rows": rows}
