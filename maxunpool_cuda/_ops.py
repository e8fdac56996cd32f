"""Loads the library, which registers the operators with PyTorch; their names and vmap rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


def _traced() -> bool:
    """Whether Dynamo or torch.jit.trace has to see a call, which ``_C`` would hide."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def call_max_unpool(arguments: tuple[Any, ...]) -> Tensor:
    """``max_unpool``, through ``_C`` where it may be: that costs half as much as torch.ops."""
    return (max_unpool if _traced() else _C.max_unpool)(*arguments)


def call_max_pool(arguments: tuple[Any, ...], return_indices: bool) -> Any:
    """``max_pool`` likewise, or its values alone. Then ``_C`` frees the indices without the GIL."""
    if not _traced():
        return _C.max_pool(*(*arguments, return_indices))
    results = max_pool(*arguments)
    return results if return_indices else results[0]


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
    the next call on that device, or here: the first of all that were met until then. On the CPU
    every call raises at once. While the current stream captures a graph this does nothing, as what
    is captured has not run; a replay's bad indices are raised after it.

    Raises:
        RuntimeError: names the index, its position and its plane.

    Example:
        >>> check_errors()
    """
    _C.check_errors()


def _batched(
    operator: Callable[..., Tensor],
    info: Any,
    in_dims: tuple[int | None, ...],
    values: Tensor,
    indices: Tensor,
    *geometry: Any,
) -> tuple[Tensor, int]:
    """The rule for vmap: planes are independent, so the batch joins that of the tensors."""
    values, indices = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((values, indices), in_dims[:2], strict=True)
    )
    unbatched = len(geometry[1]) + 1  # dimensions
    if values.dim() - 1 not in (unbatched, unbatched + 1):
        sample = (tensor.new_empty(tensor.shape[1:]) for tensor in (values, indices))
        return operator(*sample, *geometry), 0  # which is refused
    if indices.dim() - 1 == unbatched:
        return operator(values, indices, *geometry), 0
    batch = indices.shape[:2]
    result = operator(values.flatten(0, 1), indices.flatten(0, 1), *geometry)
    return result.reshape(*batch, *result.shape[1:]), 0


def _batched_pool(
    _: Any, in_dims: tuple[int | None, ...], input: Tensor, kernel_size: Any, *rest: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """As :func:`_batched`, for max_pool: two results, and no indices to begin with."""
    input = input.movedim(in_dims[0] or 0, 0)
    unbatched = len(kernel_size) + 1  # dimensions
    if input.dim() - 1 not in (unbatched, unbatched + 1):
        return max_pool(input.new_empty(input.shape[1:]), kernel_size, *rest), (0, 0)  # refused
    if input.dim() - 1 == unbatched:
        return max_pool(input, kernel_size, *rest), (0, 0)
    values, indices = max_pool(input.flatten(0, 1), kernel_size, *rest)
    shape = (*input.shape[:2], *values.shape[1:])
    return (values.reshape(shape), indices.reshape(shape)), (0, 0)


_RULES: dict[str, Callable[..., Any]] = {
    "max_unpool": functools.partial(_batched, max_unpool),
    "max_unpool_backward": functools.partial(_batched, max_unpool_backward),
    "max_pool": _batched_pool,
}
for _name, _rule in _RULES.items():
    torch.library.register_vmap(f"maxunpool_cuda::{_name}", _rule)
