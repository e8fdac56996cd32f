# SPDX-License-Identifier: BSD-3-Clause
"""Times max unpooling and pooling beside torch.nn and a clone, and checks every result first."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from . import comparisons, fallback, memory, pages, report, timing, training
from .cases import BY_NAME, CASES, QUICK, Case


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="one case of each family and direction")
    add("--filter", default="", help="only cases whose name this regular expression is found in")
    add("--seconds", type=float, default=0.3, help="to time each contender of each case")
    add("--output", type=Path, default=Path("out/benchmarks"), help="folder for the JSON")
    add("--training", action="store_true", help="measure the memory of a training step instead")
    add("--documents", action="store_true", help="time all that the documents say, on a CPU")
    add("--fallback", action="store_true", help="time a build without kernels, for the documents")
    add("--write", action="store_true", help="write benchmarks/results into the documents instead")
    add("--table", type=Path, metavar="JSON", help="print these results instead")
    add("--compare", type=Path, metavar="JSON", help="fail if a family takes 10 %% more than here")
    return parser.parse_args(arguments)


def chosen(asked: argparse.Namespace) -> list[Case]:
    """The cases that are asked for, and that the device can do in reasonable time."""
    among = QUICK if asked.quick else CASES
    named = [case for case in among if re.search(asked.filter, case.name)]
    if not named:
        raise SystemExit(f"benchmarks: no case's name contains {asked.filter!r}")
    cases = [case for case in named if case.is_timed_on(asked.device)]
    if not cases:
        raise SystemExit(f"benchmarks: {named[0].name} is timed on {named[0].device} alone")
    return cases


def row_of(case: Case, asked: argparse.Namespace) -> report.Row:
    """The case's results. If it fails, or is left out, there are none, and the reason is there."""
    try:
        return timing.run(case, asked.device, asked.seconds)
    except memory.TooLargeError as error:
        return {"name": case.name, "results": {}, "left out": str(error)}
    except Exception as error:  # whatever it is, the other cases are timed
        return {"name": case.name, "results": {}, "failed": f"{type(error).__name__}: {error}"}


def timed(asked: argparse.Namespace, cases: Sequence[Case], stem: str = "") -> report.Report:
    """Time the cases. The results so far are on disk after each, in case it is interrupted."""
    settings = {"seconds": asked.seconds, "pages kept": timing.keep_pages()}
    results: report.Report = {"facts": report.facts(asked.device), "settings": settings, "rows": []}
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name}", flush=True)
        row = row_of(case, asked)
        results["rows"].append(row)
        for reason in row.keys() & {"failed", "left out"}:
            print(f"{reason}: {row[reason]}", flush=True)
        report.save(results, asked.output, stem)
    # At the beginning the device was idle, and its clocks low.
    results["facts"] |= report.nvidia_smi(asked.device)
    return results


def document(asked: argparse.Namespace) -> None:
    """Time all that the documents say was timed, and keep it unless a case fails."""
    cases = [case for case in CASES if case.is_timed_on("cpu") and pages.shows(case)]
    calls = timed(asked, cases, "calls")
    failed = [row["name"] for row in calls["rows"] if "failed" in row]
    if failed:
        raise SystemExit(f"benchmarks: failed: {'; '.join(failed)}")
    of_network = [row for row in calls["rows"] if BY_NAME[row["name"]].operation == "network"]
    results = {
        "operators": calls | {"rows": [row for row in calls["rows"] if row not in of_network]},
        "networks": calls | {"rows": of_network},
        "comparisons": comparisons.measure(asked.seconds, comparisons.TABLES),
        "exported": comparisons.measure(asked.seconds, [comparisons.exported]),
    }
    for name, of in results.items():
        print(f"Written: {report.save(of, pages.RESULTS, name)}")


def for_documents(asked: argparse.Namespace) -> None:
    """Measure what they say, or write what was measured into them."""
    if asked.documents:
        document(asked)
    elif asked.fallback:
        print(f"Written: {report.save(fallback.measure(asked.seconds), pages.RESULTS, 'fallback')}")
    else:
        pages.write()


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line asks for."""
    asked = options(arguments)
    complaints = []
    if asked.documents or asked.fallback or asked.write:
        for_documents(asked)
        return
    if asked.table:
        results = report.load(asked.table)
    else:
        results = training.measure(asked.device) if asked.training else timed(asked, chosen(asked))
        print(f"Written: {report.save(results, asked.output)}\n")
        complaints += [f"failed: {row['name']}" for row in results["rows"] if "failed" in row]
    report.show(results)
    if asked.compare:
        slower = report.compare(results, report.load(asked.compare))
        complaints += [f"slower than before: {family}" for family in slower]
    if complaints:
        raise SystemExit(f"benchmarks: {'; '.join(complaints)}")


if __name__ == "__main__":
    main()
