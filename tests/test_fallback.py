# SPDX-License-Identifier: BSD-3-Clause
"""Where the library has no kernels: other devices, CUDA without kernels, a build without a library.

The table of operators runs on the fallback in test_operators.py, and in a build without a
library all tests do: make check-fallback. Fake tensors stand for tensors of devices that are not
there.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
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
    DIFFERENTIABLE,
    INDEX_DTYPES,
    LAYOUTS,
    OPERATORS,
    UNPOOLING,
    Call,
    Geometry,
    all_same,
    draw,
    geometry_of,
    laid_out,
    scaled,
    with_invalid_index,
)
from conftest import Record, fallback_device, needs_library
from failures import check_each
from published import pooling_in
from reference import Sizes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _fallback, _library, _operators

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parent.parent
no_cuda_kernels = pytest.mark.skipif(
    maxunpool_cuda.build_info()["cuda"], reason="this build has CUDA kernels"
)
DEVICES = ["MPS", "XPU", "HIP", "PrivateUse1"]


@pytest.mark.parametrize("name", _operators.SCHEMAS)
@pytest.mark.parametrize("key", ["CPU", "CUDA", *DEVICES, "Meta"])
def test_every_device_has_a_kernel(name: str, key: str) -> None:
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    assert has_kernel(f"maxunpool_cuda::{name}", key)
    assert has_kernel(f"maxunpool_cuda::_{name}", key)


@no_cuda_kernels
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("key", ["CUDA", *DEVICES])
def test_the_kernels_of_other_devices(operator: str, key: str, rng: Random) -> None:
    """Called by their keys, with CPU tensors: the reference's values, and the checks."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def results(call: Call) -> tuple[torch.Tensor, ...]:
        found = call.operator.redispatch(keys, *call.tensors, *call.arguments)
        return found if isinstance(found, tuple) else (found,)

    calls = (draw(rng, operator) for _ in range(scaled(20)))
    check_each(calls, lambda call: call.compare(results(call)))
    if operator in UNPOOLING:
        call = with_invalid_index(draw(rng, operator), rng)
        with pytest.raises(RuntimeError, match=call.error):
            results(call)
    x = torch.rand(1, 2, 4, 4)
    with pytest.raises(RuntimeError, match=r"^max_pool2d: expected kernel_size greater than zero"):
        _operators.max_pool.redispatch(keys, x, [0, 0], [1, 1], [0, 0], [1, 1], False, torch.int64)
    with pytest.raises(NotImplementedError, match="expected dense tensors but got a sparse_coo"):
        _operators.max_pool.redispatch(
            keys, x.to_sparse(), [2, 2], [1, 1], [0, 0], [1, 1], False, torch.int64
        )


@pytest.mark.parametrize("reduce", ["last", "sum"])
def test_strides_far_larger_than_the_plane(reduce: str) -> None:
    """Offsets are unpooled in blocks of a stride, but not in such ones."""
    x, offsets = torch.ones(1, 2, 1), torch.ones(1, 2, 1, dtype=torch.uint8)
    with fallback_device():
        output = _operators.max_unpool(x, offsets, (4,), (2,), (2**40,), (0,), reduce)
    assert output.tolist() == [[[0, 1, 0, 0]] * 2]


