"""The CUDA kernels without a GPU.

The unmodified kernels and the dispatch that chooses them are compiled with g++ against a small
stand-in for CUDA's language (emulation/), one build per sanitizer, and run one thread per CUDA
thread. The results must equal the reference bit for bit, and the sanitizers must be silent.
"""

import itertools
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    INDEX_DTYPES,
    INDEX_KINDS,
    POOLED,
    WAYS,
    WINDOWS,
    Case,
    Geometry,
    Window,
    aimed_case,
    case_of,
    channels_geometry,
    position_of,
    positions_of,
    random_case,
    random_geometry,
    random_input,
    random_limits,
    random_pool,
    row_geometry,
    same,
    some,
    with_whole_numbers,
)
from reference import as_bytes, max_pool, max_unpool, max_unpool_backward, pooled_size
from torch.utils import cpp_extension

HERE = Path(__file__).parent
ROOT = HERE.parent
SANITIZERS = {"memory": "address,undefined", "threads": "thread"}
REDUCES = ("last", "sum", "mean")
TYPES = {  # c10::ScalarType
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
}


def build(sanitizer: str, name: str = "emulator") -> Path:
    """An emulator, built once for as long as its sources do not change."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    sources = [*ROOT.glob("csrc/*.h"), *ROOT.glob("csrc/cuda/*.cuh"), *HERE.glob("emulation/*")]
    program = ROOT / "build" / "emulation" / f"{name}-{sanitizer}-{torch.__version__}"
    if program.exists() and program.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_name(f"{program.name}-{os.getpid()}")
    library = Path(torch.__file__).parent / "lib"
    subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-O0",  # compiling takes longer than running
            "-g1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-pthread",
            f"-fsanitize={SANITIZERS[sanitizer]}",
            "-fno-sanitize-recover=all",
            *("-include", HERE / "emulation" / "cuda_shim.h"),
            f"-I{HERE / 'emulation'}",
            *(f"-isystem{path}" for path in cpp_extension.include_paths()),
            f"-isystem{sysconfig.get_path('include')}",
            HERE / "emulation" / f"{name}.cpp",
            *("-rdynamic", "-o", unfinished),  # kernels have names
            *(f"-L{library}", "-lc10", f"-Wl,-rpath,{library}"),
        ],
        check=True,
    )
    unfinished.rename(program)
    return program


# It takes g++ two minutes, the others together one.
SLOW_BUILD = pytest.param("memory", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[SLOW_BUILD, "threads"])
def emulator(request: pytest.FixtureRequest) -> Path:
    return build(request.param)


class Call:
    """One call of an operator, as the emulator reads it.

    What `chosen` does not name of the request's fields is random.
    """

    def __init__(self, case: Case, rng: random.Random, forward: bool, **chosen: int) -> None:
        self.case, self.forward = case, forward
        g = case.geometry
        values = case.input if forward else case.grad_output
        batched = values.dim() == g.dims + 2
        batch, channels = values.shape[:2] if batched else (1, values.shape[0])
        self.channels_last = (
            batched and g.dims > 1 and chosen.get("channels_last", rng.random() < 0.5)
        )
        outer, inner = (batch, channels) if self.channels_last else (batch * channels, 1)
        self.inner = inner
        lead = 3 - g.dims
        axes = [(1, 1, 1, 1, 0)] * lead + list(
            zip(g.pooled, g.output, g.kernel, g.stride, g.padding, strict=True)
        )
        size = values.element_size()
        limits = random_limits(rng)
        request = (
            forward,
            REDUCES.index(case.reduce),
            chosen.get("deterministic", 0),
            TYPES[values.dtype],
            TYPES[case.indices.dtype],
            size,
            *(chosen.get(name, limit) for name, limit in limits.items()),
            chosen.get("blocks", rng.randint(1, 4)),
            chosen.get("threads", rng.choice((1, 3, 8))),
            rng.getrandbits(31),
            chosen.get("misaligned", rng.choice((0, 0, 1))),
            chosen.get("skip_barriers", 0),
            chosen.get("missing_bytes", 0),
            outer,
            inner,
            *(number for axis in axes for number in axis),
            g.dims,
        )
        self.bytes = struct.pack(f"{len(request)}q", *request)
        self.bytes += self._bytes_of(values) + self._bytes_of(case.indices)
        self.result_shape = tuple(values.shape[: values.dim() - g.dims])
        self.result_shape += g.output if forward else g.pooled
        self.dtype = values.dtype

    def _bytes_of(self, tensor: torch.Tensor) -> bytes:
        if self.channels_last:
            tensor = tensor.movedim(1, -1)
        return as_bytes(tensor).numpy().tobytes()

    @property
    def result_size(self) -> int:
        return torch.Size(self.result_shape).numel() * self.dtype.itemsize

    def result(self, data: bytes) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(data), dtype=self.dtype)
        if not self.channels_last:
            return flat.reshape(self.result_shape)
        batch, channels, *spatial = self.result_shape
        return flat.reshape(batch, *spatial, channels).movedim(-1, 1)

    def expected(self) -> torch.Tensor:
        case = self.case
        reference = max_unpool if self.forward else max_unpool_backward
        values = case.input if self.forward else case.grad_output
        return reference(values, case.positions, case.geometry.output, case.reduce)


def emulate(program: Path, calls: list[Any]) -> subprocess.CompletedProcess[bytes]:
    stdin = struct.pack("q", len(calls)) + b"".join(call.bytes for call in calls)
    return subprocess.run([program], input=stdin, capture_output=True)


@dataclass(frozen=True)
class Outcome:
    """What the emulator says of one call."""

    bad: tuple[int, int, int] | None  # index, position, plane
    items: int  # of the first kernel's grid
    kernels: list[str]  # mangled, in the order of their launches
    result: torch.Tensor


def outcomes(program: Path, calls: list[Call]) -> list[Outcome]:
    done = emulate(program, calls)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    data, found = done.stdout, []
    for call in calls:
        ready, index, position, plane, items, size = struct.unpack("6q", data[:48])
        names, data = data[48 : 48 + size].decode().split(), data[48 + size :]
        bad = (index, position, plane) if ready else None
        found.append(Outcome(bad, items, names, call.result(data[: call.result_size])))
        data = data[call.result_size :]
    assert not data
    return found


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_kernels_agree_with_the_reference(
    emulator: Path, reduce: str, forward: bool, rng: random.Random
) -> None:
    dtypes = tuple(t for t in TYPES if reduce == "last" or t != torch.bool)
    calls = []
    for _ in range(some(120)):
        case = random_case(rng, reduce=reduce, dtypes=dtypes, most_cells=24)
        deterministic = rng.random() < 0.5  # else sums come in any order
        case = case if deterministic else with_whole_numbers(case, rng)
        calls.append(Call(case, rng, forward, deterministic=deterministic))
    for call, outcome in zip(calls, outcomes(emulator, calls), strict=True):
        assert outcome.bad is None
        assert same(outcome.result, call.expected()), (call.case, call.channels_last)


def way_of(window: str, even: bool, call: Call) -> str:
    """What a forward "last" is to run, by the window that kernels are compiled for: a pattern.

    Rows that need not divide into vectors may all the same.
    """
    dims, size = call.case.geometry.dims, call.dtype.itemsize
    if size == 16:
        return "forward_windows"
    if call.inner > 1:
        compiled = dims == 2 and window in ("2x2/2", "3x3/2 padded", "3x3/2")
        return "forward_channels" if compiled else "forward_windows"
    if even and ((window == "2x2/2" and dims > 1) or (window == "3x3/2 padded" and dims == 2)):
        return "forward_rows"
    return "forward_(bands|rows)"


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_rows(emulator: Path, window: str, kind: str, rng: random.Random) -> None:
    """Contiguous tensors, in vectors: where rows divide into them and where not."""
    for even in rng.sample((True, True, False, False, False, False), some(6)):
        g = row_geometry(rng, window, even)
        chosen = {
            "channels_last": 0,
            "narrow": 2**31,
            "small_bytes": 0,
            "misaligned": 0 if even else rng.choice((0, 1)),
        }
        calls = []
        for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128):
            case = case_of(rng, g, (2, 4), dtype, kind)
            calls += [Call(case, rng, forward, **chosen) for forward in (True, False)]
        for call, outcome in zip(calls, outcomes(emulator, calls), strict=True):
            assert same(outcome.result, call.expected()), (call.case, call.forward)
            if call.forward:
                assert re.search(way_of(window, even, call), outcome.kernels[0])


@pytest.mark.parametrize("offsets", [False, True], ids=["flat", "offsets"])
@pytest.mark.parametrize("window", ["2x2/2", "3x3/2 padded"])
@pytest.mark.parametrize("pooled", [(5001,), (3, 1501), (2, 5001)], ids=str)
def test_long_rows(
    emulator: Path, pooled: tuple[int, ...], window: str, offsets: bool, rng: random.Random
) -> None:
    """Parts of lines, of two long rows, and rows that are too long for a block."""
    g = Geometry(
        pooled, *((n,) * len(pooled) for n in WINDOWS[window]), tuple(2 * n for n in pooled)
    )
    case = case_of(rng, g, (1, 2), torch.float32, "offset" if offsets else "own window")
    if not offsets:
        case.indices[0, 0, 0] = math.prod(g.output) - 1  # a stray one
    call = Call(case, rng, True, narrow=2**31, small_plane=64, channels_last=0)
    (outcome,) = outcomes(emulator, [call])
    assert same(outcome.result, call.expected())
    kernel = "forward_windows" if pooled == (2, 5001) else "forward_bands"
    assert kernel in outcome.kernels[0]


@pytest.mark.parametrize("offsets", [False, True], ids=["flat", "offsets"])
@pytest.mark.parametrize("window", ["3x3/2 padded", "3x3/1 padded", "2x2/1"])
def test_every_neighbour_is_asked(
    emulator: Path, window: str, offsets: bool, rng: random.Random
) -> None:
    """An output's gradient is the last cell's, wherever the others lie that name it too."""
    kernel, stride, padding = WINDOWS[window]
    pooled = (4, 4)
    output = tuple((n - 1) * stride - 2 * padding + kernel for n in pooled)
    g = Geometry(pooled, *((n, n) for n in (kernel, stride, padding)), output)
    cells = list(np.ndindex(*pooled))
    windows = [
        {at: where for at in range(kernel**2) if (where := position_of(g, cell, at)) is not None}
        for cell in range(len(cells))
    ]
    calls = []
    for a, b in itertools.combinations(range(len(cells)), 2):
        for shared in sorted(set(windows[a].values()) & set(windows[b].values())):
            chosen = [
                next(at for at, where in own.items() if (where == shared) == (cell in (a, b)))
                for cell, own in enumerate(windows)
            ]
            named = torch.tensor(chosen, dtype=torch.uint8).reshape(1, 1, *pooled)
            case = case_of(rng, g, (1, 2), torch.float32, "own window")
            named = named.expand(case.indices.shape).contiguous()
            indices = named if offsets else positions_of(named, g)
            limits = {"small_bytes": 0, "narrow": 2**31, "channels_last": len(calls) % 2}
            calls.append(Call(replace(case, indices=indices), rng, False, **limits))
    assert calls
    for call, outcome in zip(calls, outcomes(emulator, calls), strict=True):
        assert same(outcome.result, call.expected()), call.case.indices


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_channels(emulator: Path, window: str, kind: str, rng: random.Random) -> None:
    """A vector of channels per thread, 16 bytes long."""
    for _ in range(some(4)):
        g = channels_geometry(rng, window)
        calls = []
        for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128):
            case = case_of(rng, g, (2, 16), dtype, kind)
            chosen = {"channels_last": 1, "narrow": 2**31, "misaligned": 0, "small_bytes": 0}
            calls += [Call(case, rng, forward, **chosen) for forward in (True, False)]
        for call, outcome in zip(calls, outcomes(emulator, calls), strict=True):
            assert same(outcome.result, call.expected()), (call.case, call.forward)
            if call.forward:
                assert re.search(way_of(window, False, call), outcome.kernels[0])


@pytest.mark.parametrize("kind", [*INDEX_KINDS, "offset"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_small_planes_take_one_launch(
    emulator: Path, reduce: str, kind: str, rng: random.Random
) -> None:
    """Of contiguous tensors, whatever their windows, alignment and indices."""
    calls = []
    for _ in range(some(40)):
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        dtypes = tuple(TYPES) if reduce == "last" else floats
        geometry = random_geometry(rng, most_cells=24)
        leading = (rng.randint(1, 3), rng.choice((1, 2, 8, 33)))
        case = case_of(rng, geometry, leading, rng.choice(dtypes), kind, reduce)
        chosen = {"channels_last": 0, "narrow": 2**31, "small_bytes": 16 << 10, "deterministic": 1}
        calls += [Call(case, rng, forward, **chosen) for forward in (True, False)]
    for call, outcome in zip(calls, outcomes(emulator, calls), strict=True):
        assert same(outcome.result, call.expected()), call.case
        g = call.case.geometry
        apart = all(k <= s for k, s in zip(g.kernel, g.stride, strict=True))
        if reduce == "last":
            small = call.forward or call.case.indices.dtype != torch.uint8
        else:
            small = call.forward and apart
        if small and call.dtype.itemsize <= 8:
            assert len(outcome.kernels) == 1
            assert "_bands" in outcome.kernels[0]


@pytest.mark.parametrize("index", [-1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_bad_index_is_dropped_and_reported(
    emulator: Path, forward: bool, index: int, rng: random.Random
) -> None:
    calls, wheres = [], []
    for _ in range(some(40)):
        dtypes = tuple(t for t in TYPES if t != torch.bool)
        case = random_case(rng, dtypes=dtypes, most_cells=24, offsets=False)
        case = with_whole_numbers(case, rng)
        value = index if rng.random() < 0.5 else index * 2**32 + rng.choice((0, 1))
        wide = case.indices.to(torch.int64 if abs(value) > 2**31 else case.indices.dtype)
        where = tuple(rng.randrange(n) for n in wide.shape)
        bad = wide.clone(memory_format=torch.contiguous_format)
        bad[where] = value
        calls.append(Call(replace(case, indices=bad), rng, forward))
        dims = case.geometry.dims
        cell = int(np.ravel_multi_index(where[-dims:], wide.shape[-dims:]))
        plane = int(np.ravel_multi_index(where[:-dims], wide.shape[:-dims]))
        wheres.append((value, cell, plane, where))
    for call, (value, cell, plane, where), outcome in zip(
        calls, wheres, outcomes(emulator, calls), strict=True
    ):
        assert outcome.bad == (value, cell, plane)
        assert same(outcome.result, expected_without(call, where)), (call.case, value)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_window_offsets_take_one_launch(
    emulator: Path, reduce: str, forward: bool, rng: random.Random
) -> None:
    """Also where one of them leads out of its window, or of the plane: it is reported."""
    calls, wheres = [], []
    while len(calls) < some(40):
        case = random_case(rng, reduce=reduce, dtypes=(torch.float32, torch.int8), most_cells=24)
        if case.indices.dtype != torch.uint8:
            continue
        g, bad = case.geometry, None
        where = tuple(rng.randrange(n) for n in case.indices.shape)
        if rng.random() < 0.5:
            cell = int(np.ravel_multi_index(where[-g.dims :], g.pooled))
            bad = rng.choice([at for at in range(256) if position_of(g, cell, at) is None])
            changed = case.indices.clone(memory_format=torch.contiguous_format)
            changed[where] = bad
            plane = int(np.ravel_multi_index(where[: -g.dims], case.indices.shape[: -g.dims]))
            bad = (bad, cell, plane)
        wheres.append(bad)
        calls.append(Call(case if bad is None else replace(case, indices=changed), rng, forward))
    for call, bad, outcome in zip(calls, wheres, outcomes(emulator, calls), strict=True):
        assert len(outcome.kernels) == 1
        assert outcome.bad == bad
        if bad is None:
            assert same(outcome.result, call.expected())


def expected_without(call: Call, where: tuple[int, ...]) -> torch.Tensor:
    """The reference's result, had the pooled element at `where` not been there.

    Its index is moved to a plane one position larger, of which it gets the last.
    """
    case = call.case
    g = case.geometry
    plane = math.prod(g.output)
    indices = case.indices.clone()
    indices[where] = plane
    flat = (plane + 1,)
    leading = tuple(indices.shape[: -g.dims])
    if call.forward:
        wide = max_unpool(case.input.flatten(-g.dims), indices.flatten(-g.dims), flat, case.reduce)
        return wide[..., :plane].reshape(*leading, *g.output)
    grads = case.grad_output.flatten(-g.dims)
    padded = torch.cat((grads, torch.zeros_like(grads[..., :1])), -1)
    flat_indices = indices.flatten(-g.dims)
    return max_unpool_backward(padded, flat_indices, flat, case.reduce).reshape(indices.shape)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_bad_index_beside_a_stray_one(emulator: Path, forward: bool, rng: random.Random) -> None:
    """The one makes a plane the second kernel's, the other is reported all the same."""
    calls, wheres = [], []
    g = Geometry((4, 8), (2, 2), (2, 2), (0, 0), (8, 16))
    for _ in range(some(40)):
        case = case_of(rng, g, (2, 4), torch.float32, "own window")
        stray, bad = rng.sample([*np.ndindex(2, 4, 4, 8)], k=2)
        if rng.random() < 0.7:
            bad = (*stray[:-1], (stray[-1] + rng.randint(1, 7)) % 8)
        case.indices[stray] = 127 if stray[2:] != (3, 7) else 0
        case.indices[bad] = 128
        calls.append(Call(case, rng, forward))
        cell, plane = bad[2] * 8 + bad[3], bad[0] * 4 + bad[1]
        wheres.append((128, cell, plane, bad))
    for call, (value, cell, plane, where), outcome in zip(
        calls, wheres, outcomes(emulator, calls), strict=True
    ):
        assert outcome.bad == (value, cell, plane)
        assert same(outcome.result, expected_without(call, where))


