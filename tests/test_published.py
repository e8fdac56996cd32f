"""Published models, in every way that a model is called, kept or handed on.

All parameters and inputs are small whole numbers, so every sum of products is exact in any order:
what compilers and runtimes return is equal to eager, as is, on every machine and of every seed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from published import PUBLISHED, Published
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.onnx
from maxunpool_cuda import converted, patched, replace_max_pooling, restore_max_pooling

onnxruntime = pytest.importorskip("onnxruntime", reason="it runs what is exported to ONNX")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")

pytestmark = pytest.mark.usefixtures("as_torch_runs")

Called = Callable[[Tensor], Tensor]
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


def results(called: Called, x: Tensor, kept: nn.Module | None = None) -> Results:
    """The output, and the gradients of the input and, by name, of every parameter.

    kept: has these, if ``called`` is no module.
    """
    module = called if isinstance(called, nn.Module) else kept
    assert isinstance(module, nn.Module)
    parameters = {
        name.removeprefix("_orig_mod."): parameter for name, parameter in module.named_parameters()
    }
    x = x.clone().requires_grad_()
    out = called(x)
    weight = torch.arange(out.numel(), dtype=out.dtype).remainder(7).sub(2).view_as(out)
    gradients = torch.autograd.grad((out * weight).sum(), [x, *parameters.values()])
    return dict(zip(("output", "input", *parameters), (out.detach(), *gradients), strict=True))


def agree(got: Results, expected: Results, *names: str) -> None:
    """Equal, be it all or what has these names; a zero of either sign is a zero."""
    if not names:
        assert got.keys() == expected.keys()
    for name in names or expected:
        assert got[name].dtype == expected[name].dtype
        assert torch.equal(got[name], expected[name]), name


class Definition(torch.autograd.Function):
    """Unpooling as the reference has it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor, size: tuple[int, ...]) -> Tensor:
        ctx.indices, ctx.size = indices, size
        return reference.max_unpool(input, indices, size, "last")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return reference.max_unpool_backward(grad_output, ctx.indices, ctx.size, "last"), None, None


def defined(dims: int) -> Callable[..., Tensor]:
    def max_unpool(
        input: Tensor,
        indices: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        output_size: Any = None,
    ) -> Tensor:
        window = (kernel_size, stride or kernel_size, padding)
        kernel, step, pad = ((n,) * dims if isinstance(n, int) else tuple(n) for n in window)
        size = reference.default_output_size(tuple(input.shape[-dims:]), kernel, step, pad)
        size = size if output_size is None else tuple(output_size[-dims:])
        return Definition.apply(input, indices, size)

    return max_unpool


def expected_of(model: nn.Module, x: Tensor) -> Results:
    """With torch.nn's pooling, whose gradient is right, and unpooling by its definition."""
    with pytest.MonkeyPatch.context() as patch:
        for dims in (1, 2, 3):
            patch.setattr(nn.functional, f"max_unpool{dims}d", defined(dims))
        return results(model, x)


def drawn(published: Published) -> tuple[nn.Module, Tensor, Results]:
    """A model of torch.nn, its input and what is expected; no part of it is cut off by zeros."""
    for _ in range(50):
        model, x = with_whole_numbers(published.make()), whole(torch.Size(published.shape), -3, 3)
        expected = expected_of(model, x)
        if all(bool(tensor.any()) for tensor in expected.values() if tensor.dim() > 1):
            break
    else:
        pytest.fail("every model that was drawn has parts without a gradient")
    # Nothing was rounded: all is far below 2^53, in steps far above its inverse.
    assert all(float(tensor.abs().max()) < 2**32 for tensor in expected.values())
    assert not any(bool((tensor * 2**10).frac().any()) for tensor in expected.values())
    return model, x, expected


def replaced(model: nn.Module, published: Published) -> dict[str, str]:
    """By parts, as those who have nothing but a part would do."""
    reasons: dict[str, str] = {}
    for part in published.parts if published.modules else ():
        reasons |= replace_max_pooling(model.get_submodule(part))
    return reasons


def around(published: Published) -> contextlib.AbstractContextManager[Any]:
    """What a model needs around it for everything to be this package's, once it is converted."""
    return patched() if published.functions else contextlib.nullcontext()


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


MODELS = pytest.mark.parametrize("name", PUBLISHED)


def slow_but(*quick: str) -> pytest.MarkDecorator:
    """Every model; those that are not named are left to --all."""
    assert set(quick) <= PUBLISHED.keys()
    marks = {name: () if name in quick else pytest.mark.slow for name in PUBLISHED}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


@MODELS
def test_torch_nn(name: str) -> None:
    """What is expected below is what the models were published with, wherever that is right."""
    model, x, expected = drawn(PUBLISHED[name])
    agree(results(model, x), expected, *(["output"] if PUBLISHED[name].overlaps else []))


