"""Times max unpooling beside its peers and a clone, checks every result first.

python -m benchmarks [--device cuda] [--quick] [--filter segnet] [--peers torch onnx]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import contenders, memory, model, plot, report, runner, training
from .cases import CASES, Case
from .timing import Budget

PEERS = dict(zip(("torch", "compile", "onnx", "triton"), contenders.PEERS, strict=True))
PARTIAL_RESULTS = Path(__file__).parent.parent / "out" / "benchmarks"
QUICK_SECONDS, FULL_SECONDS, ROUNDS = 0.1, 0.3, 200


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser("benchmarks", description=(__doc__ or "").splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default=device)
    add("--threads", type=int, help="threads of the CPU; default: as many as PyTorch takes")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a few cases, in shorter time")
    size.add_argument("--full", action="store_true", help="every case; the default")
    add("--filter", default="", help="only cases whose name this regular expression is found in")
    add("--peers", nargs="*", choices=tuple(PEERS), help="default: all, compile in fewer cases")
    add("--seconds", type=float, help="to time each contender of each case")
    add("--rounds", type=int, default=ROUNDS, help="at most this many")
    add(
        "--output",
        type=Path,
        help="folder of the results; default: benchmarks/results, which MODEL.md has its table "
        "from, or out/benchmarks if not everything is timed in the usual way",
    )
    add(
        "--pages",
        choices=("kept", "fresh"),
        default="kept",
        help="of the CPU's large tensors: kept by the process when freed, as the caching allocator "
        "of CUDA does, or fresh for each call, as glibc's malloc does unless told otherwise",
    )
    add("--training", action="store_true", help="measure the memory of a training step instead")
    add("--list", action="store_true", help="print the names of the cases")
    add("--table", type=Path, metavar="JSON", help="print results as a Markdown table")
    add(
        "--model",
        nargs="?",
        const="print",
        choices=("print", "write"),
        help="print the table of MODEL.md, with the results there are, or write it there",
    )
    return parser.parse_args(arguments)


def measure(
    chosen: Sequence[Case], asked: argparse.Namespace, output: Path, console: Console
) -> report.Report:
    """Time the cases; results so far are on disk after each."""
    seconds = asked.seconds or (QUICK_SECONDS if asked.quick else FULL_SECONDS)
    budget = Budget(seconds, fewest_rounds=min(10, asked.rounds), most_rounds=asked.rounds)
    results: report.Report = {"facts": report.facts(asked.device), "rows": []}
    results["settings"] = vars(budget) | {
        "quick": asked.quick,
        "filter": asked.filter,
        "pages": asked.pages,
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.name)
            if asked.peers is None:
                peers = contenders.by_default(case, asked.quick)
            else:
                peers = [PEERS[peer] for peer in asked.peers]
            results["rows"].append(runner.run(case, asked.device, peers, budget))
            report.save(results, output / f"{report.slug(results)}.json")
            progress.advance(task)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what was asked for."""
    asked = options(arguments)
    if asked.model == "write":
        model.write(model.table(report.load_all()))
        return
    if asked.model:
        print(model.table(report.load_all()), end="")
        return
    if asked.table:
        print(report.markdown(report.load(asked.table)), end="")
        return
    chosen = [case for case in CASES if case.quick or not asked.quick]
    chosen = [case for case in chosen if re.search(asked.filter, case.name)]
    if not chosen:
        raise SystemExit(f"benchmarks: no case's name contains {asked.filter!r}; see --list")
    if asked.list:
        print(*(case.name for case in chosen), sep="\n")
        return
    if asked.threads:
        torch.set_num_threads(asked.threads)
    if asked.training:
        for path in training.run(asked.device, asked.output or report.RESULTS):
            print(f"Written: {path}")
        return
    console = Console()
    console = Console(width=max(console.width, 200))
    if asked.pages == "kept" and not memory.keep_pages():
        raise SystemExit("benchmarks: expected glibc's malloc for --pages kept; ask for fresh ones")
    usual = asked.peers is None and asked.pages == "kept"
    usual = usual and asked.seconds is None and asked.rounds == ROUNDS
    everything = len(chosen) == len(CASES) and usual
    output = asked.output or (report.RESULTS if everything else PARTIAL_RESULTS)
    results = measure(chosen, asked, output, console)
    console.print(report.rich_table(results))
    stem = output / report.slug(results)
    written = [stem.with_name(f"{stem.name}.json"), *plot.save(results, stem)]
    if output == report.RESULTS:
        model.write(model.table(report.load_all()))
        written.append(model.DOCUMENT)
    for path in written:
        print(f"Written: {path}")
    if wrong := report.wrong(results):
        raise SystemExit(f"benchmarks: not the definition's result: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
