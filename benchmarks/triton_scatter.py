# SPDX-License-Identifier: BSD-3-Clause
"""Max unpooling as a naive kernel, in Triton: fill with zeros, then scatter."""

# ruff: noqa: ANN001, ANN201  (Triton reads annotations)

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scatter(output, input, indices, cells, pooled, plane, block: tl.constexpr):
    """``output[indices[j]] = input[j]`` in its plane, for every ``j`` in the order of memory."""
    cell = tl.program_id(0) * block + tl.arange(0, block)
    inside = cell < cells
    value = tl.load(input + cell, mask=inside)
    index = tl.load(indices + cell, mask=inside)
    tl.store(output + cell // pooled * plane + index, value, mask=inside)


def max_unpool(input: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """Unpool contiguous ``(N, C, *S)`` values; at most 2^31 outputs.

    Of two values with one index any may win. Indices are not checked.
    """
    output = input.new_zeros(*input.shape[:2], *output_size)
    sizes = (input.numel(), input[0, 0].numel(), output[0, 0].numel())
    scatter[(triton.cdiv(sizes[0], 1024),)](output, input, indices, *sizes, block=1024)
    return output
