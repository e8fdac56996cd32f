"""The CUDA kernels on the CPU: csrc/cuda, compiled by g++, in place of the CPU's kernels."""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cases import random_limits

import maxunpool_cuda._C
from maxunpool_cuda import _ops

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# The kernels are registered for other operators, of the library itself: see replaced_kernels().
REGISTRATION = r"TORCH_LIBRARY_IMPL\(maxunpool_cuda, \w+,"
# What g++ cannot take as it is: launches, headers of CUDA, the device. And blocks are small, so
# that few cells take several, and a second kernel has few of them.
EDITS = {
    r"(?s)(\w+)<<<(.*?)>>>\(": r"shim::launch(\1, \2)(",
    r"#include <(c10/cuda/|cuda).*>": "",
    r"\bc10::Device\b": "shim::Device",
    r"constexpr int kThreads = \d+;": "constexpr int kThreads = 8;",
    r"most_blocks = \d+;": "most_blocks = 4;",
    r"\bErrorRecords\b": "EmulatedErrorRecords",  # else both libraries share them
    REGISTRATION: "TORCH_LIBRARY_IMPL(LIBRARY, CPU,",
}
KEPT: list[torch.library.Library] = []  # as long as their operators
OPERATORS = (_ops.max_unpool, _ops.max_unpool_backward, _ops.max_pool)
FLAGS = "-std=c++20 -O0 -g1 -fPIC -DWITH_CUDA -Wall -Wextra -Wno-unused-parameter"
FLAGS += " -Wno-unknown-pragmas -Werror -x c++"
API = "torch/csrc/api/include"
# What this process runs under, as -fsanitize takes it: see sanitized().
SANITIZERS = os.environ.get("MAXUNPOOL_SANITIZERS", "")
RUNTIMES = {  # libstdc++ too, or AddressSanitizer does not find what throws
    "thread": ["libtsan.so"],
    "address,undefined": ["libasan.so", "libubsan.so", "libstdc++.so"],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=4096:allocator_may_return_null=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def copy(backend: str, folder: Path) -> list[Path]:
    """Copy csrc, with the edits, and return the files of the backend that are to be compiled."""
    shutil.copytree(ROOT / "csrc", folder, dirs_exist_ok=True)
    edits = EDITS if backend == "cuda" else {REGISTRATION: EDITS[REGISTRATION]}
    left = set(edits)
    for path in (folder / backend).iterdir():
        text = path.read_text()
        for pattern, replacement in edits.items():
            text, count = re.subn(pattern, replacement, text)
            left -= {pattern} if count else set()
        path.write_text(text)
    assert not left, left
    return [path for path in (folder / backend).iterdir() if path.suffix in (".cpp", ".cu")]


def digest(*content: Any) -> str:
    texts = [each.read_text() if isinstance(each, Path) else each for each in content]
    return hashlib.sha256(str(texts).encode()).hexdigest()[:16]


def build(backend: str, sanitizers: str = SANITIZERS) -> Path:
    """The library of csrc/cuda or csrc/cpu. No content of a file is compiled twice."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    torch_headers = Path(torch.__file__).parent / "include"
    includes = (torch_headers, torch_headers / API, sysconfig.get_path("include"))
    command = [compiler, *FLAGS.split(), *(f"-isystem{path}" for path in includes)]
    command.append(f"-DLIBRARY=maxunpool_emulated_{backend}")
    headers = sorted((*ROOT.glob("csrc/*.h"), *ROOT.glob(f"csrc/{backend}/*"), *HERE.glob("*.h")))
    folder = ROOT / "build" / "emulation" / digest(command, EDITS, *headers)
    folder.mkdir(parents=True, exist_ok=True)
    command += [f"-iquote{path}" for path in (folder / "csrc", HERE)]
    sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes one builds
        shim = ["-include", str(HERE / "cuda_shim.h")] if backend == "cuda" else []
        options = {path: [*sanitize, *shim] for path in copy(backend, folder / "csrc")}
        if backend == "cuda":
            options[HERE / "grid.cpp"] = ["-DTHREADS"] if sanitizers == "thread" else []
        objects = {
            folder / f"{source.stem}-{digest(each, source)}.o": [*each, "-c", str(source)]
            for source, each in options.items()
        }
        library = folder / f"library-{digest(str([*objects]))}.so"
        if not library.exists():
            running = [
                subprocess.Popen([*command, *each, "-o", str(to)])
                for to, each in objects.items()
                if not to.exists()
            ]
            assert [process.wait() for process in running] == [0] * len(running)
            link = [compiler, "-shared", "-o", str(library), *map(str, objects), *sanitize]
            link += [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
            subprocess.run(link, check=True)
    return library


@functools.cache
def library(backend: str) -> Any:
    """The library's operators: those it has kernels for, and what grid.cpp adds."""
    torch.ops.load_library(build(backend))
    name = f"maxunpool_emulated_{backend}"
    KEPT.append(torch.library.Library(name, "FRAGMENT"))
    for operator in OPERATORS:
        KEPT[-1].define(str(operator._schema).partition("::")[2])
    return getattr(torch.ops, name)


@contextlib.contextmanager
def replaced_kernels(backend: str) -> Iterator[None]:
    """CPU tensors go to the library's kernels."""
    ops = library(backend)
    with torch.library._scoped_library("maxunpool_cuda", "IMPL") as replaced:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for operator in OPERATORS:
                name = operator._schema.name.partition("::")[2]
                replaced.impl(name, getattr(ops, name).default, "CPU")
        yield


@contextlib.contextmanager
def emulated_gpu(rng: Random, skips: str = "", **limits: int) -> Iterator[None]:
    """CPU tensors go to the CUDA kernels. Limits that are not given are random.

    ``skips`` is a mistake on purpose: "barriers", or "a block" of each grid.
    """
    ops, values = library("cuda"), random_limits(rng) | limits
    ops.configure(rng.getrandbits(31), list(values.values()), skips)
    with pytest.MonkeyPatch.context() as patch, replaced_kernels("cuda"):
        patch.setattr(maxunpool_cuda._C, "check_errors", ops.check_errors)
        yield
        ops.check_errors()


def cpu() -> contextlib.AbstractContextManager[None]:
    """CPU tensors go to the CPU's kernels, compiled with this process' sanitizers."""
    return replaced_kernels("cpu") if SANITIZERS else contextlib.nullcontext()


def sanitized(sanitizers: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process with these sanitizers."""
    for backend in ("cuda",) if sanitizers == "thread" else ("cuda", "cpu"):
        build(backend, sanitizers)
    runtimes = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in RUNTIMES[sanitizers]
    ]
    environment = {"MAXUNPOOL_SANITIZERS": sanitizers, "LD_PRELOAD": " ".join(runtimes)}
    # -R: ThreadSanitizer needs its addresses.
    command = ["setarch", "-R", sys.executable, *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **OPTIONS, **environment},
        cwd=HERE.parent,  # not the source tree, whose package may be without its library
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@functools.cache
def kernels() -> dict[int, str]:
    """All kernels of the library, by their addresses in its file."""
    sources = "".join(path.read_text() for path in ROOT.glob("csrc/cuda/*"))
    names = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\(", sources)
    assert len(names) == sources.count("__global__")
    nm = subprocess.run(["nm", "-C", build("cuda")], check=True, capture_output=True, text=True)
    pattern = rf"(\w+) [tTW] void (?:\w+::|\(anonymous namespace\)::)*((?:{'|'.join(names)})<.*>)\("
    return {int(at, 16): name for at, name in re.findall(pattern, nm.stdout)}


def launched() -> list[str]:
    """The kernels that ran since the last call."""
    return [kernels()[address] for address in library("cuda").take_launched()]
