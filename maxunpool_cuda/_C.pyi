from typing import Any

import torch
from torch import Tensor

def build_info() -> dict[str, Any]: ...

class UnpoolArguments:
    def __init__(
        self,
        output_size: tuple[int, ...],
        kernel_size: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        reduce: str,
        /,
    ) -> None: ...

class PoolArguments:
    def __init__(
        self,
        kernel_size: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        ceil_mode: bool,
        index_dtype: torch.dtype,
        /,
    ) -> None: ...

def max_unpool(input: Tensor, indices: Tensor, arguments: UnpoolArguments, /) -> Tensor: ...
def max_pool(input: Tensor, arguments: PoolArguments, return_indices: bool, /) -> Any: ...
def check_errors() -> None: ...
