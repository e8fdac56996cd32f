"""Tensors that no kernel of this package takes: of other devices, quantized, of mkldnn. The call is
torch.nn's if it asks for nothing that torch.nn lacks. And PyTorch's quantization of a model.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import same
from published import OPERATORS, PUBLISHED, pooling_in
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import maxunpool_cuda
import maxunpool_cuda.functional as F

PLANE = (1, 1, 4, 4)


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("device", ["mps", "xpu", "cpu"])
def test_other_devices_run_torch_nns_calls(device: str) -> None:
    """Fake tensors stand for tensors of devices that are not there."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_pool2d(x, 2), pooled, indices, F.max_unpool2d(pooled, indices, 2)

    with FakeTensorMode():
        x = torch.empty(PLANE, device=device)
        assert [tuple(t.shape[2:]) for t in function(x)] == [(2, 2), (2, 2), (2, 2), (4, 4)]
        assert {t.device.type for t in function(x)} == {device}
        called = pooling_in(make_fx(function)(x))
    assert called
    assert called & OPERATORS == (OPERATORS if device == "cpu" else set())
    if device != "cpu":
        with FakeTensorMode():
            check_refused(torch.ones(PLANE, device=device), f"plain tensor on {device}")


# The name of each in errors, how to make it, and how to make it plain again.
KINDS: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    ("quantized", lambda x: torch.quantize_per_tensor(x, 0.01, 7, torch.quint8), Tensor.dequantize),
    ("quantized", lambda x: torch.quantize_per_tensor(x, 0.01, 7, torch.qint8), Tensor.dequantize),
    ("mkldnn", Tensor.to_mkldnn, Tensor.to_dense),
]


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "make", "plain"), KINDS, ids=["quint8", "qint8", "mkldnn"])
def test_other_kinds_are_pooled_by_torch(kind: str, make: Any, plain: Any, dims: int) -> None:
    if kind == "mkldnn" and not (torch.backends.mkldnn.is_available() and dims > 1):
        pytest.skip("PyTorch has no 1d pooling of mkldnn tensors, and some builds have none")
    x, name = make(torch.rand(2, 3, *[9] * dims) - 0.5), f"max_pool{dims}d"
    for window in ((3, 2, 1), (2, None, 0, 1, True)):
        ours, expected = (getattr(of, name)(x, *window) for of in (F, nn.functional))
        with maxunpool_cuda.patched(), maxunpool_cuda.patched(torch.uint8):  # no endless loop
            within = getattr(nn.functional, name)(x, *window)
        for got in (ours, within):
            assert (got.dtype, got.layout) == (expected.dtype, expected.layout)
            assert same(plain(got), plain(expected))
    check_refused(x, f"{kind} tensor on cpu")


def check_refused(x: Tensor, kind: str) -> None:
    dims, indices = x.dim() - 2, torch.zeros(x.shape, dtype=torch.int64)
    pool, unpool = (getattr(F, f"max_{name}{dims}d") for name in ("pool", "unpool"))

    def refused(words: str) -> Any:
        return pytest.raises(NotImplementedError, match=f"^max_{words}.* but got a {kind}$")

    for dtype in (torch.uint8, torch.int32):
        with refused(f"pool{dims}d: .* for {dtype} indices"):
            pool(x, 2, return_indices=True, index_dtype=dtype)
        with refused(f"unpool{dims}d: .* for {dtype} indices"):
            unpool(x, indices.to(dtype), 2)
    with refused(f"unpool{dims}d: .* reduce='sum'"):
        unpool(x, indices, 2, reduce="sum")


@pytest.mark.usefixtures("single_threaded_torch")
def test_pt2e() -> None:
    """torchao quantizes the layers around this package's calls, as around torch.nn's."""
    reason = "PyTorch's quantization is in torchao, whose releases refuse older ones of PyTorch"
    pt2e, x86 = (
        pytest.importorskip(f"torchao.quantization.pt2e.{name}", None, reason, exc_type=ImportError)
        for name in ("quantize_pt2e", "quantizer.x86_inductor_quantizer")
    )
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    model, x = PUBLISHED["FastSurfer"].make().eval(), torch.randn(2, 3, 8, 12)
    ours = copy.deepcopy(model)
    assert maxunpool_cuda.replace_max_pooling(ours, torch.uint8) == {}
    made = []
    for each in (model, ours):
        # In PyTorch 2.11 quantizers find the module of a node only after a strict export.
        exported = torch.export.export(each, (x,), strict=True).module()
        prepared = pt2e.prepare_pt2e(exported, quantizer)
        prepared(x)
        made.append(pt2e.convert_pt2e(prepared))
    expected, got = made
    assert pooling_in(got) == OPERATORS
    assert not same(expected(x), model(x))
    for given in (x, torch.randn(2, 3, 8, 12)):
        assert same(got(given), expected(given))
