"""What surrounds an operator: autocast, threads, processes, subclasses of Tensor, Inductor."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from cases import same
from published import pooling_in
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._pytree import tree_leaves as leaves
from torch.utils.data import DataLoader

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import patched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Operators keep the dtype they are given."""
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype):
        for given in (x, x.to(dtype)):
            values, indices = F.max_pool2d(given, 2, return_indices=True)
            assert values.dtype == F.max_unpool2d(values, indices, 2).dtype == given.dtype


# Threads and processes


@pytest.mark.parametrize("unpool", [False, True])
def test_two_threads_run_backward_through_one_graph(unpool: bool) -> None:
    """The second may find its variables released, which raises PyTorch's error."""
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
        for n in range(2000):
            x = torch.rand(1, 1, 4, 4, requires_grad=True)
            output = (F.max_unpool2d(x, indices, 2) if unpool else F.max_pool2d(x, 2)).sum()
            outcomes |= set(threads.map(backward, (output, output), (False, n % 2 == 0)))
    assert {"done"} <= outcomes <= {"done", released}


DAEMONS = """
import sys, threading, time, torch, maxunpool_cuda.functional as F

class Ending:
    def __del__(self):  # as the interpreter ends; meanwhile the operators return to it
        time.sleep(2)

torch.set_num_threads(1)
ending, kept, running = Ending(), [], threading.Semaphore(0)
x = torch.rand(1, 16, 512, 512)
values, indices = F.max_pool2d(x, 2, return_indices=True)
work = lambda: F.max_pool2d(x, 2) if sys.argv[1] == "pool" else F.max_unpool2d(values, indices, 2)

def forever():
    while True:
        running.release()
        kept.append(work())  # PyTorch takes the GIL to free a tensor

for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
for _ in range(6):
    running.acquire()
"""


@pytest.mark.parametrize("operator", ["pool", "unpool"])
def test_daemon_threads_outlive_the_interpreter(operator: str) -> None:
    command = [sys.executable, "-c", DAEMONS, operator]
    # Not from the root, where the package may have no compiled extension.
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, b"")


def unpooled(images: list[Tensor]) -> Tensor:
    return F.max_unpool2d(*F.max_pool2d(torch.stack(images), 2, return_indices=True), 2)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start: str) -> None:
    images = list(torch.rand(6, 1, 4, 4))
    expected = unpooled(images)  # starts threads, which a fork does not inherit
    loader = DataLoader(
        images, 2, collate_fn=unpooled, num_workers=2, multiprocessing_context=start
    )
    assert same(torch.cat(list(loader)), expected)


# Tensors of other kinds


class Tagged(Tensor):
    """Results of its functions are Tagged as well; it keeps the functions it was asked for."""

    asked: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs)


POOL = {"stride": 2, "padding": 1, "dilation": 2, "ceil_mode": True, "return_indices": True}
UNPOOL = {"stride": 2, "padding": 1}


@pytest.mark.parametrize("place", [F, nn.functional], ids=["ours", "patched"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "which"), [("pool", 0), ("unpool", 0), ("unpool", 1)])
def test_tensor_subclasses(kind: str, which: int, dims: int, place: Any) -> None:
    """Each tensor may be one; it is handed the function that was called, with all its arguments.

    Inside of patched() that is PyTorch's, for subclasses know no other; what they call is ours.
    Its unpooling looks at the input alone, and leaves a subclass of indices to ours.
    """
    tensors: list[Tensor] = [torch.rand(2, 3, *[4] * dims)]
    own, options = {"index_dtype": torch.int32}, POOL
    if kind == "unpool":
        tensors.append(torch.randint(5, tensors[0].shape))
        own, options = {"reduce": "sum"}, UNPOOL | {"output_size": [6] * dims}
    ours, function = (getattr(of, f"max_{kind}{dims}d") for of in (F, place))
    expected = leaves(ours(*tensors, 3, **options, **own))
    tensors[which] = tensors[which].as_subclass(Tagged)
    Tagged.asked.clear()
    if place is F:
        found, asked = function(*tensors, 3, **options, **own), function
    else:
        asked = ours if which else getattr(place, f"{function.__name__}_with_indices", function)
        with patched(), patched(**own):
            found = function(*tensors, 3, **options)
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
    """PyTorch's operator is in its graph; all other pools are this package's."""
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(pool, backend=backend, fullgraph=True)
    found, expected = (of(x, 3, 2, 1, 1, True).detach() for of in (compiled, pool))
    assert same(found, expected)
    assert found.stride() == expected.stride()
    (operator,) = pooling_in(*backend.fw_graphs)
    assert operator.startswith("aten." if theirs else "maxunpool_cuda.")


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_keep_this_packages_pool(strict: bool) -> None:
    program = torch.export.export(maxunpool_cuda.MaxPool2d(2), (IMAGES,), strict=strict)
    assert pooling_in(program.graph_module) == {"maxunpool_cuda.max_pool.default"}
