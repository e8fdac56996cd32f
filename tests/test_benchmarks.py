# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks check what they time; documents say what was measured."""

import dataclasses
import functools
import re
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch

import maxunpool_cuda

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import memory, pages, report, timing  # noqa: E402
from benchmarks.cases import CASES, QUICK, Case  # noqa: E402
from benchmarks.contenders import CLONE, OURS, TORCH  # noqa: E402

pytestmark = pytest.mark.slow
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def few_rounds(deterministic_algorithms: None, monkeypatch: Patch) -> None:
    """Tests time few rounds of one set of data, and compile nothing.

    They allow torch.nn's nondeterministic algorithms.
    """
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(timing, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(memory, "cache_bytes", lambda _: 0)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def shrunk(case: Case) -> Case:
    """The same call of a small tensor."""
    spatial = (min(n, 11 + case.padding) for n in case.shape[2:])
    size = {"shape": (2, 3, *spatial), "device": ""}
    return dataclasses.replace(case, family="any", layer="small", **size)


# The cases that differ in more than their size.
DISTINCT = [*{shrunk(case): None for case in CASES if case.operation != "network"}]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everyone_is_right(device: str, subtests: pytest.Subtests) -> None:
    """A run raises unless every contender returns the definition's result."""
    for case in DISTINCT:
        with subtests.test(str(case)):
            assert timing.run(case, device, 0)["results"].keys() >= {OURS, TORCH, CLONE}


@pytest.mark.parametrize("case", DISTINCT[:3], ids=lambda case: case.direction)
def test_a_wrong_result_is_refused(case: Case, monkeypatch: Patch) -> None:
    """Of unpooling, forward, backward and both."""
    right = maxunpool_cuda.functional.max_unpool2d
    wrong = lambda values, *rest, **named: right(values * 2, *rest, **named)  # noqa: E731
    monkeypatch.setattr(maxunpool_cuda.functional, "max_unpool2d", wrong)
    with pytest.raises(RuntimeError, match=f"^{OURS} does not return the definition's result"):
        timing.run(case, "cpu", 0)


def test_rounds_rotate(monkeypatch: Patch) -> None:
    """Nobody is always the first, or takes the data that another has just read."""
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)
    order: list[str] = []
    calls = {a: [functools.partial(order.append, f"{a}{i}") for i in range(6)] for a in "abc"}
    timing.interleave(calls, dict.fromkeys("abc", timing.cpu_clock), seconds=100)
    assert " ".join(order) == "a0 b2 c4 b3 c5 a1 c0 a2 b4 a3 b5 c1"


def test_end_to_end(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three cases one is wrong, one is too large for the memory, and one is timed."""
    wrong, large, right = (case for case in QUICK if case.name.startswith("tiny"))
    monkeypatch.setattr(timing, "is_right", lambda call, case, *_: case != wrong)
    monkeypatch.setattr(memory, "bytes_needed", lambda case, *_: 2**41 if case == large else 0)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2**40)
    few = ["--device", "cpu", "--quick", "--seconds", "0", "--filter", "^tiny"]
    with pytest.raises(SystemExit, match=f"^benchmarks: failed: {wrong.name}$"):
        command.main([*few, "--output", str(tmp_path)])
    results = report.load(next(tmp_path.glob("*.json")))
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Failed: - {wrong.name}: RuntimeError: " in printed
    assert f"Left out: - {large.name}: needs 2048.0 GiB, but 1024.0 are free" in printed
    # In microseconds before the mean, as the table: 20.85 may be rounded up or down.
    time = geometric_mean([report.median(results["rows"][2]) * 1e6])
    assert f"| {right.name} | 1 | {time:.1f} |" in printed


PARTS = (*pages.TABLES, *pages.SENTENCES)  # of the documents: what was measured


@pytest.mark.parametrize("page", sorted({part.page for part in PARTS}))
def test_documents_say_what_was_measured(page: str) -> None:
    """All that has results agrees with them, wherever lines break. Each figure is found once."""
    text = (ROOT / page).read_text()
    assert text.split() == pages.rewritten(page).split(), "python -m benchmarks --write mends it"
    of_page = [part for part in PARTS if part.page == page]
    assert [part.key for part in of_page if len(re.findall(part.pattern, text)) != 1] == []
