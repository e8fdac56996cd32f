"""The table of operators: random calls of each, with what the reference makes of them."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from reference import (
    Sizes,
    as_bytes,
    default_output_size,
    max_pool,
    max_unpool,
    max_unpool_backward,
    pooled_size,
)
from torch import Tensor

import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

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
INDEX_KINDS = ("own window", "wrapped window", "anywhere", "few")

# Sizes from which on the CUDA kernels do a call in another way (csrc/cuda/limits.h): the usual
# ones, and ones so low that a test's small tensors are done as large ones are.
LIMITS = {
    "max_32bit_offset": (2**31, 2**31, 1),
    "shared_bytes": (32 << 10, 1 << 10, 64),
}

# Windows that kernels are compiled for, or differ from one of those in the stride or the padding:
# kernel, stride and padding in every dimension.
WINDOWS = {
    "2x2/2": (2, 2, 0),
    "3x3/3": (3, 3, 0),
    "4x4/4": (4, 4, 0),
    "3x3/4": (3, 4, 0),
    "3x3/2 padded": (3, 2, 1),
    "3x3/2": (3, 2, 0),
    "3x3/1 padded": (3, 1, 1),
    "2x2/1": (2, 1, 0),
}

# How kernels cut up a call: rows of contiguous tensors that divide into vectors, rows that do not,
# or vectors of channels.
WAYS = ("even rows", "uneven rows", "channels")


def scaled(count: int) -> int:
    """The number of random cases to try: ``count`` with --all, a quarter of it without."""
    return count if os.environ["MAXUNPOOL_ALL"] == "1" else max(1, count // 4)  # see conftest.py


@dataclass(frozen=True)
class Geometry:
    """Sizes of an unpooling, all spatial."""

    pooled: Sizes
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    output: Sizes

    @property
    def dims(self) -> int:
        return len(self.pooled)

    def arguments(self, reduce: str) -> tuple:
        """What follows the tensors in both operators."""
        return (self.output, self.kernel, self.stride, self.padding, reduce)


@dataclass(frozen=True)
class Case:
    """Tensors for an unpooling and for its gradient."""

    geometry: Geometry
    reduce: str
    input: Tensor
    indices: Tensor
    grad_output: Tensor

    @property
    def positions(self) -> Tensor:
        """The indices as flat positions in the output plane."""
        if self.indices.dtype != torch.uint8:
            return self.indices
        return positions_of(self.indices, self.geometry)

    def laid_out(self, *layouts: str) -> "Case":
        """The same case in one layout, or in one for each tensor."""
        tensors = (self.input, self.indices, self.grad_output)
        each = zip(tensors, layouts * 3 if len(layouts) == 1 else layouts, strict=True)
        laid = (laid_out(tensor, layout, self.geometry.dims) for tensor, layout in each)
        return Case(self.geometry, self.reduce, *laid)


@dataclass(frozen=True)
class Window:
    """A window of max pooling, with the spatial sizes of the input."""

    sizes: Sizes
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    ceil: bool

    @property
    def arguments(self) -> tuple:
        """What follows the input in the operator, without the dtype of indices."""
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil

    @property
    def has_empty_window(self) -> bool:
        """Whether dilation steps over the input somewhere: such a pool has no derivative."""
        values, _ = max_pool(torch.zeros(1, *self.sizes), *self.arguments, torch.int64)
        return bool(values.isneginf().any())

    def positions(self, offsets: Tensor) -> Tensor:
        """Flat int64 indices for uint8 ones."""
        pooled = tuple(offsets.shape[-len(self.sizes) :])
        geometry = Geometry(pooled, self.kernel, self.stride, self.padding, self.sizes)
        return positions_of(offsets, geometry)

    def index_dtypes(self) -> list[torch.dtype]:
        small = max(self.dilation) == 1 and math.prod(self.kernel) <= 256
        return [t for t in INDEX_DTYPES if small or t != torch.uint8]


@dataclass(frozen=True)
class Call:
    """One call of an operator, and what the reference makes of it."""

    operator: Callable[..., Any]
    tensors: tuple[Tensor, ...]  # only the first may have a gradient
    arguments: tuple[Any, ...]
    reference: Callable[[], Any]
    of: Case | Window

    @property
    def dims(self) -> int:
        return len(self.of.sizes) if isinstance(self.of, Window) else self.of.geometry.dims

    def on(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All results, with ``tensors`` in place of the first of its own."""
        results = self.operator(*tensors, *self.tensors[len(tensors) :], *self.arguments)
        return results if isinstance(results, tuple) else (results,)

    def values(self, *tensors: Tensor) -> Tensor:
        """The result that may have a gradient."""
        return self.on(*tensors)[0]

    def function(self, *tensors: Tensor) -> Any:
        """All results of the public function, if the operator has one."""
        if self.operator is _ops.max_unpool:
            size, *window, reduce = self.arguments
            unpool = getattr(F, f"max_unpool{self.dims}d")
            return unpool(*tensors, *window, size, reduce=reduce)
        if self.operator is _ops.max_pool:
            *window, dtype = self.arguments
            pool = getattr(F, f"max_pool{self.dims}d")
            return pool(*tensors, *window, return_indices=True, index_dtype=dtype)
        return self.operator(*tensors, *self.arguments)

    def results(self, device: str) -> tuple[Tensor, ...]:
        return self.on(*(tensor.to(device) for tensor in self.tensors))

    def check(self, device: str = "cpu") -> None:
        """Compare all results with the reference's, bit for bit."""
        self.compare(self.results(device))

    def compare(self, results: tuple[Tensor, ...]) -> None:
        expected = self.reference()
        expected = expected if isinstance(expected, tuple) else (expected,)
        for result, right in zip(results, expected, strict=True):
            assert same(result, right), (self.of, self.arguments)


