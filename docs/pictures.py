"""Draws the documents' pictures: ``python docs/pictures.py [FOLDER]``; needs ``.[bench]``.

What a picture says is computed by the package as it is drawn, or read from ``benchmarks/results``.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import maxunpool_cuda.functional as F

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import report  # noqa: E402
from benchmarks.cases import BY_NAME, Case  # noqa: E402

MEASURED = report.load(ROOT / "benchmarks" / "results" / "amd-epyc-2-threads.json")
TRAINING = report.load(ROOT / "benchmarks" / "results" / "amd-epyc-2-threads-training.json")
BLUE, ORANGE, RED, GREY = "#6f9fdd", "#e08a2e", "#c0392b", "#9aa3ad"
WINDOWS = ("#dbe7f6", "#fbe6cf", "#dcefdc", "#f3dcec")


def where(**wanted: object) -> Callable[[Case], bool]:
    """Cases with these attributes, but none of the sweep over sizes."""
    return lambda case: (
        case.family != "sweep"
        and all(getattr(case, name) == value for name, value in wanted.items())
    )


# What the README's chart and its table of slower calls are geometric means of.
FASTER = {
    "pooling and unpooling, there and back": where(operation="round-trip"),
    "pooling, contiguous": where(operation="pool", direction="forward", layout="contiguous"),
    "pooling, channels_last": where(operation="pool", direction="forward", layout="channels_last"),
    "pooling backward": where(operation="pool", direction="backward"),
    "unpooling": where(operation="unpool", direction="forward"),
    "unpooling backward, contiguous": where(
        operation="unpool", direction="backward", layout="contiguous"
    ),
    "unpooling backward, channels_last": where(
        operation="unpool", direction="backward", layout="channels_last"
    ),
}
SLOWER = {
    "unpooling backward, 3x3 windows, stride 1, contiguous": where(
        family="3x3/1 padding 1", direction="backward", layout="contiguous"
    ),
    "unpooling backward, indices of a dilated pool": where(
        family="dilated pool", direction="backward"
    ),
    "the same, forward and backward": where(family="dilated pool", direction="both"),
    "pooling backward, 3x3 windows, stride 1": where(
        family="pool, 3x3/1 padding 1", direction="backward"
    ),
    "pooling backward, 3x3 windows, stride 2, bfloat16, offsets": where(
        family="pool, uint8", direction="backward", kernel_size=3, dtype="bfloat16"
    ),
    "unpooling backward of these, contiguous": where(
        family="3x3/2 padding 1",
        direction="backward",
        dtype="bfloat16",
        index_dtype="uint8",
        layout="contiguous",
    ),
    "pooling a few kilobytes": where(family="pool, tiny", direction="forward"),
}


def ratios(wanted: Callable[[Case], bool]) -> list[float]:
    """How many times torch.nn's speed this package has in each of these cases."""
    rows = (row for row in MEASURED["rows"] if wanted(BY_NAME[row["name"]]))
    return [ratio for row in rows if (ratio := report.times(row, "torch.nn"))]


def speed(wanted: Callable[[Case], bool]) -> float:
    """The geometric mean of the ratios."""
    return statistics.geometric_mean(ratios(wanted))


def cells(panel: Axes, x: float, y: float, words: Sequence[Any], **style: Any) -> None:
    """A row of squares, the first with its lower left corner at x, y."""
    faces = style.pop("faces", ["white"] * len(words))
    for place, (word, face) in enumerate(zip(words, faces, strict=True)):
        panel.add_patch(Rectangle((x + place, y), 1, 1, facecolor=face, edgecolor="#444444"))
        panel.text(x + place + 0.5, y + 0.5, word, ha="center", va="center_baseline", **style)


def blank(panel: Axes, width: float, height: float) -> None:
    """A panel for squares: no axes."""
    panel.set(xlim=(-0.1, width + 0.1), ylim=(-0.1, height + 0.1), aspect="equal")
    panel.axis("off")


def number(value: float) -> str:
    """As a person would write it."""
    return "1/3" if abs(value - 1 / 3) < 1e-6 else f"{value:g}"


