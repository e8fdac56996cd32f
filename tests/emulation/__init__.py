# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA kernels on the CPU: csrc/cuda, compiled by g++, in place of the CPU's kernels.

docs/emulation.md has the idea. ``library`` compiles the kernels when a test first needs them, and
keeps them in build/emulation. Inside ``emulated_gpu`` operators on CPU tensors run them:

    with emulation.emulated_gpu(rng):  # rng draws the order of the threads
        output = torch.ops.maxunpool_cuda.max_unpool(...)
"""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from maxunpool_cuda import _library, _operators

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
# The kernels are compiled in a C++ namespace of this name, so they share no variable with the CUDA
# kernels that the package may have. Their operators are in a library of this name, so loading it
# changes no operator of the package. That is what emulated_gpu() does.
NAMESPACE = "emulated"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = "-std=c++20 -O0 -g1 -fPIC -Wall -Wextra -Wno-unused-parameter"
FLAGS += " -Wno-unknown-pragmas -Werror -x c++"
# PyTorch says at the import of its builder that there is no GPU; pytest would show that at the end.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
SETUP = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
# The headers of PyTorch, without what its oldest release lacks, as setup.py has them.
TORCH = [f"-DTORCH_TARGET_VERSION={SETUP['TORCH_TARGET']}"]
TORCH += [f"-isystem{path}" for path in SETUP["cpp_extension"].include_paths()]
SHIM = ["-include", "cuda_shim.h", "-I.", "-DUSE_CUDA", f"-Dmaxunpool_cuda={NAMESPACE}"]
SHIM += ["-Daoti_torch_device_type_cuda=aoti_torch_device_type_cpu"]  # of all tensors
# The sanitizers of this process, as -fsanitize takes them: see sanitized().
SANITIZERS = os.environ.get("MAXUNPOOL_SANITIZERS", "")
RUNTIMES = {  # without libstdc++, AddressSanitizer cannot intercept exceptions
    "thread": ["libtsan.so"],
    "address,undefined": ["libasan.so", "libubsan.so", "libstdc++.so"],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=4096:allocator_may_return_null=1"
    ":malloc_fill_byte=127:max_malloc_fill_size=4294967296",  # as tests/conftest.py
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1",
}


def sources(backend: str) -> dict[str, str]:
    """The text of every file that the library is made of, by its path in the build folder."""
    files = sorted([*CSRC.glob("*.h"), *CSRC.glob(f"{backend}/*")])
    texts = {str(path.relative_to(CSRC)): path.read_text() for path in files}
    if backend == "cpu":
        return texts
    # kernel<<<blocks, threads, ...>>>(plan, ...), which is there once
    launch = re.compile(r"(\w+)<<<(.*?)>>>\(", re.DOTALL)
    texts["cuda/launch.cuh"] = launch.sub(r"shim::launch(\1, \2)(", texts["cuda/launch.cuh"])
    texts["cuda_runtime_api.h"] = ""  # the shim, which is included first, has what kernels need
    texts["cuda/device.cuh"] = (HERE / "device.cuh").read_text()
    return texts | {name: (HERE / name).read_text() for name in ("cuda_shim.h", "grid.cpp")}


def build(backend: str, sanitizers: str = SANITIZERS) -> Path:
    """Build the library of csrc/cuda or csrc/cpu, unless the same files were built before."""
    command = [COMPILER, *FLAGS.split(), *TORCH, *(SHIM if backend == "cuda" else ())]
    command += ["-DFIBERS"] if sanitizers == "thread" else []
    sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    # Of functions that PyTorch has, too, the library calls its own, those of the shim, even where
    # TORCH_USE_RTLD_GLOBAL=1 puts PyTorch's first.
    libraries = [f"-L{path}" for path in SETUP["cpp_extension"].library_paths()]
    libraries += ["-ltorch_cpu", "-Wl,-Bsymbolic-functions"]
    texts = sources(backend)
    # A change of anything compiles all files anew, in a folder of its own.
    digest = hashlib.sha256(str((command, sanitize, libraries, texts)).encode()).hexdigest()[:16]
    folder = CSRC.parent / "build" / "emulation" / digest
    library = folder / "library.so"

    def compiled(path: str) -> str:
        flags = [] if path == "grid.cpp" else sanitize
        subprocess.run([*command, *flags, "-c", path, "-o", f"{path}.o"], check=True, cwd=folder)
        return f"{path}.o"

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits
        if library.exists():
            return library
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        objects = pool.map(compiled, [path for path in texts if path.endswith((".cpp", ".cu"))])
        link = [COMPILER, "-shared", "-o", library, *objects, *sanitize, *libraries]
        subprocess.run(link, check=True, cwd=folder)
    return library


@functools.cache
def library() -> Any:
    """The operators of the library of csrc/cuda: the package's, and those of grid.cpp."""
    ops = getattr(torch.ops, NAMESPACE)
    ops.definitions = _operators.define(NAMESPACE)  # which exist as long as this object
    torch.ops.load_library(build("cuda"))
    return ops


