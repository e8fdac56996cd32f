"""Max unpooling and max pooling as modules, in place of those of :mod:`torch.nn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy, Tracer

from ._arguments import IntOrInts, Reduce, check_index_dtype, check_reduce
from .functional import (
    Pooled,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    max_unpool1d,
    max_unpool2d,
    max_unpool3d,
)


class _Leaf:
    """What all six modules share: PyTorch's graphs show them whole, and TorchScript has none."""

    def _call_in_graph(self, input: Proxy, *arguments: Any) -> Any:
        """A call of this module, in the graph of a tracer that takes torch.nn's for leaves."""
        tracer: Any = input.tracer
        return tracer.create_proxy(
            "call_module", tracer.path_of_module(self), (input, *arguments), {}
        )

    def __prepare_scriptable__(self) -> None:
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}: expected torch.compile, torch.export or torch.jit.trace but got "
            "torch.jit.script, which it does not support"
        )


class _MaxUnpool(_Leaf, torch.nn.modules.pooling._MaxUnpoolNd):
    """What the three modules share; the torch.nn class each derives from makes the tuples."""

    _function: Callable[..., Tensor]
    kernel_size: Any
    stride: Any
    padding: Any
    reduce: Reduce = "last"  # also where the state is that of a torch.nn module

    def __init__(
        self,
        kernel_size: IntOrInts,
        stride: IntOrInts | None = None,
        padding: IntOrInts = 0,
        *,
        reduce: Reduce = "last",
    ) -> None:
        super().__init__(kernel_size, stride, padding)
        check_reduce(type(self).__name__, reduce)
        self.reduce = reduce

    def forward(
        self, input: Tensor, indices: Tensor, output_size: Sequence[int] | None = None
    ) -> Tensor:
        if isinstance(input, Proxy) and isinstance(input.tracer, Tracer):
            return self._call_in_graph(input, indices, output_size)
        return self._function(
            input,
            indices,
            self.kernel_size,
            self.stride,
            self.padding,
            output_size,
            reduce=self.reduce,
        )

    def extra_repr(self) -> str:
        inherited = super().extra_repr()
        return inherited if self.reduce == "last" else f"{inherited}, reduce={self.reduce!r}"


class MaxUnpool1d(_MaxUnpool, torch.nn.MaxUnpool1d):
    """:class:`torch.nn.MaxUnpool1d`, as :func:`maxunpool_cuda.functional.max_unpool1d` does it.

    Its arguments are those of :class:`MaxUnpool2d`.

    Example:
        >>> import torch
        >>> MaxUnpool1d(2)(torch.tensor([[7.0]]), torch.tensor([[1]]))
        tensor([[0., 7.]])
    """

    _function = staticmethod(max_unpool1d)


class MaxUnpool2d(_MaxUnpool, torch.nn.MaxUnpool2d):
    """:class:`torch.nn.MaxUnpool2d`, as :func:`maxunpool_cuda.functional.max_unpool2d` does it.

    Args:
        kernel_size: size of the pooling window.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding the pooling added.
        reduce: what becomes of values with the same index: ``"last"`` or ``"sum"``.

    Shape:
        - input, indices: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``
        - output: ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, with sizes
          ``(in - 1) * stride - 2 * padding + kernel_size`` or as ``output_size`` in the call says

    Example:
        >>> import torch
        >>> pool = torch.nn.MaxPool2d(2, return_indices=True)
        >>> unpool = MaxUnpool2d(2)
        >>> unpool
        MaxUnpool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0))
        >>> x = torch.randn(8, 3, 31, 32)
        >>> unpool(*pool(x), output_size=x.shape).shape
        torch.Size([8, 3, 31, 32])
    """

    _function = staticmethod(max_unpool2d)


class MaxUnpool3d(_MaxUnpool, torch.nn.MaxUnpool3d):
    """:class:`torch.nn.MaxUnpool3d`, as :func:`maxunpool_cuda.functional.max_unpool3d` does it.

    Its arguments are those of :class:`MaxUnpool2d`.

    Example:
        >>> import torch
        >>> MaxUnpool3d((1, 1, 2))(torch.tensor([[[[7.0]]]]), torch.tensor([[[[0]]]]))
        tensor([[[[7., 0.]]]])
    """

    _function = staticmethod(max_unpool3d)


class _MaxPool(_Leaf, torch.nn.modules.pooling._MaxPoolNd):
    """What the three modules share."""

    _function: Callable[..., Pooled]
    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any
    index_dtype: torch.dtype = torch.int64  # also where the state is that of a torch.nn module

    def __init__(
        self,
        kernel_size: IntOrInts,
        stride: IntOrInts | None = None,
        padding: IntOrInts = 0,
        dilation: IntOrInts = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
        *,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        super().__init__(kernel_size, stride, padding, dilation, return_indices, ceil_mode)  # type: ignore[arg-type]
        check_index_dtype(type(self).__name__, index_dtype)
        self.index_dtype = index_dtype

    def forward(self, input: Tensor) -> Pooled:
        if isinstance(input, Proxy) and isinstance(input.tracer, Tracer):
            return self._call_in_graph(input)
        return self._function(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
            index_dtype=self.index_dtype,
        )

    def extra_repr(self) -> str:
        inherited = super().extra_repr()
        if self.index_dtype == torch.int64:
            return inherited
        return f"{inherited}, index_dtype={self.index_dtype}"


class MaxPool1d(_MaxPool, torch.nn.MaxPool1d):
    """:class:`torch.nn.MaxPool1d`, as :func:`maxunpool_cuda.functional.max_pool1d` does it.

    Its arguments are those of :class:`MaxPool2d`.

    Example:
        >>> import torch
        >>> MaxPool1d(2)(torch.tensor([[1.0, 7.0]]))
        tensor([[7.]])
    """

    _function = staticmethod(max_pool1d)


class MaxPool2d(_MaxPool, torch.nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d`, as :func:`maxunpool_cuda.functional.max_pool2d` does it.

    Args:
        kernel_size: size of the window.
        stride: stride of the window; default: ``kernel_size``.
        padding: cells of minus infinity on both sides.
        dilation: distance between the cells of a window.
        return_indices: whether to return where the maxima are, too.
        ceil_mode: whether a last window may reach beyond the padding.
        index_dtype: of the indices: int64 or int32, flat positions in the input plane; or uint8,
            the row-major offset inside the window.

    Shape:
        - input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``
        - output: ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, once or twice

    Example:
        >>> import torch
        >>> pool = MaxPool2d(2, return_indices=True, index_dtype=torch.uint8)
        >>> values, offsets = pool(torch.randn(8, 3, 32, 32))
        >>> offsets.shape, offsets.dtype
        (torch.Size([8, 3, 16, 16]), torch.uint8)
    """

    _function = staticmethod(max_pool2d)


class MaxPool3d(_MaxPool, torch.nn.MaxPool3d):
    """:class:`torch.nn.MaxPool3d`, as :func:`maxunpool_cuda.functional.max_pool3d` does it.

    Its arguments are those of :class:`MaxPool2d`.

    Example:
        >>> import torch
        >>> MaxPool3d((1, 1, 2))(torch.tensor([[[[1.0, 7.0]]]]))
        tensor([[[[7.]]]])
    """

    _function = staticmethod(max_pool3d)
