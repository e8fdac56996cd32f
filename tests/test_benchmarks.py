"""The benchmarks run, check what they time, and say what they predict. No time is asserted."""

import dataclasses
import functools
import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import (  # noqa: E402
    cases,
    contenders,
    data,
    memory,
    model,
    report,
    runner,
    timing,
    training,
)
from benchmarks.cases import BY_NAME, CASES, Case  # noqa: E402
from benchmarks.contenders import CLONE, COMPILED, ONNX, OURS, TORCH, TRITON  # noqa: E402
from benchmarks.segnet import SegNet  # noqa: E402
from benchmarks.show import has  # noqa: E402

FACTS = {"device": "none", "torch": "2", "date": "2000-01-01"}
CPU = ["--device", "cpu"]
Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def any_algorithms(poisoned_memory: None) -> None:
    """As the benchmarks run: torch.nn's raises under deterministic algorithms."""
    torch.use_deterministic_algorithms(False)


def shrunk(case: Case) -> Case:
    """The same call of a small tensor."""
    spatial = (min(n, 11 + case.padding) for n in case.shape[2:])
    return dataclasses.replace(case, family="any", layer="small", shape=(2, 3, *spatial))


DISTINCT = tuple(dict.fromkeys(map(shrunk, CASES)))  # calls that differ in more than their size


def test_cases_are_valid() -> None:
    """And those that say most come first."""
    assert len(BY_NAME) == len(CASES) == 451
    assert len(cases.QUICK) == 58
    families = list(dict.fromkeys(case.family for case in CASES))
    assert (*families[:3], families[-1]) == ("networks", "2x2/2", "bottom", "sweep")
    for case in CASES:
        assert case.rank in (1, 2, 3), case
        assert min(case.pooled) > 0, case
        assert 2 * case.padding <= case.kernel_size, case
        assert case.layout == "contiguous" or case.rank > 1, case
        for size, cells in zip(case.shape[2:], case.pooled[2:], strict=True):
            default = (cells - 1) * case.stride - 2 * case.padding + case.kernel_size
            assert abs(size - default) < case.stride, case


@pytest.mark.parametrize("operation", ["unpool", "pool", "round-trip"])
@pytest.mark.parametrize(
    ("dtype", "sizes"), [("float32", (28, 24, 21)), ("bfloat16", (18, 14, 11))]
)
def test_predicted_bytes(operation: cases.Operation, dtype: str, sizes: tuple[int, ...]) -> None:
    for index_dtype, size in zip(cases.INDEX_DTYPES, sizes, strict=True):
        case = Case("", "", (1, 1, 8, 8), dtype=dtype, index_dtype=index_dtype, operation=operation)
        assert model.floor_bytes(case, "cuda") == model.useful_bytes(case)
        assert model.useful_bytes(case) == size * len(model.operators(case)) * case.cells


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_a_row_that_no_window_holds_is_not_touched(layout: str) -> None:
    odd, even = (Case("", "", (2, 3, rows, 20), layout=layout) for rows in (15, 14))
    assert odd.pooled == even.pooled
    touched = 14 / 15 * model.touched(even, "cuda")
    assert model.touched(odd, "cuda") == pytest.approx(touched)


def test_gradient_of_the_definition() -> None:
    """Three windows hold one maximum: the last of them has the gradient."""
    case = Case("", "", (1, 1, 5), kernel_size=3, stride=1, direction="both")
    indices = torch.tensor([[[2, 2, 2]]])
    given = data.Data(torch.full((1, 1, 3), 7.0), indices, indices, torch.arange(5.0).view(1, 1, 5))
    output, gradient = data.definition(case, given)
    assert output.tolist() == [[[0, 0, 7, 0, 0]]]
    assert gradient.tolist() == [[[0, 0, 2]]]
    assert data.definition(case, given, to_losers=True)[1].tolist() == [[[2, 2, 2]]]


def results_of(case: Case, *peers: str, device: str = "cpu") -> dict[str, Any]:
    return runner.run(case, device, peers, 0)["results"]


