from typing import Any

from torch import Tensor

def build_info() -> dict[str, Any]: ...
def call_if_plain(
    dims: int,
    input: object,
    indices: object,
    kernel_size: object,
    stride: object,
    padding: object,
    output_size: object,
    reduce: object,
) -> Tensor | None: ...
def check_errors() -> None: ...
