# SPDX-License-Identifier: BSD-3-Clause
"""The portable form beside torch.nn and the usual workarounds: forward and backward on the CPU.

It is timed in a build without a library, whose operators are PyTorch's own. Everyone's result and
gradient are compared with torch.nn's first: values differ, so all are equal, bit for bit. Saved are
the bytes of all tensors that a forward keeps for its backward, each storage once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as ours

from . import report, timing
from .contenders import OURS, TORCH, Call
from .training import counted_savings

theirs = nn.functional
Function = Callable[[Tensor], Tensor]


def two_2d_pools(x: Tensor) -> Tensor:
    """MaxPool3d(2) of one volume: its images, then their rows of depth."""
    images = theirs.max_pool2d(x[0], 2)  # (C, D, H/2, W/2)
    depth = theirs.max_pool2d(images.flatten(2), (2, 1))
    return depth.unflatten(2, images.shape[2:])[None]


def by_unfold(x: Tensor) -> Tensor:
    """MaxPool3d(2): every window written out, then the largest of each."""
    for dim in (2, 3, 4):
        x = x.unfold(dim, 2, 2)
    return x.flatten(5).max(-1).values


def by_scatter(x: Tensor) -> Tensor:
    """MaxUnpool2d(2), right where windows do not overlap."""
    output = x.new_zeros(*x.shape[:2], 4 * x.shape[2] * x.shape[3])
    indices = indices_of(x).flatten(2)
    return output.scatter(2, indices, x.flatten(2)).unflatten(2, (2 * x.shape[2], 2 * x.shape[3]))


def indices_of(x: Tensor) -> Tensor:
    """Indices for MaxUnpool2d(2): the first of each window."""
    rows, columns = (torch.arange(size) * 2 for size in x.shape[2:])
    return (rows[:, None] * (2 * x.shape[3]) + columns).expand(x.shape).contiguous()


@dataclass(frozen=True)
class Portable:
    """A call that is timed."""

    name: str
    shape: tuple[int, ...]  # of the input
    functions: Mapping[str, Function]


def _pooling(name: str, call: Callable[..., Tensor], *others: tuple[str, Function]) -> dict:
    """The call by torch.nn's function of this name, by this package's, and by others."""
    pairs = ((TORCH, getattr(theirs, name)), (OURS, getattr(ours, name)))
    return {who: (lambda x, f=f: call(f, x)) for who, f in pairs} | dict(others)


CASES = (
    Portable(
        "MaxPool3d of 2x2x2, stride 2",
        (1, 16, 64, 64, 64),
        _pooling(
            "max_pool3d",
            lambda f, x: f(x, 2),
            ("two 2d pools", two_2d_pools),
            ("unfold, then max", by_unfold),
        ),
    ),
    Portable(
        "MaxPool2d of 3x3, stride 2, padding 1",
        (8, 64, 112, 112),
        _pooling("max_pool2d", lambda f, x: f(x, 3, 2, 1)),
    ),
    *(
        Portable(
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
    Portable(
        "MaxUnpool2d of 2x2, stride 2",
        (8, 64, 112, 112),
        _pooling("max_unpool2d", lambda f, x: f(x, indices_of(x), 2), ("scatter", by_scatter)),
    ),
)


def forward_and_backward(function: Function, x: Tensor) -> Call:
    """A call that returns the result and the gradient."""

    def call() -> tuple[Tensor, Tensor]:
        result = function(x)
        (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
        return result.detach(), gradient

    return call


def saved_bytes(function: Function, x: Tensor) -> int:
    """The bytes that a forward keeps for its backward."""
    with counted_savings(nn.Identity()) as saved:
        kept = function(x)
    del kept
    return sum(saved.values())


def row_of(case: Portable, threads: int, seconds: float) -> report.Row:
    """Check and time everyone.

    Raises:
        RuntimeError: a result or a gradient differs from torch.nn's.
    """
    torch.set_num_threads(threads)
    count = torch.Size(case.shape).numel()
    x = torch.randperm(count, dtype=torch.int32).float().reshape(case.shape).requires_grad_()
    calls = {name: forward_and_backward(f, x) for name, f in case.functions.items()}
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
        SystemExit: the build has kernels, which would be timed in place of the portable form.
    """
    if maxunpool_cuda.build_info()["kernels"] != "none":
        raise SystemExit("benchmarks: expected a build with PORTABLE=1 but got one with kernels")
    facts = report.facts("cpu")
    settings = {"seconds": seconds, "pages kept": timing.keep_pages()}
    most = torch.get_num_threads()
    rows = [row_of(case, n, seconds) for n in sorted({1, most}) for case in CASES]
    return {"facts": facts, "settings": settings, "portable": True, "rows": rows}


def times(row: report.Row, contender: str, what: str) -> float:
    """Times torch.nn's speed, or its bytes kept for the backward: what is "speed" or "kept"."""
    ours, theirs = row["results"][contender], row["results"][TORCH]
    if what == "kept":
        return ours["saved"] / theirs["saved"]
    return theirs["quartiles"][1] / ours["quartiles"][1]


def show(results: report.Report) -> None:
    """Print the table."""
    print(f"{report.title(results)}: forward and backward\n")
    rows: dict[tuple[str, str], dict[int, report.Row]] = defaultdict(dict)
    for row in results["rows"]:
        for who in row["results"].keys() - {TORCH}:
            rows[row["name"], who][row["threads"]] = row
    order = [(case.name, who) for case in CASES for who in case.functions if who != TORCH]
    threads = sorted({row["threads"] for row in results["rows"]})
    report.table(
        ("call", "by", *(f"speed, {n} thread{'s' * (n > 1)}" for n in threads), "bytes kept"),
        (
            (
                name,
                "here" if who == OURS else who,
                *(f"{times(rows[name, who][n], who, 'speed'):.2f}" for n in threads),
                f"{times(rows[name, who][threads[0]], who, 'kept'):.3f}",
            )
            for name, who in order
        ),
    )
