# SPDX-License-Identifier: BSD-3-Clause
"""What the functions of functional.py do with a call of adaptive max pooling.

Of an axis of size n that is pooled to size m, window i begins at ``floor(i * n / m)`` and ends
before ``ceil((i + 1) * n / m)``. There are three cases:

1. m divides n, as in 6 to 3: all windows have the size n / m, here [0, 2), [2, 4), [4, 6). Max
   pooling with ``kernel_size = stride = n / m`` does the same (_call.py).
2. It does not, as in 5 to 2: the windows are [0, 3) and [2, 5), and in general of several sizes.
   torch.nn's function finds the indices, and ``max_unpool_backward`` with "sum" reads the values
   there. Its gradient, ``max_unpool`` with "sum", is deterministic on CUDA, where torch.nn's is
   not.
3. torch.export records a call for other runtimes, of which few know adaptive pooling. The elements
   are written out window by window, so that case 1 does: 0 1 2 and 2 3 4, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import _arguments, _call, _operators
from ._arguments import Ints, is_known_int
from ._call import Pooled
from ._checks import check_allocated, check_index_dtype, not_dense_error
from ._decompositions import all_positions


def adaptive_max_pool(
    function: Callable[..., Any], dims: int, arguments: tuple[Any, ...], index_dtype: torch.dtype
) -> Pooled:
    """Adaptive max pooling over ``dims`` spatial dimensions.

    Args:
        function: the public function; errors begin with its name.
        dims: 1, 2 or 3.
        arguments: those that torch.nn's function has, in its order.
        index_dtype: the argument that torch.nn's function lacks.
    """
    input, output_size, return_indices = arguments
    if has_torch_function_unary(input):
        result: Pooled = handle_torch_function(
            function, (input,), *arguments, index_dtype=index_dtype
        )
        return result
    name = function.__name__
    check_index_dtype(name, index_dtype, is_adaptive=True)
    sizes = _arguments.adaptive_size(name, output_size, dims)
    # torch.nn's function takes one int faster than a tuple.
    output_size = output_size if type(output_size) is int else sizes
    if not return_indices:
        index_dtype = torch.int64  # nobody sees them, so any plane will do
    if _call.is_for_torch(name, input, index_dtype):
        return _pool_by_torch(name, input, output_size, return_indices)
    if index_dtype == torch.int32:
        _arguments.check_fits_int32(name, input.shape[-dims:])
    axes = _known_axes(input, sizes)
    is_recorded = _call.leaves_python()
    if axes is not None and all(axis.has_one_size for axis in axes):
        window = tuple([axis.size // axis.pooled for axis in axes])
        return _pool_equal_windows(function, input, window, return_indices, index_dtype)
    if axes is not None and is_recorded:
        return _pool_written_out(function, input, axes, return_indices, index_dtype)
    if is_recorded and not return_indices and _is_recorded_as_torchs(sizes):
        return _pool_by_torch(name, input, output_size, return_indices=False)
    values, indices = _pool_unequal_windows(name, input, output_size, index_dtype, dims=dims)
    return (values, indices) if return_indices else values


def _pool_by_torch(name: str, input: Tensor, output_size: Any, return_indices: bool) -> Pooled:
    """The results of torch.nn's function."""
    results: Pooled = getattr(torch.nn.functional, name)(input, output_size, return_indices)
    return results


def _is_recorded_as_torchs(output_size: tuple[Any, ...]) -> bool:
    """Whether torch.nn's function is recorded for sizes that are not known.

    Exporters take its windows for those of the example's sizes, which is right if the window is the
    whole plane. A trace is for the example's sizes anyway.
    """
    return _operators.is_jit_tracing() or all(
        type(size) is int and size == 1 for size in output_size
    )


