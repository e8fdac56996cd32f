"""Calls the package with random arguments, most of them wrong: python tests/fuzz.py SEED COUNT.

Every call must give the reference's value or raise an exception, once more when the package may
remember the arguments. Anything else ends the program: a wrong value by an assertion, a crash by a
signal. It prints how many calls did which.
"""

import math
import random
import resource
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from cases import OPERATORS, Case, Geometry, positions_of, same
from reference import max_pool, max_unpool, max_unpool_backward

import maxunpool_cuda
import maxunpool_cuda.functional as F

HUGE = (2**40, -(2**40), 2**62, 2**63, 2**64, -(2**63))


class SymIntLike:
    """Something that is an index, but no int."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def strange(rng: random.Random) -> Any:
    """An argument that is probably not what was meant."""
    numbers = (0, -1, True, 2.5, math.nan, rng.randint(-5, 9), rng.choice(HUGE))
    others = (None, "2", b"2", object(), torch.int64, SymIntLike(rng.randint(-1, 3)))
    few = ((), [], [[2, 2]], (2, None), {2: 2}, {2, 3}, [rng.choice(HUGE), 2], range(2))
    sizes = (tuple(rng.randint(-2, 5) for _ in range(rng.randint(1, 5))), torch.Size([2, 2]))
    tensors = (torch.tensor(2), torch.tensor([2, 2]), torch.tensor([2.5, 2.5]))
    return rng.choice((*numbers, *others, *few, *sizes, *tensors))


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
    """Make one, and say what it did."""
    name = rng.choice(list(OPERATORS))
    kind = name.split()[0]  # unpool, gradient or pool
    drawn = OPERATORS[name](rng, most_cells=12, longest=6)
    of, tensors, arguments = drawn.of, list(drawn.tensors), list(drawn.arguments)
    if isinstance(of, Case) and rng.random() < 0.1:
        tensors[1] = with_an_index_at_the_edge(rng, of)
    tensors = [strange_tensor(rng, t) if rng.random() < 0.15 else t for t in tensors]
    arguments = [strange(rng) if rng.random() < 0.09 else argument for argument in arguments]
    if isinstance(of, Case) and rng.random() < 0.03:
        arguments[-1] = rng.choice(("", "max", None, 3, "LAST"))
    dims = drawn.dims if rng.random() < 0.95 else rng.choice((1, 2, 3))
    way = "operator" if kind == "gradient" else rng.choice(("operator", "function", "module"))
    indices = rng.choice((False, True, 1, None))
    try:
        if way == "operator":
            dims, indices = drawn.dims, True
            result = drawn.operator(*tensors, *arguments)
        else:
            result = as_users_call(way, kind, dims, tensors, arguments, indices)
    except Exception as error:
        return type(error).__name__
    if kind == "pool":
        check_pool(result, tensors[0], arguments, dims, bool(indices))
    else:
        check_unpool(result, tensors, arguments, drawn.dims, forward=kind == "unpool")
    return "value"


def as_users_call(
    way: str, kind: str, dims: int, tensors: list[Any], arguments: list[Any], indices: Any
) -> Any:
    if kind == "pool":
        *window, ceil_mode, index_dtype = arguments
        named = {"ceil_mode": ceil_mode, "return_indices": indices, "index_dtype": index_dtype}
        output_size = []
    else:
        output_size, *window, reduce = arguments
        named, output_size = {"reduce": reduce}, [output_size]
    if way == "module":
        module = getattr(maxunpool_cuda, f"Max{kind.title()}{dims}d")
        return module(*window, **named)(*tensors, *output_size)
    return getattr(F, f"max_{kind}{dims}d")(*tensors, *window, *output_size, **named)


def all_tuples(sizes: list[Any], dims: int) -> bool:
    """Whether they are as the reference takes them."""
    return all(isinstance(each, tuple) and len(each) == dims for each in sizes)


def check_pool(result: Any, input: Any, arguments: list[Any], dims: int, indices: bool) -> None:
    assert isinstance(result, tuple) == indices
    tensors = result if indices else (result,)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    *window, _, index_dtype = arguments
    if input.device.type == "meta" or input.numel() == 0 or not all_tuples(window, dims):
        return
    if isinstance(index_dtype, torch.dtype):
        expected = max_pool(input, *arguments)
        assert all(map(same, tensors, expected)), f"wrong value: {input.shape}, {arguments}"


def check_unpool(
    result: Any, tensors: list[Any], arguments: list[Any], dims: int, forward: bool
) -> None:
    values, indices = tensors
    assert isinstance(result, torch.Tensor)
    if result.device.type == "meta":
        return
    # However the sizes were given, the result's are those that count.
    output = tuple((result if forward else values).shape[-dims:])
    _, *window, reduce = arguments
    if indices.dtype == torch.uint8:
        if not all_tuples(window, dims):
            return  # what the offsets mean was given in another way
        indices = positions_of(indices, Geometry(tuple(indices.shape[-dims:]), *window, output))
    reference = max_unpool if forward else max_unpool_backward
    expected = reference(values, indices, output, reduce)
    assert same(result, expected), f"wrong value: {values.shape}, {arguments}"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    outcomes = Counter(call(rng) for _ in range(count))
    before = resident_bytes()
    again = random.Random(seed)  # the same calls, now remembered: nothing new should stay
    assert Counter(call(again) for _ in range(count)) == outcomes
    print({"grown": resident_bytes() - before, **outcomes})


if __name__ == "__main__":
    main()
