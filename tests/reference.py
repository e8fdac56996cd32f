"""Pooling, unpooling and its transpose from their definition: slow, plain, no PyTorch kernels.

Everything is done on NumPy scalars and rows of bytes. Sums are taken one after the other, in the
type and the order that the package promises, so that results can be compared bit for bit.
"""

import itertools
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


def pooled_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> int:
    """How many windows there are.

    They fit the padded input or, in ceil mode, reach beyond it by less than a stride, but begin in
    the input or its left padding.
    """
    end = size + 2 * padding + (stride - 1 if ceil else 0)
    count = 0
    while count * stride + dilation * (kernel - 1) + 1 <= end and (
        not ceil or count * stride < size + padding
    ):
        count += 1
    return count


def max_pool(
    input: Tensor,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    dims = len(kernel)
    sizes = tuple(input.shape[-dims:])
    windows = tuple(zip(sizes, kernel, stride, padding, dilation, strict=True))
    pooled = tuple(pooled_size(*window, ceil_mode) for window in windows)
    rows = _planes(input, dims)
    numbers = input.detach().cpu().reshape(len(rows), math.prod(sizes)).tolist()
    real = input.dtype.is_floating_point
    lowest = torch.tensor(-math.inf if real else torch.iinfo(input.dtype).min, dtype=input.dtype)
    shape = (*input.shape[: input.dim() - dims], *pooled)
    values = np.zeros((len(rows), math.prod(pooled), rows.shape[-1]), np.uint8)
    values[:] = as_bytes(lowest).numpy()
    indices = np.zeros(values.shape[:2], np.int64)
    for j, cell in enumerate(np.ndindex(*pooled)):
        axes = [
            [(k, p * s - pad + k * d) for k in range(kernel) if p * s - pad + k * d >= 0]
            for p, (_, kernel, s, pad, d) in zip(cell, windows, strict=True)
        ]
        # (offset in the window, position in the plane), row-major; the first says what an empty
        # window gets
        candidates = []
        for numbers_and_places in itertools.product(*axes):
            offset = position = 0
            for (k, at), size, width in zip(numbers_and_places, sizes, kernel, strict=True):
                offset, position = offset * width + k, position * size + at
            inside = all(at < n for (_, at), n in zip(numbers_and_places, sizes, strict=True))
            candidates.append((offset, position, inside))
        for plane, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            found = [(o, at) for o, at, inside in candidates if inside]
            nans = [c for c in found if number[c[1]] != number[c[1]]]
            if nans:
                best = nans[-1]
            elif found:
                largest = max(number[at] for _, at in found)
                best = next(c for c in found if number[c[1]] == largest)
            else:
                best = candidates[0][:2]
            if found:
                values[plane, j] = row[best[1]]
            indices[plane, j] = best[0] if index_dtype == torch.uint8 else best[1]
    return (
        _from_bytes(values, shape, input.dtype),
        torch.from_numpy(indices).reshape(shape).to(index_dtype),
    )


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
