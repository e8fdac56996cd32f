"""What surrounds an operator: copies, checkpoints, autocast, threads, subclasses, compiled graphs."""

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES, same
from networks import PoolAndUnpool, results, returned_dtypes
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves as leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import maxunpool_cuda
import maxunpool_cuda.functional as F


@pytest.fixture(params=INDEX_DTYPES, ids=str)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """With windows that overlap and windows that do not."""
    model = PoolAndUnpool(2, 3, 2, 1, middle=PoolAndUnpool(2, 2))
    maxunpool_cuda.replace_max_pooling(model, request.param)
    return model


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 3, 8, 8, requires_grad=True)


def replica(model: nn.Module) -> nn.Module:
    """As DataParallel makes them."""
    other = copy.copy(model)
    pools = {
        name: getattr(model, name)._replicate_for_data_parallel() for name in ("pool", "unpool")
    }
    other._modules = {**model._modules, **pools}
    return other


def with_tensors_elsewhere(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The backward reads copies of the tensors that were saved for it."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    def call(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, kept.__getitem__):
            out = model(x)
        # Two pools and two unpools saved their indices.
        assert [t.dtype for t in kept].count(model.pool.index_dtype) == 4
        return out

    return call


WAYS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=True),
    # For any batch, and the spatial sizes of the example.
    "traced": lambda model: torch.jit.trace(model, torch.rand(3, 3, 8, 8)),
    "replica": replica,
    "tensors elsewhere": with_tensors_elsewhere,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call_a_model(way: str, model: nn.Module, x: Tensor) -> None:
    called, expected = WAYS[way](model), results(model, x)
    assert all(map(same, results(model, x, called), expected))
    if way in ("deep copy", "pickle"):
        assert repr(called) == repr(model)
        assert returned_dtypes(called) == returned_dtypes(model)


