# SPDX-License-Identifier: BSD-3-Clause
"""Adaptive max pooling: definition, torch.nn's results, derivatives, graphs."""

import functools
import random
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from cases import LAYOUTS, all_same, distinct, laid_out, random_input, random_leading, same, scaled
from reference import Sizes, adaptive_max_pool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.testing import assert_close

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _operators

every_rank = pytest.mark.parametrize("dims", [1, 2, 3])


def ours(dims: int) -> Callable[..., Any]:
    return getattr(F, f"adaptive_max_pool{dims}d")


def theirs(dims: int) -> Callable[..., Any]:
    return getattr(nn.functional, f"adaptive_max_pool{dims}d")


@pytest.fixture(params=["torch.nn's", "composed"])
def way(request: pytest.FixtureRequest) -> None:
    if request.param == "composed":
        request.getfixturevalue("composed")


both_ways = pytest.mark.usefixtures("way")


def steps(tensor: Tensor) -> list[int]:
    """The strides that say where an element is."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def random_sizes(rng: random.Random, dims: int, most: int) -> tuple[Sizes, Any, Sizes]:
    """Sizes of a plane, an output_size that may have None, and the pooled sizes it asks for."""
    sizes = tuple(rng.randint(1, most) for _ in range(dims))
    asked: list[int | None] = []
    for size in sizes:
        divisors = [m for m in range(1, size + 1) if size % m == 0]  # then windows have one size
        asked.append(rng.choice((None, rng.choice(divisors), rng.randint(1, 2 * most))))
    pooled = tuple(n if m is None else m for n, m in zip(sizes, asked, strict=True))
    return sizes, asked if dims > 1 else pooled[0], pooled  # torch.nn's 1d takes no None


@both_ways
@every_rank
def test_the_definition_and_torchs(real_device: str, dims: int, rng: random.Random) -> None:
    """Values and indices are the reference's, strides torch.nn's. Ties, infinities and NaNs."""
    for _ in range(scaled(160)):
        sizes, asked, pooled = random_sizes(rng, dims, most=(40, 12, 6)[dims - 1])
        x = random_input(rng, (*random_leading(rng), *sizes), rng.choice(cases.FLOATS))
        x = cases.moved(laid_out(x, rng.choice(LAYOUTS), dims), real_device)
        values, indices = ours(dims)(x, asked, return_indices=True)
        # PyTorch's kernels write any NaN for float16 and bfloat16.
        exactly = {"rtol": 0, "atol": 0, "equal_nan": True, "check_device": False}
        assert_close((values, indices), adaptive_max_pool(x, pooled), **exactly)
        case = (x.dtype, x.shape, x.stride(), asked)
        assert steps(values) == steps(indices) == steps(theirs(dims)(x, asked)), case
        assert same(ours(dims)(x, asked), values), case
        small = ours(dims)(x, asked, return_indices=True, index_dtype=torch.int32)
        assert all_same(small, (values, indices.int())), case


@pytest.mark.parametrize(("rows", "dtype"), [(48, torch.uint8), (51, torch.int32)])
def test_the_backward_of_windows_of_one_size_keeps_small_indices(
    rows: int, dtype: torch.dtype, real_device: str
) -> None:
    """As that of max pooling does. Windows have 16 rows or 17, and 16 columns."""
    x = torch.rand(2, 3, rows, 32, device=real_device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.adaptive_max_pool2d(x, (3, 2))
    assert [each.dtype for each in kept] == [dtype]


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
        sizes, asked, _ = random_sizes(rng, dims, most=(9, 4, 3)[dims - 1])
        x = torch.empty(2, *sizes, dtype=torch.float64, device=real_device)
        x = distinct(x).requires_grad_()
        pool = functools.partial(ours(dims), output_size=asked)
        batched = {"check_batched_grad": True}
        assert gradcheck(pool, x, check_forward_ad=True, check_batched_forward_grad=True, **batched)
        assert gradgradcheck(pool, x, check_fwd_over_rev=True, **batched)
        batch = torch.stack([distinct(x.detach()), x.detach()])
        assert same(vmap(pool)(batch), torch.stack([pool(each) for each in batch])), "vmap"


def test_forward_mode_where_pytorch_does_not_tell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release may lack the private name."""
    x = distinct(torch.empty(1, 1, 3, 5, dtype=torch.float64))
    pool = maxunpool_cuda.AdaptiveMaxPool2d(2)
    jacobian = functools.partial(torch.autograd.functional.jacobian, pool, x, vectorize=True)
    expected = jacobian()
    monkeypatch.setattr(_operators, "forward_ad", None)
    assert same(jacobian(strategy="forward-mode"), expected)


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
def test_compiled_for_all_sizes(real_device: str, dims: int, size: int) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    pool = getattr(maxunpool_cuda, f"AdaptiveMaxPool{dims}d")(size, return_indices=True)
    compiled = torch.compile(pool, fullgraph=True, dynamic=True, backend=graphs)
    for batch, length in ((11, 5), (12, 6), (14, 8)):
        x = torch.rand(batch, 13, *[length] * dims, device=real_device, requires_grad=True)
        got, expected = compiled(x), pool(x)
        assert all_same(got, expected), x.shape
        gradients = (torch.autograd.grad(values.sum(), x) for values, _ in (got, expected))
        assert all_same(*gradients), x.shape
    assert graphs.frame_count == 1


@pytest.mark.parametrize(("dims", "size"), [(1, 3), (2, 1), (3, 4)])
def test_exported_for_all_sizes(real_device: str, dims: int, size: int) -> None:
    """Decomposed, the program has no operator of this package."""
    pool = getattr(maxunpool_cuda, f"AdaptiveMaxPool{dims}d")(size, True, index_dtype=torch.int32)
    x = torch.rand(11, 13, *[5] * dims, device=real_device)
    sizes = {dim: torch.export.Dim.DYNAMIC for dim in range(dims + 2) if dim != 1}
    program = torch.export.export(pool, (x,), dynamic_shapes=[sizes], strict=dims == 2)
    decomposed = program.run_decompositions(maxunpool_cuda.export.decompositions())
    assert "maxunpool_cuda" in str(program.graph)
    assert "maxunpool_cuda" not in str(decomposed.graph)
    for batch, length in ((11, 5), (12, 6), (14, 8)):
        x = torch.rand(batch, 13, *[length] * dims, device=real_device)
        assert all_same(program.module()(x), pool(x)), x.shape
        assert all_same(decomposed.module()(x), pool(x)), x.shape
