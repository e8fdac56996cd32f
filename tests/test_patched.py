"""Inside patched(), torch.nn.functional's max pooling and unpooling are this package's.

What models compute around which or inside of which it is: test_published.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_F
from cases import INDEX_DTYPES, same
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxPool2d, MaxUnpool2d, patched

IMAGE = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
WINDOW = (3, 2, 1)  # windows overlap


@pytest.fixture(autouse=True)
def nothing_is_left(single_threaded_torch: None) -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0
    assert dtype_of_indices() == torch.int64


def dtype_of_indices(x: Tensor = IMAGE) -> torch.dtype:
    """The dtype of the indices that torch.nn's pooling returns at this place."""
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


# What is covered


def check(got: Any, expected: Any) -> None:
    """Results are equal, and come from the same operator."""
    got, expected = ([r] if isinstance(r, Tensor) else r for r in (got, expected))
    assert all_same(got, expected)
    assert got[0].grad_fn.name() == expected[0].grad_fn.name()


# Positional arguments, up to return_indices, or named ones.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("max_pool", (3, 2, 1, 1, True), {}),
    ("max_pool", (), {"padding": 1, "stride": [], "kernel_size": [3], "dilation": 1}),
    ("adaptive_max_pool", (3,), {}),
    ("adaptive_max_pool", (), {"output_size": 3}),
]


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "placed", "named"), CALLS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_form_of_pooling(
    dims: int, kind: str, placed: Any, named: dict[str, Any], dtype: torch.dtype
) -> None:
    """Indices of adaptive pooling are flat where those of max pooling are offsets."""
    x = torch.rand(2, 3, *[9] * dims, requires_grad=True)
    name, is_flat = f"{kind}{dims}d", kind == "adaptive_max_pool"
    ours, theirs = getattr(F, name), getattr(torch_F, name)
    with_indices = getattr(torch_F, f"{name}_with_indices")
    forms = [  # functions, and whether they return indices
        (theirs, False),
        (partial(theirs, return_indices=True), True),
        (with_indices, True),
        (partial(with_indices, return_indices=False), True),
        (getattr(torch, name, theirs), is_flat and dims == 1),
        (getattr(torch, f"{name}_with_indices", with_indices), True),
    ]
    if placed:
        forms.append((lambda *every: theirs(*every, True), True))
    returned = torch.int64 if is_flat and dtype == torch.uint8 else dtype
    for function, both in forms:
        with patched(dtype):
            got = function(x, *placed, **named)
        check(got, ours(x, *placed, **named, return_indices=both, index_dtype=returned))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_form_of_unpooling(dims: int) -> None:
    x = torch.rand(2, 3, *[9] * dims, requires_grad=True)
    pooled, indices = getattr(torch_F, f"max_pool{dims}d")(x, 2, return_indices=True)
    theirs, ours = (getattr(of, f"max_unpool{dims}d") for of in (torch_F, F))
    named = {"indices": indices, "output_size": [9] * dims, "kernel_size": 2, "input": pooled}
    with patched():
        check(theirs(pooled, indices, 2, 2, 0, x.shape[2:]), ours(**named))
        check(theirs(**named), ours(**named))


ROW, TWICE = torch.tensor([[[1.0, 4.0]]]), torch.tensor([[[0, 0]]])
OwnPool = type("OwnPool", (nn.MaxPool2d,), {})
# torch.nn's calls are covered, subclasses' too. This package's keep their own arguments.
COVERED: dict[str, tuple[Callable[[], Any], Any]] = {
    "pool": (lambda: nn.MaxPool2d(2, return_indices=True)(IMAGE)[1].dtype, torch.uint8),
    "subclass": (lambda: OwnPool(2, return_indices=True)(IMAGE)[1].dtype, torch.uint8),
    "parameter": (lambda: dtype_of_indices(nn.Parameter(IMAGE.clone())), torch.uint8),
    "unpool": (lambda: nn.MaxUnpool2d(2)(ROW, TWICE)[0, 0, 0], 5),
    "our pool": (
        lambda: MaxPool2d(2, return_indices=True, index_dtype=torch.int32)(IMAGE)[1].dtype,
        torch.int32,
    ),
    "our unpool": (lambda: MaxUnpool2d(2)(ROW, TWICE)[0, 0, 0], 4),
    "our function": (lambda: F.max_unpool2d(ROW, TWICE, 2)[0, 0, 0], 4),
}


