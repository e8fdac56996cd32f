"""Deterministic mode: what raises in networks, and that converted ones never call it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import same
from published import PUBLISHED, results
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import maxunpool_cuda

PAGE = Path(__file__).parent.parent / "docs" / "deterministic.md"
SENTENCE = "does not have a deterministic implementation"
# Operators that raise on CUDA, in some releases from 2.8 to 2.15, or add up in any order unseen.
NONDETERMINISTIC = {
    "aten::max_pool3d_with_indices_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d_backward",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
}


class Operators(TorchDispatchMode):
    """The names of all that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().split(".")[0])
        return func(*args, **kwargs or {})


def adaptive() -> nn.Module:
    """Of a size that is no multiple of 5 nor of 4, to such and to one that all divide."""
    pools = nn.AdaptiveMaxPool3d((5, 6, 4)), nn.AdaptiveMaxPool3d(2)
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), pools[0], nn.Conv3d(4, 4, 3), pools[1])


def basic_unet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets", reason="make test-all installs MONAI")
    return nets.BasicUNet(in_channels=2, features=(4, 4, 8, 8, 8, 4))


# How to make each, and the size of its input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "UNet3d": (PUBLISHED["UNet3d"].make, 13),
    "overlapping": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.MaxPool3d(3, 2, 1)), 13),
    "AdaptiveMaxPool3d": (adaptive, 13),
    "MONAI's BasicUNet": (basic_unet, 32),
}


@pytest.mark.usefixtures("composed", "single_threaded_torch")
@pytest.mark.parametrize("name", NETWORKS)
def test_training_step(name: str) -> None:
    """Bit for bit torch.nn's outputs and gradients: sums have torch.nn's order on the CPU, too."""
    make, size = NETWORKS[name]
    model, x = make().double(), torch.rand(2, 2, size, size, size, dtype=torch.float64)
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


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_messages_of_unpooling(dims: int) -> None:
    """Those that torch.nn raises on the CPU are headings of the page."""
    x, size = torch.rand(1, 1, *[4] * dims), dims if dims == 3 else 2
    pooled = getattr(nn.functional, f"max_pool{dims}d")(x, 2, return_indices=True)
    message = f"max_unpooling{size}d_forward_out {SENTENCE}"
    with pytest.raises(RuntimeError, match=f"^{message}"):
        getattr(nn.functional, f"max_unpool{dims}d")(*pooled, 2)
    assert f"## {message}\n" in PAGE.read_text()
    with maxunpool_cuda.patched():
        assert getattr(nn.functional, f"max_unpool{dims}d")(*pooled, 2).shape == x.shape