@MODELS
def test_replaced_and_restored(name: str) -> None:
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    before, keys, as_published = kinds(model), [*model.state_dict()], results(model, x)
    assert replaced(model, published) == published.reasons
    assert (kinds(model) != before) == published.modules
    assert [*model.state_dict()] == keys
    with around(published):
        agree(results(model, x), expected)
    if published.modules:
        whole_reasons = published.reasons if published.parts == ("",) else {}
        assert replace_max_pooling(model) == whole_reasons
        with around(published):
            agree(results(model, x), expected)
    assert restore_max_pooling(model) is model
    assert kinds(model) == before
    agree(results(model, x), as_published)


@MODELS
def test_patched(name: str) -> None:
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    before = kinds(model)
    for index_dtype in (torch.int64, torch.int32, *(() if published.strays else (torch.uint8,))):
        with patched(index_dtype):
            agree(results(model, x), expected)
    assert kinds(model) == before
    if published.modules and not published.functions:
        with converted(model):
            assert kinds(model) != before
            agree(results(model, x), expected)
        assert kinds(model) == before


def replica(model: nn.Module) -> nn.Module:
    """Of PyTorch's own replicate, but that tensors stay where they are: one needs GPUs for that."""
    # The package's name for the module is that of the function in it.
    module = importlib.import_module("torch.nn.parallel.replicate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_broadcast_coalesced_reshape", lambda t, devices, detach=False: [t])
        return module.replicate(model, [0])[0]


HANDED_ON: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "replica": replica,
}


@pytest.mark.parametrize("way", HANDED_ON)
@MODELS
def test_handed_on(name: str, way: str) -> None:
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    replaced(model, published)
    other = HANDED_ON[way](model)
    assert other is not model
    assert kinds(other) == kinds(model)
    with around(published):
        agree(results(other, x), expected)


@MODELS
def test_state_dict(name: str) -> None:
    """Of either, into either."""
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    another, *_ = drawn(published)
    replaced(another, published)
    another.load_state_dict(model.state_dict())
    with around(published):
        agree(results(another, x), expected)
    theirs, *_ = drawn(published)
    theirs.load_state_dict(another.state_dict())
    agree(results(theirs, x), results(model, x))


def check_compiled(name: str, backend: str) -> None:
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    replaced(model, published)
    with around(published):
        agree(results(torch.compile(model, backend=backend, fullgraph=True), x), expected)


@slow_but("FastSurfer", "functional SegNet")
def test_compiled(name: str) -> None:
    """Without a graph break, as torch.nn's is, and as Inductor gets it."""
    check_compiled(name, "aot_eager")


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """The one model of which this package has a module and a function."""
    check_compiled("SegResNet", "inductor")


def operators(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@slow_but("QuickNAT", "functional SegNet")
def test_exported(name: str) -> None:
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    replaced(model, published)
    with around(published):
        program = torch.export.export(model, (x,), strict=False)
    ours = [name for name in operators(program) if "max_" in name]
    assert ours
    assert all(name.startswith("maxunpool_cuda.max_") for name in ours)
    agree(results(program.module(), x), expected)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    agree(results(torch.export.load(file).module(), x), expected)


def onnx_program(model: nn.Module, x: Tensor, form: Any) -> torch.onnx.ONNXProgram:
    table = maxunpool_cuda.onnx.translation_table(form)
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "custom_translation_table": table}
    program = torch.onnx.export(model, (x,), **options)
    assert program is not None
    return program


def run_by_onnxruntime(program: torch.onnx.ONNXProgram, x: Tensor) -> Tensor:
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (name,) = (described.name for described in session.get_inputs())
    (output,) = session.run(None, {name: x.numpy()})
    return torch.from_numpy(output)


def without_strays(input: Tensor, indices: Tensor, kernel_size: int, stride: int) -> Tensor:
    """Unpooling in square windows side by side, of what lies in its own window."""
    height, width = (torch.arange(size) for size in input.shape[2:])
    row, column = indices // (len(width) * stride), indices % (len(width) * stride)
    own = (row // stride == height[:, None]) & (column // stride == width)
    return maxunpool_cuda.functional.max_unpool2d(
        torch.where(own, input, 0), indices, kernel_size, stride, reduce="sum"
    )


@pytest.mark.parametrize("form", ["MaxUnpool", "where"])
@slow_but("mmagic", "functional SegNet")
def test_onnx(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, as ONNX Runtime has no convolutions of float64; of the same whole numbers."""
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    replaced(model, published)
    model, x, output = model.float(), x.float(), expected["output"].float()
    # For the exporter, mmagic's model has an unpool of its own, which calls the function.
    with patched() if name == "mmagic" else around(published):
        assert torch.equal(model(x), output)
        program = onnx_program(model, x, form)
    unpools = [node.op_type for node in program.model.graph].count("MaxUnpool")
    assert bool(unpools) == (form == "MaxUnpool")
    if published.strays and form == "where":  # which is documented to lose them
        monkeypatch.setattr(nn.functional, "max_unpool2d", without_strays)
        assert not torch.equal(model(x), output)
        output = model(x).detach()
    assert torch.equal(run_by_onnxruntime(program, x), output)
