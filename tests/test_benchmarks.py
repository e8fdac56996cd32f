# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks check what they time, and see what became slower; documents say what was measured."""

import dataclasses
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace

import pytest
import torch
from failures import Named, check_each

import maxunpool_cuda

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: the package's source there must not hide the one installed

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import (  # noqa: E402
    architectures,
    comparisons,
    contenders,
    data,
    fallback,
    memory,
    networks,
    pages,
    report,
    timing,
    training,
)
from benchmarks.cases import BY_NAME, CASES, KERNELBENCH, LARGE, QUICK, Case  # noqa: E402
from benchmarks.contenders import CLONE, INDUCTOR, OURS, TORCH  # noqa: E402

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


def test_cases() -> None:
    assert len(BY_NAME) == len(CASES)
    case = Case("", "", (1, 1, 8, 8), index_dtype="uint8", operation="round-trip", direction="both")
    assert case.useful_bytes == 4 * (16 * (4 + 1) + 64 * 4)


def check_each_case(cases: Iterable[Case], check: Callable[[Case], object]) -> None:
    named = (Named(str(case), case, math.prod(case.shape)) for case in cases)
    check_each(named, lambda each: check(each.value))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everyone_is_right(device: str) -> None:
    """A run raises unless every contender returns the definition's result."""

    def check(case: Case) -> None:
        assert timing.run(case, device, 0)["results"].keys() >= {OURS, TORCH, CLONE}

    check_each_case(DISTINCT, check)


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
    timing.interleave(calls, dict.fromkeys("abc", timing.cpu_clock), seconds=100)
    assert "".join(order) == "abcbcacababc"


def test_nobody_takes_the_data_that_another_has_just_read(monkeypatch: Patch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 7)
    taken: dict[str, list[int]] = {name: [] for name in "abc"}
    calls = {a: [functools.partial(taken[a].append, i) for i in range(9)] for a in "abc"}
    timing.interleave(calls, dict.fromkeys("abc", timing.cpu_clock), seconds=100)
    turns = range(len(taken["a"]))
    assert [*zip(*taken.values(), strict=True)] == [(n, (n + 3) % 9, (n + 6) % 9) for n in turns]


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


@pytest.mark.parametrize(
    "name", ["squeezenet-b1-channels_last-inference", "vgg-b8-channels_last-training"]
)
def test_whole_networks(name: str, monkeypatch: Patch) -> None:
    """A run raises if a network gets another layer in place of the maximum."""
    case = dataclasses.replace(BY_NAME[f"network-{name}"], shape=(2, 3, 40, 32))
    compiled = {INDUCTOR, f"{OURS}, {INDUCTOR}"}
    assert timing.run(case, "cpu", 0)["results"].keys() == {OURS, TORCH, *compiled}
    average = lambda model, **_: model.__setitem__(1, torch.nn.AvgPool2d(3, 1, 1))  # noqa: E731
    monkeypatch.setattr(maxunpool_cuda, "convert_max_pooling", average)
    with pytest.raises(RuntimeError, match=f"^{OURS} does not return torch.nn's result of net"):
        networks.calls(case, "cpu")


def test_networks_are_compared_with_reproducible_convolutions(monkeypatch: Patch) -> None:
    """In float32, compiled ones too. Nothing else of cuDNN's settings changes.

    They are as before when calls are timed.
    """
    seen = []

    def settings() -> tuple[bool, ...]:
        cudnn = torch.backends.cudnn
        return cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark, cudnn.enabled

    def call_of(_case: Case, _device: str, name: str) -> contenders.Call:
        return lambda: seen.append((name, settings())) or (torch.ones(1),)

    monkeypatch.setattr(networks, "call_of", call_of)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    made = networks.calls(BY_NAME["network-vgg-b1-contiguous-training"], "cpu")
    assert before[:2] == (False, True)
    assert seen == [(name, (INDUCTOR not in name, False, *before[2:])) for name, _ in seen]
    assert settings() == before
    assert {name for name, _ in seen} == made.keys()


