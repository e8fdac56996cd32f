# SPDX-License-Identifier: BSD-3-Clause
"""Builds the extension; pyproject.toml describes the package.

With a CUDA 13 build of PyTorch and a CUDA 13 toolkit the extension has CUDA kernels, else only the
CPU's. FORCE_CUDA=1 fails if it cannot have CUDA kernels; with a PyTorch for the CPU it builds them
for another environment. FORCE_CPU=1 leaves them out.
FORCE_FALLBACK=1 builds no extension, nor does a system without a C++ compiler or other than Linux:
PyTorch's own operators compute there (maxunpool_cuda/_fallback.py). A compilation that fails is an
error. DEBUG=1 builds for a debugger, LINEINFO=1 for a profiler of kernels (CONTRIBUTING.md).
tools/gpu.py calls the functions here, too; only as a program this file builds.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from setuptools import Distribution, Extension, setup
from setuptools.command.build_py import build_py
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
# The file of the package that loads what is built here.
LIBRARY = runpy.run_path(str(ROOT / "maxunpool_cuda" / "_library.py"))
CPU_KERNELS, CUDA_KERNELS = LIBRARY["CPU_KERNELS"], LIBRARY["CUDA_KERNELS"]  # files
# The major and the minor number of the oldest release, a byte each: 0x020a000000000000 is 2.10.
TORCH_TARGET = "0x{:02x}{:02x}{:012x}".format(*LIBRARY["release_of"](LIBRARY["OLDEST_TORCH"]), 0)
# PyTorch compiles C++17 by default up to 2.11.
CXX_FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter"]
CUDA_MAJOR = LIBRARY["CUDA_MAJOR"]
# What pip installs beside PyTorch: nvcc, its headers, and CUDA's runtime, which PyTorch may bring.
PIP_TOOLKIT = f"cuda-toolkit[nvcc,cccl,cudart]=={CUDA_MAJOR}.*"
# Compute capabilities to build for where no GPU is visible. Kernels run on later GPUs of the same
# major number, so these serve all from Turing to Blackwell; the last gets PTX, for those to come.
WITHOUT_A_GPU = ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))

Capability = tuple[int, int]


class Build(NamedTuple):
    """The flags that differ between builds, and what a user should know, in a sentence."""

    cxx: list[str]
    nvcc: list[str]
    link: list[str]
    note: str


# -g0: Python asks for debug information, a third of the compiler's time, and -s strips it.
RELEASE = Build(cxx=["-O3", "-g0"], nvcc=["-O3", "-Xptxas=-warn-spills"], link=["-s"], note="")
# By the environment variable that asks for them. With -G, nvcc does not optimize device code, and
# the assertions of kernels are checked (csrc/cuda/assert.cuh). Such code spills registers, so ptxas
# does not warn of that.
OTHER_BUILDS = {
    "DEBUG": Build(
        cxx=["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"],
        nvcc=["-O0", "-g", "-G", "-UNDEBUG"],
        link=[],
        note="not optimized, as DEBUG=1 says",
    ),
    "LINEINFO": RELEASE._replace(
        nvcc=[*RELEASE.nvcc, "-lineinfo"], note="kernels with line numbers, as LINEINFO=1 says"
    ),
}


class Toolkit(NamedTuple):
    """A CUDA toolkit, of major release CUDA_MAJOR."""

    home: str
    version: str  # of nvcc, such as 13.0.88


class Plan(NamedTuple):
    """What is built: CUDA kernels too if there is a toolkit, and in a sentence what is left out."""

    toolkit: Toolkit | None
    arch_list: str
    note: str


def has_compiler() -> bool:
    """Whether there is a C++ compiler. One that CXX names counts, so that its absence is an error.

    The others are those that setuptools and PyTorch call.
    """
    known = (sysconfig.get_config_var("CXX") or "").split()[:1]
    return "CXX" in os.environ or any(map(shutil.which, [*known, "c++", "g++"]))


def why_fallback() -> str:
    """Why no extension is built, in a sentence; nothing if one is."""
    if os.environ.get("FORCE_FALLBACK") == "1":
        note = "no kernels, as FORCE_FALLBACK=1 says"
    elif sys.platform != "linux":
        note = f"no kernels: expected Linux but got {sys.platform}"
    elif not has_compiler():
        note = "no kernels: expected a C++ compiler but got none"
    else:
        return ""
    for name in ("FORCE_CUDA", "FORCE_CPU", *OTHER_BUILDS):
        if os.environ.get(name) == "1":
            raise SystemExit(f"maxunpool_cuda: expected kernels, as {name}=1 says, but got {note}")
    return note


def output_of(program: Path, *arguments: str) -> str:
    """What a program prints to both of its outputs; nothing if it is not there or cannot run."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.run([program, *arguments], **both, text=True, errors="replace").stdout
    except OSError:
        return ""


