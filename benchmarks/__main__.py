"""Times max unpooling beside its peers and a clone, checks every result first.

python -m benchmarks [--device cuda] [--quick] [--filter segnet] [--peers torch onnx]
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import contenders, memory, report, runner, show, tables, training
from .cases import CASES, Case

PEERS = dict(zip(("torch", "compile", "onnx", "triton"), contenders.PEERS, strict=True))
UNPUBLISHED = Path(__file__).parent.parent / "out" / "benchmarks"
QUICK_SECONDS, FULL_SECONDS, ROUNDS = 0.1, 0.3, 200


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser("benchmarks", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=device)
    add("--quick", action="store_true", help="a few cases, in shorter time")
    add("--filter", default="", help="only cases whose name this regular expression is found in")
    add("--peers", nargs="*", choices=tuple(PEERS), help="default: all, compile in fewer cases")
    add("--seconds", type=float, help="to time each contender of each case")
    add("--rounds", type=int, default=ROUNDS, help="at most this many")
    add("--limit", type=float, default=float("inf"), help="seconds: begin no case afterwards")
    add("--output", type=Path, help="default: out/benchmarks; of all cases, benchmarks/results")
    add("--training", action="store_true", help="measure the memory of a training step instead")
    add("--model", action="store_true", help="print what the cases should cost instead")
    add("--table", type=Path, metavar="JSON", help="print these results instead")
    add("--compare", type=Path, metavar="JSON", help="fail if a family is slower than in this run")
    add("--tolerance", type=float, default=0.1, help="of --compare; default: 0.1, which is 10 %%")
    asked = parser.parse_args(arguments)
    if asked.output and asked.output.resolve() == report.RESULTS.resolve():
        parser.error(f"{asked.output} is for everything, timed in the usual way, without --output")
    return asked


def display(results: report.Report) -> None:
    """Print the tables there are of the results."""
    if "training" in results:
        training.table(results)
    else:
        tables.cases(results)
        tables.families(results)


def finish(results: report.Report, folder: Path) -> None:
    """Write the results and what is drawn of them, and show them."""
    stem = folder / (report.slug(results) + "-training" * ("training" in results))
    written = [stem.with_name(f"{stem.name}.json")]
    report.save(results, written[0])
    display(results)
    if show.has("matplotlib"):
        from . import plot

        written += plot.save(results, stem)
    print(*(f"Written: {path}" for path in written), sep="\n", flush=True)


def timed(chosen: Sequence[Case], asked: argparse.Namespace) -> report.Report:
    """Time the cases; results are on disk after each, and published if they are complete."""
    seconds = asked.seconds
    if seconds is None:
        seconds = QUICK_SECONDS if asked.quick else FULL_SECONDS
    kept = memory.keep_pages()
    settings = {name: vars(asked)[name] for name in ("rounds", "quick", "filter")}
    settings |= {"seconds": seconds, "pages kept": kept}
    rows: list[report.Row] = []
    results: report.Report = {"facts": report.facts(asked.device), "settings": settings}
    results |= {"left_out": len(chosen), "rows": rows}
    folder = asked.output or UNPUBLISHED
    deadline = time.monotonic() + asked.limit
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for case, _ in zip(chosen, show.progress([case.name for case in chosen]), strict=True):
            if time.monotonic() >= deadline:
                break
            peers = contenders.by_default(case, asked.quick)
            if asked.peers is not None:
                peers = [PEERS[peer] for peer in asked.peers]
            rows.append(runner.run(case, asked.device, peers, seconds, asked.rounds))
            results["left_out"] -= 1
            report.save(results, folder / f"{report.slug(results)}.json")
    finally:
        signal.signal(signal.SIGTERM, before)
        changed = (asked.output, asked.seconds, asked.peers) != (None, None, None)
        usual = not changed and asked.rounds == ROUNDS
        if usual and kept and len(rows) == len(CASES):
            folder = report.RESULTS  # what was published gives way to no less than everything
        if rows:
            finish(results, folder)
        if results["left_out"]:
            print(f"Stopped: {len(rows)} cases timed, {results['left_out']} left out", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what was asked for."""
    asked = options(arguments)
    chosen = [case for case in CASES if case.quick or not asked.quick]
    chosen = [case for case in chosen if re.search(asked.filter, case.name)]
    if not chosen:
        raise SystemExit(f"benchmarks: no case's name contains {asked.filter!r}; see --model")
    if asked.model:
        tables.predictions(chosen)
        return
    if asked.table:
        results = report.load(asked.table)
        display(results)
    else:
        show.say_missing()
        if asked.training:
            finish(training.measure(asked.device), asked.output or report.RESULTS)
            return
        results = timed(chosen, asked)
    if wrong := report.wrong(results["rows"]):
        raise SystemExit(f"benchmarks: not the definition's result: {', '.join(wrong)}")
    if asked.compare:
        slower = tables.compare(results, report.load(asked.compare), asked.tolerance)
        if slower:
            raise SystemExit(f"benchmarks: slower than before: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
