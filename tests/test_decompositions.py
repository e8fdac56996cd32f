# SPDX-License-Identifier: BSD-3-Clause
"""The decompositions: beside the reference, and compiled ahead of time. test_onnx.py exports it."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ARITHMETIC, MOVABLE, POOLED, Call, all_same, draw, same
from failures import check_each
from published import program_of
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _operators

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
DECOMPOSITIONS = maxunpool_cuda.export.decompositions()

# PyTorch 2.11 has no torch.where for these.
NOT_CHOSEN = () if torch.__version__ >= "2.12" else (torch.uint16, torch.uint32, torch.uint64)
CALLS = {
    ("pool", "last"): POOLED * 4,
    ("unpool from offsets", "last"): [t for t in MOVABLE if t not in NOT_CHOSEN],
    ("unpool from offsets", "sum"): ARITHMETIC,
    ("unpool", "last"): ARITHMETIC,
    ("unpool", "sum"): ARITHMETIC,
}


@pytest.mark.parametrize(("name", "reduce"), CALLS)
def test_agrees_with_the_reference(name: str, reduce: str, rng: random.Random) -> None:

    def check(call: Call) -> None:
        results = leaves(DECOMPOSITIONS[call.operator](*call.tensors, *call.arguments))
        call.compare(results)
        assert all(result.is_contiguous() for result in results)

    dtypes = [*CALLS[name, reduce]] * 4
    check_each((draw(rng, name, dtype, reduce=reduce) for dtype in dtypes), check)


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)])
def test_sums_are_rounded_once(dtype: torch.dtype, large: float) -> None:
    x = torch.tensor([[large, 1, 1]], dtype=dtype)  # neither of the ones would change the first
    unpool, window = DECOMPOSITIONS[_operators.max_unpool], ((5,), (3,), (1,), (0,), "sum")
    for indices in (torch.tensor([[2, 2, 2]]), torch.tensor([[2, 1, 0]]).byte()):
        assert unpool(x, indices, *window).tolist() == [[0, 0, large + 2, 0, 0]]


# A pool, the unpool of its indices, what is done to them, and how many windows the unpool gets as
# offsets: none if the indices may be others than those of its windows and its plane.
@pytest.mark.parametrize(
    ("pool", "unpool", "between", "by_offsets"),
    [
        pytest.param((3, 2, 1), (3, 2, 1), None, True, id="same"),
        pytest.param(((1, 3), (3, 1), 0), ((1, 3), (3, 1), 0), None, True, id="gaps and overlaps"),
        pytest.param((3, 2, 1), (3, 2, 1), lambda i: i + 0, False, id="changed"),
        pytest.param((3, 2, 1), (4, 2, 1), None, False, id="other kernel size"),
        pytest.param((2, 2, 0), (2, 3, 0), None, False, id="other stride"),
        pytest.param((3, 2, 1), (3, 2, 0), None, False, id="other padding"),
        pytest.param((3, 2, 1, 2), (3, 2, 1), None, False, id="dilated"),
        pytest.param((9, 1, 4), (9, 1, 4), None, False, id="large"),
    ],
)
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_indices_of_a_pool_in_the_same_graph(
    pool: Any, unpool: Any, between: Any, by_offsets: bool, more: int, dtype: torch.dtype
) -> None:
    """They become offsets, without a scatter, where these mean the same: not in a wider plane."""

    def function(x: Tensor) -> Tensor:
        values, indices = F.max_pool2d(x, *pool, return_indices=True, index_dtype=dtype)
        indices = between(indices) if between else indices
        plane = (max(x.shape[2], sizes[0]), max(x.shape[3], sizes[1]) + more)
        return torch.ops.maxunpool_cuda.max_unpool(values * 2, indices, plane, *window, "last")

    x = torch.randint(-3, 4, (2, 3, 12, 13)).float()
    window = [list(n) if isinstance(n, tuple) else [n, n] for n in unpool]
    pooled = F.max_pool2d(x, *pool).shape[2:]
    axes = zip(pooled, *window, strict=True)
    sizes = [(n - 1) * s - 2 * p + k for n, k, s, p in axes]
    program = program_of(function, x).run_decompositions(DECOMPOSITIONS)
    assert same(program.module()(x), function(x))
    assert ("scatter" not in str(program.graph)) == (by_offsets and more == 0)


# Windows of pooling, with dilation and ceil mode, and of unpooling what they return.
WINDOWS = {
    "unpadded": ((2, 2, 0, 1, False), (2, 2, 0)),
    "padded": ((3, 2, 1, 1, False), (3, 2, 1)),
    "ceil mode": ((3, 2, 0, 1, True), (3, 2, 0)),
    "dilated": ((2, 2, 1, 2, False), (3, 2, 1)),
}


@pytest.mark.parametrize(
    ("dims", "dynamic", "window"),
    [
        (1, True, "padded"),
        *[(2, False, window) for window in WINDOWS],
        pytest.param(2, True, "padded", marks=pytest.mark.slow),
        *[pytest.param(3, False, window, marks=pytest.mark.slow) for window in WINDOWS],
    ],
)
def test_every_integer_tensor_has_an_axis(dims: int, dynamic: bool, window: str) -> None:
    """ExecuTorch makes int64 of an int32 tensor that has none, and refuses what it is then.

    The unpooling is the operator. The functions' check of symbolic sizes has no axis; it is int64.
    """
    pooling, unpooling = WINDOWS[window]
    one_byte = torch.int64 if window == "dilated" else torch.uint8
    unpool, sizes = torch.ops.maxunpool_cuda.max_unpool, [[n] * dims for n in unpooling]

    def function(x: Tensor) -> list[Tensor]:
        results = []
        cases = (
            (x, torch.int64, "last"),
            (x.int(), torch.int32, "sum"),
            (x.byte(), one_byte, "sum"),
        )
        for image, dtype, reduce in cases:
            pool = getattr(F, f"max_pool{dims}d")
            values, indices = pool(image, *pooling, return_indices=True, index_dtype=dtype)
            results += [values, indices]
            for given in (indices, indices + 0):  # of a pool in this graph, and from elsewhere
                results.append(unpool(values, given, x.shape[2:], *sizes, reduce))
        return results

    shape = dict.fromkeys(range(2, 2 + dims), torch.export.Dim.DYNAMIC) if dynamic else {}
    program = program_of(function, torch.ones(2, 3, *(8,) * dims), shapes=(shape,))
    graph = program.run_decompositions(DECOMPOSITIONS).graph
    assert "maxunpool_cuda" not in str(graph)
    without = [node for node in graph.nodes if is_integer_without_axes(node.meta.get("val"))]
    assert not without, without


def is_integer_without_axes(value: Any) -> bool:
    is_one = isinstance(value, Tensor) and value.dim() == 0
    return is_one and not value.dtype.is_floating_point


def test_bad_indices() -> None:
    """A bad window offset loses its value. PyTorch's scatter refuses a bad flat index."""
    unpool, window = DECOMPOSITIONS[_operators.max_unpool], ((4,), (2,), (2,), (0,), "last")
    x = torch.tensor([[1.0, 2.0]])
    assert unpool(x, torch.tensor([[2, 1]]).byte(), *window).tolist() == [[0, 0, 0, 2]]
    with pytest.raises(RuntimeError, match="index 4 is out of bounds"):
        unpool(x, torch.tensor([[4, 1]]), *window)


