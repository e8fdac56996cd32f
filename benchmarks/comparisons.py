# SPDX-License-Identifier: BSD-3-Clause
"""What else the documents tell of speed: small calls, fixes, compiled and exported models.

Each function yields the comparisons of one table of the documents, which pages.py writes. All run
on one thread of the CPU. Everyone's results are compared before they are timed.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional
from maxunpool_cuda import _operators

from . import data, report, timing
from .architectures import SegNet
from .contenders import OURS, TORCH, Call

FUNCTIONS: dict[str, Any] = {TORCH: F, OURS: maxunpool_cuda.functional}
OPERATOR, TWO_POOLS, UNFOLD, SCATTER = "torch.ops", "two 2d pools", "unfold, max", "scatter"
PLAIN, INSIDE = "outside", "inside patched"
WITH_INDICES, WITHOUT_INDICES = "pooling with indices", "pooling without indices"
AND_BACKWARD = ", and its backward"
MAX_UNPOOL, DECOMPOSITIONS = "MaxUnpool", "decompositions"
IMAGES = (4, 64, 64, 64)  # (N, C, H, W) of compiled models
REPEATS = 100  # of a call of microseconds each time it is timed

Function = Callable[[Tensor], Tensor]


class Compared(NamedTuple):
    """Calls that are timed in turns."""

    row: str  # of the table
    column: str  # of the table; "" if each contender has one
    calls: Mapping[str, Sequence[Call]]  # everyone's, on data that rotate
    repeats: int = 1  # of what is timed, in one call
    nodes: Mapping[str, int] | None = None  # of everyone's graph in ONNX


def repeated(call: Call, repeats: int = REPEATS) -> Call:
    """A call that is so long that the clock's own time does not count."""
    return lambda: [call() for _ in range(repeats)]


def require_equal(calls: Mapping[str, Call], what: str, share: float = 0) -> None:
    """Raise a RuntimeError unless everyone returns the tensors that the first one does.

    Args:
        calls: Everyone's, each of which returns tensors.
        what: Is compared, for the error.
        share: Of its norm, by which a result may differ.
    """
    (first, expected), *others = ((name, call()) for name, call in calls.items())
    for name, results in others:
        for result, right in zip(results, expected, strict=True):
            if not (result - right).float().norm() <= share * right.float().norm():
                raise RuntimeError(f"{name} does not return {first}'s result of {what}")


def there_and_back(function: Function, x: Tensor) -> Call:
    """The function's result, and the gradient of its sum."""
    leaf = x.detach().requires_grad_()
    ones = torch.ones_like(function(leaf).detach())

    def call() -> tuple[Tensor, ...]:
        result = function(leaf)
        return result.detach(), *torch.autograd.grad(result, leaf, ones)

    return call


def with_gradient(function: Function, x: Tensor) -> Call:
    """The function's result, which has a gradient that nobody computes."""
    leaf = x.detach().requires_grad_()
    return lambda: (function(leaf).detach(),)


def small_planes() -> Iterator[Compared]:
    """Pooling of 64 small planes: with new values in each call, and of one tensor again."""
    for size, window in ((4, (2, 2)), (7, (3, 2)), (8, (2, 2)), (14, (2, 2))):
        row = f"{size}x{size}, windows of {window[0]}x{window[0]}, stride {window[1]}"
        planes = [torch.randn(1, 64, size, size) for _ in range(timing.MOST_ROUNDS)]
        calls = {
            name: [partial(of.max_pool2d, x, *window, return_indices=True) for x in planes]
            for name, of in FUNCTIONS.items()
        }
        require_equal({name: some[0] for name, some in calls.items()}, row)
        yield Compared(row, "new values", calls)
        again = {name: [repeated(some[0])] for name, some in calls.items()}
        yield Compared(row, "the same tensor", again, REPEATS)


