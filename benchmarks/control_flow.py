"""The path of a usual warp through a kernel's machine code, and what it takes.

- Cold blocks are left out: those that reach the error record (atomics on global memory, volatile
  accesses, calls), and what leads nowhere but there or around it, if it writes nothing and loads
  nothing as wide as other blocks.
- Of several ways to a block the usual one moves the widest vectors and accesses memory most. Of
  equal ones it is the shortest, as whole vectors are beside vectors in parts; or the longest, if
  they access none. That may be too long where a warp skips what it has no use for, and too short
  where half of a warp goes either way.
- A loop is gone through once, unless it is told how often.
- Each instruction is an issue slot, be it predicated off. Stalls, misses and pipes that are slower
  than the issue are not counted.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import networkx as nx  # PyTorch brings it

MEMORY = ("LDG", "STG", "LDS", "STS", "ATOMS", "LD", "ST")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class Cost(NamedTuple):
    """Of the instructions on a path."""

    squares: float = 0  # of the widths of global accesses
    accesses: float = 0  # to any memory
    slots: float = 0  # of issue
    bytes: float = 0  # from and to global memory

    def plus(self, other: "Cost", times: float = 1) -> "Cost":
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


NOTHING = Cost()


def _cost(opcode: str) -> Cost:
    name, *parts = opcode.split(".")
    width = 0
    if name in ("LDG", "STG"):
        width = next((WIDTHS[part] for part in parts if part in WIDTHS), 4)
    return Cost(width**2, name in MEMORY, 1, width)


@dataclass
class Block:
    """Instructions that are executed one after the other."""

    cost: Cost = NOTHING
    loads: int = 0  # bytes of the widest
    writes: bool = False  # or has to do with shared memory
    reports: bool = False  # a bad index
    ends: bool = False  # the thread, perhaps


INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)([^;]*);", re.M)
LEAVES = re.compile("BRA|BRX|JMP|JMX|EXIT|RET")


def graph_of(code: str) -> nx.DiGraph:
    """The control flow of a kernel, as cuobjdump prints it: each node's "block", by address."""
    found = [(int(a, 16), bool(g), op, rest) for a, g, op, rest in INSTRUCTION.findall(code)]
    leaders = {int(rest.split("0x")[1], 16) for _, _, op, rest in found if op.startswith("BRA")}
    leaders |= {after[0] for before, after in pairwise(found) if LEAVES.match(before[2])}
    graph = nx.DiGraph()
    start, falls = 0, False
    for address, guarded, opcode, rest in found:
        if not graph or address in leaders:
            block = Block()
            graph.add_node(address, block=block)
            if falls:
                graph.add_edge(start, address)
            start = address
        cost = _cost(opcode)
        block.cost = block.cost.plus(cost)
        if opcode.startswith("LDG"):
            block.loads = max(block.loads, int(cost.bytes))
        else:
            block.writes |= bool(cost.accesses)
        cold = opcode.startswith(("ATOM.", "ATOMG.", "RED", "CALL")) or "STRONG" in opcode
        block.reports |= cold and not guarded
        falls = True
        if opcode.startswith("BRA"):
            graph.add_edge(start, int(rest.split("0x")[1], 16))
            falls = guarded or "," in rest
        elif LEAVES.match(opcode):
            block.ends, falls = True, guarded
    entry = min(graph)
    return graph.subgraph({entry} | nx.descendants(graph, entry))


def _blocks(graph: nx.DiGraph) -> dict[int, Block]:
    return dict(graph.nodes(data="block"))


def _dominators(graph: nx.DiGraph) -> dict[int, int]:
    """Of each block but the entry the last of those that every way to it goes through."""
    entry = min(graph)
    found = nx.immediate_dominators(graph, entry)
    return {block: before for block, before in found.items() if block != entry}


def hot(graph: nx.DiGraph) -> nx.DiGraph:
    """Without cold blocks."""
    blocks, everything = _blocks(graph), set(graph)
    tree = nx.DiGraph((before, block) for block, before in _dominators(graph).items())
    # What a block leads to, and nothing else does.
    owned = {a: {a} | nx.descendants(tree, a) for a in tree if a != min(graph)}
    cold = set().union(*(owned[a] for a in owned if blocks[a].reports))
    widest = max(blocks[a].loads for a in everything - cold)

    def is_needless(address: int) -> bool:
        rest = owned[address] - cold
        works = (b.loads >= widest or b.writes or b.ends for b in map(blocks.__getitem__, rest))
        if rest == owned[address] or any(works):
            return False
        others = everything - owned[address]  # must get to the end all the same
        without = graph.subgraph(everything - {address})
        ends = {a for a in without if blocks[a].ends}
        return others <= ends.union(*(nx.ancestors(without, a) for a in ends))

    cold |= set().union(*[owned[a] for a in owned if a not in cold and is_needless(a)])
    return graph.subgraph(everything - cold)


def _usual(ways: list[Cost], origin: Cost) -> Cost:
    """Of the costs of ways that part at the origin and meet again, that of the usual one."""
    most = max(way[:2] for way in ways)
    same = [way for way in ways if way[:2] == most]
    return (min if most[1] > origin.accesses else max)(same, key=lambda way: way.slots)


class Paths:
    """Through a graph without cold blocks. `trips` is of loops by their number."""

    def __init__(self, graph: nx.DiGraph, trips: Mapping[int, float]) -> None:
        self._graph, self._blocks, self._parting = graph, _blocks(graph), _dominators(graph)
        self.trips: dict[int, float] = {}
        self.loops: dict[int, Cost] = {}  # what once through takes
        self.ends()
        self.trips = {header: trips.get(n, 1) for n, header in enumerate(sorted(self.loops))}

    def ends(self) -> list[Cost]:
        """What it takes to get to each end."""
        costs = self._costs(set(self._graph), min(self._graph))
        return [cost for a, cost in costs.items() if self._blocks[a].ends]

    def usual(self) -> Cost:
        """What the usual path takes."""
        return max(self.ends())

    def skip(self, given: Iterable[int], least: float) -> None:
        """Leave out loops, but for those given, as far as so many bytes are moved without."""
        for n, header in enumerate(self.trips):
            kept = self.trips[header]
            self.trips[header] = kept if n in given else 0
            if n not in given and not any(cost.bytes >= least for cost in self.ends()):
                self.trips[header] = kept

    def _costs(self, within: set[int], entry: int) -> dict[int, Cost]:
        """What it takes from the entry up to each block's end."""
        inside = nx.DiGraph(self._graph.subgraph(within))
        inside.remove_edges_from(list(inside.in_edges(entry)))
        condensed = nx.condensation(inside)
        best: dict[int, Cost] = {}
        for number in nx.topological_sort(condensed):
            component = condensed.nodes[number]["members"]
            into = {b: [best[a] for a in inside.predecessors(b) if a in best] for b in component}
            header = entry if entry in component else min((b for b in into if into[b]), default=-1)
            if header < 0:
                continue  # behind a loop that is not gone through
            before = NOTHING
            if header != entry:
                before = _usual(into[header], best.get(self._parting[header], NOTHING))
            costs = {header: self._blocks[header].cost}
            if header != entry and (len(component) > 1 or inside.has_edge(header, header)):
                costs = self._costs(component, header)
                self.loops[header] = max(c for a, c in costs.items() if inside.has_edge(a, header))
                trips = self.trips.get(header, 1)
                before = before.plus(self.loops[header], trips - 1)
                if trips == 0:
                    continue
            best |= {a: before.plus(cost) for a, cost in costs.items()}
        return best