PLANS = "Tiling|Bands|Pieces"  # what kernels get first


def kinds(mangled: Iterable[str]) -> set[str]:
    """Which kernels they are, but for the types of their arrays and the length of vectors."""
    names = "\n".join(mangled)
    done = subprocess.run(["c++filt"], input=names, check=True, capture_output=True, text=True)
    found = set()
    for line in done.stdout.replace("maxunpool_cuda::", "").splitlines():
        if kernel := re.match(rf"void ((?:forward|backward)\w*)<(.*)>\((?:{PLANS})", line):
            name, arguments = kernel.groups()
            values, *rest = re.split(r", (?![^<]*>)", arguments)
            parts = [name, values.partition("<")[0] if "<" in values else ""]
            for i, part in enumerate(rest):
                if i == 0 and re.match("unsigned char|int|long", part):
                    part = "offsets" if part == "unsigned char" else "flat"
                part = re.sub(r"RowShape<[^,]*,", "RowShape<", part)
                parts.append(re.sub(r"^([2-9]|16)$", "V", part))
            found.add(" ".join(part for part in parts if part))
    return found


def calls_of_every_kind(rng: random.Random) -> list[Call]:
    """As those of test_operators.py, with limits that send them any way."""
    calls = []
    for way, window, offsets in itertools.product(WAYS, WINDOWS, (False, True)):
        chosen = {"deterministic": 1, "misaligned": 0, "small_bytes": 0, "narrow": 2**31}
        chosen["channels_last"] = way == "channels"
        dtypes = torch.uint8, torch.float16, torch.float32, torch.float64
        for dtype, reduce in itertools.product(dtypes, ("last", "sum")):
            case = aimed_case(rng, way, window, offsets, dtype, reduce)
            calls += [Call(case, rng, forward, **chosen) for forward in (True, False)]
        for dtype, reduce in itertools.product((torch.int32, torch.complex128), REDUCES):
            case = random_case(rng, reduce=reduce, dtypes=(dtype,), most_cells=24)
            calls += [Call(case, rng, forward, deterministic=1) for forward in (True, False)]
    return calls


