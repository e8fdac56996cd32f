# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks check what they time, and see what became slower; documents say what was measured."""

import dataclasses
import functools
import re
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch

import maxunpool_cuda

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import (  # noqa: E402
    architectures,
    comparisons,
    contenders,
    fallback,
    memory,
    networks,
    pages,
    report,
    timing,
    training,
)
from benchmarks.cases import BY_NAME, CASES, QUICK, Case  # noqa: E402
from benchmarks.contenders import CLONE, INDUCTOR, OURS, TORCH  # noqa: E402

pytestmark = pytest.mark.slow
RESULTS = ROOT / "benchmarks" / "results" / "operators.json"
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
@pytest.mark.parametrize("name", [OURS, TORCH])
def test_a_wrong_result_is_refused(name: str, case: Case, monkeypatch: Patch) -> None:
    """Of unpooling, forward, backward and both."""
    functions = maxunpool_cuda.functional if name == OURS else torch.nn.functional
    right = functions.max_unpool2d
    wrong = lambda values, *rest, **named: right(values * 2, *rest, **named)  # noqa: E731
    monkeypatch.setattr(functions, "max_unpool2d", wrong)
    with pytest.raises(RuntimeError, match=f"^{name} does not return the definition's result"):
        timing.run(case, "cpu", 0)


@pytest.mark.parametrize("case", fallback.CASES, ids=lambda case: case.name)
def test_workarounds_return_torch_nns_results(case: fallback.Case) -> None:
    """Everyone's result and gradient are compared before they are timed."""
    small = dataclasses.replace(case, shape=(*case.shape[:1], 2, *[8] * len(case.shape[2:])))
    assert fallback.row_of(small, threads=1, seconds=0)["results"].keys() == case.functions.keys()


def test_a_network_with_another_layer_is_refused(monkeypatch: Patch) -> None:
    case = BY_NAME["network-squeezenet-b1-channels_last-inference"]
    case = dataclasses.replace(case, shape=(2, 3, 40, 32))
    compiled = {INDUCTOR, f"{OURS}, {INDUCTOR}"}
    assert timing.run(case, "cpu", 0)["results"].keys() == {OURS, TORCH, *compiled}
    average = lambda model, **_: model.__setitem__(1, torch.nn.AvgPool2d(3, 1, 1))  # noqa: E731
    monkeypatch.setattr(maxunpool_cuda, "convert_max_pooling", average)
    with pytest.raises(RuntimeError, match=f"^{OURS} does not return torch.nn's result of net"):
        networks.calls(case, "cpu")


def test_a_comparison_of_another_result_is_refused() -> None:
    calls = {TORCH: lambda: (torch.ones(2),), OURS: lambda: (torch.tensor([1.0, 1.1]),)}
    comparisons.require_equal(calls, "ones", share=0.1)
    with pytest.raises(RuntimeError, match=r"^maxunpool_cuda does not return torch.nn's .* ones$"):
        comparisons.require_equal(calls, "ones")


def test_rounds_rotate(monkeypatch: Patch) -> None:
    """Nobody is always the first, or takes the data that another has just read."""
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)
    order: list[str] = []
    calls = {a: [functools.partial(order.append, f"{a}{i}") for i in range(6)] for a in "abc"}
    timing.interleave(calls, dict.fromkeys("abc", timing.cpu_clock), seconds=100)
    assert " ".join(order) == "a0 b2 c4 b3 c5 a1 c0 a2 b4 a3 b5 c1"


def test_compare(tmp_path: Path) -> None:
    """A family is slower only if it takes longer both beside the clone and beside torch.nn."""

    def compare(*slower: str) -> None:
        now = report.load(RESULTS)
        for row in now["rows"]:
            if BY_NAME[row["name"]].family == "unpooling, networks, backward":
                for name in slower:
                    row["results"][name]["quartiles"][1] *= 1.2
        command.main(["--table", str(report.save(now, tmp_path)), "--compare", str(RESULTS)])

    compare(OURS, TORCH)
    compare(OURS, CLONE)
    with pytest.raises(SystemExit, match=r"slower than before: unpooling, networks, backward$"):
        compare(OURS)


