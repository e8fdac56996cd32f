"""The CUDA kernels without a GPU.

The unmodified kernels and the dispatch that chooses them are compiled with g++ against a small
stand-in for CUDA's language (emulation/), one build per sanitizer, and run one thread per CUDA
thread. The results must equal the reference bit for bit, and the sanitizers must be silent.
"""

import io
import itertools
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import (
    INDEX_DTYPES,
    INDEX_KINDS,
    OPERATORS,
    POOLED,
    REDUCES,
    WAYS,
    WINDOWS,
    Call,
    Case,
    Geometry,
    Window,
    aimed_case,
    case_of,
    pool_call,
    position_of,
    positions_of,
    random_case,
    random_geometry,
    random_input,
    random_limits,
    same,
    some,
    unpool_call,
    with_whole_numbers,
)
from reference import as_bytes, max_unpool, max_unpool_backward
from torch import Tensor
from torch.utils import cpp_extension

from maxunpool_cuda import _ops

HERE = Path(__file__).parent
ROOT = HERE.parent
SANITIZERS = {"memory": "address,undefined", "threads": "thread"}
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


@pytest.fixture(scope="module", params=SANITIZERS)
def pool_emulator(request: pytest.FixtureRequest) -> Path:
    return build(request.param, "pool_emulator")


class Request:
    """A call, as its emulator reads it, and what is expected of it.

    Its fields stand in the order of the emulator's; those not ``chosen`` are random. ``bad`` is
    what is reported of a bad index: the index, its position and its plane.
    """

    def __init__(
        self,
        call: Call,
        rng: random.Random,
        bad: tuple[int, int, int] | None = None,
        channels_last: bool | None = None,
        **chosen: int,
    ) -> None:
        self.call, self.bad = call, bad
        expected = call.reference()
        self.expected = expected if isinstance(expected, tuple) else (expected,)
        of, dims, x = call.of, call.dims, call.tensors[0]
        indices = self.expected[1] if isinstance(of, Window) else call.tensors[1]
        limits = random_limits(rng)
        types = {
            "type": TYPES[x.dtype],
            "index_type": TYPES[indices.dtype],
            "element_size": x.element_size(),
        }
        launch = {
            "blocks": rng.randint(1, 4),
            "threads": rng.choice((1, 3, 8)),
            "seed": rng.getrandbits(31),
            "misaligned": rng.choice((0, 0, 1)),
        }
        if isinstance(of, Window):
            window, pooled, output = of, tuple(indices.shape[-dims:]), of.sizes
            fields = types | {"index_size": indices.element_size(), "narrow": limits["narrow"]}
            fields |= launch | {"missing_bytes": 0}
            more = [*(1,) * (3 - dims), *of.dilation]
        else:
            window, pooled, output = of.geometry, of.geometry.pooled, of.geometry.output
            fields = {
                "forward": call.operator is _ops.max_unpool,
                "reduce": REDUCES.index(of.reduce),
                "deterministic": 0,
            }
            fields |= types | limits | launch | {"skip_barriers": 0, "missing_bytes": 0}
            more = []
        assert fields.keys() >= chosen.keys()
        batched = x.dim() == dims + 2
        batch, channels = x.shape[:2] if batched else (1, x.shape[0])
        chance = rng.random() < 0.5
        channels_last = chance if channels_last is None else channels_last
        self.channels_last = batched and dims > 1 and channels_last
        outer_inner = (batch, channels) if self.channels_last else (batch * channels, 1)
        axes = zip(pooled, output, window.kernel, window.stride, window.padding, strict=True)
        geometry = (*outer_inner, *itertools.chain(*[(1, 1, 1, 1, 0)] * (3 - dims), *axes), dims)
        numbers = (*(fields | chosen).values(), *more, *geometry)
        self.bytes = struct.pack(f"{len(numbers)}q", *numbers)
        for tensor in call.tensors:
            laid = tensor.movedim(1, -1) if self.channels_last else tensor
            self.bytes += as_bytes(laid).numpy().tobytes()

    def read(self, data: io.BytesIO) -> list[Tensor]:
        """The results."""
        results = []
        for like in self.expected:
            shape = like.movedim(1, -1).shape if self.channels_last else like.shape
            flat = torch.frombuffer(bytearray(data.read(like.nbytes)), dtype=like.dtype)
            result = flat.reshape(shape)
            results.append(result.movedim(-1, 1) if self.channels_last else result)
        return results


