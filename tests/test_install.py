"""Which kernels are built, and what does not fit PyTorch is refused."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import machinery, metadata, reload
from pathlib import Path

import pytest
import setuptools
import torch
from torch.utils import cpp_extension

import maxunpool_cuda
from maxunpool_cuda import _library, _ops

ROOT = Path(__file__).parent.parent
PY = machinery.EXTENSION_SUFFIXES[0].split(".")[1]
Patch = pytest.MonkeyPatch


def library(folder: Path, python: str = PY, torch: str = "2.13", cuda: str | None = None) -> Path:
    """An empty file in place of a library, and the record of what it was built for."""
    folder.mkdir(exist_ok=True)
    (folder / f"_C.{python}.json").write_text(json.dumps({"torch": torch, "cuda": cuda}))
    (folder / f"_C.{python}.so").touch()
    return folder


def refused(package: Path, words: str) -> None:
    with pytest.raises(ImportError, match=rf"^maxunpool_cuda: expected .*{re.escape(words)}"):
        _library.built_for(package)


def test_which_libraries_fit(tmp_path: Path, monkeypatch: Patch) -> None:
    """PyTorch 2.13.1 with CUDA 13.0, then without CUDA."""
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    which = ", which its library was built for, but got"
    refused(tmp_path, f"its compiled library in {tmp_path} but got none: build it")
    for cuda in (None, "13"):
        assert _library.built_for(library(tmp_path, cuda=cuda)) == {"torch": "2.13", "cuda": cuda}
    words = f"PyTorch 2.1{which} PyTorch 2.13.1: build it anew with `pip install"
    refused(library(tmp_path, torch="2.1"), words)
    words = f"2.13 with CUDA 12{which} PyTorch 2.13.1 with CUDA 13.0:"
    refused(library(tmp_path, cuda="12"), words)
    torch.version.cuda = None
    refused(library(tmp_path, cuda="13"), f"2.13 with CUDA 13{which} PyTorch 2.13.1 without CUDA:")
    (tmp_path / f"_C.{PY}.json").unlink()
    refused(tmp_path, f"a record of what its library was built for, {tmp_path}")
    (tmp_path / f"_C.{PY}.so").unlink()
    refused(library(tmp_path, "cpython-37m"), f"Python cpython-37m{which} Python {PY}")
    (tmp_path / "setup.py").touch()
    refused(tmp_path / "any", "build_ext --inplace` in the source tree, or import what")


def test_a_library_is_refused_before_it_is_loaded(monkeypatch: Patch) -> None:
    monkeypatch.delattr(maxunpool_cuda, "_C")
    monkeypatch.setitem(sys.modules, "maxunpool_cuda._C", None)  # so that it cannot be loaded
    with pytest.raises(ImportError, match="expected its compiled library to load, as it was built"):
        reload(_ops)
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    with pytest.raises(ImportError, match=r"its library was built for, but got PyTorch 1\.0\.0"):
        reload(_ops)


def setup_fails(words: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(f"maxunpool_cuda: {words}")):
        runpy.run_path("setup.py")


def test_what_setup_refuses(tmp_path: Path, monkeypatch: Patch) -> None:
    """The build of PyTorch decides which toolkit is needed. pip installs one beside PyTorch."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "pip-build-env-0/torch/__init__.py"))
    installed = metadata.version("torch")
    setup_fails(
        f"expected to be built for PyTorch {installed}, which is installed, but pip builds for "
        "9.9.0, in an environment of its own: `pip install --no-build-isolation .` builds for what"
    )
    torch.__version__ = installed
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(cpp_extension, "CUDAExtension", cpp_extension.CppExtension)
    for name, value in ("FORCE_CUDA", "1"), ("FORCE_CPU", "0"), ("TORCH_CUDA_ARCH_LIST", "9.0"):
        monkeypatch.setenv(name, value)
    setup_fails(f"FORCE_CUDA=1 needs a CUDA build of PyTorch (this is {installed})")
    torch.__file__, torch.__version__ = str(tmp_path / "torch/__init__.py"), "9.9.0"
    torch.version.cuda = "99.0"
    setup_fails("FORCE_CUDA=1 needs a CUDA toolkit (CUDA_HOME names it;")
    toolkit = tmp_path / "nvidia/cu99"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin/nvcc").touch()
    assert runpy.run_path("setup.py")["CUDA"]
    assert Path(cpp_extension.CUDA_HOME) == toolkit


CPU, CUDA, EITHER = "FORCE_CPU=1 FORCE_CUDA=0 ", "FORCE_CPU=0 FORCE_CUDA=1 ", ""
KERNELS = {"": CPU, "CUDA=0": CPU, "CUDA=1 FORCE_CPU=1": CUDA, "FORCE_CUDA=1": EITHER}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("given", KERNELS)
def test_kernels_that_make_builds(given: str, gpu: bool, tmp_path: Path) -> None:
    """With EITHER, setup.py chooses. Only without a variable it matters whether there is a GPU."""
    kernels = EITHER if gpu and not given else KERNELS[given]
    (tmp_path / "nvidia-smi").symlink_to(shutil.which("echo" if gpu else "false"))
    command = ["make", "--dry-run", "test", *given.split(), f"VENV={tmp_path / 'venv'}"]
    alone = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}  # no variables of another make
    output = subprocess.check_output(command, cwd=ROOT, env=alone, text=True)
    assert re.search(f"^{kernels}{tmp_path}/.* --no-build-isolation", output, re.M)
    assert ("CUDA=1 builds them" in output) == (not given and not gpu)
