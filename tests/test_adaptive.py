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
from cases import (
    FLOATS,
    LAYOUTS,
    all_same,
    distinct,
    laid_out,
    random_input,
    random_leading,
    same,
    scaled,
)
from reference import Sizes, adaptive_max_pool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.testing import assert_close

import maxunpool_cuda
import maxunpool_cuda.functional as F

every_rank = pytest.mark.parametrize("dims", [1, 2, 3])


def ours(dims: int, functions: Any = F) -> Callable[..., Any]:
    return getattr(functions, f"adaptive_max_pool{dims}d")


theirs = functools.partial(ours, functions=nn.functional)


@pytest.fixture(params=["torch.nn's", "composed"])
def way(request: pytest.FixtureRequest) -> None:
    if request.param == "composed":
        request.getfixturevalue("composed")


both_ways = pytest.mark.usefixtures("way")


def steps(tensor: Tensor) -> list[int]:
    """The strides that say where an element is."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def sizes_of(rng: random.Random, dims: int, most: int) -> tuple[Sizes, Any, Sizes]:
    """Sizes of a plane, an output_size that may have None, and the pooled sizes it asks for."""
    sizes = tuple(rng.randint(1, most) for _ in range(dims))
    asked = tuple(rng.choice((None, 1, rng.randint(1, 2 * most))) for _ in sizes)
    pooled = tuple(n if m is None else m for n, m in zip(sizes, asked, strict=True))
    return sizes, asked if dims > 1 else pooled[0], pooled  # torch.nn's 1d takes no None


@both_ways
@every_rank
def test_the_definition_and_torchs(real_device: str, dims: int, rng: random.Random) -> None:
    """Values, indices and strides are compared. Inputs have ties, infinities and NaNs."""
    module = getattr(maxunpool_cuda, f"AdaptiveMaxPool{dims}d")
    for _ in range(scaled(160)):
        sizes, asked, pooled = sizes_of(rng, dims, most=(40, 12, 6)[dims - 1])
        x = random_input(rng, (*random_leading(rng), *sizes), rng.choice(FLOATS))
        x = cases.moved(laid_out(x, rng.choice(LAYOUTS), dims), real_device)
        values, indices = both = ours(dims)(x, asked, return_indices=True)
        expected = theirs(dims)(x, asked, return_indices=True)
        case = (x.dtype, x.shape, x.stride(), asked)
        for right in (adaptive_max_pool(x, pooled), expected):
            # PyTorch's kernels write any NaN for float16 and bfloat16.
            exactly = {"rtol": 0, "atol": 0, "equal_nan": True, "check_device": False}
            assert_close(both, right, **exactly)
        assert steps(values) == steps(indices) == steps(expected[0]), case
        assert same(module(asked)(x), values), case
        assert same(ours(dims)(x, asked), values), case
        smaller = module(asked, True, index_dtype=torch.int32)(x)
        assert all_same(smaller, (values, indices.int())), case


@both_ways
@every_rank
def test_multiples_of_the_output_are_max_pooled(
    real_device: str, dims: int, rng: random.Random
) -> None:
    """Results and gradients are torch.nn's. The backward keeps the smallest indices."""
    for _ in range(scaled(40)):
        pooled = tuple(rng.choice((1, 1, 2, 3)) for _ in range(dims))
        window = tuple(rng.randint(1, (300, 20, 7)[dims - 1]) for _ in range(dims))
        sizes = tuple(m * k for m, k in zip(pooled, window, strict=True))
        x = distinct(torch.empty(*random_leading(rng), *sizes, dtype=torch.float64))
        x = laid_out(x, rng.choice(LAYOUTS), dims).to(real_device).requires_grad_()
        expected = theirs(dims)(x, pooled, return_indices=True)
        torch.use_deterministic_algorithms(False)  # torch.nn's backward on CUDA raises under them
        (right,) = torch.autograd.grad(expected[0].sum(), x)
        torch.use_deterministic_algorithms(True)
        smallest = torch.uint8 if math.prod(window) <= 256 else torch.int32
        case = (x.shape, x.stride(), pooled)
        for returned, kept in ((False, smallest), (True, torch.int64)):
            saved: list[torch.dtype] = []
            keep = lambda tensor, saved=saved: saved.append(tensor.dtype) or tensor  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                results = ours(dims)(x, pooled, return_indices=returned)
            values = results[0] if returned else results
            assert saved == [kept], case
            assert all_same(results, expected if returned else expected[0]), case
            assert steps(values) == steps(expected[0]), case
            assert same(torch.autograd.grad(values.sum(), x)[0], right), case


