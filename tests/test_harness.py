# SPDX-License-Identifier: BSD-3-Clause
"""What the tests themselves stand on: copies on a device, what a failure says, counts of tests."""

import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import emulation
import failures
import gpu_tests
import pytest
import test_library
import torch
from _pytest.assertion.rewrite import AssertionRewritingHook
from cases import (
    LAYOUTS,
    MOVABLE,
    OPERATORS,
    Call,
    Geometry,
    all_same,
    call_of,
    draw,
    geometry_of,
    laid_out,
    moved,
    random_bits,
)
from failures import CallError, Named, check_each, layout_of, same
from torch import Tensor

import maxunpool_cuda

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parent.parent


def place(tensor: Tensor) -> tuple[object, ...]:
    """Where the elements of a tensor lie in its storage."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def check_moved(tensor: Tensor, device: str) -> None:
    copy = moved(tensor, device)
    assert copy.device.type == device
    assert place(copy) == place(tensor)
    assert copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    if device == "meta" or tensor.numel() == 0:  # no tensor of these has an address
        return
    assert copy.data_ptr() != tensor.data_ptr()
    assert same(copy, tensor)
    # Vectors have 16 bytes.
    assert copy.data_ptr() % 16 == tensor.storage_offset() * tensor.itemsize % 16


@pytest.mark.parametrize("dtype", MOVABLE, ids=str)
@pytest.mark.parametrize("is_meta", [False, True], ids=["device", "meta"])
def test_a_moved_tensor_lies_in_memory_as_before(
    real_device: str, is_meta: bool, dtype: torch.dtype, rng: random.Random
) -> None:
    device = "meta" if is_meta else real_device
    values = random_bits(rng, (2, 8, 5, 3), dtype)
    tensors = {layout: laid_out(values, layout, dims=2) for layout in LAYOUTS}
    tensors["sliced"] = values[1:, ::3, 2:, 1]
    tensors["expanded"] = values[:, :1, :, :1].expand(values.shape)
    tensors["empty"] = values[:, 3:3]
    named = (Named(name, tensor) for name, tensor in tensors.items())
    check_each(named, lambda case: check_moved(case.value, device))


@pytest.mark.parametrize("is_meta", [False, True], ids=["device", "meta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_moved_call_lies_in_memory_as_before(
    real_device: str, is_meta: bool, operator: str, rng: random.Random
) -> None:
    def check(call: Call) -> None:
        for tensor in call.tensors:
            check_moved(tensor, "meta" if is_meta else real_device)

    check_each((draw(rng, operator) for _ in range(10)), check)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_unaligned_tensors_are_misaligned_where_they_are_moved(
    real_device: str, dtype: torch.dtype
) -> None:
    """By one element, so no vector of 16 bytes may be read there."""
    tensor = laid_out(torch.ones(2, 3, 4, 8).to(dtype), "unaligned", dims=2)
    assert moved(tensor, real_device).data_ptr() % 16 == dtype.itemsize


def test_strided_tensors_are_strided_where_they_are_moved(real_device: str) -> None:
    tensor = laid_out(torch.ones(2, 3, 4, 8), "strided", dims=2)
    assert moved(tensor, real_device).stride() == (192, 64, 16, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(2, requires_grad=True), id="has a gradient"),
        pytest.param(torch.ones(2, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.ones(2, dtype=torch.complex64).conj().imag, id="negated"),
        pytest.param(torch.nn.Parameter(torch.ones(2), requires_grad=False), id="subclass"),
    ],
)
def test_what_a_move_would_lose_is_refused(tensor: Tensor) -> None:
    with pytest.raises(AssertionError):
        moved(tensor, "cpu")


DIFFERENCES = [
    pytest.param(
        torch.tensor([[1.0, 2], [3, 4]]),
        torch.tensor([[1.0, -2], [3, 5]]),
        "2 of 4 elements differ, the first is [0, 1]: "
        "expected -2 = 0xc0000000 but got 2 = 0x40000000",
        id="float32",
    ),
    pytest.param(
        torch.tensor(0.0, dtype=torch.float64),
        torch.tensor(-0.0, dtype=torch.float64),
        "1 of 1 element differs, the first is []: "
        "expected -0 = 0x8000000000000000 but got 0 = 0x0000000000000000",
        id="zeros of float64",
    ),
    pytest.param(
        torch.tensor([0x7FC1], dtype=torch.uint16).view(torch.bfloat16),
        torch.tensor([0x7FC0], dtype=torch.uint16).view(torch.bfloat16),
        "1 of 1 element differs, the first is [0]: expected nan = 0x7fc0 but got nan = 0x7fc1",
        id="NaNs of bfloat16",
    ),
    pytest.param(
        torch.tensor([1 + 2j], dtype=torch.complex64),
        torch.tensor([1 + 1j], dtype=torch.complex64),
        "1 of 1 element differs, the first is [0]: "
        "expected 1+1j = 0x3f8000003f800000 but got 1+2j = 0x400000003f800000",
        id="complex64",
    ),
    pytest.param(
        torch.tensor([7, -1]),
        torch.tensor([7, 1]),
        "1 of 2 elements differs, the first is [1]: "
        "expected 1 = 0x0000000000000001 but got -1 = 0xffffffffffffffff",
        id="int64",
    ),
    pytest.param(
        torch.tensor([True]),
        torch.tensor([False]),
        "1 of 1 element differs, the first is [0]: expected False = 0x00 but got True = 0x01",
        id="bool",
    ),
    pytest.param(
        torch.ones(2, 1),
        torch.ones(2),
        "expected shape torch.Size([2]) but got torch.Size([2, 1])",
        id="shape",
    ),
    pytest.param(
        torch.ones(2),
        torch.ones(2).int(),
        "expected dtype torch.int32 but got torch.float32",
        id="dtype",
    ),
]


@pytest.mark.parametrize(("result", "expected", "text"), DIFFERENCES)
def test_a_comparison_says_how_tensors_differ(result: Tensor, expected: Tensor, text: str) -> None:
    """pytest shows the text where an assertion about the comparison fails."""
    comparison = same(result, expected)
    assert not comparison
    assert repr(comparison) == text
    assert same(expected, expected.clone())
    with pytest.raises(AssertionError, match=re.escape(f"tensor 1: {text}")):
        assert all_same([expected, result], [expected, expected])


def test_a_comparison_of_no_tensors_fails() -> None:
    assert repr(all_same([], [])) == "there are no tensors to compare"
    assert not all_same([], [])


def unpooling(images: int = 1, channels: int = 1) -> Call:
    """The first and the last of three values share an index."""
    x = torch.tensor([1.0, 5, 2]).expand(images, channels, 3).contiguous()
    indices = torch.tensor([2, 3, 2]).expand(images, channels, 3).contiguous()
    return call_of("unpool", x, indices, geometry=geometry_of((3,), (3, 1, 0)), kind="maxima")


def first_wins(call: Call) -> None:
    """A check that fails, as a kernel would if the first of the values that share an index won."""
    output = call.results()[0]
    output[..., 2] = 1
    call.compare([output])


def failure_text(calls: Iterable[Any], check: Callable[[Any], object]) -> str:
    with pytest.raises(CallError) as caught:
        check_each(calls, check)
    return str(caught.value)


DESCRIPTION = """\
1 of 1 failed. The smallest:
  operator    max_unpool
  input       float32 (1, 1, 3), contiguous, strides (3, 3, 1)
  indices     int64 (1, 1, 3), contiguous, strides (3, 3, 1), kind 'maxima'
  arguments   output=(5,) kernel=(3,) stride=(1,) padding=(0,) reduce='last'
  named by    [0] = 1, [2] = 2
  error       output: 1 of 5 elements differs, the first is [0, 0, 2]: \
