# SPDX-License-Identifier: BSD-3-Clause
"""Max unpooling, max pooling and adaptive max pooling as modules, in place of torch.nn's.

Each class derives from torch.nn's class of the same name, so that ``isinstance``, pickles and state
are torch.nn's. What a kind adds is in a class that its three dimensions share: an argument that
torch.nn lacks, which ``repr`` shows, and a ``forward`` that calls this package's function.
Constructors check what a call checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy, Tracer

from . import functional
from ._arguments import (
    IntOrInts,
    IntsOrNones,
    Reduce,
    adaptive_size,
    check_ceil_mode,
    per_dim,
    pool_window,
)
from ._call import Pooled
from ._checks import (
    Window,
    check_fits_uint8,
    check_index_dtype,
    check_pool_window,
    check_reduce,
    check_window,
)


class _Leaf:
    """The base of all modules of this package: PyTorch's graphs show them whole.

    torch.fx makes a node of a call of a torch.nn module, and traces into modules of others. These
    modules make the node themselves. TorchScript has neither them nor their operators.
    """

    _dims: int  # spatial dimensions
    _own_argument: str  # that torch.nn's class lacks

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the classes of this file, not those of others, what they inherit as their own.

        Python's errors name functions: "MaxUnpool2d.forward() missing 1 required positional
        argument: 'indices'".
        """
        super().__init_subclass__(**options)
        for name in ("__init__", "forward"):
            function = getattr(cls, name, None)
            if cls.__module__ == __name__ and isinstance(function, FunctionType):
                setattr(cls, name, _renamed(function, f"{cls.__name__}.{name}"))

    def _get_name(self) -> str:
        """The name in ``repr``: that of the class, and of the package if it is one of these."""
        name = type(self).__name__
        return f"maxunpool_cuda.{name}" if type(self).__module__ == __name__ else name

    def extra_repr(self) -> str:
        inherited: str = super().extra_repr()  # type: ignore[misc]  # of torch.nn's
        return f"{inherited}, {self._own_argument}={getattr(self, self._own_argument)!r}"

    def _call_in_graph(self, input: Proxy, *arguments: Any) -> Any:
        """The node of a call of this module, in the graph that torch.fx is tracing."""
        tracer: Any = input.tracer
        path = tracer.path_of_module(self)
        return tracer.create_proxy("call_module", path, (input, *arguments), {})

    def __prepare_scriptable__(self) -> None:
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}: expected torch.compile, torch.export or torch.jit.trace but got "
            "torch.jit.script, which it does not support"
        )


