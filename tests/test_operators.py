# SPDX-License-Identifier: BSD-3-Clause
"""What every operator computes: the reference's values, of every dtype, layout, size and window."""

import ctypes
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Any

import cases
import pytest
import torch
from cases import DENSE, OPERATORS, UNPOOLING, Call, Geometry, draw, geometry_of, laid_out, scaled
from conftest import GPUS, needs_library, skip_without_memory
from failures import check_each
from reference import Sizes
from torch import Tensor

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _operators

every_operator = pytest.mark.parametrize("operator", OPERATORS)
every_unpooling = pytest.mark.parametrize("operator", UNPOOLING)
TABLE = [
    (op, dtype) for op in OPERATORS for dtype in (cases.POOLED if op == "pool" else cases.MOVABLE)
]


@pytest.mark.sanitized
@pytest.mark.parametrize(("operator", "dtype"), TABLE, ids=str)
def test_operators_equal_the_reference(
    device: str, operator: str, dtype: torch.dtype, rng: Random
) -> None:
    calls = (draw(rng, operator, dtype, any_bits=n % 3 == 0) for n in range(scaled(30)))
    check_each(calls, lambda call: call.verify(device))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)])
def test_sums_are_rounded_once(device: str, dtype: torch.dtype, large: float) -> None:
    x = torch.tensor([[large, 1, 1]], dtype=dtype)  # neither of the ones would change the first
    geometry = geometry_of(pooled=(3,), window=(3, 1, 0))
    for indices in (torch.tensor([[2, 2, 2]]), torch.tensor([[2, 1, 0]]).byte()):
        cases.call_of("unpool", x, indices, geometry=geometry, reduce="sum").check(device)


# The arguments of draw().
SIZES: dict[str, dict[str, Any]] = {
    "an empty batch": {"leading": (0, 3)},
    "sides up to 20": {"most_cells": 1000, "longest": 20},
    "sides up to 4000": {"most_cells": 4000, "longest": 4000},
    "outputs between windows, in planes that are cut up": {
        "geometry": geometry_of((20, 30), (2, 4, 0), (100, 140))
    },
    "deeper than the output": {
        "geometry": Geometry((1, 2, 3), (3, 2, 2), (1, 2, 2), (1, 0, 0), (1, 4, 6))
    },
    "volumes, in rows that divide into vectors": {
        "geometry": geometry_of((2, 3, 8), (2, 2, 0)),
        "layout": "contiguous",
        "dtype": torch.float32,
    },
    "more windows in a row than are pooled at once": {
        "geometry": geometry_of((2, 1101), (3, 2, 1))
    },
    "more elements in a window than in a vector": {
        "geometry": Geometry((3, 9), (1, 40), (1, 7), (0, 20), (3, 56))
    },
    "more offsets than a word has bits": {"geometry": geometry_of((8, 8), (7, 4, 0))},
    "a stride of 32 bits, padded": {
        "geometry": Geometry((1, 4), (2, 2), (2**31, 1), (1, 0), (5, 5))
    },
    # The vector kernels refuse windows of one row that are deep, and rows that divide into vectors
    # but have one window more.
    "vectors of windows of one row, deep": {
        "geometry": Geometry((4, 1, 3), (3, 1, 2), (3, 1, 2), (0, 0, 0), (12, 1, 6)),
        "leading": (1, 8),
        "layout": "channels_last",
    },
    "vectors and one window more": {
        "geometry": Geometry.of_pooling((4, 8), (3, 3), (2, 2), (1, 1), (1, 1), ceil=True),
        "layout": "contiguous",
    },
}


@pytest.mark.parametrize("chosen", SIZES.values(), ids=SIZES)
@every_operator
def test_unusual_sizes(device: str, operator: str, chosen: dict[str, Any], rng: Random) -> None:
    calls = (draw(rng, operator, **chosen) for _ in range(scaled(20)))
    check_each(calls, lambda call: call.verify(device))


