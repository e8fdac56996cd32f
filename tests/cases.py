# SPDX-License-Identifier: BSD-3-Clause
"""Random calls of the operators, each beside what the reference makes of it.

``draw`` makes a call, of which any part may be given, and the call compares itself with the
reference (reference.py). A failure describes the call (failures.py):

    call = draw(rng, "unpool", torch.float32, geometry=geometry_of((4, 5), (2, 2, 0)))
    call.check(device)

A *plane* is one channel of one image. A *cell* is an element of a pooled plane: pooling makes it
from a window of the larger plane, and unpooling writes it there. "Offset" is a uint8 index, which
counts in its cell's window; others are flat positions in the larger plane. The table at the end of
"A test for your bug" in docs/testing.md has the other words.
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
from failures import RESULTS, Comparison, WrongResultError, check_each, facts_of, layout_of, same
from reference import Sizes, default_output_size, pooled_size
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda.functional as F
from maxunpool_cuda import _operators

UNPOOLING = ("unpool", "unpool from offsets", "gradient", "gradient from offsets")
OPERATORS = (*UNPOOLING, "pool")
# The dtypes of a pooling; those that unpooling adds up (reduce="sum"); those that it can move.
POOLED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
ARITHMETIC = (*POOLED, torch.complex64, torch.complex128)
MOVABLE = (
    *ARITHMETIC,
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2),
)
REDUCES = ("last", "sum")
INDEX_DTYPES = (torch.int64, torch.int32, torch.uint8)
LAYOUTS = ("contiguous", "channels_last", "strided", "unaligned")
INDEX_KINDS = ("own window", "maxima", "wrapped window", "one out of window", "anywhere", "few")

# Numbers of these bytes are quiet and signalling NaNs, infinities, zeros and subnormal numbers.
SPECIAL_BYTES = (0, 1, 0x7C, 0x7F, 0x80, 0xF0, 0xFF)

# Kernel, stride and padding, the same in every dimension. Kernels are compiled for some of these
# windows; the others differ from one of those in the stride or in the padding.
WINDOWS = (
    *((2, 2, 0), (3, 3, 0), (4, 4, 0), (3, 4, 0)),
    *((3, 2, 1), (3, 2, 0), (3, 1, 1), (5, 1, 2), (2, 1, 0)),
)

# The ways of CUDA kernels through memory: along rows that divide into vectors, along rows that do
# not, or along the channels of channels_last tensors.
WAYS = ("even rows", "uneven rows", "channels")


def scaled(count: int) -> int:
    """The number of random cases to try: ``count`` with --all, a quarter of it without."""
    return count if os.environ["MAXUNPOOL_ALL"] == "1" else max(1, count // 4)  # see conftest.py


@dataclass(frozen=True)
class Geometry:
    """Where the windows of a call lie. Every field has an entry for each spatial dimension."""

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
    """A geometry whose kernel, stride and padding are the same in all dimensions.

    The output size is the operators' default, but at least one, unless it is given.
    """
    sizes = [(n,) * len(pooled) for n in window]
    default = (max(n, 1) for n in default_output_size(pooled, *sizes))
    return Geometry(pooled, *sizes, output or tuple(default))


def random_window(rng: Random, sizes: Sizes, pools: bool) -> tuple[Sizes, Sizes, Sizes]:
    """Kernel, stride and padding for a plane of these pooled sizes or, if it pools, input sizes.

    One of four is drawn: one of WINDOWS in all dimensions, a different one in each, windows that
    are disjoint, any windows. Pooling has a fifth: windows of more than half of the plane.
    """
    dims = len(sizes)
    kernel = tuple(rng.randint(1, 5) for _ in range(dims))
    stride = tuple(rng.randint(1, 6) for _ in range(dims))
    most_padding = (k // 2 if pools else k for k in kernel)
    padding = tuple(rng.randint(0, most) for most in most_padding)
    usual = [(n,) * dims for n in rng.choice(WINDOWS)]
    mixed = [*zip(*rng.choices((*WINDOWS, (1, 1, 0)), k=dims), strict=True)]
    none = (0,) * dims
    disjoint, other = (kernel, kernel, none), (kernel, stride, padding)
    large = tuple(rng.randint(n // 2 + 1, n) for n in sizes), stride, none
    return rng.choice((usual, mixed, disjoint, other, other, large if pools else other))


def random_geometry(
    rng: Random, operator: str = "", most_cells: int = 64, longest: int = 9
) -> Geometry:
    """Windows that overlap or lie apart, may be padded, and have any output size that is allowed.

    Pooling may be dilated. Every window that offsets count in holds an element.
    """
    dims, pools = rng.choice((1, 2, 3)), operator == "pool"
    most, most_dilation = (8 * most_cells, rng.choice((1, 1, 3))) if pools else (most_cells, 1)
    # Until the sizes fit: most draws do.
    while True:
        sizes: Sizes = ()
        for _ in range(dims):
            sizes += (rng.randint(1, max(1, min(longest, most // math.prod(sizes)))),)
        sizes = tuple(rng.sample(sizes, dims))
        window = random_window(rng, sizes, pools)
        if pools:
            dilation = tuple(rng.randint(1, most_dilation) for _ in range(dims))
            geometry = Geometry.of_pooling(sizes, *window, dilation, rng.random() < 0.5)
        else:
            differs = rng.choice((0, 1))  # 1: from the default size, by less than a stride
            output = tuple(
                n + rng.randint(1 - step, step - 1) * differs
                for n, step in zip(default_output_size(sizes, *window), window[1], strict=True)
            )
            geometry = Geometry(sizes, *window, output)
        is_positive = min(*geometry.pooled, *geometry.output) > 0
        is_small = math.prod(geometry.pooled) <= most_cells
        is_small &= math.prod(geometry.output) <= max(2000, 32 * most_cells)
        lacks_offsets = "offsets" in operator and is_positive and geometry.has_empty_window
        if is_small and is_positive and not lacks_offsets:
            return geometry


def aimed(
    rng: Random, operator: str, way: str = "", window: Sizes = (), dims: int = 0
) -> dict[str, Any]:
    """Arguments of ``draw`` for a call that some kernel was made for: one of WAYS and of WINDOWS.

    Arguments that are not given are drawn at random. No window is empty.
    """
    way, window = way or rng.choice(WAYS), window or rng.choice(WINDOWS)
    dims = dims or rng.choice((2, 2, 3) if way == "channels" else (1, 2, 3))
    leading, layout = ((2, 16), "channels_last") if way == "channels" else ((2, 4), "contiguous")
    is_even = way == "even rows"
    _, stride, padding = window
    columns = rng.choice((8, 16)) if is_even else rng.randint(2, 9)
    pooled = (*(rng.randint(1, 4) for _ in range(dims - 1)), columns)
    *sizes, width = geometry_of(pooled, window).output
    sizes = [n + rng.randrange(stride) for n in sizes]
    # An even row has exactly `stride` outputs for each of its cells; another one has more or fewer.
    # Unpooling allows widths that differ from the default by less than a stride. The last window
    # has to begin in the row.
    begin_of_last_window = (columns - 1) * stride - padding
    widths = range(max(width - stride, begin_of_last_window) + 1, width + stride)
    fitting = [n for n in widths if (n == stride * columns) == is_even]
    output = (*sizes, rng.choice(fitting or [width]))
    geometry = geometry_of(pooled, window, output)
    if operator == "pool":
        ceil = not is_even and rng.random() < 0.5
        geometry = Geometry.of_pooling(output, *geometry.window, (1,) * dims, ceil)
    return {"geometry": geometry, "leading": leading, "layout": layout}


@functools.lru_cache(maxsize=16)
def windows_of(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The position of each offset in each cell's window, and whether it lies in the plane.

    Both are (cells, offsets).
    """
    dilation = geometry.dilation[: geometry.dims]
    positions, inside, _ = reference.windows(
        geometry.output, geometry.pooled, *geometry.window, dilation
    )
    return torch.from_numpy(positions), torch.from_numpy(inside)


