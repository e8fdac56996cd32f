"""In place of torch.nn: its results on one thread, its forms of arguments, its samples."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    LAYOUTS,
    POOLED,
    Window,
    laid_out,
    random_case,
    random_input,
    random_pool,
    same,
    some,
)
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F

FUNCTIONS = [f"max_{kind}{dims}d" for kind in ("pool", "unpool") for dims in (1, 2, 3)]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On several threads torch.nn's result for duplicate indices is anybody's."""
    before = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # under which torch.nn's unpooling raises
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offsets", [False, True], ids=["flat indices", "offsets"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_unpooling_is_torchs(dtype: torch.dtype, offsets: bool, rng: random.Random) -> None:
    for _ in range(some(40)):
        case = random_case(rng, reduce="last", dtypes=(dtype,), offsets=offsets)
        g, x = case.geometry, case.input
        window = [g.kernel, g.stride, g.padding]
        if g.dims == 1:  # torch.nn's 1d takes only tuples of one int as ints
            window = [v[0] for v in window]
        ours, theirs = (getattr(of, f"max_unpool{g.dims}d") for of in (F, nn.functional))
        expected = theirs(x.contiguous(), case.positions.long().contiguous(), *window, g.output)
        assert same(ours(x, case.indices, *window, g.output), expected), g


