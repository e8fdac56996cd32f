"""What surrounds an operator: autocast, tracing, copies, threads, tensor subclasses."""

import copy
import multiprocessing
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from cases import INDEX_DTYPES, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import maxunpool_cuda
import maxunpool_cuda.functional as F


class RoundTrip(nn.Module):
    """A convolution, a pool and its unpooling: small, and with overlapping windows."""

    def __init__(self, index_dtype: torch.dtype) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3, padding=1)
        self.pool = maxunpool_cuda.MaxPool2d(3, 2, 1, return_indices=True, index_dtype=index_dtype)
        self.unpool = maxunpool_cuda.MaxUnpool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return self.unpool(*self.pool(x), output_size=x.shape)


WINDOW = (3, 2)  # overlaps
every_index_dtype = pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)


def example(index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    most = 9 if index_dtype == torch.uint8 else 81
    return torch.rand(2, 3, 4, 4), torch.randint(0, most, (2, 3, 4, 4), dtype=index_dtype)


@every_index_dtype
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    x, indices = example(index_dtype)
    with torch.autocast("cpu", dtype):
        assert F.max_unpool2d(x, indices, *WINDOW).dtype == torch.float32
        assert F.max_unpool2d(x.to(dtype), indices, *WINDOW).dtype == dtype
        assert F.max_pool2d(x, 2).dtype == torch.float32
        assert F.max_pool2d(x.to(dtype), 2).dtype == dtype
        loss = RoundTrip(index_dtype)(torch.rand(1, 1, 8, 8)).float().sum()
    loss.backward()


@every_index_dtype
def test_deterministic_algorithms_raise_no_alert(index_dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)
    x, indices = example(index_dtype)
    for reduce in ("last", "sum", "mean"):
        leaf = x.clone().requires_grad_()
        F.max_unpool2d(leaf, indices, *WINDOW, reduce=reduce).sum().backward()
        assert leaf.grad is not None


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters())))


