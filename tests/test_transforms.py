"""What PyTorch makes of an operator: torch.func, forward mode, torch.compile, torch.export."""

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import (
    EXAMPLES,
    INDEX_DTYPES,
    OPERATORS,
    REDUCES,
    Example,
    draw_differentiable,
    laid_out,
    same,
    some,
)
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import maxunpool_cuda
import maxunpool_cuda.functional as F

every_example = pytest.mark.parametrize("example", EXAMPLES, ids=str)
# Of the slower tests, to which int32 is as int64.
FLAT_AND_OFFSETS = [example for example in EXAMPLES if example.index_dtype != torch.int32]
every_index_dtype = pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)


@pytest.fixture(autouse=True)
def no_slow_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


def all_same(results: Any, expected: Any, strides: bool = False) -> bool:
    return all(
        same(a, b) and (not strides or a.stride() == b.stride())
        for a, b in zip(results, expected, strict=True)
    )


Function = Callable[..., Tensor]  # of a tensor and its indices


def squares(f: Function) -> Function:
    return lambda *tensors: f(*tensors).pow(2).sum()


def cubes(f: Function) -> Function:
    return lambda *tensors: f(*tensors).pow(3).sum()


def gradient(f: Function) -> Function:
    def of(x: Tensor, *indices: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x, *indices), x)[0]

    return of


def rows(f: Function) -> Function:
    return lambda *tensors: torch.stack([f(*row) for row in zip(*tensors, strict=True)])


def jacobian(f: Function) -> Function:
    return lambda x, *i: torch.autograd.functional.jacobian(lambda x: f(x, *i), x)


def plain_hessian(f: Function) -> Function:
    return lambda x, *i: torch.autograd.functional.hessian(lambda x: cubes(f)(x, *i), x)


# Each with what does the same without it. All functions are linear, where maxima stay where they
# are: a function is its own derivative in the direction of its input.
TRANSFORMS: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "none": (lambda f: f, lambda f: f),
    "grad": (lambda f: grad(squares(f)), lambda f: gradient(squares(f))),
    "vjp": (
        lambda f: lambda x, *i: vjp(lambda x: f(x, *i), x)[1](f(x, *i) * 2)[0],
        lambda f: gradient(squares(f)),
    ),
    "jvp": (lambda f: lambda x, *i: jvp(lambda x: f(x, *i), (x,), (x,))[1], lambda f: f),
    "jacrev": (jacrev, jacobian),
    "jacfwd": (jacfwd, jacobian),
    "hessian": (lambda f: hessian(cubes(f)), plain_hessian),
    "vmap": (vmap, rows),
    "vmap of grad": (lambda f: vmap(grad(squares(f))), lambda f: rows(gradient(squares(f)))),
    "grad of vmap": (lambda f: grad(squares(vmap(f))), lambda f: gradient(squares(rows(f)))),
}
HESSIANS = {
    f"{outer.__name__} of {inner.__name__}": (
        lambda f, outer=outer, inner=inner: outer(inner(cubes(f))),
        plain_hessian,
    )
    for outer, inner in itertools.product((jacfwd, jacrev), repeat=2)
}
WAYS: dict[str, Callable[..., Tensor]] = {
    "compiled": lambda f, *t: torch.compile(f, fullgraph=True, backend="aot_eager")(*t),
    "functionalized": lambda f, *t: functionalize(f)(*t),
    "traced": lambda f, *t: make_fx(f)(*t)(*t),
}


@pytest.mark.parametrize("transform", TRANSFORMS | HESSIANS)
@every_example
def test_transforms(device: str, example: Example, transform: str) -> None:
    transformed, plain = (TRANSFORMS | HESSIANS)[transform]
    tensors = example.batches(device) if "vmap" in transform else example.tensors(device)
    for reduce in REDUCES[:1] if example.operator == "pool" else REDUCES:
        f = replace(example, reduce=reduce).values
        expected = plain(f)(*tensors)
        assert expected.any()
        assert same(transformed(f)(*tensors), expected), reduce


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("example", FLAT_AND_OFFSETS, ids=str)
def test_traced_transforms(example: Example, transform: str, way: str) -> None:
    transformed, plain = TRANSFORMS[transform]
    tensors = example.batches() if "vmap" in transform else example.tensors()
    expected = plain(example.values)(*tensors)
    assert same(WAYS[way](transformed(example.values), *tensors), expected)
    if way == "functionalized":
        assert same(transformed(functionalize(example.values))(*tensors), expected)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("out_dim", [0, 1, -1])
