"""What a training step of SegNet holds in memory: with pooling of torch.nn, and of this package."""

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import maxunpool_cuda

from . import report
from .memory import peak_bytes
from .segnet import SegNet

INDEX_DTYPES = {"torch.nn": None, "int32": torch.int32, "uint8": torch.uint8}
DTYPES = ("float32", "bfloat16")
SHAPE = (1, 3, 360, 480)  # of an image of CamVid, as the network's authors cut them


def step(contender: str, dtype: str, device: str) -> dict[str, Any]:
    """The same network and data for everyone: the loss, bytes of the pools' results, the peak."""
    torch.manual_seed(0)
    model = SegNet().to(device, getattr(torch, dtype))
    index_dtype = INDEX_DTYPES[contender]
    if index_dtype is not None and maxunpool_cuda.replace_max_pooling(model, index_dtype):
        raise RuntimeError("every pool of SegNet can have these indices")
    input = torch.randn(SHAPE, dtype=getattr(torch, dtype), device=device)
    labels = torch.randint(12, (SHAPE[0], *SHAPE[2:]), device=device)
    row: dict[str, Any] = {"contender": contender, "dtype": dtype}

    def note(_: nn.Module, __: Any, results: tuple[Tensor, Tensor]) -> None:
        row["values"] += results[0].nbytes
        row["indices"] += results[1].nbytes

    for pool in model.pools:
        pool.register_forward_hook(note)

    def train() -> None:
        row.update(values=0, indices=0)
        model.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(input).float(), labels)
        loss.backward()
        row["loss"] = loss.item()

    train()  # what is allocated once and for all
    row["peak"] = peak_bytes(train, device)
    return row


def measure(device: str) -> report.Report:
    """A row for each dtype and contender.

    Raises:
        RuntimeError: two losses of one dtype differ: they pool and unpool the same numbers.
    """
    rows = [step(contender, dtype, device) for dtype, contender in product(DTYPES, INDEX_DTYPES)]
    if len({(row["dtype"], row["loss"]) for row in rows}) != len(DTYPES):
        raise RuntimeError(f"expected one loss of each dtype but got {rows}")
    return {"facts": report.facts(device), "training": {"shape": SHAPE}, "rows": rows}
