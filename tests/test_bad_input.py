# SPDX-License-Identifier: BSD-3-Clause
"""Bad input: exceptions of the types that torch.nn raises, and messages that name the values."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from cases import OPERATORS, draw, scaled
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F

# Calls that raise, and a pattern of what the message names. U, P and A are max_unpool, max_pool and
# adaptive_max_pool of as many dimensions as x and y have. P returns indices, and V is max_pool that
# does not. For x, i are indices and o offsets.
# torch.nn refuses these with the same type of exception, in one, two and three dimensions.
# test_torch_nn.py has all sizes of windows, in two dimensions.
REFUSED_BY_TORCH = {
    "U(x, i + 100, 2)": "100 .* at position 0 of plane 0",
    "U(x, i.short(), 2)": "Short",
    "U(x, i[..., :1], 2)": r"2\].*1\]",
    "U(x, i.to('meta'), 2)": "cpu and meta",
    "U(x[0, 0], i[0, 0], 2)": "2",
    "U(x[:, :0], i[:, :0], 2)": r"\[1, 0, 2",
    "U(x, i, 2, output_size=[6] * x.dim())": "6",
    "U(x, i, 2, output_size=[2] * x.dim())": "2",
    "U(x, i, 2, output_size=[])": r"\[\]",
    "U(x, i, 2, output_size=[4.0] * x.dim())": r"4\.0",
    "U(x, i, 2, output_size=4)": "4",
    "U(x, i, 2, 2**62)": str(2**62),
    "U(x, i, 2, output_size=torch.tensor(4))": r"output_size .*tensor\(4\)",
    "P(y, 2, 2, 2)": "2",
    "P(y, 2, 2, 0, True)": "dilation .*True",
    "P(y, 2, True)": "stride .*True",
    "P(y, [True])": r"kernel_size .*\[True\]",
    "P(y, {2})": r"kernel_size .*\{2\}",
    "P(y, {2: 1})": r"kernel_size .*\{2: 1\}",
    "P(y, b'22')": "kernel_size .*b'22'",
    "P(y, -2**63)": f"kernel_size=.*-{2**63}",
    "P(y, 2, -2**62 - 1)": f"stride=.*-{2**62 + 1}",
    "P(y, 9)": "9",
    "P(y.bool(), 2)": "Bool",
    "P(y * 1j, 2)": "ComplexFloat",
    "P(y, 2, ceil_mode=1)": "1",
    "P(y[None], 2)": "8",
    "P(y, 2**62, 1, 2**61)": str(2**62),
    "P(y, 3, 1, 1, 2**63 - 1)": str(2**63 - 1),
}
# torch.nn accepts or lacks these. SAMPLE is also compiled and called under vmap, which take longer.
SAMPLE: list[tuple[str, type[Exception], str]] = [
    ("U(x, (i - 1).int(), 2)", RuntimeError, "-1 "),
    ("U(x, o + 4, 2)", RuntimeError, r"4 \(an offset"),
    ("U(x, o, 17)", ValueError, "256 .*17, 17"),
    ("U(x, i, 2, 2, -1)", RuntimeError, "-1"),
    ("U(x[0, 0], i[0, 0], 2)", RuntimeError, "2, 2"),
    ("U(x, i, 2, reduce='max')", ValueError, "'?max'?"),
    ("U(x[0], i[0], 2, output_size=[7, 4, 9])", ValueError, r"\[4, 9\]"),
    ("P(y, 2, 2, 0, (1, 2), **byte)", ValueError, "1, 2"),
]
REFUSED_HERE: list[tuple[str, type[Exception], str]] = [
    *SAMPLE,
    ("U([1.0], i, 2)", TypeError, "list"),
    ("U(x, None, 2)", TypeError, "NoneType"),
    ("U(x, i, 0)", RuntimeError, "0"),
    ("U(x[:0], i[:0], 2, 2, 2)", ValueError, "0, 0"),
    ("U(x, i, (2, 2, 2))", RuntimeError, r"\(2, 2, 2\)"),
    ("U(x, i, 2**31)", RuntimeError, str(2**32)),
    ("U(x, i, 2**64)", TypeError, f"kernel_size .*{2**64}"),
    ("U(x, i, 2, 2**63)", TypeError, f"stride .*{2**63}"),
    ("U(x, i, -2**63)", RuntimeError, f"kernel_size=.*-{2**63}"),
    ("U(x, i, 2, 2, -2**63)", RuntimeError, f"padding=.*-{2**63}"),
    ("U(x, i, 2, 2, 2**61)", RuntimeError, f"padding=.*{2**61}"),
    ("U(x, i, 2, 2, 2**62)", RuntimeError, f"padding=.*{2**62}"),
    ("U(x, i, 2, 2, 2**59)", ValueError, f"padding=.*{2**59}"),
    ("U(x, i, 2, 0, 0, [4, 4])", RuntimeError, r"stride=\[0, 0\]"),
    ("U(x, i, -2**63, 2, 0, [4, 4])", RuntimeError, f"kernel_size=.*-{2**63}"),
    ("U(*[x.new_empty(1, 2**20, 1, device='meta')] * 2, 1, 2**50)", RuntimeError, str(2**50)),
    ("U(x, i, True)", TypeError, "kernel_size .*True"),
    ("U(x, i, 2, {2})", TypeError, r"stride .*\{2\}"),
    ("U(x, i, 2, 2, 0, {4, 5})", TypeError, r"output_size .*\{4, 5\}"),
    ("U(x, i, 2, 2, 0, b'44')", TypeError, "output_size .*b'44'"),
    ("U(x, i, 2, 2, 0, [4, True])", TypeError, r"output_size .*\[4, True\]"),
    ("U(x, i, 2, reduce=None)", ValueError, "reduce .*None"),
    ("U(x, i, 2, reduce=['last'])", ValueError, r"reduce .*\['last'\]"),
    ("U(x, i, 2, reduce='\\ud800')", ValueError, "reduce .*ud800"),
    ("U(x.bool(), i, 2, reduce='sum')", NotImplementedError, "Bool"),
    ("U(x.to(torch.float8_e5m2), i, 2, reduce='sum')", NotImplementedError, "Float8_e5m2"),
    ("maxunpool_cuda.MaxUnpool2d(2, reduce='amax')", ValueError, "'amax'"),
    ("maxunpool_cuda.MaxPool2d(2, index_dtype='int64')", ValueError, "'int64'"),
    ("P(y, 2, 2**63 - 1, ceil_mode=True)", RuntimeError, str(2**63 - 1)),
    ("P(y.new_empty(0, *[2**20] * 3), 2)", RuntimeError, str(2**20)),
    ("P(y, 2**40, 1, 2**39, **byte)", ValueError, f"256 .*{2**40}"),
    ("P(y[..., :1, :1].expand(1, 1, 2**16, 2**15), 2, **int32)", ValueError, str(2**16)),
    ("P(y, 2, index_dtype=torch.int16)", ValueError, "torch.int16"),
    ("P(y, 2, index_dtype=None)", ValueError, "None"),
    ("V(y, 2, index_dtype=torch.float32)", ValueError, "torch.float32"),
    ("V(y, 2, index_dtype='uint8')", ValueError, "'uint8'"),
    ("A(y, 2, index_dtype=torch.uint8)", ValueError, "no offsets, but got torch.uint8"),
    ("maxunpool_cuda.AdaptiveMaxPool2d(2, index_dtype=torch.uint8)", ValueError, "torch.uint8"),
    ("A(x.new_empty(1, 2**31, 1, device='meta'), 1, **int32)", ValueError, str(2**31)),
]
GRAPHS = {
    "vmap": "torch.vmap(lambda x, i, o, y: %s)(x[None], i[None], o[None], y[None])",
    "compiled": "torch.compile(lambda x, i, o, y: %s, backend='aot_eager')(x, i, o, y)",
}
NAMING = r"(?i)^(adaptive_?)?max_?(un)?pool(\dd)?: expected .*(%s)"  # the call and the values


# Calls of operators with numbers that PyTorch refuses, in its own words, to hand to a kernel.
OPERATORS_REFUSE: list[tuple[str, type[Exception]]] = [
    ("max_pool(y, [-2**63] * 2, [2] * 2, [0] * 2, [1] * 2, False, torch.int64)", RuntimeError),
    ("max_unpool(x, i, [4] * 2, [2] * 2, [2] * 2, [-2**63] * 2, 'last')", RuntimeError),
    ("max_unpool(x, i, [-2**63] * 2, [2] * 2, [2] * 2, [0] * 2, 'last')", ValueError),
]


def evaluate(expression: str, device: str = "cpu", dims: int = 2, functions: Any = F) -> Any:
    x, y = (torch.rand(1, 1, *[size] * dims, device=device) for size in (2, 8))
    i = torch.arange(0, 2 * x.numel(), 2, device=device).reshape(x.shape)
    names = {
        "torch": torch,
        "maxunpool_cuda": maxunpool_cuda,
        "U": getattr(functions, f"max_unpool{dims}d"),
        # Without indices, torch.nn's 1d has another kernel, with other errors.
        "P": partial(getattr(functions, f"max_pool{dims}d"), return_indices=True),
        "V": getattr(functions, f"max_pool{dims}d"),
        "A": getattr(functions, f"adaptive_max_pool{dims}d"),
        "byte": {"return_indices": True, "index_dtype": torch.uint8},
        "int32": {"return_indices": True, "index_dtype": torch.int32},
    }
    return eval(expression, {**names, "x": x, "i": i, "o": torch.zeros_like(i).byte(), "y": y})


@pytest.mark.parametrize(("expression", "exception", "values"), REFUSED_HERE)
def test_bad_calls(device: str, expression: str, exception: type[Exception], values: str) -> None:
    with pytest.raises(exception, match=NAMING % values) as caught:
        evaluate(expression, device)
    assert caught.type is exception


@pytest.mark.parametrize(("expression", "exception"), OPERATORS_REFUSE)
def test_operators_name_huge_numbers(expression: str, exception: type[Exception]) -> None:
    with pytest.raises(exception, match=NAMING % f"-{2**63}"):
        evaluate(f"torch.ops.maxunpool_cuda.{expression}")


# Tensors that are not dense. A name begins with the word of the message.
NOT_DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": Tensor.to_sparse,
    "sparse_csr": Tensor.to_sparse_csr,
    "nested": lambda t: torch.nested.nested_tensor([t[0]]),
    "nested, jagged": lambda t: torch.nested.nested_tensor([t[0]], layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.5, 0, torch.quint8),
    "mkldnn": Tensor.to_mkldnn,
}


@pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|Sparse|sparse|nested)")
@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_tensors_that_are_not_dense(kind: str, dims: int) -> None:
    """The type is torch.nn's, and the message one line, for inputs and for indices."""
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no mkldnn tensors")
    x = torch.rand(1, 2, *[2] * dims)
    indices, changed = torch.zeros(x.shape, dtype=torch.int64), NOT_DENSE[kind](x)
    word = kind.split(",")[0]
    pool, adaptive, unpool = (
        getattr(F, f"{name}{dims}d") for name in ("max_pool", "adaptive_max_pool", "max_unpool")
    )
    calls = [
        ("input", lambda: unpool(changed, indices, 2)),
        ("indices", lambda: unpool(x, changed, 2)),
    ]
    if kind not in ("quantized", "mkldnn"):  # torch.nn pools these
        calls += [("input", lambda: pool(changed, 2)), ("input", lambda: adaptive(changed, 2))]
    for argument, call in calls:
        with pytest.raises(NotImplementedError) as caught:
            call()
        wanted = rf"\w+{dims}d: expected {argument} to be a dense tensor but got a {word} tensor"
        assert re.fullmatch(wanted, str(caught.value)), caught.value


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("expression", "exception", "values"), SAMPLE)
def test_bad_calls_in_graphs(
    device: str, expression: str, exception: type[Exception], values: str, graph: str
) -> None:
    # Dynamo makes a RuntimeError of an operator's ValueError.
    with pytest.raises((RuntimeError, exception), match=f"expected .*({values})"):
        evaluate(GRAPHS[graph] % expression, device)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("expression", "values"), REFUSED_BY_TORCH.items())
