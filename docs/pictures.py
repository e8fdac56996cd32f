# SPDX-License-Identifier: BSD-3-Clause
"""Draws the documents' pictures: ``python docs/pictures.py [FOLDER]``; needs matplotlib.

What a picture says is computed by the package as it is drawn, or read from ``benchmarks/results``.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import maxunpool_cuda.functional as F

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import report  # noqa: E402

MEASURED = report.load(ROOT / "benchmarks" / "results" / "amd-epyc-2-threads.json")
BLUE, ORANGE, RED = "#6f9fdd", "#e08a2e", "#c0392b"
TINTS = ("#dbe7f6", "#fbe6cf", "#dcefdc", "#f3dcec")
PLANE = torch.tensor([[1.0, 2, 9, 4, 3]])  # whose windows of three share their maximum
MARKED = ("white", "white", TINTS[1], "white", "white")
FASTER = {  # the README's chart: what finds the names of the cases
    "pooling and unpooling, there and back": "^round-trip",
    "pooling, contiguous": "^pool.*contiguous-forward",
    "pooling, channels_last": "^pool.*channels_last-forward",
    "pooling backward": "^pool.*backward",
    "unpooling": "^(?!pool|round-trip).*forward",
    "unpooling backward, contiguous": "^(?!pool|round-trip).*contiguous-backward",
    "unpooling backward, channels_last": "^(?!pool|round-trip).*channels_last-backward",
}


def ratios(pattern: str) -> dict[str, float]:
    """How many times torch.nn's speed this package has, by the names of cases."""
    rows = (row for row in MEASURED["rows"] if re.search(pattern, row["name"]))
    return {row["name"]: report.times(row, "torch.nn") for row in rows}


def panels(figure: Figure, *titles: str, low: float = -0.1) -> Sequence[Axes]:
    """Panels for squares, beside one another: no axes."""
    for panel, title in zip(figure.subplots(1, len(titles)), titles, strict=True):
        panel.set(xlim=(-0.1, 5.1), ylim=(low, 6.6), aspect="equal", title=title)
        panel.axis("off")
    return figure.axes


def cells(panel: Axes, x: float, y: float, values: Sequence[float], faces: Sequence[str]) -> None:
    """A row of squares, the first with its lower left corner at x, y."""
    for place, (value, face) in enumerate(zip(values, faces, strict=True)):
        panel.add_patch(Rectangle((x + place, y), 1, 1, facecolor=face, edgecolor="#444444"))
        panel.text(x + place + 0.5, y + 0.5, f"{value:g}", ha="center", va="center_baseline")


def unpooled(panel: Axes, values: torch.Tensor, output: torch.Tensor, adds: bool) -> None:
    """Three values above the output that they were unpooled to; an arrow is grey if overwritten."""
    cells(panel, 1, 5.5, values[0].tolist(), TINTS[:1] * 3)
    cells(panel, 0, 3, output[0].tolist(), MARKED)
    for x in (1.5, 2.5, 3.5):
        arrow = {"arrowstyle": "-|>", "color": "black" if adds or x == 3.5 else "#cccccc"}
        panel.annotate("", (2.5, 4.02), (x, 5.48), arrowprops=arrow)


def overlap(figure: Figure) -> None:
    """What becomes of three values with one index, and of the gradient."""
    values = torch.tensor([[2.0, 6, 1]]).requires_grad_()
    found = F.max_pool1d(PLANE, 3, 1, return_indices=True)[1]
    titles = ("Three windows, one maximum", 'reduce="last"', 'reduce="sum"', "torch.nn, one thread")
    first, *others = panels(figure, *titles)
    cells(first, 0, 5.5, PLANE[0].tolist(), MARKED)
    first.hlines([5, 4.55, 4.1], [0.08, 1.08, 2.08], [2.92, 3.92, 4.92], color=BLUE, linewidth=3)
    words = f"Its index is {found[0, 0]} in all three.\nTo the right: values, outputs,\ngradients."
    first.text(0, 3.3, words, va="top", fontsize=9, linespacing=1.5)
    outputs = [F.max_unpool1d(values, found, 3, 1, reduce=reduce) for reduce in ("last", "sum")]
    outputs.append(torch.nn.functional.max_unpool1d(values[None], found[None], 3, 1)[0])
    for panel, output in zip(others, outputs, strict=True):
        gradient = torch.autograd.grad(output.sum(), values)[0][0].tolist()
        unpooled(panel, values, output, output is outputs[1])
        cells(panel, 1, 0.5, gradient, [TINTS[2] if share else "white" for share in gradient])
        for x, share in zip((1.5, 2.5, 3.5), gradient, strict=True):
            colour = "black" if x == 3.5 or output is outputs[1] else RED
            arrow = {"arrowstyle": "-|>", "color": colour, "visible": share > 0}
            panel.annotate("", (x, 1.52), (2.5, 2.98), arrowprops=arrow)