def positions_of(offsets: Tensor, geometry: Geometry, table: Tensor | None = None) -> Tensor:
    """Offsets as flat int64 indices. ``table`` is (cells, offsets): by default ``windows_of``'s."""
    table = (windows_of(geometry)[0] if table is None else table).to(offsets.device)
    each = torch.arange(len(table), device=offsets.device)
    return table[each, offsets.flatten(-geometry.dims).long()].reshape(offsets.shape)


def all_same(results: Any, expected: Any) -> Comparison:
    """Compare all tensors, of which there are equally many. The first that differs is named."""
    pairs = [*zip(leaves(results), leaves(expected), strict=True)]
    if not pairs:
        return Comparison("there are no tensors to compare")
    for number, (result, wanted) in enumerate(pairs):
        comparison = same(result, wanted)
        if not comparison:
            return replace(comparison, difference=f"tensor {number}: {comparison}")
    return Comparison()


def _generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


def random_values(rng: Random, shape: Sizes, dtype: torch.dtype) -> Tensor:
    """Random numbers, among them subnormal ones and both zeros, whose sums are never NaN."""
    if dtype.is_complex:
        return torch.view_as_complex(random_values(rng, (*shape, 2), dtype.to_real()))
    if dtype.is_floating_point:
        scales = [*[1.0] * 6, *[torch.finfo(dtype).smallest_normal] * 3, 0.0]
        generator = _generator(rng)
        drawn = torch.randint(len(scales), shape, generator=generator)
        real = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (real * torch.tensor(scales, dtype=torch.float64)[drawn]).to(dtype)
    return random_bits(rng, shape, dtype, range(256))