def _renamed(function: FunctionType, qualname: str) -> FunctionType:
    """A copy of a function that has another name in Python's messages."""
    parts = (function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy = FunctionType(*parts, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    copy.__qualname__ = qualname
    return copy


class _MaxUnpool(_Leaf, torch.nn.modules.pooling._MaxUnpoolNd):
    """What MaxUnpool1d, 2d and 3d share. torch.nn's class, the other base of each, makes tuples."""

    _function: Callable[..., Tensor]
    kernel_size: Any
    stride: Any
    padding: Any
    reduce: Reduce = "last"  # also for modules whose state is from a pickle of torch.nn's
    _own_argument = "reduce"

    def __init__(
        self,
        kernel_size: IntOrInts,
        stride: IntOrInts | None = None,
        padding: IntOrInts = 0,
        *,
        reduce: Reduce = "last",
    ) -> None:
        name = type(self).__name__
        check_reduce(name, reduce)
        steps = kernel_size if stride is None else stride
        window = (
            per_dim(name, "kernel_size", kernel_size, self._dims),
            per_dim(name, "stride", steps, self._dims),
            per_dim(name, "padding", padding, self._dims),
        )
        check_window(Window("MaxUnpool", *window))
        super().__init__(kernel_size, stride, padding)
        self.reduce = reduce

    def forward(
        self, input: Tensor, indices: Tensor, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """Scatter pooled values back to where ``indices`` say; all other outputs are zero.

        Args:
            input: the pooled values, of any dtype; for ``reduce="sum"`` one that adds up.
            indices: of the shape of ``input``; int64 or int32 (flat positions in the output plane)
                or uint8 (offsets in the window).
            output_size: the sizes of the output plane, or of all dimensions; the default is
                ``(in - 1) * stride - 2 * padding + kernel_size``.

        Returns:
            The planes, of the dtype of ``input``.

        Raises:
            RuntimeError: shapes, devices, the window or the dtype of ``indices`` do not fit; or an
                index lies outside its output plane (on CUDA the next unpooling raises that).
            ValueError: ``output_size`` does not fit the window, or the window has too many elements
                for uint8 indices.
            TypeError: ``input`` or ``indices`` is no tensor, or a size is no int.
            NotImplementedError: the dtype does not add up; or a tensor is not dense.
        """
        if isinstance(input, Proxy) and isinstance(input.tracer, Tracer):
            return self._call_in_graph(input, indices, output_size)
        window = (self.kernel_size, self.stride, self.padding)
        return self._function(input, indices, *window, output_size, reduce=self.reduce)


class _Pool(_Leaf):
    """What pools of both kinds share: the dtype of their indices, and their ``forward``."""

    _function: Callable[..., Pooled]
    _argument_names: tuple[str, ...]  # the attributes that the function takes, in its order
    index_dtype: torch.dtype = torch.int64  # also for modules with the state of torch.nn's
    _own_argument = "index_dtype"

    def forward(self, input: Tensor) -> Pooled:
        """Take the largest element of each window.

        Args:
            input: of float16 to float64 or bfloat16, or integers unless the pool is adaptive.

        Returns:
            The pooled values; with ``return_indices`` the values and their indices.

        Raises:
            RuntimeError: no pooling takes the shape of the input, or the window.
            ValueError: ``index_dtype`` is too small for the plane (int32) or the window (uint8).
            TypeError: ``input`` is no tensor, or a size is no int.
            NotImplementedError: the dtype does not compare; a derivative is needed, but a window
                has no element of the input; or only torch.nn supports the kind of the input, and
                it lacks ``index_dtype``.
        """
        if isinstance(input, Proxy) and isinstance(input.tracer, Tracer):
            return self._call_in_graph(input)
        arguments = [getattr(self, name) for name in self._argument_names]
        return self._function(input, *arguments, index_dtype=self.index_dtype)


class _MaxPool(_Pool, torch.nn.modules.pooling._MaxPoolNd):
    """What MaxPool1d, 2d and 3d share."""

    # The function takes ceil_mode before return_indices, the class after it: as in torch.nn.
    _argument_names = (
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "ceil_mode",
        "return_indices",
    )

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
        name = type(self).__name__
        check_index_dtype(name, index_dtype)
        check_ceil_mode(name, ceil_mode)
        numbers = pool_window(name, self._dims, kernel_size, stride, padding, dilation)
        window = Window("MaxPool", *numbers)
        check_pool_window(window)
        if index_dtype == torch.uint8:
            check_fits_uint8(window)
        super().__init__(kernel_size, stride, padding, dilation, return_indices, ceil_mode)  # type: ignore[arg-type]
        self.index_dtype = index_dtype


class _AdaptiveMaxPool(_Pool, torch.nn.modules.pooling._AdaptiveMaxPoolNd):
    """What AdaptiveMaxPool1d, 2d and 3d share."""

    _argument_names = ("output_size", "return_indices")

    def __init__(
        self,
        output_size: IntsOrNones,
        return_indices: bool = False,
        *,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        name = type(self).__name__
        check_index_dtype(name, index_dtype, is_adaptive=True)
        adaptive_size(name, output_size, self._dims)
        super().__init__(output_size, return_indices)  # type: ignore[arg-type]
        self.index_dtype = index_dtype


# The documents below are written out for each class, as help() and editors show them. The texts of
# a kind differ in the sizes that they name.


class MaxUnpool1d(_MaxUnpool, torch.nn.MaxUnpool1d):
    """Scatters pooled signals back, in place of :class:`torch.nn.MaxUnpool1d`.

    It calls :func:`maxunpool_cuda.functional.max_unpool1d`.

    Args:
        kernel_size: size of the pooling window, an int or a sequence of one.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding that the pooling added on both sides; default: 0.
        reduce: what becomes of values with the same index. ``"last"``: the last one in row-major
            order wins; ``"sum"``: they add up. Default: ``"last"``.

    Shape:
        - input and indices: ``(N, C, L_in)`` or ``(C, L_in)``
        - output: ``(N, C, L_out)`` or ``(C, L_out)``, where by default
          ``out = (in - 1) * stride - 2 * padding + kernel_size``

    Raises:
        TypeError: a number is no int.
        RuntimeError: there are too many or too few, or ``kernel_size`` or ``stride`` is not
            positive, or ``padding`` is negative.
        ValueError: ``reduce`` is neither ``"last"`` nor ``"sum"``.

    Example:
        >>> MaxUnpool1d(2)(torch.tensor([[7.0]]), torch.tensor([[1]]))
        tensor([[0., 7.]])
    """

    _dims = 1
    _function = staticmethod(functional.max_unpool1d)


class MaxUnpool2d(_MaxUnpool, torch.nn.MaxUnpool2d):
    """Scatters pooled images back, in place of :class:`torch.nn.MaxUnpool2d`.

    It calls :func:`maxunpool_cuda.functional.max_unpool2d`.

    Args:
        kernel_size: size of the pooling window, an int for both dimensions, or a sequence of two.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding that the pooling added on both sides; default: 0.
        reduce: what becomes of values with the same index. ``"last"``: the last one in row-major
            order wins; ``"sum"``: they add up. Default: ``"last"``.

    Shape:
        - input and indices: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``
        - output: ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``, where by default
          ``out = (in - 1) * stride - 2 * padding + kernel_size``

    Raises:
        TypeError: a number is no int.
        RuntimeError: there are too many or too few, or ``kernel_size`` or ``stride`` is not
            positive, or ``padding`` is negative.
        ValueError: ``reduce`` is neither ``"last"`` nor ``"sum"``.

    Example:
        >>> pool = torch.nn.MaxPool2d(2, return_indices=True)
        >>> unpool = MaxUnpool2d(2)
        >>> x = torch.randn(8, 3, 31, 32)
        >>> unpool(*pool(x), output_size=x.shape).shape
        torch.Size([8, 3, 31, 32])
    """

    _dims = 2
    _function = staticmethod(functional.max_unpool2d)


class MaxUnpool3d(_MaxUnpool, torch.nn.MaxUnpool3d):
    """Scatters pooled volumes back, in place of :class:`torch.nn.MaxUnpool3d`.

    It calls :func:`maxunpool_cuda.functional.max_unpool3d`.

    Args:
        kernel_size: size of the pooling window, an int for all dimensions, or a sequence of three.
        stride: stride of the window; default: ``kernel_size``.
        padding: padding that the pooling added on both sides; default: 0.
        reduce: what becomes of values with the same index. ``"last"``: the last one in row-major
            order wins; ``"sum"``: they add up. Default: ``"last"``.

    Shape:
        - input and indices: ``(N, C, D_in, H_in, W_in)`` or ``(C, D_in, H_in, W_in)``
        - output: ``(N, C, D_out, H_out, W_out)`` or ``(C, D_out, H_out, W_out)``, where by default
          ``out = (in - 1) * stride - 2 * padding + kernel_size``

    Raises:
        TypeError: a number is no int.
        RuntimeError: there are too many or too few, or ``kernel_size`` or ``stride`` is not
            positive, or ``padding`` is negative.
        ValueError: ``reduce`` is neither ``"last"`` nor ``"sum"``.

    Example:
        >>> MaxUnpool3d((1, 1, 2))(torch.tensor([[[[7.0]]]]), torch.tensor([[[[0]]]]))
        tensor([[[[7., 0.]]]])
    """

    _dims = 3
    _function = staticmethod(functional.max_unpool3d)


class MaxPool1d(_MaxPool, torch.nn.MaxPool1d):
    """Takes the largest element of each window of signals, as :class:`torch.nn.MaxPool1d` does.

    It calls :func:`maxunpool_cuda.functional.max_pool1d`.

    Args:
        kernel_size: size of the window, an int or a sequence of one.
        stride: stride of the window; default: ``kernel_size``.
        padding: elements of minus infinity on both sides, at most half of ``kernel_size``;
            default: 0.
        dilation: distance between the elements of a window; default: 1.
        return_indices: whether to return the indices, too; default: False.
        ceil_mode: whether a last window may reach beyond the padding; default: False.
        index_dtype: int64, int32 or uint8. int64 and int32 indices are flat positions in the input
            plane. uint8 indices are offsets in the window, which has at most 256 elements and no
            dilation; only this package's unpooling understands them. Default: torch.int64.

    Shape:
        - input: ``(N, C, L_in)`` or ``(C, L_in)``
        - output, and indices: ``(N, C, L_out)`` or ``(C, L_out)``;
          ``out = (in + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1``, or one more
          if ``ceil_mode`` adds a window

    Raises:
        TypeError: a number is no int, or ``ceil_mode`` no bool.
        RuntimeError: there are too many or too few, or ``padding`` is negative or above half of
            ``kernel_size``, or another number is not positive.
        ValueError: ``index_dtype`` is none of those allowed, or too small for the window (uint8).

    Example:
        >>> MaxPool1d(2)(torch.tensor([[1.0, 7.0]]))
        tensor([[7.]])
    """

    _dims = 1
    _function = staticmethod(functional.max_pool1d)


class MaxPool2d(_MaxPool, torch.nn.MaxPool2d):
    """Takes the largest element of each window of images, as :class:`torch.nn.MaxPool2d` does.

    It calls :func:`maxunpool_cuda.functional.max_pool2d`.

    Args:
        kernel_size: size of the window, an int for both dimensions, or a sequence of two.
        stride: stride of the window; default: ``kernel_size``.
        padding: elements of minus infinity on both sides, at most half of ``kernel_size``;
            default: 0.
        dilation: distance between the elements of a window; default: 1.
        return_indices: whether to return the indices, too; default: False.
        ceil_mode: whether a last window may reach beyond the padding; default: False.
        index_dtype: int64, int32 or uint8. int64 and int32 indices are flat positions in the input
            plane. uint8 indices are offsets in the window, which has at most 256 elements and no
            dilation; only this package's unpooling understands them. Default: torch.int64.

    Shape:
        - input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``
        - output, and indices: ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``;
          ``out = (in + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1``, or one more
          if ``ceil_mode`` adds a window

    Raises:
        TypeError: a number is no int, or ``ceil_mode`` no bool.
        RuntimeError: there are too many or too few, or ``padding`` is negative or above half of
            ``kernel_size``, or another number is not positive.
        ValueError: ``index_dtype`` is none of those allowed, or too small for the window (uint8).

    Example:
        >>> pool = MaxPool2d(2, return_indices=True, index_dtype=torch.uint8)
        >>> values, offsets = pool(torch.randn(8, 3, 32, 32))
        >>> offsets.shape, offsets.dtype
        (torch.Size([8, 3, 16, 16]), torch.uint8)
    """

    _dims = 2
    _function = staticmethod(functional.max_pool2d)


class MaxPool3d(_MaxPool, torch.nn.MaxPool3d):
    """Takes the largest element of each window of volumes, as :class:`torch.nn.MaxPool3d` does.

    It calls :func:`maxunpool_cuda.functional.max_pool3d`.

    Args:
        kernel_size: size of the window, an int for all dimensions, or a sequence of three.
        stride: stride of the window; default: ``kernel_size``.
        padding: elements of minus infinity on both sides, at most half of ``kernel_size``;
            default: 0.
        dilation: distance between the elements of a window; default: 1.
        return_indices: whether to return the indices, too; default: False.
        ceil_mode: whether a last window may reach beyond the padding; default: False.
        index_dtype: int64, int32 or uint8. int64 and int32 indices are flat positions in the input
            plane. uint8 indices are offsets in the window, which has at most 256 elements and no
            dilation; only this package's unpooling understands them. Default: torch.int64.

    Shape:
        - input: ``(N, C, D_in, H_in, W_in)`` or ``(C, D_in, H_in, W_in)``
        - output, and indices: ``(N, C, D_out, H_out, W_out)`` or ``(C, D_out, H_out, W_out)``;
          ``out = (in + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1``, or one more
          if ``ceil_mode`` adds a window

    Raises:
        TypeError: a number is no int, or ``ceil_mode`` no bool.
        RuntimeError: there are too many or too few, or ``padding`` is negative or above half of
            ``kernel_size``, or another number is not positive.
        ValueError: ``index_dtype`` is none of those allowed, or too small for the window (uint8).

    Example:
        >>> MaxPool3d((1, 1, 2))(torch.tensor([[[[1.0, 7.0]]]]))
        tensor([[[[7.]]]])
    """

    _dims = 3
    _function = staticmethod(functional.max_pool3d)


class AdaptiveMaxPool1d(_AdaptiveMaxPool, torch.nn.AdaptiveMaxPool1d):
    """Pools signals to a given size, as :class:`torch.nn.AdaptiveMaxPool1d` does.

    It calls :func:`maxunpool_cuda.functional.adaptive_max_pool1d`.

    Args:
        output_size: length of the output, an int.
        return_indices: whether to return the indices, too; default: False.
        index_dtype: int64 or int32, of flat positions in the input plane; default: torch.int64.

    Shape:
        - input: ``(N, C, L_in)`` or ``(C, L_in)``
        - output, and indices: ``(N, C, L_out)`` or ``(C, L_out)``

    Raises:
        TypeError: a size is no int.
        RuntimeError: the number of sizes is wrong, or one is negative.
        ValueError: ``index_dtype`` is none of those allowed.

    Example:
        >>> AdaptiveMaxPool1d(1)(torch.tensor([[1.0, 7.0, 2.0]]))
        tensor([[7.]])
    """

    _dims = 1
    _function = staticmethod(functional.adaptive_max_pool1d)


class AdaptiveMaxPool2d(_AdaptiveMaxPool, torch.nn.AdaptiveMaxPool2d):
    """Pools images to a given size, as :class:`torch.nn.AdaptiveMaxPool2d` does.

    It calls :func:`maxunpool_cuda.functional.adaptive_max_pool2d`.

    Args:
        output_size: ``(H_out, W_out)``, or one int for both; None keeps the size of the input.
        return_indices: whether to return the indices, too; default: False.
        index_dtype: int64 or int32, of flat positions in the input plane; default: torch.int64.

    Shape:
        - input: ``(N, C, H_in, W_in)`` or ``(C, H_in, W_in)``
        - output, and indices: ``(N, C, H_out, W_out)`` or ``(C, H_out, W_out)``

    Raises:
        TypeError: a size is no int.
        RuntimeError: the number of sizes is wrong, or one is negative.
        ValueError: ``index_dtype`` is none of those allowed.

    Example:
        >>> AdaptiveMaxPool2d((None, 1))(torch.tensor([[[1.0, 7.0], [4.0, 2.0]]]))
        tensor([[[7.],
                 [4.]]])
    """

    _dims = 2
    _function = staticmethod(functional.adaptive_max_pool2d)


class AdaptiveMaxPool3d(_AdaptiveMaxPool, torch.nn.AdaptiveMaxPool3d):
    """Pools volumes to a given size, as :class:`torch.nn.AdaptiveMaxPool3d` does.

    It calls :func:`maxunpool_cuda.functional.adaptive_max_pool3d`.

    Args:
        output_size: ``(D_out, H_out, W_out)``, or one int for all; None keeps a size of the
            input.
        return_indices: whether to return the indices, too; default: False.
        index_dtype: int64 or int32, of flat positions in the input plane; default: torch.int64.

    Shape:
        - input: ``(N, C, D_in, H_in, W_in)`` or ``(C, D_in, H_in, W_in)``
        - output, and indices: ``(N, C, D_out, H_out, W_out)`` or ``(C, D_out, H_out, W_out)``

    Raises:
        TypeError: a size is no int.
        RuntimeError: the number of sizes is wrong, or one is negative.
        ValueError: ``index_dtype`` is none of those allowed.

    Example:
        >>> AdaptiveMaxPool3d(1)(torch.tensor([[[[1.0, 7.0]]]]))
        tensor([[[[7.]]]])
    """

    _dims = 3
    _function = staticmethod(functional.adaptive_max_pool3d)
