"""The benchmarks run, check what they time, and say what they predict. No time is asserted."""

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

for package in ("matplotlib", "rich"):
    pytest.importorskip(package, reason=f"the benchmarks need {package}")
ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import (  # noqa: E402
    cases,
    contenders,
    data,
    model,
    plot,
    report,
    runner,
    segnet,
    training,
)
from benchmarks.cases import CASES, Case  # noqa: E402
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


def test_too_large_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_bytes", lambda device: 2**30)
    row = runner.run(CASES[-1], "cpu", [], ONCE)
    assert "results" not in row
    assert "1 are available" in row["reason"]
    facts = {"device": "none", "torch": "2", "date": "2000-01-01", "kind": "cpu"}
    assert report.rich_table({"facts": facts, "rows": [row]}).row_count == 1
    assert plot.sweep({"facts": facts, "rows": [row]}) is not None


def test_document_has_the_table_of_the_runner() -> None:
    assert model.section() == model.table(report.load_all()), "python -m benchmarks --model write"


def run(*arguments: str) -> str:
    """From the root, as ``make bench`` does, with the package that the tests have."""
    import maxunpool_cuda

    path = os.pathsep.join((str(Path(maxunpool_cuda.__file__).parent.parent), *sys.path))
    command = [sys.executable, "-m", "benchmarks", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    out = run(
        *("--device", "cpu", "--quick", "--seconds", "0", "--output", str(tmp_path)),
        *("--filter", "^(tiny|sweep-1024|sweep-2048)"),
    )
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert results["facts"].keys() >= {"device", "cores", "torch", "python", "date", "build_info"}
    assert len(results["rows"]) == 5
    for row in results["rows"]:
        assert row["name"] in out
        assert row["results"][contenders.OURS].keys() >= COLUMNS
        assert row["results"][contenders.TORCH].keys() >= {*COLUMNS, "times_ours"}
    forward = results["rows"][0]
    assert forward["case"]["direction"] == "forward"
    # 2*8*16*16 float32 outputs, and nothing beside them.
    assert forward["results"][contenders.OURS]["peak_bytes"] == 2 * 8 * 16 * 16 * 4
    plots = sorted(plot.name for plot in tmp_path.glob("*.png"))
    assert [name.rpartition("-")[2] for name in plots] == ["fractions.png", "sweep.png"]
    table = run("--table", str(path))
    assert "| tiny | forward | 1 |" in table
    assert "| sweep | forward | 2 |" in table
    assert "| unpooling, all but the sweep | both | 1 |" in table


@pytest.mark.slow
def test_memory_of_a_training_step(tmp_path: Path) -> None:
    """Indices take eight, four bytes and one; the report is not taken for one of times."""
    json_path, picture = training.run("cpu", tmp_path, training.Setup(1, (32, 64)))
    rows = json.loads(json_path.read_text())["rows"]
    assert len(rows) == len(training.DTYPES) * len(training.INDEX_DTYPES)
    cells = sum(width * (32 * 64) // 4**stage for stage, width in enumerate(segnet.WIDTHS, 1))
    for row in rows:
        itemsize = {training.TORCH: 8, "int32": 4, "uint8": 1}[row["contender"]]
        assert sum(layer["indices"] for layer in row["layers"]) == cells * itemsize
        values = sum(layer["values"] for layer in row["layers"])
        assert values == cells * (4 if row["dtype"] == "float32" else 2)
    assert picture.stat().st_size > 10_000
    assert report.load_all(tmp_path) == []


@pytest.mark.slow
def test_torch_compile() -> None:
    case = dataclasses.replace(shrunk(CASES[0]), direction="both")
    results = runner.run(case, "cpu", [contenders.COMPILED], ONCE)["results"]
    assert results[contenders.COMPILED].get("agreement") == "equal", results


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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
