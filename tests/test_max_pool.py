"""Max pooling: against the reference and torch.nn's, however PyTorch calls an operator."""

import copy
import itertools
import math
import pickle
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cases import (
    INDEX_DTYPES,
    LAYOUTS,
    POOLED,
    Window,
    laid_out,
    random_input,
    random_pool,
    random_window,
    same,
    some,
)
from reference import max_pool
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxPool1d, MaxPool2d, MaxPool3d, _arguments, _ops

FUNCTIONS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
UNPOOL = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
TORCH = (nn.functional.max_pool1d, nn.functional.max_pool2d, nn.functional.max_pool3d)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", POOLED, ids=str)
def test_agrees_with_the_reference(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(some(25)):
        x, window = random_pool(rng, dtype, most_cells=64)
        index_dtype = rng.choice(window.index_dtypes())
        values, indices = _ops.max_pool(x.to(device), *window.arguments, index_dtype)
        expected = max_pool(x, *window.arguments, index_dtype)
        assert same(values, expected[0]), window
        assert same(indices, expected[1]), (window, index_dtype)


def same_but_for_nan(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit but those of NaNs, which PyTorch writes as it likes."""
    nan = b != b
    return torch.equal(a != a, nan) and same(a.where(~nan, 0), b.where(~nan, 0))


def agrees_with_torch(x: Tensor, window: Window, device: str = "cpu") -> None:
    """With its kernels for contiguous tensors on the CPU: some others err at -inf."""
    dims = len(window.sizes)
    expected = TORCH[dims - 1](x.contiguous(), *window.arguments, return_indices=True)
    expected, x = [t.to(device) for t in expected], x.to(device)
    got = FUNCTIONS[dims - 1](x, *window.arguments, return_indices=True)
    assert same_but_for_nan(got[0], expected[0]), window
    assert same(got[1], expected[1]), window
    assert same(FUNCTIONS[dims - 1](x, *window.arguments), got[0])
    for dtype in window.index_dtypes():
        values, indices = _ops.max_pool(x, *window.arguments, dtype)
        assert same(values, got[0])
        if dtype == torch.uint8:
            indices = flat(indices, window)
        assert same(indices.long(), expected[1]), (window, dtype)


def flat(offsets: Tensor, window: Window) -> Tensor:
    """The positions that offsets inside a window stand for."""
    dims, rest, position = len(window.sizes), offsets.long(), torch.zeros(())
    parts = []
    for kernel in reversed(window.kernel):
        parts.insert(0, rest % kernel)
        rest = rest // kernel
    for axis, (part, size, stride, padding) in enumerate(
        zip(parts, window.sizes, window.stride, window.padding, strict=True)
    ):
        begin = torch.arange(part.shape[axis - dims], device=part.device) * stride - padding
        begin = begin.reshape(-1, *(1,) * (dims - 1 - axis))
        position = position * size + begin + part
    return position.long()


@pytest.mark.parametrize("dtype", POOLED, ids=str)
def test_agrees_with_torch(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(some(25)):
        x, window = random_pool(rng, dtype, longest=rng.choice((9, 40)), most_cells=2000)
        agrees_with_torch(x, window, device)


def round_trip(x: Tensor, window: Window, reduce: str, index_dtype: torch.dtype) -> list[Tensor]:
    """All that pooling and unpooling make of x, but the indices."""
    dims = len(window.sizes)
    generator = torch.Generator().manual_seed(0)
    x = x.detach().requires_grad_(x.dtype.is_floating_point)
    pooled, indices = FUNCTIONS[dims - 1](
        x, *window.arguments, return_indices=True, index_dtype=index_dtype
    )
    output = UNPOOL[dims - 1](pooled, indices, *window.arguments[:3], x.shape, reduce=reduce)
    if not x.requires_grad:
        return [pooled, output]
    weight = torch.randn(output.shape, generator=generator).to(output)
    grads = torch.autograd.grad(output, (x, pooled), weight, create_graph=True)
    weight = torch.randn(pooled.shape, generator=generator).to(pooled)
    return [pooled, output, *grads, *torch.autograd.grad(pooled, x, weight)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16], ids=str
)
def test_no_index_dtype_makes_a_difference(
    device: str, dtype: torch.dtype, rng: random.Random
) -> None:
    for _ in range(some(60)):
        x, window = random_pool(rng, dtype, most_cells=64)
        if torch.uint8 not in window.index_dtypes():
            continue
        reduce = rng.choice(("last", "sum", "mean"))
        first, *others = (round_trip(x.to(device), window, reduce, t) for t in INDEX_DTYPES)
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert same(a, b), (window, reduce)
                assert a.stride() == b.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_rows_many_channels_and_large_windows(
    device: str, layout: str, dtype: torch.dtype, rng: random.Random
) -> None:
    """More than a kernel takes at once, of any of these."""
    shapes = (
        ((1, 2, 3, 1500 + rng.randint(0, 40)), 3, 2, 1, 1),
        ((1, 2, 1300 + rng.randint(0, 40)), 2, 1, 0, rng.randint(1, 700)),
        ((2, 1, 2, 3000), (1, 5), (1, rng.randint(1, 7)), (0, 2), 1),
        ((2, 1, 4, 40000), (2, 3), rng.randint(1, 4), 0, 1),  # too wide for 16-bit offsets
        ((1, 1050, 5, 6), 2, 1, 1, 1),
        ((2, 3, 40, 41), 40, 1, 20, 1),
        ((2, 3, 5000), 4000, rng.randint(1, 900), 100, 1),
        ((1, 2, 18, 17, 19), 16, 1, 8, 1),
        ((1, 20, 7, 9, 8), (7, 9, 8), 1, 0, 1),
    )
    for shape, *window in rng.sample(shapes, some(9)):
        dims = len(shape) - 2
        x = laid_out(random_input(rng, shape, dtype), layout, dims).to(device)
        parts = [(n,) * dims if isinstance(n, int) else n for n in window]
        agrees_with_torch(x, Window(shape[2:], *parts, rng.random() < 0.5))


def test_ties_nan_and_nothing(device: str) -> None:
    nan, inf = math.nan, math.inf
    for row, value, index in (
        ([1.0, 3, 3, 2], 3.0, 1),
        ([-inf] * 4, -inf, 0),
        ([nan, 9, nan, inf], nan, 2),
        ([-0.0, 0.0, 0.0, -1], -0.0, 0),
    ):
        x = torch.tensor([row], device=device)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            values, indices = F.max_pool1d(x.to(dtype), 4, return_indices=True)
            assert same(values, x.to(dtype)[:, index : index + 1])
            assert repr(values.item()) == repr(value)
            assert indices.tolist() == [[index]]
    # What lies in the padding is not there.
    x = torch.full((1, 20), -inf, device=device)
    _, indices = F.max_pool1d(x, 4, 1, 2, return_indices=True)
    assert indices.tolist() == [[0, 0, 0, *range(1, 19)]]
    _, offsets = F.max_pool1d(x, 4, 1, 2, return_indices=True, index_dtype=torch.uint8)
    assert offsets.tolist() == [[2, 1, *[0] * 19]]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("dtype", "integer", "bits"),
    [
        (torch.float16, torch.int16, (0x7E12, 0x7C12, -0x1EE)),
        (torch.bfloat16, torch.int16, (0x7FC5, 0x7F85, -0x3B)),
        (torch.float32, torch.int32, (0x7FC12345, 0x7F812345, -0x3EDCBB)),
        (torch.float64, torch.int64, (0x7FF8 << 48 | 5, 0x7FF0 << 48 | 5, -7)),
    ],
    ids=str,
)
def test_a_nan_is_taken_as_it_is(
    device: str, dtype: torch.dtype, integer: torch.dtype, bits: tuple[int, ...], layout: str
) -> None:
    for nan in bits:
        x = torch.zeros(1, 16, 24, 24, dtype=integer)
        x[..., ::2, 1::2] = nan
        x = laid_out(x.view(dtype), layout, 2).to(device)
        assert x.isnan().any()
        assert bool((F.max_pool2d(x, 2).view(integer) == nan).all())


def test_windows_without_a_cell(device: str) -> None:
    """Dilation may step over the whole input: there is no maximum, and PyTorch's index."""
    x = torch.ones(1, 1, 4, device=device)
    values, indices = F.max_pool1d(x, 2, 1, 1, 5, return_indices=True)
    assert values.tolist() == [[[-math.inf]]]
    assert indices.tolist() == [[[4]]]
    # Which is no place that the gradient of nothing could go to.
    x = torch.ones(1, 1, 4, 2, device=device)
    for window in (((1, 2), 1, (0, 1), (1, 3)), ((2, 1), 1, (1, 0), (5, 1))):
        with pytest.raises(
            NotImplementedError, match=r"^max_pool2d: expected every window to hold"
        ):
            F.max_pool2d(x.requires_grad_(), *window)
        with pytest.raises(
            NotImplementedError, match=r"^max_pool2d: expected every window to hold"
        ):
            jvp(lambda x, window=window: F.max_pool2d(x, *window), (x.detach(),), (x.detach(),))
    F.max_pool2d(x.requires_grad_(), (2, 1), 1, (1, 0), (4, 1)).sum().backward()
    assert x.grad.flatten().tolist() == [1, 1, 0, 0, 0, 0, 1, 1]


def test_which_windows_have_no_cell(rng: random.Random) -> None:
    """The tests that ask for a derivative go by it."""
    empty = Window((2, 4), (2, 1), (1, 1), (1, 0), (3, 1), False)
    assert empty.has_empty_window
    for window in (empty, *(random_window(rng, longest=4, most_cells=30) for _ in range(400))):
        values, _ = max_pool(torch.zeros(1, *window.sizes), *window.arguments, torch.int64)
        assert window.has_empty_window == bool(values.isneginf().any()), window


def test_threads_do_not_matter(rng: random.Random) -> None:
    before = torch.get_num_threads()
    try:
        for layout in ("contiguous", "channels_last"):
            x = laid_out(torch.randn(3, 5, 120, 130), layout, 2)
            results = []
            for threads in (1, 2, 7):
                torch.set_num_threads(threads)
                results.append(_ops.max_pool(x, (3, 3), (2, 2), (1, 1), (1, 1), True, torch.int32))
            for values, indices in results[1:]:
                assert same(values, results[0][0])
                assert same(indices, results[0][1])
    finally:
        torch.set_num_threads(before)


def layout(tensor: Tensor, dims: int) -> str:
    """As a batch: contiguous, channels_last, or neither."""
    batch = tensor if tensor.dim() == dims + 2 else tensor[None]
    if batch.is_contiguous():
        return "contiguous"
    format = torch.channels_last if dims == 2 else torch.channels_last_3d
    return "channels_last" if batch.is_contiguous(memory_format=format) else "neither"


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "some channels": lambda x: x[:, ::2],
    "a chunk of channels": lambda x: x.chunk(2, 1)[1],
    "a crop": lambda x: x[..., 1:8, 1:],
    "some images": lambda x: x[::2],
    "one channel": lambda x: x[:, :1],
    "transposed": lambda x: x.transpose(-1, -2),
    "without a batch": lambda x: x[0],
    "some channels without a batch": lambda x: x[0, ::2],
    "expanded": lambda x: x[:, :1, ..., :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_the_layout_is_the_one_that_strides_suggest(
    device: str, dims: int, channels_last: bool, part: str
) -> None:
    """Of pooling and unpooling alike; and that of torch.nn's pooling."""
    x = torch.rand(4, 8, *[8] * dims, device=device)
    x = PARTS[part](laid_out(x, "channels_last" if channels_last else "contiguous", dims)).detach()
    expected = TORCH[dims - 1](x, 2, return_indices=True)
    kept = layout(expected[0], dims)
    kept_parts = ("whole", "some channels", "a chunk of channels", "a crop", "some images")
    kept_parts += ("without a batch",) if dims == 3 else ()
    assert kept == ("channels_last" if channels_last and part in kept_parts else "contiguous")
    for dtype in INDEX_DTYPES:
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        for input in (x, leaf) if leaf.stride() == x.stride() else (x,):
            values, indices = FUNCTIONS[dims - 1](input, 2, return_indices=True, index_dtype=dtype)
            output = UNPOOL[dims - 1](values, indices, 2, output_size=x.shape[-dims:])
            assert [layout(t, dims) for t in (values, indices, output)] == [kept] * 3
            assert same(values.detach(), expected[0])
        if output.requires_grad:
            (grad,) = torch.autograd.grad(output, leaf, torch.rand_like(output))
            assert layout(grad, dims) == kept
    compiled = torch.compile(FUNCTIONS[dims - 1], backend="aot_eager", fullgraph=True)
    assert compiled(x, 2).stride() == values.stride()


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_empty_batch(device: str, index_dtype: torch.dtype) -> None:
    x = torch.rand(0, 3, 4, 4, device=device, requires_grad=True)
    values, indices = F.max_pool2d(x, 2, return_indices=True, index_dtype=index_dtype)
    assert values.shape == indices.shape == (0, 3, 2, 2)
    assert indices.dtype == index_dtype


@pytest.mark.slow
def test_more_than_two_to_the_31_positions(device: str) -> None:
    x = torch.zeros(1, 1, 2**31 + 64, dtype=torch.uint8, device=device)
    x[..., -3:] = 1
    values, indices = F.max_pool1d(x, 64, return_indices=True)
    assert values.flatten()[-2:].tolist() == [0, 1]
    assert indices.flatten()[-2:].tolist() == [2**31 - 64 + 0, 2**31 + 61]
    _, offsets = F.max_pool1d(x, 64, return_indices=True, index_dtype=torch.uint8)
    assert offsets.flatten()[-2:].tolist() == [0, 61]
    with pytest.raises(ValueError, match=r"fewer than 2\^31 positions for index_dtype int32"):
        F.max_pool1d(x, 64, return_indices=True, index_dtype=torch.int32)


def test_without_indices_the_backward_keeps_small_ones(device: str) -> None:
    x = torch.rand(1, 2, 18, 18, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for window in ((2,), (16, 1), ((2, 2), (2, 2)), (17, 1), (2, 2, 0, 2)):
            F.max_pool2d(x, *window)
    assert [t.dtype for t in kept] == [torch.uint8] * 3 + [torch.int32] * 2
    plane = (1, 2**16, 2**15)
    arguments = _arguments.pool_arguments(2, plane, 2, None, 0, 2, False, False, torch.int32)
    assert arguments[-1] == torch.int64


# Derivatives


def distinct(shape: tuple[int, ...], device: str) -> Tensor:
    """No two elements are near each other, so that maxima stay where they are."""
    count = math.prod(shape)
    return torch.randperm(count, device=device).reshape(shape).double() / 8


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_gradients(device: str, index_dtype: torch.dtype, rng: random.Random) -> None:
    overlapping = Window((4, 5), (3, 3), (1, 2), (1, 1), (1, 1), False)
    drawn = (random_window(rng, longest=4, most_cells=20) for _ in itertools.count())
    fitting = (w for w in drawn if index_dtype in w.index_dtypes() and not w.has_empty_window)
    for window in (overlapping, *itertools.islice(fitting, some(8))):
        x = distinct((2, 1, *window.sizes), device).requires_grad_()

        def values(x: Tensor, window: Window = window) -> Tensor:
            function = FUNCTIONS[len(window.sizes) - 1]
            return function(x, *window.arguments, return_indices=True, index_dtype=index_dtype)[0]

        checks = {"check_batched_grad": True}
        assert gradcheck(
            values, x, check_forward_ad=True, check_batched_forward_grad=True, **checks
        )
        assert gradgradcheck(lambda x: values(x).sin(), x, check_fwd_over_rev=True, **checks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_torchs(device: str, layout: str, rng: random.Random) -> None:
    """As on the CPU: on a GPU theirs depends on the order of atomics."""
    for kernel, stride, padding, dilation in ((2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2)):
        x = laid_out(torch.randint(0, 9, (2, 3, 11, 12)).float(), layout, 2).requires_grad_()
        window = (kernel, stride, padding, dilation)
        expected = nn.functional.max_pool2d(x, *window)
        weight = torch.randint(-9, 9, expected.shape).float()
        (want,) = torch.autograd.grad(expected, x, weight)
        x, weight = x.detach().to(device).requires_grad_(), weight.to(device)
        for return_indices in (False, True):
            result = F.max_pool2d(x, *window, return_indices=return_indices)
            values = result[0] if return_indices else result
            (got,) = torch.autograd.grad(values, x, weight)
            assert same(got, want)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_indices_have_no_gradient(device: str, index_dtype: torch.dtype) -> None:
    x = torch.rand(1, 1, 4, 4, device=device, requires_grad=True)
    for function in (F.max_pool2d, lambda *a, **k: vmap(lambda x: F.max_pool2d(x, 2, **k))(a[0])):
        values, indices = function(x, 2, return_indices=True, index_dtype=index_dtype)
        assert values.requires_grad
        assert not indices.requires_grad


def test_no_graph_without_gradients() -> None:
    x = torch.rand(1, 1, 4, requires_grad=True)
    with torch.no_grad():
        assert not F.max_pool1d(x, 2).requires_grad
    assert not F.max_pool1d(x.detach(), 2).requires_grad
    output = F.max_pool1d(x, 2)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_saved_indices_must_not_change(index_dtype: torch.dtype) -> None:
    x = torch.rand(1, 1, 4, requires_grad=True)
    values, indices = F.max_pool1d(x, 2, return_indices=True, index_dtype=index_dtype)
    indices += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_jacobians(device: str) -> None:
    x = distinct((2, 5, 6), device)

    def function(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    expected = torch.autograd.functional.jacobian(
        lambda x: nn.functional.max_pool2d(x, 3, 2, 1), x.cpu()
    )
    assert same(jacrev(function)(x), expected)
    assert same(jacfwd(function)(x), expected)
    tangent = torch.rand_like(x)
    _, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    along = tangent.flatten(1).gather(1, indices.flatten(1)).reshape(indices.shape)
    assert same(jvp(function, (x,), (tangent,))[1], along)
    with forward_ad.dual_level():
        dual = F.max_pool2d(forward_ad.make_dual(x, tangent), 3, 2, 1, return_indices=True)
        assert same(forward_ad.unpack_dual(dual[0]).tangent, along)
        assert forward_ad.unpack_dual(dual[1]).tangent is None


def test_hessian(device: str) -> None:
    x = distinct((2, 4, 5), device)

    def function(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1).sin().sum()

    expected = torch.autograd.functional.hessian(
        lambda x: nn.functional.max_pool2d(x, 3, 2, 1).sin().sum(), x.cpu()
    ).to(device)
    assert expected.any()
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            torch.testing.assert_close(outer(inner(function))(x), expected)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_vmap(device: str, index_dtype: torch.dtype, unbatched: bool) -> None:
    x = torch.rand(5, *(() if unbatched else (2,)), 3, 6, 7, device=device)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, 3, 2, 1, return_indices=True, index_dtype=index_dtype)

    rows = [function(row) for row in x]
    arguments = ((3, 3), (2, 2), (1, 1), (1, 1), False, index_dtype)
    for batch in (
        vmap(function)(x),
        vmap(function, in_dims=1)(x.movedim(0, 1)),
        vmap(lambda x: _ops.max_pool(x, *arguments))(x),
    ):
        for result, expected in zip(batch, zip(*rows, strict=True), strict=True):
            assert same(result, torch.stack(expected))
    x = x.expand(2, *x.shape) * torch.tensor([1, -1], device=device).reshape(2, *[1] * x.dim())
    nested = vmap(vmap(function, in_dims=1, out_dims=1), in_dims=-1)(x.movedim(0, -1).movedim(0, 1))
    for k, row in enumerate(x):
        for result, expected in zip(nested, vmap(function, out_dims=1)(row), strict=True):
            assert same(result[k], expected)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_vmap_of_round_trips(device: str, index_dtype: torch.dtype) -> None:
    """Of values and their indices, and of many values for the same indices."""
    x = torch.rand(5, 2, 3, 6, 7, device=device)
    pool = MaxPool2d(3, 2, 1, return_indices=True, index_dtype=index_dtype)
    unpool = maxunpool_cuda.MaxUnpool2d(3, 2, 1)
    rows = torch.stack([unpool(*pool(row), row.shape) for row in x])
    assert same(vmap(lambda x: unpool(*pool(x), x.shape))(x), rows)
    _, indices = pool(x[0])
    rows = torch.stack([unpool(pool(row)[0], indices, row.shape) for row in x])
    assert same(vmap(lambda x: unpool(pool(x)[0], indices, x.shape))(x), rows)


def test_gradients_of_batches(device: str) -> None:
    x = torch.rand(5, 2, 3, 6, 6, device=device)

    def loss(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1).pow(2).sum()

    assert same(vmap(grad(loss))(x), torch.stack([grad(loss)(row) for row in x]))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_opcheck(index_dtype: torch.dtype, rng: random.Random) -> None:
    draws = (random_pool(rng, torch.float32, most_cells=20) for _ in itertools.count())
    fit = (
        (x, window)
        for x, window in draws
        if index_dtype in window.index_dtypes() and x.isfinite().all()
    )
    for x, window in itertools.islice(fit, 3):
        torch.library.opcheck(_ops.max_pool, (x, *window.arguments, index_dtype))
    leaf = torch.rand(2, 3, 6, 6).requires_grad_()
    arguments = ((2, 2), (2, 2), (0, 0), (1, 1), False, index_dtype)
    checked = torch.library.opcheck(_ops.max_pool, (leaf, *arguments))
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("index_dtype", [None, *INDEX_DTYPES], ids=str)
def test_compile(index_dtype: torch.dtype | None, dynamic: bool, layout: str) -> None:
    return_indices = index_dtype is not None
    index_dtype = index_dtype or torch.int64
    pool = MaxPool2d(3, 2, 1, return_indices=return_indices, index_dtype=index_dtype)
    x = laid_out(torch.rand(2, 3, 8, 10), layout, 2)
    compiled = torch.compile(pool, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for leaf in (x, x.clone().requires_grad_()):
        got, want = compiled(leaf), pool(leaf)
        for result, expected in zip(
            *((t if return_indices else (t,)) for t in (got, want)), strict=True
        ):
            assert same(result, expected)
            assert result.stride() == expected.stride()
    values = (got[0], want[0]) if return_indices else (got, want)
    weight = torch.rand_like(values[1])
    grads = [torch.autograd.grad(v, leaf, weight)[0] for v in values]
    assert same(*grads)


class RoundTrip(nn.Module):
    def __init__(self, index_dtype: torch.dtype) -> None:
        super().__init__()
        self.first = MaxPool2d(2)
        self.pool = MaxPool2d(3, 2, 1, return_indices=True, index_dtype=index_dtype)
        self.unpool = maxunpool_cuda.MaxUnpool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.unpool(*self.pool(x), x.shape)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_export_with_dynamic_sizes(index_dtype: torch.dtype, strict: bool) -> None:
    model = RoundTrip(index_dtype)
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    program = torch.export.export(
        model,
        (torch.rand(2, 3, 8, 12),),
        dynamic_shapes={"x": {0: batch, 2: 4 * height, 3: 4 * width}},
        strict=strict,
    )
    x = torch.rand(5, 3, 16, 8, requires_grad=True)
    output = program.module()(x)
    assert same(output, model(x))
    (got,) = torch.autograd.grad(output.sum(), x)
    (want,) = torch.autograd.grad(model(x).sum(), x)
    assert same(got, want)


# Bad input

# what follows the input, as torch.nn takes it; the input, of a batch, three channels and as many
# dimensions as pooled
WRONG: dict[str, tuple[Callable[[Callable, Tensor], object], str]] = {
    "kernel of zero": (lambda pool, x: pool(x, 0), "kernel size should be greater than zero"),
    "negative kernel": (lambda pool, x: pool(x, -1, 1), "kernel size should be greater than zero"),
    "stride of zero": (lambda pool, x: pool(x, 2, 0), "stride should not be zero"),
    "negative stride": (lambda pool, x: pool(x, 2, -1), "stride should be greater than zero"),
    "negative padding": (lambda pool, x: pool(x, 2, 2, -1), "pad must be non-negative"),
    "padding": (lambda pool, x: pool(x, 2, 2, 2), "pad should be at most half of effective kernel"),
    "dilation of zero": (
        lambda pool, x: pool(x, 2, 2, 0, 0),
        "dilation should be greater than zero",
    ),
    "too small": (lambda pool, x: pool(x, 9), "Output size is too small"),
    "bool": (lambda pool, x: pool(x.bool(), 2), "not implemented for 'Bool'"),
    "complex": (lambda pool, x: pool(x * 1j, 2), "not implemented for 'ComplexFloat'"),
    "kernel of four": (
        lambda pool, x: pool(x, (2,) * 4),
        "must either be a single int, or a tuple",
    ),
    "a float": (lambda pool, x: pool(x, 2.5), ""),
}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", WRONG)
def test_errors_are_torchs(kind: str, dims: int) -> None:
    call, phrase = WRONG[kind]
    x = torch.rand(2, 3, *[8] * dims)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)) as theirs:
        call(lambda *a: TORCH[dims - 1](*a, return_indices=True), x)
    with pytest.raises(theirs.type, match=rf"^max_pool{dims}d: expected .* but got") as ours:
        call(FUNCTIONS[dims - 1], x)
    assert phrase in str(ours.value)
    # For a kernel theirs depend on the rank, or are about the stride.
    if kind not in ("kernel of four", "kernel of zero", "negative kernel"):
        assert phrase in str(theirs.value)


@pytest.mark.parametrize("shape", [(8, 8), (1, 2, 3, 8, 8), (2, 3, 0, 8), (2, 0, 8, 8), (0, 8, 8)])
def test_shapes_that_torch_refuses(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    with pytest.raises(RuntimeError) as theirs:
        nn.functional.max_pool2d(x, 2, return_indices=True)
    with pytest.raises(RuntimeError, match=r"^max_pool2d: expected input of 3 or 4 dim") as ours:
        F.max_pool2d(x, 2)
    assert str(theirs.value).splitlines()[0].split(", but got")[0] in str(ours.value)


def test_index_dtypes_that_do_not_do() -> None:
    x = torch.rand(1, 2, 40, 40)
    byte = {"return_indices": True, "index_dtype": torch.uint8}
    assert F.max_pool2d(x, 16, **byte)[1].dtype == torch.uint8
    for window in ((17, 17), (2, 2, 0, 2), ((1, 257),), (2**40, 1, 2**39)):
        wide = x if window[0] != (1, 257) else torch.rand(1, 1, 1, 300)
        with pytest.raises(ValueError, match=r"at most 256 elements and dilation 1.*use int32"):
            F.max_pool2d(wide, *window, **byte)
    with pytest.raises(ValueError, match=r"^max_pool2d: expected index_dtype to be .* but got"):
        F.max_pool2d(x, 2, index_dtype=torch.int16)
    with pytest.raises(ValueError, match=r"^max_pool2d: expected index_dtype to be .* but got Sho"):
        _ops.max_pool(x, (2, 2), (2, 2), (0, 0), (1, 1), False, torch.int16)
    with pytest.raises(ValueError, match=r"^MaxPool2d: expected index_dtype to be .* but got 'int"):
        MaxPool2d(2, index_dtype="int64")
    plane = torch.empty(1, 1, 2**16, 2**15, device="meta")
    with pytest.raises(ValueError, match=r"fewer than 2\^31 positions .*int32.*use int64"):
        F.max_pool2d(plane, 2, return_indices=True, index_dtype=torch.int32)
    assert F.max_pool2d(plane, 2).shape == (1, 1, 2**15, 2**14)


def test_sizes_that_overflow() -> None:
    x = torch.rand(1, 1, 8, 8)
    for window in ((2**62, 1, 2**61), (2, 2**62), (2**31, 1, 2**30, 2**31), (3, 1, 1, 2**60)):
        with pytest.raises(RuntimeError, match=r"^max_pool2d: expected sizes that do not overflow"):
            F.max_pool2d(x, *window)
    with pytest.raises(RuntimeError, match=r"^max_pool2d: expected sizes that do not overflow"):
        F.max_pool2d(torch.empty(0, 2**20, 2**20, 2**20), 2)
    # Large, but no more than that: all of the padding is around one window.
    assert F.max_pool2d(x, 2**40, 2**39, 2**39).flatten()[0] == x.max()


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"^max_pool1d: expected input to be a Tensor but got list"):
        F.max_pool1d([1.0], 2)


def test_errors_of_the_operator_alone() -> None:
    x = torch.rand(1, 1, 8, 8)
    for window, text in (
        (((), (), (), ()), "max_pool: expected kernel_size of 1, 2 or 3 elements"),
        (((2, 2), (2,), (0, 0), (1, 1)), "max_pool2d: expected stride, padding and dilation of 2"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            _ops.max_pool(x, *window, False, torch.int64)


# What follows only from ours.
BAD: dict[str, Callable[[Callable, Tensor], object]] = {
    **{kind: WRONG[kind][0] for kind in ("padding", "too small", "stride of zero", "bool")},
    "an empty plane": lambda pool, x: pool(x[:, :, :0], 2),
    "too large a window": lambda pool, x: pool(
        x, 17, 1, 8, return_indices=True, index_dtype=torch.uint8
    ),
    "a wide window": lambda pool, x: pool(
        x, 2, 1, 0, 2, return_indices=True, index_dtype=torch.uint8
    ),
    "overflow": lambda pool, x: pool(x, 3, 1, 1, 2**62),
    "overflow in ceil mode": lambda pool, x: pool(x, 2, 2**63 - 1, ceil_mode=True),
    "index_dtype": lambda pool, x: pool(x, 2, index_dtype=torch.int16),
    "ceil_mode": lambda pool, x: pool(x, 2, ceil_mode=1),
}


@pytest.mark.parametrize("kind", BAD)
def test_errors_are_the_same_in_every_way(kind: str) -> None:
    call = BAD[kind]
    x = torch.rand(1, 1, 8, 8)
    with pytest.raises(Exception, match=r"^max_pool2d: ") as eager:
        call(F.max_pool2d, x)
    for way in (
        lambda x: vmap(lambda x: call(F.max_pool2d, x))(x[None]),
        torch.compile(lambda x: call(F.max_pool2d, x), backend="aot_eager"),
        lambda x: call(F.max_pool2d, x.to("meta")),
    ):
        with pytest.raises(eager.type) as caught:
            way(x)
        assert str(eager.value).split(" but got")[0] in str(caught.value)


def test_cuda_tensors_on_a_cpu_build() -> None:
    cuda = maxunpool_cuda.build_info()["cuda"]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    arguments = ((2, 2), (2, 2), (0, 0), (1, 1), False, torch.int64)
    with pytest.raises(
        RuntimeError if cuda else NotImplementedError,
        match="expected CUDA tensors but got" if cuda else "FORCE_CUDA=1 pip install",
    ):
        _ops.max_pool.redispatch(keys, torch.rand(1, 1, 4, 4), *arguments)


# Functions and modules


def outcome(function: Callable, *arguments: object) -> object:
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


def test_arguments_as_torch_takes_them() -> None:
    x = torch.rand(2, 3, 9, 9)
    for window in (
        (3,),
        ((3,),),
        ((3, 2), 2),
        (3, (2,), [1]),
        (3, []),
        (3, ()),
        (3, None),
        (3, torch.Size([])),
        (torch.Size([3, 2]), torch.Size([2])),
        (torch.tensor(3), torch.tensor(2), torch.tensor(1), torch.tensor(1)),
        (torch.tensor([3]), (torch.tensor(2), 1)),
        (np.int64(3), np.int32(2), np.uint8(1)),
        ((np.int64(3), 2), [2, np.int16(1)]),
        (3, 2, 1, 2),
        (3, 2, 1, 1, True),
        # refused
        (3, 2, 1, 1, 1),
        (3, 2, 1, 1, 0),
        (3, 2, 1, 1, None),
        ((),),
        (3, 2, ()),
        (3, 2, 1, ()),
        ((3, 3, 3),),
        (3.0,),
        (torch.tensor(3.0),),
        ("3",),
        (None,),
        (-3,),
        ((3, -1),),
        (3, -1),
        (3, 2, -1),
        (3, 2, 0, -1),
        (2**62,),
        (-(2**62),),
        (3, 2**62),
        (3, -(2**62)),
        (3, 1, 2**62),
        (3, 1, 1, 2**62),
    ):
        expected = outcome(nn.functional.max_pool2d, x, *window)
        got = outcome(F.max_pool2d, x, *window)
        if isinstance(expected, type):
            assert got is expected, window
        else:
            assert same(got, expected), window
    named = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": True}
    got = F.max_pool2d(input=x, return_indices=True, **named)
    assert all(map(same, got, nn.functional.max_pool2d(x, return_indices=True, **named)))


class Tagged(Tensor):
    @classmethod
    def __torch_function__(cls, function: Callable, *_: object) -> object:
        return function


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensor_subclasses_are_asked(function: Callable) -> None:
    assert function(torch.rand(2, 3).as_subclass(Tagged), 2) is function


PAIRS = [(MaxPool1d, nn.MaxPool1d), (MaxPool2d, nn.MaxPool2d), (MaxPool3d, nn.MaxPool3d)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_modules_are_torch_modules(ours: type, theirs: type) -> None:
    for arguments in ((2,), (3, 2, 1), (4, None), (3, 2, 1, 2, True, True)):
        module = ours(*arguments)
        assert isinstance(module, theirs)
        assert repr(module) == repr(theirs(*arguments))
        assert {k: v for k, v in vars(module).items() if k in vars(theirs(2))}.keys() == vars(
            theirs(2)
        ).keys()
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is ours
            assert repr(other) == repr(module)
            assert vars(other).keys() == vars(module).keys()
    small = ours(2, return_indices=True, index_dtype=torch.uint8)
    assert "index_dtype=torch.uint8" in repr(small)
    assert pickle.loads(pickle.dumps(small)).index_dtype == torch.uint8
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(small)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_modules_call_the_functions(ours: type, theirs: type) -> None:
    dims = PAIRS.index((ours, theirs)) + 1
    x = torch.rand(2, 3, *[9] * dims)
    options = {"padding": 1, "dilation": 1, "ceil_mode": True}
    assert same(ours(3, 2, **options)(x), theirs(3, 2, **options)(x))
    for dtype in INDEX_DTYPES:
        module = ours(3, 2, return_indices=True, index_dtype=dtype, **options)
        function = FUNCTIONS[dims - 1]
        expected = function(x, 3, 2, return_indices=True, index_dtype=dtype, **options)
        assert all(map(same, module(x), expected))
    old = ours.__new__(ours)  # pickles of torch.nn's modules have no index_dtype
    old.__setstate__(vars(theirs(2, return_indices=True)))
    assert all(map(same, old(x), theirs(2, return_indices=True)(x)))
