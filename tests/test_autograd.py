# SPDX-License-Identifier: BSD-3-Clause
"""Derivatives of every order, with duplicate indices, which PyTorch's backward gets wrong."""

from random import Random
from typing import Any

import cases
import pytest
import torch
from cases import DIFFERENTIABLE, OPERATORS, Geometry, draw_differentiable, geometry_of, scaled
from failures import check_each
from torch.func import jvp

import maxunpool_cuda.functional as F

FEW_PLANES = ((2,), (1, 2))  # finite differences of more take seconds


@pytest.mark.parametrize(("operator", "reduce"), DIFFERENTIABLE)
def test_gradients(device: str, operator: str, reduce: str, rng: Random) -> None:
    dtypes = [torch.float64, torch.float64 if operator == "pool" else torch.complex128]
    calls = (
        draw_differentiable(rng, operator, dtype, reduce, leading=rng.choice(FEW_PLANES))
        for dtype in dtypes * scaled(6)
    )
    check_each(calls, lambda call: call.verify_gradient(device))


def test_the_gradient_of_two_cells_that_share_an_output(device: str) -> None:
    x = torch.tensor([[[1.0, 5.0, 2.0]]], dtype=torch.float64)  # (batch, channels, cells)
    indices = torch.tensor([[[2, 3, 2]]])
    geometry = geometry_of(pooled=(3,), window=(3, 1, 0))  # kernel, stride and padding
    cases.call_of("unpool", x, indices, geometry=geometry, reduce="last").check_gradient(device)


def test_the_gradient_of_two_windows_that_share_a_maximum(device: str) -> None:
    x = torch.tensor([[[1.0, 5.0, 2.0, 4.0]]], dtype=torch.float64)
    geometry = Geometry.of_pooling(
        sizes=(4,), kernel=(3,), stride=(1,), padding=(0,), dilation=(1,), ceil=False
    )
    cases.call_of("pool", x, geometry=geometry).check_gradient(device)


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_a_graph_keeps_may_not_change(operator: str, rng: Random) -> None:
    """It keeps the indices: those of an unpooling, and those that a pooling returns."""
    call = draw_differentiable(rng, operator, torch.float64)
    x = call.tensors[0].requires_grad_()
    with torch.no_grad():
        assert not call.on(x)[0].requires_grad
    output, *returned = call.on(x)
    (indices,) = returned or call.tensors[1:]
    assert not indices.requires_grad
    indices += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        ({"kernel_size": 16}, torch.uint8),
        ({"kernel_size": 17}, torch.int32),
        ({"kernel_size": 2, "dilation": 2}, torch.int32),
    ],
    ids=str,
)
def test_without_indices_the_backward_keeps_small_ones(
    window: dict[str, Any], dtype: torch.dtype
) -> None:
    x = torch.rand(1, 2, 18, 18, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.max_pool2d(x, **window)
    assert [each.dtype for each in kept] == [dtype]


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(((1, 2), 1, (0, 1), (1, 3)), id="in the columns"),
        pytest.param(((2, 1), 1, (1, 0), (5, 1)), id="in the rows"),
    ],
)
def test_windows_without_an_element_have_no_derivative(window: Any) -> None:
    """The index that PyTorch gives an empty window is no place for a gradient."""
    x = torch.ones(1, 1, 4, 2)
    words = r"^max_pool2d: expected every window to hold"
    with pytest.raises(NotImplementedError, match=words):
        F.max_pool2d(x.requires_grad_(), *window)
    with pytest.raises(NotImplementedError, match=words):
        jvp(lambda x: F.max_pool2d(x, *window), (x.detach(),), (x.detach(),))


def test_windows_that_all_have_an_element_have_a_derivative() -> None:
    """With less dilation than in the test above."""
    x = torch.ones(1, 1, 4, 2, requires_grad=True)
    F.max_pool2d(x, (2, 1), 1, (1, 0), (4, 1)).sum().backward()
    assert x.grad.flatten().tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
