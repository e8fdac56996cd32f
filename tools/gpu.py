# SPDX-License-Identifier: BSD-3-Clause
"""Prepares an environment for CUDA kernels, or says in one sentence why it cannot have any.

make runs it with the environment's Python before it builds with CUDA=1. A GPU that nvidia-smi lists
must be one that PyTorch can use: with a driver older than PyTorch's CUDA each test that needs a GPU
would be skipped. If there is no CUDA 13 toolkit, pip installs nvcc beside PyTorch. That is all that
python tools/gpu.py toolkit does: for a wheel, whose kernels need not run here.
"""

import logging
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import torch

# PyTorch's warning that it sees no GPU would stand before the sentence that explains it.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
SETUP = runpy.run_path(str(Path(__file__).parent.parent / "setup.py"))
# The first driver that runs all releases of CUDA 13.
# NVIDIA's table is at https://docs.nvidia.com/deploy/cuda-compatibility/
OLDEST_DRIVER = 580


def sees_a_gpu() -> bool:
    """Whether PyTorch can use a GPU. Its warning of an old driver is left to hidden_gpu."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def hidden_gpu() -> str:
    """Why PyTorch may see none of the GPUs that nvidia-smi lists; empty if it sees one."""
    listed = subprocess.getoutput("nvidia-smi -L")
    if not re.search(r"^GPU \d", listed, re.M) or sees_a_gpu():
        return ""
    expected = f"expected PyTorch {torch.__version__} to see the GPU that nvidia-smi lists"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"{expected} but got none, with CUDA_VISIBLE_DEVICES={visible!r}"
    ask = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    driver = subprocess.getoutput(ask).split("\n")[0]
    number = re.match(r"\d+", driver)
    if number and int(number[0]) < OLDEST_DRIVER:
        needs = f"{expected}, which needs driver {OLDEST_DRIVER} or later, but got driver {driver}"
        return f"{needs}: update the driver"
    more = "`python -c 'import torch; torch.zeros(1).cuda()'` tells more"
    return f"{expected} but got none, with driver {driver}: {more}"


def why_no_toolkit() -> str:
    """Why there is no toolkit, after pip did what it can; empty if there is one.

    pip installs nvcc into the environment of this Python, at the release that its PyTorch asks for.
    If pip fails it says why, and the toolkit stays missing.
    """
    toolkit, missing = SETUP["find_toolkit"]()
    if not toolkit:
        print(f"Installing nvcc, since there is no CUDA {SETUP['CUDA_MAJOR']} toolkit.", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, SETUP["PIP_TOOLKIT"]], check=False)
        _, missing = SETUP["find_toolkit"]()
    return str(missing)


def main() -> None:
    """Stops make by one sentence."""
    is_run_here = sys.argv[1:] != ["toolkit"]
    unusable = (SETUP["LIBRARY"]["misfit_of_cuda"]() or hidden_gpu()) if is_run_here else ""
    reason = unusable or why_no_toolkit()
    if reason:
        raise SystemExit(f"maxunpool_cuda: {reason}; CUDA=0 leaves out the CUDA kernels")


if __name__ == "__main__":
    main()
