"""Plots: time against size, and memory. They need matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .cases import BY_NAME
from .contenders import CONTENDERS
from .report import Report, Row, result, title

MARKERS = dict(zip(CONTENDERS, "o.s^vD", strict=True))


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
    for panel, (what, words) in zip(panels, whats.items(), strict=True):
        bars = panel.bar(names, [row[what] / 2**20 for row in rows])
        panel.bar_label(bars, fmt="%.0f")
        panel.margins(y=0.1)
        panel.set(title=words, ylabel="MiB")


def save(report: Report, stem: Path) -> list[Path]:
    """Write the plot there is, if any, beside the JSON; return its path."""
    if "training" in report:
        figure, path = Figure(figsize=(14, 4)), stem.with_name(f"{stem.name}.png")
        training(report["rows"], figure.subplots(1, 3))
    else:
        swept = [row for row in report["rows"] if BY_NAME[row["name"]].family == "sweep"]
        if not swept:
            return []
        figure, path = Figure(figsize=(8, 5)), stem.with_name(f"{stem.name}-sweep.png")
        sweep(swept, figure.subplots())
    figure.suptitle(title(report))
    for panel in figure.axes:
        panel.grid(alpha=0.3)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=100)
    return [path]
