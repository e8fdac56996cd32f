# SPDX-License-Identifier: BSD-3-Clause
"""Where the documents say what was measured: tables and sentences, made from benchmarks/results.

A table of a page follows a comment with its name, ``<!-- measured: speeds -->``. A test compares
the pages with the results; ``python -m benchmarks --write`` brings them in line.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from . import comparisons, fallback, report
from .cases import BY_NAME, OPERATIONS, Case
from .contenders import CLONE, INDUCTOR, OURS, TORCH
from .report import Report, Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    page: str
    name: str
    results: str  # the name of the file in RESULTS
    make: Callable[[Report], str]

    @property
    def key(self) -> str:
        """What tells it from the other tables of its page."""
        return self.name

    @property
    def pattern(self) -> str:
        """A regular expression: what precedes the table, and its lines."""
        return rf"(<!-- measured: {self.name} -->\n\n)((?:\|.*\n)+)"

    def rewrite(self, text: str, results: Report) -> str:
        """The page with the table of these results."""
        return re.sub(self.pattern, lambda found: found[1] + self.make(results), text)


@dataclass(frozen=True)
class Sentence:
    """Words of a page: each ``{}`` is a number, and ``{title}`` says where it was measured."""

    page: str
    words: str
    results: str
    figures: Callable[[Report], Sequence[str]]

    @property
    def key(self) -> str:
        """What tells it from the other sentences of its page."""
        return self.words

    @property
    def pattern(self) -> str:
        """A regular expression, whose groups are the figures, for words on one or more lines."""
        words = re.escape(self.words).replace(r"\ ", r"\s+").replace(r"\{\}", r"([\d.]+)")
        # A title has at most two lines. It has points, so the point at its end precedes a space.
        return words.replace(r"\{title\}", r"(.+?(?:\n.+?)?)") + r"(?!\S)"

    def rewrite(self, text: str, results: Report) -> str:
        """The page with the figures of these results."""
        figures = iter(self.figures(results))
        found = re.search(self.pattern, text)
        if found is None:
            raise ValueError(f"{self.page} expected the words {self.words!r} but has others")
        return text[: found.start()] + fill(found, figures) + text[found.end() :]


def fill(found: re.Match[str], figures: Iterable[str]) -> str:
    """The words that were found, line breaks included, with other figures."""
    words, end = "", found.start()
    for group, figure in enumerate(figures, 1):
        words += found.string[end : found.start(group)] + figure
        end = found.end(group)
    return words + found.string[end : found.end()]


def shows(case: Case) -> bool:
    """Whether the tables have the case. All of them take some 20 minutes on two CPU cores."""
    if case.operation == "network":
        return case.layer == "squeezenet-b1" or (
            case.layer != "vgg-b8" and case.layout == "contiguous"
        )
    if case.operation == "values":
        return True
    of_dtypes = (case.dtype, case.index_dtype) in (report.DEFAULT, *report.FEWER_BYTES)
    return of_dtypes and (case.operation, case.direction) in report.KINDS.values()


def of_table(results: Report, table: str) -> list[Row]:
    """The rows of one table of the comparisons."""
    return [row for row in results["rows"] if row["table"] == table]


def by_column(table: str, head: str) -> Callable[[Report], str]:
    """How to make a table of speeds beside torch.nn's, whose columns are calls of one kind."""

    def make(results: Report) -> str:
        speeds: dict[str, dict[str, str]] = {}
        for row in of_table(results, table):
            speeds.setdefault(row["row"], {})[row["column"]] = f"{report.times(row, TORCH):.2f}"
        columns = dict.fromkeys(column for cells in speeds.values() for column in cells)
        rows = [(name, *map(cells.get, columns)) for name, cells in speeds.items()]
        return report.markdown((head, *columns), rows)

    return make


def fixes(results: Report) -> str:
    """Speeds beside torch.nn's of this package, and of what may stand in its place."""
    rows = of_table(results, "fixes")
    names = dict.fromkeys(name for row in rows for name in row["results"] if name != TORCH)

    def cell(row: Row, name: str) -> str:
        speed = report.times(row, TORCH, name)
        return "" if speed is None else f"{speed:.2f}"

    cells = [(row["row"], *(cell(row, name) for name in names)) for row in rows]
    return report.markdown(("call", *names), cells)


def tiny(results: Report) -> str:
    """Microseconds."""
    names = (OURS, TORCH, comparisons.OPERATOR)
    rows = [
        (row["row"], *(f"{report.median(row, name) * 1e6:.1f}" for name in names))
        for row in of_table(results, "tiny")
    ]
    return report.markdown(("call, microseconds", *names), rows)


