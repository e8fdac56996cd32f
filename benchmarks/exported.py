"""The two forms of ONNX that unpooling is exported in: how many nodes, and how long they run.

    python -m benchmarks.exported

exports a pool and its unpool with each form, and runs them in ONNX Runtime on one thread of the
CPU, in turns; the shortest of its own time counts, so that a busy machine does little to the
figures.
"""

import io
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.onnx

from .show import show

SHAPE = (1, 16, 64, 64)
WINDOWS = {"2x2": (2, 2, 0), "3x3, stride 2": (3, 2, 1)}
FORMS = ("MaxUnpool", "where")


class RoundTrip(nn.Module):
    """Pools, and unpools what it pooled."""

    def __init__(self, window: tuple[int, ...], index_dtype: torch.dtype) -> None:
        super().__init__()
        self.pool = maxunpool_cuda.MaxPool2d(*window, return_indices=True, index_dtype=index_dtype)
        self.unpool = maxunpool_cuda.MaxUnpool2d(*window)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(x)
        return self.unpool(pooled, indices, output_size=x.shape)


def exported(model: nn.Module, x: Tensor, form: Any) -> tuple[int, Callable[[], Any]]:
    """The number of nodes, and a call of ONNX Runtime, whose result is eager's."""
    import onnxruntime

    table = maxunpool_cuda.onnx.translation_table(form)
    given: dict[str, Any] = {"dynamo": True, "verbose": False, "custom_translation_table": table}
    program: Any = torch.onnx.export(model, (x,), **given)
    file = io.BytesIO()
    program.save(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.getvalue(), options)
    feed = {session.get_inputs()[0].name: x.numpy()}
    if not torch.equal(torch.from_numpy(session.run(None, feed)[0]), model(x)):
        raise RuntimeError(f"{form} expected the result of eager but got another")
    return len(list(program.model.graph)), lambda: session.run(None, feed)


def measure(window: tuple[int, ...], index_dtype: torch.dtype, rounds: int = 50) -> list[str]:
    """Nodes and milliseconds of each form."""
    x = torch.randn(SHAPE)
    forms = {form: exported(RoundTrip(window, index_dtype), x, form) for form in FORMS}
    shortest = dict.fromkeys(forms, float("inf"))
    for _, (form, (_, call)) in product(range(rounds), forms.items()):
        begin = time.thread_time()
        call()
        shortest[form] = min(shortest[form], time.thread_time() - begin)
    return [
        *(str(nodes) for nodes, _ in forms.values()),
        *(f"{shortest[form] * 1e3:.2f}" for form in forms),
    ]


def main() -> None:
    """Measure and print."""
    rows = [
        [name, str(index_dtype).removeprefix("torch."), *measure(window, index_dtype)]
        for (name, window), index_dtype in product(WINDOWS.items(), (torch.uint8, torch.int64))
    ]
    heads = ["window", "indices", "nodes", 'of "where"', "ms", 'of "where"']
    show(f"PyTorch {torch.__version__}, one thread:", heads, rows, texts=2)


if __name__ == "__main__":
    main()
