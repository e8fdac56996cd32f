# SPDX-License-Identifier: BSD-3-Clause
"""The portable form: beside the reference, and compiled ahead of time. test_onnx.py exports it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ARITHMETIC,
    DIFFERENTIABLE,
    LAYOUTS,
    MOVABLE,
    POOLED,
    UNPOOLING,
    Call,
    Geometry,
    all_same,
    draw,
    geometry_of,
    laid_out,
    same,
)
from failures import check_each
from reference import Sizes
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops, _portable

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
PORTABLE = maxunpool_cuda.decompositions()

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
        results = leaves(PORTABLE[call.operator](*call.tensors, *call.arguments))
        call.compare(results)
        assert all(result.is_contiguous() for result in results)

    dtypes = [*CALLS[name, reduce]] * (16 if name == "pool" else 4)
    check_each((draw(rng, name, dtype, reduce=reduce) for dtype in dtypes), check)


def test_bad_indices() -> None:
    """A bad window offset loses its value. PyTorch's scatter refuses a bad flat index."""
    unpool, window = PORTABLE[_ops.max_unpool], ((4,), (2,), (2,), (0,), "last")
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
    unpool, window = PORTABLE[_ops.max_unpool], ((5,), (3,), (1,), (0,), "sum")
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
    portable = program.run_decompositions(PORTABLE)
    for name, form in {"exported": program, "loaded": loaded, "portable": portable}.items():
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
    portable = program.run_decompositions(PORTABLE)
    for name, form in {"exported": program, "portable": portable}.items():
        for other in range(8, 14):
            x = torch.randn(2, 3, other, 7)
            with subtests.test(f"{name}, height {other}"):
                assert same(form.module()(x), Pool()(x))