def tiny_shares(results: Report) -> str:
    """Thousandths of a network's time: what its pools cost more than torch.nn's do at the least."""
    more = {}
    for row in of_table(load("comparisons"), "tiny"):
        more[row["row"]] = report.median(row, OURS) - report.median(row, TORCH)
    rows_of = {
        "inference": comparisons.WITHOUT_INDICES,
        "training": f"{comparisons.WITHOUT_INDICES}{comparisons.AND_BACKWARD}",
    }
    rows = []
    for row in results["rows"]:
        case = BY_NAME[row["name"]]
        name = network_name(case)
        pools = POOLS[case.layer.partition("-")[0]]
        share = pools * more[rows_of[case.direction]] / report.median(row, OURS)
        rows.append((f"{name}, {case.direction}", pools, f"{share * 1e3:.1f}"))
    return report.markdown(("network, images, layout", "pools", "thousandths"), rows)


def exported(results: Report) -> str:
    """Nodes and milliseconds of each form in ONNX."""
    forms = {
        comparisons.MAX_UNPOOL: "with MaxUnpool",
        comparisons.DECOMPOSITIONS: "without",
        TORCH: "torch.nn",
    }
    rows = []
    for row in of_table(results, "exported"):
        of = [row["results"].get(form) for form in forms]
        nodes = ["" if one is None else one["nodes"] for one in of]
        times = ["" if one is None else f"{one['quartiles'][1] * 1e3:.2f}" for one in of]
        rows.append((row["row"], *nodes, *times))
    heads = [f"{what} {form}" for what in ("nodes", "ms") for form in forms.values()]
    return report.markdown(("window, indices", *heads), rows)


SIMPLE = "simple kernels"  # this package's, which MAXUNPOOL_CUDA_SIMPLE_KERNELS=1 asks for
NETWORKS = {"squeezenet": "SqueezeNet 1.1", "vgg": "VGG-11"}
POOLS = {"squeezenet": 3, "vgg": 5}  # of each network


def network_name(case: Case) -> str:
    """Such as "SqueezeNet 1.1, 8, contiguous": the network, its images, their layout."""
    return f"{NETWORKS[case.layer.partition('-')[0]]}, {case.shape[0]}, {case.layout}"


def networks(results: Report) -> str:
    """Speeds of whole networks beside torch.nn's, eager and compiled."""
    speeds: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        case = BY_NAME[row["name"]]
        if case.operation == "network" and row["results"]:
            name = network_name(case)
            compiled = report.times(row, INDUCTOR, f"{OURS}, {INDUCTOR}")
            cells = speeds.setdefault(name, {})
            cells[case.direction] = f"{report.times(row, TORCH):.2f}"
            cells[f"compiled {case.direction}"] = f"{compiled:.2f}"
    columns = ("inference", "training", "compiled inference", "compiled training")
    rows = [(name, *(cells.get(of, "") for of in columns)) for name, cells in speeds.items()]
    return report.markdown(("network, images, layout", *columns), rows)


def beside(row: Row, other: str) -> float | None:
    """A simulated speed beside a copy's or a simple kernel's: of cycles, where they were kept."""
    if "cycles" not in row:
        return row.get(f"speed beside a {other}")
    return row["cycles"][other] / row["cycles"]["ours"] if other in row["cycles"] else None


def is_first_simulation(row: Row) -> bool:
    """Whether the row is of kernels as they were simulated first, and then measured."""
    return "tried" not in row and "before" not in row


def simulated(results: Report) -> str:
    """The share of a copy's speed, and the speed beside a simple kernel."""
    rows = []
    for row in filter(is_first_simulation, results["rows"]):
        day = f" ({row['kernels']})" if "kernels" in row else ""
        share, speed = (beside(row, other) for other in ("copy", "simple kernel"))
        cells = f"{share:.0%}"[:-1], "-" if speed is None else f"{speed:.2f}"
        rows.append((f"{row['call']}{day}", *cells))
    return report.markdown(("call", "% of copy", "times a simple kernel's speed"), rows)


def simulated_anew(results: Report) -> str:
    """Shares of a copy's speed, of kernels before and of those that took their place."""
    rows = []
    for row in results["rows"]:
        if "before" in row:
            shares = (row["cycles"]["copy"] / n for n in (row["before"], row["cycles"]["ours"]))
            speed = beside(row, "simple kernel")
            cells = "-" if speed is None else f"{speed:.2f}"
            rows.append((row["call"], *(f"{share:.0%}"[:-1] for share in shares), cells))
    heads = ("before, % of copy", "now, % of copy", "now, times a simple kernel's speed")
    return report.markdown(("call", *heads), rows)