def attribution(figure: Figure) -> None:
    """DeepLIFT's rule for max pooling, in the example of attributions.md."""
    rows = torch.cat([PLANE, torch.tensor([[0.5, 1, 0, 2, 1]])])
    maxima, found = F.max_pool1d(rows, 3, 1, return_indices=True)
    values = maxima[:1] - maxima[1:]
    first, *others = panels(figure, "Input, baseline", "captum, shap", "inside patched", low=2.5)
    for y, row in zip((5.5, 4), rows.tolist(), strict=True):
        cells(first, 0, y, row, MARKED)
    first.text(0, 3.5, f"The outputs differ by {values.sum():g}.", va="top")
    for panel, reduce in zip(others, ("last", "sum"), strict=True):
        output = F.max_unpool1d(values, found[:1], 3, 1, reduce=reduce)
        unpooled(panel, values, output, reduce == "sum")


def indices(figure: Figure) -> None:
    """One plane, pooled by 2x2: where the maxima are, in eight bytes and in one."""
    plane = torch.tensor([[[3.0, 7, 1, 2], [5, 6, 4, 8], [9, 2, 0, 1], [4, 3, 5, 2]]])
    first = "A plane, its flat positions,\nred: those of 2x2 windows' maxima"
    others = ("int64: position\nin the plane", "uint8: place in the window,\n0 1 above 2 3")
    left, int64, uint8 = panels(figure, first, *others)
    for panel, dtype, colour in ((int64, torch.int64, ORANGE), (uint8, torch.uint8, BLUE)):
        found = F.max_pool2d(plane, 2, return_indices=True, index_dtype=dtype)[1][0]
        cells(panel, 1, 4, found[0].tolist(), TINTS[:2])
        cells(panel, 1, 3, found[1].tolist(), TINTS[2:])
        panel.add_patch(Rectangle((0.5, 2), found.nbytes / 8, 0.3, facecolor=colour))
        panel.text(0.5, 1.8, f"4 indices, {found.nbytes} bytes", va="top")
    flat = F.max_pool2d(plane, 2, return_indices=True)[1].flatten().tolist()
    for place, value in enumerate(plane.flatten().tolist()):
        y, x = divmod(place, 4)
        cells(left, x, 5 - y, [value], [TINTS[y // 2 * 2 + x // 2]])
        colour = RED if place in flat else "black"
        left.text(x + 0.06, 5.94 - y, place, va="top", fontsize=8, color=colour)


def speed(figure: Figure) -> None:
    """The README's chart."""
    panel = figure.subplots()
    speeds = [geometric_mean(ratios(pattern).values()) for pattern in FASTER.values()]
    panel.bar_label(panel.barh(list(FASTER), speeds, color=BLUE), fmt="%.1f", padding=3)
    panel.axvline(1, color=RED, linewidth=1.5)
    panel.text(1.06, -0.78, "torch.nn", color=RED, fontsize=9, va="center")
    panel.set(xmargin=0.08, xlabel=f"times torch.nn's speed; CPU: {report.title(MEASURED)}")
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)


def draw(folder: Path) -> None:
    """Write every picture as SVG: the same bytes each time, with one release of matplotlib."""
    torch.set_num_threads(1)  # on more, torch.nn's result is another each time
    mpl.rcParams.update({"svg.hashsalt": "pictures", "savefig.bbox": "tight", "axes.titlesize": 10})
    for picture in (overlap, attribution, indices, speed):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        picture(figure)
        figure.savefig(folder / f"{picture.__name__}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(Path(*sys.argv[1:2] or [ROOT / "docs" / "pictures"]))
