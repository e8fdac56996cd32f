# SPDX-License-Identifier: BSD-3-Clause
# The types of the compiled library's functions (csrc/bindings.cpp). max_unpool and max_pool take
# the arguments of the operators' schemas (csrc/schemas.cpp); max_pool also takes return_indices.
import torch
from torch import Tensor

def max_unpool(
    input: Tensor,
    indices: Tensor,
    output_size: tuple[int, ...],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    reduce: str,
    /,
) -> Tensor: ...
def max_pool(
    input: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    index_dtype: torch.dtype,
    return_indices: bool,
    /,
) -> Tensor | tuple[Tensor, Tensor]: ...
def check_window(
    op: str,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    /,
) -> None: ...
def build_info() -> dict[str, bool | str | None]: ...
def check_errors() -> None: ...
