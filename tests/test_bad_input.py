# SPDX-License-Identifier: BSD-3-Clause
"""Bad input: exceptions of the types that torch.nn raises, and messages that name the values."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from cases import OPERATORS, Call, draw, scaled
from conftest import needs_library
from failures import check_each
from torch import Tensor
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda
import maxunpool_cuda.functional as F


class Functions(NamedTuple):
    """The functions of a module for tensors of some number of dimensions."""

    unpool: Callable[..., Any]
    pool: Callable[..., Any]  # returns indices
    pool_values: Callable[..., Any]  # does not: torch.nn's 1d has another kernel, with other errors
    adaptive: Callable[..., Any]


class Tensors(NamedTuple):
    """Right input for the functions, of which a call makes bad input."""

    x: Tensor  # 2 values in every dimension, to unpool with kernel_size=2
    indices: Tensor  # of x, flat
    offsets: Tensor  # of x, in the window
    image: Tensor  # 8 values in every dimension, to pool


def functions_of(module: Any, dims: int = 2) -> Functions:
    pool = getattr(module, f"max_pool{dims}d")
    return Functions(
        unpool=getattr(module, f"max_unpool{dims}d"),
        pool=partial(pool, return_indices=True),
        pool_values=pool,
        adaptive=getattr(module, f"adaptive_max_pool{dims}d"),
    )


def tensors_of(dims: int = 2, device: str = "cpu") -> Tensors:
    x, image = (torch.rand(1, 1, *[size] * dims, device=device) for size in (2, 8))
    indices = torch.arange(0, 2 * x.numel(), 2, device=device).reshape(x.shape)
    return Tensors(x=x, indices=indices, offsets=torch.zeros_like(indices).byte(), image=image)


BadCall = Callable[[Functions, Tensors], Any]
UINT8 = {"index_dtype": torch.uint8}
INT32 = {"index_dtype": torch.int32}
# The beginning of each message: the function or module, and words that lead to the values.
NAMING = r"(?i)^(adaptive_?)?max_?(un)?pool(\dd)?: expected .*(%s)"


def every(number: int) -> str:
    """A pattern of a list of one number, as often as there are dimensions."""
    return rf"\[{number}(, {number})*\]"


# Format: (id, a pattern of the value in its place in the message, a call that raises).
# torch.nn refuses these with the same type of exception, in one, two and three dimensions.
# test_torch_nn.py has all forms of windows, in two dimensions.
REFUSED_BY_TORCH = [
    pytest.param(call, values, id=name)
    for name, values, call in (
        (
            "index too large",
            r"but got 100 at position 0 of plane 0 \(Found an invalid max index: 100; ",
            lambda f, t: f.unpool(t.x, t.indices + 100, 2),
        ),
        ("int16 indices", "but got Short$", lambda f, t: f.unpool(t.x, t.indices.short(), 2)),
        (
            "other shape of indices",
            r"the input.s shape, \[1, 1, 2.*\] .*, but got \[1, 1, (2, )*1\]$",
            lambda f, t: f.unpool(t.x, t.indices[..., :1], 2),
        ),
        (
            "other device of indices",
            "but got cpu and meta$",
            lambda f, t: f.unpool(t.x, t.indices.to("meta"), 2),
        ),
        (
            "no channels",
            r"but got shape \[2(, 2)*\]$",
            lambda f, t: f.unpool(t.x[0, 0], t.indices[0, 0], 2),
        ),
        (
            "zero channels",
            r"but got shape \[1, 0(, 2)*\]$",
            lambda f, t: f.unpool(t.x[:, :0], t.indices[:, :0], 2),
        ),
        (
            "output_size too large",
            f"output_size .* but got {every(6)} for stride={every(2)}$",
            lambda f, t: f.unpool(t.x, t.indices, 2, output_size=[6] * t.x.dim()),
        ),
        (
            "output_size too small",
            f"output_size .* but got {every(2)} for stride={every(2)}$",
            lambda f, t: f.unpool(t.x, t.indices, 2, output_size=[2] * t.x.dim()),
        ),
        (
            "empty output_size",
            r"output_size .* but got \[\]$",
            lambda f, t: f.unpool(t.x, t.indices, 2, output_size=[]),
        ),
        (
            "output_size of floats",
            r"output_size .* but got \[4\.0(, 4\.0)*\]$",
            lambda f, t: f.unpool(t.x, t.indices, 2, output_size=[4.0] * t.x.dim()),
        ),
        (
            "output_size is an int",
            "output_size .* but got 4$",
            lambda f, t: f.unpool(t.x, t.indices, 2, output_size=4),
        ),
        (
            "output_size is a tensor",
            r"output_size .* but got tensor\(4\)$",
            lambda f, t: f.unpool(t.x, t.indices, 2, output_size=torch.tensor(4)),
        ),
        (
            "stride overflows",
            f"but got .*stride={every(2**62)}, padding",
            lambda f, t: f.unpool(t.x, t.indices, 2, 2**62),
        ),
        (
            "padding of a whole window",
            f"but got .*padding={every(2)}, dilation",
            lambda f, t: f.pool(t.image, 2, 2, 2),
        ),
        (
            "dilation is a bool",
            "dilation .* but got True$",
            lambda f, t: f.pool(t.image, 2, 2, 0, True),
        ),
        ("stride is a bool", "stride .* but got True$", lambda f, t: f.pool(t.image, 2, True)),
        (
            "kernel_size of bools",
            r"kernel_size .* but got \[True\]$",
            lambda f, t: f.pool(t.image, [True]),
        ),
        (
            "kernel_size is a set",
            r"kernel_size .* but got \{2\}$",
            lambda f, t: f.pool(t.image, {2}),
        ),
        (
            "kernel_size is a dict",
            r"kernel_size .* but got \{2: 1\}$",
            lambda f, t: f.pool(t.image, {2: 1}),
        ),
        (
            "kernel_size is bytes",
            "kernel_size .* but got b'22'$",
            lambda f, t: f.pool(t.image, b"22"),
        ),
        (
            "kernel_size is the smallest int",
            f"but got kernel_size={every(-(2**63))}, stride",
            lambda f, t: f.pool(t.image, -(2**63)),
        ),
        (
            "stride is very negative",
            f"but got .*stride={every(-(2**62) - 1)}, padding",
            lambda f, t: f.pool(t.image, 2, -(2**62) - 1),
        ),
        (
            "kernel_size larger than the image",
            f"but got .*kernel_size={every(9)}, stride",
            lambda f, t: f.pool(t.image, 9),
        ),
        ("pool of bools", "but got Bool$", lambda f, t: f.pool(t.image.bool(), 2)),
        (
            "pool of complex numbers",
            "but got ComplexFloat$",
            lambda f, t: f.pool(t.image * 1j, 2),
        ),
        (
            "ceil_mode is an int",
            "ceil_mode .* but got 1$",
            lambda f, t: f.pool(t.image, 2, ceil_mode=1),
        ),
        (
            "a dimension more",
            r"but got shape \[1, 1, 1(, 8)+\]$",
            lambda f, t: f.pool(t.image[None], 2),
        ),
        (
            "kernel_size overflows",
            f"but got kernel_size={every(2**62)}, .*padding={every(2**61)}",
            lambda f, t: f.pool(t.image, 2**62, 1, 2**61),
        ),
        (
            "dilation overflows",
            f"but got .*dilation={every(2**63 - 1)}$",
            lambda f, t: f.pool(t.image, 3, 1, 1, 2**63 - 1),
        ),
    )
]


def refused(name: str, exception: type[Exception], values: str, call: BadCall) -> Any:
    """A row of the tables below."""
    return pytest.param(call, exception, values, id=name)


# torch.nn accepts or lacks these. SAMPLE is also compiled and called under vmap, which take longer.
SAMPLE = [
    refused(
        "negative int32 index",
        RuntimeError,
        "but got -1 at position 0 of plane 0 ",
        lambda f, t: f.unpool(t.x, (t.indices - 1).int(), 2),
    ),
    refused(
        "offset beyond the window",
        RuntimeError,
        # All four are out of it.
        r"but got 4, an offset in its window, at position [0-3] of plane 0 ",
        lambda f, t: f.unpool(t.x, t.offsets + 4, 2),
    ),
    refused(
        "window of more than 256 offsets",
        ValueError,
        r"at most 256 .* but got kernel_size=\[17, 17\], .*; use int32",
        lambda f, t: f.unpool(t.x, t.offsets, 17),
    ),
    refused(
        "negative padding",
        RuntimeError,
        r"padding .* but got .*padding=\[-1, -1\]",
        lambda f, t: f.unpool(t.x, t.indices, 2, 2, -1),
    ),
    refused(
        "too few dimensions",
        RuntimeError,
        r"but got shape \[2, 2\]",
        lambda f, t: f.unpool(t.x[0, 0], t.indices[0, 0], 2),
    ),
    refused(
        "another reduce",
        ValueError,
        "reduce .* but got '?max'?",
        lambda f, t: f.unpool(t.x, t.indices, 2, reduce="max"),
    ),
    refused(
        "output_size too large in the columns",
        ValueError,
        r"output_size .* but got \[7, 4, 9\] for stride=\[2, 2\]",
        lambda f, t: f.unpool(t.x[0], t.indices[0], 2, output_size=[7, 4, 9]),
    ),
    refused(
        "dilated windows for offsets",
        ValueError,
        r"no dilation, .* but got .*dilation=\[1, 2\]; use int32",
        lambda f, t: f.pool(t.image, 2, 2, 0, (1, 2), **UINT8),
    ),
]
REFUSED_HERE = [
    *SAMPLE,
    refused(
        "input is a list",
        TypeError,
        "input to be a Tensor but got list$",
        lambda f, t: f.unpool([1.0], t.indices, 2),
    ),
    refused(
        "no indices",
        TypeError,
        "indices to be a Tensor but got NoneType$",
        lambda f, t: f.unpool(t.x, None, 2),
    ),
    refused(
        "kernel_size is zero",
        RuntimeError,
        r"but got kernel_size=\[0, 0\], stride",
        lambda f, t: f.unpool(t.x, t.indices, 0),
    ),
    refused(
        "nothing but padding",
        ValueError,
        r"output_size.* but got \[0, 0\] for kernel_size=\[2, 2\], .*padding=\[2, 2\]$",
        lambda f, t: f.unpool(t.x[:0], t.indices[:0], 2, 2, 2),
    ),
    refused(
        "kernel_size of three",
        RuntimeError,
        r"kernel_size .* but got \(2, 2, 2\)$",
        lambda f, t: f.unpool(t.x, t.indices, (2, 2, 2)),
    ),
    refused(
        "unpooled shape overflows",
        RuntimeError,
        rf"but got an unpooled shape \[1, 1, {2**32}, {2**32}\]",
        lambda f, t: f.unpool(t.x, t.indices, 2**31),
    ),
    refused(
        "kernel_size of more than 64 bits",
        TypeError,
        rf"kernel_size .* but got \({2**64}, {2**64}\)$",
        lambda f, t: f.unpool(t.x, t.indices, 2**64),
    ),
    refused(
        "stride of 64 bits",
        TypeError,
        rf"stride .* but got \({2**63}, {2**63}\)$",
        lambda f, t: f.unpool(t.x, t.indices, 2, 2**63),
    ),
    refused(
        "kernel_size is the smallest int",
        RuntimeError,
        f"but got kernel_size={every(-(2**63))}, stride={every(-(2**63))}",
        lambda f, t: f.unpool(t.x, t.indices, -(2**63)),
    ),
    refused(
        "padding is the smallest int",
        RuntimeError,
        f"but got .*padding={every(-(2**63))}$",
        lambda f, t: f.unpool(t.x, t.indices, 2, 2, -(2**63)),
    ),
    *(
        refused(
            f"padding of 2**{bits} overflows",
            RuntimeError,
            f"do not overflow but got .*padding={every(2**bits)}$",
            lambda f, t, bits=bits: f.unpool(t.x, t.indices, 2, 2, 2**bits),
        )
        for bits in (61, 62)
    ),
    refused(
        "padding leaves nothing",
        ValueError,
        f"output_size.* but got {every(4 - 2**60)} for .*padding={every(2**59)}$",
        lambda f, t: f.unpool(t.x, t.indices, 2, 2, 2**59),
    ),
    refused(
        "stride is zero",
        RuntimeError,
        r"but got .*stride=\[0, 0\], padding",
        lambda f, t: f.unpool(t.x, t.indices, 2, 0, 0, [4, 4]),
    ),
    refused(
        "kernel_size is the smallest int, with output_size",
        RuntimeError,
        rf"but got kernel_size={every(-(2**63))}, stride=\[2, 2\]",
        lambda f, t: f.unpool(t.x, t.indices, -(2**63), 2, 0, [4, 4]),
    ),
    refused(
        "default output_size overflows",
        RuntimeError,
        rf"but got output_size=.*stride=\({2**50}, {2**50}\), padding",
        lambda f, t: f.unpool(*[t.x.new_empty(1, 2**20, 1, device="meta")] * 2, 1, 2**50),
    ),
    refused(
        "kernel_size is a bool",
        TypeError,
        "kernel_size .* but got True$",
        lambda f, t: f.unpool(t.x, t.indices, True),
    ),
    refused(
        "stride is a set",
        TypeError,
        r"stride .* but got \{2\}$",
        lambda f, t: f.unpool(t.x, t.indices, 2, {2}),
    ),
    refused(
        "output_size is a set",
        TypeError,
        r"output_size .* but got \{4, 5\}$",
        lambda f, t: f.unpool(t.x, t.indices, 2, 2, 0, {4, 5}),
    ),
    refused(
        "output_size is bytes",
        TypeError,
        "output_size .* but got b'44'$",
        lambda f, t: f.unpool(t.x, t.indices, 2, 2, 0, b"44"),
    ),
    refused(
        "output_size with a bool",
        TypeError,
        r"output_size .* but got \[4, True\]$",
        lambda f, t: f.unpool(t.x, t.indices, 2, 2, 0, [4, True]),
    ),
    refused(
        "reduce is None",
        ValueError,
        "reduce .* but got None$",
        lambda f, t: f.unpool(t.x, t.indices, 2, reduce=None),
    ),
    refused(
        "reduce is a list",
        ValueError,
        r"reduce .* but got \['last'\]$",
        lambda f, t: f.unpool(t.x, t.indices, 2, reduce=["last"]),
    ),
    refused(
        "reduce is no text",
        ValueError,
        r"reduce .* but got '\\ud800'$",
        lambda f, t: f.unpool(t.x, t.indices, 2, reduce="\ud800"),
    ),
    refused(
        "a sum of bools",
        NotImplementedError,
        "for reduce='sum' but got Bool$",
        lambda f, t: f.unpool(t.x.bool(), t.indices, 2, reduce="sum"),
    ),
    refused(
        "a sum of float8",
        NotImplementedError,
        "for reduce='sum' but got Float8_e5m2$",
        lambda f, t: f.unpool(t.x.to(torch.float8_e5m2), t.indices, 2, reduce="sum"),
    ),
    refused(
        "reduce of a module",
        ValueError,
        "reduce .* but got 'amax'$",
        lambda f, t: maxunpool_cuda.MaxUnpool2d(2, reduce="amax"),
    ),
    refused(
        "index_dtype of a module",
        ValueError,
        "index_dtype .* but got 'int64'$",
        lambda f, t: maxunpool_cuda.MaxPool2d(2, index_dtype="int64"),
    ),
    refused(
        "stride overflows in ceil mode",
        RuntimeError,
        f"but got .*stride={every(2**63 - 1)}, padding",
        lambda f, t: f.pool(t.image, 2, 2**63 - 1, ceil_mode=True),
    ),
    refused(
        "an empty batch of huge images",
        RuntimeError,
        rf"but got an unpooled shape \[0, {2**20}, {2**20}, {2**20}\]",
        lambda f, t: f.pool(t.image.new_empty(0, *[2**20] * 3), 2),
    ),
    refused(
        "a window of too many offsets",
        ValueError,
        f"at most 256 .* but got kernel_size={every(2**40)}, .*; use int32$",
        lambda f, t: f.pool(t.image, 2**40, 1, 2**39, **UINT8),
    ),
    refused(
        "an image too large for int32",
        ValueError,
        rf"int32 indices but got spatial sizes \[{2**16}, {2**15}\]; use int64$",
        lambda f, t: f.pool(t.image[..., :1, :1].expand(1, 1, 2**16, 2**15), 2, **INT32),
    ),
    refused(
        "index_dtype is int16",
        ValueError,
        "index_dtype .* but got torch.int16$",
        lambda f, t: f.pool(t.image, 2, index_dtype=torch.int16),
    ),
    refused(
        "index_dtype is None",
        ValueError,
        "index_dtype .* but got None$",
        lambda f, t: f.pool(t.image, 2, index_dtype=None),
    ),
    refused(
        "index_dtype is float32, without indices",
        ValueError,
        "index_dtype .* but got torch.float32$",
        lambda f, t: f.pool_values(t.image, 2, index_dtype=torch.float32),
    ),
    refused(
        "index_dtype is a word, without indices",
        ValueError,
        "index_dtype .* but got 'uint8'$",
        lambda f, t: f.pool_values(t.image, 2, index_dtype="uint8"),
    ),
    refused(
        "offsets of adaptive windows",
        ValueError,
        "index_dtype .* have no offsets, but got torch.uint8$",
        lambda f, t: f.adaptive(t.image, 2, index_dtype=torch.uint8),
    ),
    refused(
        "offsets of an adaptive module",
        ValueError,
        "index_dtype .* have no offsets, but got torch.uint8$",
        lambda f, t: maxunpool_cuda.AdaptiveMaxPool2d(2, index_dtype=torch.uint8),
    ),
    refused(
        "an adaptive image too large for int32",
        ValueError,
        rf"int32 indices but got spatial sizes \[{2**31}, 1\]; use int64$",
        lambda f, t: f.adaptive(
            t.x.new_empty(1, 2**31, 1, device="meta"), 1, return_indices=True, **INT32
        ),
    ),
]


def call_in_vmap(call: BadCall, functions: Functions, tensors: Tensors) -> Any:
    batches = Tensors(*(tensor[None] for tensor in tensors))
    return torch.vmap(lambda tensors: call(functions, tensors))(batches)


def call_compiled(call: BadCall, functions: Functions, tensors: Tensors) -> Any:
    compiled = torch.compile(lambda tensors: call(functions, tensors), backend="aot_eager")
    return compiled(tensors)


@pytest.mark.parametrize(("call", "exception", "values"), REFUSED_HERE)
def test_bad_calls(device: str, call: BadCall, exception: type[Exception], values: str) -> None:
    with pytest.raises(exception, match=NAMING % values) as caught:
        call(functions_of(F), tensors_of(device=device))
    assert caught.type is exception


# PyTorch would refuse these in its own words, if they were not checked before it gets them.
@pytest.mark.parametrize(
    ("call", "exception", "values"),
    [
        refused(
            "kernel_size of a pool",
            RuntimeError,
            f"but got kernel_size={every(-(2**63))}, stride",
            lambda ops, t: ops.max_pool(
                t.image, [-(2**63)] * 2, [2] * 2, [0] * 2, [1] * 2, False, torch.int64
            ),
        ),
        refused(
            "padding",
            RuntimeError,
            f"but got .*padding={every(-(2**63))}$",
            lambda ops, t: ops.max_unpool(
                t.x, t.indices, [4] * 2, [2] * 2, [2] * 2, [-(2**63)] * 2, "last"
            ),
        ),
        refused(
            "output_size",
            ValueError,
            f"output_size.* but got {every(-(2**63))} for kernel_size",
            lambda ops, t: ops.max_unpool(
                t.x, t.indices, [-(2**63)] * 2, [2] * 2, [2] * 2, [0] * 2, "last"
            ),
        ),
    ],
)
def test_operators_name_huge_numbers(
    call: Callable[[Any, Tensors], Any], exception: type[Exception], values: str
) -> None:
    with pytest.raises(exception, match=NAMING % values):
        call(torch.ops.maxunpool_cuda, tensors_of())


@pytest.mark.parametrize("missing", [0, 1])
def test_operators_name_a_missing_tensor(device: str, missing: int) -> None:
    tensors = [*tensors_of(device=device)[:2]]
    tensors[missing] = None
    with pytest.raises(TypeError, match=r"^maxunpool_cuda::max_unpool: .* tensors but got None$"):
        torch.ops.maxunpool_cuda.max_unpool(*tensors, [4] * 2, [2] * 2, [2] * 2, [0] * 2, "last")


# Tensors that are not dense. A name begins with the word of the message.
NOT_DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": Tensor.to_sparse,
    "sparse_csr": Tensor.to_sparse_csr,
    "nested": lambda t: torch.nested.nested_tensor([t[0]]),
    "nested, jagged": lambda t: torch.nested.nested_tensor([t[0]], layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.5, 0, torch.quint8),
    "mkldnn": Tensor.to_mkldnn,
}


def is_pooled_by_torch(kind: str) -> bool:
    """torch.nn's pooling takes these, and this package's hands them on."""
    return kind in ("quantized", "mkldnn")


NOT_DENSE_CALLS = [
    pytest.param(kind, function, argument, id=f"{kind} {argument} of {function}")
    for kind in NOT_DENSE
    for function, argument in (
        ("max_unpool", "input"),
        ("max_unpool", "indices"),
        ("max_pool", "input"),
        ("adaptive_max_pool", "input"),
    )
    if function == "max_unpool" or not is_pooled_by_torch(kind)
]


@pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|Sparse|sparse|nested)")
@pytest.mark.parametrize(("kind", "function", "argument"), NOT_DENSE_CALLS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_tensors_that_are_not_dense(kind: str, function: str, argument: str, dims: int) -> None:
    """The type is torch.nn's, and the message one line, for inputs and for indices."""
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no mkldnn tensors")
    x = torch.rand(1, 2, *[2] * dims)
    tensors = {"input": x}
    if function == "max_unpool":
        tensors["indices"] = torch.zeros(x.shape, dtype=torch.int64)
    tensors[argument] = NOT_DENSE[kind](x)
    word = kind.split(",")[0]
    # Adaptive pooling may name max_pool, which does its work.
    message = rf"\w+{dims}d: expected {argument} to be a dense tensor but got a {word} tensor"
    with pytest.raises(NotImplementedError, match=rf"\A{message}\Z"):
        getattr(F, f"{function}{dims}d")(*tensors.values(), 2)