def without_memory(case: Case, device: str) -> int:
    raise torch.OutOfMemoryError(f"no memory for {case.name} on {device}")


def test_the_run_goes_on_after_a_case_that_fails(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contender is wrong in one case, raises in another, and the third is timed."""
    right = contenders.functions

    def functions(case: Case, device: str) -> dict[str, contenders.Function]:
        able = right(case, device)
        if case.direction == "forward":
            able["liar"] = lambda *tensors: (2 * able[OURS](*tensors)[0],)
        if case.direction == "backward":
            able["glutton"] = lambda *_: without_memory(case, device)
        return able

    monkeypatch.setattr(contenders, "functions", functions)
    few = ["--device", "cpu", "--quick", "--seconds", "0", "--filter", "^tiny"]
    with pytest.raises(SystemExit) as stopped:
        command.main([*few, "--output", str(tmp_path)])
    forward, backward, both = (case.name for case in QUICK if case.name.startswith("tiny"))
    assert stopped.value.code == f"benchmarks: failed: {forward}; failed: {backward}"
    rows = report.load(next(tmp_path.glob("*.json")))["rows"]
    assert [row["name"] for row in rows] == [forward, backward, both]
    wrong = f"RuntimeError: liar does not return the definition's result of {forward}"
    raised = f"OutOfMemoryError: no memory for {backward} on cpu"
    assert [row.get("failed") for row in rows] == [wrong, raised, None]
    printed = capsys.readouterr().out
    assert f"Failed:\n\n- {forward}: {wrong}\n- {backward}: {raised}\n" in printed
    assert re.search(rf"^\| {both} +\| +1 \| ", printed, re.M)
    assert not re.search(rf"^\| {forward} ", printed, re.M)


def test_a_case_too_large_for_the_memory_is_left_out(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails nothing, also if it is the only one."""
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1000)
    few = ["--device", "cpu", "--seconds", "0", "--filter", "^tiny.*int64-contiguous-forward"]
    command.main([*few, "--output", str(tmp_path)])
    (row,) = report.load(next(tmp_path.glob("*.json")))["rows"]
    assert row["left out"] == "needs 0.0 GiB, but 0.0 are free"
    assert row["results"] == {}
    assert f"Left out:\n\n- {row['name']}: needs" in capsys.readouterr().out


class FakeGPU:
    """A device that does what is queued, one after the other; times are in microseconds."""

    def __init__(self, queueing: float, working: float) -> None:
        self.queueing = queueing  # what the host needs for a call
        self.working = working  # what the device needs for it
        self.host = 0.0  # now
        self.free = 0.0  # when the device has done all that is queued
        self.sleeps: list[int] = []

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.free = max(self.host, self.free) + cycles / 2000

    def call(self) -> None:
        """Four kernels."""
        for _ in range(4):
            self.host += self.queueing / 4
            self.free = max(self.host, self.free) + self.working / 4

    def event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        made = SimpleNamespace(at=math.nan)
        made.record = lambda: setattr(made, "at", max(self.host, self.free))
        made.query = lambda: made.at <= self.host
        made.synchronize = lambda: setattr(self, "host", max(self.host, made.at))
        made.elapsed_time = lambda end: (end.at - made.at) / 1000
        return made

    def install(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)


def test_the_device_sleeps_until_the_host_has_queued_the_call(monkeypatch: Patch) -> None:
    gpu = FakeGPU(queueing=900, working=40)  # 0.25 ms and 0.5 ms do not last
    gpu.install(monkeypatch)
    clock = timing.CudaClock()
    assert [clock(gpu.call) for _ in range(3)] == pytest.approx([40e-6] * 3)
    assert gpu.sleeps == [500_000, 1_000_000, 2_000_000, 2_000_000, 2_000_000]
    assert not clock.is_host_bound


