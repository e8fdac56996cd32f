# SPDX-License-Identifier: BSD-3-Clause
"""Loads the library, which registers the operators with PyTorch; their names and vmap rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import _library

# Raises ImportError if the library was built for another PyTorch; must run before the import of _C.
BUILT_FOR = _library.built_for()
try:
    from . import _C
except ImportError as error:
    raise ImportError(
        "maxunpool_cuda: expected its compiled library to load, as it was built for this PyTorch "
        f"({torch.__version__}), but got: {error}"
    ) from error

max_unpool: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool.default
max_unpool_backward: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool_backward.default
max_pool: Callable[..., tuple[Tensor, Tensor]] = torch.ops.maxunpool_cuda.max_pool.default


def is_traced() -> bool:
    """Whether Dynamo or torch.export has to see a call, which ``_C`` would hide."""
    return torch.compiler.is_compiling()


def call_max_unpool(arguments: tuple[Any, ...]) -> Tensor:
    """``max_unpool``, through ``_C`` where it may be: that costs half as much as torch.ops."""
    return (max_unpool if is_traced() else _C.max_unpool)(*arguments)


def call_max_pool(arguments: tuple[Any, ...], return_indices: bool) -> Any:
    """``max_pool`` likewise, or its values alone. Then ``_C`` frees the indices without the GIL."""
    if not is_traced():
        return _C.max_pool(*(*arguments, return_indices))
    results = max_pool(*arguments)
    return results if return_indices else results[0]


def check_window(operator: str, kernel_size: Any, stride: Any, padding: Any) -> None:
    """Raise ``operator``'s error if its window is none that can be unpooled."""
    _C.check_window(operator, kernel_size, stride, padding, ())


def build_info() -> dict[str, Any]:
    """Facts about the compiled extension.

    Returns:
        A dict with ``cuda`` (whether it has CUDA kernels), ``cuda_version`` (PyTorch's),
        ``nvcc_version`` (of the compiler of the CUDA kernels), ``arch_list``, ``compiler``,
        ``torch_version`` (the PyTorch it was built for) and ``note`` (in a sentence, which kernels
        the build left out and why).

    Example:
        >>> list(build_info())
        ['cuda', 'cuda_version', 'nvcc_version', 'arch_list', 'compiler', 'torch_version', 'note']
    """
    return _C.build_info()


def check_errors() -> None:
    """Wait for the CUDA kernels launched so far, and raise for an out-of-bounds index among theirs.

    A CUDA call does not wait for its kernels, so an index outside its output plane is reported at
    the next call on that device, or here: the first of all that were met until then. On the CPU
    every call raises at once. While the current stream captures a graph this does nothing, as what
    is captured has not run; a replay's out-of-bounds indices are raised after it.

    Raises:
        RuntimeError: names the index, its position and its plane.

    Example:
        >>> check_errors()
    """
    _C.check_errors()


def _batched(
    operator: Callable[..., Any],
    count: int,
    info: Any,
    in_dims: tuple[int | None, ...],
    *arguments: Any,
) -> tuple[Any, Any]:
    """The rule for vmap: planes are independent, so the batch joins that of the tensors.

    These are the first ``count`` arguments. The next has a number for each spatial dimension.
    """
    tensors = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(arguments[:count], in_dims[:count], strict=True)
    ]
    rest, batch = arguments[count:], tensors[-1].shape[:2]
    unbatched = len(rest[0]) + 1  # dimensions
    joined = tensors[-1].dim() - 1 > unbatched
    if tensors[0].dim() - 1 not in (unbatched, unbatched + 1):
        tensors = [tensor.new_empty(tensor.shape[1:]) for tensor in tensors]  # which is refused
    elif joined:
        tensors = [tensor.flatten(0, 1) for tensor in tensors]
    results = operator(*tensors, *rest)
    if joined:
        results = tree_map(lambda result: result.reshape(*batch, *result.shape[1:]), results)
    return results, tree_map(lambda _: 0, results)


_TENSORS: dict[Any, int] = {max_unpool: 2, max_unpool_backward: 2, max_pool: 1}
for _operator, _count in _TENSORS.items():
    torch.library.register_vmap(_operator, functools.partial(_batched, _operator, _count))
