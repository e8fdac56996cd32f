# SPDX-License-Identifier: BSD-3-Clause
"""Which kernels are built, which of them are loaded, and what import refuses."""

import dataclasses
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import machinery
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HAS_LIBRARY, needs_library
from torch.utils import cpp_extension

import maxunpool_cuda
from maxunpool_cuda import _fallback, _library

ROOT = Path(__file__).parent.parent
SETUP = ROOT / "setup.py"
PY = machinery.EXTENSION_SUFFIXES[0].split(".")[1]
Patch = pytest.MonkeyPatch


def library(folder: Path, python: str = PY) -> Path:
    """An empty file in place of a library for a Python."""
    folder.mkdir(exist_ok=True)
    (folder / f"_C.{python}.so").touch()
    return folder


def refused(package: Path, words: str) -> None:
    with pytest.raises(ImportError, match=rf"^maxunpool_cuda: expected .*{re.escape(words)}"):
        _library.has_library(package)


def test_no_library(tmp_path: Path) -> None:
    refused(tmp_path, f"its compiled library in {tmp_path} but got none: build it")


def test_a_library_for_another_python(tmp_path: Path) -> None:
    words = f"Python cpython-37m, which its library was built for, but got Python {PY}: build it"
    refused(library(tmp_path, "cpython-37m"), words)


