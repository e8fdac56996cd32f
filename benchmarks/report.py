"""Results: as JSON, a row for each case, and as tables in Markdown."""

import datetime
import json
import math
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import maxunpool_cuda

from .cases import BY_NAME
from .contenders import CLONE, OURS, TORCH

Row = dict[str, Any]
Report = dict[str, Any]


def facts(device: str) -> dict[str, Any]:
    """The device, the versions, and the date."""
    named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    cpu = f"{named[1] if named else platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "device": cpu if device == "cpu" else torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "maxunpool_cuda": maxunpool_cuda.__version__,
        "build_info": maxunpool_cuda.build_info(),
    }


def save(report: Report, folder: Path) -> Path:
    """Write the report as JSON, a row a line, to a file named after the device."""
    stem = re.sub(r"[^a-z0-9]+", "-", report["facts"]["device"].lower()).strip("-")
    path = folder / f"{stem}{'-training' * ('training' in report)}.json"
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in report["rows"])
    rest = json.dumps({key: value for key, value in report.items() if key != "rows"})
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{rest[:-1]},\n"rows":[\n{rows}\n]}}\n')
    return path


def load(path: Path) -> Report:
    """The report as :func:`save` wrote it."""
    return json.loads(path.read_text())


def title(report: Report) -> str:
    """Where, with what and when it was measured."""
    return "{device}, PyTorch {torch}, {date:.10}".format(**report["facts"])


def times(row: Row, contender: str, other: str = OURS) -> float | None:
    """How many times longer the contender takes than the other; None if one was not timed."""
    medians = {name: found["quartiles"][1] for name, found in row["results"].items()}
    return medians[contender] / medians[other] if {contender, other} <= medians.keys() else None


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print the rows, aligned: a column of text, then columns of numbers."""
    lines = [[str(cell) for cell in line] for line in (heads, *rows)]
    first, *others = (max(3, *map(len, column)) for column in zip(*lines, strict=True))
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    for text, *numbers in lines:
        print(f"| {' | '.join((text.ljust(first), *map(str.rjust, numbers, others)))} |")
    print(flush=True)


def _groups(rows: Iterable[Row], what: str) -> Mapping[str, list[Row]]:
    """The rows by this attribute of their cases."""
    groups = defaultdict(list)
    for row in rows:
        groups[getattr(BY_NAME[row["name"]], what)].append(row)
    return groups


def means(report: Report, what: str, at_most: float = math.inf) -> None:
    """Print geometric means of cases: this package's time, and the others' as multiples of it.

    The last column is of the case in which torch.nn takes least. Only groups in which that is at
    most ``at_most`` are printed.
    """
    others = dict.fromkeys(name for row in report["rows"] for name in row["results"])
    del others[OURS]
    rows = []
    for group, members in _groups(report["rows"], what).items():
        time = geometric_mean(row["results"][OURS]["quartiles"][1] for row in members)
        cells = [group, len(members), f"{time * 1e6:.1f}"]
        for other in others:
            known = [ratio for row in members if (ratio := times(row, other))]
            cells.append(f"{geometric_mean(known):.2f}" if known else "")
        least = min(times(row, TORCH) for row in members)
        if least <= at_most:
            rows.append((*cells, f"{least:.2f}"))
    table((what, "cases", "time, us", *others, "torch.nn's least"), rows)


def compare(report: Report, before: Report) -> list[str]:
    """Print how much longer each family takes than in an earlier run.

    Returns:
        The families whose geometric mean grew by more than 10 %, both beside the clone and beside
        torch.nn of the same run: a machine that is slower today slows all three.
    """
    earlier = {row["name"]: row for row in before["rows"]}
    both = [row for row in report["rows"] if row["name"] in earlier and CLONE in row["results"]]
    rows, slower = [], []

    def growth(row: Row, other: str) -> float:
        return times(row, OURS, other) / times(earlier[row["name"]], OURS, other)

    for family, members in _groups(both, "family").items():
        ratios = [geometric_mean(growth(row, other) for row in members) for other in (CLONE, TORCH)]
        slower += [family] * (min(ratios) > 1.1)
        rows.append((family, len(members), *(f"{ratio:.2f}" for ratio in ratios)))
    print(f"Times now, {title(report)}, over those before, {title(before)}\n")
    table(("family", "cases", "beside a clone", "beside torch.nn"), rows)
    return slower


def show(report: Report) -> None:
    """Print the tables there are of the results."""
    if "training" in report:
        print(f"The peak of SegNet's training step on {title(report)}\n")
        rows = []
        for row in report["rows"]:
            rows.append((f"{row['dtype']}, {row['contender']}", f"{row['peak'] / 2**20:.0f}"))
        return table(("dtype, pooling", "MiB"), rows)
    print(f"maxunpool_cuda on {title(report)}; the others' times are multiples of its own\n")
    means(report, "name")
    means(report, "family")
    print("Calls that take torch.nn at most 0.9 of this package's time, in any dtype\n")
    means(report, "call", at_most=0.9)