def random_bits(
    rng: Random, shape: Sizes, dtype: torch.dtype, values: Sequence[int] = SPECIAL_BYTES
) -> Tensor:
    choices = torch.tensor([0, 1] if dtype == torch.bool else values, dtype=torch.uint8)
    drawn = torch.randint(len(choices), (*shape, dtype.itemsize), generator=_generator(rng))
    return choices[drawn].view(dtype)[..., 0]


def random_input(rng: Random, shape: Sizes, dtype: torch.dtype) -> Tensor:
    """To pool: any numbers, few different ones, infinities and NaNs, or mostly the lowest."""
    is_real = dtype.is_floating_point
    lowest = -math.inf if is_real else torch.iinfo(dtype).min
    special = [-math.inf, math.inf, math.nan, -0.0] if is_real else [lowest]
    numbers: dict[str, list[float]] = {
        "any": [],
        "few": [0, 1, 2, -0.0, lowest, lowest],
        "special": [0, 1, *special],
        "mostly the lowest": [0, *[lowest] * 9],
    }
    chosen = rng.choice([*numbers])
    if chosen == "any":
        return random_values(rng, shape, dtype)
    drawn = torch.randint(len(numbers[chosen]), shape, generator=_generator(rng))
    return torch.tensor(numbers[chosen], dtype=dtype)[drawn]


def distinct(like: Tensor) -> Tensor:
    """Values so far apart, and from zero, that small changes leave every maximum where it is.

    All are multiples of 1/8, so sums of their powers are the same in any order.
    """
    return torch.randperm(like.numel()).add(1).reshape(like.shape).to(like) / 8


def random_leading(rng: Random) -> Sizes:
    """The sizes of the batch and of the channels, or of the channels alone."""
    channels = rng.choice((1, 2, 3, 4, 8, 16, 33))
    return (channels,) if rng.random() < 0.2 else (rng.randint(1, 3), channels)


def laid_out(tensor: Tensor, layout: str, dims: int) -> Tensor:
    """The same values in other memory. Without a batch, or in 1d, channels_last is contiguous."""
    if layout == "strided":
        wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] * 2)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "unaligned":  # contiguous, but not aligned to the processor's vectors
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)
    is_batched = tensor.dim() == dims + 2
    if layout == "channels_last" and is_batched and dims > 1:
        format = torch.channels_last if dims == 2 else torch.channels_last_3d
        return tensor.contiguous(memory_format=format)
    return tensor.contiguous()


