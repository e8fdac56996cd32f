"""A rehearsal of make gpu-check, with no GPU and little installed: the first try must do."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
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
    command = [python, "tools/gpu_check.py", *arguments]
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


# A step that prints its process and its child's, and goes on for a minute.
SLOW_STEP = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
ONE_STEP = """
import sys
sys.path.append("tools")
import gpu_check
gpu_check.SPARE = 1
command = [sys.executable, "-c", sys.argv.pop(1)]
gpu_check.STEPS = {"speed": gpu_check.Step(float(sys.argv.pop(1)), lambda *_: command, ())}
gpu_check.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("killed", [False, True], ids=["by the limit", "from outside"])
def test_a_step_is_stopped_with_all_that_it_began(killed: bool, tmp_path: Path) -> None:
    log = tmp_path / "speed.log"
    arguments = (SLOW_STEP, "600" if killed else "3", "--rehearse", "--out", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", ONE_STEP, *arguments], cwd=ROOT)
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.1)
    if killed:
        process.terminate()
    assert process.wait() == (128 + signal.SIGTERM if killed else 1)
    child = Path("/proc", log.read_text().strip())
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        time.sleep(0.1)  # its parent was killed as well
    verdict = "RUNNING, or killed" if killed else "STOPPED after 3 s"
    assert f"\n## speed: {verdict} in " in (tmp_path / "report.md").read_text()


def test_nothing_runs_without_a_gpu(tmp_path: Path) -> None:
    done = gpu_check(Path(sys.executable), "--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "gpu-check: expected a CUDA device but PyTorch sees none" in done.stderr
    assert not (tmp_path / "out").exists()
