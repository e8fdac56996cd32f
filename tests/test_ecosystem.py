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


def pool_and_unpool() -> None:
    """A forward and a backward. The gradient of pooling is an unpooling."""
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    F.max_unpool2d(values, indices, 2).sum().backward()


CALLED = ("max_pool", "max_unpool", "max_unpool_backward", "max_unpool")


@pytest.mark.parametrize("is_short", [False, True])
def test_a_profiler_shows_the_operators(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the short way their names begin with an underscore."""
    monkeypatch.setattr(_operators, "has_short_way", is_short)
    with profile() as profiled:
        pool_and_unpool()
    names = [event.name for event in profiled.events()]
    short = [f"maxunpool_cuda::_{name}" for name in CALLED]
    assert [name for name in names if name in short] == (short if is_short else [])
    ours = {name.replace("::_", "::") for name in names if name.startswith("maxunpool_cuda::")}
    assert ours == {f"maxunpool_cuda::{name}" for name in CALLED}


def test_a_dispatch_mode_sees_the_operators_as_they_are_documented() -> None:
    with Record() as record:
        pool_and_unpool()
    ours = [name for name in record.names if name.startswith("maxunpool_cuda::")]
    assert ours == [f"maxunpool_cuda::{name}" for name in CALLED]


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
@pytest.mark.parametrize(("device", "ours"), [("mps", set()), ("cpu", OPERATORS)])
def test_other_devices_run_torch_nns_calls(device: str, ours: set[str]) -> None:
    """The call is torch.nn's if it asks for nothing that torch.nn lacks."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_pool2d(x, 2), F.max_unpool2d(pooled, indices, 2)

    with FakeTensorMode():  # stands for a device that is not there
        x = torch.empty(1, 1, 4, 4, device=device)
        assert [tuple(t.shape[2:]) for t in function(x)] == [(2, 2), (4, 4)]
        called = pooling_in(make_fx(function)(x))
    assert called
    assert called & OPERATORS == ours


@pytest.mark.parametrize("window", [(3, 2, 1), (2, None, 0, 1, True)])
@pytest.mark.parametrize("kind", ["mkldnn", "quantized"])
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_other_kinds_are_pooled_by_torch(kind: str, window: tuple[Any, ...]) -> None:
    """What torch.nn has no call for is refused."""
    x = torch.rand(2, 3, 9, 9) - 0.5
    if kind == "quantized":
        x, plain = torch.quantize_per_tensor(x, 0.01, 7, torch.qint8), Tensor.dequantize
    elif torch.backends.mkldnn.is_available():
        x, plain = x.to_mkldnn(), Tensor.to_dense
    else:
        pytest.skip("this build of PyTorch has no mkldnn tensors")
    expected = nn.functional.max_pool2d(x, *window)
    with patched(), patched(index_dtype=torch.uint8):  # no endless loop
        within = nn.functional.max_pool2d(x, *window)
    for got in (F.max_pool2d(x, *window), within):
        assert (got.dtype, got.layout) == (expected.dtype, expected.layout)
        assert same(plain(got), plain(expected))
    indices, refused = torch.zeros(x.shape, dtype=torch.int64), f".* a {kind} tensor on cpu$"
    with pytest.raises(NotImplementedError, match=f"^max_pool2d: .*uint8 {refused}"):
        F.max_pool2d(x, 2, return_indices=True, index_dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match=f"^max_unpool2d: .*int32 {refused}"):
        F.max_unpool2d(x, indices.int(), 2)
    with pytest.raises(NotImplementedError, match=f"^max_unpool2d: .*'sum',{refused}"):
        F.max_unpool2d(x, indices, 2, reduce="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_autocast_leaves_the_dtype(real_device: str, dims: int, dtype: torch.dtype) -> None:
    pool, unpool = (getattr(F, f"max_{kind}pool{dims}d") for kind in ("", "un"))
    x = torch.rand(2, 3, *[9] * dims, device=real_device, dtype=dtype, requires_grad=True)

    def step() -> list[Tensor]:
        pooled, indices = pool(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        output, summed = (
            unpool(pooled, indices, 3, 2, 1, x.shape, reduce=reduce) for reduce in ("last", "sum")
        )
        return [pooled, output, summed, *torch.autograd.grad((output * summed).sum(), x)]

    expected = step()
    with torch.autocast(real_device, torch.bfloat16):
        assert all_same(step(), expected)


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
