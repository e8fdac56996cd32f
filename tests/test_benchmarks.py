"""The benchmarks run, check what they time, and say what they predict. No time is asserted."""

import dataclasses
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby, product
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
    segnet,
    show,
    timing,
    training,
)
from benchmarks.cases import BY_NAME, CASES, Case  # noqa: E402
from benchmarks.contenders import CLONE, COMPILED, ONNX, OURS, TORCH, TRITON  # noqa: E402

FACTS = {"device": "none", "torch": "2", "date": "2000-01-01", "kind": "cpu"}
FILE = report.slug({"facts": report.facts("cpu")}) + ".json"
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


def results_of(case: Case, *peers: str, device: str = "cpu", **others: Any) -> dict[str, Any]:
    everyone = contenders.CONTENDERS | others
    return runner.run(case, device, (*peers, *others), 0, 2, everyone)["results"]


def test_cases_are_valid() -> None:
    assert len(BY_NAME) == len(CASES) == 451
    assert sum(case.quick for case in CASES) == 66
    for case in CASES:
        assert case.rank in (1, 2, 3), case
        assert min(case.pooled) > 0, case
        assert 2 * case.padding <= case.kernel_size, case
        assert case.layout == "contiguous" or case.rank > 1, case
        for size, cells in zip(case.shape[2:], case.pooled[2:], strict=True):
            default = (cells - 1) * case.stride - 2 * case.padding + case.kernel_size
            assert abs(size - default) < case.stride, case


@pytest.mark.parametrize(
    ("families", "count", "calls"),
    [
        *(([window], 1, cases.UNPOOLING) for window in cases.WINDOWS),
        (["bottom"], 2, cases.UNPOOLING[:2]),
        ([f"pool, {index}" for index in cases.INDEX_DTYPES], 4, cases.POOLING[:2]),
    ],
)
def test_every_combination_is_there(families: list[str], count: int, calls: list[Any]) -> None:
    members = [case for case in CASES if case.family in families]
    found = [(c.dtype, c.index_dtype, c.layout, (c.operation, c.direction)) for c in members]
    assert sorted(found) == sorted([*product(*cases.ALL.values(), calls)] * count)


def test_what_says_most_comes_first() -> None:
    families = [family for family, _ in groupby(case.family for case in CASES)]
    assert families[:3] == ["networks", "2x2/2", "bottom"]
    assert families[-1] == "sweep"
    before = CASES[: next(i for i, case in enumerate(CASES) if case.family == "bottom")]
    plain = {(case.dtype, case.index_dtype, case.layout) for case in before}
    assert plain == {("float32", "int64", layout) for layout in cases.LAYOUTS}


@pytest.mark.parametrize(
    ("shape", "pooled", "held"), [((14, 14), (7, 7), 1.0), ((15, 20), (7, 10), 14 / 15)]
)
def test_bottom(shape: tuple[int, ...], pooled: tuple[int, ...], held: float) -> None:
    """A row that no window holds is in the output, of the size that is given, and counts."""
    found = [case for case in CASES if "bottom" in case.family and case.shape[2:] == shape]
    assert len(found) == 30
    for case in found:
        assert case.pooled[2:] == pooled
        even = dataclasses.replace(case, shape=(2, 3, *(2 * n for n in pooled)))
        small = dataclasses.replace(case, shape=(2, 3, *shape))
        assert model.touched(small, "cuda") == pytest.approx(held * model.touched(even, "cuda"))
        results = results_of(small, TORCH)
        assert results[OURS]["agreement"] == results[TORCH]["agreement"] == "equal", case.name


@pytest.mark.parametrize("operation", ["unpool", "pool", "round-trip"])
@pytest.mark.parametrize(
    ("dtype", "sizes"), [("float32", (28, 24, 21)), ("bfloat16", (18, 14, 11))]
)
def test_predicted_bytes(operation: cases.Operation, dtype: str, sizes: tuple[int, ...]) -> None:
    for index_dtype, size in zip(cases.INDEX_DTYPES, sizes, strict=True):
        case = Case("", "", (1, 1, 8, 8), dtype=dtype, index_dtype=index_dtype, operation=operation)
        assert model.floor_bytes(case, "cuda") == model.useful_bytes(case)
        assert model.useful_bytes(case) == size * len(model.operators(case)) * case.cells