class RoundTrip(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        return pooled, indices, F.max_unpool2d(pooled * 2, indices, 3, 2, 1, x.shape, reduce="sum")


@pytest.mark.slow
def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    """No operator of this package is left, so any process can run the compiled model."""
    x, batch = torch.randn(2, 3, 9, 12), {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(RoundTrip(), (x,), dynamic_shapes=(batch,))
    program = program.run_decompositions(PORTABLE)
    assert "maxunpool_cuda" not in str(program.graph)
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{tmp_path}/m.pt2")
    other = torch.randint(-3, 3, (5, 3, 9, 12)).float()
    other[0, 0, 4, 4:6] = torch.nan
    assert all_same(torch._inductor.aoti_load_package(path)(other), RoundTrip()(other))


def test_windows_that_begin_beyond_32_bits() -> None:
    axis = _portable.Axis(
        size=2**31 + 1, pooled=3, extent=2**31 + 1, kernel=1, stride=2**30, padding=0, dilation=1
    )
    first = _portable._first_offsets([axis], torch.device("cpu"))
    assert first.tolist() == [0, 0, 0]
    assert _portable._positions_of(first, [axis]).tolist() == [0, 2**30, 2**31]


# The devices of CPU tensors, without the emulated GPU.
on_the_cpu = pytest.mark.parametrize("device", ["cpu", "portable"], indirect=True)
every_derivative = pytest.mark.parametrize(("operator", "reduce"), DIFFERENTIABLE)
every_rank = pytest.mark.parametrize("dims", [1, 2, 3])


def in_channels_last(tensor: Tensor) -> Tensor:
    """A copy in this layout, as its strides tell: ``contiguous`` keeps those of one channel."""
    format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=format).copy_(tensor)


def calls_in_layouts(rng: random.Random, operator: str, reduce: str, dims: int) -> Iterator[Call]:
    """Calls in each layout, with and without a batch; one channel, planes of one position."""
    geometries = (geometry_of((2,) * dims, (2, 2, 0)), geometry_of((1,) * dims, (1, 1, 0)))
    leadings = ((2, 3), (2, 1), (1, 1), (0, 3), (3,), (1,))
    layouts = ("contiguous", "strided", "channels_last")[: 2 if dims == 1 else 3]
    for leading, geometry, layout in product(leadings, geometries, layouts):
        batch = leading if len(leading) == 2 else (1, *leading)
        chosen = {"geometry": geometry, "leading": batch, "reduce": reduce}
        call = draw(rng, operator, torch.float64, layout=layout, **chosen)
        tensors = call.tensors
        if layout == "channels_last":
            tensors = tuple(in_channels_last(tensor) for tensor in tensors)
        if batch != leading:  # a volume keeps channels_last_3d
            tensors = tuple(tensor[0] for tensor in tensors)
        yield replace(call, tensors=tensors)


def results_and_gradient(call: Call, x: Tensor, *indices: Tensor) -> list[Tensor]:
    """All results of the call for other tensors, and the gradient of their squares' sum / 2."""
    results = call.on(x.requires_grad_(), *indices)
    return [*results, *torch.autograd.grad(results[0], x, results[0], create_graph=True)]


@on_the_cpu
@every_rank
@every_derivative
def test_results_have_the_strides_of_the_trace(
    device: str, operator: str, reduce: str, dims: int, rng: random.Random
) -> None:
    def check(call: Call) -> None:
        real = results_and_gradient(call, *call.moved(device).tensors)
        empty = (
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in call.tensors
        )
        traced = results_and_gradient(call, *empty)
        assert [each.stride() for each in real] == [each.stride() for each in traced]
        assert not any(each._is_view() for each in traced)

    check_each(calls_in_layouts(rng, operator, reduce, dims), check)


@on_the_cpu
@every_rank
@every_derivative
def test_results_may_be_changed_in_place(
    device: str, operator: str, reduce: str, dims: int, rng: random.Random
) -> None:
    """As ``nn.ReLU(inplace=True)`` does. No result is a view, or has the memory of an input."""

    def check(call: Call) -> None:
        tensors = x, *_ = call.moved(device).tensors
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                results = call.on(*tensors)
            assert not any(each._is_view() for each in results), mode
        weight = torch.tensor(0.5, dtype=x.dtype, requires_grad=True)
        results = results_and_gradient(call, *tensors)
        assert not any(each._is_view() for each in results)
        for number in (0, -1):  # the values and the gradient
            output = (results[number] * weight).sin()
            expected = torch.autograd.grad(output.sum(), (x, weight), retain_graph=True)
            changed = results_and_gradient(call, *tensors)[number].mul_(weight).sin_()
            assert all_same(torch.autograd.grad(changed.sum(), (x, weight)), expected)
        for each in results:
            each.detach_().zero_()
        with torch.no_grad():
            values = call.on(*tensors)[0]
        assert values.mul_(weight).requires_grad
        assert all_same([each.detach() for each in tensors], call.tensors), "an input changed"

    check_each(calls_in_layouts(rng, operator, reduce, dims), check)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 1, 10, 10, 10), (2, 3, 2, 2, 2), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_inductor_trains_on_volumes(index_dtype: torch.dtype, shape: Sizes) -> None:
    """It asserts strides. One channel, planes of one position, and no batch have unusual ones."""

    def function(x: Tensor) -> Tensor:
        values, indices = F.max_pool3d(x * 2, 2, return_indices=True, index_dtype=index_dtype)
        return F.max_unpool3d(values.sin(), indices, 2) + x

    batch = in_channels_last(torch.rand((1, *shape)[-5:]))
    x = (batch if len(shape) == 5 else batch[0]).requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    outputs = [compiled(x), function(x)]
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


class Elsewhere(Tensor):
    """A tensor of any device, without data. An operator runs that device's kernel."""

    @classmethod
    def on(cls, device: str, like: Tensor) -> Any:
        return cls._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:maxunpool_cuda. CUDA tensors run PyTorch's operators")
