# SPDX-License-Identifier: BSD-3-Clause
"""Export to ONNX, run by ONNX Runtime and ONNX's reference evaluator, against eager mode: with
MaxPool and MaxUnpool, by onnx_translation_table(); or decomposed, by decompositions().
"""

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import pytest
import torch
from cases import Call, Geometry, all_same, call_of, draw, random_geometry, scaled
from failures import check_each
from published import program_of
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F

DYNAMIC = torch.export.Dim.DYNAMIC
SLOW = pytest.param(True, marks=pytest.mark.slow)
both_forms = pytest.mark.parametrize("decomposed", [False, SLOW])

# ONNX's operators in decomposed exports. These lists have all: TensorRT (docs/operators.md of
# onnx-tensorrt at 96e7811, 2024-06-17), OpenVINO (src/frontends/onnx/docs/supported_ops.md at
# 0ae60f0) and the CUDA provider of ONNX Runtime (docs/OperatorKernels.md at 001d12d).
LISTED = {
    *("Add", "And", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand"),
    *("Gather", "Greater", "Identity", "Max", "MaxPool", "Mul", "Not", "Or", "Pad"),
    *("Range", "Reshape", "ScatterElements", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    "Where",
}


def to_onnx(program: Any, decomposed: bool) -> Any:
    if not decomposed:
        table = maxunpool_cuda.export.onnx_translation_table()
        return torch.onnx.export(program, verbose=False, custom_translation_table=table)
    program = program.run_decompositions(maxunpool_cuda.export.decompositions())
    assert "maxunpool_cuda" not in str(program.graph)
    written = torch.onnx.export(program, verbose=False)
    assert operators_of(written) <= LISTED
    return written


def operators_of(program: Any) -> set[str]:
    return {node.op_type for node in program.model.graph}


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
    shapes: Any = None,  # the dynamic dimensions of each input
    decomposed: bool = False,
) -> set[str]:
    """Export for ``inputs``, run on them and on ``other``, and compare with eager mode.

    Returns the types of the ONNX operators.
    """
    exported = program_of(function, *inputs, shapes=shapes)
    program = to_onnx(exported, decomposed)
    for given in (inputs, (other,)) if other is not None else (inputs,):
        for run in (exported.module(), *runners(program)):
            assert all_same(leaves(run(*given)), function(*given)), f"{run}, {given[0].shape}"
    return operators_of(program)


def with_ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


@both_forms
def test_pooling(decomposed: bool, rng: random.Random) -> None:
    """Of fixed sizes, and of windows that ONNX has."""

    def calls() -> Iterator[Call]:
        # A window that would begin in the padding at the end of the last axis is left out.
        geometry = Geometry.of_pooling((7, 9), (3, 2), (2, 2), (1, 1), (1, 1), ceil=True)
        for _ in range(1 + scaled(4)):
            x = with_ties(*rng.choice(((2, 3), (3,))), *geometry.output)
            index_dtype = rng.choice(geometry.index_dtypes())
            yield call_of("pool", x, geometry=geometry, index_dtype=index_dtype)
            geometry = random_geometry(rng, "pool", longest=8)
            while geometry.has_empty_window or (geometry.ceil and max(geometry.dilation) > 1):
                geometry = random_geometry(rng, "pool", longest=8)

    def check_call(call: Call) -> None:
        check(lambda x: call.operator(x, *call.arguments), *call.tensors, decomposed=decomposed)

    check_each(calls(), check_call)


def pool_and_back(
    dims: int, window: Sequence[int], index_dtype: torch.dtype, reduce: Any
) -> Callable[[Tensor], list[Tensor]]:
    """A function that returns all results. ``window`` is the kernel size, stride and padding."""
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")

    def function(x: Tensor) -> list[Tensor]:
        values, indices = pool(x, *window, return_indices=True, index_dtype=index_dtype)
        return [values, indices, unpool(values, indices, *window, x.shape, reduce=reduce)]

    return function


@pytest.mark.parametrize(
    ("decomposed", "dims"),
    [
        (False, 2),
        (True, 1),
        pytest.param(False, 3, marks=pytest.mark.slow),
        pytest.param(True, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_pooling_and_back_of_named_sizes(
    index_dtype: torch.dtype, decomposed: bool, dims: int, rng: random.Random
) -> None:
    """torch.export refuses every guard on a dimension with a name and a range."""
    function = pool_and_back(dims, (3, 2, 1), index_dtype, "sum" if decomposed else "last")
    x = with_ties(2, 3, *(8,) * dims)
    other = with_ties(5, 3, *(rng.randint(4, 12) for _ in range(dims)))
    sizes = {n: torch.export.Dim(f"size{n}", min=4, max=64) for n in range(2, x.dim())}
    sizes[0] = torch.export.Dim("batch", min=2)
    check(function, x, shapes=(sizes,), other=other, decomposed=decomposed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index_dtype", "reduce", "sizes", "others", "window"),
    [
        (torch.uint8, "sum", (9,), (11,), (3, 2, 1)),
        (torch.int32, "last", (9, 9), (11, 12), (3, 2, 1)),
        # Fixed sizes, and no large windows, which take minutes to export.
        (torch.int64, "sum", (8, 8, 8), (8, 8, 8), (2, 2, 0)),
    ],
)
def test_openvino(index_dtype: Any, reduce: str, sizes: Any, others: Any, window: Any) -> None:
    openvino: Any = importlib.import_module("openvino")
    function = pool_and_back(len(sizes), window, index_dtype, reduce)
    x, other = with_ties(2, 3, *sizes), with_ties(2, 3, *others)
    dynamic = {} if sizes == others else dict.fromkeys(range(2, x.dim()), DYNAMIC)
    program = to_onnx(program_of(function, x, shapes=(dynamic,)), decomposed=True)
    model = openvino.Core().read_model(program.model_proto.SerializeToString())
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for given in (x, other):
        results = compiled([given.numpy()])
        returned = [torch.from_numpy(results[output].copy()) for output in compiled.outputs]
        assert all_same(returned, function(given))


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_decompositions_keep_nan(index_dtype: torch.dtype, window: Sequence[int]) -> None:
    """Where it is not the first of its window, ONNX Runtime's MaxPool does not."""
    x = with_ties(2, 3, 8, 8)
    x[0, 0, 4, 5] = x[1, 2, 6, 3] = torch.nan
    function = pool_and_back(2, window, index_dtype, "last")
    assert all(result.isnan().any() for result in function(x)[::2])
    assert "MaxPool" not in check(function, x, decomposed=True)
    ours = to_onnx(program_of(function, x), decomposed=False)
    pool = torch.nn.MaxPool2d(*window, return_indices=True).eval()
    for by_max_pool in (ours, torch.onnx.export(pool, (x,), verbose=False)):
        assert "MaxPool" in operators_of(by_max_pool)
        assert not any(result.isnan().any() for result in by_max_pool(x)), by_max_pool


# More padding than window, which ONNX Runtime refuses.
PADDED = Geometry((3, 9), (1, 2), (3, 1), (1, 3), (5, 4))


@both_forms
@pytest.mark.parametrize("dynamic", [False, True])
def test_unpooling_to_every_output_size(
    dynamic: bool, decomposed: bool, rng: random.Random
) -> None:

    def calls() -> Iterator[Call]:
        yield draw(rng, "unpool", torch.float32, reduce="last", geometry=PADDED)
        for _ in range(scaled(4)):
            operator = rng.choice(("unpool", "unpool from offsets"))
            geometry = random_geometry(rng, operator, longest=6)
            # torch.export takes a size of one for a constant.
            while dynamic and 1 in geometry.pooled + geometry.output:
                geometry = random_geometry(rng, operator, longest=6)
            yield draw(rng, operator, torch.float32, reduce="last", geometry=geometry)

    def check_call(call: Call) -> None:
        values, indices = call.tensors
        # Decomposed, ONNX Runtime makes 0 of -0.
        tensors = [t.contiguous() for t in (values + 0.0, indices, *call.results())]
        spatial = range(values.dim() - call.dims, values.dim()) if dynamic else ()
        shapes = [dict.fromkeys(spatial, DYNAMIC)] * 3

        def function(x: Tensor, i: Tensor, like: Tensor) -> Tensor:
            return call.operator(x, i, like.shape[-call.dims :], *call.arguments[1:])

        check(function, *tensors, shapes=shapes, decomposed=decomposed)

    check_each(calls(), check_call)


def test_bfloat16_becomes_standard_operators() -> None:
    """And pooling in ceil mode is one of them alone."""

    def function(x: Tensor) -> Tensor:
        pooled, indices = F.max_pool2d(x.bfloat16(), 3, 2, 1, return_indices=True)
        return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape).float()

    x = torch.randn(2, 3, 8, 8)
    assert check(function, x) >= {"MaxPool", "MaxUnpool"}
    assert check(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), x) == {"MaxPool"}


# Calls that ONNX's operators cannot express, with words of the error. The height is dynamic.
REFUSED = {
    "max_unpool2d: .* reduce='sum'": lambda x: F.max_unpool2d(x, (x * 0).long(), 2, reduce="sum"),
    "max_unpool2d: .* type INT32": lambda x: F.max_unpool2d(x.int(), (x * 0).long(), 2),
    "max_pool2d: .*ceil_mode=True": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    # Windows without an element.
    "max_pool2d: .*dilation=": lambda x: F.max_pool2d(
        x[..., :1], (1, 2), 1, (0, 1), (1, 2), return_indices=True
    )[0],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_onnx_cannot_express(words: str) -> None:
    """The error names the way that works, run_decompositions."""
    program = program_of(REFUSED[words], with_ties(2, 1, 8, 8), shapes=({2: DYNAMIC},))
    with pytest.raises(Exception, match=rf"{words}.*; use run_decompositions\(maxunpool_cuda\."):
        to_onnx(program, decomposed=False)


@pytest.mark.parametrize("return_indices", [False, True])
def test_adaptive_pooling_of_sizes_that_change(return_indices: bool) -> None:
    """torch.onnx.export would write the windows of the example. It does for torch.nn's pools."""
    program = program_of(
        lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices),
        with_ties(2, 1, 9, 12),
        shapes=({2: DYNAMIC},),
    )
    with pytest.raises(Exception, match="No ONNX function found"):
        to_onnx(program, decomposed=False)
    with pytest.warns(UserWarning, match="writes the windows of the example's sizes"):
        program.run_decompositions(maxunpool_cuda.export.decompositions())


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED)
def test_the_way_that_works(words: str) -> None:
    x, other = with_ties(2, 1, 8, 8), with_ties(2, 1, 11, 8)
    check(REFUSED[words], x, shapes=({2: DYNAMIC},), other=other, decomposed=True)
