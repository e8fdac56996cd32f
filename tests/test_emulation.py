"""The emulated GPU itself: which kernels the tests reach there, and which mistakes they see.

That its results are right is tested wherever a test takes the fixture ``device``.
"""

import contextlib
import itertools
import random
from dataclasses import replace

import cases
import emulation
import pytest
import torch
from cases import REDUCES, WINDOWS, Case, Geometry, Window, scaled, unpool_call

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def calls_of_every_kind(rng: random.Random) -> list[cases.Call]:
    """Calls of each operator, with the windows that kernels are compiled for and with others."""
    calls = []
    dtypes = (torch.uint8, *FLOATS, torch.complex128)
    for dtype, index_dtype, way, window in itertools.product(
        dtypes, cases.INDEX_DTYPES, cases.WAYS, WINDOWS
    ):
        for reduce in REDUCES:
            offsets = index_dtype == torch.uint8
            case = cases.aimed_case(
                rng, way, window, offsets, dtype, reduce, rng.choice((1, 2, 2, 2, 3))
            )
            case = replace(case, indices=case.indices.to(index_dtype))
            calls.append(unpool_call(case, True))
        width = {"even rows": 32, "uneven rows": rng.randint(8, 30), "channels": 9}[way]
        of = Window((6, width), *((n, n) for n in (*WINDOWS[window], 1)), False)
        if dtype in cases.POOLED:
            x = cases.random_input(rng, (1, 16, *of.sizes), dtype)
            x = cases.laid_out(x, "channels_last" if way == "channels" else "contiguous", 2)
            calls.append(cases.pool_call(x, of, index_dtype))
    return calls + [draw(rng) for draw in cases.OPERATORS.values() for _ in range(100)]


PYTEST = ("-m", "pytest", "-s", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
USUAL = {"max_32bit_offset": 2**31}


def test_every_kernel_is_reached(rng: random.Random) -> None:
    """The calls that reach a kernel for the first time are compared; other tests compare more."""
    unreached = set(emulation.kernels().values())
    assert len(unreached) > 100
    for attempt in range(40):
        if attempt >= scaled(2) and not unreached:
            break
        with emulation.emulated_gpu(rng, **{} if attempt % 4 == 3 else USUAL):
            for call in calls_of_every_kind(rng):
                results, reached = call.on(), set(emulation.launched())
                if reached & unreached:
                    call.compare(results)
                    unreached -= reached
    assert not unreached, "\n".join(sorted(unreached))


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_launches(operator: str, rng: random.Random) -> None:
    """One, and a second one where an index may be stray and its element belong elsewhere."""
    with emulation.emulated_gpu(rng):
        emulation.launched()
        for _ in range(scaled(80)):
            call = cases.OPERATORS[operator](rng, rng.choice(FLOATS), most_cells=24)
            call.check()
            may_stray = operator == "unpool"
            if isinstance(call.of, Case) and operator == "gradient":
                may_stray = call.of.reduce == "last"
            kernels = emulation.launched()
            assert len(kernels) == 1 + may_stray, (call.of, kernels)


@pytest.mark.parametrize("mistake", ["", "barriers", "a block"])
@pytest.mark.parametrize(
    ("reduce", "shared_bytes"),
    [("last", 48 << 10), ("last", 128), ("sum", 48 << 10)],
    ids=["whole planes", "parts", "sums"],
)
def test_a_mistake_is_seen(
    reduce: str, shared_bytes: int, mistake: str, rng: random.Random
) -> None:
    """Threads meet where their elements name one output. Then they, or a block, are missing."""
    geometry = Geometry((4, 4), (2, 2), (2, 2), (0, 0), (8, 8))
    case = cases.case_of(rng, geometry, (4, 2), torch.float32, "few", reduce)
    outcome = pytest.raises(AssertionError) if mistake else contextlib.nullcontext()
    limits = USUAL | {"shared_bytes": shared_bytes}
    with emulation.emulated_gpu(rng, mistake, **limits), outcome:
        unpool_call(case, True).check()


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_under_sanitizers(sanitizers: str) -> None:
    """The tests that have the mark, on the emulated GPU and, for memory, on the CPU."""
    marked = "sanitized and not cuda"
    chosen = "emulated and not arguments" if sanitizers == "thread" else "emulated or cpu"
    done = emulation.sanitized(sanitizers, *PYTEST, "-m", marked, "-k", chosen, ".")
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


def test_a_race_is_seen() -> None:
    done = emulation.sanitized("thread", *PYTEST, "-k", "mistake and barriers", __file__)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stdout, done.stdout[-8000:]


SHORT_INPUT = """
import random, cases, emulation
rng = random.Random(0)
call = cases.OPERATORS["{operator}"](rng, leading=(2, 3))
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
