# SPDX-License-Identifier: BSD-3-Clause
"""Times max unpooling and pooling beside torch.nn and a clone, and measures memory."""

import argparse
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

import maxunpool_cuda

from . import contenders, memory, pages, report, timing
from .cases import CASES, QUICK, Case

ON_CPU = [case for case in CASES if case.is_timed_on("cpu")]
DOCUMENTED = [case for case in ON_CPU if pages.is_documented(case)]
SECONDS = 0.3  # for each contender of a call
# What a call takes then, in seconds: on two CPU cores, and on an H200.
TAKES = {"cpu": 2.0, "cuda": 0.7}


def minutes(calls: int, device: str, seconds: float = SECONDS) -> str:
    """About how long it takes to time so many calls."""
    return f"{max(1, round(calls * TAKES[device] * seconds / SECONDS / 60))} min"


HELP = {  # of commands
    "time": f"time {len(ON_CPU)} calls on a CPU, in {minutes(len(ON_CPU), 'cpu')}, or {len(CASES)} "
    f"on a GPU, in {minutes(len(CASES), 'cuda')}; with --quick {len(QUICK)}",
    "memory": f"measure a training step of {len(memory.TRAININGS)} networks, in 1 min",
    "documents": f"time the {len(DOCUMENTED)} calls of the documents' tables on a CPU, in "
    f"{minutes(len(DOCUMENTED), 'cpu')}, and keep it in benchmarks/results; in a build without "
    "kernels those of its table alone, in 1 min",
}


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    made = {}
    for name, words in HELP.items():
        made[name] = commands.add_parser(name, help=words, description=words)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("time", "memory"):
        add = made[name].add_argument
        add("--device", choices=("cpu", "cuda"), default=default, help="the GPU if there is one")
        add("--output", type=Path, default=Path("out/benchmarks"), help="folder for the JSON")
    for name in ("time", "documents"):
        words = f"to time each contender of each call; {SECONDS} by default"
        made[name].add_argument("--seconds", type=float, default=SECONDS, help=words)
    add = made["time"].add_argument
    add("--quick", action="store_true", help="one case of each call and window")
    add("--filter", default="", help="only cases whose name this regular expression is found in")
    words = "write benchmarks/results into the documents, and time nothing"
    made["documents"].add_argument("--write", action="store_true", help=words)
    return parser.parse_args(arguments)


def chosen(asked: argparse.Namespace) -> list[Case]:
    """The cases that are asked for, and that the device can do in reasonable time."""
    among = QUICK if asked.quick else CASES
    named = [case for case in among if re.search(asked.filter, case.name)]
    cases = [case for case in named if case.is_timed_on(asked.device)]
    if not cases:
        raise SystemExit(f"benchmarks: {asked.filter!r} names no case that the {asked.device} has")
    return cases


def row_of(case: Case, device: str, seconds: float) -> report.Row:
    """The case's results. If it fails, or is left out, there are none, and the reason is there."""
    try:
        return timing.run(case, device, seconds)
    except torch.OutOfMemoryError:
        return {"name": case.name, "results": {}, "left out": "needs more memory than is free"}
    except Exception as error:  # whatever it is, the other cases are timed
        traceback.print_exc()
        return {"name": case.name, "results": {}, "failed": f"{type(error).__name__}: {error}"}


def timed(cases: Sequence[Case], device: str, seconds: float, path: Path) -> report.Report:
    """Time the cases. The results so far are on disk after each, in case it is interrupted."""
    takes = minutes(len(cases), device, seconds)
    print(f"{len(cases)} calls, in about {takes}. Results so far are in {path}.", flush=True)
    settings = {"seconds": seconds, "pages kept": timing.keep_pages()}
    results: report.Report = {"facts": report.facts(device), "settings": settings, "rows": []}
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name}", flush=True)
        row = row_of(case, device, seconds)
        results["rows"].append(row)
        for reason in row.keys() & {"failed", "left out"}:
            print(f"{reason}: {row[reason]}", flush=True)
        report.save(results, path)
    return results


def stop_if_failed(results: report.Report) -> None:
    """End with an error that names the cases that failed."""
    failed = [row["name"] for row in results["rows"] if "failed" in row]
    if failed:
        raise SystemExit(f"benchmarks: failed: {'; '.join(failed)}")


def document(seconds: float) -> None:
    """Time the calls of the documents' tables, and keep their times unless one fails."""
    has_kernels = maxunpool_cuda.build_info()["kernels"] != "none"
    cases = (
        DOCUMENTED if has_kernels else [case for case in DOCUMENTED if contenders.workarounds(case)]
    )
    calls = timed(cases, "cpu", seconds, Path("out/benchmarks/documents.json"))
    stop_if_failed(calls)
    networks = [row for row in calls["rows"] if row["name"].startswith("network")]
    operators = [row for row in calls["rows"] if row not in networks]
    kept = (
        {"operators": operators, "networks": networks} if has_kernels else {"fallback": operators}
    )
    for name, rows in kept.items():
        path = pages.RESULTS / f"{name}.json"
        report.save(calls | {"rows": rows}, path)
        print(f"Written: {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line asks for."""
    asked = options(arguments)
    if asked.command == "documents" and asked.write:
        pages.write()
    elif asked.command == "documents":
        document(asked.seconds)
    elif asked.command == "memory":
        path = asked.output / f"memory-{asked.device}.json"
        results = memory.measure(asked.device)
        report.save(results, path)
        print(f"\nThe memory of a training step on {report.title(results)}\n")
        print(report.table("training step", report.savings_cells(results)))
        print(f"Written: {path}")
    else:
        path = asked.output / f"time-{asked.device}.json"
        results = timed(chosen(asked), asked.device, asked.seconds, path)
        report.show(results, contenders.left_out(asked.device))
        print(f"Written: {path}")
        stop_if_failed(results)


if __name__ == "__main__":
    main()
