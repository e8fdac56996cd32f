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
from torch.utils._pytree import tree_leaves as leaves
from torch.utils.checkpoint import checkpoint

import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxPool2d, _patch, patched

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
needs_a_mode_in_backward = pytest.mark.skipif(
    not hasattr(torch.overrides, "redispatch_function"), reason="no mode in a backward"
)


@pytest.fixture(autouse=True)
def nothing_is_left(single_threaded_torch: None) -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0
    assert dtype_of_indices() == torch.int64


def dtype_of_indices(x: Tensor = IMAGE) -> torch.dtype:
    """The dtype of the indices that torch.nn's pooling returns at this place."""
    return torch_F.max_pool2d(x, 2, return_indices=True)[1].dtype


def loss(x: Tensor) -> Tensor:
    """The size of an index in bytes is a factor, which tells its dtype."""
    values, indices = torch_F.max_pool2d(x, 2, return_indices=True)
    return torch_F.max_unpool2d(values, indices, 2).square().sum() * indices.itemsize


def gradient_of_loss() -> Tensor:
    """The gradient for IMAGE, for indices of one byte. No windows overlap."""
    return 2 * F.max_unpool2d(*F.max_pool2d(IMAGE, 2, return_indices=True), 2)


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
    """Results are equal, and come from the same operator. PyTorch's tell if there are indices."""
    name, arguments = f"{kind}{dims}d", BEFORE_RETURN_INDICES[kind]
    x = torch.rand(2, 3, *[8] * dims, requires_grad=True)
    function = forms_of(name)[form]
    returns_indices = isinstance(function(x, *arguments), tuple)
    with patched(index_dtype=torch.int32):
        got = leaves(function(x, *arguments))
    options: Any = {"return_indices": returns_indices, "index_dtype": torch.int32}
    expected = leaves(getattr(F, name)(x, *arguments, **options))
    assert all_same(got, expected)
    assert got[0].grad_fn.name() == expected[0].grad_fn.name()


def test_every_name_of_the_functions_is_in_the_table() -> None:
    """A release of PyTorch with a further name fails here."""
    pattern = r"(adaptive_)?max_(un)?pool[123]d(_with_indices)?"
    names = [(of, name) for of in (torch, torch_F) for name in dir(of)]
    found = {getattr(of, name) for of, name in names if re.fullmatch(pattern, name)}
    assert found == _patch._REPLACEMENTS.keys()


def test_modules() -> None:
    """torch.nn's are covered. This package's modules and functions keep their own arguments."""
    row, twice = torch.tensor([[[1.0, 4.0]]]), torch.tensor([[[0, 0]]])
    ours = MaxPool2d(2, return_indices=True, index_dtype=torch.int32)
    with patched(index_dtype=torch.uint8, reduce="sum"):
        assert nn.MaxPool2d(2, return_indices=True)(nn.Parameter(IMAGE))[1].dtype == torch.uint8
        assert nn.MaxUnpool2d(2)(row, twice)[0, 0, 0] == 5
        assert ours(IMAGE)[1].dtype == torch.int32
        assert F.max_unpool2d(row, twice, 2)[0, 0, 0] == 4
        # Of these windows there are no offsets of one byte.
        assert nn.MaxPool2d(17)(torch.rand(1, 40, 40)).shape == (1, 2, 2)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_adaptive_pools_have_no_offsets(is_compiled: bool) -> None:
    """A warning says that they return flat indices, where they return any."""
    pools = [nn.AdaptiveMaxPool2d(2, return_indices=answer) for answer in (False, True)]
    if is_compiled:
        pools = [torch.compile(pool, backend="eager", fullgraph=True) for pool in pools]
    with patched(index_dtype=torch.uint8):
        pools[0](IMAGE)
        with pytest.warns(UserWarning, match=r"^patched: .*uint8 .* returns torch\.int64 ones$"):
            _, indices = pools[1](IMAGE)
    assert indices.dtype == torch.int64


