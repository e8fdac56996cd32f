"""Max unpooling for PyTorch: right where windows overlap, deterministic, and light.

Drop-in modules and functions in place of ``torch.nn.MaxUnpool1d/2d/3d``,
``torch.nn.MaxPool1d/2d/3d`` and their functions, for the CPU and CUDA.
"""

from . import functional
from ._ops import build_info, check_errors
from .convert import replace_max_pooling, replace_max_unpool
from .modules import MaxPool1d, MaxPool2d, MaxPool3d, MaxUnpool1d, MaxUnpool2d, MaxUnpool3d

__all__ = [
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
    "build_info",
    "check_errors",
    "functional",
    "replace_max_pooling",
    "replace_max_unpool",
]

__version__ = "0.1.0"
