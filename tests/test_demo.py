"""The demo runs, in short, and finds what it says."""

import re
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
    assert "2 losses of two runs are equal, bit for bit" in done.stdout
    sizes = re.search(r"indices take (\d+\.\d+) MiB; int64 ones take (\d+\.\d+)", done.stdout)
    assert sizes
    assert float(sizes[2]) == pytest.approx(8 * float(sizes[1]), abs=0.05)
    assert "does not have a deterministic implementation" in " ".join(done.stdout.split())
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    gradients = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in rows}
    assert gradients[f"torch.nn.functional.max_unpool{dims}d"] == "[1.0, 1.0, 1.0]"
    assert gradients["maxunpool_cuda"] == gradients["finite differences"] == "[0.0, 0.0, 1.0]"
    assert (tmp_path / f"segnet_mri_{dims}d.png").stat().st_size > 10_000
