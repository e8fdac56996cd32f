"""Times max unpooling and pooling beside torch.nn and a clone, and checks every result first."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from . import networks, report, timing
from .cases import CASES, QUICK


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
    add("--table", type=Path, metavar="JSON", help="print these results instead")
    add("--compare", type=Path, metavar="JSON", help="fail if a family takes 10 %% more than here")
    return parser.parse_args(arguments)


def timed(asked: argparse.Namespace) -> report.Report:
    """Time the cases. The results so far are on disk after each, in case it is interrupted."""
    among = QUICK if asked.quick else CASES
    chosen = [case for case in among if re.search(asked.filter, case.name)]
    if not chosen:
        raise SystemExit(f"benchmarks: no case's name contains {asked.filter!r}")
    settings = {"seconds": asked.seconds, "pages kept": timing.keep_pages()}
    results = {"facts": report.facts(asked.device), "settings": settings, "rows": []}
    for number, case in enumerate(chosen, 1):
        print(f"{number}/{len(chosen)} {case.name}", flush=True)
        results["rows"].append(timing.run(case, asked.device, asked.seconds))
        report.save(results, asked.output)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line asks for."""
    asked = options(arguments)
    if asked.table:
        results = report.load(asked.table)
    else:
        results = networks.measure(asked.device) if asked.training else timed(asked)
        print(f"Written: {report.save(results, asked.output)}\n")
    report.show(results)
    if asked.compare:
        slower = report.compare(results, report.load(asked.compare))
        if slower:
            raise SystemExit(f"benchmarks: slower than before: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
