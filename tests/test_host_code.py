# SPDX-License-Identifier: BSD-3-Clause
"""The host code of csrc/cuda as nvcc compiled it, in PyTorch's CUDA build, without a GPU.

Other tests without a GPU call the host code that g++ compiled. nvcc makes other code of it:
of a call from the host to a __device__ function, exit(1). emulation/runtime.py says how there is a
device "cuda" here.
"""

import os

import pytest
import torch
from emulation import runtime

# make check-cuda, which is there for these tests, does not accept that without a GPU none can run.
IS_REQUIRED = os.environ.get("MAXUNPOOL_HOST_CODE") == "1" and not torch.cuda.is_available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(runtime.why_not()) and not IS_REQUIRED, reason=runtime.why_not()),
]

BEGIN = """
import os, random, sys
import cases, emulation, failures, maxunpool_cuda, torch
import maxunpool_cuda.functional as F
from emulation import runtime

runtime.connect()
failures.device = "cuda"
rng = random.Random(os.environ["MAXUNPOOL_SEED"])
emulation.library().configure(rng.getrandbits(31), "")

def needs_no_copy(call):
    # Else PyTorch makes tensors contiguous by a kernel of its own, which does not run here.
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(call.tensors[0].dim())
    formats = [torch.contiguous_format, *filter(None, [last])]
    return any(all(t.is_contiguous(memory_format=f) for t in call.tensors) for f in formats)
"""

RESULTS = """
from test_emulation import calls_of_every_kernel

calls = [call for call in calls_of_every_kernel(rng) if needs_no_copy(call)]
emulation.library().take_launched()
failures.check_each(calls, lambda call: call.verify("cuda"))
print("calls:", len(calls))
print("kernels:", *sorted({*emulation.library().take_launched()}))
"""

TABLES = """
import test_dispatch

for case in rng.sample(test_dispatch.CASES, 1000):
    call = case.draw(rng).moved("cuda")
    assert needs_no_copy(call)
    launched = test_dispatch.launched(call)
    assert launched == case.expected(), (case, launched)
print("as the tables say")
"""

ERRORS = """
drawn = [cases.draw(rng, operator) for operator in ("unpool", "gradient") * 20]
drawn = [cases.with_invalid_index(call, rng) for call in drawn]
calls = [call for call in drawn if needs_no_copy(call)]
late = 0
for call in calls:
    os.environ["MAXUNPOOL_CUDA_SYNC_CHECK"] = "1"
    call.verify_error("cuda")
    os.environ["MAXUNPOOL_CUDA_SYNC_CHECK"] = "0"
    call.moved("cuda").on()
    try:
        maxunpool_cuda.check_errors()
    except RuntimeError as error:
        assert "Found an invalid max index" in str(error)
        late += 1
    maxunpool_cuda.check_errors()  # it is raised once
print(late, "of", len(calls), "raised late")
"""

OUT_OF_MEMORY = """
side = 2**25  # of a plane of 2^52 bytes
cell = torch.zeros(1, 1, 1, 1, device="cuda")
index = torch.zeros(1, 1, 1, 1, device="cuda", dtype=torch.int64)
calls = {
    "function": lambda: F.max_unpool2d(cell, index, side),
    "operator": lambda: torch.ops.maxunpool_cuda.max_unpool(
        cell, index, [side, side], [side, side], [side, side], [0, 0], "last"
    ),
    "torch": lambda: torch.empty(side, side, device="cuda"),
}
for name, call in calls.items():
    try:
        call()
    except torch.OutOfMemoryError as error:
        print(name, str(error).partition(". GPU")[0])

# From now on there is room for what is cached alone, in blocks of 512 bytes. The first one that is
# freed is for the result, the second one for the flags of the fix-up kernel.
torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / 2**33)
blocks = []
try:
    while True:
        blocks.append(torch.empty(512, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    del blocks[-1]
try:
    F.max_unpool2d(cell, index, 2)
except torch.OutOfMemoryError as error:
    print("workspace", str(error).partition(". GPU")[0])
del blocks[-1]
assert F.max_unpool2d(cell, index, 2).shape == (1, 1, 2, 2)
"""

DETERMINISTIC = """
torch.use_deterministic_algorithms(True)
assert torch.utils.deterministic.fill_uninitialized_memory
operators = ("unpool", "gradient", "unpool offsets", "gradient offsets", "pool") * 20
drawn = [cases.draw(rng, operator, layout="contiguous") for operator in operators]
calls = [call.moved("cuda") for call in drawn if needs_no_copy(call)]
cell = torch.zeros(1, 1, 1)
F.max_unpool1d(cell.cuda(), cell.long().cuda(), 2)  # the first call makes the device's error record
for call in calls:
    runtime.take_log()
    results = call.on()
    log = runtime.take_log()
    kernels = [symbol for symbol in log if "maxunpool_cuda" in symbol]
    is_flat = call.name != "max_pool" and call.tensors[1].dtype != torch.uint8
    has_fixup = is_flat and (call.name == "max_unpool" or call.arguments[-1] == "last")
    assert len(kernels) == 1 + has_fixup, (call.name, call.arguments, log)
    allocations = ["cudaMalloc"] * (len(results) + has_fixup)
    assert sorted(log) == sorted(allocations + kernels), (call.name, call.arguments, log)
print("calls:", len(calls))
torch.empty(5, device="cuda")  # which PyTorch fills
print("PyTorch's:", *runtime.take_log())
"""