# Sizes of the batch and the channels, and of the pooled planes.
PLANES = [
    ((2, 1), (34, 31)),  # the CPU cuts them into rows of cells
    ((2, 33), (5, 40)),  # into cells
    ((1, 1100), (2, 4)),  # into single elements
    ((1, 2), (2, 601)),  # and rows into cells
]


@pytest.mark.parametrize(("leading", "pooled"), PLANES, ids=str)
@every_unpooling
def test_planes_cut_among_threads_and_blocks(
    device: str, operator: str, leading: Sizes, pooled: Sizes, rng: Random
) -> None:
    """Windows overlap at the cuts, and an index may lie far from its window."""
    windows = ((3, 2, 1), (2, 1, 0), (4, 2, 2), (2, 2, 0), (1, 3, 0))
    calls = []
    for window, layout in product(windows, DENSE):
        chosen = {"geometry": geometry_of(pooled, window), "leading": leading, "layout": layout}
        kind = rng.choice(("one out of window", "wrapped window"))
        calls.append(draw(rng, operator, torch.float32, kind=kind, **chosen))
    check_each(calls, lambda call: call.verify(device))


# Signals and columns of windows that a CUDA thread does together; large windows; and windows that
# are larger than the plane, whose padding has higher indices than what comes after it.
DILATED = [
    Geometry.of_pooling((20,), (3,), (1,), (1,), (3,), ceil=False),
    Geometry.of_pooling((20, 5), (3, 2), (1, 1), (1, 1), (3, 2), ceil=False),
    Geometry.of_pooling((23, 3), (4, 2), (2, 1), (2, 1), (3, 1), ceil=False),
    Geometry.of_pooling((20, 20), (5, 5), (1, 1), (0, 0), (2, 2), ceil=False),
    Geometry.of_pooling((22, 49), (6, 21), (3, 2), (3, 6), (1, 3), ceil=False),
    Geometry.of_pooling((3, 21, 8), (3, 18, 1), (2, 1, 3), (0, 7, 0), (1, 2, 2), ceil=False),
]


@pytest.mark.parametrize("geometry", DILATED, ids=str)
def test_dilated_windows(device: str, geometry: Geometry, rng: Random) -> None:
    calls = []
    for dtype, layout in product((torch.float32, torch.bfloat16, torch.int8), DENSE):
        chosen = {"geometry": geometry, "leading": (2, 3), "layout": layout}
        calls += (draw(rng, "pool", dtype, **chosen) for _ in range(2))
    check_each(calls, lambda call: call.verify(device))


# The fix-up kernel goes through a plane of a contiguous tensor, or through 32 channels, in chunks
# of at most 1024 cells and channels. Of 70 channels, the last 6 are a group of their own.
IN_ORDER = [((2, 3), (34, 61), "contiguous"), ((2, 70), (8, 9), "channels_last")]


@pytest.mark.sanitized
@pytest.mark.parametrize(("leading", "pooled", "layout"), IN_ORDER, ids=str)
@pytest.mark.parametrize(
    ("operator", "reduce"), [("unpool", "last"), ("unpool", "sum"), ("gradient", "last")]
)
@pytest.mark.parametrize("device", GPUS, indirect=True)
def test_cells_of_several_chunks(
    device: str,
    operator: str,
    reduce: str,
    leading: Sizes,
    pooled: Sizes,
    layout: str,
    rng: Random,
) -> None:
    """Cells of one chunk and of others name one output, and two outputs share a slot."""
    chosen = {"geometry": geometry_of(pooled, (3, 2, 1)), "leading": leading, "layout": layout}
    kinds = ("anywhere", "few", "one out of window", "wrapped window")
    calls = (
        draw(rng, operator, torch.float16, reduce=reduce, kind=kind, **chosen)
        for kind in kinds * scaled(4)
    )
    check_each(calls, lambda call: call.verify(device))


DISJOINT = [((2, 2, 0), (6,)), ((3, 3, 0), (2, 3)), ((3, 4, 0), (2, 3)), ((2, 2, 0), (2, 1, 2))]


