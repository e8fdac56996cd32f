"""Thousands of calls with random arguments, most of them wrong, in a child process.

Every call must give the reference's value or raise an exception. Anything else ends the child: a
wrong value by an assertion, a crash by a signal. `python tests/test_fuzz.py SEED COUNT` is the
child: it prints how many calls gave a value, and how many raised which exception.
"""

import ast
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import OPERATORS, Case, Geometry, positions_of, same, scaled, with_a_bad_index
from reference import max_pool, max_unpool, max_unpool_backward

import maxunpool_cuda.functional as F

HERE = Path(__file__).parent
ROOT = HERE.parent
HUGE = (2**40, -(2**40), 2**62, 2**63, 2**64, -(2**63))


def strange(rng: random.Random) -> Any:
    """An argument that is probably not what was meant."""
    numbers = (0, -1, True, 2.5, math.nan, rng.randint(-5, 9), rng.choice(HUGE), [rng.choice(HUGE)])
    others = (None, "max", b"2", object(), torch.int64, torch.tensor(2), torch.tensor([2.5, 2.5]))
    few = ((), [], [[2, 2]], (2, None), {2: 2}, {2, 3}, range(2), torch.Size([2, 2]))
    sizes = tuple(rng.randint(-2, 5) for _ in range(rng.randint(1, 5)))
    return rng.choice((*numbers, *others, *few, sizes, sizes, list(sizes)))


CHANGES: tuple[Callable[[random.Random, torch.Tensor], Any], ...] = (
    lambda rng, t: t.to(rng.choice((torch.int16, torch.uint8, torch.bool, torch.bfloat16))),
    lambda rng, t: t + rng.choice((1, -1, 2**31, 2**32, -(2**40), 2**62)),
    lambda rng, t: t.unsqueeze(rng.randint(0, t.dim())),
    lambda rng, t: t[(slice(None),) * rng.randrange(t.dim()) + (rng.choice((0, slice(0, -1))),)],
    lambda rng, t: t.movedim(0, -1),
    lambda rng, t: t.expand(2, *t.shape),
    lambda rng, t: rng.choice((t.to("meta"), t.to_sparse(), t.reshape(-1)[0], t.numpy())),
    lambda rng, t: t.flip(-1).conj(),
    lambda rng, t: torch.as_strided(t, t.shape, [0] * t.dim()),
    lambda rng, t: torch.nested.nested_tensor([t, t]),
)


def strange_tensor(rng: random.Random, tensor: torch.Tensor) -> Any:
    """A tensor that was changed in some way, or something else."""
    try:
        return rng.choice(CHANGES)(rng, tensor)
    except Exception:
        return strange(rng)


def outcome(rng: random.Random) -> str:
    """Make one call. Returns "value" or the name of the exception."""
    name = rng.choice(list(OPERATORS))
    kind = name.split()[0]  # unpool, gradient or pool
    call = OPERATORS[name](rng, most_cells=12, longest=6)
    tensors, arguments = list(call.tensors), list(call.arguments)
    if isinstance(call.of, Case) and tensors[1].numel() > 0 and rng.random() < 0.1:
        tensors[1] = with_a_bad_index(call.of, rng)[0].indices
    tensors = [strange_tensor(rng, t) if rng.random() < 0.15 else t for t in tensors]
    arguments = [strange(rng) if rng.random() < 0.09 else argument for argument in arguments]
    dims, both = call.dims, True
    try:
        if kind == "gradient" or rng.random() < 0.3:
            result = call.operator(*tensors, *arguments)
        else:
            dims, both = rng.choice((dims, dims, dims, 1, 2, 3)), rng.choice((True, False))
            function = getattr(F, f"max_{kind}{dims}d")
            if kind == "pool":
                *window, ceil, index_dtype = arguments
                result = function(*tensors, *window, ceil, both, index_dtype=index_dtype)
            else:
                size, *window, reduce = arguments
                result = function(*tensors, *window, size, reduce=reduce)
    except Exception as error:
        return type(error).__name__
    results = result if isinstance(result, tuple) else (result,)
    assert [isinstance(tensor, torch.Tensor) for tensor in results] == [True] * len(results)
    expected = reference(kind, tensors, arguments, dims, results)
    if expected is not None:
        right = len(results) == 1 + (kind == "pool" and both) and all(map(same, results, expected))
        assert right, f"wrong value: {call.operator}, {tensors[0].shape}, {arguments}"
    return "value"


