# SPDX-License-Identifier: BSD-3-Clause
"""make report: one file that says what the tests and the benchmark did, also if they fail."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))  # last: wheel.py there must not hide the package of that name

import gpu_report  # noqa: E402
from gpu_report import NVIDIA_SMI, Result, Run, Suite  # noqa: E402

Capture = pytest.CaptureFixture
Patch = pytest.MonkeyPatch

# Two tests need a GPU: one is skipped, and the other fails as a test on a GPU may.
SAMPLE = """
import pytest

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_passes_without(device):
    if device == "cuda":
        pytest.skip("no CUDA | device")

@pytest.mark.cuda
def test_sums():
    print("printed by the test:", 6 * 7)
    total = {total}
    assert total == 2, "the sum is `wrong` & <so> on"
"""
BENCHMARK = """
print("1/1 unpool-2x2", flush=True)
print("Written: results.json\\n")
print("maxunpool_cuda on a processor\\n")
print("| name | time, us |\\n| ---- | -------: |\\n| unpool-2x2 |      7.5 |\\n")
raise SystemExit({problem!r} or 0)
"""
TABLE = "\n| name | time, us |\n| ---- | -------: |\n| unpool-2x2 | 7.5 |\n"
PROBLEM = "benchmarks: unpool-3x3 does not return the definition's result"


def project(folder: Path, total: int, problem: str) -> None:
    """A project of three tests and a benchmark; a failing one if total is not 2, or problem is."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda: needs a GPU\n")
    (folder / "test_sample.py").write_text(SAMPLE.format(total=total))
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__main__.py").write_text(BENCHMARK.format(problem=problem))


def reported(folder: Path, monkeypatch: Patch, *pytest_arguments: str) -> tuple[int, str]:
    """The exit status and the file of a run on that project, on a machine without a GPU."""
    monkeypatch.setattr(gpu_report, "ROOT", folder)
    monkeypatch.setattr(gpu_report, "gpus", str)
    monkeypatch.setenv("PATH", str(folder))  # so that there is no nvidia-smi
    monkeypatch.setenv("PYTHONPATH", "")
    output = folder / "out" / "gpu-report.md"
    pytest_command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *pytest_arguments)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", *pytest_command, "--output", str(output)])
    return gpu_report.main(), output.read_text()


def test_a_run_in_which_all_passes(tmp_path: Path, monkeypatch: Patch) -> None:
    project(tmp_path, total=2, problem="")
    status, text = reported(tmp_path, monkeypatch)
    assert status == 0
    assert "| all | 2 | 2 | 0 | 1 |\n| those that need a GPU | 1 | 1 | 0 | 1 |\n" in text
    assert "    1 no CUDA | device\n" in text
    assert TABLE in text
    assert "\n## Failures\n\nNone.\n" in text
    no_gpu = "PyTorch sees none, and nvidia-smi gives (No such file or directory)"
    assert text.startswith(f"# GPU report: no GPU\n\n**No GPU: {no_gpu}.**\n")
    for fact in ("GPU", "PyTorch", "maxunpool_cuda", "nvcc", "Python", "system", "commit"):
        assert f"\n| **{fact}** | " in text


def test_a_run_in_which_all_fails(tmp_path: Path, monkeypatch: Patch, capfd: Capture) -> None:
    """A failed test stops neither the benchmark nor the report, and is in it in full."""
    project(tmp_path, total=3, problem=PROBLEM)
    status, text = reported(tmp_path, monkeypatch)
    assert status == 1
    assert "| all | 2 | 1 | 1 | 1 |\n| those that need a GPU | 1 | 0 | 1 | 1 |\n" in text
    _, _, failures = text.partition("\n## Failures\n")
    assert failures.count("<details>") == 1
    assert "<summary>test_sample.py::test_sums</summary>" in failures
    assert ">       assert total == 2, " in failures
    assert "\nE       AssertionError: the sum is `wrong` & <so> on\n" in failures
    assert "printed by the test: 42" in failures
    assert TABLE in text
    assert f"```text\n{PROBLEM}\n```" in text
    printed = capfd.readouterr().out
    assert "1/1 unpool-2x2\n" in printed
    assert "The tests failed, and the report says how.\nThe benchmark failed, " in printed
    written = tmp_path / "out" / "gpu-report.md"
    assert f"Written: {written}, {written.stat().st_size:,} bytes." in printed
    assert 'with the template "GPU report".' in printed


