"""Thousands of calls with random arguments in a child process, also with sanitizers."""

import ast
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import some

HERE = Path(__file__).parent
ROOT = HERE.parent


def fuzz(seed: int, count: int, **environment: str) -> dict[str, int]:
    command = [sys.executable, HERE / "fuzz.py", str(seed), str(count)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=HERE,
        env={**os.environ, **environment},
    )
    # A string: pytest shortens the repr of anything else, here what the child said.
    assert done.returncode == 0, f"seed {seed}, exit {done.returncode}\n{done.stderr}"
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_random_arguments(rng: random.Random) -> None:
    count = some(4000)
    outcomes = fuzz(rng.getrandbits(31), count)
    assert outcomes["grown"] < 16 << 20
    assert outcomes["value"] > count / 10
    for name in ("RuntimeError", "TypeError", "ValueError"):
        assert outcomes[name] > count / 40, outcomes


@pytest.mark.slow
def test_random_arguments_under_sanitizers(rng: random.Random) -> None:
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++ to build with AddressSanitizer")
    outcomes = fuzz(rng.getrandbits(31), 1000, **sanitized_environment())
    assert outcomes["value"] > 100


def sanitized_environment() -> dict[str, str]:
    """The CPU extension, built with AddressSanitizer and UndefinedBehaviorSanitizer."""
    build = ROOT / "build" / f"sanitized-{torch.__version__}"
    flags = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
    command = [sys.executable, "setup.py", "--quiet", "build"]
    command += ["--build-lib", str(build / "lib"), "--build-temp", str(build / "temp")]
    environment = {**os.environ, "FORCE_CPU": "1", "FORCE_CUDA": "0"}
    environment |= {"CXX": "g++", "CFLAGS": flags, "LDFLAGS": flags}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    runtimes = [  # libstdc++ too, or AddressSanitizer does not find what throws
        subprocess.run(
            ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {
        "PYTHONPATH": str(build / "lib"),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=4096:allocator_may_return_null=1",
    }


def test_the_fuzzer_sees_a_wrong_value(tmp_path: Path) -> None:
    """With an operator that is off by one, it ends with an assertion."""
    saboteur = tmp_path / "sitecustomize.py"
    saboteur.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import reference\n"
        "right = reference.max_unpool\n"
        "reference.max_unpool = lambda x, i, *a: right(x, (i + 1) % 2, *a)\n"
    )
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with pytest.raises(AssertionError, match="wrong value"):
        fuzz(0, 200, PYTHONPATH=path)
