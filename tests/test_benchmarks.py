"""Benchmarks check what they time, and see what became slower; documents say what was measured."""

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
from benchmarks import data, networks, report, timing  # noqa: E402
from benchmarks.cases import BY_NAME, CASES, Case  # noqa: E402
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


# The cases that differ in more than their size.
DISTINCT = [*{shrunk(case): None for case in CASES if case.operation != "network"}]


def test_cases() -> None:
    assert len(BY_NAME) == len(CASES)
    case = Case("", "", (1, 1, 8, 8), index_dtype="uint8", operation="round-trip", direction="both")
    assert case.useful_bytes == 4 * (16 * (4 + 1) + 64 * 4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everyone_is_right(device: str) -> None:
    """A run raises unless every contender returns the definition's result."""
    for case in DISTINCT:
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


def test_rounds_rotate(monkeypatch: Patch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)
    order: list[str] = []
    calls = {name: [functools.partial(order.append, name)] for name in "abc"}
    timing.interleave(calls, timing.cpu_clock, seconds=100)
    assert "".join(order) == "abcbcacababc"


def test_compare(tmp_path: Path) -> None:
    """A family is slower only if it takes longer both beside the clone and beside torch.nn."""

    def compare(*slower: str) -> None:
        now = report.load(RESULTS)
        for row in now["rows"]:
            if BY_NAME[row["name"]].family == "networks, backward":
                for name in slower:
                    row["results"][name]["quartiles"][1] *= 1.2
        command.main(["--table", str(report.save(now, tmp_path)), "--compare", str(RESULTS)])

    compare(OURS, TORCH)
    compare(OURS, CLONE)
    with pytest.raises(SystemExit, match=r"slower than before: networks, backward$"):
        compare(OURS)


@pytest.mark.parametrize(
    "name", ["squeezenet-b1-channels_last-inference", "vgg-b8-channels_last-training"]
)
def test_whole_networks(name: str, monkeypatch: Patch) -> None:
    """A run raises if a network gets another layer in place of the maximum."""
    case = dataclasses.replace(BY_NAME[f"network-{name}"], shape=(2, 3, 40, 32))
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
    printed = " ".join(capsys.readouterr().out.split())
    results = report.load(next(tmp_path.glob("*.json")))
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    assert len(results["rows"]) == 3
    for row in results["rows"]:
        time = geometric_mean([row["results"][OURS]["quartiles"][1]])
        for group in (row["name"], BY_NAME[row["name"]].family):
            assert f"| {group} | 1 | {time * 1e6:.1f} |" in printed


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


def test_documents_say_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The first table has some of the rows that are printed, the second has all."""
    report.show(report.load(RESULTS))
    printed, text = capsys.readouterr().out, (ROOT / "docs/performance.md").read_text()
    families, slower, *_ = re.findall(r"^\| (?:family|call) .*?\n\n", text, re.M | re.S)
    assert {*families.splitlines()} <= {*printed.splitlines()}
    assert slower in printed
    rows = report.load(RESULTS.with_stem(f"{RESULTS.stem}-training"))["rows"]
    peaks = {row["contender"]: row["peak"] / 2**20 for row in rows if row["dtype"] == "float32"}
    for page in (text, (ROOT / "README.md").read_text()):
        words = f"from {peaks['torch.nn']:.0f} MiB to {peaks['uint8']:.0f}"
        assert words in " ".join(page.split())
