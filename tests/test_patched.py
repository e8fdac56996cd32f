# SPDX-License-Identifier: BSD-3-Clause
"""Inside patched(), torch.nn.functional's max pooling and unpooling are this package's."""

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_F
from cases import INDEX_DTYPES, all_same, same
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import tree_leaves as leaves
from torch.utils.checkpoint import checkpoint

import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxPool2d, _patch, patched

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nothing_is_left(single_threaded_torch: None) -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0
    assert dtype_of_indices() == torch.int64


def dtype_of_indices(x: Tensor = IMAGE) -> torch.dtype:
    """The dtype of the indices that torch.nn's pooling returns at this place."""
    indices: Tensor = torch_F.max_pool2d(x, 2, return_indices=True)[1]
    return indices.dtype


def loss(x: Tensor, of: Any = torch_F, **options: Any) -> Tensor:
    """Windows overlap. The size of an index is a factor, which tells its dtype."""
    values, indices = of.max_pool2d(x, 3, 2, 1, return_indices=True, **options)
    output = of.max_unpool2d(values, indices, 3, 2, 1, output_size=x.shape[-2:])
    return output.square().sum() * indices.itemsize


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    x = IMAGE.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


OURS = gradient(partial(loss, of=F, index_dtype=torch.uint8))


def forms_of(name: str) -> dict[str, Callable[..., Any]]:
    """The forms of a function such as max_pool2d. torch has some of them too."""
    plain, with_indices = getattr(torch_F, name), getattr(torch_F, f"{name}_with_indices")
    return {
        "without indices": plain,
        "return_indices by name": partial(plain, return_indices=True),
        "return_indices by position": lambda *arguments: plain(*arguments, True),
        "with_indices, asked for none": partial(with_indices, return_indices=False),
        "torch": getattr(torch, name, plain),
        "torch, with_indices": getattr(torch, f"{name}_with_indices", with_indices),
    }