def test_a_bad_size_is_an_error_when_the_program_runs(tmp_path: Path) -> None:
    """Tracing leaves the sizes open, so the program checks them: each form of it."""

    def unpool_like(x: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, 2, output_size=like.shape[-2:])

    image = torch.randn(2, 3, 9, 12)
    pooled, indices = F.max_pool2d(image, 2, return_indices=True)
    dim = {2: torch.export.Dim("pooled", min=2)}
    shapes = (dim, dim, {2: torch.export.Dim("height", min=4, max=64)})
    program = program_of(unpool_like, pooled, indices, image, shapes=shapes)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for form in (program, loaded, program.run_decompositions(DECOMPOSITIONS)):
        run = form.module()
        assert same(run(pooled, indices, image), unpool_like(pooled, indices, image))
        for height in (6, 10):  # the default is 8, so from 7 to 9 are right
            with pytest.raises(RuntimeError, match="max_unpool2d: expected output_size within"):
                run(pooled, indices, torch.randn(2, 3, height, 12))


@pytest.mark.parametrize(("window", "height"), [((2, 3, 1), 9), ((3, 2, 1), 8)])
def test_ceil_mode_of_named_sizes(window: tuple[int, int, int], height: int) -> None:
    """Whether the last window begins in the padding at the end differs between these heights."""

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, *window, ceil_mode=True)

    sizes = {2: torch.export.Dim("height", min=8, max=64)}
    program = program_of(pool, torch.randn(2, 3, height, 7), shapes=(sizes,))
    for form in (program, program.run_decompositions(DECOMPOSITIONS)):
        for other in range(8, 14):
            x = torch.randn(2, 3, other, 7)
            assert same(form.module()(x), pool(x)), f"height {other}"


def test_a_window_of_a_named_size_has_no_bound() -> None:
    """Larger windows have no offsets of one byte. That may not bound the size of the program."""
    sizes = {2: torch.export.Dim("rows", min=8), 3: torch.export.Dim("columns", min=8)}

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, x.shape[2:])

    program = program_of(pool, torch.randn(2, 3, 9, 10), shapes=(sizes,))
    other = torch.randn(2, 3, 8, 300)
    assert same(program.module()(other), pool(other))


def round_trip(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    pooled, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
    return pooled, indices, F.max_unpool2d(pooled * 2, indices, 3, 2, 1, x.shape, reduce="sum")


# Runs a compiled program in a process that has PyTorch, but not this package.
ELSEWHERE = """
import sys
import torch._inductor.codecache  # PyTorch 2.10 needs it, and does not import it
package, images, results = sys.argv[1:]
torch.save(torch._inductor.aoti_load_package(package)(torch.load(images)), results)
assert "maxunpool_cuda" not in sys.modules
"""


@pytest.mark.slow
def test_ahead_of_time_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decomposed runs without this package; what is not runs with it.

    In continuous integration Inductor refuses operators that PyTorch's tables could decompose.
    """
    monkeypatch.setenv("CI", "true")
    batch = {0: torch.export.Dim.DYNAMIC}
    program = program_of(round_trip, torch.randn(2, 3, 9, 12), shapes=(batch,))
    x = torch.randint(-3, 3, (5, 3, 9, 12)).float()
    x[0, 0, 4, 4:6] = torch.nan
    package, images, results = (f"{tmp_path}/{name}" for name in ("model.pt2", "images", "results"))
    torch.save(x, images)

    decomposed = program.run_decompositions(DECOMPOSITIONS)
    torch._inductor.aoti_compile_and_package(decomposed, package_path=package)
    subprocess.run([sys.executable, "-c", ELSEWHERE, package, images, results], check=True)
    assert all_same(torch.load(results), round_trip(x))

    # AOTInductor of PyTorch 2.10 gives max_pool another dtype. Those before 2.13 are left out.
    if torch.__version__ >= "2.13":
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        assert all_same(torch._inductor.aoti_load_package(package)(x), round_trip(x))
