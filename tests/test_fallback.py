# SPDX-License-Identifier: BSD-3-Clause
"""Where the library has no kernels: other devices, CUDA without kernels, a build without a library.

The fixture ``device`` runs other tests on the fallback, and in a build without a library all tests
do: make check-fallback. Fake tensors stand for tensors of devices that are not there.
"""

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cases import (
    OPERATORS,
    UNPOOLING,
    Call,
    call_of,
    draw,
    draw_differentiable,
    geometry_of,
    scaled,
    with_invalid_index,
)
from conftest import Record
from failures import check_each
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
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


@pytest.mark.usefixtures("single_threaded_torch")  # and not under deterministic algorithms
@pytest.mark.parametrize("device", ["mps", "AMD"])
def test_other_devices_run_the_operators_where_torch_nn_cannot(
    device: str, monkeypatch: Patch
) -> None:
    """torch.nn lacks small indices and sums, and refuses deterministic algorithms."""
    if device == "AMD":
        monkeypatch.setattr(torch.version, "hip", "7.0")
        device = "cuda"

    def called(function: Callable[..., Any], *arguments: Any, **options: Any) -> set[str]:
        with Record() as record:
            function(*arguments, **options)
        return {name.split("::")[0] for name in record.names if "pool" in name}

    torch_nns, ours = {"aten"}, {"maxunpool_cuda"}
    with FakeTensorMode():
        x = torch.empty(1, 1, 4, 4, device=device)
        indices = torch.empty(1, 1, 4, 4, device=device, dtype=torch.int64)
        assert called(F.max_pool2d, x, 2) == torch_nns
        assert called(F.max_unpool2d, x, indices, 2) == torch_nns
        small = {"return_indices": True, "index_dtype": torch.uint8}
        assert called(F.max_pool2d, x, 2, **small) == ours
        assert called(F.max_unpool2d, x, indices.int(), 2) == ours
        assert called(F.max_unpool2d, x, indices, 2, reduce="sum") == ours
        torch.use_deterministic_algorithms(True)
        assert called(F.max_pool2d, x, 2) == ours
        assert called(F.max_unpool2d, x, indices, 2) == ours
        assert called(F.adaptive_max_pool2d, x, 1) == ours


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
    for name in ("FORCE_CUDA", "FORCE_CPU", "DEBUG"):
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


@pytest.mark.parametrize("device", ["cpu", "fallback"], indirect=True)
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_have_the_strides_of_the_trace_and_are_no_views(
    device: str, operator: str, rng: Random
) -> None:
    """Autograd would refuse to change some views in place, as ``nn.ReLU(inplace=True)`` does."""

    def check(call: Call) -> None:
        x, *indices = call.tensors
        traced = leaves(call.definition.result(x, *indices, *call.arguments, device="meta"))
        x.requires_grad_()
        for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
            with mode:
                results = call.on(x)
            assert [each.stride() for each in results] == [each.stride() for each in traced]
            assert not any(each._is_view() for each in results)
        results[0].mul_(2).sum().backward()

    calls = (draw_differentiable(rng, operator, torch.float64) for _ in range(scaled(80)))
    check_each(calls, check)


@pytest.mark.parametrize("device", ["cpu", "fallback"], indirect=True)
def test_a_volume_of_one_channel_and_minus_infinity(device: str) -> None:
    """PyTorch's pooling of channels_last_3d gives such windows the index 0."""
    x = torch.full((2, 4, 4, 4, 1), -torch.inf).movedim(-1, 1)
    call_of("pool", x, geometry=geometry_of((2, 2, 2), (2, 2, 0))).check(device)
