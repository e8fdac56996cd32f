"""What is seen of a run: by rich where it is installed, else in plain text."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# What shows results, and what becomes of them without it. Measuring needs neither.
SHOWING = {"rich": "progress and tables in plain text", "matplotlib": "no pictures"}


def has(package: str) -> bool:
    """Whether the package can be imported."""
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def say_missing() -> None:
    """Print a line that names what is not installed; nothing where all is."""
    missing = [f"{package} ({instead})" for package, instead in SHOWING.items() if not has(package)]
    if missing:
        print(f"Not installed: {', '.join(missing)}", flush=True)


def _console() -> Console:
    """As wide as the table of results."""
    from rich.console import Console

    console = Console()
    return Console(width=max(console.width, 200))


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give what is called with the name of each of ``total`` pieces of work as it begins."""
    begun = itertools.count(1)
    if not has("rich"):
        yield lambda name: print(f"{next(begun)}/{total} {name}", flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=_console(), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, description=name, completed=next(begun))


def show(rich_table: Callable[[], Table], plain: Callable[[], str]) -> None:
    """Print a table, or where rich is missing its plain text."""
    if has("rich"):
        _console().print(rich_table())
    else:
        print(plain(), end="", flush=True)
