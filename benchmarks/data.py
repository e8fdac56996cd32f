"""The tensors of a case, and the results that a call of it must have."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

MOST_COPIES = 32


@dataclass(frozen=True)
class Data:
    """What one call is given.

    Attributes:
        input: random values; of unpooling, what PyTorch's max pooling makes of such.
        indices: where PyTorch finds the maxima, in the case's dtype: given to unpooling, and what
            pooling has to find.
        flat: the same as flat int64 indices.
        grad_output: random whole numbers, which add up exactly; None where there is no backward.
    """

    input: Tensor
    indices: Tensor
    flat: Tensor
    grad_output: Tensor | None = None

    def clone(self) -> "Data":
        """The same values in memory of their own."""
        grad = None if self.grad_output is None else self.grad_output.clone()
        return Data(self.input.clone(), self.indices.clone(), self.flat.clone(), grad)

    @property
    def bytes_read(self) -> int:
        """The size of the smallest set of tensors that one direction of the call reads."""
        read = self.input if self.grad_output is None else self.grad_output
        return min(self.input.nbytes, self.indices.nbytes + read.nbytes)


def layout_of(case: Case) -> torch.memory_format:
    """As PyTorch names it."""
    if case.layout == "contiguous":
        return torch.contiguous_format
    return {2: torch.channels_last, 3: torch.channels_last_3d}[case.rank]


def make(case: Case, device: str) -> Data:
    """Pool random values, the same ones at every call."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    unpooled = torch.empty(case.shape, dtype=dtype, device=device).normal_(generator=generator)
    pool = getattr(torch.nn.functional, f"max_pool{case.rank}d")
    window = (case.kernel_size, case.stride, case.padding, case.dilation)
    values, flat = pool(unpooled, *window, return_indices=True)
    input = values if case.operation == "unpool" else unpooled
    tensors = [input, indices_of(case, flat), flat]
    if case.direction != "forward":
        result = values if case.operation == "pool" else unpooled
        tensors.append(torch.empty_like(result).random_(-8, 9, generator=generator))
    return Data(*(tensor.contiguous(memory_format=layout_of(case)) for tensor in tensors))


def rotation(data: Data, cache_bytes: int) -> list[Data]:
    """Copies of ``data`` that together are twice the cache, so that each is out of it when read.

    At most :data:`MOST_COPIES`: smaller calls than that read from the cache.
    """
    count = min(MOST_COPIES, 1 + 2 * cache_bytes // data.bytes_read)
    return [data, *(data.clone() for _ in range(count - 1))]


def indices_of(case: Case, flat: Tensor) -> Tensor:
    """Flat int64 indices as the case has them; of uint8 the offset in each cell's window."""
    if case.index_dtype != "uint8":
        return flat.to(getattr(torch, case.index_dtype))
    offsets = torch.zeros_like(flat)
    for dim in range(case.rank):
        cells = torch.arange(flat.shape[2 + dim], device=flat.device)
        begin = (cells * case.stride - case.padding).view(-1, *[1] * (case.rank - 1 - dim))
        place = flat // math.prod(case.shape[3 + dim :]) % case.shape[2 + dim]
        offsets = offsets * case.kernel_size + place - begin
    return offsets.byte()


def definition(case: Case, data: Data, to_losers: bool = False) -> tuple[Tensor, ...]:
    """What every call must return, given where the maxima are: results, the gradient, or both.

    Unpooling, of two values with one index the last in row-major order wins. With ``to_losers`` its
    gradient is handed to every value with the index, as PyTorch does.
    """
    leading, plane = case.shape[:2], math.prod(case.shape[2:])
    indices = data.flat.flatten(2)
    winner = torch.ones_like(indices, dtype=torch.bool)
    if case.overlapping:
        order = torch.arange(indices.shape[-1], device=indices.device).expand_as(indices)
        last = order.new_full((*leading, plane), -1)
        last.scatter_reduce_(-1, indices, order, "amax")
        winner = last.gather(-1, indices) == order

    def gather(unpooled: Tensor) -> Tensor:
        return unpooled.flatten(2).gather(-1, indices)

    results = []
    if case.direction != "backward":
        values = data.input.flatten(2) if case.operation == "unpool" else gather(data.input)
        if case.operation == "pool":
            results += [values.reshape(case.pooled), data.indices]
        else:
            # Losers are sent to one more element, which is then cut off.
            output = values.new_zeros(*leading, plane + 1)
            output.scatter_(-1, indices.where(winner, plane), values)
            results.append(output[..., :plane].reshape(case.shape))
    if data.grad_output is not None:
        gradient = data.grad_output
        if case.operation != "pool":
            gradient = gather(gradient)
            if not to_losers:
                gradient = gradient.masked_fill(~winner, 0)
        if case.operation != "unpool":
            zeros = gradient.new_zeros(*leading, plane)
            gradient = zeros.scatter_add_(-1, indices, gradient.flatten(2))
        results.append(gradient.reshape(case.pooled if case.operation == "unpool" else case.shape))
    return tuple(results)