@pytest.mark.parametrize(("window", "pooled"), DISJOINT, ids=str)
def test_every_index_in_the_window_of_another(
    device: str, window: Sizes, pooled: Sizes, rng: Random
) -> None:
    """All indices but one lie in their own windows."""
    chosen = {"geometry": geometry_of(pooled, window), "leading": (1, 1), "layout": "contiguous"}
    drawn = (
        draw(rng, "gradient", torch.float32, reduce="last", **chosen),
        draw(rng, "unpool", torch.float16, reduce="sum", **chosen),
    )
    positions, _ = cases.windows_of(chosen["geometry"])
    calls = []
    for cell, owner in permutations(range(len(positions)), 2):
        for position in positions[owner]:
            indices = positions[:, 0].clone()
            indices[[cell, owner]] = position
            for call in drawn:
                tensors = (call.tensors[0], indices.reshape(1, 1, *pooled))
                calls.append(replace(call, tensors=tensors, kind="own window but one"))
    check_each(calls, lambda call: call.verify(device))


def layouts_of(tensor: Tensor, dims: int) -> list[str]:
    batch = tensor.reshape(-1, *tensor.shape[-dims - 1 :])
    return [n for n in DENSE if laid_out(batch, n, dims).stride() == batch.stride()]


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "some channels": lambda x: x[:, ::2],
    "one channel": lambda x: x[:, :1],
    "without a batch": lambda x: x[0],
    "expanded": lambda x: x[:, :1, ..., :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dims", [2, 3])
def test_the_layout_is_the_one_that_strides_suggest(dims: int, layout: str, part: str) -> None:
    """All results and gradients have the layout that torch.nn's pooling gives its values."""
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    x = PARTS[part](laid_out(torch.rand(4, 8, *[8] * dims), layout, dims)).requires_grad_()
    kept = layouts_of(getattr(torch.nn.functional, f"max_pool{dims}d")(x, 2), dims)
    assert kept == [layout] or part != "whole"
    values, indices = pool(x, 2, return_indices=True)
    output = unpool(values, indices, 2)
    results = [values, indices, output, unpool(values, indices.contiguous(), 2)]
    # An expanded grad_output has no layout of its own.
    for grad_output in (torch.rand_like(output), output.new_ones(()).expand_as(output)):
        results += torch.autograd.grad(output, (values, x), grad_output, retain_graph=True)
    assert [layouts_of(each, dims) for each in results] == [kept] * len(results)
    # The layout of an output is that of the values, not of the indices.
    assert unpool(values.contiguous(), indices, 2).is_contiguous()


@every_operator
def test_threads_do_not_matter(operator: str, rng: Random) -> None:
    """Results are large enough for 16 threads and for huge pages. Windows overlap at the cuts."""
    geometry = geometry_of((60, 60), (13, 12, 0))
    if operator == "pool":
        geometry = Geometry.of_pooling((252, 252), (12, 12), (4, 4), (0, 0), (1, 1), ceil=False)
    calls = [
        draw(rng, operator, torch.float32, geometry=geometry, leading=leading, layout=layout)
        for leading, layout in product(((1, 1), (2, 8)), DENSE)
    ]

    def check(call: Call) -> None:
        expected = call.reference()
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            assert cases.all_same(call.results(), expected), f"{threads} threads"

    check_each(calls, check)


@every_unpooling
def test_threads_name_the_first_of_many_bad_indices(operator: str, rng: Random) -> None:
    torch.set_num_threads(16)
    geometry = geometry_of((60, 60), (2, 2, 0))
    call = draw(rng, operator, torch.float32, geometry=geometry, leading=(2, 8))
    values, indices = call.tensors[0], call.tensors[1].contiguous()
    indices.view(16, -1)[1:, 7:] = 255 if "offsets" in operator else -1
    with pytest.raises(RuntimeError, match=r"at position 7 of plane 1\b"):
        call.on(values, indices)


COUNT_THREADS = """
import os, torch
from maxunpool_cuda import _operators
torch.set_num_threads(1)
x = torch.ones(4, 1, 300, 300)
indices = torch.zeros(x.shape, dtype=torch.int64)
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
_operators.max_unpool(x, indices, (600, 600), (2, 2), (2, 2), (0, 0), "last")
assert len(os.listdir("/proc/self/task")) == before + 2
"""


def test_threads_are_used(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", COUNT_THREADS], check=True, cwd=tmp_path)


def test_windows_far_larger_than_the_planes() -> None:
    """Cells reach over 2^17 * 2^27 rows of 2^20 outputs: positions of 64 bits would overflow."""
    grad_output = torch.ones(1, 1, 1, 1, 2**20, dtype=torch.uint8)
    indices = torch.zeros(1, 1, 2**17, 1, 1, dtype=torch.int64)
    arguments = ((1, 1, 2**20), (1, 1, 1), (2**27, 1, 1), (0, 0, 0), "last")
    grad_input = _operators.max_unpool_backward(grad_output, indices, *arguments)
    assert grad_input.flatten().tolist() == [0] * (2**17 - 1) + [1]
    torch.set_num_threads(2)  # each output has one owner, also of offsets that are found one by one
    x, offsets = torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.uint8)
    output = _operators.max_unpool(x, offsets, (2**17,), (2,), (2**40,), (0,), "last")
    assert output.flatten().nonzero().tolist() == [[0]]


def test_padding_far_larger_than_the_plane() -> None:
    """Many elements name one output, so sums are kept from chunk to chunk."""
    indices = torch.zeros(1, 1, 4, 512, dtype=torch.int64)
    indices[..., 0, :] = torch.arange(512) % 256
    arguments = ((4, 64), (1, 1), (1, 1), (2**57 + 2, 0), "sum")
    x = torch.ones(1, 1, 4, 512, dtype=torch.float16)
    output = _operators.max_unpool(x, indices, *arguments)
    assert output.flatten().tolist() == [2 + 3 * 512] + [2] * 255


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "index_dtype", "step"), [(1, torch.int64, 8), (16, torch.uint8, 0)]
)
def test_more_than_two_to_the_31_elements(
    real_device: str, channels: int, index_dtype: torch.dtype, step: int
) -> None:
    """One plane has as many, more than int32 counts, or all channels of a channels_last image."""
    if real_device == "cuda":
        skip_without_memory(11 * 2**30)  # bytes: five tensors of 2^31, and small ones
    cells = 2**28 // channels + 1
    format = torch.channels_last if channels > 1 else torch.contiguous_format
    x = torch.zeros((1, channels, 1, cells * 8), dtype=torch.uint8, device=real_device)
    x = x.contiguous(memory_format=format)
    x[..., 7::8] = 1
    assert x.numel() > 2**31
    window = ((1, 8), (1, 8), (0, 0))
    values, indices = _operators.max_pool(x, *window, (1, 1), False, index_dtype)
    assert bool((values == 1).all())
    each = torch.arange(cells, device=real_device) * step + 7
    assert bool((indices == each).all())
    assert torch.equal(_operators.max_unpool(values, indices, x.shape[2:], *window, "last"), x)
    grad = _operators.max_unpool_backward(x, indices, x.shape[2:], *window, "last")
    assert torch.equal(grad, values)


