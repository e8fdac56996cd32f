# SPDX-License-Identifier: BSD-3-Clause
"""Max unpooling and pooling timed beside torch.nn, FlagGems and a clone; memory of training.

cases.py lists what is timed, data.py makes its tensors, contenders.py lists who is timed, timing.py
does one case, and report.py prints the tables. networks.py has whole networks, memory.py measures a
training step, and architectures.py defines the networks of both. pages.py makes the documents'
tables, and __main__.py is the program.
"""

import sys
from pathlib import Path

# ``python -m`` puts the root first, where the package's source would hide the compiled package
# that is installed. Last, it still holds this one.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != _ROOT] + [str(_ROOT)]
