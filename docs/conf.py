# SPDX-License-Identifier: BSD-3-Clause
"""How Sphinx builds the documents: ``make docs``."""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
project = "maxunpool_cuda"
(version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
release = version
extensions = ["autoapi.extension", "sphinx.ext.napoleon", "myst_parser", "sphinx_copybutton"]

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

# The pages api-*.md take the docstrings from the package's source, so nothing is built for them.
autoapi_dirs = ["../maxunpool_cuda"]
autoapi_generate_api_docs = False
autoapi_options = []
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80


def as_written(_: Sphinx, *described: str | None) -> tuple[str | None, ...]:
    """The arguments and the result of a signature, by the names that the source has for types.

    autoapi has the first overload of a function. Here it gets what holds for all overloads.
    """
    modules = r"maxunpool_cuda\._(arguments|pooling|ops)\.|collections\.abc\."
    arguments, result = (text and re.sub(modules, "", text) for text in described[-2:])
    if arguments and "Literal[False]" in arguments:
        arguments = arguments.replace("Literal[False]", "bool")
        result = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
    return arguments, result


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", as_written)
