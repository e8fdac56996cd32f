"""What a training step of SegNet holds in memory: with pooling of torch.nn, and of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import maxunpool_cuda

from . import console, report
from .memory import peak_bytes
from .segnet import SegNet

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

TORCH = "torch.nn"
INDEX_DTYPES = {TORCH: None, "int32": torch.int32, "uint8": torch.uint8}
DTYPES = ("float32", "bfloat16")
COLORS = {"values": "tab:gray", TORCH: "tab:red", "int32": "tab:cyan", "uint8": "tab:blue"}


@dataclasses.dataclass(frozen=True)
class Setup:
    """The step: of CamVid's images, as the network's authors cut them."""

    batch: int = 1
    size: tuple[int, int] = (360, 480)


@dataclasses.dataclass
class Training:
    """A network whose pools note the sizes of what they return."""

    model: nn.Module
    input: Tensor
    labels: Tensor
    layers: list[dict[str, Any]]
    loss: float = 0.0

    def step(self) -> None:
        """Forward and backward."""
        self.layers.clear()
        self.model.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(self.input).float(), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss = loss.item()


def prepare(contender: str, dtype: str, setup: Setup, device: str) -> Training:
    """The same network and data for everyone."""
    torch.manual_seed(0)
    model = SegNet().to(device, getattr(torch, dtype))
    index_dtype = INDEX_DTYPES[contender]
    if index_dtype is not None and maxunpool_cuda.replace_max_pooling(model, index_dtype):
        raise RuntimeError("every pool of SegNet can have these indices")
    input = torch.randn(setup.batch, 3, *setup.size, dtype=getattr(torch, dtype), device=device)
    labels = torch.randint(12, (setup.batch, *setup.size), device=device)
    layers: list[dict[str, Any]] = []

    def note(name: str, _: nn.Module, __: Any, results: tuple[Tensor, Tensor]) -> None:
        values, indices = results
        layers.append({"name": name, "values": values.nbytes, "indices": indices.nbytes})

    for stage, pool in enumerate(model.pools, 1):
        pool.register_forward_hook(partial(note, f"pool {stage}"))
    return Training(model, input, labels, layers)


def measure(device: str, setup: Setup, progress: Callable[[str], None]) -> report.Report:
    """Peak bytes of a step and, for each pool, the bytes of its values and of its indices.

    Raises:
        RuntimeError: two losses of one dtype differ: they pool and unpool the same numbers.
    """
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for contender in INDEX_DTYPES:
            progress(f"{contender}, {dtype}")
            training = prepare(contender, dtype, setup, device)
            training.step()  # what is allocated once and for all
            peak = peak_bytes(training.step, device)
            row = {"contender": contender, "dtype": dtype, "peak_bytes": peak}
            rows.append({**row, "loss": training.loss, "layers": training.layers})
        losses = {row["loss"] for row in rows if row["dtype"] == dtype}
        if len(losses) != 1:
            raise RuntimeError(f"expected one loss of a {dtype} network but got {losses}")
    return {"facts": report.facts(device), "training": dataclasses.asdict(setup), "rows": rows}


def _sum(row: dict[str, Any], what: str) -> int:
    return sum(layer[what] for layer in row["layers"])


HEADS = ("dtype", "indices", "pooled values", "their indices", "peak of the step")


def _title(results: report.Report) -> str:
    facts = results["facts"]
    return f"SegNet's training step on {facts['device']}, PyTorch {facts['torch']}"


def _cells(results: report.Report) -> list[tuple[str, ...]]:
    """Of each network, what stands below :data:`HEADS`."""
    found = []
    for row in results["rows"]:
        sizes = (_sum(row, "values"), _sum(row, "indices"), row["peak_bytes"])
        named = (row["dtype"], row["contender"])
        found.append((*named, *(f"{n / 2**20:.1f} MiB" for n in sizes)))
    return found


def table(results: report.Report) -> Table:
    """To look at. Needs rich."""
    from rich.table import Table

    shown = Table(title=_title(results))
    for head in HEADS:
        shown.add_column(head, justify="right")
    for cells in _cells(results):
        shown.add_row(*cells)
    return shown


def markdown(results: report.Report) -> str:
    """The same in Markdown."""
    rows = (HEADS, ("--:",) * len(HEADS), *_cells(results))
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join((_title(results), "", *lines)) + "\n"


def figure(results: report.Report) -> Figure:
    """Bytes of each pool's values and indices, and the peak of a step. Needs matplotlib."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 6), layout="constrained")
    panels = drawn.subplots(2, 2, width_ratios=(3, 1))
    for (layers, peaks), dtype in zip(panels, DTYPES, strict=True):
        rows = {row["contender"]: row for row in results["rows"] if row["dtype"] == dtype}
        bars = {"values": [layer["values"] for layer in rows[TORCH]["layers"]]}
        bars |= {name: [layer["indices"] for layer in row["layers"]] for name, row in rows.items()}
        for place, (name, sizes) in enumerate(bars.items()):
            label = "pooled values" if name == "values" else f"indices, {name}"
            at = [stage + (place - 1.5) * 0.2 for stage in range(len(sizes))]
            heights = [size / 2**20 for size in sizes]
            layers.bar(at, heights, 0.19, color=COLORS[name], label=label)
        names = [layer["name"] for layer in rows[TORCH]["layers"]]
        layers.set_xticks(range(len(names)), names)
        layers.set(title=f"{dtype}: what each pool returns", ylabel="MiB")
        layers.legend()
        heights = [row["peak_bytes"] / 2**20 for row in rows.values()]
        drawn_bars = peaks.bar(list(rows), heights, color=[COLORS[name] for name in rows])
        peaks.bar_label(drawn_bars, fmt="%.0f")
        peaks.set(title="peak of a step", ylabel="MiB")
        peaks.set_ylim(top=1.1 * max(heights))
    facts, setup = results["facts"], results["training"]
    size = "x".join(map(str, (setup["batch"], 3, *setup["size"])))
    drawn.suptitle(f"SegNet, {size}: {facts['device']}, PyTorch {facts['torch']}")
    return drawn


def run(device: str, output: Path, setup: Setup = Setup()) -> list[Path]:
    """Measure, show, and write the results; return where they are."""
    with console.progress(len(DTYPES) * len(INDEX_DTYPES)) as begin:
        results = measure(device, setup, begin)
    console.show(lambda: table(results), lambda: markdown(results))
    stem = output / f"{report.slug(results)}-training"
    written = [stem.with_suffix(".json")]
    report.save(results, written[0])
    if console.has("matplotlib"):
        written.append(stem.with_suffix(".png"))
        with report.replacing(written[1]) as fresh:
            figure(results).savefig(fresh, dpi=120, format="png")
    return written
