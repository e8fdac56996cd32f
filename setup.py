# SPDX-License-Identifier: BSD-3-Clause
"""Builds the extension; pyproject.toml describes the package.

With a CUDA 13 build of PyTorch and a CUDA 13 toolkit the extension has CUDA kernels, else only the
CPU's. FORCE_CUDA=1 fails if it cannot have CUDA kernels; with a PyTorch for the CPU it builds them
for another environment. FORCE_CPU=1 leaves them out.
FORCE_FALLBACK=1 builds no extension, nor does a system other than Linux: PyTorch's own operators
compute there (maxunpool_cuda/_fallback.py). What is missing for a compilation is an error before it
begins, in one line. DEBUG=1 builds for a debugger (CONTRIBUTING.md).
tools/gpu.py and the tests call the functions here, too; only as a program this file builds.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

if not find_spec("torch"):
    raise SystemExit("maxunpool_cuda: expected PyTorch but got none: `pip install torch` brings it")

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
# The file of the package that loads what is built here.
LIBRARY = runpy.run_path(str(ROOT / "maxunpool_cuda" / "_library.py"))
VERSION = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
# The extensions with kernels: _cpu_kernels.so is the file of maxunpool_cuda._cpu_kernels.
CPU_KERNELS = "maxunpool_cuda." + LIBRARY["CPU_KERNELS"].removesuffix(".so")
CUDA_KERNELS = "maxunpool_cuda." + LIBRARY["CUDA_KERNELS"].removesuffix(".so")
# The major and the minor number of the oldest release, a byte each: 0x020a000000000000 is 2.10.
TORCH_TARGET = "0x{:02x}{:02x}{:012x}".format(*LIBRARY["release_of"](LIBRARY["OLDEST_TORCH"]), 0)
CUDA_MAJOR = LIBRARY["CUDA_MAJOR"]
OLDEST_SETUPTOOLS = 77  # the first that takes the licence of pyproject.toml
# What pip installs beside PyTorch: nvcc, its headers, and CUDA's runtime, which PyTorch may bring.
PIP_TOOLKIT = f"cuda-toolkit[nvcc,cccl,cudart]=={CUDA_MAJOR}.*"
# The compute capabilities that every nvcc 13 and every PyTorch with CUDA 13 can build for.
CAPABILITIES = (7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1)
# Kernels run on later GPUs of the same major number, so these serve all from Turing to Blackwell;
# the last gets PTX, for those to come.
WITHOUT_A_GPU = "7.5;8.0;9.0;10.0;12.0+PTX"
# What the user asks for, by environment variables.
VARIABLES = ("DEBUG", "FORCE_CPU", "FORCE_CUDA", "FORCE_FALLBACK")
ASKED = {name for name in VARIABLES if os.environ.get(name) == "1"}

# PyTorch compiles C++17 by default up to 2.11.
# -fno-trapping-math: else GCC does not vectorize conversions to float16.
CXX = ["-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fno-trapping-math"]
# PyTorch's header asks for USE_CUDA.
# Compressed, kernels for three architectures take less room than plain ones for one.
# 128: "loop is not reachable", in every instantiation that returns in an `if constexpr` before the
# loop. 64 such warnings hide an error in pip's log.
NVCC = ["-std=c++20", "-DUSE_CUDA", "-Xfatbin=-compress-all", "-Xcudafe", "--diag_suppress=128"]
LINK: list[str] = []
if "DEBUG" in ASKED:
    # With -G, nvcc does not optimize device code, and the assertions of kernels are checked
    # (csrc/cuda/assert.cuh). Such code spills registers, so ptxas does not warn of that.
    CXX += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    NVCC += ["-O0", "-g", "-G", "-UNDEBUG"]
else:
    # -g0: Python asks for debug information, a third of the compiler's time, and -s strips it.
    CXX += ["-O3", "-g0"]
    NVCC += ["-O3", "-Xptxas=-warn-spills"]
    LINK += ["-s"]


class Toolkit(NamedTuple):
    """A CUDA toolkit."""

    home: str
    version: str  # of nvcc, such as 13.0.88


def has_compiler() -> bool:
    """Whether there is a C++ compiler. One that CXX names counts, so that its absence is an error.

    The others are those that setuptools and PyTorch call.
    """
    known = (sysconfig.get_config_var("CXX") or "").split()[:1]
    return "CXX" in os.environ or any(map(shutil.which, [*known, "c++", "g++"]))


def why_fallback() -> str:
    """Why no extension is built, in a sentence; nothing if one is."""
    if "FORCE_FALLBACK" in ASKED:
        note = "no kernels, as FORCE_FALLBACK=1 says"
    elif sys.platform != "linux":
        note = f"no kernels: expected Linux but got {sys.platform}"
    else:
        return ""
    if refused := ASKED - {"FORCE_FALLBACK"}:
        said = f"{min(refused)}=1 says"
        raise SystemExit(f"maxunpool_cuda: expected kernels, as {said}, but got {note}")
    return note


def lacks(note: str) -> Iterator[str]:
    """What a build lacks, and what brings it; ``note`` tells why it has no kernels, if it has none.

    This is asked before a compiler starts.
    """
    oldest = LIBRARY["OLDEST_TORCH"]
    if LIBRARY["release_of"](torch.__version__) < LIBRARY["release_of"](oldest):
        way = f'`pip install "torch>={oldest}"` brings it'
        yield f"PyTorch {oldest} or later but got {torch.__version__}: {way}"
    if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
        way = f'`pip install "setuptools>={OLDEST_SETUPTOOLS}"` brings it'
        yield f"setuptools {OLDEST_SETUPTOOLS} or later but got {setuptools.__version__}: {way}"
    if note:
        return
    or_without = "brings it on Debian and Ubuntu; FORCE_FALLBACK=1 builds without kernels"
    if not has_compiler():
        yield f"a C++ compiler but got none: `apt install g++` {or_without}"
    headers = sysconfig.get_path("include")
    if not (Path(headers, "Python.h").exists() or os.environ.get("CPATH")):
        yield f"Python.h but got none in {headers}: `apt install python3-dev` {or_without}"
    if not find_spec("pybind11"):
        yield "pybind11 but got none: `pip install pybind11` brings it"


def toolkit_of(nvcc: str) -> Toolkit | None:
    """The toolkit of this nvcc; None if no nvcc runs. It may be a script that runs another nvcc.

    That one tells where it is, if it finds a C++ compiler.
    """
    run = shlex.quote(nvcc)
    told = subprocess.getoutput(
        f"{run} --version; {run} --dryrun -E -x cu /dev/null 2>&1 | grep _HERE_="
    )
    version = re.search(r"release [\d.]+, V([\d.]+)", told)
    folder = re.search(r"_HERE_=(.*)", told)
    home = Path(folder[1] if folder else Path(nvcc).parent).parent
    return Toolkit(str(home), version[1]) if version else None


def find_toolkit() -> tuple[Toolkit | None, str]:
    """The first toolkit of CUDA_MAJOR, or in a sentence why there is none.

    It may be where the user has one, and beside PyTorch, where pip installs it.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    users = f"{home}/bin/nvcc" if home else shutil.which("nvcc", path=path)
    beside = f"{Path(torch.__file__).parents[1]}/nvidia/cu{CUDA_MAJOR}/bin/nvcc"
    others = []
    for nvcc in filter(None, (users, beside)):
        toolkit = toolkit_of(nvcc)
        if toolkit and toolkit.version.split(".")[0] == CUDA_MAJOR:
            return toolkit, ""
        what = f"CUDA {toolkit.version}" if toolkit else "no nvcc"
        others.append(f"{what} in {nvcc.removesuffix('/bin/nvcc')}")
    got = " and ".join(others)
    way_out = f'`pip install "{PIP_TOOLKIT}"` installs one beside PyTorch'
    return None, f"expected a CUDA {CUDA_MAJOR} toolkit but got {got}: {way_out}"


