# SPDX-License-Identifier: BSD-3-Clause
"""What a failure says: how two tensors differ, which call was wrong, and the smallest of several.

Takes from cases.py its calls, and from reference.py the bytes of a tensor and the windows of a
geometry. ``check_each(calls, check)`` runs a check on every call. If it fails for 3 of 30, it
raises one error, which describes the smallest of these:

    3 of 30 failed. The smallest, with fewer images or channels:
      operator    max_unpool
      input       float32 (1, 3), contiguous, strides (3, 1)
      indices     int64 (1, 3), contiguous, strides (3, 1), kind 'maxima'
      arguments   output=(5,) kernel=(3,) stride=(1,) padding=(0,) reduce='last'
      named by    [0] = 1, [2] = 2
      error       output: 1 of 5 elements differs, the first is [0, 2]: expected 2 = 0x40000000 ...
      device      emulated
      launched    forward_last_slots<float, long><<<1, 8>>>
      again       MAXUNPOOL_SEED=0 pytest 'tests/test_operators.py::test_unusual_sizes[...]'

The calls come from ``cases.draw``, in 0.1 to 0.5 ms each. Hypothesis, which could make a call still
smaller, takes 1.5 to 2 ms to draw one (both measured on an x86-64 core), and draws others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import emulation
import numpy as np
import pytest
import reference
import torch
from reference import Sizes, as_bytes
from torch import Tensor

if TYPE_CHECKING:
    from cases import Call


class Case(Protocol):
    """What ``check_each`` checks, such as a Call of cases.py."""

    @property
    def size(self) -> int:
        """The number of elements of its tensors."""

    def facts(self, error: BaseException) -> list[tuple[str, str]]:
        """Names and texts that describe it, and where the error comes from."""

    def halves(self) -> Iterator[Any]:
        """The same case with fewer images or channels."""


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Named:
    """A case that is anything with a name. It is made no smaller."""

    name: str
    value: Any
    size: int = 0

    def facts(self, error: BaseException) -> list[tuple[str, str]]:
        return [("case", self.name)]

    def halves(self) -> Iterator[Named]:
        yield from ()


# The device of the running test: cpu, cuda, emulated or fallback. Fixtures of conftest.py set it.
device = "cpu"
# What a failing check raises. If a block under pytest.raises raises nothing, then pytest.raises
# raises pytest.fail.Exception, which is a BaseException.
ERRORS = (Exception, pytest.fail.Exception)
# The names of an operator's tensors, and of its results.
TENSORS = {
    "max_pool": ("input",),
    "max_unpool": ("input", "indices"),
    "max_unpool_backward": ("grad_output", "indices"),
}
RESULTS = {
    "max_pool": ("values", "indices"),
    "max_unpool": ("output",),
    "max_unpool_backward": ("grad_input",),
}
# Lines of an error that are shown. An assertion has its news in the first three: pytest.raises says
# what it expected, and an assert what was compared. gradcheck shows two Jacobian matrices.
MOST_LINES_OF_ASSERTIONS = 3
MOST_LINES = 40
MOST_LISTED = 12  # elements of a window, or cells that share an index: more are counted


class CallError(AssertionError):
    """Its text describes a call."""


class WrongResultError(AssertionError):
    """A result of a call is not the reference's.

    Attributes:
        name: which of RESULTS.
        at: the coordinates of the first element that differs, or None if shape or dtype does.
    """

    def __init__(self, name: str, comparison: Comparison) -> None:
        super().__init__(f"{name}: {comparison}")
        self.name = name
        self.at = comparison.at


@dataclass(frozen=True, repr=False)
class Comparison:
    """Whether two tensors have the same bits. If not, it is false, and its text says how.

    So ``assert same(a, b)`` prints "assert 1 of 6 elements differs, the first is [0, 2]: ...".
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
    got_bytes, wanted_bytes = as_bytes(result), as_bytes(expected)
    if torch.equal(got_bytes, wanted_bytes):
        return Comparison()
    each_element = (each.view(-1, result.itemsize) for each in (got_bytes, wanted_bytes))
    wrong = torch.ne(*each_element).any(1).nonzero().flatten()
    at = unraveled(int(wrong[0]), tuple(result.shape))
    elements = "1 element" if result.numel() == 1 else f"{result.numel()} elements"
    verb = "differs" if len(wrong) == 1 else "differ"
    numbers = f"expected {in_bits(expected[at])} but got {in_bits(result[at])}"
    text = f"{len(wrong)} of {elements} {verb}, the first is {[*at]}: {numbers}"
    return Comparison(text, at)


