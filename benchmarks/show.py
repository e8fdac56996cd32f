"""What every table of the benchmarks looks like, and which packages there are."""

import importlib.util
from collections.abc import Sequence
from itertools import zip_longest

Cells = Sequence[object]


def has(package: str) -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec(package) is not None


def table(heads: Cells, rows: Sequence[Cells], texts: int = 1) -> str:
    """In Markdown, its columns aligned: the first ``texts`` to the left, numbers to the right."""
    lines = [[str(cell) for cell in line] for line in (heads, *rows)]
    columns = []
    for place, column in enumerate(zip_longest(*lines, fillvalue="")):
        width = max(3, *map(len, column))
        if place < texts:
            columns.append([cell.ljust(width) for cell in (column[0], "-" * width, *column[1:])])
        else:
            rule = "-" * (width - 1) + ":"
            columns.append([cell.rjust(width) for cell in (column[0], rule, *column[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def show(what: str, heads: Cells, rows: Sequence[Cells], texts: int = 1) -> None:
    """Print a table under the words that say what it is."""
    print(what, table(heads, rows, texts), sep="\n\n", end="\n\n", flush=True)
