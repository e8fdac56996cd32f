"""Inside patched(), torch.nn.functional's max pooling and unpooling are this package's.

What models compute around which or inside of which it is: test_published.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_F
from cases import INDEX_DTYPES, same
from published import OPERATORS, pooling_in
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import CheckpointError, checkpoint

import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxPool2d, MaxUnpool2d, patched

IMAGE = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
WINDOW = (3, 2, 1)  # which overlaps


@pytest.fixture(autouse=True)
def nothing_is_left(single_threaded_torch: None) -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0
    assert dtype_of_indices() == torch.int64


def dtype_of_indices(x: Tensor = IMAGE) -> torch.dtype:
    """Of those that torch.nn's pooling returns where this is called."""
    indices: Tensor = torch_F.max_pool2d(x, 2, return_indices=True)[1]
    return indices.dtype


def round_trip(x: Tensor, of: Any = torch_F, **options: Any) -> tuple[Tensor, Tensor]:
    values, indices = of.max_pool2d(x, *WINDOW, return_indices=True, **options)
    return of.max_unpool2d(values, indices, *WINDOW, output_size=x.shape[-2:]), indices


def with_gradient(function: Callable[..., Any]) -> list[Tensor]:
    x = IMAGE.clone().requires_grad_()
    output, *rest = function(x)
    return [*torch.autograd.grad(output.square().sum(), x), output.detach(), *rest]


def all_same(results: Any, expected: Any) -> bool:
    return all(map(same, results, expected)) and len(results) == len(expected)


OURS = with_gradient(lambda x: round_trip(x, F, index_dtype=torch.uint8))


def test_torchs_gradient_is_another() -> None:
    """What all else here tells the two apart by, beside the dtype of the indices and the node."""
    theirs, x = with_gradient(round_trip), IMAGE.clone().requires_grad_()
    assert torch_F.max_pool2d(x, 2).grad_fn.name() != F.max_pool2d(x, 2).grad_fn.name()
    assert same(theirs[1], OURS[1])
    assert not torch.allclose(theirs[0], OURS[0])


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_form_of_a_call(dims: int, dtype: torch.dtype) -> None:
    x = (IMAGE[0], IMAGE, IMAGE[:, :, None].expand(2, 3, 4, 9, 8))[dims - 1]
    x = x.clone().requires_grad_()
    name, size = f"max_pool{dims}d", x.shape[-dims:]
    ours, theirs = getattr(F, name), getattr(torch_F, name)
    with_indices = getattr(torch_F, f"{name}_with_indices")
    for function, asked, returns in (
        (theirs, {}, False),
        (theirs, {"return_indices": True}, True),
        (with_indices, {}, True),
        (with_indices, {"return_indices": False}, True),
        (getattr(torch, name), {}, False),
    ):
        for arguments, named in (
            ((x, 3, 2, 1), {}),
            ((x, 3), {"stride": [], "ceil_mode": True}),
            ((), {"padding": 1, "kernel_size": [3], "input": x, "dilation": 1}),
        ):
            with patched(dtype):
                got = function(*arguments, **named, **asked)
            check(got, ours(*arguments, **named, return_indices=returns, index_dtype=dtype))
    window = (3, 2, 1, 1, True, True)
    pooled, indices = theirs(x, 2, return_indices=True)
    unpool, our_unpool = (getattr(of, f"max_unpool{dims}d") for of in (torch_F, F))
    with patched(dtype):
        check(theirs(x, *window), ours(x, *window, index_dtype=dtype))
        expected = our_unpool(pooled, indices, 2, output_size=size)
        check(unpool(pooled, indices, 2, 2, 0, size), expected)
        check(unpool(indices=indices, output_size=[*size], kernel_size=2, input=pooled), expected)
        if dims == 1:
            got = torch.max_pool1d_with_indices(x, *window[:-1])
            check(got, ours(x, *window, index_dtype=dtype))


def check(got: Any, expected: Any) -> None:
    """Equal, and by the same operator."""
    got, expected = ([r] if isinstance(r, Tensor) else r for r in (got, expected))
    assert all_same(got, expected)
    assert got[0].grad_fn.name() == expected[0].grad_fn.name()


