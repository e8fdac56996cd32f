"""Draws the documents' pictures: ``python docs/pictures.py [FOLDER]``; needs ``.[bench]``.

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
from benchmarks.cases import ITEM_SIZE  # noqa: E402

MEASURED = report.load(ROOT / "benchmarks" / "results" / "amd-epyc-2-threads.json")
TRAINING = report.load(ROOT / "benchmarks" / "results" / "amd-epyc-2-threads-training.json")
BLUE, ORANGE, RED, GREY = "#6f9fdd", "#e08a2e", "#c0392b", "#c9d3df"
TINTS = ("#dbe7f6", "#fbe6cf", "#dcefdc", "#f3dcec")
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
    "the same, forward and backward": "^dilated.*both",
    "pooling backward, 3x3 windows, stride 1": "^pool-duplicates.*backward",
    "pooling backward, 3x3 windows, stride 2, bfloat16, offsets": "^pool.*3x3s2.*16-uint8.*-back",
    "unpooling backward of these, contiguous": "^image.*3x3s2.*16-uint8-contiguous-backward",
    "pooling a few kilobytes": "^pool-tiny.*forward",
}


def ratios(pattern: str) -> dict[str, float]:
    """How many times torch.nn's speed this package has, by the names of cases."""
    rows = (row for row in MEASURED["rows"] if re.search(pattern, row["name"]))
    return {row["name"]: report.times(row, "torch.nn") for row in rows}


def speed(pattern: str) -> float:
    """The geometric mean of the ratios."""
    return geometric_mean(ratios(pattern).values())


def cells(panel: Axes, x: float, y: float, values: Sequence[float], faces: Sequence[str]) -> None:
    """A row of squares, the first with its lower left corner at x, y."""
    for place, (value, face) in enumerate(zip(values, faces, strict=True)):
        panel.add_patch(Rectangle((x + place, y), 1, 1, facecolor=face, edgecolor="#444444"))
        panel.text(x + place + 0.5, y + 0.5, f"{value:g}", ha="center", va="center_baseline")


def blank(panels: Sequence[Axes], height: float, titles: Sequence[str]) -> None:
    """Panels for squares: no axes."""
    for panel, title in zip(panels, titles, strict=True):
        panel.set(xlim=(-0.1, 5.1), ylim=(-0.1, height), aspect="equal")
        panel.set_title(title, fontsize=10)
        panel.axis("off")


def overlap(figure: Figure) -> None:
    """What becomes of three values with one index, and of the gradient."""
    plane, values = torch.tensor([[1.0, 2, 9, 4, 3]]), torch.tensor([[2.0, 6, 1]])
    indices = F.max_pool1d(plane, 3, 1, return_indices=True)[1]
    first, *others = figure.subplots(1, 4)
    marked = ("white", "white", TINTS[1], "white", "white")
    titles = ("Three windows, one maximum", 'reduce="last"', 'reduce="sum"')
    blank((first, *others), 7, (*titles, "torch.nn, on one thread:\nlosers get a gradient"))
    cells(first, 0, 5.5, plane[0].tolist(), marked)
    for place in range(3):
        first.plot([place + 0.08, place + 2.92], [5 - 0.45 * place] * 2, color=BLUE, linewidth=3)
    words = f"Its index is {indices[0, 0]} in all three.\nThree values are unpooled with it.\n"
    words += "To the right, downwards: the values,\nthe output, the values' gradient."
    first.text(0, 3.3, words, va="top", fontsize=9, linespacing=1.5)
    others[2].title.set_color(RED)
    leaf = values.requires_grad_()
    theirs = torch.nn.functional.max_unpool1d(leaf[None], indices[None], 3, 1)[0]
    ours = [F.max_unpool1d(leaf, indices, 3, 1, reduce=reduce) for reduce in ("last", "sum")]
    for panel, output in zip(others, (*ours, theirs), strict=True):
        gradient = torch.autograd.grad(output.sum(), leaf)[0][0].tolist()
        cells(panel, 1, 5.5, leaf[0].tolist(), TINTS[:1] * 3)
        cells(panel, 0, 3, output[0].tolist(), marked)
        cells(panel, 1, 0.5, gradient, [TINTS[2] if share else "white" for share in gradient])
        for place, share in enumerate(gradient):
            written = place == 2 or output is ours[1]
            arrow = {"arrowstyle": "-|>", "color": "black" if written else "#cccccc"}
            panel.annotate("", (2.5, 4.02), (place + 1.5, 5.48), arrowprops=arrow)
            if share:
                arrow["color"] = "black" if written else RED
                panel.annotate("", (place + 1.5, 1.52), (2.5, 2.98), arrowprops=arrow)


