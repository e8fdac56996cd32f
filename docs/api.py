# SPDX-License-Identifier: BSD-3-Clause
"""Writes the docstrings into the API's pages: ``python docs/api.py``; needs griffe.

A page has a heading for each public name. All below it is made of the docstring, as Markdown that a
code host and the site show alike. The package's source is only read, and needs no PyTorch or build.
"""

import re
from pathlib import Path

import griffe

DOCS = Path(__file__).parent
FILES = ("api-functions.md", "api-modules.md", "api-models.md")
TEXTS = {file: (DOCS / file).read_text() for file in FILES}
NAMES = {file: re.findall(r"^### (\w+)$", text, re.M) for file, text in TEXTS.items()}
MARK = "<!-- docs/api.py writes these tables. -->\n\n"
WIDTH = 80  # of a signature on one line
PACKAGE = griffe.load(
    "maxunpool_cuda",
    search_paths=[DOCS.parent],
    docstring_parser="google",
    # What is returned is one thing, and a colon in the sentence about it ends no name.
    docstring_options={"returns_multiple_items": False, "returns_named_value": False},
)


def path_of(name: str) -> str:
    """Where a public name is in the package: ``functional.max_pool2d``."""
    modules = [module for module in ("functional", "export") if name in PACKAGE[module].exports]
    return ".".join([*modules, name])


def described(name: str) -> tuple[griffe.Function | griffe.Class, griffe.Docstring]:
    """What a public name stands for, and its docstring."""
    found = PACKAGE[path_of(name)]
    thing: griffe.Function | griffe.Class = found.final_target if found.is_alias else found
    if thing.docstring is None:
        raise ValueError(f"{name}: expected a docstring but got none")
    return thing, thing.docstring


def linked(path: str) -> str:
    """A name as code, with a link if it is one of this package's."""
    name = path.split(".")[-1]
    is_ours = path in (name, path_of(name), f"maxunpool_cuda.{path_of(name)}")
    files = [file for file in FILES if is_ours and name in NAMES[file]]
    return f"[`{path}`]({files[0]}#{name.lower()})" if files else f"`{path}`"


def markdown(text: str) -> str:
    """The text of a docstring, with links for its roles and for the documents that it names."""
    text = re.sub(r":\w+:`(.+?)`", lambda role: linked(role[1]), text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def section(part: griffe.DocstringSection) -> str:
    """A part of a docstring: text, or what stands below ``Args:`` and so on."""
    kind, value = part.kind.value, part.value
    if kind == "text":
        return markdown(value)
    if kind == "admonition":  # griffe's word for titles that it does not know
        kind, value = value.kind, value.contents
    match kind:
        case "parameters" | "raises" | "warns":
            items = ((getattr(each, "name", each.annotation), each.description) for each in value)
            lines = (f"- `{name}`: {markdown(text)}".replace("\n", "\n  ") for name, text in items)
            body = "\n".join(lines)
        case "returns" | "yields":
            body = markdown(value[0].description)
        case "example":
            body = f"```py\n{value}\n```"
        case "warning":
            return f"> [!WARNING]\n{markdown(value)}".replace("\n", "\n> ")
        case _:
            body = markdown(value)
    return f"**{kind.capitalize()}**\n\n{body}"


def signature(thing: griffe.Function | griffe.Class) -> str:
    """How a function or a class is called, with the types as the source names them."""
    arguments: list[str] = []
    for each in thing.parameters:
        if each.name == "self" or str(each.annotation) == "NoReturn":  # nothing fits the latter
            continue
        if each.kind is griffe.ParameterKind.keyword_only and "*" not in arguments:
            arguments.append("*")
        default = "" if each.default is None else f" = {each.default}"
        arguments.append(f"{each.name}: {each.annotation}{default}".replace("'", '"'))
    decorators, start, end = "", f"{thing.name}(", ")"
    if isinstance(thing, griffe.Function):
        decorators = "".join(f"@{each.value}\n" for each in thing.decorators)
        pooled = str(PACKAGE["_call.Pooled"].value)
        start, end = f"def {start}", f") -> {thing.returns}".replace("Pooled", pooled)
    line = start + ", ".join(arguments) + end
    if len(line) > WIDTH:
        line = start + "\n" + "".join(f"    {each},\n" for each in arguments) + end
    return decorators + line


def entry(name: str) -> str:
    """The heading of a public name, and all below it."""
    thing, docstring = described(name)
    head = f"### {name}\n\n```py\n{signature(thing)}\n```"
    return "\n\n".join([head, *map(section, docstring.parsed)])


def page(file: str) -> str:
    """The text of a page."""
    old = re.compile(r"^### (\w+)\n.*?(?=^##|\Z)", re.M | re.S)
    text = old.sub(lambda found: f"{entry(found[1])}\n\n", TEXTS[file])
    return text.replace(f"]({file}#", "](#").strip() + "\n"


def table(file: str) -> str:
    """The names on a page, each with the first line of its docstring."""
    title = re.findall(r"^# (.+)", TEXTS[file], re.M)[0]
    rows = [f"| [{title}]({file}) | what it does |", "|---|---|"]
    for name in NAMES[file]:
        rows.append(f"| {linked(path_of(name))} | {markdown(described(name)[1].lines[0])} |")
    return "\n".join(rows) + "\n\n"


def pages() -> dict[Path, str]:
    """The text of each page, and of api.md, which has the tables of names."""
    above, rest = (DOCS / "api.md").read_text().split(MARK)
    below = rest[rest.index("```{toctree}") :]
    texts = {DOCS / file: page(file) for file in FILES}
    texts[DOCS / "api.md"] = above + MARK + "".join(map(table, FILES)) + below
    return texts


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