def test_modules_and_reduce() -> None:
    """torch.nn's are covered, subclasses too; this package's do what they were told."""
    subclass = type("Own", (nn.MaxPool2d,), {})
    x, indices = torch.tensor([[[1.0, 4.0]]]), torch.tensor([[[0, 0]]])
    with patched(reduce="sum"):
        assert dtype_of_indices() == torch.int64
    with patched():
        assert nn.MaxUnpool2d(2)(x, indices)[0, 0, 0] == 4
    with patched(torch.uint8, reduce="sum"):
        for kind in (nn.MaxPool2d, subclass):
            assert kind(2, return_indices=True)(IMAGE)[1].dtype == torch.uint8
        ours = MaxPool2d(2, return_indices=True, index_dtype=torch.int32)
        assert ours(IMAGE)[1].dtype == torch.int32
        assert nn.MaxUnpool2d(2)(x, indices)[0, 0, 0] == 5
        assert MaxUnpool2d(2)(x, indices)[0, 0, 0] == 4
        assert F.max_unpool2d(x, indices, 2)[0, 0, 0] == 4
        assert dtype_of_indices(nn.Parameter(IMAGE.clone())) == torch.uint8


def test_nesting_and_exceptions() -> None:
    outer, inner = patched(torch.int32), patched(torch.uint8)

    def fails() -> None:
        with inner:
            with outer, inner, BaseTorchFunctionMode():
                assert dtype_of_indices() == torch.uint8
            assert dtype_of_indices() == torch.uint8
            raise ZeroDivisionError

    with outer:
        assert dtype_of_indices() == torch.int32
        with pytest.raises(ZeroDivisionError):
            fails()
        assert dtype_of_indices() == torch.int32
    assert dtype_of_indices() == torch.int64
    with outer, outer:
        assert dtype_of_indices() == torch.int32


def test_decorated_functions() -> None:
    decorate = patched(torch.uint8)

    @decorate
    def recursive(depth: int, *, fails: bool = False) -> list[torch.dtype]:
        """Documented."""
        if fails and not depth:
            raise ZeroDivisionError
        return [dtype_of_indices(), *(recursive(depth - 1, fails=fails) if depth else ())]

    assert (recursive.__name__, recursive.__doc__) == ("recursive", "Documented.")
    assert recursive(2) == [torch.uint8] * 3
    with pytest.raises(ZeroDivisionError):
        recursive(2, fails=True)
    with patched(torch.int32):
        assert recursive(0) == [torch.uint8]
        assert dtype_of_indices() == torch.int32


async def async_generator() -> Any:
    yield


