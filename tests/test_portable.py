"""The portable form of the operators, on CPU tensors: what devices without our kernels run."""

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import (
    LAYOUTS,
    MOVABLE,
    OPERATORS,
    POOLED,
    REDUCES,
    aimed_case,
    draw_differentiable,
    laid_out,
    random_case,
    some,
    unpool_call,
    with_a_bad_index,
)
from torch.autograd import gradcheck, gradgradcheck

import maxunpool_cuda.functional as F
from maxunpool_cuda import _devices, _ops

OF_ANOTHER_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def elsewhere(operator: Any) -> Any:
    """The operator as it is called, below autograd, for tensors of another device."""
    return functools.partial(operator.redispatch, OF_ANOTHER_DEVICE)


pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")


@pytest.fixture
def only_portable() -> Iterator[None]:
    """Without the CPU's kernels."""
    library = torch.library.Library("maxunpool_cuda", "IMPL")
    for name, kernel in _devices.KERNELS.items():
        library.impl(name, kernel, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.parametrize("key", _devices.DEVICES)
@pytest.mark.parametrize("operator", _devices.KERNELS)
def test_devices_have_kernels(operator: str, key: str) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"maxunpool_cuda::{operator}", key)


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [(name, dtype) for name in OPERATORS for dtype in (POOLED if name == "pool" else MOVABLE)],
    ids=str,
)
def test_agrees_with_the_reference(operator: str, dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(some(12)):
        call = OPERATORS[operator](rng, dtype)
        replace(call, operator=elsewhere(call.operator)).check()


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("window", ["2x2/2", "3x3/4", "3x3/2 padded", "2x2/1"])
def test_usual_windows_agree_with_the_reference(
    window: str, forward: bool, rng: random.Random
) -> None:
    for reduce, offsets in itertools.product(REDUCES, (True, False)):
        case = aimed_case(rng, "channels", window, offsets, torch.float32, reduce)
        call = unpool_call(case, forward)
        replace(call, operator=elsewhere(call.operator)).check()


@pytest.mark.parametrize("operator", OPERATORS)
def test_results_have_the_layout_of_the_kernels(operator: str, rng: random.Random) -> None:
    for layout in LAYOUTS * some(12):
        call = OPERATORS[operator](rng)
        tensors = [laid_out(tensor.contiguous(), layout, call.dims) for tensor in call.tensors]
        results = replace(call, operator=elsewhere(call.operator)).on(*tensors)
        for result, ours in zip(results, call.on(*tensors), strict=True):
            assert result.stride() == ours.stride()


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.usefixtures("only_portable")
def test_gradients(operator: str, reduce: str, rng: random.Random) -> None:
    chosen = {} if operator == "pool" else {"reduce": reduce}
    calls = draw_differentiable(operator, rng, torch.float64, **chosen)
    for call in itertools.islice(calls, some(4)):
        x = call.tensors[0].detach().requires_grad_()
        assert gradcheck(call.values, x, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(lambda x: call.values(x).sin(), x)  # noqa: B023


@pytest.mark.parametrize("operator", [_ops.max_unpool, _ops.max_unpool_backward])
@pytest.mark.parametrize("offsets", [True, False])
def test_bad_indices_raise_as_on_the_cpu(operator: Any, offsets: bool, rng: random.Random) -> None:
    for _ in range(some(60)):
        case, words = with_a_bad_index(random_case(rng, offsets=offsets), rng)
        call = unpool_call(case, operator is _ops.max_unpool)
        with pytest.raises(RuntimeError, match=words):
            replace(call, operator=elsewhere(operator)).on()


def test_bad_arguments_raise_as_on_the_cpu() -> None:
    x, indices = torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    window = ((4, 4), (2, 2), (2, 2), (0, 0))
    for arguments, words in (
        ((x, indices.short(), *window, "last"), "elements in indices should be type int64"),
        ((x, indices[:, :, 1:], *window, "last"), "Expected shape of indices to be same"),
        ((x, indices, (4, 0), *window[1:], "last"), "positive spatial dimensions"),
        ((x, indices, *window, "most"), "expected reduce to be"),
        ((x.bool(), indices, *window, "sum"), "a dtype that adds up"),
        ((x, indices.to("meta"), *window, "last"), "on the same device but got cpu and meta"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words):
            elsewhere(_ops.max_unpool)(*arguments)
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        elsewhere(_ops.max_pool)(x, (2, 2), (2, 2), (2, 2), (1, 1), False, torch.int64)


@pytest.mark.usefixtures("only_portable")
def test_a_round_trip() -> None:
    x = torch.rand(2, 3, 7, 9, requires_grad=True)
    for index_dtype in (torch.int64, torch.int32, torch.uint8):
        pooled, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=index_dtype)
        theirs = torch.nn.functional.max_pool2d(x, 3, 2, 1)
        assert torch.equal(pooled, theirs)
        back = F.max_unpool2d(pooled, indices, 3, 2, 1, output_size=x.shape)
        assert torch.equal(back, torch.where(back != 0, x, 0))
        (grad,) = torch.autograd.grad(back.sum(), x)
        assert grad.sum() == back.count_nonzero()


def test_operators_that_a_device_lacks_are_said_to_be_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "where", Mock(side_effect=NotImplementedError("no aten::where")))
    x = torch.rand(1, 1, 4, 4)
    window = ((2, 2), (2, 2), (0, 0))
    with pytest.raises(
        NotImplementedError, match=r"max_pool2d: expected a device .* no aten::where"
    ):
        elsewhere(_ops.max_pool)(x, *window, (1, 1), False, torch.uint8)
    with pytest.raises(NotImplementedError, match=r"max_unpool2d: expected .* no aten::where"):
        elsewhere(_ops.max_unpool)(x, x.byte(), (8, 8), *window, "last")