@pytest.mark.parametrize("call_in_graph", [call_in_vmap, call_compiled])
@pytest.mark.parametrize(("call", "exception", "values"), SAMPLE)
def test_bad_calls_in_graphs(
    device: str,
    call: BadCall,
    exception: type[Exception],
    values: str,
    call_in_graph: Callable[[BadCall, Functions, Tensors], Any],
) -> None:
    # Dynamo makes a RuntimeError of an operator's ValueError.
    exceptions = (RuntimeError, exception) if call_in_graph is call_compiled else exception
    with pytest.raises(exceptions, match=f"expected .*({values})"):
        call_in_graph(call, functions_of(F), tensors_of(device=device))


class Unpool(torch.nn.Module):
    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        return F.max_unpool2d(x, indices, 2)


@needs_library
@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.11", reason="PyTorch 2.10 prints the error and goes on")
def test_a_call_of_a_package_that_does_not_fit(tmp_path: Path) -> None:
    """AOTInductor's code calls a kernel itself. It gives every error the same type."""
    x, indices = torch.rand(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    batch = {0: torch.export.Dim("batch", min=2, max=9)}
    with torch.no_grad():
        program = torch.export.export(Unpool(), (x, indices), dynamic_shapes=(batch, batch))
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{tmp_path}/m.pt2")
    compiled = torch._inductor.aoti_load_package(path)
    assert torch.equal(compiled(x, indices), Unpool()(x, indices))
    with pytest.raises(RuntimeError, match="max_unpool2d: expected indices of the input's shape"):
        compiled(x[:1], indices)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("call", "values"), REFUSED_BY_TORCH)