def two_pools(x: Tensor) -> Tensor:
    """``max_pool3d(x, 2)`` by PyTorch's pools of planes: rows and columns, then depth."""
    slices = F.max_pool2d(x.flatten(0, 1), 2)
    depth, height, width = (size // 2 for size in x.shape[2:])
    return F.max_pool2d(slices.flatten(2), (2, 1)).view(*x.shape[:2], depth, height, width)


def unfolded(kernel_size: int, stride: int, padding: int, x: Tensor) -> Tensor:
    """``max_pool3d`` by every window written out."""
    x = F.pad(x, [padding] * 6, value=-torch.inf)
    for dim in (2, 3, 4):
        x = x.unfold(dim, kernel_size, stride)
    return x.flatten(5).max(-1).values


def unpooled(of: Any, indices: Tensor, x: Tensor) -> Tensor:
    """Windows of two in each dimension."""
    return getattr(of, f"max_unpool{x.dim() - 2}d")(x, indices, 2)


def scattered(indices: Tensor, shape: Sequence[int], x: Tensor) -> Tensor:
    """Unpooling by PyTorch's scatter."""
    return x.new_zeros(shape).flatten(2).scatter(2, indices.flatten(2), x.flatten(2)).view(shape)


def fixes() -> Iterator[Compared]:
    """What raises an error in deterministic mode, and what may stand in its place."""
    x = torch.randn(1, 16, 64, 64, 64)
    for window in ((2, 2, 0), (3, 2, 1)):
        size, stride, padding = window
        row = f"`MaxPool3d({size}, {stride}, {padding})`, 16 channels of 64x64x64"
        made: dict[str, Function] = {
            name: lambda x, of=of, window=window: of.max_pool3d(x, *window)
            for name, of in FUNCTIONS.items()
        }
        made |= {TWO_POOLS: two_pools} if size == 2 else {}
        made[UNFOLD] = partial(unfolded, *window)
        yield fix(row, made, x)
    for shape, words in (
        ((8, 64, 112, 112), "8 images of 64 channels of 112x112"),
        ((1, 32, 64, 64, 64), "32 channels of 64x64x64"),
    ):
        rank = len(shape) - 2
        pooling = getattr(F, f"max_pool{rank}d")
        values, indices = pooling(torch.randn(shape), 2, return_indices=True)
        made = {name: partial(unpooled, of, indices) for name, of in FUNCTIONS.items()}
        made[SCATTER] = partial(scattered, indices, shape)
        yield fix(f"`MaxUnpool{rank}d(2)`, {words}", made, values)


def fix(row: str, made: Mapping[str, Function], x: Tensor) -> Compared:
    """Forward and backward of functions with one result."""
    calls = {name: there_and_back(function, x) for name, function in made.items()}
    require_equal(calls, row)
    return Compared(row, "", {name: [call] for name, call in calls.items()})


def adaptive() -> Iterator[Compared]:
    """Adaptive pooling of 8 images, where sizes are multiples of the output's."""
    sizes = ((28, 14, 256), (7, 1, 512), (56, 7, 128), (56, 1, 128), (224, 1, 16))
    for (before, after, channels), layout in product(sizes, ("contiguous", "channels_last")):
        x = torch.randn(8, channels, before, before)
        x = x.contiguous(memory_format=data.CHANNELS_LAST[2]) if layout != "contiguous" else x
        functions = {
            name: lambda x, of=of, after=after: of.adaptive_max_pool2d(x, after)
            for name, of in FUNCTIONS.items()
        }
        row = f"{before}x{before} to {after}x{after}, {channels}"
        forward = {
            name: lambda x=x, function=function: (function(x),)
            for name, function in functions.items()
        }
        both = {name: there_and_back(function, x) for name, function in functions.items()}
        for direction, calls in (("forward", forward), ("and backward", both)):
            require_equal(calls, row)
            once = {name: [call] for name, call in calls.items()}
            yield Compared(row, f"{layout}: {direction}", once)


def tiny() -> Iterator[Compared]:
    """A call of four planes of 8x8: what it costs at the least, also with a gradient."""
    x = torch.randn(1, 4, 8, 8)
    _, indices = F.max_pool2d(torch.randn(1, 4, 16, 16), 2, return_indices=True)
    unpooling = (indices, (16, 16), (2, 2), (2, 2), (0, 0), "last")
    pooling = ((2, 2), (2, 2), (0, 0), (1, 1), False)
    of_operators: dict[str, Function] = {
        "unpooling": lambda x: _operators.max_unpool(x, *unpooling),
        WITH_INDICES: lambda x: _operators.max_pool(x, *pooling, torch.int64)[0],
        WITHOUT_INDICES: lambda x: _operators.max_pool(x, *pooling, torch.uint8)[0],
    }
    functions: dict[str, dict[str, Function]] = {
        row: {OPERATOR: function} for row, function in of_operators.items()
    }
    for name, of in FUNCTIONS.items():
        functions["unpooling"][name] = lambda x, of=of: of.max_unpool2d(x, indices, 2)
        functions[WITH_INDICES][name] = lambda x, of=of: of.max_pool2d(x, 2, return_indices=True)[0]
        functions[WITHOUT_INDICES][name] = lambda x, of=of: of.max_pool2d(x, 2)
    for row, each in functions.items():
        calls_of: dict[str, dict[str, Call]] = {
            row: {name: lambda of=of: (of(x),) for name, of in each.items()},
            f"{row}, with a gradient": {name: with_gradient(of, x) for name, of in each.items()},
            f"{row}{AND_BACKWARD}": {name: there_and_back(of, x) for name, of in each.items()},
        }
        for kind, calls in calls_of.items():
            require_equal(calls, kind)
            yield Compared(kind, "", {name: [repeated(of)] for name, of in calls.items()}, REPEATS)


def patched() -> Iterator[Compared]:
    """What any call of PyTorch costs inside ``patched``."""
    four = torch.randn(4)
    adds = repeated(lambda: torch.add(four, four))

    def inside() -> Any:
        with maxunpool_cuda.patched():
            return adds()

    yield Compared("torch.add", "", {PLAIN: [adds], INSIDE: [inside]}, REPEATS)


class Skip(nn.Module):
    """As FastSurfer's blocks: what is unpooled competes with what an encoder has kept."""

    def __init__(self, *window: int) -> None:
        super().__init__()
        self.register_buffer("skip", torch.randn(IMAGES))
        self.norm = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(*window, return_indices=True)
        self.unpool = nn.MaxUnpool2d(*window)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(self.norm(x).relu())
        return torch.maximum(self.unpool(pooled, indices, output_size=x.shape), self.skip)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unpool and maximum, 2x2": lambda: Skip(2),
    "unpool and maximum, 3x3, stride 2": lambda: Skip(3, 2, 1),
    "pool without indices, 3x3, stride 2": lambda: nn.Sequential(
        nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ),
    "SegNet of two stages": lambda: nn.Sequential(nn.Conv2d(64, 3, 1), SegNet((16, 32), (1, 1))),
}