@pytest.mark.parametrize("wrong", [lambda: (yield), asyncio.sleep, async_generator, nn.ReLU, 3])
def test_what_cannot_be_decorated(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^patched: expected a function that is done"):
        patched()(wrong)


@pytest.mark.parametrize("wrong", ["uint8", 3, None, torch.int16, torch.float32, dtype_of_indices])
def test_wrong_arguments(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^patched: expected index_dtype to be torch\.int64, "):
        patched(wrong)
    with pytest.raises(ValueError, match=r"^patched: expected reduce to be 'last'"):
        patched(reduce=wrong)


def test_errors_are_this_packages() -> None:
    """What it refuses; and what torch.nn refuses already: arguments that only ours take."""
    x, bad = torch.rand(1, 1, 2, 2), torch.full((1, 1, 2, 2), 99)
    with patched(torch.uint8):
        with pytest.raises(ValueError, match=r"^max_pool2d: expected kernel_size of at most 256"):
            torch_F.max_pool2d(torch.rand(1, 40, 40), 17, return_indices=True)
        assert torch_F.max_pool2d(torch.rand(1, 40, 40), 17).shape == (1, 2, 2)
        with pytest.raises(RuntimeError, match=r"^max_unpool2d: expected "):
            torch_F.max_unpool2d(x, bad, 2)
        for call in (
            lambda: torch_F.max_pool2d(x, 2, index_dtype=torch.uint8),
            lambda: torch.max_pool2d(x, 2, return_indices=True),
            lambda: torch_F.max_unpool2d(x, bad, 2, reduce="sum"),
        ):
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                call()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a build without mkldnn")
def test_what_is_left_to_torchs_functions() -> None:
    """Tensors of mkldnn, for example, do not go round for ever."""
    with patched(), patched(torch.uint8):
        got = torch_F.max_pool2d(IMAGE.to_mkldnn(), 2)
    assert torch.equal(got.to_dense(), torch_F.max_pool2d(IMAGE, 2))


class Knows(Tensor):
    """A subclass with pooling of its own, and without unpooling."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_F.max_pool2d:
            return "its own"
        if func is torch_F.max_unpool2d:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_have_their_turn() -> None:
    """More of this is in test_ecosystem."""
    knows = IMAGE.as_subclass(Knows)
    with patched():
        assert torch_F.max_pool2d(knows, 2) == "its own"
        with pytest.raises(TypeError, match=r"^max_unpool2d: expected .* but got \['Knows'\]"):
            torch_F.max_unpool2d(knows, IMAGE.long(), 2)


def test_threads() -> None:
    """Each has its own; backward may run in any."""
    seen: list[Any] = []

    def elsewhere() -> None:
        seen.append(dtype_of_indices())
        loss.backward()

    x = IMAGE.clone().requires_grad_()
    with patched(torch.uint8):
        loss = round_trip(x)[0].square().sum()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert dtype_of_indices() == torch.uint8
    assert seen == [torch.int64]
    assert same(x.grad, OURS[0])


def test_a_checkpoint_that_is_computed_again_outside() -> None:
    """PyTorch notices."""
    with patched(torch.uint8):
        loss = checkpoint(round_trip, IMAGE.clone().requires_grad_(), use_reentrant=False)[0].sum()
    with pytest.raises(CheckpointError):
        loss.backward()


def test_transforms() -> None:
    def loss(x: Tensor, of: Any = torch_F) -> Tensor:
        return round_trip(x, of)[0].square().sum()

    x = IMAGE[:, :1, :4, :4].double()
    for transform in (
        lambda f: torch.vmap(torch.func.grad(f)),
        lambda f: torch.func.jacrev(torch.func.grad(f)),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    ):
        with patched():
            got = transform(loss)(x)
        assert same(got, transform(lambda x: loss(x, F))(x))


def test_tracing() -> None:
    with patched(torch.uint8):
        made = make_fx(lambda x: round_trip(x))(IMAGE)
        symbolic = torch.fx.symbolic_trace(lambda x: round_trip(x))
    assert pooling_in(made) == OPERATORS
    for graph in (made, symbolic):
        assert all_same(graph(IMAGE), OURS[1:])


GLOBAL = patched(torch.uint8)


def with_a_global(x: Tensor) -> tuple[Tensor, Tensor]:
    with GLOBAL:
        return round_trip(x)


def nested(x: Tensor) -> tuple[Tensor, ...]:
    with patched(torch.int32):
        with patched(torch.uint8):
            output, *inner = round_trip(x)
        return output, *inner, round_trip(x)[1]


def compiled(function: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(function, fullgraph=True, backend=backend)


def test_compiled_with_one_inside_of_another() -> None:
    *results, outer = with_gradient(compiled(nested))
    assert all_same(results, OURS)
    assert outer.dtype == torch.int32


def test_compiled_with_one_from_outside() -> None:
    """Dynamo takes it for what it is, or refuses it."""
    with contextlib.suppress(torch._dynamo.exc.Unsupported):
        assert all_same(with_gradient(compiled(with_a_global, "eager")), OURS)
    assert all_same(with_gradient(torch.compile(with_a_global, backend="eager")), OURS)


@pytest.mark.parametrize("place", ["around", "inside"])
def test_compiled_checkpoints_and_branches(place: str) -> None:
    """Dynamo runs their functions apart from all modes."""

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(round_trip, x, use_reentrant=False)

    def indices(x: Tensor) -> Tensor:
        return round_trip(x)[1].clone()

    def branching(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, indices, lambda x: indices(x + 1), (x,))

    def both(function: Any, backend: str) -> Any:
        torch.compiler.reset()
        mode = patched(torch.uint8)
        if place == "around":
            return mode(compiled(function, backend))
        return compiled(mode(function), backend)

    assert all_same(with_gradient(both(checkpointed, "aot_eager")), OURS)
    expected = round_trip(IMAGE.abs(), F, index_dtype=torch.uint8)[1]
    assert same(both(branching, "eager")(IMAGE.abs()), expected)


def breaking(x: Tensor) -> list[torch.dtype]:
    found = []
    with patched(torch.int32):
        found.append(dtype_of_indices(x))
        torch._dynamo.graph_break()
        with GLOBAL:
            torch._dynamo.graph_break()
            found.append(dtype_of_indices(x))
        found.append(dtype_of_indices(x))
    return [*found, dtype_of_indices(x)]


def test_graph_breaks() -> None:
    """After which Dynamo leaves modes on that it knows for such."""
    expected = [torch.int32, torch.uint8, torch.int32, torch.int64]
    assert torch.compile(breaking, backend="eager")(IMAGE) == breaking(IMAGE) == expected
    with patched(torch.uint8):
        assert torch.compile(breaking, backend="eager")(IMAGE) == [*expected[:3], torch.uint8]


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_form_of_an_adaptive_call(dims: int, dtype: torch.dtype) -> None:
    """As max pooling, but for offsets: in their place are flat indices."""
    x = torch.rand(2, 3, *[7] * dims, requires_grad=True)
    name, both = f"adaptive_max_pool{dims}d", {"return_indices": True}
    ours, theirs = getattr(F, name), getattr(torch_F, name)
    flat = torch.int64 if dtype == torch.uint8 else dtype
    module = getattr(nn, f"AdaptiveMaxPool{dims}d")
    forms: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (theirs, {}, {}),
        (theirs, both, both),
        (getattr(torch_F, f"{name}_with_indices"), {}, both),
        (getattr(torch_F, f"{name}_with_indices"), {"return_indices": False}, both),
        (lambda input, output_size: module(output_size)(input), {}, {}),
        (lambda input, output_size: module(output_size, True)(input), {}, both),
    ]
    if dims == 1:
        forms.append((torch.adaptive_max_pool1d, {}, both))
    for function, asked, returned in forms:
        with patched(dtype):
            got = [function(x, 3, **asked), function(output_size=3, input=x, **asked)]
        for each in got:
            check(each, ours(x, 3, **returned, index_dtype=flat))
    with patched(dtype):
        check(theirs(x, 3, True), ours(x, 3, True, index_dtype=flat))


def pool_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """With indices of its own, as what runs in a graph of its own must return."""
    values, indices = torch_F.max_pool2d(x, 2, return_indices=True)
    return values, indices.clone()


class Pools(torch.autograd.Function):
    """It pools in its forward and its backward, whose results are larger with larger indices."""

    generate_vmap_rule = True

    @staticmethod
    def pooled(x: Tensor) -> Tensor:
        values, indices = pool_of(x)
        return values * indices.itemsize

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return Pools.pooled(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch_F.interpolate(Pools.pooled(*ctx.saved_tensors) * grad, scale_factor=2)


class PoolsForwardMode(Pools):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return Pools.pooled(tangent)


def summed(x: Tensor) -> Tensor:
    return Pools.apply(x).sum()


X = torch.rand(2, 3, 4, 4)
POOLED = torch_F.max_pool2d(X, 2)
GRADIENT = torch_F.interpolate(POOLED, scale_factor=2)


@pytest.mark.parametrize("place", ["around", "inside"])
def test_compiled_code_of_others(place: str) -> None:
    """Functions that pool in their backward, regions that are compiled once, and torch.scan.

    A region runs as it does outside, whether or not it pools.
    """
    from torch._higher_order_ops.scan import scan

    plain, pooling = map(torch.compiler.nested_compile_region, (lambda x: x.sin(), pool_of))

    def regions(x: Tensor) -> Any:
        return plain(x), *pooling(x), pool_of(x)[1]

    def scans(x: Tensor) -> Any:
        sums = scan(lambda carry, x: (carry + x, carry * x), torch.zeros(4), x[0, 0])
        return *sums, *scan(lambda carry, x: (carry + 1, pool_of(x)[1]), torch.zeros(()), x)

    def run(function: Any, x: Tensor, backend: str = "aot_eager") -> Any:
        torch.compiler.reset()
        mode = patched(torch.uint8)
        around = place == "around"
        return (mode(compiled(function, backend)) if around else compiled(mode(function), backend))(
            x
        )

    x = X.clone().requires_grad_()
    assert same(torch.autograd.grad(run(summed, x), x)[0], GRADIENT)
    offsets = F.max_pool2d(X, 2, return_indices=True, index_dtype=torch.uint8)[1]
    if not torch.__version__.startswith("2.8."):  # which shows regions to patched
        assert all_same(run(regions, X), (*regions(X)[:3], offsets))
    assert all_same(run(scans, X, "eager"), (*scans(X)[:3], offsets))


@pytest.mark.skipif(
    not hasattr(torch.overrides, "redispatch_function"), reason="PyTorch has no redispatch_function"
)
def test_functions_under_transforms() -> None:
    with patched(torch.uint8):
        assert same(torch.func.grad(summed)(X), GRADIENT)
        assert same(torch.vmap(torch.func.grad(summed))(X[:, None])[:, 0], GRADIENT)
        assert same(torch.vmap(Pools.apply)(X[:, None])[:, 0], POOLED)
        assert all_same(torch.func.jvp(PoolsForwardMode.apply, (X,), (X,)), (POOLED, POOLED))


@torch.library.custom_op("maxunpool_tests::pool_indices", mutates_args=())
def custom_op(x: Tensor) -> Tensor:
    return pool_of(x)[1]


async def halfway() -> None:
    with patched(torch.uint8):
        await asyncio.sleep(0)


def test_what_is_not_reached() -> None:
    """As docs/pytorch.md lists it: if PyTorch changes that, so does the list."""
    with patched(torch.uint8):
        graph = torch.fx.symbolic_trace(nn.Sequential(nn.MaxPool2d(2, return_indices=True)))
        assert graph(X)[1].dtype == torch.uint8
        assert custom_op(X).dtype == torch.int64
    assert graph(X)[1].dtype == torch.int64

    async def beside() -> list[torch.dtype]:
        begun = asyncio.create_task(halfway())
        await asyncio.sleep(0)
        during = dtype_of_indices()
        await begun
        return [during, dtype_of_indices()]

    assert asyncio.run(beside()) == [torch.uint8, torch.int64]
