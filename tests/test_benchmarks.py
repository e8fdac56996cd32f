"""The benchmarks run, check what they time, and say what they predict. No time is asserted."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import (  # noqa: E402
    __main__,
    cases,
    contenders,
    data,
    memory,
    model,
    report,
    runner,
    segnet,
    show,
    tables,
    timing,
    training,
)
from benchmarks.cases import BY_NAME, CASES, Case  # noqa: E402
from benchmarks.contenders import CLONE, COMPILED, ONNX, OURS, TORCH, TRITON  # noqa: E402

MEASURED = {"quartiles", "peak_bytes"}
FACTS = {"device": "none", "torch": "2", "date": "2000-01-01", "kind": "cpu"}


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


def agreement_of_torch(case: Case) -> str:
    """With the definition: losers get the gradient too, of the only windows that share maxima.

    Dilated by two with a stride of three, windows have no element in common.
    """
    losers = case.overlapping and case.dilation == 1 and case.operation != "pool"
    return "differs" if losers and case.direction != "forward" else "equal"


def test_cases_are_valid() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 451
    assert 60 < sum(case.quick for case in CASES) < 100
    for case in CASES:
        assert case.rank in (1, 2, 3), case
        assert min(case.pooled) > 0, case
        assert 2 * case.padding <= case.kernel_size, case
        assert case.layout == "contiguous" or case.rank > 1, case
        for size, cells in zip(case.shape[2:], case.pooled[2:], strict=True):
            default = (cells - 1) * case.stride - 2 * case.padding + case.kernel_size
            assert abs(size - default) < case.stride, case


ALL = (cases.DTYPES, cases.INDEX_DTYPES, cases.LAYOUTS)
ONE = (cases.DTYPES, cases.INDEX_DTYPES, ("contiguous",))


@pytest.mark.parametrize(
    ("family", "count", "options"),
    [
        *((window, 1, (*ALL, cases.DIRECTIONS)) for window in cases.WINDOWS),
        ("bottom", 2, (*ALL, ("forward", "backward"))),
        ("round-trip, bottom", 2, (*ONE, ("both",))),
        *(
            (f"pool, {index}", 4, (cases.DTYPES, (index,), cases.LAYOUTS, ("forward", "backward")))
            for index in cases.INDEX_DTYPES
        ),
        ("sweep", 19, (("float32",), ("int64",), ("contiguous",), ("forward",))),
    ],
)
def test_every_combination_is_there(family: str, count: int, options: tuple) -> None:
    members = [case for case in CASES if case.family == family]
    found = [(c.dtype, c.index_dtype, c.layout, c.direction) for c in members]
    assert sorted(found) == sorted(list(product(*options)) * count)


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
def test_predicted_bytes(operation: cases.Operation) -> None:
    def of(dtype: str, index_dtype: str) -> float:
        case = Case("", "", (1, 1, 8, 8), dtype=dtype, index_dtype=index_dtype, operation=operation)
        assert model.floor_bytes(case, "cuda") == model.useful_bytes(case)
        return model.useful_bytes(case) / len(model.operators(case)) / case.cells

    assert [of("float32", index_dtype) for index_dtype in cases.INDEX_DTYPES] == [28, 24, 21]
    assert [of("bfloat16", index_dtype) for index_dtype in cases.INDEX_DTYPES] == [18, 14, 11]


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
    right = contenders.ours(case, copies).calls[0]

    def call() -> tuple[Tensor, ...]:
        *others, last = right()
        spoilt = last.clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[-1] += 1
        return (*others, spoilt)

    return contenders.Prepared([call])


def broken(case: Case, copies: Sequence[data.Data]) -> contenders.Prepared:
    raise RuntimeError("no such call\nwith details")


@pytest.mark.slow
@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_checks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone's result is as defined; one element that is not is found; a failure is a reason."""
    monkeypatch.setattr(memory, "cache_bytes", lambda device: 0)  # one copy is enough
    results = results_of(case, TORCH, ONNX, TRITON, sabotaged=sabotaged, broken=broken)
    assert results["sabotaged"]["agreement"] == "wrong"
    assert "quartiles" not in results["sabotaged"]
    assert results["broken"] == {"reason": "RuntimeError: no such call"}
    assert TRITON not in results  # of the CPU
    assert all(results[name].keys() >= MEASURED for name in (OURS, CLONE, TORCH)), results
    assert results[OURS]["agreement"] == "equal"
    assert results[TORCH]["agreement"] == agreement_of_torch(case)
    usual = (case.direction, case.dtype, case.layout, case.operation)
    plain = usual == ("forward", "float32", "contiguous", "unpool")
    if importlib.util.find_spec("onnxruntime"):
        assert (ONNX in results) == plain
    if ONNX in results:
        assert results[ONNX]["agreement"] == "equal"