def compiled_call(name: str, make: Callable[[], nn.Module], x: Tensor, training: bool) -> Call:
    """Inference, or forward and backward, of a compiled model, converted if the name is ours."""
    torch.manual_seed(0)
    model = make().train(training)
    if name == OURS:
        maxunpool_cuda.convert_max_pooling(model)
    if not x.is_contiguous():
        model = model.to(memory_format=torch.channels_last)
    compiled = torch.compile(model, dynamic=False)
    leaf = x.detach().requires_grad_(training)

    def call() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(training):
            output = compiled(leaf)
        return output.detach(), *(torch.autograd.grad(output.sum(), leaf) if training else ())

    return call


def first_of(call: Call) -> Call:
    """The first of the call's results alone."""
    return lambda: call()[:1]


def compiled() -> Iterator[Compared]:
    """Models of 4 images of 64 channels of 64x64, under torch.compile before and after."""
    for row, layout, training in product(MODELS, data_layouts(), (False, True)):
        torch.manual_seed(0)
        x = torch.randn(IMAGES).contiguous(memory_format=data_layouts()[layout])
        torch.compiler.reset()  # after eight compilations of a forward all others stay eager
        calls = {name: compiled_call(name, MODELS[row], x, training) for name in FUNCTIONS}
        # Not gradients: rounding moves some maxima, and torch.nn's go to all of equal indices.
        require_equal({name: first_of(call) for name, call in calls.items()}, row, share=0.05)
        column = f"{'training' if training else 'inference'}, {layout}"
        yield Compared(row, column, {name: [call] for name, call in calls.items()})