def overlap() -> Figure:
    """What becomes of three values with one index, and of the gradient."""
    plane = torch.tensor([[1.0, 2, 9, 4, 3]])
    indices = F.max_pool1d(plane, 3, 1, return_indices=True)[1]
    figure = Figure(figsize=(7.4, 6))
    (first, last, theirs), (legend, *others) = figure.subplots(2, 3)
    around = ["white"] * 2
    blank(first, 5, 7.4)
    first.set_title("Three windows,\none maximum", fontsize=11)
    cells(first, 0, 4.9, [*map(number, plane[0])], faces=[*around, WINDOWS[1], *around])
    for place in range(3):
        y = 4.4 - 0.45 * place
        first.plot([place + 0.08, place + 2.92], [y, y], color=BLUE, linewidth=3)
    words = f"The indices are {indices[0].tolist()}.\nA decoder unpools\n2, 6 and 1 with them:"
    first.text(2.5, 2.9, words, ha="center", va="top", fontsize=11, linespacing=1.5)
    blank(legend, 5, 7.4)
    for word, y in (("values", 6.2), ("output", 3.6), ("gradient of values", 1.0)):
        for panel in (last, others[0]):
            panel.text(-0.3, y, word, ha="right", va="center", fontsize=10, color="#444444")
    for panel, way in zip(
        (last, theirs, *others), ("last", "torch.nn", "sum", "mean"), strict=True
    ):
        values = torch.tensor([[2.0, 6, 1]], requires_grad=True)
        exact = way != "torch.nn"
        if exact:
            output = F.max_unpool1d(values, indices, 3, 1, reduce=way)
        else:
            output = torch.nn.functional.max_unpool1d(values[None], indices[None], 3, 1)[0]
        (gradient,) = torch.autograd.grad(output.sum(), values)
        shares = gradient[0].tolist()
        blank(panel, 5, 7.4)
        colour = "black" if exact else RED
        panel.set_title(
            f'"{way}"' if exact else "torch.nn,\non one thread", fontsize=11, color=colour
        )
        cells(panel, 1, 5.7, [*map(number, values[0].tolist())], faces=[WINDOWS[0]] * 3)
        cells(
            panel, 0, 3.1, [*map(number, output[0].tolist())], faces=[*around, WINDOWS[1], *around]
        )
        given = WINDOWS[2] if exact else WINDOWS[3]
        cells(
            panel, 1, 0.5, [*map(number, shares)], faces=[given if x else "white" for x in shares]
        )
        for place, share in enumerate(shares):
            written = way in ("sum", "mean") or place == 2
            arrow = {"arrowstyle": "-|>", "color": "black" if written else "#cccccc"}
            panel.annotate("", (2.5, 4.12), (place + 1.5, 5.68), arrowprops=arrow)
            if share:
                back = {"arrowstyle": "-|>", "color": "black" if written else RED}
                panel.annotate("", (place + 1.5, 1.52), (2.5, 3.08), arrowprops=back)
    words = "values that are not in the\noutput get a gradient too"
    theirs.text(2.5, 0.1, words, ha="center", va="top", fontsize=9, color=RED)
    return figure


