"""What torch.compile traces instead of our operators, so that it fuses."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import laid_out, same
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch.func import grad, jvp, vmap

import maxunpool_cuda
import maxunpool_cuda.functional as F

DISJOINT = ((2, 2, 0), (2, 3, 1))
OVERLAPPING = (3, 2, 1)
POOL, UNPOOL = "max_pool", "max_unpool"


@pytest.fixture(params=[False, True], ids=["kernels", "fused"])
def fused(request: pytest.FixtureRequest) -> Iterator[bool]:
    maxunpool_cuda.set_fusion(request.param)
    yield request.param
    maxunpool_cuda.set_fusion(False)


class Compiled:
    """A function as it is compiled, and which of our operators its graphs run, backward as well."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.operators: set[str] = set()
        self.run = torch.compile(function, fullgraph=True, backend=self._backend)

    def _backend(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        compiler: Any = aot_module_simplified
        return compiler(module, inputs, fw_compiler=self._seen)

    def _seen(self, module: torch.fx.GraphModule, _: Any) -> Any:
        targets = (str(node.target) for node in module.graph.nodes)
        names = (target.split(".") for target in targets if target.startswith("maxunpool_cuda."))
        self.operators |= {name for _, name, _ in names}
        return make_boxed_func(module.forward)


def round_trip(dims: int, window: Any, index_dtype: torch.dtype) -> Callable[[Tensor], Any]:
    pool, unpool = (getattr(F, f"{name}{dims}d") for name in (POOL, UNPOOL))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        pooled, indices = pool(x, *window, return_indices=True, index_dtype=index_dtype)
        return pooled, indices, unpool(pooled, indices, *window, output_size=x.shape)

    return function


@pytest.mark.parametrize(
    ("dims", "layout"),
    [(1, "contiguous"), (2, "contiguous"), (2, "channels_last"), (3, "contiguous")],
)
def test_a_round_trip_is_that_of_eager(dims: int, layout: str, fused: bool) -> None:
    offsets = ((window, torch.uint8) for window in (*DISJOINT, OVERLAPPING))
    for window, index_dtype in (*offsets, (DISJOINT[0], torch.int32)):
        function = round_trip(dims, window, index_dtype)
        torch._dynamo.reset()
        compiled = Compiled(function)
        x = laid_out(torch.randn(2, 3, *(9, 10, 7)[:dims]), layout, dims).requires_grad_()
        runs = []
        for run in (compiled.run, function):
            pooled, indices, back = run(x)
            (gradient,) = torch.autograd.grad(back.sin().sum() + pooled.cos().sum(), x)
            runs.append((pooled, indices, back, gradient))
        for ours, eager in zip(*runs, strict=True):
            assert same(ours, eager)
            assert ours.stride() == eager.stride()
        elementwise = fused and index_dtype == torch.uint8 and window in DISJOINT
        unpooling = set() if elementwise else {f"{UNPOOL}_backward"}
        assert compiled.operators == {POOL, UNPOOL, *unpooling}  # UNPOOL is pooling's gradient too


@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
def test_sizes_may_stay_open(reduce: Any, fused: bool) -> None:
    def unpool(x: Tensor, indices: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, 2, 3, reduce=reduce)

    compiled = torch.compile(unpool, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (4, 5, 7):
        x = torch.randn(2, 3, size, size + 1)
        indices = torch.randint(4, x.shape, dtype=torch.uint8)
        assert same(compiled(x, indices), unpool(x, indices))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_inside(transform: str, fused: bool) -> None:
    indices = torch.randint(4, (5, 3, 4, 4), dtype=torch.uint8)

    def unpool(x: Tensor, indices: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, 2)

    def function(x: Tensor) -> Tensor:
        if transform == "grad":
            return grad(lambda x: unpool(x, indices).pow(2).sum())(x)
        if transform == "vmap":
            return vmap(unpool)(x, indices)
        return jvp(lambda x: unpool(x, indices).square(), (x,), (x,))[1]

    x = torch.randn(indices.shape)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert same(compiled(x), function(x))


@pytest.mark.parametrize(("kernel_size", "theirs"), [(2, True), (5, True), (6, False)])
def test_pooling_without_indices_is_pytorchs_in_inference(kernel_size: int, theirs: bool) -> None:
    def pool(x: Tensor) -> Any:
        return F.max_pool2d(x, kernel_size, 2, 1, ceil_mode=True)

    x = torch.randn(2, 3, 17, 18)
    compiled = Compiled(pool)
    assert same(compiled.run(x), pool(x))
    assert (not compiled.operators) == theirs
    trained = Compiled(pool)
    assert same(trained.run(x.requires_grad_()), pool(x))
    assert trained.operators == {POOL}
    again = Compiled(pool)
    with torch.no_grad():
        assert same(again.run(x), pool(x))
    assert (not again.operators) == theirs


def test_what_pytorch_does_not_pool_is_left_to_the_operator() -> None:
    for x, pool in (
        (torch.randn(2, 3, 8), F.max_pool1d),
        (torch.randint(9, (2, 3, 8, 8)), F.max_pool2d),
        (torch.randn(2, 3, 8, 8, 8), F.max_pool3d),
    ):
        compiled = Compiled(pool)
        assert same(compiled.run(x, 2), pool(x, 2))
        assert compiled.operators == {POOL}


@pytest.mark.usefixtures("fused")
def test_bad_input_is_refused_all_the_same() -> None:
    x, indices = torch.rand(1, 2, 3, 3), torch.zeros(1, 2, 3, 3, dtype=torch.uint8)
    for function, arguments, words in (
        (F.max_unpool2d, (x, indices[..., :2], 2), "Expected shape of indices to be same"),
        (F.max_unpool2d, (x[0, 0], indices[0, 0], 2), "max_unpool2d"),
        (F.max_unpool2d, (x, indices, 17), "at most 256"),
        (F.max_pool2d, (x, 2, 2, 2), "pad should be at most half"),
        (F.max_pool2d, (x[0, 0], 2), "max_pool2d"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words):
            torch.compile(function, backend="aot_eager")(*arguments)


@pytest.mark.usefixtures("fused")
def test_inside_patched_it_is_no_other() -> None:
    function = round_trip(2, (2, 2, 0), torch.int32)
    x = torch.rand(1, 2, 4, 6)
    with maxunpool_cuda.patched(torch.uint8):
        results = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    for ours, eager in zip(results, function(x), strict=True):
        assert same(ours, eager)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.usefixtures("fused")
def test_exported_programs_keep_the_operators(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return F.max_pool2d(x, 2), *round_trip(2, (2, 2, 0), torch.uint8)(x)

    program = torch.export.export(Model(), (torch.rand(1, 2, 8, 8),), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("maxunpool_cuda.max_pool.default") == 2
    assert targets.count("maxunpool_cuda.max_unpool.default") == 1


def test_what_was_compiled_is_compiled_anew() -> None:
    compiled = Compiled(round_trip(2, (2, 2, 0), torch.uint8))
    x = torch.rand(1, 1, 4, 4)
    maxunpool_cuda.set_fusion(True)
    try:
        compiled.run(x)
        assert compiled.operators == {POOL}
    finally:
        maxunpool_cuda.set_fusion(False)
    compiled.run(x)
    assert compiled.operators == {POOL, UNPOOL}


def test_only_a_bool_chooses() -> None:
    arguments: Any = ("on", 1, None)
    for argument in arguments:
        with pytest.raises(TypeError, match="set_fusion: expected enabled to be a bool but got"):
            maxunpool_cuda.set_fusion(argument)
