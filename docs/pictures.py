# SPDX-License-Identifier: BSD-3-Clause
"""Draws the documents' pictures: ``python docs/pictures.py [FOLDER]``; needs matplotlib.

What a picture says is computed by the package as it is drawn, or read from ``benchmarks/results``.
Each is at most 390 points wide and has letters of at least 11 points, so that a telephone shows
them larger than 9 pixels. In dark mode the colours that DARK names become others.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

import maxunpool_cuda.functional as F

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import report  # noqa: E402

MEASURED = report.load(ROOT / "benchmarks" / "results" / "operators.json")
PAPER, INK, EDGE, GREY = "#fefefe", "#1b1f24", "#454c54", "#a9afb6"
BLUE, ORANGE, RED = "#6f9fdd", "#e08a2e", "#c0392b"
TINTS = ("#dbe7f6", "#fbe6cf", "#dcefdc", "#f3dcec")
RIGHT, WRONG = TINTS[2], "#f9d0ca"  # of a gradient
DARK = {
    PAPER: "#16191d",
    INK: "#e9ecef",
    EDGE: "#9aa2ab",
    GREY: "#6b737c",
    RED: "#ff7b6b",
    TINTS[0]: "#23405f",
    TINTS[1]: "#6b4516",
    TINTS[2]: "#2a4f2c",
    TINTS[3]: "#553049",
    WRONG: "#732a22",
}
WIDTH = 5.4  # inches, which are 389 points
PLANE = torch.tensor([[1.0, 2, 9, 4, 3]])  # whose windows of three share their maximum
MARKED = (PAPER, PAPER, TINTS[1], PAPER, PAPER)
VALUES = torch.tensor([[2.0, 6, 3]])  # what a network made of the three maxima, say


def canvas(figure: Figure, width: float, height: float) -> Axes:
    """A panel without axes, in units of a square's side."""
    figure.set_size_inches(WIDTH, WIDTH * height / width)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    panel.axis("off")
    return panel


def cells(panel: Axes, x: float, y: float, values: Sequence[float], faces: Sequence[str]) -> None:
    """A row of squares, the first with its lower left corner at x, y."""
    for place, (value, face) in enumerate(zip(values, faces, strict=True)):
        panel.add_patch(Rectangle((x + place, y), 1, 1, facecolor=face, edgecolor=EDGE))
        panel.text(x + place + 0.5, y + 0.47, f"{value:g}", ha="center", va="center_baseline")


def names(panel: Axes, rows: dict[float, str]) -> None:
    """The name of each row of squares, at the left of the panel; keys are their lower edges."""
    for y, name in rows.items():
        panel.text(0.2, y + 0.5, name, va="center")


def windows(panel: Axes, x: float, y: float) -> None:
    """A line for each of the three windows of the plane at x, whose upper edge is y."""
    for place in range(3):
        row = y - 0.3 - 0.3 * place
        panel.hlines(row, x + place + 0.1, x + place + 2.9, color=BLUE, linewidth=3)


def arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """An arrow from one point to another."""
    panel.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour})


def legend(panel: Axes, rows: Sequence[tuple[float, str, str]]) -> None:
    """Rows of a height, a colour, and what arrows of this colour mean."""
    for y, colour, meaning in rows:
        arrow(panel, (0.2, y), (1.5, y), colour)
        panel.text(1.8, y, meaning, va="center")


def unpooled(
    panel: Axes, place: tuple[float, float], values: torch.Tensor, output: torch.Tensor, adds: bool
) -> None:
    """Three values above the output they were unpooled to, whose lower left corner is place."""
    x, y = place
    cells(panel, x + 1, y + 2.5, values[0].tolist(), TINTS[:1] * 3)
    cells(panel, x, y, output[0].tolist(), MARKED)
    for column in range(3):
        colour = INK if adds or column == 2 else GREY
        arrow(panel, (x + 1.5 + column, y + 2.46), (x + 2.5, y + 1.04), colour)


