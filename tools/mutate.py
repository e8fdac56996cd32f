# SPDX-License-Identifier: BSD-3-Clause
"""Makes mistakes on purpose, one after the other, and prints which test sees each.

tools/mutations.toml lists them. WORDs choose those whose names or files have one; --list only
checks and prints the list. Each is made in a copy of the project, built as with DEBUG=1. The tests
that should see it have to pass without it. Exits with 1 if a mistake survives. Needs Python 3.11.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-x", "-q")
BUILD = ("setup.py", "-q", "build_ext", "--inplace")  # the CPU kernels, as far as they changed
CPU_KERNELS = ("csrc", "csrc/cpu")  # their folders


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A mistake of one line."""

    name: str
    file: str
    find: str  # in the file exactly once
    replace: str
    tests: tuple[str, ...]  # files of tests
    words: str  # what pytest's -k chooses of them

    @property
    def folder(self) -> str:
        return str(Path(self.file).parent)


def read(path: Path, words: list[str]) -> list[Mutation]:
    """The mutations that are asked for. Stops if a text does not occur in its file exactly once."""
    every = []
    for of in tomllib.loads(path.read_text())["file"]:
        chosen = {"tests": tuple(f"tests/{name}.py" for name in of["tests"]), "words": of["words"]}
        for name, find, replace in of["mistakes"]:
            every.append(Mutation(name=name, file=of["path"], find=find, replace=replace, **chosen))
    found = [m for m in every if not words or any(word in m.name + m.file for word in words)]
    counts = [(m, (ROOT / m.file).read_text().count(m.find)) for m in found]
    wrong = [f"  {m.name}: {m.find!r} occurs {n} times in {m.file}" for m, n in counts if n != 1]
    if wrong or not found:
        sys.exit("mutate: expected texts that occur once but got\n" + "\n".join(wrong or ["none"]))
    return found


def copy_project(folder: Path) -> None:
    """Copies what git knows, as it is in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the copy, whose package comes before an installed one."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "passive"}
    environment |= {"FORCE_CPU": "1", "FORCE_CUDA": "0", "DEBUG": "1"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def outcome(folder: Path, mutation: Mutation) -> str:
    """Which test saw the mutation, or how it got past them."""
    file = folder / mutation.file
    right = file.read_text()
    file.write_text(right.replace(mutation.find, mutation.replace))
    try:
        if mutation.folder in CPU_KERNELS and run(folder, *BUILD).returncode != 0:
            return "**does not compile**"
        done = run(folder, *PYTEST, *mutation.tests, "-k", mutation.words)
    finally:
        file.write_text(right)
    if done.returncode <= 0:  # below zero: by a signal
        return "a crash" if done.returncode else "**survives**"
    failed = re.search(r"^FAILED .*?::(.*?)( - .*)?$", done.stdout, re.M)
    if done.returncode != 1 or not failed:  # pytest's status of tests that ran and failed
        return f"**tests did not run**: {done.stdout.strip().splitlines()[-1:]}"
    return f"`{failed[1]}`"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    mutations = read(ROOT / "tools" / "mutations.toml", options.words)
    if options.list:
        print(*(each.name for each in mutations), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        built = run(folder, *BUILD)
        if built.returncode != 0:
            sys.exit(f"mutate: expected a build but got:\n{built.stdout}{built.stderr}")
        chosen = {(test, m.words) for m in mutations for test in m.tests}
        words = " or ".join(f"({Path(test).stem} and ({words}))" for test, words in chosen)
        right = run(folder, *PYTEST, *{test for test, _ in chosen}, "-k", words)
        if right.returncode != 0:
            sys.exit(f"mutate: expected tests that pass but got:\n{right.stdout}")
        print("| mutation | file | seen by |\n|---|---|---|")
        seen: Counter[str] = Counter()
        # CPU kernels come last, as those of one mistake stay until those of the next are built.
        for each in sorted(mutations, key=lambda each: each.folder in CPU_KERNELS):
            seen_by = outcome(folder, each)
            seen[each.folder] += not seen_by.startswith("**")
            print(f"| {each.name} | `{each.file}` | {seen_by} |", flush=True)
    total = Counter(each.folder for each in mutations)
    print(*(f"{seen[place]} of {total[place]} in {place}" for place in sorted(total)), sep="\n")
    return int(seen != total)


if __name__ == "__main__":
    sys.exit(main())