@pytest.mark.slow
def test_random_calls_reach_every_kernel(rng: random.Random) -> None:
    """Sooner or later; most of them at once."""
    program = build("threads")
    symbols = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout
    there = kinds(symbol for symbol in symbols.split() if symbol.startswith("_Z"))
    reached, rounds = set(), 0
    while reached != there and rounds < 10:
        rounds += 1
        calls = calls_of_every_kind(rng)
        done = outcomes(program, calls)
        for call, outcome in zip(calls, done, strict=True):
            assert same(outcome.result, call.expected()), (call.case, call.channels_last)
        reached |= kinds(name for outcome in done for name in outcome.kernels)
        print(f"{rounds * len(calls)} calls reach {len(reached)} of {len(there)} kinds of kernels")
    assert there
    assert not there - reached, "\n".join(sorted(there - reached))


def stray_calls(rng: random.Random, reduce: str = "last", **seeded: int) -> list[Call]:
    """Calls that go through both kernels, with threads enough to get into each other's way."""
    g = Geometry((4, 4), (2, 2), (2, 2), (0, 0), (8, 8))
    case = case_of(rng, g, (4, 2), torch.float32, "few", reduce)
    chosen = {"threads": 8, "blocks": 4, "small_bytes": 0, "narrow": 2**31, **seeded}
    return [Call(case, rng, True, **chosen) for _ in range(5)]


