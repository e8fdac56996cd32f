# SPDX-License-Identifier: BSD-3-Clause
"""What surrounds an operator: threads, tensors of other kinds, Inductor."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from threading import Barrier
from typing import Any

import pytest
import torch
from cases import all_same, moved, random_input, same, scaled
from conftest import GPUS, Record
from published import OPERATORS, pooling_in
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile
from torch.utils._pytree import tree_leaves as leaves
from torch.utils._triton import has_triton

import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxPool2d, _operators, patched


@pytest.mark.parametrize("unpool", [False, True])
def test_two_threads_run_backward_through_one_graph(unpool: bool) -> None:
    """Both keep the graph. If one released it, PyTorch could end the process: docs/design.md."""
    indices, barrier = torch.zeros(1, 1, 4, 4, dtype=torch.int64), Barrier(2)

    def backward(output: Tensor) -> None:
        barrier.wait()
        output.backward(retain_graph=True)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(scaled(2000)):
            x = torch.rand(1, 1, 4, 4, requires_grad=True)
            output = (F.max_unpool2d(x, indices, 2) if unpool else F.max_pool2d(x, 2)).sum()
            calls = [threads.submit(backward, output) for _ in range(2)]
            assert {call.exception() for call in calls} == {None}


@pytest.mark.parametrize("way", ["short", "dispatched"])
def test_a_profiler_shows_the_operators(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_operators, "has_short_way", way == "short")
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    with profile() as profiled:
        values, indices = F.max_pool2d(x, 2, return_indices=True)
        F.max_unpool2d(values, indices, 2).sum().backward()
    names = [event.name for event in profiled.events()]
    ours = [name.removeprefix("maxunpool_cuda::") for name in names if "maxunpool_cuda::" in name]
    short = ["_max_pool", "_max_unpool", "_max_unpool_backward", "_max_unpool"]
    assert [name for name in ours if name in short] == (short if way == "short" else [])
    assert {name.removeprefix("_") for name in ours} == {name.removeprefix("_") for name in short}


def test_a_dispatch_mode_sees_the_operators_as_they_are_documented() -> None:
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    with Record() as record:
        values, indices = F.max_pool2d(x, 2, return_indices=True)
        F.max_unpool2d(values, indices, 2).sum().backward()
    ours = [name for name in record.names if name.startswith("maxunpool_cuda::")]
    names = ("max_pool", "max_unpool", "max_unpool_backward", "max_unpool")
    assert ours == [f"maxunpool_cuda::{name}" for name in names]


class Tagged(Tensor):
    """A subclass that records the functions called on it. Their results are Tagged as well."""

    asked: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("calls_torch_nn", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "which"), [("pool", 0), ("unpool", 0), ("unpool", 1)])
def test_tensor_subclasses(kind: str, which: int, dims: int, calls_torch_nn: bool) -> None:
    """A subclass gets the function that was called on it, with all arguments.

    Inside of patched() it gets PyTorch's function; what it calls in turn is this package's.
    """
    tensors: list[Tensor] = [torch.rand(2, 3, *[4] * dims)]
    own: dict[str, Any] = {"index_dtype": torch.int32}
    options = {"padding": 1, "dilation": 2, "ceil_mode": True, "return_indices": True}
    if kind == "unpool":
        tensors.append(torch.randint(5, tensors[0].shape))
        own, options = {"reduce": "sum"}, {"padding": 1, "output_size": [6] * dims}
    name = f"max_{kind}{dims}d"
    ours, theirs = getattr(F, name), getattr(nn.functional, name)
    expected = leaves(ours(*tensors, 3, 2, **options, **own))
    tensors[which] = tensors[which].as_subclass(Tagged)
    # PyTorch's unpooling looks at the input alone, and leaves a subclass of indices to ours.
    inside = ours if which else getattr(nn.functional, f"{name}_with_indices", theirs)
    called, given, asked = (theirs, {}, inside) if calls_torch_nn else (ours, own, ours)
    Tagged.asked.clear()
    with patched(), patched(**own):
        found = leaves(called(*tensors, 3, 2, **options, **given))
    assert [f for f in Tagged.asked if "pool" in f.__name__] == [asked]
    assert {type(tensor) for tensor in found} == {Tagged}
    assert all_same([tensor.as_subclass(Tensor) for tensor in found], expected)


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("device", ["mps", "xpu", "cpu"])
def test_other_devices_run_torch_nns_calls(device: str) -> None:
    """The call is torch.nn's if it asks for nothing that torch.nn lacks.

    Fake tensors stand for tensors of devices that are not there.
    """

    def function(x: Tensor) -> tuple[Tensor, ...]:
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_pool2d(x, 2), pooled, indices, F.max_unpool2d(pooled, indices, 2)

    with FakeTensorMode():
        x = torch.empty(1, 1, 4, 4, device=device)
        assert [tuple(t.shape[2:]) for t in function(x)] == [(2, 2), (2, 2), (2, 2), (4, 4)]
        assert {t.device.type for t in function(x)} == {device}
        called = pooling_in(make_fx(function)(x))
    assert called
    assert called & OPERATORS == (OPERATORS if device == "cpu" else set())


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", [torch.quint8, torch.qint8, "mkldnn"], ids=str)
@pytest.mark.parametrize(
    "window",
    [
        pytest.param((3, 2, 1), id="padded"),
        pytest.param((2, None, 0, 1, True), id="ceil mode"),
    ],
)
def test_other_kinds_are_pooled_by_torch(window: tuple[Any, ...], kind: Any, dims: int) -> None:
    x = torch.rand(2, 3, *[9] * dims) - 0.5
    if kind == "mkldnn":
        if dims == 1 or not torch.backends.mkldnn.is_available():
            pytest.skip("PyTorch has no 1d pooling of mkldnn tensors, and some builds have none")
        x, name, plain = x.to_mkldnn(), "mkldnn", Tensor.to_dense
    else:
        x, name, plain = torch.quantize_per_tensor(x, 0.01, 7, kind), "quantized", Tensor.dequantize
    ours, theirs = (getattr(of, f"max_pool{dims}d") for of in (F, nn.functional))
    expected = theirs(x, *window)
    with patched(), patched(index_dtype=torch.uint8):  # no endless loop
        within = theirs(x, *window)
    got = (ours(x, *window), within)
    assert [(t.dtype, t.layout) for t in got] == [(expected.dtype, expected.layout)] * 2
    assert all_same([*map(plain, got)], [plain(expected)] * 2)
    check_refused(x, f"{name} tensor on cpu")


def check_refused(x: Tensor, kind: str) -> None:
    dims, indices = x.dim() - 2, torch.zeros(x.shape, dtype=torch.int64)
    pool, unpool = (getattr(F, f"max_{name}{dims}d") for name in ("pool", "unpool"))
    with pytest.raises(NotImplementedError, match=f"^max_pool{dims}d: .*uint8 .* a {kind}$"):
        pool(x, 2, return_indices=True, index_dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match=f"^max_unpool{dims}d: .*int32 .* a {kind}$"):
        unpool(x, indices.int(), 2)
    with pytest.raises(NotImplementedError, match=f"^max_unpool{dims}d: .*'sum', .* a {kind}$"):
        unpool(x, indices, 2, reduce="sum")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_autocast_leaves_the_dtype(
    real_device: str, dims: int, index_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Convolutions return the dtype of autocast; pooling and unpooling keep what they are given."""
    pool, unpool = (getattr(F, f"max_{kind}pool{dims}d") for kind in ("", "un"))
    conv = getattr(nn, f"Conv{dims}d")(2, 3, 3, padding=1, device=real_device)
    x = torch.rand(2, 2, *[9] * dims, device=real_device)

    def step(values: Tensor) -> list[Tensor]:
        pooled, indices = pool(values, 3, 2, 1, return_indices=True, index_dtype=index_dtype)
        output = unpool(pooled * 2, indices, 3, 2, 1, values.shape)
        summed = unpool(pooled, indices, 3, 2, 1, values.shape, reduce="sum")
        (grad,) = torch.autograd.grad((output * summed).sum(), values, retain_graph=True)
        return [pooled, output, summed, grad]

    with torch.autocast(real_device, dtype):
        values, single = conv(x), x.clone().requires_grad_()
        within = step(values)
        assert {tensor.dtype for tensor in step(single)} == {torch.float32}
    assert {tensor.dtype for tensor in within} == {dtype}
    leaf = values.detach().requires_grad_()
    assert all_same(within, step(leaf))
    within[1].sum().backward()
    assert conv.weight.grad.dtype == torch.float32
    assert conv.weight.grad.any()


