"""Integers that stand for real numbers, ``(q - zero_point) * scale``, pooled and unpooled.

First by themselves; then in what PyTorch's quantization of exported programs (PT2E) makes of a
model, which keeps these operators.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import reference
import torch
from cases import INDEX_DTYPES, random_window, same, some
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

POOL, UNPOOL = _ops.max_pool, _ops.max_unpool
DTYPES = (torch.int8, torch.uint8)
SCALE = 0.25  # a power of two, by which products are exact


def dequantized(q: Tensor, zero_point: int) -> Tensor:
    return (q.float() - zero_point) * SCALE


def quantized(x: Tensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return (torch.round(x / SCALE) + zero_point).clamp(limits.min, limits.max).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pooling_knows_no_zero_point(dtype: torch.dtype, rng: random.Random) -> None:
    """Values and indices are those of the real numbers, as these are in the same order."""
    for _ in range(some(8)):
        window = random_window(rng, longest=6)
        index_dtype = rng.choice(window.index_dtypes())
        limits = torch.iinfo(dtype)
        q = torch.randint(limits.min, limits.max + 1, (2, 3, *window.sizes), dtype=dtype)
        zero_point = rng.randint(limits.min, limits.max)
        values, indices = _ops.max_pool(q, *window.arguments, index_dtype)
        reals, of_reals = _ops.max_pool(dequantized(q, zero_point), *window.arguments, index_dtype)
        assert same(indices, of_reals)
        filled = reals > -torch.inf  # windows without an element hold the lowest number
        assert same(dequantized(values, zero_point)[filled], reals[filled])
        assert same(values, reference.max_pool(q, *window.arguments, index_dtype)[0])


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpooling_fills_with_the_integer_zero(
    dtype: torch.dtype, index_dtype: torch.dtype, rng: random.Random
) -> None:
    """Which is the number zero for a zero point of zero. For others, unpool what lies above it."""
    limits = torch.iinfo(dtype)
    every = torch.arange(432).remainder(256) + limits.min  # number, and many twice
    q = every[torch.randperm(432)].to(dtype).view(2, 3, 6, 12)
    zero_point = rng.choice((limits.min or 1, 3, limits.max))
    values, indices = F.max_pool2d(q, (2, 3), return_indices=True, index_dtype=index_dtype)

    def unpooled(values: Tensor) -> Tensor:
        return F.max_unpool2d(values, indices, (2, 3))

    for zero in (0, zero_point):
        right = unpooled(dequantized(values, zero))
        assert same(dequantized(unpooled(values), zero), right) == (zero == 0)
        # The differences wrap around, and back.
        assert same(unpooled(values - zero) + zero, quantized(right, zero, dtype))
    untouched = unpooled(torch.ones_like(values)) == 0
    assert bool((dequantized(unpooled(values), zero_point)[untouched] == -zero_point * SCALE).all())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(torch.relu(self.first(x)))
        return self.last(self.unpool(self.middle(pooled), indices))


def by_pt2e(model: nn.Module, quantizer: Any, x: Tensor) -> torch.fx.GraphModule:
    """Exported, observed on ``x`` and converted, as PyTorch's tutorials do it."""
    pt2e = pytest.importorskip(
        "torchao.quantization.pt2e.quantize_pt2e", reason="PyTorch's quantization is in torchao"
    )
    # In PyTorch 2.11 a strict export alone says what quantizers look for: whose call a node was.
    exported = torch.export.export(model.eval(), (x,), strict=True)
    prepared = pt2e.prepare_pt2e(exported.module(), quantizer)
    prepared(x)
    return pt2e.convert_pt2e(prepared)


def calls(graph: torch.fx.GraphModule, *targets: Any) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.target in targets]


def test_pt2e_with_a_quantizer_of_torchao() -> None:
    """It knows nothing of this package; results are those of torch.nn's modules, quantized."""
    x86 = pytest.importorskip(
        "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer",
        reason="PyTorch's quantization is in torchao",
    )
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    torch.use_deterministic_algorithms(False)  # under which torch.nn's unpooling raises
    model, x = Model(), torch.randn(2, 3, 8, 12)
    ours = copy.deepcopy(model)
    assert maxunpool_cuda.replace_max_pooling(ours) == {}
    expected, got = by_pt2e(model, quantizer, x), by_pt2e(ours, quantizer, x)
    assert len(calls(got, POOL)) == len(calls(got, UNPOOL)) == 1
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    assert len(calls(got, quantize)) == len(calls(expected, quantize)) == 3  # of each convolution
    assert not same(expected(x), model(x))
    other = torch.randn(2, 3, 8, 12)
    for given in (x, other):
        assert same(got(given), expected(given))


def test_pt2e_hands_int8_through() -> None:
    """By a quantizer for these operators, with a zero point: to int8 and back around each."""
    quantizers = pytest.importorskip(
        "torchao.quantization.pt2e.quantizer", reason="PyTorch's quantization is in torchao"
    )
    zero_point = -3
    spec = quantizers.FixedQParamsQuantizationSpec(
        dtype=torch.int8, scale=SCALE, zero_point=zero_point, quant_min=-128, quant_max=127
    )

    class AroundBoth(quantizers.Quantizer):
        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            for node in calls(model, POOL, UNPOOL):
                values = {node.args[0]: spec}
                both = node.target is UNPOOL
                self.mark(node, input_qspec_map=values, output_qspec=spec if both else None)
                for item in node.users if not both else ():
                    if item.args[1] == 0:  # values; indices stay as they are
                        self.mark(item, output_qspec=spec)
            return model

        def mark(self, node: torch.fx.Node, **what: Any) -> None:
            annotation = quantizers.QuantizationAnnotation(**what, _annotated=True)
            node.meta["quantization_annotation"] = annotation

        def validate(self, model: torch.fx.GraphModule) -> None:
            pass

    seen: dict[torch.fx.Node, Any] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            seen[n] = super().run_node(n)
            return seen[n]

    model, x = Model(), torch.randn(2, 3, 8, 12) * 4
    assert maxunpool_cuda.replace_max_pooling(model) == {}
    graph = by_pt2e(model, AroundBoth(), x)
    Watch(graph).run(x)
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    (pool,), (unpool,) = calls(graph, POOL), calls(graph, UNPOOL)
    values, indices = sorted(pool.users, key=lambda node: node.args[1])
    before_pool, before_unpool = (seen[node.args[0].args[0]] for node in (pool, unpool))
    after_pool, after_unpool = (
        seen[user] for node in (values, unpool) for user in node.users if user.target is quantize
    )
    assert before_pool.dtype == before_unpool.dtype == torch.int8
    pooled = F.max_pool2d(before_pool, 2, return_indices=True, index_dtype=torch.uint8)
    assert same(after_pool, pooled[0])
    assert same(seen[indices], pooled[1])
    right = F.max_unpool2d(before_unpool - zero_point, pooled[1], 2) + zero_point
    assert same(after_unpool, right)
    assert not same(after_unpool, F.max_unpool2d(before_unpool, pooled[1], 2))