def reference(
    kind: str,
    tensors: list[Any],
    arguments: list[Any],
    dims: int,
    results: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...] | None:
    """What is right, unless there is no data or the window is not given in tuples."""
    window = arguments[:4] if kind == "pool" else arguments[1:4]
    result = results[0]
    tuples = all(isinstance(sizes, tuple) and len(sizes) == dims for sizes in window)
    if result.device.type == "meta" or (kind == "pool" and (not tuples or result.numel() == 0)):
        return None
    if kind == "pool":
        # Without indices in the result, any index_dtype will do.
        index_dtype = results[1].dtype if len(results) == 2 else torch.int64
        return max_pool(*tensors, *arguments[:-1], index_dtype)
    values, indices = tensors
    # However the output size was given, the sizes of the tensor count.
    output = tuple((result if kind == "unpool" else values).shape[-dims:])
    if indices.dtype == torch.uint8:
        if not tuples:
            return None
        indices = positions_of(indices, Geometry(tuple(indices.shape[-dims:]), *window, output))
    unpool = max_unpool if kind == "unpool" else max_unpool_backward
    return (unpool(values, indices, output, arguments[-1]),)


def main() -> None:
    warnings.simplefilter("ignore")
    outcomes, peaks = [], []
    for _ in range(2):  # the second time, nothing new should stay in memory
        rng = random.Random(int(sys.argv[1]))
        outcomes.append(Counter(outcome(rng) for _ in range(int(sys.argv[2]))))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
    assert outcomes[0] == outcomes[1]
    print({"grown": peaks[1] - peaks[0], **outcomes[0]})


def fuzz(seed: int, count: int, before: str = "", **environment: str) -> dict[str, int]:
    command = [sys.executable, "-c", f"{before}\nimport test_fuzz\ntest_fuzz.main()"]
    done = subprocess.run(
        [*command, str(seed), str(count)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=HERE,
        env={**os.environ, **environment},
    )
    # A string: pytest shortens the repr of anything else, here what the child said.
    assert done.returncode == 0, f"seed {seed}, exit {done.returncode}\n{done.stderr}"
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_random_arguments(rng: random.Random) -> None:
    count = scaled(4000)
    outcomes = fuzz(rng.getrandbits(31), count)
    assert outcomes["grown"] < 16 << 10
    assert outcomes["value"] > count / 10
    for name in ("RuntimeError", "TypeError", "ValueError"):
        assert outcomes[name] > count / 40, outcomes


def test_the_fuzzer_sees_a_wrong_value() -> None:
    sabotage = "import reference as r; right = r.max_unpool\n"
    sabotage += "r.max_unpool = lambda x, i, *a: right(x, (i + 1) % 2, *a)"
    with pytest.raises(AssertionError, match="wrong value"):
        fuzz(0, 200, sabotage)


@pytest.mark.slow
def test_random_arguments_under_sanitizers(rng: random.Random) -> None:
    """The CPU extension, built with AddressSanitizer and UndefinedBehaviorSanitizer."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++ to build with AddressSanitizer")
    build = ROOT / "build" / f"sanitized-{torch.__version__}"
    flags = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
    command = [sys.executable, "setup.py", "--quiet", "build"]
    command += ["--build-lib", str(build / "lib"), "--build-temp", str(build / "temp")]
    environment = {**os.environ, "FORCE_CPU": "1", "FORCE_CUDA": "0"}
    environment |= {"CXX": "g++", "CFLAGS": flags, "LDFLAGS": flags}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    # libstdc++ too, or AddressSanitizer does not find what throws.
    runtimes = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    outcomes = fuzz(
        rng.getrandbits(31),
        1000,
        PYTHONPATH=str(build / "lib"),
        LD_PRELOAD=" ".join(runtimes),
        ASAN_OPTIONS="detect_leaks=0:max_allocation_size_mb=4096:allocator_may_return_null=1",
    )
    assert outcomes["value"] > 100


if __name__ == "__main__":
    main()