@pytest.mark.parametrize(("call", "expected"), COVERED.values(), ids=COVERED)
def test_what_is_covered(call: Callable[[], Any], expected: Any) -> None:
    with patched(torch.uint8, reduce="sum"):
        assert call() == expected


# Where it holds


def test_nesting_and_exceptions() -> None:
    outer, inner = patched(torch.int32), patched(torch.uint8)

    def fails() -> None:
        with inner:
            with outer, inner, BaseTorchFunctionMode():
                assert dtype_of_indices() == torch.uint8
            assert dtype_of_indices() == torch.uint8
            raise ZeroDivisionError

    with outer, outer:
        with pytest.raises(ZeroDivisionError):
            fails()
        assert dtype_of_indices() == torch.int32
    assert dtype_of_indices() == torch.int64


def test_decorated_functions() -> None:
    @patched(torch.uint8)
    def recursive(depth: int) -> list[torch.dtype]:
        """Documented."""
        return [dtype_of_indices(), *(recursive(depth - 1) if depth else ())]

    assert (recursive.__name__, recursive.__doc__) == ("recursive", "Documented.")
    with patched(torch.int32):
        assert recursive(2) == [torch.uint8] * 3
        assert dtype_of_indices() == torch.int32


def test_threads() -> None:
    """patched() holds for one thread. The backward may run in another."""
    x = IMAGE.clone().requires_grad_()
    with patched(torch.uint8), ThreadPoolExecutor(1) as elsewhere:
        loss = round_trip(x)[0].square().sum()
        assert elsewhere.submit(dtype_of_indices).result() == torch.int64
        elsewhere.submit(loss.backward).result()
        assert dtype_of_indices() == torch.uint8
    assert same(x.grad, OURS[0])


async def async_generator() -> Any:
    yield


class Unpoolable(Tensor):
    """A subclass that does not implement the function. Others are in test_ecosystem."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


BAD, LARGE = torch.full((1, 1, 2), 99), torch.rand(1, 40, 40)
DONE, UNEXPECTED = "^patched: expected a function that is done", "unexpected keyword argument"
# This package refuses the first calls, torch.nn the last two, whose arguments only ours has.
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *(
        (lambda wrong=wrong: patched()(wrong), TypeError, DONE)
        for wrong in (lambda: (yield), asyncio.sleep, async_generator, nn.ReLU, 3)
    ),
    (lambda: patched(torch.int16), ValueError, "^patched: expected index_dtype to be torch.int64"),
    (lambda: patched(reduce="mean"), ValueError, "^patched: expected reduce to be 'last'"),
    (
        lambda: torch_F.max_unpool2d(ROW.as_subclass(Unpoolable), BAD, 2),
        *(TypeError, r"^max_unpool2d: expected .* but got \['Unpoolable'\]"),
    ),
    (
        lambda: torch_F.max_pool2d(LARGE, 17, return_indices=True),
        *(ValueError, "^max_pool2d: expected kernel_size of at most 256"),
    ),
    (lambda: torch_F.max_unpool2d(ROW, BAD, 2), RuntimeError, "^max_unpool2d: expected "),
    (lambda: torch_F.max_pool2d(LARGE, 2, index_dtype=torch.uint8), TypeError, UNEXPECTED),
    (lambda: torch_F.max_unpool2d(ROW, BAD, 2, reduce="sum"), TypeError, UNEXPECTED),
]


@pytest.mark.parametrize(("call", "exception", "words"), REFUSED)
def test_errors(call: Callable[[], Any], exception: type[Exception], words: str) -> None:
    with patched(torch.uint8):
        with pytest.raises(exception, match=words):
            call()
        assert torch_F.max_pool2d(LARGE, 17).shape == (1, 2, 2)  # without indices any window fits


# Compilers and transforms


def test_graph_breaks() -> None:
    """Dynamo leaves a mode on after a graph break, so patched wraps one instead of being one."""
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
    if torch.__version__ < "2.9":
        pytest.skip("PyTorch 2.8 compiles no call of a subclass inside of patched")
    own = IMAGE.as_subclass(type("Own", (Tensor,), {}))  # calls of a subclass are not compiled
    with patched(torch.uint8):
        assert torch.compile(dtype_of_indices, backend="eager")(own) == torch.uint8


def pool_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Indices are cloned, as a region with a graph of its own may not return an alias.

    Arguments are positional, as Dynamo hands them to modes.
    """
    values, indices = torch_F.max_pool2d_with_indices(x, 2, 2, 0, 1, False, True)
    return values, indices.clone()