def test_bad_calls_raise_what_torch_raises(expression: str, values: str, dims: int) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        evaluate(expression, dims=dims, functions=torch.nn.functional)
    with pytest.raises(theirs.type, match=NAMING % values) as ours:
        evaluate(expression, dims=dims)
    assert ours.type is theirs.type, theirs.value


def test_the_largest_window_that_uint8_counts(device: str) -> None:
    y = torch.arange(64.0, device=device).reshape(1, 1, 8, 8)  # every window has the last element
    pooled, offsets = F.max_pool2d(y, 16, 1, 8, return_indices=True, index_dtype=torch.uint8)
    assert offsets.flatten()[0] == 255
    assert F.max_unpool2d(pooled, offsets, 16, 1, 8).sum() == 63


@pytest.mark.parametrize("operator", OPERATORS)
def test_cpu_tensors_for_cuda_kernels(operator: str, rng: Random) -> None:
    """The error depends on whether this build has such kernels."""
    exception, words = NotImplementedError, "FORCE_CUDA=1 pip install"
    if maxunpool_cuda.build_info()["cuda"]:
        exception, words = RuntimeError, "expected CUDA tensors but got tensors on cpu"
    call, keys = draw(rng, operator), torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(exception, match=words):
        call.operator.redispatch(keys, *call.tensors, *call.arguments)


