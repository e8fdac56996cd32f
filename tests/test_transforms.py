# SPDX-License-Identifier: BSD-3-Clause
"""What PyTorch makes of an operator: torch.func, torch.compile, compiled autograd, torch.fx."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from cases import OPERATORS, Call, all_same, draw_differentiable, laid_out, same
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

# An operator, transforms of a function of a tensor and its indices, and the function of
# torch.autograd.functional that computes the same. The function has one number as its result, so
# its Jacobian is its gradient.
TRANSFORMS: dict[str, tuple[str, Any, Callable[..., Any]]] = {
    # vmap maps the batch. An image is input, too.
    "vmap of grad": ("unpool", lambda f: vmap(grad(f)), jacobian),
    "grad of vmap": ("gradient", lambda f: grad(lambda *t: vmap(f)(*t).sum()), jacobian),
    "jacrev": ("pool", jacrev, jacobian),
    "jacfwd": ("unpool from offsets", jacfwd, jacobian),
    "jacfwd of jacrev": ("gradient from offsets", lambda f: jacfwd(jacrev(f)), hessian),
    "jacfwd of jacfwd": ("unpool", lambda f: jacfwd(jacfwd(f)), hessian),
    "jacrev of jacrev": ("gradient", lambda f: jacrev(jacrev(f)), hessian),
    "jacrev of jacfwd": ("pool", lambda f: jacrev(jacfwd(f)), hessian),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(real_device: str, name: str, rng: Random) -> None:
    operator, transform, by_autograd = TRANSFORMS[name]

    def check(call: Call) -> None:
        x, *indices = call.moved(real_device).tensors

        def cubes(*tensors: Tensor) -> Tensor:
            return leaves(call.function(*tensors))[0].pow(3).sum()

        expected = by_autograd(lambda x: cubes(x, *indices), x)
        assert expected.any()
        function = transform(cubes)
        assert same(function(x, *indices), expected)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert same(compiled(x, *indices), expected), "compiled"

    check_each([draw_differentiable(rng, operator, torch.float64, leading=(2, 2))], check)


# Of one tensor and of two: the dimension that vmap maps, or None if all samples share the tensor.
IN_DIMS: dict[int, list[tuple[int | None, ...]]] = {
    1: [(0,), (1,), (-1,)],
    2: [(0, 0), (0, None), (None, 1), (1, -1)],
}


@every_operator
@pytest.mark.parametrize("leading", [(4, 2), (4, 2, 3)], ids=["channels", "images"])
def test_vmap(device: str, operator: str, leading: tuple[int, ...], rng: Random) -> None:
    """Of four samples, each without a batch or with one."""

    def check(call: Call) -> None:
        tensors = call.moved(device).tensors
        for dims in IN_DIMS[len(tensors)]:
            pairs = [*zip(tensors, dims, strict=True)]
            batch = [t[0] if dim is None else t.movedim(0, dim) for t, dim in pairs]
            results = leaves(vmap(call.function, dims)(*batch))
            for n in range(4):
                sample = [t[0 if dim is None else n] for t, dim in pairs]
                assert all_same([each[n] for each in results], call.function(*sample)), dims
        if len(leading) == 3:
            nested = vmap(vmap(call.function))
            assert all_same(nested(*tensors), vmap(call.function)(*tensors)), "nested"

    check_each([draw_differentiable(rng, operator, torch.float64, leading=leading)], check)


@every_operator
def test_compile(operator: str, rng: Random) -> None:
    """A graph of open sizes returns what eager mode returns, gradients too, of the same strides."""

    def check(call: Call) -> None:
        compiled = torch.compile(call.function, fullgraph=True, dynamic=True, backend="aot_eager")
        x, *indices = (laid_out(t, "channels_last", call.dims) for t in call.tensors)
        assert all_same(compiled(x, *indices), call.function(x, *indices)), "without gradients"
        x = x.detach().requires_grad_()
        got, expected = (leaves(function(x, *indices)) for function in (compiled, call.function))
        got += torch.autograd.grad(got[0].square().sum(), x)
        expected += torch.autograd.grad(expected[0].square().sum(), x)
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


def test_compiled_autograd() -> None:
    """The graph that an eager forward leaves for its backward is compiled."""
    count = CompileCounterWithBackend("aot_eager")
    compiler = torch.compile(backend=count, fullgraph=True, dynamic=True)
    net = Net()
    for size, reduce in ((12, "last"), (12, "sum"), (16, "last"), (20, "last")):
        net.unpool.reduce = reduce
        x = torch.rand(2, 3, size, 8, requires_grad=True)
        (expected,) = torch.autograd.grad(net(x).square().sum(), x)
        with compiled_autograd._enable(compiler, dynamic=True):
            (got,) = torch.autograd.grad(net(x).square().sum(), x)
        assert same(got, expected), f"{size} rows, {reduce}"
    assert 0 < count.frame_count <= 3


def test_sizes_that_only_data_tell() -> None:
    def function(weight: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        shape = (2, 3, int(size.item()), 6)
        x = weight * weight.new_ones(shape).flatten(2).cumsum(2).reshape(shape)
        values, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=torch.uint8)
        output = F.max_unpool2d(values, indices, 3, 2, 1, x.shape)
        return output.sum() + F.max_pool2d(x, 2).sum(), output, indices

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for size in (7, 8, 9):
            weight = torch.tensor(2.0, requires_grad=True)
            got, expected = (f(weight, torch.tensor(size)) for f in (compiled, function))
            gradients = (torch.autograd.grad(each[0], weight) for each in (got, expected))
            assert all_same(got, expected), f"size {size}"
            assert all_same(*gradients), f"size {size}"


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
