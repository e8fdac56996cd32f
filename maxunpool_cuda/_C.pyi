from typing import Any

import torch
from torch import Tensor

def build_info() -> dict[str, Any]: ...
def max_unpool(
    input: Tensor,
    indices: Tensor,
    output_size: tuple[int, ...],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    reduce: str,
) -> Tensor: ...
def max_pool(
    input: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]: ...
def check_errors() -> None: ...
