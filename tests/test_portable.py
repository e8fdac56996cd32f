"""The portable form of the operators, beside the reference."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import MOVABLE, OPERATORS, POOLED, REDUCES, aimed_case, unpool_call

from maxunpool_cuda import _ops, _portable

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
PORTABLE: dict[Any, Any] = {
    _ops.max_unpool: _portable.max_unpool,
    _ops.max_unpool_backward: _portable.max_unpool_backward,
    _ops.max_pool: _portable.max_pool,
}


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [(name, dtype) for name in OPERATORS for dtype in (POOLED if name == "pool" else MOVABLE)],
    ids=str,
)
def test_agrees_with_the_reference(operator: str, dtype: torch.dtype, rng: random.Random) -> None:
    for _ in range(3):
        call = OPERATORS[operator](rng, dtype)
        replace(call, operator=PORTABLE[call.operator]).check()


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("window", ["2x2/2", "3x3/4", "3x3/2 padded", "2x2/1"])
def test_usual_windows_agree_with_the_reference(
    window: str, forward: bool, rng: random.Random
) -> None:
    for reduce, offsets in itertools.product(REDUCES, (True, False)):
        case = aimed_case(rng, "channels", window, offsets, torch.float32, reduce)
        call = unpool_call(case, forward)
        replace(call, operator=PORTABLE[call.operator]).check()