def test_a_call_that_the_device_waits_for_is_host_bound(
    monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = FakeGPU(queueing=50_000, working=40)  # more than the longest sleep
    gpu.install(monkeypatch)
    case = shrunk(CASES[0])
    monkeypatch.setattr(timing, "calls", lambda *_: {OURS: [gpu.call], TORCH: [lambda: None]})
    row = timing.run(case, "cuda", 0)
    assert row["host-bound"] == [OURS]
    assert row["results"][OURS]["quartiles"][1] == pytest.approx(18.01e-3)  # 50 ms less the sleep
    assert max(gpu.sleeps) == 64_000_000
    assert gpu.sleeps.count(1_000_000) == 1  # the longest sleep is kept

    now = report.load(RESULTS)
    first, second, *_ = rows = [
        r for r in now["rows"] if BY_NAME[r["name"]].family == "unpooling, tiny, forward"
    ]
    first["host-bound"] = [OURS]
    report.means(now | {"rows": rows}, "name")
    report.means(now | {"rows": rows}, "family")
    printed = capsys.readouterr().out
    assert f"| {first['name']}, host-bound |" in printed
    assert re.search(rf"^\| {second['name']} +\|", printed, re.M)
    assert "| unpooling, tiny, forward, 1 host-bound |" in printed


def test_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """Useful bytes by time, and the share of what a clone has."""
    case = BY_NAME["tiny-16x8-b2-2x2-float32-int64-contiguous-forward"]
    medians = {OURS: 2e-6, TORCH: 5e-6, CLONE: 1e-6}
    results = {name: {"quartiles": [0, time, 1]} for name, time in medians.items()}
    report.means({"rows": [{"name": case.name, "results": results}]}, "name")
    rate = 2 * 8 * (64 * (4 + 8) + 256 * 4) / 2e-6 / 1e9
    assert (
        f"|     1 |          2.0 | {rate:4.0f} |      50% |                   2.50 |"
        in capsys.readouterr().out
    )


class FakeProperties(SimpleNamespace):
    """A B200's, as far as they are asked for."""

    L2_cache_size = 128 * 2**20
    total_memory = 180 * 2**30
    uuid = "12345678-9abc"


def of_a_b200(monkeypatch: Patch) -> None:
    monkeypatch.undo()  # the fixture's cache of no bytes
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: FakeProperties())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "B200")
    monkeypatch.setattr(memory, "free_bytes", lambda _: 170 * 2**30)


OPERATORS = [case for case in CASES if case.operation != "network"]


def test_rotations_exceed_twice_the_cache(monkeypatch: Patch) -> None:
    """What one rotation reads, unless the tensors are tiny or 4 GiB are used up."""
    of_a_b200(monkeypatch)

    def check(case: Case) -> None:
        sets = memory.sets(case, "cuda")
        given, gradient = memory.inputs_of(case)
        reads_indices = case.operation == "unpool" or (gradient and case.operation == "pool")
        indices = memory.sizes(case).indices if reads_indices else 0
        read = sets * ((gradient or given) + indices)
        held = memory.bytes_needed(case, "cuda", sets)
        more = memory.bytes_needed(case, "cuda", sets + 1)
        assert held <= 2**32 or (case.layer in KERNELBENCH and sets == 1)
        assert read >= 2 * 128 * 2**20 or case.layer.startswith("tiny") or more > 2**32

    check_each_case(OPERATORS, check)


def test_rotations_on_the_cpu(monkeypatch: Patch) -> None:
    monkeypatch.undo()

    def check(case: Case) -> None:
        sets = memory.sets(case, "cpu")
        assert 1 <= sets <= 32
        assert memory.bytes_needed(case, "cpu", sets) <= 2**32

    check_each_case((case for case in OPERATORS if case.is_timed_on("cpu")), check)


def test_a_rotation_of_large_tensors_moves_planes(monkeypatch: Patch) -> None:
    """Each set has other values at each place, the same layout, and the results of its own."""
    monkeypatch.setattr(data, "FEW", 0)
    monkeypatch.setattr(memory, "sets", lambda *_: 4)
    case = BY_NAME["pool-image-112x64-b16-2x2-float32-uint8-channels_last-backward"]
    rotation = data.rotation(dataclasses.replace(case, shape=(2, 3, 8, 8)), "cpu")
    first = rotation[0]
    for one, channels in zip(rotation[1:], (1, 2, 1), strict=True):
        for tensor, moved in zip(first, one, strict=True):
            assert torch.equal(tensor[:, [0]], moved[:, [channels]])
            assert not torch.equal(tensor, moved)
            assert tensor.stride() == moved.stride()


