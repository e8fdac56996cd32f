from typing import Any

from torch import Tensor

def build_info() -> dict[str, Any]: ...
def max_unpool_if_plain(
    dims: int,
    input: object,
    indices: object,
    kernel_size: object,
    stride: object,
    padding: object,
    output_size: object,
    reduce: object,
) -> Tensor | None: ...
def max_pool_if_plain(
    dims: int,
    input: object,
    kernel_size: object,
    stride: object,
    padding: object,
    dilation: object,
    ceil_mode: object,
    return_indices: object,
    index_dtype: object,
) -> Tensor | tuple[Tensor, Tensor] | None: ...
def check_errors() -> None: ...
