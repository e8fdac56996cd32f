from typing import Any

import torch
from torch import Tensor

Ints = tuple[int, ...]

def build_info() -> dict[str, Any]: ...
def max_unpool(
    input: Tensor,
    indices: Tensor,
    output_size: Ints,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    reduce: str,
    /,
) -> Tensor: ...
def max_pool(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    index_dtype: torch.dtype,
    return_indices: bool,
    /,
) -> Any: ...
def check_errors() -> None: ...