@every_unpooling
def test_bad_indices_are_named(device: str, operator: str, rng: Random) -> None:
    drawn = (draw(rng, operator, rng.choice(cases.ARITHMETIC)) for _ in range(scaled(200)))
    calls = (cases.with_invalid_index(call, rng) for call in drawn)
    check_each(calls, lambda call: call.verify_error(device))


@pytest.mark.sanitized
def test_of_many_bad_indices_one_is_named(device: str) -> None:
    x, bad = torch.ones(8, 8, device=device), torch.arange(-64, 0).reshape(8, 8)
    for _ in range(10):  # the threads run in another order each time
        with pytest.raises(RuntimeError) as caught:
            F.max_unpool1d(x, bad.to(device), 2)
        words = re.search(r"but got (-\d+).* at position (\d+) of plane (\d+)", str(caught.value))
        index, position, plane = map(int, words.groups())
        assert index == bad[plane, position]


RACES = """
import itertools, threading, torch
from maxunpool_cuda import _operators

FAR = {torch.int64: 2**40, torch.int32: 2**31 - 1, torch.uint8: 255}

def race(call, indices):
    changed = indices.numpy()  # autograd does not see what is written there
    good, ended = changed.copy(), threading.Event()

    def change():
        while not ended.is_set():
            changed.fill(FAR[indices.dtype])
            changed[:] = good

    thread = threading.Thread(target=change)
    thread.start()
    for _ in range(40):
        try:
            call()
        except RuntimeError as error:
            assert "Found an invalid max index" in str(error), error
    ended.set()
    thread.join()

torch.set_num_threads(1)
image = torch.rand(1, 16, 256, 128)
images = image, image.contiguous(memory_format=torch.channels_last)
for dtype, x, size, reduce in itertools.product(FAR, images, (2, 3), ("last", "sum")):
    print(dtype, x.stride(), size, reduce, flush=True)
    window = [(size, size), (2, 2), (size // 3, size // 3)]
    pooled, indices = _operators.max_pool(x, *window, (1, 1), False, dtype)
    arguments = (indices, (256, 128), *window, reduce)
    race(lambda: _operators.max_unpool(pooled, *arguments), indices)
    race(lambda: _operators.max_unpool_backward(x, *arguments), indices)
"""