def test_end_to_end(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three cases one is wrong, one is too large for the memory, and one is timed."""
    forward, backward, both = (case for case in QUICK if case.name.startswith("tiny"))
    right, needed = contenders.functions, memory.bytes_needed

    def functions(case: Case, device: str) -> dict[str, contenders.Function]:
        able = right(case, device)
        if case == forward:
            able["liar"] = lambda *tensors: (2 * able[OURS](*tensors)[0],)
        return able

    def bytes_needed(case: Case, *others: Any) -> int:
        return 2**41 if case == backward else needed(case, *others)

    monkeypatch.setattr(contenders, "functions", functions)
    monkeypatch.setattr(memory, "bytes_needed", bytes_needed)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2**40)
    few = ["--device", "cpu", "--quick", "--seconds", "0", "--filter", "^tiny"]
    with pytest.raises(SystemExit, match=f"^benchmarks: failed: {forward.name}$"):
        command.main([*few, "--output", str(tmp_path)])
    results = report.load(next(tmp_path.glob("*.json")))
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    wrong = f"RuntimeError: liar does not return the definition's result of {forward.name}"
    assert [row.get("failed") for row in results["rows"]] == [wrong, None, None]
    assert "left out" in results["rows"][1]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Failed: - {forward.name}: {wrong}" in printed
    assert f"Left out: - {backward.name}: needs 2048.0 GiB, but 1024.0 are free" in printed
    # In microseconds before the mean, as the table: 20.85 may be rounded up or down.
    time = geometric_mean([report.median(results["rows"][2]) * 1e6])
    for group in (both.name, both.family):
        assert f"| {group} | 1 | {time:.1f} |" in printed


def airbench() -> training.Training:
    """The training of a smaller network, whose activation keeps no output for its gradient."""
    first = next(each for each in training.TRAININGS if each.network == "airbench94")
    make = functools.partial(architectures.airbench, (4, 6, 8))
    return dataclasses.replace(first, make=make, shape=(2, 3, 32, 32))


def bytes_of_pools(model: torch.nn.Module, images: torch.Tensor) -> int:
    """What conversion saves: 7 bytes of each index, and the float32 inputs of the pools."""
    found = []

    def note(_: torch.nn.Module, given: tuple[torch.Tensor], made: torch.Tensor) -> None:
        found.append(7 * made.numel() + 4 * given[0].numel())

    for module in model.modules():
        if isinstance(module, torch.nn.MaxPool2d):
            module.register_forward_hook(note)
    model(images)
    return sum(found)


def test_memory_of_training_steps(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = airbench()
    monkeypatch.setattr(training, "TRAININGS", (small,))
    command.main(["--device", "cpu", "--training", "--output", str(tmp_path)])
    results = report.load(next(tmp_path.glob("*-training.json")))
    before, after = results["rows"][:2]
    saved = before["saved"] - after["saved"]
    assert saved == bytes_of_pools(small.make(), torch.randn(small.shape))
    assert 0 < after["peak"] <= before["peak"]  # the peak may come before the pools
    printed = " ".join(capsys.readouterr().out.split())
    assert "| airbench94, GELU, 2x3x32x32, float32 |" in printed
    assert f"| {-saved / before['saved']:.1%} |" in printed


def test_a_step_with_another_result_is_refused(monkeypatch: Patch) -> None:
    average = lambda model, **_: model.__setitem__(3, torch.nn.AvgPool2d(2))  # noqa: E731
    monkeypatch.setattr(maxunpool_cuda, "convert_max_pooling", average)
    with pytest.raises(RuntimeError, match=r"^maxunpool_cuda does not return .* of airbench94$"):
        training.rows_of(airbench(), "float32", "cpu")


PARTS = (*pages.TABLES, *pages.SENTENCES)  # of the documents: what was measured


@pytest.mark.parametrize("page", sorted({part.page for part in PARTS}))
def test_documents_say_what_was_measured(page: str) -> None:
    """All that has results agrees with them, wherever lines break."""
    text = (ROOT / page).read_text()
    assert text.split() == pages.rewritten(page).split(), "python -m benchmarks --write mends it"


def test_each_figure_is_found_once() -> None:
    """Also of results that are not there yet."""
    found = {part: re.findall(part.pattern, (ROOT / part.page).read_text()) for part in PARTS}
    assert [f"{part.page}: {part.key}" for part, all_ in found.items() if len(all_) != 1] == []


def test_each_table_of_results_has_a_name() -> None:
    """A comment of a page that names a table is not forgotten in the list."""
    marked = [
        (str(page.relative_to(ROOT)), name)
        for page in ROOT.glob("docs/*.md")
        for name in re.findall("<!-- measured: (.*) -->", page.read_text())
    ]
    assert sorted(marked) == sorted((table.page, table.name) for table in pages.TABLES)


def test_speeds_are_means_of_what_was_measured() -> None:
    """Of one kind of call, with the default dtypes and layout."""
    means = []
    for of_kind in ("pool-", "(?!pool-|round-trip-)"):
        name = re.compile(f"{of_kind}.*-float32-int64-contiguous-forward")
        rows = [row["results"] for row in report.load(RESULTS)["rows"] if name.match(row["name"])]
        speeds = [row[TORCH]["quartiles"][1] / row[OURS]["quartiles"][1] for row in rows]
        means.append(f"{geometric_mean(speeds):.1f}")
    assert pages.speeds(report.load(RESULTS)) == means


def test_no_call_takes_8_times_as_long_without_kernels() -> None:
    """Nor does its gradient keep more than torch.nn's."""
    results = report.load(pages.RESULTS / "fallback.json")
    assert float(fallback.slower(results)[1]) < 8
    assert all(fallback.times(row, OURS, "kept") <= 1 for row in results["rows"])


def test_comparisons(monkeypatch: Patch) -> None:
    """Everyone returns the same, and the tables and sentences of the pages are made of them."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(comparisons, "MODELS", dict([*comparisons.MODELS.items()][:1]))
    measured = comparisons.measure(0)
    of_comparisons = [part for part in PARTS if part.results == "comparisons"]
    for part in of_comparisons:
        made = part.rewrite((ROOT / part.page).read_text(), measured)
        assert re.search(part.pattern, made)
        assert "None" not in re.search(part.pattern, made)[0]
