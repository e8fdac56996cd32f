"""Published models, in every way that a model is called, kept or handed on.

All parameters and inputs are small whole numbers, so every sum of products is exact in any order:
what compilers, runtimes and devices return is equal to the definition, whatever the seed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from cases import INDEX_DTYPES
from published import PUBLISHED, Published
from torch import Tensor, nn

import maxunpool_cuda.onnx
from maxunpool_cuda import converted, patched, replace_max_pooling, restore_max_pooling

pytestmark = pytest.mark.usefixtures("single_threaded_torch")

Results = dict[str, Tensor]


def whole(shape: torch.Size, fewest: int, most: int) -> Tensor:
    return torch.randint(fewest, most + 1, shape, dtype=torch.float64)


def with_whole_numbers(model: nn.Module) -> nn.Module:
    """In eval mode. Half of the weights of convolutions, or more, are zero: sums stay small."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 2.0**-60  # 1 + this is 1
            module.running_mean = whole(module.running_mean.shape, -1, 1)
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            if parameter.dim() > 1:
                values = whole(parameter.shape, -1, 1) * whole(parameter.shape, 0, 1)
            elif name.endswith("bias"):
                values = whole(parameter.shape, -2, 1)
            else:  # of norms, and of PReLU
                values = whole(parameter.shape, 0, 1) * 2 - 1
            parameter.copy_(values)
    return model.eval()


def results(model: nn.Module, x: Tensor) -> Results:
    """The output, and the gradients of the input and, by name, of every parameter."""
    named = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}
    x = x.clone().requires_grad_()
    out = model(x)
    weight = torch.arange(out.numel(), dtype=out.dtype, device=out.device).remainder(7).sub(2)
    gradients = torch.autograd.grad((out * weight.view_as(out)).sum(), [x, *named.values()])
    every = (out.detach(), *gradients)
    return {name: t.cpu() for name, t in zip(("output", "input", *named), every, strict=True)}


def assert_equal(got: Results, expected: Results) -> None:
    """A zero of either sign is a zero."""
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


class Definition(torch.autograd.Function):
    """Unpooling as the reference has it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor, size: tuple[int, ...]) -> Tensor:
        ctx.indices, ctx.size = indices, size
        return reference.max_unpool(input, indices, size, "last")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return reference.max_unpool_backward(grad_output, ctx.indices, ctx.size, "last"), None, None


def defined(
    input: Tensor,
    indices: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any = 0,
    output_size: Any = None,
) -> Tensor:
    dims = input.dim() - 2
    window = ((n,) * dims if isinstance(n, int) else n for n in (kernel_size, stride, padding))
    size = reference.default_output_size(tuple(input.shape[2:]), *window)
    return Definition.apply(input, indices, tuple(output_size[-dims:]) if output_size else size)


def drawn(published: Published) -> tuple[nn.Module, Tensor, Results]:
    """A model of torch.nn, its input and what is expected; no part of it is cut off by zeros.

    Expected is what torch.nn's pooling gives, whose gradient is right, and unpooling by definition.
    """
    for _ in range(50):
        model, x = with_whole_numbers(published.make()), whole(torch.Size(published.shape), -3, 3)
        with pytest.MonkeyPatch.context() as patch:
            for dims in (1, 2, 3):
                patch.setattr(nn.functional, f"max_unpool{dims}d", defined)
            expected = results(model, x)
        parts = [tensor for tensor in expected.values() if tensor.dim() > 1]
        # Far below 2^24, in steps far above its inverse: nothing was rounded.
        small = all(float(tensor.abs().max()) < 2**20 for tensor in expected.values())
        if small and all(bool(tensor.any()) for tensor in parts):
            break
    else:
        pytest.fail("every model that was drawn has parts without a gradient, or large numbers")
    assert not any(bool((tensor * 2**10).frac().any()) for tensor in expected.values())
    return model, x, expected


def replaced(published: Published, model: nn.Module, index_dtype: torch.dtype) -> nn.Module:
    """By parts, as those who have nothing but a part would do."""
    reasons: dict[str, str] = {}
    for part in published.parts if published.modules else ():
        reasons |= replace_max_pooling(model.get_submodule(part), index_dtype)
    assert reasons == ({} if index_dtype == torch.int64 else published.reasons)
    return model


def from_state_dict(published: Published, model: nn.Module, _: Tensor) -> nn.Module:
    """What torch.nn's model has saved, loaded by one that was converted."""
    other = replaced(published, with_whole_numbers(published.make()), torch.uint8)
    other.load_state_dict(model.state_dict())
    return other.to(next(model.parameters()).device)