# Positional arguments up to return_indices; max_pool's in ceil mode.
BEFORE_RETURN_INDICES = {"max_pool": (3, 2, 1, 1, True), "adaptive_max_pool": (3,)}


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("form", forms_of("max_pool2d"))
@pytest.mark.parametrize("kind", BEFORE_RETURN_INDICES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_form_of_pooling(dims: int, kind: str, form: str) -> None:
    """Results are equal, and come from the same operator."""
    name, arguments = f"{kind}{dims}d", BEFORE_RETURN_INDICES[kind]
    x = torch.rand(2, 3, *[8] * dims, requires_grad=True)
    function = forms_of(name)[form]
    returns_indices = isinstance(function(x, *arguments), tuple)  # as PyTorch's own does
    ours = partial(getattr(F, name), return_indices=returns_indices)
    for dtype in INDEX_DTYPES:
        with patched(index_dtype=dtype):
            got = leaves(function(x, *arguments))
        has_offsets = kind == "max_pool"  # indices of adaptive pooling are flat
        returned = torch.int64 if dtype == torch.uint8 and not has_offsets else dtype
        expected = leaves(ours(x, *arguments, index_dtype=returned))
        assert all_same(got, expected)
        assert got[0].grad_fn.name() == expected[0].grad_fn.name()


def test_every_name_of_the_functions_is_in_the_table() -> None:
    """A release of PyTorch with a further name fails here."""
    pattern = r"(adaptive_)?max_(un)?pool[123]d(_with_indices)?"
    names = [(of, name) for of in (torch, torch_F) for name in dir(of)]
    found = {getattr(of, name) for of, name in names if re.fullmatch(pattern, name)}
    assert found == _patch._REPLACEMENTS.keys()


ROW, TWICE = torch.tensor([[[1.0, 4.0]]]), torch.tensor([[[0, 0]]])


def test_modules() -> None:
    """torch.nn's are covered. This package's modules and functions keep their own arguments."""
    ours = MaxPool2d(2, return_indices=True, index_dtype=torch.int32)
    with patched(index_dtype=torch.uint8, reduce="sum"):
        assert dtype_of_indices(nn.Parameter(IMAGE.clone())) == torch.uint8
        assert nn.MaxUnpool2d(2)(ROW, TWICE)[0, 0, 0] == 5
        assert ours(IMAGE)[1].dtype == torch.int32
        assert F.max_unpool2d(ROW, TWICE, 2)[0, 0, 0] == 4
        assert nn.MaxPool2d(17)(torch.rand(1, 40, 40)).shape == (1, 2, 2)  # without offsets


def test_nesting() -> None:
    """Also of decorated functions, and where an exception ends it."""
    outer, inner = patched(index_dtype=torch.int32), patched(index_dtype=torch.uint8)

    @inner
    def recursive(depth: int) -> None:
        """Documented."""
        with outer, inner, BaseTorchFunctionMode():
            assert dtype_of_indices() == torch.uint8
            if depth == 0:
                raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            recursive(depth - 1)
        assert dtype_of_indices() == torch.uint8
        raise ZeroDivisionError

    assert (recursive.__name__, recursive.__doc__) == ("recursive", "Documented.")
    with outer, outer:
        with pytest.raises(ZeroDivisionError):
            recursive(2)
        assert dtype_of_indices() == torch.int32


def test_threads() -> None:
    """patched() holds for one thread. The backward may run in another."""
    x = IMAGE.clone().requires_grad_()
    with patched(index_dtype=torch.uint8), ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(dtype_of_indices).result() == torch.int64
        elsewhere.submit(loss(x).backward).result()
    assert same(x.grad, OURS)


async def async_generator() -> Any:
    yield


class Generates:
    def __call__(self) -> Any:
        yield


class Awaits(nn.Module):
    async def forward(self) -> None:
        """Nothing."""


NOT_DONE = r"^patched: expected a function that is done"


@pytest.mark.parametrize(
    "wrong",
    [lambda: (yield), asyncio.sleep, async_generator, partial(Generates()), Awaits(), nn.ReLU, 3],
)
def test_what_it_cannot_decorate(wrong: Any) -> None:
    """What only begins its work when it is called, a class, and what is no function."""
    with pytest.raises(TypeError, match=NOT_DONE):
        patched()(wrong)


def test_what_is_done_too_late() -> None:
    """Functions that look as if they were done, but return what another one has only begun."""
    coroutine = asyncio.sleep(0)
    for begun in ((n for n in (1, 2)), coroutine, async_generator()):
        function = patched()(lambda begun=begun: begun)
        with pytest.raises(TypeError, match=NOT_DONE):
            function()
    coroutine.close()


def test_arguments_are_checked() -> None:
    with pytest.raises(
        TypeError, match=r"^patched: .*, as in patched\(\)\(function\), but got <fun"
    ):
        patched(pool_of)
    with pytest.raises(ValueError, match=r"^patched: expected index_dtype .* got torch.int16$"):
        patched(index_dtype=torch.int16)
    with pytest.raises(ValueError, match=r"^patched: expected reduce .* got 'mean'$"):
        patched(reduce="mean")


def test_a_subclass_that_does_not_implement_the_function() -> None:
    """Other subclasses are in test_ecosystem."""
    lacking: Any = type("Lacking", (Tensor,), {"__torch_function__": lambda *_: NotImplemented})
    with patched(), pytest.raises(TypeError, match=r"^max_unpool2d: .* got \['Lacking'\]"):
        torch_F.max_unpool2d(ROW.as_subclass(lacking), TWICE, 2)


def test_graph_breaks() -> None:
    """Dynamo leaves a mode on after a graph break, so patched wraps one instead of being one."""
    outside = patched(index_dtype=torch.uint8)

    def breaking(x: Tensor) -> list[torch.dtype]:
        with patched(index_dtype=torch.int32):
            first = dtype_of_indices(x)
            torch._dynamo.graph_break()
            with outside:
                torch._dynamo.graph_break()
                second = dtype_of_indices(x)
            third = dtype_of_indices(x)
        return [first, second, third, dtype_of_indices(x)]

    expected = [torch.int32, torch.uint8, torch.int32, torch.int64]
    assert torch.compile(breaking, backend="eager")(IMAGE) == breaking(IMAGE) == expected
    own = IMAGE.as_subclass(type("Own", (Tensor,), {}))  # calls of a subclass are not compiled
    if torch.__version__ >= "2.11":
        with patched(index_dtype=torch.uint8):
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


POOLED, OFFSETS = F.max_pool2d(IMAGE, 2, return_indices=True, index_dtype=torch.uint8)
GRADIENT = torch_F.interpolate(POOLED, scale_factor=2)


Compile = Callable[..., Callable[[Tensor], Any]]


@pytest.fixture(params=["around", "inside"])
def compiled(request: pytest.FixtureRequest) -> Compile:
    """Compiles a function, and patches torch.nn.functional around the compiled code or inside."""
    mode = patched(index_dtype=torch.uint8)

    def compile(function: Callable[[Tensor], Any], backend: str = "aot_eager") -> Any:
        compiler = torch.compile(fullgraph=True, backend=backend)
        return mode(compiler(function)) if request.param == "around" else compiler(mode(function))

    return compile


# Below: functions that pool in their backward, and code that Dynamo runs apart from all modes.


def test_compiled_checkpoint(compiled: Compile) -> None:
    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(loss, x, use_reentrant=False)

    assert same(gradient(compiled(checkpointed)), OURS)


def test_compiled_function_with_a_backward_of_its_own(compiled: Compile) -> None:
    assert same(gradient(compiled(summed)), GRADIENT)


def test_compiled_branches(compiled: Compile) -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, pool_of, lambda x: pool_of(x + 1), (x,))[1]

    assert same(compiled(branches, "eager")(IMAGE), OFFSETS)


