"""Which kernels make builds, and what CI runs. Nothing is built."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CPU, CUDA, EITHER = "FORCE_CPU=1 FORCE_CUDA=0 ", "FORCE_CPU=0 FORCE_CUDA=1 ", ""


def make_test(folder: Path, *arguments: str, gpu: bool = False) -> str:
    """What `make test` would do, with a virtual environment in the folder."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{'echo a GPU' if gpu else 'exit 9'}")
    program.chmod(0o755)
    # The make that runs the tests may have set these.
    theirs = ("CUDA", "FORCE_CPU", "FORCE_CUDA", "SEED", "TORCH", "MAKEFLAGS", "MAKEOVERRIDES")
    kept = {name: value for name, value in os.environ.items() if name not in theirs}
    kept["PATH"] = f"{folder}{os.pathsep}{kept['PATH']}"
    command = ["make", "--dry-run", "test", *arguments, f"VENV={folder / 'venv'}"]
    return subprocess.check_output(command, cwd=ROOT, env=kept, text=True)


@pytest.mark.parametrize(
    ("given", "gpu", "kernels"),
    [
        ([], False, CPU),
        ([], True, EITHER),
        (["CUDA=1", "FORCE_CPU=1"], False, CUDA),
        (["CUDA=0"], True, CPU),
        (["FORCE_CUDA=1"], False, EITHER),
    ],
)
def test_kernels(given: list[str], gpu: bool, kernels: str, tmp_path: Path) -> None:
    """EITHER leaves the choice to setup.py."""
    output = make_test(tmp_path, *given, gpu=gpu)
    (build,) = [line for line in output.splitlines() if "--no-build-isolation" in line]
    assert build.startswith(f"{kernels}{tmp_path}")
    assert ("CUDA=1 builds them" in output) == (not given and not gpu)


def test_other_kernels_are_built_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in (".torch-torch", ".kernels-0--", ".test"):
        (venv / name).touch()
    assert "--no-build-isolation" not in make_test(tmp_path)
    for other in ("CUDA=1", "TORCH=torch==2.8.0"):
        assert "--no-build-isolation" in make_test(tmp_path, other)


def test_ci_runs_every_check() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (checks,) = re.findall(r"^CHECKS := (.+)$", makefile, re.M)
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        called |= set(re.findall(r"\b(?:lint|check-\w+)\b|(?<=run: make )[\w-]+", text))
        # A workflow may only read, unless it says more. Actions are pinned by digest.
        assert "\npermissions:\n  contents: read\n" in text
        assert "\nconcurrency:\n" in text
        pinned = re.findall(r"uses: \S+@[0-9a-f]{40} # v\d", text)
        assert len(pinned) == text.count("uses: ") > 0
    assert called == {*checks.split(), "check-nightly", "docs", "wheel", "wheel-check"}
    assert [name for name in called if not re.search(rf"^{name}:", makefile, re.M)] == []
    assert (ROOT / ".ci" / "run").read_text().endswith("\nmake test\nmake checks\n")
