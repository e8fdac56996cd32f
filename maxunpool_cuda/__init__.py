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

The functions are in ``maxunpool_cuda.functional``. Models and code that were written for torch.nn
need no edit: ``convert_max_pooling(model)`` converts a model, and ``with patched():`` is for code
that calls torch.nn.functional. ``maxunpool_cuda.export`` has tables for exporters.
"""

# A call goes through these files: modules.py, functional.py, _call.py or _adaptive.py,
# _arguments.py, _operators.py, and the compiled library, which _library.py has loaded; or
# _fallback.py, where that has no kernels. _convert.py, _patch.py and _attribution.py are for models
# and code that were written for torch.nn; export.py, with _decompositions.py, is for programs that
# leave Python.
from . import _library

if not _library.import_installed_copy():  # which a source tree does where nothing is built
    from . import export, functional
    from ._attribution import exact_attributions
    from ._convert import convert_max_pooling, restore_max_pooling
    from ._library import build_info, check_errors
    from ._patch import patched
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
    "convert_max_pooling",
    "exact_attributions",
    "export",
    "functional",
    "patched",
    "restore_max_pooling",
]

__version__: str = _library.version