def test_a_gradient_of_one_position_has_the_layout_of_the_input(device: str) -> None:
    """Its own strides are those of any layout."""
    x = torch.rand(2, 8, 5, 7, device=device).contiguous(memory_format=torch.channels_last)
    values = F.adaptive_max_pool2d(x.requires_grad_(), 1)
    (gradient,) = torch.autograd.grad(values, x, torch.ones(2, 8, 1, 1, device=device))
    assert gradient.stride() == x.stride()


@both_ways
@pytest.mark.parametrize(("dims", "leading", "size"), [(1, (0, 2), 3), (2, (2, 3), 0)])
def test_empty_batches_and_empty_outputs(dims: int, leading: Sizes, size: int) -> None:
    x = torch.rand(*leading, *[5] * dims)
    got, expected = (of(dims)(x, size, return_indices=True) for of in (ours, theirs))
    assert all_same(got, expected)
    assert ours(dims)(x.requires_grad_(), size).shape == expected[0].shape


def test_only_indices_that_are_returned_have_to_fit() -> None:
    x = torch.empty(1, 2**31, device="meta")
    for size in (3, 2**29):  # windows of two sizes, and of one
        assert ours(1)(x, size, index_dtype=torch.int32).shape == (1, size)
        with pytest.raises(ValueError, match=r"got spatial sizes \[2147483648\]; use int64$"):
            ours(1)(x, size, return_indices=True, index_dtype=torch.int32)


@both_ways
@every_rank
def test_derivatives(real_device: str, dims: int, rng: random.Random) -> None:
    for _ in range(scaled(8)):
        sizes, asked, _ = sizes_of(rng, dims, most=(9, 4, 3)[dims - 1])
        x = torch.empty(2, *sizes, dtype=torch.float64, device=real_device)
        x = distinct(x).requires_grad_()
        pool = functools.partial(ours(dims), output_size=asked)
        both = {"check_batched_grad": True}
        assert gradcheck(pool, x, check_forward_ad=True, check_batched_forward_grad=True, **both)
        cube = lambda x, pool=pool: pool(x).pow(3)  # noqa: E731
        assert gradgradcheck(cube, x, check_fwd_over_rev=True, **both)
        batch = torch.stack([distinct(x.detach()), x.detach()])
        assert same(vmap(pool)(batch), torch.stack([*map(pool, batch)]))


@pytest.mark.parametrize(("sizes", "is_pooled"), [((6, 7), True), ((7, 6), False)])
def test_compiled_for_one_size(real_device: str, sizes: Sizes, is_pooled: bool) -> None:
    """The sizes are known, so the graph has a max pooling if all windows have one size."""
    graphs = CompileCounterWithBackend("aot_eager")
    pool = maxunpool_cuda.AdaptiveMaxPool2d((3, 1))
    compiled = torch.compile(pool, fullgraph=True, dynamic=False, backend=graphs)
    x = torch.rand(2, 3, *sizes, device=real_device, requires_grad=True)
    wanted, got = (torch.autograd.grad(of(x).sum(), x)[0] for of in (pool, compiled))
    assert same(got, wanted)
    assert ("maxunpool_cuda.max_pool." in str(graphs.graphs[-1].graph)) == is_pooled


@pytest.mark.parametrize(("dims", "size"), [(1, 3), (2, 1), (3, 4)])
def test_compiled_and_exported(real_device: str, dims: int, size: int) -> None:
    """One graph serves all sizes. Decomposed, it has no operator of this package."""
    open_sizes = [{d: torch.export.Dim.DYNAMIC for d in range(dims + 2) if d != 1}]
    pool = getattr(maxunpool_cuda, f"AdaptiveMaxPool{dims}d")(size, True, index_dtype=torch.int32)
    x = torch.rand(11, 13, *[5] * dims, device=real_device)
    program = torch.export.export(pool, (x,), dynamic_shapes=open_sizes, strict=dims == 2)
    decomposed = program.run_decompositions(maxunpool_cuda.export.decompositions())
    assert "maxunpool_cuda" in str(program.graph)
    assert "maxunpool_cuda" not in str(decomposed.graph)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(pool, fullgraph=True, dynamic=True, backend=graphs)
    for batch, length in ((11, 5), (12, 6), (14, 8)):
        x = torch.rand(batch, 13, *[length] * dims, device=real_device, requires_grad=True)
        expected = pool(x)
        for form in (program.module(), decomposed.module(), compiled):
            assert all_same(form(x), expected), (x.shape, form)
        wanted, got = (torch.autograd.grad(of(x)[0].sum(), x)[0] for of in (pool, compiled))
        assert same(got, wanted), x.shape
    assert graphs.frame_count == 1
