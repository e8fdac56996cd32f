"""Which kernels make builds, and that CI runs every check. Nothing is built."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CPU, CUDA, EITHER = "FORCE_CPU=1 FORCE_CUDA=0 ", "FORCE_CPU=0 FORCE_CUDA=1 ", ""


def make(folder: Path, *arguments: str, gpu: bool = False, **environment: str) -> str:
    """What `make --dry-run` prints, with a virtual environment in the folder."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + ("echo GPU 0: of any name" if gpu else "exit 9"))
    program.chmod(0o755)
    # Arguments of the make that runs the tests would be taken for arguments of this one.
    ours = ("CUDA", "FORCE_CPU", "FORCE_CUDA", "SEED", "TORCH", "MAKEFLAGS", "MAKEOVERRIDES")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    kept["PATH"] = f"{folder}{os.pathsep}{kept['PATH']}"
    command = ["make", "--dry-run", *arguments, f"VENV={folder / 'venv'}"]
    return subprocess.check_output(command, cwd=ROOT, env=kept | environment, text=True)


@pytest.mark.parametrize(
    ("arguments", "environment", "gpu", "kernels"),
    [
        ([], {}, False, CPU),
        ([], {}, True, EITHER),
        (["CUDA=1"], {}, False, CUDA),
        (["CUDA=0"], {}, True, CPU),
        ([], {"FORCE_CUDA": "1"}, False, EITHER),
        ([], {"FORCE_CPU": "1"}, True, EITHER),
        (["CUDA=1"], {"FORCE_CPU": "1"}, False, CUDA),
    ],
    ids=str,
)
def test_kernels(
    arguments: list[str], environment: dict[str, str], gpu: bool, kernels: str, tmp_path: Path
) -> None:
    """EITHER leaves the choice to setup.py, which reads the environment."""
    output = make(tmp_path, "test", *arguments, gpu=gpu, **environment)
    (build,) = [line for line in output.splitlines() if "--no-build-isolation" in line]
    assert build.startswith(f"{kernels}{tmp_path}")
    chosen_for_the_user = not (arguments or environment or gpu)
    assert ("CUDA=1 builds them" in output) == chosen_for_the_user


def test_other_kernels_are_built_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in (".torch-torch", ".kernels-0--", ".test"):
        (venv / name).touch()
    assert "--no-build-isolation" not in make(tmp_path, "test")
    for other in ("CUDA=1", "TORCH=torch==2.11.0"):
        assert "--no-build-isolation" in make(tmp_path, "test", other)


def test_ci_runs_every_check() -> None:
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