STRANGE: tuple[Any, ...] = (
    *(0, -1, True, 2.5, math.nan, 2**40, -(2**40), 2**62, 2**63, 2**64, -(2**63), [2**62]),
    *(None, "max", b"2", object(), torch.int64, torch.tensor(2), torch.tensor([2.5, 2.5])),
    *((), [], [[2, 2]], (2, None), {2: 2}, {2, 3}, range(2), torch.Size([2, 2])),
)


def strange(rng: Random) -> Any:
    """An argument that is probably wrong."""
    sizes = tuple(rng.randint(-2, 5) for _ in range(rng.randint(1, 5)))
    return rng.choice((*STRANGE, sizes, sizes, list(sizes)))


# Some are impossible for some tensors, and raise errors.
CHANGES: tuple[Callable[[Random, Tensor], Any], ...] = (
    lambda rng, t: t.to(rng.choice((torch.int16, torch.uint8, torch.bool, torch.bfloat16))),
    lambda rng, t: t + rng.choice((1, -1, 2**31, 2**32, -(2**40), 2**62)),
    lambda rng, t: t[(slice(None),) * rng.randrange(t.dim()) + (rng.choice((0, slice(0, -1))),)],
    lambda rng, t: t.movedim(0, -1),
    lambda rng, t: t.expand(2, *t.shape),
    lambda rng, t: rng.choice((t.to("meta"), t.to_sparse(), t.reshape(-1)[0], t.numpy())),
    lambda rng, t: t.flip(-1).conj(),
    lambda rng, t: torch.as_strided(t, t.shape, [0] * t.dim()),
    lambda rng, t: torch.nested.nested_tensor([t, t]),
    lambda rng, t: strange(rng),
)


