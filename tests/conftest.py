"""What all tests run under.

PyTorch is imported by what needs it: the process that hands tests out to others starts sooner.
"""

import os
import random
import secrets
import sys
from collections.abc import Iterator

import pytest

# Of all random inputs: the same from run to run, unless another is asked for, or a fresh one.
DRAWN = os.environ.get("MAXUNPOOL_SEED", "0")
SEED = secrets.randbelow(2**31) if DRAWN == "fresh" else int(DRAWN)
os.environ["MAXUNPOOL_SEED"] = str(SEED)  # for processes that share the work


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="slow tests too, and every random case")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MAXUNPOOL_ALL"] = str(int(config.getoption("--all")))  # read by cases.py


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"random inputs of seed {SEED}: MAXUNPOOL_SEED={SEED} repeats them, fresh draws one"]
    if not config.getoption("--all"):
        lines.append("left out: slow tests, and most of the random cases; make test-all has them")
    return lines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if config.getoption("--all"):
        return
    config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("slow")])
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def numbers_for(node: pytest.Item, what: str = "") -> random.Random:
    """Of one test, so that it fails alike when run alone."""
    return random.Random(f"{SEED} {node.nodeid}{what}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of the test's own."""
    return numbers_for(request.node)


LOW, WIDE = "cuda, low limits", "cuda, 64-bit offsets"


@pytest.fixture(
    params=["cpu", *(pytest.param(name, marks=pytest.mark.cuda) for name in ("cuda", LOW, WIDE))]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device; and a GPU where small tensors go the ways of large ones, and of huge ones."""
    if request.param not in (LOW, WIDE):
        yield request.param
        return
    from cases import random_limits

    from maxunpool_cuda import _C

    chosen = {"max_32bit_offset": 2**31, "small_bytes": 0}
    if request.param == WIDE:
        chosen = {"max_32bit_offset": 1}
    _C.set_cuda_limits(**random_limits(numbers_for(request.node, " limits")) | chosen)
    yield "cuda"
    _C.set_cuda_limits()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """What the generators that everybody shares give is the test's own as well."""
    import numpy as np
    import torch

    seed = numbers_for(request.node, " shared").getrandbits(32)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test finds what another has compiled, nor its count towards the limit of such."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory: what a kernel leaves unwritten is NaN, or the largest integer."""
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def as_torch_runs(poisoned_memory: None) -> Iterator[None]:
    """What torch.nn's unpooling runs under, to the same bits every time."""
    import torch

    torch.use_deterministic_algorithms(False)  # under which it raises
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in more, any of the values that have the same index may win
    yield
    torch.set_num_threads(threads)
