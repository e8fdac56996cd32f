# SPDX-License-Identifier: BSD-3-Clause
"""Who is timed, and how a case is called and differentiated."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import maxunpool_cuda.functional

from .cases import Case
from .data import Data

OURS, CLONE, TORCH, TRITON = "maxunpool_cuda", "clone", "torch.nn", "Triton"
INDUCTOR = "torch.compile"

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
    called = (device, case.layout, case.operation, case.direction)
    naive = called == ("cuda", "contiguous", "unpool", "forward") and case.index_dtype != "uint8"
    if naive and find_spec("triton"):
        from .triton_scatter import max_unpool

        able[TRITON] = lambda *tensors: (max_unpool(*tensors, case.shape[2:]),)
    if case.operation == "values" and device == "cuda":
        torch.compiler.reset()  # after eight compilations of a function all others stay eager
        able[INDUCTOR] = torch.compile(function_of(case, TORCH), dynamic=False)
    return able


def function_of(case: Case, name: str) -> Function:
    """The case by the functions of torch.nn, or by this package's."""
    module: Any = torch.nn.functional if name == TORCH else maxunpool_cuda.functional
    window = (case.kernel_size, case.stride, case.padding)
    unpooled_by = case.unpooled_by or window
    pool_nd, unpool_nd = (getattr(module, f"max_{what}{case.rank}d") for what in ("pool", "unpool"))
    options = {"dilation": case.dilation, "return_indices": case.operation != "values"}
    if name == OURS:
        options["index_dtype"] = getattr(torch, case.index_dtype)

    def function(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        if case.operation == "values":
            return (pool_nd(values, *window, **options),)
        if case.operation != "unpool":
            values, indices = pool_nd(values, *window, **options)
        if case.operation == "pool":
            return values, indices
        return (unpool_nd(values, indices, *unpooled_by, output_size=case.shape[2:]),)

    return function
