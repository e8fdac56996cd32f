"""What only a GPU can show: streams, graphs, errors that come late, nothing that waits."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import Window, random_case, same
from reference import max_pool, max_unpool, max_unpool_backward

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import _ops

pytestmark = pytest.mark.cuda
POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
WINDOW = Window((12, 16), (2, 2), (2, 2), (0, 0), (1, 1), False)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    if torch.cuda.is_available():
        maxunpool_cuda.check_errors()
    yield
    if torch.cuda.is_available():
        maxunpool_cuda.check_errors()


def tensors(index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(1, 1, 2, 2, device="cuda")
    indices = torch.tensor([[[[0, 2], [8, 10]]]], device="cuda")
    indices[0, 0, 1, 0] += index
    return x, indices


@pytest.mark.sanitized
@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
@pytest.mark.parametrize("index", [8, -100, 2**32, -(2**40)])
def test_a_bad_index_leaves_the_context_alive(index: int, reduce: str) -> None:
    x, indices = tensors(index)
    output = F.max_unpool2d(x, indices, 2, reduce=reduce)
    message = f"Found an invalid max index: {8 + index} .* at position 2 of plane 0"
    with pytest.raises(RuntimeError, match=message):
        maxunpool_cuda.check_errors()
    maxunpool_cuda.check_errors()
    # The element is dropped, the others are where they belong.
    assert output.flatten().nonzero().flatten().tolist() == [0, 2, 10]
    x, indices = tensors()
    assert F.max_unpool2d(x, indices, 2).sum() == 4


@pytest.mark.sanitized
@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
@pytest.mark.parametrize(("window", "offset"), [((2, 2, 0), 4), ((3, 2, 1), 0), ((3, 2, 1), 255)])
def test_a_bad_offset_leaves_the_context_alive(
    window: tuple[int, int, int], offset: int, reduce: str
) -> None:
    """Beyond the window, or in the padding, which is left of the first row's second cell too."""
    x = torch.ones(1, 1, 2, 2, device="cuda")
    offsets = torch.full((1, 1, 2, 2), 4 if window[0] == 3 else 3, dtype=torch.uint8, device="cuda")
    offsets[0, 0, 0, 1] = offset
    output = F.max_unpool2d(x, offsets, *window, reduce=reduce)
    with pytest.raises(RuntimeError, match=rf"index: {offset} \(an offset .* at position 1 of"):
        maxunpool_cuda.check_errors()
    assert output.sum() == 3


def test_a_bad_index_is_raised_by_the_next_call() -> None:
    x, indices = tensors(100)
    F.max_unpool2d(x, indices, 2)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="Found an invalid max index: 108"):
        F.max_unpool2d(*tensors(), 2)
    assert F.max_unpool2d(*tensors(), 2).sum() == 4


def test_a_bad_index_in_the_backward() -> None:
    _, indices = tensors(100)
    grad = torch.ones(1, 1, 4, 4, device="cuda")
    result = _ops.max_unpool_backward(grad, indices, (4, 4), (2, 2), (2, 2), (0, 0), "last")
    with pytest.raises(RuntimeError, match="Found an invalid max index: 108"):
        maxunpool_cuda.check_errors()
    assert result.flatten().tolist() == [1, 1, 0, 1]


