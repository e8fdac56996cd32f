"""The examples in docstrings and in the README run, and say what they say."""

import doctest
from pathlib import Path

import pytest

import maxunpool_cuda
from maxunpool_cuda import _ops, convert, functional, modules, onnx

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize(
    "module", [functional, modules, convert, onnx, _ops], ids=lambda module: module.__name__
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
