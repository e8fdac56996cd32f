"""Derivatives of every order, with duplicate indices, which PyTorch's backward gets wrong."""

import random

import pytest
import torch
from cases import INDEX_DTYPES, Case, random_case, same, some
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

REDUCES = ("last", "sum", "mean")


def differentiable_case(rng: random.Random, reduce: str, dtype: torch.dtype, offsets: bool) -> Case:
    while True:
        case = random_case(rng, reduce=reduce, dtypes=(dtype,), most_cells=12, offsets=offsets)
        duplicates = case.positions.unique().numel() < case.indices.numel()
        if duplicates and case.grad_output.numel() < 200 and case.input.numel() < 50:
            return case


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients(device: str, dtype: torch.dtype, reduce: str, rng: random.Random) -> None:
    for offsets in (False, True) * some(2):
        case = differentiable_case(rng, reduce, dtype, offsets)
        indices = case.indices.to(device)
        arguments = case.geometry.arguments(reduce)
        for function, values in (
            (_ops.max_unpool, case.input),
            (_ops.max_unpool_backward, case.grad_output),
        ):
            x = values.to(device).detach().requires_grad_()
            call = (x, indices, *arguments)
            assert gradcheck(function, call, check_forward_ad=True, check_batched_grad=True)
            assert gradgradcheck(function, call, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_overlapping_windows_give_the_gradient_to_the_winner(
    device: str, index_dtype: torch.dtype
) -> None:
    """With windows of 3 and a stride of 1, one maximum is in three windows."""
    x = torch.tensor([[1.0, 2, 9, 3, 1]], device=device)
    pooled, indices = torch.nn.functional.max_pool1d(x, 3, 1, return_indices=True)
    assert indices.tolist() == [[2, 2, 2]]
    if index_dtype == torch.uint8:
        indices -= torch.arange(3, device=device)
    indices = indices.to(index_dtype)
    pooled.requires_grad_()
    for reduce, value, gradient in (
        ("last", 9.0, [0, 0, 7]),
        ("sum", 27.0, [7, 7, 7]),
        ("mean", 9.0, [7 / 3] * 3),
    ):
        output = F.max_unpool1d(pooled, indices, 3, 1, reduce=reduce)
        assert output.tolist() == [[0, 0, value, 0, 0]]
        (grad,) = torch.autograd.grad(output[0, 2] * 7, pooled)
        assert grad.tolist() == [torch.tensor(gradient).tolist()]


def test_sum_is_the_backward_of_max_pooling(rng: random.Random) -> None:
    x = torch.rand(2, 3, 9, 11, dtype=torch.float64, requires_grad=True)
    pooled = torch.nn.functional.max_pool2d(x, 3, 2, 1)
    grad = torch.rand_like(pooled)
    (expected,) = torch.autograd.grad(pooled, x, grad)
    for dtype in INDEX_DTYPES:
        _, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=dtype)
        assert same(F.max_unpool2d(grad, indices, 3, 2, 1, (9, 11), reduce="sum"), expected)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_tangents_that_come_after_the_operator(index_dtype: torch.dtype) -> None:
    """Forward over reverse, where only the gradient of the output has a tangent."""
    x = torch.rand(1, 1, 2, 2, requires_grad=True)
    indices = torch.tensor([[[[0, 2], [8, 2]]]], dtype=index_dtype)
    weight, tangent = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 4, 4)
    output = F.max_unpool2d(x, indices, 3, 1)
    with forward_ad.dual_level():
        loss = (output * forward_ad.make_dual(weight, tangent)).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        found = forward_ad.unpack_dual(gradient).tangent
    assert same(found, torch.autograd.grad(F.max_unpool2d(x, indices, 3, 1), x, tangent)[0])


def test_no_graph_without_gradients() -> None:
    x = torch.rand(1, 1, 2, requires_grad=True)
    indices = torch.tensor([[[0, 3]]])
    with torch.no_grad():
        assert not F.max_unpool1d(x, indices, 2).requires_grad
    assert F.max_unpool1d(x, indices, 2).requires_grad
    assert not F.max_unpool1d(x.detach(), indices, 2).requires_grad
    integers = torch.ones(1, 1, 2, dtype=torch.int32)
    assert not F.max_unpool1d(integers, indices, 2).requires_grad


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_saved_indices_must_not_change(index_dtype: torch.dtype) -> None:
    x = torch.rand(1, 1, 2, requires_grad=True)
    indices = torch.tensor([[[0, 1]]], dtype=index_dtype)
    output = F.max_unpool1d(x, indices, 2)
    indices += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_operators_are_each_others_transpose(rng: random.Random) -> None:
    """<A x, y> == <x, A^T y>, exactly, on whole numbers."""
    for _ in range(some(50)):
        case = random_case(rng, reduce=rng.choice(("last", "sum")), dtypes=(torch.int64,))
        arguments = case.geometry.arguments(case.reduce)
        x, y = case.input % 1000, case.grad_output % 1000
        left = (_ops.max_unpool(x, case.indices, *arguments) * y).sum()
        right = (x * _ops.max_unpool_backward(y, case.indices, *arguments)).sum()
        assert left == right


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_compiled_training_step_is_the_eager_one(index_dtype: torch.dtype) -> None:
    unpool = maxunpool_cuda.MaxUnpool2d(3, 2)
    x = torch.rand(2, 3, 4, 4, requires_grad=True)
    indices = torch.randint(0, 9, x.shape, dtype=index_dtype)
    weight = torch.rand(2, 3, 9, 9)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (unpool(x, indices) * weight).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(compiled(x), x)
    assert same(got, expected)
