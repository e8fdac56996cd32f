"""What is in the compiled library, read from its machine code: no GPU is needed."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from cases import LIMITS

import maxunpool_cuda
from maxunpool_cuda import _C

ROOT = Path(__file__).parent.parent
# Last, so that the installed package is tested.
sys.path.append(str(ROOT))

from benchmarks import machine_code  # noqa: E402

LIBRARY = Path(_C.__file__)
pytestmark = pytest.mark.slow  # to disassemble


def cuobjdump(*arguments: str) -> str:
    if not maxunpool_cuda.build_info()["cuda"]:
        pytest.skip("this build has no CUDA kernels")
    program = machine_code.disassembler()
    if program is None:
        pytest.skip("neither cuobjdump nor Triton is installed")
    return subprocess.run(
        [program, *arguments, LIBRARY], check=True, capture_output=True, text=True
    ).stdout


def test_forced_cuda_fails_where_it_cannot_be_built() -> None:
    if torch.version.cuda:
        pytest.skip("this PyTorch can have CUDA kernels")
    command = [sys.executable, "setup.py", "--name"]
    environment = {**os.environ, "FORCE_CUDA": "1", "FORCE_CPU": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "FORCE_CUDA=1 needs a CUDA build of PyTorch" in done.stderr


def architectures(listing: str) -> list[str]:
    return sorted(set(re.findall(r"\.sm_(\d+)\.", listing)))


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[str, str], str]:
    """(architecture, mangled name) to machine code."""
    found = {}
    for arch in architectures(cuobjdump("--list-elf")):
        code = cuobjdump("-sass", "-arch", f"sm_{arch}")
        for part in code.split("Function : ")[1:]:
            name, _, text = part.partition("\n")
            found[arch, name.strip()] = text
    return found


def test_limits_can_be_set() -> None:
    """Those that tests on a GPU ask for, before there is one."""
    if not maxunpool_cuda.build_info()["cuda"]:
        pytest.skip("this build has no CUDA kernels")
    try:
        for choice in map(min, LIMITS.values()), map(max, LIMITS.values()):
            _C.set_cuda_limits(**dict(zip(LIMITS, choice, strict=True)))
        with pytest.raises(TypeError):
            _C.set_cuda_limits(nonsense=1)
    finally:
        _C.set_cuda_limits()


def test_every_architecture_asked_for_is_there() -> None:
    asked = maxunpool_cuda.build_info()["arch_list"].replace(" ", ";").split(";")
    elf = architectures(cuobjdump("--list-elf"))
    ptx = architectures(cuobjdump("--list-ptx"))
    assert elf == sorted(a.removesuffix("+PTX").replace(".", "") for a in asked)
    assert ptx == [a.removesuffix("+PTX").replace(".", "") for a in asked if a.endswith("+PTX")]


@pytest.fixture(scope="module")
def usage() -> str:
    return cuobjdump("-res-usage")


def test_no_kernel_uses_local_memory(usage: str) -> None:
    """Spilled registers and stack frames both are local memory."""
    found = re.findall(r"STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert len(found) > 100
    assert set(found) == {("0", "0")}


# The kernels of most networks, for float32 and bfloat16, of which unpooling moves the bytes (j and
# t), and indices of int64 (l) and uint8 (h): contiguous rows that divide into vectors, and vectors
# of channels.
FAST = {
    f"{layout}, {window}, {dtype}, {indices}": name
    for dtype, size, moved, compared in (
        ("float32", 4, "j", "f"),
        ("bfloat16", 2, "t", "N3c108BFloat16E"),
    )
    for indices, index, index_size in (("int64", "l", 8), ("uint8", "h", 1))
    for window, shape in {"2x2/2": "Li2ELi2ELi0E", "3x3/2 padded": "Li3ELi2ELi1E"}.items()
    for lanes in (min(16 // size, 32 // index_size if window != "2x2/2" else 8),)
    for pooled in (min(16 // size, 16 // index_size),)
    for taken in (f"NS_8TakeLastI{moved}EE",)
    for cells in (4 if (size, index_size) == (2, 1) else 2,)
    for layout, name in {
        "contiguous": f"forward_rowsI{taken}{index}NS_8RowShapeI{moved}{shape}Lb0EEEE",
        "channels_last": f"forward_channelsI{taken}{index}Li{lanes}ENS_12ChannelShapeI{shape}EEE",
        "contiguous pool": f"pool_rowsI{compared}{index}Li2ELi2ELi{cells}ELi1ELb1EE",
        "channels_last pool": f"pool_channelsI{compared}{index}Li2ELi{pooled}EE",
    }.items()
    if "pool" not in layout or window == "2x2/2"
}


@pytest.mark.parametrize("name", FAST.values(), ids=FAST)
def test_fast_kernels(kernels: dict[tuple[str, str], str], usage: str, name: str) -> None:
    """They move 16 bytes at a time, be it what they read or what they write.

    And leave room for half of the threads that a processor can hold, at least: what hides memory's
    latency.
    """
    found = {arch: code for (arch, kernel), code in kernels.items() if name in kernel}
    assert set(found) == {arch for arch, _ in kernels}
    for code in found.values():
        assert re.search(r"\b(LDG|STG)\.E\.128", code)
    registers = re.findall(rf"Function \S*{name}\S*:\s+REG:(\d+)", usage)
    assert registers
    assert max(map(int, registers)) <= 64


def test_the_usual_path_is_counted() -> None:
    """What some skip is on it, what reports an error is not, a loop is there three times."""
    code = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/               @P0 EXIT ;
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR6][R2.64] ;
        /*0030*/               @P1 BRA 0x60 ;
        /*0040*/                   IMAD.WIDE.U32 R8, R4, 0x4, R2 ;
        /*0050*/                   IADD3 R9, R9, R8, RZ ;
        /*0060*/              @!P2 BRA 0xa0 ;
        /*0070*/                   ISETP.GT.U32.AND P3, PT, R9, 0x3, PT ;
        /*0080*/               @P3 BRA 0xa0 ;
        /*0090*/                   ATOMG.E.EXCH.STRONG.GPU PT, R6, desc[UR6][R6.64], R39 ;
        /*00a0*/                   LDS R5, [R9] ;
        /*00b0*/               @P4 BRA P5, 0xa0 ;
        /*00c0*/                   STG.E.64 desc[UR6][R16.64], R4 ;
        /*00d0*/                   EXIT ;
        /*00e0*/                   BRA 0xe0 ;
    """
    paths = machine_code.Paths(machine_code.hot(machine_code.graph_of(code)), {0: 3})
    assert paths.usual()[1:] == (5, 15, 24)  # accesses, slots, bytes


@pytest.fixture(scope="module")
def h200(kernels: dict[tuple[str, str], str]) -> dict[str, str]:
    """Mangled name to machine code, of the architecture that the budget is of."""
    arch = machine_code.ARCHITECTURE
    codes = {name: code for (of, name), code in kernels.items() if of == arch}
    if not codes:
        pytest.skip(f"this build has no kernels for sm_{arch}")
    return codes


def test_fast_kernels_need_no_more_than_their_bytes_allow(h200: dict[str, str]) -> None:
    """The memory of an H200, not its instructions, says how fast they are: all but ABOVE."""
    slow = [demand for demand in machine_code.demands(h200) if demand.is_too_much]
    assert not slow, "\n" + machine_code.listed(slow)


def test_the_budget_is_of_kernels_that_exist(h200: dict[str, str]) -> None:
    """One that was renamed may not hide among those that are not fast."""
    names = machine_code.demangled(h200).values()
    assert not [f.pattern for f in machine_code.FAST if not any(map(f.match, names))]


def test_the_library_stays_small(kernels: dict[tuple[str, str], str]) -> None:
    assert LIBRARY.stat().st_size < 20e6
    assert max(Counter(arch for arch, _ in kernels).values()) <= machine_code.MOST_KERNELS