def test_a_source_tree_without_a_library(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    refused(tmp_path / "any", "build_ext --inplace` in the source tree, or install it and leave")


def test_the_source_tree_hides_an_installed_copy(tmp_path: Path, monkeypatch: Patch) -> None:
    """After `pip install .` in the source tree the message first says to leave it."""
    source, site = tmp_path / "clone/maxunpool_cuda", tmp_path / "site-packages"
    installed = site / "maxunpool_cuda"
    for package in (source, installed):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (source.parent / "setup.py").touch()
    monkeypatch.chdir(source.parent)
    leave = f"leave {source.parent} (`cd ..`), as Python imports the source there instead of"
    build = "build it anew with `python setup.py build_ext --inplace`"
    for here in ("", str(source.parent)):  # the first entry for `python -c`, and for a script
        monkeypatch.setattr(sys, "path", [here, str(site)])
        refused(source, f"but got none: {build}")
        library(installed)
        refused(source, f"but got none: {leave} the installed {installed}, or {build}")
        (installed / f"_C.{PY}.so").unlink()


@pytest.mark.parametrize("version", ["2.10.0+cu128", "2.10.0a0+b4e4ee8.nv25.12", "2.16.0.dev2026"])
def test_releases_that_a_library_fits(version: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """All from 2.10 on, pre-releases too, such as those in NVIDIA's containers."""
    monkeypatch.setattr(torch, "__version__", version)
    assert _library.has_library(library(tmp_path))


@pytest.mark.parametrize("version", ["2.9.1+cpu", "1.13.1"])
def test_a_release_that_is_too_old(version: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    refused(library(tmp_path), f"PyTorch 2.10 or later but got {version}")


@pytest.fixture
def cuda_library(monkeypatch: Patch) -> list[str]:
    """In place of the library one with CUDA kernels, for CUDA 13. The files that it loads."""
    loaded: list[str] = []
    facts = {"cuda": True, "cuda_version": "13.0", "kernels": "cpu and cuda", "note": ""}
    stub = SimpleNamespace(
        build_info=lambda: dict(facts),
        load=lambda path: loaded.append(Path(path).name),
        version=_library.version,
    )
    monkeypatch.setitem(sys.modules, "maxunpool_cuda._C", stub)
    monkeypatch.setattr(_library, "has_library", lambda: True)
    for name in ("_C", "_note", "version"):  # load() sets them
        monkeypatch.setattr(_library, name, getattr(_library, name))
    return loaded


def test_cuda_kernels_for_the_cuda_of_pytorch(cuda_library: list[str], monkeypatch: Patch) -> None:
    """Those for 13.0 serve all of CUDA 13."""
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    _library.load()
    assert cuda_library == ["_cpu_kernels.so", "_cuda_kernels.so"]
    assert _library.build_info()["kernels"] == "cpu and cuda"


@pytest.mark.parametrize(("cuda", "theirs"), [("12.8", "with CUDA 12.8"), (None, "without CUDA")])
def test_cuda_kernels_for_another_cuda(
    cuda: str | None, theirs: str, cuda_library: list[str], monkeypatch: Patch
) -> None:
    """The CPU kernels are loaded. The first call with CUDA tensors warns."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    _library.load()
    assert cuda_library == ["_cpu_kernels.so"]
    info = _library.build_info()
    assert (info["kernels"], info["cuda"], info["cuda_version"]) == ("cpu", False, None)
    assert info["note"] == (
        "no CUDA kernels: expected PyTorch with CUDA 13 but got "
        f"PyTorch {torch.__version__} {theirs}"
    )
    monkeypatch.setattr(_fallback, "_has_warned", False)
    with pytest.warns(UserWarning, match=f"as this build has {re.escape(info['note'])}: `pip "):
        _fallback._warn_of_cuda()


@needs_library
def test_a_library_that_does_not_load(monkeypatch: Patch) -> None:
    monkeypatch.delattr(maxunpool_cuda, "_C")
    monkeypatch.setitem(sys.modules, "maxunpool_cuda._C", None)
    words = f"to load with PyTorch {torch.__version__} but got: import of maxunpool_cuda._C halted"
    with pytest.raises(ImportError, match=re.escape(f"expected its compiled library {words}")):
        _library.load()


def setup_fails(words: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(f"maxunpool_cuda: {words}")):
        runpy.run_path(str(SETUP), run_name="__main__")


def setup_functions() -> dict[str, Any]:
    """What setup.py defines, for the PyTorch that it finds now. Nothing is built."""
    return runpy.run_path(str(SETUP))


def program(path: Path, script: str) -> Path:
    """A shell script in place of a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, version: str, capabilities: str = "75 80 90 100 103 120") -> Path:
    """A CUDA toolkit with nothing but an nvcc that tells what it can do."""
    lists = f"printf 'compute_%s\\n' {capabilities}"
    tells = f"echo Cuda compilation tools, release {version}, V{version}.131"
    cases = f"--version) {tells} ;; --list-gpu-arch) {lists} ;;"
    program(home / "bin" / "nvcc", f'case "$1" in {cases} esac')
    return home


@pytest.fixture
def cuda_13(tmp_path: Path, monkeypatch: Patch) -> Path:
    """PyTorch 9.9.0 with CUDA 13 in the folder returned; no GPU, no toolkit, no FORCE_ variable."""
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **kw: name != "nvcc" and which(name, **kw))
    paths = ("TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH")
    for name in ("FORCE_CUDA", "FORCE_CPU", "FORCE_FALLBACK", "DEBUG", "LINEINFO", *paths):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


PIP_LINE = '`pip install "cuda-toolkit[nvcc,cccl,cudart]==13.*"` installs one beside PyTorch'
# What is in the place where PyTorch looks for a toolkit, and what setup.py says about it.
UNFIT = {
    "no folder": (None, "got no nvcc in {beside}"),
    "a folder without nvcc": ("", "got no nvcc in {home} and no nvcc in {beside}"),
    "toolkit 12.4": ("12.4", "got CUDA 12.4.131 in {home} and no nvcc in {beside}"),
    "toolkit 14.0": ("14.0", "got CUDA 14.0.131 in {home} and no nvcc in {beside}"),
}


@pytest.mark.parametrize("found", UNFIT)
def test_toolkits_that_do_not_fit(found: str, cuda_13: Path, monkeypatch: Patch) -> None:
    """They fail a build that has to have CUDA kernels, and are the note of one that need not."""
    version, words = UNFIT[found]
    home, beside = cuda_13 / "cuda", cuda_13 / "nvidia/cu13"
    if version is not None:
        monkeypatch.setenv("CUDA_HOME", str(home))
    if version:
        toolkit(home, version)
    words = "expected a CUDA 13 toolkit but " + words
    words = words.format(home=home, beside=beside) + f": {PIP_LINE}"
    assert setup_functions()["plan"]() == (None, "", f"no CUDA kernels: {words}")
    monkeypatch.setenv("FORCE_CUDA", "1")
    setup_fails(f"{words} (FORCE_CUDA=1 asks for CUDA kernels)")
    toolkit(beside, "13.2")
    planned = setup_functions()["plan"]()
    assert planned == ((str(beside), "13.2.131"), "7.5;8.0;9.0;10.0;12.0+PTX", "")


def test_a_toolkit_on_path_comes_first(cuda_13: Path, monkeypatch: Patch) -> None:
    """Where its nvcc is a script, the toolkit that nvcc itself names is taken."""
    behind = toolkit(cuda_13 / "cuda-13.0", "13.0")
    wrapper = (
        f'test "$1" != --dryrun || echo "#$ TOP={behind}/bin/.." >&2\nexec {behind}/bin/nvcc $@'
    )
    nvcc = program(cuda_13 / "local/bin/nvcc", wrapper)
    toolkit(cuda_13 / "nvidia/cu13", "13.2")
    monkeypatch.setattr(shutil, "which", lambda name, **_: str(nvcc))
    assert setup_functions()["plan"]().toolkit == (str(behind), "13.0.131")
    monkeypatch.setenv("CUDA_HOME", str(cuda_13 / "local"))
    assert setup_functions()["plan"]().toolkit == (str(cuda_13 / "local"), "13.0.131")


def test_pytorch_of_another_cuda(cuda_13: Path, monkeypatch: Patch) -> None:
    """CUDA 13 kernels are of no use to it. With a PyTorch for the CPU, FORCE_CUDA=1 builds them."""
    toolkit(cuda_13 / "nvidia/cu13", "13.0")
    words = "expected PyTorch with CUDA 13 but got PyTorch 9.9.0"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert setup_functions()["plan"]() == (None, "", f"no CUDA kernels: {words} without CUDA")
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert setup_functions()["plan"]().toolkit == (str(cuda_13 / "nvidia/cu13"), "13.0.131")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    setup_fails(f"{words} with CUDA 12.8 (FORCE_CUDA=1 asks for CUDA kernels)")


def test_setup_looks_no_further_than_it_must(cuda_13: Path, monkeypatch: Patch) -> None:
    """FORCE_CPU=1 for no toolkit, TORCH_CUDA_ARCH_LIST for no GPU, whose context takes memory."""
    functions = setup_functions()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.delattr(torch.cuda, "device_count")
    toolkit(cuda_13 / "nvidia/cu13", "13.0")
    assert functions["plan"]().arch_list == "9.0"
    monkeypatch.setenv("FORCE_CPU", "1")
    monkeypatch.setitem(functions["plan"].__globals__, "find_toolkit", None)
    assert functions["plan"]() == (None, "", "no CUDA kernels, as FORCE_CPU=1 says")


WITHOUT_KERNELS = {
    "FORCE_FALLBACK=1": "no kernels, as FORCE_FALLBACK=1 says",
    "no compiler": "no kernels: expected a C++ compiler but got none",
    "no Linux": "no kernels: expected Linux but got win32",
}


@pytest.mark.parametrize("why", WITHOUT_KERNELS)
@pytest.mark.parametrize("asked", ["", "FORCE_CUDA", "FORCE_CPU", "DEBUG", "LINEINFO"])
def test_what_builds_no_kernels(why: str, asked: str, cuda_13: Path, monkeypatch: Patch) -> None:
    """A build that is asked for kernels fails instead."""
    monkeypatch.delenv("CXX", raising=False)
    if why == "FORCE_FALLBACK=1":
        monkeypatch.setenv("FORCE_FALLBACK", "1")
    elif why == "no compiler":
        monkeypatch.setenv("PATH", str(cuda_13))
    else:
        monkeypatch.setattr(sys, "platform", "win32")
    if asked:
        monkeypatch.setenv(asked, "1")
        setup_fails(f"expected kernels, as {asked}=1 says, but got {WITHOUT_KERNELS[why]}")
    else:
        assert setup_functions()["why_fallback"]() == WITHOUT_KERNELS[why]


def test_a_compiler_that_is_named_is_expected(cuda_13: Path, monkeypatch: Patch) -> None:
    """If it is not there, the build fails: nobody gets the slow form for a typing error."""
    monkeypatch.setenv("PATH", str(cuda_13))
    monkeypatch.setenv("CXX", "clang++-99")
    assert setup_functions()["why_fallback"]() == ""


# Per kind of build: the flags of the compilers and the linker that no other kind has.
OWN_FLAGS = {
    "": ({"-O3", "-g0"}, {"-O3", "-Xptxas=-warn-spills"}, {"-s"}),
    "DEBUG": ({"-O0", "-g", "-UNDEBUG"}, {"-O0", "-G", "-UNDEBUG"}, set()),
    "LINEINFO": ({"-O3", "-g0"}, {"-O3", "-Xptxas=-warn-spills", "-lineinfo"}, {"-s"}),
}


@pytest.mark.parametrize("asked", OWN_FLAGS)
def test_builds_for_debuggers_and_profilers(asked: str, cuda_13: Path, monkeypatch: Patch) -> None:
    """Each has its flags, so that ninja compiles everything again."""
    toolkit(cuda_13 / "nvidia/cu13", "13.0")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(cuda_13 / "nvidia/cu13"))  # for PyTorch
    if asked:
        monkeypatch.setenv(asked, "1")
    functions = setup_functions()
    planned = functions["plan"]()
    build = functions["chosen_build"](planned)
    made = functions["cuda_kernels"](build)
    flags = (
        {*made.extra_compile_args["cxx"]},
        {*made.extra_compile_args["nvcc"]},
        {*made.extra_link_args},
    )
    every = [set().union(*(kind[n] for kind in OWN_FLAGS.values())) for n in range(3)]
    assert (
        tuple(given & known for given, known in zip(flags, every, strict=True)) == OWN_FLAGS[asked]
    )
    facts = dict(functions["module"](planned, build).define_macros)
    note = json.loads(facts["BUILD_NOTE"])
    assert (
        note
        == {
            "": "",
            "DEBUG": "not optimized, as DEBUG=1 says",
            "LINEINFO": "kernels with line numbers, as LINEINFO=1 says",
        }[asked]
    )