def unpool_call(case: Case, forward: bool) -> Call:
    values, operator, reference = (
        (case.input, _ops.max_unpool, max_unpool)
        if forward
        else (case.grad_output, _ops.max_unpool_backward, max_unpool_backward)
    )
    spatial, reduce = case.geometry.output, case.reduce
    return Call(
        operator,
        (values, case.indices),
        case.geometry.arguments(reduce),
        lambda: reference(values, case.positions, spatial, reduce),
        case,
    )


def pool_call(x: Tensor, window: Window, index_dtype: torch.dtype) -> Call:
    arguments = (*window.arguments, index_dtype)
    return Call(_ops.max_pool, (x,), arguments, lambda: max_pool(x, *arguments), window)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and every bit are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


# Tensors


def _generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


def random_values(rng: Random, shape: Sizes, dtype: torch.dtype) -> Tensor:
    """Any bytes that are numbers, subnormal ones too: sums are exact or rounded, never NaN."""
    generator = _generator(rng)
    if dtype.is_floating_point or dtype.is_complex:
        parts = (*shape, 2 if dtype.is_complex else 1)
        real = torch.randn(parts, generator=generator, dtype=torch.float64)
        small = torch.rand(*shape, 1, generator=generator) < 0.3
        real = torch.where(small, real * torch.finfo(dtype).smallest_normal, real)
        return (torch.view_as_complex(real) if dtype.is_complex else real[..., 0]).to(dtype)
    numbers = 2 if dtype == torch.bool else 256  # of a byte
    drawn = torch.randint(numbers, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype)[..., 0]


def random_input(rng: Random, shape: Sizes, dtype: torch.dtype) -> Tensor:
    """For pooling: any numbers, or few so that many are equal, or infinities, zeros and NaNs."""
    kind = rng.choice(("any", "few", "few", "special"))
    if kind == "any":
        return random_values(rng, shape, dtype)
    choices = [0, 1, 2] if kind == "few" else [0, 1]
    if dtype.is_floating_point:
        choices += [-0.0, -math.inf] if kind == "few" else [-math.inf, math.inf, math.nan, -0.0]
    else:
        choices += [torch.iinfo(dtype).min] * 3
    numbers = rng.choices(choices, k=math.prod(shape))
    return torch.tensor(numbers, dtype=dtype).reshape(shape)


def distinct(like: Tensor) -> Tensor:
    """No two elements are near each other, nor near zero, so that maxima stay where they are.

    They are multiples of 1/8: sums of their powers are equal in any order.
    """
    return torch.randperm(like.numel()).add(1).reshape(like.shape).to(like) / 8


def with_whole_numbers(case: Case, rng: Random) -> Case:
    """The case with small multiples of 1 or of the smallest number: sums are equal in any order."""
    dtype = case.input.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return case
    info = torch.finfo(dtype)
    unit = rng.choice((1.0, info.smallest_normal * info.eps))
    shapes = (case.input.shape, case.grad_output.shape)
    x, grad = (random_values(rng, tuple(shape), torch.int8).to(dtype) * unit for shape in shapes)
    return replace(case, input=x, grad_output=grad)


