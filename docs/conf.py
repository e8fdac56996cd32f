# SPDX-License-Identifier: BSD-3-Clause
"""How Sphinx builds the documents: ``make docs``."""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
project = "maxunpool_cuda"
(version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
release = version
extensions = ["myst_parser", "sphinx_copybutton"]

html_theme = "furo"
# When the project has an address: html_theme_options, with furo's source_repository,
# source_branch and source_directory.
html_title = f"{project} {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_copyright = html_show_sphinx = False

# Links to headings are written as GitHub takes them. A broken one is an error, as every warning.
myst_heading_anchors = 3
myst_enable_extensions = ["alert"]  # the boxes of GitHub: > [!WARNING]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def link_within(_app: Sphinx, _page: str, source: list[str]) -> None:
    """A link to a file of the project's root, as a code host needs it, becomes one to its page."""
    source[0] = source[0].replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", link_within)