is_on = False  # whether operators on CPU tensors run the CUDA kernels now


def forget_launches() -> None:
    """Empty the list that ``launches`` returns."""
    if is_on:
        library().forget_launches()


def launches() -> list[tuple[str, int, int]]:
    """Signature, blocks and threads of each kernel launched since the last ``forget_launches``.

    Empty if the emulated GPU is off. The number of blocks is what the package asked for; the
    emulation may run the kernel with fewer.
    """
    if not is_on:
        return []
    lines = [line.split() for line in library().launches().splitlines()]
    return [(kernels()[symbol], int(blocks), int(threads)) for symbol, blocks, threads in lines]


@contextlib.contextmanager
def emulated_gpu(rng: Random, skips: str = "") -> Iterator[None]:
    """Inside, operators on CPU tensors run the CUDA kernels.

    ``skips`` names a mistake on purpose: to skip "barriers", or "a block" of each grid.
    """
    ops = library()
    ops.configure(rng.getrandbits(31), skips)
    # An operator's kernel for CUDA is called, whatever the device of the tensors that it gets.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with torch.library._scoped_library("maxunpool_cuda", "IMPL") as replaced:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that kernels are overridden
            for name in (*_operators.SCHEMAS, *(f"_{name}" for name in _operators.SCHEMAS)):
                operator = getattr(ops, name).default
                replaced.impl(name, functools.partial(operator.redispatch, keys), "CPU")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_library._C, "check_errors", ops.check_errors)
            patch.setattr(sys.modules[__name__], "is_on", True)
            yield
        ops.check_errors()


def sanitized(sanitizers: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process with these sanitizers."""
    build("cuda", sanitizers)  # here: the compiler itself should not run under them
    if "address" in sanitizers:
        build("cpu", sanitizers)
    runtimes = [
        subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip()
        for name in RUNTIMES[sanitizers]
    ]
    environment = {"MAXUNPOOL_SANITIZERS": sanitizers, "LD_PRELOAD": " ".join(runtimes)}
    # -R: ThreadSanitizer needs addresses that are not random.
    return run(["setarch", "-R", sys.executable, *arguments], OPTIONS | environment)


def run(command: list[Any], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command. What it prints, and its errors, are the result's stdout."""
    return subprocess.run(
        command,
        env=os.environ | environment,
        cwd=HERE.parent,  # not the source tree, whose package may be without its library
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def taken_from_others(library: Path) -> dict[str, str]:
    """What a library takes of others: symbols, and their versions, as GLIBC_2.14."""
    lines = subprocess.check_output(["nm", "-D", "--undefined-only", library], text=True)
    pairs = (line.split()[-1].split("@", 1) for line in lines.splitlines())
    return {symbol: version[0].lstrip("@") if version else "" for symbol, *version in pairs}


@functools.cache
def kernels() -> dict[str, str]:
    """The symbols of all kernels, and their signatures: ``void emulated::backward<bool>(...)``."""
    texts = "".join(path.read_text() for path in CSRC.glob("cuda/*"))
    names = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\(", texts)
    listed = subprocess.check_output(["nm", "-D", build("cuda")], text=True)
    pattern = rf"_ZN{len(NAMESPACE)}{NAMESPACE}\d+(?:{'|'.join(names)})I\w+"
    symbols = sorted(set(re.findall(pattern, listed)))
    signatures = subprocess.check_output(["c++filt"], input="\n".join(symbols), text=True)
    return dict(zip(symbols, signatures.splitlines(), strict=True))


if "address" in SANITIZERS:  # CPU kernels with these sanitizers, in place of the package's
    torch.ops.load_library(build("cpu"))
