# SPDX-License-Identifier: BSD-3-Clause
"""Random calls of the operators, each beside what the reference makes of it.

``draw`` makes a call, of which any part may be given, and the call compares itself with the
reference (reference.py). A failure describes the call (failures.py):

    call = draw(rng, "unpool", torch.float32, geometry=geometry_of((4, 5), (2, 2, 0)))
    call.check(device)

A *plane* is one channel of one image. A *cell* is an element of a pooled plane: pooling makes it
from a window of the larger plane, and unpooling writes it there. An example in 1d,
``geometry_of((2,), (3, 2, 0))``, has 2 cells, kernel 3, stride 2, no padding and an output size of
(2 - 1) * 2 + 3 = 5:

    positions in the plane      0  1  2  3  4
    window of cell 0            0  1  2         its offsets are 0, 1 and 2, too
    window of cell 1                  2  3  4   its offsets are 0, 1 and 2
    pool of                     1  5  2  7  3   values 5 7, indices 1 3, as offsets (uint8) 1 1
    unpool of 5 7 at 1 3        0  5  0  7  0
    unpool of 5 7 at 2 2        0  0  7  0  0   the last wins, while reduce="sum" gives 12
    gradient of the output      6  1  8  2  9   for indices 1 3 gives 1 2, and for 2 2 gives 0 8
                                                with reduce="last" and 8 8 with "sum"

So an index is a flat position in the larger plane or, if it is uint8, an offset in its cell's
window. docs/testing.md has the other words.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import reference
import torch
from failures import Comparison, check_each, layout_of, same
from reference import Sizes, default_output_size, pooled_size
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda.functional as F
from maxunpool_cuda import _operators

UNPOOLING = ("unpool", "unpool from offsets", "gradient", "gradient from offsets")
OPERATORS = (*UNPOOLING, "pool")
REDUCES = ("last", "sum")
# The operators that have derivatives, each with its values of reduce.
DIFFERENTIABLE = [(op, reduce) for op in UNPOOLING for reduce in REDUCES] + [("pool", "last")]
# The dtypes of a pooling; those that unpooling adds up (reduce="sum"); those that it can move.
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
POOLED = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ARITHMETIC = (*POOLED, torch.complex64, torch.complex128)
UNSIGNED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
MOVABLE = (*ARITHMETIC, *UNSIGNED, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2)
INDEX_DTYPES = (torch.int64, torch.int32, torch.uint8)
DENSE = ("contiguous", "channels_last")
LAYOUTS = (*DENSE, "strided", "unaligned")
INDEX_KINDS = (
    "own window",  # each in the window of its cell
    "maxima",  # the same, of the largest of random numbers: windows that overlap share them
    "wrapped window",  # what a window has outside of the plane counts from its other side
    "one out of window",  # all but one in their own windows
    "anywhere",  # in the plane
    "few",  # three positions, which the cells share
)

# Kernel, stride and padding, the same in every dimension. Kernels are compiled for some of these
# windows; the others differ from one of those in the stride or in the padding.
WINDOWS = (
    *((2, 2, 0), (3, 3, 0), (4, 4, 0), (3, 4, 0)),
    *((3, 2, 1), (3, 2, 0), (3, 1, 1), (4, 1, 1), (5, 1, 2), (2, 1, 0)),
)

# The ways of CUDA kernels through memory: along rows that divide into vectors or do not, or along
# the channels of channels_last tensors.
WAYS = ("even rows", "uneven rows", "channels")


def scaled(count: int) -> int:
    """The number of random cases to try: ``count`` with --all, a quarter of it without."""
    return count if os.environ["MAXUNPOOL_ALL"] == "1" else max(1, count // 4)  # see conftest.py


@dataclass(frozen=True)
class Geometry:
    """Where the windows of a call lie. Fields have an entry for each spatial dimension."""

    pooled: Sizes  # how many windows there are
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    output: Sizes  # the larger plane: what unpooling writes, and what pooling reads
    dilation: Sizes = (1, 1, 1)  # unpooling has no dilation and no ceil mode
    ceil: bool = False

    @classmethod
    def of_pooling(
        cls, sizes: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool
    ) -> "Geometry":
        """The geometry of a pooling of a plane of these sizes. ``ceil`` is its ceil_mode."""
        axes = zip(sizes, kernel, stride, padding, dilation, strict=True)
        pooled = tuple(pooled_size(*axis, ceil) for axis in axes)
        return cls(pooled, kernel, stride, padding, sizes, dilation, ceil)

    @property
    def dims(self) -> int:
        return len(self.pooled)

    @property
    def window(self) -> tuple[Sizes, Sizes, Sizes]:
        return self.kernel, self.stride, self.padding

    @property
    def pooling(self) -> tuple[Any, ...]:
        """The arguments of a pooling between its input and index_dtype."""
        return *self.window, self.dilation[: self.dims], self.ceil

    @property
    def has_empty_window(self) -> bool:
        """Whether some window holds no element of the plane: such a pool has no derivative."""
        return not windows_of(self)[1].any(1).all()

    def index_dtypes(self) -> list[torch.dtype]:
        small = max(self.dilation) == 1 and math.prod(self.kernel) <= 256
        return [t for t in INDEX_DTYPES if small or t != torch.uint8]


def geometry_of(pooled: Sizes, window: Sizes, output: Sizes = ()) -> Geometry:
    """The window is the same in all dimensions. The default output size is at least one."""
    sizes = [(n,) * len(pooled) for n in window]
    default = (max(n, 1) for n in default_output_size(pooled, *sizes))
    return Geometry(pooled, *sizes, output or tuple(default))


@functools.lru_cache(maxsize=16)
def windows_of(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """(cells, offsets): positions of elements of windows, and whether they lie in the plane."""
    *pooling, _ceil = geometry.pooling
    positions, inside, _ = reference.windows(geometry.output, geometry.pooled, *pooling)
    return torch.from_numpy(positions), torch.from_numpy(inside)


def all_same(results: Any, expected: Any) -> Comparison:
    """Compare all tensors, of which there are equally many. Returns the first difference."""
    pairs = [*zip(leaves(results), leaves(expected), strict=True)]
    assert pairs, "there are no tensors to compare"
    comparisons = (same(*pair) for pair in pairs)
    return next((each for each in comparisons if not each), Comparison())


@dataclass(frozen=True)
class Call:
    """One call of an operator: ``operator(*tensors, *arguments)``."""

    operator: Callable[..., Any]  # of _operators: max_pool, max_unpool or max_unpool_backward
    tensors: tuple[Tensor, ...]  # only the first may have a gradient
    arguments: tuple[Any, ...]
    kind: str = ""  # of the indices: one of INDEX_KINDS, or "offset"
    error: str = ""  # a pattern of the error that the call has to raise, if it has to

    @property
    def definition(self) -> _operators.Operator:
        (found,) = (each for each in _operators.OPERATORS if each.overload is self.operator)
        return found

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def dims(self) -> int:
        return len(self.arguments[0])

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def geometry(self) -> Geometry:
        sizes = tuple(self.tensors[-1].shape[-self.dims :])
        if self.name == "max_pool":
            *pooling, _index_dtype = self.arguments
            return Geometry.of_pooling(sizes, *pooling)
        output, *window, _reduce = self.arguments
        return Geometry(sizes, *window, output)

    @property
    def positions(self) -> Tensor:
        """The indices of an unpooling as flat positions. An invalid offset becomes -1."""
        indices = self.tensors[1]
        if indices.dtype != torch.uint8:
            return indices
        positions, inside = windows_of(self.geometry)
        table = torch.nn.functional.pad(positions.where(inside, -1), (0, 256), value=-1)
        each = torch.arange(len(table), device=indices.device)
        offsets = indices.flatten(-self.dims).long()
        return table.to(indices.device)[each, offsets].reshape(indices.shape)

    def reference(self) -> tuple[Tensor, ...]:
        """All results, from the definition."""
        if self.name == "max_pool":
            return reference.max_pool(*self.tensors, *self.arguments)
        unpool = getattr(reference, self.name)
        return (unpool(self.tensors[0], self.positions, self.arguments[0], self.arguments[-1]),)

    def on(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All results of the operator. ``tensors`` replace the first ones of the call."""
        tensors = (*tensors, *self.tensors[len(tensors) :])
        results = _operators.call(self.definition, tensors, self.arguments)
        return results if isinstance(results, tuple) else (results,)

    def function(self, *tensors: Tensor) -> Any:
        """All results of the public function; of the gradient, which has none, of the operator."""
        # Dynamo traces this, and would warn of self.name.
        if self.operator is _operators.max_pool:
            *pooling, dtype = self.arguments
            pool = getattr(F, f"max_pool{self.dims}d")
            return pool(*tensors, *pooling, return_indices=True, index_dtype=dtype)
        if self.operator is _operators.max_unpool:
            size, *window, reduce = self.arguments
            unpool = getattr(F, f"max_unpool{self.dims}d")
            return unpool(*tensors, *window, size, reduce=reduce)
        return _operators.call(self.definition, tensors, self.arguments)

    def moved(self, device: str) -> "Call":
        """The same call of tensors on a device, which lie in memory as those of this call do."""
        return replace(self, tensors=tuple(moved(tensor, device) for tensor in self.tensors))

    def results(self, device: str = "cpu") -> tuple[Tensor, ...]:
        return self.moved(device).on()

    def halves(self) -> Iterator["Call"]:
        """The call for half of its images or of its channels, laid out as before."""
        if self.error:  # which names a place in the whole call
            return
        layouts = [layout_of(tensor, self.dims) for tensor in self.tensors]
        for axis, size in enumerate(self.tensors[0].shape[: -self.dims]):
            for begin, end in ((0, size // 2), (size // 2, size)) if size > 1 else ():
                halves = [each.narrow(axis, begin, end - begin).clone() for each in self.tensors]
                pairs = zip(halves, layouts, strict=True)
                yield replace(self, tensors=tuple(laid_out(*pair, self.dims) for pair in pairs))

    def check(self, device: str = "cpu") -> None:
        """``verify`` it. If that fails, the error describes the call."""
        __tracebackhide__ = True
        check_each([self], lambda call: call.verify(device))

    def check_gradient(self, device: str = "cpu") -> None:
        """``verify_gradient`` it. If that fails, the error describes the call."""
        __tracebackhide__ = True
        check_each([self], lambda call: call.verify_gradient(device))

    def verify(self, device: str = "cpu") -> None:
        """Compare the results on a device. They share no memory with inputs, which are kept."""
        call = self.moved(device)
        if device.startswith("cuda"):
            for result in call.on():  # whose memory PyTorch takes for the results of the next call
                result.untyped_storage().fill_(0x7F)
            del result
        results = call.on()
        self.compare(results)
        assert all_same(call.tensors, self.tensors), "the call changed its input"
        inputs = {tensor.untyped_storage().data_ptr() for tensor in call.tensors if tensor.numel()}
        for result in results:
            assert result.device == call.tensors[0].device
            assert result.untyped_storage().data_ptr() not in inputs, "it shares their memory"

    def compare(self, results: Sequence[Tensor]) -> None:
        """Compare with the reference, bit for bit."""
        __tracebackhide__ = True
        names = {"max_pool": ("values", "indices"), "max_unpool": ("output",)}
        each = zip(names.get(self.name, ("gradient",)), results, self.reference(), strict=True)
        for name, result, right in each:
            comparison = same(result, right)
            if not comparison:
                raise AssertionError(f"{name}: {comparison}")

    def verify_gradient(self, device: str = "cpu") -> None:
        """Compare the first result's derivatives with finite differences.

        Small changes of the values must leave every maximum where it is, as with ``distinct``.
        """
        call = self.moved(device)
        x = call.tensors[0].requires_grad_()
        assert x.dtype in (torch.float64, torch.complex128), "finite differences of few digits"
        batched = {"check_batched_grad": True}
        forward = {"check_forward_ad": True, "check_batched_forward_grad": True}
        try:
            gradcheck(lambda x: call.on(x)[0], x, **batched, **forward)
            gradgradcheck(lambda x: call.on(x)[0].sin(), x, **batched, check_fwd_over_rev=True)
        except GradcheckError as error:
            raise AssertionError(f"gradient: {error}") from None

    def verify_error(self, device: str = "cpu") -> None:
        """Call it on a device, where it has to raise its error."""
        assert self.error, "the call has no error to raise"
        with pytest.raises(RuntimeError, match=self.error):
            self.results(device)


def call_of(
    operator: str,
    *tensors: Tensor,
    geometry: Geometry,
    reduce: str = "last",
    index_dtype: torch.dtype = torch.int64,
    kind: str = "",
) -> Call:
    """A call of one of OPERATORS for these tensors: an input, or values and their indices."""
    if operator == "pool":
        return Call(_operators.max_pool, tensors, (*geometry.pooling, index_dtype))
    is_forward = operator.startswith("unpool")
    function = _operators.max_unpool if is_forward else _operators.max_unpool_backward
    return Call(function, tensors, (geometry.output, *geometry.window, reduce), kind=kind)


def laid_out(tensor: Tensor, layout: str, dims: int) -> Tensor:
    """The same values in other memory. Without a batch, or in 1d, channels_last is contiguous."""
    if layout == "strided":
        wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] * 2)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "unaligned":  # contiguous, but not aligned to the processor's vectors
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)
    format = torch.contiguous_format
    if layout == "channels_last" and tensor.dim() == dims + 2 and dims > 1:
        format = torch.channels_last if dims == 2 else torch.channels_last_3d
    return tensor.contiguous(memory_format=format)


