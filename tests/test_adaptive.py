# SPDX-License-Identifier: BSD-3-Clause
"""Adaptive max pooling: definition, torch.nn's results, derivatives, graphs."""

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from cases import LAYOUTS, Sizes, distinct, laid_out, random_input, random_leading, same, scaled
from reference import adaptive_max_pool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.testing import assert_close

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import decompositions

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
both_ways = pytest.mark.usefixtures("way")
every_rank = pytest.mark.parametrize("dims", [1, 2, 3])


def ours(dims: int, functions: Any = F) -> Callable[..., Any]:
    return getattr(functions, f"adaptive_max_pool{dims}d")


theirs = functools.partial(ours, functions=nn.functional)


@pytest.fixture(params=["torch.nn's", "composed"])
def way(request: pytest.FixtureRequest) -> None:
    if request.param == "composed":
        request.getfixturevalue("composed")


def steps(tensor: Tensor) -> list[int]:
    """The strides that say where an element is."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def draw(rng: random.Random, dims: int, longest: int = 0) -> tuple[Sizes, Any, Sizes]:
    """Sizes of a plane, an output_size that may have None, and the pooled sizes it asks for."""
    most = longest or (40, 12, 6)[dims - 1]
    sizes = tuple(rng.randint(1, most) for _ in range(dims))
    asked = tuple(rng.choice((None, 1, rng.randint(1, 2 * most))) for _ in sizes)
    pooled = tuple(n if m is None else m for n, m in zip(sizes, asked, strict=True))
    return sizes, asked if dims > 1 else pooled[0], pooled  # torch.nn's 1d takes no None


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_rank
def test_the_definition_and_torchs(
    real_device: str, dims: int, dtype: torch.dtype, rng: random.Random
) -> None:
    """Values, indices and strides are compared. Inputs have ties, infinities and NaNs."""
    for _ in range(scaled(60)):
        sizes, asked, pooled = draw(rng, dims)
        x = random_input(rng, (*random_leading(rng), *sizes), dtype)
        x = cases.moved(laid_out(x, rng.choice(LAYOUTS), dims), real_device)
        values, indices = both = ours(dims)(x, asked, return_indices=True)
        expected = theirs(dims)(x, asked, return_indices=True)
        for right in (adaptive_max_pool(x, pooled), expected):
            # PyTorch's kernels write any NaN for float16 and bfloat16.
            assert_close(both, right, rtol=0, atol=0, equal_nan=True, check_device=False)
        assert steps(values) == steps(indices) == steps(expected[0]), (x.shape, x.stride(), asked)
        module = getattr(maxunpool_cuda, f"AdaptiveMaxPool{dims}d")
        assert same(module(asked)(x), values)
        assert same(ours(dims)(x, asked), values)
        smaller = module(asked, True, index_dtype=torch.int32)(x)
        assert all(map(same, smaller, (values, indices.int())))


def draw_multiple(rng: random.Random, dims: int) -> tuple[Sizes, Any, Sizes]:
    """Sizes of a plane, an output_size of which they are multiples, and the windows of one size."""
    pooled = tuple(rng.choice((1, 1, 2, 3)) for _ in range(dims))
    window = tuple(rng.randint(1, (300, 20, 7)[dims - 1]) for _ in range(dims))
    sizes = tuple(m * k for m, k in zip(pooled, window, strict=True))
    asked = tuple(None if k == 1 else m for m, k in zip(pooled, window, strict=True))
    return sizes, asked if dims > 1 else pooled, window  # torch.nn's 1d takes no None


@both_ways
@every_rank
def test_multiples_of_the_output_are_max_pooled(
    real_device: str, dims: int, rng: random.Random
) -> None:
    """Results and gradients are torch.nn's. The backward keeps the smallest indices."""
    for _ in range(scaled(40)):
        sizes, asked, window = draw_multiple(rng, dims)
        x = distinct(torch.empty(*random_leading(rng), *sizes, dtype=torch.float64))
        x = laid_out(x, rng.choice(LAYOUTS), dims).to(real_device).requires_grad_()
        expected = theirs(dims)(x, asked, return_indices=True)
        (right,) = torch.autograd.grad(expected[0].sum(), x)
        smallest = torch.uint8 if math.prod(window) <= 256 else torch.int32
        for returned, kept in ((False, smallest), (True, torch.int64)):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.append(t.dtype) or t,  # noqa: B023
                lambda t: t,
            ):
                results = ours(dims)(x, asked, return_indices=returned)
            values = results[0] if returned else results
            assert saved == [kept], (sizes, asked)
            assert same(values, expected[0])
            assert not returned or same(results[1], expected[1])
            assert steps(values) == steps(expected[0])
            assert same(torch.autograd.grad(values.sum(), x)[0], right)


