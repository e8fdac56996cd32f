"""Pooling, unpooling and its transpose from their definition: slow, plain, no PyTorch kernels.

Everything is done on NumPy scalars and rows of bytes. Sums are taken one after the other, in the
type and the order that the package promises, so that results can be compared bit for bit.
"""

import math
from collections.abc import Collection

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
    dims = len(output_size)
    rows, targets = _planes(input, dims), _index_planes(indices, dims)
    result = np.zeros((len(rows), math.prod(output_size), rows.shape[-1]), np.uint8)
    for out, row, target in zip(result, rows, targets, strict=True):
        for at, cells in _cells_of(target).items():
            out[at] = row[cells[-1]] if reduce == "last" else _total(row[cells], input.dtype)
    return _from_bytes(result, (*input.shape[: input.dim() - dims], *output_size), input.dtype)


def max_unpool_backward(
    grad_output: Tensor, indices: Tensor, output_size: Sizes, reduce: str
) -> Tensor:
    dims = len(output_size)
    grads, targets = _planes(grad_output, dims), _index_planes(indices, dims)
    result = np.zeros((*targets.shape[:2], grads.shape[-1]), np.uint8)
    for out, grad, target in zip(result, grads, targets, strict=True):
        for at, cells in _cells_of(target).items():
            out[cells if reduce == "sum" else cells[-1]] = grad[at]
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
    axes = tuple(zip(sizes, kernel, stride, padding, dilation, strict=True))
    pooled = tuple(pooled_size(*axis, ceil_mode) for axis in axes)
    rows = _planes(input, dims)
    numbers = input.detach().cpu().reshape(rows.shape[:2]).tolist()
    real = input.dtype.is_floating_point
    lowest = torch.tensor(-math.inf if real else torch.iinfo(input.dtype).min, dtype=input.dtype)
    values = np.zeros((len(rows), math.prod(pooled), rows.shape[-1]), np.uint8)
    values[:] = as_bytes(lowest).numpy()
    indices = np.zeros(values.shape[:2], np.int64)
    for j, cell in enumerate(np.ndindex(*pooled)):
        # Offset in the window and position in the plane; an empty window gets the first of those
        # that lie before no axis.
        found, empty = {}, None
        for offset, steps in enumerate(np.ndindex(*kernel)):
            position, inside = 0, True
            for p, k, (size, _, s, pad, d) in zip(cell, steps, axes, strict=True):
                at = p * s - pad + k * d
                if at < 0:
                    break
                position, inside = position * size + at, inside and at < size
            else:
                empty = empty or (offset, position)
                found |= {position: offset} if inside else {}
        for plane, number in enumerate(numbers):
            best = empty
            if found:
                at = _largest(found, number)
                best = (found[at], at)
                values[plane, j] = rows[plane, at]
            indices[plane, j] = best[index_dtype != torch.uint8]
    shape = (*input.shape[: input.dim() - dims], *pooled)
    return (
        _from_bytes(values, shape, input.dtype),
        torch.from_numpy(indices).reshape(shape).to(index_dtype),
    )


def adaptive_max_pool(input: Tensor, output_size: Sizes) -> tuple[Tensor, Tensor]:
    """Of m windows along n elements, window i is from floor(i * n / m) to ceil((i + 1) * n / m)."""
    dims = len(output_size)
    sizes = tuple(input.shape[-dims:])
    rows = _planes(input, dims)
    numbers = input.detach().cpu().reshape(rows.shape[:2]).tolist()
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    indices = np.zeros((len(rows), math.prod(output_size)), np.int64)
    for j, cell in enumerate(np.ndindex(*output_size)):
        axes = zip(cell, output_size, sizes, strict=True)
        window = tuple(slice(i * n // m, -((i + 1) * n // -m)) for i, m, n in axes)
        for plane, number in enumerate(numbers):
            indices[plane, j] = _largest(positions[window].ravel().tolist(), number)
    values = np.take_along_axis(rows, indices[..., None], 1)
    shape = (*input.shape[: input.dim() - dims], *output_size)
    return _from_bytes(values, shape, input.dtype), torch.from_numpy(indices).reshape(shape)


def _largest(positions: Collection[int], numbers: list[float]) -> int:
    """Where the largest is: the last NaN or, where there is none, the first of the maxima."""
    nans = [at for at in positions if math.isnan(numbers[at])]
    return nans[-1] if nans else max(positions, key=numbers.__getitem__)


def as_bytes(tensor: Tensor) -> Tensor:
    """All elements in row-major order, as uint8."""
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return whole.flatten().view(torch.uint8)


def _planes(tensor: Tensor, dims: int) -> np.ndarray:
    """(planes, positions, bytes of an element)."""
    plane = math.prod(tensor.shape[tensor.dim() - dims :])
    return as_bytes(tensor).numpy().reshape(-1, plane, tensor.element_size())


def _index_planes(indices: Tensor, dims: int) -> np.ndarray:
    plane = math.prod(indices.shape[indices.dim() - dims :])
    return indices.detach().cpu().contiguous().numpy().reshape(-1, plane)


def _cells_of(target: np.ndarray) -> dict[int, list[int]]:
    """The cells that name each position, in row-major order."""
    cells: dict[int, list[int]] = {}
    for cell, at in enumerate(target.tolist()):
        cells.setdefault(at, []).append(cell)
    return cells


def _from_bytes(array: np.ndarray, shape: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array.reshape(-1)).view(dtype).reshape(shape)


def _total(rows: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bytes of a sum: integers wrap in 64 bits, half types add in float32."""
    values = torch.from_numpy(rows.copy().reshape(-1)).view(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        wrapped = (sum(values.tolist()) + 2**63) % 2**64 - 2**63
        return np.array([wrapped], np.int64).view(np.uint8)[: dtype.itemsize]
    double = dtype in (torch.float64, torch.complex128)
    elements = torch.view_as_real(values) if dtype.is_complex else values[:, None]
    total = np.zeros(elements.shape[1], np.float64 if double else np.float32)
    for element in elements.tolist():
        total = total + np.array(element, total.dtype)
    return as_bytes(torch.from_numpy(total).to(dtype.to_real())).numpy()
