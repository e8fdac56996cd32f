# SPDX-License-Identifier: BSD-3-Clause
"""What documents say: examples and templates run, pictures and the API are up to date.

``make check-docs`` finds broken links.
"""

import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text()]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_a_page(page: Path, tmp_path: Path) -> None:
    """Each page runs in its own process, as it may change PyTorch or begin a process group."""
    for package in ("captum", "shap") if ">>> import captum" in page.read_text() else ():
        pytest.importorskip(package, reason="only make test-all installs it")
    subprocess.run([sys.executable, __file__, page], check=True, cwd=tmp_path)


@pytest.mark.parametrize("blocks", [*([block] for block in BLOCKS), BLOCKS], ids=len)
def test_readme_can_be_pasted(blocks: list[str], tmp_path: Path) -> None:
    """Each block alone, and all into one Python. They print what comments beside them say."""
    pasted = "\n".join(blocks)
    if "import captum" in pasted:
        pytest.importorskip("captum", reason="only make test-all installs it")
    done = subprocess.run(
        (sys.executable, "-i", "-q"),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # captum calls torch.nn's unpooling
        input=pasted,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0
    assert "Error" not in done.stderr
    said = re.findall(r"^ *print\(.*\)  # (.*)$", pasted, re.M)
    assert set(said) <= set(done.stdout.splitlines())


@pytest.mark.parametrize("dims", [2, 3])
def test_the_demo_draws_a_picture(dims: int, tmp_path: Path) -> None:
    pytest.importorskip("nilearn", reason="only make demo and make test-all install it")
    options = ("--dims", str(dims), "--iterations", "2", "--out", tmp_path)
    command = (sys.executable, ROOT / "examples/segnet_mri.py", *options)
    subprocess.run(command, check=True)
    assert (tmp_path / f"segnet_mri_{dims}d.png").stat().st_size > 10_000


def words_of(folder: Path) -> dict[str, list[str]]:
    """By the picture's name. Matplotlib writes them as comments; outlines vary by release."""
    pictures = folder.glob("*.svg")
    return {path.name: re.findall("<!-- (.*?) -->", path.read_text()) for path in pictures}


@pytest.mark.usefixtures("single_threaded_torch")
def test_pictures_are_those_drawn(tmp_path: Path) -> None:
    with mpl.rc_context():
        runpy.run_path(str(DOCS / "pictures.py"))["draw"](tmp_path)
    drawn = words_of(tmp_path)
    assert all(len(words) > 5 for words in drawn.values())
    assert drawn == words_of(DOCS / "pictures"), "python docs/pictures.py draws them anew"


def test_the_api_has_the_docstrings() -> None:
    made = runpy.run_path(str(DOCS / "api.py"))["pages"]()
    pages = {path: path.read_text() for path in made}
    assert pages == made, "python docs/api.py writes them anew"


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


def test_templates_of_tests_pass_where_they_are_put(tmp_path: Path, monkeypatch: Patch) -> None:
    """In the file that each is for they have all that they need."""
    chosen = []
    for number, (module, code) in enumerate(templates()):
        file = tmp_path / f"test_bug_{number}.py"
        file.write_text(f"from {module} import *\n{code}")
        chosen += [f"{file}::{name}" for name in re.findall(r"^def (test_\w+)", code, re.M)]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    # A process of its own, as torch._dynamo cannot be imported a second time.
    command = (sys.executable, "-m", "pytest", "-q", "-p", "conftest", *chosen)
    subprocess.run(command, check=True, cwd=tmp_path)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    text = page.read_text()
    names: dict[str, object] = {}  # the examples after a script go on where that ended
    for script in re.findall(r"^```python\n(?!>>> )(.*?)^```", text, re.M | re.S):
        exec(compile(script, page.name, "exec"), names)
    text = re.sub(r"^```.*$", "", text, flags=re.M)  # the fences around examples
    examples = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = runner.run(examples, clear_globs=False).failed
    sys.stdout.flush()
    # At once, with all that the examples made: PyTorch may abort, or wait for ever, when a process
    # ends that had a process group, or where DistributedDataParallel is freed.
    os._exit(min(failed, 1))
