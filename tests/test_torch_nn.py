# SPDX-License-Identifier: BSD-3-Clause
"""In place of torch.nn: its results on one thread, its forms of arguments, its samples."""

import random
from inspect import getfullargspec
from typing import Any

import numpy as np
import pytest
import torch
from cases import POOLED, REDUCES, UNPOOLING, Geometry, draw, moved, same, scaled
from reference import max_unpool
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F

pytestmark = pytest.mark.usefixtures("single_threaded_torch")
KINDS = ("max_pool", "max_unpool", "adaptive_max_pool")
FUNCTIONS = [f"{kind}{dims}d" for kind in KINDS for dims in (1, 2, 3)]


@pytest.mark.parametrize("operator", UNPOOLING[:2])
@pytest.mark.parametrize("dtype", POOLED[:4], ids=str)
def test_unpooling_is_torchs(dtype: torch.dtype, operator: str, rng: random.Random) -> None:
    """Functions return torch.nn's results. Modules return the reference's for every ``reduce``."""
    for _ in range(scaled(40)):
        call = draw(rng, operator, dtype)
        g, window, (x, indices) = call.geometry, call.geometry.window, call.tensors
        ours, theirs = (getattr(of, f"max_unpool{g.dims}d") for of in (F, nn.functional))
        # torch.nn's 1d takes sizes as ints, or in tuples of other lengths.
        bare = [v[0] if g.dims == 1 else v for v in window]
        expected = theirs(x.contiguous(), call.positions.long().contiguous(), *bare, g.output)
        assert same(ours(x, indices, *window, g.output), expected), g
        for reduce in REDUCES:
            module = getattr(maxunpool_cuda, f"MaxUnpool{g.dims}d")(*window, reduce=reduce)
            got = module(input=x, indices=indices, output_size=g.output)
            assert same(got, max_unpool(x, call.positions, g.output, reduce)), (g, reduce)


# Long rows, many channels, or large windows, more than a kernel takes at once: arguments of draw,
# the sizes of the plane, and the window.
LARGE: tuple[tuple[Any, ...], ...] = (
    ({"leading": (1, 2)}, (1337,), (2,), (1,), (0,), (641,)),
    ({"leading": (2, 1)}, (4, 40000), (2, 3), (2, 2), (0, 0), (1, 1)),  # wider than 16 bits
    ({"leading": (1, 1050)}, (5, 6), (2, 2), (1, 1), (1, 1), (1, 1)),
    ({"leading": (2, 3)}, (40, 41), (40, 40), (1, 1), (20, 20), (1, 1)),
    ({"leading": (2, 3)}, (40, 41), (40, 41), (1, 1), (0, 0), (1, 1)),
    ({"leading": (2, 20), "layout": "channels_last"}, (23, 26), (20, 20), (3, 6), (0, 0), (1, 1)),
    ({"leading": (2, 3)}, (5000,), (4000,), (333,), (100,), (1,)),
    ({"leading": (1, 2)}, (18, 17, 19), (16,) * 3, (1,) * 3, (8,) * 3, (1,) * 3),
)
LARGEST = (
    {"leading": (1, 40), "layout": "channels_last"},
    (67, 66),
    (66, 65),
    (1, 1),
    (0, 0),
    (1, 1),
)


