# SPDX-License-Identifier: BSD-3-Clause
"""Max unpooling, max pooling and adaptive max pooling as modules, in place of torch.nn's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy, Tracer

from . import functional
from ._arguments import IntOrInts, IntsOrNones, Reduce, check_index_dtype, check_reduce


class _Leaf:
    """What all modules share: PyTorch's graphs show them whole, and TorchScript has none."""

    def _call_in_graph(self, input: Proxy, *arguments: Any) -> Any:
        """A call of this module, in the graph of a tracer that takes torch.nn's for leaves."""
        tracer: Any = input.tracer
        path = tracer.path_of_module(self)
        return tracer.create_proxy("call_module", path, (input, *arguments), {})

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
        """Takes torch.nn's arguments, and what becomes of values with the same index.

        Raises:
            ValueError: ``reduce`` is neither ``"last"`` nor ``"sum"``.
        """
        super().__init__(kernel_size, stride, padding)
        check_reduce(type(self).__name__, reduce)
        self.reduce = reduce

    def forward(
        self, input: Tensor, indices: Tensor, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """Scatter pooled values back to where ``indices`` say; all other outputs are zero.

        Args:
            input: ``(N, C, *pooled)`` or ``(C, *pooled)``, of any dtype that ``reduce`` takes.
            indices: as ``input``, of int64 or int32 (flat positions) or uint8 (window offsets).
            output_size: of the planes or of all dimensions; the default is
                ``(pooled - 1) * stride - 2 * padding + kernel_size``.

        Returns:
            ``(N, C, *output_size)`` or ``(C, *output_size)``, of the dtype of ``input``.

        Raises:
            RuntimeError: shapes, devices, the window or the indices' dtype do not fit, or an index
                lies outside its output plane (on CUDA the next unpooling raises that).
            ValueError: ``output_size`` does not fit the window, or uint8 cannot count its elements.
            TypeError: ``input`` or ``indices`` is no tensor, or a size is no int.
            NotImplementedError: the dtype does not add up, or only torch.nn takes such tensors and
                lacks what is asked for.
        """
        if isinstance(input, Proxy) and isinstance(input.tracer, Tracer):
            return self._call_in_graph(input, indices, output_size)
        window = (self.kernel_size, self.stride, self.padding)
        return self._function(input, indices, *window, output_size, reduce=self.reduce)

    def extra_repr(self) -> str:
        inherited = super().extra_repr()
        return inherited if self.reduce == "last" else f"{inherited}, reduce={self.reduce!r}"


class MaxUnpool1d(_MaxUnpool, torch.nn.MaxUnpool1d):
    """:class:`torch.nn.MaxUnpool1d`, as :func:`maxunpool_cuda.functional.max_unpool1d` does it.

    Example:
        >>> MaxUnpool1d(2)(torch.tensor([[7.0]]), torch.tensor([[1]]))
        tensor([[0., 7.]])
    """

    _function = staticmethod(functional.max_unpool1d)


class MaxUnpool2d(_MaxUnpool, torch.nn.MaxUnpool2d):
    """:class:`torch.nn.MaxUnpool2d`, as :func:`maxunpool_cuda.functional.max_unpool2d` does it.

    Example:
        >>> pool = torch.nn.MaxPool2d(2, return_indices=True)
        >>> unpool = MaxUnpool2d(2)
        >>> x = torch.randn(8, 3, 31, 32)
        >>> unpool(*pool(x), output_size=x.shape).shape
        torch.Size([8, 3, 31, 32])
    """

    _function = staticmethod(functional.max_unpool2d)


class MaxUnpool3d(_MaxUnpool, torch.nn.MaxUnpool3d):
    """:class:`torch.nn.MaxUnpool3d`, as :func:`maxunpool_cuda.functional.max_unpool3d` does it.

    Example:
        >>> MaxUnpool3d((1, 1, 2))(torch.tensor([[[[7.0]]]]), torch.tensor([[[[0]]]]))
        tensor([[[[7., 0.]]]])
    """

    _function = staticmethod(functional.max_unpool3d)


class _Pool(_Leaf):
    """What pools of both kinds share: the dtype of their indices."""

    _function: Callable[..., functional.Pooled]
    _passed: tuple[str, ...]  # the attributes that the function gets, in its order
    index_dtype: torch.dtype = torch.int64  # also where the state is that of a torch.nn module

    def forward(self, input: Tensor) -> functional.Pooled:
        """Take the largest of each window of the planes ``(N, C, *sizes)`` or ``(C, *sizes)``.

        They are of float16 to float64 or bfloat16 or, unless the pool is adaptive, of integers.

        Returns:
            ``(N, C, *pooled)`` or ``(C, *pooled)``; with ``return_indices`` also the indices.

        Raises:
            RuntimeError: the input's shape, or the window, is none that can be pooled.
            ValueError: ``index_dtype`` cannot name all there is to name.
            TypeError: ``input`` is no tensor, or a size is no int.
            NotImplementedError: the dtype does not compare, a derivative is needed of a window
                without an element, or only torch.nn takes such tensors and lacks ``index_dtype``.
        """
        if isinstance(input, Proxy) and isinstance(input.tracer, Tracer):
            return self._call_in_graph(input)
        arguments = [getattr(self, name) for name in self._passed]
        return self._function(input, *arguments, index_dtype=self.index_dtype)

    def extra_repr(self) -> str:
        inherited: str = super().extra_repr()  # type: ignore[misc]  # of torch.nn's
        usual = self.index_dtype == torch.int64
        return inherited if usual else f"{inherited}, index_dtype={self.index_dtype}"


class _MaxPool(_Pool, torch.nn.modules.pooling._MaxPoolNd):
    """What the three modules share."""

    _passed = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

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
        """Takes torch.nn's arguments, and the dtype of the indices.

        Raises:
            ValueError: ``index_dtype`` is none of int64 and int32 (flat positions) and uint8
                (window offsets).
        """
        super().__init__(kernel_size, stride, padding, dilation, return_indices, ceil_mode)  # type: ignore[arg-type]
        check_index_dtype(type(self).__name__, index_dtype)
        self.index_dtype = index_dtype


class _AdaptiveMaxPool(_Pool, torch.nn.modules.pooling._AdaptiveMaxPoolNd):
    """What the three modules share."""

    _passed = ("output_size", "return_indices")

    def __init__(
        self,
        output_size: IntsOrNones,
        return_indices: bool = False,
        *,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        """Takes torch.nn's arguments, and the dtype of the indices, which are flat positions.

        Raises:
            ValueError: ``index_dtype`` is neither int64 nor int32.
        """
        super().__init__(output_size, return_indices)  # type: ignore[arg-type]
        check_index_dtype(type(self).__name__, index_dtype, offsets=False)
        self.index_dtype = index_dtype


class MaxPool1d(_MaxPool, torch.nn.MaxPool1d):
    """:class:`torch.nn.MaxPool1d`, as :func:`maxunpool_cuda.functional.max_pool1d` does it.

    Example:
        >>> MaxPool1d(2)(torch.tensor([[1.0, 7.0]]))
        tensor([[7.]])
    """

    _function = staticmethod(functional.max_pool1d)


class MaxPool2d(_MaxPool, torch.nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d`, as :func:`maxunpool_cuda.functional.max_pool2d` does it.

    Example:
        >>> pool = MaxPool2d(2, return_indices=True, index_dtype=torch.uint8)
        >>> values, offsets = pool(torch.randn(8, 3, 32, 32))
        >>> offsets.shape, offsets.dtype
        (torch.Size([8, 3, 16, 16]), torch.uint8)
    """

    _function = staticmethod(functional.max_pool2d)


class MaxPool3d(_MaxPool, torch.nn.MaxPool3d):
    """:class:`torch.nn.MaxPool3d`, as :func:`maxunpool_cuda.functional.max_pool3d` does it.

    Example:
        >>> MaxPool3d((1, 1, 2))(torch.tensor([[[[1.0, 7.0]]]]))
        tensor([[[[7.]]]])
    """

    _function = staticmethod(functional.max_pool3d)


class AdaptiveMaxPool1d(_AdaptiveMaxPool, torch.nn.AdaptiveMaxPool1d):
    """:class:`torch.nn.AdaptiveMaxPool1d`, as :func:`.adaptive_max_pool1d` does it.

    Example:
        >>> AdaptiveMaxPool1d(1)(torch.tensor([[1.0, 7.0, 2.0]]))
        tensor([[7.]])
    """

    _function = staticmethod(functional.adaptive_max_pool1d)


class AdaptiveMaxPool2d(_AdaptiveMaxPool, torch.nn.AdaptiveMaxPool2d):
    """:class:`torch.nn.AdaptiveMaxPool2d`, as :func:`.adaptive_max_pool2d` does it.

    Example:
        >>> AdaptiveMaxPool2d((None, 1))(torch.tensor([[[1.0, 7.0], [4.0, 2.0]]]))
        tensor([[[7.],
                 [4.]]])
    """

    _function = staticmethod(functional.adaptive_max_pool2d)


class AdaptiveMaxPool3d(_AdaptiveMaxPool, torch.nn.AdaptiveMaxPool3d):
    """:class:`torch.nn.AdaptiveMaxPool3d`, as :func:`.adaptive_max_pool3d` does it.

    Example:
        >>> AdaptiveMaxPool3d(1)(torch.tensor([[[[1.0, 7.0]]]]))
        tensor([[[[7.]]]])
    """

    _function = staticmethod(functional.adaptive_max_pool3d)