def test_errors_at_once_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")
    with pytest.raises(RuntimeError, match="Found an invalid max index: 108"):
        F.max_unpool2d(*tensors(100), 2)


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
    bad, good = tensors(100), tensors()
    F.max_unpool2d(*good, 2)
    F.max_unpool2d(*bad, 2)
    torch.cuda.synchronize()
    monkeypatch.setenv("MAXUNPOOL_CUDA_SYNC_CHECK", "1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = F.max_unpool2d(*good, 2)
        maxunpool_cuda.check_errors()
        F.max_unpool2d(*bad, 2)
    with pytest.raises(RuntimeError, match="Found an invalid max index: 108"):
        maxunpool_cuda.check_errors()
    for _ in range(3):
        graph.replay()
        with pytest.raises(RuntimeError, match="Found an invalid max index: 108"):
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


def test_a_graph_can_be_captured(rng: random.Random) -> None:
    """Forward and backward, replayed on other values."""
    for _ in range(10):
        case = random_case(rng, dtypes=(torch.int32,))
        x, indices, grad = (t.cuda() for t in (case.input, case.indices, case.grad_output))
        arguments = case.geometry.arguments(case.reduce)

        def both() -> tuple[torch.Tensor, torch.Tensor]:
            return (
                _ops.max_unpool(x, indices, *arguments),  # noqa: B023
                _ops.max_unpool_backward(grad, indices, *arguments),  # noqa: B023
            )

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both()  # what is allocated once is allocated now
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, gathered = both()
        for _ in range(2):
            x.copy_(torch.randint_like(x, 100))
            grad.copy_(torch.randint_like(grad, 100))
            graph.replay()
            size = case.geometry.output
            assert same(output, max_unpool(x, case.positions, size, case.reduce))
            assert same(gathered, max_unpool_backward(grad, case.positions, size, case.reduce))


def test_pooling_and_back_in_a_graph() -> None:
    """Each operator is one launch, with indices of one byte; nothing waits."""
    x = torch.rand(2, 8, *WINDOW.sizes, device="cuda")
    leaf, weight = x.clone().requires_grad_(), torch.rand_like(x)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, offsets = F.max_pool2d(x, 2, return_indices=True, index_dtype=torch.uint8)
        output = F.max_unpool2d(pooled, offsets, 2)
        return output.detach(), torch.autograd.grad(output, x, weight)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(leaf)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(leaf)
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
    """Inputs made on one stream, used on another and freed at once."""
    side = torch.cuda.Stream()
    for _ in range(20):
        case = random_case(rng, reduce="last", dtypes=(torch.float32,))
        x, indices = case.input.cuda(), case.indices.cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            output = _ops.max_unpool(x, indices, *case.geometry.arguments("last"))
        x.record_stream(side)
        indices.record_stream(side)
        del x, indices
        torch.full((4096,), float("nan"), device="cuda")  # takes the memory, if it is free
        side.synchronize()
        assert same(output, max_unpool(case.input, case.positions, case.geometry.output, "last"))


def test_side_streams_and_devices(rng: random.Random) -> None:
    for device in range(torch.cuda.device_count()):
        stream = torch.cuda.Stream(device)
        case = random_case(rng, reduce="last", dtypes=(torch.float32,))
        with torch.cuda.stream(stream):
            x, indices = case.input.to(f"cuda:{device}"), case.indices.to(f"cuda:{device}")
            output = _ops.max_unpool(x, indices, *case.geometry.arguments("last"))
        stream.synchronize()
        expected = max_unpool(case.input, case.positions, case.geometry.output, "last")
        assert same(output, expected)


@pytest.mark.sanitized
@pytest.mark.parametrize("size", [20, 224, 640], ids=["one launch", "shared memory", "workspace"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_any_indices(size: int, layout: torch.memory_format) -> None:
    """The kernels for indices outside their own windows, for planes of each size."""
    x = torch.rand(2, 40, size // 2, size // 2).contiguous(memory_format=layout)
    indices = torch.randint(size**2, x.shape).contiguous(memory_format=layout)
    grad = torch.rand(2, 40, size, size).contiguous(memory_format=layout)
    geometry = ((size, size), (2, 2), (2, 2), (0, 0), "last")
    output = _ops.max_unpool(x.cuda(), indices.cuda(), *geometry)
    assert same(output.cpu(), _ops.max_unpool(x, indices, *geometry))
    gathered = _ops.max_unpool_backward(grad.cuda(), indices.cuda(), *geometry)
    assert same(gathered.cpu(), _ops.max_unpool_backward(grad, indices, *geometry))


def test_a_bad_index_beside_a_stray_one() -> None:
    x = torch.rand(4, 64, 112, 112, device="cuda")
    indices = torch.randint(224 * 224, x.shape, device="cuda")
    indices[3, 5, 111, 7] = 224 * 224
    F.max_unpool2d(x, indices, 2)
    with pytest.raises(RuntimeError, match=f"index: {224 * 224} .* at position 12439 of plane 197"):
        maxunpool_cuda.check_errors()


def test_many_runs_give_the_same_bits() -> None:
    x = torch.rand(4, 64, 112, 112, device="cuda")
    indices = torch.randint(0, 224 * 224, x.shape, device="cuda")
    first = F.max_unpool2d(x, indices, 2)
    for _ in range(10):
        assert same(F.max_unpool2d(x, indices, 2), first)


def test_tensors_on_two_devices_are_refused() -> None:
    x, indices = tensors()
    with pytest.raises(RuntimeError, match="on the same device but got"):
        F.max_unpool2d(x, indices.cpu(), 2)
    with pytest.raises(RuntimeError, match="on the same device but got"):
        F.max_unpool2d(x.cpu(), indices, 2)
