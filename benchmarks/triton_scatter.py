"""Max unpooling the usual way, in Triton: fill with zeros, then scatter. A peer to be timed.

Importing it needs Triton; running it a GPU, or Triton's interpreter (``TRITON_INTERPRET=1``).
"""

# ruff: noqa: ANN001, ANN201  (Triton reads annotations)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def scatter(
    output, input, indices, cells, pooled, plane, channels, last: tl.constexpr, block: tl.constexpr
):
    """``output[indices[j]] = input[j]`` in its plane, for every ``j`` in the order of memory."""
    cell = tl.program_id(0) * block + tl.arange(0, block)
    inside = cell < cells
    value = tl.load(input + cell, mask=inside)
    index = tl.load(indices + cell, mask=inside)
    if last:  # channels_last
        sample = cell // (pooled * channels)
        target = (sample * plane + index) * channels + cell % channels
    else:
        target = cell // pooled * plane + index
    tl.store(output + target, value, mask=inside)


def max_unpool(input: Tensor, indices: Tensor, output_size: tuple[int, ...]) -> Tensor:
    """Unpool ``(N, C, *S)`` values to the spatial ``output_size``, in the layout of ``input``.

    Both tensors have the same layout, contiguous or channels_last, and there are fewer than 2^31
    outputs. Of two values with one index any may win. Indices are not checked.
    """
    channels_last = not input.is_contiguous()
    memory_format = torch.contiguous_format
    if channels_last:
        memory_format = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    shape = (*input.shape[:2], *output_size)
    output = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=memory_format)
    output.zero_()
    scatter[(triton.cdiv(input.numel(), BLOCK),)](
        *(output, input, indices, input.numel()),
        *(math.prod(input.shape[2:]), math.prod(output_size), input.shape[1]),
        last=channels_last,
        block=BLOCK,
    )
    return output
