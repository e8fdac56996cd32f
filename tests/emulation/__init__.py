"""The CUDA kernels on the CPU: csrc/cuda, compiled by g++, in place of the CPU's kernels."""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cases import random_limits
from torch.utils import cpp_extension

import maxunpool_cuda._C

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# What g++ cannot take as it is: launches, headers of CUDA, the device. And blocks are small, so
# that few cells take several.
EDITS = {
    r"(?s)(\w+)<<<(.*?)>>>\(": r"shim::launch(\1, \2)(",
    r"#include <(c10/cuda/|cuda).*>": "",
    r"\bc10::Device\b": "shim::Device",
    r"constexpr int kThreads = \d+;": "constexpr int kThreads = 8;",
}
FLAGS = "-std=c++20 -O0 -g1 -fPIC -DWITH_CUDA -Wall -Wextra -Wno-unused-parameter"
FLAGS += " -Wno-unknown-pragmas -Werror -x c++"
# What this process runs under, as -fsanitize takes it; its LD_PRELOAD has the libraries.
SANITIZERS = os.environ.get("MAXUNPOOL_SANITIZERS", "")


def copy(backend: str, folder: Path) -> list[Path]:
    """Copy csrc, with the edits, and return the files of the backend that are to be compiled."""
    shutil.copytree(ROOT / "csrc", folder, dirs_exist_ok=True)
    left = set(EDITS)
    for path in (folder / "cuda").iterdir():
        text = path.read_text()
        for pattern, replacement in EDITS.items():
            text, count = re.subn(pattern, replacement, text)
            left -= {pattern} if count else set()
        path.write_text(text)
    assert not left, left
    return [path for path in (folder / backend).iterdir() if path.suffix in (".cpp", ".cu")]


def build(backend: str) -> Path:
    """The library of csrc/cuda or csrc/cpu, built once for as long as its sources do not change."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    includes = (*cpp_extension.include_paths(), sysconfig.get_path("include"))
    command = [compiler, *FLAGS.split(), *(f"-isystem{path}" for path in includes)]
    command.append(f"-DLIBRARY=maxunpool_emulated_{backend}")
    sources = [*ROOT.glob("csrc/*.h"), *ROOT.glob(f"csrc/{backend}/*"), *HERE.glob("*.*")]
    digest = hashlib.sha256(
        str([command, *((s.name, s.read_bytes()) for s in sorted(sources))]).encode()
    )
    folder = ROOT / "build" / "emulation" / f"{backend}-{SANITIZERS}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "library.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes one builds
        if library.exists():
            return library
        command += [f"-iquote{path}" for path in (folder / "csrc", HERE)]
        sanitize = [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"] if SANITIZERS else []
        shim = "cuda_shim.h" if backend == "cuda" else "registration.h"
        compiled = {
            source: [*sanitize, "-include", str(HERE / shim)]
            for source in copy(backend, folder / "csrc")
        }
        compiled[HERE / "registration.cpp"] = []
        if backend == "cuda":
            compiled[HERE / "grid.cpp"] = ["-DTHREADS"] if "thread" in SANITIZERS else []
        objects = [str(folder / f"{source.stem}.o") for source in compiled]
        running = [
            subprocess.Popen([*command, *options, "-c", str(source), "-o", to])
            for (source, options), to in zip(compiled.items(), objects, strict=True)
        ]
        assert [process.wait() for process in running] == [0] * len(running)
        link = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
        unfinished = folder / "unfinished.so"
        subprocess.run(
            [compiler, "-shared", "-o", str(unfinished), *objects, *sanitize, *link], check=True
        )
        unfinished.rename(library)
    return library


@functools.cache
def library(backend: str = "cuda") -> Any:
    """The operators that grid.cpp and registration.cpp add to it."""
    torch.ops.load_library(build(backend))
    return getattr(torch.ops, f"maxunpool_emulated_{backend}")


@contextlib.contextmanager
def emulated(rng: Random, skips_barriers: bool = False, **limits: int) -> Iterator[None]:
    """CPU tensors go to the CUDA kernels. Limits that are not given are random."""
    ops, values = library(), random_limits(rng) | limits
    ops.configure(rng.getrandbits(31), list(values.values()), skips_barriers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maxunpool_cuda._C, "check_errors", ops.check_errors)
        ops.replace_cpu_kernels(True)
        try:
            yield
            ops.check_errors()
        finally:
            ops.replace_cpu_kernels(False)


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
    return [kernels()[address] for address in library().take_launched()]
