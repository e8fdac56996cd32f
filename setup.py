"""Builds the extension; pyproject.toml describes the package.

With a CUDA build of PyTorch and a CUDA toolkit the extension has CUDA kernels, else only the CPU's.
FORCE_CUDA=1 fails if it cannot have CUDA kernels, FORCE_CPU=1 leaves them out.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

NAME = "maxunpool_cuda._C"
RELEASE = ".".join(torch.__version__.split(".")[:2])
CUDA_MAJOR = torch.version.cuda.split(".")[0] if torch.version.cuda else None


def refuse_another_release() -> None:
    """Fails if pip builds for another release of PyTorch than the one installed.

    Without --no-build-isolation pip builds with the newest PyTorch, in a folder of its own.
    """
    if "pip-build-env-" not in str(torch.__file__):
        return
    # -E ignores PYTHONPATH, which has that folder.
    ask = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    asked = subprocess.run([sys.executable, "-E", "-c", ask], capture_output=True, text=True)
    theirs = asked.stdout.strip()
    if asked.returncode == 0 and theirs.split(".")[:2] != RELEASE.split("."):
        raise SystemExit(
            f"maxunpool_cuda: expected to be built for PyTorch {theirs}, which is installed, but "
            f"pip builds for {torch.__version__}, in an environment of its own: "
            "`pip install --no-build-isolation .` builds for what is installed "
            '(`pip install ninja "setuptools>=77"` before)'
        )


def cuda_home() -> str | None:
    """The CUDA toolkit as PyTorch finds it; if its nvcc is a wrapper, the one that nvcc names.

    Where PyTorch finds none: the one that pip installs beside PyTorch's own CUDA libraries.
    """
    found = cpp_extension.CUDA_HOME
    if found is None:
        beside = Path(torch.__file__).parents[1] / "nvidia" / f"cu{CUDA_MAJOR}"
        return str(beside) if (beside / "bin" / "nvcc").exists() else None
    if "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ:
        return found
    nvcc = Path(found, "bin", "nvcc")
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    named = re.search(r"TOP=(.*)", dry_run.stderr)
    return str(Path(named.group(1)).resolve()) if named else found


def has_cuda() -> bool:
    """Whether the extension gets CUDA kernels."""
    if os.environ.get("FORCE_CPU") == "1":
        return False
    missing = ""
    if not torch.version.cuda:
        missing = f"a CUDA build of PyTorch (this is {torch.__version__})"
    elif not cpp_extension.CUDA_HOME:
        missing = "a CUDA toolkit (CUDA_HOME names it; docs/install.md says how pip installs one)"
    if missing and os.environ.get("FORCE_CUDA") == "1":
        raise SystemExit(f"maxunpool_cuda: FORCE_CUDA=1 needs {missing}")
    return not missing


def default_arch_list() -> str:
    """The GPUs of this machine; without a GPU two common ones, and PTX for later ones."""
    devices = range(torch.cuda.device_count())
    capabilities = {torch.cuda.get_device_capability(device) for device in devices}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(capabilities)) or "8.0;9.0+PTX"


def extension(cuda: bool) -> Extension:
    """The one extension, for the CPU alone or with CUDA."""
    sources = sorted(str(path) for path in Path("csrc").glob("**/*.cpp"))
    # PyTorch 2.11 compiles C++17 by default; later releases ask for C++20 themselves.
    # Without -fopenmp PyTorch's parallel_for is one thread. The OpenMP runtime is PyTorch's.
    # -fno-trapping-math: else GCC does not vectorize conversions to float16.
    # -g0: Python asks for debug information, a third of the compiler's time, and -s strips it.
    flags = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-fno-trapping-math"]
    flags += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    compile_flags = {"cxx": flags}
    # No code reads BUILT_FOR: another PyTorch changes it, so ninja compiles everything again.
    macros: list[tuple[str, str | None]] = [("BUILT_FOR", torch.__version__)]
    make = cpp_extension.CppExtension
    if cuda:
        make = cpp_extension.CUDAExtension
        arch_list = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_arch_list())
        sources += sorted(str(path) for path in Path("csrc").glob("cuda/*.cu"))
        macros += [
            ("WITH_CUDA", None),
            ("CUDA_VERSION_STRING", f'"{torch.version.cuda}"'),
            ("ARCH_LIST", f'"{arch_list}"'),
        ]
        # Compressed kernels for three architectures take less room than plain ones for one.
        compress = "-Xfatbin=-compress-all"
        compile_flags["nvcc"] = ["-O3", "-std=c++20", "-Xptxas=-warn-spills", compress]
    made = make(
        NAME,
        sources,
        define_macros=macros,
        extra_compile_args=compile_flags,
        extra_link_args=["-fopenmp", "-s"],
    )
    # pip's toolkit has the library under this name alone.
    versioned = {"cudart": f":libcudart.so.{CUDA_MAJOR}"}
    made.libraries = [versioned.get(library, library) for library in made.libraries]
    return made


class BuildExtension(cpp_extension.BuildExtension):
    """Writes what the library was built for beside it; maxunpool_cuda/_library.py compares it."""

    def run(self) -> None:
        super().run()
        record = {
            "version": self.distribution.get_version(),
            "torch": RELEASE,
            "cuda": CUDA_MAJOR if CUDA else None,
        }
        library = Path(self.get_ext_fullpath(NAME))
        library.with_suffix(".json").write_text(json.dumps(record) + "\n")


refuse_another_release()
cpp_extension.CUDA_HOME = cuda_home()
CUDA = has_cuda()
print(f"maxunpool_cuda: building {'CPU and CUDA' if CUDA else 'CPU'} kernels", flush=True)
setup(ext_modules=[extension(CUDA)], cmdclass={"build_ext": BuildExtension})
