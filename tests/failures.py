# SPDX-License-Identifier: BSD-3-Clause
"""What a failure says: how two tensors differ, which call was wrong, and the smallest of several.

``check_each(calls, check)`` runs a check on every call of cases.py. If it fails for 3 of 30, it
raises one error, which describes the smallest of these:

    3 of 30 failed. The smallest, with fewer images or channels:
      operator    max_unpool
      input       float32 (1, 3), contiguous, strides (3, 1)
      indices     int64 (1, 3), contiguous, strides (3, 1), kind 'maxima'
      arguments   output_size=(5,) kernel_size=(3,) stride=(1,) padding=(0,) reduce='last'
      named by    [0] = 1, [2] = 2
      error       output: 1 of 5 elements differ, the first is [0, 2]: expected 2 = 0x40000000 ...
      device      emulated
      launched    forward_last_slots<float, long><<<1, 8>>>
      again       MAXUNPOOL_SEED=0 pytest 'tests/test_operators.py::test_unusual_sizes[...]'
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import emulation
import pytest
import reference
import torch
from reference import Sizes, as_bytes
from torch import Tensor

if TYPE_CHECKING:
    from cases import Call

Facts = list[tuple[str, str]]  # names and texts: the lines of a description

# The device of the running test: cpu, cuda, emulated or fallback. Fixtures of conftest.py set it.
device = "cpu"
MOST = 12  # lines of an error, elements of a window, cells that share an index


class WrongResultError(AssertionError):
    """A result of a call is wrong.

    Attributes:
        at: the coordinates of the first element that differs from the reference's, if one does.
    """

    def __init__(self, text: str, at: Sizes | None = None) -> None:
        super().__init__(text)
        self.at = at


@dataclass(frozen=True, repr=False)
class Comparison:
    """Whether two tensors have the same bits. If not, it is false, and its text says how.

    So ``assert same(a, b)`` prints "assert 1 of 6 elements differ, the first is [0, 2]: ...".
    """

    difference: str = ""  # empty if there is none
    at: Sizes | None = None  # the first element that differs

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
    at = tuple(differ.nonzero()[0].tolist())
    numbers = f"expected {in_bits(expected[at])} but got {in_bits(result[at])}"
    count = f"{differ.sum()} of {differ.numel()} elements differ"
    return Comparison(f"{count}, the first is {[*at]}: {numbers}", at)


def in_bits(element: Tensor) -> str:
    """A tensor of one element as a number and as bits: ``1.5 = 0x3fc00000``."""
    bits = int.from_bytes(as_bytes(element).numpy().tobytes(), "little")
    return f"{in_digits(element)} = 0x{bits:0{2 * element.itemsize}x}"


def in_digits(element: Tensor) -> str:
    """A tensor of one element as a number, in as many digits as tell its dtype's numbers apart."""
    if not (element.is_floating_point() or element.is_complex()):
        return str(element.item())
    digits = 17 if element.dtype in (torch.float64, torch.complex128) else 9
    return f"{element.item():.{digits}g}"


@dataclass(frozen=True)
class Failure:
    """What a check raised for a case, and which kernels the emulated GPU had launched for it."""

    case: Any
    error: BaseException
    launched: list[str]

    def facts(self) -> Facts:
        """The case, the error, the device, its kernels, and how to run the test again."""
        launched = [("launched", each) for each in self.launched]
        error, place = ("error", text_of(self.error)), ("device", device)
        return [*self.case.facts(self.error), error, place, *launched, ("again", command_again())]


def check_each(cases: Iterable[Any], check: Callable[[Any], object]) -> None:
    """Run a check on every case. If it fails, raise one error: how often, and the smallest case.

    A case is a Call of cases.py, or has a size, facts and halves as a Call does.
    """
    __tracebackhide__ = True
    checked, failed = 0, 0
    smallest: Failure | None = None  # the others are not kept, as an error keeps its tensors
    for case in cases:
        checked += 1
        found = failure_of(case, check)
        failed += found is not None
        if found and (smallest is None or case.size < smallest.case.size):
            smallest = found
    assert checked > 0, "no case was checked"
    if smallest is None:
        return
    failure = shrunk(smallest, check)
    heading = f"{failed} of {checked} failed. The smallest"
    heading += ":" if failure is smallest else ", with fewer images or channels:"
    lines = [f"  {name:<11} {text}" for name, text in failure.facts()]
    cause = None if isinstance(failure.error, WrongResultError) else failure.error
    raise AssertionError("\n".join((heading, *lines))) from cause


def failure_of(case: Any, check: Callable[[Any], object]) -> Failure | None:
    """Run a check on a case. Returns what it raised, or None if the case passed."""
    emulation.forget_launches()
    try:
        check(case)
    except (Exception, pytest.fail.Exception) as error:  # the latter of a pytest.raises
        launched = dict.fromkeys(kernel(*each) for each in emulation.launches())  # each once
        return Failure(case, error, [*launched])
    return None


