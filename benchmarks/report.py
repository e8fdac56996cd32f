"""Where it was measured, and the results: as JSON, as a table to look at, as Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import maxunpool_cuda

from .contenders import CLONE, OURS, PEERS
from .timing import cache_bytes

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
Report = dict[str, Any]
RESULTS = Path(__file__).with_name("results")


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    named = re.search(r"model name\s*:\s*(.+)", text)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def facts(device: str) -> dict[str, Any]:
    """All that numbers depend on: the device, the versions, the threads, and the date."""
    found: dict[str, Any] = {"kind": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["memory_bytes"] = properties.total_memory
    else:
        found["device"] = f"{_cpu()}, {torch.get_num_threads()} threads"
    found |= {
        "cache_bytes": cache_bytes(device),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "maxunpool_cuda": maxunpool_cuda.__version__,
        "build_info": maxunpool_cuda.build_info(),
    }
    for package in ("onnxruntime", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def slug(report: Report) -> str:
    """The device as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", report["facts"]["device"].lower()).strip("-")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the place of ``path`` once all is written.

    Who is killed meanwhile leaves the old file. The new one's name ends in no suffix of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def save(report: Report, path: Path) -> None:
    """Write the report as JSON, a row a line: all of it, or what was there stays."""
    rows = ",\n".join(json.dumps(_rounded(row)) for row in report["rows"])
    rest = {key: value for key, value in report.items() if key != "rows"}
    head = json.dumps(rest, indent=1).removesuffix("\n}")
    with replacing(path) as fresh:
        fresh.write_text(f'{head},\n "rows": [\n{rows}\n]}}\n')


def load(path: Path) -> Report:
    """The report as :func:`save` wrote it."""
    report: Report = json.loads(path.read_text())
    return report


def load_all(folder: Path = RESULTS) -> list[Report]:
    """Every report of times in a folder."""
    reports = [load(path) for path in sorted(folder.glob("*.json"))]
    return [report for report in reports if "training" not in report]


def result(row: Row, contender: str) -> dict[str, Any] | None:
    """What was measured of a contender; None where it was not."""
    found: dict[str, Any] | None = row.get("results", {}).get(contender)
    return found if found and "median" in found else None


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _size(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"


def _ratio(row: Row, peer: str) -> str:
    measured = result(row, peer)
    if measured is None or "times_ours" not in measured:
        return ""
    return f"{measured['times_ours']:.2f}" + ("*" if measured["agreement"] != "equal" else "")


def rich_table(report: Report) -> Table:
    """Every case: this package's time, and everyone else's as a multiple of it. Needs rich."""
    from rich.table import Table

    facts = report["facts"]
    table = Table(
        title=f"maxunpool_cuda on {facts['device']}, PyTorch {facts['torch']}",
        caption="spread: interquartile; peers: their time, as a multiple of this package's"
        "\n*: its gradient is not the exact one",
    )
    table.add_column("case", no_wrap=True)
    peers = [peer for peer in PEERS if any(result(row, peer) for row in report["rows"])]
    heads = ("time", "spread", "GB/s", "of clone", *peers, "peak", "torch.nn's")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in report["rows"]:
        ours = result(row, OURS)
        if ours is None:
            reason = row.get("reason") or row["results"][OURS]["reason"]
            table.add_row(row["name"], f"[red]{reason}[/red]")
            continue
        spread = (ours["third_quartile"] - ours["first_quartile"]) / ours["median"]
        theirs = result(row, PEERS[0]) or {"peak_bytes": None}
        table.add_row(
            row["name"],
            _time(ours["median"]),
            f"{spread:.0%}",
            f"{ours['useful_gb_per_s']:.3g}",
            f"{ours['fraction_of_clone']:.2f}",
            *(_ratio(row, peer) for peer in peers),
            _size(ours["peak_bytes"]),
            _size(theirs["peak_bytes"]),
        )
    return table


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(values):.2f}" if values else ""


def markdown(report: Report) -> str:
    """A line for each family and direction: geometric means over its cases."""
    last = "unpooling, all but the sweep"
    left_out = report.get("left_out", 0)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in report["rows"]:
        if result(row, OURS):
            groups[row["case"]["family"], row["case"]["direction"]].append(row)
            if row["case"]["operation"] == "unpool" and row["case"]["family"] != "sweep":
                groups[last, row["case"]["direction"]].append(row)
    peers = [peer for peer in PEERS if any(result(row, peer) for row in report["rows"])]
    facts = report["facts"]
    lines = [
        f"Geometric means on {facts['device']}, PyTorch {facts['torch']}, {facts['date'][:10]}: "
        "the fraction of a clone's speed, and how many times longer the others take."
        + (f" {left_out} cases are left out." if left_out else ""),
        "",
        f"| family | direction | cases | of clone | {' | '.join(peers)} |",
        "|---|---|--:|--:|" + "--:|" * len(peers),
    ]
    for (family, direction), rows in sorted(groups.items(), key=lambda item: item[0][0] == last):
        fractions = [result(row, OURS)["fraction_of_clone"] for row in rows]  # type: ignore[index]
        cells = [family, direction, str(len(rows)), _mean(fractions)]
        for peer in peers:
            found = [result(row, peer) for row in rows]
            cells.append(_mean([r["times_ours"] for r in found if r]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def wrong(report: Report) -> list[str]:
    """The names of the cases in which this package's result is not the definition's."""
    results = ((row["name"], row.get("results", {}).get(OURS, {})) for row in report["rows"])
    return [name for name, ours in results if ours.get("agreement") == "wrong"]


__all__ = [
    "CLONE",
    "RESULTS",
    "Report",
    "facts",
    "load",
    "load_all",
    "markdown",
    "replacing",
    "result",
    "rich_table",
    "save",
    "slug",
    "wrong",
]