def nvcc_of(home: Path) -> Path:
    """Where a toolkit has its nvcc, if it has one."""
    return home / "bin" / "nvcc"


def nvcc_version(home: Path) -> str | None:
    """The version that a toolkit's nvcc tells, such as 13.0.88; None if no nvcc there runs."""
    found = re.search(r"release [\d.]+, V([\d.]+)", output_of(nvcc_of(home), "--version"))
    return found.group(1) if found else None


def behind_a_wrapper(home: Path) -> str:
    """The toolkit itself where its nvcc is a script, such as /usr/local/bin/nvcc, that runs one.

    A toolkit that the user names is taken as it is.
    """
    if "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ:
        return str(home)
    told = output_of(nvcc_of(home), "--dryrun", "-E", "-x", "cu", os.devnull)
    named = re.search(r"TOP=(.*)", told)
    return str(Path(named.group(1)).resolve() if named else home)


def toolkit_places() -> list[Path]:
    """Where a toolkit may be: where the user has one, and beside PyTorch, where pip installs it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home:
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
        nvcc = shutil.which("nvcc", path=path)
        home = str(Path(nvcc).parents[1]) if nvcc else None
    beside = Path(torch.__file__).parents[1] / "nvidia" / f"cu{CUDA_MAJOR}"
    return [Path(home), beside] if home else [beside]


def find_toolkit() -> tuple[Toolkit | None, str]:
    """The first toolkit that fits, or in a sentence why there is none."""
    others = []
    for place in toolkit_places():
        version = nvcc_version(place)
        if version and version.split(".")[0] == CUDA_MAJOR:
            return Toolkit(behind_a_wrapper(place), version), ""
        others.append(f"CUDA {version} in {place}" if version else f"no nvcc in {place}")
    got = " and ".join(others)
    way_out = f'`pip install "{PIP_TOOLKIT}"` installs one beside PyTorch'
    return None, f"expected a CUDA {CUDA_MAJOR} toolkit but got {got}: {way_out}"


def visible_gpus() -> dict[Capability, str]:
    """The GPUs that PyTorch sees, by compute capability. This opens a context on one of them."""
    devices = range(torch.cuda.device_count())
    return {torch.cuda.get_device_capability(i): torch.cuda.get_device_name(i) for i in devices}


def nvcc_capabilities(toolkit: Toolkit) -> list[Capability]:
    """The compute capabilities that nvcc can compile for."""
    told = output_of(nvcc_of(Path(toolkit.home)), "--list-gpu-arch")
    return [(int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", told)]


def arch_list_without_a_gpu(known: list[Capability]) -> str:
    """Of WITHOUT_A_GPU those that nvcc knows, and PTX of the last."""
    kept = [f"{major}.{minor}" for major, minor in WITHOUT_A_GPU if (major, minor) in known]
    return ";".join(kept) + "+PTX"


def arch_list_for(gpus: dict[Capability, str], known: list[Capability]) -> tuple[str, str]:
    """The list for these GPUs, and in a sentence which of them no kernel can serve.

    A GPU later than nvcc gets the kernels of the one before, and their PTX. GPUs that are earlier
    than all of nvcc's get none.
    """
    wanted, too_old = [], []
    for capability, name in sorted(gpus.items()):
        major, minor = max((each for each in known if each <= capability), default=(0, 0))
        if not major:
            too_old.append(f"{name} (compute capability {capability[0]}.{capability[1]})")
            continue
        wanted.append(f"{major}.{minor}" + "+PTX" * ((major, minor) != capability))
    oldest = ".".join(map(str, min(known, default=(0, 0))))
    note = f"no kernels for {', '.join(too_old)}: this nvcc has them from {oldest} on"
    return ";".join(wanted), note if too_old else ""


def default_arch_list(toolkit: Toolkit) -> tuple[str, str]:
    """TORCH_CUDA_ARCH_LIST for this machine, and in a sentence which GPUs it leaves out."""
    gpus, known = visible_gpus(), nvcc_capabilities(toolkit)
    return arch_list_for(gpus, known) if gpus else (arch_list_without_a_gpu(known), "")


def plan() -> Plan:
    """Decides which kernels are built. FORCE_CPU=1 looks neither for a toolkit nor for a GPU."""
    is_forced = os.environ.get("FORCE_CUDA") == "1"
    if os.environ.get("FORCE_CPU") == "1":
        if is_forced:
            raise SystemExit("maxunpool_cuda: expected FORCE_CPU=1 or FORCE_CUDA=1 but got both")
        return Plan(None, "", "no CUDA kernels, as FORCE_CPU=1 says")
    toolkit, missing = None, LIBRARY["misfit_of_cuda"]()
    is_for_cpu = not (torch.version.cuda or torch.version.hip)
    if not missing or (is_forced and is_for_cpu):
        toolkit, missing = find_toolkit()
    if toolkit:
        arch_list, note = os.environ.get("TORCH_CUDA_ARCH_LIST"), ""
        if not arch_list:
            arch_list, note = default_arch_list(toolkit)
        if arch_list:
            return Plan(toolkit, arch_list, note)
        missing = f"expected a GPU that nvcc {toolkit.version} compiles for but got {note}"
    if is_forced:
        raise SystemExit(f"maxunpool_cuda: {missing} (FORCE_CUDA=1 asks for CUDA kernels)")
    return Plan(None, "", f"no CUDA kernels: {missing}")


def chosen_build(planned: Plan) -> Build:
    """The build that DEBUG=1 or LINEINFO=1 asks for, else RELEASE."""
    asked = [name for name in OTHER_BUILDS if os.environ.get(name) == "1"]
    if len(asked) > 1:
        raise SystemExit(
            "maxunpool_cuda: expected DEBUG=1 or LINEINFO=1 but got both: a build with DEBUG=1 has "
            "line numbers, too"
        )
    if asked == ["LINEINFO"] and not planned.toolkit:
        raise SystemExit(
            "maxunpool_cuda: expected CUDA kernels, whose lines LINEINFO=1 asks for, but got "
            + planned.note
        )
    return OTHER_BUILDS[asked[0]] if asked else RELEASE


def version() -> str:
    """The version of the package."""
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    return found.group(1) if found else ""


def note_of(planned: Plan, build: Build) -> str:
    """What a user should know of the library, in a sentence; nothing of a whole release build."""
    return "; ".join(note for note in (planned.note, build.note) if note)


def compiler_flags(build: Build) -> dict[str, list[str]]:
    """The flags of kernels."""
    # -fno-trapping-math: else GCC does not vectorize conversions to float16.
    cxx = [*build.cxx, *CXX_FLAGS, "-fno-trapping-math"]
    # Compressed, kernels for three architectures take less room than plain ones for one.
    # 128: "loop is not reachable", in every instantiation that returns in an `if constexpr` before
    # the loop. 64 such warnings hide an error in pip's log.
    nvcc = ["-std=c++20", "-Xfatbin=-compress-all", "-Xcudafe", "--diag_suppress=128"]
    return {"cxx": cxx, "nvcc": [*build.nvcc, *nvcc]}


def cpu_kernels(build: Build) -> Extension:
    """The library of CPU kernels. All that it takes of PyTorch are functions in C."""
    made = cpp_extension.CppExtension(
        f"maxunpool_cuda.{Path(CPU_KERNELS).stem}",
        sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp")),
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET)],
        extra_compile_args=compiler_flags(build),
        extra_link_args=build.link,
    )
    made.libraries = ["torch_cpu"]
    return made


def cuda_kernels(build: Build) -> Extension:
    """The library of CUDA kernels. BuildExtension links it with PyTorch's CUDA library."""
    made = cpp_extension.CUDAExtension(
        f"maxunpool_cuda.{Path(CUDA_KERNELS).stem}",
        sorted(str(path) for path in Path("csrc/cuda").glob("*.cu")),
        # PyTorch's header asks for USE_CUDA.
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET), ("USE_CUDA", None)],
        extra_compile_args=compiler_flags(build),
        extra_link_args=build.link,
    )
    # pip's toolkit has CUDA's runtime under this name alone.
    made.libraries = ["torch_cpu", f":libcudart.so.{CUDA_MAJOR}"]
    return made


