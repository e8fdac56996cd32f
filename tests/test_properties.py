"""Properties that hold for any geometry and any indices, searched for counterexamples."""

import math
import random

import pytest
import torch
from cases import (
    ARITHMETIC,
    INDEX_DTYPES,
    MOVABLE,
    Geometry,
    laid_out,
    positions_of,
    random_offsets,
    random_values,
    same,
    some,
)
from reference import default_output_size, max_unpool, max_unpool_backward

from maxunpool_cuda import _ops

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis searches for counterexamples")
from hypothesis import HealthCheck, assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SETTINGS = settings(max_examples=some(150), deadline=None, suppress_health_check=list(HealthCheck))
POOLS = {
    1: torch.nn.functional.max_pool1d,
    2: torch.nn.functional.max_pool2d,
    3: torch.nn.functional.max_pool3d,
}


@pytest.fixture(autouse=True)
def hypothesis_seed(request: pytest.FixtureRequest, rng: random.Random) -> None:
    """Hypothesis draws from the seed of all tests."""
    hypothesis.seed(rng.getrandbits(64))(request.function)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    dims = draw(st.integers(1, 3))

    def ints(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    pooled, kernel, stride = ints(1, 5), ints(1, 4), ints(1, 5)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    default = default_output_size(pooled, kernel, stride, padding)
    assume(all(d + s > 1 for d, s in zip(default, stride, strict=True)))
    output = tuple(
        draw(st.integers(max(1, d - s + 1), d + s - 1))
        for d, s in zip(default, stride, strict=True)
    )
    return Geometry(pooled, kernel, stride, padding, output)


@st.composite
def calls(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]
) -> tuple[Geometry, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A geometry, an input, indices, a gradient of the output, and the positions of the indices.

    Which are any in the plane, or any offsets in the windows that lead there.
    """
    geometry = draw(geometries())
    leading = draw(st.sampled_from([(1,), (2,), (1, 2), (2, 3), (0, 2)]))
    plane = math.prod(geometry.output)
    cells = math.prod(leading) * math.prod(geometry.pooled)
    dtype = draw(st.sampled_from(dtypes))
    layout = draw(st.sampled_from(["contiguous", "channels_last", "strided"]))
    rng = draw(st.randoms(use_true_random=False))
    index_dtype = draw(st.sampled_from(INDEX_DTYPES))
    indices = random_offsets(rng, geometry, leading) if index_dtype == torch.uint8 else None
    if indices is not None:
        positions = positions_of(indices, geometry)
    else:
        numbers = draw(st.lists(st.integers(0, plane - 1), min_size=cells, max_size=cells))
        positions = torch.tensor(numbers).long().reshape(*leading, *geometry.pooled)
        indices = positions.to(torch.int32 if index_dtype == torch.int32 else torch.int64)
    tensors = (
        random_values(rng, (*leading, *geometry.pooled), dtype),
        indices,
        random_values(rng, (*leading, *geometry.output), dtype),
    )
    return (geometry, *(laid_out(t, layout, geometry.dims) for t in tensors), positions)


@SETTINGS
@given(calls(MOVABLE))
def test_last_is_the_reference(call: tuple) -> None:
    geometry, x, indices, grad, positions = call
    arguments = geometry.arguments("last")
    output = _ops.max_unpool(x, indices, *arguments)
    assert same(output, max_unpool(x, positions, geometry.output, "last"))
    gathered = _ops.max_unpool_backward(grad, indices, *arguments)
    assert same(gathered, max_unpool_backward(grad, positions, geometry.output, "last"))


@SETTINGS
@given(calls(ARITHMETIC), st.sampled_from(["sum", "mean"]))
def test_sums_are_the_reference(call: tuple, reduce: str) -> None:
    geometry, x, indices, grad, positions = call
    arguments = geometry.arguments(reduce)
    output = _ops.max_unpool(x, indices, *arguments)
    assert same(output, max_unpool(x, positions, geometry.output, reduce))
    gathered = _ops.max_unpool_backward(grad, indices, *arguments)
    assert same(gathered, max_unpool_backward(grad, positions, geometry.output, reduce))


@SETTINGS
@given(calls((torch.int64,)), st.sampled_from(["last", "sum"]))
def test_adjointness(call: tuple, reduce: str) -> None:
    """<A x, y> == <x, A^T y>, exactly: integers wrap on both sides."""
    geometry, x, indices, y, _ = call
    arguments = geometry.arguments(reduce)
    left = (_ops.max_unpool(x, indices, *arguments) * y).sum()
    assert left == (x * _ops.max_unpool_backward(y, indices, *arguments)).sum()


@SETTINGS
@given(calls((torch.float32,)))
def test_a_gather_after_a_scatter_changes_nothing_more(call: tuple) -> None:
    """Scattered, gathered and scattered again: what was there is there, bit for bit."""
    geometry, x, indices, *_ = call
    arguments = geometry.arguments("last")
    output = _ops.max_unpool(x, indices, *arguments)
    gathered = _ops.max_unpool_backward(output, indices, *arguments)
    assert same(_ops.max_unpool(gathered, indices, *arguments), output)
    assert same(_ops.max_unpool_backward(output, indices, *arguments), gathered)


@SETTINGS
@given(geometries(), st.randoms(use_true_random=False))
def test_unpooling_keeps_the_maxima(geometry: Geometry, rng: object) -> None:
    """Where the pool is one, unpool(pool(x)) is x at the maxima and zero elsewhere."""
    x = random_values(rng, (2, 3, *geometry.output), torch.float64)
    reach = zip(geometry.output, geometry.padding, geometry.kernel, strict=True)
    assume(all(n + 2 * p >= k for n, p, k in reach))
    window = (geometry.kernel, geometry.stride, geometry.padding)
    _, positions = POOLS[geometry.dims](x, *window, return_indices=True)
    is_maximum = torch.zeros_like(x, dtype=torch.bool).flatten(2)
    is_maximum.scatter_(2, positions.flatten(2), True)
    expected = torch.where(is_maximum.reshape(x.shape), x, 0.0)
    for dtype in INDEX_DTYPES:
        pooled, indices = _ops.max_pool(x, *window, (1,) * geometry.dims, False, dtype)
        output = _ops.max_unpool(pooled, indices, geometry.output, *window, "last")
        assert same(output, expected)


@settings(SETTINGS, max_examples=some(30))
@given(calls((torch.bfloat16,)), st.sampled_from(["last", "sum", "mean"]))
def test_thread_count_does_not_matter(call: tuple, reduce: str) -> None:
    geometry, x, indices, *_ = call
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(_ops.max_unpool(x, indices, *geometry.arguments(reduce)))
    finally:
        torch.set_num_threads(before)
    assert same(*results)
