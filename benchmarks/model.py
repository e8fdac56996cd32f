"""What a case should cost, before it is measured, and the table of MODEL.md. See there for why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import CASES, ITEM_SIZE, Case

DOCUMENT = Path(__file__).with_name("MODEL.md")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
NOT_MEASURED = "not measured yet"

SECTOR = {"cuda": 32, "cpu": 64}
CPU_EFFICIENCY = 0.77


def _sizes(case: Case) -> tuple[int, int, int]:
    """Bytes of the pooled values, of the indices and of the output."""
    item = ITEM_SIZE[case.dtype]
    return case.cells * item, case.cells * ITEM_SIZE[case.index_dtype], case.outputs * item


def operators(case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is called, forward and backward: maxima are pooled, scattered and gathered."""
    forward, backward = {
        "unpool": (("scatter",), ("gather",)),
        "pool": (("pool",), ("scatter",)),
        "round-trip": (("pool", "scatter"), ("gather", "scatter")),
    }[case.operation]
    return (
        () if case.direction == "backward" else forward,
        () if case.direction == "forward" else backward,
    )


def calls(case: Case) -> int:
    """Of operators."""
    return sum(map(len, operators(case)))


def useful_bytes(case: Case) -> int:
    """Every tensor of each operator's call once: pooled values, indices, and the unpooled side."""
    return sum(_sizes(case)) * calls(case)


def touched(case: Case, device: str) -> float:
    """The expected fraction of grad_output's sectors (of a CPU: cache lines) that hold an index.

    A window's index may be anywhere in it; a sector is a piece of a row, in channels_last of one
    position's channels. Of windows that overlap, all of them. What no window holds is not touched:
    the last row of an odd number of them.
    """
    elements = SECTOR[device] // ITEM_SIZE[case.dtype]
    window = case.kernel_size**case.rank
    if case.overlapping:
        return 1.0
    sizes = zip(case.pooled[2:], case.shape[2:], strict=True)
    held = math.prod(min(1, cells * case.stride / size) for cells, size in sizes)
    if case.layout == "channels_last":
        return held * (1 - math.pow(1 - 1 / window, min(elements, case.shape[1])))
    windows = elements / case.kernel_size
    return held * (1 - math.pow(1 - case.kernel_size / window, windows))


def _floor(case: Case, operator: str, device: str) -> float:
    """What the memory has to move at least. Only a gather may leave something where it is."""
    values, indices, unpooled = _sizes(case)
    return values + indices + unpooled * (touched(case, device) if operator == "gather" else 1)


def floor_bytes(case: Case, device: str) -> float:
    """Of all operators."""
    return sum(_floor(case, operator, device) for part in operators(case) for operator in part)


def cpu_fraction(case: Case) -> float:
    """Predicted fraction of the clone on a CPU of few cores, calls' overhead apart."""
    return CPU_EFFICIENCY * useful_bytes(case) / floor_bytes(case, "cpu")


def _measured(rows: dict[str, Any], case: Case) -> str:
    result = rows.get(case.name, {}).get("results", {}).get("maxunpool_cuda", {})
    if "median" not in result:
        return NOT_MEASURED
    return f"{result['median'] * 1e3:.3g} ms, {result['fraction_of_clone']:.2f}"


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of all cases, with what the reports (as in the JSON) measured."""
    measured: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {}}
    devices = {"cuda": NOT_MEASURED, "cpu": NOT_MEASURED}
    for report in sorted(reports, key=lambda report: report["facts"]["date"]):
        kind = report["facts"]["kind"]
        measured[kind] = {row["name"]: row for row in report["rows"]}
        devices[kind] = report["facts"]["device"]
    lines = [
        "Bytes are for each pooled element; fractions are of the clone.",
        f"GPU: {devices['cuda']}. CPU: {devices['cpu']}.\n",
        "| case | useful | floor | GPU, measured | CPU, predicted | measured |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in CASES:
        useful, floor = useful_bytes(case), floor_bytes(case, "cuda")
        cells = (
            case.name,
            f"{useful / case.cells:.3g}",
            f"{floor / case.cells:.3g}",
            _measured(measured["cuda"], case),
            f"{cpu_fraction(case):.2f}",
            _measured(measured["cpu"], case),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def section() -> str:
    """The table as MODEL.md has it."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]


def write(text: str) -> None:
    """Put a table into MODEL.md."""
    before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    DOCUMENT.write_text(before + begin + text + end + after)
