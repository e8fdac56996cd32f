"""What the machine code of the fast kernels needs of an H200, and what their bytes allow.

    python -m benchmarks.machine_code [--markdown] [--kernel REGEX] [LIBRARY]

reads sm_90 code with cuobjdump, of the toolkit or of Triton; no GPU is needed. A kernel that needs
more issue slots than its bytes allow is slower than a copy: tests/test_library.py fails above
100 %. Counted is the path of a usual warp through the control flow graph:

- Cold blocks are left out: those that reach the error record (atomics on global memory, volatile
  accesses, calls), and what leads nowhere but there or around it, if it writes nothing and loads
  nothing as wide as other blocks.
- Of several ways to a block the usual one moves the widest vectors and accesses memory most. Of
  equal ones it is the shortest, as whole vectors are beside vectors in parts; or the longest, if
  they access none. That may be too long where a warp skips what it has no use for, and too short
  where half of a warp goes either way.
- A loop is gone through as often as FAST says, or once; or not at all if windows share none and
  their bytes are moved without it, as by the loop for depth beside that for the plane.
- Each instruction is an issue slot, be it predicated off. Those of the busiest pipe among the pipes
  slower than the issue are a figure of their own. Stalls and misses are not counted.

A kernel that neither FAST nor NOT_FAST knows is an error, and so is a path that moves fewer bytes
than are useful, or twice as many where windows share none: FAST has its cells or its loops wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import util
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

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
THREADS, SM_THREADS, SM_REGISTERS, SM_SHARED = 256, 2048, 65536, 228 * 1024

# Issue slots that pass while a pipe takes one instruction (CUDA C++ Programming Guide, throughput
# of arithmetic instructions, compute capability 9.0).
INTEGER = "ISETP|SEL|P?LOP3|SHF|IADD3|IABS|PRMT|VIADD|LEA|VIMNMX|VIADDMNMX|MOV|F(SETP|SEL|MNMX)"
MEMORY = "LDG|STG|LDS|STS|ATOMS|LD|ST"
PIPES = {
    "integer": (2, INTEGER),
    "multiply": (2, "IMAD"),
    "memory": (4, MEMORY),
    "double": (2, "DADD|DFMA|DMUL|DSETP"),
    "special": (8, "MUFU|I2F|F2I|F2F|POPC|FLO"),
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


def _planes(given: Given) -> float:
    return 4


def _looking_planes(given: Given) -> float:
    return 2


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
    shared: int = 0  # bytes of a block that only the launch knows

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
           lambda g: {1: _group(g), 2: 0, 3: _group(g) * g["T"] / 4, 4: 0, 5: 0, 6: 0},
           shared=16 << 10),
    Family("backward, bands", r"backward_bands<(T), (I)>", _group, 2, 2,
           lambda g: {1: _group(g), 2: 0, 3: 0}, gathers=True, shared=16 << 10),
    Family("pool, rows", rf"pool_rows<(T), (I), (?P<k>\d), (?P<s>\d), {V}, (?P<R>\d), true>"),
    Family("pool, channels", rf"pool_channels<(T), (I), (?P<k>\d), {V}>", _own, 0, 2),
    Family("backward", r"backward<(T), (I), false>", _planes, 2, 2, gathers=True),
    Family("backward", r"backward<(T), (I), true>", _looking_planes, 3, 2,
           gathers=True),
]
# fmt: on
# One of these is in the name of each other kernel: any windows, layouts and offsets; what is
# stray; rows that do not divide into vectors; elements of other sizes.
NOT_FAST = [
    r"(forward|pool)_windows|_stray|_any|void",
    r"(forward_\w+|backward\w*|pool_\w+)<(TakeLast<)?(unsigned char|unsigned long|double)",
]

# Of what is executed: squares of the widths of global accesses, accesses to any memory, issue
# slots, bytes from and to global memory, and slots of each pipe.
Cost = tuple[float, ...]
NOTHING: Cost = (0.0,) * (4 + len(PIPES))


def _add(a: Cost, b: Cost, times: float = 1) -> Cost:
    return tuple(x + times * y for x, y in zip(a, b, strict=True))


def _cost(opcode: str) -> Cost:
    name, *parts = opcode.split(".")
    width = 0
    if name in ("LDG", "STG"):
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        width = next((widths[part] for part in parts if part in widths), 4)
    accesses = bool(re.fullmatch(MEMORY, name))
    slots = (slots if re.fullmatch(of, name) else 0 for slots, of in PIPES.values())
    return width**2, accesses, 1, width, *(2 * n if "WIDE" in parts else n for n in slots)


@dataclass
class Block:
    """Instructions that are executed one after the other."""

    cost: Cost = NOTHING
    loads: int = 0  # bytes of the widest
    writes: bool = False  # or has to do with shared memory
    reports: bool = False  # a bad index
    ends: bool = False  # the thread, perhaps
    after: list[int] = field(default_factory=list)


Graph = dict[int, Block]  # by address; the first is the entry
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)([^;]*);", re.M)


def graph_of(code: str) -> Graph:
    """The blocks of a kernel, as cuobjdump prints it."""
    found = [(int(a, 16), bool(g), op, rest) for a, g, op, rest in INSTRUCTION.findall(code)]
    leaves = re.compile("BRA|BRX|JMP|JMX|EXIT|RET")
    leaders = {int(rest.split("0x")[1], 16) for _, _, op, rest in found if op.startswith("BRA")}
    leaders |= {b[0] for a, b in pairwise(found) if leaves.match(a[2])}
    blocks: Graph = {}
    block, falls = Block(), False
    for address, guarded, opcode, rest in found:
        if not blocks or address in leaders:
            if falls:
                block.after.append(address)
            block = blocks[address] = Block()
        block.cost = _add(block.cost, _cost(opcode))
        if opcode.startswith("LDG"):
            block.loads = max(block.loads, int(_cost(opcode)[3]))
        else:
            block.writes |= bool(_cost(opcode)[1])
        cold = opcode.startswith(("ATOM.", "ATOMG.", "RED", "CALL")) or "STRONG" in opcode
        block.reports |= cold and not guarded
        falls = True
        if opcode.startswith("BRA"):
            block.after.append(int(rest.split("0x")[1], 16))
            falls = guarded or "," in rest
        elif leaves.match(opcode):
            block.ends, falls = True, guarded
    return blocks


def _reach(graph: Graph, start: int, without: Iterable[int] = ()) -> set[int]:
    seen, todo = set(without), [start]
    while todo:
        address = todo.pop()
        if address not in seen:
            seen.add(address)
            todo += graph[address].after
    return seen - set(without)


def hot(graph: Graph) -> Graph:
    """Without cold blocks."""
    entry = next(iter(graph))
    everything = _reach(graph, entry)
    # What a block leads to, and nothing else does.
    owned = {a: everything - _reach(graph, entry, [a]) for a in everything if a != entry}
    cold = set().union(*(owned[a] for a in owned if graph[a].reports))
    widest = max(graph[a].loads for a in everything - cold)

    def is_needless(address: int) -> bool:
        rest = owned[address] - cold
        works = (b.loads >= widest or b.writes or b.ends for b in map(graph.__getitem__, rest))
        if rest == owned[address] or any(works):
            return False
        others = everything - owned[address]  # must get to the end all the same
        return all(any(graph[b].ends for b in _reach(graph, a, [address])) for a in others)

    cold |= set().union(*[owned[a] for a in owned if a not in cold and is_needless(a)])
    kept = {a: graph[a] for a in graph if a in everything - cold}
    return {a: replace(b, after=[t for t in b.after if t in kept]) for a, b in kept.items()}


def _usual(ways: list[Cost], origin: Cost) -> Cost:
    """Of the costs of ways that part at the origin and meet again, that of the usual one."""
    most = max(way[:2] for way in ways)
    same = [way for way in ways if way[:2] == most]
    return (min if most[1] > origin[1] else max)(same, key=lambda way: way[2])


class Paths:
    """Through a graph without cold blocks. `trips` is of loops by their number."""

    def __init__(self, graph: Graph, trips: Mapping[int, float]) -> None:
        self.graph, self.entry = graph, next(iter(graph))
        # The blocks that each is reached through only.
        reached = {a: _reach(graph, self.entry, [a]) for a in graph}
        self.through = {b: {a for a in graph if b not in reached[a]} for b in graph}
        self.trips: dict[int, float] = {}
        self.loops: dict[int, Cost] = {}  # what once through takes
        self._costs(set(graph), self.entry)
        self.trips = {header: trips.get(n, 1) for n, header in enumerate(sorted(self.loops))}

    def usual(self) -> Cost:
        """What the usual path takes."""
        costs = self._costs(set(self.graph), self.entry)
        return max(cost for a, cost in costs.items() if self.graph[a].ends)

    def skip(self, given: Iterable[int], least: float) -> None:
        """Leave out loops, but for those given, as far as so many bytes are moved without."""
        for n, header in enumerate(self.trips):
            kept = self.trips[header]
            self.trips[header] = kept if n in given else 0
            if n not in given and not self._moves(least):
                self.trips[header] = kept

    def _moves(self, least: float) -> bool:
        costs = self._costs(set(self.graph), self.entry)
        return any(cost[3] >= least for a, cost in costs.items() if self.graph[a].ends)

    def _costs(self, within: set[int], entry: int) -> dict[int, Cost]:
        """What it takes from the entry up to each block's end."""
        graph, best = self.graph, dict[int, Cost]()
        for component in self._components(within, entry):
            into = {b: [best[a] for a in best if b in graph[a].after] for b in component}
            header = entry if entry in component else min((b for b in into if into[b]), default=-1)
            if header < 0:
                continue  # behind a loop that is not gone through
            before = NOTHING
            if header != entry:
                parting = max(self.through[header] - {header}, key=lambda a: len(self.through[a]))
                before = _usual(into[header], best.get(parting, NOTHING))
            inside = {header: graph[header].cost}
            if header != entry and (len(component) > 1 or header in graph[header].after):
                inside = self._costs(component, header)
                self.loops[header] = max(inside[a] for a in inside if header in graph[a].after)
                before = _add(before, self.loops[header], self.trips.get(header, 1) - 1)
                if self.trips.get(header, 1) == 0:
                    continue
            best |= {a: _add(before, cost) for a, cost in inside.items()}
        return best

    def _components(self, within: set[int], header: int) -> list[set[int]]:
        """Strongly connected ones but for the ways back to the header, in topological order."""
        cut = (set(self.graph) - within) | {header}
        after = {
            a: {a}.union(*(_reach(self.graph, b, cut) for b in self.graph[a].after)) for a in within
        }
        found: list[set[int]] = []
        placed: set[int] = set()
        for a in sorted(within, key=lambda a: (-len(after[a]), a)):
            if a not in placed:
                found.append({b for b in after[a] if a in after[b]})
                placed |= found[-1]
        return found


