# SPDX-License-Identifier: BSD-3-Clause
"""What the tests themselves stand on: copies on a device, counts of tests and of registers."""

import os
import random
import warnings
from pathlib import Path

import gpu_tests
import pytest
import test_library
import torch
from cases import LAYOUTS, MOVABLE, OPERATORS, draw, laid_out, moved, random_bits, same
from torch import Tensor

import maxunpool_cuda

Patch = pytest.MonkeyPatch


def place(tensor: Tensor) -> tuple[object, ...]:
    """Where the elements of a tensor lie in its storage."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def check_moved(tensor: Tensor, device: str) -> None:
    copy = moved(tensor, device)
    assert copy.device.type == device
    assert place(copy) == place(tensor)
    assert copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    if device == "meta" or tensor.numel() == 0:  # no tensor of these has an address
        return
    assert copy.data_ptr() != tensor.data_ptr()
    assert same(copy, tensor)
    # Vectors have 16 bytes.
    assert copy.data_ptr() % 16 == tensor.storage_offset() * tensor.itemsize % 16


def test_a_moved_tensor_lies_in_memory_as_before(real_device: str, rng: random.Random) -> None:
    for device in (real_device, "meta"):
        for dtype in MOVABLE:
            for layout in LAYOUTS:
                values = random_bits(rng, (2, 8, 5, 3), dtype)
                check_moved(laid_out(values, layout, dims=2), device)
            check_moved(values[1:, ::3, 2:, 1], device)
            check_moved(values[:, :1, :, :1].expand(values.shape), device)
            check_moved(values[:, 3:3], device)
        for operator in OPERATORS * 10:
            for tensor in draw(rng, operator).tensors:
                check_moved(tensor, device)


def test_unaligned_tensors_are_misaligned_where_they_are_moved(real_device: str) -> None:
    """By one element, so no vector of 16 bytes may be read there."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        tensor = laid_out(torch.ones(2, 3, 4, 8).to(dtype), "unaligned", dims=2)
        assert moved(tensor, real_device).data_ptr() % 16 == dtype.itemsize
    tensor = laid_out(torch.ones(2, 3, 4, 8), "strided", dims=2)
    assert moved(tensor, real_device).stride() == (192, 64, 16, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(2, requires_grad=True), id="has a gradient"),
        pytest.param(torch.ones(2, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.ones(2, dtype=torch.complex64).conj().imag, id="negated"),
        pytest.param(torch.nn.Parameter(torch.ones(2), requires_grad=False), id="subclass"),
    ],
)
def test_what_a_move_would_lose_is_refused(tensor: Tensor) -> None:
    with pytest.raises(AssertionError):
        moved(tensor, "cpu")


# Of three tests that need a GPU, one passes, one fails, and one skips itself. A fourth needs none.
MADE_UP = """
import pytest

@pytest.mark.cuda
def test_passes(): pass

@pytest.mark.cuda
def test_fails(): assert False

@pytest.mark.cuda
def test_skips(): pytest.skip("too little memory")

def test_needs_no_gpu(): pass
"""
FAKE_GPU = """
import torch, maxunpool_cuda
torch.cuda.is_available = lambda: {gpu}
torch.cuda.get_device_name = lambda: "Fake 100"
maxunpool_cuda.build_info = lambda: {{"cuda": {kernels}}}
"""
LINES = [
    pytest.param(False, True, "none of 3 cuda tests ran: no CUDA device", id="no GPU"),
    pytest.param(
        True, False, "none of 3 cuda tests ran: this build has no CUDA kernels", id="no kernels"
    ),
    pytest.param(
        True,
        True,
        "2 of 3 cuda tests ran, on Fake 100; the others did not: too little memory",
        id="both",
    ),
]


@pytest.fixture
def made_up(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers = cuda\naddopts = -p gpu_tests -p no:cacheprovider")
    pytester.makepyfile(MADE_UP)
    return pytester


def fake(gpu: bool, kernels: bool, patch: Patch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: gpu)
    patch.setattr(gpu_tests, "gpu_name", lambda: "Fake 100")
    patch.setattr(maxunpool_cuda, "build_info", lambda: {"cuda": kernels})


@pytest.mark.parametrize(("gpu", "kernels", "line"), LINES)
def test_a_run_says_how_many_tests_ran_on_a_gpu(
    gpu: bool, kernels: bool, line: str, made_up: pytest.Pytester, monkeypatch: Patch
) -> None:
    fake(gpu, kernels, monkeypatch)
    done = made_up.runpytest_inprocess()
    done.stdout.fnmatch_lines(f"On a GPU: {line}")
    ran = gpu and kernels
    done.assert_outcomes(passed=1 + ran, failed=int(ran), skipped=1 if ran else 3)


def test_a_run_says_that_no_test_for_a_gpu_was_selected(made_up: pytest.Pytester) -> None:
    done = made_up.runpytest_inprocess("-k", "needs_no_gpu")
    done.stdout.fnmatch_lines("On a GPU: no test ran: 0 cuda tests were selected")
    done.assert_outcomes(passed=1, deselected=3)


def test_two_processes_count_together(made_up: pytest.Pytester, monkeypatch: Patch) -> None:
    pytest.importorskip("xdist")
    made_up.makeconftest(FAKE_GPU.format(gpu=True, kernels=True))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    done = made_up.runpytest_subprocess("-n", "2")
    done.stdout.fnmatch_lines(f"On a GPU: {LINES[-1].values[-1]}")
    done.assert_outcomes(passed=2, failed=1, skipped=1)


# What cuobjdump prints of kernels that fit: a name, and the registers of a thread.
FITTING = {"7forwardI": 64, "8backwardI": 48, "18forward_last_slotsI": 64}
FITTING |= {"9pool_rowsI": 62, "13pool_channelsI": 64, "12pool_windowsI": 128}


def usage(kernels: dict[str, int], stack: int = 0) -> str:
    line = " Function _ZN14maxunpool_cuda{}:\n  REG:{} STACK:{} SHARED:1024 LOCAL:0 TEXTURE:0\n"
    return "".join(line.format(name, registers, stack) for name, registers in kernels.items())


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        pytest.param(usage(FITTING, stack=8), "forwardI spills", id="spills"),
        pytest.param(
            usage(FITTING | {"7forwardI": 65}), "forwardI: 65 registers", id="too many registers"
        ),
        pytest.param(usage(FITTING | {"12pool_windowsI": 130}), "130 registers", id="of pooling"),
    ],
)
def test_kernels_must_fit_with_an_nvcc_that_they_were_tuned_with(
    printed: str, words: str, monkeypatch: Patch
) -> None:
    info = {"cuda_version": "13.2"}
    monkeypatch.setattr(maxunpool_cuda, "build_info", lambda: info)
    monkeypatch.setattr(test_library, "cuobjdump", lambda argument: printed)
    with pytest.raises(AssertionError, match=words):
        test_library.test_kernels_fit_the_registers()
    info["nvcc_version"] = "13.1"
    with pytest.warns(UserWarning, match=words):
        test_library.test_kernels_fit_the_registers()
    monkeypatch.setattr(test_library, "cuobjdump", lambda argument: usage(FITTING))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test_library.test_kernels_fit_the_registers()