def beside_simulated(results: Report) -> str:
    """Shares of a clone's speed, as simulated and as measured, and measured speeds beside others.

    A call that was not simulated, or not timed with simple kernels, has a "-" there.
    """
    rows_of = {row["call"]: row for row in filter(is_first_simulation, load("simulated")["rows"])}
    shares = {call: beside(row, "copy") for call, row in rows_of.items()}
    rows = []
    for row in of_table(results, "simulated"):
        share = shares.get(row["row"])
        cells = ["-" if share is None else f"{share:.0%}"[:-1]]
        cells.append(f"{report.times(row, CLONE):.0%}"[:-1])
        cells.append(f"{report.times(row, TORCH):.2f}")
        speed = report.times(row, SIMPLE)
        cells.append("-" if speed is None else f"{speed:.2f}")
        rows.append((row["row"], *cells))
    heads = ("simulated, % of copy", "measured, % of clone", "torch.nn's speed", "simple kernels'")
    return report.markdown(("call", *heads), rows)


def without_indices(results: Report) -> str:
    """Speeds beside torch.nn's of pooling that returns no indices, and with its backward."""
    speeds: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        case = BY_NAME[row["name"]]
        if case.operation == "values":
            window = case.family.removeprefix(OPERATIONS["values"]).removesuffix(case.direction)
            backward = ", and backward" * (case.direction == "both")
            cells = speeds.setdefault(f"{window}{case.layout}", {})
            cells[f"{case.dtype}{backward}"] = f"{report.times(row, TORCH):.2f}"
    columns = dict.fromkeys(column for cells in speeds.values() for column in cells)
    rows = [(name, *map(cells.get, columns)) for name, cells in speeds.items()]
    return report.markdown(("window, layout", *columns), rows)


def kernelbench(results: Report) -> str:
    """Milliseconds of KernelBench's problems."""
    names = (TORCH, INDUCTOR, OURS)
    rows = []
    for row in results["rows"]:
        case = BY_NAME[row["name"]]
        if case.family == "kernelbench":
            cells = (f"{report.median(row, name) * 1e3:.2f}" for name in names)
            rows.append((case.layer, *cells))
    return report.markdown(("case, ms", *names), rows)


def tried(results: Report) -> str:
    """Times over a copy's, of kernels that were left out, and of those that are here."""
    rows = []
    for row in results["rows"]:
        if "tried" in row:
            here = f"{row['here']:.2f}" if "here" in row else ""
            rows.append((f"{row['tried']}: {row['call']}", f"{row['over a copy']:.2f}", here))
    heads = ("what was tried", "time over a copy's", "of the kernels here, that day")
    return report.markdown(heads, rows)


def plain(results: Report) -> str:
    """Times over a copy's, of the kernels then, of plain ones, and of PyTorch's way to unpool."""
    names = {"here": "kernels then", "plain": "plain", "fill and scatter": "fill and scatter"}
    rows = []
    for row in results["rows"]:
        timed = [row.get(name) for name in names]
        cells = [f"{of['seconds'] / of['copy']:.2f}" if of else "" for of in timed]
        rows.append((row["call"], *cells))
    return report.markdown(("call, times over a copy's", *names.values()), rows)


def kernels(table: str) -> Callable[[Report], str]:
    """How to make a table of microseconds, of kernels before and now, and of torch.nn's."""

    def make(results: Report) -> str:
        rows = []
        for row in of_table(results, table):
            timed = (row.get(name) for name in (TORCH, "before", "now"))
            cells = ["-" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in timed]
            cells.append(f"{row[TORCH] / row['now']:.2f}" if TORCH in row else "-")
            rows.append((row["call"], *cells))
        heads = ("torch.nn", "before", "now", "times torch.nn's speed")
        return report.markdown(("call, microseconds", *heads), rows)

    return make


def out_of_window(results: Report) -> list[str]:
    """How many times as fast torch.nn is with such indices, at most."""
    rows = [row for row in of_table(results, "out of window") if TORCH in row]
    return [f"{max(row['now'] / row[TORCH] for row in rows):.0f}"]


def titled(results: Report) -> list[str]:
    """Where, with what and when it was measured."""
    return [report.title(results)]


