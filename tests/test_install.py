# SPDX-License-Identifier: BSD-3-Clause
"""Which kernels are built, which of them are loaded, and what import refuses."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib import machinery, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools
import torch
from conftest import HAS_LIBRARY, needs_library

import maxunpool_cuda
from maxunpool_cuda import _library

ROOT = Path(__file__).parent.parent
PY = machinery.EXTENSION_SUFFIXES[0].split(".")[1]
Patch = pytest.MonkeyPatch


def refusal(package: Path) -> str:
    """What import says of a package that it refuses."""
    with pytest.raises(ImportError, match=r"^maxunpool_cuda: expected ") as error:
        _library.has_library(package)
    return str(error.value)


def test_what_import_refuses(tmp_path: Path, monkeypatch: Patch) -> None:
    """No library, one for another Python, and an old PyTorch."""
    way_out = ": `pip install --no-build-isolation .` in the source tree builds it"
    assert refusal(tmp_path).endswith(f"its compiled library in {tmp_path} but got none{way_out}")
    (tmp_path / "_C.cpython-37m.so").touch()
    expected = f"Python cpython-37m, which its library was built for, but got Python {PY}{way_out}"
    assert refusal(tmp_path).endswith(expected)
    (tmp_path / f"_C.{PY}.so").touch()
    assert _library.has_library(tmp_path)
    # Such names have releases in NVIDIA's containers. As text it would be later than 2.10.
    monkeypatch.setattr(torch, "__version__", "2.9.0a0+b4.nv25.12")
    assert refusal(tmp_path).endswith("PyTorch 2.10 or later but got 2.9.0a0+b4.nv25.12")


@pytest.mark.parametrize("place", ["current folder", "PYTHONPATH"])
@pytest.mark.parametrize("name", ["maxunpool_cuda", "maxunpool_cuda.functional"])
def test_in_a_source_tree_the_installed_copy_is_imported(
    name: str, place: str, tmp_path: Path
) -> None:
    """If nothing is built in the tree: the whole copy, and no file of the tree."""
    installed = Path(maxunpool_cuda.functional.__file__).parent
    source = tmp_path / "clone"
    files = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
    shutil.copytree(ROOT / "maxunpool_cuda", source / "maxunpool_cuda", ignore=files)
    code = f"""
