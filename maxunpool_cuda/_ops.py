# SPDX-License-Identifier: BSD-3-Clause
"""Loads the compiled library, which registers the operators, and calls them.

In a build without a library _definitions.py does what the library does.

Here are the operators under their names (``max_unpool``, ``max_unpool_backward``, ``max_pool``; all
arguments are given, as tuples), their quicker calls for eager mode, and their rule for vmap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import _fallback, _library

# Raises ImportError if the library was built for another PyTorch; must run before the import of _C.
BUILT_FOR = _library.built_for()
if _library.is_fallback(BUILT_FOR):
    from . import _definitions as _C
else:
    try:
        from . import _C  # type: ignore[no-redef]
    except ImportError as error:
        raise ImportError(
            "maxunpool_cuda: expected its compiled library to load, as it was built for this "
            f"PyTorch ({torch.__version__}), but got: {error}"
        ) from error

max_unpool: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool.default
max_unpool_backward: Callable[..., Tensor] = torch.ops.maxunpool_cuda.max_unpool_backward.default
max_pool: Callable[..., tuple[Tensor, Tensor]] = torch.ops.maxunpool_cuda.max_pool.default
# Where the library has no kernels. Registered as long as this object exists.
_FALLBACK = _fallback.register(
    (max_unpool, max_unpool_backward, max_pool), str(_C.build_info()["note"])
)


def is_traced() -> bool:
    """Whether Dynamo or torch.export has to see a call, which ``_C`` would hide."""
    return torch.compiler.is_compiling()


Ints: TypeAlias = tuple[int, ...]  # one for each spatial dimension; under tracing also symbolic
# The arguments of the operators, in the order of their schemas (csrc/schemas.cpp):
# input, indices, output_size, kernel_size, stride, padding, reduce;
UnpoolArguments: TypeAlias = tuple[Tensor, Tensor, Ints, Ints, Ints, Ints, str]
# input, kernel_size, stride, padding, dilation, ceil_mode, index_dtype.
PoolArguments: TypeAlias = tuple[Tensor, Ints, Ints, Ints, Ints, bool, torch.dtype]


def call_max_unpool(arguments: UnpoolArguments) -> Tensor:
    """The result of ``max_unpool``, through ``_C`` if possible, which costs less than torch.ops."""
    return (max_unpool if is_traced() else _C.max_unpool)(*arguments)


def call_max_pool(arguments: PoolArguments, return_indices: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The results of ``max_pool``, or its values alone, through ``_C`` if possible.

    ``_C`` frees indices that nobody wants itself, so Python need not let go of its lock for that.
    """
    if not is_traced():
        return _C.max_pool(*arguments, return_indices)
    results = max_pool(*arguments)
    return results if return_indices else results[0]


def check_window(operator: str, kernel_size: Ints, stride: Ints, padding: Ints) -> None:
    """Raise ``operator``'s error if no window of these numbers can be unpooled."""
    _C.check_window(operator, kernel_size, stride, padding, ())


def build_info() -> dict[str, Any]:
    """Facts about the compiled extension.

    Returns:
        A dict with ``kernels`` ("cpu", "cpu and cuda", or "none" where PyTorch's own operators
        compute), ``cuda`` (whether it has CUDA kernels), ``cuda_version`` (of PyTorch's CUDA),
        ``nvcc_version`` (of the compiler of the CUDA kernels), ``arch_list`` (the GPUs that it has
        kernels for), ``compiler`` (of C++), ``torch_version`` (the PyTorch it was built for) and
        ``note`` (a sentence: which kernels the build left out, and why).

    Example:
        >>> build_info()["kernels"] in ("cpu", "cpu and cuda", "none")
        True
    """
    return _C.build_info()


def check_errors() -> None:
    """On CUDA, wait for the kernels launched so far, and raise the error of a bad index.

    A CUDA call does not wait for its kernels. So if an index lies outside its output plane, the
    next unpooling on that device raises the error, or this function does. Of several such indices
    one is named. While the current stream captures a CUDA graph, this function does nothing,
    because the captured kernels have not run. Errors of a replay are raised after it. On the CPU
    every call raises at once, and there is nothing left to raise.

    Raises:
        RuntimeError: a kernel met an out-of-bounds index; the message has the index, its position
            and its plane.

    Example:
        >>> check_errors()
    """
    _C.check_errors()


def _call_under_vmap(
    operator: Callable[..., Any],
    tensor_count: int,
    info: Any,
    in_dims: tuple[int | None, ...],
    *arguments: Any,
) -> tuple[Any, Any]:
    """The rule of an operator for :func:`torch.vmap`: one call for all calls of the batch.

    Planes do not depend on each other. So B calls with tensors ``(C, H, W)`` are one call with
    ``(B, C, H, W)``, and B calls with ``(N, C, H, W)`` are one with ``(B * N, C, H, W)``.

    Args:
        operator: takes ``arguments``.
        tensor_count: how many of them are tensors; the next one has a number for each spatial
            dimension.
        info: has the size B of the batch.
        in_dims: for each argument, the dimension of the batch, or None if it has none.
        *arguments: the operator's.

    Returns:
        The results, and where each has the batch: in front.
    """
    tensors = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(arguments[:tensor_count], in_dims[:tensor_count], strict=True)
    ]
    others = arguments[tensor_count:]
    unbatched_rank = len(others[0]) + 1  # of (C, *plane)
    batch_shape = tensors[-1].shape[:2]  # (B, N), if the calls have an N
    calls_have_n = tensors[-1].dim() - 1 > unbatched_rank
    if tensors[0].dim() - 1 not in (unbatched_rank, unbatched_rank + 1):
        # No call takes such a tensor: the operator shall name the shape of one call in its error.
        tensors = [tensor.new_empty(tensor.shape[1:]) for tensor in tensors]
    elif calls_have_n:
        tensors = [tensor.flatten(0, 1) for tensor in tensors]
    results = operator(*tensors, *others)
    if calls_have_n:
        results = tree_map(lambda result: result.reshape(*batch_shape, *result.shape[1:]), results)
    return results, tree_map(lambda _: 0, results)


_TENSOR_COUNTS: dict[Any, int] = {max_unpool: 2, max_unpool_backward: 2, max_pool: 1}
for _operator, _count in _TENSOR_COUNTS.items():
    _rule = functools.partial(_call_under_vmap, _operator, _count)
    torch.library.register_vmap(_operator, _rule)
