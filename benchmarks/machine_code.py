"""What the machine code of the fast kernels needs of an H200, and what their bytes allow.

    python -m benchmarks.machine_code [LIBRARY]

reads sm_90 code with cuobjdump, of the toolkit or of Triton; no GPU is needed. A kernel that needs
more issue slots than its bytes allow is slower than a copy: tests/test_library.py fails above
100 %. What is counted, control_flow.py says. Loops are gone through as often as FAST says, or once;
or not at all if windows share none and their bytes are moved without, as by the loop for depth
beside that for the plane.

A kernel that neither FAST nor NOT_FAST knows is an error, and so is a path that moves fewer bytes
than are useful, or twice as many where windows share none: FAST has its cells or its loops wrong.
"""

import argparse
import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import NamedTuple

from maxunpool_cuda import _C

from .control_flow import Paths, graph_of, hot
from .show import table

# While an H200's memory moves a byte for each lane of a warp, these many issue slots pass: 4 a
# clock and SM, 132 SMs, 1.98 GHz, 4.8 TB/s of which a copy reaches 0.9, 32 lanes.
SLOTS_PER_BYTE = 4 * 132 * 1.98e9 / (0.9 * 4.8e12) * 32  # 7.7
ARCHITECTURE = "90"
MOST_KERNELS = 350  # of an architecture
# Kernels that are known to need more than is allowed, and so are slower than a copy: percent by
# family, window and values. Half types compare one by one; offsets of later cells are shifted.
ABOVE = {
    ("backward", "3x3/2", "2 bytes"): 185,
    ("pool, channels", "2x2/2", "float16"): 115,
    ("pool, channels", "3x3/2", "bfloat16"): 160,
    ("pool, channels", "3x3/2", "float16"): 210,
    ("pool, rows", "3x3/2", "bfloat16"): 130,
    ("pool, rows", "3x3/2", "float16"): 180,
}
TYPES = {
    "unsigned short": (2, "2 bytes"),
    "unsigned int": (4, "4 bytes"),
    "float": (4, "float32"),
    "BFloat16": (2, "bfloat16"),
    "Half": (2, "float16"),
    "unsigned char": (1, "uint8"),
    "int": (4, "int32"),
    "long": (8, "int64"),
}


Given = Mapping[str, int]  # sizes of the values, T, and indices, I; numbers of a pattern


def _own(given: Given) -> float:
    return given["V"] * given.get("R", 1)