def data_layouts() -> dict[str, torch.memory_format]:
    """By the names of the tables."""
    return {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class RoundTrip(nn.Module):
    """Pools, and unpools what it pooled."""

    def __init__(self, window: Sequence[int]) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(*window, return_indices=True)
        self.unpool = nn.MaxUnpool2d(*window)

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(x)
        return self.unpool(pooled, indices, output_size=x.shape)


def in_onnx(model: nn.Module, x: Tensor, form: str) -> tuple[int, Call]:
    """The number of nodes of the model in this form, and a call of it in ONNX Runtime."""
    import onnxruntime

    program = torch.export.export(model, (x,))
    table = maxunpool_cuda.export.onnx_translation_table() if form == MAX_UNPOOL else None
    if form == DECOMPOSITIONS:
        program = program.run_decompositions(maxunpool_cuda.export.decompositions())
    made: Any = torch.onnx.export(program, custom_translation_table=table, verbose=False)
    file = io.BytesIO()
    made.save(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.getvalue(), options, ["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return len(list(made.model.graph)), lambda: [*map(torch.from_numpy, session.run(None, feed))]


def exported() -> Iterator[Compared]:
    """A pool and its unpool of 16 channels of 64x64 in ONNX Runtime, in each form."""
    x = torch.randn(1, 16, 64, 64)
    windows = {"2x2": (2, 2, 0), "3x3, stride 2": (3, 2, 1)}
    for (window, numbers), dtype in product(windows.items(), (torch.int64, torch.uint8)):
        forms = [TORCH] * (dtype == torch.int64) + [MAX_UNPOOL, DECOMPOSITIONS]
        graphs = {}
        for form in forms:
            model = RoundTrip(numbers).eval()
            if form != TORCH:
                maxunpool_cuda.convert_max_pooling(model, index_dtype=dtype)
            graphs[form] = in_onnx(model, x, form)
        row = f"{window}, {str(dtype).removeprefix('torch.')}"
        require_equal({form: call for form, (_, call) in graphs.items()}, row)
        calls = {form: [call] for form, (_, call) in graphs.items()}
        yield Compared(row, "", calls, nodes={form: nodes for form, (nodes, _) in graphs.items()})


TABLES = (small_planes, fixes, adaptive, tiny, patched, compiled)


def row_of(table: str, compared: Compared, seconds: float) -> report.Row:
    """Quartiles of everyone's seconds, of one call."""
    clocks = dict.fromkeys(compared.calls, timing.cpu_clock)
    results: dict[str, Any] = {}
    for name, three in timing.interleave(compared.calls, clocks, seconds).items():
        results[name] = {"quartiles": [float(f"{x / compared.repeats:.5g}") for x in three]}
        if compared.nodes:
            results[name]["nodes"] = compared.nodes[name]
    return {"table": table, "row": compared.row, "column": compared.column, "results": results}


def measure(seconds: float, tables: Sequence[Callable[[], Iterator[Compared]]]) -> report.Report:
    """These tables, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        settings = {"seconds": seconds, "pages kept": timing.keep_pages()}
        rows = []
        for table in tables:
            for compared in table():
                name = table.__name__
                print(f"{name}: {compared.row} {compared.column}", flush=True)
                rows.append(row_of(name, compared, seconds))
        return {"facts": report.facts("cpu"), "settings": settings, "rows": rows}
    finally:
        torch.set_num_threads(threads)