@dataclass(frozen=True)
class Launched:
    """What the emulator says of one call."""

    items: int  # of the first kernel's grid
    kernels: list[str]  # mangled, in the order of their launches


def emulate(program: Path, requests: list[Request]) -> subprocess.CompletedProcess[bytes]:
    stdin = struct.pack("q", len(requests)) + b"".join(request.bytes for request in requests)
    return subprocess.run([program], input=stdin, capture_output=True)


def check(program: Path, requests: list[Request]) -> list[Launched]:
    """Run them for what is expected, and say how each was launched."""
    done = emulate(program, requests)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    data, found = io.BytesIO(done.stdout), []
    for request in requests:
        of = request.call.of
        header = "2q" if isinstance(of, Window) else "6q"
        *report, items, size = struct.unpack(header, data.read(struct.calcsize(header)))
        kernels = data.read(size).decode().split()
        results = request.read(data)
        bad = tuple(report[1:]) if any(report[:1]) else None
        assert bad == request.bad, (of, kernels)
        assert all(map(same, results, request.expected)), (of, request.channels_last, kernels)
        if isinstance(of, Window) or of.indices.dtype == torch.uint8:
            assert len(kernels) == 1
        found.append(Launched(items, kernels))
    assert not data.read()
    return found


def both_ways(case: Case, rng: random.Random, **chosen: int) -> list[Request]:
    return [Request(unpool_call(case, forward), rng, **chosen) for forward in (True, False)]


@pytest.mark.parametrize("reduce", REDUCES)
def test_unpooling_agrees_with_the_reference(
    emulator: Path, reduce: str, rng: random.Random
) -> None:
    dtypes = tuple(t for t in TYPES if reduce == "last" or t != torch.bool)
    requests = []
    for _ in range(some(160)):
        case = random_case(rng, reduce=reduce, dtypes=dtypes, most_cells=24)
        deterministic = rng.random() < 0.5  # else sums come in any order
        case = case if deterministic else with_whole_numbers(case, rng)
        requests += both_ways(case, rng, deterministic=deterministic)
    check(emulator, requests)


def test_pooling_agrees_with_the_reference(pool_emulator: Path, rng: random.Random) -> None:
    draw = OPERATORS["pool"]
    check(pool_emulator, [Request(draw(rng, most_cells=24), rng) for _ in range(some(300))])


def way_of(way: str, window: str, request: Request) -> str:
    """What a forward "last" is to run, by the window that kernels are compiled for: a pattern.

    Rows that need not divide into vectors may all the same.
    """
    if request.expected[0].element_size() == 16:
        return "forward_windows"
    dims = request.call.dims
    if way == "channels":
        compiled = dims == 2 and window in ("2x2/2", "3x3/2 padded", "3x3/2")
        return "forward_channels" if compiled else "forward_windows"
    compiled = (window == "2x2/2" and dims > 1) or (window == "3x3/2 padded" and dims == 2)
    return "forward_rows" if compiled and way == "even rows" else "forward_(bands|rows)"


def aimed_requests(
    rng: random.Random, way: str, window: str, dtypes: tuple[torch.dtype, ...], reduce: str
) -> list[Request]:
    """Calls that kernels are made for, of both kinds of indices, in vectors of 16 bytes."""
    requests = []
    for dtype, offsets in itertools.product(dtypes, (False, True)):
        case = aimed_case(rng, way, window, offsets, dtype, reduce)
        chosen = {"deterministic": 1, "narrow": 2**31, "small_bytes": 0}
        chosen["misaligned"] = rng.randint(0, 1) if way == "uneven rows" else 0
        requests += both_ways(case, rng, channels_last=way == "channels", **chosen)
    return requests


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("way", WAYS)
def test_what_kernels_are_made_for(
    emulator: Path, way: str, window: str, rng: random.Random
) -> None:
    dtypes = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128)
    requests = []
    for _ in range(some(8)):
        requests += aimed_requests(rng, way, window, dtypes, "last")
    for request, launched in zip(requests, check(emulator, requests), strict=True):
        if request.call.operator is _ops.max_unpool:
            assert re.search(way_of(way, window, request), launched.kernels[0])