def test_byte_indices_are_offsets_in_the_window() -> None:
    case = Case("", "", (1, 1, 5, 4), 3, 2, 1, index_dtype="uint8")
    flat = torch.tensor([[[[5, 6], [9, 15], [16, 19]]]])
    offsets = torch.tensor([[[[8, 7], [5, 8], [4, 5]]]], dtype=torch.uint8)
    assert torch.equal(data.indices_of(case, flat), offsets)


def test_gradient_of_the_definition() -> None:
    """Three windows hold one maximum: the last of them has the gradient."""
    case = Case("", "", (1, 1, 5), kernel_size=3, stride=1, direction="both")
    indices = torch.tensor([[[2, 2, 2]]])
    given = data.Data(torch.full((1, 1, 3), 7.0), indices, indices, torch.arange(5.0).view(1, 1, 5))
    output, gradient = data.definition(case, given)
    assert output.tolist() == [[[0, 0, 7, 0, 0]]]
    assert gradient.tolist() == [[[0, 0, 2]]]
    assert data.definition(case, given, to_losers=True)[1].tolist() == [[[2, 2, 2]]]


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


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_checks(case: Case, device: str, monkeypatch: Patch) -> None:
    """Everyone's result is as defined; one element that is not is found; a failure is a reason."""
    monkeypatch.setattr(memory, "cache_bytes", lambda device: 0)  # one copy is enough
    spoilers = {"sabotaged": sabotaged, "broken": broken}
    results = results_of(case, TORCH, ONNX, TRITON, device=device, **spoilers)
    assert results.pop("sabotaged").keys() == {"agreement", "reason"}
    assert results.pop("broken") == {"reason": "RuntimeError: no such call"}
    assert all(result.keys() >= {"quartiles", "peak_bytes"} for result in results.values())
    forward = (case.operation, case.direction) == ("unpool", "forward")
    plain = forward and (device, case.dtype, case.layout) == ("cpu", "float32", "contiguous")
    assert (ONNX in results) == (plain and show.has("onnxruntime"))
    flat = forward and (device, case.index_dtype == "uint8") == ("cuda", False)
    assert (TRITON in results) == (flat and show.has("triton"))
    # Losers get torch.nn's gradient too, of the only windows that share maxima. Dilated by two with
    # a stride of three, windows have no element in common.
    losers = case.overlapping and case.dilation == 1 and case.operation != "pool"
    agreement = {"torch.nn": "differs" if losers and case.direction != "forward" else "equal"}
    for name in results.keys() - {CLONE}:
        assert results[name]["agreement"] == agreement.get(name, "equal"), name


def test_own_wrong_result_fails(monkeypatch: Patch) -> None:
    case = CASES[0]
    row = {"name": case.name, "results": results_of(shrunk(case), **{OURS: sabotaged})}
    monkeypatch.setattr(command, "timed", lambda *_: {"rows": [row]})
    with pytest.raises(SystemExit, match=f"not the definition's result: {case.name}"):
        command.main(CPU)
    with pytest.raises(RuntimeError, match="no such call"):
        results_of(shrunk(case), **{OURS: broken})


def test_where_triton_is_timed(monkeypatch: Patch) -> None:
    """On CUDA it unpools from flat indices, forward, in every layout and rank."""
    monkeypatch.setattr(contenders, "has", lambda package: True)
    monkeypatch.setitem(sys.modules, "benchmarks.triton_scatter", Mock())

    def timed(device: str) -> list[Case]:
        copies: Any = [Mock(input=Mock(device=torch.device(device)), grad_output=None)]
        return [case for case in DISTINCT if contenders.triton_scatter(case, copies)]

    called = {(case.operation, case.direction, case.index_dtype) for case in timed("cuda")}
    assert called == {("unpool", "forward", "int64"), ("unpool", "forward", "int32")}
    ways = {(case.rank, case.layout) for case in timed("cuda")}
    assert ways == {(case.rank, case.layout) for case in CASES}
    assert timed("cpu") == []


