# SPDX-License-Identifier: BSD-3-Clause
"""What documents say: examples and templates run, pictures are those drawn, the map is whole.

``make check-docs`` finds broken links.
"""

import ctypes
import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from matplotlib.figure import Figure

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [page for page in (README, *sorted(DOCS.glob("*.md"))) if "```python" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_a_page(page: Path) -> None:
    """Each page runs in its own process, as it may change PyTorch or begin a process group."""
    for package in ("captum", "shap") if ">>> import captum" in page.read_text() else ():
        pytest.importorskip(package, reason="only make test-all installs it")
    subprocess.run([sys.executable, __file__, page], check=True)


@pytest.mark.parametrize("dims", [2, 3])
def test_the_demo_prints_what_the_readme_shows(dims: int, tmp_path: Path) -> None:
    """But for the number of losses."""
    pytest.importorskip("nilearn", reason="only make demo and make test-all install it")
    options = ("--dims", str(dims), "--iterations", "2", "--out", tmp_path)
    command = (sys.executable, ROOT / "examples/segnet_mri.py", *options)
    printed = " ".join(subprocess.check_output(command, text=True, timeout=300).split())
    # Between columns the table has lines, which are another character below the head.
    printed = printed.replace("┃", "│")
    (shown,) = re.findall(r"^150 (losses .*?)^```", README.read_text(), re.M | re.S)
    lines = [" ".join(line.split()) for line in shown.replace("2d", f"{dims}d").splitlines()]
    assert [line for line in lines if line.removesuffix(".") not in printed] == []
    assert (tmp_path / f"segnet_mri_{dims}d.png").stat().st_size > 10_000


def test_every_document_has_the_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"\nversion: {version}\ndate-released: " in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version


def words_of(folder: Path) -> dict[str, list[str]]:
    """By the picture's name. Matplotlib writes them as comments; outlines vary by release."""
    pictures = folder.glob("*.svg")
    return {path.name: re.findall("<!-- (.*?) -->", path.read_text()) for path in pictures}


@pytest.mark.usefixtures("single_threaded_torch")
def test_pictures_are_those_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing in them goes over their edge."""
    save = Figure.savefig
    cut: list[str] = []

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        save(figure, path, **options)
        corners = figure.get_tightbbox().corners()
        if not all(figure.bbox_inches.contains(*corner) for corner in corners):
            cut.append(path.name)

    monkeypatch.setattr(Figure, "savefig", savefig)
    with mpl.rc_context():
        runpy.run_path(str(DOCS / "pictures.py"))["draw"](tmp_path)
    drawn = words_of(tmp_path)
    assert cut == []
    assert all(len(words) > 5 for words in drawn.values())
    assert drawn == words_of(DOCS / "pictures"), "python docs/pictures.py draws them anew"


# Runs the kernel of the page one thread after another: it has no barriers.
ONE_BY_ONE = """
#include <cstdint>
#define __global__
struct Dim3 { unsigned x; } threadIdx, blockIdx, blockDim{32};
%s
extern "C" void run(int64_t cells, int64_t height, int64_t width,
                    const float* input, const int64_t* indices, float* output) {
  for (blockIdx.x = 0; blockIdx.x * blockDim.x < cells; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
      unpool_2x2(cells, height, width, input, indices, output);
}
"""


@pytest.mark.usefixtures("single_threaded_torch")
def test_the_kernel_of_the_design_page(tmp_path: Path) -> None:
    (kernel,) = re.findall(r"^```cuda\n(.*?)^```", (DOCS / "design.md").read_text(), re.M | re.S)
    (tmp_path / "kernel.cpp").write_text(ONE_BY_ONE % kernel)
    library = tmp_path / "kernel.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "kernel.cpp"], check=True)
    pooled, indices = torch.nn.functional.max_pool2d(torch.randn(6, 8, 10), 2, return_indices=True)
    output = torch.full((6, 8, 10), torch.nan)
    sizes = (ctypes.c_int64(size) for size in (pooled.numel(), *pooled.shape[1:]))
    addresses = (ctypes.c_void_p(t.data_ptr()) for t in (pooled, indices, output))
    ctypes.CDLL(str(library)).run(*sizes, *addresses)
    assert torch.equal(output, torch.nn.functional.max_unpool2d(pooled, indices, 2))


def test_the_map_names_every_file() -> None:
    """And no other."""
    section = (DOCS / "design.md").read_text().split("\n## A map\n")[1].split("\n## ")[0]
    named = {Path(path).name for path in re.findall(r"`([\w/]+\.(?:h|cuh|cpp|cu|py))`", section)}
    files = (*ROOT.glob("csrc/**/*.*"), *ROOT.glob("maxunpool_cuda/*.py"))
    assert named == {path.name for path in files} | {"reference.py", "cases.py"}


def templates() -> list[tuple[str, str]]:
    """The file of tests that docs/testing.md names above each template, and the template."""
    section = (DOCS / "testing.md").read_text().split("\n## A test for your bug\n")[1]
    section = section.split("\n## ")[0]
    blocks = re.finditer(r"^```py\n(.*?)^```", section, re.M | re.S)
    files = r"`tests/(test_\w+)\.py`"
    return [(re.findall(files, section[: block.start()])[-1], block[1]) for block in blocks]


def test_templates_of_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file that each is for they have all that they need, and pass on some device.

    A process of its own runs them: modules that a run within this one imports are forgotten, and
    torch._dynamo cannot be imported a second time.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    chosen: set[str] = set()
    for number, (module, code) in enumerate(templates()):
        file = pytester.makepyfile(**{f"test_bug_{number}": f"from {module} import *\n{code}"})
        chosen |= {f"{file.name}::{name}" for name in re.findall(r"^def (test_\w+)", code, re.M)}
    assert chosen
    done = pytester.runpytest_subprocess("-v", "-p", "conftest", *chosen)
    assert done.parseoutcomes().keys() <= {"passed", "skipped", "warnings"}
    passed = re.findall(r"^(\w+\.py::\w+)(?:\[.*\])? PASSED", done.stdout.str(), re.M)
    assert {*passed} == chosen


if __name__ == "__main__":
    page = Path(sys.argv[1])
    text = page.read_text()
    scripts = re.findall(r"^```python\n(?!>>> )(.*?)^```", text, re.M | re.S)
    names: dict[str, object] = {}
    for script in scripts:  # each goes on where the one before ended
        exec(compile(script, page.name, "exec"), names)
    text = re.sub(r"^```.*$", "", text, flags=re.M)  # the fences around examples
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = runner.run(examples, clear_globs=False).failed
    sys.stdout.flush()
    # At once, with all that the examples made: PyTorch may abort, or wait for ever, when a process
    # ends that had a process group, or where DistributedDataParallel is freed.
    os._exit(min(failed, 1))
