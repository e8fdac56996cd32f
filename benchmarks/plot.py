"""Plots: how close to a clone each case comes, time against size, memory. Need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .cases import BY_NAME, DIRECTIONS
from .contenders import CLONE, CONTENDERS
from .report import Report, Row, result, times

MARKERS = dict(zip(CONTENDERS, "o.s^vD", strict=True))


def fractions(rows: Sequence[Row], panels: Sequence[Axes]) -> None:
    """Fraction of the clone's speed for each case, a panel for each direction."""
    names = list(dict.fromkeys(row["name"].rpartition("-")[0] for row in rows))
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        for contender, marker in MARKERS.items():
            points = [
                (1 / time, names.index(row["name"].removesuffix(f"-{direction}")))
                for row in rows
                if row["name"].endswith(f"-{direction}") and (time := times(row, contender, CLONE))
            ]
            if points:
                panel.plot(*zip(*points, strict=True), marker, markersize=4, label=contender)
                panel.legend(loc="lower right")
        panel.set(title=direction, xlabel="fraction of torch.clone's speed")
        panel.set_xlim(left=0)
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.set_ylim(len(names), -1)


def sweep(rows: Sequence[Row], panel: Axes) -> None:
    """Time against the number of output elements, with the quartiles."""
    for contender, marker in MARKERS.items():
        points = [
            (BY_NAME[row["name"]].outputs, *found["quartiles"])
            for row in rows
            if (found := result(row, contender))
        ]
        if points:
            sizes, first, medians, third = zip(*points, strict=True)
            (line,) = panel.plot(sizes, medians, f"{marker}-", markersize=4, label=contender)
            panel.fill_between(sizes, first, third, color=line.get_color(), alpha=0.2)
            panel.legend()
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set(xlabel="output elements", ylabel="seconds", title="2x2/2, float32, int64, forward")


def training(rows: Sequence[Row], panels: Sequence[Axes]) -> None:
    """Of each network the bytes of all pools' values and indices, and the peak of a step."""
    names = [f"{row['dtype']}\n{row['contender']}" for row in rows]
    whats = {"values": "pooled values", "indices": "their indices", "peak": "peak of the step"}
    for panel, (what, title) in zip(panels, whats.items(), strict=True):
        bars = panel.bar(names, [row[what] / 2**20 for row in rows])
        panel.bar_label(bars, fmt="%.0f")
        panel.margins(y=0.1)
        panel.set(title=title, ylabel="MiB")


def save(report: Report, stem: Path) -> list[Path]:
    """Write the plots there are, beside the JSON; return their paths."""
    facts, written = report["facts"], []

    def figure(name: str, width: float, height: float) -> Figure:
        made = Figure(figsize=(width, height), layout="constrained")
        made.suptitle(f"{facts['device']}, PyTorch {facts['torch']}, {facts['date'][:10]}")
        written.append((made, stem.with_name(stem.name + name)))
        return made

    if "training" in report:
        training(report["rows"], figure(".png", 14, 4).subplots(1, 3))
    else:
        swept = [row for row in report["rows"] if BY_NAME[row["name"]].family == "sweep"]
        others = [row for row in report["rows"] if row not in swept]
        if others:
            panels = figure("-fractions.png", 13, 2 + 0.1 * len(others)).subplots(1, 3, sharey=True)
            fractions(others, panels)
        if swept:
            sweep(swept, figure("-sweep.png", 8, 5).subplots())
    for made, path in written:
        for panel in made.axes:
            panel.grid(alpha=0.3)
        made.savefig(path, dpi=100)
    return [path for _, path in written]