CAPTURED = """
x = torch.rand(2, 3, 16, 16)
pooled, indices = F.max_pool2d(x, 2, return_indices=True)
there = pooled.cuda(), indices.cuda()
graph = torch.cuda.CUDAGraph()
runtime.take_log()
with torch.cuda.graph(graph):
    output = F.max_unpool2d(*there, 2)
assert not any("maxunpool_cuda" in name for name in runtime.take_log())
graph.replay()
assert torch.equal(output.cpu(), F.max_unpool2d(pooled, indices, 2))
print("the first call was captured")
"""

REPLAYS = """
def pooled(*shape):
    x = torch.rand(shape, dtype=torch.float64)
    return F.max_pool2d(x, 2, return_indices=True)

def barriers_of_fixup(call):
    runtime.take_log()
    call()
    fixup = runtime.take_log()[-1]
    assert "slots" in fixup, fixup
    return emulation.library().most_barriers()

def barriers_of_replay():
    barriers = barriers_of_fixup(graph.replay)
    assert torch.equal(output.cpu(), F.max_unpool2d(values, indices_there.cpu(), 2))
    return barriers

values, indices = pooled(1, 1, 2048, 1028)
values_there, indices_there = values.cuda(), indices.cuda()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    output = F.max_unpool2d(values_there, indices_there, 2)
assert barriers_of_replay() == 1  # after which a block knows that there is nothing to do

small, places = pooled(1, 1, 8, 8)
far = small.cuda(), places.flip(-1).cuda()
assert barriers_of_fixup(lambda: F.max_unpool2d(*far, 2)) > 1  # indices out of their windows
assert barriers_of_replay() == 1

indices_there.copy_(indices.flip(-1))
assert barriers_of_replay() > 1
indices_there.copy_(indices)
assert barriers_of_replay() == 1
maxunpool_cuda.check_errors()
print("replays read flags only where they have to")
"""

GRADIENTS = """
x, weight = torch.rand(2, 2, 3, 12, 16)

def results(device):
    x_there = x.to(device).requires_grad_()
    pooled, indices = F.max_pool2d(x_there, 3, 2, 1, return_indices=True)
    output = F.max_unpool2d(pooled, indices, 3, 2, 1, output_size=(12, 16), reduce="sum")
    return output, *torch.autograd.grad(output, x_there, weight.to(device))

with torch.cuda.stream(torch.cuda.Stream()):
    assert cases.all_same(results("cuda"), results("cpu"))
print("the gradients are those of the CPU")
"""


# Autograd's threads of the device may still run, and the process would not end in order.
END = """
sys.stdout.flush()
os._exit(0)
"""


def run(script: str, caches_memory: bool = False) -> str:
    """What a script prints, in a process that has a device "cuda"."""
    done = runtime.run("-c", BEGIN + script + END, caches_memory=caches_memory)
    # The end alone tells whether the process got there: exit(1) prints nothing.
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


@pytest.mark.parametrize("simple", [False, True], ids=["fast kernels", "simple kernels"])
def test_results(simple: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAXUNPOOL_CUDA_SIMPLE_KERNELS", str(int(simple)))
    calls, kernels = run(RESULTS).splitlines()[-2:]
    assert int(calls.removeprefix("calls: ")) > 300
    launched = kernels.removeprefix("kernels: ")
    families = ["forward_last_slots", "backward_last_slots", "forward_any_sum_slots"]
    families += ["pool_rows", "pool_channels", "pool_lanes", "pool_windows"]
    fast = ["forward", "forward_strips", "backward", "forward_own_sum_slots"]
    families += ["backward_sum_slots"] if simple else fast
    assert [name for name in families if f"{len(name)}{name}I" not in launched] == []


def test_kernels_are_those_of_the_tables() -> None:
    """In the emulation they are compared with limits that are far below a GPU's."""
    assert run(TABLES).endswith("as the tables say\n")


def test_an_out_of_bounds_index_is_named() -> None:
    late, _, count, *_ = run(ERRORS).splitlines()[-1].split()
    assert int(late) == int(count) > 10


def test_too_little_memory_is_the_error_of_pytorch() -> None:
    said = "CUDA out of memory. Tried to allocate 4194304.00 GiB"
    expected = {f"{name} {said}" for name in ("function", "operator", "torch")}
    expected.add("workspace CUDA out of memory. Tried to allocate 2.00 MiB")
    printed = run(OUT_OF_MEMORY, caches_memory=True)
    assert expected <= {*printed.splitlines()}  # PyTorch's warnings come in between


def test_deterministic_mode_fills_nothing() -> None:
    """A call allocates and launches its own kernels alone: one, and a fix-up for flat indices."""
    calls, pytorch = run(DETERMINISTIC).splitlines()[-2:]
    assert int(calls.removeprefix("calls: ")) > 50
    assert pytorch.startswith("PyTorch's: cudaMalloc _Z")


def test_the_first_call_of_a_process_may_be_captured() -> None:
    assert run(CAPTURED, caches_memory=True).endswith("the first call was captured\n")


def test_replays_after_out_of_window_indices() -> None:
    """A graph keeps the number of a launch; others get larger ones (csrc/cuda/launch.cuh)."""
    printed = run(REPLAYS, caches_memory=True)
    assert printed.endswith("replays read flags only where they have to\n")


def test_gradients_on_another_stream() -> None:
    assert run(GRADIENTS).endswith("the gradients are those of the CPU\n")
