# SPDX-License-Identifier: BSD-3-Clause
"""The emulated GPU itself: which kernels the tests reach there, and which mistakes they see.

That its results are right is tested wherever a test takes the fixture ``device``. The kernel of
docs/design.md, which is not the package's, is run here.
"""

import ctypes
import itertools
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cases
import emulation
import pytest
import reference
import torch
from cases import Call, aimed, draw, geometry_of
from failures import check_each

PYTEST = ("-m", "pytest", "-s", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")


def calls_of_every_kernel(rng: random.Random) -> Iterator[Call]:
    """Calls for usual windows, and for others: large ones, and such that 64 bits count a plane."""
    usual = [*itertools.product((torch.uint8, *cases.FLOATS), cases.WAYS, cases.WINDOWS)]
    others = [geometry_of((1, 1), window) for window in ((5, 5, 0), (5, 3, 1), (5, 2**17, 0))]
    for operator, reduce in cases.DIFFERENTIABLE:
        for dtype, way, window in usual:
            aim = aimed(rng, operator, way, window, dims=2)
            yield draw(rng, operator, dtype, reduce=reduce, **aim)
        dtypes = cases.POOLED if operator == "pool" else cases.ARITHMETIC
        for dtype, geometry in itertools.product(dtypes, others):
            yield draw(rng, operator, dtype, reduce=reduce, geometry=geometry)


@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_every_kernel_is_reached(device: str, rng: random.Random) -> None:
    reached = set()

    def check(call: Call) -> None:
        call.verify(device)
        reached.update(signature for signature, _, _ in emulation.launches())

    check_each(calls_of_every_kernel(rng), check)
    assert reached == {*emulation.kernels().values()}


def test_kernels_divide_numbers_of_63_bits(rng: random.Random) -> None:
    """They multiply by a reciprocal, whose rounding shows next to multiples of the divisor."""
    for _ in range(5000):
        bits = rng.randint(1, 63)  # of the divisor; the product has at most 63
        divisor, quotient = rng.getrandbits(bits) or 1, rng.getrandbits(63 - bits) or 1
        n = divisor * quotient - rng.randint(0, 1)
        assert emulation.library().divide(n, divisor) == n // divisor, (n, divisor)


RUN_A_THREAD = """
extern "C" void run(
    unsigned block, unsigned thread, int64_t cells, int64_t height, int64_t width,
    const float* input, const int64_t* indices, float* output) {
  blockDim.x = 8, blockIdx.x = block, threadIdx.x = thread;
  unpool_2x2(cells, height, width, input, indices, output);
}
"""


def test_the_kernel_of_the_design_page(rng: random.Random, tmp_path: Path) -> None:
    """Its threads run in any order. The last plane, which is no argument, has no results."""
    page = (emulation.CSRC.parent / "docs" / "design.md").read_text()
    (kernel,) = re.findall(r"^```cuda\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "kernel.cpp").write_text(kernel + RUN_A_THREAD)
    command = [emulation.COMPILER, *emulation.FLAGS.split(), *emulation.TORCH, *emulation.SHIM]
    files = ("-shared", tmp_path / "kernel.cpp", "-o", tmp_path / "kernel.so")
    subprocess.run([*command, *files], check=True, cwd=emulation.HERE)
    run = ctypes.CDLL(str(tmp_path / "kernel.so")).run
    for _ in range(20):
        planes, height, width = (rng.randint(1, 5) for _ in range(3))
        x = torch.randn(planes + 1, 2 * height, 2 * width)
        values, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
        cells = planes * height * width
        output = torch.full_like(x, torch.nan)
        threads = [divmod(number, 8) for number in range(-(-cells // 8) * 8)]
        for numbers in rng.sample(threads, len(threads)):
            sizes = map(ctypes.c_int64, (cells, height, width))
            addresses = (ctypes.c_void_p(t.data_ptr()) for t in (values, indices, output))
            run(*numbers, *sizes, *addresses)
        expected = reference.max_unpool(values, indices, (2 * height, 2 * width), "last")
        assert torch.equal(output[:planes], expected[:planes])
        assert output[planes:].isnan().all()


@pytest.mark.parametrize("mistake", ["barriers", "a block"])
def test_a_mistake_is_seen(mistake: str, rng: random.Random) -> None:
    """Threads that name the same output skip the barrier between them, or a block is left out."""
    chosen = {"geometry": geometry_of((9, 9), (2, 2, 0)), "leading": (4, 2), "kind": "few"}
    call = draw(rng, "unpool", torch.float32, reduce="last", layout="contiguous", **chosen)
    with emulation.emulated_gpu(rng, mistake), pytest.raises(AssertionError, match="differ"):
        check_each([call] * 20, Call.verify)  # the order is random: a run may be right


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
    assert "ThreadSanitizer: data race" in done.stdout, done.stdout[-8000:]


# PyTorch does not know how short the memory is: the package refuses a storage that is too small.
SHORT_INPUT = """
import contextlib, random, cases, emulation, numpy, torch
rng = random.Random(0)
call = cases.draw(rng, "unpool", leading=(2, 3))
x = call.tensors[0].contiguous().numpy()
half = numpy.zeros(x.size // 2, x.dtype)
with {device}:
    call.on(torch.from_numpy(x))
    call.on(torch.from_numpy(numpy.lib.stride_tricks.as_strided(half, x.shape, x.strides)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["contextlib.nullcontext()", "emulation.emulated_gpu(rng)"])
def test_an_overflow_is_seen(device: str) -> None:
    script = SHORT_INPUT.format(device=device)
    done = emulation.sanitized("address,undefined", "-c", script)
    # An address far beyond the input may lie in freed memory. A vector that begins in the input
    # and ends beyond it is reported as an unknown-crash.
    seen = re.search("ERROR: AddressSanitizer: (heap-|unknown-crash)", done.stdout)
    assert seen, done.stdout[-8000:]