expected 2 = 0x40000000 but got 1 = 0x3f800000
  device      cpu
"""


def test_a_failing_call_describes_itself(request: pytest.FixtureRequest) -> None:
    text = failure_text([unpooling()], first_wins)
    options = "--all " if request.config.getoption("--all") else ""
    again = f"MAXUNPOOL_SEED={os.environ['MAXUNPOOL_SEED']} pytest {options}{request.node.nodeid}"
    assert text == f"{DESCRIPTION}  again       {again}"


@pytest.mark.parametrize("is_all", [False, True], ids=["quick", "all"])
def test_the_command_again_draws_as_many_inputs(is_all: bool, monkeypatch: Patch) -> None:
    """``scaled`` draws more with --all: without it the failing one might not be among them."""
    monkeypatch.setenv("MAXUNPOOL_ALL", str(int(is_all)))
    assert (" pytest --all " in failures.command_again()) == is_all


def test_long_errors_say_what_is_left_out() -> None:
    """Of a Jacobian that gradcheck refuses both matrices are shown."""
    calls = [unpooling()]
    matrix = "\n".join("[1., 0., 0.]" for _ in range(5))

    def mismatch(call: Call) -> None:
        raise RuntimeError(f"numerical:\n{matrix}\nanalytical:\n{matrix}")

    def assertion(call: Call) -> None:
        raise AssertionError("\n".join("abcde"))

    text = failure_text(calls, mismatch)
    assert text.count("[1., 0., 0.]") == 10
    assert "lines left out" not in text
    text = failure_text(calls, assertion)
    assert re.search(r"\n +c\n +\.\.\. \(lines left out: 2; .*\n  device ", text), text


def test_the_origin_of_a_wrong_gradient_and_of_a_wrong_maximum() -> None:
    backward = draw(
        random.Random(0),
        "gradient",
        torch.float32,
        geometry=geometry_of((2, 2), (3, 1, 0)),
        leading=(1, 1),
        layout="contiguous",
        kind="maxima",
    )
    window = Geometry.of_pooling((3, 3), (2, 2), (2, 2), (0, 0), (1, 1), ceil=True)
    pool = draw(random.Random(0), "pool", torch.int32, geometry=window, leading=(1, 1))
    for call, words in ((backward, ("index", "named by")), (pool, ("window",))):
        wrong = [torch.zeros_like(result) - 1 for result in call.results()]
        text = failure_text([call], lambda call, wrong=wrong: call.compare(wrong))
        for word in words:
            assert re.search(rf"^  {word} +\[\d, \d\]( = |, |$)", text, re.M), text


def test_the_smallest_failing_call_is_made_smaller() -> None:
    """To the fewest images and channels with which it fails: here more than two channels."""

    def check(call: Call) -> None:
        if call.tensors[0].shape[1] > 2:
            first_wins(call)

    text = failure_text([unpooling(4, 2), unpooling(2, 40), unpooling(3, 33)], check)
    assert text.startswith("2 of 3 failed. The smallest, with fewer images or channels:\n")
    assert "\n  input       float32 (1, 3, 3)," in text


def test_a_call_is_made_smaller_only_if_it_fails_in_the_same_way() -> None:
    def check(call: Call) -> None:
        if call.tensors[0].shape[0] == 1:
            raise ValueError
        first_wins(call)

    assert "\n  input       float32 (2, 1, 3)," in failure_text([unpooling(8, 3)], check)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_of_a_call_are_laid_out_as_before(layout: str) -> None:
    geometry = geometry_of((2, 3), (2, 2, 0))
    call = draw(random.Random(1), "unpool", geometry=geometry, leading=(2, 4), layout=layout)
    halves = [*call.halves()]
    assert [tuple(half.tensors[0].shape[:2]) for half in halves] == [(1, 4)] * 2 + [(2, 2)] * 2
    layouts = [layout_of(tensor, 2) for half in halves for tensor in half.tensors]
    assert layouts == [layout_of(tensor, 2) for tensor in call.tensors] * 4
    assert same(torch.cat([half.tensors[0] for half in halves[2:]], 1), call.tensors[0])
    assert [*replace(call, error="an index").halves()] == []


def test_other_errors_are_the_cause() -> None:
    """One of pytest.raises is an error too; a skip is none."""
    call = unpooling()
    invalid = replace(call, error="an index that it does not have")
    with pytest.raises(CallError, match=r"error +ZeroDivisionError: integer division") as caught:
        check_each([call], lambda call: 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "error       Failed: DID NOT RAISE" in failure_text([invalid], Call.verify_error)
    with_another_error = replace(call.part(1, 0, 0), error="expected another")
    text = failure_text([with_another_error], Call.verify_error)
    assert "Actual message: 'max_unpool1d: expected input of 2 or 3 dimensions" in text
    with pytest.raises(pytest.skip.Exception):
        check_each([call], lambda call: pytest.skip("reason"))


def test_a_result_in_the_memory_of_an_input_is_seen(monkeypatch: Patch) -> None:
    """Also if it begins at another address, and no element of the input is overwritten."""
    call, memory = unpooling(), torch.zeros(16)
    output, x = call.results()[0], memory[:3].view(1, 1, 3).copy_(call.tensors[0])

    def on_the_same_storage(call: Call) -> tuple[Tensor, ...]:
        overlap = call.tensors[0].as_strided(output.shape, output.stride(), storage_offset=8)
        return (overlap.copy_(output),)

    monkeypatch.setattr(Call, "on", on_the_same_storage)
    with pytest.raises(AssertionError, match="a result shares memory with an input"):
        replace(call, tensors=(x, call.tensors[1])).verify()


def test_a_result_on_another_device_is_seen(monkeypatch: Patch) -> None:
    call = unpooling()
    output = call.results()[0]
    monkeypatch.setattr(Call, "on", lambda call: (output,))
    with pytest.raises(AssertionError, match="a result on another device"):
        call.verify("meta")


def test_a_check_of_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="no case was checked"):
        check_each([], Call.verify)


def test_assertions_of_cases_show_values() -> None:
    assert isinstance(cases.__loader__, AssertionRewritingHook)


def test_a_failure_names_emulated_kernels(rng: random.Random, monkeypatch: Patch) -> None:
    """With their grids: those of the call that failed, and none of calls before it."""
    monkeypatch.setattr(failures, "device", "emulated")
    launched = []
    with emulation.emulated_gpu(rng):
        for before in (1, 3):
            for _ in range(before):
                unpooling(8, 8).results()
            text = failure_text([unpooling()], first_wins)
            launched.append(re.findall(r"^  launched +(\w+<.*>)<<<\d+, \d+>>>$", text, re.M))
    assert launched[0] == launched[1] != []


def test_kernels_in_what_the_profiler_exports() -> None:
    grid = {"grid": [12, 1, 1], "block": [256, 1, 1]}
    kernel = {"cat": "kernel", "ts": 2.5, "args": grid}
    name = "void maxunpool_cuda::forward<float, maxunpool_cuda::Last, 3>(maxunpool_cuda::Work<3>)"
    trace = [
        {"cat": "cpu_op", "name": "maxunpool_cuda::max_unpool", "ts": 0},
        kernel | {"name": name.replace("forward", "slots"), "ts": 3.5},
        kernel | {"name": name},
        kernel | {"name": "void at::native::fill<float>(int)"},
    ]
    launches = ["forward<float, Last, 3><<<12, 256>>>", "slots<float, Last, 3><<<12, 256>>>"]
    assert failures.launches_in({"traceEvents": trace}) == launches


needs_tomllib = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11")


def list_mutations(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, root / "tools" / "mutate.py", "--list"]
    return subprocess.run(command, capture_output=True, text=True)


@needs_tomllib
def test_the_list_of_mutations_fits_the_code() -> None:
    """Each text occurs in its file once. docs/testing.md has the table that mutate.py printed."""
    done = list_mutations(ROOT)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "testing.md").read_text()
    table = page.partition("\n## Mistakes on purpose\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `.+` \| (.+) \|$", table, re.M)
    assert [name for name, _ in rows] == done.stdout.splitlines()
    assert [row for row in rows if "**" in row[1]] == []  # every mutation was seen


@needs_tomllib
@pytest.mark.parametrize("text", ["", "right\nright\n"], ids=["0 times", "2 times"])
def test_a_mutation_that_does_not_fit_is_an_error(text: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "code.py").write_text(text)
    entry = ["[[mutation]]", "name = 'a mistake'", "file = 'code.py'", "tests = ''", "words = ''"]
    entry += ["find = 'right'", "replace = 'wrong'"]
    (tmp_path / "tools" / "mutations.toml").write_text("\n".join(entry))
    done = list_mutations(tmp_path)
    assert done.returncode == 1
    times = text.count("right")
    assert f"a mistake: 'right' occurs {times} times in code.py" in done.stderr


# Of three tests that need a GPU, one passes, one fails, and one skips itself. A fourth needs none.
MADE_UP = """
import pytest