IMAGES = torch.rand(2, 3, 9, 8).contiguous(memory_format=torch.channels_last)
TRAINED = IMAGES.clone().requires_grad_()
with_indices = partial(F.max_pool2d, return_indices=True)
# Format: (pool, input, whether the graph has PyTorch's operator).
INDUCTORS = [
    pytest.param(F.max_pool2d, IMAGES, True, id="inference"),
    pytest.param(torch.no_grad()(F.max_pool2d), TRAINED, True, id="no_grad"),
    pytest.param(F.max_pool2d, TRAINED, False, id="training"),
    pytest.param(lambda *call: with_indices(*call)[0], IMAGES, False, id="indices"),
    pytest.param(F.max_pool2d, IMAGES.mul(9).long(), False, id="integers"),
    pytest.param(F.max_pool1d, IMAGES[0], False, id="1d"),
]


@pytest.mark.parametrize(("pool", "x", "theirs"), INDUCTORS)
def test_inductor_fuses_plain_2d_pools(
    pool: Callable[..., Tensor], x: Tensor, theirs: bool, real_device: str
) -> None:
    """Their graph has PyTorch's operator. Other pools, and exports, have this package's."""
    x, images = x.to(real_device), IMAGES.to(real_device)
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(pool, backend=backend, fullgraph=True)
    found, expected = (of(x, 3, 2, 1, 1, True).detach() for of in (compiled, pool))
    assert same(found, expected)
    assert found.stride() == expected.stride()
    (operator,) = pooling_in(*backend.fw_graphs)
    assert operator.startswith("aten." if theirs else "maxunpool_cuda.")
    program = torch.export.export(MaxPool2d(2), (images,), strict=theirs)
    assert pooling_in(program.graph_module) == {"maxunpool_cuda.max_pool.default"}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), GPUS[0]])
def test_inductors_own_kernels(device: str, rng: Random) -> None:
    """Code that Inductor generates gives what eager calls give: g++ compiles it, or Triton."""
    if device == "cuda" and not has_triton():
        pytest.skip("Triton, which Inductor needs, is not installed or does not serve this GPU")

    def function(x: Tensor) -> tuple[Tensor, ...]:
        plain = F.max_pool2d(x * 2, 3, 2, 1) + 1
        pooled, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        return plain, pooled, indices, F.max_unpool2d(pooled * 2, indices, 3, 2, 1, x.shape) - 1

    x = moved(random_input(rng, (2, 3, 9, 12), torch.float32), device)
    found, expected = (of(x) for of in (torch.compile(function, fullgraph=True), function))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
