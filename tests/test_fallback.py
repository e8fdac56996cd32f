# SPDX-License-Identifier: BSD-3-Clause
"""Where the library has no kernels: other devices, CUDA without kernels, a build without a library.

The fixture ``device`` runs other tests on the fallback, and in a build without a library all tests
do: make check-fallback. Fake tensors stand for tensors of devices that are not there.
"""

import math
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cases import (
    DENSE,
    DIFFERENTIABLE,
    OPERATORS,
    UNPOOLING,
    Call,
    all_same,
    call_of,
    draw,
    geometry_of,
    laid_out,
    scaled,
    with_invalid_index,
)
from conftest import Record, needs_library
from failures import check_each
from published import pooling_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda.functional as F
from maxunpool_cuda import _fallback, _operators

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parent.parent


def test_every_device_has_a_kernel() -> None:
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    keys = ("CPU", "CUDA", "MPS", "XPU", "HIP", "PrivateUse1", "Meta")
    for key, name in product(keys, _operators.SCHEMAS):
        assert has_kernel(f"maxunpool_cuda::{name}", key)
        assert has_kernel(f"maxunpool_cuda::_{name}", key)


def call_kernel(call: Call) -> list[Tensor]:
    """The results of the kernel of a device that has none of its own, called with CPU tensors."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return leaves(call.operator.redispatch(keys, *call.tensors, *call.arguments))


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_of_other_devices(operator: str, rng: Random) -> None:
    """They compute as on the CPU, where PyTorch's scatter has an order."""
    calls = (draw(rng, operator) for _ in range(scaled(80)))
    check_each(calls, lambda call: call.compare(call_kernel(call)))
    if operator in UNPOOLING:
        call = with_invalid_index(draw(rng, operator), rng)
        with pytest.raises(RuntimeError, match=call.error):
            call_kernel(call)


def test_the_kernels_of_other_devices_check_their_tensors(rng: Random) -> None:
    call = draw(rng, "unpool", torch.float32)
    values, indices = call.tensors
    with pytest.raises(NotImplementedError, match="expected dense tensors but got a sparse_coo"):
        call_kernel(replace(call, tensors=(values.to_sparse(), indices)))
    with pytest.raises(RuntimeError, match=r"same device but got cpu and meta$"):
        call_kernel(replace(call, tensors=(values, indices.to("meta"))))