@no_cuda_kernels
def test_cuda_tensors_without_kernels_warn_once(monkeypatch: Patch) -> None:
    """Of a GPU of AMD, for which there are none, nothing is said."""
    monkeypatch.setattr(_fallback, "_has_warned", False)
    with FakeTensorMode():
        x = torch.empty(1, 2, 4, 4, device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monkeypatch.setattr(torch.version, "hip", "7.0")
            _fallback._check_kinds("max_pool", x)
            monkeypatch.setattr(torch.version, "hip", None)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                _fallback._check_kinds("max_pool", x)
    (words,) = (str(warning.message) for warning in warned)
    assert words.startswith("maxunpool_cuda: CUDA tensors run PyTorch's operators")
    assert '`pip install "cuda-toolkit[nvcc,cccl]==13.*"`' in words
    assert "as this build has no " in words


def test_a_captured_graph_checks_indices_when_it_runs(monkeypatch: Patch) -> None:
    """While a CUDA graph is captured, no call may wait for the device."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    window = _fallback._Unpooling((4,), (2,), (2,), (0,))
    with FakeTensorMode(), Record() as record:
        indices = torch.empty(1, 2, dtype=torch.int64, device="cuda")
        _fallback._check_inside(indices, [(indices, 0, 4)], window)
    assert "aten::_assert_async" in record.names


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("device", ["mps", "xpu", "AMD"])
def test_other_devices_run_the_operators_where_torch_nn_cannot(
    device: str, monkeypatch: Patch
) -> None:
    """torch.nn lacks small indices and sums, and refuses deterministic algorithms."""
    if device == "AMD":
        monkeypatch.setattr(torch.version, "hip", "7.0")
        device = "cuda"

    def called(function: Callable[..., Any], *tensors: torch.Tensor) -> set[str]:
        found = {name.split(".")[0] for name in pooling_in(make_fx(function)(*tensors))}
        assert len(found) == 1
        return found

    with FakeTensorMode():
        x = torch.empty(1, 1, 4, 4, device=device)
        indices = torch.empty(1, 1, 4, 4, device=device, dtype=torch.int64)
        pool = lambda x: F.max_pool2d(x, 2)  # noqa: E731
        unpool = lambda x, i: F.max_unpool2d(x, i, 2)  # noqa: E731
        small = {"return_indices": True, "index_dtype": torch.uint8}
        assert called(pool, x) == called(unpool, x, indices) == {"aten"}
        assert called(lambda x: F.max_pool2d(x, 2, **small), x) == {"maxunpool_cuda"}
        assert called(unpool, x, indices.int()) == {"maxunpool_cuda"}
        sums = lambda x, i: F.max_unpool2d(x, i, 2, reduce="sum")  # noqa: E731
        assert called(sums, x, indices) == {"maxunpool_cuda"}
        torch.use_deterministic_algorithms(True)
        assert called(pool, x) == called(unpool, x, indices) == {"maxunpool_cuda"}
        assert called(lambda x: F.adaptive_max_pool2d(x, 1), x) == {"maxunpool_cuda"}


FIRST_RUN = """
import re, sys, warnings
import torch, maxunpool_cuda
assert maxunpool_cuda.__file__.startswith(sys.argv[1]), maxunpool_cuda.__file__
info = maxunpool_cuda.build_info()
assert (info["kernels"], info["cuda"]) == ("none", False)
print(info["note"])
for script in re.findall(r"^```python\\n(.*?)^```", open(sys.argv[2]).read(), re.M | re.S):
    exec(script)
x = torch.rand(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
pool = maxunpool_cuda.MaxPool2d(3, 1)
assert torch.autograd.gradcheck(pool, x, check_forward_ad=True)
print(type(pool(x).grad_fn).__name__, maxunpool_cuda.__version__)
"""
NOTES = {
    "asked for": "no kernels, as FORCE_FALLBACK=1 says",
    "no compiler": "no kernels: expected a C++ compiler but got none",
}


@pytest.mark.parametrize("why", NOTES)
def test_a_wheel_without_a_library(why: str, tmp_path: Path) -> None:
    """It is for every system and Python, says what it is, and runs the examples of the README."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", _library.FALLBACK)
    shutil.copytree(ROOT / "maxunpool_cuda", source / "maxunpool_cuda", ignore=ignored)
    names = ("FORCE_CUDA", "FORCE_CPU", "FORCE_FALLBACK", "CXX", "DEBUG", "LINEINFO")
    alone = {name: value for name, value in os.environ.items() if name not in names}
    alone |= {"FORCE_FALLBACK": "1"} if why == "asked for" else {"PATH": str(tmp_path)}
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], env=alone, cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"maxunpool_cuda: built {NOTES[why]}. PyTorch's operators compute instead"
    assert done.stdout.splitlines()[-1].startswith(said)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    # PyTorch 2.14 warns of itself, where forward mode begins to use torch.jit.script.
    run = subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", "-c", FIRST_RUN, site, ROOT / "README.md"],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    note, results = run.stdout.splitlines()
    assert note == NOTES[why]
    assert results == f"MaxPoolBackward {maxunpool_cuda.__version__}"


