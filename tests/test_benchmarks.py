"""The benchmarks run, check what they time, and say what they predict. No time is asserted."""

import dataclasses
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
    console,
    contenders,
    data,
    memory,
    model,
    report,
    runner,
    segnet,
    training,
)
from benchmarks.cases import CASES, Case  # noqa: E402
from benchmarks.stopping import stopping  # noqa: E402
from benchmarks.timing import Budget, CpuClock, CudaClock, interleave  # noqa: E402

ONCE = Budget(seconds=0, fewest_rounds=2, most_rounds=2, warm_up=1)
COLUMNS = {
    "median",
    "first_quartile",
    "third_quartile",
    "rounds",
    "useful_gb_per_s",
    "fraction_of_clone",
    "peak_bytes",
}


@pytest.fixture(autouse=True)
def any_algorithms(poisoned_memory: None) -> None:
    """As the benchmarks run: torch.nn's raises under deterministic algorithms."""
    torch.use_deterministic_algorithms(False)


def shrunk(case: Case) -> Case:
    """The same call of a small tensor."""
    spatial = (min(n, 11 + case.padding) for n in case.shape[2:])
    return dataclasses.replace(case, shape=(2, 3, *spatial))


# Calls that differ in more than their size.
DISTINCT = tuple(
    dict.fromkeys(
        dataclasses.replace(shrunk(case), family="any", layer="small", quick=False)
        for case in CASES
    )
)


def agreement_of_torch(case: Case) -> str:
    """With the definition: losers get the gradient too, of the only windows that share maxima.

    Dilated by two with a stride of three, windows have no element in common.
    """
    losers = case.overlapping and case.dilation == 1 and case.operation != "pool"
    return "differs" if losers and case.with_gradient else "equal"


def test_cases_are_valid() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert case.rank in (1, 2, 3), case
        assert min(case.pooled) > 0, case
        assert 2 * case.padding <= case.kernel_size, case
        assert case.dtype in cases.DTYPES, case
        assert case.index_dtype in cases.INDEX_DTYPES, case
        assert case.layout == "contiguous" or case.rank > 1, case
        assert case.direction in cases.DIRECTIONS, case
        default = (
            (n - 1) * case.stride - 2 * case.padding + case.kernel_size for n in case.pooled[2:]
        )
        for size, middle in zip(case.shape[2:], default, strict=True):
            assert abs(size - middle) < case.stride, case


def test_every_combination_is_there() -> None:
    for window in ("2x2/2", "3x3/2 padding 1", "4x4/4", "2x2x2/2"):
        found = {
            (case.dtype, case.index_dtype, case.layout, case.direction)
            for case in CASES
            if case.family == window
        }
        options = (cases.DTYPES, cases.INDEX_DTYPES, cases.LAYOUTS, cases.DIRECTIONS)
        assert found == set(itertools.product(*options))
    for index_dtype in cases.INDEX_DTYPES:
        for operation, directions in (("pool", {"forward", "backward"}), ("round-trip", {"both"})):
            found = {
                (case.dtype, case.layout, case.direction)
                for case in CASES
                if case.family == f"{operation}, {index_dtype}"
            }
            assert found == set(itertools.product(cases.DTYPES, cases.LAYOUTS, directions))
    shapes = ((64, 512, 14, 14), (32, 256, 15, 20))
    every = (shapes, cases.DTYPES, cases.INDEX_DTYPES, cases.LAYOUTS, ("forward", "backward"))
    quick = (shapes, cases.DTYPES, ("int64", "uint8"), ("contiguous",), ("forward",))
    there_and_back = (shapes, cases.DTYPES, cases.INDEX_DTYPES, ("contiguous",), ("both",))
    bottom = [case for case in CASES if case.family == "bottom"]
    for options, chosen in (
        (every, bottom),
        (quick, [case for case in bottom if case.quick]),
        (there_and_back, [case for case in CASES if case.family == "round-trip, bottom"]),
    ):
        found = {
            (case.shape, case.dtype, case.index_dtype, case.layout, case.direction)
            for case in chosen
        }
        assert found == set(itertools.product(*options))
    sizes = [case.outputs for case in CASES if case.family == "sweep"]
    assert sizes == [2**exponent for exponent in range(10, 29)]


def test_what_says_most_comes_first() -> None:
    families = [family for family, _ in itertools.groupby(case.family for case in CASES)]
    assert families[:2] == ["networks", "2x2/2"]
    assert families[2] == "bottom"
    assert families[-1] == "sweep"
    before = CASES[: next(i for i, case in enumerate(CASES) if case.family == "bottom")]
    plain = {(case.dtype, case.index_dtype, case.layout) for case in before}
    assert plain == {("float32", "int64", layout) for layout in cases.LAYOUTS}