def same_but_for_nan(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit but those of NaNs, which PyTorch writes as it likes."""
    nan = b != b
    return torch.equal(a != a, nan) and same(a.where(~nan, 0), b.where(~nan, 0))


def pooling_is_torchs(x: Tensor, window: Window, device: str) -> None:
    """Its kernels' for contiguous tensors on the CPU: some others err at -inf."""
    ours, theirs = (getattr(of, f"max_pool{len(window.sizes)}d") for of in (F, nn.functional))
    expected = theirs(x.contiguous(), *window.arguments, return_indices=True)
    (values, positions), x = (t.to(device) for t in expected), x.to(device)
    assert same_but_for_nan(ours(x, *window.arguments), values), window
    for dtype in window.index_dtypes():
        got, indices = ours(x, *window.arguments, return_indices=True, index_dtype=dtype)
        assert same_but_for_nan(got, values), window
        indices = window.positions(indices) if dtype == torch.uint8 else indices.long()
        assert same(indices, positions), (window, dtype)


@pytest.mark.parametrize("dtype", POOLED, ids=str)
def test_pooling_is_torchs(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(some(25)):
        x, window = random_pool(rng, dtype, longest=rng.choice((9, 40)), most_cells=2000)
        pooling_is_torchs(x, window, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pooling_of_long_rows_many_channels_and_large_windows(
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
        x = laid_out(random_input(rng, shape, dtype), layout, dims)
        parts = [(n,) * dims if isinstance(n, int) else n for n in window]
        pooling_is_torchs(x, Window(shape[2:], *parts, rng.random() < 0.5), device)


def first(results: object) -> object:
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pytorchs_own_samples(name: str, rng: random.Random) -> None:
    # Seconds, which runs of other tests should not wait for.
    pytest.importorskip("expecttest", reason="PyTorch's own samples need expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    named = [op for op in op_db if op.name == f"nn.functional.{name}"]
    assert named
    for op in named:
        agrees_on_samples(op, getattr(F, name), rng)


def agrees_on_samples(op: Any, ours: Callable, rng: random.Random) -> None:
    count = 0
    for sample in op.sample_inputs("cpu", torch.float32):
        theirs = op(sample.input, *sample.args, **sample.kwargs)
        got = ours(sample.input, *sample.args, **sample.kwargs)
        assert isinstance(got, tuple) == isinstance(theirs, tuple)
        pairs = zip(got, theirs, strict=True) if isinstance(got, tuple) else ((got, theirs),)
        assert all(same(*pair) for pair in pairs)
        count += 1
    pooling = "unpool" not in op.name
    gradients = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
    for sample in rng.sample(gradients, some(20 if pooling else len(gradients))):
        if pooling:  # of elements apart, so that maxima stay where they are
            apart = torch.randperm(sample.input.numel()).double() / 8
            sample.input = apart.reshape(sample.input.shape).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, s=sample: first(ours(x, *s.args, **s.kwargs)), (sample.input,), fast_mode=True
        )
        count += 1
    assert count > 0
    if op.error_inputs_func is not None:
        for error in op.error_inputs("cpu"):
            sample = error.sample_input
            # For 1d and 3d, PyTorch's pooling has other words, which here are those of 2d.
            words = None if pooling and "2d" not in op.name else error.error_regex
            with pytest.raises(error.error_type, match=words):
                ours(sample.input, *sample.args, **sample.kwargs)


# What the documentation of torch.nn has for examples, of 1.8 and of 2.1 where these differ: the
# input, the window of the pool, the output_size, and the output.
DOCUMENTED = [
    ([[[1, 2, 3, 4, 5, 6, 7, 8]]], None, [[[0, 2, 0, 4, 0, 6, 0, 8]]]),
    ([[[1, 2, 3, 4, 5, 6, 7, 8, 9]]], (1, 1, 9), [[[0, 2, 0, 4, 0, 6, 0, 8, 0]]]),
    ([[[1, 2, 3, 4, 5, 6, 7, 8, 9]]], None, [[[0, 2, 0, 4, 0, 6, 0, 8]]]),
    (
        [[[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]]],
        None,
        [[[[0, 0, 0, 0], [0, 6, 0, 8], [0, 0, 0, 0], [0, 14, 0, 16]]]],
    ),
    (  # to another size, where the indices of a 4x4 plane lie outside their windows
        [[[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]]],
        (1, 1, 5, 5),
        [[[[0] * 5, [6, 0, 8, 0, 0], [0, 0, 0, 14, 0], [16, 0, 0, 0, 0], [0] * 5]]],
    ),
    (
        [[[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15], [16, 17, 18, 19, 20]]]],
        (1, 1, 4, 5),
        [[[[0] * 5, [0, 7, 0, 9, 0], [0] * 5, [0, 17, 0, 19, 0]]]],
    ),
]


@pytest.mark.parametrize(("image", "size", "output"), DOCUMENTED)
def test_documentation(
    device: str, image: list, size: tuple[int, ...] | None, output: list
) -> None:
    x = torch.tensor(image, dtype=torch.float32, device=device)
    pool = getattr(nn, f"MaxPool{x.dim() - 2}d")(2, stride=2, return_indices=True)
    unpool = getattr(maxunpool_cuda, f"MaxUnpool{x.dim() - 2}d")(2, stride=2)
    assert unpool(*pool(x), output_size=size and torch.Size(size)).tolist() == output


def test_documentation_of_max_unpool3d(device: str) -> None:
    pool = nn.MaxPool3d(3, stride=2, return_indices=True)
    unpool = maxunpool_cuda.MaxUnpool3d(3, stride=2)
    pooled, indices = pool(torch.randn(20, 16, 51, 33, 15, device=device))
    output = unpool(pooled, indices)
    assert output.shape == (20, 16, 51, 33, 15)
    assert same(output.flatten(2).gather(2, indices.flatten(2)), pooled.flatten(2))


def test_documentation_of_lucid(device: str) -> None:
    """int32 indices, all zero: Lucid scatters by adding, so what falls together adds up."""
    for x, window, size in (
        (torch.arange(1.0, 5.0).reshape(1, 1, 2, 2), (2, 2), 4),
        (torch.ones(1, 3, 7, 7), (3, 2, 0), 15),
    ):
        unpool = maxunpool_cuda.MaxUnpool2d(*window, reduce="sum")
        indices = torch.zeros(x.shape, dtype=torch.int32, device=device)
        expected = torch.zeros(1, x.shape[1], size, size, device=device)
        expected[..., 0, 0] = x.sum((2, 3))
        assert same(unpool(x.to(device), indices), expected)


def outcome(function: Callable, *arguments: object, **named: object) -> object:
    try:
        return function(*arguments, **named)
    except Exception as error:
        return type(error)


# What a size may be given as, or not.
SIZES = [
    *(2, (2,), [2], (2, 1), [1, 2], torch.Size([2]), torch.Size([2, 1])),
    *(np.int64(2), np.uint8(2), (np.int64(2), 1), [2, np.int16(1)]),
    *(torch.tensor(2), torch.tensor([2]), (torch.tensor(2), 1)),
    *((), [], None, torch.Size([]), (2, 2, 2), 2.0, torch.tensor(2.0), "2"),
    *(0, -1, (2, -1), 2**62, -(2**62)),
]


@pytest.mark.parametrize("ceil_mode", [False, True, 1, 0, None])
@pytest.mark.parametrize("argument", ["kernel_size", "stride", "padding", "dilation"])
def test_forms_of_the_window(argument: str, ceil_mode: object) -> None:
    """In the place of each argument of pooling: taken as torch.nn takes it, or refused alike."""
    x = torch.rand(2, 3, 9, 9)
    for size in SIZES:
        window = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, argument: size}
        calls = ((x, *window.values(), ceil_mode),)
        if argument == "kernel_size":  # alone too, as it is the stride's default
            calls += ((x, size),)
        for call in calls:
            expected, got = (outcome(of.max_pool2d, *call) for of in (nn.functional, F))
            assert got is expected if isinstance(expected, type) else same(got, expected), call


@pytest.mark.usefixtures("one_thread")
def test_names_of_arguments() -> None:
    x = torch.rand(2, 3, 9, 9)
    named = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": True}
    ours, theirs = (
        of.max_pool2d(input=x, return_indices=True, **named) for of in (F, nn.functional)
    )
    assert all(map(same, ours, theirs))
    named = {"kernel_size": 2, "stride": 2, "padding": 0, "output_size": (8, 8)}
    x = torch.rand(2, 3, 4, 4)
    indices = torch.arange(16).reshape(4, 4).expand(x.shape)
    ours, theirs = (of.max_unpool2d(input=x, indices=indices, **named) for of in (F, nn.functional))
    assert same(ours, theirs)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize(
    "output_size",
    [
        None,
        (5, 7),
        [5, 7],
        torch.Size([5, 7]),
        torch.tensor([5, 7]),
        (2, 3, 5, 7),
        torch.Size([2, 3, 5, 7]),
        # Sizes before those of the plane only say where these are.
        (9, 1, 5, 7),
        [-1, 2**70, 5, 7],
        (None, "C", 5, 7),
        torch.tensor([0, 0, 5, 7]),
        # refused
        (5,),
        (3, 5, 7),
        (1, 2, 3, 5, 7),
        (2, 3, 5, 7.5),
        (2, 3, 9, 7),
    ],
    ids=repr,
)
def test_forms_of_output_size(output_size: object, unbatched: bool) -> None:
    """torch.nn's, and for an unbatched input one size more, as it has."""
    x = torch.rand(2, 3, 2, 3)
    indices = torch.arange(6).reshape(2, 3).expand(x.shape)
    if unbatched:
        x, indices = x[0], indices[0]
    told = output_size.tolist() if isinstance(output_size, Tensor) else output_size
    if unbatched and told == (3, 5, 7):
        told = (5, 7)
    expected = outcome(nn.functional.max_unpool2d, x, indices, 2, output_size=told)
    if isinstance(expected, type):
        with pytest.raises(expected, match=r"^max_unpool2d: expected"):
            F.max_unpool2d(x, indices, 2, output_size=output_size)
    else:
        assert same(F.max_unpool2d(x, indices, 2, output_size=output_size), expected)


class Tagged(Tensor):
    @classmethod
    def __torch_function__(cls, function: Callable, *_: object) -> object:
        return function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensor_subclasses_are_asked(name: str) -> None:
    function = getattr(F, name)
    x, indices = torch.rand(1, 2, 2, 2, 2), torch.zeros(1, 2, 2, 2, 2).long()
    tensors = (x,) if "unpool" not in name else (x, indices)
    assert function(*(tensor.as_subclass(Tagged) for tensor in tensors), 2) is function


class Widening(nn.Module):
    """A SegNet that unpools to the sizes from before its channels became more."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.widen = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(x)
        wide = self.widen(pooled)
        return self.unpool(wide, indices.repeat(1, 3, 1, 1)[:, :8], output_size=x.size())


@pytest.mark.usefixtures("one_thread")
def test_sizes_from_before_the_channels_widen() -> None:
    model, x = Widening(), torch.rand(2, 3, 7, 9)
    expected = model(x)
    maxunpool_cuda.replace_max_pooling(model, torch.int64)
    assert same(model(x), expected)
