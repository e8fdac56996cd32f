"""In place of torch.nn: its results on one thread, its documentation's examples, its samples."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import (
    positions_of,
    random_geometry,
    random_indices,
    random_offsets,
    random_pool,
    random_values,
    same,
    some,
)
from torch import nn

import maxunpool_cuda
import maxunpool_cuda.functional as F

OURS = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}
THEIRS = {
    1: nn.functional.max_unpool1d,
    2: nn.functional.max_unpool2d,
    3: nn.functional.max_unpool3d,
}
POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


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
def test_same_as_torch_on_one_thread(rng: random.Random) -> None:
    for _ in range(some(200)):
        g = random_geometry(rng)
        dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
        x = random_values(rng, (2, 3, *g.pooled), dtype)
        kind = rng.choice(("own window", "anywhere", "few"))
        indices = random_indices(rng, g, (2, 3), kind)
        window = [g.kernel, g.stride, g.padding]
        if g.dims == 1:  # torch.nn's 1d takes only tuples of one int as ints
            window = [v[0] for v in window]
        expected = THEIRS[g.dims](x, indices, *window, g.output)
        assert same(OURS[g.dims](x, indices, *window, g.output), expected), g
        offsets = random_offsets(rng, g, (2, 3))
        if offsets is not None:
            expected = THEIRS[g.dims](x, positions_of(offsets, g), *window, g.output)
            assert same(OURS[g.dims](x, offsets, *window, g.output), expected), g


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trips_are_torchs_on_one_thread(dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(some(60)):
        x, window = random_pool(rng, dtype, most_cells=64)
        x = x.nan_to_num()  # of which PyTorch writes the bits as it likes
        if max(window.dilation) > 1:
            continue
        dims, geometry = len(window.sizes), (window.kernel, window.stride, window.padding)
        if dims == 1:
            geometry = tuple(v[0] for v in geometry)
        pool = getattr(nn.functional, f"max_pool{dims}d")
        pooled, indices = pool(x.contiguous(), *window.arguments, return_indices=True)
        expected = THEIRS[dims](pooled, indices, *geometry, window.sizes)
        for index_dtype in window.index_dtypes():
            pooled, indices = POOLS[dims - 1](
                x, *window.arguments, return_indices=True, index_dtype=index_dtype
            )
            got = OURS[dims](pooled, indices, *geometry, x.shape)
            assert same(got, expected), (window, index_dtype)


def first(results: object) -> object:
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [f.__name__ for f in (*OURS.values(), *POOLS)])
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


def test_documentation_of_max_unpool1d(device: str) -> None:
    pool = nn.MaxPool1d(2, stride=2, return_indices=True)
    unpool = maxunpool_cuda.MaxUnpool1d(2, stride=2)
    x = torch.tensor([[[1.0, 2, 3, 4, 5, 6, 7, 8]]], device=device)
    pooled, indices = pool(x)
    assert unpool(pooled, indices).tolist() == [[[0, 2, 0, 4, 0, 6, 0, 8]]]
    x = torch.tensor([[[1.0, 2, 3, 4, 5, 6, 7, 8, 9]]], device=device)
    pooled, indices = pool(x)
    assert unpool(pooled, indices, output_size=x.size()).tolist() == [[[0, 2, 0, 4, 0, 6, 0, 8, 0]]]
    assert unpool(pooled, indices).tolist() == [[[0, 2, 0, 4, 0, 6, 0, 8]]]


def test_documentation_of_max_unpool2d_in_1_8(device: str) -> None:
    """Unpooled to another size, the indices of a 4x4 plane lie outside their windows."""
    pool = nn.MaxPool2d(2, stride=2, return_indices=True)
    unpool = maxunpool_cuda.MaxUnpool2d(2, stride=2)
    pooled, indices = pool(torch.arange(1.0, 17.0, device=device).reshape(1, 1, 4, 4))
    assert unpool(pooled, indices).tolist() == [
        [[[0, 0, 0, 0], [0, 6, 0, 8], [0, 0, 0, 0], [0, 14, 0, 16]]]
    ]
    output = unpool(pooled, indices, output_size=torch.Size([1, 1, 5, 5]))
    assert output.tolist() == [
        [[[0, 0, 0, 0, 0], [6, 0, 8, 0, 0], [0, 0, 0, 14, 0], [16, 0, 0, 0, 0], [0, 0, 0, 0, 0]]]
    ]


def test_documentation_of_max_unpool2d_in_2_1(device: str) -> None:
    pool = nn.MaxPool2d(2, stride=2, return_indices=True)
    unpool = maxunpool_cuda.MaxUnpool2d(2, stride=2)
    x = torch.tensor(
        [[[[1.0, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15], [16, 17, 18, 19, 20]]]],
        device=device,
    )
    pooled, indices = pool(x)
    assert unpool(pooled, indices, output_size=x.size()).tolist() == [
        [[[0, 0, 0, 0, 0], [0, 7, 0, 9, 0], [0, 0, 0, 0, 0], [0, 17, 0, 19, 0]]]
    ]


def test_documentation_of_max_unpool3d(device: str) -> None:
    pool = nn.MaxPool3d(3, stride=2, return_indices=True)
    unpool = maxunpool_cuda.MaxUnpool3d(3, stride=2)
    pooled, indices = pool(torch.randn(20, 16, 51, 33, 15, device=device))
    output = unpool(pooled, indices)
    assert output.shape == (20, 16, 51, 33, 15)
    assert same(output.flatten(2).gather(2, indices.flatten(2)), pooled.flatten(2))


def test_documentation_of_lucid(device: str) -> None:
    """int32 indices, all zero: Lucid scatters by adding, so what falls together adds up."""
    unpool = maxunpool_cuda.MaxUnpool2d(kernel_size=2, stride=2, reduce="sum")
    x = torch.arange(1.0, 5.0, device=device).reshape(1, 1, 2, 2)
    indices = torch.zeros(1, 1, 2, 2, dtype=torch.int32, device=device)
    output = unpool(x, indices)
    assert output.shape == (1, 1, 4, 4)
    assert output[0, 0, 0, 0] == 10
    assert int(output.count_nonzero()) == 1

    unpool = maxunpool_cuda.MaxUnpool2d(kernel_size=3, stride=2, padding=0, reduce="sum")
    x = torch.ones(1, 3, 7, 7, device=device)
    output = unpool(x, torch.zeros(1, 3, 7, 7, dtype=torch.int32, device=device))
    assert output.shape == (1, 3, 15, 15)
    assert output.flatten(2).sum(2).tolist() == [[49, 49, 49]]


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
    told = output_size.tolist() if isinstance(output_size, torch.Tensor) else output_size
    try:
        expected = nn.functional.max_unpool2d(x, indices, 2, output_size=told)
    except (TypeError, ValueError) as error:
        if unbatched and output_size == (3, 5, 7):
            expected = nn.functional.max_unpool2d(x, indices, 2, output_size=(5, 7))
        else:
            with pytest.raises(type(error), match=r"^max_unpool2d: expected"):
                F.max_unpool2d(x, indices, 2, output_size=output_size)
            return
    assert same(F.max_unpool2d(x, indices, 2, output_size=output_size), expected)


class Widening(nn.Module):
    """A SegNet that unpools to the sizes from before its channels became more."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.widen = nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, indices = self.pool(x)
        wide = self.widen(pooled)
        return self.unpool(wide, indices.repeat(1, 3, 1, 1)[:, :8], output_size=x.size())


@pytest.mark.usefixtures("one_thread")
def test_sizes_from_before_the_channels_widen() -> None:
    model, x = Widening(), torch.rand(2, 3, 7, 9)
    expected = model(x)
    maxunpool_cuda.replace_max_pooling(model, torch.int64)
    assert same(model(x), expected)