class Demand(NamedTuple):
    """What a kernel needs at a usual window, and what it is allowed."""

    kernel: str
    window: str
    values: str
    indices: str
    registers: int
    blocks: int  # that fit an SM
    useful: float  # bytes a thread
    moved: float  # those, with what others read too
    needed: float  # issue slots a warp
    allowed: float
    percent: float
    busiest_pipe: str
    name: str
    loops: str

    @property
    def is_too_much(self) -> bool:
        return self.percent > ABOVE.get((self.kernel, self.window, self.values), 100)


def demand(family: Family, match: re.Match[str], code: str, usage: str) -> Demand:
    """Of a kernel that the family's pattern matches; usage as cuobjdump -res-usage prints it."""
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
    if apart and paths.usual()[3] >= 2 * useful:
        paths.skip(trips, useful)
    _, _, needed, moved, *pipes = paths.usual()
    loops = "; ".join(
        f"{n:g} x {paths.loops[a][2]:.0f} slots and {paths.loops[a][3]:.0f} bytes at {a:x}"
        for a, n in paths.trips.items()
    )
    if moved < least or (apart and moved >= 2 * useful):
        raise LookupError(f"{match[0]}: {moved:g} of {least:g} bytes are moved; loops: {loops}")
    registers, shared = (int(re.findall(rf"{what}:(\d+)", usage)[0]) for what in ("REG", "SHARED"))
    allocated = -(-registers * 32 // 256) * 256 * THREADS // 32
    shared = max(shared, 1024) + family.shared  # 1 KB of a block is not its own
    blocks = min(SM_THREADS // THREADS, SM_REGISTERS // allocated, SM_SHARED // shared)
    allowed = useful * SLOTS_PER_BYTE
    busiest, pipe = max(zip(pipes, PIPES, strict=True))
    return Demand(
        family.name,
        f"{window}x{window}/{stride}" + (" padded" if given.get("p") else ""),
        *(values, indices, registers, blocks, useful, moved, needed, allowed),
        percent=100 * needed / allowed,
        busiest_pipe=f"{pipe}, {100 * busiest / allowed:.0f} %",
        name=match[0],
        loops=loops,
    )


def demands(codes: Mapping[str, str], usages: Mapping[str, str]) -> list[Demand]:
    """Of all fast kernels at all their usual windows. Both are by mangled names."""
    found: list[Demand] = []
    for mangled, name in demangled(codes).items():
        fits = [(family, match) for family in FAST if (match := family.match(name))]
        if not fits and not any(re.search(pattern, name) for pattern in NOT_FAST):
            raise LookupError(f"neither FAST nor NOT_FAST knows {name}")
        found += [demand(*fit, codes[mangled], usages[mangled]) for fit in fits]
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


def read_usages(listing: str) -> dict[str, str]:
    """By mangled names, what cuobjdump -res-usage lists."""
    return dict(re.findall(r"Function (\S+):\s+(REG.*)", listing))


def read(library: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The kernels' machine code, without its encoding, and their usages."""
    program = disassembler()
    if program is None:
        sys.exit("neither cuobjdump nor Triton is installed")
    command = [program, "-arch", f"sm_{ARCHITECTURE}", str(library)]
    usage = subprocess.run([*command, "-res-usage"], capture_output=True, text=True)
    if usage.returncode != 0:
        sys.exit(usage.stderr)
    codes: dict[str, list[str]] = {}
    with subprocess.Popen([*command, "-sass"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Function : " in line:
                lines = codes[line.split()[-1]] = []
            elif ";" in line:
                lines.append(line.partition(";")[0] + ";")
    return {name: "\n".join(lines) for name, lines in codes.items()}, read_usages(usage.stdout)


def table(found: Iterable[Demand], markdown: bool) -> str:
    """Bytes are those of a thread, slots those of a warp."""
    shown = len(Demand._fields) - 2
    rows = [[f"{x:.0f}" if isinstance(x, float) else str(x) for x in d[:shown]] for d in found]
    rows.insert(0, [name.replace("_", " ") for name in Demand._fields[:shown]])
    if markdown:
        rows.insert(1, ["--"] * 4 + ["--:"] * 7 + ["--"])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    """Print the table of a library, by default of the one that is installed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("library", type=Path, nargs="?")
    parser.add_argument("--kernel", metavar="REGEX", help="only such names, and their loops")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    installed = (so for path in sys.path for so in Path(path).glob("maxunpool_cuda/_C*.so"))
    library = asked.library or next(installed, None)
    if library is None:
        sys.exit("maxunpool_cuda is not installed")
    codes, usages = read(library)
    names = demangled(codes)
    chosen = {name: codes[name] for name in codes if re.search(asked.kernel or "", names[name])}
    found = demands(chosen, usages)
    print(table(found, asked.markdown))
    print(f"\n{len(codes)} kernels for sm_{ARCHITECTURE}; at most {MOST_KERNELS} are wanted.")
    if asked.kernel:
        print(*(f"{d.name}: {d.loops}" for d in found), sep="\n")


if __name__ == "__main__":
    main()
