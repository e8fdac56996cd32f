"""Everything that needs a GPU, in one command, with a report: make gpu-check PYTHON=python3.

Uses the interpreter that runs it and what is installed there, and installs nothing: what is missing
is named first, and only what needs it is left out. The steps come in the order of their worth, each
within minutes; --steps chooses among them, so that they can be spread over several commands:

    build       the extension, for the GPUs that are there, into build/gpu
    cuda        the tests that need a GPU
    speed       a few full-size benchmarks
    memcheck    tests under compute-sanitizer: accesses outside of memory
    racecheck   the same: races in shared memory
    benchmarks  as many as there is time for, the most telling first
    training    the memory of a training step
    tests       every test, also those that are slow and those of the CPU

Everything is written to --out as it comes: report.md, which has all steps that were run with that
folder, whole logs, the benchmarks' JSON and pictures.

--rehearse does on the CPU what can be done without a GPU: all of it but the CUDA kernels.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
TAIL, WIDTH = 15, 150  # lines of a log that the report has, and their length
SPARE = 10  # seconds in which a command ends that was told when to
# What needs it, where it is not installed.
PACKAGES = {
    "torch": "everything",
    "setuptools": "the build",
    "ninja": "a build on more than one core",
    "numpy": "the tests",
    "pytest": "the tests",
    "xdist": "tests on more than one core (pytest-xdist)",
    "expecttest": "PyTorch's own samples",
    "onnx": "the tests of ONNX export",
    "onnxruntime": "the tests of ONNX export",
    "onnxscript": "the tests of ONNX export",
    "nibabel": "the test of the demo",
    "nilearn": "the test of the demo",
    "triton": "Triton as a peer",
    "rich": "the test of the demo",
    "matplotlib": "pictures",
}
PROGRAMS = {"nvcc": "the CUDA kernels", "compute-sanitizer": "memcheck and racecheck"}


def is_missing(name: str) -> bool:
    if name in PROGRAMS:
        return shutil.which(name) is None
    return importlib.util.find_spec(name) is None


@dataclass(frozen=True)
class Asked:
    """What was asked for."""

    out: Path
    quick: bool
    rehearse: bool
    pytest: Sequence[str]

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def build(self) -> Path:
        """Where the package is, with its extension."""
        return ROOT / "build" / ("rehearsal" if self.rehearse else "gpu")

    def tests(self, *arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return [*command, str(ROOT / "tests"), *arguments, *self.pytest]

    def in_parallel(self) -> list[str]:
        """On some cores, if that can be; not on all, as each process takes memory of the GPU."""
        processes = min(4, (os.cpu_count() or 1) // 2)
        if processes < 2 or is_missing("xdist"):
            return []
        return ["-n", str(processes), "--dist", "loadfile" if self.rehearse else "worksteal"]

    def sanitizer(self, tool: str) -> list[str]:
        tests = self.tests("-m", "sanitized" if self.rehearse else "sanitized and cuda")
        if self.rehearse:  # no GPU, and perhaps no sanitizer
            return tests
        return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *tests]

    def benchmarks(self, name: str, limit: float, *arguments: str) -> list[str]:
        command = [sys.executable, "-m", "benchmarks", "--device", self.device]
        if self.rehearse:  # what is full size on a GPU takes a CPU minutes
            command += ["--seconds", "0", "--filter", "^tiny"]
        output = str(self.out / name)
        return [*command, "--limit", f"{limit:.0f}", "--output", output, *arguments]


@dataclass(frozen=True)
class Step:
    """A command, which is told how many seconds it has, and stopped some seconds after them."""

    seconds: float
    command: Callable[[Asked, float], list[str]]
    needs: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


PEERS = ("--peers", "torch", "triton")  # compiling takes others too long


def build(asked: Asked, limit: float) -> list[str]:
    objects = ["--build-temp", str(asked.build / "objects")]
    command = [sys.executable, "setup.py", "--quiet", "build"]
    return [*command, "--build-lib", str(asked.build), *objects]


def cuda(asked: Asked, limit: float) -> list[str]:
    # On the CPU all are skipped, but collected: what a missing package breaks is seen.
    return asked.tests("-m", "cuda", *asked.in_parallel())


def speed(asked: Asked, limit: float) -> list[str]:
    return asked.benchmarks("speed", limit, "--quick", *PEERS)


def benchmarks(asked: Asked, limit: float) -> list[str]:
    return asked.benchmarks("benchmarks", limit, *["--quick"] * asked.quick, *PEERS)


def training(asked: Asked, limit: float) -> list[str]:
    return asked.benchmarks("training", limit, "--training")


def every_test(asked: Asked, limit: float) -> list[str]:
    return asked.tests(*([] if asked.quick else ["--all"]), *asked.in_parallel())


# Every step in less than nine minutes, all in less than 25.
TO_TIME, TO_TEST = ("torch",), ("torch", "numpy", "pytest")
TO_SANITIZE = (*TO_TEST, "compute-sanitizer")
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
STEPS = {
    "build": Step(480, build, ("torch", "setuptools")),
    "cuda": Step(420, cuda, TO_TEST),
    "speed": Step(240, speed, TO_TIME),
    "memcheck": Step(240, lambda asked, _: asked.sanitizer("memcheck"), TO_SANITIZE, NO_CACHE),
    "racecheck": Step(240, lambda asked, _: asked.sanitizer("racecheck"), TO_SANITIZE, NO_CACHE),
    "benchmarks": Step(520, benchmarks, TO_TIME),
    "training": Step(120, training, TO_TIME),
    "tests": Step(520, every_test, TO_TEST),
}


@dataclass(frozen=True)
class Outcome:
    verdict: str
    command: str
    seconds: float
    tail: list[str]

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


def run(name: str, command: list[str], limit: float, asked: Asked, environment: dict) -> Outcome:
    """Run it, with all that it prints in a log. When the time is up, it and what it began stop."""
    log = asked.out / f"{name}.log"
    print(f"== {name}, {limit:.0f} s at most: {shlex.join(command)}", flush=True)
    start, stopped = time.monotonic(), ""
    with log.open("w") as file:
        # Python looks in the current folder first, and the root's package has no extension: tests
        # run elsewhere, and the benchmarks look for it last.
        where = asked.build if "pytest" in command else ROOT
        process = subprocess.Popen(
            command, cwd=where, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stopped = f"STOPPED after {limit:.0f} s"
        except BaseException:
            stopped = "STOPPED from outside"
            raise
        finally:
            if stopped:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(SPARE)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    code = process.returncode
    verdict = stopped or (f"FAILED ({code})" if code else "passed")
    tail = [line[:WIDTH] for line in log.read_text(errors="replace").splitlines()[-TAIL:]]
    seconds = time.monotonic() - start
    print(*tail, f"== {name}: {verdict} in {seconds:.0f} s", sep="\n", flush=True)
    return Outcome(verdict, shlex.join(command), seconds, tail)


def missing() -> list[str]:
    """A line for each package or program that is not there, and what needs it."""
    named = {**PACKAGES, **PROGRAMS}
    return [f"{name}: {what}" for name, what in named.items() if is_missing(name)]


def reason_against(step: Step, asked: Asked) -> str:
    """Why a step cannot be run, if so. A rehearsal does without the programs."""
    needs = [name for name in step.needs if not (asked.rehearse and name in PROGRAMS)]
    absent = ", ".join(filter(is_missing, needs))
    return absent and f"not run: no {absent}"


def facts(asked: Asked) -> dict[str, str]:
    import torch

    found = {
        "date": datetime.date.today().isoformat(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": platform.python_version(),
        "missing": "; ".join(missing()) or "nothing",
    }
    if asked.rehearse:
        return {"device": "none: a rehearsal on the CPU", **found}
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return {"device": f"{properties.name}, compute capability {capability}", **found}


def write_report(asked: Asked, outcomes: dict[str, Outcome]) -> None:
    """Every step that was run with this folder, in the order of the steps."""
    text = "# make gpu-check\n\n" + "".join(f"- {k}: {v}\n" for k, v in facts(asked).items())
    for name in STEPS:
        if outcome := outcomes.get(name):
            text += f"\n## {name}: {outcome.verdict} in {outcome.seconds:.0f} s\n\n"
            text += "\n".join(("```", f"$ {outcome.command}", *outcome.tail, "```", ""))
    (asked.out / "report.md").write_text(text)
    kept = {name: asdict(outcome) for name, outcome in outcomes.items()}
    (asked.out / "steps.json").write_text(json.dumps(kept, indent=1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--steps", nargs="+", choices=tuple(STEPS), default=tuple(STEPS), help="default: all")
    few = "fewer benchmarks, and no slow tests but those of cuda"
    add("--quick", action="store_true", help=few)
    add("--out", type=Path, default=ROOT / "out" / "gpu-check", help="default: out/gpu-check")
    add("--minutes", type=float, default=25, help="for everything; default: 25")
    add("--rehearse", action="store_true", help="on the CPU")
    add("--pytest", default="", help="more arguments for pytest")
    return parser.parse_args()


def main() -> None:
    given = options()
    asked = Asked(given.out.resolve(), given.quick, given.rehearse, shlex.split(given.pytest))
    for line in missing():
        print(f"Not installed: {line}", flush=True)
    if not asked.rehearse and not is_missing("torch"):
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("gpu-check: expected a CUDA device but PyTorch sees none; --rehearse?")
    asked.out.mkdir(parents=True, exist_ok=True)
    kept = asked.out / "steps.json"
    earlier = json.loads(kept.read_text()) if kept.exists() else {}
    outcomes = {name: Outcome(**fields) for name, fields in earlier.items()}
    paths = [str(asked.build), os.environ.get("PYTHONPATH", "")]
    force = {"FORCE_CPU": "1"} if asked.rehearse else {"FORCE_CUDA": "1"}
    deadline = time.monotonic() + 60 * given.minutes
    # What a step began would outlive us.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for name in given.steps:
        step = STEPS[name]
        limit = min(step.seconds, deadline - time.monotonic())
        why = reason_against(step, asked)
        if why or limit < 2 * SPARE:
            outcomes[name] = Outcome(why or "not run: no time left", "", 0, [])
        else:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **force, **step.environment}
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            command = step.command(asked, limit - SPARE)
            outcomes[name] = Outcome("RUNNING, or killed", shlex.join(command), 0, [])
            write_report(asked, outcomes)
            outcomes[name] = run(name, command, limit, asked, environment)
        write_report(asked, outcomes)
        if name == "build" and not outcomes[name].passed:
            break
    print(f"The report is in {asked.out / 'report.md'}")
    if bad := [name for name in given.steps if name in outcomes and not outcomes[name].passed]:
        raise SystemExit(f"gpu-check: not passed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