@pytest.mark.parametrize("offsets", [False, True], ids=["flat", "offsets"])
@pytest.mark.parametrize("window", ["2x2/2", "3x3/2 padded"])
@pytest.mark.parametrize("pooled", [(5001,), (3, 1501), (2, 5001)], ids=str)
def test_long_rows(
    emulator: Path, pooled: tuple[int, ...], window: str, offsets: bool, rng: random.Random
) -> None:
    """Parts of lines, of two long rows, and rows that are too long for a block."""
    parts = ((n,) * len(pooled) for n in WINDOWS[window])
    g = Geometry(pooled, *parts, tuple(2 * n for n in pooled))
    case = case_of(rng, g, (1, 2), torch.float32, "offset" if offsets else "own window")
    if not offsets:
        case.indices[0, 0, 0] = math.prod(g.output) - 1  # a stray one
    chosen = {"narrow": 2**31, "small_plane": 64}
    request = Request(unpool_call(case, True), rng, channels_last=False, **chosen)
    (launched,) = check(emulator, [request])
    kernel = "forward_windows" if pooled == (2, 5001) else "forward_bands"
    assert kernel in launched.kernels[0]


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
    cells = range(math.prod(pooled))
    windows = [
        {at: where for at in range(kernel**2) if (where := position_of(g, cell, at)) is not None}
        for cell in cells
    ]
    requests: list[Request] = []
    for a, b in itertools.combinations(cells, 2):
        for shared in sorted(set(windows[a].values()) & set(windows[b].values())):
            chosen = [
                next(at for at, where in own.items() if (where == shared) == (cell in (a, b)))
                for cell, own in enumerate(windows)
            ]
            case = case_of(rng, g, (1, 2), torch.float32, "own window")
            named = torch.tensor(chosen, dtype=torch.uint8).reshape(pooled)
            named = named.expand(case.indices.shape).contiguous()
            case = replace(case, indices=named if offsets else positions_of(named, g))
            limits = {"small_bytes": 0, "narrow": 2**31, "channels_last": len(requests) % 2}
            requests.append(Request(unpool_call(case, False), rng, **limits))
    assert check(emulator, requests)


