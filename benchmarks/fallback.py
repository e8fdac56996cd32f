# SPDX-License-Identifier: BSD-3-Clause
"""The fallback beside torch.nn and the usual workarounds: forward and backward on the CPU.

It is timed in a build without a library, whose operators are PyTorch's own. Everyone's result and
gradient are compared with torch.nn's first: values differ, so all are equal, bit for bit. Saved are
the bytes of all tensors that a forward keeps for its backward, each storage once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as ours

from . import report, timing
from .comparisons import SCATTER, TWO_POOLS, UNFOLD, scattered, there_and_back, two_pools, unfolded
from .contenders import OURS, TORCH
from .training import counted_savings

theirs = nn.functional
Function = Callable[[Tensor], Tensor]


def indices_of(x: Tensor) -> Tensor:
    """Indices for MaxUnpool2d(2): the first of each window."""
    rows, columns = (torch.arange(size) * 2 for size in x.shape[2:])
    return (rows[:, None] * (2 * x.shape[3]) + columns).expand(x.shape).contiguous()


def scatter(x: Tensor) -> Tensor:
    """MaxUnpool2d(2), right where windows do not overlap."""
    shape = (*x.shape[:2], *(2 * size for size in x.shape[2:]))
    return scattered(indices_of(x), shape, x)


@dataclass(frozen=True)
class Case:
    """A call that is timed."""

    name: str
    shape: tuple[int, ...]  # of the input
    functions: Mapping[str, Function]


def _pooling(name: str, call: Callable[..., Tensor], *others: tuple[str, Function]) -> dict:
    """The call by torch.nn's function of this name, by this package's, and by others."""
    pairs = ((TORCH, getattr(theirs, name)), (OURS, getattr(ours, name)))
    return {who: (lambda x, f=f: call(f, x)) for who, f in pairs} | dict(others)


CASES = (
    Case(
        "MaxPool3d of 2x2x2, stride 2",
        (1, 16, 64, 64, 64),
        _pooling(
            "max_pool3d",
            lambda f, x: f(x, 2),
            (TWO_POOLS, two_pools),
            (UNFOLD, partial(unfolded, 2, 2, 0)),
        ),
    ),
    Case(
        "MaxPool2d of 3x3, stride 2, padding 1",
        (8, 64, 112, 112),
        _pooling("max_pool2d", lambda f, x: f(x, 3, 2, 1)),
    ),
    *(
        Case(
            f"AdaptiveMaxPool2d(1) of {size}x{size}",
            (8, channels, size, size),
            _pooling(
                "adaptive_max_pool2d",
                lambda f, x: f(x, 1),
                ("amax", lambda x: x.amax((2, 3), keepdim=True)),
            ),
        )
        for size, channels in ((56, 128), (7, 512))
    ),
    Case(
        "MaxUnpool2d of 2x2, stride 2",
        (8, 64, 112, 112),
        _pooling("max_unpool2d", lambda f, x: f(x, indices_of(x), 2), (SCATTER, scatter)),
    ),
)


def saved_bytes(function: Function, x: Tensor) -> int:
    """The bytes that a forward keeps for its backward."""
    with counted_savings(nn.Identity()) as saved:
        kept = function(x)
    del kept
    return sum(saved.values())


def row_of(case: Case, threads: int, seconds: float) -> report.Row:
    """Check and time everyone.

    Raises:
        RuntimeError: a result or a gradient differs from torch.nn's.
    """
    torch.set_num_threads(threads)
    count = torch.Size(case.shape).numel()
    x = torch.randperm(count, dtype=torch.int32).float().reshape(case.shape).requires_grad_()
    calls = {name: there_and_back(f, x) for name, f in case.functions.items()}
    expected = calls[TORCH]()
    for name, call in calls.items():
        if not all(map(torch.equal, call(), expected)):
            raise RuntimeError(f"{name} does not return torch.nn's result of {case.name}")
    clocks = dict.fromkeys(calls, timing.cpu_clock)
    found = timing.interleave({name: [call] for name, call in calls.items()}, clocks, seconds)
    results = {
        name: {
            "quartiles": [float(f"{x:.5g}") for x in quartiles],
            "saved": saved_bytes(case.functions[name], x),
        }
        for name, quartiles in found.items()
    }
    return {"name": case.name, "shape": case.shape, "threads": threads, "results": results}


def measure(seconds: float) -> report.Report:
    """Time all calls, with one thread and with as many as PyTorch takes.

    Raises:
        SystemExit: the build has kernels, which would be timed in place of the fallback.
    """
    if maxunpool_cuda.build_info()["kernels"] != "none":
        raise SystemExit("benchmarks: expected a build with FALLBACK=1 but got one with kernels")
    facts = report.facts("cpu")
    settings = {"seconds": seconds, "pages kept": timing.keep_pages()}
    most = torch.get_num_threads()
    rows = [row_of(case, n, seconds) for n in sorted({1, most}) for case in CASES]
    return {"facts": facts, "settings": settings, "rows": rows}


def times(row: report.Row, contender: str, what: str) -> float:
    """Times torch.nn's speed, or its bytes kept for the backward: what is "speed" or "kept"."""
    ours, theirs = row["results"][contender], row["results"][TORCH]
    if what == "kept":
        return ours["saved"] / theirs["saved"]
    return theirs["quartiles"][1] / ours["quartiles"][1]


def table(results: report.Report) -> str:
    """Speeds and bytes beside torch.nn's, a line for each call and each who does it."""
    rows: dict[tuple[str, str], dict[int, report.Row]] = defaultdict(dict)
    for row in results["rows"]:
        for who in row["results"].keys() - {TORCH}:
            rows[row["name"], who][row["threads"]] = row
    order = [(case.name, who) for case in CASES for who in case.functions if who != TORCH]
    threads = sorted({row["threads"] for row in results["rows"]})
    lines = [
        (
            f"{name}: {'here' if who == OURS else who}",
            *(f"{times(rows[name, who][n], who, 'speed'):.2f}" for n in threads),
            f"{times(rows[name, who][threads[0]], who, 'kept'):.3f}",
        )
        for name, who in order
    ]
    heads = (f"speed, {n} thread{'s' * (n > 1)}" for n in threads)
    return report.markdown(("call: by", *heads, "bytes kept"), lines)


def slower(results: report.Report) -> list[str]:
    """The least and the most times torch.nn's time that MaxPool3d takes."""
    rows = [row for row in results["rows"] if row["name"] == CASES[0].name]
    found = [1 / times(row, OURS, "speed") for row in rows]
    return [f"{min(found):.1f}", f"{max(found):.1f}"]
