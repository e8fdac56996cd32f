# SPDX-License-Identifier: BSD-3-Clause
"""The compiled library: checks that it fits, loads it, asks it for facts and errors.

PyTorch promises no ABI from one minor release to the next. A library for another release fails with
an undefined symbol, or goes wrong later without an error. So setup.py writes a record beside the
library, such as ``{"version": "0.3.0", "torch": "2.13", "cuda": "13"}``, and the import of the
package compares it with what is installed, before it loads the library. If they differ, the error
says what was expected, what is there, and what to do.

A build without a library, where the fallback computes, has the record FALLBACK. It fits every
PyTorch: ``{"version": "0.3.0", "torch": null, "cuda": null, "note": "no kernels, as
FORCE_FALLBACK=1 says"}``.

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

_C: Any = None  # the compiled library's module, once it is loaded
_note = ""  # of a build without a library
PACKAGE = Path(__file__).parent
FALLBACK = "_C.fallback.json"  # the name of the record of a build without a library


def release_of(version: str) -> str:
    """The part of a version of PyTorch that decides its ABI: ``2.13`` of 2.13.1+cu130.

    A pre-release is compared whole. 2.16.0.dev20261101 may have another ABI than the next night's,
    and 2.10.0a0+1234567, as NVIDIA's containers have them, another than 2.10.
    """
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?", version)
    return release.group(1) if release else str(version)


def built_for(package: Path = PACKAGE) -> dict[str, Any]:
    """The record beside the library: ``version``, ``torch`` and ``cuda``.

    That of a build without a library has a ``note``, too.

    Raises:
        ImportError: the library does not fit, is not in ``package``, or has no record.
    """
    spec = PathFinder.find_spec("_C", [str(package)])
    if spec is None or spec.origin is None:
        fallback = package / FALLBACK
        if not fallback.exists():
            raise _no_library_error(package)
        facts: dict[str, Any] = json.loads(fallback.read_text())
        return facts
    record = Path(spec.origin).with_suffix(".json")
    if not record.exists():
        expected = f"a record of what its library was built for, {record},"
        may_not_fit = f"none, so it may not fit PyTorch {torch.__version__}"
        raise _import_error(expected, may_not_fit, _build_it(package))
    built: dict[str, Any] = json.loads(record.read_text())
    cuda = torch.version.cuda.split(".")[0] if torch.version.cuda else None
    # Kernels for the CPU alone are alike in every build of a release.
    fits_cuda = built["cuda"] in (None, cuda)
    if release_of(torch.__version__) != built["torch"] or not fits_cuda:
        raise _misfit_error(built, package)
    return built


def is_fallback(built: dict[str, Any]) -> bool:
    """Whether a record is that of a build without a library."""
    return built["torch"] is None


def load(built: dict[str, Any]) -> None:
    """Load the library, whose kernels register themselves. A fallback build has none."""
    global _C, _note
    if is_fallback(built):
        _note = built["note"]
        return
    try:
        _C = importlib.import_module(f"{__package__}._C")
    except ImportError as error:
        raise ImportError(
            "maxunpool_cuda: expected its compiled library to load, as it was built for this "
            f"PyTorch ({torch.__version__}), but got: {error}"
        ) from error


def build_info() -> dict[str, Any]:
    """Facts about the compiled extension.

    Returns:
        A dict with ``kernels`` ("cpu", "cpu and cuda", or "none" where PyTorch's own operators
        compute), ``cuda`` (whether it has CUDA kernels), ``cuda_version`` (of PyTorch's CUDA),
        ``nvcc_version`` (of the compiler of the CUDA kernels), ``arch_list`` (the GPUs that it has
        kernels for), ``compiler`` (of C++), ``torch_version`` (the PyTorch it was built for, or
        without kernels the one that runs) and ``note`` (a sentence: which kernels the build left
        out, and why).

    Example:
        >>> build_info()["kernels"] in ("cpu", "cpu and cuda", "none")
        True
    """
    if _C is not None:
        facts: dict[str, Any] = _C.build_info()
        return facts
    return {
        "kernels": "none",
        "cuda": False,
        "cuda_version": None,
        "nvcc_version": None,
        "arch_list": "",
        "compiler": "",
        "torch_version": torch.__version__,
        "note": _note,
    }


def check_errors() -> None:
    """On CUDA, wait for the kernels launched so far, and raise the error of a bad index.

    A CUDA call does not wait for its kernels. So if an index lies outside its output plane, the
    next unpooling on that device raises the error, or this function does. Of several such indices
    one is named. While the current stream captures a CUDA graph, this function does nothing,
    because the captured kernels have not run. Errors of a replay are raised after it. On the CPU
    every call raises at once, and there is nothing left to raise.

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


def _misfit_error(built: dict[str, Any], package: Path) -> ImportError:
    """The error if PyTorch is of another release than the record's, or has another CUDA."""
    expected = f"PyTorch {built['torch']}"
    got = f"PyTorch {torch.__version__}"
    if built["cuda"]:
        expected += f" with CUDA {built['cuda']}"
        got += f" with CUDA {torch.version.cuda}" if torch.version.cuda else " without CUDA"
    return _import_error(f"{expected}, which its library was built for,", got, _build_it(package))


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
