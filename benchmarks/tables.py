"""Tables of results, of what was predicted, and of what has changed."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch.utils.benchmark.utils.common import select_unit

from . import model
from .cases import BY_NAME, Case
from .contenders import CLONE, OURS, PEERS, TORCH
from .report import Report, Row, result, times, title
from .show import show

ALL = "unpooling, all but the sweep"
Groups = dict[tuple[str, str], list[Row]]


def _peers(report: Report) -> list[str]:
    return [peer for peer in PEERS if any(result(row, peer) for row in report["rows"])]


def _size(size: int | None) -> str:
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
    peaks = (_size((result(row, who) or {}).get("peak_bytes")) for who in (OURS, TORCH))
    return [row["name"], *shown, *(_ratio(row, peer) for peer in peers), *peaks]


def cases(report: Report) -> None:
    """Every case: this package's time, and everyone else's as a multiple of it."""
    peers = _peers(report)
    what = f"maxunpool_cuda on {title(report)}; spread: interquartile; peers: their time, as a "
    what += "multiple of this package's; *: its gradient is not the exact one"
    heads = ["case", "time", "spread", "GB/s", "of clone", "predicted"]
    rows = [_case(row, peers) for row in report["rows"]]
    show(what, [*heads, *peers, "peak", "torch.nn's"], rows)


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
    what = f"Geometric means on {title(report)}: the fraction of a clone's speed, and how many "
    what += "times longer the others take."
    if left_out := report["left_out"]:
        what += f" {left_out} cases are left out."
    rows = [
        (*group, len(members), *(_mean(times(row, other) for row in members) for other in others))
        for group, members in _families(report["rows"]).items()
    ]
    show(what, ("family", "direction", "cases", "of clone", *others[1:]), rows, texts=2)


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
    what = f"Times now, {title(report)}, over those before, {title(before)}"
    heads = ("family", "direction", "cases", "beside a clone", "beside torch.nn", "")
    show(what, heads, rows, texts=2)
    return slower


def predictions(cases: Sequence[Case]) -> None:
    """Bytes and fractions of the model."""
    rows = []
    for case in cases:
        floors = (model.floor_bytes(case, device) for device in ("cuda", "cpu"))
        sizes = (f"{n / case.cells:.3g}" for n in (model.useful_bytes(case), *floors))
        rows.append((case.name, *sizes, f"{model.cpu_fraction(case):.2f}"))
    what = "Predicted, not measured: bytes for each pooled element, and the fraction of a clone"
    show(what, ("case", "useful bytes", "floor, GPU", "floor, CPU", "fraction, CPU"), rows)


def training(report: Report) -> None:
    """Bytes of all pools' values and indices, and the peak of a step."""
    whats = ("values", "indices", "peak")
    rows = [
        (row["dtype"], row["contender"], *(_size(row[what]) for what in whats))
        for row in report["rows"]
    ]
    heads = ("dtype", "indices", "pooled values", "their indices", "peak of the step")
    show(f"SegNet's training step on {title(report)}", heads, rows, texts=2)