@pytest.mark.parametrize(
    ("reduce", "shared_bytes"),
    [("last", 48 << 10), ("last", 128), ("sum", 0)],
    ids=["whole planes", "parts", "global memory"],
)
def test_a_missing_barrier_is_caught(reduce: str, shared_bytes: int, rng: random.Random) -> None:
    program = build("threads")
    calls = stray_calls(rng, reduce, shared_bytes=shared_bytes)
    assert emulate(program, calls).returncode == 0
    # Now and then the race itself ends the program, before it is reported.
    for _ in range(40):
        calls = stray_calls(rng, reduce, shared_bytes=shared_bytes, skip_barriers=1)
        done = emulate(program, calls)
        assert done.returncode != 0
        if b"ThreadSanitizer: data race" in done.stderr:
            return
    pytest.fail("no data race reported")


@pytest.mark.slow
def test_a_write_past_the_end_is_caught(rng: random.Random) -> None:
    program = build("memory")
    assert emulate(program, stray_calls(rng)).returncode == 0
    done = emulate(program, stray_calls(rng, missing_bytes=4))
    assert done.returncode != 0
    assert b"AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.fixture(scope="module", params=SANITIZERS)
def pool_emulator(request: pytest.FixtureRequest) -> Path:
    return build(request.param, "pool_emulator")