@pytest.mark.cuda
def test_passes(): pass

@pytest.mark.cuda
def test_fails(): assert False

@pytest.mark.cuda
def test_skips(): pytest.skip("too little memory")

def test_needs_no_gpu(): pass
"""
FAKE_GPU = """
import torch, maxunpool_cuda
torch.cuda.is_available = lambda: {gpu}
torch.cuda.get_device_name = lambda: "Fake 100"
maxunpool_cuda.build_info = lambda: {{"cuda": {kernels}}}
"""
LINES = [
    pytest.param(False, True, "none of 3 cuda tests ran: no CUDA device", id="no GPU"),
    pytest.param(
        True, False, "none of 3 cuda tests ran: this build has no CUDA kernels", id="no kernels"
    ),
    pytest.param(
        True,
        True,
        "2 of 3 cuda tests ran, on Fake 100; the others did not: too little memory",
        id="both",
    ),
]


@pytest.fixture
def made_up(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers = cuda\naddopts = -p gpu_tests -p no:cacheprovider")
    pytester.makepyfile(MADE_UP)
    return pytester


def fake(gpu: bool, kernels: bool, patch: Patch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: gpu)
    patch.setattr(gpu_tests, "gpu_name", lambda: "Fake 100")
    patch.setattr(maxunpool_cuda, "build_info", lambda: {"cuda": kernels})


@pytest.mark.parametrize(("gpu", "kernels", "line"), LINES)
def test_a_run_says_how_many_tests_ran_on_a_gpu(
    gpu: bool, kernels: bool, line: str, made_up: pytest.Pytester, monkeypatch: Patch
) -> None:
    fake(gpu, kernels, monkeypatch)
    done = made_up.runpytest_inprocess()
    done.stdout.fnmatch_lines(f"On a GPU: {line}")
    ran = gpu and kernels
    done.assert_outcomes(passed=1 + ran, failed=int(ran), skipped=1 if ran else 3)


def test_a_run_says_that_no_test_for_a_gpu_was_selected(made_up: pytest.Pytester) -> None:
    done = made_up.runpytest_inprocess("-k", "needs_no_gpu")
    done.stdout.fnmatch_lines("On a GPU: no test ran: 0 cuda tests were selected")
    done.assert_outcomes(passed=1, deselected=3)


def test_two_processes_count_together(made_up: pytest.Pytester, monkeypatch: Patch) -> None:
    pytest.importorskip("xdist")
    made_up.makeconftest(FAKE_GPU.format(gpu=True, kernels=True))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    done = made_up.runpytest_subprocess("-n", "2")
    done.stdout.fnmatch_lines(f"On a GPU: {LINES[-1].values[-1]}")
    done.assert_outcomes(passed=2, failed=1, skipped=1)


# What cuobjdump prints of kernels that fit: a name, and the registers of a thread.
FITTING = {"7forwardI": 64, "14forward_stripsI": 80, "8backwardI": 48, "18forward_last_slotsI": 64}
FITTING |= {"9pool_rowsI": 62, "13pool_channelsI": 64, "12pool_windowsI": 128, "10pool_lanesI": 44}


def usage(kernels: dict[str, int], stack: int = 0) -> str:
    line = " Function _ZN14maxunpool_cuda{}:\n  REG:{} STACK:{} SHARED:1024 LOCAL:0 TEXTURE:0\n"
    return "".join(line.format(name, registers, stack) for name, registers in kernels.items())


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        pytest.param(usage(FITTING, stack=8), "forwardI spills", id="spills"),
        pytest.param(
            usage(FITTING | {"7forwardI": 65}), "forwardI: 65 registers", id="too many registers"
        ),
        pytest.param(usage(FITTING | {"12pool_windowsI": 130}), "130 registers", id="of pooling"),
        pytest.param(usage(FITTING | {"7inverseI": 40}), "inverseI: of no family", id="unknown"),
    ],
)
def test_kernels_must_fit_with_an_nvcc_that_they_were_tuned_with(
    printed: str, words: str, monkeypatch: Patch
) -> None:
    info = {"nvcc_version": "13.0.88"}
    monkeypatch.setattr(maxunpool_cuda, "build_info", lambda: info)
    monkeypatch.setattr(test_library, "cuobjdump", lambda argument: printed)
    with pytest.raises(AssertionError, match=words):
        test_library.test_kernels_fit_the_registers()
    info["nvcc_version"] = "13.2.86"
    with pytest.warns(UserWarning, match=words):
        test_library.test_kernels_fit_the_registers()
    monkeypatch.setattr(test_library, "cuobjdump", lambda argument: usage(FITTING))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test_library.test_kernels_fit_the_registers()