def unraveled(position: int, sizes: Sizes) -> Sizes:
    """The coordinates of a flat position."""
    return tuple(map(int, np.unravel_index(position, sizes)))


def in_bits(element: Tensor) -> str:
    """A tensor of one element as a number and as bits: ``1.5 = 0x3fc00000``."""
    bits = int.from_bytes(as_bytes(element).numpy().tobytes(), "little")
    return f"{in_digits(element)} = 0x{bits:0{2 * element.itemsize}x}"


def in_digits(element: Tensor) -> str:
    """A tensor of one element as a number, in as many digits as tell its dtype's numbers apart."""
    dtype = element.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return str(element.item())
    widest = torch.complex128 if dtype.is_complex else torch.float64
    digits = 17 if dtype in (torch.float64, torch.complex128) else 9
    return f"{element.detach().cpu().to(widest).item():.{digits}g}"


@dataclass(frozen=True)
class Failure(Generic[C]):
    """What a check raised for a case, and which kernels the emulated GPU had launched for it."""

    case: C
    error: BaseException
    launches: list[str]


def check_each(cases: Iterable[C], check: Callable[[C], object]) -> None:
    """Run a check on every case. If it fails, raise one error: how often, and the smallest case."""
    __tracebackhide__ = True
    checked, failed = 0, 0
    smallest: Failure[C] | None = None  # the others are not kept, as an error keeps its tensors
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
    lines = [*failure.case.facts(failure.error), *circumstances(failure, check)]
    table = [f"  {name:<11} {text}" for name, text in lines]
    cause = None if isinstance(failure.error, WrongResultError) else failure.error
    raise CallError("\n".join((heading, *table))) from cause


def failure_of(case: C, check: Callable[[C], object]) -> Failure[C] | None:
    """Run a check on a case. Returns what it raised, or None if the case passed."""
    emulation.forget_launches()
    try:
        check(case)
    except ERRORS as error:
        return Failure(case, error, launched())
    return None


def shrunk(failure: Failure[C], check: Callable[[C], object]) -> Failure[C]:
    """A failure with fewer images or channels, or the same one if no half of its case fails.

    A half counts if its check raises an error of the same type. Halves are cut in turn.
    """
    for half in failure.case.halves():
        smaller = failure_of(half, check)
        if smaller and type(smaller.error) is type(failure.error):
            return shrunk(smaller, check)
    return failure


def circumstances(failure: Failure[C], check: Callable[[C], object]) -> list[tuple[str, str]]:
    """The error, the device, its kernels, and how to run the test again."""
    first_line, *more_lines = lines_of(failure.error)
    launches = failure.launches
    if device == "cuda":
        launches = profiled(lambda: check(failure.case))
    return [
        ("error", first_line),
        *(("", line) for line in more_lines),
        ("device", device),
        *(("launched", each) for each in launches),
        ("again", command_again()),
    ]


def lines_of(error: BaseException) -> list[str]:
    """The type and the text of an error, without empty lines. The last says how many are left out.

    pytest shows all of the error above its description: it is the cause of the CallError.
    """
    text = str(error)
    if not isinstance(error, WrongResultError):
        text = f"{type(error).__name__}: {text}"
    lines = [line for line in text.split("\n") if line.strip()]
    most = MOST_LINES_OF_ASSERTIONS if isinstance(error, AssertionError) else MOST_LINES
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"... (lines left out: {len(lines) - most}; pytest shows all above)"]


