"""Deterministic mode: what raises in networks, and that converted ones never call it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import same
from published import Results, results
from torch import Tensor, nn
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


class UNet3d(nn.Module):
    """A U-Net of two levels."""

    def __init__(self, *pools: nn.Module) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv3d(c, 4, 3, padding=1) for c in (1, 4))
        self.pools = nn.ModuleList(pools)
        self.middle = nn.Conv3d(4, 4, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv3d(8, 4, 3, padding=1) for _ in pools)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for convolution, pool in zip(self.down, self.pools, strict=True):
            skips.append(convolution(x))
            x = pool(skips[-1].relu())
        x = self.middle(x)
        for convolution in self.up:
            skip = skips.pop()
            x = nn.functional.interpolate(x, skip.shape[2:])
            x = convolution(torch.cat([x, skip], 1))
        return x


def basic_unet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets", reason="make test-all installs MONAI")
    return nets.BasicUNet(in_channels=1, features=(4, 4, 8, 8, 8, 4))


# Windows beside one another, windows that overlap, adaptive ones (13 is no multiple of 5 nor 4).
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MaxPool3d": lambda: UNet3d(nn.MaxPool3d(2), nn.MaxPool3d(3, 2, 1)),
    "AdaptiveMaxPool3d": lambda: UNet3d(nn.AdaptiveMaxPool3d((5, 6, 4)), nn.AdaptiveMaxPool3d(2)),
    "MONAI's BasicUNet": basic_unet,
}


def equal(found: Results, expected: Results) -> bool:
    pairs = ((found[name], expected[name]) for name in expected)
    return found.keys() == expected.keys() and all(same(*pair) for pair in pairs)


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("name", NETWORKS)
def test_training_step(name: str) -> None:
    """Bit for bit torch.nn's outputs and gradients: sums have torch.nn's order on the CPU, too."""
    model = NETWORKS[name]().double()
    size = 32 if "MONAI" in name else 13
    x = torch.rand(2, 1, size, size, size, dtype=torch.float64)
    with Operators() as theirs:
        expected = results(model, x)
    assert theirs.names & NONDETERMINISTIC
    torch.use_deterministic_algorithms(True)
    with maxunpool_cuda.patched(), Operators() as functions:
        assert equal(results(model, x), expected)
    assert maxunpool_cuda.replace_max_pooling(model) == {}
    with Operators() as modules:
        assert equal(results(model, x), expected)
    assert not (functions.names | modules.names) & NONDETERMINISTIC


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
