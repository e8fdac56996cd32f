"""The emulated GPU itself: which kernels the tests reach there, and which mistakes they see.

That its results are right is tested wherever a test takes the fixture ``device``.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator

import emulation
import pytest
import torch
from cases import (
    ARITHMETIC,
    LIMITS,
    OPERATORS,
    POOLED,
    REDUCES,
    WAYS,
    Call,
    aimed,
    draw,
    geometry_of,
    scaled,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPILED_WINDOWS = ("2x2/2", "3x3/2", "3x3/2 padded", "3x3/1 padded", "4x4/4")


PYTEST = ("-m", "pytest", "-s", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
USUAL = {"max_32bit_offset": 2**31}


def calls_of_every_kernel(rng: random.Random) -> Iterator[Call]:
    """Those for usual windows, and those for the rest or for large tensors."""
    operators = [(op, reduce) for op in OPERATORS for reduce in REDUCES[: 1 if op == "pool" else 2]]
    with emulation.emulated_gpu(rng, **USUAL):
        for (operator, reduce), dtype, way, window in itertools.product(
            operators, (torch.uint8, *FLOATS), WAYS, COMPILED_WINDOWS
        ):
            chosen = aimed(rng, operator, way, window, dims=2)
            yield draw(rng, operator, dtype, reduce=reduce, **chosen)
    for offset in LIMITS["max_32bit_offset"][1:]:
        with emulation.emulated_gpu(rng, max_32bit_offset=offset):
            for (operator, reduce), dtype in itertools.product(operators, ARITHMETIC):
                if operator != "pool" or dtype in POOLED:
                    geometry = geometry_of((2, 3), (4, 4, 0))
                    yield draw(rng, operator, dtype, reduce=reduce, geometry=geometry)


def test_every_kernel_is_reached(rng: random.Random) -> None:
    unreached = set(emulation.kernels().values())
    assert len(unreached) > 100
    for call in calls_of_every_kernel(rng):
        call.check()
        unreached -= set(emulation.launched())
    assert not unreached, "\n".join(sorted(unreached))


@pytest.mark.parametrize("operator", OPERATORS)
def test_launches(operator: str, rng: random.Random) -> None:
    """One, and a second one where an index may be stray and its element belong elsewhere."""
    with emulation.emulated_gpu(rng):
        emulation.launched()
        for _ in range(scaled(80)):
            call = draw(rng, operator, rng.choice(FLOATS), most_cells=24)
            call.check()
            may_stray = operator == "unpool" or (
                operator == "gradient" and "last" in call.arguments
            )
            kernels = emulation.launched()
            assert len(kernels) == 1 + may_stray, (call.geometry, kernels)


@pytest.mark.parametrize("mistake", ["", "barriers", "a block"])
@pytest.mark.parametrize(
    ("reduce", "shared_bytes"),
    [("last", 48 << 10), ("last", 64), ("sum", 48 << 10)],  # with 128, a block may have no work
    ids=["whole planes", "parts", "sums"],
)
def test_a_mistake_is_seen(
    reduce: str, shared_bytes: int, mistake: str, rng: random.Random
) -> None:
    """Threads meet where their elements name one output. Then they, or a block, are missing."""
    chosen = {"geometry": geometry_of((4, 4), (2, 2, 0)), "leading": (4, 2), "kind": "few"}
    call = draw(rng, "unpool", torch.float32, reduce=reduce, layouts=("contiguous",), **chosen)
    outcome = pytest.raises(AssertionError) if mistake else contextlib.nullcontext()
    limits = USUAL | {"shared_bytes": shared_bytes}
    with emulation.emulated_gpu(rng, mistake, **limits), outcome:
        for _ in range(4):  # in an order by luck, one run may be right
            call.check()


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_under_sanitizers(sanitizers: str) -> None:
    """The tests that have the mark, on the emulated GPU and, for memory, on the CPU."""
    marked = "sanitized and not cuda"
    chosen = "emulated and not arguments" if sanitizers == "thread" else "emulated or cpu"
    done = emulation.sanitized(sanitizers, *PYTEST, "-m", marked, "-k", chosen, ".")
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_a_race_is_seen() -> None:
    done = emulation.sanitized("thread", *PYTEST, "-k", "mistake and barriers", __file__)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stdout, done.stdout[-8000:]


SHORT_INPUT = """
import random, cases, emulation
rng = random.Random(0)
call = cases.draw(rng, "{operator}", leading=(2, 3))
x = call.tensors[0].contiguous()
with emulation.{device}:
    call.on(x)
    x.untyped_storage().resize_(x.nbytes // 2)
    call.on(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu()", "emulated_gpu(rng)"])
@pytest.mark.parametrize("operator", ["unpool", "gradient", "pool"])
def test_an_overflow_is_seen(operator: str, device: str) -> None:
    script = SHORT_INPUT.format(operator=operator, device=device)
    done = emulation.sanitized("address,undefined", "-c", script)
    assert done.returncode != 0
    # Far beyond the input, memory may be another's that was freed.
    assert "ERROR: AddressSanitizer: heap-" in done.stdout, done.stdout[-8000:]
