# SPDX-License-Identifier: BSD-3-Clause
"""What the functions of functional.py do with a call: max unpooling and max pooling.

A call goes one of three ways:

1. A subclass of Tensor, or a mode, overrides torch functions: it gets the function of functional.py
   and its arguments, as it would get torch.nn.functional's.
2. The input is quantized or mkldnn, or it is on a device for which this package never has kernels
   (as Apple's and Intel's GPUs): the function of the same name in torch.nn.functional does. On such
   a device the third way is for what torch.nn lacks, and for deterministic algorithms.
3. Else the arguments become those of an operator (_arguments.py), which is called (_ops.py). So
   ``max_pool2d(x, 2)`` calls ``max_pool(x, (2, 2), (2, 2), (0, 0), (1, 1), False, torch.uint8)``:
   window, stride, padding, dilation, ceil_mode and the dtype of indices for the backward alone.

A tiny call takes some microseconds, in which each call of a Python function counts. So the usual
arguments are told by identity, without a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import (
    handle_torch_function,
    has_torch_function_unary,
    has_torch_function_variadic,
)

from . import _arguments, _ops
from ._arguments import Reduce, per_dim
from ._checks import storage_kind
from ._ops import Ints

# The result of pooling: the values, or the values and the indices, as return_indices says.
Pooled: TypeAlias = Tensor | tuple[Tensor, Tensor]
# The usual arguments.
_LAST: Reduce = "last"
_INT64 = torch.int64


def max_unpool(
    function: Callable[..., Tensor], dims: int, arguments: tuple[Any, ...], reduce: Reduce
) -> Tensor:
    """Max unpooling over ``dims`` spatial dimensions.

    Args:
        function: the public function, whose name errors have.
        dims: 1, 2 or 3.
        arguments: those that torch.nn's function has, in its order.
        reduce: the argument that it lacks.
    """
    input, indices, kernel_size, stride, padding, output_size = arguments
    if has_torch_function_variadic(input, indices):
        tensors = (input, indices)
        result: Tensor = handle_torch_function(function, tensors, *arguments, reduce=reduce)
        return result
    name = function.__name__
    if not isinstance(indices, Tensor):
        raise TypeError(f"{name}: expected indices to be a Tensor but got {type(indices).__name__}")
    if reduce is not _LAST:
        _arguments.check_reduce(name, reduce)
    if is_for_torch(name, input, indices.dtype, reduce):
        if input.is_quantized or input.is_mkldnn:  # which torch.nn pools but does not unpool
            raise not_dense_error(name, input)
        torch_function: Callable[..., Tensor] = getattr(torch.nn.functional, name)
        return torch_function(*arguments)
    kernel = per_dim(name, "kernel_size", kernel_size, dims)
    steps = kernel if stride is None else per_dim(name, "stride", stride, dims)
    pads = per_dim(name, "padding", padding, dims)
    sizes = _arguments.unpooled_size(name, input.shape, kernel, steps, pads, output_size)
    return _ops.call_max_unpool((input, indices, sizes, kernel, steps, pads, reduce))


def max_pool(
    function: Callable[..., Any], dims: int, arguments: tuple[Any, ...], index_dtype: torch.dtype
) -> Pooled:
    """Max pooling over ``dims`` spatial dimensions.

    Args:
        function: the public function; errors begin with its name.
        dims: 1, 2 or 3.
        arguments: those that torch.nn's function has, in its order.
        index_dtype: the argument that torch.nn's function lacks.
    """
    input, kernel_size, stride, padding, dilation, ceil_mode, return_indices = arguments
    if has_torch_function_unary(input):
        result: Pooled = handle_torch_function(
            function, (input,), *arguments, index_dtype=index_dtype
        )
        return result
    name = function.__name__
    if index_dtype is not _INT64:
        _arguments.check_index_dtype(name, index_dtype)
    if is_for_torch(name, input, index_dtype if return_indices else torch.int64):
        torch_function: Callable[..., Pooled] = getattr(torch.nn.functional, name)
        return torch_function(*arguments)
    if not isinstance(ceil_mode, bool):
        raise TypeError(f"{name}: expected ceil_mode to be a bool but got {ceil_mode!r}")
    kernel = per_dim(name, "kernel_size", kernel_size, dims)
    no_stride = _arguments.has_no_stride(stride)
    steps = kernel if no_stride else per_dim(name, "stride", stride, dims)
    pads = per_dim(name, "padding", padding, dims)
    dilations = per_dim(name, "dilation", dilation, dims)
    if not return_indices:
        if _is_for_inductor(input, kernel):
            window = (kernel, steps, pads, dilations)
            values: Tensor = torch.ops.aten.max_pool2d_with_indices(input, *window, ceil_mode)[0]
            return values
        # Nobody but the backward sees the indices.
        index_dtype = _arguments.smallest_index_dtype(input.shape, kernel, dilations)
    operands = (input, kernel, steps, pads, dilations, ceil_mode, index_dtype)
    return _ops.call_max_pool(operands, bool(return_indices))


def is_for_torch(
    name: str, input: Tensor, index_dtype: torch.dtype = torch.int64, reduce: Reduce = "last"
) -> bool:
    """Whether torch.nn's function takes the call.

    If it lacks the ``index_dtype`` or the ``reduce`` of a call that only it can take, that is an
    error, and so is a nested input. Sparse tensors are left to the operators, which refuse them:
    here Dynamo may not look at a layout.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: expected input to be a Tensor but got {type(input).__name__}")
    if input.is_nested:
        raise not_dense_error(name, input)
    is_dense = not (input.is_quantized or input.is_mkldnn)
    if is_dense and (input.is_cpu or input.is_meta or _is_nvidia(input)):
        return False
    if reduce == "last" and index_dtype == torch.int64:
        return not (is_dense and torch.are_deterministic_algorithms_enabled())
    if is_dense:
        return False
    what = f"reduce={reduce!r}" if reduce != "last" else f"{index_dtype} indices"
    raise NotImplementedError(
        f"{name}: expected a plain tensor for {what}, which torch.nn lacks, but got a "
        f"{storage_kind(input)} tensor on {input.device.type}"
    )


def _is_nvidia(input: Tensor) -> bool:
    """Whether the tensor is on a CUDA device. PyTorch calls AMD's GPUs so, too."""
    return input.is_cuda and torch.version.hip is None


def not_dense_error(name: str, input: Tensor) -> NotImplementedError:
    """The error of an input that neither this package nor torch.nn takes."""
    return NotImplementedError(
        f"{name}: expected input to be a dense tensor but got a {storage_kind(input)} tensor"
    )


def _is_for_inductor(input: Tensor, kernel_size: Ints) -> bool:
    """Whether torch.compile sees a pool that Inductor, its backend, can fuse with what is around it.

    Then PyTorch's operator is called, which Inductor knows. It is as fast as this package's
    kernels. Inductor compiles 2d windows of at most 25 elements itself. A gradient would need
    indices, which Inductor would save as int64, so pools that need one keep this package's operator. So do
    subclasses of Tensor and exported programs.
    """
    return (
        torch.compiler.is_compiling()
        and not _arguments.is_exporting()
        and len(kernel_size) == 2
        and math.prod(kernel_size) <= 25
        and input.dtype.is_floating_point
        and type(input) in (Tensor, torch.nn.Parameter)
        and not (torch.is_grad_enabled() and input.requires_grad)
    )
