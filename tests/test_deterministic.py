# SPDX-License-Identifier: BSD-3-Clause
"""Deterministic mode fills no result of this package.

And PyTorch's own calls raise, or do not, as docs/deterministic.md says of the installed release.
"""

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from cases import OPERATORS, draw, scaled
from conftest import Record, needs_library
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.profiler import profile

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Modules of PyTorch, whose backward on CUDA raises the error unless they are decomposed. Of each
# the dimensions, the operator that a decomposition has not, and whether this release decomposes it.
CALLS = [
    (nn.MaxPool3d(2), 3, "max_pool3d_with_indices", False),
    (nn.MaxPool3d(2, return_indices=True), 3, "max_pool3d_with_indices", RELEASE >= (2, 13)),
    (nn.AdaptiveMaxPool2d(1), 2, "adaptive_max_pool2d", False),
    (nn.Upsample(scale_factor=2, mode="bicubic"), 2, "upsample_bicubic2d", RELEASE >= (2, 15)),
]


def dispatched(call: Callable[[Tensor], Any], dims: int) -> list[str]:
    """The operators that ``call`` dispatches for a CUDA tensor, which is fake: no GPU is needed."""
    # Without CUDA, PyTorch stops in the middle of a decomposition, but not at an operator.
    stops = contextlib.nullcontext() if torch.version.cuda else contextlib.suppress(RuntimeError)
    with FakeTensorMode(), Record() as record:
        x = torch.empty(1, 2, *[8] * dims, device="cuda")
        with stops:
            call(x)
    return record.names


@pytest.mark.parametrize(("call", "dims", "operator", "is_decomposed"), CALLS)
def test_what_raises_on_cuda(
    call: Callable[[Tensor], Any], dims: int, operator: str, is_decomposed: bool
) -> None:
    """A failure means that PyTorch has changed: docs/deterministic.md must say so, then CALLS."""
    assert (f"aten::{operator}" not in dispatched(call, dims)) == is_decomposed
    torch.use_deterministic_algorithms(False)
    assert f"aten::{operator}" in dispatched(call, dims)


@needs_library
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("device", ["cpu", "dispatched"], indirect=True)
def test_deterministic_mode_fills_no_tensor(device: str, operator: str, rng: Random) -> None:
    """PyTorch fills what torch.empty() makes. Kernels write every element of their results."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    calls = [draw(rng, operator) for _ in range(scaled(40))]  # some have copies of their tensors
    with profile(record_shapes=True) as recorded:
        torch.empty(5)
        for call in calls:
            call.on(*call.tensors)
    fills = [event.input_shapes[0] for event in recorded.events() if event.name == "aten::fill_"]
    assert fills == [[5]]
