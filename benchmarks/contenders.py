# SPDX-License-Identifier: BSD-3-Clause
"""Who is timed, and how a case is called and differentiated."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import maxunpool_cuda.functional

from .cases import EVERY_DTYPE, Case
from .data import Data

OURS, CLONE, TORCH = "maxunpool_cuda", "clone", "torch.nn"
INDUCTOR = "torch.compile"
FLAG_GEMS = "FlagGems"  # PyTorch's operators in Triton, https://github.com/flagos-ai/FlagGems

Call = Callable[[], Any]
# From values and indices to results, of which the first is differentiated.
Function = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def call_of(case: Case, function: Function, data: Data) -> Call:
    """A call in the case's direction. For the gradient alone the forward is called here."""
    if data.grad_output is None:
        return lambda: function(data.input, data.indices)
    leaf = data.input.detach().requires_grad_()
    if case.direction == "backward":
        kept = function(leaf, data.indices)[0]
        # The gradient needs the shape of the result, and not its memory, which is most of a set.
        kept.untyped_storage().resize_(0)
        return lambda: torch.autograd.grad(kept, leaf, data.grad_output, retain_graph=True)

    def both() -> tuple[Tensor, ...]:
        result = function(leaf, data.indices)[0]
        return result.detach(), *torch.autograd.grad(result, leaf, data.grad_output)

    return both


def clone(case: Case, device: str) -> Call:
    """The yardstick: each operator's useful bytes, read and written by a clone."""
    words = -(-case.useful_bytes // (8 * case.operators))  # 4 bytes read, 4 written
    # Memory that was never written reads as one page of zeros.
    source = torch.ones(words, device=device)
    return lambda: [source.clone() for _ in range(case.operators)]


def functions(case: Case, device: str) -> dict[str, Function]:
    """Everyone who can do the case on the device."""
    able = {name: function_of(case, name) for name in (OURS, TORCH)}
    if not left_out(device) and case.direction == "forward" and case.index_dtype == "int64":
        able |= flag_gems(case)
    able |= workarounds(case)
    if case.returns_values and device == "cuda":
        torch.compiler.reset()  # after eight compilations of a function all others stay eager
        able[INDUCTOR] = torch.compile(function_of(case, TORCH), dynamic=False)
    return able


def function_of(case: Case, name: str) -> Function:
    """The case by the functions of torch.nn, or by this package's."""
    module: Any = torch.nn.functional if name == TORCH else maxunpool_cuda.functional
    window = (case.kernel_size, case.stride, case.padding)
    unpooled_by = case.unpooled_by or window
    pool_nd, unpool_nd = (getattr(module, f"max_{what}{case.rank}d") for what in ("pool", "unpool"))
    adaptive_nd = getattr(module, f"adaptive_max_pool{case.rank}d")
    options = {"dilation": case.dilation, "return_indices": not case.returns_values}
    if name == OURS:
        options["index_dtype"] = getattr(torch, case.index_dtype)

    def function(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        if case.operation == "adaptive":
            return (adaptive_nd(values, case.pooled[2:]),)
        if case.operation == "values":
            return (pool_nd(values, *window, **options),)
        if case.operation != "unpool":
            values, indices = pool_nd(values, *window, **options)
        if case.operation == "pool":
            return values, indices
        return (unpool_nd(values, indices, *unpooled_by, output_size=case.shape[2:]),)

    return function


def workarounds(case: Case) -> dict[str, Function]:
    """What may stand in for a call of torch.nn that deterministic mode refuses, in training."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    is_usual = (case.dtype, case.index_dtype, case.layout) == ("float32", "int64", "contiguous")
    if not is_usual or case.direction != "both":
        return {}
    if case.operation == "values" and case.rank == 3:
        found["unfold, max"] = lambda x, _: unfolded(x, case)
        if case.window == "2x2x2/2":
            found["two 2d pools"] = lambda x, _: two_pools(x)
    if case.operation == "adaptive" and case.pooled[2:] == (1, 1):
        found["amax"] = lambda x, _: x.amax((2, 3), keepdim=True)
    is_even = case.window in ("2x2/2", "2x2x2/2")
    if case.operation == "unpool" and case.layer in EVERY_DTYPE and is_even:
        found["scatter"] = lambda x, indices: scattered(x, indices, case)
    return {name: lambda *given, of=of: (of(*given),) for name, of in found.items()}


def two_pools(x: Tensor) -> Tensor:
    """``max_pool3d(x, 2)`` by PyTorch's pools of planes: rows and columns, then depth."""
    slices = torch.nn.functional.max_pool2d(x.flatten(0, 1), 2)
    pooled = torch.nn.functional.max_pool2d(slices.flatten(2), (2, 1))
    return pooled.view(*x.shape[:2], -1, *slices.shape[2:])


def unfolded(x: Tensor, case: Case) -> Tensor:
    """Pooling by every window written out."""
    x = torch.nn.functional.pad(x, [case.padding] * (2 * case.rank), value=-torch.inf)
    for dim in range(2, 2 + case.rank):
        x = x.unfold(dim, case.kernel_size, case.stride)
    return x.flatten(2 + case.rank).max(-1).values


def scattered(x: Tensor, indices: Tensor, case: Case) -> Tensor:
    """Unpooling by PyTorch's scatter, which is right where windows do not overlap."""
    zeros = x.new_zeros(case.shape).flatten(2)
    return zeros.scatter(2, indices.flatten(2), x.flatten(2)).view(case.shape)


@cache
def left_out(device: str) -> str:
    """Who cannot be timed here, and why; nothing if everyone can."""
    if device == "cpu":
        return f"{FLAG_GEMS}: needs a GPU"
    try:
        importlib.import_module("flag_gems.ops")
    except Exception as error:  # it is not installed, or does not fit the PyTorch that is
        return f"{FLAG_GEMS}: {type(error).__name__}: {error}"
    return ""


def flag_gems(case: Case) -> dict[str, Function]:
    """FlagGems' own function for a forward. If its release has none of that name, a call fails."""
    pool = f"max_pool{case.rank}d_with_indices"
    window = (case.kernel_size, case.stride, case.padding, case.dilation)
    name, *arguments = {
        "unpool": (f"max_unpool{case.rank}d", case.shape[2:]),
        "pool": (pool, *window),
        "values": (pool, *window),
        "adaptive": (f"adaptive_max_pool{case.rank}d", case.pooled[2:]),
    }[case.operation]

    def function(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        operator = getattr(importlib.import_module("flag_gems.ops"), name)
        if case.operation == "unpool":
            return (operator(values, indices, *arguments),)
        results = operator(values, *arguments)
        return results if case.operation == "pool" else results[:1]

    return {FLAG_GEMS: function}