@needs_library
def test_indices_that_another_thread_changes(tmp_path: Path) -> None:
    """Results are undefined, or an error is raised. No memory outside of the tensors is touched."""
    command = [sys.executable, "-c", RACES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


CLIPPED = {
    "2x2x2/2": geometry_of((2, 2, 2), (2, 2, 0), (3, 3, 3)),
    "3x3x3/2, padded": geometry_of((2, 2, 2), (3, 2, 1), (3, 4, 4)),
    "4x4/4": geometry_of((2, 2), (4, 4, 0), (7, 6)),
    "3x3/2, in rows that divide into vectors": geometry_of((2, 4), (3, 2, 0), (5, 8)),
    "apart in depth": Geometry((2, 2, 2), (1, 2, 2), (3, 2, 2), (0, 0, 0), (4, 3, 4)),
}


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "channels_last"), (torch.bfloat16, "contiguous")]
)
def test_what_a_window_has_outside_of_the_plane_is_bad(
    device: str, dtype: torch.dtype, layout: str, name: str
) -> None:
    """One index of one plane is bad: each in turn that its window would have without the clip."""
    geometry, planes, plane = CLIPPED[name], 8, 5
    positions, inside = cases.windows_of(geometry)
    x = laid_out(torch.ones(1, planes, *geometry.pooled, dtype=dtype), layout, geometry.dims)
    offsets = inside.int().argmax(1, keepdim=True)  # good ones
    flat = positions.gather(1, offsets)
    calls = []
    for cell, offset in (~inside).nonzero().tolist():
        for good, bad in ((offsets.byte(), offset), (flat, int(positions[cell, offset]))):
            if good is flat and 0 <= bad < math.prod(geometry.output):
                continue  # an index outside of its window, but in the plane
            indices = good.flatten().repeat(planes, 1)
            indices[plane, cell] = bad
            indices = laid_out(indices.reshape(x.shape), layout, geometry.dims)
            error = rf"got {bad}\b.* position {cell} of plane {plane} "
            call = cases.call_of("unpool", x, indices, geometry=geometry)
            calls.append(replace(call, error=error))
    check_each(calls, lambda call: call.verify_error(device))


