"""Who is timed. Each takes a case and its tensors, and gives the call, or why it has none."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import maxunpool_cuda.functional

from . import model
from .cases import Case
from .data import Data, indices_of, positions

# From what the case differentiates by, and indices, to what it differentiates and other results.
Call = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
OURS, CLONE, TORCH, COMPILED, ONNX, TRITON = (
    "maxunpool_cuda",
    "clone",
    "torch.nn",
    "torch.compile",
    "ONNX Runtime",
    "Triton",
)
PEERS = (TORCH, COMPILED, ONNX, TRITON)


class Unable(Exception):  # noqa: N818
    """A contender does not do the case; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready for a case.

    Attributes:
        calls: one for each copy of the data; each gives a fresh result.
        tensors: what :func:`data.definition` returns, from a result; None: nothing to compare.
        note: what was done beforehand that its user has to do as well.
    """

    calls: Sequence[Callable[[], Any]]
    tensors: Callable[[Any], tuple[Tensor, ...]] | None = tuple
    note: str = ""


Contender = Callable[[Case, Sequence[Data]], Prepared]


def directed(case: Case, data: Data, call: Call) -> Callable[[], tuple[Tensor, ...]]:
    """``call``, or its gradient through autograd, as the case asks for.

    For the gradient alone the forward has been called here, and its graph is kept.
    """
    leaf, indices, grad_output = data.input, data.indices, data.grad_output
    if grad_output is None:
        return lambda: call(leaf, indices)
    leaf = leaf.detach().requires_grad_()
    if case.direction == "backward":
        kept, *_ = call(leaf, indices)
        return lambda: torch.autograd.grad(kept, leaf, grad_output, retain_graph=True)

    def both() -> tuple[Tensor, ...]:
        result, *others = call(leaf, indices)
        return result.detach(), *others, *torch.autograd.grad(result, leaf, grad_output)

    return both


def _call_of(module: Any, case: Case, **options: Any) -> Call:
    """From the functions of ``module``, which is torch.nn.functional or like it."""
    unpool_nd = getattr(module, f"max_unpool{case.rank}d")
    pool_nd = getattr(module, f"max_pool{case.rank}d")
    window = (case.kernel_size, case.stride, case.padding)
    size, dilation = case.shape[2:], case.dilation

    def unpool(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return (unpool_nd(values, indices, *window, output_size=size),)

    def pool(values: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = pool_nd(
            values, *window, dilation, return_indices=True, **options
        )
        return result

    def round_trip(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        pooled, found = pool(values, indices)
        return unpool(pooled, found)

    return {"unpool": unpool, "pool": pool, "round-trip": round_trip}[case.operation]


def ours(case: Case, copies: Sequence[Data]) -> Prepared:
    """This package."""
    index_dtype = getattr(torch, case.index_dtype)
    call = _call_of(maxunpool_cuda.functional, case, index_dtype=index_dtype)
    return Prepared([directed(case, data, call) for data in copies])


def clone(case: Case, copies: Sequence[Data]) -> Prepared:
    """The ceiling: a copy reads and writes as many bytes as the case's call has use for.

    As many copies as there are calls. Every byte has been written before: reading memory never
    written to reads one page of zeros.
    """
    calls = model.calls(case)
    words = -(-model.useful_bytes(case) // (8 * calls))  # 4 bytes that are read and written
    sources = [torch.ones(words, device=copies[0].input.device) for _ in copies]

    def copy(source: Tensor) -> list[Tensor]:
        return [source.clone() for _ in range(calls)]

    return Prepared([functools.partial(copy, source) for source in sources], tensors=None)


def _int64(case: Case, copies: Sequence[Data], call: Call) -> Prepared:
    """PyTorch's: it takes and makes flat int64 indices, whatever the case asks for."""
    if case.index_dtype == "int64":
        return Prepared([directed(case, data, call) for data in copies])
    if case.operation == "unpool":
        wide = [
            Data(data.input, positions(case, data.indices), data.grad_output) for data in copies
        ]
        note = "takes int64 indices only: made beforehand"
        return Prepared([directed(case, data, call) for data in wide], note=note)
    calls = [directed(case, data, call) for data in copies]
    if case.operation == "round-trip" or case.direction == "backward":
        return Prepared(calls, note="its indices are int64")

    def narrow(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values, indices, *gradient = results
        return values, indices_of(case, indices), *gradient

    return Prepared(calls, narrow, note="its indices are int64")


def torch_nn(case: Case, copies: Sequence[Data]) -> Prepared:
    """torch.nn, eager."""
    return _int64(case, copies, _call_of(torch.nn.functional, case))


def torch_compile(case: Case, copies: Sequence[Data]) -> Prepared:
    """torch.compile of torch.nn, for the shapes of this case alone."""
    torch.compiler.reset()
    call = torch.compile(_call_of(torch.nn.functional, case), fullgraph=True, dynamic=False)
    return _int64(case, copies, call)


def onnx_runtime(case: Case, copies: Sequence[Data]) -> Prepared:
    """ONNX Runtime on the CPU."""
    missing = [name for name in ("onnx", "onnxruntime") if not importlib.util.find_spec(name)]
    if missing:
        raise Unable(f"not installed: {', '.join(missing)}")
    if copies[0].input.device.type != "cpu":
        raise Unable("timed on the CPU only")
    if case.operation != "unpool":
        raise Unable("timed unpooling only")
    if case.direction != "forward":
        raise Unable("has no gradient")
    if case.dtype != "float32" or case.layout != "contiguous":
        raise Unable("takes contiguous float32 only")
    peer = importlib.import_module(".onnx_peer", __package__)
    prepared = [peer.prepare(case, data) for data in copies]
    note = "takes int64 indices over the whole tensor: made beforehand"
    return Prepared([call for call, _ in prepared], prepared[0][1], note)


def triton_reason(case: Case, device: str) -> str:
    """Why Triton's scatter, where it is installed, is not timed in the case; empty where it is."""
    if device != "cuda":
        return "needs CUDA"
    if case.operation != "unpool" or case.index_dtype == "uint8":
        return "unpools from flat indices only"
    if case.direction != "forward":
        return "has no gradient"
    return ""


def triton_scatter(case: Case, copies: Sequence[Data]) -> Prepared:
    """A memset and a scatter in Triton."""
    if reason := triton_reason(case, copies[0].input.device.type):
        raise Unable(reason)
    if not importlib.util.find_spec("triton"):
        raise Unable("not installed: triton")
    peer = importlib.import_module(".triton_scatter", __package__)
    size = case.shape[2:]

    def unpool(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return (peer.max_unpool(values, indices, size),)

    return Prepared([directed(case, data, unpool) for data in copies])


CONTENDERS: dict[str, Contender] = {
    OURS: ours,
    CLONE: clone,
    TORCH: torch_nn,
    COMPILED: torch_compile,
    ONNX: onnx_runtime,
    TRITON: triton_scatter,
}


def by_default(case: Case, quick: bool) -> list[str]:
    """The peers timed where none are named.

    torch.compile takes seconds for each case. It is left out of the sweep, of pooling alone and of
    all but float32 with int64 indices, and where it has to be quick, of all but the networks.
    """
    compiled = (case.dtype, case.index_dtype) == ("float32", "int64")
    compiled = compiled and case.operation != "pool" and case.family != "sweep"
    if quick:
        compiled = compiled and case.family == "networks"
    return [peer for peer in PEERS if peer != COMPILED or compiled]