def test_a_run_in_which_pytest_does_not_start(tmp_path: Path, monkeypatch: Patch) -> None:
    project(tmp_path, total=2, problem="")
    (tmp_path / "conftest.py").write_text("raise ImportError('no such library')")
    status, text = reported(tmp_path, monkeypatch)
    assert status == 1
    assert "**pytest wrote no results.**" in text
    assert "ImportError: no such library" in text
    assert TABLE in text


def test_arguments_of_pytest_keep_their_order(tmp_path: Path, monkeypatch: Patch) -> None:
    project(tmp_path, total=3, problem="")
    _, text = reported(tmp_path, monkeypatch, "-k", "passes and not sums", "--maxfail", "1")
    assert "| all | 1 | 1 | 0 | 1 |\n| those that need a GPU | 0 | 0 | 0 | 1 |\n" in text
    assert "-k 'passes and not sums' --maxfail 1" in text


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python raises KeyboardInterrupt, also in a process that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_only_the_program(tmp_path: Path) -> None:
    """Ctrl-C also reaches the report, which stays; a program that it starts still has it."""
    code = "import os, signal; os.kill(os.getppid(), signal.SIGINT); print(signal.SIGINT.name)"
    code += "; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    done = gpu_report.run((sys.executable, "-c", code), tmp_path / "log")
    assert (done.status, done.output) == (0, "SIGINT\n")
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), 2)


KNOWN = {"GPU": "", NVIDIA_SMI: "NVIDIA T4, 570.86", "PyTorch": "2.15.0+cu132", "CUDA kernels": ""}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "No GPU: PyTorch sees none, but nvidia-smi gives NVIDIA T4, 570.86"),
        ({NVIDIA_SMI: ""}, "No GPU: PyTorch sees none, and nvidia-smi gives nothing"),
        ({NVIDIA_SMI: "(x failed)"}, "No GPU: PyTorch sees none, and nvidia-smi gives (x failed)"),
        ({"GPU": "NVIDIA T4"}, "No CUDA kernels: this build has none, so nothing of it runs"),
        ({"GPU": "NVIDIA T4", "CUDA kernels": "built for 7.5"}, None),
    ],
    ids=["driver too old", "nothing listed", "nvidia-smi failed", "no kernels", "all is there"],
)
def test_why_nothing_ran_on_a_gpu(facts: dict[str, str], words: str | None) -> None:
    """Said at the head, so that a report of skipped tests is not taken for one of a GPU."""
    tests = Suite(Run(["pytest"], 0, 1, ""), [Result("a", "passed")], set())
    text = gpu_report.report(KNOWN | facts, tests, Run(["benchmarks"], 0, 1, ""))
    second = text.split("\n\n")[1]
    assert second.startswith(f"**{words}") == (words is not None)
    assert second.startswith("| ") == (words is None)


