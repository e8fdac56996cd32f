# SPDX-License-Identifier: BSD-3-Clause
"""The documents' tables of what was measured, made from benchmarks/results.

A table of a page follows a comment with its name, ``<!-- measured: speeds -->``, and has a line
with its machine and date below. A test compares the pages with the results;
``python -m benchmarks documents --write`` brings them in line.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from . import report
from .cases import SMALL, Case
from .contenders import CLONE, INDUCTOR, OURS, TORCH, workarounds
from .report import Cells, Report, Row, formatted, median, speed_beside

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SIMPLE = "simple kernels"  # this package's, which MAXUNPOOL_CUDA_SIMPLE_KERNELS=1 asks for
TRITON = "Triton"  # zeros, then a scatter in any order; only gpu_h200.json has it
# Files, and the days of runs whose rows of channels_last are in no table. Large tensors were
# contiguous: by PyTorch's source torch.roll makes them so on CUDA, and torch.nn, which copies
# channels_last, took no longer.
ROLLED = {"gpu_h200": "2026-11-27", "gpu_h200_calls": "2026-11-26"}
NETWORKS = {"squeezenet": ("SqueezeNet 1.1", 3), "vgg": ("VGG-11", 5)}  # and their pools


class Table(NamedTuple):
    """A table of a page."""

    page: str
    name: str
    results: tuple[str, ...]  # the names of files in RESULTS
    head: str  # of the first column
    cells: Callable[..., Cells]  # of these results
    part: str = ""  # the name of the rows to take, where results have those of several tables

    @property
    def pattern(self) -> str:
        """A regular expression: the comment, the table's lines, and the line below it."""
        return rf"(<!-- measured: {self.name} -->\n\n)(?:\|.*\n)+\n.*\n"

    def made(self) -> str:
        """The table, and where and when it was measured."""
        results = [loaded(name) for name in self.results]
        where = "; ".join(dict.fromkeys(map(report.title, results)))
        cells = self.cells(*results, self.part) if self.part else self.cells(*results)
        return f"{report.table(self.head, cells)}\n*{where}*\n"


def loaded(name: str) -> Report:
    """The results of a file, without rows that are wrong."""
    results = report.load(RESULTS / f"{name}.json")
    if results["facts"]["date"].startswith(ROLLED.get(name, "none")):
        named = [(row, row.get("name") or row["row"]) for row in results["rows"]]
        results["rows"] = [row for row, call in named if "channels_last" not in call]
    return results


def rewritten(page: str) -> str:
    """The page with the tables of the results."""
    text = (ROOT / page).read_text()
    for table in TABLES:
        if table.page == page:
            made = table.made()
            text, count = re.subn(table.pattern, lambda found, made=made: found[1] + made, text)
            if count != 1:
                raise ValueError(f"{page}: expected one table {table.name!r} but got {count}")
    return text


def write() -> None:
    """Bring all pages in line with the results."""
    for page in dict.fromkeys(table.page for table in TABLES):
        (ROOT / page).write_text(rewritten(page))


def is_documented(case: Case) -> bool:
    """Whether a table has the case."""
    if case.operation == "network":
        is_usual = case.layer != "vgg-b8" and case.layout == "contiguous"
        return is_usual or case.layer == "squeezenet-b1"
    of_dtypes = (case.dtype, case.index_dtype) in (report.DEFAULT, *report.FEWER_BYTES)
    is_of_kind = of_dtypes and (case.operation, case.direction) in report.KINDS.values()
    return is_of_kind or case.returns_values or bool(workarounds(case))


def of_table(results: Report, table: str) -> list[Row]:
    """The rows of one table of the results."""
    return [row for row in results["rows"] if row["table"] == table]


def compared(results: Report, table: str) -> Cells:
    """Speeds beside torch.nn's: a column for each kind of call, or else for each contender."""
    for row in of_table(results, table):
        for who in row["results"]:
            if who != TORCH:
                yield row["row"], row.get("column") or who, formatted(speed_beside(row, TORCH, who))


