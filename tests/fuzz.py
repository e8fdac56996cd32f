"""Calls the package with random arguments, most of them wrong: python tests/fuzz.py SEED COUNT.

Every call must give the reference's value or raise an exception, and do the same once more, when
the package may remember the arguments. Anything else ends the program: a wrong value by an
assertion, a crash by a signal. It prints how many calls did which.
"""

import math
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import (
    INDEX_DTYPES,
    POOLED,
    Case,
    Geometry,
    positions_of,
    random_case,
    random_pool,
    same,
)
from reference import max_pool, max_unpool, max_unpool_backward

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

FUNCTIONS = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}
POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
HUGE = (2**40, -(2**40), 2**62, 2**63, 2**64, -(2**63))


class SymIntLike:
    """Something that is an index, but no int."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def strange(rng: random.Random) -> Any:
    """An argument that is probably not what was meant."""
    return rng.choice(
        (
            None,
            0,
            -1,
            rng.randint(-5, 9),
            rng.choice(HUGE),
            True,
            2.5,
            float("nan"),
            "2",
            b"2",
            (),
            [],
            [[2, 2]],
            (2, None),
            {2: 2},
            {2, 3},
            SymIntLike(rng.randint(-1, 3)),
            tuple(rng.randint(-2, 5) for _ in range(rng.randint(1, 5))),
            [rng.choice(HUGE), 2],
            torch.tensor(2),
            torch.tensor([2, 2]),
            torch.tensor([2.5, 2.5]),
            torch.Size([2, 2]),
            range(2),
            object(),
            torch.int64,
        )
    )


def strange_tensor(rng: random.Random, tensor: torch.Tensor) -> Any:
    """A tensor that was changed in some way, or none at all."""
    changes = (
        lambda t: t.float(),
        lambda t: t.to(rng.choice((torch.int16, torch.uint8, torch.bool, torch.bfloat16))),
        lambda t: t[..., :-1],
        lambda t: t[:0],
        lambda t: t.unsqueeze(rng.randint(0, t.dim())),
        lambda t: t[0],
        lambda t: t.movedim(0, -1),
        lambda t: t.expand(2, *t.shape),
        lambda t: t.flatten(),
        lambda t: t.to("meta"),
        lambda t: t.to_sparse(),
        lambda t: t.reshape(-1)[0],
        lambda t: t.flip(-1).conj(),
        lambda t: torch.as_strided(t, t.shape, [0] * t.dim()),
        lambda t: t + rng.choice((1, -1, 2**31, 2**32, -(2**40), 2**62)),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: torch.nested.nested_tensor([t, t]),
        lambda t: torch.empty(0, dtype=t.dtype),
    )
    try:
        return rng.choice(changes)(tensor)
    except Exception:
        return strange(rng)


def with_an_index_at_the_edge(rng: random.Random, case: Case) -> torch.Tensor:
    edge = math.prod(case.geometry.output)
    if case.indices.dtype == torch.uint8:
        edge = rng.choice((math.prod(case.geometry.kernel), 256))
    indices = case.indices.clone(memory_format=torch.contiguous_format)
    if indices.numel() > 0:
        where = rng.randrange(indices.numel())
        number = rng.choice((-1, 0, edge - 1, edge, edge + 1))
        indices.view(-1)[where] = number % 256 if indices.dtype == torch.uint8 else number
    return indices


def call(rng: random.Random) -> str:
    return pool_call(rng) if rng.random() < 0.3 else unpool_call(rng)


def pool_call(rng: random.Random) -> str:
    x, window = random_pool(rng, rng.choice(POOLED), longest=6, most_cells=12)
    dims = len(window.sizes) if rng.random() < 0.95 else rng.choice((1, 2, 3))
    arguments: list[Any] = [
        strange(rng) if rng.random() < 0.08 else argument for argument in window.arguments
    ]
    input: Any = strange_tensor(rng, x) if rng.random() < 0.15 else x
    index_dtype: Any = strange(rng) if rng.random() < 0.05 else rng.choice(INDEX_DTYPES)
    return_indices = rng.choice((False, True, 1, None))
    as_operator, as_module = rng.random() < 0.2, rng.random() < 0.3

    def run() -> Any:
        if as_operator:
            return _ops.max_pool(input, *arguments, index_dtype)
        options = {"return_indices": return_indices, "index_dtype": index_dtype}
        if as_module:
            *geometry, ceil = arguments
            module = getattr(maxunpool_cuda, f"MaxPool{dims}d")
            return module(*geometry, ceil_mode=ceil, **options)(input)
        return POOLS[dims](input, *arguments, **options)

    results = [outcome(run)] if as_operator else outcomes_of(run)
    for result in results:
        if isinstance(result, Exception):
            return type(result).__name__
        rank = len(window.sizes) if as_operator else dims
        seen = as_operator or bool(return_indices)
        check_pool(result, input, arguments, index_dtype, rank, seen)
    return "value"


def check_pool(
    result: Any, input: Any, arguments: list[Any], index_dtype: Any, dims: int, indices: bool
) -> None:
    assert isinstance(result, tuple) == indices
    tensors = result if indices else (result,)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    *geometry, ceil = arguments
    known = isinstance(index_dtype, torch.dtype) and all(
        isinstance(sizes, tuple) and len(sizes) == dims for sizes in geometry
    )
    if input.device.type == "meta" or input.numel() == 0 or not known:
        return  # or given in another way, which the reference does not know
    expected = max_pool(input, *geometry, ceil, index_dtype)
    assert all(map(same, tensors, expected)), f"wrong value: {input.shape}, {arguments}"


def unpool_call(rng: random.Random) -> str:
    case = random_case(rng, most_cells=12)
    g, reduce = case.geometry, case.reduce
    forward = rng.random() < 0.8
    arguments: list[Any] = [case.input if forward else case.grad_output, case.indices]
    if rng.random() < 0.1:
        arguments[1] = with_an_index_at_the_edge(rng, case)
    as_operator = not forward or rng.random() < 0.3
    windows: list[Any] = [g.kernel, g.stride, g.padding]
    for i in (0, 1):
        if rng.random() < 0.15:
            arguments[i] = strange_tensor(rng, arguments[i])
    for i in range(3):
        if rng.random() < 0.12:
            windows[i] = strange(rng)
    output_size: Any = strange(rng) if rng.random() < 0.12 else g.output
    if rng.random() < 0.03:
        reduce = rng.choice(("", "max", None, 3, "LAST"))
    dims = g.dims if rng.random() < 0.95 else rng.choice((1, 2, 3))
    as_module = rng.random() < 0.3

    def run() -> Any:
        if as_operator:
            operators = torch.ops.maxunpool_cuda
            operator = operators.max_unpool if forward else operators.max_unpool_backward
            return operator(*arguments, output_size, *windows, reduce)
        if as_module:
            module = getattr(maxunpool_cuda, f"MaxUnpool{dims}d")(*windows, reduce=reduce)
            return module(*arguments, output_size)
        return FUNCTIONS[dims](*arguments, *windows, output_size, reduce=reduce)

    results = [outcome(run)] if as_operator else outcomes_of(run)
    for result in results:
        if isinstance(result, Exception):
            return type(result).__name__
        check(result, arguments, windows, reduce, forward, case)
        assert result.stride() == results[0].stride()
    return "value"


def outcomes_of(run: Callable[[], Any]) -> list[Any]:
    """What a call does, and what it does once more: the same."""
    results = [outcome(run), outcome(run)]
    assert len({described(result) for result in results}) == 1, results
    return results


def described(result: Any) -> str:
    return f"{type(result).__name__}: {result}" if isinstance(result, Exception) else "value"


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return error


def check(
    result: Any,
    arguments: list[Any],
    windows: list[Any],
    reduce: str,
    forward: bool,
    case: Case,
) -> None:
    values, indices = arguments
    assert isinstance(result, torch.Tensor)
    if result.device.type == "meta":
        return
    # However the sizes were given, the result's are those that count.
    dims = case.geometry.dims
    output = tuple((result if forward else values).shape[-dims:])
    if indices.dtype == torch.uint8:
        if not all(isinstance(sizes, tuple) and len(sizes) == dims for sizes in windows):
            return  # what the offsets mean was given in another way
        pooled = tuple(indices.shape[-dims:])
        indices = positions_of(indices, Geometry(pooled, *windows, output))
    reference = max_unpool if forward else max_unpool_backward
    expected = reference(values, indices, output, reduce)
    assert same(result, expected), f"wrong value: {case.geometry}, {reduce}"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        outcomes[call(rng)] += 1
    before = resident_bytes()
    again = random.Random(seed)  # the same calls: nothing new should stay
    for _ in range(count):
        call(again)
    print({"grown": resident_bytes() - before, **outcomes})


if __name__ == "__main__":
    main()