@pytest.mark.parametrize("dtype", POOLED, ids=str)
def test_pooling_is_torchs(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    """Compare with torch.nn's kernels for contiguous CPU tensors, as its others err at -inf."""
    chosen: list[dict[str, Any]] = [
        {"longest": rng.choice((9, 40)), "most_cells": 2000} for _ in range(scaled(25))
    ]
    for each, *window in (LARGEST, *rng.sample(LARGE, scaled(len(LARGE)))):
        chosen.append(each | {"geometry": Geometry.of_pooling(*window, rng.random() < 0.5)})
    for each in chosen:
        call = draw(rng, "pool", dtype, **each)
        (x,), g, (*window, ceil) = call.tensors, call.geometry, call.geometry.pooling
        ours, theirs = (getattr(of, f"max_pool{g.dims}d") for of in (F, nn.functional))
        expected, positions = theirs(x.contiguous(), *window, ceil, return_indices=True)
        module = getattr(maxunpool_cuda, f"MaxPool{g.dims}d")(*window, True, ceil)
        there = moved(x, device)
        values, indices = module(there)
        assert same(indices, positions), g
        for got in (values, ours(there, *window, ceil)):
            assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pytorchs_own_samples(name: str) -> None:
    # Takes seconds to import.
    from torch.testing._internal.common_methods_invocations import op_db

    ours = getattr(F, name)
    ops = [op for op in op_db if op.name == f"nn.functional.{name}"]
    assert ops
    for op in ops:
        samples = list(op.sample_inputs("cpu", torch.float32))
        assert samples
        for sample in samples:
            theirs, got = (of(sample.input, *sample.args, **sample.kwargs) for of in (op, ours))
            assert type(got) is type(theirs)
            assert all(map(same, leaves(got), leaves(theirs)))
        for error in op.error_inputs("cpu") if op.error_inputs_func else ():
            sample = error.sample_input
            # In 1d and 3d, PyTorch's pooling and max_unpool1d have other words: here all have 2d's.
            words = error.error_regex if "2d" in name or name == "max_unpool3d" else None
            with pytest.raises(error.error_type, match=words):
                ours(sample.input, *sample.args, **sample.kwargs)


# Sizes in all forms, valid or not.
SIZES: list[Any] = [
    *(2, (2,), [2], (2, 1), [1, 2], torch.Size([2]), torch.Size([2, 1])),
    *(np.int64(2), np.uint8(2), (np.int64(2), 1), [2, np.int16(1)]),
    *((), [], None, torch.Size([]), (2, 2, 2), 2.0, "2", 0, -1, (2, -1), 2**62, -(2**62)),
]
if torch.__version__ >= "2.13":  # 2.8 refuses tensors, or takes them for empty tuples
    SIZES += [torch.tensor(2), torch.tensor([2]), (torch.tensor(2), 1), torch.tensor(2.0)]


@pytest.mark.parametrize("argument", ["kernel_size", "stride", "padding", "dilation"])
def test_forms_of_the_window(argument: str) -> None:
    """Pooling takes what torch.nn takes, and raises the exceptions it raises."""
    x = torch.rand(2, 3, 9, 9)
    for size in SIZES:
        window = {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 1, argument: size}
        # Without a stride, kernel_size is the default.
        call = (x, size) if argument == "kernel_size" else (x, *window.values())
        try:
            expected: Any = nn.functional.max_pool2d(*call)
        except Exception as error:
            expected = type(error)
        if isinstance(expected, Tensor):
            assert same(F.max_pool2d(*call), expected), call
        else:
            with pytest.raises(expected, match=r"^max_pool2d: expected .* but got ") as ours:
                F.max_pool2d(*call)
            assert ours.type is expected, call


@pytest.mark.parametrize("name", FUNCTIONS)
def test_names_and_defaults_of_arguments(name: str) -> None:
    module = "".join(part.capitalize() for part in name.split("_")).replace("unpool", "Unpool")
    dispatched = f"{name}_with_indices" if "unpool" not in name else name
    for ours, theirs in (
        (getattr(F, name), getattr(nn.functional, dispatched)),
        (getattr(maxunpool_cuda, module), getattr(nn, module)),
    ):
        assert getfullargspec(ours)[:4] == getfullargspec(theirs)[:4]


# Sizes before those of the plane are ignored, whatever they are.
OUTPUT_SIZES: list[Any] = [
    *((5, 7), [5, 7], torch.Size([5, 7]), (2, 3, 5, 7), torch.Size([2, 3, 5, 7])),
    *((9, 1, 5, 7), [-1, 2**70, 5, 7], (None, "C", 5, 7)),
    *(torch.tensor([5, 7]), torch.tensor([0, 0, 5, 7])),
]


def test_forms_of_output_size() -> None:
    """Forms are torch.nn's. An unbatched input also takes as many sizes as it has itself."""
    x = torch.rand(2, 3, 2, 3)
    indices = torch.arange(6).reshape(2, 3).expand(x.shape)
    for given, more in ((x, indices), []), ((x[0], indices[0]), [(3, 5, 7)]):
        expected = nn.functional.max_unpool2d(*given, 2, output_size=(5, 7))
        for size in OUTPUT_SIZES + more:
            assert same(F.max_unpool2d(*given, 2, output_size=size), expected), size
