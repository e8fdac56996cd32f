"""The CUDA kernels in the compiled library, as cuobjdump describes them: no GPU is needed."""

import itertools
import re
import shutil
import subprocess
from importlib import util
from pathlib import Path

import pytest
from cases import LIMITS

import maxunpool_cuda
from maxunpool_cuda import _C

LIBRARY = Path(_C.__file__)
# The kernels for contiguous rows and for channels_last, at the windows of most networks.
FAST = ("forward_rows", "forward_channels", "backward", "pool_rows", "pool_channels")


@pytest.fixture(scope="module", autouse=True)
def with_cuda_kernels() -> None:
    if not maxunpool_cuda.build_info()["cuda"]:
        pytest.skip("this build has no CUDA kernels")


def cuobjdump(argument: str) -> str:
    triton = util.find_spec("triton")
    packaged = Path(triton.origin).parent / "backends/nvidia/bin" if triton else None
    program = shutil.which("cuobjdump") or (packaged and shutil.which("cuobjdump", path=packaged))
    if not program:
        pytest.skip("cuobjdump is installed neither with a CUDA toolkit nor with Triton")
    return subprocess.check_output([program, argument, LIBRARY], text=True)


def test_every_architecture_asked_for_is_there() -> None:
    asked = maxunpool_cuda.build_info()["arch_list"].replace(" ", ";").split(";")
    expected = {
        "--list-elf": {arch.removesuffix("+PTX").replace(".", "") for arch in asked},
        "--list-ptx": {arch[:-4].replace(".", "") for arch in asked if arch.endswith("+PTX")},
    }
    for listing, architectures in expected.items():
        assert set(re.findall(r"\.sm_(\d+)\.", cuobjdump(listing))) == architectures


def test_kernels_fit_the_registers() -> None:
    """A stack or local memory would mean that registers are spilled.

    With at most 64 registers at least half of the threads that a processor can hold run at once,
    and hide the latency of memory.
    """
    usage = cuobjdump("--dump-resource-usage")
    kernel = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)"
    parts = re.split(r"^arch = (\w+)$", usage, flags=re.MULTILINE)
    fast = set()
    for arch, part in zip(parts[1::2], parts[2::2], strict=True):
        kernels = re.findall(kernel, part)
        assert len(kernels) == part.count("Function ")
        for name, registers, *memory in kernels:
            assert memory == ["0", "0"], name
            if family := re.search(rf"\d({'|'.join(FAST)})I", name):
                assert int(registers) <= 64, name
                fast.add((arch, family[1]))
    architectures = {arch for arch, _ in fast}
    assert architectures
    assert fast == set(itertools.product(architectures, FAST))


def test_the_library_stays_small() -> None:
    architectures = maxunpool_cuda.build_info()["arch_list"].replace(" ", ";").split(";")
    assert LIBRARY.stat().st_size < 6e6 * len(architectures)


def test_limits_can_be_set() -> None:
    """The tests on a GPU set them (conftest.py)."""
    try:
        for choice in map(min, LIMITS.values()), map(max, LIMITS.values()):
            _C.set_cuda_limits(**dict(zip(LIMITS, choice, strict=True)))
        with pytest.raises(TypeError):
            _C.set_cuda_limits(nonsense=1)
    finally:
        _C.set_cuda_limits()
