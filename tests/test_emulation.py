# SPDX-License-Identifier: BSD-3-Clause
"""The emulated GPU itself: which kernels the tests reach there, and which mistakes they see.

That its results are right is tested wherever a test takes the fixture ``device``.
"""

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

import cases
import emulation
import failures
import pytest
import torch
from cases import REDUCES, Call, aimed, draw, geometry_of
from failures import check_each

PYTEST = ("-m", "pytest", "-s", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")


def calls_of_every_kernel(rng: random.Random) -> Iterator[Call]:
    """Calls of kernels for usual windows, large ones, other windows, and 64-bit numbers."""
    usual = itertools.product(
        cases.DIFFERENTIABLE, (torch.uint8, *cases.POOLED[:4]), cases.WAYS, cases.WINDOWS
    )
    for (operator, reduce), dtype, way, window in usual:
        aim = aimed(rng, operator, way, window, dims=2)
        yield draw(rng, operator, dtype, reduce=reduce, **aim)
    other_windows = ((5, 5, 0), (5, 5, 2), (5, 2**17, 0))
    others = itertools.product(cases.DIFFERENTIABLE, cases.ARITHMETIC, other_windows)
    for (operator, reduce), dtype, window in others:
        if operator != "pool" or dtype in cases.POOLED:
            geometry = geometry_of((1, 1), window)
            yield draw(rng, operator, dtype, reduce=reduce, geometry=geometry)


def test_every_kernel_is_reached(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "device", "emulated")
    library = emulation.library()
    library.take_launched()
    with emulation.emulated_gpu(rng):
        check_each(calls_of_every_kernel(rng), Call.verify)
    kernels = emulation.kernels()
    assert len(kernels) > 100
    unreached = kernels - {*library.take_launched()}
    assert not unreached, "\n".join(sorted(unreached))


def declared(header: Path) -> set[str]:
    """The constants and the functions that a header of C++ declares."""
    return set(re.findall(r"^\w.*?(\w+)(?: = |\()", header.read_text(), re.MULTILINE))


def test_the_table_of_changes_is_whole() -> None:
    """docs/emulation.md lists what the emulation replaces, and nothing else."""
    page = (emulation.CSRC.parent / "docs" / "emulation.md").read_text()
    section = page.partition("## What it changes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    replaced = declared(emulation.CSRC / "cuda" / "device.cuh")
    assert declared(emulation.HERE / "device.cuh") == replaced
    assert sorted(rows) == sorted([*replaced, *emulation.EDITS])


def test_files_that_depend_on_the_compiler_are_named() -> None:
    """Other code of theirs would run on a GPU than in the emulation."""
    page = (emulation.CSRC.parent / "docs" / "emulation.md").read_text()
    for path in (*emulation.CSRC.glob("cuda/*"), *emulation.CSRC.glob("*.h")):
        for macro in ("__CUDA_ARCH__", "__CUDACC__"):
            if macro in path.read_text():
                named = f"`{path.relative_to(emulation.CSRC.parent)}` asks"
                assert re.search(rf"{named}[^.]*`{macro}`", page), path


def test_kernels_divide_numbers_of_63_bits(rng: random.Random) -> None:
    """They multiply by a reciprocal, whose rounding shows next to multiples of the divisor."""
    wrong = []
    for _ in range(5000):
        divisor, quotient = (rng.getrandbits(rng.randint(1, 63)) or 1 for _ in range(2))
        n = min(divisor * quotient, 2**63 - 1) - rng.randint(0, 1)
        found = emulation.library().divide(n, divisor)
        if found != n // divisor:
            wrong.append(f"{n} / {divisor}: expected {n // divisor} but got {found}")
    assert wrong == []


def test_out_of_window_indices_of_other_launches_change_nothing(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the fix-up kernel asks the flags of its own launch."""
    monkeypatch.setattr(failures, "device", "emulated")
    library = emulation.library()
    kinds = itertools.product(("unpool", "gradient"), cases.INDEX_KINDS, range(4))
    calls = (draw(rng, operator, kind=kind) for operator, kind, _ in kinds)
    with emulation.emulated_gpu(rng):
        library.let_others_leave_window(True)
        try:
            check_each(calls, Call.verify)
        finally:
            library.let_others_leave_window(False)


@pytest.mark.parametrize("mistake", ["barriers", "a block"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("size", [4, 9], ids=["whole planes", "parts"])
def test_a_mistake_is_seen(size: int, reduce: str, mistake: str, rng: random.Random) -> None:
    """Threads that name the same output skip the barrier between them, or a block is left out."""
    chosen = {"geometry": geometry_of((size, size), (2, 2, 0)), "leading": (4, 2), "kind": "few"}
    call = draw(rng, "unpool", torch.float32, reduce=reduce, layout="contiguous", **chosen)
    with emulation.emulated_gpu(rng, mistake), pytest.raises(AssertionError):
        any(call.check() for _ in range(20))  # the order is random: a run may be right


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_under_sanitizers(sanitizers: str) -> None:
    """Runs the tests marked sanitized: on the emulated GPU and, for memory errors, on the CPU."""
    chosen = "emulated and not arguments" if sanitizers == "thread" else "emulated or cpu"
    marked = ("-m", "sanitized and not cuda", "-k", chosen, ".")
    done = emulation.sanitized(sanitizers, *PYTEST, *marked)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_a_race_is_seen() -> None:
    done = emulation.sanitized("thread", *PYTEST, "-k", "mistake and barriers", __file__)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stdout, done.stdout[-8000:]


SHORT_INPUT = """
import contextlib, random, cases, emulation
rng = random.Random(0)
call = cases.draw(rng, "{operator}", leading=(2, 3))
x = call.tensors[0].contiguous()
with {device}:
    call.on(x)
    x.untyped_storage().resize_(x.nbytes // 2)
    call.on(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["contextlib.nullcontext()", "emulation.emulated_gpu(rng)"])
@pytest.mark.parametrize("operator", ["unpool", "pool"])
def test_an_overflow_is_seen(operator: str, device: str) -> None:
    script = SHORT_INPUT.format(operator=operator, device=device)
    done = emulation.sanitized("address,undefined", "-c", script)
    assert done.returncode != 0
    # An address far beyond the input may lie in freed memory. A vector that begins in the input
    # and ends beyond it is reported as an unknown-crash.
    seen = re.search("ERROR: AddressSanitizer: (heap-|unknown-crash)", done.stdout)
    assert seen, done.stdout[-8000:]
