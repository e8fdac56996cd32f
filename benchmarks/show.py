"""What is seen of a run: by rich where it is installed, else in plain text."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

# What measuring does not need, and what becomes of it where it is not installed.
OPTIONAL = {
    "rich": "progress and tables in plain text",
    "matplotlib": "no pictures",
    "onnxruntime": "a peer less",
    "triton": "a peer less on CUDA",
}
Cells = Sequence[object]


def has(package: str) -> bool:
    """Whether the package can be imported."""
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def say_missing() -> None:
    """Print a line that names what is not installed; nothing where all is."""
    missing = [f"{package} ({what})" for package, what in OPTIONAL.items() if not has(package)]
    if missing:
        print(f"Not installed: {', '.join(missing)}", flush=True)


def progress(names: Sequence[str]) -> Iterator[str]:
    """Give each name as the work on it begins, and show it."""
    if not has("rich"):
        for number, name in enumerate(names, 1):
            print(f"{number}/{len(names)} {name}", flush=True)
            yield name
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task("", total=len(names))
        for number, name in enumerate(names, 1):
            bar.update(task, description=name, completed=number)
            yield name


def markdown(heads: Cells, rows: Sequence[Cells], texts: int = 1) -> str:
    """A table; all its columns but the first, which are ``texts``, hold numbers."""
    rule = ["---"] * texts + ["--:"] * (len(heads) - texts)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, rule, *rows))


def table(title: str, heads: Cells, rows: Sequence[Cells], texts: int = 1) -> None:
    """Print a Markdown table: columns are aligned where rich is installed."""
    if not has("rich"):
        print(f"{title}\n\n{markdown(heads, rows, texts)}\n", flush=True)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.MARKDOWN)
    for place, head in enumerate(heads):
        justify = "left" if place < texts else "right"
        shown.add_column(str(head), justify=justify, no_wrap=True)
    for row in rows:
        shown.add_row(*map(str, row))
    console = Console(width=max(Console().width, 200), highlight=False)
    console.print(title, shown)
