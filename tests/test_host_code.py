# SPDX-License-Identifier: BSD-3-Clause
"""The host code of csrc/cuda as nvcc compiled it, in PyTorch's CUDA build, without a GPU.

Other tests without a GPU call the host code that g++ compiled. nvcc makes other code of it:
of a call from the host to a __device__ function, exit(1). emulation/runtime.py says how there is a
device "cuda" here, and emulation/host_code.py has the tests that run in a process with it.
"""

import os
import re

import emulation
import pytest
import torch
from emulation import runtime

# Where make check-cuda runs this without a GPU, an obstacle is a failure and no skip.
IS_REQUIRED = os.environ.get("MAXUNPOOL_HOST_CODE") == "1" and not torch.cuda.is_available()
OBSTACLE = "" if IS_REQUIRED else runtime.why_not()


def test_no_array_has_elements_of_an_alias_of_an_array_type() -> None:
    """Of ``Row rows[2]{}``, where Row is float[4], nvcc 13.0 initializes the first row alone."""
    texts = [path.read_text() for path in emulation.CSRC.glob("**/*.*")]
    aliases = [name for text in texts for name in re.findall(r"\busing (\w+) = [^;]*\];", text)]
    arrays = rf"\b(?:{'|'.join(aliases)}) \w+\[.*"
    assert aliases
    assert [found for text in texts for found in re.findall(arrays, text)] == []


@pytest.mark.slow
@pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)
def test_host_code() -> None:
    done = runtime.run_tests(emulation.HERE / "host_code.py")
    # exit(1) prints nothing: the last line names the test that was running.
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}"
