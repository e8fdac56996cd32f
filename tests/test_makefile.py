"""Which kernels make builds, and what it hands to the tests. Nothing is built."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CPU, CUDA, EITHER = "FORCE_CPU=1 FORCE_CUDA=0 ", "FORCE_CPU=0 FORCE_CUDA=1 ", ""
LEFT_OUT = "no GPU is visible here: make test CUDA=1 builds them"


def commands(folder: Path, *given: str, gpu: bool = False) -> str:
    """What `make test` would do with a new virtual environment. FORCE_... are no arguments."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + ("echo GPU 0: of any name" if gpu else "exit 9"))
    program.chmod(0o755)
    # What the make that runs the tests was given.
    ours = ("CUDA", "FORCE_CPU", "FORCE_CUDA", "SEED", "TORCH", "MAKEFLAGS", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= dict(each.split("=") for each in given if each.startswith("FORCE"))
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    arguments = [each for each in given if not each.startswith("FORCE")]
    command = ["make", "--dry-run", "test", f"VENV={folder / 'venv'}", *arguments]
    return subprocess.check_output(command, cwd=ROOT, env=environment, text=True)


@pytest.mark.parametrize(
    ("given", "gpu", "kernels"),
    [
        ([], False, CPU),
        ([], True, EITHER),
        (["CUDA=1"], False, CUDA),
        (["CUDA=0"], True, CPU),
        (["FORCE_CUDA=1"], False, CUDA),
        (["FORCE_CPU=1"], True, CPU),
        (["CUDA=1", "FORCE_CPU=1"], False, CUDA),
    ],
    ids=str,
)
def test_kernels(given: list[str], gpu: bool, kernels: str, tmp_path: Path) -> None:
    output = commands(tmp_path, *given, gpu=gpu)
    (build,) = [line for line in output.splitlines() if "--no-build-isolation" in line]
    assert build.startswith(f"{kernels}{tmp_path}")
    # Said where nobody decided.
    assert (LEFT_OUT in output) == (not given and not gpu)


def test_other_kernels_are_built_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in (".torch-torch", ".cuda-0", ".test"):
        (venv / name).touch()
    assert "--no-build-isolation" not in commands(tmp_path)
    for other in ("CUDA=1", "TORCH=torch==2.11.0"):
        assert "--no-build-isolation" in commands(tmp_path, other)


def test_the_workflow_makes_every_check() -> None:
    """One list: what CI calls are targets, and none of the checks is forgotten."""
    makefile = (ROOT / "Makefile").read_text()
    (checks,) = re.findall(r"^CHECKS := (.+)$", makefile, re.M)
    workflows = ROOT / ".github" / "workflows"
    called = set(re.findall(r"\b(?:check-\w+|lint)\b", (workflows / "ci.yml").read_text()))
    assert called == set(checks.split())
    for name, targets in ("nightly", ["check-nightly"]), ("wheels", ["wheel", "wheel-check"]):
        found = re.findall(r"run: make ([\w-]+)", (workflows / f"{name}.yml").read_text())
        assert found == targets
        called |= set(found)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in called)
    entry = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (.+)$", entry, re.M) == ["test", "checks"]