def test_cuda_tensors_without_kernels_warn_once(monkeypatch: Patch) -> None:
    """Of a GPU of AMD, for which there are none, nothing is said."""
    monkeypatch.setattr(_fallback, "_has_warned", False)
    with FakeTensorMode(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        x = torch.empty(1, 2, 4, 4, device="cuda")
        monkeypatch.setattr(torch.version, "hip", "7.0")
        _fallback._check_kinds("max_pool", x)
        assert warned == []
        monkeypatch.setattr(torch.version, "hip", None)
        for _ in range(2):
            _fallback._check_kinds("max_pool", x)
    (warning,) = warned
    words = str(warning.message)
    assert words.startswith("maxunpool_cuda: CUDA tensors run PyTorch's operators, which is slower")
    assert '`pip install "cuda-toolkit[nvcc,cccl]==13.*"`' in words


def test_a_captured_graph_checks_indices_when_it_runs(monkeypatch: Patch) -> None:
    """While a CUDA graph is captured, no call may wait for the device."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    window = _fallback._Unpooling((4,), (2,), (2,), (0,))
    with FakeTensorMode(), Record() as record:
        indices = torch.empty(1, 2, dtype=torch.int64, device="cuda")
        _fallback._check_inside(indices, [(indices, 0, 4)], window)
    assert "aten::_assert_async" in record.names


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("device", ["mps", "AMD"])
def test_other_devices_run_the_operators_where_torch_nn_cannot(
    device: str, monkeypatch: Patch
) -> None:
    """torch.nn lacks small indices and sums, and refuses deterministic algorithms."""
    if device == "AMD":
        monkeypatch.setattr(torch.version, "hip", "7.0")
        device = "cuda"

    def called(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> set[str]:
        traced = make_fx(partial(function, **options))(*tensors)
        return {name.split(".")[0] for name in pooling_in(traced)}

    with FakeTensorMode():
        x = torch.empty(1, 1, 4, 4, device=device)
        at = torch.empty(1, 1, 4, 4, device=device, dtype=torch.int64)
        pool, unpool = (partial(each, kernel_size=2) for each in (F.max_pool2d, F.max_unpool2d))
        assert called(pool, x) == called(unpool, x, at) == {"aten"}
        small = called(pool, x, return_indices=True, index_dtype=torch.uint8)
        assert small == called(unpool, x, at.int()) == {"maxunpool_cuda"}
        assert called(unpool, x, at, reduce="sum") == {"maxunpool_cuda"}
        torch.use_deterministic_algorithms(True)
        assert called(pool, x) == called(unpool, x, at) == {"maxunpool_cuda"}
        assert called(F.adaptive_max_pool2d, x, output_size=1) == {"maxunpool_cuda"}


FIRST_RUN = """
import torch, maxunpool_cuda
info = maxunpool_cuda.build_info()
print(info["kernels"], info["cuda"], info["note"])
x = torch.rand(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(maxunpool_cuda.MaxPool2d(3, 1), x)
print(maxunpool_cuda.__file__)
"""


def test_a_wheel_without_a_library(tmp_path: Path, monkeypatch: Patch) -> None:
    """It is for every system and Python, says what it is, and computes."""
    for name in ("FORCE_CUDA", "FORCE_CPU", "DEBUG", "LINEINFO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_FALLBACK", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def lines_of(*arguments: str, folder: Path) -> list[str]:
        command = [sys.executable, *arguments]
        return subprocess.check_output(command, cwd=folder, text=True).splitlines()

    build = "build --build-base {0} egg_info --egg-base {0} bdist_wheel --dist-dir {0}"
    said = lines_of("setup.py", "-q", *build.format(tmp_path).split(), folder=ROOT)
    note = "no kernels, as FORCE_FALLBACK=1 says"
    assert said[-1].startswith(f"maxunpool_cuda: built {note}. PyTorch's operators compute")
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    shutil.unpack_archive(wheel, tmp_path, "zip")
    init = tmp_path / "maxunpool_cuda" / "__init__.py"
    assert lines_of("-c", FIRST_RUN, folder=tmp_path) == [f"none False {note}", str(init)]


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes and strides of the results of a call, or the words of its error."""
    try:
        results = call(*arguments)
    except Exception as error:
        return str(error).split("\n")[0]
    return [(tuple(result.shape), result.stride()) for result in leaves(results)]


def spoilt(rng: Random, numbers: Any) -> Any:
    """The numbers of a list, sometimes with other ones, or with one less."""
    if not isinstance(numbers, tuple) or rng.random() < 0.8:
        return numbers
    if rng.random() < 0.2:
        return numbers[1:]
    strange = (-1, 0, 1, 2, 17, 256, 2**31, 2**58, 2**60, 2**61)
    return tuple(rng.choice((number, number + 1, rng.choice(strange))) for number in numbers)


# The tensor with other strides, another shape or another dtype.
CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t[:1].expand(t.shape),
    lambda t: t[(slice(None),) * (t.dim() - 1) + (slice(0, 1),)],
    lambda t: t.transpose(0, -1),
    lambda t: t[0],
    lambda t: t[:, :0],
    lambda t: t.new_empty(1, *t.shape),
    lambda t: t.as_strided(t.shape, [1] * t.dim()),
    lambda t: t.to(torch.bool),
)


@needs_library
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_guard_refuses_what_the_checks_refuse(operator: str, rng: Random) -> None:
    """Right calls and wrong ones, straight to a kernel: the checks' errors, shapes and strides."""
    errors = set()
    for _ in range(scaled(1200)):
        call = draw(rng, operator, most_cells=12, longest=6)
        if rng.random() < 0.05:  # a single position a plane, and one channel: any layout fits
            call = draw(rng, operator, leading=(3, 1), geometry=geometry_of((1, 1), (2, 2, 0)))
        tensors = [t if rng.random() < 0.9 else rng.choice(CHANGES)(t) for t in call.tensors]
        arguments = [spoilt(rng, argument) for argument in call.arguments]
        if rng.random() < 0.05:
            arguments[-1] = torch.int16 if operator == "pool" else "max"
        result = call.definition.result
        expected = outcome(partial(result, device="meta"), *tensors, *arguments)
        if isinstance(expected, list) and math.prod(expected[0][0]) > 2**16:
            continue  # all numbers are allowed, and the result would be large
        with torch.inference_mode():  # without autograd, whose kernel is in Python
            found = outcome(call.operator, *tensors, *arguments)
        if isinstance(expected, str):
            errors.add(re.sub(r"[\d-]+", "", expected)[:60])
        if "in the output plane" not in str(found):  # the numbers fit, but not these indices
            assert found == expected, (tensors, arguments)
    assert len(errors) > 5, errors


# The devices of CPU tensors, without the emulated GPU.
on_the_cpu = pytest.mark.parametrize("device", ["cpu", "fallback"], indirect=True)
every_derivative = pytest.mark.parametrize(("operator", "reduce"), DIFFERENTIABLE)


def in_channels_last(tensor: Tensor) -> Tensor:
    """A copy in this layout, as its strides tell: ``contiguous`` keeps those of one channel."""
    format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=format).copy_(tensor)


