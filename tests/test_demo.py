"""The demo runs, in short, and finds what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "segnet_mri.py"


@pytest.mark.slow
@pytest.mark.parametrize("dims", [2, 3])
def test_demo(dims: int, tmp_path: Path) -> None:
    for package in ("matplotlib", "nibabel", "nilearn", "rich"):
        pytest.importorskip(package, reason=f"the demo needs {package}")
    command = [sys.executable, DEMO, "--dims", str(dims), "--iterations", "2", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    for words in (
        "2 losses of two runs are equal, bit for bit",
        f"torch.nn.functional.max_unpool{dims}d │ [1.0, 1.0, 1.0]",
        "maxunpool_cuda │ [0.0, 0.0, 1.0]",
        "finite differences │ [0.0, 0.0, 1.0]",
    ):
        assert words in printed
    assert (tmp_path / f"segnet_mri_{dims}d.png").stat().st_size > 10_000