@every_example
def test_vmap(device: str, example: Example, out_dim: int, unbatched: bool) -> None:
    batches = [t[:, 0] if unbatched else t for t in example.batches(device)]
    for in_dims in itertools.product((0, None, 1, -1), repeat=len(batches)):
        if in_dims == (None,) * len(batches):
            continue
        moved = [
            t[0] if dim is None else t.movedim(0, dim)
            for t, dim in zip(batches, in_dims, strict=True)
        ]
        rows = [
            example(*(t[0 if dim is None else k] for t, dim in zip(batches, in_dims, strict=True)))
            for k in range(5)
        ]
        result = vmap(example, in_dims, out_dim)(*moved)
        expected = [torch.stack(each, out_dim) for each in zip(*rows, strict=True)]
        assert all_same(result, expected), in_dims


@every_example
def test_nested_vmap(device: str, example: Example) -> None:
    """Over the batch too, in any order; and more batches than the operator has dimensions for."""
    batches = example.batches(device)
    expected = vmap(example)(*batches)
    assert all_same(vmap(vmap(example))(*batches), expected)
    assert all_same(vmap(vmap(example), 1, 1)(*batches), expected)
    more = [torch.stack((t, t.flip(0))) for t in batches]
    twice = vmap(vmap(example, 1, 1), -1)(*(t.movedim(0, -1).movedim(0, 1) for t in more))
    for k in range(2):
        rows = vmap(example, out_dims=1)(*(t[k] for t in more))
        assert all_same([t[k] for t in twice], rows)


def test_vmap_refuses_samples_that_are_refused(device: str) -> None:
    x, indices = torch.rand(3, 2, 2, device=device), torch.zeros(3, 2, 2, device=device).long()
    for function in (lambda x: F.max_unpool2d(x, indices[0], 2), lambda x: F.max_pool2d(x, 2)):
        with pytest.raises(RuntimeError, match="expected input of 3 or 4 dimensions"):
            vmap(function)(x)


@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator: str, rng: random.Random) -> None:
    calls = draw_differentiable(operator, rng, torch.float32)
    for call in itertools.islice(calls, some(12)):
        x, *others = call.tensors
        for requires_grad in (False, True):
            leaf = x.detach().clone().requires_grad_(requires_grad)
            results = torch.library.opcheck(call.operator, (leaf, *others, *call.arguments))
            assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dynamic", [False, True])
