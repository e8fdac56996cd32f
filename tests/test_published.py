# SPDX-License-Identifier: BSD-3-Clause
"""Published models, made this package's in both ways, and called or handed on."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from published import OPERATORS, PUBLISHED, Results, drawn, pooling_in, results
from torch import Tensor, nn

from maxunpool_cuda import converted, export, patched


def unpickled(model: nn.Module, x: Tensor) -> Results:
    return results(pickle.loads(pickle.dumps(model)), x)


def traced(model: nn.Module, x: Tensor) -> Results:
    """A trace holds for any batch, and for the spatial sizes of the example."""
    return results(torch.jit.trace(model, torch.cat((x, x))), x)


def compiled(model: nn.Module, x: Tensor) -> Results:
    return results(torch.compile(model, backend="aot_eager", fullgraph=True), x)


def exported(model: nn.Module, x: Tensor) -> Results:
    program = torch.export.export(model, (x,), strict=True)
    called = pooling_in(program.graph_module)
    assert called
    assert called <= OPERATORS
    return results(program.module(), x)


def through_onnx(model: nn.Module, x: Tensor) -> Results:
    """ONNX Runtime has no float64 convolutions; in float32 the whole numbers are exact, too."""
    table = export.onnx_translation_table()
    model, x = model.float(), x.float()
    program: Any = torch.onnx.export(
        model, (x,), dynamo=True, verbose=False, custom_translation_table=table
    )
    return {"output": program(x.cpu())[0].double()}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", [unpickled, traced, compiled, exported, through_onnx])
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("is_converted", [True, False], ids=["converted", "patched"])
@pytest.mark.usefixtures("single_threaded_torch")
def test_every_way(
    is_converted: bool, name: str, way: Callable[[nn.Module, Tensor], Results], real_device: str
) -> None:
    """The output and all gradients equal torch.nn's. A zero of either sign is a zero."""
    model, x, expected = drawn(PUBLISHED[name])
    model.to(real_device)
    torch.use_deterministic_algorithms(True)  # under which torch.nn's unpooling raises an error
    if is_converted:
        context: Any = converted(model, index_dtype=torch.uint8)
    else:
        context = patched(index_dtype=torch.int32)
    with context:
        found = way(model, x.to(real_device))
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
