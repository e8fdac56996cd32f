"""The tensors of a case, and the results that a call of it must have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

MOST_COPIES = 32


@dataclass(frozen=True)
class Data:
    """What one call is given.

    Attributes:
        input: pooled values, from PyTorch's max pooling of random ones.
        indices: theirs, flat in the output plane.
        grad_output: random; None where there is no backward.
    """

    input: Tensor
    indices: Tensor
    grad_output: Tensor | None

    def clone(self) -> Data:
        """The same values in memory of their own."""
        grad = None if self.grad_output is None else self.grad_output.clone()
        return Data(self.input.clone(), self.indices.clone(), grad)

    @property
    def bytes_read(self) -> int:
        """The size of the smallest set of tensors that one direction of the call reads."""
        tensors = (self.indices, self.input if self.grad_output is None else self.grad_output)
        return sum(tensor.nbytes for tensor in tensors)


def laid_out(tensor: Tensor, case: Case) -> Tensor:
    """The same values in the case's layout."""
    if case.layout == "contiguous":
        return tensor.contiguous()
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[case.rank])


def make(case: Case, device: str) -> Data:
    """Pool random values, the same ones at every call."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, index_dtype = getattr(torch, case.dtype), getattr(torch, case.index_dtype)

    def random() -> Tensor:
        values = torch.empty(case.shape, dtype=dtype, device=device)
        return values.normal_(generator=generator)

    pool = getattr(torch.nn.functional, f"max_pool{case.rank}d")
    window = (case.kernel_size, case.stride, case.padding, case.dilation)
    values, indices = pool(random(), *window, return_indices=True)
    grad_output = laid_out(random(), case) if case.with_gradient else None
    return Data(laid_out(values, case), laid_out(indices.to(index_dtype), case), grad_output)


def rotation(data: Data, cache_bytes: int) -> list[Data]:
    """Copies of ``data`` that together are twice the cache, so that each is out of it when read.

    At most :data:`MOST_COPIES`: smaller calls than that read from the cache.
    """
    count = min(MOST_COPIES, 1 + 2 * cache_bytes // data.bytes_read)
    return [data, *(data.clone() for _ in range(count - 1))]


def definition(case: Case, data: Data, to_losers: bool = False) -> tuple[Tensor, ...]:
    """What every call must return: of two values with one index the last in row-major order wins.

    Args:
        case: gives the sizes.
        data: any copy.
        to_losers: with the gradient handed to every value with the index, as PyTorch does.

    Returns:
        ``(output,)``, ``(grad_input,)`` or both, as the case's direction asks for.
    """
    batch = case.shape[:2]
    indices = data.indices.flatten(2).long()
    winner = torch.ones_like(indices, dtype=torch.bool)
    if case.overlapping:
        order = torch.arange(indices.shape[-1], device=indices.device).expand_as(indices)
        last = order.new_full((*batch, case.outputs // (batch[0] * batch[1])), -1)
        last.scatter_reduce_(-1, indices, order, "amax")
        winner = last.gather(-1, indices) == order
    results = []
    if case.direction != "backward":
        # Losers are sent to one more element, which is then cut off.
        plane = case.outputs // (batch[0] * batch[1])
        values = data.input.flatten(2)
        output = values.new_zeros(*batch, plane + 1)
        output.scatter_(-1, indices.where(winner, plane), values)
        results.append(output[..., :plane].reshape(case.shape))
    if data.grad_output is not None:
        gradient = data.grad_output.flatten(2).gather(-1, indices)
        if not to_losers:
            gradient = gradient.masked_fill(~winner, 0)
        results.append(gradient.reshape(case.pooled))
    return tuple(results)