def command_again() -> str:
    """The command that runs the current test again, with the same random inputs."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without "(call)"
    options = "--all " if os.environ["MAXUNPOOL_ALL"] == "1" else ""  # more random inputs
    return f"MAXUNPOOL_SEED={os.environ['MAXUNPOOL_SEED']} pytest {options}{shlex.quote(test)}"


def facts_of(call: Call, error: BaseException) -> list[tuple[str, str]]:
    """Names and texts that describe a call: the first lines of a description."""
    facts = [("operator", call.name)]
    for name, tensor in zip(TENSORS[call.name], call.tensors, strict=True):
        kind = f", kind {call.kind!r}" if name == "indices" and call.kind else ""
        facts.append((name, placed(tensor, call.dims) + kind))
    facts.append(("arguments", call.arguments_by_name()))
    if call.error:
        facts.append(("must raise", call.error))
    if isinstance(error, WrongResultError) and error.at is not None:
        facts += origin(call, error.at)
    return facts


def placed(tensor: Any, dims: int) -> str:
    """Dtype, shape and place in memory of a tensor."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return repr(tensor)  # a strange argument of test_bad_input.py
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


def origin(call: Call, at: Sizes) -> list[tuple[str, str]]:
    """The inputs that the definition makes the element ``at`` of a result from.

    The lines ``window`` of a pooling, ``named by`` of an unpooling, ``index`` and ``named by`` of
    its gradient.
    """
    plane, place = at[: -call.dims], at[-call.dims :]
    geometry = call.geometry
    values = call.tensors[0][plane]
    if call.name == "max_pool":
        return [("window", listed(values, window_of(call, place)))]
    positions = call.positions[plane]
    if call.name == "max_unpool":
        position = int(np.ravel_multi_index(place, geometry.output))
        return [("named by", listed(values, (positions == position).nonzero().tolist()))]
    position = int(positions[place])
    if not 0 <= position < values.numel():
        return [("index", f"{position}, out of bounds")]
    output = unraveled(position, geometry.output)
    cells = (positions == position).nonzero().tolist()
    return [("index", listed(values, [output])), ("named by", ", ".join(map(str, cells)))]


def window_of(call: Call, cell: Sizes) -> list[Sizes]:
    """The coordinates of the elements of a cell's window."""
    geometry = call.geometry
    positions, inside, _ = reference.windows(
        geometry.output, geometry.pooled, *geometry.window, geometry.dilation[: call.dims]
    )
    number = np.ravel_multi_index(cell, geometry.pooled)
    return [unraveled(n, geometry.output) for n in positions[number][inside[number]]]


def listed(plane: Tensor, places: Sequence[Sequence[int]]) -> str:
    """Elements of a plane: ``[0, 1] = 2.5, [1, 1] = 3``."""
    texts = [f"{[*place]} = {in_digits(plane[tuple(place)])}" for place in places[:MOST_LISTED]]
    more = len(places) - MOST_LISTED
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "") or "nothing"


def profiled(run: Callable[[], object]) -> list[str]:
    """The kernels that a GPU runs in a call, which is made again for that."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    # Nothing that goes wrong here hides the failure, as after an error the GPU may be unusable.
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):
        with torch.profiler.profile(activities=activities) as profile:
            with contextlib.suppress(*ERRORS):  # as before
                run()
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return launches_in(json.loads(path.read_text()))
    return ["what the profiler did not tell"]


def launches_in(trace: dict[str, Any]) -> list[str]:
    """The kernels of this package, with their grids, in what PyTorch's profiler exports."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return [
        launch(event["name"], event["args"]["grid"][0], event["args"]["block"][0])
        for event in sorted(kernels, key=lambda event: event["ts"])
        if "maxunpool_cuda::" in event["name"]
    ]


def launched() -> list[str]:
    """The kernels that the emulated GPU has launched since ``check_each`` began the current case.

    They are in the order of their launches, and as ``launch`` writes them.
    """
    return [launch(*each) for each in emulation.launches()]


def launch(signature: str, blocks: int, threads: int) -> str:
    """The kernel's name, its template arguments and its grid: ``forward<float><<<3, 256>>>``."""
    name, closing, _ = signature.removeprefix("void ").partition(">(")
    name = re.sub(r"\b(maxunpool_cuda|emulated)::", "", name)
    return f"{name}{closing[:1]}<<<{blocks}, {threads}>>>"
