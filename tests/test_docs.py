# SPDX-License-Identifier: BSD-3-Clause
"""What documents and the demo say: examples run, pictures are those drawn, the map is whole."""

import ctypes
import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from fontTools.misc.transform import Transform
from fontTools.pens.boundsPen import BoundsPen
from fontTools.pens.transformPen import TransformPen
from fontTools.svgLib.path import parse_path

import maxunpool_cuda
from maxunpool_cuda import functional

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "tools"))

import docs_shots  # noqa: E402

# The names of the public interface, as the reference has them.
PAGES = "".join(page.read_text() for page in sorted(DOCS.glob("api-*.md")))
NAMES = re.findall(r":: maxunpool_cuda\.(\S+)$", PAGES, re.M)


def test_every_public_name_is_in_the_reference() -> None:
    functions = [name for name in dir(functional) if name.startswith(("max_", "adaptive_max_"))]
    public = {*maxunpool_cuda.__all__} - {"functional", "export"}
    public |= {f"export.{name}" for name in maxunpool_cuda.export.__all__}
    assert sorted(NAMES) == sorted(public | {f"functional.{name}" for name in functions})


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(attrgetter(name)(maxunpool_cuda), name)
    results = doctest.DocTestRunner().run(test)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(
    "page",
    [p for p in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))) if "```python" in p.read_text()],
    ids=lambda page: page.stem,
)
def test_examples_of_a_page(page: Path) -> None:
    """Each page runs in its own process, as it may change PyTorch or begin a process group."""
    text = page.read_text()
    has_prompts = re.findall(r"^```python\n(>>> )?", text, re.M)
    assert len({*has_prompts}) == 1, "a page has examples with prompts, or scripts"
    for package in ("captum", "shap") if ">>> import captum" in text else ():
        pytest.importorskip(package, reason="only make test-all installs it")
    subprocess.run([sys.executable, __file__, page], check=True)


def test_readme_can_be_pasted() -> None:
    """A screenful of lines; blocks without prompts, of lines that no narrow page cuts."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    blocks = re.findall(r"^```(?:py|python|sh)\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) > 3
    assert not re.search("^(>>>|[$]) ", "".join(blocks), re.M)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80


def printed_by_the_demo(dims: int) -> tuple[str, ...]:
    """The end of what it prints, after the number of losses."""
    return (
        "losses of two runs are equal, bit for bit",
        "gradient of the sum │ three windows that hold one maximum",
        f"torch.nn.functional.max_unpool{dims}d │ [1.0, 1.0, 1.0]",
        "maxunpool_cuda │ [0.0, 0.0, 1.0]",
        "finite differences │ [0.0, 0.0, 1.0]",
    )


def test_readme_shows_what_the_demo_prints() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert [words for words in printed_by_the_demo(2) if words not in readme] == []


@pytest.mark.slow
@pytest.mark.parametrize("dims", [2, 3])
def test_demo(dims: int, tmp_path: Path) -> None:
    options = ("--dims", str(dims), "--iterations", "2", "--out", tmp_path)
    command = (sys.executable, ROOT / "examples/segnet_mri.py", *options)
    printed = " ".join(subprocess.check_output(command, text=True, timeout=300).split())
    # Between columns the table has lines, which are another character below the head.
    printed = printed.replace("┃", "│")
    assert "2 losses of two runs" in printed
    for words in printed_by_the_demo(dims):
        assert words in printed
    assert (tmp_path / f"segnet_mri_{dims}d.png").stat().st_size > 10_000


def test_every_document_has_the_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"\nversion: {version}\ndate-released: " in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version


def test_pictures_are_those_drawn(tmp_path: Path) -> None:
    """Their words are, which matplotlib writes as comments. Outlines vary by release."""
    subprocess.run([sys.executable, DOCS / "pictures.py", tmp_path], check=True)
    pictures = (sorted(folder.iterdir()) for folder in (tmp_path, DOCS / "pictures"))
    drawn, kept = (
        {path.name: re.findall("<!-- (.*?) -->", path.read_text()) for path in folder}
        for folder in pictures
    )
    assert all(len(words) > 5 for words in drawn.values())
    assert drawn == kept, "python docs/pictures.py draws them anew"


Box = tuple[float, float, float, float]  # the left, upper, right and lower edge
Elements = Mapping[str, ElementTree.Element]  # by id


class Where(NamedTuple):
    """Where matplotlib drew something: in which group, coordinates, and rectangles that cut it."""

    group: str
    place: Transform
    edges: tuple[Box, ...]


def inside(element: ElementTree.Element, where: Where, elements: Elements) -> Where:
    """Where the element's content is, if the element is there."""
    group, place, edges = where
    for change, numbers in re.findall(r"(\w+)\((.*?)\)", element.get("transform", "")):
        changes = {"translate": place.translate, "scale": place.scale}
        place = changes[change](*map(float, numbers.split()))
    if clip := re.search(r"#(\w+)", element.get("clip-path", "")):
        (edge,) = elements[clip[1]]
        x, y, width, height = (float(edge.attrib[name]) for name in ("x", "y", "width", "height"))
        corners = place.transformPoints([(x, y), (x + width, y + height)])
        edges = (*edges, (*corners[0], *corners[1]))
    return Where(element.get("id", group), place, edges)


