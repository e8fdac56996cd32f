"""What documents say of the code: examples run, numbers are those measured, the map is whole."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

import maxunpool_cuda
from maxunpool_cuda import functional, onnx

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
sys.path += [str(ROOT), str(ROOT / "docs")]  # last: what is installed must not be hidden

from benchmarks import report  # noqa: E402

# All names of the public interface, with what they are.
PUBLIC = {name: getattr(maxunpool_cuda, name) for name in maxunpool_cuda.__all__}
PUBLIC |= {
    f"functional.{name}": of
    for name, of in vars(functional).items()
    if name.startswith(("max_", "adaptive_max_"))
}
PUBLIC["onnx.translation_table"] = onnx.translation_table
del PUBLIC["functional"]

# The table of slower calls in performance.md: what finds the names of the cases.
SLOWER = {
    "unpooling backward, 3x3 windows, contiguous": (
        "^(image-112x64-b16-3x3s2p1|duplicates).*contiguous-backward"
    ),
    "unpooling forward and backward, 3x3 windows, int64, contiguous": (
        "^image.*3x3s2p1-float32-int64-contiguous-both"
    ),
    "unpooling backward, one row of 2^20 elements": "^signal.*backward",
    "unpooling backward, small planes, 2x2 windows": "^(bottom|segnet-28).*backward",
    "unpooling backward, 2x2x2 windows, float32, contiguous": (
        "^volume-48.*float32.*contiguous-backward"
    ),
    "unpooling backward, indices of a dilated pool, contiguous": "^dilated.*contiguous-backward",
    "pooling, 4x4 windows, float32, channels_last": (
        "^pool-image.*4x4-float32.*channels_last-forward"
    ),
    "pooling, dilated windows, channels_last": "^pool-dilated.*channels_last-forward",
    "pooling backward, 3x3 windows, stride 2, bfloat16, contiguous": (
        "^pool-image.*3x3s2p1-bfloat16.*contiguous-backward"
    ),
}


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name)
    results = doctest.DocTestRunner().run(test)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_name_is_in_the_reference() -> None:
    described = re.findall(r":: maxunpool_cuda\.(\S+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(described) == sorted(PUBLIC)


def examples_of(page: Path) -> doctest.DocTest:
    """The examples of a page, without the fences around them."""
    text = re.sub(r"^```.*$", "", page.read_text(), flags=re.M)
    return doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_examples_of_a_page(page: Path) -> None:
    """In a process of its own: a page may change what PyTorch does, and begin a process group."""
    text = page.read_text()
    assert not re.search(r"^```python\n(?!>>> )", text, re.M)  # which would not be run
    needed = {"onnx.export": ("onnxscript", "onnxruntime"), "import captum": ("captum", "shap")}
    for package in (package for code, those in needed.items() if code in text for package in those):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, __file__, page], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def pictures() -> Any:
    """The program that draws them, which reads what was measured."""
    pytest.importorskip("matplotlib")
    return importlib.import_module("pictures")


def words_in(folder: Path) -> dict[str, list[str]]:
    """Of each picture. matplotlib writes them as comments; outlines differ between its releases."""
    return {path.name: re.findall(r"<!-- (.*?) -->", path.read_text()) for path in folder.iterdir()}


def test_pictures_are_those_drawn(pictures: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, pictures.__file__, tmp_path], check=True)
    drawn = words_in(tmp_path)
    assert all(len(words) > 5 for words in drawn.values())
    assert drawn == words_in(ROOT / "docs/pictures"), "python docs/pictures.py draws them anew"


def test_slower_calls(pictures: Any) -> None:
    text = " ".join(PERFORMANCE.read_text().split())
    rows = re.findall(r"\| (\w[^|]+,[^|]+|pooling a few \w+) \| (0\.\d\d) \|", text)
    slower = {what: pictures.ratios(cases) for what, cases in SLOWER.items()}
    assert rows == [(what, f"{geometric_mean(of.values()):.2f}") for what, of in slower.items()]
    fastest = geometric_mean(pictures.ratios(next(iter(pictures.FASTER.values()))).values())
    assert f"A round trip, forward and backward, is {fastest:.1f} times as fast" in text
    calls = len(pictures.MEASURED["rows"])
    assert f"of the {calls} calls that were timed falls below 0.9" in text
    named = set().union(*slower.values())
    assert min(x for case, x in pictures.ratios("").items() if case not in named) >= 0.9


def test_memory_in_the_documents() -> None:
    rows = report.load(RESULTS / "amd-epyc-2-threads-training.json")["rows"]
    of = {(row["contender"], row["dtype"]): row for row in rows}
    theirs, ours = of["torch.nn", "float32"], of["uint8", "float32"]
    mebibytes = {
        what: [round(row[what] / 2**20) for row in (theirs, ours)] for what in ("indices", "peak")
    }
    for page in (README, PERFORMANCE):
        text = " ".join(page.read_text().split())
        assert "shrink from {} MiB to {},".format(*mebibytes["indices"]) in text
        assert "from {} MiB to {}".format(*mebibytes["peak"]) in text


def test_the_table_of_performance(capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows are a selection of those that are printed."""
    report.families(report.load(RESULTS / "amd-epyc-2-threads.json"))
    printed = capsys.readouterr().out.splitlines()
    (table,) = re.findall(r"^\| family .*?\n\n", PERFORMANCE.read_text(), re.M | re.S)
    assert [line for line in table.splitlines() if line and line not in printed] == []


def test_the_map_names_every_file() -> None:
    text = (ROOT / "docs/design.md").read_text()
    (table,) = re.findall(r"^## A map\n.*?\n\n(\|.*?)\n\n", text, re.M | re.S)
    named: set[Path] = set()
    for row in re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.M):
        folder = ""  # that of the name before, in the same row
        for name in re.findall(r"`([^`]+)`", row):
            folder = name[: name.rindex("/") + 1] if "/" in name else folder
            found = set(ROOT.glob(folder + name.removeprefix(folder)))
            assert found, name
            named |= found
    sources = {*ROOT.glob("csrc/**/*.*"), *ROOT.glob("maxunpool_cuda/*.py")}
    assert {str(path.relative_to(ROOT)) for path in sources - named} == set()


if __name__ == "__main__":
    examples = examples_of(Path(sys.argv[1]))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = runner.run(examples, clear_globs=False).failed
    sys.stdout.flush()
    # At once, with all that the examples made: PyTorch may abort, or wait for ever, when a process
    # ends that had a process group, or where DistributedDataParallel is freed.
    os._exit(min(failed, 1))