def indices() -> Figure:
    """One plane, pooled by 2x2: where the maxima are, said in eight bytes and in one."""
    plane = torch.tensor([[[3.0, 7, 1, 2], [5, 6, 4, 8], [9, 2, 0, 1], [4, 3, 5, 2]]])
    flat, offsets = (
        F.max_pool2d(plane, 2, return_indices=True, index_dtype=dtype)[1][0]
        for dtype in (torch.int64, torch.uint8)
    )
    figure = Figure(figsize=(10, 3.6))
    left, middle, right = figure.subplots(1, 3, width_ratios=[4, 4, 4])
    for panel in (left, middle, right):
        blank(panel, 4, 4.6)
    tint = [[WINDOWS[row // 2 * 2 + column // 2] for column in range(4)] for row in range(4)]
    for row in range(4):
        y = 3 - row
        values = plane[0, row].tolist()
        cells(left, 0, y, [f"{x:g}" for x in values], faces=tint[row], fontsize=12)
        found = flat.flatten().tolist()
        for column in range(4):
            place = 4 * row + column
            chosen = place in found
            left.text(column + 0.06, y + 0.94, place, va="top", fontsize=7, color="#555555")
            if chosen:
                left.add_patch(
                    Rectangle(
                        (column + 0.03, y + 0.03),
                        0.94,
                        0.94,
                        fill=False,
                        linewidth=2.2,
                        edgecolor=RED,
                    )
                )
    left.set_title(
        "A plane, its flat positions (small),\nthe maximum of each 2x2 window", fontsize=10
    )
    for panel, found, title, words in (
        (middle, flat, "int64, int32: flat position\nin the plane", "4 indices, 32 bytes (int64)"),
        (
            right,
            offsets,
            "uint8: place in the window,\n0 and 1 above 2 and 3",
            "4 indices, 4 bytes",
        ),
    ):
        for row in range(2):
            faces = [WINDOWS[2 * row], WINDOWS[2 * row + 1]]
            cells(
                panel, 1, 2.5 - row, [str(x) for x in found[row].tolist()], faces=faces, fontsize=12
            )
        panel.set_title(title, fontsize=10)
        width = 4 * found.nbytes / 32
        panel.add_patch(Rectangle((0, 0.45), width, 0.3, facecolor=ORANGE if width > 1 else BLUE))
        panel.text(0, 0.3, words, va="top", fontsize=9)
    return figure


def training_bytes() -> Figure:
    """What pooling and unpooling move, from the shapes; what a training step held, as measured."""
    figure = Figure(figsize=(11, 4))
    computed, held, peak = figure.subplots(1, 3, width_ratios=[4, 3, 3])
    kinds = [(v, i) for v in ("float32", "bfloat16") for i in ("int64", "uint8")]
    names = [f"{value}\n{index}" for value, index in kinds]
    size = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}
    # A pooled element's share of each of four calls: pooling, unpooling, and back.
    parts = {
        "unpooled planes": ([4 * 4 * size[value] for value, _ in kinds], "#c9d3df"),
        "pooled values": ([4 * size[value] for value, _ in kinds], BLUE),
        "indices": ([4 * size[index] for _, index in kinds], ORANGE),
    }
    bottom = [0.0] * len(kinds)
    for what, (heights, colour) in parts.items():
        bars = computed.bar(names, heights, bottom=bottom, color=colour, label=what)
        words = [f"{height}" if height > 4 else "" for height in heights]
        computed.bar_label(bars, words, label_type="center", fontsize=9)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    computed.bar_label(bars, [f"{total:g}" for total in bottom], padding=2, fontweight="bold")
    computed.set_title(
        "Computed from the shapes: bytes moved\nper window of 2x2, there and back", fontsize=10
    )
    computed.legend(fontsize=8)
    rows = [row for row in TRAINING["rows"] if row["contender"] != "int32"]
    labels = [
        f"{row['dtype']}\n{'torch.nn' if row['contender'] == 'torch.nn' else 'uint8'}"
        for row in rows
    ]
    mebibytes = {
        what: [row[what] / 2**20 for row in rows] for what in ("values", "indices", "peak")
    }
    bars = held.bar(labels, mebibytes["values"], color=BLUE)
    held.bar_label(bars, fmt="%.0f", label_type="center", fontsize=9)
    bars = held.bar(labels, mebibytes["indices"], bottom=mebibytes["values"], color=ORANGE)
    held.bar_label(
        bars, [f"{x:.0f}" for x in mebibytes["indices"]], label_type="center", fontsize=9
    )
    both = [x + y for x, y in zip(mebibytes["values"], mebibytes["indices"], strict=True)]
    held.bar_label(bars, [f"{x:.0f}" for x in both], padding=2, fontweight="bold")
    held.set_title("Measured: MiB held by SegNet's\npools, values and indices", fontsize=10)
    bars = peak.bar(labels, mebibytes["peak"], color=[GREY, "#5d6b7a"] * 2)
    peak.bar_label(bars, fmt="%.0f", padding=2, fontweight="bold")
    peak.set_title("Measured: MiB at the peak\nof the training step", fontsize=10)
    for panel in (computed, held, peak):
        panel.margins(y=0.12)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"Measured: one image of 360x480, CPU, {report.title(TRAINING)}", fontsize=8)
    return figure


def speeds() -> Figure:
    """The README's chart."""
    figure = Figure(figsize=(9, 3.2))
    panel = figure.subplots()
    values = [speed(wanted) for wanted in FASTER.values()]
    bars = panel.barh(list(FASTER), values, color=BLUE)
    panel.bar_label(bars, fmt="%.1f", padding=3)
    panel.axvline(1, color=RED, linewidth=1.5)
    panel.text(1.06, -0.78, "torch.nn", color=RED, fontsize=9, va="center")
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.08)
    panel.set_xlabel(
        f"times torch.nn's speed; measured on the CPU, {report.title(MEASURED)}", fontsize=9
    )
    return figure


PICTURES = {
    "overlap": overlap,
    "indices": indices,
    "training-bytes": training_bytes,
    "speed": speeds,
}


def draw(folder: Path) -> None:
    """Write every picture as SVG: the same bytes each time, with one release of matplotlib."""
    torch.set_num_threads(1)  # on more, torch.nn's result is another each time
    mpl.rcParams.update({"svg.hashsalt": "maxunpool_cuda", "savefig.facecolor": "white"})
    for name, picture in PICTURES.items():
        figure = picture()
        figure.set_layout_engine("constrained")
        metadata = {"Date": None, "Creator": None}
        figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata=metadata)


if __name__ == "__main__":
    draw(Path(*sys.argv[1:2] or [ROOT / "docs" / "pictures"]))
