# SPDX-License-Identifier: BSD-3-Clause
"""Max pooling and max unpooling for PyTorch: deterministic, with right gradients, and light.

Drop-in modules and functions in place of ``torch.nn.MaxUnpool1d/2d/3d``, ``MaxPool1d/2d/3d``,
``AdaptiveMaxPool1d/2d/3d`` and their functions, for the CPU and CUDA:

    >>> import torch, maxunpool_cuda
    >>> pool = maxunpool_cuda.MaxPool2d(2, return_indices=True)
    >>> values, indices = pool(torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]))
    >>> maxunpool_cuda.MaxUnpool2d(2)(values, indices)
    tensor([[[0., 0.],
             [4., 0.]]])

A call goes through these files: modules.py, functional.py, _pooling.py or _adaptive.py,
_arguments.py, _ops.py, and the compiled library, which _library.py has checked; or _kernels.py,
where that has no kernels. convert.py, patch.py and attribution.py are for models and code that were
written for torch.nn; onnx.py and _portable.py export.
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
