"""What several processes share: models that each of them trains, and tensors sharded over them."""

import functools
import itertools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import INDEX_DTYPES, same
from networks import PoolAndUnpool, returned_dtypes
from torch import Tensor, distributed, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("no gloo", allow_module_level=True)

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode

Placements = tuple[Placement, ...]
Results = tuple[Tensor, ...]
WINDOW = (3, 2, 1)  # overlaps
mesh_of = functools.cache(partial(init_device_mesh, "cpu"))


def whole_numbers(*shape: int) -> Tensor:
    """Which sum up exactly, in any order."""
    return torch.randint(-8, 8, shape).double()


def process(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=10),
    )
    work(rank, folder)
    distributed.destroy_process_group()
    # PyTorch aborts now and then as such a process ends, with torch.nn's unpooling too.
    os._exit(0)


def in_two_processes(work: Callable[[int, Path], None], folder: Path) -> None:
    torch.multiprocessing.spawn(process, (work, folder), nprocs=2)


def train_step(model: nn.Module, x: Tensor) -> None:
    # Powers of two: exact, as sums of whole numbers are.
    model(x).sum().div(len(x)).backward()
    torch.optim.SGD(model.parameters(), lr=0.25).step()


def trained(model: nn.Module) -> list[Tensor]:
    """The parameters and their gradients, whole."""
    tensors = [tensor for p in model.parameters() for tensor in (p.detach(), p.grad)]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def train(parallel: Callable[[nn.Module], nn.Module], rank: int, folder: Path) -> None:
    model, x = torch.load(folder / "start.pt", weights_only=False)
    model = parallel(model)
    train_step(model, x[rank::2])
    torch.save(trained(model), folder / f"{rank}.pt")


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh_of((2,)))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [nn.parallel.DistributedDataParallel, sharded])
def test_two_processes_train_as_one(
    parallel: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model, x = PoolAndUnpool(2, *WINDOW).double(), whole_numbers(4, 3, 8, 8)
    maxunpool_cuda.replace_max_pooling(model)
    assert returned_dtypes(model) == {"pool": torch.uint8}
    for parameter in model.parameters():
        parameter.data = whole_numbers(*parameter.shape)
    torch.save((model, x), tmp_path / "start.pt")
    in_two_processes(partial(train, parallel), tmp_path)
    train_step(model, x)
    assert all(p.grad.any() for p in model.parameters())
    for rank in range(2):
        shared = torch.load(tmp_path / f"{rank}.pt")
        for ours, theirs in zip(trained(model), shared, strict=True):
            assert same(ours, theirs)


def round_trip(dims: int, index_dtype: torch.dtype, reduce: str, x: Tensor) -> Results:
    """The values, the indices, what they are unpooled to, and its first and second derivatives."""
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    x = x.detach().requires_grad_()
    values, indices = pool(x, *WINDOW, return_indices=True, index_dtype=index_dtype)
    size = x.shape[-dims:]
    output = unpool(values, indices, *WINDOW, output_size=size, reduce=reduce)
    grad_output = output.detach().requires_grad_()
    (first,) = torch.autograd.grad(output, x, grad_output, create_graph=True)
    (second,) = torch.autograd.grad(first, grad_output, first.detach())
    return values, indices, output, first, second


@dataclass(frozen=True)
class Scenario:
    """A function of sharded tensors, to be what it is of whole ones."""

    function: Callable[..., Results]
    tensors: tuple[Tensor, ...]
    placements: tuple[Placements, ...]
    stays: bool = False  # the results lie where the tensors do, and nothing is sent
    mesh: tuple[int, ...] = (2,)

    def check(self) -> None:
        mesh = mesh_of(self.mesh)
        pairs = zip(self.tensors, self.placements, strict=True)
        shards = [distribute_tensor(tensor, mesh, placed) for tensor, placed in pairs]
        with CommDebugMode() as sent:
            results = self.function(*shards)
        assert not (self.stays and sent.get_total_counts())
        for result, whole in zip(results, self.function(*self.tensors), strict=True):
            assert result.shape == whole.shape
            assert result.placements == self.placements[0] or not self.stays
            assert same(result.full_tensor(), whole)


# Spatial dimensions, the shape of an input, how two processes share it, and whether they share the
# results alike. They do not where one of the two would be left with nothing.
SHARED: tuple[tuple[int, tuple[int, ...], Placement, bool], ...] = (
    (2, (4, 3, 7, 6), Replicate(), True),
    (2, (4, 3, 7, 6), Shard(0), True),
    (2, (4, 3, 7, 6), Shard(1), True),
    (2, (4, 3, 7, 6), Shard(2), False),
    (2, (4, 3, 7, 6), Shard(3), False),
    (2, (3, 2, 5, 6), Shard(0), True),
    (2, (1, 2, 5, 6), Shard(0), False),
    (2, (2, 1, 5, 6), Shard(1), False),
    (2, (2, 2, 5, 1), Shard(3), False),
    (2, (0, 2, 5, 6), Shard(0), False),
    (2, (0, 2, 5, 6), Shard(1), True),
    (2, (3, 5, 6), Shard(0), True),
    (2, (1, 5, 6), Shard(0), False),
    (2, (3, 5, 6), Shard(1), False),
    (1, (3, 2, 9), Shard(0), True),
    (1, (3, 2, 9), Shard(1), True),
    (1, (3, 2, 9), Shard(2), False),
    (1, (3, 9), Shard(0), True),
    (3, (2, 3, 4, 5, 3), Shard(0), True),
    (3, (2, 3, 4, 5, 3), Shard(1), True),
    (3, (2, 3, 4, 5, 3), Shard(4), False),
    (3, (3, 4, 5, 3), Shard(0), True),
    (3, (3, 4, 5, 3), Shard(1), False),
)
# The dtype of indices, and how unpooling reduces.
WAYS = (*((dtype, "last") for dtype in INDEX_DTYPES), (torch.int32, "sum"), (torch.uint8, "mean"))


@torch.inference_mode()
def inferred(x: Tensor) -> Results:
    """By modules, without a graph."""
    pool = maxunpool_cuda.MaxPool2d(2, return_indices=True, index_dtype=torch.uint8)
    values, indices = pool(x)
    return values, indices, maxunpool_cuda.MaxUnpool2d(2)(values, indices)


def scenarios() -> Iterator[Scenario]:
    """The same in both processes."""
    for (dims, shape, placement, stays), way in itertools.product(SHARED, WAYS):
        both = partial(round_trip, dims, *way)
        yield Scenario(both, (whole_numbers(*shape),), ((placement,),), stays)
    x, both = whole_numbers(4, 3, 7, 6), partial(round_trip, 2, torch.uint8, "last")
    for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        for mesh in ((1, 2), (2, 1)):
            yield Scenario(both, (x,), (placements,), True, mesh)
    x, indices = whole_numbers(4, 3, 4, 4), torch.randint(0, 9, (4, 3, 4, 4), dtype=torch.uint8)
    for placements in itertools.product((Replicate(), *map(Shard, range(3))), repeat=2):
        yield Scenario(
            lambda x, i: (F.max_unpool2d(x, i, 3, 2),),
            (x, indices),
            tuple((p,) for p in placements),
        )
    x = whole_numbers(4, 3, 20, 20)
    for size in (2, 3, 4, 17):  # the last beyond uint8 indices
        yield Scenario(lambda x, k=size: (F.max_pool2d(x, k),), (x,), ((Shard(0),),), True)
    yield Scenario(inferred, (x,), ((Shard(0),),), True)


def check_parts(kind: str) -> None:
    """Every element of the input is the sum, or the maximum, of what the processes have."""
    parts, mesh = whole_numbers(2, 4, 3, 6, 6), mesh_of((2,))
    x = DTensor.from_local(parts[mesh.get_local_rank()], mesh, (Partial(kind),))
    whole = parts.sum(0) if kind == "sum" else parts.amax(0)
    both = partial(round_trip, 2, torch.uint8, "sum")
    for result, one in zip(both(x), both(whole), strict=True):
        assert same(result.full_tensor(), one)


def run_checks(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    failures = []
    checks = [scenario.check for scenario in scenarios()]
    for check in (*checks, partial(check_parts, "sum"), partial(check_parts, "max")):
        try:
            check()
        except Exception:
            failures.append(f"{check}: {traceback.format_exc()}")
    (folder / f"{rank}.txt").write_text("\n".join(failures))


@pytest.mark.slow
def test_sharded_tensors(tmp_path: Path) -> None:
    in_two_processes(run_checks, tmp_path)
    for rank in range(2):
        failures = (tmp_path / f"{rank}.txt").read_text()
        assert not failures, failures


def run(program: str) -> None:
    # Not from the root, where the package has no compiled extension.
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# One of four processes, the others pretended. Each row: the mesh, a shape, how it is placed and how
# the results are. Four processes share five as two, two, one and none: a batch may be empty.
FOUR_PROCESSES = """
import torch
from torch import distributed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import maxunpool_cuda.functional as F

R, S = Replicate(), Shard
distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
for sizes, shape, placements, expected in (
    ((4,), (5, 4, 6, 6), (S(0),), (S(0),)),
    ((4,), (4, 7, 6, 6), (S(1),), (S(1),)),
    ((4,), (4, 5, 6, 6), (S(1),), (R,)),
    ((4,), (5, 6, 6), (S(0),), (R,)),
    ((2, 2), (3, 3, 6, 6), (S(0), S(1)), (S(0), S(1))),
    ((2, 2), (4, 5, 6, 6), (S(1), S(1)), (S(1), S(1))),
    ((2, 2), (4, 5, 6, 6), (S(0), S(2)), (S(0), R)),
    ((2, 2), (4, 5, 6, 6), (S(0), R), (S(0), R)),
):
    mesh = init_device_mesh("cpu", sizes)
    values, indices = F.max_pool2d(
        distribute_tensor(torch.rand(shape), mesh, placements), 2, return_indices=True
    )
    for result in (values, indices, F.max_unpool2d(values, indices, 2)):
        assert result.placements == expected, (sizes, shape, placements, result.placements)
"""


def test_no_process_is_without_channels() -> None:
    run(FOUR_PROCESSES)


LATE = """
import sys

import torch
from torch import distributed

there = "torch.distributed.tensor" in sys.modules

import maxunpool_cuda
import maxunpool_cuda.functional as F

F.max_pool2d(torch.rand(1, 2, 2), [2, 2])
assert ("torch.distributed.tensor" in sys.modules) == there


@torch.compile(fullgraph=True, backend="aot_eager")
def round_trip(x):
    values, indices = F.max_pool2d(x, 2, return_indices=True, index_dtype=torch.uint8)
    return F.max_unpool2d(values, indices, [2, 2])


from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(1 + torch.rand(2, 3, 4, 4), mesh, (Shard(1),)).requires_grad_()
result = round_trip(x)
assert result.placements == (Shard(1),)
whole = x.full_tensor()
assert result.full_tensor().equal(F.max_unpool2d(*F.max_pool2d(whole, 2, return_indices=True), 2))
result.sum().backward()
assert x.grad.full_tensor().equal((result.full_tensor() != 0).float())
maxunpool_cuda.set_fusion(True)  # which leaves a DTensor alone
assert round_trip(x).placements == (Shard(1),)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_dtensor_is_imported_late_and_met_while_compiling() -> None:
    run(LATE)
