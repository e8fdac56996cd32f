"""The random tests, with one fresh seed after another: python tests/soak.py SEEDS [for pytest].

The first round runs every test, sees which of them draw random numbers, and takes their time. The
others run those alone: all that are quick, and the slower ones in turn. Whatever fails is shown
with what repeats it.
"""

import itertools
import math
import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

TESTS = Path(__file__).parent
SHARE = 0.02  # seconds of a round that one test may take on average
LONGEST_TURN = 100  # rounds


def seconds() -> float:
    """Of this process and its children, whatever else the machine does."""
    return sum(os.times()[:4])


def shared_generators() -> tuple[object, ...]:
    """Their states, to be compared."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), bytes(keys), rest, bytes(torch.get_rng_state())


class Round:
    """A plugin for one seed."""

    def __init__(self, number: int, turns: dict[str, int] | None) -> None:
        self.number = number
        self.turns = turns  # a test's is every so many rounds; None: all of them
        self.drawn: dict[str, int] = {}  # the turns of those that drew
        self.failures: dict[str, str] = {}
        self.passed = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.turns is not None:
            turns = [self.turns.get(item.nodeid) for item in items]
            due = [turn and (self.number + at) % turn == 0 for at, turn in enumerate(turns)]
            items[:] = itertools.compress(items, due)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before, start = shared_generators(), seconds()
        try:
            return (yield)
        finally:
            if "rng" in item.fixturenames or shared_generators() != before:
                turn = math.ceil((seconds() - start) / SHARE)
                self.drawn[item.nodeid] = min(max(turn, 1), LONGEST_TURN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = report.longreprtext


def main() -> None:
    count, *arguments = sys.argv[1:]
    if not any((TESTS.parent / a.split("::")[0]).exists() or Path(a).exists() for a in arguments):
        arguments.append(str(TESTS))
    turns, failed = None, 0
    for number in range(1, int(count) + 1):
        seed = str(secrets.randbelow(2**31))
        os.environ["MAXUNPOOL_SEED"] = seed
        start, this = seconds(), Round(number, turns)
        quiet = ("-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider")
        pytest.main([*quiet, *arguments], [this])
        turns = this.drawn if turns is None else turns
        failed += bool(this.failures) or not this.passed
        print(
            f"{number} of {count}, seed {seed}: {this.passed} passed, {len(this.failures)} failed "
            f"in {seconds() - start:.0f} s",
            flush=True,
        )
        for name, text in this.failures.items():
            print(f"\n{text}\n\nMAXUNPOOL_SEED={seed} pytest '{name}'\n", flush=True)
    print(f"{failed} of {count} seeds failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