def exported(published: Published, model: nn.Module, x: Tensor) -> nn.Module:
    program = torch.export.export(replaced(published, model, torch.uint8), (x,), strict=False)
    calls = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    ours = {"maxunpool_cuda.max_pool.default", "maxunpool_cuda.max_unpool.default"}
    assert {name for name in calls if "max_" in name} == ours
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def channels_last(published: Published, model: nn.Module, x: Tensor) -> nn.Module:
    if x.dim() > 3:
        format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model.to(memory_format=format)
        x.data = x.contiguous(memory_format=format)
    return replaced(published, model, torch.uint8)


def of_uint8(way: Callable[[nn.Module], nn.Module]) -> Callable[..., nn.Module]:
    return lambda published, model, _: way(replaced(published, model, torch.uint8))


def of_dtype(dtype: torch.dtype) -> Callable[..., nn.Module]:
    return lambda published, model, _: replaced(published, model, dtype)


# What becomes of a model, before it is called.
WAYS: dict[str, Callable[[Published, nn.Module, Tensor], nn.Module]] = {
    **{f"replaced, {dtype}": of_dtype(dtype) for dtype in INDEX_DTYPES},
    "channels_last": channels_last,
    "deep copy": of_uint8(copy.deepcopy),
    "pickle": of_uint8(lambda model: pickle.loads(pickle.dumps(model))),
    "state dict": from_state_dict,
    "compiled": of_uint8(lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)),
    "exported": exported,
}
QUICK = ("FastSurfer", "functional SegNet")


def case(name: str, way: str) -> Any:
    """The slow ways are left to --all for most models."""
    slow = way in ("compiled", "exported", "onnx") and name not in QUICK
    return pytest.param(name, way, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "way"), [case(name, way) for name in PUBLISHED for way in WAYS])
def test_every_way(name: str, way: str, device: str) -> None:
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    model, x = model.to(device), x.to(device)
    with patched() if published.functions else contextlib.nullcontext():
        called = WAYS[way](published, model, x)
        assert_equal(results(called, x), expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back(name: str) -> None:
    """Inside patched, inside converted, and restored: as torch.nn's, whose output is right."""
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    kinds, with_torch = [*map(type, model.modules())], results(model, x)
    compared = ["output"] if published.overlaps else [*expected]
    assert_equal({n: with_torch[n] for n in compared}, {n: expected[n] for n in compared})
    for index_dtype in INDEX_DTYPES if not published.strays else (torch.int64, torch.int32):
        with patched(index_dtype):
            assert_equal(results(model, x), expected)
        if published.modules and not published.functions:
            with converted(model, index_dtype):
                assert_equal(results(model, x), expected)
        assert [*map(type, model.modules())] == kinds
        replaced(published, model, index_dtype)
        assert ([*map(type, model.modules())] != kinds) == published.modules
        assert restore_max_pooling(model) is model
        assert [*map(type, model.modules())] == kinds
        assert_equal(results(model, x), with_torch)


@pytest.mark.parametrize(("name", "_"), [case(name, "onnx") for name in PUBLISHED])
def test_onnx(name: str, _: str) -> None:
    """In float32, as ONNX Runtime has no convolutions of float64; of the same whole numbers."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="it runs what is exported to ONNX")
    pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    model, x, file = replaced(published, model, torch.uint8).float(), x.float(), io.BytesIO()
    with patched() if published.functions else contextlib.nullcontext():
        program = torch.onnx.export(
            model,
            (x,),
            dynamo=True,
            verbose=False,
            custom_translation_table=maxunpool_cuda.onnx.translation_table(),
        )
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_equal({"output": torch.from_numpy(output).double()}, {"output": expected["output"]})
