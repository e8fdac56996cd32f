"""Which kernels are built; what does not fit PyTorch is refused; the source archive is whole."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from maxunpool_cuda import _library

ROOT = Path(__file__).parent.parent
PY = EXTENSION_SUFFIXES[0].split(".")[1]
RECORD = {"version": "0.3.0", "torch": "2.13", "cuda": None}


def library(folder: Path, python: str = PY, **built_for: str | None) -> Path:
    """An empty file in place of a library, and its record."""
    folder.mkdir(exist_ok=True)
    (folder / f"_C.{python}.json").write_text(json.dumps(RECORD | built_for))
    (folder / f"_C.{python}.so").touch()
    return folder


def refused(package: Path, words: str) -> None:
    with pytest.raises(ImportError, match=rf"^maxunpool_cuda: expected .*{re.escape(words)}"):
        _library.built_for(package)


def test_which_libraries_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.13.1 with CUDA 13.0, then without CUDA."""
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    which = ", which its library was built for, but got"
    refused(tmp_path, f"its compiled library in {tmp_path} but got none: build it")
    for cuda in (None, "13"):
        assert _library.built_for(library(tmp_path, cuda=cuda)) == RECORD | {"cuda": cuda}
    for torch_release in ("2.1", "2.131"):
        words = f"PyTorch {torch_release}{which} PyTorch 2.13.1: build it anew with `pip install"
        refused(library(tmp_path, torch=torch_release), words)
    refused(
        library(tmp_path, cuda="12"), f"2.13 with CUDA 12{which} PyTorch 2.13.1 with CUDA 13.0:"
    )
    torch.version.cuda = None
    refused(library(tmp_path, cuda="13"), f"2.13 with CUDA 13{which} PyTorch 2.13.1 without CUDA:")
    (tmp_path / f"_C.{PY}.json").unlink()
    refused(tmp_path, f"a record of what its library was built for, {tmp_path}")
    (tmp_path / f"_C.{PY}.so").unlink()
    refused(library(tmp_path, "cpython-37m"), f"Python cpython-37m{which} Python {PY}")
    (tmp_path / "setup.py").touch()
    refused(tmp_path / "any", "build_ext --inplace` in the source tree, or import what")


def last_line(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """The last line of what a failing command prints."""
    kept = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


def test_a_library_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """An empty file cannot be loaded. That shows only once its record fits."""
    package = library(tmp_path / "maxunpool_cuda", torch="1.0")
    for source in _library.PACKAGE.glob("*.py"):
        (package / source.name).symlink_to(source)
    command = (sys.executable, "-c", "import maxunpool_cuda")
    assert "expected PyTorch 1.0, which" in last_line(*command, cwd=tmp_path)
    library(package, torch=".".join(torch.__version__.split(".")[:2]))
    assert "to load, as it was built for" in last_line(*command, cwd=tmp_path)


ANOTHER_TORCH = """
from types import SimpleNamespace
__version__, version = "9.9.0", SimpleNamespace(cuda={!r})
cuda = SimpleNamespace(device_count=int)
"""
ITS_EXTENSIONS = """
BuildExtension = CppExtension = object
CUDA_HOME = None
def CUDAExtension(*_, **__): raise SystemExit(f"builds with {CUDA_HOME}")
"""


def setup_says(folder: Path, cuda: str | None = None, **environment: str) -> str:
    """The error of setup.py, given a PyTorch 9.9.0 in this folder that finds no CUDA toolkit."""
    (folder / "torch" / "utils").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(ANOTHER_TORCH.format(cuda))
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(ITS_EXTENSIONS)
    return last_line(sys.executable, "setup.py", "--name", PYTHONPATH=str(folder), **environment)


def test_pip_may_not_build_for_another_release(tmp_path: Path) -> None:
    """setup.py knows the folders that pip builds in by their names."""
    words = setup_says(tmp_path / "pip-build-env-0")
    installed = importlib.metadata.version("torch")
    assert f"PyTorch {installed}, which is installed, but pip builds for 9.9.0," in words
    assert "`pip install --no-build-isolation .` builds for what is installed" in words


def test_forced_cuda_names_what_is_missing_first(tmp_path: Path) -> None:
    """The build of PyTorch decides which toolkit is needed. pip installs one beside PyTorch."""
    forced = {"FORCE_CUDA": "1", "FORCE_CPU": "0"}
    needs = "maxunpool_cuda: FORCE_CUDA=1 needs a CUDA"
    words = setup_says(tmp_path, None, **forced)
    assert words == f"{needs} build of PyTorch (this is 9.9.0)"
    assert setup_says(tmp_path, "99.0", **forced).startswith(f"{needs} toolkit (CUDA_HOME names")
    toolkit = tmp_path / "nvidia" / "cu99"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").touch()
    assert setup_says(tmp_path, "99.0", **forced) == f"builds with {toolkit}"


CPU, CUDA, EITHER = "FORCE_CPU=1 FORCE_CUDA=0 ", "FORCE_CPU=0 FORCE_CUDA=1 ", ""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("given", "gpu", "kernels"),
    [
        ("", False, CPU),
        ("", True, EITHER),
        ("CUDA=1 FORCE_CPU=1", False, CUDA),
        ("CUDA=0", True, CPU),
        ("FORCE_CUDA=1", False, EITHER),
    ],
)
def test_kernels_that_make_builds(given: str, gpu: bool, kernels: str, tmp_path: Path) -> None:
    """With EITHER, setup.py chooses."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{'echo a GPU' if gpu else 'exit 9'}")
    program.chmod(0o755)
    command = ["make", "--dry-run", "test", *given.split(), f"VENV={tmp_path / 'venv'}"]
    alone = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}  # no variables of another make
    output = subprocess.check_output(command, cwd=ROOT, env=alone, text=True)
    (build,) = [line for line in output.splitlines() if "--no-build-isolation" in line]
    assert build.startswith(f"{kernels}{tmp_path}")
    assert ("CUDA=1 builds them" in output) == (not given and not gpu)


@pytest.mark.slow
def test_the_source_archive_is_whole(tmp_path: Path) -> None:
    """It has every tracked file but those whose names begin with a dot."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    sdist = ["egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path]
    subprocess.run([sys.executable, "setup.py", "--quiet", *sdist], cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert {name for name in tracked if name[0] != "."} <= names