import sys, {name}
modules = [module for name, module in sys.modules.items() if name.startswith("maxunpool_cuda")]
folders = {{module.__spec__.origin.rpartition("/")[0] for module in modules}}
print(maxunpool_cuda.build_info()["kernels"], maxunpool_cuda.__version__, *folders)
"""
    paths = [str(source)] * (place == "PYTHONPATH") + [str(installed.parent)]
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source if place == "current folder" else tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    kernels = maxunpool_cuda.build_info()["kernels"]
    assert told.strip() == f"{kernels} {maxunpool_cuda.__version__} {installed}"


@pytest.mark.parametrize(
    ("cuda", "files", "kernels", "note"),
    [
        ("13.2", ["_cpu_kernels.so", "_cuda_kernels.so"], "cpu and cuda", ""),
        ("12.8", ["_cpu_kernels.so"], "cpu", "no CUDA kernels: expected PyTorch with CUDA 13 but "),
    ],
)
def test_cuda_kernels_are_loaded_for_their_release_of_cuda(
    cuda: str, files: list[str], kernels: str, note: str, monkeypatch: Patch
) -> None:
    """Those for 13.0 serve all of CUDA 13."""
    loaded: list[str] = []
    stub = SimpleNamespace(
        build_info=lambda: {"cuda": True, "kernels": "cpu and cuda", "note": ""},
        load=lambda path: loaded.append(Path(path).name),
        version=_library.version,
    )
    monkeypatch.setitem(sys.modules, "maxunpool_cuda._C", stub)
    monkeypatch.setattr(_library, "has_library", lambda: True)
    for name in ("_C", "_note", "version"):  # load() sets them
        monkeypatch.setattr(_library, name, getattr(_library, name))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    _library.load()
    assert loaded == files
    info = _library.build_info()
    assert (info["kernels"], info["cuda"]) == (kernels, kernels != "cpu")
    assert info["note"].startswith(note)


@needs_library
def test_a_library_that_does_not_load(monkeypatch: Patch) -> None:
    monkeypatch.delattr(maxunpool_cuda, "_C")
    monkeypatch.setitem(sys.modules, "maxunpool_cuda._C", None)
    words = f"to load with PyTorch {torch.__version__} but got: import of maxunpool_cuda._C halted"
    with pytest.raises(ImportError, match=re.escape(f"expected its compiled library {words}")):
        _library.load()


def test_the_facts_of_a_build() -> None:
    info = maxunpool_cuda.build_info()
    if info["cuda"]:
        assert re.fullmatch(rf"{_library.CUDA_MAJOR}\.\d+", info["cuda_version"])
        assert info["nvcc_version"].startswith(info["cuda_version"] + ".")
    else:
        assert info["cuda_version"] is info["nvcc_version"] is None
        assert info["note"].startswith("no CUDA kernels" if HAS_LIBRARY else "no kernels")
    kernels = "cpu and cuda" if info["cuda"] else "cpu"
    assert info["kernels"] == (kernels if HAS_LIBRARY else "none")


def program(path: Path, script: str) -> Path:
    """A shell script in place of a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, version: str) -> None:
    """A CUDA toolkit with nothing but an nvcc that tells its version and its place."""
    tells = f"echo Cuda compilation tools, release {version}, V{version}.131"
    program(
        home / "bin/nvcc",
        f'case "$1" in --version) {tells} ;; *) echo "#$ _HERE_={home}/bin" ;; esac',
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A machine for setup.py: PyTorch 9.9.0 with CUDA 13, and neither a GPU nor a toolkit."""
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **_: name != "nvcc" and which(name))
    asked = ("FORCE_CUDA", "FORCE_CPU", "FORCE_FALLBACK", "DEBUG", "CPATH", "CXX")
    for name in (*asked, "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def outcome() -> str:
    """What setup.py would build for, with which toolkit; what it leaves out; or its error."""
    functions = runpy.run_path(str(ROOT / "setup.py"))
    try:
        note = functions["why_fallback"]()
        for lack in functions["lacks"](note):
            return f"lacks {lack}"
        if note:
            return str(note)
        found, arch_list, note = functions["plan"]()
    except SystemExit as error:
        return str(error)
    return f"{found.home} for {arch_list}" if found else str(note)


ALL = "7.5;8.0;9.0;10.0;12.0+PTX"
V100, L4, H100, LATER = (7, 0), (8, 9), (9, 0), (12, 2)
UNUSABLE = (
    "no CUDA kernels: expected a GPU of compute capability 7.5 or later but got older ones alone"
)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        pytest.param([], f"{{beside}} for {ALL}", id="none"),
        pytest.param([H100, H100], "{beside} for 9.0", id="two of a kind"),
        pytest.param([LATER, V100, L4], "{beside} for 8.9;12.1+PTX", id="one too old, one too new"),
        pytest.param([V100], UNUSABLE, id="each too old"),
    ],
)
def test_kernels_are_built_for_the_gpus_that_are_there(
    gpus: list[Any], expected: str, machine: Path, monkeypatch: Patch
) -> None:
    beside = machine / "nvidia/cu13"
    toolkit(beside, "13.2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i])
    assert outcome() == expected.format(beside=beside)


@pytest.mark.parametrize(("cuda", "theirs"), [("12.8", "with CUDA 12.8"), (None, "without CUDA")])
def test_cuda_kernels_need_pytorch_with_cuda_13(
    cuda: str | None, theirs: str, machine: Path, monkeypatch: Patch
) -> None:
    """With FORCE_CUDA=1 a PyTorch for the CPU builds them for another environment."""
    toolkit(machine / "nvidia/cu13", "13.2")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    words = f"expected PyTorch with CUDA 13 but got PyTorch 9.9.0 {theirs}"
    assert outcome() == f"no CUDA kernels: {words}"
    monkeypatch.setenv("FORCE_CUDA", "1")
    error = f"maxunpool_cuda: {words} (FORCE_CUDA=1 asks for CUDA kernels)"
    assert outcome() == (error if cuda else f"{machine}/nvidia/cu13 for {ALL}")


def test_variables_decide_without_a_look_at_gpus(machine: Path, monkeypatch: Patch) -> None:
    toolkit(machine / "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", None)
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert outcome() == f"{machine}/cuda for 8.0"
    monkeypatch.setenv("FORCE_CPU", "1")
    assert outcome() == "no CUDA kernels, as FORCE_CPU=1 says"
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert outcome() == "maxunpool_cuda: expected FORCE_CPU=1 or FORCE_CUDA=1 but got both"


def test_the_first_toolkit_that_fits_is_taken(machine: Path, monkeypatch: Patch) -> None:
    """Where nvcc is a script, that is the toolkit of the nvcc that it runs."""
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    beside = machine / "nvidia/cu13"
    toolkit(beside, "14.0")
    why = f"a CUDA 13 toolkit but got no nvcc in {machine}/cuda and CUDA 14.0.131 in {beside}: `pip"
    assert outcome().startswith(f"no CUDA kernels: expected {why} install ")
    toolkit(machine / "cuda", "12.4")
    toolkit(beside, "13.2")
    assert outcome() == f"{beside} for {ALL}"
    toolkit(machine / "cuda", "13.0")
    assert outcome() == f"{machine}/cuda for {ALL}"
    monkeypatch.delenv("CUDA_HOME")
    nvcc = program(machine / "local/bin/nvcc", f"exec {machine}/cuda/bin/nvcc $@")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: str(nvcc))
    assert outcome() == f"{machine}/cuda for {ALL}"


def test_systems_without_kernels(machine: Path, monkeypatch: Patch) -> None:
    assert outcome().startswith("no CUDA kernels: expected a CUDA 13 toolkit but got no nvcc")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert outcome() == "no kernels: expected Linux but got darwin"
    for name in ("DEBUG", "FORCE_CPU"):
        monkeypatch.setenv(name, "1")
        expected = f"maxunpool_cuda: expected kernels, as {name}=1 says, but got no kernels: "
        assert outcome().startswith(expected)
        monkeypatch.delenv(name)
    monkeypatch.setenv("FORCE_FALLBACK", "1")
    assert outcome() == "no kernels, as FORCE_FALLBACK=1 says"


def test_what_a_build_lacks_is_said_before_it_compiles(machine: Path, monkeypatch: Patch) -> None:
    or_without = "brings it on Debian and Ubuntu; FORCE_FALLBACK=1 builds without kernels"
    find_spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: name != "pybind11" and find_spec(name))
    assert outcome() == "lacks pybind11 but got none: `pip install pybind11` brings it"
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(machine))
    headers = f"lacks Python.h but got none in {machine}: `apt install python3-dev` {or_without}"
    assert outcome() == headers
    monkeypatch.setenv("PATH", "")
    assert outcome() == f"lacks a C++ compiler but got none: `apt install g++` {or_without}"
    monkeypatch.setenv("FORCE_FALLBACK", "1")
    assert outcome() == "no kernels, as FORCE_FALLBACK=1 says"
    monkeypatch.setattr(setuptools, "__version__", "66.1.1")
    assert outcome().startswith("lacks setuptools 77 or later but got 66.1.1: `pip install ")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert outcome().startswith("lacks PyTorch 2.10 or later but got 2.9.1: `pip install ")
