"""The benchmarks check what they time, and fail if something became slower. No time is asserted."""

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import contenders, data, report, timing, training  # noqa: E402
from benchmarks.cases import BY_NAME, CASES, QUICK, Case  # noqa: E402
from benchmarks.contenders import CLONE, OURS, TORCH, Function  # noqa: E402
from benchmarks.segnet import SegNet  # noqa: E402

Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]


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


DISTINCT = tuple(dict.fromkeys(map(shrunk, CASES)))  # calls that differ in more than their size


def test_cases() -> None:
    assert len(BY_NAME) == len(CASES) == 403
    assert {case.family for case in QUICK} == {case.family for case in CASES}
    case = Case("", "", (1, 1, 8, 8), index_dtype="uint8", operation="round-trip", direction="both")
    assert case.useful_bytes == 4 * (16 * (4 + 1) + 64 * 4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everyone_is_right(device: str) -> None:
    """A run raises unless every result is the definition's."""
    for case in DISTINCT:
        results = timing.run(case, device, 0)["results"]
        assert results.keys() >= {OURS, TORCH, CLONE}
        for found in results.values():
            first, median, third = found["quartiles"]
            assert 0 < first <= median <= third


@pytest.mark.parametrize("name", [OURS, TORCH])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_a_wrong_result_is_refused(name: str, direction: str, monkeypatch: Patch) -> None:
    function_of = contenders.CONTENDERS[name]

    def spoilt(case: Case, device: str) -> Function:
        return lambda values, indices: function_of(case, device)(values * 2, indices)

    monkeypatch.setitem(contenders.CONTENDERS, name, spoilt)
    case = dataclasses.replace(DISTINCT[0], direction=direction)
    with pytest.raises(RuntimeError, match=f"^{name} does not return the definition's result"):
        timing.run(case, "cpu", 0)


def test_definition_if_windows_share_a_maximum() -> None:
    case = Case("", "", (1, 1, 5), kernel_size=3, stride=1, direction="both")
    indices = torch.tensor([[[2, 2, 2]]])
    given = data.Data(torch.tensor([[[7.0, 8, 9]]]), indices, indices, torch.ones(1, 1, 5))
    output, gradient = data.definition(case, given)
    assert output.tolist() == [[[0, 0, 9, 0, 0]]]
    assert gradient.tolist() == [[[0, 0, 1]]]
    assert data.definition(case, given, to_losers=True)[1].tolist() == [[[1, 1, 1]]]


def test_rounds_rotate(monkeypatch: Patch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "abc"}
    timing.interleave(calls, timing.cpu_clock, seconds=100)
    assert "".join(order) == "abcbcacababc"


def row_of(name: str, ours: float = 1.0, clone: float = 1.0, torch_nn: float = 2.0) -> report.Row:
    seconds = {OURS: ours, CLONE: clone, TORCH: torch_nn}
    return {"name": name, "results": {n: {"quartiles": [s, s, s]} for n, s in seconds.items()}}


@pytest.mark.parametrize(
    ("now", "fails"),
    [
        ({}, False),
        ({"ours": 1.2}, True),
        ({"ours": 1.2, "torch_nn": 2.4}, False),  # slower beside a clone alone
        ({"ours": 3.0, "clone": 3.0, "torch_nn": 6.0}, False),  # a slower machine
    ],
)
def test_compare(now: dict[str, float], fails: bool, tmp_path: Path) -> None:
    first, second = (case.name for case in CASES[:2])  # forward, backward
    arguments = []
    for option, row in (("--table", row_of(second, **now)), ("--compare", row_of(second))):
        facts = {"device": option, "torch": "2", "date": "2000-01-01"}
        results = {"facts": facts, "rows": [row_of(first), row]}
        path = report.save(results, tmp_path)
        assert report.load(path) == results
        arguments += [option, str(path)]
    if fails:
        with pytest.raises(SystemExit, match=r"slower than before: networks, backward$"):
            command.main(arguments)
    else:
        command.main(arguments)


def test_end_to_end(tmp_path: Path) -> None:
    few = ["--device", "cpu", "--quick", "--seconds", "0", "--filter", "^(tiny|sweep)"]
    arguments = [sys.executable, "-m", "benchmarks", *few, "--output", str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    results = report.load(path)
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    assert len(results["rows"]) == 4
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for row in results["rows"]:
        time = f"{row['results'][OURS]['quartiles'][1] * 1e6:.1f}"
        assert any(line.startswith(f"| {row['name']} | {time} |") for line in lines)
    assert any(line.startswith("| tiny | forward | 1 |") for line in lines)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("amd-epyc-2-threads", "| networks | forward | 8 | 0.79 | 1.51 | 1.55 | 1.89 |"),
        ("amd-epyc-2-threads-training", "| float32 | uint8 | 20.1 | 5.0 | 864.8 |"),
    ],
)
def test_committed_results_are_shown(file: str, line: str, capsys: Captured) -> None:
    command.main(["--table", str(ROOT / "benchmarks" / "results" / f"{file}.json")])
    assert line in " ".join(capsys.readouterr().out.split())


def test_peak_is_of_the_call_alone() -> None:
    kept = [torch.empty(10_000)]

    def call() -> Tensor:
        kept.clear()
        held = torch.empty(100), torch.empty(50)
        del held
        return torch.empty(120)

    assert training.peak_bytes(call, "cpu") == 600


def test_training_step(tmp_path: Path, monkeypatch: Patch) -> None:
    widths = (16, 32)
    monkeypatch.setattr(training, "SegNet", functools.partial(SegNet, widths, (1, 1)))
    monkeypatch.setattr(training, "SHAPE", (1, 3, 32, 64))
    command.main(["--device", "cpu", "--training", "--output", str(tmp_path)])
    cells = sum(width * (32 * 64) // 4**stage for stage, width in enumerate(widths, 1))
    for row in report.load(next(tmp_path.glob("*-training.json")))["rows"]:
        assert row["indices"] == cells * {"torch.nn": 8, "int32": 4, "uint8": 1}[row["contender"]]
        assert row["values"] == cells * {"float32": 4, "bfloat16": 2}[row["dtype"]]
        assert row["peak"] > row["values"] + row["indices"]


TRITON_SCRIPT = """
import sys, torch
sys.path.append(sys.argv[1])
from benchmarks import cases, data, triton_scatter
case = cases.Case("", "", (2, 3, 10, 12), dtype="bfloat16", index_dtype="int32")
given = data.make(case, "cpu")
output = triton_scatter.max_unpool(given.input, given.indices, (10, 12))
assert torch.equal(output, *data.definition(case, given))
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_triton_in_its_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    arguments = [sys.executable, "-c", TRITON_SCRIPT, str(ROOT)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
