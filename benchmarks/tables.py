"""Tables of results: every case, families of cases, what was predicted, and what has changed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch.utils.benchmark.utils.common import select_unit

from . import model, show
from .cases import BY_NAME, Case
from .contenders import CLONE, OURS, PEERS, TORCH
from .report import Report, Row, result, times

ALL = "unpooling, all but the sweep"


def _time(seconds: float) -> str:
    unit, scale = select_unit(seconds)
    return f"{seconds / scale:.3g} {unit}"


def _size(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.geometric_mean(known):.2f}" if known else ""


def _title(report: Report) -> str:
    facts = report["facts"]
    return f"{facts['device']}, PyTorch {facts['torch']}, {facts['date'][:10]}"


def _peers(report: Report) -> list[str]:
    return [peer for peer in PEERS if any(result(row, peer) for row in report["rows"])]


def _ratio(row: Row, peer: str) -> str:
    ratio, measured = times(row, peer), result(row, peer)
    if ratio is None or measured is None:
        return ""
    return f"{ratio:.2f}" + ("*" if measured["agreement"] != "equal" else "")


def cases(report: Report) -> None:
    """Every case: this package's time, and everyone else's as a multiple of it."""
    peers = _peers(report)
    rows = []
    for row in report["rows"]:
        ours, torchs, of_clone = result(row, OURS), result(row, TORCH), times(row, CLONE)
        if ours is None or of_clone is None:
            reasons = (found.get("reason", "") for found in (row, *row.get("results", {}).values()))
            rows.append((row["name"], "; ".join(filter(None, reasons))))
            continue
        first, median, third = ours["quartiles"]
        case = BY_NAME[row["name"]]
        useful = model.useful_bytes(case)
        rows.append(
            (
                *(row["name"], _time(median), f"{(third - first) / median:.0%}"),
                *(f"{useful / median / 1e9:.3g}", f"{of_clone:.2f}"),
                f"{model.cpu_fraction(case):.2f}",
                *(_ratio(row, peer) for peer in peers),
                *(_size(ours["peak_bytes"]), _size(torchs and torchs["peak_bytes"])),
            )
        )
    title = (
        f"maxunpool_cuda on {_title(report)}; spread: interquartile; peers: their time, as a "
        "multiple of this package's; *: its gradient is not the exact one"
    )
    heads = (
        "case",
        "time",
        "spread",
        "GB/s",
        "of clone",
        "predicted",
        *peers,
        "peak",
        "torch.nn's",
    )
    show.table(title, heads, rows)


def _families(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """By family and direction, what this package was timed in; last the means of unpooling."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    last: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        case = BY_NAME.get(row["name"])
        if case and result(row, OURS):
            groups[case.family, case.direction].append(row)
            if case.operation == "unpool" and case.family != "sweep":
                last[ALL, case.direction].append(row)
    return groups | last


def families(report: Report) -> None:
    """Geometric means over the cases of each family and direction."""
    peers = _peers(report)
    rows = [
        (
            *(*group, len(members)),
            *(_mean(times(row, of) for row in members) for of in (CLONE, *peers)),
        )
        for group, members in _families(report["rows"]).items()
    ]
    left_out = report.get("left_out", 0)
    title = (
        f"Geometric means on {_title(report)}: the fraction of a clone's speed, and how many times "
        "longer the others take." + (f" {left_out} cases are left out." if left_out else "")
    )
    show.table(title, ("family", "direction", "cases", "of clone", *peers), rows, texts=2)


def compare(report: Report, before: Report, tolerance: float) -> list[str]:
    """How much longer each family takes than in an earlier run, and which take too much longer.

    Both times are multiples of the clone's and of torch.nn's in their own run, and a family is
    slower if it is so beside both: a machine that is slower today slows them as well.

    Returns:
        The families whose geometric mean grew by more than the tolerance, 0.1 being 10 %.
    """
    earlier = {row["name"]: row for row in before["rows"]}
    rows, slower = [], []
    for group, members in _families(report["rows"]).items():
        ratios: dict[str, list[float]] = {CLONE: [], TORCH: []}
        for row, name in ((row, yardstick) for row in members for yardstick in ratios):
            now, then = times(row, OURS, name), times(earlier.get(row["name"], {}), OURS, name)
            if now and then:
                ratios[name].append(now / then)
        means = [statistics.geometric_mean(found) for found in ratios.values() if found]
        if means:
            too_slow = min(means) > 1 + tolerance
            slower += [", ".join(group)] * too_slow
            shown = (*map(_mean, ratios.values()), "slower" if too_slow else "")
            rows.append((*group, len(ratios[CLONE]), *shown))
    title = f"Times now, {_title(report)}, over those before, {_title(before)}"
    heads = ("family", "direction", "cases", "beside a clone", "beside torch.nn", "")
    show.table(title, heads, rows, texts=2)
    return slower


def predictions(cases: Sequence[Case]) -> None:
    """Bytes and fractions of the model."""
    rows = []
    for case in cases:
        floors = (model.floor_bytes(case, device) for device in ("cuda", "cpu"))
        sizes = (f"{n / case.cells:.3g}" for n in (model.useful_bytes(case), *floors))
        rows.append((case.name, *sizes, f"{model.cpu_fraction(case):.2f}"))
    title = "Predicted, not measured: bytes for each pooled element, and the fraction of a clone"
    heads = ("case", "useful bytes", "floor, GPU", "floor, CPU", "fraction, CPU")
    show.table(title, heads, rows)