@pytest.mark.parametrize("with_host", [False, True])
def test_order_of_the_cuda_clock(with_host: bool, monkeypatch: Patch) -> None:
    """The device sleeps, or has nothing left to do, before what is timed."""
    cuda = Mock()
    cuda.Event().elapsed_time.return_value = 3.0
    for name in ("Event", "_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    cuda.reset_mock()
    seconds = timing.cuda_clock(cuda.call, with_host)
    before, *order = [name for name, *_ in cuda.mock_calls if name != "Event"]
    assert before == ("synchronize" if with_host else "_sleep")
    assert order == ["Event().record", "call", "Event().record"]
    assert seconds() == 0.003
    assert cuda.mock_calls[-2][0] == "Event().synchronize"


def test_rounds_rotate() -> None:
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "abc"}
    found = timing.interleave(calls, timing.cpu_clock, seconds=100, rounds=4)
    assert "".join(order) == "aabbcc" + "abcbcacababc"
    assert all(sorted(quartiles) == quartiles for quartiles in found.values())


def test_copies_exceed_the_cache() -> None:
    given = data.make(shrunk(CASES[0]), "cpu")
    copies = data.rotation(given, cache_bytes=3 * given.bytes_read)
    assert len({copy.input.data_ptr() for copy in copies}) == len(copies) == 7
    assert len(data.rotation(given, cache_bytes=2**30)) == data.MOST_COPIES


def test_too_large_is_said(monkeypatch: Patch, capsys: Captured) -> None:
    """It is in the table, with the reason, and no point of the plot."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    results = {"facts": FACTS, "rows": [runner.run(CASES[-1], "cpu", [], 0, 2)]}
    command.display(results)
    assert "GiB of memory, 1 are available" in capsys.readouterr().out
    plot = pytest.importorskip("benchmarks.plot", reason="pictures need matplotlib")
    panel = Mock()
    plot.sweep(results["rows"], panel)
    panel.plot.assert_not_called()


def row_of(name: str, **seconds: float) -> report.Row:
    """As the runner's, without its work."""
    names = {"ours": OURS, "clone": CLONE, "torch": TORCH}
    one = {"agreement": "equal", "peak_bytes": 1}
    found = {names[n]: {**one, "quartiles": [s, s, s]} for n, s in seconds.items()}
    return {"name": name, "results": found}


THEN = {"ours": 1.0, "clone": 1.0, "torch": 2.0}


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
    report.save({"facts": FACTS, "rows": new}, tmp_path / "new")
    report.save({"facts": FACTS, "rows": old}, tmp_path / "old")
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


