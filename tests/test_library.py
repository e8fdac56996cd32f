# SPDX-License-Identifier: BSD-3-Clause
"""What compilers made of csrc: what the libraries take of others, and the code of CUDA kernels.

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
from emulation import taken_from_others

import maxunpool_cuda
from maxunpool_cuda import _library

pytestmark = pytest.mark.skipif(not shutil.which("nm"), reason="GCC's nm is not installed")
MODULE = Path(_library._C.__file__).name if _library._C else ""
LIBRARIES = [
    _library.PACKAGE / name
    for name in (_library.CPU_KERNELS, _library.CUDA_KERNELS, MODULE)
    if (_library.PACKAGE / name).is_file()
]
ASKED = maxunpool_cuda.build_info()["arch_list"].replace(" ", ";").split(";")
of_cuda = pytest.mark.skipif(not ASKED[0], reason="this build has no CUDA kernels")


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_libraries_take_functions_in_c_alone(library: Path) -> None:
    """Functions of PyTorch in C++ are of one release. Those of Python are the module's alone."""
    of_every_library = r"__gmon_start__|_ITM_(de)?registerTMCloneTable"
    of_others = r"_?Py[A-Z_]\w+" if library.name == MODULE else r"(aoti_)?torch_\w+"
    # Only symbols of PyTorch and Python have no version.
    taken = {symbol for symbol, version in taken_from_others(library).items() if not version}
    others = {symbol for symbol in taken if re.fullmatch(of_others, symbol)}
    assert others
    assert [each for each in taken - others if not re.fullmatch(of_every_library, each)] == []


# Their libraries of PyTorch and of CUDA.
NEEDED = {
    MODULE: set(),
    _library.CPU_KERNELS: {"libtorch_cpu.so"},
    _library.CUDA_KERNELS: {
        "libtorch_cpu.so",
        "libtorch_cuda.so",
        f"libcudart.so.{_library.CUDA_MAJOR}",
    },
}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_the_libraries_that_are_needed(library: Path) -> None:
    """libtorch_cuda.so is not there to link with, so nothing else sees that it is not named."""
    read = ["readelf", "--dynamic", "--wide", library]
    names = re.findall(r"\(NEEDED\).*\[(.*)\]", subprocess.check_output(read, text=True))
    found = {name for name in names if re.match("libtorch|libc10|libcu", name)}
    assert found == NEEDED[library.name]


def cuobjdump(argument: str) -> str:
    path = os.environ["PATH"]
    if triton := find_spec("triton"):
        path += f"{os.pathsep}{Path(triton.origin).parent / 'backends/nvidia/bin'}"
    if not (program := shutil.which("cuobjdump", path=path)):
        pytest.skip("cuobjdump is installed neither with a CUDA toolkit nor with Triton")
    return subprocess.check_output(
        [program, argument, _library.PACKAGE / _library.CUDA_KERNELS], text=True
    )


@of_cuda
@pytest.mark.parametrize(("option", "suffix"), [("--list-elf", ""), ("--list-ptx", "+PTX")])
def test_every_architecture_asked_for_is_there(option: str, suffix: str) -> None:
    asked = {arch.removesuffix("+PTX") for arch in ASKED if arch.endswith(suffix)}
    found = re.findall(r"\.sm_(\d+)(\d)\.", cuobjdump(option))
    assert {".".join(arch) for arch in found} == asked


# A thread may have 64 registers: then half of the threads that a processor can hold run at once,
# and hide the latency of memory. Exceptions are windows with stride 1, which are bound by
# instructions, and pool_windows, which does what networks rarely have.
MOST_REGISTERS = {"forward, stride 1": 80, "pool_windows": 128}
TUNED = "13.0"  # the release of nvcc that the kernels were tuned with


@of_cuda
def test_kernels_fit_the_registers() -> None:
    """And spill none. With another nvcc than kernels were tuned with, this is a warning."""
    usage = cuobjdump("--dump-resource-usage")
    symbol = r"Function _ZN14maxunpool_cuda\d+([a-z_]+)I(\S+):"
    kernels = re.findall(rf"{symbol}\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert len(kernels) == usage.count("Function ") > 0
    found = []
    for name, arguments, registers, *memory in kernels:
        # Square<K, S, P> is SquareILi3ELi1ELi1EE.
        kind = name + ", stride 1" * bool(re.search(r"SquareILi\dELi1E", arguments))
        is_too_large = int(registers) > MOST_REGISTERS.get(kind, 64)
        if is_too_large or memory != ["0", "0"]:  # a spill shows as a stack or as local memory
            found.append(f"{name}<{arguments}>: {registers} registers, {memory} bytes")
    nvcc = maxunpool_cuda.build_info()["nvcc_version"]
    if nvcc.startswith(TUNED):
        assert found == []
    elif found:
        warnings.warn(f"With nvcc {nvcc}: {found}", stacklevel=1)


@of_cuda
def test_host_code_calls_no_device_function() -> None:
    """nvcc makes exit(1) of a call from the host to a __device__ function, at least in templates.

    It prints no warning, and the library calls exit nowhere else.
    """
    names = taken_from_others(_library.PACKAGE / _library.CUDA_KERNELS)
    assert any("cudaLaunchKernel" in name for name in names)
    assert "exit" not in names