@pytest.mark.parametrize("other", ["cuda:0", "privateuseone:1"])
@pytest.mark.parametrize("moved", ["values", "indices"])
@pytest.mark.parametrize("operator", UNPOOLING)
def test_values_and_indices_on_two_devices(
    operator: str, moved: str, other: str, rng: random.Random
) -> None:
    call = draw(rng, operator, torch.float32)
    values, indices = call.tensors
    if moved == "values":
        tensors, devices = (Elsewhere.on(other, values), indices), f"{other} and cpu"
    else:
        tensors = values.requires_grad_(), Elsewhere.on(other, indices)
        devices = f"cpu and {other}"
    words = rf"^max_unpool{call.dims}d: expected values and indices on the same device but got "
    with pytest.raises(RuntimeError, match=f"{words}{devices}$"):
        call.on(*tensors)
    size, *window, reduce = call.arguments
    no_window = replace(call, arguments=(size, (0,) * call.dims, *window[1:], reduce))
    with pytest.raises(RuntimeError, match="expected kernel_size greater than zero"):
        no_window.on(*tensors)
    if operator.startswith("unpool"):
        module = getattr(maxunpool_cuda, f"MaxUnpool{call.dims}d")(*window, reduce=reduce)
        for function in (call.function, lambda *tensors: module(*tensors, size)):
            with pytest.raises(RuntimeError, match=f"{words}{devices}$"):
                function(*tensors)


@on_the_cpu
@pytest.mark.parametrize("of_indices", LAYOUTS[:2])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("operator", UNPOOLING)
def test_of_bad_indices_the_first_in_memory_is_named(
    device: str, operator: str, dims: int, layout: str, of_indices: str, rng: random.Random
) -> None:
    """The call's layout orders them, which is that of the values."""
    geometry = geometry_of((2,) * dims, (2, 2, 0))
    call = draw(rng, operator, torch.float32, geometry=geometry, leading=(2, 3), layout=layout)
    indices = call.tensors[1].contiguous()
    planes = indices.view(6, -1)
    planes[4, 3], planes[5, 2] = 201, 202
    first, place = (201, (3, 4)) if layout == "contiguous" else (202, (2, 5))
    error = rf"index: {first} .* at position {place[0]} of plane {place[1]}$"
    tensors = call.tensors[0], laid_out(indices, of_indices, dims)
    replace(call, tensors=tensors, error=error).verify_error(device)


def test_numbers_that_are_rounded_to_the_limit() -> None:
    """In floats, in which sizes are checked, 2^60 - 1 is 2^60."""
    x, indices = torch.ones(1, 1, 8), torch.zeros(1, 1, 8, dtype=torch.int64)
    words = "expected sizes that do not overflow but got an unpooled shape"
    with pytest.raises(RuntimeError, match=f"^max_pool1d: {words}"):
        F.max_pool1d(x, 2**60 - 1, 1, 2**59 - 1)
    for window in ((2**60 - 1, 1, 0), (1, 1, 2**60 - 1), (1, 2**57 - 1, 0)):
        with pytest.raises(RuntimeError, match=f"^max_unpool1d: {words}"):
            _ops.max_unpool(x, indices, (8,), *((number,) for number in window), "last")


@on_the_cpu
@every_rank
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_strides_beyond_32_bits(
    device: str, dtype: torch.dtype, dims: int, rng: random.Random
) -> None:
    """One window is left, though the operators of PyTorch that pool take strides of 32 bits."""

    def calls() -> Iterator[Call]:
        for stride, padding, ceil in product((2**31 - 1, 2**31, 2**40), (0, 1), (False, True)):
            steps = (stride, *[1] * (dims - 1))
            sizes, window = (5,) * dims, ((2,) * dims, steps, (padding,) * dims)
            geometry = Geometry.of_pooling(sizes, *window, (1,) * dims, ceil=ceil)
            yield draw(rng, "pool", dtype, geometry=geometry, leading=(2, 3))

    check_each(calls(), lambda call: call.verify(device))
