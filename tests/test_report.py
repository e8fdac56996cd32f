# SPDX-License-Identifier: BSD-3-Clause
"""make report: one file that says what the tests and the benchmark did, also if they fail."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "tools"))  # last, as it has a wheel.py

import gpu_report

TESTS = """
import pytest

@pytest.mark.cuda
@pytest.mark.parametrize("total", [2, 3])
def test_sums(total):
    print("printed by the test:", 6 * 7)
    assert 1 + 1 == total, "the sum is `wrong` & <so> on"

@pytest.mark.cuda
def test_skips():
    pytest.skip("no CUDA | device")
"""
BENCHMARK = r"""
print("1/1 unpool\nWritten: results.json\n\n| name | time, us |\n| ---- | -------: |")
raise SystemExit("a wrong result")
"""


@pytest.mark.slow
def test_a_report_of_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails stops neither the benchmark nor the report, and is in it in full."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "benchmarks.py").write_text(BENCHMARK)
    output = tmp_path / "out" / "gpu-report.md"
    command = ["gpu_report.py", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "gpus", str)
    monkeypatch.setenv("PATH", str(tmp_path))  # so that there is no nvidia-smi
    monkeypatch.setenv("PYTHONPATH", "")
    assert gpu_report.main() == 1
    text = output.read_text()
    assert text.startswith("# GPU report: no GPU\n\n**No GPU: PyTorch sees none, and nvidia-smi ")
    assert "\n| those that need a GPU | 2 | 1 | 1 | 1 |\n" in text
    assert "    1 no CUDA | device\n" in text
    assert "\n| name | time, us |\n| ---- | -------: |\n" in text
    assert "```text\na wrong result\n```" in text
    assert "<summary>test_it.py::test_sums[3]</summary>" in text
    assert "AssertionError: the sum is `wrong` & <so> on\n" in text
    assert "printed by the test: 42" in text