def test_own_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"name": CASES[0].name, "results": results_of(shrunk(CASES[0]), **{OURS: sabotaged})}
    assert report.wrong([row]) == [CASES[0].name]
    with pytest.raises(RuntimeError, match="no such call"):
        results_of(shrunk(CASES[0]), **{OURS: broken})
    monkeypatch.setattr(__main__, "timed", lambda *_: {"rows": [row]})
    with pytest.raises(SystemExit, match=f"not the definition's result: {CASES[0].name}"):
        __main__.main(["--device", "cpu"])


def test_where_triton_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it unpools from flat indices, forward, in every layout and rank."""
    monkeypatch.setattr(contenders, "has", lambda package: True)
    monkeypatch.setitem(sys.modules, "benchmarks.triton_scatter", SimpleNamespace())
    claimed = {kind: SimpleNamespace(device=torch.device(kind)) for kind in ("cpu", "cuda")}
    copies = {kind: [data.Data(x, x, x, None)] for kind, x in claimed.items()}  # type: ignore[arg-type]
    timed = {case for case in DISTINCT if contenders.triton_scatter(case, copies["cuda"])}
    assert timed == {
        case
        for case in DISTINCT
        if (case.direction, case.operation) == ("forward", "unpool") and case.index_dtype != "uint8"
    }
    assert {case.rank for case in timed} == {1, 2, 3}
    assert {case.layout for case in timed} == set(cases.LAYOUTS)
    assert not any(contenders.triton_scatter(case, copies["cpu"]) for case in DISTINCT)
    monkeypatch.setattr(contenders, "has", lambda package: False)
    assert not any(contenders.triton_scatter(case, copies["cuda"]) for case in DISTINCT)


@pytest.mark.parametrize("with_host", [False, True])
def test_order_of_the_cuda_clock(with_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sleeps, or has nothing left to do, before what is timed."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, _: "Event") -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    seconds = timing.cuda_clock(lambda: order.append("call"), with_host)
    assert order == ["synchronize" if with_host else "sleep", "event", "call", "event"]
    assert seconds() == 0.003
    assert order[-1] == "wait"


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


def test_too_large_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in the table, with the reason, and no point of the plot."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    row = runner.run(CASES[-1], "cpu", [], 0, 2)
    results = {"facts": FACTS, "rows": [row]}
    tables.cases(results)
    tables.families(results)
    assert "GiB of memory, 1 are available" in capsys.readouterr().out
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.figure import Figure

    from benchmarks import plot

    panel = Figure().subplots()
    plot.sweep(results, panel)
    assert not panel.lines


def row_of(name: str, **seconds: float) -> report.Row:
    """As the runner's, without its work."""
    names = {"ours": OURS, "clone": CLONE, "torch": TORCH}
    one = {"agreement": "equal", "peak_bytes": 1}
    found = {names[n]: {**one, "quartiles": [s, s, s]} for n, s in seconds.items()}
    return {"name": name, "results": found}