def in_microseconds(results: Report, table: str) -> Cells:
    """Times, a column for each contender."""
    for row in of_table(results, table):
        for who in row["results"]:
            yield row["row"], who, formatted(median(row, who) * 1e6, ".1f")


def fixes(results: Report) -> Cells:
    """Speeds beside torch.nn's of this package, and of what may stand in its place."""
    modules = {"values": "MaxPool", "adaptive": "AdaptiveMaxPool", "unpool": "MaxUnpool"}
    for case, row in report.with_results(results):
        found = workarounds(case)
        if not found:
            continue
        size = 1 if case.operation == "adaptive" else case.kernel_size
        window = f", {case.stride}, {case.padding}" * (case.stride != case.kernel_size)
        call = f"`{modules[case.operation]}{case.rank}d({size}{window})`"
        name = f"{call}, {'x'.join(map(str, case.shape))}"
        for who in (OURS, *found):
            yield name, who, formatted(speed_beside(row, TORCH, who))


def tiny(results: Report) -> Cells:
    """Microseconds of calls with so little to do that their cost in Python counts."""
    for case, row in report.with_results(results):
        if case.is_tiny and case.layout == "contiguous":
            for who in (OURS, TORCH):
                yield case.call, who, formatted(median(row, who) * 1e6, ".1f")
            yield case.call, "times torch.nn's speed", formatted(speed_beside(row, TORCH))


def tiny_shares(results: Report, operators: Report) -> Cells:
    """Thousandths of a network's time: what its pools cost more than torch.nn's do at the least."""
    more = {}
    for case, row in report.with_results(operators):
        if case.layer == SMALL[0][0]:
            more[case.direction] = median(row) - median(row, TORCH)
    for case, row in report.with_results(results):
        name = f"{network_name(case)}, {case.direction}"
        _, pools = NETWORKS[case.layer.partition("-")[0]]
        yield name, "pools", pools
        share = pools * more["forward" if case.direction == "inference" else "both"] / median(row)
        yield name, "thousandths", formatted(share * 1e3, ".1f")


def exported(results: Report) -> Cells:
    """Nodes and milliseconds of each form in ONNX."""
    forms = {"MaxUnpool": "with MaxUnpool", "decompositions": "without", TORCH: "torch.nn"}
    found = [(row, form) for form in forms for row in results["rows"] if form in row["results"]]
    for row, form in found:
        yield row["row"], f"nodes {forms[form]}", row["results"][form]["nodes"]
    for row, form in found:
        yield row["row"], f"ms {forms[form]}", formatted(median(row, form) * 1e3)


def network_name(case: Case) -> str:
    """Such as "SqueezeNet 1.1, 8, contiguous": the network, its images, their layout."""
    name, _ = NETWORKS[case.layer.partition("-")[0]]
    return f"{name}, {case.shape[0]}, {case.layout}"


def networks(results: Report) -> Cells:
    """Speeds of whole networks beside torch.nn's, eager and compiled."""
    rows = [pair for pair in report.with_results(results) if pair[0].operation == "network"]
    for case, row in rows:
        yield network_name(case), case.direction, formatted(speed_beside(row, TORCH))
    for case, row in rows:
        speed = speed_beside(row, INDUCTOR, f"{OURS}, {INDUCTOR}")
        yield network_name(case), f"compiled {case.direction}", formatted(speed)


def without_indices(results: Report) -> Cells:
    """Speeds beside torch.nn's of pooling that returns no indices, and with its backward."""
    for case, row in report.with_results(results):
        if case.operation == "values" and not case.is_tiny:
            column = f"{case.dtype}{', and backward' * (case.direction == 'both')}"
            yield f"{case.window}, {case.layout}", column, formatted(speed_beside(row, TORCH))


