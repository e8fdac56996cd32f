# SPDX-License-Identifier: BSD-3-Clause
"""Which kernels are built, which of them are loaded, and what import refuses."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import machinery
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import HAS_LIBRARY, needs_library

import maxunpool_cuda
from maxunpool_cuda import _fallback, _library

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))  # last: wheel.py there must not hide the package of that name

import gpu  # noqa: E402

PY = machinery.EXTENSION_SUFFIXES[0].split(".")[1]
LIBRARY = f"package/_C.{PY}.so"
Patch = pytest.MonkeyPatch


def refused(package: Path, words: str) -> None:
    with pytest.raises(ImportError, match=rf"^maxunpool_cuda: expected .*{re.escape(words)}"):
        _library.has_library(package)


@pytest.mark.parametrize(
    ("file", "version", "words"),
    [
        ("package/any", "2.10.0", "its compiled library in {package} but got none: build it"),
        (
            "package/_C.cpython-37m.so",
            "2.10.0",
            f"Python cpython-37m, which its library was built for, but got Python {PY}: build it",
        ),
        ("setup.py", "2.10.0", "build_ext --inplace` in the source tree, or install it and leave"),
        (LIBRARY, "2.9.1+cpu", "PyTorch 2.10 or later but got 2.9.1+cpu"),
        (LIBRARY, "1.13.1", "PyTorch 2.10 or later but got 1.13.1"),
    ],
    ids=["no library", "another Python", "a source tree", "PyTorch 2.9", "PyTorch 1.13"],
)
def test_what_import_refuses(
    file: str, version: str, words: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / file).touch()
    monkeypatch.setattr(torch, "__version__", version)
    refused(package, words.format(package=package))


@pytest.mark.parametrize("here", ["", "clone"])
def test_the_source_tree_hides_an_installed_copy(
    here: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The first entry of the path is empty for `python -c`, and of a script its folder."""
    source, site = tmp_path / "clone" / "maxunpool_cuda", tmp_path / "site-packages"
    installed = site / "maxunpool_cuda"
    for package in (source, installed):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (installed / f"_C.{PY}.so").touch()
    (source.parent / "setup.py").touch()
    monkeypatch.chdir(source.parent)
    monkeypatch.setattr(sys, "path", [here and str(tmp_path / here), str(site)])
    leave = f"leave {source.parent} (`cd ..`), as Python imports the source there instead of"
    build = "build it anew with `python setup.py build_ext --inplace`"
    refused(source, f"but got none: {leave} the installed {installed}, or {build}")


def test_releases_have_many_names() -> None:
    """Such as those in NVIDIA's containers."""
    assert _library.release_of("2.10.0a0+b4e4ee8.nv25.12") == (2, 10)
    assert _library.release_of("2.16.0.dev2026") == (2, 16)


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
    got = f"PyTorch {torch.__version__} {theirs}"
    assert info["note"] == f"no CUDA kernels: expected PyTorch with CUDA 13 but got {got}"
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


def toolkit(home: Path, version: str, capabilities: str = "75 80 90 100 103 120") -> None:
    """A CUDA toolkit with nothing but an nvcc that tells what it can do."""
    lists = f"printf 'compute_%s\\n' {capabilities}"
    tells = f"echo Cuda compilation tools, release {version}, V{version}.131"
    cases = f"--version) {tells} ;; --list-gpu-arch) {lists} ;;"
    program(home / "bin" / "nvcc", f'case "$1" in {cases} esac')