@needs_library
def test_a_library_comes_before_the_record_of_a_build_without_one(tmp_path: Path) -> None:
    """Both may lie in a source tree that was built twice."""
    package = Path(_library._C.__file__).parent
    for path in package.glob("_C.cpython*"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / _library.FALLBACK).touch()
    assert _library.has_library(tmp_path)


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes and strides of the results of a call, or the type and the words of its error."""
    try:
        results = call(*arguments)
    except Exception as error:
        return type(error).__name__, str(error).split("\n")[0]
    results = results if isinstance(results, tuple) else (results,)
    return [(tuple(result.shape), result.stride()) for result in results]


def spoilt(rng: Random, numbers: Any) -> Any:
    """The numbers of a list, sometimes with other ones, or with one less."""
    if not isinstance(numbers, tuple) or rng.random() < 0.8:
        return numbers
    if rng.random() < 0.2:
        return numbers[1:]
    strange = (-1, 0, 1, 2, 17, 256, 2**31, 2**58, 2**60, 2**61)
    return tuple(rng.choice((number, number + 1, rng.choice(strange))) for number in numbers)


CHANGES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t[:1].expand(t.shape),
    lambda t: t[..., :1].expand(t.shape),
    lambda t: t[(slice(None),) * (t.dim() - 1) + (slice(0, 1),)],
    lambda t: t.transpose(0, -1),
    lambda t: t[0],
    lambda t: t[:0],
    lambda t: t[:, :0],
    lambda t: t.new_empty(1, *t.shape),
    lambda t: t.as_strided(t.shape, [1] * t.dim()),
    lambda t: t.to(torch.bool),
    lambda t: t.to(torch.int16),
)


def changed(rng: Random, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with other strides, another shape or another dtype."""
    return rng.choice(CHANGES)(tensor)


@needs_library
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_guard_refuses_what_the_checks_refuse(operator: str, rng: Random) -> None:
    """Right calls and wrong ones, straight to a kernel: the checks' errors, shapes and strides."""
    errors = set()
    for _ in range(scaled(1200)):
        call = draw(rng, operator, most_cells=12, longest=6)
        if rng.random() < 0.05:  # a single position a plane, and one channel: any layout fits
            call = draw(rng, operator, leading=(3, 1), geometry=geometry_of((1, 1), (2, 2, 0)))
        tensors = [t if rng.random() < 0.9 else changed(rng, t) for t in call.tensors]
        arguments = [spoilt(rng, argument) for argument in call.arguments]
        if rng.random() < 0.05:
            arguments[-1] = torch.int16 if operator == "pool" else "max"
        result = call.definition.result
        expected = outcome(partial(result, device="meta"), *tensors, *arguments)
        if isinstance(expected, list) and math.prod(expected[0][0]) > 2**16:
            continue  # all numbers are allowed, and the result would be large
        with torch.inference_mode():  # without autograd, whose kernel is in Python
            found = outcome(call.operator, *tensors, *arguments)
        if isinstance(expected, tuple):
            expected = ("RuntimeError", expected[1])  # the one type that a kernel raises
            errors.add(re.sub(r"[\d-]+", "", expected[1])[:60])
        if "in the output plane" not in str(found):  # the numbers fit, but not these indices
            assert found == expected, (tensors, arguments)
    assert len(errors) > 5, errors


# The devices of CPU tensors, without the emulated GPU.
on_the_cpu = pytest.mark.parametrize("device", ["cpu", "fallback"], indirect=True)
every_derivative = pytest.mark.parametrize(("operator", "reduce"), DIFFERENTIABLE)
every_rank = pytest.mark.parametrize("dims", [1, 2, 3])


def in_channels_last(tensor: Tensor) -> Tensor:
    """A copy in this layout, as its strides tell: ``contiguous`` keeps those of one channel."""
    format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=format).copy_(tensor)