@every_example
def test_compile(example: Example, dynamic: bool, layout: str) -> None:
    compiled = torch.compile(example, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x, *indices = (laid_out(t, layout, 2) for t in example.tensors())
    for leaf in (x, x.detach().requires_grad_()):
        results = [function(leaf, *indices) for function in (compiled, example)]
        assert all_same(*results, strides=True)
    weight = torch.rand_like(results[1][0])
    grads = [torch.autograd.grad(values, leaf, weight) for values, *_ in results]
    assert all_same(*grads, strides=True)


def test_compile_does_not_recompile_for_every_batch() -> None:
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(maxunpool_cuda.MaxUnpool2d(2), fullgraph=True, backend=count)
    for batch in range(2, 12):
        x = torch.rand(batch, 3, 2, 2)
        compiled(x, torch.zeros(x.shape, dtype=torch.int64))
    assert count.frame_count <= 2  # the first size, then any


class Mapped(torch.nn.Module):
    def __init__(self, example: Example) -> None:
        super().__init__()
        self.example = example

    def forward(self, *tensors: Tensor) -> Any:
        return vmap(lambda *each: self.example(*each))(*tensors)


@pytest.mark.parametrize("strict", [False, True])
@every_example
def test_export_of_vmap(example: Example, strict: bool) -> None:
    model, batches = Mapped(example), example.batches()
    program = torch.export.export(model, batches, strict=strict)
    assert all_same(program.module()(*batches), model(*batches))


class Net(torch.nn.Module):
    """Pools and unpools, with indices and without."""

    def __init__(self, index_dtype: torch.dtype) -> None:
        super().__init__()
        self.first = maxunpool_cuda.MaxPool2d(2)
        window = (3, 2, 1)
        self.encoder = torch.nn.Sequential(
            maxunpool_cuda.MaxPool2d(*window, return_indices=True, index_dtype=index_dtype)
        )
        self.unpool = maxunpool_cuda.MaxUnpool2d(*window)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pooled, indices = self.encoder(x)
        return self.unpool(pooled * 3, indices, output_size=x.shape)


@pytest.mark.parametrize("strict", [False, True])
@every_index_dtype
def test_export_with_dynamic_sizes(index_dtype: torch.dtype, strict: bool) -> None:
    net = Net(index_dtype)
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    program = torch.export.export(
        net,
        (torch.rand(2, 3, 8, 12),),
        dynamic_shapes={"x": {0: batch, 2: 4 * height, 3: 4 * width}},
        strict=strict,
    )
    x = torch.rand(5, 3, 16, 8, requires_grad=True)
    outputs = [function(x) for function in (program.module(), net)]
    assert same(*outputs)
    assert same(*(torch.autograd.grad(output.sum(), x)[0] for output in outputs))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_compiled_autograd(backend: str, dynamic: bool, index_dtype: torch.dtype) -> None:
    """The graph of a backward pass that eager's forward pass left, compiled."""
    count = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiler = torch.compile(backend=count, fullgraph=True, dynamic=dynamic)
    net = Net(index_dtype)
    for size in (12, 12, 16):
        x = torch.rand(2, 3, size, 8, requires_grad=True)
        weight = torch.randint(-9, 9, (2, 3, size // 2, 4)).float()
        (expected,) = torch.autograd.grad(net(x), x, weight)
        with compiled_autograd._enable(compiler, dynamic=dynamic):
            (got,) = torch.autograd.grad(net(x), x, weight)
        assert same(got, expected)
    assert 0 < count.frame_count <= 2


@every_index_dtype
def test_compiled_autograd_of_a_step(index_dtype: torch.dtype) -> None:
    net, x = Net(index_dtype), torch.rand(2, 3, 8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), x)

    def step(x: Tensor) -> None:
        net(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    assert same(x.grad, expected)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_sizes_that_only_data_tell(index_dtype: torch.dtype, dims: int, ceil: bool) -> None:
    pool, unpool = (getattr(F, f"max_{kind}{dims}d") for kind in ("pool", "unpool"))

    def function(weight: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        shape = (2, 3, int(size.item()), *[6] * (dims - 1))
        x = weight * weight.new_ones(shape).flatten(2).cumsum(2).sin().reshape(shape)
        values, indices = pool(
            x, 3, 2, 1, ceil_mode=ceil, return_indices=True, index_dtype=index_dtype
        )
        return pool(x, 2), values, indices, unpool(values, indices, 3, 2, 1, x.shape)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for size in (7, 8, 9):
            weight = torch.tensor(2.0, requires_grad=True)
            results = [f(weight, torch.tensor(size)) for f in (compiled, function)]
            assert all_same(*results, strides=True)
            sums = [sum(t.sum() for t in each if t.requires_grad) for each in results]
            assert all_same(*(torch.autograd.grad(total, weight) for total in sums))


@every_index_dtype
def test_symbolic_tracing_keeps_modules_whole(index_dtype: torch.dtype) -> None:
    """As torch.nn's, which tools look for."""
    net, x = Net(index_dtype), torch.rand(2, 3, 8, 8)
    traced = torch.fx.symbolic_trace(net)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["first", "encoder.0", "unpool"]
    assert same(traced(x), net(x))
    assert traced.get_submodule("encoder.0").index_dtype == index_dtype

    class Through(torch.fx.Tracer):
        def is_leaf_module(self, *_: object) -> bool:
            return False

    assert same(torch.fx.GraphModule(net, Through().trace(net))(x), net(x))


def test_symbolic_values_without_a_tracer_of_modules() -> None:
    graph = torch.fx.Graph()
    x = torch.fx.Proxy(graph.placeholder("x"))
    graph.output(maxunpool_cuda.MaxPool2d(2)(x).node)
    x = torch.rand(1, 4, 4)
    assert same(torch.fx.GraphModule({}, graph)(x), F.max_pool2d(x, 2))
