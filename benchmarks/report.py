# SPDX-License-Identifier: BSD-3-Clause
"""Results: as JSON, a row for each case, and as tables in Markdown."""

import datetime
import json
import platform
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import maxunpool_cuda

from .cases import ALL, BY_NAME, EVERY_DTYPE, Case
from .contenders import CLONE, OURS, TORCH

Row = dict[str, Any]
Report = dict[str, Any]
Cells = Iterable[tuple[str, str, object]]  # of a table: the row, the column, and what stands there


def facts(device: str) -> dict[str, Any]:
    """The device, the versions, and the date."""
    named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    threads = torch.get_num_threads()
    cpu = f"{named[1] if named else platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    found: dict[str, Any] = {
        "device": cpu if device == "cpu" else torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "maxunpool_cuda": maxunpool_cuda.__version__,
        "build_info": maxunpool_cuda.build_info(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["L2 MiB"] = properties.L2_cache_size / 2**20
        found["memory GiB"] = round(properties.total_memory / 2**30, 1)
    return found


def title(report: Report) -> str:
    """Where, with what and when it was measured or simulated."""
    facts = report["facts"]
    torch_of = f", PyTorch {facts['torch']}" if "torch" in facts else ""
    return f"{facts.get('device') or facts['tool']}{torch_of}, {facts['date']:.10}"


def save(report: Report, path: Path) -> None:
    """Write the report as JSON, a row a line."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in report["rows"])
    rest = json.dumps({key: value for key, value in report.items() if key != "rows"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{rest[:-1]},\n"rows":[\n{rows}\n]}}\n')


def load(path: Path) -> Report:
    """The report as :func:`save` wrote it."""
    return json.loads(path.read_text())


def median(row: Row, contender: str = OURS) -> float:
    """The contender's seconds."""
    return row["results"][contender]["quartiles"][1]


def speed_beside(row: Row, contender: str, other: str = OURS) -> float | None:
    """How many times the contender's speed the other has; None if one was not timed."""
    if not {contender, other} <= row["results"].keys():
        return None
    return median(row, contender) / median(row, other)


def formatted(number: float | None, form: str = ".2f") -> str:
    """The number in this form, without its percent sign; "-" for None."""
    return "-" if number is None else format(number, form).removesuffix("%")


def table(head: str, cells: Cells) -> str:
    """A table in Markdown, aligned: a column of text below the head, then columns of numbers.

    Rows and columns come in the order in which they are first named. If a row has no cell of a
    column, the place stays empty. If no cell is there, nothing is returned.
    """
    rows: dict[str, dict[str, str]] = {}
    for row, column, cell in cells:
        rows.setdefault(row, {})[column] = str(cell)
    columns = [*dict.fromkeys(column for found in rows.values() for column in found)]
    lines = [[head, *columns]]
    lines += [[row, *(found.get(column, "") for column in columns)] for row, found in rows.items()]
    first, *others = (max(3, *map(len, column)) for column in zip(*lines, strict=True))
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "".join(
        f"| {' | '.join((text.ljust(first), *map(str.rjust, numbers, others)))} |\n"
        for text, *numbers in lines
    ) * bool(rows)


KINDS = {  # of calls: the operation and the direction of their cases
    "pooling": ("pool", "forward"),
    "pooling, backward": ("pool", "backward"),
    "unpooling": ("unpool", "forward"),
    "unpooling, backward": ("unpool", "backward"),
    "both, there and back": ("round-trip", "both"),
}
DEFAULT = ("float32", "int64")  # of values and indices: torch.nn's, which conversion keeps
FEWER_BYTES = (
    ("float32", "int32"),
    ("float32", "uint8"),
    ("bfloat16", "int64"),
    ("bfloat16", "uint8"),
)
SLOW = 0.9  # times torch.nn's speed; less is no noise


def with_results(report: Report) -> Iterator[tuple[Case, Row]]:
    """The cases that have results, and their rows."""
    for row in report["rows"]:
        if OURS in row["results"]:
            yield BY_NAME[row["name"]], row


def kind_of(case: Case) -> str:
    """The kind of call; "" if it has none, or gets indices of other windows."""
    names = {key: kind for kind, key in KINDS.items()}
    return "" if case.unpooled_by else names.get((case.operation, case.direction), "")


def speeds(
    report: Report, dtypes: tuple[str, str] = DEFAULT, layers: Container[str] | None = None
) -> dict[str, list[float]]:
    """How many times torch.nn's speed each case has, by kind of call and layout.

    Calls that get indices of other windows are left out: they have a table of their own.

    Args:
        report: The results.
        dtypes: Those of values and indices.
        layers: Leave out the cases of others; None keeps all.
    """
    found: dict[str, list[float]] = {
        f"{kind}, {layout}": [] for layout in ALL["layout"] for kind in KINDS
    }
    for case, row in with_results(report):
        kind = kind_of(case)
        if not kind or (case.dtype, case.index_dtype) != dtypes:
            continue
        if layers is None or case.layer in layers:
            found[f"{kind}, {case.layout}"].append(speed_beside(row, TORCH))
    return {kind: of for kind, of in found.items() if of}


def summary_cells(found: dict[str, list[float]], contender: str) -> Cells:
    """How many speeds beside a contender's each name has, their geometric mean, and extremes."""
    for name, of in found.items():
        yield name, "cases", len(of)
        yield name, f"times {contender}'s speed", formatted(geometric_mean(of))
        yield name, "slowest", formatted(min(of))
        yield name, "fastest", formatted(max(of))


def speeds_cells(report: Report) -> Cells:
    """Speeds beside torch.nn's with the default dtypes."""
    yield from summary_cells(speeds(report), TORCH)


def dtypes_cells(report: Report) -> Cells:
    """Speeds of the layers that are timed with every dtype."""
    for dtypes in (DEFAULT, *FEWER_BYTES):
        for kind, of in speeds(report, dtypes, EVERY_DTYPE).items():
            yield kind, ", ".join(dtypes), formatted(geometric_mean(of))


def slower_cells(report: Report) -> Cells:
    """The calls of which a case has at most SLOW times torch.nn's speed, in any dtype."""
    calls: dict[str, list[float]] = defaultdict(list)
    for case, row in with_results(report):
        if case.operation != "network":
            calls[case.call].append(speed_beside(row, TORCH))
    for call, of in calls.items():
        if min(of) <= SLOW:
            yield call, "cases", len(of)
            yield call, "times torch.nn's speed", formatted(geometric_mean(of))
            yield call, "slowest", formatted(min(of))


def case_cells(report: Report) -> Cells:
    """Each case: its time, and how many times as fast as each other it is.

    GB/s are useful bytes by time, and "of clone" is their share of a clone's.
    """
    for case, row in with_results(report):
        is_host_bound = OURS in row.get("host-bound", ())
        name = f"{case.name}{', host-bound' * is_host_bound}"
        yield name, "microseconds", formatted(median(row) * 1e6, ".1f")
        if CLONE in row["results"]:
            yield name, "GB/s", formatted(case.useful_bytes / median(row) / 1e9, ".0f")
            yield name, "of clone", f"{speed_beside(row, CLONE):.0%}"
        for other in row["results"]:
            if other not in (OURS, CLONE):
                yield name, f"times {other}'s speed", formatted(speed_beside(row, other))


def savings_cells(report: Report) -> Cells:
    """A training step's MiB with torch.nn's pools, then after ``convert_max_pooling``."""
    before: dict[str, Row] = {}
    for row in report["rows"]:
        images = "x".join(map(str, row["shape"]))
        step = f"{row['network']}, {row['activation']}, {images}, {row['dtype']}"
        if row["pooling"] == TORCH:
            before[step] = row
            continue
        for figure in ("saved", "peak"):
            theirs, ours = before[step][figure], row[figure]
            yield step, f"{figure}, MiB", f"{theirs / 2**20:.0f}"
            yield step, f"{figure} after", f"{ours / 2**20:.0f}"
            yield step, f"{figure}, change", f"{ours / theirs - 1:.1%}"


def show(report: Report, missing: str) -> None:
    """Print the tables that there are of the results, and what is missing."""
    print(f"maxunpool_cuda on {title(report)}\n")
    for words, head, cells in (
        ("Times torch.nn's speed, float32 and int64 indices", "call, layout", speeds_cells),
        ("Times torch.nn's speed, the same layers with each dtype", "call, layout", dtypes_cells),
        ("Each case", "name", case_cells),
        (f"Calls of at most {SLOW} times torch.nn's speed, in any dtype", "call", slower_cells),
    ):
        made = table(head, cells(report))
        if made:
            print(f"{words}\n\n{made}", flush=True)
    named = [
        f"{reason}: {row['name']}: {row[reason]}"
        for reason in ("left out", "failed")
        for row in report["rows"]
        if reason in row
    ]
    print(*filter(None, (f"left out: {missing}" * bool(missing), *named)), sep="\n")
