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
from dataclasses import replace
from pathlib import Path

import cases
import pytest
import torch
from cases import REDUCES, WINDOWS, Call, Case, Geometry, Window, same, scaled, unpool_call
from reference import as_bytes, max_unpool, max_unpool_backward
from torch import Tensor
from torch.utils import cpp_extension

from maxunpool_cuda import _ops

HERE = Path(__file__).parent
ROOT = HERE.parent
SANITIZERS = {"memory": "address,undefined", "threads": "thread"}
# c10::ScalarType, from 0 on.
SCALARS = "uint8 int8 int16 int32 int64 half float double complex32 complex64 complex128 bool"
TYPES = {getattr(torch, name): number for number, name in enumerate(SCALARS.split())}
TYPES[torch.bfloat16] = 15
FEW_CELLS = 24
# Limits of calls that are small, but not done in bands of whole planes.
USUAL = {"max_32bit_offset": 2**31, "small_bytes": 0}


def build(sanitizer: str, operator: str) -> Path:
    """An emulator, built once for as long as its sources do not change."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    sources = [*ROOT.glob("csrc/*.h"), *ROOT.glob("csrc/cuda/*.*h"), *HERE.glob("emulation/*")]
    program = ROOT / "build" / "emulation" / f"{operator}-{sanitizer}-{torch.__version__}"
    if program.exists() and program.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_name(f"{program.name}-{os.getpid()}")
    library = Path(torch.__file__).parent / "lib"
    # Compiling takes longer than running. -rdynamic gives kernels names.
    flags = "-std=c++20 -O0 -g1 -Wall -Wextra -Werror -Wno-unknown-pragmas -pthread -rdynamic"
    flags += f" -fsanitize={SANITIZERS[sanitizer]} -fno-sanitize-recover=all"
    flags += " -DPOOLING" if operator == "pool" else ""
    includes = (*cpp_extension.include_paths(), sysconfig.get_path("include"))
    source = HERE / "emulation" / "emulator.cpp"
    command = [compiler, *flags.split(), *(f"-isystem{path}" for path in includes), source]
    link = ["-o", unfinished, f"-L{library}", "-lc10", f"-Wl,-rpath,{library}"]
    subprocess.run([*command, *link], check=True)
    unfinished.rename(program)
    return program


# Of the four builds, the slow one takes g++ two minutes, the others together one.
@pytest.fixture(scope="module", params=["threads", pytest.param("memory", marks=pytest.mark.slow)])
def emulator(request: pytest.FixtureRequest) -> Path:
    return build(request.param, "unpool")


@pytest.fixture(scope="module", params=SANITIZERS)
def pool_emulator(request: pytest.FixtureRequest) -> Path:
    return build(request.param, "pool")


class Request:
    """A call for an emulator, and what the emulator should answer.

    The fields that follow the geometry are in the order of the emulator's. Those not ``chosen`` are
    random. ``bad`` is the report of a bad index: the index, its position and its plane. ``kernels``
    is a pattern of the mangled names of all launches, ``items`` what the first one has to do.
    """

    def __init__(
        self,
        call: Call,
        rng: random.Random,
        bad: tuple[int, int, int] | None = None,
        channels_last: bool | None = None,
        kernels: str = "",
        items: int | None = None,
        **chosen: int,
    ) -> None:
        self.call, self.bad, self.kernels, self.items = call, bad, kernels, items
        of, dims, x = call.of, call.dims, call.tensors[0]
        result, pools = call.reference(), isinstance(of, Window)
        # Unpooling leaves the indices as they are.
        self.expected = result if pools else (result, call.tensors[1])
        indices, window = self.expected[1], of if pools else of.geometry
        fields = {
            "forward": call.operator is _ops.max_unpool,
            "reduce": 0 if pools else REDUCES.index(of.reduce),
            "deterministic": 0,
            "type": TYPES[x.dtype],
            "index_type": TYPES[indices.dtype],
            **cases.random_limits(rng),
            "blocks": rng.randint(1, 4),
            "threads": rng.choice((1, 3, 8)),
            "seed": rng.getrandbits(31),
            "misaligned": rng.choice((0, 0, 1)),
            "skip_barriers": 0,
            "missing_bytes": 0,
        }
        assert fields.keys() >= chosen.keys()
        self.fields = fields | chosen
        batched = x.dim() == dims + 2
        batch, channels = x.shape[:2] if batched else (1, x.shape[0])
        if channels_last is None:
            channels_last = rng.random() < 0.5
        self.channels_last = batched and dims > 1 and channels_last
        outer_inner = (batch, channels) if self.channels_last else (batch * channels, 1)
        output = of.sizes if pools else window.output
        sizes = (indices.shape[-dims:], output, window.kernel, window.stride, window.padding)
        axes = [(1, 1, 1, 1, 0)] * (3 - dims) + list(zip(*sizes, strict=True))
        dilation = (*(1,) * (3 - dims), *(of.dilation if pools else (1,) * dims))
        numbers = (*outer_inner, *itertools.chain(*axes), dims, *dilation, *self.fields.values())
        tensors = b"".join(as_bytes(self.laid(t)).numpy().tobytes() for t in call.tensors)
        self.bytes = struct.pack(f"{len(numbers)}q", *numbers) + tensors

    def laid(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(1, -1) if self.channels_last else tensor


def emulate(program: Path, requests: list[Request]) -> subprocess.CompletedProcess[bytes]:
    stdin = struct.pack("q", len(requests)) + b"".join(request.bytes for request in requests)
    return subprocess.run([program], input=stdin, capture_output=True)


def check(program: Path, requests: list[Request]) -> set[str]:
    """Compare the answers with what is expected. Returns the mangled names of the kernels."""
    done = emulate(program, requests)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    rest, launched = memoryview(done.stdout), set()
    for request in requests:
        of, (is_bad, *report, items, size) = request.call.of, struct.unpack("6q", rest[:48])
        kernels, rest = bytes(rest[48 : 48 + size]).decode().strip(), rest[48 + size :]
        assert (tuple(report) if is_bad else None) == request.bad, (of, kernels)
        assert re.search(request.kernels, kernels), (of, request.fields)
        assert request.items in (None, items), (of, kernels)
        for right in map(request.laid, request.expected):
            flat = torch.frombuffer(bytearray(rest[: right.nbytes]), dtype=right.dtype)
            assert same(flat.reshape(right.shape), right), (of, request.fields, kernels)
            rest = rest[right.nbytes :]
        names = kernels.split()
        assert len(names) == 1 or not (isinstance(of, Window) or of.indices.dtype == torch.uint8)
        launched.update(names)
    assert not rest
    return launched


def both_ways(case: Case, rng: random.Random, **chosen: int) -> list[Request]:
    return [Request(unpool_call(case, forward), rng, **chosen) for forward in (True, False)]


@pytest.mark.parametrize("reduce", REDUCES)
def test_unpooling_agrees_with_the_reference(
    emulator: Path, reduce: str, rng: random.Random
) -> None:
    dtypes = tuple(t for t in TYPES if reduce == "last" or t in cases.ARITHMETIC)
    requests = []
    for _ in range(scaled(160)):
        case = cases.random_case(rng, reduce=reduce, dtypes=dtypes, most_cells=FEW_CELLS)
        requests += both_ways(case, rng)
    check(emulator, requests)


def test_pooling_agrees_with_the_reference(pool_emulator: Path, rng: random.Random) -> None:
    draw = cases.OPERATORS["pool"]
    requests = [Request(draw(rng, most_cells=FEW_CELLS), rng) for _ in range(scaled(300))]
    check(pool_emulator, requests)


def symbols(program: Path) -> list[str]:
    nm = subprocess.run(["nm", program], check=True, capture_output=True, text=True)
    return [symbol for symbol in nm.stdout.split() if symbol.startswith("_Z")]


def kinds(mangled: Iterable[str]) -> set[str]:
    """Kernels of unpooling."""
    names = "\n".join(mangled)
    done = subprocess.run(["c++filt"], input=names, check=True, capture_output=True, text=True)
    found = set()
    for line in done.stdout.replace("maxunpool_cuda::", "").splitlines():
        if re.match(r"void (forward|backward)\w*<.*>\((Tiling|Parts)", line):
            found.add(line.partition("(Tiling")[0].partition("(Parts")[0])
    return found


def kernels_for(way: str, window: str, case: Case) -> str:
    return ""


def aimed_requests(rng: random.Random, way: str, window: str, reduce: str) -> list[Request]:
    """Calls that kernels are made for, of both kinds of indices, in vectors of 16 bytes."""
    requests = []
    dtypes = [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128]
    for dtype, offsets, forward in itertools.product(dtypes, (False, True), (False, True)):
        case = cases.aimed_case(rng, way, window, offsets, dtype, reduce)
        kernels = kernels_for(way, window, case) if forward and reduce == "last" else ""
        misaligned = rng.randint(0, 1) if way == "uneven rows" else 0
        chosen = {**USUAL, "deterministic": 1, "misaligned": misaligned, "kernels": kernels}
        call = unpool_call(case, forward)
        requests.append(Request(call, rng, channels_last=way == "channels", **chosen))
    return requests


def test_every_kernel_of_unpooling(emulator: Path, rng: random.Random) -> None:
    """Aimed calls run the kernels that are made for them. With random ones they reach every one."""
    there, reached = kinds(symbols(emulator)), set()
    assert len(there) >= 100
    for attempt in range(60):
        if attempt >= scaled(8) and reached == there:
            break
        names = set()
        for way, window, reduce in itertools.product(cases.WAYS, WINDOWS, REDUCES):
            requests = aimed_requests(rng, way, window, reduce)
            for dtype in (torch.int32, torch.complex128):
                case = cases.random_case(rng, reduce=reduce, dtypes=(dtype,), most_cells=FEW_CELLS)
                requests += both_ways(case, rng, deterministic=1)
            names |= check(emulator, requests)
        reached |= kinds(names)
    assert reached == there, "\n".join(sorted(reached ^ there))


def test_every_kernel_of_pooling(pool_emulator: Path, rng: random.Random) -> None:
    floats, windows = (torch.float32, torch.float16, torch.bfloat16), ((2, 2, 0), (3, 2, 1))
    chosen = {"max_32bit_offset": 2**31, "misaligned": 0}
    requests = []
    for dtype, index_dtype, (kernel, *window), width, channels_last in itertools.product(
        floats, cases.INDEX_DTYPES, windows, (16, 9, rng.randint(4, 15)), (False, True)
    ):
        whole = Window((6, 2 * width), *((n, n) for n in (kernel, *window, 1)), False)
        x = cases.random_input(rng, (1, 16, *whole.sizes), dtype)
        call = cases.pool_call(x, whole, index_dtype)
        requests.append(Request(call, rng, channels_last=channels_last, **chosen))
    for dtype, kernel, limit in itertools.product(cases.POOLED, (3, 4), (2**31, 1)):
        whole = Window((5, 7), (kernel,) * 2, (1, 1), (1, 1), (1, 1), True)
        x = cases.random_input(rng, (2, 3, *whole.sizes), dtype)
        call = cases.pool_call(x, whole, rng.choice(cases.INDEX_DTYPES))
        requests.append(Request(call, rng, channels_last=False, max_32bit_offset=limit))
    pattern = r"_ZN14maxunpool_cuda\d+pool_[a-z]+I"
    there = {name for name in symbols(pool_emulator) if re.match(pattern, name)}
    assert len(there) >= 30
    assert check(pool_emulator, requests) == there


@pytest.mark.parametrize("kind", ["own window", "offset"])
@pytest.mark.parametrize("window", ["2x2/2", "3x3/2 padded"])
@pytest.mark.parametrize("pooled", [(5001,), (3, 1501), (2, 5001)], ids=str)
def test_long_rows(
    emulator: Path, pooled: tuple[int, ...], window: str, kind: str, rng: random.Random
) -> None:
    """Parts of lines, of two long rows, and rows that are too long for a block."""
    parts = ((n,) * len(pooled) for n in WINDOWS[window])
    g = Geometry(pooled, *parts, tuple(2 * n for n in pooled))
    case = cases.case_of(rng, g, (1, 2), torch.float32, kind)
    if kind != "offset":
        case.indices[0, 0, 0] = math.prod(g.output) - 1  # a stray one
    chosen = {"max_32bit_offset": 2**31}
    check(emulator, [Request(unpool_call(case, True), rng, channels_last=False, **chosen)])


@pytest.mark.parametrize("offsets", [False, True], ids=["flat", "offsets"])
@pytest.mark.parametrize("window", ["3x3/2 padded", "3x3/1 padded", "2x2/1"])
def test_every_pair_of_neighbours(
    emulator: Path, window: str, offsets: bool, rng: random.Random
) -> None:
    """Two cells name one output: its gradient goes to the later one, wherever both lie."""
    kernel, stride, padding = WINDOWS[window]
    output = tuple((4 - 1) * stride - 2 * padding + kernel for _ in range(2))
    g = Geometry((4, 4), *((n, n) for n in (kernel, stride, padding)), output)
    windows = [
        {at: p for at in range(kernel**2) if (p := cases.position_of(g, cell, at)) is not None}
        for cell in range(16)
    ]
    requests: list[Request] = []
    for a, b in itertools.combinations(range(16), 2):
        for shared in sorted(set(windows[a].values()) & set(windows[b].values())):
            chosen = [
                next(at for at, position in own.items() if (position == shared) == (cell in (a, b)))
                for cell, own in enumerate(windows)
            ]
            named = torch.tensor(chosen, dtype=torch.uint8).reshape(4, 4).repeat(1, 2, 1, 1)
            case = cases.case_of(rng, g, (1, 2), torch.float32, "own window")
            case = replace(case, indices=named if offsets else cases.positions_of(named, g))
            channels_last = bool(len(requests) % 2)
            call = unpool_call(case, False)
            requests.append(Request(call, rng, channels_last=channels_last, **USUAL))
    assert check(emulator, requests)


def without(case: Case, forward: bool, plane: int, cell: int) -> Tensor:
    """The reference's result as if one pooled element were not there.

    Its index is moved to a plane one position larger, of which it gets the last.
    """
    g, size = case.geometry, math.prod(case.geometry.output)
    flat = case.positions.long().flatten(-g.dims)
    planes = flat.reshape(-1, flat.shape[-1]).clone()
    planes[plane, cell] = size
    flat = planes.reshape(flat.shape)
    if forward:
        wide = max_unpool(case.input.flatten(-g.dims), flat, (size + 1,), case.reduce)
        return wide[..., :size].reshape(case.grad_output.shape)
    padded = torch.nn.functional.pad(case.grad_output.flatten(-g.dims), (0, 1))
    result = max_unpool_backward(padded, flat, (size + 1,), case.reduce)
    return result.reshape(case.indices.shape)


@pytest.mark.parametrize("kind", ["flat", "offset", "beside a stray one"])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_bad_index_is_dropped_and_reported(
    emulator: Path, forward: bool, kind: str, rng: random.Random
) -> None:
    """Also in a plane that has a stray index, and that the second kernel rewrites."""
    dtypes = tuple(cases.ARITHMETIC)
    requests = []
    for _ in range(scaled(120)):
        if kind == "beside a stray one":
            g = Geometry((4, 8), (2, 2), (2, 2), (0, 0), (8, 16))
            case = cases.case_of(rng, g, (1, 2), torch.float32, "own window")
            case.indices[0, 0, 0, rng.randrange(8)] = 127
        else:
            offsets = kind == "offset"
            case = cases.random_case(rng, dtypes=dtypes, most_cells=FEW_CELLS, offsets=offsets)
            case = cases.with_whole_numbers(case, rng)
        bad, _ = cases.with_a_bad_index(case, rng)
        before, planes = (c.indices.flatten(-c.geometry.dims).flatten(0, -2) for c in (case, bad))
        plane, cell = (before != planes).nonzero()[0].tolist()
        right = without(case, forward, plane, cell)
        call = replace(unpool_call(bad, forward), reference=lambda right=right: right)
        requests.append(Request(call, rng, (int(planes[plane, cell]), cell, plane)))
    check(emulator, requests)


def stray_requests(rng: random.Random, reduce: str = "last", **seeded: int) -> list[Request]:
    """Calls that go through both kernels, with threads enough to get into each other's way."""
    g = Geometry((4, 4), (2, 2), (2, 2), (0, 0), (8, 8))
    call = unpool_call(cases.case_of(rng, g, (4, 2), torch.float32, "few", reduce), True)
    return [Request(call, rng, **{**USUAL, "threads": 8, "blocks": 4, **seeded}) for _ in range(5)]