class _Axis(NamedTuple):
    """An axis of known sizes."""

    size: int
    pooled: int

    @property
    def has_one_size(self) -> bool:
        """Whether all windows have the same size, side by side."""
        return self.size % self.pooled == 0

    def windows(self) -> list[list[int]]:
        """The elements of each window; its last one is repeated up to the size of the largest."""
        size, pooled = self.size, self.pooled
        windows = [range(i * size // pooled, -(-(i + 1) * size // pooled)) for i in range(pooled)]
        largest = max(map(len, windows))
        return [[*window] + [window[-1]] * (largest - len(window)) for window in windows]


def _known_axes(input: Tensor, output_size: tuple[Any, ...]) -> list[_Axis] | None:
    """The axes, or None if case 2 has to do it.

    All sizes must be known: a question about a symbolic size would fix it in the graph that is
    being traced. Case 2 are empty inputs, too, and shapes and dtypes that are wrong: torch.nn's
    function refuses those, in its own words.
    """
    shape, dims = input.shape, len(output_size)
    if len(shape) - dims not in (1, 2) or input.dtype not in _call.TORCH_POOLS:
        return None
    if any(is_known_int(size) and size == 0 for size in shape):
        return None
    axes = []
    for size, output in zip(shape[-dims:], output_size, strict=True):
        pooled = size if output is None else output
        if not (is_known_int(size) and is_known_int(pooled) and pooled > 0):
            return None
        axes.append(_Axis(size, pooled))
    return axes


def _pool_equal_windows(
    function: Callable[..., Any],
    input: Tensor,
    window: Ints,
    return_indices: bool,
    index_dtype: torch.dtype,
) -> Pooled:
    """Adaptive pooling as max pooling, with windows of this size side by side."""
    dims = len(window)
    # Of max pooling: the window, its stride, padding, dilation, ceil_mode, return_indices.
    pooling = (input, window, window, 0, 1, False, return_indices)
    results = _call.max_pool(function, dims, pooling, index_dtype)
    if dims < 3:
        return results
    # Of volumes, torch.nn's function returns contiguous tensors alone.
    if isinstance(results, Tensor):
        return results.contiguous()
    values, indices = results
    return values.contiguous(), indices.contiguous()


def _pool_written_out(
    function: Callable[..., Any],
    input: Tensor,
    axes: list[_Axis],
    return_indices: bool,
    index_dtype: torch.dtype,
) -> Pooled:
    """The same after the elements are written out window by window."""
    dims = len(axes)
    windows = [axis.windows() for axis in axes]
    window = tuple([len(of_axis[0]) for of_axis in windows])
    coordinates = [torch.tensor(of_axis, device=input.device).flatten() for of_axis in windows]
    for number, axis in enumerate(axes):
        if not axis.has_one_size:
            input = input.index_select(number - dims, coordinates[number])
    results = _pool_equal_windows(function, input, window, return_indices, torch.int64)
    if isinstance(results, Tensor):
        return results
    values, indices = results
    positions = all_positions(coordinates, [axis.size for axis in axes]).index_select(
        0, indices.flatten()
    )
    return values, positions.view(indices.shape).to(index_dtype)


def _pool_unequal_windows(
    name: str,
    input: Tensor,
    output_size: Any,
    index_dtype: torch.dtype,
    *,
    dims: int,
) -> tuple[Tensor, Tensor]:
    """Values and indices. The indices are those of torch.nn's function.

    So are the values in eager mode on a CPU, where the gradient of that function is
    deterministic. Else this package's operator reads them: on CUDA, in what is compiled or
    exported, and under forward-mode derivatives, which torch.nn's function lacks under PyTorch's
    older vmap.
    """
    is_eager = not (_operators.is_traced() or _operators.in_forward_mode())
    if is_eager and input.layout is not torch.strided:
        raise not_dense_error(name, "input", input)
    if is_eager and not input.is_contiguous():  # torch.nn's function refuses contiguous ones alone
        check_allocated(name, input=input)
    takes_torch_values = input.is_cpu and is_eager
    pool = getattr(torch.nn.functional, f"{name}_with_indices")
    values, indices = pool(input if takes_torch_values else input.detach(), output_size)
    if index_dtype == torch.int32:
        indices = indices.int()
    if not takes_torch_values and 0 not in indices.shape[-dims:]:
        values = _values_at(input, indices, dims)
    return values, indices


def _values_at(input: Tensor, indices: Tensor, dims: int) -> Tensor:
    """The elements of ``input`` at flat ``indices``, by an operator with a fast gradient.

    The operator expects windows of one size and stride. Those that it gets fit the adaptive ones
    near the beginning of the plane. The result is right wherever the indices lie.
    """
    sizes = input.shape[-dims:]
    pooled = indices.shape[-dims:]
    # PyTorch 2.11 compiles torch.sym_max of symbolic sizes alone.
    are_known = all(map(is_known_int, (*sizes, *pooled)))
    largest: Callable[..., Any] = max if are_known else torch.sym_max
    # No adaptive window is larger: it has at most one element more than n / m, rounded up.
    kernel_size = [2 * -(-n // m) - n // m for n, m in zip(sizes, pooled, strict=True)]
    stride = [largest(1, n // m) for n, m in zip(sizes, pooled, strict=True)]
    padding = [0] * dims
    window = (tuple(kernel_size), tuple(stride), tuple(padding))
    unpooling = (tuple(sizes), *window, "sum")
    values: Tensor = _operators.call(_operators.MAX_UNPOOL_BACKWARD, (input, indices), unpooling)
    # Of volumes, torch.nn's function returns contiguous tensors alone.
    return values.contiguous() if dims == 3 else values
