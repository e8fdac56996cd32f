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
        target = (cell // (pooled * channels) * plane + index) * channels + cell % channels
    else:
        target = cell // pooled * plane + index
    tl.store(output + target, value, mask=inside)


def max_unpool(
    input: Tensor, indices: Tensor, output_size: tuple[int, ...], layout: torch.memory_format
) -> Tensor:
    """Unpool ``(N, C, *S)`` values, all tensors in the layout; at most 2^31 outputs.

    Of two values with one index any may win. Indices are not checked.
    """
    shape = (*input.shape[:2], *output_size)
    output = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=layout)
    output.zero_()
    cells, pooled, plane = input.numel(), math.prod(input.shape[2:]), math.prod(output_size)
    sizes, last = (cells, pooled, plane, input.shape[1]), layout != torch.contiguous_format
    scatter[(triton.cdiv(cells, 1024),)](output, input, indices, *sizes, last=last, block=1024)
    return output