def test_bad_calls_raise_what_torch_raises(call: BadCall, values: str, dims: int) -> None:
    tensors = tensors_of(dims)
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        call(functions_of(torch.nn.functional, dims), tensors)
    with pytest.raises(theirs.type, match=NAMING % values) as ours:
        call(functions_of(F, dims), tensors)
    assert ours.type is theirs.type, theirs.value


def test_the_largest_window_that_uint8_counts(device: str) -> None:
    y = torch.arange(64.0, device=device).reshape(1, 1, 8, 8)  # every window has the last element
    pooled, offsets = F.max_pool2d(y, 16, 1, 8, return_indices=True, index_dtype=torch.uint8)
    assert offsets.flatten()[0] == 255
    assert F.max_unpool2d(pooled, offsets, 16, 1, 8).sum() == 63


LARGE = 2**25  # of a plane's sides: its float32 are 2^52 bytes, more than any machine addresses
WINDOW = {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0]}
TOO_LARGE = {  # calls of torch.ops of whose results, or copies of tensors, there is no memory
    "unpool": lambda ops, plane, cell: ops.max_unpool(
        cell, cell.long(), [LARGE, LARGE], **WINDOW, reduce="last"
    ),
    "gradient": lambda ops, plane, cell: ops.max_unpool_backward(
        plane, cell.long(), [LARGE, LARGE], **WINDOW, reduce="last"
    ),
    "pool": lambda ops, plane, cell: ops.max_pool(
        plane, [1, 1], [1, 1], [0, 0], [1, 1], False, torch.int64
    ),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("call", TOO_LARGE)
def test_too_little_memory_is_the_error_of_pytorch(call: str, inference: bool) -> None:
    plane, cell = torch.zeros(1, 1, 1, 1).expand(1, 1, LARGE, LARGE), torch.zeros(1, 1, 1, 1)
    with pytest.raises(RuntimeError) as theirs:
        torch.empty(1, 1, LARGE, LARGE)
    with torch.inference_mode(inference), pytest.raises(RuntimeError) as ours:
        TOO_LARGE[call](torch.ops.maxunpool_cuda, plane, cell)
    assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))


