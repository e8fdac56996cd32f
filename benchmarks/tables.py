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
Groups = dict[tuple[str, str], list[Row]]


def _title(report: Report) -> str:
    facts = report["facts"]
    return f"{facts['device']}, PyTorch {facts['torch']}, {facts['date'][:10]}"


def _peers(report: Report) -> list[str]:
    return [peer for peer in PEERS if any(result(row, peer) for row in report["rows"])]


def _peak(row: Row, contender: str) -> str:
    size = (result(row, contender) or {}).get("peak_bytes")
    if size is None:
        return ""
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else f"{size / 2**10:.4g} KiB"


def _ratio(row: Row, peer: str) -> str:
    ratio = times(row, peer)
    if ratio is None:
        return ""
    return f"{ratio:.2f}" + "*" * (row["results"][peer]["agreement"] != "equal")


def _case(row: Row, peers: Sequence[str]) -> list[str]:
    case, ours, of_clone = BY_NAME[row["name"]], result(row, OURS), times(row, CLONE)
    if ours is None or of_clone is None:
        reasons = (found.get("reason", "") for found in (row, *row.get("results", {}).values()))
        return [row["name"], "; ".join(filter(None, reasons))]
    first, median, third = ours["quartiles"]
    unit, scale = select_unit(median)
    speed = f"{model.useful_bytes(case) / median / 1e9:.3g}"
    fractions = (f"{of_clone:.2f}", f"{model.cpu_fraction(case):.2f}")
    shown = [f"{median / scale:.3g} {unit}", f"{(third - first) / median:.0%}", speed, *fractions]
    ratios = (_ratio(row, peer) for peer in peers)
    return [row["name"], *shown, *ratios, _peak(row, OURS), _peak(row, TORCH)]


def cases(report: Report) -> None:
    """Every case: this package's time, and everyone else's as a multiple of it."""
    peers = _peers(report)
    title = f"maxunpool_cuda on {_title(report)}; spread: interquartile; peers: their time, as a "
    title += "multiple of this package's; *: its gradient is not the exact one"
    heads = ["case", "time", "spread", "GB/s", "of clone", "predicted"]
    rows = [_case(row, peers) for row in report["rows"]]
    show.table(title, [*heads, *peers, "peak", "torch.nn's"], rows)


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.geometric_mean(known):.2f}" if known else ""


def _families(rows: Iterable[Row]) -> Groups:
    """By family and direction, what this package was timed in; last all of unpooling."""
    groups: Groups = defaultdict(list)
    last: Groups = defaultdict(list)
    for row in rows:
        case = BY_NAME.get(row["name"])
        if case and result(row, OURS):
            groups[case.family, case.direction].append(row)
            if case.operation == "unpool" and case.family != "sweep":
                last[ALL, case.direction].append(row)
    return groups | last


def families(report: Report) -> None:
    """Geometric means over the cases of each family and direction."""
    others = (CLONE, *_peers(report))
    left_out = report.get("left_out", 0)
    title = f"Geometric means on {_title(report)}: the fraction of a clone's speed, and how many "
    title += "times longer the others take." + f" {left_out} cases are left out." * bool(left_out)
    rows = [
        (*group, len(members), *(_mean(times(row, other) for row in members) for other in others))
        for group, members in _families(report["rows"]).items()
    ]
    show.table(title, ("family", "direction", "cases", "of clone", *others[1:]), rows, texts=2)


def compare(report: Report, before: Report, tolerance: float) -> list[str]:
    """How much longer each family takes than in an earlier run, and which take too much longer.

    Both times are multiples of the clone's and of torch.nn's in their own run, and a family is
    slower if it is so beside both: a machine that is slower today slows them as well.

    Returns:
        The families whose geometric mean grew by more than the tolerance, 0.1 being 10 %.
    """
    earlier = {row["name"]: row for row in before["rows"]}

    def growth(row: Row, yardstick: str) -> float | None:
        now, then = (times(r, OURS, yardstick) for r in (row, earlier[row["name"]]))
        return now / then if now and then else None

    rows, slower = [], []
    both = [row for row in report["rows"] if row["name"] in earlier]
    for group, members in _families(both).items():
        means = [_mean(growth(row, yardstick) for row in members) for yardstick in (CLONE, TORCH)]
        if any(means):
            too_slow = min(float(mean) for mean in means if mean) > 1 + tolerance
            slower += [", ".join(group)] * too_slow
            rows.append((*group, len(members), *means, "slower" * too_slow))
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
