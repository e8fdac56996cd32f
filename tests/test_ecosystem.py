"""What surrounds an operator: autocast, tracing, copies, threads, processes, tensor subclasses."""

import copy
import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
from cases import same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import maxunpool_cuda
import maxunpool_cuda.functional as F


class RoundTrip(nn.Module):
    """A convolution, a pool and its unpooling: small, and with overlapping windows."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3, padding=1)
        self.pool = nn.MaxPool2d(3, 2, 1, return_indices=True)
        self.unpool = maxunpool_cuda.MaxUnpool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return self.unpool(*self.pool(x), output_size=x.shape)


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(2, 3, 4, 4), torch.randint(0, 64, (2, 3, 4, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x, indices = example()
    with torch.autocast("cpu", dtype):
        assert F.max_unpool2d(x, indices, 2).dtype == torch.float32
        assert F.max_unpool2d(x.to(dtype), indices, 2).dtype == dtype
        loss = RoundTrip()(torch.rand(1, 1, 8, 8)).float().sum()
    loss.backward()


def test_deterministic_algorithms_raise_no_alert() -> None:
    torch.use_deterministic_algorithms(True)
    x, indices = example()
    for reduce in ("last", "sum", "mean"):
        leaf = x.clone().requires_grad_()
        F.max_unpool2d(leaf, indices, 2, reduce=reduce).sum().backward()
        assert leaf.grad is not None


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace() -> None:
    """For any batch, and the spatial sizes it was traced with."""
    x, indices = example()
    traced = torch.jit.trace(maxunpool_cuda.MaxUnpool2d(2), (x, indices))
    assert same(traced(x[:1] * 2, indices[:1]), F.max_unpool2d(x[:1] * 2, indices[:1], 2))


def test_jit_script_is_refused_clearly() -> None:
    for module in (maxunpool_cuda.MaxUnpool2d(2), nn.Sequential(maxunpool_cuda.MaxUnpool1d(2))):
        with pytest.raises(NotImplementedError, match=r"MaxUnpool\dd: expected torch.compile"):
            torch.jit.script(module)


def test_whole_models_copy_and_pickle(tmp_path: Path) -> None:
    model, x = RoundTrip(), torch.rand(1, 1, 8, 8)
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert same(other(x), model(x))
    assert model.state_dict().keys() == {"convolution.weight", "convolution.bias"}


def test_replicas_of_data_parallel() -> None:
    module = maxunpool_cuda.MaxUnpool2d(2, reduce="mean")
    x, indices = example()
    assert same(module._replicate_for_data_parallel()(x, indices), module(x, indices))


def test_threads_of_the_caller() -> None:
    x, indices = example()
    expected = F.max_unpool2d(x, indices, 2)
    (gradient,) = torch.autograd.grad(
        F.max_unpool2d(leaf := x.clone().requires_grad_(), indices, 2).sum(), leaf
    )
    wrong = []

    def work() -> None:
        for _ in range(200):
            leaf = x.clone().requires_grad_()
            output = F.max_unpool2d(leaf, indices, 2)
            (grad,) = torch.autograd.grad(output.sum(), leaf)
            if not (same(output, expected) and same(grad, gradient)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Unpooled(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        x, indices = example()
        return F.max_unpool2d(x + i, indices, 2)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start: str) -> None:
    F.max_unpool2d(*example(), 2)  # so that a fork has something to inherit
    context = multiprocessing.get_context(start)
    loader = DataLoader(Unpooled(), batch_size=2, num_workers=2, multiprocessing_context=context)
    x, indices = example()
    expected = torch.stack([F.max_unpool2d(x + i, indices, 2) for i in range(6)])
    assert same(torch.cat(list(loader)), expected)


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-8, 8, shape).float()


def train_step(model: nn.Module, x: Tensor) -> None:
    # Powers of two: means and sums of whole numbers are exact in any order.
    model(x).sum().div(len(x)).backward()


def distributed_worker(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model, x = torch.load(f"{folder}/start.pt", weights_only=False)
    parallel = nn.parallel.DistributedDataParallel(model)
    train_step(parallel, x[rank::2])
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], f"{folder}/gradients.pt")
    torch.distributed.destroy_process_group()
    # PyTorch aborts now and then as such a process ends, with torch.nn's unpooling too.
    os._exit(0)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="no gloo")
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = RoundTrip(), whole_numbers(4, 1, 8, 8)
    for parameter in model.parameters():
        parameter.data = whole_numbers(*parameter.shape)
    torch.save((model, x), tmp_path / "start.pt")
    torch.multiprocessing.spawn(distributed_worker, (str(tmp_path),), nprocs=2)
    train_step(model, x)
    gradients = torch.load(tmp_path / "gradients.pt")
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad.any()
        assert same(parameter.grad, gradient)


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


@pytest.mark.parametrize("which", [0, 1])
def test_tensor_subclasses(which: int) -> None:
    tensors = list(example())
    expected = F.max_unpool2d(*tensors, 2, reduce="sum")
    tensors[which] = tensors[which].as_subclass(Tagged)
    output = F.max_unpool2d(*tensors, 2, reduce="sum")
    assert type(output) is Tagged
    assert same(output.as_subclass(Tensor), expected)


@pytest.mark.parametrize("which", [0, 1])
def test_torch_function(which: int) -> None:
    tensors = list(example())
    expected = F.max_unpool2d(*tensors, 2, output_size=(9, 8), reduce="mean")
    tensors[which] = Logged(tensors[which])
    name, output = F.max_unpool2d(*tensors, 2, output_size=(9, 8), reduce="mean")
    assert name == "max_unpool2d"
    assert same(output, expected)
    name, output = maxunpool_cuda.MaxUnpool2d(2, reduce="mean")(*tensors, (9, 8))
    assert same(output, expected)