@pytest.mark.parametrize("free", [2**31, 2**30, 2**29])
def test_rotations_fit_the_free_memory(free: int, monkeypatch: Patch) -> None:
    of_a_b200(monkeypatch)
    case = BY_NAME["image-112x64-b16-4x4-float32-uint8-contiguous-backward"]
    most = memory.sets(case, "cuda")
    monkeypatch.setattr(memory, "free_bytes", lambda _: free)
    sets = memory.sets(case, "cuda")
    assert 1 <= sets < most
    assert memory.bytes_needed(case, "cuda", sets) <= free


def test_a_case_that_does_not_fit_the_free_memory(monkeypatch: Patch) -> None:
    of_a_b200(monkeypatch)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 12 * 2**30)
    with pytest.raises(memory.TooLargeError, match=r"^needs 18\.\d GiB, but 12\.0 are free$"):
        memory.sets(BY_NAME["kernelbench-41"], "cuda")


def test_free_memory_is_asked_for_when_the_cache_is_empty(monkeypatch: Patch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, len(asked)))
    assert memory.free_bytes("cuda") == 2**30
    assert asked == ["emptied"]
    assert memory.free_bytes("cpu") == math.inf


PLANNED = [
    shrunk(CASES[0]),
    *(
        next(c for c in DISTINCT if (c.operation, c.direction) == which)
        for which in (
            ("unpool", "backward"),
            ("pool", "forward"),
            ("pool", "backward"),
            ("values", "forward"),
            ("round-trip", "both"),
        )
    ),
]


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: f"{case.operation}-{case.direction}")
def test_no_more_memory_is_used_than_planned(case: Case) -> None:
    case = dataclasses.replace(case, shape=(8, 16, *[4096 if case.rank == 1 else 66] * case.rank))
    held = training.peak_bytes(lambda: timing.run(case, "cpu", 0), "cpu")
    assert held <= 1.02 * memory.bytes_needed(case, "cpu", memory.sets(case, "cpu"))


PROBLEMS = [
    pytest.param(41, torch.nn.MaxPool1d(8, 1, 4, dilation=3), (64, 192, 65536), id="1d"),
    pytest.param(42, torch.nn.MaxPool2d(4, 1, 1), (32, 64, 512, 512), id="2d"),
    pytest.param(43, torch.nn.MaxPool3d(3, 2, 1, dilation=3), (16, 32, 128, 128, 128), id="3d"),
]


@pytest.mark.parametrize(("number", "problem", "shape"), PROBLEMS)
def test_kernelbench(number: int, problem: torch.nn.Module, shape: tuple[int, ...]) -> None:
    """The problems as published, whose times docs/performance.md has, and the bound by bytes."""
    name, text = f"kernelbench-{number}", (ROOT / "docs/performance.md").read_text()
    case = BY_NAME[name]
    expected = problem(torch.empty(shape, device="meta"))
    assert (case.shape, case.pooled, case.dtype) == (shape, expected.shape, "float32")
    assert case.useful_bytes == 4 * (math.prod(shape) + expected.numel())
    assert re.search(rf"\| {name} \|.* {case.useful_bytes / 3.35e9:.2f} \|", text)
    small = shrunk(case)
    image = torch.randn(small.shape)
    wrong = [
        contender
        for contender, function in contenders.functions(small, "cpu").items()
        if not torch.equal(function(image, image)[0], problem(image))
    ]
    assert wrong == []


