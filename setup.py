"""Builds the extension. What is about the package rather than its build is in pyproject.toml.

With a CUDA build of PyTorch and a CUDA toolkit the extension has CUDA kernels, else only the CPU's.
FORCE_CUDA=1 fails where it cannot have them, FORCE_CPU=1 leaves them out.
"""

import os
import re
import subprocess
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension


def cuda_home() -> str | None:
    """The CUDA toolkit: as PyTorch finds it, unless the nvcc it went by is a wrapper elsewhere."""
    found = cpp_extension.CUDA_HOME
    if found is None or "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ:
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
    missing = []
    if not torch.version.cuda:
        missing.append(f"a CUDA build of PyTorch (this is {torch.__version__})")
    if not cpp_extension.CUDA_HOME:
        missing.append("a CUDA toolkit (CUDA_HOME names it)")
    if missing and os.environ.get("FORCE_CUDA") == "1":
        raise SystemExit(f"maxunpool_cuda: FORCE_CUDA=1 needs {' and '.join(missing)}")
    return not missing


def default_arch_list() -> str:
    """The GPUs of this machine; where there are none, two common ones and PTX for what follows."""
    devices = range(torch.cuda.device_count())
    capabilities = {torch.cuda.get_device_capability(device) for device in devices}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(capabilities)) or "8.0;9.0+PTX"


def extension(cuda: bool) -> Extension:
    """The one extension, for the CPU alone or with CUDA."""
    name = "maxunpool_cuda._C"
    sources = sorted(str(path) for path in Path("csrc").glob("**/*.cpp"))
    # PyTorch 2.11 compiles C++17 unless told; later releases ask for C++20 themselves.
    # Without -fopenmp PyTorch's parallel_for is one thread. The OpenMP runtime is PyTorch's.
    # What Python adds for debuggers, a third of the compiler's time, would be stripped again.
    flags = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    # Compressed, three architectures take less room than one does otherwise.
    nvcc_flags = ["-O3", "-std=c++20", "-Xptxas=-warn-spills", "-Xfatbin=-compress-all"]
    link_flags = ["-fopenmp", "-s"]
    if not cuda:
        return cpp_extension.CppExtension(
            name, sources, extra_compile_args={"cxx": flags}, extra_link_args=link_flags
        )
    arch_list = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_arch_list())
    return cpp_extension.CUDAExtension(
        name,
        [*sources, *sorted(str(path) for path in Path("csrc").glob("cuda/*.cu"))],
        define_macros=[
            ("WITH_CUDA", None),
            ("CUDA_VERSION_STRING", f'"{torch.version.cuda}"'),
            ("ARCH_LIST", f'"{arch_list}"'),
        ],
        extra_compile_args={"cxx": flags, "nvcc": nvcc_flags},
        extra_link_args=link_flags,
    )


cpp_extension.CUDA_HOME = cuda_home()
CUDA = has_cuda()
print(f"maxunpool_cuda: building {'CPU and CUDA' if CUDA else 'CPU'} kernels", flush=True)
setup(ext_modules=[extension(CUDA)], cmdclass={"build_ext": cpp_extension.BuildExtension})
