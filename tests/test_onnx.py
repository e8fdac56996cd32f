"""Export to ONNX, run by ONNX Runtime and ONNX's reference evaluator, against eager mode: with
MaxPool and MaxUnpool, by translation_table(); or "portable", without them, by decompositions().
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES, REDUCES, Geometry, draw, random_geometry, same, scaled
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F
import maxunpool_cuda.onnx
from maxunpool_cuda import _ops

onnx = pytest.importorskip("onnx", reason="its evaluator runs the exports")
pytest.importorskip("onnxruntime", reason="the exports are run by ONNX Runtime")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")

Axes = tuple[int, ...]

# ONNX's operators in portable exports. These lists have all of them: TensorRT (docs/operators.md of
# onnx-tensorrt at 96e7811, 2024-06-17), OpenVINO (src/frontends/onnx/docs/supported_ops.md at
# 0ae60f0) and the CUDA provider of ONNX Runtime (docs/OperatorKernels.md at 001d12d).
LISTED = {
    *("Add", "And", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand"),
    *("Floor", "GatherElements", "Greater", "Identity", "IsNaN", "Max", "Mod", "Mul", "Or", "Pad"),
    *("Range", "Reshape", "ScatterElements", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    "Where",
}


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def export(
    function: Callable[..., Any], *inputs: Tensor, dynamic: Axes = (), portable: bool = False
) -> Any:
    """Export to ONNX. The sizes of the dynamic dimensions of every input are left open."""
    shapes = (tuple(dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC) for _ in inputs),)
    program: Any = torch.export.export(
        Function(function), inputs, dynamic_shapes=shapes if dynamic else None
    )
    table = maxunpool_cuda.onnx.translation_table()
    if portable:
        program, table = program.run_decompositions(maxunpool_cuda.decompositions()), {}
        assert "maxunpool_cuda" not in str(program.graph)
    return torch.onnx.export(program, verbose=False, custom_translation_table=table)


def runners(program: Any) -> list[Callable[..., Sequence[Tensor]]]:
    """ONNX Runtime and, where it can run the program, ONNX's evaluator.

    The evaluator cannot shrink a tensor by Pad. It returns indices in the window for a MaxPool with
    strides of one, which PyTorch's exports have to learn where planes begin.
    """
    onnx.checker.check_model(program.model_proto, full_check=True)
    pools = [node.attributes for node in program.model.graph if node.op_type == "MaxPool"]
    steps = ([*pool["strides"].as_ints(), *pool["dilations"].as_ints()] for pool in pools)
    if "Pad" in operators(program) or any(max(step) == 1 for step in steps):
        return [program]
    return [program, getattr(program, "call_reference", program)]  # not in PyTorch 2.8


def operators(program: Any) -> list[str]:
    return [node.op_type for node in program.model.graph]


def check(
    function: Callable[..., Any], *inputs: Tensor, other: Tensor | None = None, **how: Any
) -> None:
    """Export, run on ``inputs`` and on ``other``, and compare with eager mode."""
    program = export(function, *inputs, **how)
    if how.get("portable"):
        assert set(operators(program)) <= LISTED
    every = [inputs] if other is None else [inputs, (other,)]
    for given, runner in itertools.product(every, runners(program)):
        expected = function(*given)
        expected = expected if isinstance(expected, tuple) else (expected,)
        got = runner(*given)
        assert len(got) == len(expected)
        assert all(map(same, got, expected))


def with_ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def pool_and_back(
    window: Geometry, index_dtype: torch.dtype, portable: bool
) -> Callable[[Tensor], Any]:
    """A function that returns every result of pooling and unpooling."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        values, indices = _ops.max_pool(x, *window.pooling, index_dtype)
        axes = zip(window.kernel, window.dilation, strict=True)
        extent = [(kernel - 1) * spread + 1 for kernel, spread in axes]  # each index lies in it
        geometry = (x.shape[-window.dims :], extent, window.stride, window.padding)
        reduces = REDUCES if portable else ("last",)
        return values, indices, *(_ops.max_unpool(values, indices, *geometry, r) for r in reduces)

    return function


CEIL = [
    # ceil mode leaves out a window that would begin in the padding at the end of the last axis.
    Geometry.of_pooling((7, 9), (3, 2), (2, 2), (1, 1), (1, 1), ceil=True),
    # The output is smaller than the default one, which ONNX Runtime would refuse.
    Geometry.of_pooling((1,), (4,), (2,), (2,), (1,), ceil=True),
]


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pooling_and_back(portable: bool, rng: random.Random) -> None:
    drawn = (random_geometry(rng, "pool", longest=8) for _ in iter(int, 1))
    dense = (w for w in drawn if not w.has_empty_window and not (w.ceil and max(w.dilation) > 1))
    for window in (*CEIL, *itertools.islice(dense, scaled(8))):
        x = with_ties(*rng.choice(((2, 3), (3,))), *window.output)
        index_dtype = rng.choice(window.index_dtypes())
        check(pool_and_back(window, index_dtype, portable), x, portable=portable)


