# SPDX-License-Identifier: BSD-3-Clause
"""In place of torch.nn: its results on one thread, its forms of arguments, its samples."""

import random
from inspect import getfullargspec
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    FLOATS,
    POOLED,
    REDUCES,
    UNPOOLING,
    Call,
    Geometry,
    all_same,
    draw,
    moved,
    same,
    scaled,
)
from failures import check_each
from reference import Sizes, max_unpool
from torch import nn
from torch.testing import assert_close

import maxunpool_cuda
import maxunpool_cuda.functional as F

pytestmark = pytest.mark.usefixtures("single_threaded_torch")
KINDS = ("max_pool", "max_unpool", "adaptive_max_pool")
FUNCTIONS = [f"{kind}{dims}d" for kind in KINDS for dims in (1, 2, 3)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unpooling_is_torchs(dtype: torch.dtype, rng: random.Random) -> None:
    """Functions return torch.nn's results. Modules return the reference's for every ``reduce``."""

    def check(call: Call) -> None:
        x, indices = call.tensors
        size, *window, _reduce = call.arguments
        positions = call.positions.long().contiguous()
        name = f"max_unpool{call.dims}d"
        # torch.nn's 1d takes sizes as ints, or in tuples of other lengths.
        numbers = [sizes[0] if call.dims == 1 else sizes for sizes in window]
        expected = getattr(nn.functional, name)(x.contiguous(), positions, *numbers, size)
        assert same(getattr(F, name)(x, indices, *window, size), expected)
        for reduce in REDUCES:
            module = getattr(maxunpool_cuda, f"MaxUnpool{call.dims}d")(*window, reduce=reduce)
            got = module(input=x, indices=indices, output_size=size)
            assert same(got, max_unpool(x, positions, size, reduce)), reduce

    check_each((draw(rng, rng.choice(UNPOOLING[:2]), dtype) for _ in range(scaled(60))), check)


# Poolings of more than a kernel takes at once: batch and channels, sizes of the plane; kernel,
# stride and padding, the same in all dimensions; and the layout.
LARGE: list[tuple[Sizes, Sizes, Sizes, str]] = [
    ((2, 1), (4, 40000), (2, 2, 0), "contiguous"),  # a row wider than 16 bits count
    ((1, 1050), (5, 6), (2, 1, 1), "contiguous"),  # many channels
    ((2, 3), (40, 41), (40, 1, 20), "contiguous"),  # windows padded by half
    # More elements than a uint16 counts, in windows of many channels.
    ((1, 40), (67, 66), (65, 1, 0), "channels_last"),
]


@pytest.mark.parametrize("dtype", POOLED, ids=str)
def test_pooling_is_torchs(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    """Compare with torch.nn's kernels for contiguous CPU tensors, as its others err at -inf."""

    def check(call: Call) -> None:
        (x,) = call.tensors
        *window, ceil_mode, _index_dtype = call.arguments
        pool = getattr(nn.functional, f"max_pool{call.dims}d")
        expected, positions = pool(x.contiguous(), *window, ceil_mode, return_indices=True)
        there = moved(x, device)
        module = getattr(maxunpool_cuda, f"MaxPool{call.dims}d")(*window, True, ceil_mode)
        values, indices = module(there)
        assert same(indices, positions)
        alone = getattr(F, f"max_pool{call.dims}d")(there, *window, ceil_mode)
        for got in (values, alone):
            assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)

    calls = [
        draw(rng, "pool", dtype, longest=rng.choice((9, 40)), most_cells=2000)
        for _ in range(scaled(25))
    ]
    for leading, sizes, window, layout in LARGE:
        kernel, stride, padding = ((number,) * 2 for number in window)
        geometry = Geometry.of_pooling(
            sizes, kernel, stride, padding, dilation=(1, 1), ceil=rng.random() < 0.5
        )
        calls.append(draw(rng, "pool", dtype, geometry=geometry, leading=leading, layout=layout))
    check_each(calls, check)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pytorchs_own_samples(name: str, rng: random.Random) -> None:
    """Right ones and wrong ones, of PyTorch's descriptions of its tests of a function."""
    with pytest.MonkeyPatch.context() as patch:
        # The import, which takes seconds, would forbid other tests to set flags of cuDNN.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_methods_invocations import op_db

    ours = getattr(F, name)
    described = [op for op in op_db if op.name == f"nn.functional.{name}"]
    for op in described:
        samples = [*op.sample_inputs("cpu", torch.float32)]
        for sample in rng.sample(samples, min(scaled(800), len(samples))):
            given = (sample.input, *sample.args)
            got, theirs = (of(*given, **sample.kwargs) for of in (ours, op))
            assert type(got) is type(theirs)
            assert all_same(got, theirs), sample
    errors = [*described[0].error_inputs("cpu")]
    assert errors
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type):
            ours(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_dilation_that_32_bits_just_hold(device: str, dims: int) -> None:
    """In windows of one element, which are not dilated by it."""
    x = torch.rand(2, 3, *[5] * dims)
    pool = getattr(F, f"max_pool{dims}d")
    values, indices = pool(x.to(device), 1, dilation=2**31 - 1, ceil_mode=True, return_indices=True)
    assert same(values.cpu(), x)
    assert same(indices.cpu(), torch.arange(5**dims).view(x.shape[2:]).expand(x.shape))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_bools_pool_as_zeros_and_ones(device: str, dims: int) -> None:
    """torch.nn pools none. Of equal elements the first is taken, as of numbers."""
    x = torch.rand(2, 3, *[7] * dims) > 0.7
    of_torch, pool = (
        getattr(of, f"MaxPool{dims}d")(3, 2, 1, return_indices=True) for of in (nn, maxunpool_cuda)
    )
    values, indices = of_torch(x.float())
    there = x.to(device)
    compiled = torch.compile(pool, backend="aot_eager", fullgraph=True)
    for each in (pool, torch.vmap(pool), compiled, torch.jit.trace(pool, there)):
        assert all_same([result.cpu() for result in each(there)], [values.bool(), indices])
    pool.return_indices = False
    for each in (pool, torch.jit.trace(pool, there)):
        assert same(each(there).cpu(), values.bool())


# Sizes in all forms, valid or not.
SIZES: list[Any] = [
    *(2, (2,), [2, 1], torch.Size([2, 1]), (np.int64(2), 1), torch.tensor([2]), torch.tensor(2.0)),
    *((), [], None, torch.Size([]), (2, 2, 2), 2.0, "2", 0, -1, (2, -1), 2**62),
]


@pytest.mark.parametrize("size", SIZES, ids=repr)
@pytest.mark.parametrize("argument", ["kernel_size", "stride", "padding", "dilation"])
def test_forms_of_the_window(argument: str, size: Any) -> None:
    """Pooling takes what torch.nn takes, and raises the exceptions it raises."""
    x = torch.rand(2, 3, 9, 9)
    window = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, argument: size}
    # Without a stride, kernel_size is the default.
    call = (x, size) if argument == "kernel_size" else (x, *window.values())
    try:
        expected = nn.functional.max_pool2d(*call)
    except Exception as error:
        refusal = type(error)
    else:
        assert same(F.max_pool2d(*call), expected)
        return
    with pytest.raises(refusal, match=r"^max_pool2d: expected .* but got ") as ours:
        F.max_pool2d(*call)
    assert ours.type is refusal