# The sizes of the batch and the channels, and a size of pooled planes.
SHAPES = [((2, 3), 2), ((2, 1), 2), ((1, 1), 1), ((0, 3), 1)]


def calls_in_layouts(rng: Random, operator: str, reduce: str) -> Iterator[Call]:
    """Calls in each layout; one channel, planes of one position, a volume without a batch."""
    for dims, (leading, size) in product((1, 2, 3), SHAPES):
        geometry = geometry_of((size,) * dims, (size, size, 0))
        how: dict[str, Any] = {"geometry": geometry, "leading": leading, "reduce": reduce}
        yield draw(rng, operator, torch.float64, **how, layout="contiguous")
        yield draw(rng, operator, torch.float64, **how, layout="strided")
        if dims > 1:
            call = draw(rng, operator, torch.float64, **how)
            yield replace(call, tensors=tuple(map(in_channels_last, call.tensors)))
        if dims == 3 and leading[0] > 0:  # it keeps channels_last_3d
            yield replace(call, tensors=tuple(in_channels_last(t)[0] for t in call.tensors))


def results_and_gradient(call: Call, x: Tensor, *indices: Tensor) -> list[Tensor]:
    """All results of the call for other tensors, and the gradient of their squares' sum / 2."""
    results = call.on(x.requires_grad_(), *indices)
    return [*results, *torch.autograd.grad(results[0], x, results[0], create_graph=True)]


@on_the_cpu
@every_derivative
def test_results_have_the_strides_of_the_trace(
    device: str, operator: str, reduce: str, rng: Random
) -> None:
    def check(call: Call) -> None:
        real = results_and_gradient(call, *call.moved(device).tensors)
        empty = (
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in call.tensors
        )
        traced = results_and_gradient(call, *empty)
        assert [each.stride() for each in real] == [each.stride() for each in traced]
        assert not any(each._is_view() for each in traced)

    check_each(calls_in_layouts(rng, operator, reduce), check)


@on_the_cpu
@every_derivative
def test_results_may_be_changed_in_place(
    device: str, operator: str, reduce: str, rng: Random
) -> None:
    """As ``nn.ReLU(inplace=True)`` does. No result is a view."""

    def check(call: Call) -> None:
        tensors = x, *_ = call.moved(device).tensors
        weight = torch.tensor(0.5, dtype=x.dtype, requires_grad=True)
        with torch.inference_mode():
            assert not any(each._is_view() for each in call.on(*tensors))
        with torch.no_grad():
            values = call.on(*tensors)[0]
        assert values.mul_(weight).requires_grad
        results = results_and_gradient(call, *tensors)
        assert not any(each._is_view() for each in results)
        for number in (0, -1):  # the values and the gradient
            output = (results[number] * weight).sin()
            expected = torch.autograd.grad(output.sum(), (x, weight), retain_graph=True)
            changed = results_and_gradient(call, *tensors)[number].mul_(weight).sin_()
            assert all_same(torch.autograd.grad(changed.sum(), (x, weight)), expected)

    check_each(calls_in_layouts(rng, operator, reduce), check)


@on_the_cpu
@pytest.mark.parametrize("of_indices", DENSE)
@pytest.mark.parametrize("operator", UNPOOLING)
def test_of_bad_indices_the_first_in_memory_is_named(
    device: str, operator: str, of_indices: str, rng: Random
) -> None:
    """The call's layout orders them, which is that of the values."""
    errors = {
        "contiguous": r"but got 201\b.* at position 3 of plane 4 ",
        "channels_last": r"but got 202\b.* at position 2 of plane 5 ",
    }
    for layout, error in errors.items():
        geometry = geometry_of((2, 2), (2, 2, 0))
        how: dict[str, Any] = {"geometry": geometry, "leading": (2, 3), "layout": layout}
        call = draw(rng, operator, torch.float32, **how)
        indices = call.tensors[1].contiguous()
        planes = indices.view(6, -1)
        planes[4, 3] = 201
        planes[5, 2] = 202
        tensors = call.tensors[0], laid_out(indices, of_indices, 2)
        replace(call, tensors=tensors, error=error).verify_error(device)


@on_the_cpu
def test_a_volume_of_one_channel_and_minus_infinity(device: str) -> None:
    """PyTorch's pooling of channels_last_3d gives such windows the index 0."""
    x = in_channels_last(torch.full((2, 1, 4, 4, 4), -torch.inf))
    call_of("pool", x, geometry=geometry_of((2, 2, 2), (2, 2, 0))).check(device)
