"""Export to ONNX, run by ONNX Runtime and ONNX's reference evaluator, against eager."""

import io
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import INDEX_DTYPES, Geometry, Window, random_case, random_window, same, some
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F
import maxunpool_cuda.onnx
from maxunpool_cuda import _ops

onnx = pytest.importorskip("onnx", reason="its evaluator runs the exports")
onnxruntime = pytest.importorskip("onnxruntime", reason="the exports are run by ONNX Runtime")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")


class Stage(nn.Module):
    def __init__(self, dims: int, window: tuple[int, int, int], with_size: bool) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(*window, return_indices=True)
        self.unpool = getattr(maxunpool_cuda, f"MaxUnpool{dims}d")(*window)
        self.with_size = with_size

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(x)
        return self.unpool(pooled, indices, x.shape if self.with_size else None)


class SegNet(nn.Module):
    """Two stages down and up, the inner one with overlapping windows, and int32 indices."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(*channels, 3, padding=1) for channels in ((1, 4), (4, 4), (4, 4), (4, 2))
        )
        self.outer = nn.MaxPool2d(2, return_indices=True)
        self.inner = nn.MaxPool2d(3, 2, 1, return_indices=True)
        self.unpools = nn.ModuleList(
            (maxunpool_cuda.MaxUnpool2d(3, 2, 1), maxunpool_cuda.MaxUnpool2d(2))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions[0](x).relu()
        outer_size = x.shape
        x, outer = self.outer(x)
        x = self.convolutions[1](x).relu()
        inner_size = x.shape
        x, inner = self.inner(x)
        x = self.convolutions[2](self.unpools[0](x, inner.int(), inner_size)).relu()
        return self.convolutions[3](self.unpools[1](x, outer.int(), outer_size))


class Bytes(nn.Module):
    """The way down and up again, with indices of one byte."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(maxunpool_cuda, f"MaxPool{dims}d")(
            3, 2, 1, return_indices=True, index_dtype=torch.uint8
        )
        self.unpool = getattr(maxunpool_cuda, f"MaxUnpool{dims}d")(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(x)
        return self.unpool(pooled * 2, indices, x.shape)


class Operators(nn.Module):
    """All that both operators return."""

    def __init__(self, window: Window, index_dtype: torch.dtype) -> None:
        super().__init__()
        self.window, self.index_dtype = window, index_dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w = self.window
        values, indices = _ops.max_pool(x, *w.arguments, self.index_dtype)
        sizes = x.shape[-len(w.sizes) :]
        unpooled = _ops.max_unpool(values, indices, sizes, w.kernel, w.stride, w.padding, "last")
        return values, indices, unpooled


class Unpool(nn.Module):
    """To the sizes of a tensor, from any indices."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    def forward(self, x: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        sizes = like.shape[-self.geometry.dims :]
        return _ops.max_unpool(x, indices, sizes, *self.geometry.arguments("last")[1:])


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1, ceil_mode=True)


def export(
    model: nn.Module, *inputs: Tensor, dynamic: bool | tuple[int, ...] = False
) -> torch.onnx.ONNXProgram:
    """With the sizes of these dimensions left open; True: of the batch."""
    axes = (0,) if dynamic is True else dynamic or ()
    shapes = [dict.fromkeys(axes, torch.export.Dim.DYNAMIC)] * len(inputs)
    sizes = {"dynamic_shapes": shapes} if axes else {}
    return torch.onnx.export(
        model,
        inputs,
        dynamo=True,
        verbose=False,
        custom_translation_table=maxunpool_cuda.onnx.translation_table(),
        **sizes,
    )


def run_all(program: torch.onnx.ONNXProgram, *inputs: Tensor) -> list[Tensor]:
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


def evaluator_can(program: torch.onnx.ONNXProgram) -> bool:
    """Not MaxPool of strides one: it counts the places of a window as if that were the output.

    PyTorch's own translation has such a pool, to learn where planes begin.
    """
    pools = [node.attributes for node in program.model.graph if node.op_type == "MaxPool"]
    steps = ([*pool["strides"].as_ints(), *pool["dilations"].as_ints()] for pool in pools)
    return all(max(step) > 1 for step in steps)


def run(program: torch.onnx.ONNXProgram, *inputs: Tensor) -> Tensor:
    return run_all(program, *inputs)[0]


def operators(program: torch.onnx.ONNXProgram) -> list[str]:
    return [node.op_type for node in program.model.graph]


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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("window", "with_size"), [((2, 2, 0), False), ((3, 2, 1), True)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_stage(dims: int, window: tuple[int, int, int], with_size: bool, dynamic: bool) -> None:
    model, x = Stage(dims, window, with_size), torch.rand(2, 3, *[8] * dims)
    program = export(model, x, dynamic=dynamic)
    assert operators(program).count("MaxUnpool") == 1
    other = torch.rand(5, *x.shape[1:]) if dynamic else x
    assert torch.equal(run(program, other), model(other))


@pytest.mark.parametrize("dynamic", [False, True])
def test_segnet(dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = SegNet().eval(), torch.rand(2, 1, 16, 24)
    other = torch.rand(3, 1, 16, 24) if dynamic else x
    result = run(export(model, x, dynamic=dynamic), other)
    torch.testing.assert_close(result, model(other), rtol=1e-4, atol=1e-5)


def test_duplicates_and_unbatched_input() -> None:
    model = maxunpool_cuda.MaxUnpool2d(2)
    x, indices = torch.rand(3, 2, 2), torch.randint(0, 3, (3, 2, 2))
    assert torch.equal(run(export(model, x, indices), x, indices), model(x, indices))


def with_ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def exportable_window(rng: random.Random) -> Window:
    while True:
        window = random_window(rng, longest=8, most_cells=64)
        values, _ = _ops.max_pool(torch.zeros(1, *window.sizes), *window.arguments, torch.int64)
        if values.isfinite().all() and not (window.ceil and max(window.dilation) > 1):
            return window


def test_pooling_and_back(rng: random.Random) -> None:
    for _ in range(some(14)):
        window = exportable_window(rng)
        model = Operators(window, rng.choice(window.index_dtypes()))
        x = with_ties(*rng.choice(((2, 3), (3,))), *window.sizes)
        for got, expected in zip(run_all(export(model, x), x), model(x), strict=True):
            assert same(got, expected), (window, model.index_dtype, x.shape)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dynamic_sizes(dims: int, index_dtype: torch.dtype, rng: random.Random) -> None:
    ceil, leading = rng.random() < 0.5, rng.choice(((2, 3), (3,)))
    kernel, stride, padding = rng.choice(((2, 2, 1), (3, 2, 1), (3, 2, 0), (4, 1, 2)))
    window = Window((8,) * dims, *[(n,) * dims for n in (kernel, stride, padding, 1)], ceil)
    model, first = Operators(window, index_dtype), len(leading)
    open_sizes = (*range(first - 1), *range(first, first + dims))
    program = export(model, with_ties(*leading, *window.sizes), dynamic=open_sizes)
    for _ in range(3):
        batch = (rng.randint(1, 4),) * (first - 1)
        x = with_ties(*batch, 3, *(rng.randint(4, 12) for _ in range(dims)))
        for got, expected in zip(run_all(program, x), model(x), strict=True):
            assert same(got, expected), (window, x.shape)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_bytes_become_standard_operators(dims: int) -> None:
    model, x = Bytes(dims), torch.rand(2, 3, *[8] * dims)
    program = export(model, x, dynamic=True)
    assert [operators(program).count(name) for name in ("MaxPool", "MaxUnpool")] == [1, 1]
    other = torch.rand(4, *x.shape[1:])
    assert same(run(program, other), model(other))


@pytest.mark.parametrize("dynamic", [(), (0, 2, 3)])
def test_pooling_alone_has_no_indices(dynamic: tuple[int, ...]) -> None:
    model, x = Plain(), torch.randn(2, 3, 8, 9)
    program = export(model, x, dynamic=dynamic)
    assert operators(program) == ["MaxPool"]
    assert len(program.model.graph[0].outputs) == 1
    other = torch.randn(3, 3, 11, 6) if dynamic else x
    assert same(run(program, other), model(other))


# In each a window would begin in the padding at the end of the last axis, and is left out.
@pytest.mark.parametrize(
    ("window", "dynamic"),
    [
        (Window((7, 9), (3, 2), (2, 2), (1, 1), (1, 1), ceil=True), ()),
        (Window((8, 8), (3, 1), (2, 2), (0, 0), (1, 1), ceil=True), ()),
        (Window((8, 9), (3, 2), (2, 2), (0, 1), (1, 1), ceil=True), (0, 2)),
        (Window((12, 9), (2, 2), (5, 2), (0, 1), (4, 1), ceil=True), (0,)),
    ],
)
def test_ceil_mode_counts_the_same_windows(window: Window, dynamic: tuple[int, ...]) -> None:
    model, x = Operators(window, window.index_dtypes()[-1]), with_ties(2, 3, *window.sizes)
    program = export(model, x, dynamic=dynamic)
    for got, expected in zip(run_all(program, x), model(x), strict=True):
        assert same(got, expected)


@pytest.mark.parametrize("window", [(4, 2, 2), (2, 2, 1), (3, 3, 0)])
def test_output_sizes_below_the_default(window: tuple[int, int, int]) -> None:
    """Which ONNX Runtime would refuse, for the windows as they are."""
    model = Operators(Window((1,), *[(n,) for n in (*window, 1)], ceil=True), torch.uint8)
    x = torch.rand(2, 3, 1)
    for got, expected in zip(run_all(export(model, x), x), model(x), strict=True):
        assert same(got, expected)


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
        model = Unpool(geometry)
        program = export(model, *tensors, dynamic=dynamic and spatial)
        assert same(run(program, *tensors), model(*tensors)), (geometry, tensors[0].shape)


@pytest.mark.parametrize("dynamic", [(), (2, 3)])
def test_unpooling_with_more_padding_than_window(dynamic: tuple[int, ...]) -> None:
    """Which ONNX Runtime refuses, for the windows as they are."""
    model = Unpool(Geometry((3, 9), (1, 2), (3, 1), (1, 3), (5, 4)))
    x, indices = torch.rand(2, 3, 3, 9), torch.randint(20, (2, 3, 3, 9))
    tensors = x, indices, torch.rand(2, 3, 5, 4)
    assert same(run(export(model, *tensors, dynamic=dynamic), *tensors), model(*tensors))


def test_bfloat16() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pooled, indices = F.max_pool2d(x.bfloat16(), 3, 2, 1, return_indices=True)
            return F.max_unpool2d(pooled, indices, 3, 2, 1, x.shape).float()

    x = torch.randn(2, 3, 8, 8)
    assert same(run(export(Model(), x), x), Model()(x))


def refused(model: nn.Module, *inputs: Tensor, dynamic: tuple[int, ...] = ()) -> str:
    with pytest.raises(Exception, match="for ONNX") as caught:
        export(model, *inputs, dynamic=dynamic)
    return str(caught.value)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_what_onnx_cannot_say_is_refused(reduce: str) -> None:
    x, indices = torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    message = refused(maxunpool_cuda.MaxUnpool2d(2, reduce=reduce), x, indices)
    assert f"max_unpool2d: expected reduce='last' for ONNX but got {reduce!r}" in message


def test_dtypes_that_onnx_does_not_take_are_refused() -> None:
    x = torch.ones(1, 1, 2, 2, dtype=torch.int32)
    message = refused(maxunpool_cuda.MaxPool2d(2), x)
    assert "max_pool2d: expected input of type" in message
    assert "but got INT32" in message
    message = refused(maxunpool_cuda.MaxUnpool2d(2), x.byte(), x.long())
    assert "max_unpool2d: expected input of type" in message
    assert "but got UINT8" in message


def test_windows_that_onnx_does_not_know_are_refused() -> None:
    empty = Window((1, 5), (2, 1), (1, 1), (1, 0), (2, 1), ceil=False)
    message = refused(Operators(empty, torch.int64), torch.ones(1, 1, 1, 5))
    assert "max_pool2d: expected windows that hold elements of the input for ONNX" in message
    wide = Window((8, 8), (3, 1), (2, 2), (0, 0), (1, 1), ceil=True)
    message = refused(Operators(wide, torch.int64), torch.ones(1, 1, 8, 8), dynamic=(2,))
    assert "max_pool2d: expected strides within their windows for ONNX" in message