def gradients(panel: Axes, place: tuple[float, float], shares: torch.Tensor, adds: bool) -> None:
    """The gradients of three values: right are 1 of each in the output, and 0 of the others."""
    x, y = place
    for column, share in enumerate(shares.tolist()):
        right = share == (adds or column == 2)
        cells(panel, x + column, y, [share], [RIGHT if right else WRONG])
        if share:
            start, end = (x + 1.5, y + 2.46), (x + 0.5 + column, y + 1.04)
            arrow(panel, start, end, INK if right else RED)


def overlap(figure: Figure) -> None:
    """What becomes of three values with one index, and of the gradient."""
    values = VALUES.clone().requires_grad_()
    maxima, found = F.max_pool1d(PLANE, 3, 1, return_indices=True)
    panel = canvas(figure, 20, 16.4)
    names(panel, {14.9: "a plane", 10.4: "values", 7.9: "output", 5.4: "gradient"})
    cells(panel, 4, 14.9, PLANE[0].tolist(), MARKED)
    windows(panel, 4, 14.9)
    said = (
        f"Its three windows of 3\nhave one maximum, {maxima[0, 0]:g},\nso one index, {found[0, 0]}."
    )
    panel.text(9.8, 14.9, said, va="center", linespacing=1.4)
    outputs = [F.max_unpool1d(values, found, 3, 1, reduce=reduce) for reduce in ("last", "sum")]
    outputs.append(torch.nn.functional.max_unpool1d(values[None], found[None], 3, 1)[0])
    titles = ('here, "last"', 'here, "sum"', "torch.nn")
    for x, title, output in zip((4, 9.3, 14.6), titles, outputs, strict=True):
        adds = output is outputs[1]
        panel.text(x + 2.5, 12.2, title, ha="center", va="center", weight="bold")
        unpooled(panel, (x, 7.9), values.detach(), output.detach(), adds)
        gradients(panel, (x + 1, 5.4), torch.autograd.grad(output.sum(), values)[0][0], adds)
    panel.text(17.6, 4.85, "0 is right", ha="right", va="center", color=RED)
    rows = [(3.7, INK, "the value is in the output, and gets its gradient")]
    rows.append((2.4, GREY, "the value is overwritten: it is not in the output"))
    rows.append((1.1, RED, "wrong: it was overwritten, so 0 is right"))
    legend(panel, rows)


def attribution(figure: Figure) -> None:
    """DeepLIFT's rule for max pooling, in the example of attributions.md."""
    rows = torch.cat([PLANE, torch.tensor([[0.5, 1, 0, 2, 1]])])
    maxima, found = F.max_pool1d(rows, 3, 1, return_indices=True)
    values = maxima[:1] - maxima[1:]
    panel = canvas(figure, 18, 13.4)
    names(
        panel, {11.9: "input", 10.4: "baseline", 5.4: "differences\nof maxima", 2.9: "attributions"}
    )
    for y, row in zip((11.9, 10.4), rows.tolist(), strict=True):
        cells(panel, 5, y, row, MARKED)
    windows(panel, 5, 10.4)
    said = f"Windows of 3, added up:\nthe outputs differ by {values.sum():g}."
    panel.text(10.6, 11.7, said, va="center", linespacing=1.4)
    for x, title, reduce in ((5, "captum, shap", "last"), (11.8, 'reduce="sum"', "sum")):
        output = F.max_unpool1d(values, found[:1], 3, 1, reduce=reduce)
        unpooled(panel, (x, 2.9), values, output, reduce == "sum")
        total = f"{title}: {output.sum():g}"
        panel.text(x + 2.5, 7.5, total, ha="center", va="center", weight="bold")
    legend(panel, [(1.5, GREY, "overwritten: these differences are lost")])