def moved(tensor: Tensor, device: str) -> Tensor:
    """A copy on a device, of the same strides and storage offset, which Tensor.to would change."""
    assert not any((tensor.requires_grad, tensor.is_conj(), tensor.is_neg()))
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    copied = whole.to(device, copy=True).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype, device=device)
    return view.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())


def generator_of(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


def choose(rng: Random, values: Sequence[float], dtype: torch.dtype, shape: Sizes) -> Tensor:
    """A tensor of this dtype and shape, each of whose elements is one of the values."""
    places = torch.randint(len(values), shape, generator=generator_of(rng))
    return torch.tensor([*values], dtype=dtype)[places]


def random_values(rng: Random, shape: Sizes, dtype: torch.dtype, any_bits: bool = False) -> Tensor:
    """Numbers with subnormals and both zeros; infinities and NaNs of all kinds with any_bits."""
    if dtype == torch.bool:
        return choose(rng, (False, True), dtype, shape)
    if any_bits or not (dtype.is_floating_point or dtype.is_complex):
        # Numbers of these bytes are quiet and signalling NaNs, infinities, zeros and subnormals.
        values = (0, 1, 0x7C, 0x7F, 0x80, 0xF0, 0xFF) if any_bits else range(256)
        return choose(rng, values, torch.uint8, (*shape, dtype.itemsize)).view(dtype)[..., 0]
    if dtype.is_complex:
        return torch.view_as_complex(random_values(rng, (*shape, 2), dtype.to_real()))
    scales = [*[1.0] * 6, *[torch.finfo(dtype).smallest_normal] * 3, 0.0]
    numbers = torch.randn(shape, generator=generator_of(rng), dtype=torch.float64)
    return (numbers * choose(rng, scales, torch.float64, shape)).to(dtype)


def random_input(rng: Random, shape: Sizes, dtype: torch.dtype) -> Tensor:
    """To pool: any numbers, few different ones, infinities and NaNs, or mostly the lowest."""
    is_real = dtype.is_floating_point
    lowest = -math.inf if is_real else torch.iinfo(dtype).min
    few = [0, 1, 2, -0.0, lowest, lowest]
    special = [0, 1, lowest, *([math.inf, math.nan, -0.0] if is_real else [])]
    numbers = rng.choice(([], few, special, [0, *[lowest] * 9]))
    return choose(rng, numbers, dtype, shape) if numbers else random_values(rng, shape, dtype)


def distinct(like: Tensor) -> Tensor:
    """Multiples of 1/8, each once, in random order: their sums are the same in any order."""
    return torch.randperm(like.numel()).add(1).reshape(like.shape).to(like) / 8


def random_leading(rng: Random) -> Sizes:
    """The sizes of the batch and of the channels, or of the channels alone."""
    channels = rng.choice((1, 2, 3, 4, 8, 16, 33))
    return (channels,) if rng.random() < 0.2 else (rng.randint(1, 3), channels)


def random_indices(rng: Random, geometry: Geometry, leading: Sizes, kind: str) -> Tensor:
    """Contiguous indices of one of INDEX_KINDS or, if no window is empty, of kind "offset"."""
    plane, shape = math.prod(geometry.output), (*leading, *geometry.pooled)
    dtype = rng.choice((torch.int64, torch.int32))
    if kind == "anywhere":
        return torch.randint(plane, shape, generator=generator_of(rng), dtype=dtype)
    if kind == "few":
        return choose(rng, rng.choices(range(plane), k=3), dtype, shape)
    positions, allowed = windows_of(geometry)
    if kind == "wrapped window":
        allowed = torch.ones_like(allowed)
    allowed = allowed | ~allowed.any(1, keepdim=True)  # in an empty window every element
    # Each cell's index is that of the largest of random values in its window. For maxima they are
    # drawn once for each position of the plane, so that windows that overlap often share one.
    maxima = kind == "maxima" or (kind == "offset" and rng.random() < 0.5)
    drawn = (plane,) if maxima else positions.shape
    values = torch.rand(math.prod(leading), *drawn, generator=generator_of(rng))
    if maxima:
        values = values[:, positions % plane]
    offsets = values.where(allowed, -1).argmax(-1)
    if kind == "offset":
        return offsets.reshape(shape).byte()
    # A position beyond one side of the plane wraps around to the other side.
    flat = positions[torch.arange(len(positions)), offsets].remainder(plane).reshape(shape)
    if kind == "one out of window" and flat.numel() > 0:
        # By chance this position may lie in the cell's window after all.
        flat.view(-1)[rng.randrange(flat.numel())] = rng.randrange(plane)
    return flat.to(dtype)


def random_window(rng: Random, sizes: Sizes, pools: bool) -> tuple[Sizes, ...]:
    """Kernel, stride and padding for a plane of these pooled sizes or, if it pools, input sizes."""
    kernel = tuple(rng.randint(1, 5) for _ in sizes)
    stride = tuple(rng.randint(1, 6) for _ in sizes)
    none = (0,) * len(sizes)
    how = rng.choice(("usual", "mixed", "disjoint", "any", "any", "large"))
    if how == "usual":
        return tuple((n,) * len(sizes) for n in rng.choice(WINDOWS))
    if how == "mixed":  # a usual one in each dimension
        return tuple(zip(*rng.choices((*WINDOWS, (1, 1, 0)), k=len(sizes)), strict=True))
    if how == "disjoint":
        return kernel, kernel, none
    if how == "large" and pools:  # more than half of the plane
        return tuple(rng.randint(n // 2 + 1, n) for n in sizes), stride, none
    return kernel, stride, tuple(rng.randint(0, k // 2 if pools else k) for k in kernel)


def random_sizes(rng: Random, most: int, longest: int) -> Sizes:
    """Of a plane of one to three dimensions, with at most so many positions in all."""
    sizes: Sizes = ()
    for _ in range(rng.choice((1, 2, 3))):
        room = most // math.prod(sizes)
        sizes += (rng.randint(1, max(1, min(longest, room))),)
    return tuple(rng.sample(sizes, len(sizes)))  # else the first ones would be the largest


def random_geometry(
    rng: Random, operator: str = "", most_cells: int = 64, longest: int = 9
) -> Geometry:
    """Any windows, for any output size that is allowed. For offsets no window is empty."""
    pools = operator == "pool"
    most_outputs = 8 * most_cells if pools else max(2000, 32 * most_cells)
    while True:  # until all of it fits, as most draws do
        sizes = random_sizes(rng, most_outputs if pools else most_cells, longest)
        kernel, stride, padding = window = random_window(rng, sizes, pools)
        if pools:
            most_dilation = rng.choice((1, 1, 3))
            dilation = tuple(rng.randint(1, most_dilation) for _ in sizes)
            geometry = Geometry.of_pooling(sizes, *window, dilation, rng.random() < 0.5)
        else:
            output = default_output_size(sizes, kernel, stride, padding)
            if rng.random() < 0.5:  # other sizes differ from it by less than a stride
                pairs = zip(output, stride, strict=True)
                output = tuple(n + rng.randint(1 - step, step - 1) for n, step in pairs)
            geometry = Geometry(sizes, *window, output)
        if min(*geometry.pooled, *geometry.output) < 1 or math.prod(geometry.pooled) > most_cells:
            continue
        lacks_offsets = "offsets" in operator and geometry.has_empty_window
        if math.prod(geometry.output) <= most_outputs and not lacks_offsets:
            return geometry


def aimed(
    rng: Random, operator: str, way: str = "", window: Sizes = (), dims: int = 0
) -> dict[str, Any]:
    """Arguments of ``draw`` for a kernel of one of WAYS and of WINDOWS. No window is empty."""
    way = way or rng.choice(WAYS)
    window = window or rng.choice(WINDOWS)
    dims = dims or rng.choice((2, 2, 3) if way == "channels" else (1, 2, 3))
    columns = rng.choice((8, 16) if way == "even rows" else (3, 5, 7, 9))
    fewest = 2 if way == "uneven rows" else 1  # a thread has several rows there
    geometry = geometry_of((*(rng.randint(fewest, 4) for _ in range(dims - 1)), columns), window)
    _, stride, _ = window
    # Unpooling allows sizes that differ from the default by less than a stride. Rows are even if
    # there are `stride` outputs for each cell, where that size is allowed.
    *sizes, width = (n + rng.randrange(stride) for n in geometry.output)
    if way == "even rows" and abs(stride * columns - geometry.output[-1]) < stride:
        width = stride * columns
    geometry = replace(geometry, output=(*sizes, width))
    if operator == "pool":
        ceil = way != "even rows" and rng.random() < 0.5
        geometry = Geometry.of_pooling(geometry.output, *geometry.window, (1,) * dims, ceil)
    if way == "channels":
        return {"geometry": geometry, "leading": (2, 16), "layout": "channels_last"}
    return {"geometry": geometry, "leading": (2, 4), "layout": "contiguous"}


def draw(
    rng: Random,
    operator: str,
    dtype: torch.dtype | None = None,
    *,
    reduce: str = "",
    kind: str = "",  # one of INDEX_KINDS
    layout: str = "",
    leading: Sizes = (),
    geometry: Geometry | None = None,
    any_bits: bool = False,  # the values may be NaNs, unless they are added up
    **limits: int,  # of random_geometry
) -> Call:
    """A call of one of OPERATORS. Arguments that are not given are drawn at random."""
    # Random sizes seldom fit the kernels that are compiled for one window. ``aimed`` ones do.
    if not (layout or leading or geometry or limits) and rng.random() < 0.4:
        aim = aimed(rng, operator)
        return draw(rng, operator, dtype, reduce=reduce, kind=kind, any_bits=any_bits, **aim)
    geometry = geometry or random_geometry(rng, operator, **limits)
    of_values = layout or rng.choice(LAYOUTS)
    of_indices = of_values if layout or rng.random() < 0.7 else rng.choice(LAYOUTS)
    shape = leading or random_leading(rng)
    # The reference takes up to a second for so many elements.
    while not leading and math.prod((*shape, *geometry.output)) > 2**17:
        shape = random_leading(rng)
    if operator == "pool":
        dtype = dtype or rng.choice(POOLED)
        shape = (*shape, *geometry.output)
        x = random_values(rng, shape, dtype, True) if any_bits else random_input(rng, shape, dtype)
        x = laid_out(x, of_values, geometry.dims)
        index_dtype = rng.choice(geometry.index_dtypes())
        return call_of(operator, x, geometry=geometry, index_dtype=index_dtype)
    reduce = reduce or rng.choice(REDUCES if dtype in (None, *ARITHMETIC) else ("last",))
    dtype = dtype or rng.choice(MOVABLE if reduce == "last" else ARITHMETIC)
    is_forward = operator.startswith("unpool")
    sizes = geometry.pooled if is_forward else geometry.output
    any_bits = any_bits and not (is_forward and reduce == "sum")
    values = random_values(rng, (*shape, *sizes), dtype, any_bits)
    kind = "offset" if "offsets" in operator else kind or rng.choice(INDEX_KINDS)
    indices = random_indices(rng, geometry, shape, kind)
    pairs = ((values, of_values), (indices, of_indices))
    tensors = (laid_out(tensor, layout, geometry.dims) for tensor, layout in pairs)
    return call_of(operator, *tensors, geometry=geometry, reduce=reduce, kind=kind)


def with_invalid_index(call: Call, rng: Random) -> Call:
    """The call with an index outside its plane, which it has to name in an error.

    A narrower type would wrap some into the plane. Some offsets lie in the window's padding.
    """
    geometry, (values, indices) = call.geometry, call.tensors
    cell, size = rng.randrange(math.prod(geometry.pooled)), math.prod(geometry.output)
    if indices.dtype == torch.uint8:
        inside = windows_of(geometry)[1][cell]
        invalid = [*(~inside).nonzero().flatten().tolist(), len(inside), 255]
    else:
        invalid = [-1, size, size + rng.randrange(size), -(2**31), 2**31 - 1]
    if indices.dtype == torch.int64:
        beyond_32_bits = (2**31, 2**32, -(2**32), -(2**63))
        invalid += [n + rng.randrange(size) for n in beyond_32_bits]
    index = rng.choice(invalid)
    planes = indices.flatten(-call.dims).flatten(0, -2).clone()
    plane = rng.randrange(len(planes))
    planes[plane, cell] = index
    changed = laid_out(planes.reshape(indices.shape), rng.choice(LAYOUTS), call.dims)
    where = rf"at position {cell} of plane {plane}\b"
    error = rf"^max_unpool{call.dims}d: .* got {index}(, an offset in its window,)? {where}"
    return replace(call, tensors=(values, changed), error=error)


def draw_differentiable(
    rng: Random, operator: str, dtype: torch.dtype, reduce: str = "", leading: Sizes = ()
) -> Call:
    """A small call of distinct values: a pooling without empty windows, or a repeated index."""
    while True:
        shape = leading or rng.choice(((2,), (2, 2)))
        call = draw(rng, operator, dtype, reduce=reduce, leading=shape, most_cells=12, longest=5)
        if operator == "pool":
            usable = not call.geometry.has_empty_window
        else:
            usable = bool((call.positions.flatten(-call.dims).sort().values.diff() == 0).any())
        if usable and math.prod(call.geometry.output) <= 24:
            return replace(call, tensors=(distinct(call.tensors[0]), *call.tensors[1:]))
