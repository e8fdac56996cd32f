"""The benchmarks check what they time, and fail if something became slower. No time is asserted."""

import dataclasses
import functools
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import maxunpool_cuda

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import contenders, data, networks, report, timing, training  # noqa: E402
from benchmarks.cases import BY_NAME, CASES, QUICK, Case  # noqa: E402
from benchmarks.contenders import CLONE, OURS, TORCH  # noqa: E402

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def few_rounds(poisoned_memory: None, monkeypatch: Patch) -> None:
    """Also allows algorithms that are not deterministic, as torch.nn's are."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(timing, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(data, "CACHE_BYTES", 0)


def shrunk(case: Case) -> Case:
    """The same call of a small tensor."""
    spatial = (min(n, 11 + case.padding) for n in case.shape[2:])
    return dataclasses.replace(case, family="any", layer="small", shape=(2, 3, *spatial))


OPERATORS = [case for case in CASES if case.operation != "network"]
DISTINCT = tuple(dict.fromkeys(map(shrunk, OPERATORS)))  # calls that differ in more than their size


def test_cases() -> None:
    assert len(BY_NAME) == len(CASES)
    assert {case.family for case in QUICK} == {case.family for case in CASES}
    case = Case("", "", (1, 1, 8, 8), index_dtype="uint8", operation="round-trip", direction="both")
    assert case.useful_bytes == 4 * (16 * (4 + 1) + 64 * 4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everyone_is_right(device: str) -> None:
    """A run raises unless every result is the definition's."""
    for case in DISTINCT:
        assert timing.run(case, device, 0)["results"].keys() >= {OURS, TORCH, CLONE}


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("name", [OURS, TORCH])
def test_a_wrong_result_is_refused(name: str, direction: str, monkeypatch: Patch) -> None:
    right = contenders.function_of

    def wrong(case: Case, called: str) -> contenders.Function:
        function = right(case, called)
        return function if called != name else lambda values, at: function(values * 2, at)

    monkeypatch.setattr(contenders, "function_of", wrong)
    with pytest.raises(RuntimeError, match=f"^{name} does not return the definition's result"):
        timing.run(dataclasses.replace(DISTINCT[0], direction=direction), "cpu", 0)


def test_rounds_rotate(monkeypatch: Patch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "abc"}
    timing.interleave(calls, timing.cpu_clock, seconds=100)
    assert "".join(order) == "abcbcacababc"


def saved(path: Path, ours: float = 1.0, clone: float = 1.0, torch_nn: float = 2.0) -> str:
    """The file of a run in which everyone's second case took these seconds."""
    rows: list[report.Row] = []
    for case, times in zip(CASES[:2], ((1.0, 1.0, 2.0), (ours, clone, torch_nn)), strict=True):
        whose = zip((OURS, CLONE, TORCH), times, strict=True)
        results = {who: {"quartiles": [seconds] * 3} for who, seconds in whose}
        rows.append({"name": case.name, "results": results})
    run = {"facts": {"device": "none", "torch": "2", "date": "2000-01-01"}, "rows": rows}
    file = report.save(run, path)
    assert report.load(file) == run
    return str(file)


BESIDE_CLONE_ALONE = {"ours": 1.2, "torch_nn": 2.4}
SLOWER_MACHINE = {"ours": 3.0, "clone": 3.0, "torch_nn": 6.0}


@pytest.mark.parametrize("now", [{}, {"ours": 1.2}, BESIDE_CLONE_ALONE, SLOWER_MACHINE])
def test_compare(now: dict[str, float], tmp_path: Path) -> None:
    files = ["--table", saved(tmp_path / "now", **now), "--compare", saved(tmp_path / "then")]
    slower = pytest.raises(SystemExit, match=r"slower than before: networks, backward$")
    with slower if now == {"ours": 1.2} else nullcontext():
        command.main(files)


SMALL_NETWORKS = [
    dataclasses.replace(case, shape=(2, 3, 40, 32))
    for case in CASES
    if re.fullmatch(r"network-\w+-b1-channels_last-.*", case.name)
]


@pytest.mark.parametrize("case", SMALL_NETWORKS, ids=lambda case: case.name)
def test_whole_networks(case: Case, monkeypatch: Patch) -> None:
    """A run raises if a network gets another layer in place of the maximum."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = {"torch.compile", f"{OURS}, torch.compile"}
    assert timing.run(case, "cpu", 0)["results"].keys() == {OURS, TORCH, *compiled}
    average = lambda model: model.__setitem__(1, torch.nn.AvgPool2d(3, 1, 1))  # noqa: E731
    monkeypatch.setattr(maxunpool_cuda, "replace_max_pooling", average)
    with pytest.raises(RuntimeError, match=f"^{OURS} does not return torch.nn's result of net"):
        networks.calls(case, "cpu")


def test_end_to_end(tmp_path: Path) -> None:
    few = ["--device", "cpu", "--quick", "--seconds", "0", "--filter", "^(tiny|sweep)"]
    arguments = [sys.executable, "-m", "benchmarks", *few, "--output", str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    results, printed = report.load(next(tmp_path.glob("*.json"))), " ".join(done.stdout.split())
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    assert len(results["rows"]) == 4
    for row in results["rows"]:
        time = row["results"][OURS]["quartiles"][1]
        assert f"| {row['name']} | {time * 1e6:.1f} |" in printed
    assert "| tiny | forward | 1 |" in printed


def test_peak_is_of_what_is_held_at_once() -> None:
    def call() -> None:
        torch.empty(1000)  # freed at once
        torch.empty(2**20)

    assert training.peak_bytes(call, "cpu") == 4 * 2**20


def test_training_step(tmp_path: Path, monkeypatch: Patch) -> None:
    widths = (16, 32)
    monkeypatch.setattr(training, "SegNet", functools.partial(training.SegNet, widths, (1, 1)))
    monkeypatch.setattr(training, "SHAPE", (1, 3, 32, 64))
    command.main(["--device", "cpu", "--training", "--output", str(tmp_path)])
    cells = sum(width * (32 * 64) // 4**stage for stage, width in enumerate(widths, 1))
    for row in report.load(next(tmp_path.glob("*-training.json")))["rows"]:
        assert row["indices"] == cells * {"torch.nn": 8, "int32": 4, "uint8": 1}[row["contender"]]
        assert row["values"] == cells * {"float32": 4, "bfloat16": 2}[row["dtype"]]
        assert row["peak"] > row["values"] + row["indices"]


TRITON = """
import sys, torch
sys.path.append(sys.argv[1])
from benchmarks import cases, data, triton_scatter
case = cases.Case("", "", (2, 3, 10, 12), dtype="bfloat16", index_dtype="int32")
given = data.make(case, "cpu")
output = triton_scatter.max_unpool(given.input, given.indices, (10, 12))
assert torch.equal(output, *data.definition(case, given))
"""


def test_triton_in_its_interpreter(monkeypatch: Patch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    subprocess.run([sys.executable, "-c", TRITON, str(ROOT)], check=True, timeout=120)
