"""The portable form: beside the reference, in exported programs, and compiled ahead of time."""

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ARITHMETIC, MOVABLE, OPERATORS, POOLED, same
from torch import Tensor, nn

import maxunpool_cuda
from maxunpool_cuda import _ops

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
PORTABLE = maxunpool_cuda.decompositions()
CALLS = {
    ("pool", None): POOLED,
    ("unpool from offsets", "last"): MOVABLE,
    ("unpool from offsets", "sum"): ARITHMETIC,
    ("unpool", "last"): ARITHMETIC,
    ("unpool", "sum"): ARITHMETIC,
}


@pytest.mark.parametrize(
    ("name", "reduce", "dtype"),
    [(*call, dtype) for call, dtypes in CALLS.items() for dtype in dtypes],
    ids=str,
)
def test_agrees_with_the_reference(
    name: str, reduce: str | None, dtype: torch.dtype, rng: random.Random
) -> None:
    for _ in range(4):
        call = OPERATORS[name](rng, dtype, **({"reduce": reduce} if reduce else {}))
        portable = replace(call, operator=PORTABLE[call.operator])
        portable.check()
        assert all(result.is_contiguous() for result in portable.on(*call.tensors))


def test_bad_indices() -> None:
    """A window offset that names no output is lost. The scatter refuses such a flat index."""
    unpool, window = PORTABLE[_ops.max_unpool], ((4,), (2,), (2,), (0,), "last")
    x = torch.tensor([[1.0, 2.0]])
    offsets = torch.tensor([[2, 1]], dtype=torch.uint8)
    assert unpool(x, offsets, *window).tolist() == [[0, 0, 0, 2]]
    with pytest.raises(RuntimeError, match="index 4 is out of bounds"):
        unpool(x, torch.tensor([[4, 1]]), *window)


class RoundTrip(nn.Module):
    def __init__(self, window: tuple[int, int, int], index_dtype: torch.dtype, reduce: Any) -> None:
        super().__init__()
        pool = {"return_indices": True, "index_dtype": index_dtype, "ceil_mode": True}
        self.pool = maxunpool_cuda.MaxPool2d(*window, **pool)
        self.unpool = maxunpool_cuda.MaxUnpool2d(*window, reduce=reduce)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = self.pool(x)
        return values, indices, self.unpool(values * 2, indices, output_size=x.shape)


def exported(model: nn.Module, x: Tensor, dynamic: tuple[int, ...]) -> Any:
    shapes = (dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC),) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    portable = program.run_decompositions(maxunpool_cuda.decompositions())
    assert "maxunpool_cuda" in str(program.graph)
    assert "maxunpool_cuda" not in str(portable.graph)
    return portable


@pytest.mark.parametrize("index_dtype", [torch.uint8, torch.int32], ids=str)
@pytest.mark.parametrize("dynamic", [(), (0,), (0, 2, 3)])
def test_exported_programs(dynamic: tuple[int, ...], index_dtype: torch.dtype) -> None:
    for window, reduce in itertools.product(((2, 2, 0), (3, 2, 1)), ("last", "sum")):
        model = RoundTrip(window, index_dtype, reduce)
        x = torch.randint(-3, 3, (2, 3, 9, 12)).float()
        x[0, 0, 4, 4:6] = torch.nan
        portable = exported(model, x, dynamic).module()
        others = [torch.randn(5, 3, *((14, 7) if 2 in dynamic else (9, 12)))] if dynamic else []
        for given in (x, *others):
            for got, want in zip(portable(given), model(given), strict=True):
                assert same(got, want)
                assert got.stride() == want.stride()


WITHOUT_THE_PACKAGE = """
import sys
import torch

model = torch._inductor.aoti_load_package("model.pt2")
torch.save(model(torch.load("x.pt")), "results.pt")
assert "maxunpool_cuda" not in sys.modules
"""


@pytest.mark.slow
def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    """Runs in a process that does not import this package."""
    model = RoundTrip((3, 2, 1), torch.uint8, "last")
    x = torch.randint(-3, 3, (2, 3, 9, 12)).float()
    program = exported(model, x, dynamic=(0,))
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    other = torch.randn(5, 3, 9, 12)
    torch.save(other, tmp_path / "x.pt")
    subprocess.run([sys.executable, "-c", WITHOUT_THE_PACKAGE], cwd=tmp_path, check=True)
    assert all(map(same, torch.load(tmp_path / "results.pt"), model(other)))
