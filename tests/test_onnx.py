# SPDX-License-Identifier: BSD-3-Clause
"""Export to ONNX, run by ONNX Runtime and ONNX's reference evaluator, against eager mode: with
MaxPool and MaxUnpool, by onnx_translation_table(); or decomposed, by decompositions().
With --all OpenVINO runs one decomposed model of each kind.
"""

import importlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import pytest
import torch
from cases import INDEX_DTYPES, REDUCES, Call, Geometry, all_same, draw, random_geometry, scaled
from failures import Named, check_each
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
    dynamic: Sequence[int] = (),
    decomposed: bool = False,
) -> Any:
    """Export to ONNX. The sizes of the dynamic dimensions of every input are left open."""
    module, table = nn.Module(), maxunpool_cuda.export.onnx_translation_table()
    module.forward = function
    shapes = [dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC) for _ in inputs]
    program: Any = torch.export.export(module, inputs, dynamic_shapes=shapes)
    if decomposed:
        program, table = program.run_decompositions(maxunpool_cuda.export.decompositions()), {}
        assert "maxunpool_cuda" not in str(program.graph)
    return torch.onnx.export(program, verbose=False, custom_translation_table=table)


def runners(program: Any) -> list[Callable[..., Sequence[Tensor]]]:
    """ONNX Runtime and, where it can run the program, ONNX's evaluator.

    The evaluator returns indices in the window for a MaxPool whose strides and dilations are one.
    """
    onnx.checker.check_model(program.model_proto, full_check=True)
    pools = [node for node in program.model.graph if node.op_type == "MaxPool"]
    with_indices = [pool.attributes for pool in pools if len(pool.outputs) > 1]
    steps = ([*pool["strides"].as_ints(), *pool["dilations"].as_ints()] for pool in with_indices)
    if any(max(step) == 1 for step in steps):
        return [program]
    return [program, program.call_reference]


def openvino_runner(program: Any) -> Callable[..., Sequence[Tensor]]:
    openvino: Any = importlib.import_module("openvino")
    model = openvino.Core().read_model(program.model_proto.SerializeToString())
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(model, "CPU", exact)

    def run(*inputs: Tensor) -> list[Tensor]:
        results = compiled([tensor.numpy() for tensor in inputs])
        return [torch.from_numpy(results[output].copy()) for output in compiled.outputs]

    return run


def operators(program: Any) -> list[str]:
    return [node.op_type for node in program.model.graph]


def check(
    function: Callable[..., Any], *inputs: Tensor, other: Tensor | None = None, **how: Any
) -> None:
    """Export, run on ``inputs`` and on ``other``, and compare with eager mode."""
    program = export(function, *inputs, **how)
    if how.get("decomposed"):
        assert set(operators(program)) <= LISTED
    every = [inputs] if other is None else [inputs, (other,)]
    wrong = {}
    for given, runner in itertools.product(every, runners(program)):
        comparison = all_same([*runner(*given)], function(*given))
        if not comparison:
            shapes = [tuple(tensor.shape) for tensor in given]
            wrong[f"{getattr(runner, '__name__', 'ONNX Runtime')} of {shapes}"] = comparison
    assert wrong == {}


