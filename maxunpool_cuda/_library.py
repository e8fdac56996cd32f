# SPDX-License-Identifier: BSD-3-Clause
"""Refuses a library built for another PyTorch, CUDA or Python, before it is loaded.

Loading one ends in an undefined symbol, if it is noticed at all: PyTorch promises no ABI from one
minor release to the next.
"""

from __future__ import annotations

import json
import re
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent


def release_of(version: str) -> str:
    """What of a version of PyTorch its ABI goes with: ``2.13`` for the release 2.13.1+cu130.

    A pre-release is compared whole. 2.16.0.dev20261101 may have another ABI than the next night's,
    and 2.10.0a0+1234567, as NVIDIA's containers have them, another than 2.10.
    """
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?", version)
    return release.group(1) if release else str(version)


def built_for(package: Path = PACKAGE) -> dict[str, Any]:
    """What setup.py recorded beside the library: ``version``, ``torch`` and ``cuda``.

    An ImportError if the library does not fit, is not in ``package``, or has no record.
    """
    in_place = (package.parent / "setup.py").exists()
    build = "pip install --no-build-isolation ."
    if in_place:
        build = "python setup.py build_ext --inplace"

    def refused(expected: str, got: str, otherwise: str = "") -> ImportError:
        way_out = f"build it anew with `{build}` in the source tree{otherwise}"
        return ImportError(f"maxunpool_cuda: expected {expected} but got {got}: {way_out}")

    spec = PathFinder.find_spec("_C", [str(package)])
    if spec is None or spec.origin is None:
        python = EXTENSION_SUFFIXES[0].split(".")[1]
        if others := [library.name.split(".")[1] for library in sorted(package.glob("_C.*.so"))]:
            other = f"Python {' or '.join(others)}, which its library was built for,"
            raise refused(other, f"Python {python}")
        elsewhere = ", or import what is installed from outside of it" if in_place else ""
        raise refused(f"its compiled library in {package}", "none", elsewhere)
    record = Path(spec.origin).with_suffix(".json")
    if not record.exists():
        may_not_fit = f"none, so it may not fit PyTorch {torch.__version__}"
        raise refused(f"a record of what its library was built for, {record},", may_not_fit)
    built: dict[str, Any] = json.loads(record.read_text())
    release, cuda = built["torch"], built["cuda"]
    # Kernels for the CPU alone are alike in every build of a release.
    found = torch.version.cuda.split(".")[0] if torch.version.cuda else None
    if release_of(torch.__version__) != release or cuda not in (None, found):
        expected = f"PyTorch {release}" + (f" with CUDA {cuda}" if cuda else "")
        got = f" with CUDA {torch.version.cuda}" if found else " without CUDA"
        got = f"PyTorch {torch.__version__}{got if cuda else ''}"
        raise refused(f"{expected}, which its library was built for,", got)
    return built