class PoolCall:
    """One call of max_pool, as :class:`Call`."""

    def __init__(
        self, x: torch.Tensor, window: Window, rng: random.Random, **chosen: int | torch.dtype
    ) -> None:
        self.x, self.window = x, window
        self.index_dtype = chosen.get("index_dtype", rng.choice(window.index_dtypes()))
        self.expected = max_pool(x, *window.arguments, self.index_dtype)
        pooled = tuple(self.expected[0].shape)
        dims = len(window.sizes)
        batched = x.dim() == dims + 2
        batch, channels = x.shape[:2] if batched else (1, x.shape[0])
        self.channels_last = (
            batched and dims > 1 and bool(chosen.get("channels_last", rng.random() < 0.5))
        )
        lead = 3 - dims
        axes = zip(
            pooled[-dims:], window.sizes, window.kernel, window.stride, window.padding, strict=True
        )
        request = (
            TYPES[x.dtype],
            TYPES[self.index_dtype],
            x.element_size(),
            self.index_dtype.itemsize,
            chosen.get("narrow", rng.choice((2**31, 2**31, 1))),  # 32-bit offsets, or 64-bit
            rng.randint(1, 4),
            rng.choice((1, 3, 8)),
            rng.getrandbits(31),
            chosen.get("misaligned", rng.choice((0, 0, 1))),
            chosen.get("missing_bytes", 0),
            *((1,) * lead + window.dilation),
            *((batch, channels) if self.channels_last else (batch * channels, 1)),
            *(number for axis in [(1, 1, 1, 1, 0)] * lead + list(axes) for number in axis),
            dims,
        )
        data = as_bytes(x.movedim(1, -1) if self.channels_last else x)
        self.bytes = struct.pack(f"{len(request)}q", *request) + data.numpy().tobytes()

    def result(self, data: bytes, like: torch.Tensor) -> torch.Tensor:
        shape = tuple(like.shape)
        flat = torch.frombuffer(bytearray(data), dtype=like.dtype)
        if self.channels_last:
            return flat.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
        return flat.reshape(shape)


