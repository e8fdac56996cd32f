# SPDX-License-Identifier: BSD-3-Clause
"""What tests and releases stand on: copies on a device, comparisons, mutations, one version."""

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from cases import LAYOUTS, draw, moved, same

ROOT = Path(__file__).parent.parent


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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tools/mutate.py needs tomllib")
def test_the_list_of_mutations_fits_the_code() -> None:
    """The text of each occurs in its file once."""
    tool = ROOT / "tools" / "mutate.py"
    done = subprocess.run([sys.executable, tool, "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_is_one_version() -> None:
    """Citation and changelog have that of pyproject.toml."""
    lines = {
        "pyproject.toml": '^version = "(.*)"$',
        "CITATION.cff": "^version: (.*)$",
        "CHANGELOG.md": r"^## (\S+)",  # the first heading
    }
    texts = {name: (ROOT / name).read_text() for name in lines}
    found = {name: re.search(line, texts[name], re.M)[1] for name, line in lines.items()}
    assert len({*found.values()}) == 1, found
