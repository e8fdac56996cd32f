# SPDX-License-Identifier: BSD-3-Clause
"""What nvcc made of csrc/cuda, libmaxunpool_cuda.so: its kernels, and its host code.

No GPU is needed.
"""

import os
import re
import shutil
import subprocess
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from emulation.runtime import imported

import maxunpool_cuda
from maxunpool_cuda import _library

LIBRARY = _library.PACKAGE / _library.CUDA_KERNELS
ASKED = maxunpool_cuda.build_info()["arch_list"].replace(" ", ";").split(";")
pytestmark = pytest.mark.skipif(not ASKED[0], reason="this build has no CUDA kernels")


def cuobjdump(argument: str) -> str:
    path = os.environ["PATH"]
    if triton := find_spec("triton"):
        path += f"{os.pathsep}{Path(triton.origin).parent / 'backends/nvidia/bin'}"
    if not (program := shutil.which("cuobjdump", path=path)):
        pytest.skip("cuobjdump is installed neither with a CUDA toolkit nor with Triton")
    return subprocess.check_output([program, argument, LIBRARY], text=True)


# The releases of nvcc that the kernels were tuned with. Others may take more registers.
TUNED = ("13.0", "13.2")
# Families of kernels by the most registers of a thread that they may have, of 255. With at most 64,
# half of the threads that a processor can hold run at once, and hide the latency of memory; with at
# most 80, three eighths; with at most 128, a quarter. Strips are bound by instructions, and
# pool_windows does what networks rarely have.
MOST_REGISTERS = {
    "forward": 64,
    "forward_strips": 80,
    "backward": 64,
    r"\w+_slots": 64,
    "pool_rows": 64,
    "pool_channels": 64,
    "pool_lanes": 64,
    "pool_windows": 128,
}


def misfits(usage: str) -> list[str]:
    """The kernels that spill registers, have more than they may, or belong to no family.

    ``usage`` is what cuobjdump prints. A spill shows as a stack or as local memory.
    """
    kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert len(kernels) == usage.count("Function ")
    found = [f"{name} spills" for name, _, *memory in kernels if memory != ["0", "0"]]
    strangers = {name for name, *_ in kernels}
    for family, most in MOST_REGISTERS.items():
        of_family = [each for each in kernels if re.search(rf"\d{family}I", each[0])]
        assert of_family, family
        found += [f"{name}: {used} registers" for name, used, *_ in of_family if int(used) > most]
        strangers -= {name for name, *_ in of_family}
    return found + [f"{name}: of no family" for name in sorted(strangers)]


@pytest.mark.parametrize(
    ("option", "suffix"),
    [
        pytest.param("--list-elf", "", id="machine code"),
        pytest.param("--list-ptx", "+PTX", id="PTX"),
    ],
)
def test_every_architecture_asked_for_is_there(option: str, suffix: str) -> None:
    asked = {arch.removesuffix("+PTX") for arch in ASKED if arch.endswith(suffix)}
    found = re.findall(r"\.sm_(\d+)(\d)\.", cuobjdump(option))
    assert {".".join(arch) for arch in found} == asked


def test_kernels_fit_the_registers() -> None:
    """With an nvcc that the kernels were not tuned with, one that does not fit is a warning."""
    info = maxunpool_cuda.build_info()
    nvcc = info.get("nvcc_version") or info["cuda_version"]
    found = misfits(cuobjdump("--dump-resource-usage"))
    if nvcc.startswith(TUNED):
        assert found == []
    elif found:
        warnings.warn(f"With nvcc {nvcc}: {', '.join(found)}", stacklevel=1)


def test_host_code_calls_no_device_function() -> None:
    """nvcc makes exit(1) of a call from the host to a __device__ function, at least in templates.

    It prints no warning, and the library calls exit nowhere else.
    """
    if not shutil.which("nm"):
        pytest.skip("nm is not installed: it comes with GCC's binutils")
    names = imported(LIBRARY)
    assert any("cudaLaunchKernel" in name for name in names)
    assert "exit" not in names


def test_takes_no_function_of_cpp_from_pytorch() -> None:
    """Those are of one release. Functions of the stable ABI are in C, and stay."""
    if not shutil.which("nm"):
        pytest.skip("nm is not installed: it comes with GCC's binutils")
    names = imported(LIBRARY)
    assert "aoti_torch_get_current_cuda_stream" in names
    assert [name for name in names if re.search(r"^_Z.*(2at|3c10|5torch|6caffe2)\d", name)] == []
