# SPDX-License-Identifier: BSD-3-Clause
"""Takes screenshots of the built documents, and looks for what does not fit: ``make docs-shots``.

    python tools/docs_shots.py out/docs out/docs-shots [PAGE...]

Each page is shown 1280 and 390 pixels wide, light and dark. Complaints are pages that are wider
than the window, and letters of pictures that are smaller than 9 pixels. Without Chromium it does
nothing, and says so.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTHS = (1280, 390)  # pixels: a desk, a telephone
SMALLEST_LETTERS = 9  # pixels: the size of the font
LARGEST_HEIGHT = 16_000  # pixels: Chromium draws no taller picture
SECONDS = 120  # for one page; a busy machine takes some
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
)
# Shows a page in a frame, as no window of Chromium is narrower than 500 pixels. Writes what it has
# measured to itself.
MEASURE = """<body>
<iframe src="{page}" width="{width}" height="2000" style="border: 0"></iframe>
<script>
window.addEventListener("load", () => {{
  const inner = document.querySelector("iframe").contentWindow;
  const root = inner.document.documentElement;
  const pictures = [...inner.document.querySelectorAll("article img")].map(
    picture => ({{source: picture.getAttribute("src"), width: picture.clientWidth}}));
  const dark = inner.matchMedia("(prefers-color-scheme: dark)").matches;
  const found = {{window: inner.innerWidth, width: root.scrollWidth, height: root.scrollHeight}};
  document.body.setAttribute("data-measured", JSON.stringify({{...found, pictures, dark}}));
}});
</script>
</body>
"""


def chromium() -> str | None:
    """Where Chromium is, or None. The environment variable CHROMIUM comes first."""
    named = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, (shutil.which(name) for name in named if name)), None)


def letters(picture: Path) -> tuple[float, float]:
    """The smallest size of letters of matplotlib's SVG, and its width, in the same unit.

    matplotlib draws a letter as an outline in units of a hundredth of the font's size.
    """
    text = picture.read_text()
    scales = re.findall(r"scale\((0\.\d+) -0\.\d+\)", text)
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', text)
    return 100 * min(map(float, scales)), float(width)


def browse(program: str, page: Path, width: int, dark: bool, *options: str) -> str:
    """What Chromium prints for the page."""
    with tempfile.TemporaryDirectory() as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", *options]
        command += ["--force-dark-mode"] * dark
        if not any(option.startswith("--window-size") for option in options):
            command += [f"--window-size={width},2000"]
        run = subprocess.run(
            ["timeout", str(SECONDS), *command, page.as_uri()], capture_output=True, text=True
        )
    if run.returncode:
        sys.exit(f"Chromium stopped with {run.returncode} at {page.name}: {run.stderr[-500:]}")
    return run.stdout


def measured(program: str, page: Path, width: int, dark: bool) -> dict[str, Any]:
    """The sizes of the page and of its pictures, in a window of this width."""
    frame = page.with_name(f".frame-{page.name}")
    frame.write_text(MEASURE.format(page=page.name, width=width))
    try:
        printed = browse(program, frame, width, dark, "--dump-dom")
    finally:
        frame.unlink()
    (found,) = re.findall(r'data-measured="(.*?)"', printed)
    return json.loads(found.replace("&quot;", '"'))


def complaints(page: Path, found: dict[str, Any]) -> list[str]:
    """What does not fit, a sentence each."""
    said = []
    if found["width"] > found["window"]:
        said.append(f"expected at most {found['window']} pixels but got {found['width']}")
    for picture in found["pictures"]:
        path = page.parent / picture["source"]
        if path.suffix == ".svg":
            size, width = letters(path)
            pixels = size * picture["width"] / width
            if pixels < SMALLEST_LETTERS:
                said.append(
                    f"{path.name}: expected letters of at least {SMALLEST_LETTERS} pixels "
                    f"but got {pixels:.1f}"
                )
    return said


def shoot(program: str, page: Path, folder: Path) -> list[str]:
    """Take the screenshots of a page; returns complaints."""
    said = []
    for width in WIDTHS:
        for dark in (False, True):
            found = measured(program, page, width, dark)
            where = f"{page.stem}-{width}-{'dark' if dark else 'light'}"
            if (found["dark"], found["window"]) != (dark, width):
                said.append(f"{where}: Chromium shows another width or theme: {found}")
            said += [f"{where}: {complaint}" for complaint in complaints(page, found)]
            height = min(found["height"], LARGEST_HEIGHT)
            size = f"--window-size={width},{height}"
            target = folder.resolve() / f"{where}.png"
            browse(program, page, width, dark, size, f"--screenshot={target}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="folder of the built documents")
    parser.add_argument("folder", type=Path, help="for the screenshots")
    parser.add_argument("pages", nargs="*", help="names without .html; by default all")
    options = parser.parse_args()
    program = chromium()
    if program is None:
        print("No screenshots: no Chromium is on PATH, and CHROMIUM names none.")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    pages = [options.site / f"{name}.html" for name in options.pages]
    said = []
    for page in pages or sorted(options.site.glob("*.html")):
        said += shoot(program, page.resolve(), options.folder)
    if said:
        sys.exit("\n".join(said))
    print(f"The screenshots are in {options.folder}; everything fits.")


if __name__ == "__main__":
    main()
