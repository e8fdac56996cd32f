"""Times max unpooling beside its peers and a clone, checks every result first.

python -m benchmarks [--device cuda] [--quick] [--filter segnet] [--peers torch onnx]
"""

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import contenders, memory, report, runner, tables, training
from .cases import CASES, QUICK, Case
from .show import has

PEERS = dict(zip(("torch", "compile", "onnx", "triton"), contenders.PEERS, strict=True))
OUTPUT = Path(__file__).parent.parent / "out" / "benchmarks"
QUICK_SECONDS, FULL_SECONDS = 0.1, 0.3
OPTIONAL = ("matplotlib", "onnx", "onnxruntime", "triton")


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
    add("--limit", type=float, default=float("inf"), help="seconds: begin no case afterwards")
    add("--output", type=Path, default=OUTPUT, help="folder; default: out/benchmarks")
    add("--training", action="store_true", help="measure the memory of a training step instead")
    add("--model", action="store_true", help="print what the cases should cost instead")
    add("--table", type=Path, metavar="JSON", help="print these results instead")
    add("--compare", type=Path, metavar="JSON", help="fail if a family is slower than in this run")
    add("--tolerance", type=float, default=0.1, help="of --compare; default: 0.1, which is 10 %%")
    asked = parser.parse_args(arguments)
    if asked.seconds is None:
        asked.seconds = QUICK_SECONDS if asked.quick else FULL_SECONDS
    return asked


def show(results: report.Report) -> None:
    """Print the tables there are of the results."""
    if "training" in results:
        tables.training(results)
    else:
        tables.cases(results)
        tables.families(results)


def finish(results: report.Report, folder: Path) -> None:
    """Write the results and what is drawn of them, and show them."""
    stem = folder / (report.slug(results) + "-training" * ("training" in results))
    written = [stem.with_name(f"{stem.name}.json")]
    report.save(results, written[0])
    show(results)
    if has("matplotlib"):
        from . import plot

        written += plot.save(results, stem)
    print(*(f"Written: {path}" for path in written), sep="\n", flush=True)


def timed(chosen: Sequence[Case], asked: argparse.Namespace) -> report.Report:
    """Time the cases; what was timed is on disk after each, and shown whatever stops it."""
    settings = {name: vars(asked)[name] for name in ("seconds", "quick", "filter")}
    rows: list[report.Row] = []
    results: report.Report = {
        "facts": report.facts(asked.device),
        "settings": settings | {"pages kept": memory.keep_pages()},
        "left_out": len(chosen),
        "rows": rows,
    }
    deadline = time.monotonic() + asked.limit
    try:
        for number, case in enumerate(chosen, 1):
            if time.monotonic() >= deadline:
                break
            print(f"{number}/{len(chosen)} {case.name}", flush=True)
            peers = [
                peer for peer in contenders.PEERS if contenders.is_quick(peer, case, asked.quick)
            ]
            if asked.peers is not None:
                peers = [PEERS[peer] for peer in asked.peers]
            rows.append(runner.run(case, asked.device, peers, asked.seconds))
            results["left_out"] -= 1
            report.save(results, asked.output / f"{report.slug(results)}.json")
    finally:
        if rows:
            finish(results, asked.output)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what was asked for."""
    asked = options(arguments)
    among = QUICK if asked.quick else CASES
    chosen = [case for case in among if re.search(asked.filter, case.name)]
    if not chosen:
        raise SystemExit(f"benchmarks: no case's name contains {asked.filter!r}; see --model")
    if asked.model:
        tables.predictions(chosen)
        return
    if asked.table:
        results = report.load(asked.table)
        show(results)
    else:
        if missing := [package for package in OPTIONAL if not has(package)]:
            print(f"Not installed, and so left out: {', '.join(missing)}", flush=True)
        if asked.training:
            results = training.measure(asked.device)
            finish(results, asked.output)
        else:
            results = timed(chosen, asked)
    if wrong := report.wrong(results["rows"]):
        raise SystemExit(f"benchmarks: not the definition's result: {', '.join(wrong)}")
    if asked.compare:
        slower = tables.compare(results, report.load(asked.compare), asked.tolerance)
        if slower:
            raise SystemExit(f"benchmarks: slower than before: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
