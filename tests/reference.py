# SPDX-License-Identifier: BSD-3-Clause
"""Pooling, unpooling and its transpose from their definition: slow, plain, no PyTorch kernels.

Everything is done on NumPy numbers and bytes, one pooled element after the other, in all planes at
once. Sums are taken in the type and the order that the package promises, so that results can be
compared bit for bit.

Example: two cells with the values 1 and 5 and the flat indices 2 and 2, unpooled to three outputs,
give 0 0 5 with reduce="last" and 0 0 6 with "sum". Indices here are flat: a Call of cases.py turns
window offsets into positions before it asks for ``max_unpool``.
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
    elements = _accumulators(input, dims) if reduce == "sum" else _planes(input, dims)
    targets = _targets(indices, output_size)
    shape = (len(elements), math.prod(output_size) + 1, elements.shape[2])
    result = np.zeros(shape, elements.dtype)
    every_plane = np.arange(len(elements))
    for cell, target in enumerate(targets.T):  # in each plane, the target of this cell
        before = result[every_plane, target] if reduce == "sum" else 0
        result[every_plane, target] = before + elements[:, cell]
    result = result[:, :-1].copy()  # without the place for indices outside of the plane
    if reduce == "sum":
        result = as_bytes(torch.from_numpy(result).to(dtype.to_real())).numpy()
    return _from_bytes(result, (*input.shape[: input.dim() - dims], *output_size), dtype)


def max_unpool_backward(
    grad_output: Tensor, indices: Tensor, output_size: Sizes, reduce: str
) -> Tensor:
    """Each cell gets the gradient of its target; with "last" only the last cell of a target."""
    # An index outside of the plane finds the zero behind it.
    grads = np.pad(_planes(grad_output, len(output_size)), ((0, 0), (0, 1), (0, 0)))
    targets = _targets(indices, output_size)
    every_plane = np.arange(len(grads))
    result = grads[every_plane[:, None], targets]
    if reduce == "last":
        winners = np.zeros(grads.shape[:2], np.int64)
        for cell, target in enumerate(targets.T):
            winners[every_plane, target] = cell
        result[winners[every_plane[:, None], targets] != np.arange(targets.shape[1])] = 0
    return _from_bytes(result, tuple(indices.shape), grad_output.dtype)


def _targets(indices: Tensor, output_size: Sizes) -> np.ndarray:
    """(planes, cells): a position, or one behind the plane for all that lie outside of it."""
    targets, plane = _numbers(indices, len(output_size)), math.prod(output_size)
    return np.where((targets >= 0) & (targets < plane), targets, plane)


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


def windows(
    size: Sizes, pooled: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three tables, all (cells, elements), of the elements of each cell's window.

    The position, which outside the plane is what the coordinates give: in another row, before or
    behind the plane. Whether it is in the plane. Whether it is there or behind: no coordinate is
    negative.
    """
    cells, steps = (np.indices(sizes).reshape(len(sizes), -1).T for sizes in (pooled, kernel))
    places = cells[:, None] * stride + steps * dilation - padding
    positions = places @ [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    inside = (places >= 0) & (places < size)
    return positions, inside.all(2), (places >= 0).all(2)


def max_pool(
    input: Tensor,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    size = tuple(input.shape[-len(kernel) :])
    axes = zip(size, kernel, stride, padding, dilation, strict=True)
    pooled = tuple(pooled_size(*axis, ceil_mode) for axis in axes)
    chosen = []
    tables = windows(size, pooled, kernel, stride, padding, dilation)
    for positions, inside, not_negative in zip(*tables, strict=True):
        # An empty window has the index of its first element without a negative coordinate.
        offsets = inside.nonzero()[0] if inside.any() else not_negative.argmax(keepdims=True)
        counted = offsets if index_dtype == torch.uint8 else positions[offsets]
        chosen.append((positions[inside], counted))
    values, indices = _pool(input, pooled, chosen)
    return values, indices.to(index_dtype)


def adaptive_max_pool(input: Tensor, output_size: Sizes) -> tuple[Tensor, Tensor]:
    """Window i of m along n elements is from floor(i * n / m) to ceil((i + 1) * n / m)."""
    sizes = tuple(input.shape[-len(output_size) :])
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    windows = []
    for cell in np.ndindex(*output_size):
        axes = zip(cell, output_size, sizes, strict=True)
        window = positions[tuple(slice(i * n // m, -((i + 1) * n // -m)) for i, m, n in axes)]
        windows.append((window.ravel(), window.ravel()))
    return _pool(input, output_size, windows)


def _pool(
    input: Tensor, pooled: Sizes, windows: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[Tensor, Tensor]:
    """The values and their indices.

    ``windows`` has for each cell the positions of its elements, and their indices. An empty window
    has one index, and as its value the lowest number of the dtype.
    """
    dims, dtype = len(pooled), input.dtype
    elements, numbers = _planes(input, dims), _numbers(input, dims)
    lowest = torch.tensor(-math.inf if dtype.is_floating_point else torch.iinfo(dtype).min)
    values = np.empty((len(elements), len(windows), dtype.itemsize), np.uint8)
    values[:] = as_bytes(lowest.to(dtype)).numpy()
    chosen = np.empty(values.shape[:2], np.int64)
    for cell, (positions, indices) in enumerate(windows):
        best = np.array(0)
        if len(positions):
            best = _largest(numbers[:, positions])
            values[:, cell] = elements[np.arange(len(elements)), positions[best]]
        chosen[:, cell] = indices[best]
    shape = (*input.shape[: input.dim() - dims], *pooled)
    return _from_bytes(values, shape, dtype), torch.from_numpy(chosen).reshape(shape)


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


def _accumulators(input: Tensor, dims: int) -> np.ndarray:
    """(planes, positions, parts): integers wrap in 64 bits, half types add in float32."""
    values, dtype = input.detach().cpu().resolve_conj(), input.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        values = values.long()
    elif dtype.to_real() != torch.float64:
        values = values.to(torch.complex64 if dtype.is_complex else torch.float32)
    parts = torch.view_as_real(values) if dtype.is_complex else values[..., None]
    plane = math.prod(input.shape[input.dim() - dims :])
    return parts.reshape(-1, plane, parts.shape[-1]).numpy()


def _from_bytes(array: np.ndarray, shape: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array.reshape(-1)).view(dtype).reshape(shape)
