"""Derivatives of every order, with duplicate indices, which PyTorch's backward gets wrong."""

from random import Random

import pytest
import torch
from cases import (
    DIFFERENTIABLE,
    OPERATORS,
    draw,
    draw_differentiable,
    scaled,
)
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import jvp, vmap

import maxunpool_cuda.functional as F

every_operator = pytest.mark.parametrize("operator", OPERATORS)


@pytest.mark.parametrize(
    ("operator", "reduce", "dtype"),
    [
        (operator, reduce, dtype)
        for operator, reduce in DIFFERENTIABLE
        for dtype in (torch.float64, torch.complex128)[: 1 if operator == "pool" else 2]
    ],
    ids=str,
)
def test_gradients(
    real_device: str, operator: str, reduce: str, dtype: torch.dtype, rng: Random
) -> None:
    for _ in range(scaled(24 if operator == "pool" else 4)):
        call = draw_differentiable(rng, operator, dtype, reduce)
        x, *others = (tensor.to(real_device) for tensor in call.tensors)
        x = x.detach().requires_grad_()

        def values(x: torch.Tensor) -> torch.Tensor:
            return call.values(x, *others)  # noqa: B023

        both = {"check_batched_grad": True}
        assert gradcheck(values, x, check_forward_ad=True, check_batched_forward_grad=True, **both)
        assert gradgradcheck(lambda x: values(x).sin(), x, check_fwd_over_rev=True, **both)


@every_operator
def test_graphs_are_kept_where_a_gradient_needs_them(operator: str, rng: Random) -> None:
    call = draw_differentiable(rng, operator, torch.float64)
    x, *indices = (tensor.clone() for tensor in call.tensors)
    assert not call.values(x).requires_grad
    assert not call.values(x.int()).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not call.values(x).requires_grad
    output = call.values(x)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()
    values, changed = (*call.on(x, *indices), *indices)
    changed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


@every_operator
def test_gradients_of_an_empty_batch(operator: str, rng: Random) -> None:
    call = draw(rng, operator, torch.float64, leading=(0, 3))
    x = call.tensors[0].requires_grad_()
    assert torch.autograd.grad(call.values(x).sum(), x)[0].shape == x.shape


def test_indices_have_no_gradient(rng: Random) -> None:
    call = draw_differentiable(rng, "pool", torch.float64, leading=(2, 3, 4))
    (x,) = call.tensors
    for values, indices in (call.on(x[0].requires_grad_()), vmap(call.on)(x.requires_grad_())):
        assert values.requires_grad
        assert not indices.requires_grad
    with forward_ad.dual_level():
        values, indices = map(forward_ad.unpack_dual, call.on(forward_ad.make_dual(x[0], x[1])))
        assert values.tangent is not None
        assert indices.tangent is None


def test_without_indices_the_backward_keeps_small_ones() -> None:
    x = torch.rand(1, 2, 18, 18, requires_grad=True)
    huge = torch.empty(1, 2**16, 2**15, device="meta", requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for window in ((2,), (16, 1), ((2, 2), (2, 2)), (17, 1), (2, 2, 0, 2)):
            F.max_pool2d(x, *window)
        F.max_pool2d(huge, 2)
        F.max_pool2d(huge, 2, 2, 0, 2)
    small, wide = [torch.uint8] * 3 + [torch.int32] * 2, [torch.uint8, torch.int64]
    assert [t.dtype for t in kept] == small + wide


def test_windows_without_an_element_have_no_derivative() -> None:
    """The index that PyTorch gives an empty window is no place for a gradient."""
    x = torch.ones(1, 1, 4, 2)
    words = r"^max_pool2d: expected every window to hold"
    for window in (((1, 2), 1, (0, 1), (1, 3)), ((2, 1), 1, (1, 0), (5, 1))):
        with pytest.raises(NotImplementedError, match=words):
            F.max_pool2d(x.requires_grad_(), *window)
        with pytest.raises(NotImplementedError, match=words):
            jvp(lambda x, window=window: F.max_pool2d(x, *window), (x.detach(),), (x.detach(),))
    F.max_pool2d(x.requires_grad_(), (2, 1), 1, (1, 0), (4, 1)).sum().backward()
    assert x.grad.flatten().tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
