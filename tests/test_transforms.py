# SPDX-License-Identifier: BSD-3-Clause
"""What PyTorch makes of an operator: torch.func, forward mode, torch.compile, torch.export."""

import itertools
from collections.abc import Callable
from random import Random

import pytest
import torch
from cases import OPERATORS, Call, all_same, draw_differentiable, laid_out, same, scaled
from failures import check_each
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.functional import hessian, jacobian
from torch.func import grad, jacfwd, jacrev, vmap
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")  # no rule for vmap
every_operator = pytest.mark.parametrize("operator", OPERATORS)

Function = Callable[..., Tensor]  # of a tensor and its indices


def power(f: Function, exponent: int) -> Function:
    return lambda *tensors: f(*tensors).pow(exponent).sum()


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vmap of grad": lambda f: vmap(grad(power(f, 2))),
    "grad of vmap": lambda f: grad(power(vmap(f), 2)),
    "jacrev": jacrev,  # vmap of vjp
    "jacfwd": jacfwd,  # vmap of jvp
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(power(f, 3))),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(power(f, 3))),
    "jacrev of jacrev": lambda f: jacrev(jacrev(power(f, 3))),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(power(f, 3))),
}


def by_autograd(transform: str, f: Function, x: Tensor, *indices: Tensor) -> Tensor:
    """The result of the transform of f, by torch.autograd.functional."""
    if "of jac" in transform:
        return hessian(lambda x: power(f, 3)(x, *indices), x)
    f = f if "jac" in transform else power(f, 2)
    return jacobian(lambda x: f(x, *indices), x)


# Each operator under one transform or two.
@pytest.mark.parametrize(
    ("operator", "transform"), [*zip(itertools.cycle(OPERATORS), TRANSFORMS, strict=False)]
)
def test_transforms(real_device: str, operator: str, transform: str, rng: Random) -> None:
    """vmap maps a batch, whose images are input too; the Jacobians map batches of batches."""

    def check(call: Call) -> None:
        tensors = call.moved(real_device).tensors
        values: Function = lambda *t: leaves(call.function(*t))[0]  # noqa: E731
        function = TRANSFORMS[transform](values)
        expected = by_autograd(transform, values, *tensors)
        assert expected.any()
        assert same(function(*tensors), expected)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert same(compiled(*tensors), expected), "compiled"

    check_each([draw_differentiable(rng, operator, torch.float64, leading=(2, 2))], check)


# Of one tensor and of two: the dimension that vmap maps, or None if it maps another tensor alone.
IN_DIMS = {1: [(0,), (1,), (-1,)], 2: [(0, 0), (0, None), (None, 1), (1, -1), (-1, 0)]}


@every_operator
def test_vmap(device: str, operator: str, rng: Random) -> None:
    def check(call: Call) -> None:
        batches, function = call.moved(device).tensors, call.function
        for dims, out_dim in itertools.product(IN_DIMS[len(batches)], (0, -1)):
            pairs = [*zip(batches, dims, strict=True)]
            spread = (t[:1].expand_as(t) if dim is None else t for t, dim in pairs)
            each = [leaves(function(*sample)) for sample in zip(*spread, strict=True)]
            expected = [torch.stack(results, out_dim) for results in zip(*each, strict=True)]
            moved = [t[0] if dim is None else t.movedim(0, dim) for t, dim in pairs]
            assert all_same(vmap(function, dims, out_dim)(*moved), expected), (dims, out_dim)
        if batches[0].dim() == call.dims + 3:
            assert all_same(vmap(vmap(function))(*batches), vmap(function)(*batches)), "nested"

    leadings = ((4, 2), (4, 2, 3))
    calls = (draw_differentiable(rng, operator, torch.float64, leading=each) for each in leadings)
    check_each(calls, check)


@every_operator
def test_opcheck(operator: str, rng: Random) -> None:
    def check(call: Call) -> None:
        x, *others = call.tensors
        for leaf in (x, x.detach().clone().requires_grad_()):
            results = torch.library.opcheck(call.operator, (leaf, *others, *call.arguments))
            assert set(results.values()) == {"SUCCESS"}

    calls = (draw_differentiable(rng, operator, torch.float32) for _ in range(scaled(4)))
    check_each(calls, check)