@pytest.mark.parametrize("name", FUNCTIONS)
def test_names_and_defaults_of_arguments(name: str) -> None:
    module = "".join(part.capitalize() for part in name.split("_"))
    dispatched = f"{name}_with_indices" if "unpool" not in name else name
    for ours, theirs in (
        (getattr(F, name), getattr(nn.functional, dispatched)),
        (getattr(maxunpool_cuda, module), getattr(nn, module)),
    ):
        assert getfullargspec(ours)[:4] == getfullargspec(theirs)[:4]


@pytest.mark.parametrize(
    "size", [(5, 7), [9, 1, 5, 7], (None, "C", 5, 7), torch.tensor([0, 0, 5, 7])], ids=repr
)
def test_forms_of_output_size(size: Any) -> None:
    """Sizes before those of the plane are ignored, whatever they are, as by torch.nn.

    An unbatched input also takes as many sizes as it has itself.
    """
    x = torch.rand(2, 3, 2, 3)
    indices = torch.arange(6).reshape(2, 3).expand(x.shape)
    expected = nn.functional.max_unpool2d(x, indices, 2, output_size=(5, 7))
    assert same(F.max_unpool2d(x, indices, 2, output_size=size), expected)
    assert same(F.max_unpool2d(x[0], indices[0], 2, output_size=size), expected[0])
    assert same(F.max_unpool2d(x[0], indices[0], 2, output_size=(3, 5, 7)), expected[0])