@every_index_dtype
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, index_dtype: torch.dtype) -> None:
    model, x = RoundTrip(index_dtype), torch.rand(1, 1, 8, 8, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    output.pow(2).sum().backward()
    assert all(map(same, (p.grad for p in model.parameters()), gradients(model, x)))


@every_index_dtype
def test_saved_tensors_elsewhere(index_dtype: torch.dtype) -> None:
    model, x = RoundTrip(index_dtype), torch.rand(1, 1, 8, 8)
    expected = gradients(model, x)
    kept = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        assert all(map(same, gradients(model, x), expected))
    # Those of the pooling and those of the unpooling.
    assert [t.dtype for t in kept].count(index_dtype) == 2


@every_index_dtype
def test_inference_mode(index_dtype: torch.dtype) -> None:
    model, x = RoundTrip(index_dtype), torch.rand(1, 1, 8, 8)
    with torch.inference_mode():
        output = model(x)
    assert output.is_inference()
    assert same(output, model(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@every_index_dtype
def test_jit_trace(index_dtype: torch.dtype) -> None:
    """For any batch, and the spatial sizes it was traced with."""
    x, indices = example(index_dtype)
    traced = torch.jit.trace(maxunpool_cuda.MaxUnpool2d(*WINDOW), (x, indices))
    assert same(traced(x[:1] * 2, indices[:1]), F.max_unpool2d(x[:1] * 2, indices[:1], *WINDOW))
    model, images = RoundTrip(index_dtype), torch.rand(3, 1, 8, 8)
    traced = torch.jit.trace(model, images)
    assert same(traced(images[:2] * 2), model(images[:2] * 2))
    assert all(map(same, gradients(traced, images), gradients(model, images)))


def test_jit_script_is_refused_clearly() -> None:
    for module in (
        maxunpool_cuda.MaxUnpool2d(*WINDOW),
        nn.Sequential(maxunpool_cuda.MaxUnpool1d(2)),
    ):
        with pytest.raises(NotImplementedError, match=r"MaxUnpool\dd: expected torch.compile"):
            torch.jit.script(module)


@every_index_dtype
def test_whole_models_copy_and_pickle(tmp_path: Path, index_dtype: torch.dtype) -> None:
    model, x = RoundTrip(index_dtype), torch.rand(1, 1, 8, 8)
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert same(other(x), model(x))
    assert model.state_dict().keys() == {"convolution.weight", "convolution.bias"}


@every_index_dtype
def test_replicas_of_data_parallel(index_dtype: torch.dtype) -> None:
    module = maxunpool_cuda.MaxUnpool2d(*WINDOW, reduce="mean")
    x, indices = example(index_dtype)
    assert same(module._replicate_for_data_parallel()(x, indices), module(x, indices))


@every_index_dtype
def test_threads_of_the_caller(index_dtype: torch.dtype) -> None:
    x, indices = example(index_dtype)
    expected = F.max_unpool2d(x, indices, *WINDOW)
    (gradient,) = torch.autograd.grad(
        F.max_unpool2d(leaf := x.clone().requires_grad_(), indices, *WINDOW).sum(), leaf
    )
    wrong = []

    def work() -> None:
        for _ in range(200):
            leaf = x.clone().requires_grad_()
            output = F.max_unpool2d(leaf, indices, *WINDOW)
            (grad,) = torch.autograd.grad(output.sum(), leaf)
            if not (same(output, expected) and same(grad, gradient)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def run_alone(script: str, *arguments: str) -> str:
    """What a program prints that may end the process it runs in."""
    command = [sys.executable, "-c", script, *arguments]
    # Not from the root, where the package has no compiled extension.
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout


BACKWARD_TWICE = """
import sys, threading, torch, maxunpool_cuda.functional as F
operator, retain = sys.argv[1], sys.argv[2] == "retain"
outcomes = []

def backward(output, barrier, retain_graph):
    barrier.wait()
    try:
        output.backward(retain_graph=retain_graph)
        outcomes.append("done")
    except RuntimeError as error:
        outcomes.append(str(error).split(" (")[0])

for _ in range(1000):
    leaf = torch.rand(1, 1, 4, 4, requires_grad=True)
    if operator == "pool":
        output = F.max_pool2d(leaf, 2).sum()
    else:
        output = F.max_unpool2d(leaf, torch.zeros(1, 1, 4, 4, dtype=torch.int64), 2).sum()
    barrier = threading.Barrier(2)
    arguments = [(output, barrier, False), (output, barrier, retain)]
    threads = [threading.Thread(target=backward, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(outcomes), *sorted(set(outcomes)), sep="; ")
"""


@pytest.mark.parametrize("retain", ["retain", "release"])
@pytest.mark.parametrize("operator", ["pool", "unpool"])
def test_two_threads_run_backward_through_one_graph(operator: str, retain: str) -> None:
    """The second may find its variables released, which is an error and no more."""
    count, *outcomes = run_alone(BACKWARD_TWICE, operator, retain).strip().split("; ")
    assert int(count) == 2000
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


class Unpooled(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        return torch.stack([F.max_unpool2d(*example(t), *WINDOW) * i for t in INDEX_DTYPES])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start: str) -> None:
    Unpooled()[0]  # so that a fork has something to inherit
    context = multiprocessing.get_context(start)
    loader = DataLoader(Unpooled(), batch_size=2, num_workers=2, multiprocessing_context=context)
    expected = torch.stack([Unpooled()[i] for i in range(6)])
    assert same(torch.cat(list(loader)), expected)


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


@every_index_dtype
@pytest.mark.parametrize("which", [0, 1])
def test_tensor_subclasses(which: int, index_dtype: torch.dtype) -> None:
    tensors = list(example(index_dtype))
    expected = F.max_unpool2d(*tensors, *WINDOW, reduce="sum")
    tensors[which] = tensors[which].as_subclass(Tagged)
    output = F.max_unpool2d(*tensors, *WINDOW, reduce="sum")
    assert type(output) is Tagged
    assert same(output.as_subclass(Tensor), expected)


@every_index_dtype
@pytest.mark.parametrize("which", [0, 1])
def test_torch_function(which: int, index_dtype: torch.dtype) -> None:
    tensors = list(example(index_dtype))
    expected = F.max_unpool2d(*tensors, *WINDOW, output_size=(10, 9), reduce="mean")
    tensors[which] = Logged(tensors[which])
    name, output = F.max_unpool2d(*tensors, *WINDOW, output_size=(10, 9), reduce="mean")
    assert name == "max_unpool2d"
    assert same(output, expected)
    name, output = maxunpool_cuda.MaxUnpool2d(*WINDOW, reduce="mean")(*tensors, (10, 9))
    assert same(output, expected)


def models_of_pools(dims: int) -> tuple[nn.Module, nn.Module]:
    """One of torch.nn's, and it converted."""
    pool = getattr(nn, f"MaxPool{dims}d")
    model = nn.Sequential(nn.ReLU(), pool(3, 2, 1), pool(2, ceil_mode=True))
    converted = copy.deepcopy(model)
    for module in converted[1:]:
        module.__class__ = getattr(maxunpool_cuda, f"MaxPool{dims}d")
    return model, converted


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_quantized_tensors_are_pooled_by_torch(dims: int, dtype: torch.dtype) -> None:
    model, converted = models_of_pools(dims)
    x = torch.quantize_per_tensor(torch.rand(2, 3, *[9] * dims) - 0.5, 0.01, 7, dtype)
    got, expected = converted(x), model(x)
    assert got.qscheme() == expected.qscheme()
    assert (got.q_scale(), got.q_zero_point()) == (expected.q_scale(), expected.q_zero_point())
    assert torch.equal(got.int_repr(), expected.int_repr())


@pytest.mark.parametrize("dims", [2, 3])
def test_mkldnn_tensors_are_pooled_by_torch(dims: int) -> None:
    model, converted = models_of_pools(dims)
    x = torch.randn(2, 3, *[9] * dims).to_mkldnn()
    got, expected = converted(x), model(x)
    assert got.layout == expected.layout == torch._mkldnn
    assert same(got.to_dense(), expected.to_dense())
