# SPDX-License-Identifier: BSD-3-Clause
"""Deterministic mode fills no result of this package, and docs/deterministic.md is right.

It is right about PyTorch's own calls, in the release that is installed.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from cases import OPERATORS, draw, scaled
from conftest import Record, needs_library
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import interpolate
from torch.profiler import profile

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
ALWAYS, NEVER = (0,), (99,)  # every release that is known, and none


def dispatched(call: Callable[[Tensor], Any], dims: int) -> list[str]:
    """The operators that ``call`` dispatches for a CUDA tensor under deterministic algorithms.

    The tensor is fake, so no GPU is needed. A build of PyTorch without CUDA stops in the middle of
    a decomposition, but not at an operator.
    """
    stops = (
        contextlib.suppress(RuntimeError) if not torch.version.cuda else contextlib.nullcontext()
    )
    with FakeTensorMode(), Record() as record:
        x = torch.empty(1, 2, *[8] * dims, device="cuda")
        record.names.clear()
        with stops:
            call(x)
    return record.names


@dataclass(frozen=True)
class Known:
    """A call of PyTorch, whose backward on CUDA raises the error unless it is decomposed."""

    call: Callable[[Tensor], Any]
    dims: int
    operator: str  # which a decomposition has not
    decomposed_since: tuple[int, ...] = NEVER  # the first release


CALLS = {
    "MaxPool3d": Known(nn.MaxPool3d(2), 3, "aten::max_pool3d_with_indices"),
    "MaxPool3d with indices": Known(
        nn.MaxPool3d(2, return_indices=True), 3, "aten::max_pool3d_with_indices", (2, 13)
    ),
    "AdaptiveMaxPool2d": Known(nn.AdaptiveMaxPool2d(1), 2, "aten::adaptive_max_pool2d"),
    "linear": Known(
        lambda x: interpolate(x, scale_factor=2, mode="linear"), 1, "aten::upsample_linear1d"
    ),
    "bilinear": Known(
        lambda x: interpolate(x, scale_factor=2, mode="bilinear"),
        2,
        "aten::upsample_bilinear2d",
        ALWAYS,
    ),
    "bilinear, antialias": Known(
        lambda x: interpolate(x, scale_factor=2, mode="bilinear", antialias=True),
        2,
        "aten::_upsample_bilinear2d_aa",
    ),
    "trilinear": Known(
        lambda x: interpolate(x, scale_factor=2, mode="trilinear"),
        3,
        "aten::upsample_trilinear3d",
        ALWAYS,
    ),
    "bicubic": Known(
        lambda x: interpolate(x, scale_factor=2, mode="bicubic"), 2, "aten::upsample_bicubic2d"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_raises_on_cuda(name: str) -> None:
    """A failure means that PyTorch has changed: docs/deterministic.md must say so, then CALLS."""
    known = CALLS[name]
    torch.use_deterministic_algorithms(True)
    names = dispatched(known.call, known.dims)
    decomposed = not any(each.startswith(known.operator) for each in names)
    # Each decomposition computes the coordinates of its windows.
    assert not decomposed or "aten::arange" in names, names
    found = "decomposes it" if decomposed else f"dispatches {known.operator}"
    page = "decomposes it" if known.decomposed_since <= RELEASE else f"dispatches {known.operator}"
    assert found == page, (
        f"{name}: docs/deterministic.md says that PyTorch {torch.__version__} {page} for a CUDA "
        f"tensor under deterministic algorithms, but it {found}: correct the page and CALLS"
    )


@pytest.mark.parametrize("name", CALLS)
def test_only_deterministic_mode_decomposes(name: str) -> None:
    """The check above sees a difference: without the mode, every call has its operator."""
    torch.use_deterministic_algorithms(False)
    names = dispatched(CALLS[name].call, CALLS[name].dims)
    assert any(each.startswith(CALLS[name].operator) for each in names), names


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
