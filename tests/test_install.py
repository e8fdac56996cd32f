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

from maxunpool_cuda import __version__, _library

ROOT = Path(__file__).parent.parent
PY = EXTENSION_SUFFIXES[0].split(".")[1]
RECORD = {"version": "0.3.0", "torch": "2.13", "cuda": None}


def library(folder: Path, python: str = PY, **built_for: str | None) -> Path:
    """An empty file in place of a library, and its record."""
    folder.mkdir(exist_ok=True)
    (folder / f"_C.{python}.json").write_text(json.dumps(RECORD | built_for))
    (folder / f"_C.{python}.so").touch()
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the package, beside PyTorch 2.13.1 with CUDA 13.0."""
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return tmp_path


def refused(package: Path, words: str) -> None:
    with pytest.raises(ImportError, match=rf"^maxunpool_cuda: expected .*{re.escape(words)}"):
        _library.built_for(package)


def test_a_library_that_fits(package: Path) -> None:
    for cuda in (None, "13"):
        assert _library.built_for(library(package, cuda=cuda)) == RECORD | {"cuda": cuda}


def test_another_release_or_cuda(package: Path) -> None:
    words = ", which its library was built for, but got PyTorch 2.13.1"
    refused(library(package, torch="2.1"), f"PyTorch 2.1{words}: build it anew with `pip install")
    refused(library(package, torch="2.131"), f"PyTorch 2.131{words}: build it anew")
    refused(library(package, cuda="12"), f"2.13 with CUDA 12{words} with CUDA 13.0: build it anew")
    torch.version.cuda = None
    refused(library(package, cuda="13"), f"2.13 with CUDA 13{words} without CUDA: build it anew")


def test_no_library(package: Path) -> None:
    (package / "_C.pyi").touch()
    refused(package, f"its compiled library in {package} but got none: build it")
    library(package, "cpython-37m-linux-gnu")
    refused(package, f"cpython-37m-linux-gnu, which its library was built for, but got Python {PY}")
    (library(package) / f"_C.{PY}.json").unlink()
    refused(package, f"a record of what its library was built for, {package}")
    (package / "setup.py").touch()
    refused(package / "any", "build_ext --inplace` in the source tree, or import what is installed")


def last_line(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """What a command that fails says at last."""
    kept = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


def test_a_library_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """The empty file cannot be loaded, which is noticed only if its record fits."""
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


def another_torch(folder: Path, cuda: str | None = None) -> str:
    """A folder in which Python finds PyTorch 9.9.0, which finds no CUDA toolkit."""
    (folder / "torch" / "utils").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(ANOTHER_TORCH.format(cuda))
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(ITS_EXTENSIONS)
    return str(folder)


def test_pip_may_not_build_for_another_release(tmp_path: Path) -> None:
    """A PyTorch of its own, in a folder named as pip names those that it builds in."""
    folder = another_torch(tmp_path / "pip-build-env-0")
    words = last_line(sys.executable, "setup.py", "--version", PYTHONPATH=folder)
    installed = importlib.metadata.version("torch")
    assert f"PyTorch {installed}, which is installed, but pip builds for 9.9.0," in words
    assert "`pip install --no-build-isolation .` builds for what is installed" in words


def test_forced_cuda_names_what_is_missing_first(tmp_path: Path) -> None:
    """Which toolkit is wanted, the build of PyTorch decides. pip installs one beside PyTorch."""
    for cuda in (None, "99.0"):
        forced = {"PYTHONPATH": another_torch(tmp_path / str(cuda), cuda), "FORCE_CUDA": "1"}
        words = last_line(sys.executable, "setup.py", "--name", **forced, FORCE_CPU="0")
        missing = "toolkit (CUDA_HOME names" if cuda else "build of PyTorch (this is 9.9.0)"
        assert words.startswith(f"maxunpool_cuda: FORCE_CUDA=1 needs a CUDA {missing}")
        assert ("toolkit" in words) == bool(cuda)
    toolkit = tmp_path / "99.0" / "nvidia" / "cu99"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").touch()
    words = last_line(sys.executable, "setup.py", "--name", **forced, FORCE_CPU="0")
    assert words == f"builds with {toolkit}"


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
    """EITHER leaves the choice to setup.py."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{'echo a GPU' if gpu else 'exit 9'}")
    program.chmod(0o755)
    command = ["make", "--dry-run", "test", *given.split(), f"VENV={tmp_path / 'venv'}"]
    # The make that runs the tests may have set more variables.
    alone = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    output = subprocess.check_output(command, cwd=ROOT, env=alone, text=True)
    (build,) = [line for line in output.splitlines() if "--no-build-isolation" in line]
    assert build.startswith(f"{kernels}{tmp_path}")
    assert ("CUDA=1 builds them" in output) == (not given and not gpu)


def test_one_version() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    version = __version__.split("+")[0]  # a wheel's version has a suffix
    assert re.findall(r'^version = "(.+)"$', text, re.M) == [version]


@pytest.mark.slow
def test_the_source_archive_is_whole(tmp_path: Path) -> None:
    """It has every tracked file but those whose names begin with a dot."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    at = ["egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path]
    subprocess.run([sys.executable, "setup.py", "--quiet", *at], cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert {name for name in tracked if name[0] != "."} <= names
