# SPDX-License-Identifier: BSD-3-Clause
"""What the tests themselves stand on: copies on a device, what a failure says, smaller calls."""

import subprocess
import sys
from pathlib import Path
from random import Random

import emulation
import failures
import pytest
import torch
from cases import LAYOUTS, Call, call_of, draw, geometry_of, moved
from conftest import needs_library
from failures import check_each, layout_of, same

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_moved_tensor_lies_in_memory_as_before(
    real_device: str, layout: str, rng: Random
) -> None:
    for tensor in draw(rng, "unpool", layout=layout).tensors:
        copy = moved(tensor, real_device)
        assert same(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        assert copy.data_ptr() != tensor.data_ptr()
        # Vectors have 16 bytes.
        assert copy.data_ptr() % 16 == tensor.storage_offset() * tensor.itemsize % 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_of_a_call_are_laid_out_as_before(layout: str, rng: Random) -> None:
    geometry = geometry_of((2, 3), (2, 2, 0))
    call = draw(rng, "unpool", geometry=geometry, leading=(2, 4), layout=layout)
    halves = [*call.halves()]
    assert [tuple(half.tensors[0].shape[:2]) for half in halves] == [(1, 4)] * 2 + [(2, 2)] * 2
    layouts = [layout_of(tensor, 2) for half in halves for tensor in half.tensors]
    assert layouts == [layout_of(tensor, 2) for tensor in call.tensors] * 4
    assert same(torch.cat([half.tensors[0] for half in halves[2:]], 1), call.tensors[0])


def test_a_comparison_sees_every_bit() -> None:
    zero = torch.tensor(0.0)
    assert same(zero, zero.clone())
    for other in (-zero, zero.double(), zero[None], torch.tensor(torch.nan)):
        assert not same(zero, other)


def unpooling(images: int, channels: int) -> Call:
    """The first and the last of three values share an index."""
    x = torch.tensor([1.0, 5, 2]).expand(images, channels, 3).contiguous()
    indices = torch.tensor([2, 3, 2]).expand(images, channels, 3).contiguous()
    return call_of("unpool", x, indices, geometry=geometry_of((3,), (3, 1, 0)))


DESCRIPTION = r"""2 of 3 failed. The smallest, with fewer images or channels:
  operator    max_unpool
  input       float32 \(1, 3, 3\), contiguous, strides \(120, 3, 1\)
  indices     int64 \(1, 3, 3\), contiguous, strides \(120, 3, 1\)
  arguments   output_size=\(5,\) kernel_size=\(3,\) .* reduce='last'
  named by    \[0\] = 1, \[2\] = 2
  error       output: 3 of 15 elements differ, the first is \[0, 0, 2\]: expected 2 = .* got 1 = .*
  device      emulated
  launched    \w+<.*>[\w\W]*
  again       MAXUNPOOL_SEED=\d+ pytest .*::test_a_failing_call_is_described$"""


@needs_library
def test_a_failing_call_is_described(rng: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the smallest, with the fewest images and channels with which it fails: here three."""

    def first_wins(call: Call) -> None:
        (output,) = call.results()
        if output.shape[1] > 2:
            output[..., 2] = 1
        call.compare([output])

    monkeypatch.setattr(failures, "device", "emulated")
    calls = [unpooling(4, 2), unpooling(2, 40), unpooling(3, 33)]
    with emulation.emulated_gpu(rng), pytest.raises(AssertionError, match=DESCRIPTION):
        check_each(calls, first_wins)


def test_a_check_of_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="no case was checked"):
        check_each([], Call.verify)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tools/mutate.py needs tomllib")
def test_the_list_of_mutations_fits_the_code() -> None:
    """The text of each occurs in its file once."""
    command = [sys.executable, ROOT / "tools" / "mutate.py", "--list"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
