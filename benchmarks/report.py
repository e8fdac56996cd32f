"""Results: as JSON, a row for each case, and as tables in Markdown."""

import datetime
import json
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
    """The device, the threads, the versions, and the date."""
    named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    cpu, threads = named[1] if named else platform.machine(), torch.get_num_threads()
    return {
        "device": f"{cpu}, {threads} threads" if device == "cpu" else torch.cuda.get_device_name(),
        "cpu": cpu,
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
    fresh = path.with_suffix(".tmp")  # an interrupted write leaves the old file
    fresh.write_text(f'{rest[:-1]},\n"rows":[\n{rows}\n]}}\n')
    return fresh.replace(path)


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


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> None:
    """Print the rows, aligned. The first ``texts`` columns are text, the others numbers."""
    lines = [[str(cell) for cell in line] for line in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths[:texts]]
    rule += ["-" * (width - 1) + ":" for width in widths[texts:]]
    for line in (lines[0], rule, *lines[1:]):
        left = map(str.ljust, line[:texts], widths)
        right = map(str.rjust, line[texts:], widths[texts:])
        print(f"| {' | '.join((*left, *right))} |")
    print(flush=True)


def _others(report: Report) -> list[str]:
    """Everyone in the report but this package, the clone first."""
    names = dict.fromkeys(name for row in report["rows"] for name in row["results"])
    return [CLONE, *(name for name in names if name not in (OURS, CLONE))]


def _mean(rows: Sequence[Row], other: str) -> str:
    known = [ratio for row in rows if (ratio := times(row, other))]
    return f"{geometric_mean(known):.2f}" if known else ""


def cases(report: Report) -> None:
    """Print for every case this package's time, and everyone else's as a multiple of it."""
    others, rows = _others(report), []
    for row in report["rows"]:
        first, median, third = row["results"][OURS]["quartiles"]
        cells = (f"{median * 1e6:.1f}", f"{(third - first) / median:.0%}")
        rows.append((row["name"], *cells, *(_mean([row], other) for other in others)))
    print(f"maxunpool_cuda on {title(report)}; the others' times are multiples of its own\n")
    table(("case", "time, us", "spread", "of clone", *others[1:]), rows)


def _families(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    groups = defaultdict(list)
    for row in rows:
        groups[BY_NAME[row["name"]].family, BY_NAME[row["name"]].direction].append(row)
    return groups


def families(report: Report) -> None:
    """Print geometric means over the cases of each family and direction."""
    others, rows = _others(report), []
    for group, members in _families(report["rows"]).items():
        rows.append((*group, len(members), *(_mean(members, other) for other in others)))
    print(f"Geometric means on {title(report)}: how many times longer the others take\n")
    table(("family", "direction", "cases", "of clone", *others[1:]), rows, texts=2)


def compare(report: Report, before: Report, tolerance: float) -> list[str]:
    """Print how much longer each family takes than in an earlier run.

    Returns:
        The families whose geometric mean grew by more than the tolerance, both beside the clone and
        beside torch.nn of the same run: a machine that is slower today slows all three.
    """
    earlier = {row["name"]: row for row in before["rows"]}
    both = [row for row in report["rows"] if row["name"] in earlier and CLONE in row["results"]]
    rows, slower = [], []
    for group, members in _families(both).items():
        growth = [
            geometric_mean(
                times(row, OURS, other) / times(earlier[row["name"]], OURS, other)
                for row in members
            )
            for other in (CLONE, TORCH)
        ]
        slower += [", ".join(group)] * (min(growth) > 1 + tolerance)
        rows.append((*group, len(members), *(f"{ratio:.2f}" for ratio in growth)))
    print(f"Times now, {title(report)}, over those before, {title(before)}\n")
    table(("family", "direction", "cases", "beside a clone", "beside torch.nn"), rows, texts=2)
    return slower


def training(report: Report) -> None:
    """Print the MiB of all pools' values and indices, and the peak of a step."""
    whats, rows = ("values", "indices", "peak"), []
    for row in report["rows"]:
        sizes = (f"{row[what] / 2**20:.1f}" for what in whats)
        rows.append((row["dtype"], row["contender"], *sizes))
    print(f"SegNet's training step on {title(report)}; MiB\n")
    table(("dtype", "pooling", *whats), rows, texts=2)


def show(report: Report) -> None:
    """Print the tables there are of the results."""
    for tables in (training,) if "training" in report else (cases, families):
        tables(report)
