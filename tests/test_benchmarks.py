"""The benchmarks check what they time, and fail if something became slower. No time is asserted."""

import dataclasses
import functools
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import maxunpool_cuda

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import contenders, data, networks, report, timing  # noqa: E402
from benchmarks.cases import BY_NAME, CASES, QUICK, Case  # noqa: E402
from benchmarks.contenders import CLONE, OURS, TORCH  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-2-threads.json"
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def few_rounds(poisoned_memory: None, monkeypatch: Patch) -> None:
    """Tests time few rounds, and allow torch.nn's nondeterministic algorithms."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(timing, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(data, "CACHE_BYTES", 0)


def shrunk(case: Case) -> Case:
    """The same call of a small tensor."""
    spatial = (min(n, 11 + case.padding) for n in case.shape[2:])
    return dataclasses.replace(case, family="any", layer="small", shape=(2, 3, *spatial))


OPERATORS = [case for case in CASES if case.operation != "network"]
DISTINCT = tuple(dict.fromkeys(map(shrunk, OPERATORS)))  # cases that differ in more than their size


def test_cases() -> None:
    assert len(BY_NAME) == len(CASES)
    assert {case.family for case in QUICK} == {case.family for case in CASES}
    case = Case("", "", (1, 1, 8, 8), index_dtype="uint8", operation="round-trip", direction="both")
    assert case.useful_bytes == 4 * (16 * (4 + 1) + 64 * 4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everyone_is_right(device: str) -> None:
    """A run raises unless every contender returns the definition's result."""
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


@pytest.mark.parametrize("times", [{OURS: 1.2}, {OURS: 1.2, TORCH: 1.2}, {OURS: 1.2, CLONE: 1.2}])
def test_compare(times: dict[str, float], tmp_path: Path) -> None:
    """A family is slower only if it takes longer both beside the clone and beside torch.nn."""
    now = report.load(RESULTS)
    for row in now["rows"]:
        if BY_NAME[row["name"]].family == "networks, backward":
            for name, factor in times.items():
                quartiles = row["results"][name]["quartiles"]
                row["results"][name]["quartiles"] = [factor * seconds for seconds in quartiles]
    file = report.save(now, tmp_path)
    slower = pytest.raises(SystemExit, match=r"slower than before: networks, backward$")
    with slower if times == {OURS: 1.2} else nullcontext():
        command.main(["--table", str(file), "--compare", str(RESULTS)])


@pytest.mark.parametrize(
    ("layer", "direction"), [("squeezenet-b1", "inference"), ("vgg-b1", "training")]
)
def test_whole_networks(layer: str, direction: str, monkeypatch: Patch) -> None:
    """A run raises if a network gets another layer in place of the maximum."""
    options = {"layout": "channels_last", "operation": "network", "direction": direction}
    case = Case("", layer, (2, 3, 40, 32), **options)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = {"torch.compile", f"{OURS}, torch.compile"}
    assert timing.run(case, "cpu", 0)["results"].keys() == {OURS, TORCH, *compiled}
    average = lambda model, _: model.__setitem__(1, torch.nn.AvgPool2d(3, 1, 1))  # noqa: E731
    monkeypatch.setattr(maxunpool_cuda, "replace_max_pooling", average)
    with pytest.raises(RuntimeError, match=f"^{OURS} does not return torch.nn's result of net"):
        networks.calls(case, "cpu")


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--device", "cpu", "--quick", "--seconds", "0", "--filter", "^tiny"]
    command.main([*few, "--output", str(tmp_path)])
    results, printed = (
        report.load(next(tmp_path.glob("*.json"))),
        " ".join(capsys.readouterr().out.split()),
    )
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    assert len(results["rows"]) == 3
    for row in results["rows"]:
        time, case = row["results"][OURS]["quartiles"][1], BY_NAME[row["name"]]
        assert f"| {case.name} | 1 | {time * 1e6:.1f} |" in printed
        assert f"| {case.family} | 1 | {time * 1e6:.1f} |" in printed


def test_peak_is_of_what_is_held_at_once() -> None:
    def call() -> None:
        torch.empty(1000)  # freed at once
        torch.empty(2**20)

    assert networks.peak_bytes(call, "cpu") == 4 * 2**20


def test_training_step(tmp_path: Path, monkeypatch: Patch) -> None:
    """The peak includes all indices, as nothing larger is made after the last of them."""
    small = functools.partial(networks.SegNet, (16, 32), (1, 1))
    monkeypatch.setitem(networks.NETWORKS, "segnet", small)
    monkeypatch.setattr(networks, "CAMVID", (1, 3, 32, 64))
    command.main(["--device", "cpu", "--training", "--output", str(tmp_path)])
    rows = report.load(next(tmp_path.glob("*-training.json")))["rows"]
    for theirs, int32, uint8 in (rows[:3], rows[3:]):
        indices = 16 * (32 * 64) // 4 + 32 * (32 * 64) // 16
        assert theirs["peak"] - int32["peak"] == 4 * indices
        assert int32["peak"] - uint8["peak"] == 3 * indices
