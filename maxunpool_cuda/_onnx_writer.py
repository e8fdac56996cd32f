"""What translations to ONNX are written with."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


class Writer:
    """Writes what both translations are made of, for tensors with a batch; sizes are scalars."""

    def __init__(self, operator: str, input: Any, dims: int) -> None:
        onnxscript: Any = importlib.import_module("onnxscript")
        self.op, self.types = onnxscript.opset18, onnxscript.ir.DataType
        self.name, self.dims = f"{operator}{dims}d", dims
        self.axes = list(range(2, 2 + dims))  # the spatial ones
        self.batched = len(input.shape) == dims + 2
        self.tensor = onnxscript.ir.tensor

    def narrow(self, tensor: Any) -> bool:
        """Whether it is computed in another type."""
        return bool(tensor.dtype == self.types.BFLOAT16)

    def computed(self, tensor: Any) -> Any:
        """The type in which a tensor is computed."""
        return self.types.FLOAT if self.narrow(tensor) else tensor.dtype

    def number(self, value: float, dtype: Any) -> Any:
        return self.op.Constant(value=self.tensor(value, dtype=dtype))

    def taken(self, tensor: Any, *dtypes: str) -> Any:
        """As ONNX's operators take it, those of ``dtypes`` if there are any."""
        if dtypes and self.narrow(tensor):
            tensor = self.op.Cast(tensor, to=self.types.FLOAT)
        elif dtypes and tensor.dtype.name not in dtypes:
            raise ValueError(
                f"{self.name}: expected input of type {', '.join(dtypes)} or BFLOAT16 for ONNX "
                f"but got {tensor.dtype.name}"
            )
        return tensor if self.batched else self.op.Unsqueeze(tensor, [0])

    def given(self, tensor: Any, dtype: int) -> Any:
        """As this package's operators return it."""
        tensor = self.op.Cast(tensor, to=dtype)
        return tensor if self.batched else self.op.Squeeze(tensor, [0])

    def size(self, tensor: Any, axis: int) -> Any:
        return self.op.Squeeze(self.op.Shape(tensor, start=axis, end=axis + 1))

    def row(self, tensor: Any, axis: int, first: int, step: Any) -> Any:
        """``first``, ``first + step`` and so on along an axis of a tensor, to be added to it."""
        row = self.op.Range(first, self.size(tensor, axis) * step + first, step)
        return self.op.Reshape(row, [-1] + [1] * (self.dims + 1 - axis))

    def pooled(
        self,
        input: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
    ) -> tuple[Any, Any, Any]:
        """The input as MaxPool takes it, and what that makes of it: values, and ONNX's indices."""
        window = (kernel_size, stride, padding, dilation, ceil_mode)
        after, ceil = _padding_after(self.name, input.shape[-self.dims :], *window)
        taken = self.taken(input, "FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8")
        values, positions = self.op.MaxPool(
            taken,
            ceil_mode=int(ceil),
            dilations=list(dilation),
            kernel_shape=list(kernel_size),
            pads=[*padding, *after],
            strides=list(stride),
        )
        return taken, values, positions

    def moved(
        self,
        positions: Any,
        sizes: Sequence[Any],
        into: Sequence[Any],
        by: Sequence[Any],
        scale: Sequence[int] | None = None,
    ) -> Any:
        """Row-major positions in a box of ``sizes``, moved by a distance an axis: those in another.

        Coordinates are scaled first, if ``scale`` says so. What lies before the first axis is
        dropped.
        """
        moved, unit = 0, 1
        axes = zip(sizes, into, by, scale or [1] * len(sizes), strict=True)
        for size, other, distance, times in reversed(list(axes)):
            at = positions % size if times == 1 else positions % size * times
            moved = (at + distance) * unit + moved
            positions = self.op.Div(positions, size)
            unit = unit * other
        return moved


def _padding_after(
    name: str,
    sizes: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[list[int], bool]:
    """The padding after the input, and the ceil_mode, with which ONNX has the same windows.

    PyTorch and runtimes drop a last window that would begin in the padding. The shapes that ONNX
    infers before opset 22 have it in ceil mode, so it is floor mode wherever that can say the same.
    """
    after, ceil = list(padding), False
    axes = zip(sizes, kernel_size, stride, padding, dilation, strict=True)
    for d, (size, kernel, step, pad, spread) in enumerate(axes):
        if not isinstance(size, int):
            ceil = ceil_mode
            continue
        # ONNX Runtime's value of such a window, the only one then, is not minus infinity.
        if -pad % spread >= size:
            raise ValueError(
                f"{name}: expected windows that hold elements of the input for ONNX but got "
                f"spatial sizes {list(sizes)}, padding={padding}, dilation={dilation}"
            )
        if ceil_mode:
            extent = spread * (kernel - 1) + 1
            last = min(-((extent - size - 2 * pad) // step), (size + pad - 1) // step)
            after[d] = last * step + extent - size - pad
            ceil = ceil or after[d] >= kernel  # more padding than ONNX Runtime takes
    if ceil:
        if min(after) < 0:
            raise ValueError(
                f"{name}: expected strides within their windows for ONNX, in ceil mode with "
                f"dilation or dynamic sizes, but got stride={stride}, kernel_size={kernel_size}, "
                f"spatial sizes {list(sizes)}"
            )
        after = [min(pair) for pair in zip(after, padding, strict=True)]
    return [max(0, end) for end in after], ceil