def choose_arch_list() -> str:
    """The GPUs to build for, as TORCH_CUDA_ARCH_LIST names them; nothing if all are too old.

    Without that variable they are those that PyTorch sees, each by the last of CAPABILITIES whose
    kernels it runs, or PTX if it is later than all. To ask for them opens a context on one of them.
    """
    if chosen := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return chosen
    devices = range(torch.cuda.device_count())
    gpus = [float("{}.{}".format(*torch.cuda.get_device_capability(i))) for i in devices]
    if not gpus:
        return WITHOUT_A_GPU
    fitting = ([each for each in CAPABILITIES if each <= gpu] for gpu in gpus)
    served = {max(each) for each in fitting if each}
    return ";".join(map(str, sorted(served))) + "+PTX" * (max(gpus) > CAPABILITIES[-1])


def plan() -> tuple[Toolkit | None, str, str]:
    """The toolkit and the GPUs to build CUDA kernels for, or in a sentence why none are built.

    FORCE_CPU=1 looks neither for a toolkit nor for a GPU.
    """
    is_forced = "FORCE_CUDA" in ASKED
    if "FORCE_CPU" in ASKED:
        if is_forced:
            raise SystemExit("maxunpool_cuda: expected FORCE_CPU=1 or FORCE_CUDA=1 but got both")
        return None, "", "no CUDA kernels, as FORCE_CPU=1 says"
    toolkit, missing = None, LIBRARY["misfit_of_cuda"]()
    is_for_cpu = not (torch.version.cuda or torch.version.hip)
    if not missing or (is_forced and is_for_cpu):
        toolkit, missing = find_toolkit()
    if toolkit:
        if arch_list := choose_arch_list():
            return toolkit, arch_list, ""
        oldest = f"a GPU of compute capability {CAPABILITIES[0]} or later"
        missing = f"expected {oldest} but got older ones alone"
    if is_forced:
        raise SystemExit(f"maxunpool_cuda: {missing} (FORCE_CUDA=1 asks for CUDA kernels)")
    return None, "", f"no CUDA kernels: {missing}"


