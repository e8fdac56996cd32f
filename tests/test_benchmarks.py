# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks check what they time; documents say what was measured."""

import dataclasses
import functools
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import maxunpool_cuda

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import contenders, data, pages, report, timing  # noqa: E402
from benchmarks.cases import CASES, QUICK, Case  # noqa: E402
from benchmarks.contenders import CLONE, FLAG_GEMS, OURS, TORCH, Call  # noqa: E402

pytestmark = pytest.mark.slow
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def few_rounds(deterministic_algorithms: None, monkeypatch: Patch) -> None:
    """Tests time few rounds of one set of data, and compile nothing.

    They allow torch.nn's nondeterministic algorithms.
    """
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(timing, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(data, "cache_bytes", lambda _: 0)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def shrunk(case: Case) -> Case:
    """The same call of a small tensor; its sizes stay multiples of an adaptive pool's."""
    most = 224 if case.operation == "adaptive" else 11 + case.padding
    spatial = (min(n, most) for n in case.shape[2:])
    return dataclasses.replace(case, layer="small", shape=(2, 3, *spatial), device="")


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


UNPOOL, POOL, VALUES = (
    next(case for case in DISTINCT if (case.operation, case.rank) == (operation, 2))
    for operation in ("unpool", "pool", "adaptive")
)


def test_a_rival_is_timed_if_it_is_right(monkeypatch: Patch) -> None:
    """FlagGems' functions, which need a GPU, are PyTorch's here; one is wrong."""
    operators = SimpleNamespace(
        max_unpool2d=torch.ops.aten.max_unpool2d,
        max_pool2d_with_indices=lambda x, *window: F.max_pool2d(x, *window, return_indices=True),
        adaptive_max_pool2d=lambda x, size: (F.adaptive_max_pool2d(x, size) + 1, None),
    )
    monkeypatch.setitem(sys.modules, "flag_gems.ops", operators)
    monkeypatch.setattr(contenders, "left_out", lambda _: "")
    for case in (UNPOOL, POOL):
        assert FLAG_GEMS in timing.run(case, "cpu", 0)["results"]
    row = timing.run(VALUES, "cpu", 0)
    assert row["results"].keys() >= {OURS, TORCH, CLONE}
    assert row["left out"].startswith(f"{FLAG_GEMS}: ")
    assert FLAG_GEMS not in row["results"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_all_data_have_the_layout(device: str, monkeypatch: Patch) -> None:
    """Of large tensors, whose planes move."""
    monkeypatch.setattr(data, "cache_bytes", lambda _: 2**23)
    case = Case("large", (2, 64, 96, 96), direction="both", layout="channels_last")
    rotation = data.rotation(case, device)
    assert len(rotation) > 2
    for tensors in rotation:
        for tensor in tensors:
            assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_rounds_rotate(monkeypatch: Patch) -> None:
    """Nobody is always the first, or takes the data that another has just read."""
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)
    order: list[str] = []
    calls = {a: [functools.partial(order.append, f"{a}{i}") for i in range(6)] for a in "abc"}
    timing.interleave(calls, dict.fromkeys("abc", timing.cpu_clock), seconds=100)
    assert " ".join(order) == "a0 b2 c4 b3 c5 a1 c0 a2 b4 a3 b5 c1"


def test_end_to_end(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three cases one is wrong, one is too large for the memory, and one is timed."""
    wrong, large, right = islice((case for case in QUICK if case.returns_values), 3)
    check = timing.check

    def checked(name: str, call: Call, case: Case, one: data.Data) -> None:
        if case == large:
            raise torch.OutOfMemoryError
        check(name, call, case, one._replace(input=-one.input) if case == wrong else one)

    monkeypatch.setattr(timing, "check", checked)
    names = "|".join(case.name for case in (wrong, large, right))
    few = ["time", "--device", "cpu", "--seconds", "0", "--filter", f"^({names})$"]
    with pytest.raises(SystemExit, match=f"^benchmarks: failed: {wrong.name}$"):
        command.main([*few, "--output", str(tmp_path)])
    results = report.load(tmp_path / "time-cpu.json")
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    printed = " ".join(capsys.readouterr().out.split())
    assert f"failed: {wrong.name}: RuntimeError: " in printed
    assert f"left out: {large.name}: needs more memory" in printed
    assert f"| {right.name} | {report.median(results['rows'][2]) * 1e6:.1f} |" in printed
    assert "call, layout" not in printed  # a table without a row


@pytest.mark.parametrize("page", sorted({table.page for table in pages.TABLES}))
def test_documents_say_what_was_measured(page: str) -> None:
    """Each table agrees with the results, and is found once."""
    text = (ROOT / page).read_text()
    assert text == pages.rewritten(page), "python -m benchmarks documents --write mends it"
    tables = [table for table in pages.TABLES if table.page == page]
    assert [table.name for table in tables if len(re.findall(table.pattern, text)) != 1] == []
    assert text.count("<!-- measured: ") == len(tables)