@pytest.mark.parametrize(
    ("reduce", "shared_bytes"),
    [("last", 48 << 10), ("last", 128), ("sum", 0)],
    ids=["whole planes", "parts", "global memory"],
)
def test_a_missing_barrier_is_caught(reduce: str, shared_bytes: int, rng: random.Random) -> None:
    program = build("threads", "unpool")
    requests = stray_requests(rng, reduce, shared_bytes=shared_bytes)
    assert emulate(program, requests).returncode == 0
    # The race itself may end the program before it is reported.
    for _ in range(40):
        requests = stray_requests(rng, reduce, shared_bytes=shared_bytes, skip_barriers=1)
        done = emulate(program, requests)
        assert done.returncode != 0
        if b"ThreadSanitizer: data race" in done.stderr:
            return
    pytest.fail("no data race reported")


@pytest.mark.parametrize("operator", [pytest.param("unpool", marks=pytest.mark.slow), "pool"])
def test_a_write_past_the_end_is_caught(operator: str, rng: random.Random) -> None:
    program, call = build("memory", operator), cases.OPERATORS[operator](rng, torch.float32)
    assert emulate(program, [Request(call, rng)]).returncode == 0
    done = emulate(program, [Request(call, rng, missing_bytes=4)])
    assert done.returncode != 0
    assert b"AddressSanitizer: heap-buffer-overflow" in done.stderr
