"""Pooling, unpooling and its transpose from their definition: slow, plain, no PyTorch kernels.

Everything is done on NumPy numbers and bytes, one pooled element after the other, in all planes at
once. Sums are taken in the type and the order that the package promises, so that results can be
compared bit for bit.
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
    dims, dtype = len(output_size), input.dtype
    elements, targets = _planes(input, dims), _index_planes(indices, dims)
    if reduce == "sum":
        elements = _accumulators(elements, dtype)
    result = np.zeros((len(elements), math.prod(output_size), *elements.shape[2:]), elements.dtype)
    every_plane = np.arange(len(elements))
    for cell, at in enumerate(targets.T):
        before = result[every_plane, at] if reduce == "sum" else 0
        result[every_plane, at] = before + elements[:, cell]
    if reduce == "sum":
        result = as_bytes(torch.from_numpy(result).to(dtype.to_real())).numpy()
    return _from_bytes(result, (*input.shape[: input.dim() - dims], *output_size), dtype)


def max_unpool_backward(
    grad_output: Tensor, indices: Tensor, output_size: Sizes, reduce: str
) -> Tensor:
    dims = len(output_size)
    grads, targets = _planes(grad_output, dims), _index_planes(indices, dims)
    every_plane = np.arange(len(grads))
    result = grads[every_plane[:, None], targets]
    if reduce == "last":
        winners = np.zeros(grads.shape[:2], np.int64)
        for cell, at in enumerate(targets.T):
            winners[every_plane, at] = cell
        result[winners[every_plane[:, None], targets] != np.arange(targets.shape[1])] = 0
    return _from_bytes(result, tuple(indices.shape), grad_output.dtype)


def pooled_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> int:
    """The number of windows along an axis.

    Windows fit the padded input. In ceil mode a window may reach beyond it by less than a stride,
    if it begins in the input or its left padding.
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
    axes = zip(sizes, kernel, stride, padding, dilation, strict=True)
    pooled = tuple(pooled_size(*axis, ceil_mode) for axis in axes)
    elements, numbers = _planes(input, dims), _numbers(input, dims)
    every_plane = np.arange(len(elements))
    real = input.dtype.is_floating_point
    lowest = torch.tensor(-math.inf if real else torch.iinfo(input.dtype).min, dtype=input.dtype)
    values = np.empty((len(elements), math.prod(pooled), elements.shape[2]), np.uint8)
    values[:] = as_bytes(lowest).numpy()
    indices = np.empty(values.shape[:2], np.int64)
    steps = np.array([*np.ndindex(*kernel)]) * dilation - padding
    to_position = [math.prod(sizes[axis + 1 :]) for axis in range(dims)]
    for j, cell in enumerate(np.ndindex(*pooled)):
        places = np.array(cell) * stride + steps  # of the window's elements, in each dimension
        positions = places @ to_position
        (found,) = ((places >= 0) & (places < sizes)).all(1).nonzero()
        if len(found):
            best = found[_largest(numbers[:, positions[found]])]
            values[:, j] = elements[every_plane, positions[best]]
        else:  # an empty window: its first element that lies before no axis' begin
            best = (places >= 0).all(1).argmax()
        indices[:, j] = best if index_dtype == torch.uint8 else positions[best]
    shape = (*input.shape[: input.dim() - dims], *pooled)
    return (
        _from_bytes(values, shape, input.dtype),
        torch.from_numpy(indices).reshape(shape).to(index_dtype),
    )


def adaptive_max_pool(input: Tensor, output_size: Sizes) -> tuple[Tensor, Tensor]:
    """Window i of m along n elements is from floor(i * n / m) to ceil((i + 1) * n / m)."""
    dims = len(output_size)
    sizes = tuple(input.shape[-dims:])
    elements, numbers = _planes(input, dims), _numbers(input, dims)
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    indices = np.empty((len(elements), math.prod(output_size)), np.int64)
    for j, cell in enumerate(np.ndindex(*output_size)):
        axes = zip(cell, output_size, sizes, strict=True)
        window = positions[tuple(slice(i * n // m, -((i + 1) * n // -m)) for i, m, n in axes)]
        indices[:, j] = window.ravel()[_largest(numbers[:, window.ravel()])]
    values = np.take_along_axis(elements, indices[..., None], 1)
    shape = (*input.shape[: input.dim() - dims], *output_size)
    return _from_bytes(values, shape, input.dtype), torch.from_numpy(indices).reshape(shape)


def _largest(windows: np.ndarray) -> np.ndarray:
    """The place of the largest in each row: the last NaN or, without any, the first maximum."""
    nans = np.isnan(windows)
    last_nan = windows.shape[1] - 1 - nans[:, ::-1].argmax(1)
    return np.where(nans.any(1), last_nan, windows.argmax(1))


def as_bytes(tensor: Tensor) -> Tensor:
    """All elements in row-major order, as uint8."""
    whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return whole.flatten().view(torch.uint8)


def _planes(tensor: Tensor, dims: int) -> np.ndarray:
    """(planes, positions, bytes of an element)."""
    plane = math.prod(tensor.shape[tensor.dim() - dims :])
    return as_bytes(tensor).numpy().reshape(-1, plane, tensor.element_size())


def _numbers(tensor: Tensor, dims: int) -> np.ndarray:
    """(planes, positions), in a type that holds every number of the tensor's."""
    real = tensor.dtype.is_floating_point
    numbers = tensor.detach().cpu().to(torch.float64 if real else torch.int64)
    return numbers.reshape(-1, math.prod(tensor.shape[tensor.dim() - dims :])).numpy()


def _index_planes(indices: Tensor, dims: int) -> np.ndarray:
    plane = math.prod(indices.shape[indices.dim() - dims :])
    return indices.detach().cpu().long().numpy().reshape(-1, plane)


def _accumulators(elements: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """(planes, positions, parts): integers wrap in 64 bits, half types add in float32."""
    values = torch.from_numpy(elements.copy()).flatten().view(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        values = values.long()
    elif dtype.to_real() != torch.float64:
        values = values.to(torch.complex64 if dtype.is_complex else torch.float32)
    values = torch.view_as_real(values) if dtype.is_complex else values[:, None]
    return values.reshape(*elements.shape[:2], values.shape[-1]).numpy()


def _from_bytes(array: np.ndarray, shape: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array.reshape(-1)).view(dtype).reshape(shape)