def indices(figure: Figure) -> None:
    """One plane, pooled by 2x2: where the maxima are, in eight bytes and in one."""
    plane = torch.tensor([[[3.0, 7, 1, 2], [5, 6, 4, 8], [9, 2, 0, 1], [4, 3, 5, 2]]])
    left, *others = figure.subplots(1, 3)
    titles = (
        "int64: flat position in the plane",
        "uint8: place in the window,\n0 and 1 above 2 and 3",
    )
    blank(
        (left, *others),
        4.6,
        ("A plane, its flat positions (small),\nthe maximum of each 2x2 window", *titles),
    )
    for panel, dtype, colour in zip(
        others, (torch.int64, torch.uint8), (ORANGE, BLUE), strict=True
    ):
        found = F.max_pool2d(plane, 2, return_indices=True, index_dtype=dtype)[1][0]
        for row in range(2):
            cells(panel, 1, 2.5 - row, found[row].tolist(), TINTS[2 * row : 2 * row + 2])
        panel.add_patch(Rectangle((0, 0.45), found.nbytes / 8, 0.3, facecolor=colour))
        panel.text(0, 0.3, f"4 indices, {found.nbytes} bytes", va="top", fontsize=9)
    chosen = F.max_pool2d(plane, 2, return_indices=True)[1].flatten().tolist()
    for place, value in enumerate(plane.flatten().tolist()):
        y, x = divmod(place, 4)
        cells(left, x, 3 - y, [value], [TINTS[y // 2 * 2 + x // 2]])
        left.text(x + 0.06, 3.94 - y, place, va="top", fontsize=7)
        if place in chosen:
            left.add_patch(
                Rectangle((x + 0.04, 3.04 - y), 0.92, 0.92, fill=False, lw=2, edgecolor=RED)
            )


def bars(panel: Axes, title: str, names: Sequence[str], parts: dict[str, list[float]]) -> None:
    """Stacked bars, with their sums above."""
    bottom = [0.0] * len(names)
    for (what, heights), colour in zip(parts.items(), (BLUE, ORANGE, GREY), strict=False):
        drawn = panel.bar(names, heights, bottom=bottom, color=colour, label=what)
        labels = [f"{x:.0f}" if x > 4 and len(parts) > 1 else "" for x in heights]
        panel.bar_label(drawn, labels, label_type="center", fontsize=9)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    panel.bar_label(drawn, [f"{x:.0f}" for x in bottom], padding=2, fontweight="bold")
    panel.set_title(title, fontsize=10)
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)


def training_bytes(figure: Figure) -> None:
    """What pooling and unpooling move, from the shapes; what a training step held, as measured."""
    computed, held, peak = figure.subplots(1, 3, width_ratios=[4, 3, 3])
    kinds = [(v, i) for v in ("float32", "bfloat16") for i in ("int64", "uint8")]
    # Of each window, pooling, unpooling and both gradients read or write all of these.
    parts = {
        "pooled values": [4 * ITEM_SIZE[value] for value, _ in kinds],
        "indices": [4 * ITEM_SIZE[index] for _, index in kinds],
        "unpooled planes": [4 * 4 * ITEM_SIZE[value] for value, _ in kinds],
    }
    title = "Computed from the shapes: bytes moved\nper window of 2x2, there and back"
    bars(computed, title, ["\n".join(kind) for kind in kinds], parts)
    computed.legend(fontsize=8)
    rows = [row for row in TRAINING["rows"] if row["contender"] != "int32"]
    names = [f"{row['dtype']}\n{row['contender']}" for row in rows]
    mib = {what: [row[what] / 2**20 for row in rows] for what in ("values", "indices", "peak")}
    rest = mib.pop("peak")
    bars(held, "Measured: MiB held by SegNet's\npools, values and indices", names, mib)
    bars(peak, "Measured: MiB at the peak\nof the training step", names, {"peak": rest})
    figure.supxlabel(f"Measured: one image of 360x480, CPU, {report.title(TRAINING)}", fontsize=8)


def speeds(figure: Figure) -> None:
    """The README's chart."""
    panel = figure.subplots()
    values = [speed(pattern) for pattern in FASTER.values()]
    panel.bar_label(panel.barh(list(FASTER), values, color=BLUE), fmt="%.1f", padding=3)
    panel.axvline(1, color=RED, linewidth=1.5)
    panel.text(1.06, -0.78, "torch.nn", color=RED, fontsize=9, va="center")
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.08)
    panel.set_xlabel(
        f"times torch.nn's speed; measured on the CPU, {report.title(MEASURED)}", fontsize=9
    )


PICTURES = {
    "overlap": (overlap, (10, 3.6)),
    "indices": (indices, (10, 3.2)),
    "training-bytes": (training_bytes, (11, 4)),
    "speed": (speeds, (9, 3.2)),
}


def draw(folder: Path) -> None:
    """Write every picture as SVG: the same bytes each time, with one release of matplotlib."""
    torch.set_num_threads(1)  # on more, torch.nn's result is another each time
    mpl.rcParams.update({"svg.hashsalt": "maxunpool_cuda", "savefig.facecolor": "white"})
    for name, (picture, size) in PICTURES.items():
        figure = Figure(figsize=size, layout="constrained")
        picture(figure)
        metadata = {"Date": None, "Creator": None}
        figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata=metadata)


if __name__ == "__main__":
    draw(Path(*sys.argv[1:2] or [ROOT / "docs" / "pictures"]))
