# SPDX-License-Identifier: BSD-3-Clause
"""What a failure says: how two tensors differ, which call was wrong, and the smallest of several.

``check_each(calls, check)`` runs a check on every call of cases.py. If it fails for 3 of 30, it
raises one error, which describes the smallest of these:

    3 of 30 failed. The smallest, with fewer images or channels:
      operator    max_unpool
      input       float32 (1, 3), contiguous, strides (3, 1)
      indices     int64 (1, 3), contiguous, strides (3, 1)
      arguments   output_size=(5,) kernel_size=(3,) stride=(1,) padding=(0,) reduce='last'
      kind        maxima
      error       AssertionError: output: 1 of 5 elements differ, the first is [0, 2]: ...
      device      emulated
      launched    <<<1, 8>>> void emulated::slots<unsigned int, (emulated::Order)0>
      again       MAXUNPOOL_SEED=0 pytest 'tests/test_operators.py::test_unusual_sizes[...]'
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import emulation
import pytest
import torch
from reference import as_bytes
from torch import Tensor

if TYPE_CHECKING:
    from cases import Call

# The device of the running test, as the fixture `device` of conftest.py names it.
device = "cpu"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Whether two tensors have the same bits. If not, it is false, and its text says how.

    So ``assert same(a, b)`` prints "assert 1 of 6 elements differ, the first is [0, 2]: ...".
    """

    difference: str = ""  # empty if there is none

    def __bool__(self) -> bool:
        return not self.difference

    def __repr__(self) -> str:
        return self.difference or "the same bits"


def same(result: Tensor, expected: Tensor) -> Comparison:
    """Compare shape, dtype and every bit, but not the strides."""
    for name in ("shape", "dtype"):
        got, wanted = getattr(result, name), getattr(expected, name)
        if got != wanted:
            return Comparison(f"expected {name} {wanted} but got {got}")
    shape = (*result.shape, result.itemsize)
    differ = (as_bytes(result) != as_bytes(expected)).view(shape).any(-1)
    if not differ.any():
        return Comparison()
    at = differ.nonzero()[0].tolist()
    numbers = f"expected {in_bits(expected[tuple(at)])} but got {in_bits(result[tuple(at)])}"
    count = f"{differ.sum()} of {differ.numel()} elements differ"
    return Comparison(f"{count}, the first is {at}: {numbers}")


def in_bits(element: Tensor) -> str:
    """A tensor of one element as a number and as bits: ``1.5 = 0x3fc00000``."""
    bits = int.from_bytes(as_bytes(element).numpy().tobytes(), "little")
    return f"{element.item()} = 0x{bits:0{2 * element.itemsize}x}"


@dataclass(frozen=True)
class Failure:
    """What a check raised for a call, and which kernels the emulated GPU had launched for it."""

    call: Call
    error: BaseException
    launched: list[tuple[str, int, int]]  # signatures, blocks and threads


def check_each(calls: Iterable[Call], check: Callable[[Call], object]) -> None:
    """Run a check on every call. If it fails, raise one error: how often, and the smallest call."""
    __tracebackhide__ = True
    checked, failed = 0, 0
    smallest: Failure | None = None  # the others are not kept: an error's traceback keeps tensors
    for call in calls:
        checked += 1
        found = failure_of(call, check)
        failed += found is not None
        if found and (smallest is None or call.size < smallest.call.size):
            smallest = found
    assert checked > 0, "no call was checked"
    if smallest is None:
        return
    failure = shrunk(smallest, check)
    heading = f"{failed} of {checked} failed. The smallest"
    heading += ":" if failure is smallest else ", with fewer images or channels:"
    # What an assertion says is in the description; of other errors the place is worth to know.
    cause = None if isinstance(failure.error, AssertionError) else failure.error
    raise AssertionError("\n".join((heading, *lines_of(failure)))) from cause


def failure_of(call: Call, check: Callable[[Call], object]) -> Failure | None:
    """Run a check on a call. Returns what it raised, or None if the call passed."""
    emulation.forget_launches()
    try:
        check(call)
    except (Exception, pytest.fail.Exception) as error:  # the latter of a pytest.raises
        return Failure(call, error, emulation.launches())
    return None


def shrunk(failure: Failure, check: Callable[[Call], object]) -> Failure:
    """A failure of the same type with the fewest images and channels that halving leads to."""
    for half in failure.call.halves():
        smaller = failure_of(half, check)
        if smaller and type(smaller.error) is type(failure.error):
            return shrunk(smaller, check)
    return failure


def lines_of(failure: Failure) -> list[str]:
    """The lines that describe it."""
    call, error = failure.call, failure.error
    names = [argument.name for argument in call.operator._schema.arguments]
    facts = [("operator", call.name)]
    for name, tensor in zip(names, call.tensors, strict=False):
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        layout = layout_of(tensor, call.dims)
        facts.append((name, f"{dtype} {shape}, {layout}, strides {tensor.stride()}"))
    arguments = zip(names[len(call.tensors) :], call.arguments, strict=True)
    facts.append(("arguments", " ".join(f"{name}={value!r}" for name, value in arguments)))
    facts += [("kind", call.kind), ("must raise", call.error)]
    facts.append(("error", f"{type(error).__name__}: {error}"))
    facts.append(("device", device))
    for signature, blocks, threads in dict.fromkeys(failure.launched):  # each once
        kernel = re.sub(r">\(.*", ">", signature)  # without its arguments
        facts.append(("launched", f"<<<{blocks}, {threads}>>> {kernel}"))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without "(call)"
    options = "--all " if os.environ["MAXUNPOOL_ALL"] == "1" else ""  # more random inputs
    command = f"MAXUNPOOL_SEED={os.environ['MAXUNPOOL_SEED']} pytest {options}{shlex.quote(test)}"
    facts.append(("again", command))
    return [f"  {name:<11} {text}" for name, text in facts if text]


def layout_of(tensor: Tensor, dims: int) -> str:
    """Which of cases.LAYOUTS gives a tensor such strides."""
    if tensor.is_contiguous():
        return "unaligned" if tensor.storage_offset() else "contiguous"
    format = {2: torch.channels_last, 3: torch.channels_last_3d}.get(dims)
    if format and tensor.dim() == dims + 2 and tensor.is_contiguous(memory_format=format):
        return "channels_last"
    return "strided"
