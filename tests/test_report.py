# SPDX-License-Identifier: BSD-3-Clause
"""make report: one file that says what the tests and the benchmark did, also if they fail."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "tools"))  # last, as it has a wheel.py

import gpu_report

TESTS = """
import pytest

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_passes(device):
    if device == "cuda":
        pytest.skip("no CUDA | device")

@pytest.mark.cuda
def test_sums():
    print("printed by the test:", 6 * 7)
    assert 1 + 1 == {total}, "the sum is `wrong` & <so> on"
"""
BENCHMARK = r"""
print("1/1 unpool\nWritten: results.json\n\n| name | time, us |\n| ---- | -------: |")
raise SystemExit({ends!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_report(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails stops neither the benchmark nor the report, and is in it in full."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda: needs a GPU\n")
    (tmp_path / "test_it.py").write_text(TESTS.format(total=2 + fails))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text(
        BENCHMARK.format(ends="a wrong result" if fails else 0)
    )
    output = tmp_path / "out" / "gpu-report.md"
    command = ["gpu_report.py", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "gpus", str)
    monkeypatch.setenv("PATH", str(tmp_path))  # so that there is no nvidia-smi
    monkeypatch.setenv("PYTHONPATH", "")
    assert gpu_report.main() == fails
    text = output.read_text()
    assert text.startswith("# GPU report: no GPU\n\n**No GPU: PyTorch sees none, and nvidia-smi ")
    for fact in ("GPU", "PyTorch", "maxunpool_cuda", "nvcc", "Python", "system", "commit"):
        assert f"\n| **{fact}** | " in text
    counts = "1 | 0 | 1 | 1" if fails else "1 | 1 | 0 | 1"
    assert f"\n| those that need a GPU | {counts} |\n" in text
    assert "    1 no CUDA | device\n" in text
    assert "\n| name | time, us |\n| ---- | -------: |\n" in text
    failures = text.partition("\n## Failures\n")[2]
    if fails:
        assert "<summary>test_it.py::test_sums</summary>" in failures
        assert "\nE       AssertionError: the sum is `wrong` & <so> on\n" in failures
        assert "printed by the test: 42" in failures
        assert "```text\na wrong result\n```" in text
    else:
        assert failures == "\nNone.\n"