def test_compiled_regions(compiled: Compile) -> None:
    """A region that is compiled once runs as it does outside of patched(), even if it pools."""
    plain, pooling = map(torch.compiler.nested_compile_region, (lambda x: x.sin(), pool_of))

    def regions(x: Tensor) -> Any:
        return plain(x), *pooling(x), pool_of(x)[1]

    assert all_same(compiled(regions)(IMAGE), (*regions(IMAGE)[:3], OFFSETS))


def test_compiled_scan(compiled: Compile) -> None:
    from torch._higher_order_ops.scan import scan

    def scans(x: Tensor) -> Any:
        sums = scan(lambda carry, x: (carry + x, carry * x), torch.zeros(8), x[0, 0])
        return *sums, *scan(lambda carry, x: (carry + 1, pool_of(x)[1]), torch.zeros(()), x)

    assert all_same(compiled(scans, "eager")(IMAGE), (*scans(IMAGE)[:3], OFFSETS))


def test_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of functions with a backward of their own, if PyTorch shows these to modes."""
    vmap, grad = torch.vmap, torch.func.grad
    with patched(index_dtype=torch.uint8):
        assert same(vmap(grad(loss))(IMAGE), OURS)
        if hasattr(torch.overrides, "redispatch_function"):
            assert same(grad(summed)(IMAGE), GRADIENT)
            assert same(vmap(grad(summed))(IMAGE[:, None])[:, 0], GRADIENT)
            assert same(vmap(Pools.apply)(IMAGE[:, None])[:, 0], POOLED)
        graph = torch.fx.symbolic_trace(pool_of)
        monkeypatch.setattr("maxunpool_cuda._patch._redispatch", None)
        assert same(vmap(Pools.apply)(IMAGE[:, None])[:, 0], POOLED * torch.int64.itemsize)
    assert graph(IMAGE)[1].dtype == torch.uint8


@pytest.mark.skipif(
    not hasattr(torch.overrides, "redispatch_function"), reason="no mode in a backward"
)
def test_what_a_checkpoint_computes_again() -> None:
    x = IMAGE.clone().requires_grad_()
    with patched(index_dtype=torch.uint8):
        checkpoint(loss, x, use_reentrant=False).backward()
    assert same(x.grad, OURS)
