# SPDX-License-Identifier: BSD-3-Clause
"""What all tests run under: seeds, devices, poisoned memory, deterministic algorithms."""

import contextlib
import ctypes
import os
import random
import secrets
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import emulation
import failures
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import maxunpool_cuda
from maxunpool_cuda import _fallback, _operators

pytest.register_assert_rewrite("cases")  # its assertions show values, as tests' do

# The seed of the random inputs that tests draw.
GIVEN = os.environ.get("MAXUNPOOL_SEED", "0")
SEED = secrets.randbelow(2**31) if GIVEN == "fresh" else int(GIVEN)
os.environ["MAXUNPOOL_SEED"] = str(SEED)  # for the processes of pytest-xdist

# What new memory of the host holds: a byte that makes large numbers of floats and of integers.
# cases.py does the same for results on a GPU.
POISON = 0x7F
M_PERTURB = -6  # of mallopt in glibc, which fills new memory with the complement of the argument
if set_malloc_option := getattr(ctypes.CDLL(None), "mallopt", None):
    set_malloc_option(M_PERTURB, POISON ^ 0xFF)


def why_no_gpu() -> str:
    """Why no test can run on a GPU, or nothing if tests can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not maxunpool_cuda.build_info()["cuda"]:
        return "this build has no CUDA kernels"
    return ""


def skip_without_memory(needed: int) -> None:
    """Skip a test unless so many bytes of the GPU are free. PyTorch then keeps them for it."""
    torch.cuda.empty_cache()  # what PyTorch keeps of earlier tests is free for this one
    try:
        torch.empty(needed, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip(f"{needed >> 20} MiB of GPU memory are not free")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="slow tests too, and every random case")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MAXUNPOOL_ALL"] = str(int(config.getoption("--all")))  # for cases.py


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        f"random inputs: MAXUNPOOL_SEED={SEED} repeats them, MAXUNPOOL_SEED=fresh draws others",
        "all tests" if config.getoption("--all") else "without what only make test-all runs",
        f"GPU: {why_no_gpu() or torch.cuda.get_device_name()}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if reason := why_no_gpu():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, in a line for each reason. pytest has one for each place."""
    skipped = terminalreporter.stats.get("skipped", [])
    # longrepr is the path, the line, and "Skipped: " with the reason.
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} skipped: {reason}")


def generator(node: pytest.Item, purpose: str = "") -> random.Random:
    """Seeded by SEED, the test's name, so that it may run alone, and what the numbers are for."""
    return random.Random(f"{SEED} {node.nodeid}{purpose}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The test's own random numbers."""
    return generator(request.node)


HAS_LIBRARY = maxunpool_cuda.build_info()["kernels"] != "none"
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="this build has no compiled library")
# The devices that run csrc/cuda: a GPU, and the emulation on the CPU.
ON_GPU = pytest.param("cuda", marks=pytest.mark.cuda)
EMULATED = pytest.param("emulated", marks=needs_library)
GPUS = [ON_GPU, EMULATED]


class Record(TorchDispatchMode):
    """Records the names of the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fallback_device() -> Iterator[None]:
    """Inside, _fallback.py computes, as on a device that the package has no kernels for.

    It is told that PyTorch's scatter has no order there, and that torch.nn does not pool alike.
    """
    with contextlib.ExitStack() as stack:
        if HAS_LIBRARY:
            replaced = stack.enter_context(torch.library._scoped_library("maxunpool_cuda", "IMPL"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the warning that kernels are overridden
            for name, kernel in _operators.fallback_kernels():
                replaced.impl(name, kernel, "CPU")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_fallback, "_has_order", lambda tensor: False)
        patch.setattr(_fallback, "_pools_as_torch", lambda tensor: False)
        yield


@pytest.fixture(params=["cpu", "dispatched", *GPUS, "fallback"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of a test's tensors: "cpu" also on the emulated GPU and the "fallback" device."""
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")  # an invalid index is an error at once
    monkeypatch.setattr(failures, "device", request.param)
    if request.param == "dispatched":  # no call takes the short way past PyTorch's dispatcher
        monkeypatch.setattr(_operators, "has_short_way", False)
        yield "cpu"
    elif request.param == "emulated":
        with emulation.emulated_gpu(generator(request.node, " device")):
            yield "cpu"
    elif request.param == "fallback":
        with fallback_device():
            yield "cpu"
    else:
        yield request.param


@pytest.fixture(params=["cpu", ON_GPU])
def real_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a test's tensors, if it does not test kernels and so needs no emulation."""
    monkeypatch.setattr(failures, "device", request.param)
    return request.param


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive pooling on the CPU takes the way that it takes on a GPU and in graphs."""
    monkeypatch.setattr(_operators, "is_traced", lambda: True)


@pytest.fixture(autouse=True)
def deterministic_algorithms(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins under them, with the same global generators and number of threads.

    A test may switch them off, but no call of the package may need that. Compiled code of earlier
    tests is forgotten: it would count towards Dynamo's limit.
    """
    seed, threads = generator(request.node, " shared").getrandbits(32), torch.get_num_threads()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def single_threaded_torch(deterministic_algorithms: None) -> None:
    """Makes torch.nn's unpooling deterministic."""
    torch.use_deterministic_algorithms(False)  # torch.nn's unpooling raises an error under them
    torch.set_num_threads(1)  # with more threads any of the values that share an index may win
