"""What documents say of the code: examples run, numbers are those measured, the map is whole."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import maxunpool_cuda
from maxunpool_cuda import functional, onnx

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
sys.path.append(str(ROOT))  # last: what is installed must not be hidden

from benchmarks import report  # noqa: E402

# The public interface: names and objects.
PUBLIC = {name: getattr(maxunpool_cuda, name) for name in maxunpool_cuda.__all__}
PUBLIC |= {
    f"functional.{name}": of
    for name, of in vars(functional).items()
    if name.startswith(("max_", "adaptive_max_"))
}
PUBLIC["onnx.translation_table"] = onnx.translation_table
del PUBLIC["functional"]


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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_examples_of_a_page(page: Path) -> None:
    """Each page runs in its own process, as it may change PyTorch or begin a process group."""
    text = page.read_text()
    assert not re.search(r"^```python\n(?!>>> )", text, re.M)  # which would not be run
    needed = {"onnx.export": ("onnxscript", "onnxruntime"), "import captum": ("captum", "shap")}
    for package in (package for code, those in needed.items() if code in text for package in those):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, __file__, page], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def words_in(folder: Path) -> dict[str, list[str]]:
    """The words in each picture, which matplotlib writes as comments. Outlines vary by release."""
    return {path.name: re.findall(r"<!-- (.*?) -->", path.read_text()) for path in folder.iterdir()}


def test_pictures_are_those_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "docs" / "pictures.py", tmp_path], check=True)
    drawn = words_in(tmp_path)
    assert all(len(words) > 5 for words in drawn.values())
    assert drawn == words_in(ROOT / "docs/pictures"), "python docs/pictures.py draws them anew"


def test_memory_in_the_documents() -> None:
    rows = report.load(RESULTS / "amd-epyc-2-threads-training.json")["rows"]
    of = {row["contender"]: row["peak"] / 2**20 for row in rows if row["dtype"] == "float32"}
    for page in (README, PERFORMANCE):
        peaks = f"from {of['torch.nn']:.0f} MiB to {of['uint8']:.0f}"
        assert peaks in " ".join(page.read_text().split())


def test_tables_of_performance(capsys: pytest.CaptureFixture[str]) -> None:
    """The first table has some of the rows that are printed, the second has all."""
    report.show(report.load(RESULTS / "amd-epyc-2-threads.json"))
    printed, text = capsys.readouterr().out, PERFORMANCE.read_text()
    families, slower = (
        re.findall(rf"^\| {head} .*?\n\n", text, re.M | re.S) for head in ("family", "call")
    )
    assert set(families[0].splitlines()) <= set(printed.splitlines())
    assert slower[0] in printed


def test_the_map_names_every_file() -> None:
    """And no other. A name without a folder is in the folder of the name before."""
    text = (ROOT / "docs/design.md").read_text()
    (table,) = re.findall(r"^## A map\n.*?\n\n(\|.*?)\n\n", text, re.M | re.S)
    named, folder = set(), Path()
    for name in map(Path, re.findall(r"`([^`]+)`", table)):
        folder = name.parent if name.parent.name else folder
        named.add(ROOT / folder / name.name)
    assert [path for path in named if not path.exists()] == []
    assert {*ROOT.glob("csrc/**/*.*"), *ROOT.glob("maxunpool_cuda/*.py")} <= named


if __name__ == "__main__":
    page = Path(sys.argv[1])
    text = re.sub(r"^```.*$", "", page.read_text(), flags=re.M)  # the fences around examples
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = runner.run(examples, clear_globs=False).failed
    sys.stdout.flush()
    # At once, with all that the examples made: PyTorch may abort, or wait for ever, when a process
    # ends that had a process group, or where DistributedDataParallel is freed.
    os._exit(min(failed, 1))
