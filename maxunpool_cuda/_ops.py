"""Loads the library, which registers the operators with PyTorch, and names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        "maxunpool_cuda: expected the compiled extension maxunpool_cuda._C but got: "
        f"{error}. Build it for this PyTorch ({torch.__version__}) with "
        "`pip install --no-build-isolation .`, and import from outside the source tree."
    ) from error

max_unpool: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool.default
max_unpool_backward: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool_backward.default
max_pool: Callable[..., tuple[Tensor, Tensor]] = torch.ops.maxunpool_cuda.max_pool.default
call_if_plain = _C.call_if_plain


def build_info() -> dict[str, Any]:
    """Facts about the compiled extension.

    Returns:
        A dict with ``cuda`` (whether it has CUDA kernels), ``cuda_version``, ``arch_list``,
        ``compiler`` and ``torch_version`` (the PyTorch it was built for).

    Example:
        >>> build_info()["cuda"] in (True, False)
        True
    """
    return _C.build_info()


def check_errors() -> None:
    """Wait for the CUDA kernels launched so far, and raise for a bad index that one of them met.

    A CUDA call does not wait for its kernels, so an index outside its output plane is reported at
    the next call on that device, or here. On the CPU every call raises at once.

    Raises:
        RuntimeError: names the index, its position and its plane.

    Example:
        >>> check_errors()
    """
    _C.check_errors()