def module(planned: Plan, build: Build) -> Extension:
    """The module _C, for the Python that runs this. It takes nothing of PyTorch."""
    import pybind11  # which a build without kernels does not need

    facts = {
        "VERSION": version(),
        "TORCH_VERSION_STRING": str(torch.__version__),
        "BUILD_NOTE": note_of(planned, build),
    }
    if planned.toolkit:
        facts["CUDA_VERSION_STRING"] = planned.toolkit.version.rpartition(".")[0]
        facts["NVCC_VERSION_STRING"] = planned.toolkit.version
        facts["ARCH_LIST"] = planned.arch_list
    return Extension(
        "maxunpool_cuda._C",
        ["csrc/bindings.cpp"],
        include_dirs=[pybind11.get_include()],
        define_macros=[(name, json.dumps(fact)) for name, fact in facts.items()],
        extra_compile_args={"cxx": [*build.cxx, *CXX_FLAGS, "-fvisibility=hidden"]},
        extra_link_args=build.link,
        language="c++",
    )


class BuildExtension(cpp_extension.BuildExtension):
    """Links and names the libraries of kernels, and says what was built."""

    planned: Plan
    build: Build

    def build_extensions(self) -> None:
        for extension in self.extensions:
            if extension.name.endswith(Path(CUDA_KERNELS).stem):
                # Needed, though the linker finds no function in it.
                stub = ["-Wl,--push-state,--no-as-needed", self.stub_of("libtorch_cuda.so")]
                extension.extra_link_args = [*extension.extra_link_args, *stub, "-Wl,--pop-state"]
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
        filename = super().get_ext_filename(fullname)
        name = fullname.split(".")[-1] + ".so"
        is_library = name in (CPU_KERNELS, CUDA_KERNELS)
        return str(Path(filename).with_name(name)) if is_library else filename

    def run(self) -> None:
        super().run()
        kernels = "CPU and CUDA" if self.planned.toolkit else "CPU"
        note = note_of(self.planned, self.build) or "nothing is left out"
        print(f"maxunpool_cuda: built {kernels} kernels: {note}", flush=True)


