# SPDX-License-Identifier: BSD-3-Clause
"""The decompositions: beside the reference, and compiled ahead of time. test_onnx.py exports it."""

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ARITHMETIC, MOVABLE, POOLED, Call, all_same, draw, same
from failures import check_each
from torch import Tensor, nn
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


def test_bad_indices() -> None:
    """A bad window offset loses its value. PyTorch's scatter refuses a bad flat index."""
    unpool, window = DECOMPOSITIONS[_operators.max_unpool], ((4,), (2,), (2,), (0,), "last")
    x = torch.tensor([[1.0, 2.0]])
    assert unpool(x, torch.tensor([[2, 1]]).byte(), *window).tolist() == [[0, 0, 0, 2]]
    with pytest.raises(RuntimeError, match="index 4 is out of bounds"):
        unpool(x, torch.tensor([[4, 1]]), *window)


def exported(
    function: Callable[..., Any], *inputs: Tensor, shapes: Sequence[Any], strict: bool = False
) -> Any:
    module = nn.Module()
    module.forward = function
    return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)


def test_a_bad_size_is_an_error_when_the_program_runs(tmp_path: Path) -> None:
    """Tracing leaves the sizes open, so the program checks them: each form of it."""

    def unpool_like(x: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, 2, output_size=like.shape[-2:])

    image = torch.randn(2, 3, 9, 12)
    inputs = (*F.max_pool2d(image, 2, return_indices=True), image)
    pooled = {2: torch.export.Dim("pooled", min=2)}
    shapes = (pooled, pooled, {2: torch.export.Dim("height", min=4, max=64)})
    program = exported(unpool_like, *inputs, shapes=shapes)
    torch.export.save(program, tmp_path / "program.pt2")
    forms = {
        "exported": program,
        "loaded": torch.export.load(tmp_path / "program.pt2"),
        "decomposed": program.run_decompositions(DECOMPOSITIONS),
    }
    refused = pytest.raises(RuntimeError, match="max_unpool2d: expected output_size within")
    for name, form in forms.items():
        run = form.module()
        assert same(run(*inputs), unpool_like(*inputs)), name
        for height in (6, 10):  # the default is 8, so from 7 to 9 are right
            with refused:
                run(*inputs[:2], torch.randn(2, 3, height, 12))


@pytest.mark.parametrize(("window", "height"), [((2, 3, 1), 9), ((3, 2, 1), 8)])
def test_ceil_mode_of_named_sizes(window: tuple[int, int, int], height: int) -> None:
    """Whether the last window begins in the padding at the end differs between these heights."""

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, *window, ceil_mode=True)

    sizes = {2: torch.export.Dim("height", min=8, max=64)}
    program = exported(pool, torch.randn(2, 3, height, 7), shapes=(sizes,))
    for form in (program, program.run_decompositions(DECOMPOSITIONS)):
        for other in range(8, 14):
            x = torch.randn(2, 3, other, 7)
            assert same(form.module()(x), pool(x)), f"height {other}"


@pytest.mark.parametrize("strict", [False, True])
def test_a_window_of_a_named_size_has_no_bound(strict: bool) -> None:
    """Larger windows have no offsets of one byte. That may not bound the size of the program."""
    sizes = {2: torch.export.Dim("rows", min=8), 3: torch.export.Dim("columns", min=8)}

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, x.shape[2:])

    program = exported(pool, torch.randn(2, 3, 9, 10), shapes=(sizes,), strict=strict)
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
def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    """A program that is decomposed has no operator of this package."""
    program = exported(
        round_trip, torch.randn(2, 3, 9, 12), shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    package, images, results = (f"{tmp_path}/{name}" for name in ("model.pt2", "images", "results"))
    other = torch.randint(-3, 3, (5, 3, 9, 12)).float()
    other[0, 0, 4, 4:6] = torch.nan
    torch.save(other, images)
    command = [sys.executable, "-c", ELSEWHERE, package, images, results]

    decomposed = program.run_decompositions(DECOMPOSITIONS)
    torch._inductor.aoti_compile_and_package(decomposed, package_path=package)
    subprocess.run(command, check=True)
    assert all_same(torch.load(results), round_trip(other))

    torch._inductor.aoti_compile_and_package(program, package_path=package)
    if torch.__version__ >= "2.13":  # AOTInductor of PyTorch 2.10 gives max_pool another dtype
        assert all_same(torch._inductor.aoti_load_package(package)(other), round_trip(other))
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Could not find schema for maxunpool_cuda::max_pool." in done.stderr
