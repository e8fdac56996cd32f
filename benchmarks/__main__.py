"""Times max unpooling beside its peers and a clone, checks every result first.

python -m benchmarks [--device cuda] [--quick] [--filter segnet] [--peers torch onnx]
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import torch

from . import console, contenders, memory, model, report, runner, training
from .cases import CASES, Case
from .stopping import SIGNALS, stopping
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
        "--limit",
        type=float,
        metavar="SECONDS",
        help="begin no case once they are over; SIGINT and SIGTERM do the same at once",
    )
    add(
        "--output",
        type=Path,
        help="folder of the results; default: out/benchmarks and, once everything was timed in the "
        "usual way, benchmarks/results, which MODEL.md has its table from",
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


def budget(asked: argparse.Namespace) -> Budget:
    """For each case."""
    seconds = asked.seconds
    if seconds is None:
        seconds = QUICK_SECONDS if asked.quick else FULL_SECONDS
    return Budget(seconds, fewest_rounds=min(10, asked.rounds), most_rounds=asked.rounds)


def begun(chosen: Sequence[Case], asked: argparse.Namespace) -> report.Report:
    """The report before the first case."""
    asked_for = {"quick": asked.quick, "filter": asked.filter, "pages": asked.pages}
    settings = vars(budget(asked)) | asked_for
    facts = report.facts(asked.device)
    return {"facts": facts, "settings": settings, "left_out": len(chosen), "rows": []}


def measure(
    results: report.Report, chosen: Sequence[Case], asked: argparse.Namespace, output: Path
) -> str:
    """Time the cases, and add their rows to the report, which is on disk after each.

    Returns:
        Why it stopped before the last case, or nothing.
    """
    with stopping(asked.limit) as reason, console.progress(len(chosen)) as start:
        for case in chosen:
            if why := reason():
                return why
            start(case.name)
            if asked.peers is None:
                peers = contenders.by_default(case, asked.quick)
            else:
                peers = [PEERS[peer] for peer in asked.peers]
            results["rows"].append(runner.run(case, asked.device, peers, budget(asked)))
            results["left_out"] -= 1
            report.save(results, output / f"{report.slug(results)}.json")
    return ""


def finish(results: report.Report, folder: Path) -> None:
    """Write the results and what is drawn of them, and show them."""
    stem = folder / report.slug(results)
    written = [stem.with_name(f"{stem.name}.json")]
    report.save(results, written[0])
    console.show(lambda: report.rich_table(results), lambda: report.markdown(results))
    if console.has("matplotlib"):
        from . import plot

        written += plot.save(results, stem)
    if folder == report.RESULTS:
        model.write(model.table(report.load_all()))
        written.append(model.DOCUMENT)
    say_written(written)


def say_written(paths: Sequence[Path]) -> None:
    """A line for each file; one more if there would be pictures."""
    for path in paths:
        print(f"Written: {path}")
    if not console.has("matplotlib"):
        print("No pictures: they need matplotlib")


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
    console.say_missing()
    if asked.training:
        say_written(training.run(asked.device, asked.output or report.RESULTS))
        return
    usual = asked.peers is None and asked.pages == "kept"
    usual = usual and asked.seconds is None and asked.rounds == ROUNDS
    everything = len(chosen) == len(CASES) and usual
    output, public = asked.output or PARTIAL_RESULTS, asked.output is None
    if output.resolve() == report.RESULTS.resolve():
        if not everything:
            raise SystemExit(f"benchmarks: {output} is for everything, timed in the usual way")
        output, public = PARTIAL_RESULTS, True
    if asked.pages == "kept" and not memory.keep_pages():
        raise SystemExit("benchmarks: expected glibc's malloc for --pages kept; ask for fresh ones")
    results = begun(chosen, asked)
    why = ""
    try:
        why = measure(results, chosen, asked, output)
    except BaseException as error:
        why = type(error).__name__
        raise
    finally:
        left_out = results["left_out"]
        # What was published gives way to no less than everything.
        public = public and everything and not left_out
        if results["rows"]:
            finish(results, report.RESULTS if public else output)
        if left_out:
            timed = len(results["rows"])
            print(f"Stopped by {why}: {timed} cases timed, {left_out} left out", flush=True)
    if wrong := report.wrong(results):
        raise SystemExit(f"benchmarks: not the definition's result: {', '.join(wrong)}")
    if why in [number.name for number in SIGNALS]:
        raise SystemExit(128 + signal.Signals[why])


if __name__ == "__main__":
    main()
