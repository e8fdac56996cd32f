# SPDX-License-Identifier: BSD-3-Clause
"""Export to ONNX, run by ONNX Runtime and ONNX's reference evaluator, against eager mode: with
MaxPool and MaxUnpool, by onnx_translation_table(); or decomposed, by decompositions().
"""

import importlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import pytest
import torch
from cases import REDUCES, Call, Geometry, all_same, draw, random_geometry, scaled
from failures import check_each
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _operators

SLOW = pytest.param(True, marks=pytest.mark.slow)
both_forms = pytest.mark.parametrize("decomposed", [False, SLOW])

# ONNX's operators in decomposed exports. These lists have all: TensorRT (docs/operators.md of
# onnx-tensorrt at 96e7811, 2024-06-17), OpenVINO (src/frontends/onnx/docs/supported_ops.md at
# 0ae60f0) and the CUDA provider of ONNX Runtime (docs/OperatorKernels.md at 001d12d).
LISTED = {
    *("Add", "And", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand"),
    *("Floor", "Gather", "Greater", "Identity", "IsNaN", "Max", "Mod", "Mul", "Or", "Pad"),
    *("Range", "Reshape", "ScatterElements", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    "Where",
}


def export(
    function: Callable[..., Any],
    *inputs: Tensor,
    shapes: Sequence[dict[int, Any]] = (),
    decomposed: bool = False,
) -> tuple[Any, Any]:
    """The exported program and its ONNX."""
    module, table = nn.Module(), maxunpool_cuda.export.onnx_translation_table()
    module.forward = function
    program: Any = torch.export.export(module, inputs, dynamic_shapes=shapes or None)
    if decomposed:
        program, table = program.run_decompositions(maxunpool_cuda.export.decompositions()), {}
        assert "maxunpool_cuda" not in str(program.graph)
    return program, torch.onnx.export(program, verbose=False, custom_translation_table=table)


def runners(program: Any) -> list[Callable[..., Sequence[Tensor]]]:
    """ONNX Runtime and, where it can run the program, ONNX's evaluator.

    The evaluator returns indices in the window for a MaxPool whose strides and dilations are one.
    """
    onnx.checker.check_model(program.model_proto, full_check=True)
    for node in program.model.graph:
        if node.op_type == "MaxPool" and len(node.outputs) > 1:
            pool = node.attributes
            if max(*pool["strides"].as_ints(), *pool["dilations"].as_ints()) == 1:
                return [program]
    return [program, program.call_reference]


def check(
    function: Callable[..., Any],
    *inputs: Tensor,
    other: Tensor | None = None,
    shapes: Sequence[dict[int, Any]] = (),
    decomposed: bool = False,
) -> list[str]:
    """Export, run on ``inputs`` and on ``other``, and compare with eager mode.

    Returns the types of the ONNX operators. ``shapes`` are the dynamic dimensions of each input.
    """
    exported, program = export(function, *inputs, shapes=shapes, decomposed=decomposed)
    written = [node.op_type for node in program.model.graph]
    if decomposed:
        assert set(written) <= LISTED
    every = [inputs] if other is None else [inputs, (other,)]
    for given, run in itertools.product(every, [exported.module(), *runners(program)]):
        assert all_same(leaves(run(*given)), function(*given)), f"{run}, {given[0].shape}"
    return written


def with_ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def pool_and_back(
    window: Geometry, index_dtype: torch.dtype, decomposed: bool
) -> Callable[[Tensor], Any]:
    """A function that returns every result of pooling and unpooling."""
    axes = zip(window.kernel, window.dilation, strict=True)
    extent = [(kernel - 1) * spread + 1 for kernel, spread in axes]  # each index lies in it
    reduces = REDUCES if decomposed else ("last",)

    def function(x: Tensor) -> list[Tensor]:
        values, indices = _operators.max_pool(x, *window.pooling, index_dtype)
        geometry = (x.shape[-window.dims :], extent, window.stride, window.padding)
        unpooled = [_operators.max_unpool(values, indices, *geometry, r) for r in reduces]
        return [values, indices, *unpooled]

    return function


CEIL = [
    # ceil mode leaves out a window that would begin in the padding at the end of the last axis.
    Geometry.of_pooling((7, 9), (3, 2), (2, 2), (1, 1), (1, 1), ceil=True),
    # The output is smaller than the default one, which ONNX Runtime would refuse.
    Geometry.of_pooling((1,), (4,), (2,), (2,), (1,), ceil=True),
]


@both_forms
def test_pooling_and_back(decomposed: bool, rng: random.Random, subtests: pytest.Subtests) -> None:
    drawn = (random_geometry(rng, "pool", longest=8) for _ in itertools.count())
    dense = (w for w in drawn if not w.has_empty_window and not (w.ceil and max(w.dilation) > 1))
    for window in (*CEIL, *itertools.islice(dense, scaled(4))):
        x = with_ties(*rng.choice(((2, 3), (3,))), *window.output)
        index_dtype = rng.choice(window.index_dtypes())
        with subtests.test(f"{window}, {index_dtype}, {x.shape}"):
            check(pool_and_back(window, index_dtype, decomposed), x, decomposed=decomposed)


@pytest.mark.parametrize(
    ("decomposed", "dims", "numbers"),  # kernel_size, stride and padding
    [
        (False, 2, (3, 2, 1)),
        (True, 1, (3, 2, 1)),
        pytest.param(False, 3, (2, 3, 1), marks=pytest.mark.slow),
        pytest.param(True, 2, (2, 3, 1), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_pooling_and_back_of_named_sizes(
    index_dtype: torch.dtype, decomposed: bool, dims: int, numbers: Any, rng: random.Random
) -> None:
    """torch.export refuses every guard on a dimension with a name and a range."""
    batched = rng.choice((0, 1))
    window = Geometry.of_pooling(*((n,) * dims for n in (8, *numbers, 1)), ceil=False)
    x = with_ties(*(2,) * batched, 3, *window.output)
    other = with_ties(*(5,) * batched, 3, *(rng.randint(4, 12) for _ in range(dims)))
    if decomposed:
        other.flatten()[5:7] = torch.nan
    named = (*range(batched), *range(batched + 1, x.dim()))  # all but the channels
    sizes = {n: torch.export.Dim(f"size{n}", min=2 if n < batched else 4) for n in named}
    sizes[x.dim() - 1] = torch.export.Dim("columns", min=4, max=64)
    function = pool_and_back(window, index_dtype, decomposed)
    check(function, x, shapes=(sizes,), other=other, decomposed=decomposed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index_dtype", "sizes", "other"),
    [
        (torch.uint8, (9,), (11,)),
        (torch.int32, (9, 9), (11, 12)),
        (torch.int64, (8, 8, 8), None),  # fixed
    ],
)
def test_openvino(index_dtype: torch.dtype, sizes: Any, other: Any) -> None:
    openvino: Any = importlib.import_module("openvino")
    dims = len(sizes)
    # In 3d, large windows take minutes to export decomposed.
    numbers = (2, 2, 0, 1) if dims == 3 else (3, 2, 1, 1)
    window = Geometry.of_pooling(sizes, *((n,) * dims for n in numbers), ceil=False)
    function, x = pool_and_back(window, index_dtype, True), with_ties(2, 3, *sizes)
    dynamic = dict.fromkeys(range(2, 2 + dims) if other else (), torch.export.Dim.DYNAMIC)
    _, program = export(function, x, shapes=(dynamic,), decomposed=True)
    model = openvino.Core().read_model(program.model_proto.SerializeToString())
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for given in (x, with_ties(2, 3, *other)) if other else (x,):
        results = compiled([given.numpy()])
        returned = [torch.from_numpy(results[output].copy()) for output in compiled.outputs]
        assert all_same(returned, function(given))


# More padding than window, which ONNX Runtime refuses.
PADDED = Geometry((3, 9), (1, 2), (3, 1), (1, 3), (5, 4))


@both_forms
@pytest.mark.parametrize("dynamic", [False, True])
def test_unpooling_to_every_output_size(
    dynamic: bool, decomposed: bool, rng: random.Random
) -> None:

    def calls() -> Iterator[Call]:
        how: dict[str, Any] = {"reduce": "last", "longest": 6}
        yield draw(rng, "unpool", torch.float32, geometry=PADDED, **how)
        for _ in range(scaled(4)):
            operator = rng.choice(("unpool", "unpool from offsets"))
            call = draw(rng, operator, torch.float32, **how)
            # torch.export takes a size of one for a constant.
            while dynamic and 1 in call.geometry.pooled + call.geometry.output:
                call = draw(rng, operator, torch.float32, **how)
            yield call

    def check_call(call: Call) -> None:
        values, indices = call.tensors
        # Decomposed, ONNX Runtime makes 0 of -0.
        tensors = [t.contiguous() for t in (values + 0.0, indices, *call.results())]
        spatial = range(values.dim() - call.dims, values.dim()) if dynamic else ()
        shapes = [dict.fromkeys(spatial, torch.export.Dim.DYNAMIC)] * 3

        def function(x: Tensor, i: Tensor, like: Tensor) -> Tensor:
            return _operators.max_unpool(x, i, like.shape[-call.dims :], *call.arguments[1:])

        check(function, *tensors, shapes=shapes, decomposed=decomposed)

    check_each(calls(), check_call)


def test_bfloat16_becomes_standard_operators() -> None:
    """And pooling in ceil mode one of them."""

    def function(x: Tensor) -> Tensor:
        pooled, indices = F.max_pool2d(x.bfloat16(), 3, 2, 1, return_indices=True)
        return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape).float()

    x = torch.randn(2, 3, 8, 8)
    written = check(function, x)
    assert written.count("MaxPool") == written.count("MaxUnpool") == 1
    assert check(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), x) == ["MaxPool"]


# Calls that ONNX's operators cannot express, with words of the error. The height is dynamic.
REFUSED = {
    "max_unpool2d: .* reduce='sum'": lambda x: F.max_unpool2d(x, (x * 0).long(), 2, reduce="sum"),
    "max_unpool2d: .* type INT32": lambda x: F.max_unpool2d(x.int(), (x * 0).long(), 2),
    "max_pool2d: .*ceil_mode=True": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "max_pool2d: .*sizes .1, 4.": lambda x: F.max_pool2d(
        x[..., :1, :4], (1, 2), (1, 3), 0, (1, 2), ceil_mode=True
    ),
    # Windows without an element.
    "max_pool2d: .*dilation=": lambda x: F.max_pool2d(x[..., :1], (1, 2), 1, (0, 1), (1, 2)),
}


@both_forms
@pytest.mark.parametrize("words", REFUSED)
def test_what_onnx_cannot_express(words: str, decomposed: bool) -> None:
    """The error names the way that works, run_decompositions."""
    x, shapes = with_ties(2, 1, 8, 8), ({2: torch.export.Dim.DYNAMIC},)
    if decomposed:
        check(REFUSED[words], x, shapes=shapes, other=with_ties(2, 1, 11, 8), decomposed=True)
        return
    with pytest.raises(Exception, match=rf"{words}.*; use run_decompositions\(maxunpool_cuda\."):
        export(REFUSED[words], x, shapes=shapes)
