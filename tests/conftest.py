"""What all tests run under."""

import os
import random
import secrets
from collections.abc import Iterator

import pytest
import torch

SEED = int(os.environ.get("MAXUNPOOL_SEED", secrets.randbelow(2**31)))


def pytest_report_header() -> str:
    return f"fresh random inputs; repeat these with MAXUNPOOL_SEED={SEED}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of the test's own, so that it fails alike when run alone."""
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory: what a kernel leaves unwritten is NaN, or the largest integer."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
