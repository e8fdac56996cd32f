"""What documents say of the code: examples run, numbers are those measured, the map is whole."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import maxunpool_cuda
from maxunpool_cuda import _fusion, _ops, convert, functional, modules, onnx, patch

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
sys.path += [str(ROOT), str(ROOT / "docs")]  # last: what is installed must not be hidden

from benchmarks import report, tables  # noqa: E402


@pytest.mark.parametrize(
    "module",
    [functional, modules, convert, patch, onnx, _fusion, _ops],
    ids=lambda module: module.__name__,
)
def test_docstrings(module: object) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_name_has_an_example() -> None:
    for name in maxunpool_cuda.__all__:
        if name != "functional":
            assert ">>> " in getattr(maxunpool_cuda, name).__doc__, name


@pytest.fixture
def pictures() -> Any:
    """The program that draws them, which knows what was measured."""
    pytest.importorskip("matplotlib")
    return importlib.import_module("pictures")


def failures(page: Path) -> int:
    """Of the examples of a page, without the fences around them."""
    text = re.sub(r"^```.*$", "", page.read_text(), flags=re.M)
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples).failed


@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>> " in page.read_text()], ids=lambda page: page.stem
)
def test_page(page: Path) -> None:
    """In a process of its own: a page may change what PyTorch does, and begin a process group."""
    for package in ("onnxscript", "onnxruntime"):
        if "onnx.export" in page.read_text():
            pytest.importorskip(package)
    done = subprocess.run([sys.executable, __file__, page], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_python_example_runs() -> None:
    """None is written without a prompt."""
    for page in PAGES:
        for example in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S):
            assert example.startswith(">>> "), page.name


def test_every_public_name_is_in_the_reference() -> None:
    described = re.findall(r":: (\S+)$", (ROOT / "docs/api.md").read_text(), flags=re.M)
    public = {f"maxunpool_cuda.{name}" for name in maxunpool_cuda.__all__}
    functions = {
        f"maxunpool_cuda.functional.{name}" for name in vars(functional) if name.startswith("max_")
    }
    public |= functions | {"maxunpool_cuda.onnx.translation_table"}
    assert sorted(described) == sorted(public - {"maxunpool_cuda.functional"})


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


def words_in(picture: Path) -> list[str]:
    """matplotlib writes each as a comment beside its outlines, which differ between releases."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text())


def test_pictures_are_those_drawn(pictures: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, pictures.__file__, tmp_path], check=True)
    drawn, published = (
        {path.name: path for path in folder.glob("*")}
        for folder in (tmp_path, ROOT / "docs/pictures")
    )
    assert drawn.keys() == published.keys()
    for name, path in drawn.items():
        assert len(words_in(path)) > 5
        assert words_in(path) == words_in(published[name]), f"python docs/pictures.py draws {name}"


def test_speeds_in_the_readme(pictures: Any) -> None:
    text = README.read_text()
    rows = re.findall(r"^\| (.+) \| (0\.\d\d) \|$", text, flags=re.M)
    assert rows == [
        (what, f"{pictures.speed(cases):.2f}") for what, cases in pictures.SLOWER.items()
    ]
    (claimed,) = re.findall(r"run at (\S+) times torch.nn's speed", text)
    assert claimed == f"{pictures.speed(next(iter(pictures.FASTER.values()))):.1f}"
    assert (
        f"of the {len(pictures.MEASURED['rows'])} calls that were timed falls below 0.9"
        in " ".join(text.split())
    )
    named = pictures.SLOWER.values()
    unnamed = pictures.ratios(lambda case: not any(wanted(case) for wanted in named))
    assert min(unnamed) >= 0.9


def test_memory_in_the_documents() -> None:
    rows = report.load(RESULTS / "amd-epyc-2-threads-training.json")["rows"]
    of = {(row["contender"], row["dtype"]): row for row in rows}
    theirs, ours = of["torch.nn", "float32"], of["uint8", "float32"]
    indices, peaks = (
        [f"{row[what] / 2**20:.0f}" for row in (theirs, ours)] for what in ("indices", "peak")
    )
    for page in (README, ROOT / "docs/performance.md"):
        text = " ".join(page.read_text().split())
        assert "shrink from {} MiB to {},".format(*indices) in text
        assert "from {} MiB to {}".format(*peaks) in text


def test_the_table_of_performance(capsys: pytest.CaptureFixture[str]) -> None:
    tables.families(report.load(RESULTS / "amd-epyc-2-threads.json"))
    _, printed = capsys.readouterr().out.split("\n\n", 1)
    assert printed.strip() in (ROOT / "docs/performance.md").read_text()


def test_the_map_names_every_file() -> None:
    text = (ROOT / "docs/design.md").read_text()
    table = text[text.index("## A map") : text.index("The operators stand here")]
    named: list[Path] = []
    for row in re.findall(r"^\|[^|]*\|([^|]*)\|", table, flags=re.MULTILINE):
        folder = ""
        for path in re.findall(r"`([^`]+)`", row):
            folder = path[: path.rindex("/") + 1] or folder if "/" in path else folder
            found = list(ROOT.glob(path if "/" in path else folder + path))
            assert found, path
            named += found
    sources = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("maxunpool_cuda/*.py")]
    unnamed = {path.relative_to(ROOT) for path in sources} - {
        path.relative_to(ROOT) for path in named
    }
    assert unnamed == set()


if __name__ == "__main__":
    # At once, as PyTorch may abort when a process ends that had a process group.
    failed = failures(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(min(failed, 1))