def shrunk(failure: Failure, check: Callable[[Any], object]) -> Failure:
    """A failure with fewer images or channels, or the same one if no half of its case fails.

    A half counts if its check raises an error of the same type. Halves are cut in turn.
    """
    for half in failure.case.halves():
        smaller = failure_of(half, check)
        if smaller and type(smaller.error) is type(failure.error):
            return shrunk(smaller, check)
    return failure


def kernel(signature: str, blocks: int, threads: int) -> str:
    """Its name, its template arguments and its grid: ``forward<float><<<3, 256>>>``."""
    name, closing, _ = signature.removeprefix("void ").partition(">(")
    name = re.sub(r"\b(maxunpool_cuda|emulated)::", "", name)
    return f"{name}{closing[:1]}<<<{blocks}, {threads}>>>"


def text_of(error: BaseException) -> str:
    """The type of an error and the first lines of its text, which are indented but for the first.

    pytest shows all of the error above its description: it is its cause.
    """
    is_result = isinstance(error, WrongResultError)
    text = str(error) if is_result else f"{type(error).__name__}: {error}"
    lines = [line for line in text.splitlines() if line.strip()]
    return ("\n" + " " * 14).join(first(lines))


def command_again() -> str:
    """The command that runs the current test again, with the same random inputs."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without "(call)"
    options = "--all " if os.environ["MAXUNPOOL_ALL"] == "1" else ""  # more random inputs
    return f"MAXUNPOOL_SEED={os.environ['MAXUNPOOL_SEED']} pytest {options}{shlex.quote(test)}"


def facts_of(call: Call, error: BaseException) -> Facts:
    """The first lines of the description of a call."""
    names = [argument.name for argument in call.operator._schema.arguments]
    facts = [("operator", call.name)]
    facts += [(name, placed(t, call.dims)) for name, t in zip(names, call.tensors, strict=False)]
    if call.kind:
        facts[-1] = (facts[-1][0], f"{facts[-1][1]}, kind {call.kind!r}")
    arguments = zip(names[len(call.tensors) :], call.arguments, strict=True)
    facts.append(("arguments", " ".join(f"{name}={value!r}" for name, value in arguments)))
    if call.error:
        facts.append(("must raise", call.error))
    if isinstance(error, WrongResultError) and error.at is not None:
        facts += origin(call, error.at)
    return facts


def placed(tensor: Tensor, dims: int) -> str:
    """Dtype, shape and place in memory of a tensor."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    offset = tensor.storage_offset()
    beginning = f" from element {offset} of the storage" if offset else ""
    return f"{dtype} {shape}, {layout_of(tensor, dims)}, strides {tensor.stride()}{beginning}"


def layout_of(tensor: Tensor, dims: int) -> str:
    """Which of cases.LAYOUTS gives a tensor such strides."""
    if tensor.is_contiguous():
        return "unaligned" if tensor.storage_offset() else "contiguous"
    format = {2: torch.channels_last, 3: torch.channels_last_3d}.get(dims)
    if format and tensor.dim() == dims + 2 and tensor.is_contiguous(memory_format=format):
        return "channels_last"
    return "strided"


def origin(call: Call, at: Sizes) -> Facts:
    """The inputs that the definition makes the element ``at`` of a result from.

    The lines ``window`` of a pooling, ``named by`` of an unpooling, ``index`` and ``named by`` of
    its gradient.
    """
    plane, place = at[: -call.dims], at[-call.dims :]
    geometry, values = call.geometry, call.tensors[0][plane]
    if call.name == "max_pool":
        dilation = geometry.dilation[: call.dims]
        windows = reference.windows(geometry.output, geometry.pooled, *geometry.window, dilation)
        cell = numbered(geometry.pooled)[place]
        positions, inside = (torch.from_numpy(table)[cell] for table in windows[:2])
        return [("window", listed(values, torch.isin(numbered(values.shape), positions[inside])))]
    positions = call.positions[plane]
    if call.name == "max_unpool":
        return [("named by", listed(values, positions == int(numbered(geometry.output)[place])))]
    named = int(positions[place])
    return [
        ("index", listed(values, numbered(values.shape) == named)),
        ("named by", listed(positions, positions == named)),
    ]


def numbered(sizes: Sizes) -> Tensor:
    """The flat position of each place in a plane."""
    return torch.arange(math.prod(sizes)).view(sizes)


def listed(plane: Tensor, mask: Tensor) -> str:
    """The elements of a plane where a mask is true: ``[0, 1] = 2.5, [1, 1] = 3``."""
    places = mask.nonzero().tolist()
    texts = first([f"{place} = {in_digits(plane[tuple(place)])}" for place in places])
    return ", ".join(texts) or "nothing"


def first(texts: list[str]) -> list[str]:
    """The first of these texts, and how many more there are."""
    more = [f"... ({len(texts) - MOST} more)"] if len(texts) > MOST else []
    return [*texts[:MOST], *more]
