"""Bad input: an exception of the type that torch.nn raises, and a message that names the values.

A call with random arguments, most of them wrong, gives the reference's value or an exception.
"""

import math
import re
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import cases
import emulation
import pytest
import torch
from cases import OPERATORS, Call, draw, same, scaled, with_a_bad_index
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

# U and P are max_unpool and max_pool of as many dimensions as x and y have, i are indices and o
# offsets for x, and g is a gradient. The pattern is of values that the message names.
#
# What torch.nn refuses too, with the same type of exception, in one, two and three dimensions.
REFUSED_BY_TORCH = [
    ("U(x, i + 100, 2)", "100 .* at position 0 of plane 0"),
    ("U(x, -1 - i, 2)", "-1 .* at position 0 of plane 0"),
    ("U(x, i.short(), 2)", "Short"),
    ("U(x, i[..., :1], 2)", r"2\].*1\]"),
    ("U(x, i.to('meta'), 2)", "(cpu|cuda:0) and meta"),
    ("U(x[0, 0], i[0, 0], 2)", r"\d"),
    ("U(x[None], i[None], 2)", r"\d"),
    ("U(x[:, :0], i[:, :0], 2)", r"\[1, 0, 2"),
    ("U(x, i, 2, output_size=[9] * x.dim())", "9"),
    ("U(x, i, 2, output_size=[2] * x.dim())", "2"),
    ("U(x, i, 2, output_size=[2**62] * x.dim())", str(2**62)),
    ("U(x, i, 2, output_size=[])", r"\[\]"),
    ("U(x, i, 2, output_size=[4.0] * x.dim())", r"4\.0"),
    ("U(x, i, 2, output_size='a' * x.dim())", "a"),
    ("U(x, i, 2, output_size=4)", "4"),
    ("U(x, i, 2.0)", r"2\.0"),
    ("U(x, i, None)", "None"),
    ("U(x, i, 2, 0)", "0"),
    ("U(x, i, 2, 2**62)", str(2**62)),
    ("P(y, 0)", "0"),
    ("P(y, 2, -1)", "-1"),
    ("P(y, 2, 2, -1)", "-1"),
    ("P(y, 2, 2, 2)", "2"),
    ("P(y, 2, 2, 0, 0)", "0"),
    ("P(y, 9)", "9"),
    ("P(y.bool(), 2)", "Bool"),
    ("P(y * 1j, 2)", "ComplexFloat"),
    ("P(y, (2,) * 4)", r"\(2, 2, 2, 2\)"),
    ("P(y, 2.5)", r"2\.5"),
    ("P(y, 2, ceil_mode=1)", "1"),
    ("P(y[0, 0], 2)", "8"),
    ("P(y[None], 2)", "8"),
    ("P(y[:, :0], 2)", "0"),
    ("P(y[:0, 0], 2)", "0"),
    ("P(y, 2**62, 1, 2**61)", str(2**62)),
    ("P(y, 3, 1, 1, 2**63 - 1)", str(2**63 - 1)),
]
COUNT = (ValueError, RuntimeError)  # for a number of ints that differs from that of dimensions
TOO_LARGE = (TypeError, ValueError, RuntimeError)  # for ints that 64 bits do not hold
# Also compiled and under vmap, which take too long for all. torch.nn takes these, or lacks them.
SAMPLE: list[tuple[str, Any, str]] = [
    ("U(x, (i - 1).int(), 2)", RuntimeError, "-1 "),
    ("U(x, o + 4, 2)", RuntimeError, r"4 \(an offset"),
    ("U(x, o, 17)", ValueError, "256 .*17, 17"),
    ("U(x, i, 2, 2, -1)", RuntimeError, "-1"),
    ("U(x, i, 2, reduce='max')", ValueError, "'?max'?"),
    ("U(x[0], i[0], 2, output_size=[7, 4, 9])", ValueError, r"\[4, 9\]"),
    ("backward(g[..., :3], i)", RuntimeError, r"\[1, 1, 4, 4\] .*\[1, 1, 4, 3\]"),
    ("P(y, 2, 2, 0, (1, 2), **byte)", ValueError, "1, 2"),
]
REFUSED_HERE: list[tuple[str, Any, str]] = [
    *SAMPLE,
    ("U([1.0], i, 2)", TypeError, "list"),
    ("U(x, None, 2)", TypeError, "NoneType"),
    ("U(x, i[0], 2)", RuntimeError, r"\[1, 2, 2\]"),
    ("U(x, i, 2, 2, 5)", ValueError, "-6"),  # in torch.nn a RuntimeError until PyTorch 2.13
    ("U(x, i, 0)", RuntimeError, "0"),
    ("U(x, i, 2, (2, -3))", RuntimeError, "-3"),
    ("U(x[:0], i[:0], 2, 2, 2)", ValueError, "0, 0"),
    ("U(x, i, (2, 2, 2))", COUNT, r"\(2, 2, 2\)"),
    ("U(x, i, 2, 2, ())", COUNT, r"\(\)"),
    ("U(x, i, 2**31)", RuntimeError, str(2**32)),
    ("U(x, i, 2**40, 2**40, 2**39)", RuntimeError, str(2**40)),
    ("U(x, i, 2**22)", RuntimeError, ""),  # more than there is memory
    *((f"U(x, i, {n})", TOO_LARGE, "") for n in ("2**62", "2**64", "2**63 - 1", "2, 2, 2**62")),
    ("U(x, i, 2, output_size=[2**64, 4])", TOO_LARGE, ""),
    *((f"P(y, {window})", TOO_LARGE, "") for window in ("2**63", "2, -2**64", "2, 2, 2**64")),
    ("P(y, 2, 2**63 - 1, ceil_mode=True)", TOO_LARGE, ""),
    ("P(y.new_empty(0, *[2**20] * 3), 2)", RuntimeError, str(2**20)),
    ("U(x, i + 16, 2, reduce='sum')", RuntimeError, "(16|18|24|26) "),  # CUDA names any
    ("U(x.bool(), i, 2, reduce='sum')", NotImplementedError, "Bool"),
    ("U(x.to(torch.float8_e5m2), i, 2, reduce='sum')", NotImplementedError, "Float8_e5m2"),
    ("maxunpool_cuda.MaxUnpool2d(2, reduce='amax')", ValueError, "'amax'"),
    ("maxunpool_cuda.MaxPool2d(2, index_dtype='int64')", ValueError, "'int64'"),
    ("U(x, o.to(torch.int8), 2)", RuntimeError, "Char"),
    ("U(x, o + 255, 16, 2, 8, (2, 2))", RuntimeError, r"255 \(an offset"),
    ("F.max_unpool3d(x[None], o[None], 7)", ValueError, "256 .*7, 7, 7"),
    ("P(y, 17, **byte)", ValueError, "256 .*17, 17"),
    ("F.max_pool1d(y[0], 257, **byte)", ValueError, "256 .*257"),
    ("P(y, 2**40, 1, 2**39, **byte)", ValueError, f"256 .*{2**40}"),
    ("P(y[..., :1, :1].expand(1, 1, 2**16, 2**15), 2, **int32)", ValueError, str(2**16)),
    ("P(y, 2, return_indices=True, index_dtype=torch.int16)", ValueError, "Short|int16"),
    ("P(y, 2, return_indices=True, index_dtype=None)", (TypeError, ValueError), "None"),
    # the operators alone
    ("op(x, i, [], [2] * 4, [2] * 4, [0] * 4, 'last')", COUNT, r"\[2, 2, 2, 2\]"),
    ("op(x, i, [], [], [], [], 'last')", COUNT, r"\[\]"),
    ("op(x, i, [4, 4], [2, 2], [2], [0, 0], 'last')", COUNT, r"\[2\]"),
    ("op(x, i, [4], [2, 2], [2, 2], [0, 0], 'last')", COUNT, r"\[4\]"),
    ("pool(y, [], [], [], [], False, i.dtype)", COUNT, r"\[\]"),
    ("pool(y, [2, 2], [2], [0] * 2, [1] * 2, False, i.dtype)", COUNT, r"\[2\]"),
    ("pool(y, *[[2, 2]] * 2, [0, 0], [1, 1], False, torch.int16)", ValueError, "Short"),
    ("backward(g, i + 2**32)", RuntimeError, "429496(7296|7298|7304|7306) "),
    ("backward(g, i - 1, 'sum')", RuntimeError, "-1 "),
    ("backward(g[..., :2, :2], o, padding=1)", RuntimeError, r"0 \(an offset"),
    ("backward(g.repeat(2, 1, 1, 1), i)", RuntimeError, r"\[2, 1, 4, 4\]"),
    ("backward(g, i[0])", RuntimeError, r"\[1, 1, 4, 4\]"),
]
WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda call, *tensors: call(*tensors),
    "vmap": lambda call, *tensors: torch.vmap(call)(*(tensor[None] for tensor in tensors)),
    "compiled": lambda call, *tensors: torch.compile(call, backend="aot_eager")(*tensors),
}