def adaptive(results: Report) -> Cells:
    """The same of adaptive pooling."""
    for case, row in report.with_results(results):
        if case.operation == "adaptive":
            before, after = ("x".join(map(str, of[2:])) for of in (case.shape, case.pooled))
            direction = "and backward" if case.direction == "both" else "forward"
            name = f"{before} to {after}, {case.shape[1]}"
            yield name, f"{case.layout}: {direction}", formatted(speed_beside(row, TORCH))


def segnet(results: Report) -> Cells:
    """Speeds beside torch.nn's of SegNet's layers, by kind of call."""
    for case, row in report.with_results(results):
        is_default = (case.dtype, case.index_dtype) == report.DEFAULT
        kind = report.kind_of(case)
        if kind and is_default and case.layer.startswith("segnet"):
            yield "x".join(map(str, case.shape)), kind, formatted(speed_beside(row, TORCH))


def beside_triton(results: Report) -> Cells:
    """Speeds beside Triton's of unpooling: of all cases, and of those of each window."""
    found: dict[str, list[float]] = defaultdict(list)
    for case, row in report.with_results(results):
        if TRITON in row["results"]:
            for windows in ("all", case.window):
                found[windows].append(speed_beside(row, TRITON))
    yield from report.summary_cells(found, TRITON)


def kernelbench(results: Report) -> Cells:
    """Milliseconds of KernelBench's problems."""
    for case, row in report.with_results(results):
        if case.layer.startswith("kernelbench"):
            for who in (TORCH, INDUCTOR, OURS):
                yield case.layer, who, formatted(median(row, who) * 1e3)


def beside_simulated(results: Report, table: str) -> Cells:
    """Shares of a clone's speed, as simulated and as measured, and measured speeds beside others.

    A call that was not simulated, or not timed with simple kernels, has a "-" there.
    """
    for row in of_table(results, table):
        yield row["row"], "simulated, % of copy", formatted(row["simulated share of copy"], ".0%")
        yield row["row"], "measured, % of clone", formatted(speed_beside(row, CLONE), ".0%")
        yield row["row"], "torch.nn's speed", formatted(speed_beside(row, TORCH))
        yield row["row"], "simple kernels'", formatted(speed_beside(row, SIMPLE))


def published(results: Report, table: str) -> Cells:
    """What other programs measured or simulated. A cell is a number over another, in a format.

    Example: ``"now, % of copy": [1234, 1400, ".0%"]`` are a copy's cycles over a kernel's: 88.
    """
    for row in of_table(results, table):
        for column, cell in row["cells"].items():
            number = cell and cell[0] / cell[1]
            yield row["row"], column, formatted(number, cell[2] if cell else "")


def summary(cpu: Report, gpu: Report) -> Cells:
    """README's figures: times torch.nn's speed, contiguous, on a CPU and on a GPU."""
    speed_of = {case.name: speed_beside(row, TORCH) for case, row in report.with_results(cpu)}
    pool = "values-image-112x64-b16-2x2-float32-contiguous"  # nn.MaxPool2d(2)
    yield "`nn.MaxPool2d(2)`", "CPU", formatted(speed_of[f"{pool}-forward"], ".2g")
    yield "`nn.MaxPool2d(2)`, and its backward", "CPU", formatted(speed_of[f"{pool}-both"], ".2g")
    for device, results in (("CPU", cpu), ("GPU", gpu)):
        for kind, of in report.speeds(results).items():
            if kind.endswith(", contiguous") and "both" not in kind:
                name = kind.removesuffix(", contiguous")
                yield f"{name} (geometric mean)", device, formatted(geometric_mean(of), ".2g")


def kept(training: Report) -> Cells:
    """README's figures of memory: what a step in float32 keeps for its backward, in MiB."""
    for row in training["rows"]:
        if row["dtype"] == "float32" and row["network"] in ("airbench94", "VGG-16", "ResNet-50"):
            yield row["network"], f"{row['pooling']}, MiB", f"{row['saved'] / 2**20:.0f}"