NUMBERS = [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 1)]
DYNAMIC = [
    pytest.param(numbers, dtype, portable, marks=[pytest.mark.slow] if left else [])
    for row, numbers in enumerate(NUMBERS)
    for column, dtype in enumerate(INDEX_DTYPES)
    for portable in (False, True)
    for left in ((row + column) % 3 or (portable and row % 2),)
]


@pytest.mark.parametrize(("numbers", "index_dtype", "portable"), DYNAMIC, ids=str)
def test_pooling_and_back_of_dynamic_sizes(
    numbers: tuple[int, int, int], index_dtype: torch.dtype, portable: bool, rng: random.Random
) -> None:
    # In 3d, the portable form of large windows takes minutes to export.
    dims, leading = rng.choice((1, 2, 2 if portable else 3)), rng.choice(((2, 3), (3,)))
    sizes = [(n,) * dims for n in (8, *numbers, 1)]
    window = Geometry.of_pooling(*sizes, ceil=False)
    first = len(leading)
    dynamic = (*range(first - 1), *range(first, first + dims))
    x = with_ties(*leading, *window.output)
    other = with_ties(*(5,) * (first - 1), 3, *(rng.randint(4, 12) for _ in range(dims)))
    if portable:
        other.flatten()[5:7] = torch.nan
    function = pool_and_back(window, index_dtype, portable)
    check(function, x, dynamic=dynamic, other=other, portable=portable)


def unpool_to(geometry: Geometry) -> Callable[..., Tensor]:
    """A function that unpools any indices to the sizes of a tensor."""
    window = (*geometry.window, "last")
    return lambda x, i, like: _ops.max_unpool(x, i, like.shape[-geometry.dims :], *window)


# More padding than window, which ONNX Runtime refuses.
PADDED = Geometry((3, 9), (1, 2), (3, 1), (1, 3), (5, 4))


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_unpooling_to_every_output_size(dynamic: bool, portable: bool, rng: random.Random) -> None:
    for given in (PADDED, *[None] * scaled(8)):
        while True:
            operator = "unpool" if given else rng.choice(("unpool", "unpool from offsets"))
            call = draw(rng, operator, torch.float32, reduce="last", geometry=given, longest=6)
            geometry = call.geometry
            # torch.export takes a size of one for a constant.
            if not dynamic or min(*geometry.pooled, *geometry.output) > 1:
                break
        values, indices = call.tensors
        # In the portable form ONNX Runtime makes 0 of -0.
        tensors = [t.contiguous() for t in (values + 0.0, indices, *call.results())]
        spatial = tuple(range(-geometry.dims % tensors[0].dim(), tensors[0].dim()))
        dims = spatial if dynamic else ()
        check(unpool_to(geometry), *tensors, dynamic=dims, portable=portable)


def test_bfloat16_becomes_standard_operators() -> None:
    def function(x: Tensor) -> Tensor:
        pooled, indices = F.max_pool2d(x.bfloat16(), 3, 2, 1, return_indices=True)
        return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape).float()

    x = torch.randn(2, 3, 8, 8)
    check(function, x)
    written = operators(export(function, x))
    assert written.count("MaxPool") == written.count("MaxUnpool") == 1
    assert operators(export(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), x)) == ["MaxPool"]


# Calls that ONNX's operators cannot express, by words of the error. The height is dynamic.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "max_unpool2d: .* reduce='sum'": lambda x: F.max_unpool2d(x, (x * 0).long(), 2, reduce="sum"),
    "max_unpool2d: .* type INT32": lambda x: F.max_unpool2d(x.int(), (x * 0).long(), 2),
    "max_pool2d: .* type INT32": lambda x: F.max_pool2d(x.int(), 2),
    "max_pool2d: .*ceil_mode=True": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "max_pool2d: .*sizes .1, 4.": (
        lambda x: F.max_pool2d(x[..., :1, :4], (1, 2), (1, 3), 0, (1, 2), ceil_mode=True)
    ),
    "max_pool2d: .*dilation=": lambda x: F.max_pool2d(x[..., :1], (1, 2), 1, (0, 1), (1, 2)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_onnx_cannot_express(words: str) -> None:
    """The error names the way that works, run_decompositions."""
    with pytest.raises(Exception, match=rf"{words}.*; use run_decompositions\(maxunpool_cuda\."):
        export(REFUSED[words], with_ties(2, 1, 8, 8), dynamic=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED)
def test_what_onnx_cannot_express_is_decomposed(words: str) -> None:
    x, other = with_ties(2, 1, 8, 8), with_ties(2, 1, 11, 8)
    check(REFUSED[words], x, dynamic=(2,), other=other, portable=True)