def outlines(
    element: ElementTree.Element, where: Where, elements: Elements
) -> Iterator[tuple[Box, Where]]:
    """The bounds of each outline that the element draws. An element of another kind is an error."""
    kind = element.tag.rpartition("}")[2]
    where = inside(element, where, elements)
    if kind == "path":
        pen = BoundsPen(None)
        parse_path(element.get("d", ""), TransformPen(pen, where.place))
        if pen.bounds:  # a space's outline has no points
            yield pen.bounds, where
    elif kind == "use":
        x, y = (float(element.get(name, 0)) for name in "xy")
        used = elements[element.attrib["{http://www.w3.org/1999/xlink}href"][1:]]
        moved = where._replace(place=where.place.translate(x, y))
        for box, within in outlines(used, moved, elements):
            yield box, within._replace(group=where.group)
    elif kind in ("svg", "g"):
        for child in element:
            yield from outlines(child, where, elements)
    else:
        assert kind in ("metadata", "style", "defs"), f"what does {kind} draw?"


def cut(svg: str) -> set[str]:
    """What goes over an edge, the picture's or a clipPath's: texts, and names of other groups."""
    root = ElementTree.fromstring(svg)
    elements = {element.get("id", ""): element for element in root.iter()}
    words = dict(re.findall(r'<g id="(\w+)">\s*<!-- (.*?) -->', svg, re.S))
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    picture = Where("", Transform(), ((left, top, left + width, top + height),))
    found = set()
    for box, where in outlines(root, picture, elements):
        for edge in where.edges:
            beyond = (edge[0] - box[0], edge[1] - box[1], box[2] - edge[2], box[3] - edge[3])
            if max(beyond) > 0.01:  # points; matplotlib rounds
                found.add(words.get(where.group, where.group))
    return found


@pytest.mark.parametrize(
    "picture", sorted((DOCS / "pictures").iterdir()), ids=lambda path: path.stem
)
def test_pictures_are_whole_and_legible_on_a_phone(picture: Path) -> None:
    """A phone shows them 358 pixels wide: 390, without the margins of the page."""
    assert cut(picture.read_text()) == set()
    size, width = docs_shots.letters(picture)
    assert 358 * size / width >= docs_shots.SMALLEST_LETTERS
    assert "prefers-color-scheme: dark" in picture.read_text()


