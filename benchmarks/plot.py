"""Plots: how close to a clone each case comes, time against size, memory. Need matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .cases import BY_NAME, DIRECTIONS
from .contenders import CLONE, COMPILED, ONNX, OURS, TORCH, TRITON
from .report import Report, result, times

STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "tab:blue", "marker": "o"},
    CLONE: {"color": "tab:gray", "marker": "."},
    TORCH: {"color": "tab:red", "marker": "s"},
    COMPILED: {"color": "tab:orange", "marker": "^"},
    ONNX: {"color": "tab:green", "marker": "v"},
    TRITON: {"color": "tab:purple", "marker": "D"},
}


def fractions(report: Report, panels: list[Axes]) -> None:
    """Fraction of the clone's speed for each case, a panel for each direction."""
    rows = [row for row in report["rows"] if BY_NAME[row["name"]].family != "sweep"]
    names = list(dict.fromkeys(row["name"].rpartition("-")[0] for row in rows))
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        for contender, style in STYLES.items():
            points = [
                (1 / time, names.index(row["name"].removesuffix(f"-{direction}")))
                for row in rows
                if row["name"].endswith(f"-{direction}") and contender != CLONE
                if (time := times(row, contender, CLONE))
            ]
            if points:
                panel.plot(*zip(*points, strict=True), ls="", ms=4, label=contender, **style)
                panel.legend(loc="lower right")
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set(title=direction, xlabel="fraction of torch.clone's speed")
    panels[0].set_yticks(range(len(names)), names, fontsize=7)
    panels[0].set_ylim(len(names), -1)
    panels[0].set_xlim(left=0)


def sweep(report: Report, panel: Axes) -> None:
    """Time against the number of output elements, with the quartiles."""
    rows = [row for row in report["rows"] if BY_NAME[row["name"]].family == "sweep"]
    for contender, style in STYLES.items():
        points = [
            (BY_NAME[row["name"]].outputs, *found["quartiles"])
            for row in rows
            if (found := result(row, contender))
        ]
        if points:
            sizes, first, medians, third = zip(*points, strict=True)
            panel.plot(sizes, medians, markersize=4, label=contender, **style)
            panel.fill_between(sizes, first, third, color=style["color"], alpha=0.2)
            panel.legend()
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set(xlabel="output elements", ylabel="seconds", title="2x2/2, float32, int64, forward")


def training(report: Report, panels: list[Axes]) -> None:
    """Of each network the bytes of all pools' values and indices, and the peak of a step."""
    names = [f"{row['dtype']}\n{row['contender']}" for row in report["rows"]]
    whats = {"values": "pooled values", "indices": "their indices", "peak": "peak of the step"}
    for panel, (what, title) in zip(panels, whats.items(), strict=True):
        bars = panel.bar(names, [row[what] / 2**20 for row in report["rows"]])
        panel.bar_label(bars, fmt="%.0f")
        panel.margins(y=0.1)
        panel.set(title=title, ylabel="MiB")


def save(report: Report, stem: Path) -> list[Path]:
    """Write the plots there are, beside the JSON; return their paths."""
    written = []

    def finish(figure: Figure, name: str) -> None:
        for panel in figure.axes:
            panel.grid(alpha=0.3)
        facts = report["facts"]
        figure.suptitle(f"{facts['device']}, PyTorch {facts['torch']}, {facts['date'][:10]}")
        written.append(stem.with_name(f"{stem.name}{name}.png"))
        figure.savefig(written[-1], dpi=100)

    if "training" in report:
        figure = Figure(figsize=(14, 4), layout="constrained")
        training(report, figure.subplots(1, 3))
        finish(figure, "")
        return written
    swept = [BY_NAME[row["name"]].family == "sweep" for row in report["rows"]]
    if not all(swept):
        figure = Figure(figsize=(13, 2 + 0.1 * len(swept)), layout="constrained")
        fractions(report, figure.subplots(1, len(DIRECTIONS), sharex=True, sharey=True))
        finish(figure, "-fractions")
    if any(swept):
        figure = Figure(figsize=(8, 5), layout="constrained")
        sweep(report, figure.subplots())
        finish(figure, "-sweep")
    return written