WITHOUT = """
import runpy, sys
for package in ("matplotlib", "rich"):
    sys.modules[package] = None  # importing it fails
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("plain", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_end_to_end(plain: bool, tmp_path: Path) -> None:
    """As ``make bench``; or without rich and matplotlib, which is said in the first line."""
    import maxunpool_cuda

    path = os.pathsep.join((str(Path(maxunpool_cuda.__file__).parent.parent), *sys.path))
    start = ["-c", WITHOUT] if plain else ["-m", "benchmarks"]
    few = ["--quick", "--seconds", "0", "--filter", "^(tiny|sweep-1024|sweep-2048)"]
    arguments = [sys.executable, *start, *CPU, *few, "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = report.load(next(tmp_path.glob("*.json")))
    assert results["facts"].keys() >= {"device", "cores", "torch", "python", "date", "build_info"}
    assert (results["settings"]["seconds"], results["left_out"], len(results["rows"])) == (0, 0, 5)
    # 2*8*16*16 float32 outputs, and nothing beside them.
    assert results["rows"][0]["results"][OURS]["peak_bytes"] == 2 * 8 * 16 * 16 * 4
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for number, row in enumerate(results["rows"], 1):
        assert {OURS, CLONE, TORCH} <= row["results"].keys()
        assert any(line.startswith(f"| {row['name']} | ") for line in lines)
        assert not plain or f"{number}/5 {row['name']}" in lines
    for start_of_line in ("| tiny | forward | 1 |", "| sweep | forward | 2 |"):
        assert any(line.startswith(start_of_line) for line in lines)
    said = "Not installed: rich (progress and tables in plain text), matplotlib (no pictures)"
    assert lines[0].startswith(said) == plain
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == (0 if plain else 2 * show.has("matplotlib"))
    assert all(p.stat().st_size > 10_000 and f"Written: {p}" in lines for p in pictures)


def test_predictions(capsys: Captured) -> None:
    command.main(["--model", "--filter", "^segnet-28"])
    out = capsys.readouterr().out
    assert out.count("| segnet-28x512-b8-2x2-float32-int64-contiguous-") == 3
    with pytest.raises(SystemExit, match="no case's name contains 'nonsense'"):
        command.main(["--model", "--filter", "nonsense"])


def test_published_results_are_small_and_of_cases_that_exist() -> None:
    for path in report.RESULTS.glob("*.json"):
        rows = report.load(path)["rows"]
        assert "training" in path.stem or all(row["name"] in BY_NAME for row in rows)
        assert path.stat().st_size < 200_000


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: Patch) -> tuple[Path, Path]:
    """In place of the one that is published, with results in it, and of the other."""
    published, partial = tmp_path / "published", tmp_path / "partial"
    monkeypatch.setattr(report, "RESULTS", published)
    monkeypatch.setattr(command, "UNPUBLISHED", partial)
    monkeypatch.setattr(memory, "keep_pages", lambda: True)
    monkeypatch.setattr(show, "has", lambda package: False)  # pictures take long
    monkeypatch.setattr(runner, "run", lambda case, *_: row_of(case.name, **THEN))
    published.mkdir()
    (published / FILE).write_text("published")
    return published, partial


def test_everything_is_published(folders: tuple[Path, Path], capsys: Captured) -> None:
    command.main([*CPU, "--limit", "1000"])
    results = report.load(folders[0] / FILE)
    assert [row["name"] for row in results["rows"]] == [case.name for case in CASES]
    assert results["left_out"] == 0
    assert "left out" not in capsys.readouterr().out


PARTS = {"--filter": "^tiny", "--seconds": "1", "--peers": "torch", "--rounds": "3", "--limit": "5"}
STOPS = {signal.SIGTERM: SystemExit, signal.SIGINT: KeyboardInterrupt, "bug": ZeroDivisionError}


@pytest.mark.parametrize("why", [*PARTS, *STOPS])
def test_part_is_not_published(
    why: Any, folders: tuple[Path, Path], monkeypatch: Patch, capsys: Captured
) -> None:
    """What stops it leaves what was timed, in the other folder, and says how much is left out."""
    published, partial = folders
    seen: list[str] = []

    def timed(case: Case, *_: Any) -> report.Row:
        if seen:  # the cases before are on disk
            assert len(report.load(partial / FILE)["rows"]) == len(seen)
        if len(seen) == 2 and why in STOPS:
            signal.raise_signal(why) if why != "bug" else 1 / 0
        seen.append(case.name)
        return row_of(case.name, **THEN)

    monkeypatch.setattr(runner, "run", timed)
    clock = SimpleNamespace(monotonic=lambda: 3.0 * len(seen))
    monkeypatch.setattr(command, "time", clock)
    before = signal.getsignal(signal.SIGTERM)
    if why in STOPS:
        with pytest.raises(STOPS[why]) as stopped:
            command.main(CPU)
        assert getattr(stopped.value, "code", 143) == 128 + signal.SIGTERM
    else:
        command.main([*CPU, why, PARTS[why]])
    assert signal.getsignal(signal.SIGTERM) == before
    results = report.load(partial / FILE)
    assert [row["name"] for row in results["rows"]] == seen
    out, left = capsys.readouterr().out, results["left_out"]
    if why in STOPS or why == "--limit":
        assert (len(seen), left) == (2, len(CASES) - 2)
        assert out.splitlines()[-1] == f"Stopped: 2 cases timed, {left} left out"
        assert f" {left} cases are left out." in out
    assert (published / FILE).read_text() == "published"
    assert [path.name for path in partial.iterdir()] == [FILE]


def test_published_folder_is_for_everything(folders: tuple[Path, Path], capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        command.main([*CPU, "--output", str(folders[0])])
    assert "is for everything" in capsys.readouterr().err
    command.main([*CPU, "--limit", "0"])
    assert f"Stopped: 0 cases timed, {len(CASES)} left out" in capsys.readouterr().out
    assert not folders[1].exists()


def test_half_a_report_replaces_none(tmp_path: Path, monkeypatch: Patch) -> None:
    """Killed before the new one takes its place, the old one is there."""
    path = tmp_path / "folder" / "report.json"
    old, new = ({"facts": FACTS, "rows": [{"name": name}]} for name in ("old", "new"))
    report.save(old, path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            report.save(new, path)
    assert report.load(path) == old
    report.save(new, path)
    assert report.load(path) == new
    assert list(path.parent.iterdir()) == [path]


def test_garbage_of_before_is_no_memory_of_a_call() -> None:
    kept: list[Any] = []
    memory.peak_bytes(lambda: kept.append(torch.empty(10_000)), "cpu")
    kept.append(kept)  # a cycle, which waits for the garbage collector
    del kept

    def call() -> Tensor:
        gc.collect()
        return torch.empty(100)

    assert memory.peak_bytes(call, "cpu") == 400


@pytest.mark.slow
def test_memory_of_a_training_step() -> None:
    """Indices take eight, four bytes and one."""
    cells = sum(width * (32 * 64) // 4**stage for stage, width in enumerate(segnet.WIDTHS, 1))
    for row in training.measure("cpu", (1, 3, 32, 64))["rows"]:
        itemsize = {"torch.nn": 8, "int32": 4, "uint8": 1}[row["contender"]]
        assert row["indices"] == cells * itemsize
        assert row["values"] == cells * (4 if row["dtype"] == "float32" else 2)
        assert row["peak"] > row["values"] + row["indices"]


@pytest.mark.parametrize("plain", [False, True])
def test_report_of_a_training_step(
    plain: bool, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    def step(contender: str, dtype: str, *_: Any) -> report.Row:
        sizes = {"values": 2**21, "indices": 2**22, "peak": 2**23}
        return {"contender": contender, "dtype": dtype, "loss": len(dtype), **sizes}

    monkeypatch.setattr(training, "step", step)
    for package in ("rich", "matplotlib") if plain else ():
        monkeypatch.setitem(sys.modules, package, None)
    command.main([*CPU, "--training", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert len(report.load(next(tmp_path.glob("*-training.json")))["rows"]) == 6
    assert "| float32 | torch.nn | 2.0 MiB | 4.0 MiB | 8.0 MiB |" in " ".join(out.split())
    assert not plain or "1/6 torch.nn, float32" in out
    pictures = [path.stat().st_size for path in tmp_path.glob("*-training.png")]
    assert len(pictures) == show.has("matplotlib")
    assert min(pictures, default=10_001) > 10_000
    monkeypatch.setattr(training, "step", lambda c, d, *_: {"dtype": d, "loss": len(c)})
    with pytest.raises(RuntimeError, match="expected one loss of each dtype"):
        training.measure("cpu")


@pytest.mark.slow
def test_torch_compile() -> None:
    results = results_of(dataclasses.replace(shrunk(CASES[0]), direction="both"), COMPILED)
    assert results[COMPILED].get("agreement") == "equal", results


@pytest.mark.cuda
@pytest.mark.parametrize("with_host", [False, True])
def test_cuda_clock(with_host: bool) -> None:
    """Events in milliseconds, made seconds; the host's time is in them where it is asked for."""
    numbers = torch.zeros(10, device="cuda")

    def call() -> Tensor:
        time.sleep(0.02 * with_host)
        return numbers + 1

    assert timing.cuda_clock(call, with_host)() > 0.015 * with_host


TRITON_SCRIPT = """
import sys
import torch
sys.path.append(sys.argv[1])
from benchmarks import data, triton_scatter
from benchmarks.cases import Case
for layout, shapes in (("contiguous", (2, 3, 1)), ("channels_last", (2, 3))):
    for index_dtype in ("int64", "int32"):
        for rank in shapes:
            shape = (2, 3, 20, 14, 10)[: 2 + rank]
            case = Case("", "", shape, index_dtype=index_dtype, layout=layout)
            given = data.make(case, "cpu")
            result = triton_scatter.max_unpool(given.input, given.indices, case.shape[2:])
            assert torch.equal(result, *data.definition(case, given)), case
            assert result.is_contiguous() == given.input.is_contiguous()
"""


def test_triton_in_its_interpreter() -> None:
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    arguments = [sys.executable, "-c", TRITON_SCRIPT, str(ROOT)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
