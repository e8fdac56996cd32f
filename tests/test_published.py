# SPDX-License-Identifier: BSD-3-Clause
"""Published models, made this package's in both ways, and called or handed on."""

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from published import PUBLISHED, Results, drawn, pooling_in, results
from torch import Tensor, nn

from maxunpool_cuda import convert_max_pooling, export, patched


def unpickled(model: nn.Module, x: Tensor) -> Results:
    return results(pickle.loads(pickle.dumps(model)), x)


def with_pools_of_torch(model: Any, x: Tensor) -> Results:
    """Pools without indices are PyTorch's there, whose gradients are not deterministic on CUDA."""
    torch.use_deterministic_algorithms(False)
    return results(model, x)


def traced(model: nn.Module, x: Tensor) -> Results:
    """A trace holds for any batch, and for the spatial sizes of the example."""
    trace = torch.jit.trace(model, torch.cat((x, x)))
    return with_pools_of_torch(trace, x)


def compiled(model: nn.Module, x: Tensor) -> Results:
    return results(torch.compile(model, backend="aot_eager", fullgraph=True), x)


def exported(model: nn.Module, x: Tensor) -> Results:
    program = torch.export.export(model, (x,), strict=True)
    assert pooling_in(program.graph_module)
    return with_pools_of_torch(program.module(), x)


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
    """The output and all gradients are the expected ones. A zero of either sign is a zero."""
    model, x, expected = drawn(PUBLISHED[name])
    model.to(real_device)
    torch.use_deterministic_algorithms(True)  # under which torch.nn's unpooling raises an error
    if is_converted:
        convert_max_pooling(model, index_dtype=torch.uint8)
    with contextlib.nullcontext() if is_converted else patched(index_dtype=torch.int32):
        found = way(model, x.to(real_device))
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("single_threaded_torch")
def test_what_torch_nn_returns(name: str) -> None:
    """What is expected, but for gradients where windows overlap: all of them in TASEDNet."""
    model, x, expected = drawn(PUBLISHED[name])
    found = results(model, x)
    right = ["output"] if name == "TASEDNet" else expected
    assert [key for key in right if not torch.equal(found[key], expected[key])] == []


@pytest.mark.usefixtures("single_threaded_torch")
def test_finite_differences() -> None:
    """They show that torch.nn's gradient of TASEDNet is wrong, and this package's right.

    All numbers are positive. So no ReLU hides the values that are not written, whose gradients
    torch.nn adds.
    """
    published = PUBLISHED["TASEDNet"]
    model = published.make().double()
    for parameter in model.parameters():
        parameter.data = torch.rand_like(parameter)

    def slope() -> float:
        """The derivative of the outputs' sum in the direction, by autograd."""
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf)
        return (gradient * direction).sum().item()

    step, is_smooth = 2.0**-20, False
    while not is_smooth:  # A maximum that moves on one side makes the two sides differ.
        x, direction = torch.rand(2, *published.shape, dtype=torch.float64)
        before, here, after = (model(x + n * step * direction).sum().item() for n in (-1, 0, 1))
        is_smooth = after - here == pytest.approx(here - before)
    expected = (after - before) / (2 * step)
    assert slope() > 1.1 * expected
    with patched():
        assert slope() == pytest.approx(expected)
    convert_max_pooling(model, index_dtype=torch.uint8)
    assert slope() == pytest.approx(expected)
