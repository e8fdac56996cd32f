# SPDX-License-Identifier: BSD-3-Clause
"""Runs the tests and a quick benchmark, and writes one Markdown file to paste into an issue.

    gpu_report.py [--bench ARGUMENTS] [--output FILE] PYTEST [ARGUMENTS ...]

PYTEST is the command that runs the tests, as the Makefile has it. What the programs print goes to
the terminal too, and, with pytest's XML and the benchmark's JSON, into a folder beside the file.
Ctrl-C ends the program that runs; the report goes on. The exit status is 1 if one of them failed.
"""

import argparse
import html
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

import maxunpool_cuda

ROOT = Path(__file__).resolve().parent.parent
# Characters. GitHub takes 65,536 in an issue, and the form's other fields need some of them.
MOST = 60_000
MOST_TABLES = 30_000  # characters; the quick tables had 9,000 on a CPU
MOST_TRACEBACK = 6_000  # characters; so eight of the longest have room
MOST_LISTED = 4_000  # characters: the reasons of skips, or the names of failed tests
MOST_FACT = 1_000  # characters
QUERY = "name,driver_version,memory.total,compute_mode,clocks.max.sm,clocks.max.memory"
NVIDIA_SMI = "nvidia-smi: name, driver, memory, compute mode, clocks"


@dataclass(frozen=True)
class Run:
    """A program that ran."""

    command: Sequence[str]
    status: int
    seconds: float
    output: str  # stdout and stderr together

    @property
    def summary(self) -> str:
        """What ran, for how long, and how it ended."""
        ended = f"in {self.seconds:.0f} s, with exit status {self.status}"
        return f"`{shlex.join(self.command)}` ended {ended}."


@dataclass(frozen=True)
class Result:
    """A test that ran or was skipped."""

    name: str  # pytest's node id
    outcome: str  # passed, failed or skipped
    text: str = ""  # the traceback and what the test printed, or the reason of the skip


@dataclass(frozen=True)
class Suite:
    """The run of pytest, what became of each test, and which tests need a GPU."""

    run: Run
    results: Sequence[Result]
    for_gpu: set[str]  # node ids