def with_ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def pool_and_back(
    window: Geometry, index_dtype: torch.dtype, decomposed: bool
) -> Callable[[Tensor], Any]:
    """A function that returns every result of pooling and unpooling."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        values, indices = _operators.max_pool(x, *window.pooling, index_dtype)
        axes = zip(window.kernel, window.dilation, strict=True)
        extent = [(kernel - 1) * spread + 1 for kernel, spread in axes]  # each index lies in it
        geometry = (x.shape[-window.dims :], extent, window.stride, window.padding)
        reduces = REDUCES if decomposed else ("last",)
        return (
            values,
            indices,
            *(_operators.max_unpool(values, indices, *geometry, r) for r in reduces),
        )

    return function


CEIL = [
    # ceil mode leaves out a window that would begin in the padding at the end of the last axis.
    Geometry.of_pooling((7, 9), (3, 2), (2, 2), (1, 1), (1, 1), ceil=True),
    # The output is smaller than the default one, which ONNX Runtime would refuse.
    Geometry.of_pooling((1,), (4,), (2,), (2,), (1,), ceil=True),
]


@both_forms
def test_pooling_and_back(decomposed: bool, rng: random.Random) -> None:
    drawn = (random_geometry(rng, "pool", longest=8) for _ in itertools.count())
    dense = (w for w in drawn if not w.has_empty_window and not (w.ceil and max(w.dilation) > 1))

    def check_window(case: Named) -> None:
        window, index_dtype, x = case.value
        check(pool_and_back(window, index_dtype, decomposed), x, decomposed=decomposed)

    def windows() -> Iterator[Named]:
        for window in (*CEIL, *itertools.islice(dense, scaled(8))):
            x = with_ties(*rng.choice(((2, 3), (3,))), *window.output)
            index_dtype = rng.choice(window.index_dtypes())
            name = f"{window}, {index_dtype}, input {tuple(x.shape)}"
            yield Named(name, (window, index_dtype, x), x.numel())

    check_each(windows(), check_window)


# kernel_size, stride and padding.
WINDOWS = [
    (3, 2, 1),
    *(pytest.param(window, marks=pytest.mark.slow) for window in ((2, 2, 0), (3, 1, 1), (2, 3, 1))),
]


@pytest.mark.parametrize("numbers", WINDOWS, ids=str)
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_pooling_and_back_of_dynamic_sizes(
    index_dtype: torch.dtype, decomposed: bool, numbers: tuple[int, int, int], rng: random.Random
) -> None:
    # In 3d, decomposed large windows take minutes to export.
    dims, batched = rng.choice((1, 2, 2 if decomposed else 3)), rng.choice((0, 1))
    window = Geometry.of_pooling(*((n,) * dims for n in (8, *numbers, 1)), ceil=False)
    x = with_ties(*(2,) * batched, 3, *window.output)
    other = with_ties(*(5,) * batched, 3, *(rng.randint(4, 12) for _ in range(dims)))
    if decomposed:
        other.flatten()[5:7] = torch.nan
    dynamic = (*range(batched), *range(batched + 1, x.dim()))  # all but the channels
    function = pool_and_back(window, index_dtype, decomposed)
    check(function, x, dynamic=dynamic, other=other, decomposed=decomposed)


class Segmenter(nn.Module):
    """Pools and unpools to the size of its input."""

    def __init__(self, index_dtype: torch.dtype, reduce: Any = "last") -> None:
        super().__init__()
        self.index_dtype, self.reduce = index_dtype, reduce

    def forward(self, x: Tensor) -> Tensor:
        indices_as = {"return_indices": True, "index_dtype": self.index_dtype}
        pooled, indices = F.max_pool2d(x, 3, 2, 1, **indices_as)
        return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape[-2:], reduce=self.reduce)


NAMED = [torch.int64, pytest.param(torch.int32, marks=pytest.mark.slow), torch.uint8]


@pytest.mark.parametrize("strict", [False, SLOW])
@pytest.mark.parametrize("index_dtype", NAMED, ids=str)
def test_named_sizes(index_dtype: torch.dtype, strict: bool, subtests: pytest.Subtests) -> None:
    """torch.export refuses every guard on a dimension with a name and a range."""
    model, x, other = Segmenter(index_dtype), with_ties(2, 3, 9, 12), with_ties(2, 3, 14, 11)
    height, width = torch.export.Dim("height", min=8, max=64), torch.export.Dim("width", min=8)
    sizes = ({2: height, 3: width},)
    program: Any = torch.export.export(model, (x,), dynamic_shapes=sizes, strict=strict)
    decomposed = program.run_decompositions(maxunpool_cuda.export.decompositions())
    assert "maxunpool_cuda" not in str(decomposed.graph)
    table = maxunpool_cuda.export.onnx_translation_table()
    translated = torch.onnx.export(program, verbose=False, custom_translation_table=table)
    written = torch.onnx.export(decomposed, verbose=False)
    runs = [program.module(), decomposed.module(), *runners(translated), *runners(written)]
    for number, run in enumerate(runs):
        for given in (x, other):
            with subtests.test(f"run {number}, {tuple(given.shape)}"):
                assert all_same([*leaves(run(given))], model(given))


# The kinds of decomposed models: static and dynamic sizes, each dtype of indices, each reduce.
KINDS = [*itertools.product([False, True], INDEX_DTYPES, REDUCES)]


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "index_dtype", "reduce"), KINDS, ids=str)
def test_openvino(dynamic: bool, index_dtype: torch.dtype, reduce: str) -> None:
    model, x = Segmenter(index_dtype, reduce), with_ties(2, 3, 9, 12)
    program = export(model.forward, x, dynamic=(2, 3) if dynamic else (), decomposed=True)
    run = openvino_runner(program)
    inputs = (x, with_ties(2, 3, 14, 11)) if dynamic else (x,)
    assert all_same([*map(run, inputs)], [*map(model, inputs)])


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_openvino_returns_pooled_values_and_indices(dims: int) -> None:
    window = Geometry.of_pooling(*((n,) * dims for n in (8, 2, 2, 0, 1)), ceil=False)
    function = pool_and_back(window, torch.int64, decomposed=True)
    x = with_ties(2, 3, *window.output)
    assert all_same(openvino_runner(export(function, x, decomposed=True))(x), function(x))


# More padding than window, which ONNX Runtime refuses.
PADDED = Geometry((3, 9), (1, 2), (3, 1), (1, 3), (5, 4))


@both_forms
@pytest.mark.parametrize("dynamic", [False, True])
def test_unpooling_to_every_output_size(
    dynamic: bool, decomposed: bool, rng: random.Random
) -> None:

    def calls() -> Iterator[Call]:
        for given in (PADDED, *[None] * scaled(8)):
            operator = "unpool" if given else rng.choice(("unpool", "unpool from offsets"))
            how = {"reduce": "last", "geometry": given, "longest": 6}
            drawn = (draw(rng, operator, torch.float32, **how) for _ in itertools.count())
            # torch.export takes a size of one for a constant.
            yield next(
                call
                for call in drawn
                if not dynamic or 1 not in call.geometry.pooled + call.geometry.output
            )

    def check_call(call: Call) -> None:
        values, indices = call.tensors
        # Decomposed, ONNX Runtime makes 0 of -0.
        tensors = [t.contiguous() for t in (values + 0.0, indices, *call.results())]
        spatial = range(values.dim() - call.dims, values.dim()) if dynamic else ()

        def function(x: Tensor, i: Tensor, like: Tensor) -> Tensor:
            return _operators.max_unpool(x, i, like.shape[-call.dims :], *call.arguments[1:])

        check(function, *tensors, dynamic=spatial, decomposed=decomposed)

    check_each(calls(), check_call)


def test_bfloat16_becomes_standard_operators() -> None:
    def function(x: Tensor) -> Tensor:
        pooled, indices = F.max_pool2d(x.bfloat16(), 3, 2, 1, return_indices=True)
        return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape).float()

    x = torch.randn(2, 3, 8, 8)
    check(function, x)
    written = operators(export(function, x))
    assert written.count("MaxPool") == written.count("MaxUnpool") == 1
    assert operators(export(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), x)) == ["MaxPool"]


# Calls that ONNX's operators cannot express, with words of the error. The height is dynamic.
REFUSED = [
    pytest.param(
        "max_unpool2d: .* reduce='sum'",
        lambda x: F.max_unpool2d(x, (x * 0).long(), 2, reduce="sum"),
        id="a sum",
    ),
    pytest.param(
        "max_unpool2d: .* type INT32",
        lambda x: F.max_unpool2d(x.int(), (x * 0).long(), 2),
        id="unpooling of integers",
    ),
    pytest.param(
        "max_pool2d: .* type INT32", lambda x: F.max_pool2d(x.int(), 2), id="pooling of integers"
    ),
    pytest.param(
        "max_pool2d: .*ceil_mode=True",
        lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
        id="ceil mode",
    ),
    pytest.param(
        "max_pool2d: .*sizes .1, 4.",
        lambda x: F.max_pool2d(x[..., :1, :4], (1, 2), (1, 3), 0, (1, 2), ceil_mode=True),
        id="ceil mode, dilated",
    ),
    pytest.param(
        "max_pool2d: .*dilation=",
        lambda x: F.max_pool2d(x[..., :1], (1, 2), 1, (0, 1), (1, 2)),
        id="windows without an element",
    ),
]


@both_forms
@pytest.mark.parametrize(("words", "function"), REFUSED)
def test_what_onnx_cannot_express(
    words: str, function: Callable[[Tensor], Any], decomposed: bool
) -> None:
    """The error names the way that works, run_decompositions."""
    x, dynamic = with_ties(2, 1, 8, 8), (2,)
    if decomposed:
        check(function, x, dynamic=dynamic, other=with_ties(2, 1, 11, 8), decomposed=True)
        return
    with pytest.raises(Exception, match=rf"{words}.*; use run_decompositions\(maxunpool_cuda\."):
        export(function, x, dynamic=dynamic)
