"""What a case should cost, before it is measured. See docs/performance.md for why."""

import math

from .cases import ITEM_SIZE, Case

SECTOR = {"cuda": 32, "cpu": 64}
CPU_EFFICIENCY = 0.77


def _sizes(case: Case) -> tuple[int, int, int]:
    """Bytes of the pooled values, of the indices and of the output."""
    item = ITEM_SIZE[case.dtype]
    return case.cells * item, case.cells * ITEM_SIZE[case.index_dtype], case.outputs * item


def operators(case: Case) -> tuple[str, ...]:
    """What is called: maxima are pooled, scattered and gathered."""
    forward, backward = {
        "unpool": (("scatter",), ("gather",)),
        "pool": (("pool",), ("scatter",)),
        "round-trip": (("pool", "scatter"), ("gather", "scatter")),
    }[case.operation]
    return {"forward": forward, "backward": backward, "both": forward + backward}[case.direction]


def useful_bytes(case: Case) -> int:
    """Every tensor of each operator's call once: pooled values, indices, and the unpooled side."""
    return sum(_sizes(case)) * len(operators(case))


def touched(case: Case, device: str) -> float:
    """The expected fraction of grad_output's sectors (of a CPU: cache lines) that hold an index.

    A window's index may be anywhere in it; a sector is a piece of a row, in channels_last of one
    position's channels. Of windows that overlap, all of them. What no window holds is not touched:
    the last row of an odd number of them.
    """
    if case.overlapping:
        return 1.0
    elements = SECTOR[device] // ITEM_SIZE[case.dtype]
    window = case.kernel_size**case.rank
    sizes = zip(case.pooled[2:], case.shape[2:], strict=True)
    held = math.prod(min(1, cells * case.stride / size) for cells, size in sizes)
    if case.layout == "channels_last":
        return held * (1 - (1 - 1 / window) ** min(elements, case.shape[1]))
    return held * (1 - (1 - case.kernel_size / window) ** (elements / case.kernel_size))


def floor_bytes(case: Case, device: str) -> float:
    """What the memory has to move at least. Only a gather may leave something where it is."""
    values, indices, unpooled = _sizes(case)
    needed = {"gather": touched(case, device)}
    return sum(values + indices + unpooled * needed.get(name, 1) for name in operators(case))


def cpu_fraction(case: Case) -> float:
    """Predicted fraction of the clone on a CPU of few cores, calls' overhead apart."""
    return CPU_EFFICIENCY * useful_bytes(case) / floor_bytes(case, "cpu")
