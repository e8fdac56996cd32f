"""The CUDA kernels in the compiled library, as cuobjdump describes them: no GPU is needed."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import maxunpool_cuda
from maxunpool_cuda import _C

ASKED = maxunpool_cuda.build_info()["arch_list"].replace(" ", ";").split(";")
pytestmark = pytest.mark.skipif(not ASKED[0], reason="this build has no CUDA kernels")


def cuobjdump(argument: str) -> str:
    path = os.environ["PATH"]
    if triton := find_spec("triton"):
        path += f"{os.pathsep}{Path(triton.origin).parent / 'backends/nvidia/bin'}"
    if not (program := shutil.which("cuobjdump", path=path)):
        pytest.skip("cuobjdump is installed neither with a CUDA toolkit nor with Triton")
    return subprocess.check_output([program, argument, _C.__file__], text=True)


def test_every_architecture_asked_for_is_there() -> None:
    for option, suffix in ("--list-elf", ""), ("--list-ptx", "+PTX"):
        asked = {arch.removesuffix("+PTX") for arch in ASKED if arch.endswith(suffix)}
        found = re.findall(r"\.sm_(\d+)(\d)\.", cuobjdump(option))
        assert {".".join(arch) for arch in found} == asked


def test_kernels_fit_the_registers() -> None:
    """No kernel spills registers, which would show as a stack or local memory.

    With at most 64 registers at least half of the threads that a processor can hold run at once,
    and hide the latency of memory.
    """
    usage = cuobjdump("--dump-resource-usage")
    kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert len(kernels) == usage.count("Function ")
    assert [name for name, _, *memory in kernels if memory != ["0", "0"]] == []
    # All but pool_windows, which does what networks rarely have.
    for family in ("forward", "backward", r"\w+_slots", "pool_rows", "pool_channels"):
        registers = [int(used) for name, used, *_ in kernels if re.search(rf"\d{family}I", name)]
        assert 0 < max(registers) <= 64, family