MAX_POOL_2D_2 = "values-image-112x64-b16-2x2-float32-contiguous"  # nn.MaxPool2d(2)


def speeds(results: Report) -> list[str]:
    """Contiguous float32 of nn.MaxPool2d(2), forward and with backward, and of unpooling."""
    of = {row["name"]: report.times(row, TORCH) for row in results["rows"]}
    unpooling = geometric_mean(report.speeds(results)["unpooling, contiguous"])
    pooling = (of[f"{MAX_POOL_2D_2}-{direction}"] for direction in ("forward", "both"))
    return [*(f"{speed:.0f}" for speed in pooling), f"{unpooling:.1f}"]


def each_speed(results: Report) -> list[str]:
    """Contiguous pooling, its backward, unpooling and its backward, float32 and int64."""
    means = report.speeds(results)
    kinds = ("pooling", "pooling, backward", "unpooling", "unpooling, backward")
    return [f"{geometric_mean(means[f'{kind}, contiguous']):.2f}" for kind in kinds]


def of_fills(results: Report) -> list[str]:
    """Microseconds outside and inside of deterministic mode, of uint8 indices and of int64 ones."""
    rows = of_table(results, "fills")
    return [
        f"{report.median(row, name) * 1e6:.0f}"
        for row in (rows[0], rows[-1])
        for name in ("outside", "deterministic")
    ]


def of_replays(results: Report) -> list[str]:
    """Microseconds before another call had indices out of window, and after it."""
    (row,) = of_table(results, "replays")
    return [f"{report.median(row, name) * 1e6:.0f}" for name in row["results"]]


def of_squeezenet(results: Report) -> list[str]:
    """The least and the most of contiguous inference."""
    names = [f"network-squeezenet-b{images}-contiguous-inference" for images in (1, 8)]
    of = [report.times(row, TORCH) for row in results["rows"] if row["name"] in names]
    return [f"{min(of):.1f}", f"{max(of):.1f}"]


def of_maximum(results: Report) -> list[str]:
    """The least and the most of compiled training that unpools and takes a maximum."""
    of = [
        report.times(row, TORCH)
        for row in of_table(results, "compiled")
        if row["row"].startswith("unpool and maximum") and row["column"].startswith("training")
    ]
    return [f"{min(of):.2f}", f"{max(of):.2f}"]


def of_patched(results: Report) -> list[str]:
    """Microseconds inside and outside."""
    (row,) = of_table(results, "patched")
    return [
        f"{report.median(row, name) * 1e6:.1f}" for name in (comparisons.INSIDE, comparisons.PLAIN)
    ]


def savings(*networks: str) -> Callable[[Report], list[str]]:
    """By how many percent fewer bytes a training step in float32 saves in these networks."""

    def figures(results: Report) -> list[str]:
        saved = {
            (row["network"], row["pooling"]): row["saved"]
            for row in results["rows"]
            if row["dtype"] == "float32"
        }
        return [f"{1 - saved[name, OURS] / saved[name, TORCH]:.0%}"[:-1] for name in networks]

    return figures


