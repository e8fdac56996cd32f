"""ONNX Runtime's MaxUnpool, which counts its indices over the whole tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

from .cases import Case
from .data import Data, positions


@functools.lru_cache(maxsize=1)
def session(case: Case) -> onnxruntime.InferenceSession:
    """One MaxUnpool node, run with as many threads as PyTorch has.

    Its threads do not spin while they wait, or they would take the cores from who is timed next.
    """
    node = helper.make_node(
        "MaxUnpool",
        ["input", "indices", "output_size"],
        ["output"],
        kernel_shape=[case.kernel_size] * case.rank,
        strides=[case.stride] * case.rank,
        pads=[case.padding] * (2 * case.rank),
    )
    size = helper.make_tensor("output_size", TensorProto.INT64, [len(case.shape)], case.shape)
    graph = helper.make_graph(
        [node],
        "max_unpool",
        [
            helper.make_tensor_value_info("input", TensorProto.FLOAT, case.pooled),
            helper.make_tensor_value_info("indices", TensorProto.INT64, case.pooled),
        ],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, case.shape)],
        [size],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def prepare(
    case: Case, data: Data
) -> tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, ...]]]:
    """The call, and what makes a tensor of its result."""
    run = session(case).run_with_ort_values
    planes = case.shape[0] * case.shape[1]
    offsets = torch.arange(planes).reshape(*case.shape[:2], *[1] * case.rank)
    flat = positions(case, data.indices) + offsets * (case.outputs // planes)
    from_numpy = onnxruntime.OrtValue.ortvalue_from_numpy
    feed = {"input": from_numpy(data.input.numpy()), "indices": from_numpy(flat.numpy())}
    return (
        lambda: run(["output"], feed)[0],
        lambda result: (torch.from_numpy(result.numpy()),),
    )