def sabotaged(case: Case, copies: Sequence[data.Data]) -> contenders.Prepared:
    """One element is wrong."""

    def spoilt(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        *others, last = results
        last = last.clone(memory_format=torch.contiguous_format)
        last.view(-1)[-1] += 1
        return (*others, last)

    return contenders.Prepared(contenders.ours(case, copies).calls, spoilt)


def broken(case: Case, copies: Sequence[data.Data]) -> contenders.Prepared:
    raise RuntimeError("no such call\nwith details")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (number % 20 > 0), id=case.name)
        for number, case in enumerate(DISTINCT)
    ],
)
def test_checks(case: Case, device: str, monkeypatch: Patch) -> None:
    """Everyone's result is as defined; one element that is not is found; a failure is a reason."""
    monkeypatch.setattr(memory, "cache_bytes", lambda device: 0)  # one copy is enough
    monkeypatch.setattr(timing, "FEWEST_ROUNDS", 2)
    for spoiler in (sabotaged, broken):
        monkeypatch.setitem(contenders.CONTENDERS, spoiler.__name__, spoiler)
    peers = [TORCH, *[ONNX] * has("onnxruntime"), *[TRITON] * has("triton")]
    results = results_of(case, *peers, "sabotaged", "broken", device=device)
    assert results.pop("sabotaged").keys() == {"agreement", "reason"}
    assert results.pop("broken") == {"reason": "RuntimeError: no such call"}
    able = {peer for peer in peers if contenders.is_able(peer, case, device)}
    assert results.keys() == {OURS, CLONE, *able}
    assert all(result.keys() >= {"quartiles", "peak_bytes"} for result in results.values())
    # Losers get torch.nn's gradient too, of the only windows that share maxima. Dilated by two with
    # a stride of three, windows have no element in common.
    losers = case.overlapping and case.dilation == 1 and case.operation != "pool"
    agreement = {TORCH: "differs" if losers and case.direction != "forward" else "equal"}
    for name in results.keys() - {CLONE}:
        assert results[name]["agreement"] == agreement.get(name, "equal"), name


@pytest.mark.parametrize(
    ("peer", "device", "count"),
    [(TORCH, "cuda", 451), (ONNX, "cpu", 48), (ONNX, "cuda", 0), (TRITON, "cuda", 81)],
)
def test_who_is_able(peer: str, device: str, count: int) -> None:
    assert sum(contenders.is_able(peer, case, device) for case in CASES) == count


def test_own_wrong_result_fails(monkeypatch: Patch) -> None:
    monkeypatch.setitem(contenders.CONTENDERS, OURS, sabotaged)
    row = {"name": CASES[0].name, "results": results_of(shrunk(CASES[0]))}
    monkeypatch.setattr(command, "timed", lambda *_: {"rows": [row]})
    with pytest.raises(SystemExit, match=f"not the definition's result: {CASES[0].name}"):
        command.main(CPU)
    monkeypatch.setitem(contenders.CONTENDERS, OURS, broken)
    with pytest.raises(RuntimeError, match="no such call"):
        results_of(shrunk(CASES[0]))


@pytest.mark.parametrize("with_host", [False, True])
def test_order_of_the_cuda_clock(with_host: bool, monkeypatch: Patch) -> None:
    """The device sleeps, or has nothing left to do, before what is timed."""
    cuda = Mock()
    cuda.Event().elapsed_time.return_value = 3.0
    for name in ("Event", "_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    cuda.reset_mock()
    assert timing.cuda_clock(cuda.call, with_host) == 0.003
    before, *order, _ = [name for name, *_ in cuda.mock_calls if name != "Event"]
    assert before == ("synchronize" if with_host else "_sleep")
    assert order == ["Event().record", "call", "Event().record", "Event().synchronize"]


def test_rounds_rotate(monkeypatch: Patch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 4)
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "abc"}
    found = timing.interleave(calls, timing.cpu_clock, seconds=100)
    assert "".join(order) == "aabbcc" + "abcbcacababc"
    assert all(sorted(quartiles) == quartiles for quartiles in found.values())


def test_copies_exceed_the_cache() -> None:
    given = data.make(shrunk(CASES[0]), "cpu")
    copies = data.rotation(given, cache_bytes=3 * given.bytes_read)
    assert len({copy.input.data_ptr() for copy in copies}) == len(copies) == 7
    assert len(data.rotation(given, cache_bytes=2**30)) == data.MOST_COPIES