@every_operator
def test_compile(operator: str, rng: Random) -> None:
    def check(call: Call) -> None:
        eager = call.function
        compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
        x, *indices = (laid_out(t, "channels_last", call.dims) for t in call.tensors)
        assert all_same(compiled(x, *indices), eager(x, *indices)), "without gradients"
        leaf = x.detach().requires_grad_()
        got, expected = (leaves(function(leaf, *indices)) for function in (compiled, eager))
        weight = torch.rand_like(expected[0])
        got += torch.autograd.grad(got[0], leaf, weight)
        expected += torch.autograd.grad(expected[0], leaf, weight)
        assert all_same(got, expected)
        assert [t.stride() for t in got] == [t.stride() for t in expected]

    check_each([draw_differentiable(rng, operator, torch.float64, leading=(2, 3))], check)


class Net(torch.nn.Module):
    """Pools and unpools, with indices and without."""

    def __init__(self) -> None:
        super().__init__()
        offsets = {"return_indices": True, "index_dtype": torch.uint8}
        self.first = maxunpool_cuda.MaxPool2d(2)
        self.encoder = torch.nn.Sequential(maxunpool_cuda.MaxPool2d(3, 2, 1, **offsets))
        self.unpool = maxunpool_cuda.MaxUnpool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pooled, indices = self.encoder(x)
        return self.unpool(pooled * 3, indices, output_size=x.shape)


def test_compile_does_not_recompile_for_every_batch() -> None:
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Net(), fullgraph=True, backend=count)
    for batch in range(2, 12):
        compiled(torch.rand(batch, 3, 8, 8))
    assert 0 < count.frame_count <= 2  # the first size, then any


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """Exports have dynamic sizes."""
    net, x = Net(), torch.rand(5, 3, 16, 8, requires_grad=True)
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    sizes = {"x": {0: batch, 2: 4 * height, 3: 4 * width}}
    example = (torch.rand(2, 3, 8, 12),)
    program = torch.export.export(net, example, dynamic_shapes=sizes, strict=strict)
    outputs = [function(x) for function in (program.module(), net)]
    assert same(*outputs)
    assert same(*(torch.autograd.grad(output.sum(), x)[0] for output in outputs))


def test_compiled_autograd() -> None:
    """The graph that an eager forward leaves for its backward is compiled."""
    count = CompileCounterWithBackend("aot_eager")
    compiler = torch.compile(backend=count, fullgraph=True, dynamic=True)
    net = Net()
    for size, reduce in ((12, "last"), (12, "sum"), (16, "last"), (16, "last")):
        net.unpool.reduce = reduce
        x = torch.rand(2, 3, size, 8, requires_grad=True)
        weight = torch.randint(-9, 9, (2, 3, size // 2, 4)).float()
        (expected,) = torch.autograd.grad(net(x), x, weight)
        with compiled_autograd._enable(compiler, dynamic=True):
            (got,) = torch.autograd.grad(net(x), x, weight)
        assert same(got, expected), f"{size} rows, {reduce}"
    assert 0 < count.frame_count <= 3
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: net(x).mul(weight).sum().backward(), backend="aot_eager")(x)
    assert same(x.grad, expected)


def test_sizes_that_only_data_tell() -> None:
    def function(weight: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        shape = (2, 3, int(size.item()), 6)
        x = weight * weight.new_ones(shape).flatten(2).cumsum(2).reshape(shape)
        values, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        output = F.max_unpool2d(values, indices, 3, 2, 1, x.shape)
        return F.max_pool2d(x, 2), values, output, indices

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for size in (7, 8, 9):
            weight = torch.tensor(2.0, requires_grad=True)
            results = [f(weight, torch.tensor(size)) for f in (compiled, function)]
            assert all_same(*results), f"size {size}"
            sums = [sum(t.sum() for t in each[:3]) for each in results]
            assert all_same(*(torch.autograd.grad(total, weight) for total in sums)), f"size {size}"


def test_symbolic_tracing_keeps_modules_whole() -> None:
    """Tools look for whole modules in traced graphs, so torch.fx keeps torch.nn's, too."""
    net, x = Net(), torch.rand(2, 3, 8, 8)
    traced = torch.fx.symbolic_trace(net)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["first", "encoder.0", "unpool"]
    assert same(traced(x), net(x))
    graph = torch.fx.Graph()  # a plain Proxy, of a tracer that knows no modules
    graph.output(net.first(torch.fx.Proxy(graph.placeholder("x"))).node)
    assert same(torch.fx.GraphModule({}, graph)(x), net.first(x))
