"""A rehearsal of make gpu-check, with no GPU and little installed: the first try must do."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LACKING = ("expecttest", "onnxscript", "nilearn", "rich")
# Of the tests that --quick leaves, what touches the packages above, and what touches none.
FEW = "test_cuda or test_operators or test_torch_nn or test_onnx or test_demo or test_gradients"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with all that is installed here, but for LACKING and this package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (target,) = folder.glob("lib/python*/site-packages")
    lacking = re.compile(rf"({'|'.join((*LACKING, 'maxunpool_cuda', '__editable__'))})\b", re.I)
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for item in Path(place).iterdir():
            if not lacking.match(item.name) and not (target / item.name).exists():
                (target / item.name).symlink_to(item)
    return folder / "bin" / "python"


def gpu_check(
    python: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "tests/gpu_check.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_rehearsal(bare_python: Path, tmp_path: Path) -> None:
    """Every step, one after the other in commands of their own; the last of them has no time."""
    arguments = ("--rehearse", "--quick", "--out", str(tmp_path), "--pytest", f"-k '{FEW}'")
    for steps in (["build"], ["cuda", "speed"], ["memcheck", "racecheck"], ["benchmarks", "tests"]):
        done = gpu_check(bare_python, *arguments, "--steps", *steps)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    for package in LACKING:
        assert f"Not installed: {package}: " in done.stdout
    done = gpu_check(bare_python, *arguments, "--steps", "training", "--minutes", "0.1")
    assert done.returncode == 1
    assert "gpu-check: not passed: training" in done.stderr
    text = (tmp_path / "report.md").read_text()
    verdicts = dict(re.findall(r"^## (\w+): (.*) in \d+ s$", text, re.M))
    assert verdicts.pop("training") == "not run: no time left"
    steps = ["build", "cuda", "speed", "memcheck", "racecheck", "benchmarks", "tests"]
    assert verdicts == dict.fromkeys(steps, "passed")
    assert "- missing: expecttest: PyTorch's own samples; " in text
    assert [*(tmp_path / "speed").glob("*.json")]
    assert [*(tmp_path / "benchmarks").glob("*.json")]
    ran = {step: (tmp_path / f"{step}.log").read_text() for step in steps}
    assert re.search(r"\n\d+ skipped, \d+ deselected", ran["cuda"])
    for step in ("memcheck", "racecheck", "tests"):
        assert re.search(r"\b\d+ passed", ran[step])
    assert "PyTorch's own samples need expecttest" in ran["tests"]


def test_nothing_runs_without_a_gpu(tmp_path: Path) -> None:
    done = gpu_check(Path(sys.executable), "--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "gpu-check: expected a CUDA device but PyTorch sees none" in done.stderr
    assert not (tmp_path / "out").exists()