def test_garbage_of_before_is_no_memory_of_a_call() -> None:
    def garbage() -> None:
        kept: list[Any] = [torch.empty(10_000)]
        kept.append(kept)  # a cycle, which waits for the garbage collector

    def call() -> Tensor:
        gc.collect()
        return torch.empty(100)

    memory.peak_bytes(garbage, "cpu")
    assert memory.peak_bytes(call, "cpu") == 400


def test_end_to_end(tmp_path: Path) -> None:
    """As ``make bench``."""
    few = ["--quick", "--seconds", "0", "--filter", "^(tiny|sweep-1024|sweep-2048)"]
    arguments = [sys.executable, "-m", "benchmarks", *CPU, *few, "--output", str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = report.load(next(tmp_path.glob("*.json")))
    assert results["facts"].keys() >= {"device", "cores", "torch", "python", "date", "build_info"}
    assert (results["settings"]["seconds"], results["left_out"], len(results["rows"])) == (0, 0, 5)
    # 2*8*16*16 float32 outputs, and nothing beside them.
    assert results["rows"][0]["results"][OURS]["peak_bytes"] == 2 * 8 * 16 * 16 * 4
    out = "\n".join(" ".join(line.split()) for line in done.stdout.splitlines())
    for number, row in enumerate(results["rows"], 1):
        assert {OURS, CLONE, TORCH} <= row["results"].keys()
        assert f"{number}/5 {row['name']}\n" in out
        assert f"\n| {row['name']} | " in out
    assert "\n| tiny | forward | 1 |" in out
    assert "\n| sweep | forward | 2 |" in out
    pictures = [*tmp_path.glob("*-sweep.png")]
    assert len(pictures) == has("matplotlib")
    assert all(p.stat().st_size > 10_000 and f"Written: {p}" in out for p in pictures)


def row_of(name: str, **seconds: float) -> report.Row:
    """As the runner's, without its work."""
    names = {"ours": OURS, "clone": CLONE, "torch": TORCH}
    one = {"agreement": "equal", "peak_bytes": 1}
    found = {names[n]: {**one, "quartiles": [s, s, s]} for n, s in seconds.items()}
    return {"name": name, "results": found}


THEN = {"ours": 1.0, "clone": 1.0, "torch": 2.0}


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt, ZeroDivisionError])
def test_what_was_timed_is_kept(
    stop: type[BaseException] | None, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """On disk after each case, and shown, whatever stops it: with None, the limit."""
    seen: list[str] = []

    def run(case: Case, *_: Any) -> report.Row:
        if seen:
            assert len(report.load(next(tmp_path.glob("*.json")))["rows"]) == len(seen)
        if len(seen) == 2 and stop:
            raise stop
        seen.append(case.name)
        return row_of(case.name, **THEN)

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: 3.0 * len(seen)))
    arguments = [*CPU, "--limit", "1000" if stop else "5", "--output", str(tmp_path)]
    if stop:
        with pytest.raises(stop):
            command.main(arguments)
    else:
        command.main(arguments)
    results = report.load(next(tmp_path.glob("*.json")))
    assert [row["name"] for row in results["rows"]] == seen == [case.name for case in CASES[:2]]
    assert results["left_out"] == 449
    assert " 449 cases are left out." in capsys.readouterr().out


def test_half_a_report_replaces_none(tmp_path: Path, monkeypatch: Patch) -> None:
    """Killed before the new one takes its place, the old one is there."""
    path = tmp_path / "report.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.save({"facts": FACTS, "rows": []}, path)
    assert path.read_text() == "old"


