# SPDX-License-Identifier: BSD-3-Clause
"""What surrounds an operator: threads, tensors of other kinds, Inductor."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from cases import all_same, same, scaled
from conftest import Record
from published import OPERATORS, pooling_in
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxPool2d, patched


def test_two_threads_run_backward_through_one_graph() -> None:
    """Both keep the graph. If one released it, PyTorch could end the process: docs/design.md."""
    indices, barrier = torch.zeros(1, 1, 2, 2, dtype=torch.int64), Barrier(2)

    def backward(output: Tensor) -> None:
        barrier.wait()
        output.backward(retain_graph=True)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(scaled(2000)):
            x = torch.rand(1, 1, 4, 4, requires_grad=True)
            output = F.max_unpool2d(F.max_pool2d(x, 2), indices, 2).sum()
            calls = [threads.submit(backward, output) for _ in range(2)]
            assert {call.exception() for call in calls} == {None}


def test_a_dispatch_mode_sees_the_operators_as_they_are_documented() -> None:
    """The gradient of pooling is an unpooling."""
    x = torch.rand(1, 1, 4, 4, requires_grad=True)
    with Record() as record:
        values, indices = F.max_pool2d(x, 2, return_indices=True)
        F.max_unpool2d(values, indices, 2).sum().backward()
    ours = [name for name in record.names if name.startswith("maxunpool_cuda::")]
    called = ("max_pool", "max_unpool", "max_unpool_backward", "max_unpool")
    assert ours == [f"maxunpool_cuda::{name}" for name in called]


class Tagged(Tensor):
    """A subclass that records the functions called on it. Their results are Tagged as well."""

    asked: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "which"), [("pool", 0), ("unpool", 0), ("unpool", 1)])
def test_tensor_subclasses(kind: str, which: int, dims: int) -> None:
    """A subclass gets the function that was called on it, with all arguments."""
    function = getattr(F, f"max_{kind}{dims}d")
    tensors: list[Tensor] = [torch.rand(2, 3, *[4] * dims)]
    options: dict[str, Any] = {"padding": 1, "dilation": 2, "ceil_mode": True}
    options |= {"return_indices": True, "index_dtype": torch.int32}
    if kind == "unpool":
        tensors.append(torch.randint(5, tensors[0].shape))
        options = {"padding": 1, "output_size": [6] * dims, "reduce": "sum"}
    expected = leaves(function(*tensors, 3, 2, **options))
    tensors[which] = tensors[which].as_subclass(Tagged)
    Tagged.asked.clear()
    found = leaves(function(*tensors, 3, 2, **options))
    assert [f for f in Tagged.asked if "pool" in f.__name__] == [function]
    assert {type(tensor) for tensor in found} == {Tagged}
    assert all_same([tensor.as_subclass(Tensor) for tensor in found], expected)


@pytest.mark.usefixtures("single_threaded_torch")  # and not under deterministic algorithms
def test_other_devices_run_torch_nns_calls() -> None:
    """If they ask for nothing that torch.nn lacks."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_pool2d(x, 2), F.max_unpool2d(pooled, indices, 2)

    with FakeTensorMode():  # stands for a device that is not there
        called = pooling_in(make_fx(function)(torch.empty(1, 1, 4, 4, device="mps")))
    assert called
    assert not called & OPERATORS


@pytest.mark.parametrize("kind", ["mkldnn", "quantized"])
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_other_kinds_are_pooled_by_torch(kind: str) -> None:
    x = torch.rand(2, 3, 9, 9) - 0.5
    if kind == "quantized":
        x, plain = torch.quantize_per_tensor(x, 0.01, 7, torch.qint8), Tensor.dequantize
    elif torch.backends.mkldnn.is_available():
        x, plain = x.to_mkldnn(), Tensor.to_dense
    else:
        pytest.skip("this build of PyTorch has no mkldnn tensors")
    expected = nn.functional.max_pool2d(x, 3, 2, 1)
    with patched(), patched(index_dtype=torch.uint8):  # no endless loop
        within = nn.functional.max_pool2d(x, 3, 2, 1)
    for got in (F.max_pool2d(x, 3, 2, 1), within):
        assert (got.dtype, got.layout) == (expected.dtype, expected.layout)
        assert same(plain(got), plain(expected))
    refused = rf"^max_pool2d: expected a plain tensor for torch\.uint8 .* a {kind} tensor on cpu$"
    with pytest.raises(NotImplementedError, match=refused):
        F.max_pool2d(x, 2, return_indices=True, index_dtype=torch.uint8)


def test_autocast_leaves_the_dtype(real_device: str) -> None:
    x = torch.rand(2, 3, 9, 9, device=real_device, requires_grad=True)

    def step() -> list[Tensor]:
        window = (3, 2, 1)
        pooled, indices = F.max_pool2d(x, *window, return_indices=True, index_dtype=torch.uint8)
        output = F.max_unpool2d(pooled, indices, *window, x.shape)
        summed = F.max_unpool2d(pooled, indices, *window, x.shape, reduce="sum")
        return [pooled, output, summed, *torch.autograd.grad((output * summed).sum(), x)]

    expected = step()
    with torch.autocast(real_device, torch.bfloat16):
        assert all_same(step(), expected)


IMAGES = torch.rand(2, 3, 9, 8).contiguous(memory_format=torch.channels_last)
TRAINED = IMAGES.clone().requires_grad_()


@pytest.mark.parametrize(
    ("pool", "x", "operator"),
    [
        pytest.param(F.max_pool2d, IMAGES, "aten", id="inference"),
        pytest.param(torch.no_grad()(F.max_pool2d), TRAINED, "aten", id="no_grad"),
        pytest.param(F.max_pool2d, TRAINED, "maxunpool_cuda", id="training"),
        pytest.param(F.max_pool2d, IMAGES.mul(9).long(), "maxunpool_cuda", id="integers"),
        pytest.param(F.max_pool1d, IMAGES[0], "maxunpool_cuda", id="1d"),
    ],
)
def test_inductor_fuses_plain_2d_pools(
    pool: Callable[..., Tensor], x: Tensor, operator: str, real_device: str
) -> None:
    """Their graph has PyTorch's operator. Other pools have this package's."""
    x = x.to(real_device)
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(pool, backend=backend, fullgraph=True)
    found, expected = (of(x, 3, 2, 1, 1, True).detach() for of in (compiled, pool))
    assert same(found, expected)
    assert found.stride() == expected.stride()
    (called,) = pooling_in(*backend.fw_graphs)
    assert called.startswith(f"{operator}.")


def test_an_exported_program_has_this_packages_operator() -> None:
    program = torch.export.export(MaxPool2d(2), (IMAGES,), strict=True)
    assert pooling_in(program.graph_module) == {"maxunpool_cuda.max_pool.default"}
