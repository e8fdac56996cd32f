# SPDX-License-Identifier: BSD-3-Clause
"""The interface: its names, examples and types, and what it needs of PyTorch.

test_torch_nn.py compares names and defaults of arguments with torch.nn's.
"""

import doctest
import re
import subprocess
import sys
import typing
from operator import attrgetter
from pathlib import Path
from typing import Literal

import pytest
from torch import Tensor

import maxunpool_cuda
from maxunpool_cuda import export, functional
from maxunpool_cuda._call import Pooled

DOCS = Path(__file__).parent.parent / "docs"
NAMES = sorted(
    {*maxunpool_cuda.__all__} - {"functional", "export"}
    | {f"functional.{name}" for name in functional.__all__}
    | {f"export.{name}" for name in export.__all__}
)


def test_public_names_are_those_of_the_reference() -> None:
    public = {name for name in dir(maxunpool_cuda) if not name.startswith("_")}
    assert public == {*maxunpool_cuda.__all__, "modules"}
    pages = "".join(page.read_text() for page in DOCS.glob("api-*.md"))
    described = re.findall(r"^### (\w+)$", pages, re.M)
    assert sorted(described) == sorted(name.split(".")[-1] for name in NAMES)


@pytest.mark.usefixtures("single_threaded_torch")
@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(attrgetter(name)(maxunpool_cuda), name)
    results = doctest.DocTestRunner().run(example)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of Python 3.11")
@pytest.mark.parametrize("name", [name for name in functional.__all__ if "unpool" not in name])
def test_return_indices_decides_the_type_of_the_result(name: str) -> None:
    """A call without this argument is of the first overload. Mypy compares the others."""
    hints = [typing.get_type_hints(f) for f in typing.get_overloads(getattr(functional, name))]
    assert [(each["return_indices"], each["return"]) for each in hints] == [
        (Literal[False], Tensor),
        (Literal[True], tuple[Tensor, Tensor]),
        (bool, Pooled),
    ]


# Names that only one feature needs: patched in functions, branches and regions that PyTorch traces;
# the short way of a call.
OPTIONAL_NAMES = """
import importlib

for module, name in (
    ("torch._functorch.autograd_function", "custom_function_call"),
    ("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder"),
    ("torch._ops", "HigherOrderOperator"),
    ("torch.autograd.forward_ad", "_current_level"),
    ("torch._C", "_len_torch_dispatch_stack"),
):
    delattr(importlib.import_module(module), name)

import maxunpool_cuda, torch
x = torch.tensor([[1.0, 3.0, 2.0]])
assert not maxunpool_cuda._operators.has_short_way  # so these go through the dispatcher
with maxunpool_cuda.patched(index_dtype=torch.int32):
    values, indices = torch.nn.functional.max_pool1d(x, 3, return_indices=True)
assert (values.tolist(), indices.tolist(), indices.dtype) == ([[3.0]], [[1]], torch.int32)
"""


def test_import_without_private_names_of_pytorch() -> None:
    subprocess.run([sys.executable, "-c", OPTIONAL_NAMES], check=True, cwd=Path(__file__).parent)