BOTTOM = (
    ((2, 3, 14, 14), (7, 7), 1.0),
    ((2, 3, 15, 20), (7, 10), 14 / 15),
)


@pytest.mark.parametrize(("shape", "pooled", "held"), BOTTOM)
def test_bottom(
    shape: tuple[int, ...],
    pooled: tuple[int, ...],
    held: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that no window holds is in the output, of the size that is given, and counts."""
    monkeypatch.setattr("benchmarks.timing.cache_bytes", lambda device: 0)
    cells = [case for case in CASES if "bottom" in case.family and case.shape[2:] == shape[2:]]
    assert len(cells) == 30
    for case in cells:
        assert case.pooled == (*case.shape[:2], *pooled)
        even = dataclasses.replace(case, shape=(*shape[:2], *(2 * n for n in pooled)))
        small = dataclasses.replace(case, shape=shape)
        assert model.touched(small, "cuda") == pytest.approx(held * model.touched(even, "cuda"))
        results = runner.run(small, "cpu", [contenders.TORCH], ONCE)["results"]
        for name in (contenders.OURS, contenders.TORCH):
            assert results[name]["agreement"] == "equal", (case.name, results)


@pytest.mark.parametrize("operation", ["unpool", "pool", "round-trip"])
def test_predicted_bytes(operation: cases.Operation) -> None:
    def of(dtype: str, index_dtype: str) -> float:
        case = Case("", "", (1, 1, 8, 8), dtype=dtype, index_dtype=index_dtype, operation=operation)
        assert model.floor_bytes(case, "cuda") == model.useful_bytes(case)
        return model.useful_bytes(case) / model.calls(case) / case.cells

    assert [of("float32", index_dtype) for index_dtype in cases.INDEX_DTYPES] == [28, 24, 21]
    assert [of("bfloat16", index_dtype) for index_dtype in cases.INDEX_DTYPES] == [18, 14, 11]


def test_byte_indices_are_offsets_in_the_window() -> None:
    case = Case("", "", (1, 1, 5, 4), 3, 2, 1, index_dtype="uint8")
    positions = torch.tensor([[[[5, 6], [9, 15], [16, 19]]]])
    offsets = torch.tensor([[[[8, 7], [5, 8], [4, 5]]]], dtype=torch.uint8)
    assert torch.equal(data.indices_of(case, positions), offsets)
    assert torch.equal(data.positions(case, offsets), positions)


@pytest.mark.slow
@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_checks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone's result is as defined; one element that is not is found; a failure is a reason."""
    monkeypatch.setattr("benchmarks.timing.cache_bytes", lambda device: 0)  # one copy is enough

    def sabotaged(case: Case, copies: Sequence[data.Data]) -> contenders.Prepared:
        prepared = contenders.ours(case, copies)

        def call() -> tuple[Tensor, ...]:
            results = prepared.calls[0]()
            spoilt = results[-1].clone(memory_format=torch.contiguous_format)
            spoilt.view(-1)[-1] += 1
            return (*results[:-1], spoilt)

        return contenders.Prepared([call])

    def broken(case: Case, copies: Sequence[data.Data]) -> contenders.Prepared:
        raise RuntimeError("no such call\nwith details")

    everyone = contenders.CONTENDERS | {"sabotaged": sabotaged, "broken": broken}
    peers = [contenders.TORCH, contenders.ONNX, contenders.TRITON, "sabotaged", "broken"]
    results = runner.run(case, "cpu", peers, ONCE, everyone)["results"]
    assert results["sabotaged"]["agreement"] == "wrong"
    assert "median" not in results["sabotaged"]
    assert results["broken"] == {"reason": "RuntimeError: no such call"}
    assert results[contenders.TRITON] == {"reason": "needs CUDA"}
    for name in (contenders.OURS, contenders.CLONE, contenders.TORCH):
        assert results[name].keys() >= COLUMNS, results[name]
    assert results[contenders.OURS]["agreement"] == "equal"
    assert results[contenders.TORCH]["agreement"] == agreement_of_torch(case)
    if case.direction == "forward" and importlib.util.find_spec("onnxruntime"):
        plain = (case.dtype, case.layout, case.operation) == ("float32", "contiguous", "unpool")
        assert ("median" in results[contenders.ONNX]) == plain, results[contenders.ONNX]


def test_where_triton_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it unpools from flat indices, forward; every other case has a reason."""
    timed = {case for case in DISTINCT if not contenders.triton_reason(case, "cuda")}
    forward = {case for case in DISTINCT if case.direction == "forward"}
    flat = {case for case in DISTINCT if case.index_dtype in ("int64", "int32")}
    unpooled = {case for case in DISTINCT if case.operation == "unpool"}
    assert timed == forward & flat & unpooled
    assert {(case.dtype, case.index_dtype, case.layout) for case in timed} == set(
        itertools.product(cases.DTYPES, ("int64", "int32"), cases.LAYOUTS)
    )
    assert {case.dilation for case in timed} == {1, 2}
    assert {case.rank for case in timed} == {1, 2, 3}
    assert all(contenders.triton_reason(case, "cpu") == "needs CUDA" for case in DISTINCT)

    # The contender does as it says, of tensors that only claim to be on the device.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "benchmarks.triton_scatter", SimpleNamespace())
    for case in DISTINCT:
        claimed = SimpleNamespace(device=torch.device("cuda"))
        copies = [data.Data(claimed, claimed, None)]  # type: ignore[arg-type]
        if case in timed:
            assert len(contenders.triton_scatter(case, copies).calls) == 1
        else:
            reason = contenders.triton_reason(case, "cuda")
            with pytest.raises(contenders.Unable, match=f"^{reason}$"):
                contenders.triton_scatter(case, copies)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(contenders.Unable, match=r"^not installed: triton$"):
        contenders.triton_scatter(next(iter(timed)), copies)


@pytest.mark.parametrize("with_host", [False, True])
def test_order_of_the_cuda_clock(with_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sleeps, or has nothing left to do, before what is timed."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, _: "Event") -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    clock = CudaClock(with_host)
    clock.time(lambda: order.append("call"))
    assert order == ["synchronize" if with_host else "sleep", "event", "call", "event"]
    assert clock.collect() == [0.003]
    assert order[-1] == "synchronize"


def test_own_wrong_result_fails() -> None:
    case = shrunk(CASES[0])

    def wrong(case: Case, copies: Sequence[data.Data]) -> contenders.Prepared:
        return contenders.Prepared([lambda: (torch.zeros(case.shape),)])

    everyone = contenders.CONTENDERS | {contenders.OURS: wrong}
    row = runner.run(case, "cpu", [contenders.TORCH], ONCE, everyone)
    assert report.wrong({"rows": [row]}) == [case.name]


def test_gradient_of_the_definition() -> None:
    """Three windows hold one maximum: the last of them has the gradient."""
    case = Case("", "", (1, 1, 5), kernel_size=3, stride=1, direction="both")
    given = data.Data(
        torch.tensor([[[7.0, 7, 7]]]), torch.tensor([[[2, 2, 2]]]), torch.arange(5.0).view(1, 1, 5)
    )
    output, gradient = data.definition(case, given)
    assert output.tolist() == [[[0, 0, 7, 0, 0]]]
    assert gradient.tolist() == [[[0, 0, 2]]]
    assert data.definition(case, given, to_losers=True)[1].tolist() == [[[2, 2, 2]]]


def test_rounds_rotate() -> None:
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "abc"}
    times = interleave(calls, CpuClock(), Budget(0, fewest_rounds=4, most_rounds=4, warm_up=0))
    assert "".join(order) == "abcbcacababc"
    assert [times[name].rounds for name in "abc"] == [4, 4, 4]


def test_copies_exceed_the_cache() -> None:
    given = data.make(shrunk(CASES[0]), "cpu")
    copies = data.rotation(given, cache_bytes=3 * given.bytes_read)
    assert len(copies) == 7
    assert len({copy.input.data_ptr() for copy in copies}) == 7
    assert len(data.rotation(given, cache_bytes=2**30)) == data.MOST_COPIES


FACTS = {"device": "none", "torch": "2", "date": "2000-01-01", "kind": "cpu"}


def too_large(monkeypatch: pytest.MonkeyPatch) -> report.Report:
    monkeypatch.setattr(runner, "available_bytes", lambda device: 2**30)
    return {"facts": FACTS, "rows": [runner.run(CASES[-1], "cpu", [], ONCE)]}


def test_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = too_large(monkeypatch)["rows"]
    assert "results" not in row
    assert "1 are available" in row["reason"]


def test_too_large_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="the table to look at needs rich")
    assert report.rich_table(too_large(monkeypatch)).row_count == 1


def test_too_large_is_no_point_of_the_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from benchmarks import plot

    figure = plot.sweep(too_large(monkeypatch))
    assert figure is not None
    assert not figure.axes[0].lines


def test_document_has_the_table_of_the_runner() -> None:
    assert model.section() == model.table(report.load_all()), "python -m benchmarks --model write"


WITHOUT = """
import runpy, sys
for package in ("matplotlib", "rich"):
    sys.modules[package] = None  # importing it fails
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


def run(*arguments: str, plain: bool = False) -> str:
    """From the root, as ``make bench`` does, with the package that the tests have.

    Args:
        arguments: of the command line.
        plain: as if matplotlib and rich were not installed.
    """
    import maxunpool_cuda

    path = os.pathsep.join((str(Path(maxunpool_cuda.__file__).parent.parent), *sys.path))
    start = ["-c", WITHOUT] if plain else ["-m", "benchmarks"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of results, and what was printed meanwhile."""
    folder = tmp_path_factory.mktemp("results")
    out = run(
        *("--device", "cpu", "--quick", "--seconds", "0", "--output", str(folder)),
        *("--filter", "^(tiny|sweep-1024|sweep-2048)"),
    )
    return folder, out


@pytest.mark.slow
def test_end_to_end(measured: tuple[Path, str]) -> None:
    folder, out = measured
    (path,) = folder.glob("*.json")
    results = json.loads(path.read_text())
    assert results["facts"].keys() >= {"device", "cores", "torch", "python", "date", "build_info"}
    assert results["settings"]["seconds"] == 0
    assert results["left_out"] == 0
    assert len(results["rows"]) == 5
    for row in results["rows"]:
        assert row["name"] in out
        assert row["results"][contenders.OURS].keys() >= COLUMNS
        assert row["results"][contenders.TORCH].keys() >= {*COLUMNS, "times_ours"}
    forward = results["rows"][0]
    assert forward["case"]["direction"] == "forward"
    # 2*8*16*16 float32 outputs, and nothing beside them.
    assert forward["results"][contenders.OURS]["peak_bytes"] == 2 * 8 * 16 * 16 * 4
    table = run("--table", str(path))
    assert "| tiny | forward | 1 |" in table
    assert "| sweep | forward | 2 |" in table
    assert "| unpooling, all but the sweep | both | 1 |" in table


@pytest.mark.slow
def test_pictures(measured: tuple[Path, str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    folder, out = measured
    pictures = sorted(folder.glob("*.png"))
    assert [path.stem.rpartition("-")[2] for path in pictures] == ["fractions", "sweep"]
    for path in pictures:
        assert path.stat().st_size > 10_000
        assert f"Written: {path}" in out


def test_without_rich_and_matplotlib(tmp_path: Path) -> None:
    """Said in the first line; then a line for each case, and the table in Markdown."""
    arguments = ("--device", "cpu", "--seconds", "0", "--peers", "torch", "--output", str(tmp_path))
    out = run(*arguments, "--filter", "^tiny.*contiguous-(forward|both)", plain=True)
    (path,) = tmp_path.iterdir()
    results = report.load(path)
    names = [row["name"] for row in results["rows"]]
    missing, first, second, *table, written, no_pictures = out.splitlines()
    assert missing.startswith("Not installed: rich (")
    assert ", matplotlib (" in missing
    assert [first, second] == [f"1/2 {names[0]}", f"2/2 {names[1]}"]
    assert "\n".join(table) + "\n" == report.markdown(results)
    assert any(line.startswith("| tiny | both | 1 |") for line in table)
    assert written == f"Written: {path}"
    assert no_pictures == "No pictures: they need matplotlib"


def test_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    if all(map(console.has, console.SHOWING)):
        console.say_missing()
        assert capsys.readouterr().out == ""
    assert console.has("json")
    assert not console.has("no_such_package")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """In place of the one that is published, with results in it, and of the other."""
    published, partial = tmp_path / "published", tmp_path / "partial"
    document = tmp_path / "MODEL.md"
    document.write_text(model.DOCUMENT.read_text())
    monkeypatch.setattr(model, "DOCUMENT", document)
    monkeypatch.setattr(report, "RESULTS", published)
    monkeypatch.setattr(__main__, "PARTIAL_RESULTS", partial)
    monkeypatch.setattr(memory, "keep_pages", lambda: True)
    monkeypatch.setattr(report, "load_all", list)
    # Pictures and tables take long, and are tested elsewhere.
    monkeypatch.setattr(console, "has", lambda package: False)
    published.mkdir()
    (published / f"{slug()}.json").write_text("published")
    return published, partial


def slug() -> str:
    return report.slug({"facts": report.facts("cpu")})


def timed(case: Case, *_: Any) -> report.Row:
    """A row as the runner's, without its work."""
    ours = {"median": 1.0, "fraction_of_clone": 0.5, "agreement": "equal"}
    results = {contenders.OURS: ours}
    return {"name": case.name, "case": dataclasses.asdict(case), "results": results}


def test_everything_is_published(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published, _ = folders
    monkeypatch.setattr(runner, "run", timed)
    __main__.main(["--device", "cpu", "--limit", "1000"])
    results = report.load(published / f"{slug()}.json")
    assert [row["name"] for row in results["rows"]] == [case.name for case in CASES]
    assert results["left_out"] == 0
    out = capsys.readouterr().out
    assert "Stopped" not in out
    assert "left out" not in out
    assert f"Written: {model.DOCUMENT}" in out


@pytest.mark.parametrize(
    "why",
    [signal.SIGTERM, signal.SIGINT, "--limit 5", "ZeroDivisionError", "--filter"],
    ids=lambda why: getattr(why, "name", why),
)
def test_part_is_not_published(
    why: str | signal.Signals,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What stops it leaves what was timed, in the other folder, and says how much is left out."""
    published, partial = folders
    document = model.DOCUMENT.read_text()
    seen: list[str] = []
    now = [0.0]
    expected = len(CASES)
    arguments = ["--device", "cpu"]

    def run(case: Case, *_: Any) -> report.Row:
        if seen:  # the cases before are on disk
            assert len(report.load(partial / f"{slug()}.json")["rows"]) == len(seen)
        seen.append(case.name)
        if len(seen) == 3:
            if isinstance(why, signal.Signals):
                signal.raise_signal(why)
            elif why == "ZeroDivisionError":
                raise ZeroDivisionError
            now[0] = 5.0
        return timed(case)

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr("benchmarks.stopping.time", SimpleNamespace(monotonic=lambda: now[0]))
    rows = 3
    if isinstance(why, signal.Signals):
        before = signal.getsignal(why)
        with pytest.raises(SystemExit) as stopped:
            __main__.main(arguments)
        assert stopped.value.code == 128 + why
        assert signal.getsignal(why) == before
    elif why == "ZeroDivisionError":
        rows = 2
        with pytest.raises(ZeroDivisionError):
            __main__.main(arguments)
    elif why == "--limit 5":
        __main__.main([*arguments, "--limit", "5"])
    else:
        __main__.main([*arguments, "--filter", "^tiny"])
        rows = expected = sum(case.name.startswith("tiny") for case in CASES)
    results = report.load(partial / f"{slug()}.json")
    assert [row["name"] for row in results["rows"]] == seen[:rows]
    assert results["left_out"] == expected - rows
    out = capsys.readouterr().out
    if expected > rows:
        name = why.name if isinstance(why, signal.Signals) else why
        said = f"Stopped by {name}: {rows} cases timed, {expected - rows} left out"
        assert out.splitlines()[-1] == said
        assert f" {expected - rows} cases are left out." in out
    assert (published / f"{slug()}.json").read_text() == "published"
    assert model.DOCUMENT.read_text() == document
    assert [path.name for path in partial.iterdir()] == [f"{slug()}.json"]


def test_published_folder_is_for_everything(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run", timed)
    arguments = ["--device", "cpu", "--output", str(folders[0])]
    for part in (["--quick"], ["--filter", "^tiny"], ["--seconds", "1"], ["--peers", "torch"]):
        with pytest.raises(SystemExit, match="is for everything"):
            __main__.main([*arguments, *part])
    assert not folders[1].exists()


def test_time_is_up_before_the_first(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    __main__.main(["--device", "cpu", "--limit", "0"])
    said = f"Stopped by --limit 0: 0 cases timed, {len(CASES)} left out"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert not folders[1].exists()


def test_second_signal_does_what_it_did() -> None:
    with stopping() as reason:
        assert reason() == ""
        signal.raise_signal(signal.SIGINT)
        assert reason() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_half_a_report_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the new one takes its place, the old one is there, and nothing beside it."""
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
    assert list(path.parent.iterdir()) == [path]
    report.save(new, path)
    assert report.load(path) == new
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_memory_of_a_training_step(tmp_path: Path) -> None:
    """Indices take eight, four bytes and one; the report is not taken for one of times."""
    json_path, *_ = training.run("cpu", tmp_path, training.Setup(1, (32, 64)))
    rows = json.loads(json_path.read_text())["rows"]
    assert len(rows) == len(training.DTYPES) * len(training.INDEX_DTYPES)
    cells = sum(width * (32 * 64) // 4**stage for stage, width in enumerate(segnet.WIDTHS, 1))
    for row in rows:
        itemsize = {training.TORCH: 8, "int32": 4, "uint8": 1}[row["contender"]]
        assert sum(layer["indices"] for layer in row["layers"]) == cells * itemsize
        values = sum(layer["values"] for layer in row["layers"])
        assert values == cells * (4 if row["dtype"] == "float32" else 2)
    assert report.load_all(tmp_path) == []


def trained(*_: Any) -> report.Report:
    """A report as the one of the training, without its work."""
    layers = [{"name": f"pool {stage}", "values": 2**20, "indices": 2**21} for stage in (1, 2)]
    row = {"peak_bytes": 2**23, "loss": 1.0, "layers": layers}
    every = itertools.product(training.DTYPES, training.INDEX_DTYPES)
    rows = [{"contender": contender, "dtype": dtype, **row} for dtype, contender in every]
    setup = dataclasses.asdict(training.Setup())
    return {"facts": FACTS, "training": setup, "rows": rows}


def test_picture_of_a_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    monkeypatch.setattr(training, "measure", trained)
    _, picture = training.run("cpu", tmp_path)
    assert picture.name == "none-training.png"
    assert picture.stat().st_size > 10_000
    assert sorted(tmp_path.iterdir()) == [tmp_path / "none-training.json", picture]


def test_training_without_rich_and_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in console.SHOWING:
        monkeypatch.setitem(sys.modules, package, None)

    def measure(device: str, setup: training.Setup, begin: Callable[[str], None]) -> report.Report:
        begin("torch.nn, float32")
        return trained()

    monkeypatch.setattr(training, "measure", measure)
    __main__.main(["--device", "cpu", "--training", "--output", str(tmp_path)])
    missing, begun, title, _, *table, written, no_pictures = capsys.readouterr().out.splitlines()
    assert missing.startswith("Not installed: rich (")
    assert begun == "1/6 torch.nn, float32"
    assert title == "SegNet's training step on none, PyTorch 2"
    assert table[0].startswith("| dtype | indices |")
    assert table[2] == "| float32 | torch.nn | 2.0 MiB | 4.0 MiB | 8.0 MiB |"
    assert len(table) == 8
    assert written == f"Written: {tmp_path / 'none-training.json'}"
    assert no_pictures == "No pictures: they need matplotlib"


@pytest.mark.slow
def test_torch_compile() -> None:
    case = dataclasses.replace(shrunk(CASES[0]), direction="both")
    results = runner.run(case, "cpu", [contenders.COMPILED], ONCE)["results"]
    assert results[contenders.COMPILED].get("agreement") == "equal", results


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_cuda(case: Case) -> None:
    peers = [contenders.TORCH, contenders.TRITON]
    results = runner.run(case, "cuda", peers, ONCE)["results"]
    assert results[contenders.OURS]["agreement"] == "equal"
    for name in (contenders.OURS, contenders.CLONE, contenders.TORCH):
        assert results[name].keys() >= COLUMNS, results[name]
    assert results[contenders.TORCH]["agreement"] == agreement_of_torch(case)
    reason = contenders.triton_reason(case, "cuda")
    if not importlib.util.find_spec("triton"):
        reason = reason or "not installed: triton"
    if reason:
        assert results[contenders.TRITON] == {"reason": reason}
    else:
        assert results[contenders.TRITON].keys() >= COLUMNS, results[contenders.TRITON]
        assert results[contenders.TRITON]["agreement"] == "equal"


@pytest.mark.cuda
@pytest.mark.parametrize("with_host", [False, True])
def test_cuda_clock(with_host: bool) -> None:
    """Events in milliseconds, made seconds; the host's time is in them where it is asked for."""
    numbers = torch.zeros(10, device="cuda")

    def call() -> Tensor:
        if with_host:
            time.sleep(0.02)
        return numbers + 1

    clock = CudaClock(with_host)
    for _ in range(3):
        clock.time(call)
    seconds = clock.collect()
    assert len(seconds) == 3
    assert clock.collect() == []
    assert min(seconds) > (0.015 if with_host else 0)


TRITON = """
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
    command = [sys.executable, "-c", TRITON, str(ROOT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