def calls_in_layouts(rng: Random, operator: str, reduce: str, dims: int) -> Iterator[Call]:
    """Calls in each layout, with and without a batch; one channel, planes of one position."""
    geometries = (geometry_of((2,) * dims, (2, 2, 0)), geometry_of((1,) * dims, (1, 1, 0)))
    leadings = ((2, 3), (2, 1), (1, 1), (0, 3), (3,), (1,))
    layouts = ("contiguous", "strided", "channels_last")[: 2 if dims == 1 else 3]
    for leading, geometry, layout in product(leadings, geometries, layouts):
        batch = leading if len(leading) == 2 else (1, *leading)
        chosen = {"geometry": geometry, "leading": batch, "reduce": reduce}
        call = draw(rng, operator, torch.float64, layout=layout, **chosen)
        tensors = call.tensors
        if layout == "channels_last":
            tensors = tuple(in_channels_last(tensor) for tensor in tensors)
        if batch != leading:  # a volume keeps channels_last_3d
            tensors = tuple(tensor[0] for tensor in tensors)
        yield replace(call, tensors=tensors)


def results_and_gradient(call: Call, x: Tensor, *indices: Tensor) -> list[Tensor]:
    """All results of the call for other tensors, and the gradient of their squares' sum / 2."""
    results = call.on(x.requires_grad_(), *indices)
    return [*results, *torch.autograd.grad(results[0], x, results[0], create_graph=True)]


@on_the_cpu
@every_rank
@every_derivative
def test_results_have_the_strides_of_the_trace(
    device: str, operator: str, reduce: str, dims: int, rng: Random
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

    check_each(calls_in_layouts(rng, operator, reduce, dims), check)


@on_the_cpu
@every_rank
@every_derivative
def test_results_may_be_changed_in_place(
    device: str, operator: str, reduce: str, dims: int, rng: Random
) -> None:
    """As ``nn.ReLU(inplace=True)`` does. No result is a view, or has the memory of an input."""

    def check(call: Call) -> None:
        tensors = x, *_ = call.moved(device).tensors
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                results = call.on(*tensors)
            assert not any(each._is_view() for each in results), mode
        weight = torch.tensor(0.5, dtype=x.dtype, requires_grad=True)
        results = results_and_gradient(call, *tensors)
        assert not any(each._is_view() for each in results)
        for number in (0, -1):  # the values and the gradient
            output = (results[number] * weight).sin()
            expected = torch.autograd.grad(output.sum(), (x, weight), retain_graph=True)
            changed = results_and_gradient(call, *tensors)[number].mul_(weight).sin_()
            assert all_same(torch.autograd.grad(changed.sum(), (x, weight)), expected)
        for each in results:
            each.detach_().zero_()
        with torch.no_grad():
            values = call.on(*tensors)[0]
        assert values.mul_(weight).requires_grad
        assert all_same([each.detach() for each in tensors], call.tensors), "an input changed"

    check_each(calls_in_layouts(rng, operator, reduce, dims), check)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 1, 10, 10, 10), (2, 3, 2, 2, 2), (4, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.uint8], ids=str)
def test_inductor_trains_on_volumes(index_dtype: torch.dtype, shape: Sizes) -> None:
    """It asserts strides. One channel, planes of one position, and no batch have unusual ones."""

    def function(x: Tensor) -> Tensor:
        values, indices = F.max_pool3d(x * 2, 2, return_indices=True, index_dtype=index_dtype)
        return F.max_unpool3d(values.sin(), indices, 2) + x

    batch = in_channels_last(torch.rand((1, *shape)[-5:]))
    x = (batch if len(shape) == 5 else batch[0]).requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    outputs = [compiled(x), function(x)]
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


class Elsewhere(Tensor):
    """A tensor of any device, without data. An operator runs that device's kernel."""

    @classmethod
    def on(cls, device: str, like: Tensor) -> Any:
        return cls._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:maxunpool_cuda. CUDA tensors run PyTorch's operators")
