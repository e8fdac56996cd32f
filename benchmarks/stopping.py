"""When no more work is to be begun: after a signal, or when the time is up."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping(limit: float | None = None) -> Iterator[Callable[[], str]]:
    """Give what says why nothing more is to be begun; empty as long as there is no reason.

    That is the name of the first signal that came meanwhile, or that ``limit`` seconds are over.
    The work that has been begun goes on; a second signal does what it did before.
    """
    came: list[signal.Signals] = []
    before: dict[signal.Signals, Any] = {}
    deadline = math.inf if limit is None else time.monotonic() + limit

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        came.append(signal.Signals(number))
        restore()

    def reason() -> str:
        if came:
            return came[0].name
        return f"--limit {limit:g}" if time.monotonic() >= deadline else ""

    for number in SIGNALS:
        before[number] = signal.getsignal(number)
        signal.signal(number, note)
    try:
        yield reason
    finally:
        restore()