def moved(tensor: Tensor, device: str) -> Tensor:
    """A copy on a device, of the same strides and storage offset, also where that is the CPU.

    ``Tensor.to`` packs elements that lie apart, and aligns them. Here the whole storage is copied,
    and the same view is laid over the copy: a tensor that is misaligned by 4 bytes is misaligned by
    4 bytes on the GPU, whose allocator aligns storages to 512 bytes. ``tensor`` is a plain tensor
    that needs no gradient.
    """
    assert type(tensor) is Tensor
    assert not tensor.requires_grad
    assert not tensor.is_conj()
    assert not tensor.is_neg()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    copied = whole.to(device, copy=True).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype, device=device)
    return view.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())


def random_indices(rng: Random, geometry: Geometry, leading: Sizes, kind: str) -> Tensor:
    """Contiguous indices of one of INDEX_KINDS or, if no window is empty, of kind "offset".

    Overlapping windows often share their "maxima", as in a pooling.
    """
    plane, shape = math.prod(geometry.output), (*leading, *geometry.pooled)
    dtype = rng.choice((torch.int64, torch.int32))
    # These do not look at the windows.
    if kind in ("anywhere", "few"):
        choices = torch.arange(plane)
        if kind == "few":
            choices = choices[rng.choices(range(plane), k=3)]
        return choices[torch.randint(len(choices), shape, generator=_generator(rng))].to(dtype)
    positions, allowed = windows_of(geometry)
    if kind == "wrapped window":
        allowed = torch.ones_like(allowed)
    allowed = allowed | ~allowed.any(1, keepdim=True)  # in an empty window every element
    # Each cell's index is that of the largest of random values in its window. Like the maxima of a
    # pooling, they are drawn once for each position of the plane, so windows that overlap agree;
    # or else for each element of each window.
    maxima = kind == "maxima" or (kind == "offset" and rng.random() < 0.5)
    drawn = (plane,) if maxima else positions.shape
    values = torch.rand(math.prod(leading), *drawn, generator=_generator(rng))
    if maxima:
        values = values[:, positions % plane]
    offsets = values.where(allowed, -1).argmax(-1).reshape(shape)
    if kind == "offset":
        return offsets.byte()
    # A position beyond one side of the plane wraps around to the other side.
    flat = positions_of(offsets, geometry).remainder(plane)
    if kind == "one out of window" and flat.numel() > 0:
        # By chance this position may lie in the cell's window after all.
        flat.view(-1)[rng.randrange(flat.numel())] = rng.randrange(plane)
    return flat.to(dtype)