class Pools(torch.autograd.Function):
    """Pools in forward and backward. Both multiply by an index's size, which tells its dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        values, indices = pool_of(x)
        return values * indices.itemsize

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch_F.interpolate(Pools.forward(*ctx.saved_tensors) * grad, scale_factor=2)


def summed(x: Tensor) -> Tensor:
    return Pools.apply(x).sum()


X = torch.rand(2, 3, 4, 4)
POOLED = torch_F.max_pool2d(X, 2)
GRADIENT = torch_F.interpolate(POOLED, scale_factor=2)


@pytest.mark.parametrize("place", ["around", "inside"])
def test_compiled_code_of_others(place: str) -> None:
    """Functions that pool in their backward, and code that Dynamo runs apart from all modes.

    A region that is compiled once runs as it does outside of patched(), even if it pools.
    """
    from torch._higher_order_ops.scan import scan

    plain, pooling = map(torch.compiler.nested_compile_region, (lambda x: x.sin(), pool_of))

    def compiled(function: Any, backend: str = "aot_eager") -> Any:
        torch.compiler.reset()
        mode, compiler = patched(torch.uint8), torch.compile(fullgraph=True, backend=backend)
        return mode(compiler(function)) if place == "around" else compiler(mode(function))

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(round_trip, x, use_reentrant=False)

    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, pool_of, lambda x: pool_of(x + 1), (x,))[1]

    def regions(x: Tensor) -> Any:
        return plain(x), *pooling(x), pool_of(x)[1]

    def scans(x: Tensor) -> Any:
        sums = scan(lambda carry, x: (carry + x, carry * x), torch.zeros(4), x[0, 0])
        return *sums, *scan(lambda carry, x: (carry + 1, pool_of(x)[1]), torch.zeros(()), x)

    assert all_same(with_gradient(compiled(checkpointed)), OURS)
    x = X.clone().requires_grad_()
    assert same(torch.autograd.grad(compiled(summed)(x), x)[0], GRADIENT)
    offsets = F.max_pool2d(X, 2, return_indices=True, index_dtype=torch.uint8)[1]
    assert same(compiled(branches, "eager")(X), offsets)
    if not torch.__version__.startswith("2.8."):  # 2.8 shows regions to patched
        assert all_same(compiled(regions)(X), (*regions(X)[:3], offsets))
    assert all_same(compiled(scans, "eager")(X), (*scans(X)[:3], offsets))


def test_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of functions with a backward of their own, if PyTorch shows these to modes."""
    grad = torch.func.grad
    with patched(torch.uint8):
        got = torch.vmap(grad(lambda x: round_trip(x)[0].square().sum()))(IMAGE)
    assert same(got, OURS[0])
    with patched(torch.uint8), monkeypatch.context() as older:
        older.setattr("maxunpool_cuda.patch._redispatch", None)
        assert same(torch.vmap(Pools.apply)(X[:, None])[:, 0], POOLED * torch.int64.itemsize)
    if not hasattr(torch.overrides, "redispatch_function"):
        pytest.skip("PyTorch has no redispatch_function")
    with patched(torch.uint8):
        assert same(grad(summed)(X), GRADIENT)
        assert same(torch.vmap(grad(summed))(X[:, None])[:, 0], GRADIENT)
        assert same(torch.vmap(Pools.apply)(X[:, None])[:, 0], POOLED)
