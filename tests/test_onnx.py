"""Export to ONNX, run by ONNX Runtime and ONNX's reference evaluator, against eager."""

import io
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES, Geometry, Window, random_case, random_window, same, some
from networks import NETWORKS, POOLS, UNPOOLS
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F
import maxunpool_cuda.onnx
from maxunpool_cuda import _ops

onnx = pytest.importorskip("onnx", reason="its evaluator runs the exports")
onnxruntime = pytest.importorskip("onnxruntime", reason="the exports are run by ONNX Runtime")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")

Axes = tuple[int, ...]
FORMS = ("MaxUnpool", "where")

# Of what the form "where" is made of, all is in the lists that translation_table() names. There,
# Identity and constants go without saying.
LISTED = {
    *("Add", "ArgMax", "Cast", "Concat", "Constant", "Div", "Equal", "Expand", "Identity", "Max"),
    *("MaxPool", "Mod", "Mul", "Pad", "Range", "Reshape", "Shape", "Slice", "Squeeze", "Sub"),
    *("Tile", "Unsqueeze", "Where"),
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


def unpool_to(geometry: Geometry, reduce: str = "last") -> nn.Module:
    """To the sizes of a tensor, from any indices."""

    def function(x: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        sizes = like.shape[-geometry.dims :]
        return _ops.max_unpool(x, indices, sizes, *geometry.arguments(reduce)[1:])

    return Function(function)


def export(
    model: nn.Module, *inputs: Tensor, dynamic: Axes = (), form: Any = "MaxUnpool"
) -> torch.onnx.ONNXProgram:
    """With the sizes of some dimensions left open, of every input the same."""
    shapes: Any = [dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC)] * len(inputs)
    if isinstance(model, Function):  # whose inputs are one argument
        shapes = (tuple(shapes),)
    program = torch.onnx.export(
        model,
        inputs,
        dynamo=True,
        verbose=False,
        custom_translation_table=maxunpool_cuda.onnx.translation_table(form),
        dynamic_shapes=shapes if dynamic else None,
    )
    if form == "where":
        assert {*operators(program)} <= LISTED | {"Conv", "ConvTranspose", "Relu"}
        pools = [node for node in program.model.graph if node.op_type == "MaxPool"]
        assert all(len(pool.outputs) == 1 for pool in pools)
    return program


def operators(program: torch.onnx.ONNXProgram) -> list[str]:
    return [node.op_type for node in program.model.graph]


def evaluator_can(program: torch.onnx.ONNXProgram) -> bool:
    """Not MaxPool of strides one: it counts the places of a window as if that were the output.

    PyTorch's own translation has such a pool, to learn where planes begin.
    """
    pools = [node.attributes for node in program.model.graph if node.op_type == "MaxPool"]
    steps = ([*pool["strides"].as_ints(), *pool["dilations"].as_ints()] for pool in pools)
    return all(max(step) > 1 for step in steps)


def run(program: torch.onnx.ONNXProgram, *inputs: Tensor) -> list[Tensor]:
    """By ONNX Runtime, once the reference evaluator says the same."""
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
        if "Conv" in operators(program):  # whose sums are added up in another order
            torch.testing.assert_close(others, outputs, rtol=1e-4, atol=1e-5)
        else:
            assert all(map(same, others, outputs))
    return outputs


def check(
    model: nn.Module,
    *inputs: Tensor,
    dynamic: Axes = (),
    others: tuple[Tensor, ...] = (),
    form: str = "MaxUnpool",
) -> torch.onnx.ONNXProgram:
    """Export ``model``, and run it on its inputs, and on others, for what it returns in eager."""
    program = export(model, *inputs, dynamic=dynamic, form=form)
    for given in (inputs, *((other,) for other in others)):
        expected = model(*given)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for got, want in zip(run(program, *given), expected, strict=True):
            assert same(got, want)
    return program


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


@pytest.mark.parametrize("pool", ["torch.nn's", "ours"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_modules_become_standard_operators(dims: int, pool: str) -> None:
    model, x = Stage(dims), torch.rand(2, 3, *[8] * dims)
    if pool == "ours":
        maxunpool_cuda.replace_max_pooling(model)
    else:
        maxunpool_cuda.replace_max_unpool(model)
    program = check(model, x, dynamic=(0,), others=(torch.rand(5, *x.shape[1:]),))
    assert operators(program).count("MaxUnpool") == 1
    if pool == "ours":
        assert operators(program).count("MaxPool") == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [(), (0,)])
def test_segnet(dynamic: Axes, form: str) -> None:
    make, (_, *shape) = NETWORKS["SegNet"]
    model = make().eval()
    maxunpool_cuda.replace_max_pooling(model, torch.uint8 if dynamic else torch.int32)
    program = export(model, torch.rand(2, *shape), dynamic=dynamic, form=form)
    x = torch.rand(3 if dynamic else 2, *shape)
    torch.testing.assert_close(run(program, x), [model(x)], rtol=1e-4, atol=1e-5)


def with_ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def exportable_window(rng: random.Random) -> Window:
    while True:
        window = random_window(rng, longest=8, most_cells=64)
        if not window.has_empty_window and not (window.ceil and max(window.dilation) > 1):
            return window


@pytest.mark.parametrize("form", FORMS)
def test_pooling_and_back(form: str, rng: random.Random) -> None:
    for _ in range(some(14)):
        window = exportable_window(rng)
        x = with_ties(*rng.choice(((2, 3), (3,))), *window.sizes)
        check(pool_and_back(window, rng.choice(window.index_dtypes())), x, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dynamic_sizes(dims: int, index_dtype: torch.dtype, form: str, rng: random.Random) -> None:
    ceil, leading = rng.random() < 0.5, rng.choice(((2, 3), (3,)))
    windows = [(2, 2, 1), (3, 2, 1), (3, 2, 0), (4, 1, 2)]
    # Of 64 cells, each in another block: a graph of 700 nodes.
    kernel, stride, padding = rng.choice(windows[: 3 if dims == 3 and form == "where" else 4])
    window = Window((8,) * dims, *[(n,) * dims for n in (kernel, stride, padding, 1)], ceil)
    first = len(leading)
    others = tuple(
        with_ties(
            *(rng.randint(1, 4),) * (first - 1), 3, *(rng.randint(4, 12) for _ in range(dims))
        )
        for _ in range(3)
    )
    check(
        pool_and_back(window, index_dtype),
        with_ties(*leading, *window.sizes),
        dynamic=(*range(first - 1), *range(first, first + dims)),
        others=others,
        form=form,
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
def test_unpooling_without_maxunpool(reduce: str, dynamic: bool, rng: random.Random) -> None:
    """From offsets in every way, and from flat indices of their own windows."""
    for _ in range(some(6)):
        while True:
            case = random_case(rng, reduce=reduce, dtypes=(torch.float32,), longest=6, offsets=True)
            geometry = case.geometry
            # torch.export takes a size of one for a constant.
            if not dynamic or min(*geometry.pooled, *geometry.output) > 1:
                break
        indices = case.indices
        if reduce == "last" and rng.random() < 0.5:
            indices = case.positions.to(rng.choice((torch.int64, torch.int32)))
        tensors = [t.contiguous() for t in (case.input, indices, case.grad_output)]
        spatial = tuple(range(-geometry.dims % tensors[0].dim(), tensors[0].dim()))
        dims = spatial if dynamic else ()
        check(unpool_to(geometry, reduce), *tensors, dynamic=dims, form="where")


@pytest.mark.parametrize("dynamic", [False, True])
def test_unpooling_to_every_output_size(dynamic: bool, rng: random.Random) -> None:
    for _ in range(some(6)):
        while True:
            case = random_case(rng, reduce="last", dtypes=(torch.float32,), longest=6)
            geometry = case.geometry
            # torch.export takes a size of one for a constant.
            if not dynamic or min(*geometry.pooled, *geometry.output) > 1:
                break
        tensors = [t.contiguous() for t in (case.input, case.indices, case.grad_output)]
        spatial = tuple(range(-geometry.dims % tensors[0].dim(), tensors[0].dim()))
        check(unpool_to(geometry), *tensors, dynamic=spatial if dynamic else ())


@pytest.mark.parametrize("dynamic", [(), (2, 3)])
def test_unpooling_with_more_padding_than_window(dynamic: Axes) -> None:
    """Which ONNX Runtime refuses, for the windows as they are."""
    model = unpool_to(Geometry((3, 9), (1, 2), (3, 1), (1, 3), (5, 4)))
    tensors = torch.rand(2, 3, 3, 9), torch.randint(20, (2, 3, 3, 9)), torch.rand(2, 3, 5, 4)
    check(model, *tensors, dynamic=dynamic)


@pytest.mark.parametrize(
    ("window", "dynamic"),
    [
        # A window would begin in the padding at the end of the last axis, and is left out.
        (Window((7, 9), (3, 2), (2, 2), (1, 1), (1, 1), ceil=True), ()),
        (Window((8, 8), (3, 1), (2, 2), (0, 0), (1, 1), ceil=True), ()),
        (Window((8, 9), (3, 2), (2, 2), (0, 1), (1, 1), ceil=True), (0, 2)),
        (Window((12, 9), (2, 2), (5, 2), (0, 1), (4, 1), ceil=True), (0,)),
        # The output is smaller than the default one, which ONNX Runtime would refuse.
        (Window((1,), (4,), (2,), (2,), (1,), ceil=True), ()),
        (Window((1,), (2,), (2,), (1,), (1,), ceil=True), ()),
        (Window((1,), (3,), (3,), (0,), (1,), ceil=True), ()),
    ],
    ids=repr,
)
@pytest.mark.parametrize("form", FORMS)
def test_ceil_mode_counts_the_same_windows(window: Window, dynamic: Axes, form: str) -> None:
    model, x = pool_and_back(window, window.index_dtypes()[-1]), with_ties(2, 3, *window.sizes)
    check(model, x, dynamic=dynamic, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [(), (0, 2, 3)])
def test_pooling_alone_has_no_indices(dynamic: Axes, form: str) -> None:
    model = Function(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True))
    others = (torch.randn(3, 3, 11, 6),) if dynamic else ()
    program = check(model, torch.randn(2, 3, 8, 9), dynamic=dynamic, others=others, form=form)
    assert operators(program) == ["MaxPool"]
    assert len(program.model.graph[0].outputs) == 1


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form: str) -> None:
    def function(x: Tensor) -> Tensor:
        pooled, indices = F.max_pool2d(x.bfloat16(), 3, 2, 1, return_indices=True)
        return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape).float()

    check(Function(function), torch.randn(2, 3, 8, 8), form=form)


# What is said, and of what. The height of its input is left open.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "max_unpool2d: expected reduce='last' for ONNX but got 'sum'": (
        lambda x: F.max_unpool2d(x, x.long(), 2, reduce="sum")
    ),
    "max_unpool2d: expected reduce='last' for ONNX but got 'mean'": (
        lambda x: F.max_unpool2d(x, x.long(), 2, reduce="mean")
    ),
    "max_unpool2d: expected input of type .* for ONNX but got UINT8": (
        lambda x: F.max_unpool2d(x.byte(), x.long(), 2)
    ),
    "max_pool2d: expected input of type .* for ONNX but got INT32": (
        lambda x: F.max_pool2d(x.int(), 2)
    ),
    "max_pool2d: expected windows that hold elements of the input for ONNX": (
        lambda x: F.max_pool2d(x[..., :1, :], (2, 1), 1, (1, 0), (2, 1))
    ),
    "max_pool2d: expected strides within their windows for ONNX": (
        lambda x: F.max_pool2d(x, (3, 1), 2, ceil_mode=True)
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_onnx_cannot_say_is_refused(said: str) -> None:
    with pytest.raises(Exception, match=said):
        export(Function(REFUSED[said]), torch.ones(1, 1, 8, 8), dynamic=(2,))


# As above, for the form without scatters.
REFUSED_WITHOUT_SCATTERS: dict[str, Callable[[Tensor], Any]] = {
    "expected reduce='last' of flat indices for ONNX but got 'sum'": (
        lambda x: F.max_unpool2d(x, x.long(), 2, reduce="sum")
    ),
    "expected reduce='last' of flat indices for ONNX but got 'mean'": (
        lambda x: F.max_unpool2d(x, x.long(), 2, reduce="mean")
    ),
    r"expected windows that span fewer than 2\^24 positions": (
        lambda x: F.max_unpool2d(x[..., :1, :1], x[..., :1, :1].long(), (2, 2**24))
    ),
}


@pytest.mark.parametrize("said", REFUSED_WITHOUT_SCATTERS)
def test_what_cannot_be_said_without_scatters_is_refused(said: str) -> None:
    unpool = Function(REFUSED_WITHOUT_SCATTERS[said])
    with pytest.raises(Exception, match=f"max_unpool2d: {said}"):
        export(unpool, torch.ones(1, 1, 8, 8), form="where")


def test_forms_have_names() -> None:
    with pytest.raises(ValueError, match="to be 'MaxUnpool' or 'where' but got 'scatter'"):
        maxunpool_cuda.onnx.translation_table("scatter")
