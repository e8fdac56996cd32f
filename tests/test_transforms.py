"""What PyTorch makes of an operator: torch.func, forward mode, torch.compile, torch.export."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cases import (
    INDEX_DTYPES,
    LAYOUTS,
    OPERATORS,
    REDUCES,
    Call,
    draw_differentiable,
    laid_out,
    same,
    scaled,
)
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd.functional import hessian, jacobian
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F

every_operator = pytest.mark.parametrize("operator", OPERATORS)


@pytest.fixture(autouse=True)
def no_slow_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


def drawn(rng: Random, operator: str, reduce: str = "", leading: tuple[int, ...] = ()) -> Call:
    return draw_differentiable(rng, operator, torch.float64, reduce, leading)


def all_same(results: Any, expected: Any, strides: bool = False) -> bool:
    return all(
        same(a, b) and (not strides or a.stride() == b.stride())
        for a, b in zip(leaves(results), leaves(expected), strict=True)
    )


Function = Callable[..., Tensor]  # of a tensor and its indices


def power(f: Function, exponent: int) -> Function:
    return lambda *tensors: f(*tensors).pow(exponent).sum()


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: grad(power(f, 2)),
    "vjp": lambda f: lambda x, *i: vjp(lambda x: f(x, *i), x)[1](f(x, *i) * 2)[0],
    "jvp": lambda f: lambda x, *i: jvp(lambda x: f(x, *i), (x,), (x,))[1],
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "vmap of grad": lambda f: vmap(grad(power(f, 2))),
    "grad of vmap": lambda f: grad(power(vmap(f), 2)),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(power(f, 3))),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(power(f, 3))),
    "jacrev of jacrev": lambda f: jacrev(jacrev(power(f, 3))),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(power(f, 3))),
}


def by_autograd(transform: str, f: Function, x: Tensor, *indices: Tensor) -> Tensor:
    """The result of the transform of f, by torch.autograd.functional.

    While maxima stay where they are, operators are linear: an operator is its own derivative in the
    direction of its input.
    """
    if "vmap" in transform:
        every = zip(x, *indices, strict=True)
        return torch.stack([by_autograd("grad", f, *tensors) for tensors in every])
    if transform == "jvp":
        return f(x, *indices)
    if "of" in transform:
        return hessian(lambda x: power(f, 3)(x, *indices), x)
    if transform in ("grad", "vjp"):
        f = power(f, 2)
    return jacobian(lambda x: f(x, *indices), x)


# Without --all, few pairs of an operator and a transform are compiled, but each is in some pair.
TABLE = [
    pytest.param(operator, transform, compiled, marks=[pytest.mark.slow] if left else [])
    for row, operator in enumerate(OPERATORS)
    for column, transform in enumerate(TRANSFORMS)
    for compiled in (False, True)
    for left in (compiled and (row + column) % len(OPERATORS) > 0,)
]


@pytest.mark.parametrize(("operator", "transform", "compiled"), TABLE)
def test_transforms(
    real_device: str, operator: str, transform: str, compiled: bool, rng: Random
) -> None:
    leading = (3, 2, 2) if "vmap" in transform else (2, 2)
    for reduce in ("",) if compiled else REDUCES:
        call = drawn(rng, operator, reduce, leading)
        tensors = [t.to(real_device) for t in call.tensors]
        values: Function = lambda *t: leaves(call.function(*t))[0]  # noqa: B023, E731
        function = TRANSFORMS[transform](values)
        expected = by_autograd(transform, values, *tensors)
        assert expected.any()
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert same(function(*tensors), expected), call


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("out_dim", [0, 1, -1])
@every_operator
def test_vmap(device: str, operator: str, out_dim: int, unbatched: bool, rng: Random) -> None:
    """vmap maps any dimension, of all tensors or of some, and is nested."""
    call = drawn(rng, operator, "", (4, 2) if unbatched else (4, 2, 3))
    batches, function = [t.to(device) for t in call.tensors], call.function
    for in_dims in itertools.product((0, None, 1, -1), repeat=len(batches)):
        if in_dims == (None,) * len(batches):
            continue
        moved, samples = [], []
        for t, dim in zip(batches, in_dims, strict=True):
            moved.append(t[0] if dim is None else t.movedim(0, dim))
            samples.append([t[0]] * 4 if dim is None else list(t))
        each = [leaves(function(*sample)) for sample in zip(*samples, strict=True)]
        expected = [torch.stack(results, out_dim) for results in zip(*each, strict=True)]
        assert all_same(vmap(function, in_dims, out_dim)(*moved), expected), in_dims
    expected = vmap(function)(*batches)
    twice = [torch.stack((t, t.flip(0)), -1) for t in batches]
    nested = leaves(vmap(vmap(function, 0, out_dim), -1)(*twice))
    assert all_same([t[0].movedim(out_dim, 0) for t in nested], expected)
    assert all_same([t[1].movedim(out_dim, 0).flip(0) for t in nested], expected)


@every_operator
def test_opcheck(operator: str, rng: Random) -> None:
    for _ in range(scaled(12)):
        call = draw_differentiable(rng, operator, torch.float32)
        x, *others = call.tensors
        for requires_grad in (False, True):
            leaf = x.detach().clone().requires_grad_(requires_grad)
            results = torch.library.opcheck(call.operator, (leaf, *others, *call.arguments))
            assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dynamic", [False, True])
@every_operator
def test_compile(operator: str, dynamic: bool, layout: str, rng: Random) -> None:
    call = drawn(rng, operator, leading=(2, 3))
    compiled = torch.compile(call.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x, *indices = (laid_out(t, layout, call.dims) for t in call.tensors)
    for leaf in (x, x.detach().requires_grad_()):
        results = [leaves(function(leaf, *indices)) for function in (compiled, call.function)]
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


class Mapped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda each: Net.forward(self, each))(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_export(index_dtype: torch.dtype, strict: bool) -> None:
    """Exports have dynamic sizes. A model may call vmap."""
    net, x = Net(index_dtype), torch.rand(5, 3, 16, 8, requires_grad=True)
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    sizes = {"x": {0: batch, 2: 4 * height, 3: 4 * width}}
    example = (torch.rand(2, 3, 8, 12),)
    program = torch.export.export(net, example, dynamic_shapes=sizes, strict=strict)
    outputs = [function(x) for function in (program.module(), net)]
    assert same(*outputs)
    assert same(*(torch.autograd.grad(output.sum(), x)[0] for output in outputs))
    if torch.__version__.startswith("2.8."):
        pytest.skip("PyTorch 2.8 exports no model that calls vmap")
    program = torch.export.export(Mapped(index_dtype), (x[:, None],), strict=strict)
    assert same(program.module()(x[:, None]), net(x)[:, None])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_compiled_autograd(dynamic: bool, index_dtype: torch.dtype) -> None:
    """The graph that an eager forward leaves for its backward is compiled."""
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
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
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: net(x).mul(weight).sum().backward(), backend="aot_eager")(x)
    assert same(x.grad, expected)


@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="PyTorch 2.8 needs the sizes")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("index_dtype", "ceil"), [(torch.int64, True), (torch.uint8, False)])
def test_sizes_that_only_data_tell(index_dtype: torch.dtype, dims: int, ceil: bool) -> None:
    pool, unpool = (getattr(F, f"max_{kind}{dims}d") for kind in ("pool", "unpool"))

    def function(weight: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        shape = (2, 3, int(size.item()), *[6] * (dims - 1))
        x = weight * weight.new_ones(shape).flatten(2).cumsum(2).reshape(shape)
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


def test_symbolic_tracing_keeps_modules_whole() -> None:
    """Tools look for whole modules in traced graphs, so torch.fx keeps torch.nn's, too."""
    net, x = Net(torch.uint8), torch.rand(2, 3, 8, 8)
    traced = torch.fx.symbolic_trace(net)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["first", "encoder.0", "unpool"]
    assert same(traced(x), net(x))
    assert traced.get_submodule("encoder.0").index_dtype == torch.uint8
    graph = torch.fx.Graph()  # a plain Proxy, of a tracer that knows no modules
    graph.output(net.first(torch.fx.Proxy(graph.placeholder("x"))).node)
    assert same(torch.fx.GraphModule({}, graph)(x), net.first(x))
