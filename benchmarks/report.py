# SPDX-License-Identifier: BSD-3-Clause
"""Results: as JSON, a row for each case, and as tables in Markdown."""

import datetime
import json
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import maxunpool_cuda

from .cases import ALL, BY_NAME, WINDOWS
from .contenders import CLONE, OURS, TORCH

Row = dict[str, Any]
Report = dict[str, Any]


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
        found["nvcc"] = found["build_info"].get("nvcc_version")
    return found | nvidia_smi(device)


def nvidia_smi(device: str) -> dict[str, str]:
    """The GPU's driver and its clocks now, as nvidia-smi writes them; nothing if it cannot say."""
    if device == "cpu":
        return {}
    names = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")
    which = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', 0)}"
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(names)}"]
    try:
        said = subprocess.run(
            [*command, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,  # seconds; without its daemon the driver takes some to load
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in said.stdout.strip().split(",")]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def save(report: Report, folder: Path, stem: str = "") -> Path:
    """Write the report as JSON, a row a line, to a file of this name, or named after the device."""
    if not stem:
        stem = re.sub(r"[^a-z0-9]+", "-", report["facts"]["device"].lower()).strip("-")
        stem += "-training" * ("training" in report)
    path = folder / f"{stem}.json"
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


def details(report: Report) -> str:
    """What else is known of the GPU; nothing of a CPU."""
    named = {
        "driver": "driver_version",
        "nvcc": "nvcc",
        "L2 MiB": "L2 MiB",
        "SM clock": "clocks.sm",
        "at most": "clocks.max.sm",
        "memory clock": "clocks.mem",
    }
    facts = report["facts"]
    return ", ".join(f"{word} {facts[name]}" for word, name in named.items() if facts.get(name))


def median(row: Row, contender: str = OURS) -> float:
    """The contender's seconds."""
    return row["results"][contender]["quartiles"][1]


def times(row: Row, contender: str, other: str = OURS) -> float | None:
    """How many times longer the contender takes than the other; None if one was not timed."""
    if not {contender, other} <= row["results"].keys():
        return None
    return median(row, contender) / median(row, other)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows as a table, aligned: a column of text, then columns of numbers."""
    lines = [[str(cell) for cell in line] for line in (heads, *rows)]
    first, *others = (max(3, *map(len, column)) for column in zip(*lines, strict=True))
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "".join(
        f"| {' | '.join((text.ljust(first), *map(str.rjust, numbers, others)))} |\n"
        for text, *numbers in lines
    )


def _groups(rows: Iterable[Row], what: str) -> Mapping[str, list[Row]]:
    """The rows by this attribute of their cases."""
    groups = defaultdict(list)
    for row in rows:
        groups[getattr(BY_NAME[row["name"]], what)].append(row)
    return groups


def _mean(values: Iterable[float | None], form: str) -> str:
    """The geometric mean of those that are known, or nothing."""
    known = [value for value in values if value is not None]
    return format(geometric_mean(known), form) if known else ""


def _marked(group: str, members: Sequence[Row]) -> str:
    """The group's name, and how many of its cases waited for the host."""
    bound = sum("host-bound" in row for row in members)
    number = "" if bound == len(members) else f"{bound} "
    return f"{group}, {number}host-bound" if bound else group


def _bandwidth(row: Row) -> float | None:
    """GB/s: the bytes that the call has to move, in its time. None for a network."""
    case = BY_NAME[row["name"]]
    return None if case.operation == "network" else case.useful_bytes / median(row) / 1e9


def means(report: Report, what: str) -> None:
    """Print geometric means of cases: the time, and how many times as fast as each other it is.

    GB/s are useful bytes by time, and "of clone" is their share of a clone's. The last column is of
    the case that is slowest beside torch.nn.
    """
    timed = [row for row in report["rows"] if OURS in row["results"]]
    names = dict.fromkeys(name for row in timed for name in row["results"])
    others = [name for name in names if name not in (OURS, CLONE)]
    rows = []
    for group, members in _groups(timed, what).items():
        cells = [_marked(group, members), len(members)]
        cells.append(_mean((median(row) * 1e6 for row in members), ".1f"))
        cells.append(_mean(map(_bandwidth, members), ".0f"))
        cells.append(_mean((times(row, CLONE) for row in members), ".0%"))
        cells += [_mean((times(row, other) for row in members), ".2f") for other in others]
        rows.append((*cells, f"{min(times(row, TORCH) for row in members):.2f}"))
    fast = [f"times {other}'s speed" for other in others]
    heads = (what, "cases", "microseconds", "GB/s", "of clone", *fast, "slowest")
    print(markdown(heads, rows), flush=True)


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
# The layers that are timed with every dtype.
EVERY_DTYPE = {layer for layer, *_ in WINDOWS.values()}


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
    names = {key: kind for kind, key in KINDS.items()}
    found: dict[str, list[float]] = {
        f"{kind}, {layout}": [] for layout in ALL["layout"] for kind in KINDS
    }
    for row in report["rows"]:
        case = BY_NAME[row["name"]]
        kind = names.get((case.operation, case.direction))
        if kind is None or case.unpooled_by or (case.dtype, case.index_dtype) != dtypes:
            continue
        speed = times(row, TORCH)
        if speed is not None and (layers is None or case.layer in layers):
            found[f"{kind}, {case.layout}"].append(speed)
    return {kind: of for kind, of in found.items() if of}


def speeds_table(report: Report) -> str:
    """Speeds beside torch.nn's with the default dtypes."""
    rows = [
        (kind, len(of), _mean(of, ".2f"), f"{min(of):.2f}", f"{max(of):.2f}")
        for kind, of in speeds(report).items()
    ]
    return markdown(("call, layout", "cases", "times torch.nn's speed", "slowest", "fastest"), rows)


def dtypes_table(report: Report) -> str:
    """Speeds of the same shapes and windows with each dtype."""
    choices = (DEFAULT, *FEWER_BYTES)
    columns = [speeds(report, dtypes, EVERY_DTYPE) for dtypes in choices]
    rows = [
        (kind, *(_mean(column.get(kind, ()), ".2f") for column in columns))
        for kind in speeds(report)
    ]
    return markdown(("call, layout", *(", ".join(dtypes) for dtypes in choices)), rows)


SLOW = 0.9  # times torch.nn's speed; less is no noise


def slower_table(report: Report) -> str:
    """The calls of which a case has at most so many times torch.nn's speed, in any dtype."""
    rows = []
    timed = [row for row in report["rows"] if OURS in row["results"]]
    for call, members in _groups(timed, "call").items():
        of = [times(row, TORCH) for row in members]
        if BY_NAME[members[0]["name"]].operation != "network" and min(of) <= SLOW:
            rows.append((call, len(of), _mean(of, ".2f"), f"{min(of):.2f}"))
    return markdown(("call", "cases", "times torch.nn's speed", "slowest"), rows)


def compare(report: Report, before: Report) -> list[str]:
    """Print how much longer each family takes than in an earlier run.

    Returns:
        The families whose geometric mean grew by more than 10 %, both beside the clone and beside
        torch.nn of the same run: a machine that is slower today slows all three.
    """
    earlier = {row["name"]: row for row in before["rows"] if CLONE in row["results"]}
    both = [row for row in report["rows"] if row["name"] in earlier and CLONE in row["results"]]
    rows, slower = [], []

    def growth(row: Row, other: str) -> float:
        return times(row, OURS, other) / times(earlier[row["name"]], OURS, other)

    for family, members in _groups(both, "family").items():
        ratios = [geometric_mean(growth(row, other) for row in members) for other in (CLONE, TORCH)]
        slower += [family] * (min(ratios) > 1.1)
        rows.append((family, len(members), *(f"{ratio:.2f}" for ratio in ratios)))
    print(f"Times now, {title(report)}, over those before, {title(before)}\n")
    print(markdown(("family", "cases", "beside a clone", "beside torch.nn"), rows), flush=True)
    return slower


def savings_table(report: Report) -> str:
    """A training step's MiB with torch.nn's pools, then after ``convert_max_pooling``."""
    steps: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in report["rows"]:
        images = "x".join(map(str, row["shape"]))
        step = f"{row['network']}, {row['activation']}, {images}, {row['dtype']}"
        steps[step][row["pooling"]] = row
    rows = []
    for step, by_pooling in steps.items():
        cells = []
        for figure in ("saved", "peak"):
            before, after = (by_pooling[name][figure] for name in (TORCH, OURS))
            cells += [f"{before / 2**20:.0f}", f"{after / 2**20:.0f}", f"{after / before - 1:.1%}"]
        rows.append((step, *cells))
    changes = ("saved, MiB", "after", "change", "peak, MiB", "after", "change")
    return markdown(("network, activation, input, dtype", *changes), rows)


def show(report: Report) -> None:
    """Print the tables there are of the results."""
    if "training" in report:
        print(f"The memory of a training step on {title(report)}\n")
        print(savings_table(report))
        return
    print(f"maxunpool_cuda on {title(report)}\n")
    known = details(report)
    if known:
        print(f"{known}\n")
    if speeds(report):
        print("Times torch.nn's speed, float32 and int64 indices\n")
        print(speeds_table(report))
        print("Times torch.nn's speed, the same shapes and windows with each dtype\n")
        print(dtypes_table(report))
    means(report, "name")
    means(report, "family")
    print(f"Calls of at most {SLOW} times torch.nn's speed, in any dtype\n")
    print(slower_table(report))
    for reason in ("left out", "failed"):
        named = [f"- {row['name']}: {row[reason]}" for row in report["rows"] if reason in row]
        if named:
            print(f"{reason.capitalize()}:\n\n{chr(10).join(named)}\n")
