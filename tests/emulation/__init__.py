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

import maxunpool_cuda._C
from maxunpool_cuda import _ops

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# The library registers its kernels for operators of its own: see replaced_kernels().
REGISTRATION = r"TORCH_LIBRARY_IMPL\(maxunpool_cuda, \w+,"
# The first edits replace what g++ does not know: launches, headers of CUDA, the device. The next
# let small tensors go the ways of large ones: many blocks, parts, few blocks, long offsets.
EDITS = {
    r"(?s)(\w+)<<<(.*?)>>>\(": r"shim::launch(\1, \2)(",
    r"#include <(c10/cuda/|cuda).*>": "",
    r"\bdevice\.is_cuda\(\)": "device.is_cpu()",
    r"constexpr int kThreads = \d+;": "constexpr int kThreads = 8;",
    r"most_blocks = \d+;": "most_blocks = 4;",
    r"kSharedBytes = 32 << 10;": "kSharedBytes = 512;",
    r"kMost32BitOffset = int64_t\{1\} << 31;": "kMost32BitOffset = 1 << 17;",
    r"\bErrorRecords\b": "EmulatedErrorRecords",  # else both libraries share them
    REGISTRATION: "TORCH_LIBRARY_IMPL(LIBRARY, CPU,",
}
KEPT: list[torch.library.Library] = []  # their operators live as long
OPERATORS = (_ops.max_unpool, _ops.max_unpool_backward, _ops.max_pool)
FLAGS = "-std=c++20 -O0 -g1 -fPIC -DWITH_CUDA -Wall -Wextra -Wno-unused-parameter"
FLAGS += " -Wno-unknown-pragmas -Werror -x c++"
API = "torch/csrc/api/include"
# The sanitizers of this process, as -fsanitize takes them: see sanitized().
SANITIZERS = os.environ.get("MAXUNPOOL_SANITIZERS", "")
RUNTIMES = {  # without libstdc++, AddressSanitizer cannot intercept exceptions
    "thread": ["libtsan.so"],
    "address,undefined": ["libasan.so", "libubsan.so", "libstdc++.so"],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=4096:allocator_may_return_null=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def edited(backend: str) -> dict[Path, str]:
    """The edited text of every file that the backend needs, by its path in csrc."""
    files = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc" / backend).iterdir()]
    edits = EDITS if backend == "cuda" else {REGISTRATION: EDITS[REGISTRATION]}
    texts, left = {}, set(edits)
    for path in sorted(files):
        text = path.read_text()
        for pattern, replacement in edits.items() if path.parent.name == backend else ():
            text, count = re.subn(pattern, replacement, text)
            left -= {pattern} if count else set()
        texts[path.relative_to(ROOT / "csrc")] = text
    assert not left, left
    return texts


def build(backend: str, sanitizers: str = SANITIZERS) -> Path:
    """Build the library of csrc/cuda or csrc/cpu, unless the same files were built before."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    torch_headers = Path(torch.__file__).parent / "include"
    includes = (torch_headers, torch_headers / API, sysconfig.get_path("include"))
    command = [compiler, *FLAGS.split(), *(f"-isystem{path}" for path in includes)]
    command.append(f"-DLIBRARY=maxunpool_emulated_{backend}")
    sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    texts, shim, grid = edited(backend), HERE / "cuda_shim.h", HERE / "grid.cpp"
    content = [*map(str, texts.items()), shim.read_text(), grid.read_text()]
    digest = hashlib.sha256(str((command, sanitize, content)).encode()).hexdigest()
    folder = ROOT / "build" / "emulation" / digest[:16]
    library = folder / "library.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits
        if library.exists():
            return library
        for path, text in texts.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        included = ["-include", str(shim)] if backend == "cuda" else []
        sources = [folder / path for path in texts if path.suffix in (".cpp", ".cu")]
        options = {source: [*sanitize, *included] for source in sources}
        if backend == "cuda":
            options[grid] = ["-DTHREADS"] if sanitizers == "thread" else []
        command += [f"-iquote{path}" for path in (folder, HERE)]
        objects = [str(folder / f"{source.stem}.o") for source in options]
        running = [
            subprocess.Popen([*command, *each, "-c", str(source), "-o", to])
            for (source, each), to in zip(options.items(), objects, strict=True)
        ]
        assert [process.wait() for process in running] == [0] * len(running)
        torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
        link = [compiler, "-shared", "-o", str(library), *objects, *sanitize, *torch_libraries]
        subprocess.run(link, check=True)
    return library


@functools.cache
def library(backend: str) -> Any:
    """The library's operators: copies of the package's, and the ones that grid.cpp adds."""
    torch.ops.load_library(build(backend))
    name = f"maxunpool_emulated_{backend}"
    KEPT.append(torch.library.Library(name, "FRAGMENT"))
    for operator in OPERATORS:
        KEPT[-1].define(str(operator._schema).partition("::")[2])
    return getattr(torch.ops, name)


@contextlib.contextmanager
def replaced_kernels(backend: str) -> Iterator[None]:
    """Inside, operators on CPU tensors run the library's kernels."""
    ops = library(backend)
    with torch.library._scoped_library("maxunpool_cuda", "IMPL") as replaced:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that kernels are overridden
            for operator in OPERATORS:
                name = operator._schema.name.partition("::")[2]
                replaced.impl(name, getattr(ops, name).default, "CPU")
        yield


@contextlib.contextmanager
def emulated_gpu(rng: Random, skips: str = "") -> Iterator[None]:
    """Inside, operators on CPU tensors run the CUDA kernels.

    ``skips`` names a mistake on purpose: to skip "barriers", or "a block" of each grid.
    """
    ops = library("cuda")
    ops.configure(rng.getrandbits(31), skips)
    with pytest.MonkeyPatch.context() as patch, replaced_kernels("cuda"):
        patch.setattr(maxunpool_cuda._C, "check_errors", ops.check_errors)
        yield
        ops.check_errors()


def cpu() -> contextlib.AbstractContextManager[None]:
    """Inside, operators run the CPU's kernels, compiled with the sanitizers of this process."""
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
    # -R: ThreadSanitizer needs addresses that are not random.
    command = ["setarch", "-R", sys.executable, *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **OPTIONS, **environment},
        cwd=HERE.parent,  # not the source tree, whose package may be without its library
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kernels() -> set[str]:
    """The symbols of all kernels."""
    sources = "".join(path.read_text() for path in ROOT.glob("csrc/cuda/*"))
    names = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\(", sources)
    assert len(names) == sources.count("__global__")
    symbols = subprocess.check_output(["nm", "-D", build("cuda")], text=True)
    return set(re.findall(rf"_ZN14maxunpool_cuda\d+(?:{'|'.join(names)})I\w+", symbols))


def launched() -> set[str]:
    """The kernels that ran since the last call."""
    return {*library("cuda").take_launched()}