def outcome(
    expression: str, device: str, way: str = "eager", dims: int = 2, functions: ModuleType = F
) -> tuple[list[str], str]:
    """The names of the exception's classes and its text, or "no exception" and the value."""

    def backward(g: Tensor, i: Tensor, reduce: str = "last", padding: int = 0) -> Tensor:
        size, window = (4 - 2 * padding,) * 2, ((2, 2), (2, 2), (padding,) * 2)
        return _ops.max_unpool_backward(g, i, size, *window, reduce)

    names = {
        "torch": torch,
        "maxunpool_cuda": maxunpool_cuda,
        "F": functions,
        "U": getattr(functions, f"max_unpool{dims}d"),
        "P": getattr(functions, f"max_pool{dims}d"),
        "op": _ops.max_unpool,
        "pool": _ops.max_pool,
        "byte": {"return_indices": True, "index_dtype": torch.uint8},
        "int32": {"return_indices": True, "index_dtype": torch.int32},
        "backward": backward,
    }
    if functions is not F:  # without indices, torch.nn's 1d has another kernel, with other errors
        names["P"] = partial(names["P"], return_indices=True)
    tensors = (
        torch.rand(1, 1, *[2] * dims),
        torch.tensor([0, 2, 8, 10] * (dims // 2 + 1))[: 2**dims].reshape(1, 1, *[2] * dims),
        torch.rand(1, 1, *[4] * dims),
        torch.zeros(1, 1, *[2] * dims, dtype=torch.uint8),
        torch.rand(1, 1, *[8] * dims),
    )
    call = eval(f"lambda x, i, g, o, y: {expression}", names)
    try:
        value = WAYS[way](call, *(tensor.to(device) for tensor in tensors))
    except Exception as error:
        return [each.__name__ for each in type(error).__mro__], str(error)
    return ["no exception"], repr(value)


def names_the_values(message: str, values: str) -> bool:
    start = r"^(max_(un)?pool(\dd)?|Max(Unp|P)ool2d): expected "
    return not values or re.search(f"{start}.*({values})", message, re.IGNORECASE) is not None


@pytest.mark.parametrize(
    ("expression", "exception", "values"), REFUSED_HERE, ids=[row[0] for row in REFUSED_HERE]
)
def test_bad_calls(device: str, expression: str, exception: Any, values: str) -> None:
    allowed = {each.__name__ for each in (exception if type(exception) is tuple else (exception,))}
    (raised, *_), message = outcome(expression, device)
    assert raised in allowed, message
    assert names_the_values(message, values), message
    for way in ("vmap", "compiled") if (expression, exception, values) in SAMPLE else ():
        classes, message = outcome(expression, device, way)
        # Dynamo makes a RuntimeError of an operator's ValueError.
        assert {"RuntimeError", *allowed} & {*classes}, (way, message)
        assert re.search(f"expected .*({values})", message), (way, message)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("expression", "values"), REFUSED_BY_TORCH, ids=[row[0] for row in REFUSED_BY_TORCH]
)
def test_bad_calls_raise_what_torch_raises(expression: str, values: str, dims: int) -> None:
    (theirs, *_), said = outcome(expression, "cpu", "eager", dims, torch.nn.functional)
    assert theirs != "no exception"
    (ours, *_), message = outcome(expression, "cpu", "eager", dims)
    assert ours == theirs, (message, said)
    assert names_the_values(message, values), message


def test_valid_calls_succeed(device: str) -> None:
    for expression, value in {
        "U(x, i, 2).shape": "torch.Size([1, 1, 4, 4])",
        "U(x, i, (2,), [2], (0,)).shape": "torch.Size([1, 1, 4, 4])",
        "backward(g, i).shape": "torch.Size([1, 1, 2, 2])",
        "len(P(y, 2, **byte))": "2",
        "len(P(y, 16, 1, 8, **byte))": "2",
        "len(P(y, 17, 1, 8, **int32))": "2",
        "U(x, o + 3, 2).count_nonzero()": "tensor(4)",
        "U(x, o + 4, 3, 2, 1).count_nonzero()": "tensor(4)",
        "U(x, o + 255, 16, 1).count_nonzero()": "tensor(4)",
    }.items():
        for way in ("eager", "compiled"):
            kind, text = outcome(expression, device, way)
            assert (kind, text.replace(", device='cuda:0'", "")) == (["no exception"], value)


@pytest.mark.parametrize("operator", ["max_unpool", "max_unpool_backward", "max_pool"])
def test_cpu_tensors_for_cuda_kernels(operator: str) -> None:
    """Whether this build has such kernels, or not."""
    x, indices = torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    window = ((1, 1), (1, 1), (0, 0))
    arguments = (x, *window, (1, 1), False, torch.int64)
    if operator != "max_pool":
        arguments = (x, indices, (2, 2), *window, "last")
    exception, words = NotImplementedError, "FORCE_CUDA=1 pip install"
    if maxunpool_cuda.build_info()["cuda"]:
        exception, words = RuntimeError, "expected CUDA tensors but got tensors on cpu"
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(exception, match=words):
        getattr(_ops, operator).redispatch(keys, *arguments)


# Random arguments


HUGE = (2**40, -(2**40), 2**62, 2**63, 2**64, -(2**63))


def strange(rng: Random) -> Any:
    """An argument that is probably not what was meant."""
    numbers = (0, -1, True, 2.5, math.nan, rng.randint(-5, 9), rng.choice(HUGE), [rng.choice(HUGE)])
    others = (None, "max", b"2", object(), torch.int64, torch.tensor(2), torch.tensor([2.5, 2.5]))
    few = ((), [], [[2, 2]], (2, None), {2: 2}, {2, 3}, range(2), torch.Size([2, 2]))
    sizes = tuple(rng.randint(-2, 5) for _ in range(rng.randint(1, 5)))
    return rng.choice((*numbers, *others, *few, sizes, sizes, list(sizes)))


CHANGES: tuple[Callable[[Random, Tensor], Any], ...] = (
    lambda rng, t: t.to(rng.choice((torch.int16, torch.uint8, torch.bool, torch.bfloat16))),
    lambda rng, t: t + rng.choice((1, -1, 2**31, 2**32, -(2**40), 2**62)),
    lambda rng, t: t.unsqueeze(rng.randint(0, t.dim())),
    lambda rng, t: t[(slice(None),) * rng.randrange(t.dim()) + (rng.choice((0, slice(0, -1))),)],
    lambda rng, t: t.movedim(0, -1),
    lambda rng, t: t.expand(2, *t.shape),
    lambda rng, t: rng.choice((t.to("meta"), t.to_sparse(), t.reshape(-1)[0], t.numpy())),
    lambda rng, t: t.flip(-1).conj(),
    lambda rng, t: torch.as_strided(t, t.shape, [0] * t.dim()),
    lambda rng, t: torch.nested.nested_tensor([t, t]),
)


def strange_tensor(rng: Random, tensor: Tensor) -> Any:
    """A tensor that was changed in some way, or something else."""
    try:
        return rng.choice(CHANGES)(rng, tensor)
    except Exception:
        return strange(rng)


def random_outcome(rng: Random, device: str) -> str:
    """Make one call. Returns "value" or the name of the exception."""
    operator = rng.choice(OPERATORS)
    call = draw(rng, operator, most_cells=12, longest=6)
    if operator != "pool" and rng.random() < 0.1:
        call = with_a_bad_index(call, rng)[0]
    tensors = [tensor.to(device) for tensor in call.tensors]
    tensors = [strange_tensor(rng, t) if rng.random() < 0.15 else t for t in tensors]
    arguments = [strange(rng) if rng.random() < 0.09 else each for each in call.arguments]
    dims, both = call.dims, True
    try:
        if "gradient" in operator or rng.random() < 0.3:
            result = call.operator(*tensors, *arguments)
        else:
            dims, both = rng.choice((dims, dims, dims, 1, 2, 3)), rng.choice((True, False))
            function = getattr(F, f"max_{operator.split()[0]}{dims}d")
            if operator == "pool":
                *window, ceil, index_dtype = arguments
                result = function(*tensors, *window, ceil, both, index_dtype=index_dtype)
            else:
                size, *window, reduce = arguments
                result = function(*tensors, *window, size, reduce=reduce)
    except Exception as error:
        return type(error).__name__
    results = leaves(result)
    assert [isinstance(tensor, Tensor) for tensor in results] == [True] * len(results)
    made = as_made(call, tensors, arguments, dims, results)
    if made is not None:
        right = all(map(same, results, made.reference()))
        right &= len(results) == 1 + (operator == "pool" and both)
        assert right, f"wrong value: {made}"
    return "value"


def as_made(
    call: Call, tensors: list[Any], arguments: list[Any], dims: int, results: list[Tensor]
) -> Call | None:
    """The call that was made, unless it has no data or its window is not in tuples."""
    if results[0].device.type == "meta":
        return None
    if call.operator is _ops.max_pool:
        # Without indices in the result, any index_dtype will do.
        window, index_dtype = arguments[:4], results[-1].dtype if len(results) == 2 else torch.int64
        needs_window, arguments = True, [*arguments[:-1], index_dtype]
    else:
        # However the output size was given, the sizes of the tensor count.
        whole = results[0] if call.operator is _ops.max_unpool else tensors[0]
        window, needs_window = arguments[1:4], tensors[1].dtype == torch.uint8
        arguments = [tuple(whole.shape[-dims:]), *arguments[1:]]
    if needs_window:
        in_tuples = all(isinstance(sizes, tuple) and len(sizes) == dims for sizes in window)
        if not in_tuples or results[0].numel() == 0:
            return None
    return replace(call, tensors=tuple(tensors), arguments=tuple(arguments))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.sanitized
@pytest.mark.filterwarnings("ignore")
def test_random_arguments(device: str, rng: Random) -> None:
    count, seed, outcomes, resident = scaled(4000), rng.random(), [], []
    for _ in range(2):  # the second time, nothing new should stay in memory
        rng = Random(seed)
        outcomes.append(Counter(random_outcome(rng, device) for _ in range(count)))
        resident.append(resident_bytes())
    assert outcomes[0] == outcomes[1]
    if not emulation.SANITIZERS:  # which keep what is freed
        assert resident[1] - resident[0] < 32 << 20
    assert outcomes[0]["value"] > count / 10
    for name in ("RuntimeError", "TypeError", "ValueError"):
        assert outcomes[0][name] > count / 40, outcomes


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_value_is_seen(rng: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.max_unpool

    def wrong(x: Tensor, indices: Tensor, size: Any, reduce: str) -> Tensor:
        return right(x, (indices.long() + 1) % torch.Size(size).numel(), size, reduce)

    monkeypatch.setattr(cases, "max_unpool", wrong)
    with pytest.raises(AssertionError, match="wrong value"):
        all(random_outcome(rng, "cpu") for _ in range(200))