def test_a_gradient_of_one_position_has_the_layout_of_the_input(device: str) -> None:
    """Its own strides are those of any layout."""
    x = torch.rand(2, 8, 5, 7, device=device).contiguous(memory_format=torch.channels_last)
    values = F.adaptive_max_pool2d(x.requires_grad_(), 1)
    (gradient,) = torch.autograd.grad(values, x, torch.ones(2, 8, 1, 1, device=device))
    assert gradient.stride() == x.stride()


@pytest.mark.parametrize("asked", [2, 3], ids=["windows of one size", "of two sizes"])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("device")
def test_several_nans_and_none_but_minus_infinity(
    dtype: torch.dtype, layout: str, asked: int
) -> None:
    """In both cases indices are torch.nn's: of the last NaN, and of the first element."""
    for value, other in ((math.nan, math.inf), (-math.inf, -math.inf)):
        x = torch.full((2, 8, 16, 16), other, dtype=dtype)
        x[:, ::2, ::3, 1::5] = value
        x = laid_out(x, layout, 2)
        expected = theirs(2)(x, asked, return_indices=True)
        both = F.adaptive_max_pool2d(x, asked, return_indices=True)
        assert_close(both, expected, rtol=0, atol=0, equal_nan=True)
        assert_close(both, adaptive_max_pool(x, (asked, asked)), rtol=0, atol=0, equal_nan=True)


@both_ways
@every_rank
def test_empty_batches_and_empty_outputs(dims: int) -> None:
    for shape, size in (((0, 2), 3), ((2, 3), 0), ((3,), 0), ((0, 1), 0)):
        x = torch.rand(*shape, *[5] * dims)
        got, expected = (of(dims)(x, size, return_indices=True) for of in (ours, theirs))
        assert all(map(same, got, expected))
        assert ours(dims)(x.requires_grad_(), size).shape == expected[0].shape


@both_ways
@every_rank
def test_derivatives(real_device: str, dims: int, rng: random.Random) -> None:
    for _ in range(scaled(8)):
        sizes, asked, _ = draw(rng, dims, longest=(9, 4, 3)[dims - 1])
        x = distinct(torch.empty(2, *sizes, dtype=torch.float64)).to(real_device).requires_grad_()
        pool = functools.partial(ours(dims), output_size=asked)
        both = {"check_batched_grad": True}
        assert gradcheck(pool, x, check_forward_ad=True, check_batched_forward_grad=True, **both)
        assert gradgradcheck(lambda x: pool(x).pow(3), x, check_fwd_over_rev=True, **both)  # noqa: B023
        batch = torch.stack([distinct(x.detach()), x.detach()])
        assert same(vmap(pool)(batch), torch.stack([*map(pool, batch)]))


def test_compiled_for_one_size(real_device: str) -> None:
    """The sizes are known, so the graph has a max pooling."""
    graphs = CompileCounterWithBackend("aot_eager")
    pool = maxunpool_cuda.AdaptiveMaxPool2d((3, 1))
    compiled = torch.compile(pool, fullgraph=True, dynamic=False, backend=graphs)
    for sizes, is_pooled in (((6, 7), True), ((7, 6), False)):
        x = torch.rand(2, 3, *sizes, device=real_device, requires_grad=True)
        wanted, got = (torch.autograd.grad(of(x).sum(), x)[0] for of in (pool, compiled))
        assert same(got, wanted)
        assert ("maxunpool_cuda.max_pool." in str(graphs.graphs[-1].graph)) == is_pooled


@pytest.mark.parametrize(
    ("dims", "size", "length"), [(1, 3, 5), (2, 4, 3), (3, 2, 4), (2, 3, 6), (2, 1, 4)]
)
def test_compiled_and_exported(real_device: str, dims: int, size: int, length: int) -> None:
    """One graph serves all sizes. The portable form has no operator of this package."""
    open_sizes = [{d: torch.export.Dim.DYNAMIC for d in range(dims + 2) if d != 1}]
    pool = getattr(maxunpool_cuda, f"AdaptiveMaxPool{dims}d")(size, True, index_dtype=torch.int32)
    x = torch.rand(11, 13, *[length] * dims, device=real_device)
    program = torch.export.export(pool, (x,), dynamic_shapes=open_sizes, strict=dims == 2)
    portable = program.run_decompositions(decompositions())
    assert "maxunpool_cuda" in str(program.graph)
    assert "maxunpool_cuda" not in str(portable.graph)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(pool, fullgraph=True, dynamic=True, backend=graphs)
    for batch, more in ((11, 0), (12, 1), (14, 2)):
        shape = (batch, 13, *[length + more] * dims)
        x = torch.rand(shape, device=real_device, requires_grad=True)
        expected = pool(x)
        for of in (program.module(), portable.module(), compiled):
            assert all(map(same, of(x), expected))
        wanted, got = (torch.autograd.grad(of(x)[0].sum(), x)[0] for of in (pool, compiled))
        assert same(got, wanted)
    assert graphs.frame_count == 1
