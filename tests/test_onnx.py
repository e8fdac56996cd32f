"""Export to ONNX, run by ONNX Runtime and ONNX's reference evaluator, against eager mode.

Each test exports in one of two ways: with MaxPool and MaxUnpool, by translation_table(); or without
MaxUnpool, by decompositions().
"""

import io
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES, Geometry, Window, random_case, random_window, same
from networks import POOLS, UNPOOLS
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F
import maxunpool_cuda.onnx
from maxunpool_cuda import _ops

onnx = pytest.importorskip("onnx", reason="its evaluator runs the exports")
onnxruntime = pytest.importorskip("onnxruntime", reason="the exports are run by ONNX Runtime")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")

Axes = tuple[int, ...]

# What decompositions() become. These lists have all of it: TensorRT (docs/operators.md of
# onnx-tensorrt at 96e7811, 2024-06-17),
# OpenVINO (src/frontends/onnx/docs/supported_ops.md at 0ae60f0) and the CUDA provider of ONNX
# Runtime (docs/OperatorKernels.md at 001d12d) list all of these.
LISTED = {
    *("Add", "And", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand"),
    *(
        "Floor",
        "GatherElements",
        "Greater",
        "Identity",
        "IsNaN",
        "Max",
        "Mod",
        "Mul",
        "Or",
        "Pad",
        "Range",
    ),
    *("Reshape", "ScatterElements", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
}


class Function(nn.Module):
    """A function as what can be exported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def pool_and_back(window: Window, index_dtype: torch.dtype) -> nn.Module:
    """All that both operators return."""

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = _ops.max_pool(x, *window.arguments, index_dtype)
        axes = zip(window.kernel, window.dilation, strict=True)
        extent = [(kernel - 1) * spread + 1 for kernel, spread in axes]  # each index lies in it
        geometry = (x.shape[-len(window.sizes) :], extent, window.stride, window.padding)
        return values, indices, _ops.max_unpool(values, indices, *geometry, "last")

    return Function(function)


def export(
    model: nn.Module, *inputs: Tensor, dynamic: Axes = (), portable: bool = False
) -> torch.onnx.ONNXProgram:
    """With the sizes of some dimensions left open, of every input the same."""
    shapes: Any = tuple(dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC) for _ in inputs)
    if isinstance(model, Function):  # whose inputs are one argument
        shapes = (shapes,)
    program: Any = torch.export.export(model, inputs, dynamic_shapes=shapes if dynamic else None)
    table = maxunpool_cuda.onnx.translation_table()
    if portable:
        program, table = program.run_decompositions(maxunpool_cuda.decompositions()), {}
    return torch.onnx.export(program, verbose=False, custom_translation_table=table)


def operators(program: torch.onnx.ONNXProgram) -> list[str]:
    return [node.op_type for node in program.model.graph]


def evaluator_can(program: torch.onnx.ONNXProgram) -> bool:
    """Not MaxPool of strides one, nor Pad of less than nothing, which makes the output smaller.

    It counts the places in windows of such a pool as if each were the output.
    """
    if "Pad" in operators(program):
        return False
    pools = [node.attributes for node in program.model.graph if node.op_type == "MaxPool"]
    steps = ([*pool["strides"].as_ints(), *pool["dilations"].as_ints()] for pool in pools)
    return all(max(step) > 1 for step in steps)


def run(program: torch.onnx.ONNXProgram, *inputs: Tensor) -> list[Tensor]:
    """By ONNX Runtime, once the reference evaluator returns the same."""
    file = io.BytesIO()
    program.save(file)
    onnx.checker.check_model(file.getvalue(), full_check=True)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [described.name for described in session.get_inputs()]
    fed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    outputs = [torch.from_numpy(output) for output in session.run(None, fed)]
    if evaluator_can(program):
        evaluator = onnx.reference.ReferenceEvaluator(file.getvalue())
        others = [torch.from_numpy(output) for output in evaluator.run(None, fed)]
        assert all(map(same, others, outputs))
    return outputs


def check(
    model: nn.Module,
    *inputs: Tensor,
    dynamic: Axes = (),
    others: tuple[Tensor, ...] = (),
    portable: bool = False,
) -> list[str]:
    """Export ``model``, and run it on its inputs, and on others, for what it returns in eager."""
    program = export(model, *inputs, dynamic=dynamic, portable=portable)
    for given in (inputs, *((other,) for other in others)):
        expected = model(*given)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for got, want in zip(run(program, *given), expected, strict=True):
            assert same(got, want)
    if portable:
        assert set(operators(program)) <= LISTED
    return operators(program)


def with_ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def test_importing_the_package_is_enough() -> None:
    program = """
import sys
import maxunpool_cuda
assert "onnx" in dir(maxunpool_cuda)
assert "maxunpool_cuda.onnx" not in sys.modules
print(len(maxunpool_cuda.onnx.translation_table()))
try:
    maxunpool_cuda.tensorrt
except AttributeError as error:
    print(error)
"""
    root = Path(maxunpool_cuda.__file__).parent.parent
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=root, text=True)
    assert printed == "2\nmodule 'maxunpool_cuda' has no attribute 'tensorrt'\n"


class Stage(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = POOLS[dims - 1](3, 2, 1, return_indices=True)
        self.unpool = UNPOOLS[dims - 1](3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(x)
        return self.unpool(pooled * 2, indices, x.shape)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_modules_become_standard_operators(dims: int) -> None:
    model, x = Stage(dims), torch.rand(2, 3, *[8] * dims)
    maxunpool_cuda.replace_max_pooling(model)
    written = check(model, x, dynamic=(0,), others=(torch.rand(5, *x.shape[1:]),))
    assert written.count("MaxUnpool") == written.count("MaxPool") == 1


def test_pooling_and_back(rng: random.Random) -> None:
    for _ in range(6):
        while True:
            window = random_window(rng, longest=8, most_cells=64)
            if not window.has_empty_window and not (window.ceil and max(window.dilation) > 1):
                break
        x = with_ties(*rng.choice(((2, 3), (3,))), *window.sizes)
        check(pool_and_back(window, rng.choice(window.index_dtypes())), x)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("numbers", [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 1)], ids=str)
def test_pooling_and_back_of_dynamic_sizes(
    numbers: tuple[int, int, int], index_dtype: torch.dtype, rng: random.Random
) -> None:
    dims, leading = rng.choice((1, 2, 3)), rng.choice(((2, 3), (3,)))
    window = Window((8,) * dims, *[(n,) * dims for n in (*numbers, 1)], ceil=False)
    first = len(leading)
    dynamic = (*range(first - 1), *range(first, first + dims))
    other = with_ties(*(5,) * (first - 1), 3, *(rng.randint(4, 12) for _ in range(dims)))
    x = with_ties(*leading, *window.sizes)
    check(pool_and_back(window, index_dtype), x, dynamic=dynamic, others=(other,))


def unpool_to(geometry: Geometry) -> nn.Module:
    """To the sizes of a tensor, from any indices."""

    def function(x: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        sizes = like.shape[-geometry.dims :]
        return _ops.max_unpool(x, indices, sizes, *geometry.arguments("last")[1:])

    return Function(function)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_unpooling_to_every_output_size(dynamic: bool, portable: bool, rng: random.Random) -> None:
    for _ in range(3):
        while True:
            case = random_case(rng, reduce="last", dtypes=(torch.float32,), longest=6)
            geometry = case.geometry
            # torch.export takes a size of one for a constant.
            if not dynamic or min(*geometry.pooled, *geometry.output) > 1:
                break
        tensors = [t.contiguous() for t in (case.input, case.indices, case.grad_output)]
        spatial = tuple(range(-geometry.dims % tensors[0].dim(), tensors[0].dim()))
        dims = spatial if dynamic else ()
        check(unpool_to(geometry), *tensors, dynamic=dims, portable=portable)


@pytest.mark.parametrize("dynamic", [(), (2, 3)])
def test_unpooling_with_more_padding_than_window(dynamic: Axes) -> None:
    """Which ONNX Runtime refuses, for the windows as they are."""
    model = unpool_to(Geometry((3, 9), (1, 2), (3, 1), (1, 3), (5, 4)))
    tensors = torch.rand(2, 3, 3, 9), torch.randint(20, (2, 3, 3, 9)), torch.rand(2, 3, 5, 4)
    check(model, *tensors, dynamic=dynamic)


@pytest.mark.parametrize(
    "window",
    [
        # A window would begin in the padding at the end of the last axis, and is left out.
        Window((7, 9), (3, 2), (2, 2), (1, 1), (1, 1), ceil=True),
        Window((8, 8), (3, 1), (2, 2), (0, 0), (1, 1), ceil=True),
        # The output is smaller than the default one, which ONNX Runtime would refuse.
        Window((1,), (4,), (2,), (2,), (1,), ceil=True),
        Window((1,), (2,), (2,), (1,), (1,), ceil=True),
        Window((1,), (3,), (3,), (0,), (1,), ceil=True),
    ],
    ids=repr,
)
def test_ceil_mode_counts_the_same_windows(window: Window) -> None:
    x = with_ties(2, 3, *window.sizes)
    check(pool_and_back(window, window.index_dtypes()[-1]), x, dynamic=(0,), others=(x[:1],))


def test_pooling_alone_has_no_indices() -> None:
    model = Function(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True))
    program = export(model, torch.randn(2, 3, 8, 9))
    assert operators(program) == ["MaxPool"]
    assert len(program.model.graph[0].outputs) == 1


def test_bfloat16() -> None:
    def function(x: Tensor) -> Tensor:
        pooled, indices = F.max_pool2d(x.bfloat16(), 3, 2, 1, return_indices=True)
        return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape).float()

    check(Function(function), torch.randn(2, 3, 8, 8))


# What ONNX's operators cannot express, and its name in the error. The height is dynamic.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "max_unpool2d: ONNX cannot express reduce='sum'": (
        lambda x: F.max_unpool2d(x, (x * 0).long(), 2, reduce="sum")
    ),
    "max_unpool2d: ONNX cannot express input of type INT32": (
        lambda x: F.max_unpool2d(x.int(), (x * 0).long(), 2)
    ),
    "max_pool2d: ONNX cannot express input of type INT32": lambda x: F.max_pool2d(x.int(), 2),
    "max_pool2d: ONNX cannot express .*ceil_mode=True": (
        lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True)
    ),
    "max_pool2d: ONNX cannot express .*dilation=[(\\[]1, 2": (
        lambda x: F.max_pool2d(x[..., :1], (1, 2), 1, (0, 1), (1, 2))
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_onnx_cannot_express_is_decomposed(words: str) -> None:
    """The error names the other way, which leads there."""
    model, x = Function(REFUSED[words]), with_ties(2, 1, 8, 8)
    with pytest.raises(Exception, match=rf"{words}.*; use run_decompositions\(maxunpool_cuda\."):
        export(model, x, dynamic=(2,))
    check(model, x, dynamic=(2,), others=(with_ties(2, 1, 11, 8),), portable=True)


@pytest.mark.parametrize(
    ("dims", "window", "index_dtype", "dynamic"),
    [
        (2, (2, 2, 0), torch.uint8, (0,)),
        (2, (2, 2, 0), torch.int64, ()),
        (2, (3, 2, 1), torch.uint8, ()),
        (2, (3, 2, 1), torch.int64, (0,)),
        (1, (3, 2, 1), torch.uint8, ()),
        (3, (2, 2, 0), torch.int64, ()),
    ],
    ids=str,
)
def test_without_maxunpool(
    dims: int, window: tuple[int, int, int], index_dtype: torch.dtype, dynamic: Axes
) -> None:
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")

    def function(x: Tensor) -> tuple[Tensor, ...]:
        values, indices = pool(x, *window, return_indices=True, index_dtype=index_dtype)
        reduces = ("last", "sum")
        return values, *(unpool(values, indices, *window, x.shape, reduce=r) for r in reduces)

    x, other = with_ties(2, 3, *[8] * dims), torch.randn(5 if dynamic else 2, 3, *[8] * dims)
    x.flatten()[5:7] = torch.nan
    check(Function(function), x, dynamic=dynamic, others=(other,), portable=True)