@pytest.mark.parametrize("other", ["cuda:0", "privateuseone:1"])
@pytest.mark.parametrize("moved", ["values", "indices"])
@pytest.mark.parametrize("operator", UNPOOLING)
def test_values_and_indices_on_two_devices(
    operator: str, moved: str, other: str, rng: Random
) -> None:
    call = draw(rng, operator, torch.float32)
    values, indices = call.tensors
    if moved == "values":
        tensors, devices = (Elsewhere.on(other, values), indices), f"{other} and cpu"
    else:
        tensors = values.requires_grad_(), Elsewhere.on(other, indices)
        devices = f"cpu and {other}"
    words = rf"^max_unpool{call.dims}d: expected values and indices on the same device but got "
    with pytest.raises(RuntimeError, match=f"{words}{devices}$"):
        call.on(*tensors)
    size, *window, reduce = call.arguments
    no_window = replace(call, arguments=(size, (0,) * call.dims, *window[1:], reduce))
    with pytest.raises(RuntimeError, match="expected kernel_size greater than zero"):
        no_window.on(*tensors)
    if operator.startswith("unpool"):
        module = getattr(maxunpool_cuda, f"MaxUnpool{call.dims}d")(*window, reduce=reduce)
        for function in (call.function, lambda *tensors: module(*tensors, size)):
            with pytest.raises(RuntimeError, match=f"{words}{devices}$"):
                function(*tensors)


@on_the_cpu
@pytest.mark.parametrize("of_indices", LAYOUTS[:2])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("operator", UNPOOLING)
def test_of_bad_indices_the_first_in_memory_is_named(
    device: str, operator: str, dims: int, layout: str, of_indices: str, rng: Random
) -> None:
    """The call's layout orders them, which is that of the values."""
    geometry = geometry_of((2,) * dims, (2, 2, 0))
    call = draw(rng, operator, torch.float32, geometry=geometry, leading=(2, 3), layout=layout)
    indices = call.tensors[1].contiguous()
    planes = indices.view(6, -1)
    planes[4, 3], planes[5, 2] = 201, 202
    first, place = (201, (3, 4)) if layout == "contiguous" else (202, (2, 5))
    error = rf"but got {first}\b.* at position {place[0]} of plane {place[1]} "
    tensors = call.tensors[0], laid_out(indices, of_indices, dims)
    replace(call, tensors=tensors, error=error).verify_error(device)


@on_the_cpu
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_a_volume_of_one_channel_and_minus_infinity(device: str, index_dtype: torch.dtype) -> None:
    """PyTorch's pooling of channels_last_3d gives such windows the index 0."""
    x = in_channels_last(torch.full((2, 1, 4, 4, 4), -torch.inf))
    window = ((2,) * 3, (2,) * 3, (0,) * 3, (1,) * 3)
    Call(_operators.max_pool, (x,), (*window, False, index_dtype)).verify(device)


def test_numbers_that_are_rounded_to_the_limit() -> None:
    """In floats, in which sizes are checked, 2^60 - 1 is 2^60."""
    x, indices = torch.ones(1, 1, 8), torch.zeros(1, 1, 8, dtype=torch.int64)
    words = "expected sizes that do not overflow but got an unpooled shape"
    with pytest.raises(RuntimeError, match=f"^max_pool1d: {words}"):
        F.max_pool1d(x, 2**60 - 1, 1, 2**59 - 1)
    for window in ((2**60 - 1, 1, 0), (1, 1, 2**60 - 1), (1, 2**57 - 1, 0)):
        with pytest.raises(RuntimeError, match=f"^max_unpool1d: {words}"):
            _operators.max_unpool(x, indices, (8,), *((number,) for number in window), "last")


@on_the_cpu
@every_rank
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_strides_beyond_32_bits(device: str, dtype: torch.dtype, dims: int, rng: Random) -> None:
    """One window is left, though the operators of PyTorch that pool take strides of 32 bits."""

    def calls() -> Iterator[Call]:
        for stride, padding, ceil in product((2**31 - 1, 2**31, 2**40), (0, 1), (False, True)):
            steps = (stride, *[1] * (dims - 1))
            sizes, window = (5,) * dims, ((2,) * dims, steps, (padding,) * dims)
            geometry = Geometry.of_pooling(sizes, *window, (1,) * dims, ceil=ceil)
            yield draw(rng, "pool", dtype, geometry=geometry, leading=(2, 3))

    check_each(calls(), lambda call: call.verify(device))