def indices(figure: Figure) -> None:
    """One plane, pooled by 2x2: where the maxima are, in eight bytes and in one."""
    plane = torch.tensor([[[3.0, 7, 1, 2], [5, 6, 4, 8], [9, 2, 0, 1], [4, 3, 5, 2]]])
    panel = canvas(figure, 11.4, 7.3)
    panel.text(0.2, 6.4, "A plane and its positions;\nred: maxima of 2x2 windows", va="center")
    words = {
        6.5: "int64: the position\nin the plane",
        3.0: "uint8: the place in\nthe window, 0 to 3",
    }
    for (y, text), dtype, colour in zip(
        words.items(), (torch.int64, torch.uint8), (ORANGE, BLUE), strict=True
    ):
        found = F.max_pool2d(plane, 2, return_indices=True, index_dtype=dtype)[1][0]
        panel.text(6.4, y, text, va="center")
        cells(panel, 6.4, y - 1.8, found[0].tolist(), TINTS[:2])
        cells(panel, 6.4, y - 2.8, found[1].tolist(), TINTS[2:])
        panel.add_patch(Rectangle((8.8, y - 2.8), found.nbytes / 16, 0.4, facecolor=colour))
        panel.text(8.8, y - 1.4, f"4 indices,\n{found.nbytes} bytes", va="center")
    flat = F.max_pool2d(plane, 2, return_indices=True)[1].flatten().tolist()
    for place, value in enumerate(plane.flatten().tolist()):
        row, column = divmod(place, 4)
        x, y = 0.2 + 1.35 * column, 4.3 - 1.35 * row
        face = TINTS[row // 2 * 2 + column // 2]
        panel.add_patch(Rectangle((x, y), 1.35, 1.35, facecolor=face, edgecolor=EDGE))
        panel.text(x + 0.95, y + 0.4, f"{value:g}", ha="center", va="center", fontsize=14)
        colour = RED if place in flat else INK
        panel.text(x + 0.08, y + 1.27, place, va="top", color=colour)


def speed(figure: Figure) -> None:
    """The README's chart: the default case, geometric means, and whiskers to the extremes."""
    figure.set_size_inches(WIDTH, 4.3)
    measured = report.speeds(MEASURED)
    fastest = max(map(max, measured.values()))
    for layout, bottom in (("contiguous", 0.6), ("channels_last", 0.19)):
        panel = figure.add_axes((0.38, bottom, 0.52, 0.33))  # right of it: a number
        panel.set_xlim(0, max(1, fastest))  # 1: the red line
        panel.xaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 5, 10), integer=True))
        panel.set_title(layout, fontsize=11, loc="left", weight="bold")
        names_of = {kind: kind.removesuffix(f", {layout}") for kind in measured if layout in kind}
        for place, kind in enumerate(names_of):
            mean, low, high = (of(measured[kind]) for of in (geometric_mean, min, max))
            panel.barh(place, mean, color=BLUE, height=0.66)
            panel.hlines(place, low, high, color=INK, linewidth=1)
            number, beside = f"{mean:.1f}", (4, 0)
            panel.annotate(number, (high, place), beside, textcoords="offset points", va="center")
        panel.axvline(1, color=RED, linewidth=1.5)
        panel.set_yticks(range(len(names_of)), names_of.values())
        panel.invert_yaxis()
        panel.tick_params(labelbottom=layout == "channels_last")
        panel.spines[["top", "right"]].set_visible(False)
    said = (
        "on a CPU, times as fast as torch.nn (red line)\nbar: mean; line: slowest to fastest case"
    )
    figure.axes[-1].set_xlabel(said)


def in_the_dark(svg: str) -> str:
    """The picture with a style for dark mode: DARK's colours, and a picture's ink is its text's."""
    rules = [
        f'[style*="{what}: {colour}"] {{ {what}: {dark} !important }}'
        for colour, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    return svg.replace("<defs>", f"{style}\n <defs>", 1)


def draw(folder: Path) -> None:
    """Write every picture as SVG: the same bytes each time, with one release of matplotlib."""
    torch.set_num_threads(1)  # on more, torch.nn's result is another each time
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(colours, INK))
    mpl.rcParams.update({"svg.hashsalt": "pictures", "font.size": 11, "axes.facecolor": PAPER})
    for picture in (overlap, attribution, indices, speed):
        figure = Figure(facecolor=PAPER)
        picture(figure)
        path = folder / f"{picture.__name__}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        path.write_text(in_the_dark(path.read_text()))


if __name__ == "__main__":
    draw(Path(*sys.argv[1:2] or [ROOT / "docs" / "pictures"]))
