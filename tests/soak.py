"""The random tests, once for each of many fresh seeds: python tests/soak.py SEEDS [for pytest].

The first round runs every test and sees which of them draw random numbers; the others run those
alone. Whatever fails is shown with what repeats it.
"""

import os
import random
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

TESTS = Path(__file__).parent


def shared_generators() -> tuple[object, ...]:
    """Their states, to be compared."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), bytes(keys), rest, bytes(torch.get_rng_state())


class Round:
    """A plugin for one seed."""

    def __init__(self, chosen: set[str] | None) -> None:
        self.chosen = chosen  # None: all
        self.random: set[str] = set()
        self.failures: dict[str, str] = {}
        self.passed = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.chosen is not None:
            items[:] = [item for item in items if item.nodeid in self.chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = shared_generators()
        try:
            return (yield)
        finally:
            if "rng" in item.fixturenames or shared_generators() != before:
                self.random.add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = report.longreprtext
        elif report.passed and report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = report.longreprtext


def main() -> None:
    count, *arguments = sys.argv[1:]
    if not any((TESTS.parent / a.split("::")[0]).exists() or Path(a).exists() for a in arguments):
        arguments.append(str(TESTS))
    chosen, failed = None, 0
    for number in range(1, int(count) + 1):
        seed = str(secrets.randbelow(2**31))
        os.environ["MAXUNPOOL_SEED"] = seed
        start, this = time.monotonic(), Round(chosen)
        quiet = ("-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider")
        pytest.main([*quiet, *arguments], [this])
        chosen = this.random if chosen is None else chosen
        failed += bool(this.failures) or not this.passed
        print(
            f"{number} of {count}, seed {seed}: {this.passed} passed, {len(this.failures)} failed "
            f"in {time.monotonic() - start:.0f} s",
            flush=True,
        )
        for name, text in this.failures.items():
            print(f"\n{text}\n\nMAXUNPOOL_SEED={seed} pytest '{name}'\n", flush=True)
    print(f"{failed} of {count} seeds failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