@pytest.mark.parametrize("kind", [*INDEX_KINDS, "offset"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_small_planes_take_one_launch(
    emulator: Path, reduce: str, kind: str, rng: random.Random
) -> None:
    """Of contiguous tensors, whatever their windows, alignment and indices."""
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    dtypes = tuple(TYPES) if reduce == "last" else floats
    requests = []
    for _ in range(some(40)):
        geometry = random_geometry(rng, most_cells=24)
        leading = (rng.randint(1, 3), rng.choice((1, 2, 8, 33)))
        case = case_of(rng, geometry, leading, rng.choice(dtypes), kind, reduce)
        chosen = {"narrow": 2**31, "small_bytes": 16 << 10, "deterministic": 1}
        requests += both_ways(case, rng, channels_last=False, **chosen)
    for request, launched in zip(requests, check(emulator, requests), strict=True):
        forward, g = request.call.operator is _ops.max_unpool, request.call.of.geometry
        if reduce == "last":
            small = forward or request.call.of.indices.dtype != torch.uint8
        else:
            small = forward and all(k <= s for k, s in zip(g.kernel, g.stride, strict=True))
        if small and request.expected[0].element_size() <= 8:
            assert len(launched.kernels) == 1
            assert "_bands" in launched.kernels[0]


Bad = tuple[Case, tuple[int, ...], int]  # a good case, where one index is to be bad, and that one


def bad_index(rng: random.Random) -> Bad:
    dtypes = tuple(t for t in TYPES if t != torch.bool)
    case = with_whole_numbers(random_case(rng, dtypes=dtypes, most_cells=24, offsets=False), rng)
    index = rng.choice((-1, -(2**31), 2**31 - 1))
    if rng.random() < 0.5:
        index = index * 2**32 + rng.choice((0, 1))
        case = replace(case, indices=case.indices.long())
    return case, tuple(map(rng.randrange, case.indices.shape)), index


def bad_offset(rng: random.Random) -> Bad:
    """Beyond its window, or outside the plane."""
    case = random_case(rng, dtypes=(torch.float32, torch.int8), most_cells=24, offsets=True)
    g, where = case.geometry, tuple(map(rng.randrange, case.indices.shape))
    cell = int(np.ravel_multi_index(where[-g.dims :], g.pooled))
    return case, where, rng.choice([at for at in range(256) if position_of(g, cell, at) is None])


def bad_index_beside_a_stray_one(rng: random.Random) -> Bad:
    """The one makes a plane the second kernel's, the other is reported all the same."""
    g = Geometry((4, 8), (2, 2), (2, 2), (0, 0), (8, 16))
    case = case_of(rng, g, (2, 4), torch.float32, "own window")
    stray, where = rng.sample([*np.ndindex(2, 4, 4, 8)], k=2)
    if rng.random() < 0.7:
        where = (*stray[:-1], (stray[-1] + rng.randint(1, 7)) % 8)
    case.indices[stray] = 127 if stray[2:] != (3, 7) else 0
    return case, where, 128


def without(case: Case, forward: bool, where: tuple[int, ...]) -> Tensor:
    """The reference's result, had the pooled element at ``where`` not been there.

    Its index is moved to a plane one position larger, of which it gets the last.
    """
    g = case.geometry
    plane = math.prod(g.output)
    indices = case.positions.clone()
    indices[where] = plane
    flat = indices.flatten(-g.dims)
    if forward:
        wide = max_unpool(case.input.flatten(-g.dims), flat, (plane + 1,), case.reduce)
        return wide[..., :plane].reshape(case.grad_output.shape)
    padded = torch.nn.functional.pad(case.grad_output.flatten(-g.dims), (0, 1))
    return max_unpool_backward(padded, flat, (plane + 1,), case.reduce).reshape(indices.shape)


@pytest.mark.parametrize("draw", [bad_index, bad_offset, bad_index_beside_a_stray_one])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_bad_index_is_dropped_and_reported(
    emulator: Path, forward: bool, draw: Callable[[random.Random], Bad], rng: random.Random
) -> None:
    requests = []
    for _ in range(some(120)):
        case, where, index = draw(rng)
        indices = case.indices.clone(memory_format=torch.contiguous_format)
        indices[where] = index
        call = unpool_call(replace(case, indices=indices), forward)
        right = without(case, forward, where)
        flat = int(np.ravel_multi_index(where, indices.shape))
        plane, cell = divmod(flat, math.prod(case.geometry.pooled))
        requests.append(
            Request(replace(call, reference=lambda right=right: right), rng, (index, cell, plane))
        )
    check(emulator, requests)


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


def requests_of_every_kind(rng: random.Random) -> list[Request]:
    """As those of test_operators.py, with limits that send them any way."""
    requests = []
    for way, window in itertools.product(WAYS, WINDOWS):
        for reduce in ("last", "sum"):
            dtypes = torch.uint8, torch.float16, torch.float32, torch.float64
            requests += aimed_requests(rng, way, window, dtypes, reduce)
        for dtype, reduce in itertools.product((torch.int32, torch.complex128) * 2, REDUCES):
            case = random_case(rng, reduce=reduce, dtypes=(dtype,), most_cells=24)
            requests += both_ways(case, rng, deterministic=1)
    return requests


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
        sizes[-1] = rng.choice((5, 9, 13, rng.randint(size, 40)))
        stride[-2:] = [rng.choice((1, 2))] * min(dims, 2)
    elif way == "channels":
        stride = [rng.randint(1, 3) for _ in range(dims)]
    else:
        kernel[-1], padding[-1], sizes[-1] = 4, rng.randint(0, 2), rng.randint(4, 9)
    channels = 8 if way == "channels" else rng.randint(1, 3)
    ceil = way != "even rows" and rng.random() < 0.5
    window = Window(*map(tuple, (sizes, kernel, stride, padding, [1] * dims)), ceil)
    return random_input(rng, (rng.randint(1, 2), channels, *sizes), dtype), window


def pools_of_every_kind(rng: random.Random) -> list[Request]:
    requests = []
    ways = ("even rows", "uneven rows", "channels", "any windows")
    for way, size, dtype, index in itertools.product(ways, (2, 3), POOLED, INDEX_DTYPES):
        chosen = {"narrow": 2**31, "misaligned": 0}
        if way in ("uneven rows", "any windows"):
            chosen = {"narrow": rng.choice((2**31, 1)), "misaligned": rng.randint(0, 1)}
        call = pool_call(*aimed_pool(rng, way, size, dtype), index)
        requests.append(Request(call, rng, channels_last=way == "channels", **chosen))
    return requests


def pool_kinds(mangled: Iterable[str]) -> set[str]:
    return {name for name in mangled if re.match(r"_ZN14maxunpool_cuda\d+pool_[a-z]+I", name)}


@pytest.mark.parametrize(
    ("name", "sanitizer", "draw", "kinds", "least"),
    [
        pytest.param(
            "emulator", "threads", requests_of_every_kind, kinds, 1, marks=pytest.mark.slow
        ),
        ("pool_emulator", "threads", pools_of_every_kind, pool_kinds, 50),
        ("pool_emulator", "memory", pools_of_every_kind, pool_kinds, 50),
    ],
)
def test_random_calls_reach_every_kernel(
    name: str,
    sanitizer: str,
    draw: Callable[[random.Random], list[Request]],
    kinds: Callable[[Iterable[str]], set[str]],
    least: int,
    rng: random.Random,
) -> None:
    """Sooner or later; most of them at once. No others, of which names would not be understood."""
    program = build(sanitizer, name)
    nm = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout
    there = kinds(symbol for symbol in nm.split() if symbol.startswith("_Z"))
    reached: set[str] = set()
    for _ in range(30):
        for launched in check(program, draw(rng)):
            reached |= kinds(launched.kernels)
        print(f"{len(reached)} of {len(there)} kinds of kernels are reached")
        if reached == there:
            break
    assert len(there) >= least
    assert reached == there, "\n".join(sorted(reached ^ there))


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
        whole = Window((6, 2 * width), *((n, n) for n in (*window, 1)), False)
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        calls = [
            pool_call(random_input(rng, (2, 16, *whole.sizes), dtype), whole, index_dtype)
            for dtype in dtypes
        ]
        chosen = {"channels_last": channels_last, "narrow": 2**31, "misaligned": 0}
        found = check(pool_emulator, [Request(call, rng, **chosen) for call in calls])
        for dtype, launched in zip(dtypes, found, strict=True):
            if channels_last:
                few = dtype == torch.float16
                vector = min(16 // max(dtype.itemsize, index_dtype.itemsize), 4 if few else 8)
                assert launched.items == 2 * 16 * 3 * width // vector
                continue
            vector = 16 // max(2 * dtype.itemsize, index_dtype.itemsize)
            rows = 2 if window[0] == 3 and dtype == torch.bfloat16 else 1
            if width % vector != 0:
                vector, rows = 1, 4
            assert launched.items == 2 * 16 * -(-3 // rows) * width // vector


def stray_requests(rng: random.Random, reduce: str = "last", **seeded: int) -> list[Request]:
    """Calls that go through both kernels, with threads enough to get into each other's way."""
    g = Geometry((4, 4), (2, 2), (2, 2), (0, 0), (8, 8))
    call = unpool_call(case_of(rng, g, (4, 2), torch.float32, "few", reduce), True)
    chosen = {"threads": 8, "blocks": 4, "small_bytes": 0, "narrow": 2**31, **seeded}
    return [Request(call, rng, **chosen) for _ in range(5)]


@pytest.mark.parametrize(
    ("reduce", "shared_bytes"),
    [("last", 48 << 10), ("last", 128), ("sum", 0)],
    ids=["whole planes", "parts", "global memory"],
)
def test_a_missing_barrier_is_caught(reduce: str, shared_bytes: int, rng: random.Random) -> None:
    program = build("threads")
    requests = stray_requests(rng, reduce, shared_bytes=shared_bytes)
    assert emulate(program, requests).returncode == 0
    # Now and then the race itself ends the program, before it is reported.
    for _ in range(40):
        requests = stray_requests(rng, reduce, shared_bytes=shared_bytes, skip_barriers=1)
        done = emulate(program, requests)
        assert done.returncode != 0
        if b"ThreadSanitizer: data race" in done.stderr:
            return
    pytest.fail("no data race reported")


def pool_requests(rng: random.Random, **seeded: int) -> list[Request]:
    return [Request(OPERATORS["pool"](rng, torch.float32), rng, **seeded)]


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        pytest.param("emulator", stray_requests, marks=pytest.mark.slow),
        ("pool_emulator", pool_requests),
    ],
)
def test_a_write_past_the_end_is_caught(
    name: str, draw: Callable[..., list[Request]], rng: random.Random
) -> None:
    program = build("memory", name)
    assert emulate(program, draw(rng)).returncode == 0
    done = emulate(program, draw(rng, missing_bytes=4))
    assert done.returncode != 0
    assert b"AddressSanitizer: heap-buffer-overflow" in done.stderr
