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
from cases import all_same, same
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
    for dtype in (torch.int32, torch.uint8):
        with patched(index_dtype=dtype):
            got = leaves(function(x, *arguments))
        is_flat = kind == "adaptive_max_pool"
        returned = torch.int64 if dtype == torch.uint8 and is_flat else dtype
        options: Any = {"return_indices": returns_indices, "index_dtype": returned}
        expected = leaves(getattr(F, name)(x, *arguments, **options))
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
    def fails() -> None:
        """Documented."""
        with outer, inner, BaseTorchFunctionMode():
            assert dtype_of_indices() == torch.uint8
            raise ZeroDivisionError

    assert (fails.__name__, fails.__doc__) == ("fails", "Documented.")
    with outer, outer:
        with pytest.raises(ZeroDivisionError):
            fails()
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


WRONG = [lambda: (yield), partial(asyncio.sleep, 0), async_generator, nn.ReLU]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_it_cannot_decorate(wrong: Any) -> None:
    """What only begins its work when it is called, and a class."""
    with pytest.raises(TypeError, match=r"^patched: expected a function that is done"):
        patched()(wrong)


def test_what_is_done_too_late() -> None:
    """A function that looks as if it were done, but returns what another one has only begun."""
    function = patched()(lambda: (n for n in (1, 2)))
    with pytest.raises(TypeError, match=r"^patched: expected a function that is done"):
        function()


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"^patched: .*, as in patched\(\)\(function\), but got"):
        patched(pool_of)
    with pytest.raises(ValueError, match=r"^patched: expected index_dtype .* got torch.int16$"):
        patched(index_dtype=torch.int16)
    with pytest.raises(ValueError, match=r"^patched: expected reduce .* got 'mean'$"):
        patched(reduce="mean")


def test_graph_breaks() -> None:
    """Dynamo leaves a mode on after a graph break, so patched wraps one instead of being one."""

    def breaking(x: Tensor) -> list[torch.dtype]:
        with patched(index_dtype=torch.uint8):
            torch._dynamo.graph_break()
            inside = dtype_of_indices(x)
        return [inside, dtype_of_indices(x)]

    expected = [torch.uint8, torch.int64]
    assert torch.compile(breaking, backend="eager")(IMAGE) == breaking(IMAGE) == expected


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


def compiled(function: Callable[[Tensor], Any], place: str) -> Callable[[Tensor], Any]:
    """Compiles a function, and patches torch.nn.functional around the compiled code or inside."""
    mode = patched(index_dtype=torch.uint8)
    compiler: Any = torch.compile(fullgraph=True, backend="aot_eager")
    return mode(compiler(function)) if place == "around" else compiler(mode(function))


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(loss, x, use_reentrant=False)


@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize(("function", "expected"), [(checkpointed, OURS), (summed, GRADIENT)])
def test_compiled_code_that_pools_in_its_backward(
    function: Any, expected: Tensor, place: str
) -> None:
    assert same(gradient(compiled(function, place)), expected)


# Code that Dynamo runs apart from all modes. The last results are the indices of a pooling.
def branches(x: Tensor) -> tuple[Tensor, ...]:
    return torch.cond(x.sum() > 0, pool_of, lambda x: pool_of(x + 1), (x,))


# A region that is compiled once runs as it does outside of patched(), even if it pools.
plain_region = torch.compiler.nested_compile_region(lambda x: x.sin())
pooling_region = torch.compiler.nested_compile_region(pool_of)


def regions(x: Tensor) -> tuple[Tensor, ...]:
    return plain_region(x), *pooling_region(x), pool_of(x)[1]


def scans(x: Tensor) -> tuple[Tensor, ...]:
    from torch._higher_order_ops.scan import scan

    sums = scan(lambda carry, x: (carry + x, carry * x), torch.zeros(8), x[0, 0])
    return *sums, *scan(lambda carry, x: (carry + 1, pool_of(x)[1]), torch.zeros(()), x)


@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("function", [branches, regions, scans])
def test_compiled_code_apart_from_modes(function: Any, place: str) -> None:
    *others, _indices = function(IMAGE)
    assert all_same(compiled(function, place)(IMAGE), (*others, OFFSETS))


def test_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of functions with a backward of their own, if PyTorch shows these to modes."""
    with patched(index_dtype=torch.uint8):
        assert same(torch.vmap(torch.func.grad(loss))(IMAGE), OURS)
        if hasattr(torch.overrides, "redispatch_function"):
            assert same(torch.func.grad(summed)(IMAGE), GRADIENT)
            assert same(torch.vmap(Pools.apply)(IMAGE[:, None])[:, 0], POOLED)
        graph = torch.fx.symbolic_trace(pool_of)
        monkeypatch.setattr("maxunpool_cuda._patch._redispatch", None)
        # PyTorch 2.11: the mode is off in them.
        assert same(torch.vmap(Pools.apply)(IMAGE[:, None])[:, 0], POOLED * torch.int64.itemsize)
    assert graph(IMAGE)[1].dtype == torch.uint8


@pytest.mark.skipif(
    not hasattr(torch.overrides, "redispatch_function"), reason="no mode in a backward"
)
def test_what_a_checkpoint_computes_again() -> None:
    x = IMAGE.clone().requires_grad_()
    with patched(index_dtype=torch.uint8):
        checkpoint(loss, x, use_reentrant=False).backward()
    assert same(x.grad, OURS)