def test_builds_that_contradict(cuda_13: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("LINEINFO", "1")
    setup_fails("expected CUDA kernels, whose lines LINEINFO=1 asks for, but got no CUDA kernels: ")
    monkeypatch.setenv("DEBUG", "1")
    setup_fails(
        "expected DEBUG=1 or LINEINFO=1 but got both: a build with DEBUG=1 has line numbers"
    )
    monkeypatch.delenv("LINEINFO")
    functions = setup_functions()
    planned = functions["plan"]()
    note = functions["note_of"](planned, functions["chosen_build"](planned))
    assert note == f"{planned.note}; not optimized, as DEBUG=1 says"
    monkeypatch.setenv("FORCE_CPU", "1")
    monkeypatch.setenv("FORCE_CUDA", "1")
    setup_fails("expected FORCE_CPU=1 or FORCE_CUDA=1 but got both")


# GPUs by compute capability, the list to build for them, and what is said of those left out.
V100 = "no kernels for V100 (compute capability 7.0): this nvcc has them from 7.5 on"
ARCH_LISTS: dict[str, tuple[dict[tuple[int, int], str], str, str]] = {
    "known": ({(12, 0): "RTX 5090", (9, 0): "H100"}, "9.0;12.0", ""),
    "later than nvcc": ({(12, 1): "GB10", (8, 9): "L4"}, "8.0+PTX;12.0+PTX", ""),
    "too old": ({(7, 0): "V100"}, "", V100),
    "too old, beside another": ({(9, 0): "H100", (7, 0): "V100"}, "9.0", V100),
}


@pytest.mark.parametrize("gpus", ARCH_LISTS)
def test_architectures_of_this_machine(gpus: str, cuda_13: Path, monkeypatch: Patch) -> None:
    names, arch_list, note = ARCH_LISTS[gpus]
    capabilities = list(names)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", list(names.values()).__getitem__)
    home = toolkit(cuda_13 / "nvidia/cu13", "13.0")
    planned = setup_functions()["plan"]()
    if arch_list:
        assert planned == ((str(home), "13.0.131"), arch_list, note)
        return
    words = f"expected a GPU that nvcc 13.0.131 compiles for but got {note}"
    assert planned == (None, "", f"no CUDA kernels: {words}")
    monkeypatch.setenv("FORCE_CUDA", "1")
    setup_fails(words)


def test_an_older_toolkit_without_a_gpu(cuda_13: Path) -> None:
    """PTX is that of the last architecture which this nvcc knows."""
    toolkit(cuda_13 / "nvidia/cu13", "13.0", "50 75 80 86 89 90")
    assert setup_functions()["plan"]().arch_list == "7.5;8.0;9.0+PTX"


def smi(driver: str) -> str:
    """A script in place of nvidia-smi, for one GPU."""
    return f'case "$1" in -L) echo "GPU 0: A Card (UUID: GPU-1)" ;; *) echo {driver} ;; esac'


SMI_FAILS = 'echo "NVIDIA-SMI has failed because it could not communicate with the driver."; exit 9'
CPU, CUDA = "FORCE_CPU=1 FORCE_CUDA=0 ", "FORCE_CPU=0 FORCE_CUDA=1 "
NONE = "FORCE_CPU=0 FORCE_CUDA=0 FORCE_FALLBACK=1 "
# What make is given, and the kernels that it then builds without a GPU and with one.
KERNELS = {
    "": (CPU, CUDA),
    "CUDA=0": (CPU, CPU),
    "CUDA=1": (CUDA, CUDA),
    "CUDA=1 FORCE_CPU=1": (CUDA, CUDA),
    "FORCE_CPU=1": (CPU, CPU),
    "FORCE_CUDA=1": (CUDA, CUDA),
    "FALLBACK=1": (NONE, NONE),
    "FALLBACK=1 CUDA=1": (NONE, NONE),
}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("given", KERNELS)
def test_kernels_that_make_builds(given: str, gpu: bool, tmp_path: Path) -> None:
    """For demo, test and bench alike. An nvidia-smi that fails is no GPU."""
    program(tmp_path / "nvidia-smi", smi("580.65") if gpu else SMI_FAILS)
    kernels = KERNELS[given][gpu]
    command = ["make", "--dry-run", "demo", "bench", *given.split(), f"VENV={tmp_path / 'venv'}"]
    alone = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}  # no variables of another make
    output = subprocess.check_output(command, cwd=ROOT, env=alone, text=True)
    for extra in ("demo", "test"):
        assert re.search(
            rf'^{kernels}{tmp_path}/.* --no-build-isolation "\.\[{extra}\]"', output, re.M
        )
    assert ("tools/gpu.py" in output) == (kernels == CUDA)
    assert ("CUDA=1 builds them" in output) == (not given and not gpu)


