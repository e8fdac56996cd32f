# SPDX-License-Identifier: BSD-3-Clause
"""The decompositions: beside the reference, and compiled ahead of time. test_onnx.py exports it."""

import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize(
    "indices",
    [
        pytest.param(torch.tensor([[2, 1, 0]]).byte(), id="offsets"),
        pytest.param(torch.full((1, 3), 2), id="flat"),
    ],
)
@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)])
def test_sums_are_rounded_once(dtype: torch.dtype, large: float, indices: Tensor) -> None:
    x = torch.tensor([[large, 1, 1]], dtype=dtype)  # neither of the ones would change the first
    unpool, window = DECOMPOSITIONS[_operators.max_unpool], ((5,), (3,), (1,), (0,), "sum")
    assert unpool(x, indices, *window).tolist() == [[0, 0, large + 2, 0, 0]]


class UnpoolLike(nn.Module):
    def forward(self, x: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, 2, output_size=like.shape[-2:])


@pytest.mark.parametrize("strict", [False, True])
def test_a_bad_size_is_an_error_when_the_program_runs(
    strict: bool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Tracing leaves the sizes open, so the program checks them: each form of it."""
    image = torch.randn(2, 3, 9, 12)
    values, indices = F.max_pool2d(image, 2, return_indices=True)
    pooled = {2: torch.export.Dim("pooled", min=2)}
    sizes = (pooled, pooled, {2: torch.export.Dim("height", min=4, max=64)})
    inputs = (values, indices, image)
    program = torch.export.export(UnpoolLike(), inputs, dynamic_shapes=sizes, strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    decomposed = program.run_decompositions(DECOMPOSITIONS)
    for name, form in {"exported": program, "loaded": loaded, "decomposed": decomposed}.items():
        run = form.module()
        with subtests.test(name):
            assert same(run(*inputs), UnpoolLike()(*inputs))
        for height in (6, 10):  # the default is 8, so from 7 to 9 are right
            refused = pytest.raises(RuntimeError, match="max_unpool2d: expected output_size within")
            with subtests.test(f"{name}, height {height}"), refused:
                run(values, indices, torch.randn(2, 3, height, 12))


@pytest.mark.parametrize("height", [8, 9])
@pytest.mark.parametrize("window", [(2, 2, 1), (2, 3, 1), (3, 2, 1)])
def test_ceil_mode_of_named_sizes(
    window: tuple[int, int, int], height: int, subtests: pytest.Subtests
) -> None:
    """Whether the last window begins in the padding at the end differs between these heights."""

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(x, *window, ceil_mode=True)

    sizes = ({2: torch.export.Dim("height", min=8, max=64)},)
    program = torch.export.export(Pool(), (torch.randn(2, 3, height, 7),), dynamic_shapes=sizes)
    decomposed = program.run_decompositions(DECOMPOSITIONS)
    for name, form in {"exported": program, "decomposed": decomposed}.items():
        for other in range(8, 14):
            x = torch.randn(2, 3, other, 7)
            with subtests.test(f"{name}, height {other}"):
                assert same(form.module()(x), Pool()(x))


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("pool", "dims"),
    [
        pytest.param(lambda x: F.max_pool1d(x, x.size(2)), 1, id="1d"),
        pytest.param(lambda x: F.max_pool2d(x, x.shape[2:]), 2, id="2d"),
        pytest.param(lambda x: F.max_pool3d(x, (1, 2, x.size(4))), 3, id="3d, the columns"),
    ],
)
def test_a_window_of_a_named_size_has_no_bound(
    pool: Callable[[Tensor], Tensor], dims: int, is_strict: bool
) -> None:
    """Larger windows have no offsets of one byte. That may not bound the size of the program."""

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return pool(x)

    named = ({2 + n: torch.export.Dim(f"size{n}", min=8) for n in range(dims)},)
    x = torch.randn(2, 3, *range(9, 9 + dims))
    program = torch.export.export(Pool(), (x,), dynamic_shapes=named, strict=is_strict)
    other = torch.randn(2, 3, *[8] * (dims - 1), 300)
    assert same(program.module()(other), pool(other))


class RoundTrip(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    x, batch = torch.randn(2, 3, 9, 12), {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(RoundTrip(), (x,), dynamic_shapes=(batch,))
    decomposed = program.run_decompositions(DECOMPOSITIONS)
    assert "maxunpool_cuda" not in str(decomposed.graph)
    other = torch.randint(-3, 3, (5, 3, 9, 12)).float()
    other[0, 0, 4, 4:6] = torch.nan

    executable = build_without_python(tmp_path)
    for name, form in {"whole": program, "decomposed": decomposed}.items():
        (tmp_path / name).mkdir()
        package = f"{tmp_path}/{name}/model.pt2"
        path = torch._inductor.aoti_compile_and_package(form, package_path=package)
        if form is decomposed or GETS_DTYPES:
            results = torch._inductor.aoti_load_package(path)(other)
            assert all_same(results, RoundTrip()(other))
        written = subprocess.run(
            executable, cwd=tmp_path / name, input=other.numpy().tobytes(), stdout=subprocess.PIPE
        ).stdout
        if form is decomposed:
            assert written == b"".join(result.numpy().tobytes() for result in results)
        else:
            assert written.startswith(b"Could not find schema for maxunpool_cuda::max_pool.\n")


def test_windows_that_begin_beyond_32_bits() -> None:
    axis = _decompositions.Axis(
        size=2**31 + 1, pooled=3, extent=2**31 + 1, kernel=1, stride=2**30, padding=0, dilation=1
    )
    first = _decompositions._first_offsets([axis], torch.device("cpu"))
    assert first.tolist() == [0, 0, 0]
    assert _decompositions._positions_of(first, [axis]).tolist() == [0, 2**30, 2**31]
