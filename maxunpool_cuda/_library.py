# SPDX-License-Identifier: BSD-3-Clause
"""The compiled library: finds it, loads it, asks it for facts and errors.

It is up to three files. The module ``_C`` is compiled for one Python; it has facts about the build.
The kernels are in _cpu_kernels.so and _cuda_kernels.so, for every Python: they use PyTorch's stable
ABI, and so one build serves PyTorch ``OLDEST_TORCH`` and all later releases. The CUDA kernels are
for one major release of CUDA. With another they are not loaded: the fallback computes for CUDA
tensors, and warns at the first call.

A build without a library, where the fallback computes all, has the file ``FALLBACK`` instead, such
as ``{"version": "0.3.0", "note": "no kernels, as FORCE_FALLBACK=1 says"}``.

setup.py runs this file, too, without the rest of the package.
"""

from __future__ import annotations

import importlib
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


def has_library(package: Path = PACKAGE) -> bool:
    """Whether ``package`` has a library. If not, it is a build without one.

    Raises:
        ImportError: this Python or PyTorch cannot load the library, or ``package`` has none.
    """
    if release_of(torch.__version__) < release_of(OLDEST_TORCH):
        raise ImportError(
            f"maxunpool_cuda: expected PyTorch {OLDEST_TORCH} or later but got {torch.__version__}"
        )
    if PathFinder.find_spec("_C", [str(package)]):
        return True
    if not (package / FALLBACK).exists():
        raise _no_library_error(package)
    return False


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


def _no_library_error(package: Path) -> ImportError:
    """The error if ``package`` has no library that this Python can load."""
    names = [library.name for library in sorted(package.glob("_C.*.so"))]
    if names:
        pythons = " or ".join(name.split(".")[1] for name in names)
        expected = f"Python {pythons}, which its library was built for,"
        this_python = EXTENSION_SUFFIXES[0].split(".")[1]
        return _import_error(expected, f"Python {this_python}", _build_it(package))
    way_out = _build_it(package)
    if _is_source(package):
        # Often `pip install .` has just been run here, and Python looks into this folder first.
        installed = _installed_copy(package)
        if installed:
            source = f"the source there instead of the installed {installed}"
            way_out = f"leave {package.parent} (`cd ..`), as Python imports {source}, or {way_out}"
        else:
            way_out += ", or install it and leave the source tree"
    return _import_error(f"its compiled library in {package}", "none", way_out)


def _import_error(expected: str, got: str, way_out: str) -> ImportError:
    return ImportError(f"maxunpool_cuda: expected {expected} but got {got}: {way_out}")


def _build_it(package: Path) -> str:
    """How to build the library that is missing in ``package``, for a message."""
    command = "pip install --no-build-isolation ."
    if _is_source(package):
        command = "python setup.py build_ext --inplace"
    return f"build it anew with `{command}` in the source tree"


def _is_source(package: Path) -> bool:
    """Whether ``package`` lies in a source tree."""
    return (package.parent / "setup.py").exists()


def _installed_copy(package: Path) -> Path | None:
    """The folder of another copy of the package that Python would find, if it has a library."""
    elsewhere = [path for path in sys.path if Path(path).resolve() != package.parent.resolve()]
    spec = PathFinder.find_spec(package.name, elsewhere)
    if spec is None or spec.origin is None:
        return None
    other = Path(spec.origin).parent
    return other if PathFinder.find_spec("_C", [str(other)]) else None