README, PERFORMANCE = "README.md", "docs/performance.md"
TABLES = (
    Table(PERFORMANCE, "speeds", "operators", report.speeds_table),
    Table(PERFORMANCE, "dtypes", "operators", report.dtypes_table),
    Table(PERFORMANCE, "without indices", "operators", without_indices),
    Table(PERFORMANCE, "slower", "operators", report.slower_table),
    Table(PERFORMANCE, "networks", "networks", networks),
    Table(PERFORMANCE, "small planes", "comparisons", by_column("small_planes", "planes")),
    Table(PERFORMANCE, "savings", "training", report.savings_table),
    Table(PERFORMANCE, "gpu speeds", "gpu_h200", report.speeds_table),
    Table(PERFORMANCE, "gpu dtypes", "gpu_h200", report.dtypes_table),
    Table(PERFORMANCE, "gpu slower", "gpu_h200", report.slower_table),
    Table(PERFORMANCE, "gpu out of window", "gpu_h200_kernels", kernels("out of window")),
    Table(PERFORMANCE, "gpu windows", "gpu_h200_kernels", kernels("windows")),
    Table(PERFORMANCE, "gpu networks", "gpu_h100", networks),
    Table(PERFORMANCE, "gpu kernelbench", "gpu_h200", kernelbench),
    Table(PERFORMANCE, "gpu beside simulated", "gpu_h200_calls", beside_simulated),
    Table(PERFORMANCE, "simulated", "simulated", simulated),
    Table(PERFORMANCE, "simulated anew", "simulated", simulated_anew),
    Table("docs/pytorch.md", "compiled", "comparisons", by_column("compiled", "model")),
    Table("docs/deterministic.md", "fixes", "comparisons", fixes),
    Table(
        "docs/deterministic.md",
        "adaptive",
        "comparisons",
        by_column("adaptive", "from, to, channels"),
    ),
    Table("docs/deterministic.md", "gpu fixes", "gpu_h200_calls", fixes),
    Table("docs/install.md", "fallback", "fallback", fallback.table),
    Table("docs/export.md", "exported", "exported", exported),
    Table(PERFORMANCE, "tiny", "comparisons", tiny),
    Table(PERFORMANCE, "tiny shares", "networks", tiny_shares),
    Table("docs/design.md", "tried", "simulated", tried),
    Table("docs/design.md", "plain", "gpu_h100_kernels", plain),
)
SENTENCES = (
    Sentence(
        README,
        "`nn.MaxPool2d(2)` {} times, {} with its backward, unpooling {} times [as",
        "operators",
        speeds,
    ),
    Sentence(README, "Measured on {title}, with", "operators", titled),
    Sentence(README, "Measured on one GPU, {title}:", "gpu_h200", titled),
    Sentence(
        README,
        "pooling {}, its backward {}, unpooling {}, its backward {}",
        "gpu_h200",
        each_speed,
    ),
    Sentence(README, "torch.nn, which is [up to {} times as", "gpu_h200_kernels", out_of_window),
    Sentence(README, "inference is {} to {} times as", "networks", of_squeezenet),
    Sentence(README, "takes a maximum has {} to {} times", "comparisons", of_maximum),
    Sentence(README, "`MaxPool3d` takes {} to {} times torch.nn's", "fallback", fallback.slower),
    Sentence(README, "so VGG-16 saves [{} % fewer", "training", savings("VGG-16")),
    Sentence(
        README,
        "saves {} % fewer bytes in airbench94, which has GELU, {} % in VGG-16, and {} % in",
        "training",
        savings("airbench94", "VGG-16", "ResNet-50"),
    ),
    Sentence(PERFORMANCE, "geometric means on {title}, and the slowest", "operators", titled),
    Sentence(PERFORMANCE, "Eager and compiled networks on {title}.", "networks", titled),
    Sentence(PERFORMANCE, "Small planes on {title}.", "comparisons", titled),
    Sentence(PERFORMANCE, "Training steps on {title}.", "training", titled),
    Sentence(PERFORMANCE, "Operators on {title}.", "gpu_h200", titled),
    Sentence(PERFORMANCE, "Networks on {title}.", "gpu_h100", titled),
    Sentence(PERFORMANCE, "Kernels before and now on {title}.", "gpu_h200_kernels", titled),
    Sentence(PERFORMANCE, "took {} microseconds, and {} after", "gpu_h200_calls", of_replays),
    Sentence("docs/pytorch.md", "Compiled models on {title}.", "comparisons", titled),
    Sentence("docs/deterministic.md", "Fixes on {title}.", "comparisons", titled),
    Sentence("docs/deterministic.md", "Adaptive pools on {title}.", "comparisons", titled),
    Sentence("docs/deterministic.md", "A GPU's, on {title}.", "gpu_h200_calls", titled),
    Sentence(
        "docs/deterministic.md",
        "from {} microseconds to {} with uint8 indices, from {} to {} with int64",
        "gpu_h200_calls",
        of_fills,
    ),
    Sentence("docs/install.md", "Calls without kernels on {title}.", "fallback", titled),
    Sentence("docs/export.md", "Graphs on {title}.", "exported", titled),
    Sentence(PERFORMANCE, "Tiny calls on {title}.", "comparisons", titled),
    Sentence(
        "docs/recipes.md", "takes {} microseconds instead of {} (one", "comparisons", of_patched
    ),
)


def load(name: str) -> Report | None:
    """The results of this name, or None if none were measured."""
    path = RESULTS / f"{name}.json"
    return report.load(path) if path.exists() else None


def rewritten(page: str) -> str:
    """The page with the figures of all results that there are."""
    text = (ROOT / page).read_text()
    for part in (*TABLES, *SENTENCES):
        results = load(part.results)
        if part.page == page and results:
            text = part.rewrite(text, results)
    return text


def write() -> None:
    """Bring all pages in line with the results."""
    for page in dict.fromkeys(part.page for part in (*TABLES, *SENTENCES)):
        (ROOT / page).write_text(rewritten(page))
