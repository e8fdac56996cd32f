"""Plots: how close to a clone each case comes, and how time grows with size. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .cases import DIRECTIONS
from .contenders import CLONE, OURS, PEERS
from .report import Report, Row, replacing, result

STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "tab:blue", "marker": "o"},
    CLONE: {"color": "tab:gray", "marker": "."},
    PEERS[0]: {"color": "tab:red", "marker": "s"},
    PEERS[1]: {"color": "tab:orange", "marker": "^"},
    PEERS[2]: {"color": "tab:green", "marker": "v"},
    PEERS[3]: {"color": "tab:purple", "marker": "D"},
}


def _title(report: Report) -> str:
    facts = report["facts"]
    return f"{facts['device']}, PyTorch {facts['torch']}, {facts['date'][:10]}"


def _without_direction(row: Row) -> str:
    return str(row["name"].rpartition("-")[0])


def fractions(report: Report) -> Figure | None:
    """Fraction of the clone for each case, a panel for each direction; None where there is none."""
    rows: Sequence[Row] = [row for row in report["rows"] if row["case"]["family"] != "sweep"]
    names = list(dict.fromkeys(map(_without_direction, rows)))
    if not names:
        return None
    figure = Figure(figsize=(13, 2 + 0.19 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(DIRECTIONS), sharex=True, sharey=True)
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        for contender, style in STYLES.items():
            points = [
                (measured["fraction_of_clone"], names.index(_without_direction(row)))
                for row in rows
                if row["case"]["direction"] == direction
                and contender != CLONE
                and (measured := result(row, contender))
            ]
            if points:
                panel.plot(
                    *zip(*points, strict=True), linestyle="", markersize=4, label=contender, **style
                )
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set(title=direction, xlabel="fraction of torch.clone's speed")
        panel.grid(alpha=0.3)
    panels[0].set_yticks(range(len(names)), names, fontsize=7)
    panels[0].invert_yaxis()
    panels[0].set_xlim(left=0)
    found = {}
    for panel in panels:
        lines, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, lines, strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=len(STYLES))
    figure.suptitle(_title(report))
    return figure


def sweep(report: Report) -> Figure | None:
    """Time against the number of output elements; None where the sweep was left out."""
    rows = [row for row in report["rows"] if row["case"]["family"] == "sweep"]
    if not rows:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for contender, style in STYLES.items():
        points = [
            (math.prod(row["case"]["shape"]), measured)
            for row in rows
            if (measured := result(row, contender))
        ]
        if not points:
            continue
        sizes, results = zip(*points, strict=True)
        panel.plot(sizes, [r["median"] for r in results], markersize=4, label=contender, **style)
        panel.fill_between(
            sizes,
            [r["first_quartile"] for r in results],
            [r["third_quartile"] for r in results],
            color=style["color"],
            alpha=0.2,
            linewidth=0,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set(xlabel="output elements", ylabel="seconds", title="2x2/2, float32, int64, forward")
    panel.grid(alpha=0.3)
    if panel.lines:
        panel.legend()
    figure.suptitle(_title(report))
    return figure


def save(report: Report, stem: Path) -> list[Path]:
    """Write the plots there are, beside the JSON; return their paths."""
    written = []
    for name, figure, dpi in (("fractions", fractions(report), 80), ("sweep", sweep(report), 120)):
        if figure is not None:
            path = stem.with_name(f"{stem.name}-{name}.png")
            with replacing(path) as fresh:
                figure.savefig(fresh, dpi=dpi, format="png")
            written.append(path)
    return written