def extensions(toolkit: Toolkit | None, arch_list: str, note: str) -> list[Extension]:
    """What is compiled: the module _C, for the Python that runs this, and libraries of kernels.

    The module takes nothing of PyTorch, and the kernels functions in C alone.
    """
    import pybind11  # which a build without kernels does not need

    facts = {
        "VERSION": VERSION,
        "TORCH_VERSION_STRING": str(torch.__version__),
        "BUILD_NOTE": note,
    }
    if toolkit:
        facts["CUDA_VERSION_STRING"] = toolkit.version.rpartition(".")[0]
        facts["NVCC_VERSION_STRING"] = toolkit.version
        facts["ARCH_LIST"] = arch_list
    module = Extension(
        "maxunpool_cuda._C",
        ["csrc/bindings.cpp"],
        include_dirs=[pybind11.get_include()],
        define_macros=[(name, json.dumps(fact)) for name, fact in facts.items()],
        extra_compile_args={"cxx": [*CXX, "-fvisibility=hidden"]},
        extra_link_args=LINK,
    )
    options = {
        "define_macros": [("TORCH_TARGET_VERSION", TORCH_TARGET)],
        "extra_compile_args": {"cxx": CXX, "nvcc": NVCC},
        "extra_link_args": LINK,
    }
    cpu = cpp_extension.CppExtension(CPU_KERNELS, sorted(glob("csrc/cpu/*.cpp")), **options)
    cpu.libraries = ["torch_cpu"]  # in place of all of PyTorch's
    if not toolkit:
        return [module, cpu]
    # PyTorch compiles with this toolkit, and asks for the release of its nvcc.
    cpp_extension.CUDA_HOME = toolkit.home
    os.environ["TORCH_CUDA_ARCH_LIST"] = arch_list
    cuda = cpp_extension.CUDAExtension(CUDA_KERNELS, sorted(glob("csrc/cuda/*.cu")), **options)
    # pip's toolkit has CUDA's runtime under this name alone.
    cuda.libraries = ["torch_cpu", f":libcudart.so.{CUDA_MAJOR}"]
    return [module, cpu, cuda]


class BuildExtension(cpp_extension.BuildExtension):
    """Links and names the libraries of kernels."""

    def build_extensions(self) -> None:
        for extension in self.extensions:
            if extension.name == CUDA_KERNELS:
                # Needed, though the linker finds no function in it.
                stub = ["-Wl,--push-state,--no-as-needed", self.stub_of("libtorch_cuda.so")]
                extension.extra_link_args = [*LINK, *stub, "-Wl,--pop-state"]
        super().build_extensions()

    def stub_of(self, name: str) -> str:
        """An empty library to link with, in place of one that a PyTorch for the CPU does not have.

        What is linked with it needs a library of this name, and takes functions of the one that is
        there when it is loaded.
        """
        empty = [f"-Wl,-soname,{name}", "-x", "c", os.devnull]
        self.compiler.link("shared_library", [], name, self.build_temp, extra_preargs=empty)
        return str(Path(self.build_temp, name))

    def get_ext_filename(self, fullname: str) -> str:
        """The libraries of kernels serve every Python."""
        filename = str(super().get_ext_filename(fullname))
        return filename if fullname.endswith("_C") else filename.split(".")[0] + ".so"


class BuildFallback(build_py):
    """Writes the record of a build without a library."""

    def run(self) -> None:
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        record = {"version": VERSION, "note": why_fallback()}
        path = package / "maxunpool_cuda" / LIBRARY["FALLBACK"]
        path.write_text(json.dumps(record) + "\n")


def main() -> None:
    """Builds, and says at the end what was built."""
    command: type[BuildFallback | BuildExtension]
    note = why_fallback()
    for lack in lacks(note):
        raise SystemExit(f"maxunpool_cuda: expected {lack}")
    if note:
        name, command, modules = "build_py", BuildFallback, []
        built = f"{note}. PyTorch's operators compute instead, which is slower (docs/install.md)"
    else:
        toolkit, arch_list, missing = plan()
        debug = "not optimized, as DEBUG=1 says" if "DEBUG" in ASKED else ""
        note = "; ".join(filter(None, (missing, debug)))
        name, command = "build_ext", BuildExtension
        modules = extensions(toolkit, arch_list, note)
        which = "CPU and CUDA" if toolkit else "CPU"
        built = f"{which} kernels: {note or 'nothing is left out'}"
    made = setup(ext_modules=modules, cmdclass={name: command})
    if made and made.have_run.get(name):
        print(f"maxunpool_cuda: built {built}", flush=True)


if __name__ == "__main__":
    main()
