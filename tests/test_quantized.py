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
from networks import PoolAndUnpool
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

POOL, UNPOOL = torch.ops.maxunpool_cuda.max_pool.default, torch.ops.maxunpool_cuda.max_unpool.default
DTYPES = (torch.int8, torch.uint8)
SCALE = 0.25  # a power of two, by which products are exact


def dequantized(q: Tensor, zero_point: int) -> Tensor:
    return (q.float() - zero_point) * SCALE


def quantized(x: Tensor, zero_point: int, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return (torch.round(x / SCALE) + zero_point).clamp(limits.min, limits.max).to(dtype)


def drawn(rng: random.Random, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Every number of a dtype, with ties; and a zero point, one of its numbers."""
    limits = torch.iinfo(dtype)
    few = torch.randint(limits.min, limits.max + 1, (3,)).tolist()
    zero_point = rng.choice((0, limits.min, limits.max, rng.randint(limits.min, limits.max)))
    values = torch.tensor([*range(limits.min, limits.max + 1), *few * 40][:360], dtype=dtype)
    return values[torch.randperm(360)].view(2, 3, 6, 10), zero_point


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
        assert same(values, reference.max_pool(q, *window.reference_arguments, index_dtype)[0])


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpooling_fills_with_the_integer_zero(
    dtype: torch.dtype, index_dtype: torch.dtype, rng: random.Random
) -> None:
    """Which is the number zero for a zero point of zero. For others, unpool what lies above it."""
    q, zero_point = drawn(rng, dtype)
    zero_point = zero_point or torch.iinfo(dtype).max  # another
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


def example() -> tuple[nn.Module, Tensor]:
    return PoolAndUnpool(2, 3, 2, 1).eval(), torch.randn(2, 3, 9, 12)