def _row(given: Given) -> float:
    grain = 16 // given["T"]
    return min(grain, 4) if given["s"] == 3 else max(1, grain // given["s"])


def _group(given: Given) -> float:
    return min(16 / given["T"], 32 / given["I"])


VALUES = "(?P<T>unsigned short|unsigned int|float|BFloat16|Half)"
INDICES = "(?P<I>unsigned char|int|long)"


@dataclass(frozen=True)
class Family:
    """Kernels at a usual window: of `pattern`'s groups k, s and p (padding), or as given.

    The pattern is of the demangled name; (T) and (I) stand for the values' type and the indices'. A
    thread has so many `cells`, each with its index and stride x stride others. `trips`: of loops,
    by their number in the order of addresses; others are gone through once.
    """

    name: str
    pattern: str
    cells: Callable[[Given], float] = _own
    window: int = 0
    stride: int = 0
    trips: Callable[[Given], Mapping[int, float]] = lambda given: {}
    gathers: bool = False  # only one of the others, though sectors hold them all

    def match(self, kernel: str) -> re.Match[str] | None:
        """Of a name as demangled() gives it."""
        pattern = self.pattern.replace("(T)", VALUES).replace("(I)", INDICES)
        return re.fullmatch(pattern, kernel)


KSP = r"(?P<k>[1-9]), (?P<s>\d), (?P<p>\d)"
V = r"(?P<V>[2-9]|\d\d)"
CHANNELS = rf"(I), {V}, ChannelShape<{KSP}> >"
# fmt: off
FAST = [
    Family("forward, rows",
           rf"forward_rows<TakeLast<(T)>, (I), RowShape<[\w ]+, {KSP}, false> >", _row),
    Family("forward, deep rows",
           rf"forward_rows<TakeLast<(T)>, (I), RowShape<[\w ]+, {KSP}, true> >", _row,
           trips=lambda g: {1: 2}),
    Family("forward, channels", rf"forward_channels<TakeLast<(T)>, {CHANNELS}"),
    Family("sum, rows", rf"forward_rows<TakeSum<(T)>, (I), RowShape<[\w ]+, {KSP}, false> >", _row),
    Family("sum, channels", rf"forward_channels<TakeSum<(T)>, {CHANNELS}"),
    # Slots are cleared, no second group is read, outputs are stored, no sums are looked for.
    Family("forward, bands", r"forward_bands<(T), (I), (true|false)>", _group, 2, 2,
           lambda g: {1: _group(g), 2: 0, 3: _group(g) * g["T"] / 4, 4: 0, 5: 0, 6: 0}),
    Family("backward, bands", r"backward_bands<(T), (I)>", _group, 2, 2,
           lambda g: {1: _group(g), 2: 0, 3: 0}, gathers=True),
    Family("pool, rows", rf"pool_rows<(T), (I), (?P<k>\d), (?P<s>\d), {V}, (?P<R>\d), true>"),
    Family("pool, channels", rf"pool_channels<(T), (I), (?P<k>\d), {V}>", _own, 0, 2),
    Family("backward", r"backward<(T), (I), false>", lambda g: 4, 2, 2, gathers=True),
    Family("backward", r"backward<(T), (I), true>", lambda g: 2, 3, 2, gathers=True),
]
# fmt: on
# One of these is in the name of each other kernel: any windows, layouts and offsets; what is
# stray; rows that do not divide into vectors; elements of other sizes.
NOT_FAST = [
    r"(forward|pool)_windows|_stray|_any|void",
    r"(forward_\w+|backward\w*|pool_\w+)<(TakeLast<)?(unsigned char|unsigned long|double)",
]


class Demand(NamedTuple):
    """What a kernel needs at a usual window, and what it is allowed."""

    kernel: str
    window: str
    values: str
    indices: str
    useful: float  # bytes a thread
    moved: float  # those, with what others read too
    needed: float  # issue slots a warp
    allowed: float
    percent: float

    @property
    def is_too_much(self) -> bool:
        return self.percent > ABOVE.get((self.kernel, self.window, self.values), 100)


def demand(family: Family, match: re.Match[str], code: str) -> Demand:
    """Of a kernel that the family's pattern matches."""
    groups = match.groupdict()
    (value, values), (index, indices) = TYPES[groups["T"]], TYPES[groups["I"]]
    given = {name: int(n) for name, n in groups.items() if name not in "TI"}
    given |= {"T": value, "I": index}
    window, stride = family.window or given["k"], family.stride or given["s"]
    cells = family.cells(given)
    useful = cells * (value + index + stride**2 * value)
    least = cells * (2 * value + index) if family.gathers else useful
    apart = window <= stride and not family.gathers
    trips = family.trips(given)
    paths = Paths(hot(graph_of(code)), trips)
    if apart and paths.usual().bytes >= 2 * useful:
        paths.skip(trips, useful)
    needed, moved = paths.usual()[2:]
    if moved < least or (apart and moved >= 2 * useful):
        loops = "; ".join(
            f"{trips:g} x {paths.loops[at].slots} slots, {paths.loops[at].bytes} bytes at {at:x}"
            for at, trips in paths.trips.items()
        )
        raise LookupError(f"{match[0]}: {moved:g} of {least:g} bytes are moved; loops: {loops}")
    shape = f"{window}x{window}/{stride}" + (" padded" if given.get("p") else "")
    allowed = useful * SLOTS_PER_BYTE
    sizes = (useful, moved, needed, allowed, 100 * needed / allowed)
    return Demand(family.name, shape, values, indices, *sizes)


def demands(codes: Mapping[str, str]) -> list[Demand]:
    """Of all fast kernels, by their mangled names, at all their usual windows."""
    found: list[Demand] = []
    for mangled, name in demangled(codes).items():
        fits = [(family, match) for family in FAST if (match := family.match(name))]
        if not fits and not any(re.search(pattern, name) for pattern in NOT_FAST):
            raise LookupError(f"neither FAST nor NOT_FAST knows {name}")
        found += [demand(*fit, codes[mangled]) for fit in fits]
    return sorted(found)


def demangled(names: Iterable[str]) -> dict[str, str]:
    """Of each name what it was, without namespaces and parameters."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p  # allocated, and never freed
    found = {}
    for mangled in names:
        name = demangle(mangled.encode(), None, None, None).decode()
        name = re.sub(r"^void |\b(maxunpool_cuda|c10)::", "", name)
        found[mangled] = name[: name.find(">(") + 1 or name.find("(")]
    return found


def disassembler() -> str | None:
    """CUDA's: from the toolkit, or from Triton, which comes with PyTorch."""
    triton = util.find_spec("triton")
    origin = triton.origin if triton else None
    ours = Path(origin).parent / "backends" / "nvidia" / "bin" if origin else None
    return shutil.which("cuobjdump") or (shutil.which("cuobjdump", path=ours) if ours else None)


def read(library: Path) -> dict[str, str]:
    """The machine code of the library's kernels, by their mangled names."""
    program = disassembler()
    if program is None:
        sys.exit("neither cuobjdump nor Triton is installed")
    command = [program, "-sass", "-arch", f"sm_{ARCHITECTURE}", str(library)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # cuobjdump has said why, such as that there are no CUDA kernels
        sys.exit(done.returncode)
    parts = (part.partition("\n") for part in done.stdout.split("Function : ")[1:])
    return {name.strip(): code for name, _, code in parts}


def listed(found: Iterable[Demand]) -> str:
    """A table in Markdown; bytes are those of a thread, slots those of a warp."""
    rows = [[*demand[:4], *(f"{size:.0f}" for size in demand[4:])] for demand in found]
    return table(Demand._fields, rows, texts=4)


def main() -> None:
    """Print the table of a library, by default of the one that is installed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("library", type=Path, nargs="?", default=Path(_C.__file__))
    codes = read(parser.parse_args().library)
    print(f"{len(codes)} kernels for sm_{ARCHITECTURE}; at most {MOST_KERNELS} are wanted.\n")
    print(listed(demands(codes)))


if __name__ == "__main__":
    main()
