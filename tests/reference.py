"""Max unpooling and its transpose from their definition: slow, plain, no kernels of PyTorch's.

Everything is done on NumPy scalars and rows of bytes. Sums are taken one after the other, in the
type and the order that the package promises, so that results can be compared bit for bit.
"""

import math

import numpy as np
import torch
from torch import Tensor

Sizes = tuple[int, ...]


def default_output_size(pooled: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes) -> Sizes:
    return tuple(
        (n - 1) * s - 2 * p + k for n, k, s, p in zip(pooled, kernel, stride, padding, strict=True)
    )


def max_unpool(input: Tensor, indices: Tensor, output_size: Sizes, reduce: str) -> Tensor:
    """``output_size`` is spatial; ``input`` is (*leading, *spatial)."""
    plane = math.prod(output_size)
    shape = (*input.shape[: input.dim() - len(output_size)], *output_size)
    rows, targets = _planes(input, len(output_size)), _index_planes(indices, len(output_size))
    if reduce == "last":
        result = np.zeros((len(rows), plane, rows.shape[-1]), np.uint8)
        for out, row, target in zip(result, rows, targets, strict=True):
            for j, at in enumerate(target):
                out[at] = row[j]
        return _from_bytes(result, shape, input.dtype)
    adder = _Adder(input.dtype)
    result = np.zeros((len(rows), plane, rows.shape[-1]), np.uint8)
    for out, row, target in zip(result, rows, targets, strict=True):
        values = adder.read(row)
        sums: dict[int, list] = {}
        for j, at in enumerate(target):
            sums.setdefault(at, []).append(values[j])
        for at, members in sums.items():
            total = adder.sum(members)
            mean = reduce == "mean" and len(members) > 1
            out[at] = adder.write(adder.divide(total, len(members)) if mean else total)
    return _from_bytes(result, shape, input.dtype)


def max_unpool_backward(
    grad_output: Tensor, indices: Tensor, output_size: Sizes, reduce: str
) -> Tensor:
    grads, targets = (
        _planes(grad_output, len(output_size)),
        _index_planes(indices, len(output_size)),
    )
    result = np.zeros((len(targets), targets.shape[1], grads.shape[-1]), np.uint8)
    adder = _Adder(grad_output.dtype) if reduce == "mean" else None
    for out, grad, target in zip(result, grads, targets, strict=True):
        positions = target.tolist()
        last = {at: j for j, at in enumerate(positions)}
        for j, at in enumerate(positions):
            if adder is not None:
                value = adder.read(grad[at : at + 1])[0]
                out[j] = adder.write(adder.divide(value, positions.count(at)))
            elif reduce == "sum" or last[at] == j:
                out[j] = grad[at]
    return _from_bytes(result, tuple(indices.shape), grad_output.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """All elements in row-major order, as uint8."""
    return (
        tensor.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .flatten()
        .view(torch.uint8)
    )


def _planes(tensor: Tensor, dims: int) -> np.ndarray:
    """(planes, positions, bytes of an element)."""
    plane = math.prod(tensor.shape[tensor.dim() - dims :])
    return as_bytes(tensor).numpy().reshape(-1, plane, tensor.element_size())


def _index_planes(indices: Tensor, dims: int) -> np.ndarray:
    plane = math.prod(indices.shape[indices.dim() - dims :])
    return indices.detach().cpu().contiguous().numpy().reshape(-1, plane)


def _from_bytes(array: np.ndarray, shape: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array.reshape(-1)).view(dtype).reshape(shape)


class _Adder:
    """Sums and means of elements: integers wrap in 64 bits, half types add in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.integral = not (dtype.is_floating_point or dtype.is_complex)
        double = dtype in (torch.float64, torch.complex128)
        self.scalar = int if self.integral else np.float64 if double else np.float32

    def read(self, rows: np.ndarray) -> list[tuple]:
        """The elements, each as its real and (if complex) imaginary part."""
        values = torch.from_numpy(rows.copy().reshape(-1)).view(self.dtype)
        parts = torch.view_as_real(values) if self.dtype.is_complex else values[:, None]
        return [tuple(self.scalar(part) for part in element) for element in parts.tolist()]

    def sum(self, values: list[tuple]) -> tuple:
        total = tuple(self.scalar(0) for _ in values[0])
        for value in values:
            total = tuple(t + v for t, v in zip(total, value, strict=True))
        return tuple((t + 2**63) % 2**64 - 2**63 for t in total) if self.integral else total

    def divide(self, value: tuple, count: int) -> tuple:
        if self.integral:
            return (value[0] // count,)
        return tuple(v / self.scalar(count) for v in value)

    def write(self, value: tuple) -> np.ndarray:
        if self.integral:
            return np.array(value, np.int64).view(np.uint8)[: self.dtype.itemsize]
        return as_bytes(torch.tensor(np.array(value)).to(self.dtype.to_real())).numpy()
