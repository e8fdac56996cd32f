"""The operators' kernels on devices for which none were written: the portable form, checked.

Autograd, vmap and graphs are the operators' own, as on every device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import _ops, _portable

# Their dispatch keys, as PyTorch names them.
DEVICES = ("MPS", "XPU", "HPU", "MTIA", "XLA", "IPU", "PrivateUse1")


def _unpool_kernel(
    operator: Callable[..., Tensor], portable: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def kernel(values: Tensor, indices: Tensor, *arguments: Any) -> Tensor:
        output_size, kernel_size, stride, padding, _ = arguments
        name = f"max_unpool{len(kernel_size)}d"
        if values.device != indices.device:
            raise RuntimeError(
                f"{name}: expected all tensors on the same device but got "
                f"{values.device} and {indices.device}"
            )
        like = operator(_described(values), _described(indices), *arguments)
        with _lacking(name):
            if indices.dtype == torch.uint8:
                _, good = _portable.positions_of(indices, output_size, kernel_size, stride, padding)
            else:
                good = (indices >= 0) & (indices < math.prod(output_size))
            if not good.all():  # the CPU's kernels say which is bad
                operator(torch.zeros_like(values, device="cpu"), indices.cpu(), *arguments)
            return _portable.laid_out_as(like, portable(values, indices, *arguments))

    return kernel


def _pool_kernel(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    like, like_indices = _ops.max_pool(_described(input), *arguments)
    with _lacking(f"max_pool{len(arguments[0])}d"):
        values, indices = _portable.max_pool(input, *arguments)
        laid_out_as = _portable.laid_out_as
        return laid_out_as(like, values), laid_out_as(like_indices, indices)


@contextlib.contextmanager
def _lacking(name: str) -> Iterator[None]:
    """Say under the name of ours which of PyTorch's operators a device lacks."""
    try:
        yield
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{name}: expected a device with the operators that it is made of but got: {error}"
        ) from error


def _described(tensor: Tensor) -> Tensor:
    """Without its data: by these the operators check their arguments and say what they return."""
    shape, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")


KERNELS: dict[str, Callable[..., Any]] = {
    "max_unpool": _unpool_kernel(_ops.max_unpool, _portable.max_unpool),
    "max_unpool_backward": _unpool_kernel(_ops.max_unpool_backward, _portable.max_unpool_backward),
    "max_pool": _pool_kernel,
}


_library: Any = torch.library.Library("maxunpool_cuda", "IMPL")  # type: ignore[no-untyped-call]


def register() -> None:
    """Register the kernels, for as long as this module lives."""
    for name, kernel in KERNELS.items():
        for key in DEVICES:
            _library.impl(name, kernel, key)
