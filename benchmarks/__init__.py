"""Max unpooling timed side by side: this package, its peers, and the ceiling, a clone.

``python -m benchmarks --help``, or ``make bench``. What is predicted, and why: docs/performance.md.

What is timed is in cases.py, its tensors in data.py, who is timed in contenders.py; runner.py does
one case, __main__.py all that were asked for.
"""

import sys
from pathlib import Path

# ``python -m`` puts the root first, where the package's source would hide the compiled package
# that is installed. Last, it still holds this one.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != _ROOT] + [str(_ROOT)]
