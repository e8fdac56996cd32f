# SPDX-License-Identifier: BSD-3-Clause
"""The compiled library: finds it, loads it, asks it for facts and errors.

It is up to three files. The module ``_C`` is compiled for one Python; it has facts about the build.
The kernels are in _cpu_kernels.so and _cuda_kernels.so, for every Python: they use PyTorch's stable
ABI, and so one build serves PyTorch ``OLDEST_TORCH`` and all later releases. The CUDA kernels are
for one major release of CUDA. With another they are not loaded: the fallback computes for CUDA
tensors, and warns at the first call.

A build without a library, where the fallback computes all, has the file ``FALLBACK`` instead, such
as ``{"version": "0.3.0", "note": "no kernels, as FORCE_FALLBACK=1 says"}``.

A source tree is often on Python's path, before the copy that pip has installed. If nothing is built
in the tree, the package's ``__init__`` imports that copy instead, and no other file of the tree.

setup.py runs this file, too, without the rest of the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

import torch

_C: Any = None  # the compiled module, once it is loaded
_note = ""  # which kernels are left out here, and why
version = ""  # of the package
PACKAGE = Path(__file__).parent
FALLBACK = "_C.fallback.json"
CPU_KERNELS = "_cpu_kernels.so"
CUDA_KERNELS = "_cuda_kernels.so"
# The first release whose stable ABI has all that the kernels need.
OLDEST_TORCH = "2.10"
CUDA_MAJOR = "13"  # the release of CUDA that the CUDA kernels are for


def has_module(package: Path) -> bool:
    """Whether the folder ``package`` has a library for this Python."""
    return PathFinder.find_spec("_C", [str(package)]) is not None


def is_built(package: Path) -> bool:
    """Whether the folder ``package`` has such a library, or is a build without one."""
    return has_module(package) or (package / FALLBACK).exists()


def import_installed_copy() -> bool:
    """If nothing is built here, import the copy that is installed elsewhere, if there is one.

    Returns:
        Whether there is. Then this import of the package ends with that copy.
    """
    if is_built(PACKAGE):
        return False
    elsewhere = [path for path in sys.path if Path(path).resolve() != PACKAGE.parent.resolve()]
    copy = PathFinder.find_spec(PACKAGE.name, elsewhere)
    if not (copy and copy.loader and copy.origin and is_built(Path(copy.origin).parent)):
        return False
    for name in [name for name in sys.modules if name.partition(".")[0] == copy.name]:
        del sys.modules[name]
    package = importlib.util.module_from_spec(copy)
    sys.modules[copy.name] = package
    copy.loader.exec_module(package)
    return True


def has_library(package: Path = PACKAGE) -> bool:
    """Whether ``package`` has a library. If not, it is a build without one.

    Raises:
        ImportError: this Python or PyTorch cannot load the library, or ``package`` has none.
    """
    if release_of(torch.__version__) < release_of(OLDEST_TORCH):
        raise ImportError(
            f"maxunpool_cuda: expected PyTorch {OLDEST_TORCH} or later but got {torch.__version__}"
        )
    if not is_built(package):
        raise _not_built_error(package)
    return has_module(package)


def release_of(version: str) -> tuple[int, int]:
    """The minor release of a version of PyTorch: (2, 13) of 2.13.1+cu130."""
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    return major, minor


def load() -> None:
    """Load the library, whose kernels register themselves. A fallback build has none."""
    global _C, _note, version
    if not has_library():
        record = json.loads((PACKAGE / FALLBACK).read_text())
        _note, version = record["note"], record["version"]
        return
    try:
        _C = importlib.import_module(f"{__package__}._C")
        _C.load(str(PACKAGE / CPU_KERNELS))
        _note = _C.build_info()["note"]
        if _C.build_info()["cuda"]:
            _load_cuda_kernels()
    except ImportError as error:
        raise ImportError(
            "maxunpool_cuda: expected its compiled library to load with PyTorch "
            f"{torch.__version__} but got: {error}"
        ) from error
    version = _C.version


def _load_cuda_kernels() -> None:
    """Load the CUDA kernels, unless they are for another CUDA than PyTorch's."""
    global _note
    if misfit := misfit_of_cuda():
        _note = f"no CUDA kernels: {misfit}"
    else:
        _C.load(str(PACKAGE / CUDA_KERNELS))


def misfit_of_cuda() -> str:
    """Why this PyTorch cannot run the CUDA kernels, in a sentence; nothing if it can."""
    if (torch.version.cuda or "").split(".")[0] == CUDA_MAJOR:
        return ""
    theirs = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"expected PyTorch with CUDA {CUDA_MAJOR} but got PyTorch {torch.__version__} {theirs}"


def build_info() -> dict[str, Any]:
    """Facts about the compiled extension.

    Returns:
        A dict with ``kernels`` ("cpu", "cpu and cuda", or "none" where PyTorch's own operators
        compute), ``cuda`` (whether it has CUDA kernels), ``cuda_version`` (of their toolkit),
        ``nvcc_version`` (of the compiler of the CUDA kernels), ``arch_list`` (the GPUs that it has
        kernels for), ``compiler`` (of C++), ``torch_version`` (the PyTorch it was built with, or
        without kernels the one that runs) and ``note`` (a sentence: which kernels are left out,
        and why).

    Example:
        >>> build_info()["kernels"] in ("cpu", "cpu and cuda", "none")
        True
    """
    without_cuda = {"cuda": False, "cuda_version": None, "nvcc_version": None, "arch_list": ""}
    if _C is None:
        none = {"kernels": "none", "compiler": "", "torch_version": torch.__version__}
        return {**none, **without_cuda, "note": _note}
    facts: dict[str, Any] = _C.build_info()
    if _note != facts["note"]:  # the CUDA kernels are not loaded
        facts |= {"kernels": "cpu", **without_cuda, "note": _note}
    return facts


def check_errors() -> None:
    """On CUDA, wait for the kernels launched so far, and raise the error of a bad index.

    It waits for the current stream of each device. A CUDA call does not wait for its kernels. So if
    an index lies outside its output plane, the next unpooling on that device raises the error, or
    this function does. Of several such indices one is named. While the current stream captures a
    CUDA graph, this function does nothing, because the captured kernels have not run. Errors of a
    replay are raised after it. On the CPU every call raises at once, and there is nothing left to
    raise.

    Raises:
        RuntimeError: a kernel met an out-of-bounds index; the message has the index, its position
            and its plane.

    Example:
        >>> check_errors()
    """
    if _C is not None:
        _C.check_errors()


def _not_built_error(package: Path) -> ImportError:
    """The error if ``package`` has no library that this Python can load."""
    names = [library.name for library in sorted(package.glob("_C.*.so"))]
    if names:
        pythons = " or ".join(name.split(".")[1] for name in names)
        this_python = EXTENSION_SUFFIXES[0].split(".")[1]
        seen = f"Python {pythons}, which its library was built for, but got Python {this_python}"
    else:
        seen = f"its compiled library in {package} but got none"
    command = "`pip install --no-build-isolation .`"
    return ImportError(f"maxunpool_cuda: expected {seen}: {command} in the source tree builds it")