WITHOUT_OUTPUTS = {
    "below": geometry_of((4, 4), (2, 2, 0), (6, 8)),
    "on the right": geometry_of((4, 4), (2, 2, 0), (8, 6)),
    "behind": geometry_of((4, 4, 4), (2, 2, 0), (6, 8, 8)),
    # The lower bits of the stride would lead into the plane.
    "beyond 32 bits": Geometry((4,), (2,), (2**32,), (0,), (5,)),
    "in the padding": Geometry((1, 2, 2), (1, 2, 2), (1, 2, 2), (1, 0, 0), (1, 4, 4)),
}


@pytest.mark.parametrize("geometry", WITHOUT_OUTPUTS.values(), ids=WITHOUT_OUTPUTS)
@pytest.mark.parametrize("reduce", cases.REDUCES)
@pytest.mark.parametrize("operator", ["unpool", "gradient"])
def test_no_offset_is_good_in_a_window_without_outputs(
    device: str, operator: str, reduce: str, geometry: Geometry
) -> None:
    sizes = geometry.pooled if operator == "unpool" else geometry.output
    offsets = torch.zeros(1, 4, *geometry.pooled, dtype=torch.uint8)
    tensors = torch.ones(1, 4, *sizes), offsets
    call = cases.call_of(operator, *tensors, geometry=geometry, reduce=reduce)
    replace(call, error="but got 0, an offset in its window, ").verify_error(device)


@pytest.mark.sanitized
@pytest.mark.parametrize("device", GPUS, indirect=True)
@pytest.mark.parametrize("name", ["any", *CLIPPED])
def test_bad_indices_are_dropped_and_named_later(
    device: str, name: str, rng: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "0")

    operators = UNPOOLING * scaled(120 if name == "any" else 40)
    geometry, dtypes = CLIPPED.get(name), cases.ARITHMETIC
    drawn = (draw(rng, each, rng.choice(dtypes), geometry=geometry) for each in operators)
    calls = (cases.with_invalid_index(call, rng) for call in drawn)

    def check(call: Call) -> None:
        results = call.results(device)
        with pytest.raises(RuntimeError, match=call.error):
            maxunpool_cuda.check_errors()
        call.compare(results)

    check_each(calls, check)


@pytest.mark.sanitized
@pytest.mark.parametrize("device", GPUS, indirect=True)
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("reduce", cases.REDUCES)
@pytest.mark.parametrize("operator", ["unpool", "gradient"])
def test_an_index_whose_lower_half_is_in_its_window_is_dropped(
    device: str,
    operator: str,
    reduce: str,
    window: tuple[int, int, int],
    rng: Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that compares lower halves alone has to see the upper one, too."""
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "0")
    chosen = {"geometry": geometry_of((6, 7), window), "leading": (2, 3), "kind": "own window"}
    call = draw(rng, operator, torch.float32, reduce=reduce, **chosen)
    values, indices = call.tensors
    indices = indices.long()
    indices[1, 2, 3, 4] += 2**32
    bad = replace(call, tensors=(values, indices))
    results = bad.results(device)
    with pytest.raises(RuntimeError, match=f"{indices[1, 2, 3, 4]}.* at position 25 of plane 5"):
        maxunpool_cuda.check_errors()
    bad.compare(results)


class MallocInfo(ctypes.Structure):
    """What mallinfo2 of glibc returns: ten sizes in bytes.

    The fifth is the memory in use of large pieces, the eighth that of the others.
    """

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def bytes_in_use() -> int:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallocInfo
    sizes = ask().sizes
    return sizes[4] + sizes[7]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("device", ["cpu", "dispatched"], indirect=True)
@every_operator
def test_calls_free_all_memory(device: str, operator: str, rng: Random) -> None:
    call = draw(rng, operator, layout="strided")  # its tensors are copied
    count, smallest_piece = 1000, 32  # bytes that malloc gives out
    call.on(*call.tensors)
    before = bytes_in_use()
    for _ in range(count):
        call.on(*call.tensors)
    assert bytes_in_use() - before < count * smallest_piece
