# SPDX-License-Identifier: BSD-3-Clause
"""What compilers made of csrc: what the libraries take of others, and the code of CUDA kernels.

No GPU is needed.
"""

import os
import re
import shutil
import subprocess
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

import maxunpool_cuda
from maxunpool_cuda import _library

KERNELS = [
    name
    for name in (_library.CPU_KERNELS, _library.CUDA_KERNELS)
    if (_library.PACKAGE / name).exists()
]
MODULE = Path(_library._C.__file__).name if _library._C else ""
ASKED = maxunpool_cuda.build_info()["arch_list"].replace(" ", ";").split(";")
of_cuda = pytest.mark.skipif(not ASKED[0], reason="this build has no CUDA kernels")


def taken_from_others(name: str) -> dict[str, str]:
    """What a library of the package takes of others: symbols, and their versions, as GLIBC_2.14."""
    if not shutil.which("nm"):
        pytest.skip("nm is not installed: it comes with GCC's binutils")
    command = ["nm", "-D", "--undefined-only", _library.PACKAGE / name]
    lines = subprocess.check_output(command, text=True).splitlines()
    pairs = (line.split()[-1].split("@", 1) for line in lines)
    return {symbol: version[0].lstrip("@") if version else "" for symbol, *version in pairs}


def without_version(name: str) -> set[str]:
    """What it takes of PyTorch and Python, whose symbols have none."""
    of_every_library = {
        "__gmon_start__",
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
    }
    taken = taken_from_others(name).items()
    return {symbol for symbol, version in taken if not version} - of_every_library


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_functions_in_c_alone(name: str) -> None:
    """Functions of PyTorch in C++ are of one release, those of Python of one version."""
    taken = without_version(name)
    assert "aoti_torch_empty_strided" in taken
    assert [each for each in taken if not re.match(r"(aoti_)?torch_\w", each)] == []


@pytest.mark.skipif(not MODULE, reason="this build has no compiled module")
def test_the_module_takes_functions_of_python_alone() -> None:
    taken = without_version(MODULE)
    assert "PyModuleDef_Init" in taken or "PyModule_Create2" in taken
    assert [each for each in taken if not re.match("_?Py[A-Z_]", each)] == []


# The libraries of PyTorch and of CUDA that each library of the package names. They are there before
# it is loaded. If one is not named, functions of it are undefined symbols, though it is there.
NEEDED = {
    _library.CPU_KERNELS: {"libtorch_cpu.so"},
    _library.CUDA_KERNELS: {
        "libtorch_cpu.so",
        "libtorch_cuda.so",
        f"libcudart.so.{_library.CUDA_MAJOR}",
    },
    MODULE: set(),
}


@pytest.mark.parametrize("name", [*KERNELS, *filter(None, [MODULE])])
def test_the_libraries_that_are_needed(name: str) -> None:
    if not shutil.which("readelf"):
        pytest.skip("readelf is not installed: it comes with GCC's binutils")
    command = ["readelf", "--dynamic", "--wide", _library.PACKAGE / name]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", subprocess.check_output(command, text=True))
    c_library = r"(libc|libm|libgcc_s|libstdc\+\+|libpthread|ld-linux.*)\.so\.\d+"
    assert {each for each in needed if not re.fullmatch(c_library, each)} == NEEDED[name]


# The newest C libraries that a wheel of this tag may need.
NEWEST = {
    "manylinux_2_28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)},
    "manylinux_2_34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29)},
}


def tag_of_the_wheel() -> str:
    """The tag of the installed wheel, without the processor; nothing of a build from source."""
    try:
        facts = distribution("maxunpool_cuda").read_text("WHEEL") or ""
    except PackageNotFoundError:
        return ""
    return min(re.findall(r"manylinux_2_\d\d", facts), default="")


@pytest.mark.skipif(tag_of_the_wheel() not in NEWEST, reason="no wheel of these is installed")
@pytest.mark.parametrize("library", ["GLIBC", "GLIBCXX"])
def test_the_wheel_needs_no_newer_c_library_than_its_tag_says(library: str) -> None:
    versions = [each for name in (*KERNELS, MODULE) for each in taken_from_others(name).values()]
    needed = {each.partition("_")[2] for each in versions if each.partition("_")[0] == library}
    newest = max(tuple(map(int, each.split("."))) for each in needed)
    assert newest <= NEWEST[tag_of_the_wheel()][library]


def cuobjdump(argument: str) -> str:
    path = os.environ["PATH"]
    if triton := find_spec("triton"):
        path += f"{os.pathsep}{Path(triton.origin).parent / 'backends/nvidia/bin'}"
    if not (program := shutil.which("cuobjdump", path=path)):
        pytest.skip("cuobjdump is installed neither with a CUDA toolkit nor with Triton")
    return subprocess.check_output(
        [program, argument, _library.PACKAGE / _library.CUDA_KERNELS], text=True
    )


# The release of nvcc that the kernels were tuned with. Others may take more registers.
TUNED = "13.0"
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


@of_cuda
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


@of_cuda
def test_kernels_fit_the_registers() -> None:
    """With an nvcc that the kernels were not tuned with, one that does not fit is a warning."""
    nvcc = maxunpool_cuda.build_info()["nvcc_version"]
    found = misfits(cuobjdump("--dump-resource-usage"))
    if nvcc.startswith(TUNED):
        assert found == []
    elif found:
        warnings.warn(f"With nvcc {nvcc}: {', '.join(found)}", stacklevel=1)


@of_cuda
def test_host_code_calls_no_device_function() -> None:
    """nvcc makes exit(1) of a call from the host to a __device__ function, at least in templates.

    It prints no warning, and the library calls exit nowhere else.
    """
    names = taken_from_others(_library.CUDA_KERNELS)
    assert any("cudaLaunchKernel" in name for name in names)
    assert "exit" not in names
