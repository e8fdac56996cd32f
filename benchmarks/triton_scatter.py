"""Max unpooling the usual way, in Triton: fill with zeros, then scatter. A peer to be timed.

Importing it needs Triton; running it a GPU, or Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def scatter(  # noqa: ANN201
    output,  # noqa: ANN001
    input,  # noqa: ANN001
    indices,  # noqa: ANN001
    cells,  # noqa: ANN001
    pooled_plane,  # noqa: ANN001
    plane,  # noqa: ANN001
    channels,  # noqa: ANN001
    channels_last: tl.constexpr,
    block: tl.constexpr,
):
    """``output[indices[j]] = input[j]`` in its plane, for every ``j`` in the order of memory."""
    cell = tl.program_id(0) * block + tl.arange(0, block)
    inside = cell < cells
    value = tl.load(input + cell, mask=inside)
    index = tl.load(indices + cell, mask=inside)
    if channels_last:
        sample = cell // (pooled_plane * channels)
        target = (sample * plane + index) * channels + cell % channels
    else:
        target = cell // pooled_plane * plane + index
    tl.store(output + target, value, mask=inside)


def max_unpool(input: Tensor, indices: Tensor, output_size: tuple[int, ...]) -> Tensor:
    """Unpool ``(N, C, *S)`` values to the spatial ``output_size``, in the layout of ``input``.

    Both tensors have the same layout, contiguous or channels_last. Of two values with one index
    any may win. Indices are not checked.

    Raises:
        ValueError: there are 2^31 output elements or more.
    """
    channels_last = not input.is_contiguous()
    shape = (*input.shape[:2], *output_size)
    if math.prod(shape) >= 2**31:
        raise ValueError(f"expected fewer than 2^31 output elements but got {math.prod(shape)}")
    memory_format = torch.contiguous_format
    if channels_last:
        memory_format = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
    output = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=memory_format)
    output.zero_()
    cells = input.numel()
    scatter[(triton.cdiv(cells, BLOCK),)](
        output,
        input,
        indices,
        cells,
        math.prod(input.shape[2:]),
        math.prod(output_size),
        input.shape[1],
        channels_last=channels_last,
        block=BLOCK,
    )
    return output
