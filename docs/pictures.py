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
MARKED = ("white", "white", TINTS[1], "white", "white")
# The README's chart and its table of slower calls: what finds the names of the cases.
FASTER = {
    "pooling and unpooling, there and back": "^round-trip",
    "pooling, contiguous": "^pool.*contiguous-forward",
    "pooling, channels_last": "^pool.*channels_last-forward",
    "pooling backward": "^pool.*backward",
    "unpooling": "^(?!pool|round-trip|sweep).*forward",
    "unpooling backward, contiguous": "^(?!pool|round-trip).*contiguous-backward",
    "unpooling backward, channels_last": "^(?!pool|round-trip).*channels_last-backward",
}
SLOWER = {
    "unpooling backward, 3x3 windows, stride 1, contiguous": "^duplicates.*contiguous-backward",
    "unpooling backward, indices of a dilated pool": "^dilated.*backward",
    "unpooling forward and backward, indices of a dilated pool": "^dilated.*both",
    "pooling backward, 3x3 windows, stride 1": "^pool-duplicates.*backward",
    "pooling backward, 3x3 windows, stride 2, bfloat16, offsets": "^pool.*3x3s2.*16-uint8.*-back",
    "unpooling backward, 3x3 windows, stride 2, bfloat16, offsets, contiguous": (
        "^image.*3x3s2.*16-uint8-contiguous-backward"
    ),
    "pooling a few kilobytes": "^pool-tiny.*forward",
}


def ratios(pattern: str) -> dict[str, float]:
    """How many times torch.nn's speed this package has, by the names of cases."""
    rows = (row for row in MEASURED["rows"] if re.search(pattern, row["name"]))
    return {row["name"]: report.times(row, "torch.nn") for row in rows}


def mean_ratio(pattern: str) -> float:
    """The geometric mean of the ratios."""
    return geometric_mean(ratios(pattern).values())


def panels(figure: Figure, *titles: str) -> Sequence[Axes]:
    """Panels for squares, beside one another: no axes."""
    for panel, title in zip(figure.subplots(1, len(titles)), titles, strict=True):
        panel.set(xlim=(-0.1, 5.1), ylim=(-0.1, 6.6), aspect="equal", title=title)
        panel.axis("off")
    return figure.axes


def cells(panel: Axes, x: float, y: float, values: Sequence[float], faces: Sequence[str]) -> None:
    """A row of squares, the first with its lower left corner at x, y."""
    for place, (value, face) in enumerate(zip(values, faces, strict=True)):
        panel.add_patch(Rectangle((x + place, y), 1, 1, facecolor=face, edgecolor="#444444"))
        panel.text(x + place + 0.5, y + 0.5, f"{value:g}", ha="center", va="center_baseline")


def overlap(figure: Figure) -> None:
    """What becomes of three values with one index, and of the gradient."""
    plane, values = torch.tensor([[1.0, 2, 9, 4, 3]]), torch.tensor([[2.0, 6, 1]]).requires_grad_()
    found = F.max_pool1d(plane, 3, 1, return_indices=True)[1]
    titles = ("Three windows, one maximum", 'reduce="last"', 'reduce="sum"', "torch.nn, one thread")
    first, *others = panels(figure, *titles)
    cells(first, 0, 5.5, plane[0].tolist(), MARKED)
    for place in range(3):
        first.plot([place + 0.08, place + 2.92], [5 - 0.45 * place] * 2, color=BLUE, linewidth=3)
    words = f"Its index is {found[0, 0]} in all three.\nThree values are unpooled with it.\n"
    words += "To the right, downwards: the values,\nthe output, the values' gradient."
    first.text(0, 3.3, words, va="top", fontsize=9, linespacing=1.5)
    outputs = [F.max_unpool1d(values, found, 3, 1, reduce=reduce) for reduce in ("last", "sum")]
    outputs.append(torch.nn.functional.max_unpool1d(values[None], found[None], 3, 1)[0])
    for panel, output in zip(others, outputs, strict=True):
        gradient = torch.autograd.grad(output.sum(), values)[0][0].tolist()
        cells(panel, 1, 5.5, values[0].tolist(), TINTS[:1] * 3)
        cells(panel, 0, 3, output[0].tolist(), MARKED)
        cells(panel, 1, 0.5, gradient, [TINTS[2] if share else "white" for share in gradient])
        for x, share in zip((1.5, 2.5, 3.5), gradient, strict=True):
            kept = x == 3.5 or output is outputs[1]  # not overwritten
            arrow = {"arrowstyle": "-|>", "color": "black" if kept else "#cccccc"}
            panel.annotate("", (2.5, 4.02), (x, 5.48), arrowprops=arrow)
            arrow = {"arrowstyle": "-|>", "color": "black" if kept else RED}
            panel.annotate("", (x, 1.52), (2.5, 2.98), arrowprops=arrow).set_visible(share > 0)


def indices(figure: Figure) -> None:
    """One plane, pooled by 2x2: where the maxima are, in eight bytes and in one."""
    plane = torch.tensor([[[3.0, 7, 1, 2], [5, 6, 4, 8], [9, 2, 0, 1], [4, 3, 5, 2]]])
    first = "A plane, its flat positions,\nred: those of 2x2 windows' maxima"
    second, third = (
        "int64: flat position\nin the plane",
        "uint8: place in the window,\n0 1 above 2 3",
    )
    left, int64, uint8 = panels(figure, first, second, third)
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
    speeds = [mean_ratio(pattern) for pattern in FASTER.values()]
    panel.bar_label(panel.barh(list(FASTER), speeds, color=BLUE), fmt="%.1f", padding=3)
    panel.axvline(1, color=RED, linewidth=1.5)
    panel.text(1.06, -0.78, "torch.nn", color=RED, fontsize=9, va="center")
    panel.set(xmargin=0.08, xlabel=f"times torch.nn's speed; CPU: {report.title(MEASURED)}")
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)


def draw(folder: Path) -> None:
    """Write every picture as SVG: the same bytes each time, with one release of matplotlib."""
    torch.set_num_threads(1)  # on more, torch.nn's result is another each time
    style = {"svg.hashsalt": "maxunpool_cuda", "savefig.facecolor": "white", "axes.titlesize": 10}
    mpl.rcParams.update(style)
    for picture in (overlap, indices, speed):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        picture(figure)
        path = folder / f"{picture.__name__}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(Path(*sys.argv[1:2] or [ROOT / "docs" / "pictures"]))