@pytest.mark.parametrize(
    ("now", "tolerance", "fails"),
    [
        ({"ours": 1.0, "clone": 1.0, "torch": 2.0}, 0.0, False),
        ({"ours": 3.0, "clone": 3.0, "torch": 6.0}, 0.0, False),  # a slower machine
        ({"ours": 1.2, "clone": 1.0, "torch": 2.0}, 0.1, True),
        ({"ours": 1.2, "clone": 1.0, "torch": 2.0}, 0.3, False),
        ({"ours": 1.2, "clone": 1.0, "torch": 2.4}, 0.1, False),  # beside a clone alone
        ({"ours": 1.2, "clone": 1.0}, 0.1, True),
        ({}, 0.1, False),
    ],
)
def test_compare(
    now: dict[str, float],
    tolerance: float,
    fails: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A regression is the mean of a family, beside both the clone and torch.nn of its own run."""
    forward, backward = CASES[0].name, CASES[1].name
    same = {"ours": 1.0, "clone": 1.0, "torch": 2.0}
    runs = {
        "then": [row_of(forward, **same), row_of(backward, **same)],
        "now": [row_of(forward, **same), row_of(backward, **now), row_of(CASES[2].name, ours=1.0)],
    }
    paths = {run: tmp_path / f"{run}.json" for run in runs}
    for run, rows in runs.items():
        report.save({"facts": FACTS, "rows": rows}, paths[run])
    arguments = ["--table", str(paths["now"]), "--compare", str(paths["then"])]
    arguments += ["--tolerance", str(tolerance)]
    if fails:
        with pytest.raises(SystemExit, match="slower than before: networks, backward"):
            __main__.main(arguments)
    else:
        __main__.main(arguments)
    table = " ".join(capsys.readouterr().out.partition("Times now")[2].split())
    assert "| networks | forward | 1 | 1.00 | 1.00 | |" in table
    assert ("slower |" in table) == fails


WITHOUT = """
import runpy, sys
for package in ("matplotlib", "rich"):
    sys.modules[package] = None  # importing it fails
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


def run(*arguments: str, plain: bool = False) -> str:
    """From the root, as ``make bench`` does; plain: as if matplotlib and rich were not there."""
    import maxunpool_cuda

    path = os.pathsep.join((str(Path(maxunpool_cuda.__file__).parent.parent), *sys.path))
    start = ["-c", WITHOUT] if plain else ["-m", "benchmarks"]
    command = [sys.executable, *start, "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    few = ("--seconds", "0", "--filter", "^(tiny|sweep-1024|sweep-2048)")
    out = run("--quick", *few, "--output", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert results["facts"].keys() >= {"device", "cores", "torch", "python", "date", "build_info"}
    assert (results["settings"]["seconds"], results["left_out"]) == (0, 0)
    assert len(results["rows"]) == 5
    for row in results["rows"]:
        assert row["name"] in out
        assert all(row["results"][name].keys() >= MEASURED for name in (OURS, CLONE, TORCH))
    # 2*8*16*16 float32 outputs, and nothing beside them.
    assert results["rows"][0]["results"][OURS]["peak_bytes"] == 2 * 8 * 16 * 16 * 4
    for start in ("| tiny | forward | 1 |", "| sweep | forward | 2 |"):
        assert start in " ".join(run("--table", str(path)).split())
    if show.has("matplotlib"):
        pictures = sorted(tmp_path.glob("*.png"))
        assert [p.stem.rpartition("-")[2] for p in pictures] == ["fractions", "sweep"]
        assert all(p.stat().st_size > 10_000 and f"Written: {p}" in out for p in pictures)


def test_without_rich_and_matplotlib(tmp_path: Path) -> None:
    """Said in the first line; then a line for each case, and the tables in Markdown."""
    arguments = ("--seconds", "0", "--rounds", "2", "--peers", "torch", "--output", str(tmp_path))
    out = run(*arguments, "--filter", "^tiny.*contiguous-(forward|both)", plain=True)
    (path,) = tmp_path.iterdir()
    names = [row["name"] for row in report.load(path)["rows"]]
    missing, first, second, *shown, written = out.splitlines()
    assert missing.startswith("Not installed: rich (progress and tables in plain text), matplotlib")
    assert [first, second] == [f"1/2 {names[0]}", f"2/2 {names[1]}"]
    assert [any(line.startswith(f"| {name} | ") for line in shown) for name in names] == [True] * 2
    assert any(line.startswith("| tiny | both | 1 |") for line in shown)
    assert written == f"Written: {path}"


def test_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main(["--model", "--filter", "^segnet-28"])
    out = capsys.readouterr().out
    assert out.count("| segnet-28x512-b8-2x2-float32-int64-contiguous-") == 3
    with pytest.raises(SystemExit, match="no case's name contains 'nonsense'"):
        __main__.main(["--model", "--filter", "nonsense"])


def test_published_results_are_of_cases_that_exist() -> None:
    for path in report.RESULTS.glob("*.json"):
        rows = report.load(path)["rows"]
        assert "training" in path.stem or all(row["name"] in BY_NAME for row in rows)
        assert path.stat().st_size < 200_000
        assert len(path.read_text().splitlines()) == len(rows) + 3


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """In place of the one that is published, with results in it, and of the other."""
    published, partial = tmp_path / "published", tmp_path / "partial"
    monkeypatch.setattr(report, "RESULTS", published)
    monkeypatch.setattr(__main__, "UNPUBLISHED", partial)
    monkeypatch.setattr(memory, "keep_pages", lambda: True)
    # Pictures and tables take long, and are tested elsewhere.
    monkeypatch.setattr(show, "has", lambda package: False)
    monkeypatch.setattr(runner, "run", lambda case, *_: row_of(case.name, ours=1.0, clone=0.5))
    published.mkdir()
    (published / FILE).write_text("published")
    return published, partial


FILE = report.slug({"facts": report.facts("cpu")}) + ".json"


def test_everything_is_published(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    __main__.main(["--device", "cpu", "--limit", "1000"])
    results = report.load(folders[0] / FILE)
    assert [row["name"] for row in results["rows"]] == [case.name for case in CASES]
    assert results["left_out"] == 0
    out = capsys.readouterr().out
    assert "Stopped" not in out
    assert "left out" not in out


PARTS = {"--filter": "^tiny", "--seconds": "1", "--peers": "torch", "--rounds": "3"}


@pytest.mark.parametrize("why", [signal.SIGTERM, signal.SIGINT, "--limit", "fails", *PARTS])
def test_part_is_not_published(
    why: str | signal.Signals,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What stops it leaves what was timed, in the other folder, and says how much is left out."""
    published, partial = folders
    seen: list[str] = []
    now = [1.0]

    def timed(case: Case, *_: Any) -> report.Row:
        if seen:  # the cases before are on disk
            assert len(report.load(partial / FILE)["rows"]) == len(seen)
        if len(seen) == 2:
            now[0] = 10.0
            if isinstance(why, signal.Signals):
                signal.raise_signal(why)
            if why == "fails":
                raise ZeroDivisionError
        seen.append(case.name)
        return row_of(case.name, ours=1.0, clone=0.5)

    arguments = ["--device", "cpu"]
    if why in PARTS:
        arguments += [str(why), PARTS[str(why)]]
    elif why == "--limit":
        arguments += ["--limit", "5"]
        monkeypatch.setattr(__main__, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stops = {
        signal.SIGTERM: SystemExit,
        signal.SIGINT: KeyboardInterrupt,
        "fails": ZeroDivisionError,
    }
    monkeypatch.setattr(runner, "run", timed)
    before = signal.getsignal(signal.SIGTERM)
    if why in stops:
        with pytest.raises(stops[why]) as stopped:
            __main__.main(arguments)
        assert why != signal.SIGTERM or stopped.value.code == 128 + why
    else:
        __main__.main(arguments)
    assert signal.getsignal(signal.SIGTERM) == before
    results = report.load(partial / FILE)
    assert [row["name"] for row in results["rows"]] == seen
    out = capsys.readouterr().out
    if why not in PARTS:
        left = results["left_out"]
        assert (len(seen), left) == (3 if why == "--limit" else 2, len(CASES) - len(seen))
        assert out.splitlines()[-1] == f"Stopped: {len(seen)} cases timed, {left} left out"
        assert f" {left} cases are left out." in out
    assert (published / FILE).read_text() == "published"
    assert [path.name for path in partial.iterdir()] == [FILE]


def test_published_folder_is_for_everything(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["--device", "cpu", "--output", str(folders[0])])
    assert "is for everything" in capsys.readouterr().err
    __main__.main(["--device", "cpu", "--limit", "0"])
    said = f"Stopped: 0 cases timed, {len(CASES)} left out"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert not folders[1].exists()


def test_half_a_report_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the new one takes its place, the old one is there."""
    path = tmp_path / "folder" / "report.json"
    old, new = ({"facts": FACTS, "rows": [{"name": name}]} for name in ("old", "new"))
    report.save(old, path)

    def killed(self: Path, target: Path) -> None:
        assert (report.load(self), report.load(target)) == (new, old)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            report.save(new, path)
    assert report.load(path) == old
    report.save(new, path)
    assert report.load(path) == new
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_memory_of_a_training_step() -> None:
    """Indices take eight, four bytes and one."""
    results = training.measure("cpu", (1, 3, 32, 64))
    assert len(results["rows"]) == len(training.DTYPES) * len(training.INDEX_DTYPES)
    cells = sum(width * (32 * 64) // 4**stage for stage, width in enumerate(segnet.WIDTHS, 1))
    for row in results["rows"]:
        itemsize = {"torch.nn": 8, "int32": 4, "uint8": 1}[row["contender"]]
        assert row["indices"] == cells * itemsize
        assert row["values"] == cells * (4 if row["dtype"] == "float32" else 2)
        assert row["peak"] > row["values"] + row["indices"]


@pytest.mark.parametrize("plain", [False, True])
def test_report_of_a_training_step(
    plain: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def step(contender: str, dtype: str, *_: Any) -> report.Row:
        sizes = {"values": 2**21, "indices": 2**22, "peak": 2**23, "loss": len(dtype)}
        return {"contender": contender, "dtype": dtype, **sizes}

    monkeypatch.setattr(training, "step", step)
    for package in ("rich", "matplotlib") if plain else ():
        monkeypatch.setitem(sys.modules, package, None)
    __main__.main(["--device", "cpu", "--training", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    (path,) = tmp_path.glob("*-training.json")
    assert len(report.load(path)["rows"]) == 6
    assert "| float32 | torch.nn | 2.0 MiB | 4.0 MiB | 8.0 MiB |" in " ".join(out.split())
    assert f"Written: {path}" in out
    assert not plain or "1/6 torch.nn, float32" in out
    pictures = list(tmp_path.glob("*-training.png"))
    assert len(pictures) == show.has("matplotlib")
    assert all(picture.stat().st_size > 10_000 for picture in pictures)


def test_losses_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(contender: str, dtype: str, *_: Any) -> report.Row:
        return {"dtype": dtype, "loss": len(contender)}

    monkeypatch.setattr(training, "step", step)
    with pytest.raises(RuntimeError, match="expected one loss of each dtype"):
        training.measure("cpu")


@pytest.mark.slow
def test_torch_compile() -> None:
    results = results_of(dataclasses.replace(shrunk(CASES[0]), direction="both"), COMPILED)
    assert results[COMPILED].get("agreement") == "equal", results


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_cuda(case: Case) -> None:
    results = results_of(case, TORCH, TRITON, device="cuda")
    assert all(results[name].keys() >= MEASURED for name in (OURS, CLONE, TORCH)), results
    assert results[OURS]["agreement"] == "equal"
    assert results[TORCH]["agreement"] == agreement_of_torch(case)
    if TRITON in results:
        assert results[TRITON].keys() >= MEASURED, results[TRITON]
        assert results[TRITON]["agreement"] == "equal"


@pytest.mark.cuda
@pytest.mark.parametrize("with_host", [False, True])
def test_cuda_clock(with_host: bool) -> None:
    """Events in milliseconds, made seconds; the host's time is in them where it is asked for."""
    numbers = torch.zeros(10, device="cuda")

    def call() -> Tensor:
        if with_host:
            time.sleep(0.02)
        return numbers + 1

    seconds: list[Callable[[], float]] = [timing.cuda_clock(call, with_host) for _ in range(3)]
    assert min(one() for one in seconds) > (0.015 if with_host else 0)


TRITON_SCRIPT = """
import sys
import torch
sys.path.append(sys.argv[1])
from benchmarks import data, triton_scatter
from benchmarks.cases import Case
for layout in ("contiguous", "channels_last"):
    for index_dtype in ("int64", "int32"):
        for shape in ((2, 3, 20, 14), (1, 5, 6, 4, 10), (3, 2, 66)):
            if layout == "contiguous" or len(shape) > 3:
                case = Case("", "", shape, index_dtype=index_dtype, layout=layout)
                given = data.make(case, "cpu")
                result = triton_scatter.max_unpool(given.input, given.indices, case.shape[2:])
                assert torch.equal(result, *data.definition(case, given)), case
                assert result.is_contiguous() == given.input.is_contiguous()
print("equal")
"""


def test_triton_in_its_interpreter() -> None:
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TRITON_SCRIPT, str(ROOT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
