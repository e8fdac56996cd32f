"""Everything that needs a GPU, in one command, with a report: make gpu-check PYTHON=python3.

Uses the interpreter that runs it and what is installed there (torch with CUDA, a CUDA toolkit,
ninja, setuptools, numpy, pytest, expecttest, hypothesis; for the benchmarks matplotlib and rich);
installs nothing. Builds into build/gpu, runs every test, then a few of them under
compute-sanitizer, then the benchmarks, and writes benchmarks/results/.
"""

import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "gpu"
FEW = "cuda and (float32 or bfloat16) and (test_operators or test_max_pool)"


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]
    seconds: float
    returncode: int
    tail: str


def run(name: str, command: list[str], cwd: Path, **environment: str) -> Step:
    print(f"== {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    lines = []
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    code = process.wait()
    return Step(name, command, time.monotonic() - start, code, "\n".join(lines[-12:]))


def report(steps: list[Step]) -> str:
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "date": datetime.date.today().isoformat(),
        "device": f"{properties.name}, compute capability {properties.major}.{properties.minor}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": platform.python_version(),
    }
    text = "# make gpu-check\n\n" + "".join(f"- {k}: {v}\n" for k, v in facts.items())
    for step in steps:
        verdict = "passed" if step.returncode == 0 else f"FAILED ({step.returncode})"
        text += f"\n## {step.name}: {verdict} in {step.seconds:.0f} s\n\n"
        text += f"```\n{step.tail}\n```\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, help="where to write instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu-check: expected a CUDA device but PyTorch sees none")

    python = sys.executable
    build = [python, "setup.py", "--quiet", "build", "--build-lib", str(BUILD)]
    steps = [run("build", build, ROOT, FORCE_CUDA="1")]
    if steps[0].returncode == 0:
        # From the build: the package in the root has no compiled extension.
        path = os.pathsep.join((str(BUILD), os.environ.get("PYTHONPATH", "")))
        pytest = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            "--all",
            str(ROOT / "tests"),
        ]
        steps.append(run("tests", pytest, BUILD, PYTHONPATH=path))
        for tool in ("memcheck", "racecheck"):
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
            command += [*pytest, "-k", FEW]
            if shutil.which(command[0]) is None:
                steps.append(Step(tool, command, 0, 1, "compute-sanitizer is not on the PATH"))
            else:
                no_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
                steps.append(run(tool, command, BUILD, PYTHONPATH=path, **no_cache))
        command = [python, "-m", "benchmarks", "--device", "cuda"]
        steps.append(run("benchmarks", command, ROOT, PYTHONPATH=path))
        steps.append(run("training", [*command, "--training"], ROOT, PYTHONPATH=path))

    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    default = ROOT / "benchmarks" / "results" / f"gpu-check-{device}.md"
    target = options.report or default
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report(steps))
    print(f"The report is in {target}")
    if any(step.returncode for step in steps):
        raise SystemExit("gpu-check: failed")


if __name__ == "__main__":
    main()