@dataclass(frozen=True)
class Pooled:
    """What the emulator says of one call of max_pool."""

    items: int  # of the kernel's grid
    kernel: str  # mangled
    results: list[torch.Tensor]  # values, indices


def pooled_by(program: Path, calls: list[PoolCall]) -> list[Pooled]:
    done = emulate(program, calls)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    data, found = done.stdout, []
    for call in calls:
        items, size = struct.unpack("2q", data[:16])
        kernel, data = data[16 : 16 + size].decode(), data[16 + size :]
        results = []
        for like in call.expected:
            results.append(call.result(data[: like.nbytes], like))
            data = data[like.nbytes :]
        found.append(Pooled(items, kernel, results))
    assert not data
    return found


def check_pooling(program: Path, calls: list[PoolCall]) -> list[Pooled]:
    found = pooled_by(program, calls)
    for call, pooled in zip(calls, found, strict=True):
        seen = (call.window, call.x.dtype, call.index_dtype, call.channels_last, pooled.kernel)
        assert all(map(same, pooled.results, call.expected)), seen
    return found


def test_pooling_agrees_with_the_reference(pool_emulator: Path, rng: random.Random) -> None:
    calls = [
        PoolCall(*random_pool(rng, rng.choice(POOLED), most_cells=24), rng)
        for _ in range(some(300))
    ]
    check_pooling(pool_emulator, calls)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1)], ids=["2x2/2", "3x3/2 padded"])
