"""One case: make its tensors, check everyone's result, time them in turns, weigh one call of each.

What comes out is a dict for JSON; see :func:`run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import data, model, timing
from .cases import Case
from .contenders import CLONE, COMPILED, CONTENDERS, ONNX, OURS, TORCH, Contender, Prepared, Unable
from .memory import available_bytes, peak_bytes

EQUAL, DIFFERS, WRONG = "equal", "differs", "wrong"


class Judge:
    """Compares everyone's result of one case with the definition's."""

    def __init__(self, case: Case, given: data.Data) -> None:
        self._case = case
        self._given = given
        self._expected = data.definition(case, given)

    def agreement(self, name: str, results: Sequence[Tensor]) -> str:
        """Whether results are as defined, in shape, dtype and every value.

        Returns:
            ``"equal"``; ``"differs"`` of PyTorch's, where windows overlap and the gradient is
            handed to every value with the same index, as it is known to be; else ``"wrong"``.
        """
        if _same(results, self._expected):
            return EQUAL
        known = self._case.overlapping and self._case.with_gradient
        if name in (TORCH, COMPILED) and known and self._case.operation != "pool":
            torchs = data.definition(self._case, self._given, to_losers=True)
            return DIFFERS if _same(results, torchs) else WRONG
        return WRONG


def _same(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(results) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(results, expected, strict=True)
    )


def _prepare(
    case: Case, name: str, contender: Contender, copies: Sequence[data.Data], judge: Judge
) -> tuple[Prepared | None, dict[str, Any]]:
    """The contender ready for the case, or None; and what is to be said of it."""
    try:
        prepared = contender(case, copies)
        if prepared.tensors is None:
            return prepared, {}
        verdict = judge.agreement(name, prepared.tensors(prepared.calls[0]()))
    except Unable as reason:
        return None, {"reason": str(reason)}
    except Exception as error:
        if name == OURS:
            raise
        # A peer's failure is a fact about it: the others are still compared.
        first_line = str(error).strip().split("\n")[0]
        return None, {"reason": f"{type(error).__name__}: {first_line}"}
    if verdict == WRONG:
        return None, {"reason": "its result is not the definition's", "agreement": WRONG}
    return prepared, {"agreement": verdict, "note": prepared.note}


def run(
    case: Case,
    device: str,
    peers: Sequence[str],
    budget: timing.Budget,
    contenders: dict[str, Contender] = CONTENDERS,
) -> dict[str, Any]:
    """Time the case.

    Returns:
        A dict with ``name``, ``case`` (its fields), ``useful_bytes`` and ``results``: by name of
        contender either a ``reason`` why it was not timed, or seconds ``median``,
        ``first_quartile`` and ``third_quartile``, ``rounds``, ``useful_gb_per_s``,
        ``fraction_of_clone``, ``peak_bytes`` (None where it cannot be seen), ``agreement`` with
        the definition, a ``note`` and, of a peer, ``times_ours``: its time divided by this
        package's. Where memory does not suffice there is a ``reason`` instead of ``results``.
    """
    row: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case)}
    useful = model.useful_bytes(case)
    row["useful_bytes"] = useful
    # Data, clone's source, several results and the definition's workings.
    needed, available = 5 * useful, available_bytes(device)
    if needed > available:
        need, have = (round(size / 2**30) for size in (needed, available))
        return {**row, "reason": f"needs about {need} GiB of memory, {have} are available"}

    copies = data.rotation(data.make(case, device), timing.cache_bytes(device))
    judge = Judge(case, copies[0])
    ready: dict[str, Prepared] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in (OURS, CLONE, *peers):
        prepared, results[name] = _prepare(case, name, contenders[name], copies, judge)
        if prepared is not None:
            ready[name] = prepared

    clock: timing.Clock = timing.CpuClock()
    if device == "cuda":
        clock = timing.CudaClock(with_host=case.family in ("sweep", "tiny"))
    times = timing.interleave({name: ready[name].calls for name in ready}, clock, budget)
    for name, measured in times.items():
        call = ready[name].calls[0]
        result = results[name]
        result |= dataclasses.asdict(measured)
        result["useful_gb_per_s"] = useful / measured.median / 1e9
        result["fraction_of_clone"] = times[CLONE].median / measured.median
        result["peak_bytes"] = None if name == ONNX else peak_bytes(call, device)
        if name not in (OURS, CLONE) and OURS in times:
            result["times_ours"] = measured.median / times[OURS].median
    return {**row, "results": results}