class BuildFallback(build_py):
    """Writes the record of a build without a library."""

    note: str

    def run(self) -> None:
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        record = {"version": self.distribution.get_version(), "note": self.note}
        path = package / "maxunpool_cuda" / LIBRARY["FALLBACK"]
        path.write_text(json.dumps(record) + "\n")


def build_fallback(note: str) -> None:
    """Builds the package without an extension, and says so at the end."""
    BuildFallback.note = note
    made: Distribution | None = setup(cmdclass={"build_py": BuildFallback})
    if made and made.have_run.get("build_py"):
        print(
            f"maxunpool_cuda: built {note}. PyTorch's operators compute instead, which is slower "
            "(docs/install.md)",
            flush=True,
        )


def main() -> None:
    """Builds as planned."""
    if note := why_fallback():
        build_fallback(note)
        return
    planned = plan()
    build = chosen_build(planned)
    # PyTorch compiles with this toolkit, and asks for the release of its nvcc.
    cpp_extension.CUDA_HOME = planned.toolkit.home if planned.toolkit else None
    if planned.toolkit:
        os.environ["TORCH_CUDA_ARCH_LIST"] = planned.arch_list
    BuildExtension.planned = planned
    BuildExtension.build = build
    extensions = [module(planned, build), cpu_kernels(build)]
    if planned.toolkit:
        extensions.append(cuda_kernels(build))
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtension})


if __name__ == "__main__":
    main()