def test_pooling_in_vectors(
    pool_emulator: Path,
    window: tuple[int, int, int],
    channels_last: bool,
    index_dtype: torch.dtype,
    rng: random.Random,
) -> None:
    """A thread stores at most 16 bytes of values, and of indices, and in a row reads as many."""
    for width in rng.sample((16, 8, 7, 9, 12, 14), some(6)):
        parts = [(n, n) for n in (*window, 1)]
        calls = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            whole = Window((6, 2 * width), *parts, False)
            x = random_input(rng, (2, 16, *whole.sizes), dtype)
            chosen = {"channels_last": channels_last, "narrow": 2**31, "misaligned": 0}
            calls.append(PoolCall(x, whole, rng, index_dtype=index_dtype, **chosen))
        for call, pooled in zip(calls, check_pooling(pool_emulator, calls), strict=True):
            size = call.x.element_size()
            if channels_last:
                few = call.x.dtype == torch.float16
                vector = min(16 // max(size, index_dtype.itemsize), 4 if few else 8)
                assert pooled.items == call.expected[0].numel() // vector
                continue
            vector = 16 // max(2 * size, index_dtype.itemsize)
            rows = 2 if window[0] == 3 and call.x.dtype == torch.bfloat16 else 1
            if width % vector != 0:
                vector, rows = 1, 4
            assert pooled.items == 2 * 16 * -(-3 // rows) * width // vector


def test_pooling_of_any_width(pool_emulator: Path, rng: random.Random) -> None:
    calls = []
    for width in range(1, 41):
        for _ in range(some(4)):
            dims, dtype = rng.choice((1, 2, 3)), rng.choice(POOLED[:4])
            kernel, stride = rng.choice(((2, 2), (3, 2), (3, 1), (2, 1), (3, 3)))
            sizes = (*(rng.randint(1, 4) for _ in range(dims - 1)), width)
            padding = tuple(rng.randint(kernel > n, kernel // 2) for n in sizes)
            parts = [(n,) * dims for n in (kernel, stride)]
            ceil = rng.random() < 0.5
            whole = Window(sizes, *parts, padding, (1,) * dims, ceil)
            x = random_input(rng, (2, 2, *sizes), dtype)
            if all(
                pooled_size(*axis, ceil) > 0
                for axis in zip(sizes, *parts, padding, (1,) * dims, strict=True)
            ):
                calls.append(PoolCall(x, whole, rng, channels_last=0))
    check_pooling(pool_emulator, calls)


def aimed_pool(rng: random.Random, way: str, size: int, dtype: torch.dtype) -> tuple:
    """An input and a window that go the way, if nothing else is in it."""
    dims = rng.choice((2, 3) if way == "channels" else (1, 2, 3))
    sizes = [rng.randint(size, 6) for _ in range(dims)]
    kernel, stride = [size] * dims, [2] * dims
    padding = [rng.randint(0, size // 2) for _ in range(dims)]
    if dims == 3:  # any depth of windows
        kernel[0], stride[0], padding[0] = rng.randint(1, size), rng.randint(1, 3), 0
    if way == "even rows":
        sizes[-1], padding[-1] = 16, size - 2
    elif way == "uneven rows":
        sizes[-1] = rng.choice((5, 9, 13))
        stride[-2:] = [rng.choice((1, 2))] * min(dims, 2)
    elif way == "channels":
        stride = [rng.randint(1, 3) for _ in range(dims)]
    else:
        kernel[-1], padding[-1], sizes[-1] = 4, rng.randint(0, 2), rng.randint(4, 9)
    channels = 8 if way == "channels" else rng.randint(1, 3)
    ceil = way != "even rows" and rng.random() < 0.5
    window = Window(*map(tuple, (sizes, kernel, stride, padding, [1] * dims)), ceil)
    return random_input(rng, (rng.randint(1, 2), channels, *sizes), dtype), window


def test_aimed_pooling_reaches_every_kernel(rng: random.Random) -> None:
    """Of every type, and no other ones."""
    program = build("threads", "pool_emulator")
    symbols = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout
    there = set(re.findall(r"\b_ZN14maxunpool_cuda\d+pool_[a-z]+I\w+", symbols))
    ways = ("even rows", "uneven rows", "channels", "any windows")
    reached, rounds = set(), 0
    while reached != there and rounds < 10:
        rounds += 1
        calls = []
        for way, size, dtype, index in itertools.product(ways, (2, 3), POOLED, INDEX_DTYPES):
            chosen = {"channels_last": int(way == "channels"), "narrow": 2**31, "misaligned": 0}
            if way in ("uneven rows", "any windows"):
                chosen["misaligned"] = rng.randint(0, 1)
                chosen["narrow"] = rng.choice((2**31, 1))
            x, window = aimed_pool(rng, way, size, dtype)
            calls.append(PoolCall(x, window, rng, index_dtype=index, **chosen))
        reached |= {pooled.kernel for pooled in check_pooling(program, calls)}
    assert len(there) > 50
    assert reached == there, "\n".join(sorted(reached ^ there))


def test_a_write_past_the_end_of_pooled_values_is_caught(rng: random.Random) -> None:
    program = build("memory", "pool_emulator")
    whole = Window((4, 8), *[(n, n) for n in (2, 2, 0, 1)], False)
    x = random_input(rng, (1, 2, *whole.sizes), torch.float32)
    done = emulate(program, [PoolCall(x, whole, rng, missing_bytes=4)])
    assert done.returncode != 0
    assert b"AddressSanitizer: heap-buffer-overflow" in done.stderr
