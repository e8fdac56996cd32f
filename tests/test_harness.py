# SPDX-License-Identifier: BSD-3-Clause
"""What the tests themselves stand on: copies on a device, what a failure says, mutations."""

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
from failures import check_each, same


def test_a_moved_tensor_lies_in_memory_as_before(real_device: str, rng: Random) -> None:
    for tensor in (t for layout in LAYOUTS for t in draw(rng, "unpool", layout=layout).tensors):
        copy = moved(tensor, real_device)
        assert same(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() != tensor.data_ptr()
        # Vectors have 16 bytes.
        assert copy.data_ptr() % 16 == tensor.storage_offset() * tensor.itemsize % 16


def test_a_comparison_sees_every_bit() -> None:
    zero = torch.tensor(0.0)
    assert same(zero, zero.clone())
    for other in (-zero, zero.double(), zero[None], torch.tensor(torch.nan)):
        assert not same(zero, other)


def unpooling(images: int, channels: int) -> Call:
    """In channels_last. The first and the last of three values share an index."""
    x = torch.tensor([[1.0, 5, 2]]).expand(images, channels, 1, 3)
    indices = torch.tensor([[2, 3, 2]]).expand(images, channels, 1, 3)
    tensors = (t.contiguous(memory_format=torch.channels_last) for t in (x, indices))
    return call_of("unpool", *tensors, geometry=geometry_of((1, 3), (3, 1, 0)))


DESCRIPTION = r"""2 of 3 failed. The smallest, with fewer images or channels:
  operator    max_unpool
  input       float32 \(1, 3, 1, 3\), channels_last, strides \(9, 1, 9, 3\)
  indices     int64 \(1, 3, 1, 3\), channels_last, strides \(9, 1, 9, 3\)
  arguments   output_size=\(3, 5\) kernel_size=\(3, 3\) .* reduce='last'
  named by    \[0, 0\] = 1\.0, \[0, 2\] = 2\.0
  error       output: 3 of 45 elements differ, the first is \[0, 0, 0, 2\]: expected 2.0 = .*
  device      emulated
  launched    <<<\d+, \d+>>> void \w+::\w+<.*>[\w\W]*
  again       MAXUNPOOL_SEED=\d+ pytest .*::test_a_failing_call_is_described$"""


@needs_library
def test_a_failing_call_is_described(rng: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the smallest, with the fewest images and channels with which it fails: here three."""

    def first_wins(call: Call) -> None:
        (output,) = call.results()
        if output.shape[1] > 2:
            output[..., 0, 2] = 1
        call.compare([output])

    monkeypatch.setattr(failures, "device", "emulated")
    calls = [unpooling(4, 2), unpooling(2, 40), unpooling(3, 33)]
    with emulation.emulated_gpu(rng), pytest.raises(AssertionError, match=DESCRIPTION):
        check_each(calls, first_wins)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tools/mutate.py needs tomllib")
def test_the_list_of_mutations_fits_the_code() -> None:
    """The text of each occurs in its file once."""
    tool = Path(__file__).parent.parent / "tools" / "mutate.py"
    done = subprocess.run([sys.executable, tool, "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