def test_inference_mode(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        output = model(x)
    assert output.is_inference()
    assert same(output, model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, model: nn.Module, x: Tensor) -> None:
    """Operators keep the dtype they are given: a convolution's is that of autocast."""
    with torch.autocast("cpu", dtype):
        output = model(x)
        assert output.dtype == dtype
        for given in (x, x.to(dtype)):
            values, indices = F.max_pool2d(given, 2, return_indices=True)
            assert values.dtype == F.max_unpool2d(values, indices, 2).dtype == given.dtype
    output.float().sum().backward()
    assert x.grad.any()


# Threads and processes


def test_threads_of_the_caller(model: nn.Module, x: Tensor) -> None:
    expected, right = results(model, x), []

    def work() -> None:
        own = copy.deepcopy(model)
        right.append(all(all(map(same, results(own, x), expected)) for _ in range(20)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


def run_alone(script: str, argument: str) -> str:
    """The output of a program that may end the process it runs in."""
    command = [sys.executable, "-c", script, argument]
    # Not from the root, where the package has no compiled extension.
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout


BACKWARD_TWICE = """
import sys, threading, torch, maxunpool_cuda.functional as F
outcomes = []

def backward(output, barrier, retain_graph):
    barrier.wait()
    try:
        output.backward(retain_graph=retain_graph)
        outcomes.append("done")
    except RuntimeError as error:
        outcomes.append(str(error).split(" (")[0])

for n in range(2000):
    leaf = torch.rand(1, 1, 4, 4, requires_grad=True)
    if sys.argv[1] == "pool":
        output = F.max_pool2d(leaf, 2).sum()
    else:
        output = F.max_unpool2d(leaf, torch.zeros(1, 1, 4, 4, dtype=torch.int64), 2).sum()
    barrier = threading.Barrier(2)
    arguments = [(output, barrier, False), (output, barrier, n % 2 == 0)]
    threads = [threading.Thread(target=backward, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(outcomes), *sorted(set(outcomes)), sep="; ")
"""


@pytest.mark.parametrize("operator", ["pool", "unpool"])
def test_two_threads_run_backward_through_one_graph(operator: str) -> None:
    """The second may find its variables released, which raises PyTorch's error."""
    count, *outcomes = run_alone(BACKWARD_TWICE, operator).strip().split("; ")
    assert int(count) == 4000
    assert set(outcomes) <= {"done", "Trying to backward through the graph a second time"}
    assert "done" in outcomes


DAEMONS = """
import sys, threading, time, torch, maxunpool_cuda.functional as F

class Ending:
    def __del__(self):  # as the interpreter ends; meanwhile the operators return to it
        time.sleep(2)

torch.set_num_threads(1)
ending, kept, running = Ending(), [], threading.Semaphore(0)
x = torch.rand(1, 16, 512, 512)
values, indices = F.max_pool2d(x, 2, return_indices=True)
work = {
    "pool": lambda: F.max_pool2d(x, 2),
    "unpool": lambda: F.max_unpool2d(values, indices, 2),
}[sys.argv[1]]

def forever():
    while True:
        running.release()
        kept.append(work())  # PyTorch takes the GIL to free a tensor

for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
for _ in range(6):
    running.acquire()
"""


@pytest.mark.parametrize("work", ["pool", "unpool"])
def test_daemon_threads_outlive_the_interpreter(work: str) -> None:
    run_alone(DAEMONS, work)


def unpooled(images: list[Tensor]) -> Tensor:
    """With indices of every dtype."""
    x = torch.stack(images)
    pooled = [F.max_pool2d(x, 2, return_indices=True, index_dtype=t) for t in INDEX_DTYPES]
    return torch.cat([F.max_unpool2d(*each, 2) for each in pooled], 1)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start: str) -> None:
    images = list(torch.rand(6, 1, 4, 4))
    expected = unpooled(images)  # starts threads, which a fork does not inherit
    loader = DataLoader(
        images, 2, num_workers=2, collate_fn=unpooled, multiprocessing_context=start
    )
    assert same(torch.cat(list(loader)), expected)


# Tensors of other kinds


class Tagged(Tensor):
    """A subclass that does nothing but stay itself."""


class Logged:
    """No tensor, but it says that it can stand for one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # noqa: ANN206, ANN001
        bare = [a.tensor if isinstance(a, cls) else a for a in args]
        return function.__name__, function(*bare, **(kwargs or {}))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "which"), [("pool", 0), ("unpool", 0), ("unpool", 1)])
def test_tensor_subclasses(kind: str, which: int, dims: int) -> None:
    """Each tensor may be one; it is handed our function and all of its arguments."""
    shape, options = (2, 3, *[4] * dims), {"stride": 2, "padding": 1}
    tensors: list[Any] = [torch.rand(shape)]
    if kind == "pool":
        options |= {"dilation": 2, "ceil_mode": True, "return_indices": True}
        options["index_dtype"] = torch.int32
    else:
        tensors.append(torch.randint(5, shape))
        options |= {"output_size": [6] * dims, "reduce": "sum"}  # as only this padding allows
    function, plain = getattr(F, f"max_{kind}{dims}d"), tensors[which]
    expected = leaves(function(*tensors, 3, **options))
    tensors[which] = plain.as_subclass(Tagged)
    results = leaves(function(*tensors, 3, **options))
    assert {type(tensor) for tensor in results} == {Tagged}
    assert all(map(same, (tensor.as_subclass(Tensor) for tensor in results), expected))
    tensors[which] = Logged(plain)
    name, *results = leaves(function(*tensors, 3, **options))
    assert name == function.__name__
    assert all(map(same, results, expected))


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "quint8": lambda x: torch.quantize_per_tensor(x, 0.01, 7, torch.quint8),
    "qint8": lambda x: torch.quantize_per_tensor(x, 0.01, 7, torch.qint8),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize(
    ("dims", "kind"), [(d, k) for d in (1, 2, 3) for k in KINDS if (d, k) != (1, "mkldnn")]
)
def test_other_kinds_are_pooled_by_torch(dims: int, kind: str) -> None:
    """PyTorch has no 1d pooling of mkldnn tensors."""
    x, name = KINDS[kind](torch.rand(2, 3, *[9] * dims) - 0.5), f"max_pool{dims}d"
    for window in ((3, 2, 1), (2, None, 0, 1, True)):
        got, expected = (getattr(of, name)(x, *window) for of in (F, nn.functional))
        assert (got.dtype, got.layout) == (expected.dtype, expected.layout) == (x.dtype, x.layout)
        plain = Tensor.to_dense if kind == "mkldnn" else Tensor.dequantize
        assert same(plain(got), plain(expected))
    with pytest.raises(NotImplementedError, match=name):
        getattr(F, name)(x, 2, return_indices=True, index_dtype=torch.uint8)


# Compiled graphs


IMAGES = torch.rand(2, 3, 9, 8).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("pool", "x", "theirs"),
    [
        (F.max_pool2d, IMAGES, True),
        (torch.no_grad()(F.max_pool2d), IMAGES.clone().requires_grad_(), True),
        (F.max_pool2d, IMAGES.clone().requires_grad_(), False),
        (lambda x, *window: F.max_pool2d(x, *window, return_indices=True)[0], IMAGES, False),
        (F.max_pool1d, IMAGES[0], False),
        (F.max_pool2d, IMAGES.long(), False),
        (F.max_pool3d, IMAGES, False),
    ],
    ids=["inference", "no_grad", "training", "indices", "1d", "integers", "3d"],
)
def test_compiled_2d_pooling_in_inference_is_pytorchs(
    pool: Callable[..., Tensor], x: Tensor, theirs: bool
) -> None:
    """Which Inductor fuses with what is around it; all other pooling is by this package."""
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(pool, backend=backend, fullgraph=True)
    results = [of(x, 3, 2, 1, 1, True) for of in (compiled, pool)]
    assert same(*(result.detach() for result in results))
    assert results[0].stride() == results[1].stride()
    (graph,) = backend.fw_graphs
    pools = [str(node.target) for node in graph.graph.nodes if "max_pool" in str(node.target)]
    assert len(pools) == 1
    assert pools[0].startswith("aten." if theirs else "maxunpool_cuda.")


@pytest.mark.parametrize("strict", [False, True])
def test_exported_pooling_in_inference_is_ours(strict: bool) -> None:
    program = torch.export.export(maxunpool_cuda.MaxPool2d(2), (IMAGES,), strict=strict)
    assert torch.ops.maxunpool_cuda.max_pool.default in {
        node.target for node in program.graph.nodes
    }
