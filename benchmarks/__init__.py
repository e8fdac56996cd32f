"""Max unpooling timed side by side: this package, its peers, and the ceiling, a clone.

``python -m benchmarks --help``, or ``make bench``. What is predicted, and why: MODEL.md.

    cases.py           what is timed, as data
    data.py            the tensors of a case, and the results it must have
    contenders.py      who is timed: a case and its tensors become a call
    onnx_peer.py       one of them: ONNX Runtime
    triton_scatter.py  another: the usual memset and scatter, in Triton
    timing.py          clocks, interleaved rounds
    memory.py          peak memory of one call, memory at hand
    segnet.py          the network of the training step
    training.py        what that step holds in memory
    runner.py          one case: make, check, time, weigh
    model.py           predicted bytes and fractions, and the table of MODEL.md
    report.py          facts, JSON, tables
    plot.py            plots
    console.py         progress and tables, with rich or without it
    stopping.py        signals, and the time there is
"""

import sys
from pathlib import Path

# ``python -m`` puts the root first, where the package's source would hide the compiled package
# that is installed. Last, it still holds this one.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != _ROOT] + [str(_ROOT)]