def run(command: Sequence[str], log: Path) -> Run:
    """Run a program in the root. What it prints goes to the terminal and into the log."""
    print("+", shlex.join(command), flush=True)
    start = time.monotonic()
    # A handler is not inherited, as SIG_IGN would be: Ctrl-C reaches the program alone.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    reader, writer = os.pipe()
    with log.open("wb", buffering=0) as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=writer)
        os.close(writer)
        for piece in iter(lambda: os.read(reader, 2**16), b""):
            file.write(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    os.close(reader)
    status = process.wait()
    signal.signal(signal.SIGINT, before)
    seconds = time.monotonic() - start
    return Run(command, status, seconds, log.read_text(errors="replace"))


def asked(*command: str) -> str:
    """What a program prints on stdout; if it fails, why, in parentheses."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        return f"({error.strerror})"
    said = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip()
    return said if done.returncode == 0 else f"(failed: {said})"


def commit() -> str:
    """The commit of the source, and whether it was changed."""
    if not (ROOT / ".git").exists():
        return "(no git repository)"
    changed = asked("git", "status", "--porcelain")
    return asked("git", "rev-parse", "HEAD") + ", changed" * bool(changed)


def processor() -> str:
    """The name of the CPU."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} logical processors"


def gpus() -> str:
    """The GPUs that PyTorch sees; empty if it sees none. This opens a context on each."""
    said = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(number)
        architecture = f"compute capability {found.major}.{found.minor}"
        memory = f"{found.total_memory / 2**30:.1f} GiB"
        cache = f"{found.L2_cache_size / 2**20:.0f} MiB of L2"
        count = f"{found.multi_processor_count} multiprocessors"
        said.append(", ".join((found.name, architecture, memory, cache, count)))
    return "; ".join(said)


def facts() -> dict[str, str]:
    """The machine and the versions."""
    built: Mapping[str, Any] = maxunpool_cuda.build_info()
    try:
        seen = gpus()
    except RuntimeError as error:  # a failed test may have left the GPU unusable
        seen = f"(PyTorch: {error})"
    return {
        "GPU": seen,
        NVIDIA_SMI: asked("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
        "PyTorch": f"{torch.__version__}, built for CUDA {torch.version.cuda}",
        "maxunpool_cuda": maxunpool_cuda.__version__,
        "CUDA kernels": f"built for {built['arch_list']}" if built["cuda"] else "",
        "nvcc": str(built.get("nvcc_version") or ""),
        "build_info()": str(built),
        "Python": platform.python_version(),
        "system": f"{platform.platform()}, {processor()}",
        "commit": commit(),
    }


def without_gpu(known: Mapping[str, str]) -> str:
    """Why nothing of this package can run on a GPU; empty if it can."""
    listed = known[NVIDIA_SMI]
    if not known["GPU"]:
        also = "but" if listed and not listed.startswith("(") else "and"
        return f"No GPU: PyTorch sees none, {also} nvidia-smi gives {listed or 'nothing'}"
    if not known["CUDA kernels"]:
        return "No CUDA kernels: this build has none, so nothing of it runs on the GPU"
    return ""


def result(case: ElementTree.Element) -> Result:
    """What pytest's XML says of a test."""
    file = case.get("classname", "").replace(".", "/")
    name = "::".join([f"{file}.py"] * bool(file) + [case.get("name", "")])
    problems = [*case.findall("failure"), *case.findall("error")]
    if problems:
        printed = [*case.findall("system-out"), *case.findall("system-err")]
        texts = [element.text or element.get("message") or "" for element in (*problems, *printed)]
        return Result(name, "failed", "\n".join(texts).strip())
    skipped = case.find("skipped")
    if skipped is not None:
        return Result(name, "skipped", skipped.get("message", ""))
    return Result(name, "passed")


def results(xml: Path) -> list[Result]:
    """All tests that pytest's XML lists; none if pytest could not write it."""
    try:
        return [result(case) for case in ElementTree.parse(xml).iter("testcase")]
    except (OSError, ElementTree.ParseError):
        return []


def node_ids(output: str) -> set[str]:
    """The tests that ``pytest --collect-only -q`` lists."""
    return {line.strip() for line in output.splitlines() if "::" in line}


def shortened(text: str, most: int) -> str:
    """The text with at most so many characters; its middle is left out, and that is said."""
    if len(text) <= most:
        return text
    said = f"\n[... {len(text) - most + 50:,} characters left out ...]\n"
    room = max(0, most - len(said))
    end = room * 3 // 4  # the end of a traceback says more than its beginning
    return text[: room - end] + said + text[len(text) - end :]


def fenced(text: str) -> str:
    """A block of code, within more backticks than the text has in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def details(title: str, text: str) -> str:
    """A block of code that opens at a click."""
    head = f"<details><summary>{html.escape(title, quote=False)}</summary>"
    return f"{head}\n\n{fenced(text)}\n\n</details>\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def without_folders(text: str) -> str:
    """The text without the names of the user's folders."""
    text = text.replace(f"{ROOT}/", "")
    home = str(Path.home())
    return text.replace(f"{home}/", "~/") if home != "/" else text


def one_of_each_first(failed: Iterable[Result]) -> list[Result]:
    """The failed tests in such an order that the first of each test function come first."""
    functions = defaultdict(list)
    for found in failed:
        functions[found.name.partition("[")[0]].append(found)
    ranked = [pair for members in functions.values() for pair in enumerate(members)]
    return [found for _, found in sorted(ranked, key=lambda pair: pair[0])]


def failures(found: Iterable[Result], room: int) -> str:
    """The failed tests in full, while there is room; then the names of the others."""
    blocks: list[str] = []
    others: list[str] = []
    room -= MOST_LISTED  # for the names
    for failed in one_of_each_first(each for each in found if each.outcome == "failed"):
        text = shortened(without_folders(failed.text), MOST_TRACEBACK)
        block = details(failed.name, text)
        if len(block) <= room and not others:
            blocks.append(block)
            room -= len(block)
        else:
            others.append(failed.name)
    if others:
        names = shortened("\n".join(others), MOST_LISTED - 200)
        blocks.append(details(f"{len(others)} more failed, for which no room was left", names))
    return "\n".join(blocks)


def counts(tests: Suite) -> str:
    """How many tests passed, failed and were skipped: all, and those that need a GPU."""
    rows = []
    of_gpu = [each for each in tests.results if each.name in tests.for_gpu]
    for name, members in (("all", tests.results), ("those that need a GPU", of_gpu)):
        outcomes = Counter(each.outcome for each in members)
        ran = outcomes["passed"] + outcomes["failed"]
        rows.append((name, ran, outcomes["passed"], outcomes["failed"], outcomes["skipped"]))
    return table(("tests", "ran", "passed", "failed", "skipped"), rows)


def tests_section(tests: Suite) -> str:
    """The counts of the tests, and why some were skipped."""
    output = tests.run.output
    seeds = re.findall(r"^random inputs: .*\n", output, re.M)
    parts = ["## Tests\n", tests.run.summary + "\n", *seeds]
    if not tests.results:
        said = details("What pytest printed", shortened(output, MOST_TRACEBACK))
        return "\n".join([*parts, "**pytest wrote no results.**\n", said])
    parts.append(counts(tests))
    skips = Counter(each.text for each in tests.results if each.outcome == "skipped")
    if skips:
        listed = "\n".join(f"{count:5} {reason}" for reason, count in skips.most_common())
        parts.append(details("Why tests were skipped", shortened(listed, MOST_LISTED)))
    return "\n".join(parts)


def benchmark_section(ran: Run) -> str:
    """The tables that the benchmark prints at its end; if it failed, also what else it printed."""
    before, _, after = ran.output.partition("\nWritten: ")
    tables = after.partition("\n")[2].strip()
    parts = ["## Benchmark\n", ran.summary + "\n"]
    if ran.status != 0:
        tables, row, rest = tables.rpartition("|\n")
        tables += row
        progress = r"^\d+/\d+ .*\n?"
        said = f"{re.sub(progress, '', before, flags=re.M)}\n{rest}".strip()
        parts.append(details("What it printed besides", shortened(said, MOST_TRACEBACK)))
    tables = re.sub("  +", " ", tables)  # Markdown needs no padding, and an issue has limits
    parts.append(shortened(tables, MOST_TABLES) + "\n")
    return "\n".join(parts)


def report(known: Mapping[str, str], tests: Suite, bench: Run) -> str:
    """The whole file; failures come last and take what room is left."""
    known = {name: shortened(said, MOST_FACT) for name, said in known.items()}
    missing = without_gpu(known)
    title = "# GPU report: " + (known["GPU"].partition(",")[0] or "no GPU")
    parts = [
        f"{title}\n",
        f"**{missing}.**\n" * bool(missing),
        table(("", ""), ((f"**{name}**", said or "none") for name, said in known.items())),
        tests_section(tests),
        benchmark_section(bench),
    ]
    text = without_folders("\n".join(filter(None, parts)))
    last = failures(tests.results, MOST - len(text) - 100)
    return f"{text}\n## Failures\n\n{last or 'None.'}\n"


def run_tests(pytest: Sequence[str], folder: Path) -> Suite:
    """Run the tests, and ask pytest which of them need a GPU."""
    print("First, which of them need a GPU:", end=" ", flush=True)
    for_gpu = node_ids(asked(*pytest, "-m", "cuda", "--collect-only", "-q"))
    print(f"{len(for_gpu)}.", flush=True)
    xml = folder / "tests.xml"
    xml.unlink(missing_ok=True)
    printed = ("-o", "junit_logging=out-err", "-o", "junit_log_passing_tests=false")
    done = run((*pytest, f"--junitxml={xml}", *printed), folder / "tests.log")
    return Suite(done, results(xml), for_gpu)


def ending(known: Mapping[str, str], tests: Run, bench: Run, written: Path) -> str:
    """What the terminal says at the end."""
    missing = without_gpu(known)
    lines = [f"{missing}."] * bool(missing)
    for name, done in (("The tests", tests), ("The benchmark", bench)):
        how = "passed" if done.status == 0 else "failed, and the report says how"
        lines.append(f"{name} {how}.")
    lines.append(f"Written: {written}, {written.stat().st_size:,} bytes. Please read it, and paste")
    lines.append('all of it into a new issue of this project, with the template "GPU report".')
    return "\n".join(lines)


def main() -> int:
    """Run all, write the file, and say what to do with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bench", default="--quick", help="the benchmark's arguments")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "gpu-report.md")
    options, pytest = parser.parse_known_args()
    if not pytest:
        parser.error("expected the command that runs pytest, but got none")
    folder = options.output.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)

    print("1 of 3: the tests", flush=True)
    tests = run_tests(pytest, folder)
    print("\n2 of 3: the benchmark", flush=True)
    command = (sys.executable, "-m", "benchmarks", "--output", str(folder))
    bench = run((*command, *shlex.split(options.bench)), folder / "benchmark.log")
    print("\n3 of 3: the report", flush=True)
    known = facts()
    options.output.write_text(report(known, tests, bench))
    print(ending(known, tests.run, bench, options.output))
    return int(tests.run.status != 0 or bench.status != 0)


if __name__ == "__main__":
    raise SystemExit(main())
