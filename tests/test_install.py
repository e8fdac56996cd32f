"""What happens where the library, or what it is built with, does not fit what is installed."""

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import maxunpool_cuda
from maxunpool_cuda import _library

ROOT = Path(__file__).parent.parent
PIP = r"`pip install --no-build-isolation \.` in the source tree"
RECORD = {"version": "0.2.0", "torch": "2.13", "cuda": None}


def library(folder: Path, suffix: str = EXTENSION_SUFFIXES[0], **built_for: str | None) -> Path:
    """A library that could not be loaded, with its record."""
    folder.mkdir(exist_ok=True)
    (folder / f"_C{suffix}").touch()
    record = folder / f"_C{suffix}".replace(".so", ".json")
    record.write_text(json.dumps(RECORD | built_for))
    return folder


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.1+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize("cuda", [None, "13"])
def test_of_the_same_release_and_cuda(cuda: str | None, tmp_path: Path) -> None:
    assert _library.built_for(library(tmp_path, cuda=cuda)) == RECORD | {"cuda": cuda}


@pytest.mark.parametrize(
    ("built_for", "words"),
    [
        ({"torch": "2.11"}, "PyTorch 2.11, which"),
        ({"torch": "2.1"}, "PyTorch 2.1, which"),
        ({"torch": "2.131"}, "PyTorch 2.131, which"),
        ({"torch": "3.13"}, "PyTorch 3.13, which"),
        ({"torch": "2.15", "cuda": "13"}, "PyTorch 2.15 with CUDA 13, which"),
        ({"cuda": "12"}, "PyTorch 2.13 with CUDA 12, which"),
    ],
)
def test_of_another_release_or_cuda(built_for: dict[str, str], words: str, tmp_path: Path) -> None:
    cuda = " with CUDA 13.0" if "cuda" in built_for else ""
    got = re.escape(f"its library was built for, but got PyTorch 2.13.1+cu130{cuda}: build it")
    with pytest.raises(ImportError, match=f"^maxunpool_cuda: expected {words} {got} anew .*{PIP}$"):
        _library.built_for(library(tmp_path, **built_for))


def test_of_cuda_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ImportError, match=r"with CUDA 13, .* PyTorch 2.13.1\+cu130 without CUDA: "):
        _library.built_for(library(tmp_path, cuda="13"))


def test_of_another_python(tmp_path: Path) -> None:
    library(tmp_path, ".cpython-37m-x86_64-linux-gnu.so")
    python = EXTENSION_SUFFIXES[0].split(".")[1]
    words = rf"Python cpython-37m-x86_64-linux-gnu, .* but got Python {python}: .*{PIP}$"
    with pytest.raises(ImportError, match=words):
        _library.built_for(tmp_path)


def test_without_a_library(tmp_path: Path) -> None:
    (tmp_path / "_C.pyi").touch()
    with pytest.raises(ImportError, match=rf"in {tmp_path} but got none: build .* with {PIP}$"):
        _library.built_for(tmp_path)


def test_without_a_library_in_the_source_tree(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    words = r"`python setup.py build_ext --inplace` in .*, or import what is installed from outside"
    with pytest.raises(ImportError, match=words):
        _library.built_for(tmp_path / "maxunpool_cuda")


def test_without_a_record(tmp_path: Path) -> None:
    for record in library(tmp_path).glob("*.json"):
        record.unlink()
    words = rf"a record of .* {tmp_path}/_C\.[\w-]+\.json, but .* PyTorch 2.13.1\+cu130: .*{PIP}$"
    with pytest.raises(ImportError, match=words):
        _library.built_for(tmp_path)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_it_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """The library here is an empty file, which fails to load only where its record fits."""
    package = library(tmp_path / "maxunpool_cuda", torch="1.0")
    for source in _library.PACKAGE.glob("*.py"):
        (package / source.name).symlink_to(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import maxunpool_cuda"
    done = run(sys.executable, "-c", code)
    assert "ImportError: maxunpool_cuda: expected PyTorch 1.0" in done.stderr.splitlines()[-1]
    library(package, torch=".".join(torch.version.__version__.split(".")[:2]))
    done = run(sys.executable, "-c", code)
    assert "to load, as it was built for this PyTorch" in done.stderr.splitlines()[-1]


def test_pip_may_not_build_for_another_release(tmp_path: Path) -> None:
    """Stands in for the environment that pip makes for a build, with a PyTorch of the future."""
    folder = tmp_path / "pip-build-env-0" / "overlay"
    (folder / "torch" / "utils").mkdir(parents=True)
    (folder / "torch" / "utils" / "__init__.py").touch()
    extension = "class BuildExtension: ...\nCUDA_HOME = None"
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(extension)
    (folder / "torch" / "__init__.py").write_text("__version__ = '9.9.0+cu990'")
    done = run(sys.executable, "setup.py", "--version", PYTHONPATH=str(folder))
    installed = re.escape(torch.version.__version__.split("+")[0])
    words = rf"maxunpool_cuda: .*PyTorch {installed}\S*, .*builds for 9.9.0\+cu990, .*{PIP[:-19]}"
    assert re.fullmatch(words + ".*", done.stderr.splitlines()[-1])
    assert done.returncode != 0


def test_one_version() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    version = maxunpool_cuda.__version__.split("+")[0]  # a wheel's says more
    assert re.findall(r'^version = "(.+)"$', text, re.M) == [version]


@pytest.mark.slow
def test_the_source_archive_is_whole(tmp_path: Path) -> None:
    """All that git has, but for what only serves a repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    at = ("egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    done = run(sys.executable, "setup.py", "--quiet", *at)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert {name for name in tracked if name[0] != "."} <= names


def test_actions_are_pinned() -> None:
    """By digest, with the release beside it; and a workflow may read, unless it says more."""
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert workflows
    for workflow in workflows:
        text = workflow.read_text()
        used = re.findall(r"uses: (.*)", text)
        assert used
        assert [use for use in used if not re.fullmatch(r"\S+@[0-9a-f]{40} # v\d.*", use)] == []
        assert "\npermissions:\n  contents: read\n" in text
        assert "\nconcurrency:\n" in text
