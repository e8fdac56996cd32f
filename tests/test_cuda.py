"""What only a GPU can show: streams, graphs, errors that come late, nothing that waits."""

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from cases import Window, random_case, same
from reference import max_pool, max_unpool, max_unpool_backward

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

pytestmark = pytest.mark.cuda
Results = tuple[torch.Tensor, ...]
POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
WINDOW = Window((12, 16), (2, 2), (2, 2), (0, 0), (1, 1), False)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    if torch.cuda.is_available():
        maxunpool_cuda.check_errors()
    yield
    if torch.cuda.is_available():
        maxunpool_cuda.check_errors()


def tensors(index: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(1, 1, 2, 2, device="cuda")
    return x, torch.tensor([[[[0, 2], [index, 10]]]], device="cuda")


def raised(words: str = "108 ") -> AbstractContextManager:
    return pytest.raises(RuntimeError, match=f"Found an invalid max index: {words}")


@pytest.mark.sanitized
@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
@pytest.mark.parametrize("index", [16, -92, 2**32 + 8, 8 - 2**40])
def test_a_bad_index_leaves_the_context_alive(index: int, reduce: str) -> None:
    output = F.max_unpool2d(*tensors(index), 2, reduce=reduce)
    with raised(f"{index} .* at position 2 of plane 0"):
        maxunpool_cuda.check_errors()
    maxunpool_cuda.check_errors()
    # The element is dropped, the others are where they belong.
    assert output.flatten().nonzero().flatten().tolist() == [0, 2, 10]
    assert F.max_unpool2d(*tensors(), 2).sum() == 4


@pytest.mark.sanitized
@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
@pytest.mark.parametrize(("window", "offset"), [((2, 2, 0), 4), ((3, 2, 1), 0), ((3, 2, 1), 255)])
def test_a_bad_offset_leaves_the_context_alive(
    window: tuple[int, int, int], offset: int, reduce: str
) -> None:
    """Beyond the window, or in the padding, which is left of the first row's second cell too."""
    offsets = torch.full((1, 1, 2, 2), 4 if window[0] == 3 else 3, dtype=torch.uint8, device="cuda")
    offsets[0, 0, 0, 1] = offset
    output = F.max_unpool2d(tensors()[0], offsets, *window, reduce=reduce)
    with raised(rf"{offset} \(an offset .* at position 1 of"):
        maxunpool_cuda.check_errors()
    assert output.sum() == 3


def test_a_bad_index_is_raised_by_the_next_call() -> None:
    F.max_unpool2d(*tensors(108), 2)
    torch.cuda.synchronize()
    with raised():
        F.max_unpool2d(*tensors(), 2)
    assert F.max_unpool2d(*tensors(), 2).sum() == 4


def test_a_bad_index_in_the_backward() -> None:
    _, indices = tensors(108)
    grad = torch.ones(1, 1, 4, 4, device="cuda")
    result = _ops.max_unpool_backward(grad, indices, (4, 4), (2, 2), (2, 2), (0, 0), "last")
    with raised():
        maxunpool_cuda.check_errors()
    assert result.flatten().tolist() == [1, 1, 0, 1]


def test_errors_at_once_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")
    with raised():
        F.max_unpool2d(*tensors(108), 2)


def some_calls(rng: random.Random) -> Callable[[], None]:
    """Calls of every operator, to be made again and again."""
    cases = [random_case(rng, dtypes=(torch.float32,)) for _ in range(20)]
    inputs = [(c, c.input.cuda(), c.indices.cuda(), c.grad_output.cuda()) for c in cases]

    def call() -> None:
        for case, x, indices, grad in inputs:
            arguments = case.geometry.arguments(case.reduce)
            _ops.max_unpool(x, indices, *arguments)
            _ops.max_unpool_backward(grad, indices, *arguments)
            POOLS[case.geometry.dims - 1](grad, 1, return_indices=True, index_dtype=torch.uint8)

    call()  # loads the kernels, and allocates
    torch.cuda.synchronize()
    return call


def test_pytorch_sees_nothing_wait(rng: random.Random) -> None:
    call = some_calls(rng)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("checks", [False, True], ids=["as ever", "errors at once"])
def test_only_who_asks_for_errors_at_once_waits(
    checks: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls return while the device is at work that was given to it before."""
    call = some_calls(rng)
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", str(int(checks)))
    torch.cuda._sleep(2_000_000_000)  # about a second
    awake = torch.cuda.Event()
    awake.record()
    call()
    assert awake.query() == checks


def test_one_bad_call_raises_once() -> None:
    """Also where its kernel is still at work, and finds more, when it is raised."""
    x = torch.ones(64, 64, 256, 256, device="cuda")
    indices = torch.full(x.shape, 2**20, dtype=torch.int32, device="cuda")
    good = tensors()
    for _ in range(5):
        F.max_unpool2d(x, indices, 2)
        raised = 0
        for _ in range(20_000):
            try:
                F.max_unpool2d(*good, 2)
            except RuntimeError:
                raised += 1
        maxunpool_cuda.check_errors()
        assert raised == 1


def test_a_capture_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was reported before it; what its replays report is raised after each of them."""
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "0")
    bad, good = tensors(108), tensors()
    F.max_unpool2d(*good, 2)
    F.max_unpool2d(*bad, 2)
    torch.cuda.synchronize()
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = F.max_unpool2d(*good, 2)
        maxunpool_cuda.check_errors()
        F.max_unpool2d(*bad, 2)
    with raised():
        maxunpool_cuda.check_errors()
    for _ in range(3):
        graph.replay()
        with raised():
            maxunpool_cuda.check_errors()
        maxunpool_cuda.check_errors()
        assert output.sum() == 4


FORK = """
import os
import maxunpool_cuda
maxunpool_cuda.check_errors()
child = os.fork()
if child == 0:
    import torch
    assert torch.ones(2, device="cuda").sum() == 2
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_that_only_asked_for_errors_can_fork() -> None:
    """One that has used CUDA cannot."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def captured(call: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of it, and the results that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # what is allocated once is allocated now
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def test_a_graph_can_be_captured(rng: random.Random) -> None:
    """Forward and backward, replayed on other values."""
    for _ in range(10):
        case = random_case(rng, dtypes=(torch.int32,))
        x, indices, grad = (t.cuda() for t in (case.input, case.indices, case.grad_output))
        size, *window, reduce = case.geometry.arguments(case.reduce)
        operators = ((_ops.max_unpool, x), (_ops.max_unpool_backward, grad))
        graph, results = captured(
            lambda: tuple(op(t, indices, size, *window, reduce) for op, t in operators)  # noqa: B023
        )
        for _ in range(2):
            x.copy_(torch.randint_like(x, 100))
            grad.copy_(torch.randint_like(grad, 100))
            graph.replay()
            assert same(results[0], max_unpool(x, case.positions, size, reduce))
            assert same(results[1], max_unpool_backward(grad, case.positions, size, reduce))


def test_pooling_and_back_in_a_graph() -> None:
    """Each operator is one launch, with indices of one byte; nothing waits."""
    leaf = torch.rand(2, 8, *WINDOW.sizes, device="cuda", requires_grad=True)
    weight = torch.rand_like(leaf)

    def step() -> Results:
        pooled, offsets = F.max_pool2d(leaf, 2, return_indices=True, index_dtype=torch.uint8)
        output = F.max_unpool2d(pooled, offsets, 2)
        return output.detach(), torch.autograd.grad(output, leaf, weight)[0]

    graph, results = captured(step)
    for _ in range(2):
        with torch.no_grad():
            leaf.copy_(torch.rand_like(leaf))
        graph.replay()
        pooled, indices = max_pool(leaf, *WINDOW.arguments, torch.int64)
        output = max_unpool(pooled, indices, WINDOW.sizes, "last")
        # What unpooling puts where the maximum was, pooling's gradient puts there as well.
        kept = max_unpool_backward(weight, indices, WINDOW.sizes, "last")
        assert same(results[0], output)
        assert same(results[1], max_unpool(kept, indices, WINDOW.sizes, "last"))


def test_memory_of_another_stream(rng: random.Random) -> None:
    """Inputs made on one stream, used on another and freed at once; of every device."""
    for device in [*range(torch.cuda.device_count())] * 20:
        side = torch.cuda.Stream(device)
        case = random_case(rng, reduce="last", dtypes=(torch.float32,))
        x, indices = (tensor.to(f"cuda:{device}") for tensor in (case.input, case.indices))
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            output = _ops.max_unpool(x, indices, *case.geometry.arguments("last"))
        x.record_stream(side)
        indices.record_stream(side)
        del x, indices
        torch.full((4096,), math.nan, device=f"cuda:{device}")  # takes the memory, if it is free
        side.synchronize()
        assert same(output, max_unpool(case.input, case.positions, case.geometry.output, "last"))


@pytest.mark.sanitized
@pytest.mark.parametrize("size", [20, 224, 640], ids=["one launch", "shared memory", "workspace"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_any_indices(size: int, layout: torch.memory_format) -> None:
    """The kernels for indices outside their own windows, for planes of each size, in every run."""
    x = torch.rand(2, 40, size // 2, size // 2).contiguous(memory_format=layout)
    indices = torch.randint(size**2, x.shape).contiguous(memory_format=layout)
    grad = torch.rand(2, 40, size, size).contiguous(memory_format=layout)
    geometry = ((size, size), (2, 2), (2, 2), (0, 0), "last")
    for operator, values in ((_ops.max_unpool, x), (_ops.max_unpool_backward, grad)):
        expected = operator(values, indices, *geometry)
        values, on_device = values.cuda(), indices.cuda()
        for _ in range(5):
            assert same(operator(values, on_device, *geometry).cpu(), expected)


def test_a_bad_index_beside_a_stray_one() -> None:
    x = torch.rand(4, 64, 112, 112, device="cuda")
    indices = torch.randint(224 * 224, x.shape, device="cuda")
    indices[3, 5, 111, 7] = 224 * 224
    F.max_unpool2d(x, indices, 2)
    with raised(f"{224 * 224} .* at position 12439 of plane 197"):
        maxunpool_cuda.check_errors()
