"""Inside patched(), torch.nn.functional's max pooling and unpooling are this package's.

What models compute around which or inside of which it is: test_published.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_F
from cases import INDEX_DTYPES, same
from torch import Tensor, nn
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


def inputs(dims: int) -> Tensor:
    x = (IMAGE[0], IMAGE, IMAGE[:, :, None].expand(2, 3, 4, 9, 8))[dims - 1]
    return x.clone().requires_grad_()


def check(got: Any, expected: Any) -> None:
    """Equal, and by the same operator."""
    got, expected = ([r] if isinstance(r, Tensor) else r for r in (got, expected))
    assert all_same(got, expected)
    assert got[0].grad_fn.name() == expected[0].grad_fn.name()


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["max_pool", "adaptive_max_pool"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_form_of_pooling(dims: int, kind: str, dtype: torch.dtype) -> None:
    """Indices of adaptive pooling are flat where those of max pooling are offsets."""
    x, name, adaptive = inputs(dims), f"{kind}{dims}d", kind == "adaptive_max_pool"
    ours, theirs = getattr(F, name), getattr(torch_F, name)
    with_indices = getattr(torch_F, f"{name}_with_indices")
    assert theirs(x, 3).grad_fn.name() != ours(x, 3).grad_fn.name()  # by which check sees
    forms: list[tuple[Any, dict[str, Any], bool]] = [
        (theirs, {}, False),
        (theirs, {"return_indices": True}, True),
        (with_indices, {}, True),
        (with_indices, {"return_indices": False}, True),
    ]
    if hasattr(torch, name):
        forms.append((getattr(torch, name), {}, adaptive))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 3, 2, 1), {}),
        ((x, 3), {"stride": [], "ceil_mode": True}),
        ((), {"padding": 1, "kernel_size": [3], "input": x, "dilation": 1}),
    ]
    every: tuple[Any, ...] = (x, 3, 2, 1, 1, True, True)
    if adaptive:
        calls, every = [((x, 3), {}), ((), {"output_size": 3, "input": x})], (x, 3, True)
    returned = torch.int64 if adaptive and dtype == torch.uint8 else dtype
    for (function, asked, both), (arguments, named) in itertools.product(forms, calls):
        with patched(dtype):
            got = function(*arguments, **named, **asked)
        check(got, ours(*arguments, **named, return_indices=both, index_dtype=returned))
    with patched(dtype):
        got = theirs(*every)
        if name == "max_pool1d":
            check(torch.max_pool1d_with_indices(*every[:-1]), got)
    check(got, ours(*every, index_dtype=returned))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_form_of_unpooling(dims: int) -> None:
    x, pool = inputs(dims), getattr(torch_F, f"max_pool{dims}d")
    size, (pooled, indices) = x.shape[-dims:], pool(x, 2, return_indices=True)
    theirs, ours = (getattr(of, f"max_unpool{dims}d") for of in (torch_F, F))
    expected = ours(pooled, indices, 2, output_size=size)
    with patched():
        check(theirs(pooled, indices, 2, 2, 0, size), expected)
        check(theirs(indices=indices, output_size=[*size], kernel_size=2, input=pooled), expected)


def test_modules_and_reduce() -> None:
    """torch.nn's are covered, subclasses too; this package's do what they were told."""
    subclass = type("Own", (nn.MaxPool2d,), {})
    x, indices = torch.tensor([[[1.0, 4.0]]]), torch.tensor([[[0, 0]]])
    with patched(reduce="sum"):
        assert dtype_of_indices() == torch.int64
    with patched(torch.int32):
        for dims in (1, 2, 3):
            adaptive = getattr(nn, f"AdaptiveMaxPool{dims}d")(2, True)
            assert adaptive(inputs(dims))[1].dtype == torch.int32
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
    @patched(torch.uint8)
    def recursive(depth: int) -> list[torch.dtype]:
        """Documented."""
        return [dtype_of_indices(), *(recursive(depth - 1) if depth else ())]

    assert (recursive.__name__, recursive.__doc__) == ("recursive", "Documented.")
    assert recursive(2) == [torch.uint8] * 3
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


class Unpoolable(Tensor):
    """Subclasses that implement the function are in test_ecosystem."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_errors_are_this_packages() -> None:
    """What it refuses; and what torch.nn refuses already: arguments that only ours take."""
    x, bad = torch.rand(1, 1, 2, 2), torch.full((1, 1, 2, 2), 99)
    with patched(torch.uint8):
        words = r"^max_unpool2d: expected .* but got \['Unpoolable'\]"
        with pytest.raises(TypeError, match=words):
            torch_F.max_unpool2d(x.as_subclass(Unpoolable), bad, 2)
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


def test_threads() -> None:
    """Each has its own; backward may run in any."""
    x = IMAGE.clone().requires_grad_()
    with patched(torch.uint8), ThreadPoolExecutor(1) as elsewhere:
        loss = round_trip(x)[0].square().sum()
        assert elsewhere.submit(dtype_of_indices).result() == torch.int64
        elsewhere.submit(loss.backward).result()
        assert dtype_of_indices() == torch.uint8
    assert same(x.grad, OURS[0])


def compiled(function: Any, place: str, backend: str = "aot_eager") -> Any:
    """With patched around what is compiled, or inside of it."""
    torch.compiler.reset()
    mode, compiler = patched(torch.uint8), torch.compile(fullgraph=True, backend=backend)
    return mode(compiler(function)) if place == "around" else compiler(mode(function))


