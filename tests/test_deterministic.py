"""Deterministic mode: what raises in networks, and that converted ones never call it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import same
from published import PUBLISHED, results
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import maxunpool_cuda

# Operators that, on CUDA in some release from 2.8 to 2.15, raise or silently add up in any order.
NONDETERMINISTIC = {
    "aten::max_pool3d_with_indices_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d_backward",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
}


class Operators(TorchDispatchMode):
    """The names of all operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().split(".")[0])
        return func(*args, **kwargs or {})


def pools() -> nn.Module:
    """A pool whose windows overlap, and adaptive ones: of uneven sizes, and of even ones."""
    layers = [nn.Conv3d(2, 4, 3, padding=1), nn.MaxPool3d(3, 2, 1)]
    for size in ((5, 6, 4), 2):
        layers += [nn.Conv3d(4, 4, 3, padding=1), nn.AdaptiveMaxPool3d(size)]
    return nn.Sequential(*layers)


@pytest.mark.usefixtures("composed", "single_threaded_torch")
@pytest.mark.parametrize("make", [PUBLISHED["UNet3d"].make, pools], ids=["UNet3d", "pools"])
def test_training_step(make: Callable[[], nn.Module]) -> None:
    """Results equal torch.nn's bit for bit, as its sums have the same order on the CPU."""
    model, x = make().double(), torch.rand(2, 2, 13, 14, 15, dtype=torch.float64)
    with Operators() as theirs:
        expected = results(model, x)
    assert theirs.names & NONDETERMINISTIC
    torch.use_deterministic_algorithms(True)
    with maxunpool_cuda.patched(), Operators() as functions:
        found = [results(model, x)]
    assert maxunpool_cuda.replace_max_pooling(model) == {}
    with Operators() as modules:
        found.append(results(model, x))
    assert not (functions.names | modules.names) & NONDETERMINISTIC
    for each in found:
        assert [name for name in expected if not same(each[name], expected[name])] == []