def test_too_large_is_said(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """It is in the table, with the reason, and no point of the plot."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    rows = [runner.run(CASES[-1], "cpu", [], 0)]
    command.finish({"facts": FACTS, "left_out": 0, "rows": rows}, tmp_path)
    assert "GiB of memory, 1 are available" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("now", "tolerance", "fails"),
    [
        (THEN, 0.0, False),
        ({"ours": 3.0, "clone": 3.0, "torch": 6.0}, 0.0, False),  # a slower machine
        (THEN | {"ours": 1.2}, 0.1, True),
        (THEN | {"ours": 1.2}, 0.3, False),
        (THEN | {"ours": 1.2, "torch": 2.4}, 0.1, False),  # beside a clone alone
        ({"ours": 1.2, "clone": 1.0}, 0.1, True),
        ({}, 0.1, False),
    ],
)
def test_compare(
    now: dict[str, float], tolerance: float, fails: bool, tmp_path: Path, capsys: Captured
) -> None:
    """A regression is the mean of a family, beside both the clone and torch.nn of its own run."""
    forward, backward, both = (case.name for case in CASES[:3])
    new = [row_of(forward, **THEN), row_of(backward, **now), row_of(both, **THEN)]
    old = [row_of(name, **THEN) for name in (forward, backward)]
    for name, rows in {"new": new, "old": old}.items():
        report.save({"facts": FACTS, "left_out": 0, "rows": rows}, tmp_path / name)
    files = ["--table", f"{tmp_path}/new", "--compare", f"{tmp_path}/old"]
    arguments = [*files, "--tolerance", str(tolerance)]
    if fails:
        with pytest.raises(SystemExit, match="slower than before: networks, backward"):
            command.main(arguments)
    else:
        command.main(arguments)
    table = " ".join(capsys.readouterr().out.partition("Times now")[2].split())
    assert "| networks | forward | 1 | 1.00 | 1.00 | |" in table
    assert ("slower |" in table) == fails


def test_predictions(capsys: Captured) -> None:
    command.main(["--model", "--filter", "^segnet-28"])
    out = capsys.readouterr().out
    assert out.count("| segnet-28x512-b8-2x2-float32-int64-contiguous-") == 3
    with pytest.raises(SystemExit, match="no case's name contains 'nonsense'"):
        command.main(["--model", "--filter", "nonsense"])


@pytest.mark.parametrize(("training", "line"), [("", "| networks"), ("-training", "| bfloat16")])
def test_published_results_are_small_and_shown(training: str, line: str, capsys: Captured) -> None:
    path = ROOT / "benchmarks" / "results" / f"amd-epyc-2-threads{training}.json"
    command.main(["--table", str(path)])
    assert f"\n{line}" in capsys.readouterr().out
    assert path.stat().st_size < 200_000


def test_training_step(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """Indices take eight, four bytes and one; the losses are equal."""
    widths = (16, 32)
    monkeypatch.setattr(training, "SegNet", functools.partial(SegNet, widths, (1, 1)))
    monkeypatch.setattr(training, "SHAPE", (1, 3, 32, 64))
    command.main([*CPU, "--training", "--output", str(tmp_path)])
    cells = sum(width * (32 * 64) // 4**stage for stage, width in enumerate(widths, 1))
    rows = report.load(next(tmp_path.glob("*-training.json")))["rows"]
    for row in rows:
        itemsize = {"torch.nn": 8, "int32": 4, "uint8": 1}[row["contender"]]
        assert row["indices"] == cells * itemsize
        assert row["values"] == cells * (4 if row["dtype"] == "float32" else 2)
        assert row["peak"] > row["values"] + row["indices"]
    assert len(rows) == 6
    assert "| float32 | torch.nn | 48 KiB | 96 KiB |" in " ".join(capsys.readouterr().out.split())
    pictures = [path.stat().st_size > 10_000 for path in tmp_path.glob("*-training.png")]
    assert pictures == [True] * has("matplotlib")
    monkeypatch.setattr(training, "step", lambda c, d, *_: {"dtype": d, "loss": len(c)})
    with pytest.raises(RuntimeError, match="expected one loss of each dtype"):
        training.measure("cpu")


@pytest.mark.slow
def test_torch_compile() -> None:
    results = results_of(dataclasses.replace(shrunk(CASES[0]), direction="both"), COMPILED)
    assert results[COMPILED].get("agreement") == "equal", results


TRITON_SCRIPT = """
import sys
sys.path.append(sys.argv[1])
from test_benchmarks import DISTINCT, TRITON, contenders, data, torch
for case in DISTINCT:
    if contenders.is_able(TRITON, case, "cuda"):
        given = data.make(case, "cpu")
        for call in contenders.triton_scatter(case, [given]).calls:
            assert torch.equal(*call(), *data.definition(case, given)), case
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_triton_in_its_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    arguments = [sys.executable, "-c", TRITON_SCRIPT, str(Path(__file__).parent)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