def test_compiled_with_one_inside_of_another() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def nested(x: Tensor) -> tuple[Tensor, ...]:
        with patched(torch.int32):
            with patched(torch.uint8):
                output, *inner = round_trip(x)
            return output, *inner, round_trip(x)[1]

    *results, outer = with_gradient(nested)
    assert all_same(results, OURS)
    assert outer.dtype == torch.int32


def test_graph_breaks() -> None:
    """After which Dynamo leaves modes on that it knows for such."""
    outside = patched(torch.uint8)

    def breaking(x: Tensor) -> list[torch.dtype]:
        found = []
        with patched(torch.int32):
            found.append(dtype_of_indices(x))
            torch._dynamo.graph_break()
            with outside:
                torch._dynamo.graph_break()
                found.append(dtype_of_indices(x))
            found.append(dtype_of_indices(x))
        return [*found, dtype_of_indices(x)]

    expected = [torch.int32, torch.uint8, torch.int32, torch.int64]
    assert torch.compile(breaking, backend="eager")(IMAGE) == breaking(IMAGE) == expected
    own = IMAGE.as_subclass(type("Own", (Tensor,), {}))  # which is not compiled
    with patched(torch.uint8):
        assert torch.compile(breaking, backend="eager")(IMAGE) == [*expected[:3], torch.uint8]
        if not torch.__version__.startswith("2.8."):  # which raises a TypeError
            assert torch.compile(dtype_of_indices, backend="eager")(own) == torch.uint8


def pool_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """With indices of its own, as what runs in a graph of its own must return.

    Dynamo hands arguments to modes as they are here: by place.
    """
    values, indices = torch_F.max_pool2d_with_indices(x, 2, 2, 0, 1, False, True)
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
    """Functions that pool in their backward, and what Dynamo runs apart from all modes.

    A region that is compiled once runs as it does outside, whether or not it pools.
    """
    from torch._higher_order_ops.scan import scan

    plain, pooling = map(torch.compiler.nested_compile_region, (lambda x: x.sin(), pool_of))

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(round_trip, x, use_reentrant=False)

    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, pool_of, lambda x: pool_of(x + 1), (x,))[1]

    def regions(x: Tensor) -> Any:
        return plain(x), *pooling(x), pool_of(x)[1]

    def scans(x: Tensor) -> Any:
        sums = scan(lambda carry, x: (carry + x, carry * x), torch.zeros(4), x[0, 0])
        return *sums, *scan(lambda carry, x: (carry + 1, pool_of(x)[1]), torch.zeros(()), x)

    assert all_same(with_gradient(compiled(checkpointed, place)), OURS)
    x = X.clone().requires_grad_()
    assert same(torch.autograd.grad(compiled(summed, place)(x), x)[0], GRADIENT)
    offsets = F.max_pool2d(X, 2, return_indices=True, index_dtype=torch.uint8)[1]
    assert same(compiled(branches, place, "eager")(X), offsets)
    if not torch.__version__.startswith("2.8."):  # which shows regions to patched
        assert all_same(compiled(regions, place)(X), (*regions(X)[:3], offsets))
    assert all_same(compiled(scans, place, "eager")(X), (*scans(X)[:3], offsets))


def test_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions; and of those with a backward of their own, if PyTorch shows these to modes."""
    x, grad = IMAGE[:, :1, :4, :4].double(), torch.func.grad
    ours, theirs = (lambda x, of=of: round_trip(x, of)[0].square().sum() for of in (F, torch_F))
    for transform in (lambda f: torch.vmap(grad(f)), lambda f: torch.func.jacrev(grad(f))):
        with patched():
            got = transform(theirs)(x)
        assert same(got, transform(ours)(x))
    with patched(torch.uint8), monkeypatch.context() as older:
        older.setattr("maxunpool_cuda.patch._redispatch", None)
        assert same(torch.vmap(Pools.apply)(X[:, None])[:, 0], POOLED * torch.int64.itemsize)
    if not hasattr(torch.overrides, "redispatch_function"):
        pytest.skip("PyTorch has no redispatch_function")
    with patched(torch.uint8):
        assert same(grad(summed)(X), GRADIENT)
        assert same(torch.vmap(grad(summed))(X[:, None])[:, 0], GRADIENT)
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
        functions = torch.fx.symbolic_trace(lambda x: round_trip(x))
        module = torch.fx.symbolic_trace(nn.Sequential(nn.MaxPool2d(2, return_indices=True)))
        assert module(X)[1].dtype == torch.uint8
        assert custom_op(X).dtype == torch.int64
        loss = checkpoint(round_trip, IMAGE.clone().requires_grad_(), use_reentrant=False)[0].sum()
    assert all_same(functions(IMAGE), OURS[1:])
    assert module(X)[1].dtype == torch.int64
    with pytest.raises(CheckpointError):  # PyTorch notices
        loss.backward()

    async def beside() -> list[torch.dtype]:
        begun = asyncio.create_task(halfway())
        await asyncio.sleep(0)
        during = dtype_of_indices()
        await begun
        return [during, dtype_of_indices()]

    assert asyncio.run(beside()) == [torch.uint8, torch.int64]
