"""Who is timed. Each takes a case and its tensors, and gives the calls."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import maxunpool_cuda.functional

from . import model
from .cases import Case
from .data import Data, indices_of, layout_of

OURS, CLONE, TORCH, COMPILED = "maxunpool_cuda", "clone", "torch.nn", "torch.compile"
ONNX, TRITON = "ONNX Runtime", "Triton"


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready for a case.

    Attributes:
        calls: one for each copy of the data; each gives a fresh result.
        tensors: what :func:`data.definition` returns, from a result; None: nothing to compare.
    """

    calls: Sequence[Callable[[], Any]]
    tensors: Callable[[Any], tuple[Tensor, ...]] | None = tuple


# From what the case differentiates by, and indices, to what it differentiates and other results.
Call = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Contender = Callable[[Case, Sequence[Data]], Prepared]


def _directed(case: Case, data: Data, call: Call, indices: Tensor) -> Callable[[], Any]:
    """``call``, or its gradient through autograd, as the case asks for.

    For the gradient alone the forward has been called here, and its graph is kept.
    """
    leaf, grad_output = data.input, data.grad_output
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
    options |= {"dilation": case.dilation, "return_indices": True}

    def unpool(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return (unpool_nd(values, indices, *window, output_size=case.shape[2:]),)

    def pool(values: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(pool_nd(values, *window, **options))

    def round_trip(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return unpool(*pool(values, indices))

    return {"unpool": unpool, "pool": pool, "round-trip": round_trip}[case.operation]


def ours(case: Case, copies: Sequence[Data]) -> Prepared:
    """This package."""
    index_dtype = getattr(torch, case.index_dtype)
    call = _call_of(maxunpool_cuda.functional, case, index_dtype=index_dtype)
    return Prepared([_directed(case, data, call, data.indices) for data in copies])


def clone(case: Case, copies: Sequence[Data]) -> Prepared:
    """The ceiling: a copy reads and writes as many bytes as the case's call has use for.

    As many copies as there are operators. Every byte has been written before: reading memory
    never written to reads one page of zeros.
    """
    count = len(model.operators(case))
    words = -(-model.useful_bytes(case) // (8 * count))  # 4 bytes that are read and written
    sources = [torch.ones(words, device=copies[0].input.device) for _ in copies]

    def copy(source: Tensor) -> list[Tensor]:
        return [source.clone() for _ in range(count)]

    return Prepared([functools.partial(copy, source) for source in sources], tensors=None)


def torch_nn(case: Case, copies: Sequence[Data], compiled: bool = False) -> Prepared:
    """torch.nn: it takes and makes flat int64 indices, whatever the case asks for."""
    call = _call_of(torch.nn.functional, case)
    if compiled:  # for the shapes of this case alone
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, dynamic=False)

    def narrowed(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values, indices, *gradient = results
        return values, indices_of(case, indices), *gradient

    with_indices = case.operation == "pool" and case.direction != "backward"
    calls = [_directed(case, data, call, data.flat) for data in copies]
    return Prepared(calls, narrowed if with_indices else tuple)


def onnx_runtime(case: Case, copies: Sequence[Data]) -> Prepared:
    """ONNX Runtime's MaxUnpool on the CPU; its indices count over the whole tensor.

    Its threads do not spin while they wait, or they would take the cores from who is timed next.
    """
    import onnx.parser
    import onnxruntime

    kernel, stride, pads = ([n] * case.rank for n in (case.kernel_size, case.stride, case.padding))
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        max_unpool (float{list(case.pooled)} input, int64{list(case.pooled)} indices)
            => (float{list(case.shape)} output)
        <int64[{len(case.shape)}] output_size = {{{str(case.shape)[1:-1]}}}> {{
            output = MaxUnpool<kernel_shape = {kernel}, strides = {stride}, pads = {pads + pads}>
                (input, indices, output_size)
        }}"""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        onnx.parser.parse_model(text).SerializeToString(), options, ["CPUExecutionProvider"]
    )
    leading = case.shape[0] * case.shape[1]
    offsets = torch.arange(leading).reshape(*case.shape[:2], *[1] * case.rank)
    value = onnxruntime.OrtValue.ortvalue_from_numpy

    def call_of(data: Data) -> Callable[[], Any]:
        indices = data.flat + offsets * (case.outputs // leading)
        feed = {"input": value(data.input.numpy()), "indices": value(indices.numpy())}
        return lambda: session.run_with_ort_values(["output"], feed)[0]

    calls = [call_of(data) for data in copies]
    return Prepared(calls, lambda result: (torch.from_numpy(result.numpy()),))


def triton_scatter(case: Case, copies: Sequence[Data]) -> Prepared:
    """A memset and a scatter in Triton."""
    from .triton_scatter import max_unpool

    def unpool(values: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return (max_unpool(values, indices, case.shape[2:], layout_of(case)),)

    return Prepared([_directed(case, data, unpool, data.indices) for data in copies])


CONTENDERS: dict[str, Contender] = {
    OURS: ours,
    CLONE: clone,
    TORCH: torch_nn,
    COMPILED: functools.partial(torch_nn, compiled=True),
    ONNX: onnx_runtime,
    TRITON: triton_scatter,
}
PEERS = (TORCH, COMPILED, ONNX, TRITON)


def is_able(contender: str, case: Case, device: str) -> bool:
    """Whether the contender does the case on the device."""
    forward = (case.operation, case.direction) == ("unpool", "forward")
    if contender == ONNX:
        return forward and (device, case.dtype, case.layout) == ("cpu", "float32", "contiguous")
    if contender == TRITON:
        return forward and device == "cuda" and case.index_dtype != "uint8"
    return True


def is_quick(contender: str, case: Case, quick: bool) -> bool:
    """Whether it is timed unless it is asked for: torch.compile takes seconds for each case.

    It is left out of the sweep, of pooling alone and of all but float32 with int64 indices, and
    where it has to be quick, of all but the networks.
    """
    plain = (case.dtype, case.index_dtype) == ("float32", "int64") and case.operation != "pool"
    kept = case.family == "networks" if quick else case.family != "sweep"
    return contender != COMPILED or (plain and kept)
