# SPDX-License-Identifier: BSD-3-Clause
"""The decompositions: beside the reference, and compiled ahead of time. test_onnx.py exports it."""

import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ARITHMETIC, MOVABLE, POOLED, Call, all_same, draw, same
from failures import check_each
from torch import Tensor, nn
from torch.utils import cpp_extension
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _decompositions, _operators

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
DECOMPOSITIONS = maxunpool_cuda.export.decompositions()

# PyTorch 2.11 has no torch.where for these.
NOT_CHOSEN = () if torch.__version__ >= "2.12" else (torch.uint16, torch.uint32, torch.uint64)
CALLS = {
    ("pool", "last"): POOLED,
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

    dtypes = [*CALLS[name, reduce]] * (16 if name == "pool" else 4)
    check_each((draw(rng, name, dtype, reduce=reduce) for dtype in dtypes), check)


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


@pytest.mark.parametrize("strict", [False, True])
def test_a_bad_size_is_an_error_when_the_program_runs(
    strict: bool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Tracing leaves the sizes open, so the program checks them: each form of it."""

    def unpool_like(x: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, 2, output_size=like.shape[-2:])

    image = torch.randn(2, 3, 9, 12)
    inputs = (*F.max_pool2d(image, 2, return_indices=True), image)
    pooled = {2: torch.export.Dim("pooled", min=2)}
    shapes = (pooled, pooled, {2: torch.export.Dim("height", min=4, max=64)})
    program = exported(unpool_like, *inputs, shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    forms = {
        "exported": program,
        "loaded": torch.export.load(tmp_path / "program.pt2"),
        "decomposed": program.run_decompositions(DECOMPOSITIONS),
    }
    refused = pytest.raises(RuntimeError, match="max_unpool2d: expected output_size within")
    for name, form in forms.items():
        run = form.module()
        with subtests.test(name):
            assert same(run(*inputs), unpool_like(*inputs))
            with refused:  # the default is 8, so from 7 to 9 are right
                run(*inputs[:2], image[:, :, :6])
            with refused:
                run(*inputs[:2], torch.randn(2, 3, 10, 12))


@pytest.mark.parametrize(("window", "height"), [((2, 3, 1), 8), ((2, 3, 1), 9), ((3, 2, 1), 8)])
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
@pytest.mark.parametrize(
    ("pool", "dims"),
    [
        (lambda x: F.max_pool1d(x, x.size(2)), 1),
        (lambda x: F.max_pool2d(x, x.shape[2:]), 2),
        (lambda x: F.max_pool3d(x, (1, 2, x.size(4))), 3),
    ],
    ids=["1d", "2d", "3d, the columns"],
)
def test_a_window_of_a_named_size_has_no_bound(
    pool: Callable[[Tensor], Tensor], dims: int, strict: bool
) -> None:
    """Larger windows have no offsets of one byte. That may not bound the size of the program."""
    named = ({2 + n: torch.export.Dim(f"size{n}", min=8) for n in range(dims)},)
    program = exported(pool, torch.randn(2, 3, *range(9, 9 + dims)), shapes=named, strict=strict)
    other = torch.randn(2, 3, *[8] * (dims - 1), 300)
    assert same(program.module()(other), pool(other))


def round_trip(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    pooled, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
    return pooled, indices, F.max_unpool2d(pooled * 2, indices, 3, 2, 1, x.shape, reduce="sum")


# Follows the example of docs/export.md. It reads the input, and writes the results one after the
# other, or the error.
MAIN = """
#include <ATen/ops/empty.h>

#include <cstdio>

int main() try {
  at::Tensor x = at::empty({5, 3, 9, 12});
  if (std::fread(x.data_ptr(), 1, x.nbytes(), stdin) != x.nbytes()) return 2;
  for (const at::Tensor& result : run(x))
    std::fwrite(result.contiguous().data_ptr(), 1, result.nbytes(), stdout);
} catch (const std::exception& error) {
  std::puts(error.what());
  return 1;
}
"""
COMPILER = cpp_extension.get_cxx_compiler()
# AOTInductor of PyTorch 2.10 gives max_pool another dtype, that of 2.13 does not. PyTorch's pull
# request 173562 repaired it in between.
GETS_DTYPES = torch.__version__ >= "2.13"


def build_without_python(folder: Path) -> Path:
    """Build the program that runs the package ``model.pt2`` of its working directory."""
    page = (Path(__file__).parent.parent / "docs" / "export.md").read_text()
    (run,) = re.findall(r"^```cpp\n(.*?)^```", page, re.M | re.S)
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(run + MAIN)
    flags = ["-std=c++20", *(f"-isystem{path}" for path in cpp_extension.include_paths())]
    for path in cpp_extension.library_paths():
        flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
    (libraries,) = re.findall(r"^Link with `(.*)`", page, re.M)
    command = [COMPILER, source, "-o", program, *flags, *libraries.split()]
    subprocess.run(command, check=True)
    return program


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    """A process without Python runs a program that has no operator of this package."""
    batch = {0: torch.export.Dim.DYNAMIC}
    program = exported(round_trip, torch.randn(2, 3, 9, 12), shapes=(batch,))
    decomposed = program.run_decompositions(DECOMPOSITIONS)
    other = torch.randint(-3, 3, (5, 3, 9, 12)).float()
    other[0, 0, 4, 4:6] = torch.nan

    executable = build_without_python(tmp_path)
    for form in (program, decomposed):
        package = f"{tmp_path}/model.pt2"
        torch._inductor.aoti_compile_and_package(form, package_path=package)
        if form is decomposed or GETS_DTYPES:
            results = torch._inductor.aoti_load_package(package)(other)
            assert all_same(results, round_trip(other))
        run = subprocess.run(
            executable, cwd=tmp_path, input=other.numpy().tobytes(), stdout=subprocess.PIPE
        )
        expected = b"Could not find schema for maxunpool_cuda::max_pool.\n"
        if form is decomposed:
            expected = b"".join(result.numpy().tobytes() for result in round_trip(other))
        assert run.stdout.startswith(expected)


def test_windows_that_begin_beyond_32_bits() -> None:
    axis = _decompositions.Axis(
        size=2**31 + 1, pooled=3, extent=2**31 + 1, kernel=1, stride=2**30, padding=0, dilation=1
    )
    first = _decompositions._first_offsets([axis], torch.device("cpu"))
    assert first.tolist() == [0, 0, 0]
    assert _decompositions._positions_of(first, [axis]).tolist() == [0, 2**30, 2**31]
