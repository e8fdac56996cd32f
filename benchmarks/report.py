"""Where it was measured, and the results as JSON."""

import datetime
import importlib
import json
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import maxunpool_cuda

from .contenders import OURS

Row = dict[str, Any]
Report = dict[str, Any]


def facts(device: str) -> dict[str, Any]:
    """All that numbers depend on: the device, the versions, the threads, and the date."""
    cpuinfo, versions = Path("/proc/cpuinfo"), {}
    named = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cpu = named[1].strip() if named else platform.machine()
    for package in ("maxunpool_cuda", "torch", "onnxruntime", "triton"):
        with suppress(ImportError):
            versions[package] = importlib.import_module(package).__version__
    threads = torch.get_num_threads()
    return {
        "device": f"{cpu}, {threads} threads" if device == "cpu" else torch.cuda.get_device_name(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "build_info": maxunpool_cuda.build_info(),
        **versions,
    }


def slug(report: Report) -> str:
    """The device as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", report["facts"]["device"].lower()).strip("-")


def save(report: Report, path: Path) -> None:
    """Write the report as JSON, a row a line: all of it, or what was there stays."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in report["rows"])
    rest = {key: value for key, value in report.items() if key != "rows"}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(f'{json.dumps(rest)[:-1]},\n"rows":[\n{rows}\n]}}\n')
    fresh.replace(path)


def load(path: Path) -> Report:
    """The report as :func:`save` wrote it."""
    report: Report = json.loads(path.read_text())
    return report


def title(report: Report) -> str:
    """Where, with what and when it was measured."""
    facts = report["facts"]
    return f"{facts['device']}, PyTorch {facts['torch']}, {facts['date'][:10]}"


def result(row: Row, contender: str) -> dict[str, Any] | None:
    """What was measured of a contender; None where it was not."""
    found: dict[str, Any] | None = row.get("results", {}).get(contender)
    return found if found and "quartiles" in found else None


def times(row: Row, contender: str, other: str = OURS) -> float | None:
    """How many times longer the contender takes than the other; None where one was not timed."""
    measured, unit = result(row, contender), result(row, other)
    return measured["quartiles"][1] / unit["quartiles"][1] if measured and unit else None


def wrong(rows: Sequence[Row]) -> list[str]:
    """The names of the cases in which this package's result is not the definition's."""
    judged = ((row, row.get("results", {}).get(OURS, {})) for row in rows)
    return [row["name"] for row, ours in judged if ours.get("agreement") == "wrong"]
