"""One case: make its tensors, check everyone's result, time them in turns, weigh a call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import data, memory, model, timing
from .cases import Case
from .contenders import CLONE, COMPILED, CONTENDERS, ONNX, OURS, TORCH, Prepared, is_able

EQUAL, DIFFERS, WRONG = "equal", "differs", "wrong"


def _agree(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """In shape, dtype and every value."""
    return len(results) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(results, expected, strict=True)
    )


def _judge(
    name: str, prepared: Prepared, definition: Callable[..., tuple[Tensor, ...]]
) -> dict[str, Any]:
    """What is to be said of the first call's result."""
    if prepared.tensors is None:
        return {}
    found = prepared.tensors(prepared.calls[0]())
    if _agree(found, definition()):
        return {"agreement": EQUAL}
    if name in (TORCH, COMPILED) and _agree(found, definition(to_losers=True)):
        return {"agreement": DIFFERS}
    return {"agreement": WRONG, "reason": "its result is not the definition's"}


def run(case: Case, device: str, peers: Sequence[str], seconds: float) -> dict[str, Any]:
    """Time the case.

    Returns:
        A dict with ``name`` and ``results``. Of each contender that does the case: the
        ``agreement`` of its result with the definition (``"equal"``; ``"differs"`` of PyTorch's,
        which is known to hand the gradient of overlapping windows to every value with the same
        index; or ``"wrong"``), and the ``quartiles`` of its seconds and ``peak_bytes`` (None where
        it cannot be seen), or a ``reason`` why it was not timed. Where memory does not suffice
        there is a ``reason`` instead of ``results``.
    """
    # Data, clone's source, several results and the definition's workings.
    needed, available = 5 * model.useful_bytes(case), memory.available_bytes(device)
    if needed > available:
        need, have = (round(size / 2**30) for size in (needed, available))
        reason = f"needs about {need} GiB of memory, {have} are available"
        return {"name": case.name, "reason": reason}

    copies = data.rotation(data.make(case, device), memory.cache_bytes(device))
    definition = functools.cache(functools.partial(data.definition, case, copies[0]))
    results: dict[str, dict[str, Any]] = {}
    calls: dict[str, Sequence[timing.Call]] = {}
    for name in (OURS, CLONE, *(peer for peer in peers if is_able(peer, case, device))):
        try:
            prepared = CONTENDERS[name](case, copies)
            results[name] = _judge(name, prepared, definition)
        except Exception as error:
            if name == OURS:
                raise
            # A peer's failure is a fact about it: the others are still compared.
            first_line = str(error).strip().split("\n")[0]
            results[name] = {"reason": f"{type(error).__name__}: {first_line}"}
            continue
        if results[name].get("agreement") != WRONG:
            calls[name] = prepared.calls

    clock: timing.Clock = timing.cpu_clock
    if device == "cuda":
        with_host = case.family in ("sweep", "tiny")
        clock = functools.partial(timing.cuda_clock, with_host=with_host)
    for name, quartiles in timing.interleave(calls, clock, seconds).items():
        peak = None if name == ONNX else memory.peak_bytes(calls[name][0], device)
        rounded = [float(f"{time:.5g}") for time in quartiles]
        results[name] |= {"quartiles": rounded, "peak_bytes": peak}
    return {"name": case.name, "results": results}