def laid_out(tensor: Tensor, layout: str, dims: int) -> Tensor:
    """The same values in other memory."""
    if layout == "strided":
        wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "unaligned":  # contiguous, but no vector of the processor's begins where it does
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view_as(tensor).copy_(tensor)
    if layout == "channels_last" and dims > 1 and tensor.dim() == dims + 2:
        format = torch.channels_last if dims == 2 else torch.channels_last_3d
        return tensor.contiguous(memory_format=format)
    return tensor.contiguous()


def random_leading(rng: Random) -> Sizes:
    """The sizes of the batch and of the channels, or of the channels alone."""
    channels = rng.choice((1, 2, 3, 4, 8, 16, 33))
    return (channels,) if rng.random() < 0.2 else (rng.randint(1, 3), channels)


# Indices


@functools.lru_cache(maxsize=16)
def windows_of(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """For each cell and each offset in its window: the position, and whether it is in the plane.

    Both are (cells, offsets). A position outside the plane is the one it would wrap to.
    """
    positions, inside = torch.zeros(1, 1).long(), torch.ones(1, 1).bool()
    axes = (geometry.pooled, geometry.kernel, geometry.stride, geometry.padding, geometry.output)
    for cells, kernel, stride, padding, size in zip(*axes, strict=True):
        at = torch.arange(cells).mul(stride).sub(padding).reshape(-1, 1, 1) + torch.arange(kernel)
        shape = (len(positions) * cells, -1)
        positions = (positions[:, None, :, None] * size + at).reshape(shape)
        inside = (inside[:, None, :, None] & (at >= 0) & (at < size)).reshape(shape)
    return positions, inside


def position_of(geometry: Geometry, cell: int, offset: int) -> int | None:
    """The position in the output plane of an offset in the window of a cell, if it has one."""
    positions, inside = windows_of(geometry)
    if offset >= positions.shape[1] or not inside[cell, offset]:
        return None
    return int(positions[cell, offset])


def positions_of(offsets: Tensor, geometry: Geometry) -> Tensor:
    """Flat int64 indices for offsets that all lead into the plane."""
    positions = windows_of(geometry)[0].to(offsets.device)
    each = torch.arange(len(positions), device=offsets.device)
    return positions[each, offsets.flatten(-geometry.dims).long()].reshape(offsets.shape)


def random_indices(rng: Random, geometry: Geometry, leading: Sizes, kind: str) -> Tensor:
    """Contiguous indices of one of INDEX_KINDS; or of kind "offset", if all windows have any."""
    planes, plane = math.prod(leading), math.prod(geometry.output)
    shape = (*leading, *geometry.pooled)
    if kind in ("anywhere", "few"):
        choices = torch.arange(plane)
        if kind == "few":
            choices = torch.tensor(rng.choices(range(plane), k=3))
        drawn = choices[torch.randint(len(choices), shape, generator=_generator(rng))]
        return drawn.to(rng.choice((torch.int64, torch.int32)))
    _, allowed = windows_of(geometry)
    as_offsets = kind == "offset" and allowed.shape[1] <= 256 and bool(allowed.any(1).all())
    if kind == "wrapped window":
        allowed = torch.ones_like(allowed)
    allowed = allowed | ~allowed.any(1, keepdim=True)
    drawn = torch.multinomial(allowed.float(), max(planes, 1), True, generator=_generator(rng))
    offsets = drawn.T[:planes].reshape(shape).contiguous()
    if as_offsets:
        return offsets.byte()
    # What leaves the plane on one side comes in on another.
    flat = positions_of(offsets, geometry).remainder(plane)
    return flat.to(rng.choice((torch.int64, torch.int32)))


def with_a_bad_index(case: Case, rng: Random) -> tuple[Case, str, int, int]:
    """The case with an index outside its plane, a pattern of the error, the position and plane.

    Among these are indices that a narrower type would wrap into the plane, and offsets that are
    beyond the window, or in the window but outside the plane.
    """
    g, dtype = case.geometry, case.indices.dtype
    cell, size = rng.randrange(math.prod(g.pooled)), math.prod(g.output)
    if dtype == torch.uint8:
        bad = [at for at in range(256) if position_of(g, cell, at) is None]
        bad = [at for at in bad if at < math.prod(g.kernel)] or bad
    else:
        bad = [-1, size, size + rng.randrange(size), -(2**31), 2**31 - 1]
    if dtype == torch.int64:
        bad += [n + rng.randrange(size) for n in (2**31, 2**32, -(2**32), -(2**63))]
    index = rng.choice(bad)
    planes = case.indices.flatten(-g.dims).flatten(0, -2).clone()
    plane = rng.randrange(len(planes))
    planes[plane, cell] = index
    indices = laid_out(planes.reshape(case.indices.shape), rng.choice(LAYOUTS), g.dims)
    words = rf"^max_unpool{g.dims}d: .* {index} \(.* at position {cell} of plane {plane}\b"
    return replace(case, indices=indices), words, cell, plane


# Cases


def random_geometry(rng: Random, most_cells: int = 64, longest: int = 9) -> Geometry:
    """Any windows: overlapping or apart, padded, of every output size the default allows."""
    dims = rng.choice((1, 2, 3))
    most_outputs = max(2000, 32 * most_cells)
    while True:
        pooled = tuple(rng.randint(1, longest) for _ in range(dims))
        kernel = tuple(rng.randint(1, 4) for _ in range(dims))
        if rng.random() < 0.4:  # as most networks have them
            stride, padding = kernel, (0,) * dims
        else:
            stride = tuple(rng.randint(1, 6) for _ in range(dims))
            padding = tuple(rng.randint(0, k // 2) for k in kernel)
        output = default_output_size(pooled, kernel, stride, padding)
        if rng.random() < 0.5:
            output = tuple(
                n + rng.randint(1 - s, s - 1) for n, s in zip(output, stride, strict=True)
            )
        small = math.prod(pooled) <= most_cells and math.prod(output) <= most_outputs
        if min(output) > 0 and small:
            return Geometry(pooled, kernel, stride, padding, output)


def case_of(
    rng: Random,
    geometry: Geometry,
    leading: Sizes,
    dtype: torch.dtype,
    kind: str,
    reduce: str = "last",
) -> Case:
    """A case of contiguous tensors, with indices as ``random_indices`` makes them."""
    return Case(
        geometry,
        reduce,
        random_values(rng, (*leading, *geometry.pooled), dtype),
        random_indices(rng, geometry, leading, kind),
        random_values(rng, (*leading, *geometry.output), dtype),
    )


def random_case(
    rng: Random,
    *,
    reduce: str = "",
    dtypes: tuple[torch.dtype, ...] = (),
    most_cells: int = 64,
    longest: int = 9,
    offsets: bool | None = None,
    leading: Sizes = (),
) -> Case:
    """``offsets``: whether the indices are uint8. All that is not given is random."""
    reduce = reduce or rng.choice(REDUCES if set(dtypes) <= set(ARITHMETIC) else ("last",))
    dtype = rng.choice(dtypes or (MOVABLE if reduce == "last" else ARITHMETIC))
    leading = leading or random_leading(rng)
    if offsets is None:
        offsets = rng.random() < 0.25
    kind = "offset" if offsets else rng.choice(INDEX_KINDS)
    while True:
        geometry = random_geometry(rng, most_cells, longest)
        case = case_of(rng, geometry, leading, dtype, kind, reduce)
        if not offsets or case.indices.dtype == torch.uint8:
            one = rng.random() < 0.7
            return case.laid_out(*rng.choices(LAYOUTS, k=1 if one else 3))


def aimed_case(
    rng: Random,
    way: str,
    window: str,
    offsets: bool,
    dtype: torch.dtype,
    reduce: str = "",
    dims: int = 0,
) -> Case:
    """A call that kernels are made for: one of WAYS, with one of WINDOWS.

    Unless given, ``dims`` and ``reduce`` are random, which is more often "last".
    """
    kind = "offset" if offsets else rng.choice(INDEX_KINDS)
    reduce = reduce or rng.choice(("last", "last", "sum"))
    leading, layout = ((2, 16), "channels_last") if way == "channels" else ((2, 4), "contiguous")
    stride = WINDOWS[window][1]
    while True:
        dims = dims or rng.choice((2, 2, 3) if way == "channels" else (1, 2, 3))
        pooled = [rng.randint(1, 4) for _ in range(dims)]
        if way == "even rows":
            pooled[-1] = rng.choice((8, 16))
        output = [stride * n for n in pooled]
        if way != "even rows":
            pooled[-1], more = rng.randint(1, 9), rng.choice((0, 1, -1, stride - 1))
            output[-1] = max(1, stride * pooled[-1] + more)
        sizes = ((n,) * dims for n in WINDOWS[window])
        geometry = Geometry(tuple(pooled), *sizes, tuple(output))
        case = case_of(rng, geometry, leading, dtype, kind, reduce)
        if not offsets or case.indices.dtype == torch.uint8:
            return case.laid_out(layout)


def random_limits(rng: Random) -> dict[str, int]:
    """For one call of the CUDA kernels."""
    return {name: rng.choice(choices) for name, choices in LIMITS.items()}


def random_window(rng: Random, longest: int = 9, most_cells: int = 256) -> Window:
    dims = rng.choice((1, 2, 3))
    while True:
        sizes = tuple(rng.randint(1, longest) for _ in range(dims))
        if rng.random() < 0.4:  # as most networks have them
            kernel, stride, padding = rng.choice(((2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 1, 1)))
            window = [(n,) * dims for n in (kernel, stride, padding, 1)]
        else:
            kernels = tuple(rng.randint(1, 5) for _ in range(dims))
            most = rng.choice((1, 1, 3))
            window = [
                kernels,
                tuple(rng.randint(1, 6) for _ in range(dims)),
                tuple(rng.randint(0, k // 2) for k in kernels),
                tuple(rng.randint(1, most) for _ in range(dims)),
            ]
        ceil = rng.random() < 0.5
        pooled = [pooled_size(*axis, ceil) for axis in zip(sizes, *window, strict=True)]
        if min(pooled) > 0 and math.prod(pooled) <= most_cells:
            return Window(sizes, *window, ceil)


def random_pool(
    rng: Random, dtype: torch.dtype, longest: int = 9, most_cells: int = 256, leading: Sizes = ()
) -> tuple[Tensor, Window]:
    window = random_window(rng, longest, most_cells)
    x = random_input(rng, (*(leading or random_leading(rng)), *window.sizes), dtype)
    return laid_out(x, rng.choice(LAYOUTS), len(window.sizes)), window


# The table


def _draw_unpool(
    forward: bool, offsets: bool, rng: Random, dtype: torch.dtype | None = None, **chosen: Any
) -> Call:
    dtypes = (dtype,) if dtype else ()
    return unpool_call(random_case(rng, dtypes=dtypes, offsets=offsets, **chosen), forward)


def _draw_pool(
    rng: Random, dtype: torch.dtype | None = None, most_cells: int = 64, **chosen: Any
) -> Call:
    x, window = random_pool(rng, dtype or rng.choice(POOLED), most_cells=most_cells, **chosen)
    return pool_call(x, window, rng.choice(window.index_dtypes()))


# How to draw a call of each operator: from a generator and, if given, the dtype, most_cells,
# longest and leading. All else is random: window, layout, kind of indices and reduce.
OPERATORS: dict[str, Callable[..., Call]] = {
    "unpool": functools.partial(_draw_unpool, True, False),
    "unpool from offsets": functools.partial(_draw_unpool, True, True),
    "gradient": functools.partial(_draw_unpool, False, False),
    "gradient from offsets": functools.partial(_draw_unpool, False, True),
    "pool": _draw_pool,
}


# What derivatives are tested of, and under which reduce.
DIFFERENTIABLE = [
    (op, reduce) for op in OPERATORS for reduce in REDUCES[: 1 if op == "pool" else 2]
]


def draw_differentiable(
    operator: str, rng: Random, dtype: torch.dtype, reduce: str = "", leading: Sizes = ()
) -> Iterator[Call]:
    """Small calls without end, whose first tensor is distinct.

    No window of a pooling is empty. Unpooling has an index that is twice in a plane.
    """
    chosen: dict[str, Any] = {} if operator == "pool" else {"reduce": reduce}
    while True:
        chosen["leading"] = leading or rng.choice(((3,), (2, 3)))
        call = OPERATORS[operator](rng, dtype, most_cells=12, longest=5, **chosen)
        x, of = call.tensors[0], call.of
        if isinstance(of, Window):
            usable = not of.has_empty_window and math.prod(of.sizes) <= 40
        else:
            flat = of.positions.flatten(-call.dims).sort().values
            usable = bool((flat.diff() == 0).any()) and math.prod(of.geometry.output) <= 40
        if usable:
            yield replace(call, tensors=(distinct(x), *call.tensors[1:]))
