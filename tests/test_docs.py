"""What documents say of the code: examples run, and the map of the design names every file."""

import doctest
import re
from pathlib import Path

import pytest

import maxunpool_cuda
from maxunpool_cuda import _ops, convert, functional, modules, onnx, patch

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.parametrize(
    "module", [functional, modules, convert, patch, onnx, _ops], ids=lambda module: module.__name__
)
def test_docstrings(module: object) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_name_has_an_example() -> None:
    for name in maxunpool_cuda.__all__:
        if name != "functional":
            assert ">>> " in getattr(maxunpool_cuda, name).__doc__, name


def test_readme() -> None:
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0


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
