# SPDX-License-Identifier: BSD-3-Clause
"""What surrounds an operator: threads, tensors of other kinds, Inductor."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from cases import all_same, same, scaled
from conftest import Record
from published import pooling_in, program_of
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import AdaptiveMaxPool2d, MaxPool2d, patched


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


def check_tagged(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
    """The subclass gets the function that was called on it, with all arguments."""
    plain = (tensor.as_subclass(Tensor) for tensor in tensors)
    expected = leaves(function(*plain, 3, 2, **options))
    Tagged.asked.clear()
    found = leaves(function(*tensors, 3, 2, **options))
    assert [f for f in Tagged.asked if "pool" in f.__name__] == [function]
    assert {type(tensor) for tensor in found} == {Tagged}
    assert all_same([tensor.as_subclass(Tensor) for tensor in found], expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_tensor_subclasses(dims: int) -> None:
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    x = torch.rand(2, 3, *[4] * dims)
    indices = torch.randint(5, x.shape)
    options: Any = {"padding": 1, "dilation": 2, "ceil_mode": True, "return_indices": True}
    check_tagged(pool, x.as_subclass(Tagged), index_dtype=torch.int32, **options)
    options = {"padding": 1, "output_size": [6] * dims, "reduce": "sum"}
    check_tagged(unpool, x.as_subclass(Tagged), indices, **options)
    check_tagged(unpool, x, indices.as_subclass(Tagged), **options)


@pytest.mark.parametrize("kind", ["mkldnn", "quantized"])
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_other_kinds_are_pooled_by_torch(kind: str) -> None:
    x = torch.rand(2, 3, 9, 9)
    if kind == "quantized":
        x = torch.quantize_per_tensor(x, 0.01, 7, torch.qint8)
    elif torch.backends.mkldnn.is_available():
        x = x.to_mkldnn()
    else:
        pytest.skip("this build of PyTorch has no mkldnn tensors")
    expected = nn.functional.max_pool2d(x, 3, 2, 1)
    with patched(), patched(index_dtype=torch.uint8):  # no endless loop
        within = nn.functional.max_pool2d(x, 3, 2, 1)
    for found in (F.max_pool2d(x, 3, 2, 1), within):
        assert (found.is_quantized, found.is_mkldnn) == (x.is_quantized, x.is_mkldnn)
        assert torch.equal(found.to_dense(), expected.to_dense())
    refused = rf"^max_pool2d: expected a plain tensor for torch\.uint8 .* a {kind} tensor on cpu$"
    with pytest.raises(NotImplementedError, match=refused):
        F.max_pool2d(x, 2, return_indices=True, index_dtype=torch.uint8)


def test_autocast_leaves_the_dtype(real_device: str) -> None:
    x = torch.rand(2, 3, 9, 9, device=real_device, requires_grad=True)

    def step() -> list[Tensor]:
        pooled, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        output = F.max_unpool2d(pooled, indices, 3, 2, 1, reduce="sum")
        return [pooled, output, *torch.autograd.grad(output.square().sum(), x)]

    expected = step()
    with torch.autocast(real_device, torch.bfloat16):
        assert all_same(step(), expected)


IMAGES = torch.arange(432.0).view(2, 3, 9, 8).contiguous(memory_format=torch.channels_last)
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


COUNTS = IMAGES.int()
OURS = {"maxunpool_cuda.max_pool.default"}
OF_ANY_LENGTH = {"aten.max_pool2d.default"} if torch.__version__ >= "2.13" else OURS
HEIGHT = {2: torch.export.Dim("height", min=8)}


@pytest.mark.parametrize(
    ("pool", "x", "sizes", "operators"),
    [
        pytest.param(F.max_pool2d, TRAINED, {}, {"aten.max_pool2d.default"}, id="training"),
        pytest.param(
            F.max_pool3d, TRAINED[None].contiguous(), {}, {"aten.max_pool3d.default"}, id="3d"
        ),
        pytest.param(F.max_pool1d, TRAINED[0], {}, {"aten.max_pool1d.default"}, id="1d"),
        pytest.param(F.max_pool2d, COUNTS, {}, {"aten.max_pool2d.default"}, id="integers"),
        pytest.param(F.max_pool1d, COUNTS[0], {}, OURS, id="integers in 1d"),
        pytest.param(F.max_pool1d, IMAGES[0], HEIGHT, OF_ANY_LENGTH, id="any length"),
        pytest.param(F.max_pool2d, IMAGES, HEIGHT, OURS, id="any height in ceil mode"),
    ],
)
def test_recorded_pools_without_indices(
    pool: Callable[..., Tensor], x: Tensor, sizes: Any, operators: set[str]
) -> None:
    """They are PyTorch's, which every runtime has, if it has one: it needs no gradient here."""
    window = (3, 2, 1, 1, pool is not F.max_pool1d)
    program = program_of(lambda x: pool(x, *window), x, shapes=(sizes,))
    assert pooling_in(program.graph_module) == operators
    assert same(program.module()(x).detach(), pool(x, *window).detach())
    if not sizes:
        traced = torch.jit.trace(lambda x: pool(x, *window), x)
        (node,) = [node for node in traced.inlined_graph.nodes() if "max_pool" in node.kind()]
        assert {node.kind().replace("::", ".") + ".default"} == operators


def test_a_graph_with_a_backward_has_this_packages_operators() -> None:
    graph = aot_export_joint_simple(lambda x: (F.max_pool2d(x, 2),), (TRAINED,), trace_joint=True)
    called = {"maxunpool_cuda.max_pool.default", "maxunpool_cuda.max_unpool.default"}
    assert pooling_in(graph) == called


@pytest.mark.parametrize(("size", "operator"), [(1, "aten.adaptive_max_pool2d.default"), (3, "")])
def test_adaptive_pools_of_any_sizes(size: int, operator: str) -> None:
    """torch.onnx.export takes torch.nn's windows for those of the example, if there are several."""
    pool = AdaptiveMaxPool2d(size)
    program = program_of(pool.forward, IMAGES, shapes=({2: torch.export.Dim.DYNAMIC},))
    other = torch.rand(2, 3, 13, 8)
    assert same(program.module()(other), pool(other))
    called = pooling_in(program.graph_module)
    assert called == {operator or "maxunpool_cuda.max_unpool_backward.default", *called}
    assert ("maxunpool_cuda" in str(called)) == (not operator)


def test_only_what_keeps_the_operators_warns() -> None:
    """Neither torch.export nor what decomposes them."""
    pool = MaxPool2d(2, return_indices=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "maxunpool_cuda: this program calls")
        program = torch.export.export(pool, (IMAGES,))
        program.run_decompositions(maxunpool_cuda.export.decompositions())
        table = maxunpool_cuda.export.onnx_translation_table()
        torch.onnx.export(program, verbose=False, custom_translation_table=table)
    with pytest.warns(UserWarning, match="calls maxunpool_cuda.max_pool.default, which only"):
        program.run_decompositions()
    with pytest.warns(torch.jit.TracerWarning, match="calls maxunpool_cuda.max_pool.default"):
        torch.jit.trace(pool, IMAGES)