README, PERFORMANCE, DETERMINISTIC = "README.md", "docs/performance.md", "docs/deterministic.md"
OPERATORS, COMPILED = ("operators",), ("compiled",)
SIMULATED, PLAIN = ("simulated",), ("gpu_h100_kernels",)
H200, H200_CALLS, H200_KERNELS = ("gpu_h200",), ("gpu_h200_calls",), ("gpu_h200_kernels",)
CALL, LAYOUT, MICROSECONDS = "call", "call, layout", "call, microseconds"
NETWORK = "network, images, layout"
TABLES = (
    Table(README, "summary", ("operators", "gpu_h200"), "times torch.nn's speed", summary),
    Table(README, "kept", ("training",), "kept for the backward", kept),
    Table(PERFORMANCE, "speeds", OPERATORS, LAYOUT, report.speeds_cells),
    Table(PERFORMANCE, "dtypes", OPERATORS, LAYOUT, report.dtypes_cells),
    Table(PERFORMANCE, "without indices", OPERATORS, "window, layout", without_indices),
    Table(PERFORMANCE, "slower", OPERATORS, CALL, report.slower_cells),
    Table(PERFORMANCE, "tiny", OPERATORS, MICROSECONDS, tiny),
    Table(PERFORMANCE, "tiny shares", ("networks", "operators"), NETWORK, tiny_shares),
    Table(PERFORMANCE, "networks", ("networks",), NETWORK, networks),
    Table(PERFORMANCE, "savings", ("training",), "training step", report.savings_cells),
    Table(PERFORMANCE, "gpu speeds", H200, LAYOUT, report.speeds_cells),
    Table(PERFORMANCE, "gpu dtypes", H200, LAYOUT, report.dtypes_cells),
    Table(PERFORMANCE, "gpu slower", H200, CALL, report.slower_cells),
    Table(PERFORMANCE, "gpu segnet", H200, "SegNet's layer", segnet),
    Table(PERFORMANCE, "gpu triton", H200, "unpooling", beside_triton),
    Table(PERFORMANCE, "gpu windows", H200_KERNELS, MICROSECONDS, published, "windows"),
    Table(PERFORMANCE, "gpu out of window", H200_KERNELS, MICROSECONDS, published, "out of window"),
    Table(PERFORMANCE, "gpu replays", H200_CALLS, MICROSECONDS, in_microseconds, "replays"),
    Table(PERFORMANCE, "gpu networks", ("gpu_h100",), NETWORK, networks),
    Table(PERFORMANCE, "gpu kernelbench", H200, "case, ms", kernelbench),
    Table(PERFORMANCE, "gpu beside simulated", H200_CALLS, CALL, beside_simulated, "simulated"),
    Table(PERFORMANCE, "simulated", SIMULATED, CALL, published, "simulated"),
    Table(PERFORMANCE, "simulated anew", SIMULATED, CALL, published, "simulated anew"),
    Table(DETERMINISTIC, "fixes", OPERATORS, CALL, fixes),
    Table(DETERMINISTIC, "adaptive", OPERATORS, "from, to, channels", adaptive),
    Table(DETERMINISTIC, "gpu fixes", H200_CALLS, CALL, compared, "fixes"),
    Table(DETERMINISTIC, "gpu fills", H200_CALLS, MICROSECONDS, in_microseconds, "fills"),
    Table("docs/pytorch.md", "compiled", COMPILED, "model", compared, "compiled"),
    Table("docs/recipes.md", "patched", COMPILED, MICROSECONDS, in_microseconds, "patched"),
    Table("docs/install.md", "fallback", ("fallback",), CALL, fixes),
    Table("docs/export.md", "exported", ("exported",), "window, indices", exported),
    Table("docs/tried.md", "tried", SIMULATED, "what was tried", published, "tried"),
    Table("docs/tried.md", "plain", PLAIN, "call, times over a copy's", published, "plain"),
)