def test_the_report_fits_an_issue() -> None:
    """GitHub takes 65,536 characters. One failure of each test function is shown first."""
    names = [f"tests/test_{letter}.py::test_it[cuda-{n}]" for letter in "abc" for n in range(300)]
    found = [Result(name, "failed", f"{name}\n{'long ' * 4000}\nE  the end") for name in names]
    output = f"1/1 case\n\nWritten: x\n\n| table |\n{'| row |' * 9000}\n"
    known = dict.fromkeys((*KNOWN, "a", "b", "c", "d"), "fact " * 9000)
    tests = Suite(Run(["pytest"], 1, 1, output), found, set(names))
    for few in (KNOWN, known):
        text = gpu_report.report(few, tests, Run(["benchmarks"], 1, 1, output))
        assert len(text) <= gpu_report.MOST
        assert "| those that need a GPU | 900 | 0 | 900 | 0 |" in text
        assert text.count("<details>") == text.count("</details>")
    text = gpu_report.report(KNOWN, tests, Run(["benchmarks"], 1, 1, output))
    shown = re.findall(r"<summary>(tests/.*)</summary>", text)
    assert shown[:4] == [names[0], names[300], names[600], names[1]]
    assert f"<summary>{900 - len(shown)} more failed, for which no room was left</summary>" in text
    assert text.count("\nE  the end\n") == len(shown)
    assert text.count(" characters left out ...]") >= len(shown) + 2  # the tables, the names


def test_what_a_test_prints_stays_in_its_block() -> None:
    block = gpu_report.details("a < b", "~~~\n````\n</details>\n````")
    assert block.startswith("<details><summary>a &lt; b</summary>\n\n`````text\n~~~\n````\n")
    assert block.endswith("\n````\n`````\n\n</details>\n")


def test_folders_of_the_user_are_not_told() -> None:
    text = f"{ROOT}/tests/a.py, {Path.home()}/data, and elsewhere"
    assert gpu_report.without_folders(text) == "tests/a.py, ~/data, and elsewhere"


def test_the_issue_form() -> None:
    form = ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu_report.yml"
    if not form.exists():
        pytest.skip("the source archive has no issue forms")
    assert form.read_text().startswith("name: GPU report\n")
    assert "label: All of out/gpu-report.md\n" in form.read_text()


NOTEBOOK = ROOT / "examples" / "gpu_report.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
SHELL = [line[1:] for cell in CODE for line in cell.splitlines() if line.startswith("!")]


def test_the_notebook_is_one() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert {cell["cell_type"] for cell in CELLS} == {"markdown", "code"}
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)


def test_the_cells_of_the_notebook() -> None:
    """Their Python compiles, their shell has names that the Python defines, and make knows both."""
    python = "\n".join(re.sub(r"^!.*$", "", cell, flags=re.M) for cell in CODE)
    compile(python, str(NOTEBOOK), "exec")
    defined = {*re.findall(r"^([A-Z]+) = ", python, re.M)}
    makefile = (ROOT / "Makefile").read_text()
    assert len(SHELL) == 5
    for line in SHELL:
        assert {*re.findall(r"\{(\w+)\}", line)} <= defined
        subprocess.run(["bash", "-n", "-c", line], check=True)
    (command,) = (line for line in SHELL if line.startswith("make "))
    target, *variables = command.removeprefix("make -C maxunpool_cuda ").split()
    assert re.search(rf"^{target}: .*## ", makefile, re.M)
    for variable in variables:
        assert re.search(rf"^## {variable.partition('=')[0]}=", makefile, re.M)


@pytest.mark.parametrize(
    ("driver", "torch"), [("550.54.15", "torch==2.10.0"), ("580.82.07", "torch"), (None, None)]
)
def test_the_notebook_looks_at_the_driver(
    driver: str | None, torch: str | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    """CUDA 13 needs driver 580. Without a GPU the first cell says what to do."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{f'echo Tesla T4, {driver}' if driver else 'exit 9'}\n")
    smi.chmod(0o755)
    names: dict[str, object] = {}
    if driver is None:
        with pytest.raises(SystemExit, match=r"^No GPU: choose a runtime that has one"):
            exec(CODE[0], names)
    else:
        exec(CODE[0], names)
    assert names.get("TORCH") == torch


def test_the_address_is_one_placeholder() -> None:
    """CONTRIBUTING.md names it among what is done before the first release."""
    (address,) = re.findall(r'^REPOSITORY = "(.*)"$', "\n".join(CODE), re.M)
    assert NOTEBOOK.read_text().count("://") == 1
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert ("/OWNER/" in address) == ("`REPOSITORY` in `examples/gpu_report.ipynb`" in contributing)