def test_cases_for_gpus_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Large planes, KernelBench: as no run on the CPU has them, so no other case is for GPUs."""
    names = {case.layer for case in CASES if not case.is_timed_on("cpu")}
    assert names == {*KERNELBENCH, *(layer for layer, _ in LARGE)}
    assert all(case.is_timed_on("cuda") for case in CASES)
    on_cuda = [case.name for case in CASES if case.device == "cuda"]
    too_large = [
        case.name
        for case in CASES
        if math.prod(case.shape[2:]) > 2**21 or case.layer in KERNELBENCH
    ]
    assert on_cuda == too_large
    with pytest.raises(SystemExit, match=r"^benchmarks: kernelbench-42 is timed on cuda alone"):
        command.main(["--device", "cpu", "--filter", "kernelbench-42"])


def test_facts_of_a_gpu(monkeypatch: Patch) -> None:
    """What nvidia-smi says of this GPU; nothing where there is none, or another answer."""
    of_a_b200(monkeypatch)
    asked: list[str] = []

    def says(words: str) -> None:
        def run(line: list[str], **_) -> SimpleNamespace:
            asked[:] = line
            return SimpleNamespace(stdout=words)

        monkeypatch.setattr(subprocess, "run", run)

    says("580.95.05, 1965 MHz, 1980 MHz, 3996 MHz, 3996 MHz\n")
    facts = report.facts("cuda")
    assert asked[:2] == ["nvidia-smi", "--id=GPU-12345678-9abc"]
    assert facts["L2 MiB"] == 128
    assert facts["driver_version"] == "580.95.05"
    assert "nvcc" in facts
    known = "driver 580.95.05, L2 MiB 128.0, SM clock 1965 MHz, at most 1980 MHz, memory clock 3996"
    assert report.details({"facts": facts | {"nvcc": None}}).startswith(known)
    says("No devices were found\n")
    assert "driver_version" not in report.facts("cuda")
    monkeypatch.setattr(subprocess, "run", without_nvidia_smi)
    assert "driver_version" not in report.facts("cuda")
    assert report.details({"facts": report.facts("cpu")}) == ""


def without_nvidia_smi(*_, **__) -> None:
    raise FileNotFoundError("nvidia-smi")


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--device", "cpu", "--quick", "--seconds", "0", "--filter", "^tiny"]
    command.main([*few, "--output", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    results = report.load(next(tmp_path.glob("*.json")))
    assert results["facts"].keys() >= {"device", "torch", "maxunpool_cuda", "date"}
    assert len(results["rows"]) == 3
    for row in results["rows"]:
        # In microseconds before the mean, as the table: 20.85 may be rounded up or down.
        time = geometric_mean([row["results"][OURS]["quartiles"][1] * 1e6])
        for group in (row["name"], BY_NAME[row["name"]].family):
            assert f"| {group} | 1 | {time:.1f} |" in printed


SMALL = {
    "SegNet": (functools.partial(architectures.SegNet, (16, 32), (1, 1)), (1, 3, 32, 64)),
    "VGG-16": (functools.partial(architectures.vgg16, 16), (1, 3, 32, 32)),
    "3d U-Net": (functools.partial(architectures.UNet3d, (4, 8)), (1, 1, 4, 6, 8)),
    "airbench94": (functools.partial(architectures.airbench, (4, 6, 8)), (2, 3, 32, 32)),
    "ResNet-50": (functools.partial(architectures.resnet50, (1, 1)), (1, 3, 24, 40)),
}


def small(network: str) -> training.Training:
    """The training of a smaller network of this name."""
    first = next(each for each in training.TRAININGS if each.network == network)
    make, shape = SMALL[network]
    return dataclasses.replace(first, make=make, shape=shape)


def saved_of_pools(training: training.Training, item: int) -> tuple[int, int]:
    """The bytes of each pool's outputs as they would be in uint8, and of its inputs."""
    model, images = training.make(), torch.randn(training.shape)
    outputs, inputs = [], []

    def note(_: torch.nn.Module, given: tuple[torch.Tensor], made: torch.Tensor) -> None:
        outputs.append((made[0] if isinstance(made, tuple) else made).numel())
        inputs.append(given[0].numel() * item)

    for module in model.modules():
        if isinstance(module, torch.nn.modules.pooling._MaxPoolNd):
            module.register_forward_hook(note)
    model(images)
    return sum(outputs), sum(inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("network", SMALL)
def test_saved_bytes(network: str, dtype: str) -> None:
    """Indices take 1 byte in place of 8; inputs are not saved unless an activation saves them."""
    each = small(network)
    before, after = training.rows_of(each, dtype, "cpu")
    outputs, inputs = saved_of_pools(each, getattr(torch, dtype).itemsize)
    frees_inputs = each.activation in ("LeakyReLU", "GELU")
    assert before["saved"] - after["saved"] == 7 * outputs + frees_inputs * inputs
    assert 0 < after["saved"] < before["saved"]
    assert 0 < after["peak"] <= before["peak"]  # the peak may come before the pools


def test_peak_of_segnet() -> None:
    """The peak includes all indices, as nothing larger is made after the last of them."""
    before, after = training.rows_of(small("SegNet"), "float32", "cpu")
    assert before["peak"] - after["peak"] == 7 * (16 * (32 * 64) // 4 + 32 * (32 * 64) // 16)


def test_segnet_with_int64_indices_gains_nothing() -> None:
    """Its ReLU keeps the input of each pool, and its unpools keep the indices."""
    before, after = training.rows_of(
        dataclasses.replace(small("SegNet"), index_dtype=torch.int64), "float32", "cpu"
    )
    assert (after["saved"], after["peak"]) == (before["saved"], before["peak"])


@pytest.mark.parametrize("network", [name for name in SMALL if name != "SegNet"])
def test_inference_gains_nothing(network: str) -> None:
    model, images = small(network).make().eval(), torch.randn(small(network).shape)
    peaks = []
    with torch.no_grad():
        for _ in range(2):
            model(images)  # the first call allocates what is allocated once
            peaks.append(training.peak_bytes(lambda: model(images), "cpu"))
            maxunpool_cuda.convert_max_pooling(model)
    assert peaks[1] == peaks[0] > 0


def test_parameters_and_buffers_are_not_counted() -> None:
    """What is saved twice, or as a view, counts once."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5).eval())
    x = torch.ones(2, 4, 3)[:, 1].requires_grad_()
    with training.counted_savings(model) as saved:
        model(x)
        (x * x[:1]).exp()
    x_bytes, product_bytes, linear_bytes = 4 * 2 * 4 * 3, 4 * 2 * 3, 4 * 2 * 5
    assert {*saved.values()} - {0} == {x_bytes, product_bytes, linear_bytes}
    assert len([size for size in saved.values() if size]) == 3


def test_a_step_with_another_result_is_refused(monkeypatch: Patch) -> None:
    average = lambda model, **_: model.__setitem__(3, torch.nn.AvgPool2d(2))  # noqa: E731
    monkeypatch.setattr(maxunpool_cuda, "convert_max_pooling", average)
    with pytest.raises(RuntimeError, match=r"^maxunpool_cuda does not return .* of airbench94$"):
        training.rows_of(small("airbench94"), "float32", "cpu")


def test_gradients_may_differ_by_the_tolerance() -> None:
    output, gradient = torch.ones(3), torch.tensor([3.0, 4.0])
    near = gradient * 1.05
    assert training.are_equal((output, near), (output, gradient), tolerance=0.1)
    assert not training.are_equal((output, near), (output, gradient), tolerance=0.01)
    assert not training.are_equal((output, near), (output, gradient), tolerance=0)
    assert not training.are_equal((output * 1.01, near), (output, gradient), tolerance=0.1)


def test_trainings_end_to_end(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "TRAININGS", (small("airbench94"), small("SegNet")))
    command.main(["--device", "cpu", "--training", "--output", str(tmp_path)])
    results = report.load(next(tmp_path.glob("*-training.json")))
    assert [row["dtype"] for row in results["rows"]] == 2 * [*2 * ["float32"], *2 * ["bfloat16"]]
    printed = " ".join(capsys.readouterr().out.split())
    before, after = results["rows"][:2]
    assert "| airbench94, GELU, 2x3x32x32, float32 |" in printed
    assert f"| {after['saved'] / before['saved'] - 1:.1%} |" in printed


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        pytest.param(architectures.vgg16, 138_357_544, id="VGG-16"),
        pytest.param(architectures.resnet50, 25_557_032, id="ResNet-50"),
        pytest.param(architectures.UNet3d, 5_749_410, id="MONAI's BasicUNet"),
    ],
)
def test_networks_have_the_published_number_of_parameters(
    make: Callable[[], torch.nn.Module], parameters: int
) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == parameters


PARTS = (*pages.TABLES, *pages.SENTENCES)  # of the documents: what was measured


@pytest.mark.parametrize("page", sorted({part.page for part in PARTS}))
def test_documents_say_what_was_measured(page: str) -> None:
    """All that has results agrees with them, wherever lines break."""
    text = (ROOT / page).read_text()
    assert text.split() == pages.rewritten(page).split(), "python -m benchmarks --write mends it"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.page}-{part.key}")
def test_each_figure_is_found_once(part: pages.Table | pages.Sentence) -> None:
    """Also of results that are not there yet."""
    found = re.findall(part.pattern, (ROOT / part.page).read_text())
    assert len(found) == 1


def test_each_table_of_results_has_a_name() -> None:
    """A comment of a page that names a table is not forgotten in the list."""
    marked = [
        (str(page.relative_to(ROOT)), name)
        for page in ROOT.glob("docs/*.md")
        for name in re.findall("<!-- measured: (.*) -->", page.read_text())
    ]
    assert sorted(marked) == sorted((table.page, table.name) for table in pages.TABLES)


def test_words_are_filled() -> None:
    """Figures change, and nothing else, also if the words are on two lines."""
    sentence = pages.Sentence("", "takes {} of {} bytes, or {} %.", "", lambda of: of["figures"])
    text = "It is so.\nThis takes 2 of\n16.5 bytes, or 3 %.\nIt is."
    written = sentence.rewrite(text, {"figures": ["1", "8", "44"]})
    assert written == "It is so.\nThis takes 1 of\n8 bytes, or 44 %.\nIt is."
    with pytest.raises(ValueError, match=r"expected the words 'takes \{\} of"):
        sentence.rewrite("This took 2 of 16 bytes", {"figures": ["1", "8", "44"]})


def test_no_call_takes_8_times_as_long_without_kernels() -> None:
    """Nor does its gradient keep more than torch.nn's."""
    results = report.load(pages.RESULTS / "fallback.json")
    assert float(fallback.slower(results)[1]) < 8
    assert all(fallback.times(row, OURS, "kept") <= 1 for row in results["rows"])


@pytest.mark.parametrize("case", fallback.CASES, ids=lambda case: case.name)
def test_workarounds_return_torch_nns_results(case: fallback.Case) -> None:
    """On small tensors: everyone's result and gradient are compared before they are timed."""
    small = dataclasses.replace(case, shape=(*case.shape[:1], 2, *[8] * len(case.shape[2:])))
    row = fallback.row_of(small, threads=1, seconds=0)
    assert row["results"].keys() == case.functions.keys()
    assert all(each["saved"] > 0 for each in row["results"].values())


def test_kernels_are_not_timed_as_if_there_were_none() -> None:
    if maxunpool_cuda.build_info()["kernels"] == "none":
        pytest.skip("this build has no compiled library")
    with pytest.raises(SystemExit, match="expected a build with FALLBACK=1 but got one with kern"):
        fallback.measure(0)


def test_speeds_are_of_one_kind_of_call() -> None:
    """They tell dtypes, directions and layouts apart, and leave out networks and untimed cases."""
    case = BY_NAME["image-112x64-b16-2x2-float32-int64-contiguous-forward"]
    times = {OURS: 2.0, TORCH: 5.0}
    results = {name: {"quartiles": [0, time, 9]} for name, time in times.items()}
    others = [
        dataclasses.replace(case, **change).name
        for change in ({"direction": "backward"}, {"dtype": "bfloat16"}, {"operation": "pool"})
    ]
    rows = [{"name": name, "results": results} for name in (case.name, *others)]
    rows += [{"name": "network-squeezenet-b1-contiguous-inference", "results": results}]
    rows += [{"name": case.name, "results": {}, "left out": "memory"}]
    found = report.speeds({"rows": rows})
    expected = ("pooling", "unpooling", "unpooling, backward")
    assert found == {f"{kind}, contiguous": [2.5] for kind in expected}
    assert report.speeds({"rows": rows}, layers=()) == {}


@pytest.fixture
def quick_comparisons(monkeypatch: Patch) -> report.Report:
    """The comparisons of the documents, timed for a moment; two models are compiled."""
    few = dict(list(comparisons.MODELS.items())[:1])
    monkeypatch.setattr(comparisons, "MODELS", few)
    pytest.importorskip("onnxruntime")
    return comparisons.measure(0)


@pytest.mark.slow
def test_comparisons(quick_comparisons: report.Report) -> None:
    """Everyone returns the same, and every table of the pages is made of them."""
    made = {
        (part.page, part.name): part.make(quick_comparisons)
        for part in pages.TABLES
        if part.results == "comparisons"
    }
    assert all(text.count("\n") > 2 for text in made.values())
    assert not any("None" in text for text in made.values())
    for part in pages.SENTENCES:
        if part.results == "comparisons":
            figures = part.figures(quick_comparisons)
            assert len(figures) == part.words.count("{")
            part.rewrite((ROOT / part.page).read_text(), quick_comparisons)


def test_a_comparison_of_another_result_is_refused() -> None:
    calls = {TORCH: lambda: (torch.ones(2),), OURS: lambda: (torch.tensor([1.0, 1.1]),)}
    comparisons.require_equal(calls, "ones", share=0.1)
    with pytest.raises(RuntimeError, match=r"^maxunpool_cuda does not return torch.nn's .* ones$"):
        comparisons.require_equal(calls, "ones")


def test_networks_have_a_table() -> None:
    """Eager networks beside eager ones, compiled ones beside compiled ones."""
    times = {OURS: 2.0, TORCH: 5.0, INDUCTOR: 3.0, f"{OURS}, {INDUCTOR}": 1.5}
    results = {name: {"quartiles": [0, time, 9]} for name, time in times.items()}
    cases = [case for case in CASES if case.operation == "network" and pages.shows(case)]
    measured = {"rows": [{"name": case.name, "results": results} for case in cases]}
    lines = pages.networks(measured).splitlines()
    assert len(lines) == 2 + len(cases) // 2
    for line in lines[2:]:
        assert [cell.strip() for cell in line.split("|")[2:6]] == ["2.50", "2.50", "2.00", "2.00"]
    assert pages.of_squeezenet(measured) == ["2.5", "2.5"]


def test_documents_end_to_end(tmp_path: Path, monkeypatch: Patch) -> None:
    """One run measures everything, and keeps it where the pages look for it, if nothing fails."""
    case = BY_NAME["tiny-16x8-b2-2x2-float32-int64-contiguous-forward"]
    in_no_table = BY_NAME["tiny-16x8-b2-2x2-float32-int64-contiguous-both"]
    monkeypatch.setattr(command, "CASES", (case, in_no_table))
    monkeypatch.setattr(comparisons, "TABLES", (comparisons.patched,))
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "kept")
    few = ["--documents", "--device", "cpu", "--seconds", "0", "--output", str(tmp_path / "run")]
    command.main(few)
    kept = {path.stem: report.load(path) for path in (tmp_path / "kept").iterdir()}
    assert {name: len(results["rows"]) for name, results in kept.items()} == {
        "operators": 1,
        "networks": 0,
        "comparisons": 1,
    }
    assert pages.load("comparisons")["facts"]["device"].endswith(", 1 thread")
    assert pages.load("simulated") is None
    monkeypatch.setattr(timing, "calls", without_memory)
    with pytest.raises(SystemExit, match=f"^benchmarks: failed: {case.name}$"):
        command.main(few)