def outcome(rng: Random, device: str) -> str:
    """Make one call. Returns "right value", "value" or the name of the exception."""
    call = draw(rng, rng.choice(OPERATORS), most_cells=12, longest=6).moved(device)
    tensors: list[Any] = [*call.tensors]
    arguments = [strange(rng) if rng.random() < 0.09 else each for each in call.arguments]
    try:
        tensors = [rng.choice(CHANGES)(rng, t) if rng.random() < 0.15 else t for t in tensors]
        call = replace(call, tensors=tuple(tensors), arguments=tuple(arguments))
        results = leaves(rng.choice((call.on, call.function))(*tensors))
    except Exception as error:
        return type(error).__name__
    plain = all(isinstance(each, tuple) and len(each) == call.dims for each in arguments[:4])
    plain = plain and isinstance(arguments[-1], (str, torch.dtype))
    if not plain or results[0].is_meta or results[0].numel() == 0:
        return "value"  # which the reference does not tell
    call.compare(results)
    return "right value"


@pytest.mark.sanitized
@pytest.mark.filterwarnings("ignore")
def test_random_arguments(device: str, rng: Random) -> None:
    """Most are wrong. A call gives the reference's value or an exception, and never crashes."""
    count = scaled(4000)
    outcomes = Counter(outcome(rng, device) for _ in range(count))
    assert outcomes["right value"] > count / 10, outcomes
    for name in ("RuntimeError", "TypeError", "ValueError"):
        assert outcomes[name] > count / 40, outcomes