def test_nesting() -> None:
    """Also of decorated functions, where an exception ends it, and only in this thread."""
    outer, inner = patched(index_dtype=torch.int32), patched(index_dtype=torch.uint8)

    @inner
    def fails() -> None:
        """Documented."""
        with outer, inner:
            assert dtype_of_indices() == torch.uint8
            raise ZeroDivisionError

    assert (fails.__name__, fails.__doc__) == ("fails", "Documented.")
    with outer, outer, ThreadPoolExecutor(1) as elsewhere:
        with pytest.raises(ZeroDivisionError):
            fails()
        assert dtype_of_indices() == torch.int32
        assert elsewhere.submit(dtype_of_indices).result() == torch.int64


async def async_generator() -> Any:
    yield


def generator() -> Any:
    yield


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(generator, id="a generator"),
        pytest.param(async_generator, id="an async generator"),
        pytest.param(partial(asyncio.sleep, 0), id="a coroutine"),
        pytest.param(nn.ReLU, id="a class"),
    ],
)
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
        patched(loss)
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


def compiled(function: Callable[[Tensor], Any], place: str) -> Callable[[Tensor], Any]:
    """Compiles a function, and patches torch.nn.functional around the compiled code or inside."""
    mode = patched(index_dtype=torch.uint8)
    compiler: Any = torch.compile(fullgraph=True, backend="aot_eager")
    return mode(compiler(function)) if place == "around" else compiler(mode(function))


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(loss, x, use_reentrant=False)


def sizes_of_indices(x: Tensor) -> Tensor:
    """A tensor of the shape of pooled ``x``, that holds how many bytes its indices take."""
    # Arguments are positional, as Dynamo hands them to modes.
    indices = torch_F.max_pool2d_with_indices(x, 2, 2, 0, 1, False, True)[1]
    return torch.full_like(indices, indices.itemsize, dtype=torch.int64)


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, sizes_of_indices, lambda x: sizes_of_indices(x + 1), (x,))


def scans(x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, x: (carry + 1, sizes_of_indices(x)), torch.zeros(()), x)[1]


every_place = pytest.mark.parametrize("place", ["around", "inside"])


@every_place
def test_compiled_code_that_pools_in_its_backward(place: str) -> None:
    x = IMAGE.clone().requires_grad_()
    compiled(checkpointed, place)(x).backward()
    assert same(x.grad, gradient_of_loss())


@every_place
@pytest.mark.parametrize("function", [branches, scans])
def test_compiled_branches_and_loops(function: Any, place: str) -> None:
    """Dynamo runs their code apart from all modes."""
    assert compiled(function, place)(IMAGE).unique() == 1


plain_region = torch.compiler.nested_compile_region(lambda x: x.sin())
pooling_region = torch.compiler.nested_compile_region(sizes_of_indices)


@every_place
def test_compiled_regions(place: str) -> None:
    """A region that is compiled once runs as it does outside of patched(), even if it pools."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return plain_region(x), pooling_region(x), sizes_of_indices(x)

    plain, pooled, other = compiled(function, place)(IMAGE)
    assert same(plain, IMAGE.sin())
    assert pooled.unique() == torch.int64.itemsize
    assert other.unique() == 1


def test_transforms() -> None:
    with patched(index_dtype=torch.uint8):
        assert same(torch.vmap(torch.func.grad(loss))(IMAGE), gradient_of_loss())
        graph = torch.fx.symbolic_trace(sizes_of_indices)
    assert graph(IMAGE).unique() == 1


class TimesSize(torch.autograd.Function):
    """``x`` times how many bytes an index takes. The gradient is multiplied by it as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * dtype_of_indices(x).itemsize

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * dtype_of_indices(*ctx.saved_tensors).itemsize


@needs_a_mode_in_backward
def test_transforms_of_functions_with_a_backward_of_their_own() -> None:
    with patched(index_dtype=torch.uint8):
        gradient = torch.func.grad(lambda x: TimesSize.apply(x).sum())(IMAGE)
        assert same(torch.vmap(TimesSize.apply)(IMAGE), IMAGE)
    assert same(gradient, torch.ones_like(IMAGE))


@needs_a_mode_in_backward
def test_what_a_checkpoint_computes_again() -> None:
    x = IMAGE.clone().requires_grad_()
    with patched(index_dtype=torch.uint8):
        checkpointed(x).backward()
    assert same(x.grad, gradient_of_loss())