@dataclass(frozen=True)
class Call:
    """One call of an operator: ``operator(*tensors, *arguments)``."""

    operator: Callable[..., Any]  # of _operators: max_pool, max_unpool or max_unpool_backward
    tensors: tuple[Tensor, ...]  # only the first may have a gradient
    arguments: tuple[Any, ...]  # arguments_by_name() has their names
    kind: str = ""  # of the indices: one of INDEX_KINDS, or "offset"
    error: str = ""  # a pattern of the error that the call has to raise, if it has to

    @property
    def name(self) -> str:
        return self.operator.__name__.partition(".")[0]

    @property
    def definition(self) -> _operators.Operator:
        (found,) = (each for each in _operators.OPERATORS if each.overload is self.operator)
        return found

    @property
    def dims(self) -> int:
        return len(self.arguments[0])

    @property
    def geometry(self) -> Geometry:
        sizes = tuple(self.tensors[-1].shape[-self.dims :])
        if self.operator is _operators.max_pool:
            *pooling, _index_dtype = self.arguments
            return Geometry.of_pooling(sizes, *pooling)
        output, *window, _reduce = self.arguments
        return Geometry(sizes, *window, output)

    def arguments_by_name(self) -> str:
        """The arguments as a failure shows them: ``kernel=(2,) stride=(2,) ...``."""
        names = ("output", "kernel", "stride", "padding", "reduce")
        if self.name == "max_pool":
            names = ("kernel", "stride", "padding", "dilation", "ceil", "index_dtype")
        pairs = zip(names, self.arguments, strict=True)
        return " ".join(f"{name}={argument!r}" for name, argument in pairs)

    @property
    def positions(self) -> Tensor:
        """The indices of an unpooling as flat positions. An invalid offset becomes -1."""
        indices, geometry = self.tensors[1], self.geometry
        if indices.dtype != torch.uint8:
            return indices
        positions, inside = windows_of(geometry)
        table = torch.nn.functional.pad(positions.where(inside, -1), (0, 256), value=-1)
        return positions_of(indices, geometry, table)

    def reference(self) -> tuple[Tensor, ...]:
        """All results, from the definition."""
        if self.operator is _operators.max_pool:
            return reference.max_pool(*self.tensors, *self.arguments)
        forward = self.operator is _operators.max_unpool
        unpool = reference.max_unpool if forward else reference.max_unpool_backward
        return (unpool(self.tensors[0], self.positions, self.arguments[0], self.arguments[-1]),)

    def on(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All results of the operator. ``tensors`` replace the first ones of the call.

        They come by the short way of functional.py, unless it is closed (conftest.py).
        """
        tensors = (*tensors, *self.tensors[len(tensors) :])
        results = _operators.call(self.definition, tensors, self.arguments)
        return results if isinstance(results, tuple) else (results,)

    def function(self, *tensors: Tensor) -> Any:
        """All results of the public function; of the gradient, which has none, of the operator.

        The rank, such as 2 of max_pool2d, is the length of any of the arguments that has one from 1
        to 3. test_bad_input.py puts wrong values in the place of some arguments, or of all.
        """
        ranks = [len(each) for each in self.arguments[:-1] if isinstance(each, tuple)]
        rank = ([rank for rank in ranks if 1 <= rank <= 3] or [2])[0]
        if self.operator is _operators.max_unpool:
            size, *window, reduce = self.arguments
            unpool = getattr(F, f"max_unpool{rank}d")
            return unpool(*tensors, *window, size, reduce=reduce)
        if self.operator is _operators.max_pool:
            *window, dtype = self.arguments
            pool = getattr(F, f"max_pool{rank}d")
            return pool(*tensors, *window, return_indices=True, index_dtype=dtype)
        return _operators.call(self.definition, tensors, self.arguments)

    def moved(self, device: str) -> "Call":
        """The same call of tensors on a device, which lie in memory as those of this call do."""
        return replace(self, tensors=tuple(moved(tensor, device) for tensor in self.tensors))

    @property
    def size(self) -> int:
        # Tests may put what is no tensor in the place of one.
        return sum(each.numel() for each in self.tensors if isinstance(each, Tensor))

    def facts(self, error: BaseException) -> list[tuple[str, str]]:
        return facts_of(self, error)

    def halves(self) -> Iterator["Call"]:
        """The call for half of its images or of its channels, laid out as before.

        There is none if the call has to raise an error, as that names a place in the whole call.
        Nor is there one if test_bad_input.py has put another object in the place of a tensor.
        """
        if self.error or not all(isinstance(each, Tensor) for each in self.tensors):
            return
        for axis, size in enumerate(self.tensors[0].shape[: -self.dims]):
            for begin, end in ((0, size // 2), (size // 2, size)) if size > 1 else ():
                yield self.part(axis, begin, end)

    def part(self, axis: int, begin: int, end: int) -> "Call":
        """The call for some images (axis 0 of a batch) or channels."""
        parts = (tensor.narrow(axis, begin, end - begin).clone() for tensor in self.tensors)
        layouts = (layout_of(tensor, self.dims) for tensor in self.tensors)
        pairs = zip(parts, layouts, strict=True)
        return replace(self, tensors=tuple(laid_out(*pair, self.dims) for pair in pairs))

    def results(self, device: str = "cpu") -> tuple[Tensor, ...]:
        return self.moved(device).on()

    def check(self, device: str = "cpu") -> None:
        """``verify`` it. If that fails, the error describes the call."""
        __tracebackhide__ = True
        check_each([self], lambda call: call.verify(device))

    def verify(self, device: str = "cpu") -> None:
        """Compare the results on a device. They lie there, in memory that no input has.

        No input is changed.
        """
        call = self.moved(device)
        if device.startswith("cuda"):
            for result in call.on():  # whose memory PyTorch takes for the results of the next call
                result.untyped_storage().fill_(0x7F)
            del result
        results = call.on()
        devices = {tensor.device for tensor in (*results, *call.tensors)}
        assert len(devices) == 1, "a result on another device"
        self.compare(results)
        assert all_same(call.tensors, self.tensors), "the call changed its input"
        of_results, of_inputs = (
            {tensor.untyped_storage().data_ptr() for tensor in tensors}
            for tensors in (results, call.tensors)
        )
        shared = of_results & of_inputs
        assert shared <= {0}, "a result shares memory with an input"  # 0: it has no elements

    def compare(self, results: Sequence[Tensor]) -> None:
        """Compare with the reference, bit for bit."""
        __tracebackhide__ = True
        names = RESULTS[self.name]
        for name, result, right in zip(names, results, self.reference(), strict=True):
            comparison = same(result, right)
            if not comparison:
                raise WrongResultError(name, comparison)

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
    arguments = (geometry.output, *geometry.window, reduce)
    return Call(function, tensors, arguments, kind=kind)


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
    any_bits: bool = False,
    **limits: int,
) -> Call:
    """A call of one of OPERATORS. Arguments that are not given are drawn at random.

    any_bits: the values may be NaNs, unless they are added up.
    limits: of ``random_geometry``.
    """
    # Random sizes seldom fit the kernels that are compiled for one window. ``aimed`` ones do.
    if not (layout or leading or geometry or limits) and rng.random() < 0.4:
        aim = aimed(rng, operator)
        return draw(rng, operator, dtype, reduce=reduce, kind=kind, any_bits=any_bits, **aim)
    geometry = geometry or random_geometry(rng, operator, **limits)
    layout, layout_of_indices = (layout or rng.choice(LAYOUTS) for _ in range(2))
    if rng.random() < 0.7:
        layout_of_indices = layout
    shape = leading or random_leading(rng)
    # The reference takes up to a second for so many elements.
    while not leading and math.prod((*shape, *geometry.output)) > 2**17:
        shape = random_leading(rng)
    if operator == "pool":
        dtype = dtype or rng.choice(POOLED)
        make = random_bits if any_bits else random_input
        x = laid_out(make(rng, (*shape, *geometry.output), dtype), layout, geometry.dims)
        return call_of(
            operator, x, geometry=geometry, index_dtype=rng.choice(geometry.index_dtypes())
        )
    reduce = reduce or rng.choice(REDUCES if dtype in (None, *ARITHMETIC) else ("last",))
    dtype = dtype or rng.choice(MOVABLE if reduce == "last" else ARITHMETIC)
    is_forward = operator.startswith("unpool")
    spatial = geometry.pooled if is_forward else geometry.output
    adds = is_forward and reduce == "sum"
    make = random_bits if any_bits and not adds else random_values
    values = laid_out(make(rng, (*shape, *spatial), dtype), layout, geometry.dims)
    kind = "offset" if "offsets" in operator else kind or rng.choice(INDEX_KINDS)
    indices = random_indices(rng, geometry, shape, kind)
    indices = laid_out(indices, layout_of_indices, geometry.dims)
    return call_of(operator, values, indices, geometry=geometry, reduce=reduce, kind=kind)


def with_invalid_index(call: Call, rng: Random) -> Call:
    """The call with an index outside its plane, which it has to name in an error.

    Among these are indices that a narrower type would wrap into the plane, and offsets that are
    beyond the window, or in the window but outside the plane.
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


# The operators that have derivatives, each with its values of reduce.
DIFFERENTIABLE = [(op, reduce) for op in UNPOOLING for reduce in REDUCES] + [("pool", "last")]


def draw_differentiable(
    rng: Random, operator: str, dtype: torch.dtype, reduce: str = "", leading: Sizes = ()
) -> Call:
    """A small call, whose first tensor is distinct.

    Pooling has no empty window. Unpooling has an index that occurs twice in a plane.
    """
    while True:
        shape = leading or rng.choice(((2,), (2, 2)))
        call = draw(rng, operator, dtype, reduce=reduce, leading=shape, most_cells=12, longest=5)
        if operator == "pool":
            usable = not call.geometry.has_empty_window
        else:
            usable = bool((call.positions.flatten(-call.dims).sort().values.diff() == 0).any())
        if usable and math.prod(call.geometry.output) <= 24:
            return replace(call, tensors=(distinct(call.tensors[0]), *call.tensors[1:]))