class Machine(NamedTuple):
    """What setup.py finds, with a PyTorch 9.9.0."""

    cuda: str | None = "13.0"  # of PyTorch
    home: str | None = None  # the release of the toolkit that CUDA_HOME names; "": without an nvcc
    beside: str | None = "13.2"  # the release of the toolkit beside PyTorch
    knows: str = "75 80 90 100 103 120"  # what the latter compiles for
    gpus: Any = ()  # pairs of a compute capability and a name; None: nobody may look
    variables: str = ""
    path: str | None = None  # where programs are
    platform: str = "linux"

    def install(self, folder: Path, patch: Patch) -> None:
        patch.setattr(torch, "__version__", "9.9.0")
        patch.setattr(torch, "__file__", str(folder / "torch/__init__.py"))
        patch.setattr(torch.version, "cuda", self.cuda)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.gpus))
        patch.setattr(torch.cuda, "get_device_capability", lambda i: self.gpus[i][0])
        patch.setattr(torch.cuda, "get_device_name", lambda i: self.gpus[i][1])
        patch.setattr(sys, "platform", self.platform)
        which = shutil.which
        patch.setattr(shutil, "which", lambda name, **_: name != "nvcc" and which(name))
        asked = ("FORCE_CUDA", "FORCE_CPU", "FORCE_FALLBACK", "DEBUG", "LINEINFO", "CXX")
        for name in (*asked, "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
            patch.delenv(name, raising=False)
        for name, value in (pair.split("=") for pair in self.variables.split()):
            patch.setenv(name, value)
        if self.path is not None:
            patch.setenv("PATH", self.path)
        if self.home is not None:
            patch.setenv("CUDA_HOME", f"{folder}/cuda")
        if self.home:
            toolkit(folder / "cuda", self.home)
        if self.beside:
            toolkit(folder / "nvidia/cu13", self.beside, self.knows)


def outcome() -> str:
    """What setup.py would build for, with which toolkit; what it leaves out; or its error."""
    functions = runpy.run_path(str(ROOT / "setup.py"))
    try:
        if note := functions["why_fallback"]():
            return note
        planned = functions["plan"]()
        functions["chosen_build"](planned)
    except SystemExit as error:
        return str(error)
    if planned.toolkit is None:
        return planned.note
    return f"{planned.toolkit.home} for {planned.arch_list}. {planned.note}"


ALL = "{beside} for 7.5;8.0;9.0;10.0;12.0+PTX. "
H100, V100, L4, GB10 = ((9, 0), "H100"), ((7, 0), "V100"), ((8, 9), "L4"), ((12, 1), "GB10")
TOO_OLD = "no kernels for V100 (compute capability 7.0): this nvcc has them from 7.5 on"
UNFIT = "no CUDA kernels: expected a CUDA 13 toolkit but got "
PIP = ': `pip install "cuda-toolkit[nvcc,cccl,cudart]==13.*"` installs one beside PyTorch'
NO_COMPILER = "no kernels: expected a C++ compiler but got none"
OUTCOMES = {
    "no GPU": (Machine(), ALL),
    "CUDA_HOME comes first": (Machine(home="13.0", gpus=[H100]), "{home} for 9.0. "),
    "one toolkit does not fit": (Machine(home="12.4"), ALL),
    "an older nvcc": (Machine(knows="50 75 80 86 90"), "{beside} for 7.5;8.0;9.0+PTX. "),
    "GPUs later than nvcc": (Machine(gpus=[GB10, L4]), "{beside} for 8.0+PTX;12.0+PTX. "),
    "one GPU too old": (Machine(gpus=[H100, V100]), f"{{beside}} for 9.0. {TOO_OLD}"),
    "GPUs are given": (
        Machine(gpus=None, variables="TORCH_CUDA_ARCH_LIST=8.0"),
        "{beside} for 8.0. ",
    ),
    "for another environment": (Machine(cuda=None, variables="FORCE_CUDA=1"), ALL),
    "each GPU too old": (
        Machine(gpus=[V100]),
        f"no CUDA kernels: expected a GPU that nvcc 13.2.131 compiles for but got {TOO_OLD}",
    ),
    "another PyTorch": (
        Machine(cuda="12.8"),
        "no CUDA kernels: expected PyTorch with CUDA 13 but got PyTorch 9.9.0 with CUDA 12.8",
    ),
    "a PyTorch for the CPU": (
        Machine(cuda=None),
        "no CUDA kernels: expected PyTorch with CUDA 13 but got PyTorch 9.9.0 without CUDA",
    ),
    "no toolkit": (Machine(beside=None), f"{UNFIT}no nvcc in {{beside}}{PIP}"),
    "no nvcc": (
        Machine(home="", beside="14.0"),
        f"{UNFIT}no nvcc in {{home}} and CUDA 14.0.131 in {{beside}}{PIP}",
    ),
    "FORCE_CPU=1": (
        Machine(gpus=None, variables="FORCE_CPU=1"),
        "no CUDA kernels, as FORCE_CPU=1 says",
    ),
    "FORCE_FALLBACK=1": (
        Machine(variables="FORCE_FALLBACK=1"),
        "no kernels, as FORCE_FALLBACK=1 says",
    ),
    "no Linux": (Machine(platform="win32"), "no kernels: expected Linux but got win32"),
    "no compiler": (Machine(path=""), NO_COMPILER),
    "a compiler that is named, but is not there": (Machine(path="", variables="CXX=g++-99"), ALL),
    "no compiler, for CPU kernels": (
        Machine(path="", variables="FORCE_CPU=1"),
        f"maxunpool_cuda: expected kernels, as FORCE_CPU=1 says, but got {NO_COMPILER}",
    ),
    "for the CPU alone and for CUDA": (
        Machine(variables="FORCE_CPU=1 FORCE_CUDA=1"),
        "maxunpool_cuda: expected FORCE_CPU=1 or FORCE_CUDA=1 but got both",
    ),
    "for a debugger and a profiler": (
        Machine(variables="DEBUG=1 LINEINFO=1"),
        "maxunpool_cuda: expected DEBUG=1 or LINEINFO=1 but got both: a build with DEBUG=1 has "
        "line numbers, too",
    ),
    "for a profiler of no kernels": (
        Machine(variables="LINEINFO=1 FORCE_CPU=1"),
        "maxunpool_cuda: expected CUDA kernels, whose lines LINEINFO=1 asks for, but got no CUDA "
        "kernels, as FORCE_CPU=1 says",
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_is_built(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """A build that has to have CUDA kernels fails where another leaves them out."""
    machine, expected = OUTCOMES[name]
    machine.install(tmp_path, monkeypatch)
    expected = expected.format(home=f"{tmp_path}/cuda", beside=f"{tmp_path}/nvidia/cu13")
    assert outcome() == expected
    if machine.cuda and expected.startswith("no CUDA kernels: "):
        monkeypatch.setenv("FORCE_CUDA", "1")
        words = expected.removeprefix("no CUDA kernels: ")
        assert outcome() == f"maxunpool_cuda: {words} (FORCE_CUDA=1 asks for CUDA kernels)"


def test_a_toolkit_on_path_comes_first(tmp_path: Path, monkeypatch: Patch) -> None:
    """Where its nvcc is a script, the toolkit that nvcc itself names is taken."""
    Machine(gpus=[H100]).install(tmp_path, monkeypatch)
    behind = tmp_path / "cuda-13.0"
    toolkit(behind, "13.0")
    names_it = f'test "$1" != --dryrun || echo "#$ TOP={behind}/bin/.." >&2'
    nvcc = program(tmp_path / "local/bin/nvcc", f"{names_it}\nexec {behind}/bin/nvcc $@")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: str(nvcc))
    assert outcome() == f"{behind} for 9.0. "


SMI_FAILS = 'echo "NVIDIA-SMI has failed because it could not communicate with the driver."; exit 9'


def smi(driver: str) -> str:
    """A script in place of nvidia-smi, for one GPU."""
    return f'case "$1" in -L) echo "GPU 0: A Card (UUID: GPU-1)" ;; *) echo {driver} ;; esac'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "variables", "words"),
    [
        ("570.86.15", "", "needs driver 580 or later, but got driver 570.86.15: update the driver"),
        ("580.65.06", "", "but got none, with driver 580.65.06: `python -c"),
        ("580.65.06", "CUDA_VISIBLE_DEVICES=", "but got none, with CUDA_VISIBLE_DEVICES=''"),
    ],
    ids=["old driver", "unknown reason", "hidden"],
)
def test_why_pytorch_does_not_see_a_gpu(
    driver: str, variables: str, words: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program(tmp_path / "nvidia-smi", smi(driver))
    Machine(variables=variables, path=str(tmp_path)).install(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert words in gpu.hidden_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.hidden_gpu() == ""


@pytest.mark.slow
def test_nvcc_is_installed_where_it_is_missing(tmp_path: Path, monkeypatch: Patch) -> None:
    """By pip, beside PyTorch. If it cannot, make stops."""
    program(tmp_path / "nvidia-smi", SMI_FAILS)
    Machine(beside=None).install(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", "exit 1")))
    with pytest.raises(SystemExit, match="installs one beside PyTorch; CUDA=0 leaves out the CUDA"):
        gpu.main()
    toolkit(tmp_path / "downloaded", "13.2")
    moves = f"mkdir {tmp_path}/nvidia && mv {tmp_path}/downloaded {tmp_path}/nvidia/cu13"
    program(tmp_path / "python", f'test "$2 $6" = "pip {gpu.SETUP["PIP_TOOLKIT"]}" && {moves}')
    gpu.main()


# In place of Python, and of that in the environment that it makes: says which kernels it is to
# build and what it is to run, and fails where the file "broken" says.
PYTHON = """
echo "ran $FORCE_CPU$FORCE_CUDA$FORCE_FALLBACK $*"
test "$2" = venv && mkdir -p $3/bin && cp {folder}/python3 $3/bin/python
case "$*" in "$(cat {folder}/broken)"*) exit 1 ;; *) exit 0 ;; esac
"""
VENV, TORCH, GPU, DEMO = "-m venv", "ninja numpy", "tools/gpu.py", "examples/segnet_mri.py"
CPU, CUDA, NONE, WHEEL = r"^10 .* \.\[demo]", r"^01 .* \.\[demo]", r"^001 .* \.\[demo]", "whl.demo]"


class Make:
    """make demo, with stubs of all that it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.breaks_at("nowhere")
        self.sees_gpu(True)
        program(folder / "python3", PYTHON.format(folder=folder))

    def breaks_at(self, command: str) -> None:
        (self.folder / "broken").write_text(command)

    def sees_gpu(self, is_there: bool) -> None:
        program(self.folder / "nvidia-smi", smi("580.65") if is_there else SMI_FAILS)

    def runs(self, given: str = "") -> list[str]:
        """What it ran, in order, of the steps that depend on the machine."""
        command = ["make", "demo", f"VENV={self.folder / 'venv'}", *given.split()]
        path = {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=ROOT, env=path, text=True, capture_output=True)
        steps = (VENV, TORCH, GPU, CPU, CUDA, NONE, WHEEL, DEMO)
        lines = re.findall("^ran (.*)", done.stdout, re.M)
        return [step for line in lines for step in steps if re.search(step, line)]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "has_gpu", "kernels"),
    [
        ("", False, CPU),
        ("", True, CUDA),
        ("CUDA=0", True, CPU),
        ("CUDA=1 FORCE_CPU=1", False, CUDA),
        ("FORCE_CPU=1", True, CPU),
        ("FORCE_CUDA=1", False, CUDA),
        ("FALLBACK=1 CUDA=1", True, NONE),
    ],
    ids=lambda value: str(value) if value not in (CPU, CUDA, NONE) else "",
)
def test_kernels_that_make_builds(given: str, has_gpu: bool, kernels: str, make: Make) -> None:
    """An nvidia-smi that fails is no GPU."""
    make.sees_gpu(has_gpu)
    expected = [VENV, TORCH, GPU, CUDA, DEMO] if kernels == CUDA else [VENV, TORCH, kernels, DEMO]
    assert make.runs(given) == expected


@pytest.mark.slow
def test_what_make_does_anew(make: Make) -> None:
    """A build for no GPU was for others, and PyTorch may not see the GPU that appears."""
    (make.folder / "any.whl").touch()
    of_the_wheel = f"WHEEL={make.folder}/any.whl"
    make.sees_gpu(False)
    assert make.runs("CUDA=1") == [VENV, TORCH, GPU, CUDA, DEMO]
    assert make.runs("CUDA=1") == [DEMO]
    make.sees_gpu(True)
    assert make.runs() == [GPU, CUDA, DEMO]
    assert make.runs(of_the_wheel) == [WHEEL, DEMO]
    assert make.runs(of_the_wheel) == [DEMO]
    assert make.runs("CUDA=0") == [CPU, DEMO]
    assert make.runs("CUDA=0 TORCH=torch==2.13.0") == [TORCH, CPU, DEMO]


@pytest.mark.slow
@pytest.mark.parametrize("step", [VENV, GPU])
def test_make_stops_where_a_step_fails(step: str, make: Make) -> None:
    """On each try. An environment made by half is made anew."""
    make.breaks_at(step)
    assert make.runs()[-1] == step
    assert make.runs() == [step]
    if step == GPU:
        assert make.runs("CUDA=0") == [CPU, DEMO]
        assert make.runs() == [step]  # not taken for built
    make.breaks_at("nowhere")
    assert make.runs()[0] == step
    assert make.runs() == [DEMO]