@pytest.mark.parametrize("operator", OPERATORS)
def test_cpu_tensors_for_cuda_kernels(operator: str, rng: Random) -> None:
    """In a build without such kernels, test_fallback.py calls those that are there instead."""
    if not maxunpool_cuda.build_info()["cuda"]:
        pytest.skip("this build has no CUDA kernels")
    call, keys = draw(rng, operator), torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="expected a call that a kernel can do"):
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


def outcome(call: Call, operator: Callable[..., Any]) -> str:
    """Make the call. Returns "right value", "value" or the name of the exception."""
    try:
        results = leaves(operator(*call.tensors))
    except Exception as error:
        return type(error).__name__
    *sizes, last = call.arguments
    is_plain = isinstance(last, (str, torch.dtype)) and all(
        isinstance(each, tuple) and len(each) == call.dims for each in sizes[:4]
    )
    if not is_plain or results[0].is_meta or results[0].numel() == 0:
        return "value"  # which the reference does not tell
    call.compare(results)
    return "right value"


@pytest.mark.sanitized
@pytest.mark.filterwarnings("ignore")
def test_random_arguments(device: str, rng: Random) -> None:
    """Most are wrong. A call gives the reference's value or an exception, and never crashes."""
    count, outcomes = scaled(4000), Counter[str]()

    def calls() -> Iterator[Call]:
        for _ in range(count):
            call = draw(rng, rng.choice(OPERATORS), most_cells=12, longest=6).moved(device)
            arguments = [strange(rng) if rng.random() < 0.09 else each for each in call.arguments]
            try:
                tensors = [
                    rng.choice(CHANGES)(rng, tensor) if rng.random() < 0.15 else tensor
                    for tensor in call.tensors
                ]
            except Exception:
                continue
            yield replace(call, tensors=tuple(tensors), arguments=tuple(arguments))

    def check(call: Call) -> None:
        by_torch_ops = lambda *tensors: call.operator(*tensors, *call.arguments)  # noqa: E731
        outcomes[outcome(call, rng.choice((by_torch_ops, call.function)))] += 1

    check_each(calls(), check)
    frequent = {"RuntimeError", "TypeError", "ValueError", "right value"}
    assert outcomes.keys() <= {*frequent, "NotImplementedError", "value"}, outcomes
    assert outcomes["right value"] > count / 10, outcomes
    assert all(outcomes[name] > count / 40 for name in frequent), outcomes
