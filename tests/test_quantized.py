"""Tensors that no kernel of this package takes: of other devices, quantized, of mkldnn. The call is
torch.nn's if it asks for nothing that torch.nn lacks. And PyTorch's quantization of a model.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import same
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import maxunpool_cuda
import maxunpool_cuda.functional as F

PLANE = (1, 1, 4, 4)


class Namespaces(TorchDispatchMode):
    """Notes whose operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_run_torch_nns_calls(device: str) -> None:
    """On fake tensors, which need no such device."""
    with FakeTensorMode(), Namespaces() as called:
        x = torch.empty(PLANE, device=device)
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        results = F.max_pool2d(x, 2), pooled, indices, F.max_unpool2d(pooled, indices, 2)
        assert [tuple(result.shape[2:]) for result in results] == [(2, 2), (2, 2), (2, 2), (4, 4)]
        assert {result.device.type for result in results} == {device}
        assert "maxunpool_cuda" not in called.seen
        F.max_pool2d(torch.empty(PLANE), 2)
        assert "maxunpool_cuda" in called.seen


KINDS: dict[str, Callable[[], Tensor]] = {
    "quantized tensor on cpu": (
        lambda: torch.quantize_per_tensor(torch.ones(PLANE), 0.25, 3, torch.quint8)
    ),
    "mkldnn tensor on cpu": lambda: torch.ones(PLANE).to_mkldnn(),
    "plain tensor on mps": lambda: torch.ones(PLANE, device="mps"),
}


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_nn_lacks_is_refused(kind: str) -> None:
    if "mkldnn" in kind and not torch.backends.mkldnn.is_available():
        pytest.skip("a build without mkldnn")

    def refused(words: str) -> Any:
        return pytest.raises(NotImplementedError, match=f"^{words}.* but got a {kind}$")

    with FakeTensorMode() if "mps" in kind else torch.no_grad():
        x, indices = KINDS[kind](), torch.zeros(PLANE, dtype=torch.int64)
        for dtype in (torch.uint8, torch.int32):
            with refused(f"max_pool2d: .* for {dtype} indices"):
                F.max_pool2d(x, 2, return_indices=True, index_dtype=dtype)
            with refused(f"max_unpool2d: .* for {dtype} indices"):
                F.max_unpool2d(x, indices.to(dtype), 2)
        with refused("max_unpool2d: .* reduce='sum'"):
            F.max_unpool2d(x, indices, 2, reduce="sum")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(torch.relu(self.first(x)))
        return self.last(self.unpool(pooled, indices))


@pytest.mark.usefixtures("single_threaded_torch")
def test_pt2e() -> None:
    """torchao's quantizer knows nothing of this package, and quantizes what is around its calls."""
    reason = "PyTorch's quantization is in torchao"
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", reason=reason)
    path = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"
    x86 = pytest.importorskip(path, reason=reason)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    model, x = Model().eval(), torch.randn(2, 3, 8, 12)
    ours = copy.deepcopy(model)
    assert maxunpool_cuda.replace_max_pooling(ours, torch.uint8) == {}
    quantized = []
    for each in (model, ours):
        # In PyTorch 2.11 quantizers find the module of a node only after a strict export.
        exported = torch.export.export(each, (x,), strict=True).module()
        prepared = pt2e.prepare_pt2e(exported, quantizer)
        prepared(x)
        quantized.append(pt2e.convert_pt2e(prepared))
    expected, got = quantized
    for operator in ("max_pool", "max_unpool"):
        assert str(got.graph).count(f"maxunpool_cuda.{operator}.") == 1
    assert not same(expected(x), model(x))
    for given in (x, torch.randn(2, 3, 8, 12)):
        assert same(got(given), expected(given))
