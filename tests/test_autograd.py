"""Derivatives of every order, with duplicate indices, which PyTorch's backward gets wrong."""

import itertools
import random

import pytest
import torch
from cases import (
    EXAMPLES,
    INDEX_DTYPES,
    LAYOUTS,
    OPERATORS,
    REDUCES,
    Example,
    draw_differentiable,
    laid_out,
    same,
    some,
)
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import jvp, vmap

import maxunpool_cuda.functional as F

DIFFERENTIABLE = [
    (operator, dtype, reduce)
    for operator in OPERATORS
    for dtype in (torch.float64, torch.complex128)
    for reduce in REDUCES
    if operator != "pool" or (dtype, reduce) == (torch.float64, "last")
]


@pytest.mark.parametrize(("operator", "dtype", "reduce"), DIFFERENTIABLE, ids=str)
def test_gradients(
    device: str, operator: str, dtype: torch.dtype, reduce: str, rng: random.Random
) -> None:
    chosen = {} if operator == "pool" else {"reduce": reduce}
    calls = draw_differentiable(operator, rng, dtype, **chosen)
    for call in itertools.islice(calls, some(24 if operator == "pool" else 4)):
        x, *others = (tensor.to(device) for tensor in call.tensors)
        x = x.detach().requires_grad_()

        def values(x: torch.Tensor) -> torch.Tensor:
            return call.on(x, *others)[0]  # noqa: B023

        batched = {"check_batched_grad": True}
        assert gradcheck(
            values, x, check_forward_ad=True, check_batched_forward_grad=True, **batched
        )
        assert gradgradcheck(lambda x: values(x).sin(), x, check_fwd_over_rev=True, **batched)


@pytest.mark.parametrize("window", [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_pooling_are_torchs(
    device: str, layout: str, window: tuple[int, int, int, int]
) -> None:
    """And unpooling's sum. As on the CPU: on a GPU theirs depends on the order of atomics."""
    x = laid_out(torch.randint(0, 9, (2, 3, 11, 12)).float(), layout, 2).requires_grad_()
    expected = torch.nn.functional.max_pool2d(x, *window)
    weight = torch.randint(-9, 9, expected.shape).float()
    (want,) = torch.autograd.grad(expected, x, weight)
    x, weight = x.detach().to(device).requires_grad_(), weight.to(device)
    assert same(torch.autograd.grad(F.max_pool2d(x, *window), x, weight)[0], want)
    for dtype in INDEX_DTYPES:
        if dtype == torch.uint8 and window[3] > 1:
            continue
        values, indices = F.max_pool2d(x, *window, return_indices=True, index_dtype=dtype)
        assert same(torch.autograd.grad(values, x, weight)[0], want)
        if window[3] == 1:
            summed = F.max_unpool2d(weight, indices, *window[:3], x.shape, reduce="sum")
            assert same(summed, want)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_tangents_that_come_after_the_operator(example: Example) -> None:
    """Forward over reverse, where only the gradient of the output has a tangent."""
    x, *indices = example.tensors()
    x.requires_grad_()
    output = example.values(x, *indices)
    weight, tangent = torch.rand_like(output), torch.rand_like(output)
    with forward_ad.dual_level():
        loss = (output * forward_ad.make_dual(weight, tangent)).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        found = forward_ad.unpack_dual(gradient).tangent
    assert same(found, torch.autograd.grad(example.values(x, *indices), x, tangent)[0])


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_no_graph_without_gradients(example: Example) -> None:
    x, *indices = example.tensors()
    assert not example.values(x, *indices).requires_grad
    assert not example.values(x.int(), *indices).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not example.values(x, *indices).requires_grad
    output = example.values(x, *indices)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_gradients_of_an_empty_batch(device: str, example: Example) -> None:
    x, *indices = (tensor[:0] for tensor in example.tensors(device))
    output = example.values(x.requires_grad_(), *indices)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert grad.shape == x.shape


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_saved_indices_must_not_change(example: Example) -> None:
    x, *indices = example.tensors()
    values, changed = (*example(x.requires_grad_(), *indices), *indices)
    changed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_indices_have_no_gradient(device: str, index_dtype: torch.dtype) -> None:
    example = Example("pool", index_dtype)
    (x,) = example.batches(device)
    for values, indices in (example(x[0].requires_grad_()), vmap(example)(x.requires_grad_())):
        assert values.requires_grad
        assert not indices.requires_grad
    with forward_ad.dual_level():
        values, indices = map(forward_ad.unpack_dual, example(forward_ad.make_dual(x[0], x[1])))
        assert values.tangent is not None
        assert indices.tangent is None


def test_without_indices_the_backward_keeps_small_ones(device: str) -> None:
    x = torch.rand(1, 2, 18, 18, device=device, requires_grad=True)
    huge = torch.empty(1, 2**16, 2**15, device="meta", requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for window in ((2,), (16, 1), ((2, 2), (2, 2)), (17, 1), (2, 2, 0, 2)):
            F.max_pool2d(x, *window)
        F.max_pool2d(huge, 2)
        F.max_pool2d(huge, 2, 2, 0, 2)
    small, wide = [torch.uint8] * 3 + [torch.int32] * 2, [torch.uint8, torch.int64]
    assert [t.dtype for t in kept] == small + wide


def test_windows_without_a_cell_have_no_derivative(device: str) -> None:
    """PyTorch's index is no place that the gradient of nothing could go to."""
    x = torch.ones(1, 1, 4, 2, device=device)
    words = r"^max_pool2d: expected every window to hold"
    for window in (((1, 2), 1, (0, 1), (1, 3)), ((2, 1), 1, (1, 0), (5, 1))):
        with pytest.raises(NotImplementedError, match=words):
            F.max_pool2d(x.requires_grad_(), *window)
        with pytest.raises(NotImplementedError, match=words):
            jvp(lambda x, window=window: F.max_pool2d(x, *window), (x.detach(),), (x.detach(),))
    F.max_pool2d(x.requires_grad_(), (2, 1), 1, (1, 0), (4, 1)).sum().backward()
    assert x.grad.flatten().tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
