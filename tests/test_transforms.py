"""What PyTorch makes of an operator: torch.func, forward mode, torch.compile, torch.export."""

import random
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import laid_out, random_case, same, some
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

REDUCES = ("last", "sum", "mean")
OPERATORS = (_ops.max_unpool, _ops.max_unpool_backward)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_slow_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


@pytest.fixture(params=[torch.int64, torch.uint8], ids=str)
def index_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


WINDOW = (3, 1)  # overlaps


def batches(device: str, index_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Five inputs and the indices of each, many of them the same, for WINDOW."""
    x = torch.rand(5, 2, 3, 2, 2, dtype=torch.float64, device=device)
    most = 9 if index_dtype == torch.uint8 else 16
    return x, torch.randint(0, most, x.shape, dtype=index_dtype, device=device)


@pytest.mark.parametrize("reduce", REDUCES)
def test_jacobians(device: str, index_dtype: torch.dtype, reduce: str) -> None:
    (x, *_), (indices, *_) = batches(device, index_dtype)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(x, indices, *WINDOW, reduce=reduce)

    expected = torch.autograd.functional.jacobian(function, x)
    assert same(jacrev(function)(x), expected)
    assert same(jacfwd(function)(x), expected)
    assert same(jvp(function, (x,), (x,))[1], function(x))
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, x))
        assert same(forward_ad.unpack_dual(dual).tangent, function(x))


def test_hessian(device: str, index_dtype: torch.dtype) -> None:
    (x, *_), (indices, *_) = batches(device, index_dtype)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(x, indices, *WINDOW).pow(3).sum()

    expected = torch.autograd.functional.hessian(function, x)
    torch.testing.assert_close(jacfwd(jacrev(function))(x), expected)
    torch.testing.assert_close(jacrev(jacfwd(function))(x), expected)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("out_dim", [0, 1, -1])
def test_vmap(device: str, index_dtype: torch.dtype, unbatched: bool, out_dim: int) -> None:
    x, indices = (t[:, 0] if unbatched else t for t in batches(device, index_dtype))

    def function(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(x, indices, *WINDOW)

    for in_dims in ((0, 0), (0, None), (None, 0), (1, 0), (-1, 2), (None, -1)):
        pick = [
            t if dim is not None else t[0] for t, dim in zip((x, indices), in_dims, strict=True)
        ]
        moved = [
            t if dim is None else t.movedim(0, dim) for t, dim in zip(pick, in_dims, strict=True)
        ]
        result = vmap(function, in_dims, out_dim)(*moved)
        rows = [
            function(*(t if dim is None else t[k] for t, dim in zip(pick, in_dims, strict=True)))
            for k in range(5)
        ]
        assert same(result, torch.stack(rows, out_dim)), in_dims


def test_vmap_of_the_operators_and_of_themselves(device: str, index_dtype: torch.dtype) -> None:
    x, indices = batches(device, index_dtype)
    geometry = ((4, 4), (3, 3), (1, 1), (0, 0), "last")
    for operator in OPERATORS:
        values = x if operator is _ops.max_unpool else torch.rand(5, 2, 3, 4, 4, device=device)
        expected = torch.stack(
            [operator(v, i, *geometry) for v, i in zip(values, indices, strict=True)]
        )
        assert same(vmap(lambda v, i, f=operator: f(v, i, *geometry))(values, indices), expected)
    nested = vmap(vmap(lambda v, i: F.max_unpool2d(v, i, *WINDOW)))
    assert same(nested(x, indices), vmap(lambda v, i: F.max_unpool2d(v, i, *WINDOW))(x, indices))


def test_gradients_of_batches(device: str, index_dtype: torch.dtype) -> None:
    x, indices = batches(device, index_dtype)

    def loss(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(x, indices, *WINDOW).pow(2).sum()

    rows = torch.stack([grad(loss)(v, i) for v, i in zip(x, indices, strict=True)])
    assert same(vmap(grad(loss))(x, indices), rows)
    assert same(grad(lambda x: vmap(loss)(x, indices).sum())(x), rows)


def test_batches_of_gradients(device: str, index_dtype: torch.dtype) -> None:
    (x, *_), (indices, *_) = batches(device, index_dtype)
    x = x.clone().requires_grad_()
    output = F.max_unpool2d(x, indices, *WINDOW)
    grads = torch.rand(4, *output.shape, dtype=output.dtype, device=device)
    (batch,) = torch.autograd.grad(output, x, grads, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(output, x, g, retain_graph=True)[0] for g in grads]
    assert same(batch, torch.stack(rows))


def test_functionalize(device: str, index_dtype: torch.dtype) -> None:
    (x, *_), (indices, *_) = batches(device, index_dtype)
    assert same(
        functionalize(lambda x: F.max_unpool2d(x, indices, *WINDOW))(x),
        F.max_unpool2d(x, indices, *WINDOW),
    )


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_opcheck(operator: Callable, rng: random.Random) -> None:
    for reduce in REDUCES:
        for offsets in rng.sample((False, True, None), some(3)):
            case = random_case(
                rng, reduce=reduce, dtypes=(torch.float32,), most_cells=12, offsets=offsets
            )
            values = case.input if operator is _ops.max_unpool else case.grad_output
            for requires_grad in (False, True):
                leaf = values.detach().clone().requires_grad_(requires_grad)
                torch.library.opcheck(
                    operator, (leaf, case.indices, *case.geometry.arguments(reduce))
                )


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool, layout: str, index_dtype: torch.dtype) -> None:
    unpool = maxunpool_cuda.MaxUnpool2d(*WINDOW)
    x, indices = (laid_out(t[0].float(), layout, 2) for t in batches("cpu", index_dtype))
    indices = indices.to(index_dtype)
    compiled = torch.compile(unpool, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert same(compiled(x, indices), unpool(x, indices))
    assert compiled(x, indices).stride() == unpool(x, indices).stride()
    x = x.requires_grad_()
    output, expected = compiled(x, indices), unpool(x, indices)
    assert output.stride() == expected.stride()
    weight = torch.rand_like(expected)
    (got,) = torch.autograd.grad(output, x, weight)
    (want,) = torch.autograd.grad(expected, x, weight)
    assert same(got, want)
    assert got.stride() == want.stride()


TRANSFORMS: dict[str, Callable] = {
    "grad": lambda f: grad(lambda x: f(x).pow(2).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](f(x))[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[1],
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: f(x).pow(3).sum()),
    "vmap": lambda f: vmap(f),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).pow(2).sum())),
}


WAYS: dict[str, Callable] = {
    "compiled": lambda f, x: torch.compile(f, fullgraph=True, backend="aot_eager")(x),
    "functionalized": lambda f, x: functionalize(f)(x),
    "traced": lambda f, x: make_fx(f)(x)(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("what", ["int64", "uint8", "pooling"])
def test_traced_transforms(what: str, transform: str, way: str) -> None:
    (x, *_), (indices, *_) = batches("cpu", torch.uint8 if what == "uint8" else torch.int64)
    if what == "pooling":
        function = TRANSFORMS[transform](lambda x: F.max_pool2d(x, 2, 1, 1))
    elif "vmap" in transform:  # over the batch
        function = TRANSFORMS[transform](lambda x: F.max_unpool2d(x, indices[0], *WINDOW))
    else:
        function = TRANSFORMS[transform](lambda x: F.max_unpool2d(x, indices, *WINDOW))
    assert same(WAYS[way](function, x), function(x))


class Mapped(torch.nn.Module):
    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return vmap(lambda x, i: F.max_unpool2d(x, i, *WINDOW))(x, indices)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_vmap(strict: bool, index_dtype: torch.dtype) -> None:
    x, indices = batches("cpu", index_dtype)
    program = torch.export.export(Mapped(), (x, indices), strict=strict)
    assert same(program.module()(x, indices), Mapped()(x, indices))


def test_functionalize_inside(index_dtype: torch.dtype) -> None:
    (x, *_), (indices, *_) = batches("cpu", index_dtype)
    function = lambda x: F.max_unpool2d(x, indices, *WINDOW).pow(2).sum()  # noqa: E731
    assert same(grad(functionalize(function))(x), grad(function)(x))


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        pooled, indices = self.encoder(x)
        return self.unpool(pooled * 3, indices, output_size=x.shape)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
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


def test_compiled_autograd_of_a_step(index_dtype: torch.dtype) -> None:
    net, x = Net(index_dtype), torch.rand(2, 3, 8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), x)

    def step(x: torch.Tensor) -> None:
        net(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    assert same(x.grad, expected)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_sizes_that_only_data_tell(dims: int, ceil: bool, index_dtype: torch.dtype) -> None:
    pool, unpool = (getattr(F, f"max_{kind}{dims}d") for kind in ("pool", "unpool"))

    def function(weight: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
            for got, expected in zip(*results, strict=True):
                assert same(got, expected)
                assert got.stride() == expected.stride()
            got, expected = (
                torch.autograd.grad(sum(t.sum() for t in each if t.requires_grad), weight)
                for each in results
            )
            assert same(got[0], expected[0])


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


class RoundTrip(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = torch.nn.MaxPool2d(2, return_indices=True)
        self.unpool = maxunpool_cuda.MaxUnpool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unpool(*self.pool(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_sizes(strict: bool) -> None:
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    program = torch.export.export(
        RoundTrip(),
        (torch.rand(2, 3, 8, 6),),
        dynamic_shapes={"x": {0: batch, 2: 2 * height, 3: 2 * width}},
        strict=strict,
    )
    x = torch.rand(5, 3, 12, 4, requires_grad=True)
    output = program.module()(x)
    assert same(output, RoundTrip()(x))
    (got,) = torch.autograd.grad(output.sum(), x)
    (want,) = torch.autograd.grad(RoundTrip()(x).sum(), x)
    assert same(got, want)


def test_vmap_refuses_samples_that_are_refused(device: str) -> None:
    x, indices = torch.rand(3, 2, 2, device=device), torch.zeros(3, 2, 2, device=device).long()
    with pytest.raises(RuntimeError, match="expected input of 3 or 4 dimensions but got 2"):
        vmap(lambda x, i: F.max_unpool2d(x, i, 2))(x, indices)


BAD = {
    "indices of another shape": lambda x, i: F.max_unpool2d(x, i[..., :1], 2),
    "indices of another dtype": lambda x, i: F.max_unpool2d(x, i.float(), 2),
    "a bad index": lambda x, i: F.max_unpool2d(x, i + 100, 2),
    "a bad offset": lambda x, i: F.max_unpool2d(x, i.byte() + 200, 2),
    "an offset in the padding": lambda x, i: F.max_unpool2d(x, i.byte(), 3, 2, 1),
    "an offset beyond the output": lambda x, i: F.max_unpool2d(x, i.byte() + 8, 3, 2, 1, (2, 2)),
    "offsets in too large a window": lambda x, i: F.max_unpool2d(x, i.byte(), 17),
    "kernel_size": lambda x, i: F.max_unpool2d(x, i, 0),
    "stride": lambda x, i: F.max_unpool2d(x, i, 2, 0),
    "padding": lambda x, i: F.max_unpool2d(x, i, 2, 2, -1),
    "too much padding": lambda x, i: F.max_unpool2d(x, i, 2, 2, 3),
    "output_size out of range": lambda x, i: F.max_unpool2d(x, i, 2, output_size=(9, 9)),
    "output_size of a length": lambda x, i: F.max_unpool2d(x, i, 2, output_size=(4,)),
    "no int": lambda x, i: F.max_unpool2d(x, i, 2.5),
    "overflow": lambda x, i: F.max_unpool2d(x, i, 2**62),
    "reduce": lambda x, i: F.max_unpool2d(x, i, 2, reduce="max"),
    "dtype": lambda x, i: F.max_unpool2d(x.bool(), i, 2, reduce="sum"),
}


@pytest.mark.parametrize("kind", BAD)
def test_errors_are_the_same_in_every_way(kind: str) -> None:
    call = BAD[kind]
    x, indices = torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    with pytest.raises(Exception, match=r"^max_unpool2d: ") as eager:
        call(x, indices)
    for way in (
        lambda x: vmap(call)(x[None], indices[None]),
        lambda x: grad(lambda x: call(x, indices).sum())(x),
        torch.compile(lambda x: call(x, indices), backend="aot_eager"),
    ):
        with pytest.raises(eager.type) as caught:
            way(x)
        assert str(eager.value).split(" but got")[0] in str(caught.value)
