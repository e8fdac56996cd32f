# SPDX-License-Identifier: BSD-3-Clause
"""A device "cuda" without a GPU: PyTorch's CUDA build, nvcc's host code, and emulated kernels.

The emulation compiles the host code of csrc/cuda by g++, and calls it for CPU tensors. Here that
code is the library's own, as nvcc has compiled it, and tensors are on the device "cuda". A library
that is preloaded stands for CUDA's runtime (runtime.cpp). When it should launch a kernel of this
package, it runs the emulated one (invoke.cpp). PyTorch's kernels do not run, so tests here may
create tensors, copy storages and call the operators, but not compare tensors on the device.
"""

import ctypes
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import emulation
import maxunpool_cuda

WRITTEN_FOR = "13.0"  # runtime.cpp has the functions of this release of CUDA
TOOLKIT, _ = emulation.SETUP["find_toolkit"]()


def why_not() -> str:
    """Why there can be no such device; empty if there can."""
    if not maxunpool_cuda.build_info()["cuda"]:
        return "this build has no CUDA kernels"
    if torch.version.cuda != WRITTEN_FOR:
        return f"the stand-in is for CUDA {WRITTEN_FOR}, and this PyTorch has {torch.version.cuda}"
    if torch.cuda.is_available():
        return "there is a GPU"
    if not TOOLKIT:
        return "no nvcc is found, which knows the headers of CUDA's runtime"
    return ""


def kernel_table() -> str:
    """A row for each kernel: its symbol, and thread_at() of invoke.cpp for its type."""
    rows = []
    for symbol, signature in emulation.kernels().items():
        # Such as: void emulated::forward<float, (emulated::Elements)2>(unsigned int, ...).
        signature = re.sub(r"\((emulated::\w+)\)(\d)", r"\1{\2}", signature)
        function = signature.removeprefix("void ").partition("(")[0]
        rows.append(f'{{"{symbol}", thread_at<decltype({function})>}},\n')
    return "".join(rows)


@functools.cache
def build() -> Path:
    """The library that stands for CUDA's runtime and for its driver. invoke.so is beside it."""
    library = emulation.build("cuda")
    folder = library.parent
    texts = {name: (emulation.HERE / name).read_text() for name in ("runtime.cpp", "invoke.cpp")}
    texts["kernel_table.inc"] = kernel_table()
    # PyTorch loads a library that names functions of the driver, and calls none of them here.
    nvrtc = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    driver = [name for name in emulation.taken_from_others(nvrtc) if re.match("cu[A-Z]", name)]
    texts["driver.cpp"] = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in driver)
    for name, text in texts.items():
        (folder / name).write_text(text)
    # nvcc calls g++, and tells it where the headers of CUDA are. The library has the name of the
    # driver's, so that the loader looks for no other.
    nvcc = [Path(TOOLKIT.home, "bin", "nvcc"), "-x", "c++", "-std=c++20", "-cudart", "none", "-w"]
    nvcc += ["-shared", "-Xcompiler", "-fPIC", "-Xlinker", "-soname=libcuda.so.1"]
    stand_in = [*nvcc, "runtime.cpp", "driver.cpp", "-o", "runtime.so"]
    subprocess.run(stand_in, check=True, cwd=folder)
    gcc = [emulation.COMPILER, "-std=c++20", "-O0", "-g1", "-fPIC", "-shared"]
    invoke = [*gcc, *emulation.TORCH, *emulation.SHIM, "invoke.cpp", "-o", "invoke.so", library]
    subprocess.run(invoke, check=True, cwd=folder)
    return folder / "runtime.so"


# Autograd's threads of the device may still run, and the process would not end in order.
RUN_PYTEST = """
import os, sys, pytest
status = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
"""


def run_tests(file: Path) -> subprocess.CompletedProcess[str]:
    """Run tests, each of which calls connect() first, in a process that has the device."""
    arguments = ("--all", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", file)
    command = [sys.executable, "-c", RUN_PYTEST, *arguments]
    return emulation.run(command, {"LD_PRELOAD": str(build())})


def stand_in() -> ctypes.CDLL:
    """The library that stands for CUDA's runtime, in a process that has the device."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def connect() -> None:
    """Let launches of nvcc's host code run emulated kernels."""
    invoke = ctypes.CDLL(str(Path(os.environ["LD_PRELOAD"]).parent / "invoke.so"))
    stand_in().set_work_of_launch(invoke.work_of_launch)
    assert torch.cuda.get_device_name() == "a stand-in without a GPU"


def take_history() -> list[str]:
    """What the device did since the last call: symbols of kernels, names of other functions.

    Such as ["cudaMalloc", "_ZN14maxunpool_cuda8backwardI...", "cudaMemcpyAsync"].
    """
    take = stand_in().take_history
    take.restype = ctypes.c_char_p
    return take().decode().splitlines()
