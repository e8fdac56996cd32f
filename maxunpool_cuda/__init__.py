# SPDX-License-Identifier: BSD-3-Clause
"""Max unpooling for PyTorch: right where windows overlap, deterministic, and light.

Drop-in modules and functions in place of ``torch.nn.MaxUnpool1d/2d/3d``,
``MaxPool1d/2d/3d``, ``AdaptiveMaxPool1d/2d/3d`` and their functions, for the CPU and CUDA.
"""

from . import functional
from . import onnx as onnx
from ._ops import BUILT_FOR, build_info, check_errors
from ._portable import decompositions
from .attribution import exact_attributions
from .convert import converted, replace_max_pooling, restore_max_pooling
from .modules import (
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
)
from .patch import patched

__all__ = [
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
    "build_info",
    "check_errors",
    "converted",
    "decompositions",
    "exact_attributions",
    "functional",
    "patched",
    "replace_max_pooling",
    "restore_max_pooling",
]

__version__: str = BUILT_FOR["version"]
