"""What surrounds an operator: threads, processes, subclasses of Tensor, Inductor."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from cases import same, scaled
from published import pooling_in
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._pytree import tree_leaves as leaves
from torch.utils.data import DataLoader

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import patched

# Threads and processes


@pytest.mark.parametrize("unpool", [False, True])
def test_two_threads_run_backward_through_one_graph(unpool: bool) -> None:
    """One may find the variables released, and raises PyTorch's error."""
    barrier, outcomes = Barrier(2), set()
    released = "Trying to backward through the graph a second time"

    def backward(output: Tensor, retain_graph: bool) -> str:
        barrier.wait()
        try:
            output.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            return str(error).split(" (")[0]
        return "done"

    indices = torch.zeros(1, 1, 4, 4, dtype=torch.int64)
    with ThreadPoolExecutor(2) as threads:
        for n in range(scaled(2000)):
            x = torch.rand(1, 1, 4, 4, requires_grad=True)
            output = (F.max_unpool2d(x, indices, 2) if unpool else F.max_pool2d(x, 2)).sum()
            outcomes |= set(threads.map(backward, (output, output), (False, n % 2 == 0)))
    assert {"done"} <= outcomes <= {"done", released}


DAEMONS = """
import sys, threading, time, torch, maxunpool_cuda.functional as F

class Ending:
    def __del__(self):  # runs as the interpreter ends, while operators return to it
        time.sleep(2)

torch.set_num_threads(1)
ending, kept, running = Ending(), [], threading.Semaphore(0)
x = torch.rand(1, 16, 512, 512)
values, indices = F.max_pool2d(x, 2, return_indices=True)

def forever(work):
    while True:
        running.release()
        kept.append(work())  # PyTorch takes the GIL to free a tensor

for work in (lambda: F.max_pool2d(x, 2), lambda: F.max_unpool2d(values, indices, 2)) * 2:
    threading.Thread(target=forever, args=[work], daemon=True).start()
for _ in range(8):
    running.acquire()
"""


def test_daemon_threads_outlive_the_interpreter() -> None:
    # Not from the root, where the package may have no compiled extension.
    command, folder = [sys.executable, "-c", DAEMONS], Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, b"")


def unpooled(images: list[Tensor]) -> Tensor:
    return F.max_unpool2d(*F.max_pool2d(torch.stack(images), 2, return_indices=True), 2)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader(start: str) -> None:
    images = list(torch.rand(6, 1, 4, 4))
    expected = unpooled(images)  # starts threads, which a fork does not inherit
    processes = {"num_workers": 2, "multiprocessing_context": start}
    assert same(torch.cat([*DataLoader(images, 2, collate_fn=unpooled, **processes)]), expected)


# Tensors of other kinds


class Tagged(Tensor):
    """A subclass that records the functions called on it. Their results are Tagged as well."""

    asked: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs)


POOL = {"padding": 1, "dilation": 2, "ceil_mode": True, "return_indices": True}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "which"), [("pool", 0), ("unpool", 0), ("unpool", 1)])
def test_tensor_subclasses(kind: str, which: int, dims: int) -> None:
    """A subclass gets the function that was called on it, with all arguments.

    Inside of patched() it gets PyTorch's function; what it calls in turn is this package's.
    """
    tensors: list[Tensor] = [torch.rand(2, 3, *[4] * dims)]
    own, options = {"index_dtype": torch.int32}, POOL
    if kind == "unpool":
        tensors.append(torch.randint(5, tensors[0].shape))
        own, options = {"reduce": "sum"}, {"padding": 1, "output_size": [6] * dims}
    ours, theirs = (getattr(of, f"max_{kind}{dims}d") for of in (F, nn.functional))
    expected = leaves(ours(*tensors, 3, 2, **options, **own))
    tensors[which] = tensors[which].as_subclass(Tagged)
    with_indices = getattr(nn.functional, f"max_{kind}{dims}d_with_indices", theirs)
    # PyTorch's unpooling looks at the input alone, and leaves a subclass of indices to ours.
    for called, given, asked in (ours, own, ours), (theirs, {}, ours if which else with_indices):
        Tagged.asked.clear()
        with patched(), patched(**own):
            found = called(*tensors, 3, 2, **options, **given)
        assert [f for f in Tagged.asked if "pool" in f.__name__] == [asked]
        assert {type(tensor) for tensor in leaves(found)} == {Tagged}
        plain = (tensor.as_subclass(Tensor) for tensor in leaves(found))
        assert all(map(same, plain, expected))


# Inductor


IMAGES = torch.rand(2, 3, 9, 8).contiguous(memory_format=torch.channels_last)
TRAINED = IMAGES.clone().requires_grad_()
WITH_INDICES = lambda x, *window: F.max_pool2d(x, *window, return_indices=True)[0]  # noqa: E731
INDUCTORS = {
    "inference": (F.max_pool2d, IMAGES, True),
    "no_grad": (torch.no_grad()(F.max_pool2d), TRAINED, True),
    "training": (F.max_pool2d, TRAINED, False),
    "indices": (WITH_INDICES, IMAGES, False),
    "integers": (F.max_pool2d, IMAGES.mul(9).long(), False),
    "1d": (F.max_pool1d, IMAGES[0], False),
}


@pytest.mark.parametrize(("pool", "x", "theirs"), INDUCTORS.values(), ids=INDUCTORS)
def test_inductor_fuses_plain_2d_pools(
    pool: Callable[..., Tensor], x: Tensor, theirs: bool
) -> None:
    """Their graph has PyTorch's operator. Other pools, and exports, have this package's."""
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(pool, backend=backend, fullgraph=True)
    found, expected = (of(x, 3, 2, 1, 1, True).detach() for of in (compiled, pool))
    assert same(found, expected)
    assert found.stride() == expected.stride()
    (operator,) = pooling_in(*backend.fw_graphs)
    assert operator.startswith("aten." if theirs else "maxunpool_cuda.")
    program = torch.export.export(maxunpool_cuda.MaxPool2d(2), (IMAGES,), strict=theirs)
    assert pooling_in(program.graph_module) == {"maxunpool_cuda.max_pool.default"}