@pytest.mark.slow
def test_screenshots_see_what_does_not_fit(tmp_path: Path) -> None:
    """A page with a line that is too wide, and a picture that is too small."""
    program = docs_shots.chromium()
    if program is None:
        pytest.skip("no Chromium is installed")
    picture = tmp_path / "speed.svg"
    picture.write_bytes((DOCS / "pictures" / "speed.svg").read_bytes())
    page = tmp_path / "page.html"
    fits = '<body style="margin: 0"><article><img src="speed.svg" width="%d">%s</article></body>'
    page.write_text(fits % (358, ""))
    found = docs_shots.measured(program, page, 390, dark=True)
    assert (found["window"], found["dark"]) == (390, True)
    assert docs_shots.complaints(page, found) == []
    page.write_text(fits % (200, '<div style="width: 500px">wide</div>'))
    found = docs_shots.measured(program, page, 390, dark=False)
    assert docs_shots.complaints(page, found) == [
        "expected at most 390 pixels but got 500",
        "speed.svg: expected letters of at least 9 pixels but got 5.7",
    ]


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


def test_the_kernel_of_the_design_page(tmp_path: Path) -> None:
    (kernel,) = re.findall(r"^```cuda\n(.*?)^```", (DOCS / "design.md").read_text(), re.M | re.S)
    (tmp_path / "kernel.cpp").write_text(ONE_BY_ONE % kernel)
    library = tmp_path / "kernel.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "kernel.cpp"], check=True)
    x = torch.randn(6, 8, 10)
    pooled, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    output = torch.full_like(x, torch.nan)
    sizes = (ctypes.c_int64(size) for size in (pooled.numel(), *pooled.shape[1:]))
    addresses = (ctypes.c_void_p(t.data_ptr()) for t in (pooled, indices, output))
    ctypes.CDLL(str(library)).run(*sizes, *addresses)
    assert torch.equal(output, torch.where(output != 0, x, 0))
    assert output.count_nonzero() == pooled.numel()
    assert torch.equal(output.flatten(1).gather(1, indices.flatten(1)), pooled.flatten(1))


def test_the_map_names_every_file() -> None:
    """And no other."""
    section = re.search(r"^## A map$.*?^## ", (DOCS / "design.md").read_text(), re.M | re.S)[0]
    named = {Path(path).name for path in re.findall(r"`([\w/]+\.(?:h|cuh|cpp|cu|py))`", section)}
    files = (*ROOT.glob("csrc/**/*.*"), *ROOT.glob("maxunpool_cuda/*.py"))
    assert named == {path.name for path in files} | {"reference.py", "cases.py"}


TESTING = (DOCS / "testing.md").read_text()
# Of each template: the file that it is for, and its code.
TEMPLATES = re.findall(
    r"^A[^\n]* in `tests/(test_\w+)\.py`:.*?^```py\n(.*?)^```", TESTING, re.M | re.S
)


def test_templates_of_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the file that each is for they have all that they need, and pass.

    Each passes on some device. Those for a GPU may be skipped. A process of its own runs them:
    modules that a run within this one imports are forgotten, and torch._dynamo cannot be imported
    a second time.
    """
    assert len(TEMPLATES) == TESTING.count("```py\n") == 5
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    chosen: list[str] = []
    names: set[str] = set()
    for number, (module, code) in enumerate(TEMPLATES):
        path = pytester.makepyfile(**{f"test_bug_{number}": f"from {module} import *\n{code}"})
        of_template = re.findall(r"^def (test_\w+)", code, re.M)
        chosen += [f"{path}::{name}" for name in of_template]
        names |= {f"test_bug_{number}.py::{name}" for name in of_template}
    done = pytester.runpytest_subprocess("-v", "-p", "conftest", *chosen)
    outcomes = done.parseoutcomes()
    assert outcomes.keys() <= {"passed", "skipped", "warnings"}, outcomes
    passed = re.findall(r"^(\w+\.py::\w+)(?:\[.*\])? PASSED", done.stdout.str(), re.M)
    assert {*passed} == names


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))],
    ids=lambda page: page.stem,
)
def test_links_to_files(page: Path) -> None:
    """Each file that a page links is there, and a link whose text is a file's name leads to it."""
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"\[`([\w/]+\.\w+)`\]\(([\w./-]+)\)", page.read_text())
    assert [link for name, link in named if not link.endswith(f"/{name}")] == []


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