@pytest.mark.parametrize("has_nvcc", [False, True])
def test_when_check_cuda_builds(has_nvcc: bool, tmp_path: Path) -> None:
    """CUDA kernels if there is an nvcc, also without a GPU, or if CUDA=1 asks for them."""
    program(tmp_path / "nvidia-smi", SMI_FAILS)
    if has_nvcc:
        toolkit(tmp_path, "13.0")
    folders = [tmp_path, tmp_path / "bin", *tools_without_nvcc(tmp_path / "tools")]
    alone = {"PATH": os.pathsep.join(map(str, folders))}
    for given, builds in ((), has_nvcc), (("CUDA=1",), True):
        command = ["make", "--dry-run", "check-cuda", *given]
        output = subprocess.check_output(command, cwd=ROOT, env=alone, text=True)
        assert (" dist/.wheel-1 CUDA=1 " in output) == builds


def tools_without_nvcc(folder: Path) -> list[Path]:
    """A folder with what the Makefile runs, and no nvcc."""
    folder.mkdir()
    for name in ("make", "sh", "grep", "ls", "head", "sed", "awk", "mkdir", "touch", "rm"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return [folder]


STUB_TORCH = """
import types
__version__ = {version!r}
version = types.SimpleNamespace(cuda={cuda!r})
cuda = types.SimpleNamespace(
    is_available=lambda: {sees_gpu},
    device_count=lambda: int({sees_gpu}),
    get_device_capability=lambda i: (9, 0),
    get_device_name=lambda i: "A Card",
)
"""
STUB_CPP_EXTENSION = "class BuildExtension: pass"
# Installs an nvcc, or builds: so much of it as depends on this machine. In a process of its own, as
# pip does: setuptools takes a process that has imported a module named pip for pip itself.
STUB_PIP = """
import pathlib, shutil, subprocess, sys
site, wanted = pathlib.Path(__file__).parents[1], sys.argv[-1]
if wanted.startswith("cuda-toolkit"):
    if not (site / "online").exists():
        sys.exit("ERROR: No matching distribution found for cuda-toolkit")
    shutil.copytree(site / "toolkit-13", site / "nvidia/cu13")
if ".whl[" in wanted:
    shutil.copy(wanted.split("[")[0], site / "maxunpool_cuda.py")
if wanted.startswith("."):
    done = subprocess.run([sys.executable, site / "build.py"])
    sys.exit(done.returncode)
"""
STUB_BUILD = """
import pathlib, runpy
planned = runpy.run_path("setup.py")["plan"]()
info = dict(cuda=planned.toolkit is not None, note=planned.note)
stub = pathlib.Path(__file__).with_name("maxunpool_cuda.py")
stub.write_text(f"build_info = lambda: {info}")
"""
# Runs Python with the stubs, and in place of the demo and the benchmarks says that they ran.
STUB_PYTHON = """
case "$*" in
    examples/* | "-m benchmarks"*) echo ran "$*" ;;
    *) PYTHONPATH={site} exec {python} "$@" ;;
esac
"""
STUB_VENV = """
mkdir -p {venv}/bin
ln -sf {python} {venv}/bin/python
printf '#!/bin/sh\\necho ran pytest\\n' > {venv}/bin/pytest && chmod +x {venv}/bin/pytest
test -e {site}/has-venv && exit
echo "ensurepip is not available: apt install python3-venv"
exit 1
"""


@dataclasses.dataclass
class Machine:
    """A machine with a GPU, on which make runs for real, with stubs of all that it calls."""

    folder: Path
    torch: str = "2.15.0+cu132"
    cuda: str = "13.2"
    driver: str = "580.65.06"
    home: str = "/no/toolkit"  # that CUDA_HOME names
    sees_gpu: bool = True

    def write(self) -> None:
        """The stubs, as they are now."""
        site = self.folder / "site"
        stubs = {
            "torch/__init__.py": STUB_TORCH.format(
                version=self.torch, cuda=self.cuda, sees_gpu=self.sees_gpu
            ),
            "torch/utils/__init__.py": "",
            "torch/utils/cpp_extension.py": STUB_CPP_EXTENSION,
            "pip/__init__.py": "",
            "pip/__main__.py": STUB_PIP,
            "build.py": STUB_BUILD,
            "online": "",
            "has-venv": "",
        }
        for name, text in stubs.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
        toolkit(site / "toolkit-13", "13.2")
        program(self.folder / "bin/nvidia-smi", smi(self.driver))
        python = program(
            self.folder / "bin/fake-python",
            STUB_PYTHON.format(site=site, python=sys.executable),
        )
        venv = STUB_VENV.format(venv=self.folder / "venv", python=python, site=site)
        program(self.folder / "bin/python3", venv)

    def make(self, *given: str) -> tuple[bool, str]:
        """Runs make demo, test and bench, each even if one before failed. The lines it prints."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        targets = ("demo", "test", "bench")
        command = ["make", "--keep-going", *targets, f"VENV={self.folder / 'venv'}", *given]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        variables = {"PATH": path, "CUDA_HOME": self.home}
        done = subprocess.run(command, cwd=ROOT, env=variables, text=True, **both)
        return done.returncode == 0, done.stdout

    def passes(self, *given: str, builds: str) -> str:
        """Runs make, whose targets all run, after a build: "CUDA", "CPU" or none, "". The lines."""
        passed, printed = self.make(*given)
        assert passed, printed
        built = {"True": "CUDA", "False": "CPU"}
        found = {built[cuda] for cuda in re.findall("Built: {'cuda': (True|False)", printed)}
        assert found == ({builds} if builds else set())
        assert_runs(printed, times=1)
        return printed

    def stops(self, *given: str, says: str) -> None:
        """Runs make, which says one sentence, builds nothing and runs nothing."""
        passed, printed = self.make(*given)
        assert not passed
        assert says in printed
        assert "Built:" not in printed
        assert "Traceback" not in printed
        assert_runs(printed, times=0)


def assert_runs(printed: str, times: int) -> None:
    for target in ("examples/segnet_mri.py", "pytest", "-m benchmarks"):
        assert printed.count(f"\nran {target}") == times, printed


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write()
    return made


INSTALLS = "Installing nvcc, since there is no CUDA 13 toolkit."
LEAVES_OUT = "; CUDA=0 leaves out the CUDA kernels\n"


def test_first_run_with_a_fitting_toolkit(machine: Machine) -> None:
    machine.home = str(toolkit(machine.folder / "cuda", "13.0"))
    machine.write()
    assert "Installing nvcc" not in machine.passes(builds="CUDA")
    machine.passes(builds="")


@pytest.mark.parametrize("found", UNFIT)
def test_first_run_without_a_fitting_nvcc(found: str, machine: Machine) -> None:
    """make installs one; pip alone builds for the CPU, and the note says why."""
    version, _ = UNFIT[found]
    home = machine.folder / "cuda"
    if version is not None:
        home.mkdir()
        machine.home = str(home)
    if version:
        toolkit(home, version)
    machine.write()
    assert INSTALLS in machine.passes(builds="CUDA")
    machine.passes(builds="")


def test_first_run_before_nvcc_is_installed(machine: Machine) -> None:
    """pip cannot install it; make stops, and builds once there is a toolkit."""
    (machine.folder / "site/online").unlink()
    machine.stops(says="ERROR: No matching distribution found for cuda-toolkit\nmaxunpool_cuda: ")
    machine.stops(says=f" no nvcc in {machine.folder}/site/nvidia/cu13: {PIP_LINE}{LEAVES_OUT}")
    machine.home = str(toolkit(machine.folder / "cuda", "13.0"))
    machine.write()
    assert "Installing nvcc" not in machine.passes(builds="CUDA")


def test_first_run_with_an_old_driver(machine: Machine) -> None:
    """It is said before a build, whatever the toolkit."""
    machine.driver, machine.sees_gpu = "570.86.15", False
    machine.write()
    machine.stops(
        says="maxunpool_cuda: expected PyTorch 2.15.0+cu132 to see the GPU that nvidia-smi lists, "
        f"which needs driver 580 or later, but got driver 570.86.15: update the driver{LEAVES_OUT}"
    )
    machine.passes("CUDA=0", builds="CPU")
    machine.stops(says="got driver 570.86.15")  # not taken for built
    machine.driver = "580.65.06"
    machine.write()
    machine.stops(says="got none, with driver 580.65.06: `python -c 'import torch; torch.zeros(1)")
    machine.stops("CUDA_VISIBLE_DEVICES=", says=f"with CUDA_VISIBLE_DEVICES=''{LEAVES_OUT}")


@pytest.mark.parametrize(("cuda", "theirs"), [("12.8", "with CUDA 12.8"), ("", "without CUDA")])
def test_first_run_with_a_pytorch_of_another_cuda(cuda: str, theirs: str, machine: Machine) -> None:
    """make says so, and builds for the CPU if it is told to."""
    machine.torch, machine.cuda, machine.sees_gpu = "2.10.0", cuda, bool(cuda)
    machine.home = str(toolkit(machine.folder / "cuda", "13.0"))
    machine.write()
    words = f"maxunpool_cuda: expected PyTorch with CUDA 13 but got PyTorch 2.10.0 {theirs}"
    machine.stops(says=words + LEAVES_OUT)
    machine.passes("CUDA=0", builds="CPU")


def test_first_run_for_the_cpu_on_a_machine_with_a_gpu(machine: Machine) -> None:
    assert "Installing nvcc" not in machine.passes("CUDA=0", builds="CPU")
    machine.passes("CUDA=0", builds="")
    machine.passes(builds="CUDA")


def test_a_wheel_in_place_of_a_build(machine: Machine) -> None:
    wheel = machine.folder / "any.whl"
    for version in ("first", "second"):
        wheel.write_text(f"build_info = lambda: dict(cuda=False, note={version!r})")
        assert version in machine.passes(f"WHEEL={wheel}", builds="CPU")
        machine.passes(f"WHEEL={wheel}", builds="")
        machine.passes(builds="CUDA")
    wheel.unlink()
    machine.stops(f"WHEEL={wheel}", says=f"No rule to make target '{wheel}'")


def test_first_run_without_python3_venv(machine: Machine) -> None:
    """An environment made by half is made anew, so that the second try says the same."""
    (machine.folder / "site/has-venv").unlink()
    for _ in range(2):
        machine.stops(says="ensurepip is not available: apt install python3-venv")
    (machine.folder / "site/has-venv").touch()
    machine.passes(builds="CUDA")


def test_a_gpu_that_appears_after_a_build(machine: Machine) -> None:
    """The build for no GPU was for others, and PyTorch may not see this one."""
    program(machine.folder / "bin/nvidia-smi", SMI_FAILS)
    machine.passes("CUDA=1", builds="CUDA")
    machine.sees_gpu = False
    machine.write()
    machine.stops(says="to see the GPU that nvidia-smi lists")
    machine.sees_gpu = True
    machine.write()
    machine.passes(builds="CUDA")


GPU, NO_KERNELS = "A Card", "the CPU (this build has no CUDA kernels)"


@pytest.mark.parametrize(
    ("asked", "sees_gpu", "kernels", "says"),
    [
        pytest.param(None, True, True, GPU, id="GPU"),
        pytest.param(None, True, False, NO_KERNELS, id="no kernels"),
        pytest.param(None, False, True, "the CPU (PyTorch sees no GPU)", id="no GPU"),
        pytest.param("cpu", True, True, "the CPU", id="asked for"),
    ],
)
def test_where_the_demo_runs(
    asked: str | None,
    sees_gpu: bool,
    kernels: bool,
    says: str,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("matplotlib", "nibabel", "rich"):
        pytest.importorskip(package, reason="only make demo and make test-all install it")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A Card")
    monkeypatch.setattr(maxunpool_cuda, "build_info", lambda: {"cuda": kernels})
    demo = runpy.run_path(str(ROOT / "examples/segnet_mri.py"))
    assert demo["choose_device"](asked).type == ("cuda" if says == GPU else "cpu")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == f"Training on {says}, with PyTorch {torch.__version__}."


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


def test_the_table_of_first_runs_names_tests_that_exist() -> None:
    text = (ROOT / "docs/testing.md").read_text()
    section = text.split("## What a first run meets")[1].split("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", section))
    assert len(named) > 5
    assert named - set(globals()) == set()
