"""Max unpooling timed side by side: this package, its peers, and the ceiling, a clone.

``python -m benchmarks --help``, or ``make bench``. What is predicted, and why: MODEL.md.

    cases.py           what is timed, as data
    data.py            the tensors of a case, and the results it must have
    contenders.py      who is timed: a case and its tensors become a call
    triton_scatter.py  one of them: the usual memset and scatter
    timing.py          clocks, interleaved rounds
    memory.py          peak memory of one call, memory at hand, pages, caches
    segnet.py          the network of the training step
    training.py        what that step holds in memory
    runner.py          one case: make, check, time, weigh
    model.py           predicted bytes and fractions
    report.py          where it was measured, and JSON
    tables.py          of cases, of families, of predictions, and of what has changed
    plot.py            plots
    show.py            progress and tables, with rich or without it
    machine_code.py    what the CUDA kernels' instructions allow
    control_flow.py    counts them
"""

import sys
from pathlib import Path

# ``python -m`` puts the root first, where the package's source would hide the compiled package
# that is installed. Last, it still holds this one.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != _ROOT] + [str(_ROOT)]
