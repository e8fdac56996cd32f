# SPDX-License-Identifier: BSD-3-Clause
"""The interface: its names, what help() and type checkers say of it, what it needs of PyTorch."""

import inspect
import pydoc
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import maxunpool_cuda
from maxunpool_cuda import functional
from maxunpool_cuda._call import Pooled

KINDS = ("MaxUnpool", "MaxPool", "AdaptiveMaxPool")
POOLS = [name for name in functional.__all__ if "unpool" not in name]
# How documents write the default of an argument; None is explained in a word.
WRITTEN = {None: "``kernel_size``", "last": '``"last"``', torch.int64: "torch.int64"}


def sections(document: str) -> dict[str, str]:
    """The text of each section of a docstring, by its heading."""
    parts = re.split(r"^(\w+):\n", inspect.cleandoc(document), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def arguments(document: str) -> dict[str, str]:
    """What a docstring says of each argument, on one line."""
    entries = re.findall(r"^    (\w+): (.*(?:\n      .*)*)", sections(document)["Args"], re.M)
    return {name: " ".join(text.split()) for name, text in entries}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_list_their_arguments(kind: str, dims: int) -> None:
    """In order, with their defaults, in the same words for all dimensions but for sizes."""
    module = getattr(maxunpool_cuda, f"{kind}{dims}d")
    said = arguments(module.__doc__)
    parameters = list(inspect.signature(module).parameters.values())
    assert list(said) == [parameter.name for parameter in parameters]
    for name, default in [(each.name, each.default) for each in parameters]:
        if default is inspect.Parameter.empty:
            assert "default" not in said[name]
        else:
            written = WRITTEN.get(default, str(default))
            assert re.search(rf"[Dd]efault: {re.escape(written)}\.$", said[name]), name
    others = arguments(getattr(maxunpool_cuda, f"{kind}2d").__doc__)
    assert {name for name in said if said[name] != others[name]} <= {"kernel_size", "output_size"}
    assert set(sections(module.__doc__)) == {"Args", "Shape", "Raises", "Example"}
    assert set(sections(module.forward.__doc__)) == {"Args", "Returns", "Raises"}
    assert (
        list(arguments(module.forward.__doc__))
        == [*inspect.signature(module.forward).parameters][1:]
    )


@pytest.mark.parametrize("name", functional.__all__)
def test_functions_list_their_arguments(name: str) -> None:
    """Those for images do. The others refer to them."""
    function = getattr(functional, name)
    if name.endswith("2d"):
        said = arguments(function.__doc__)
        assert list(said) == [*inspect.signature(function).parameters]
        assert set(sections(function.__doc__)) >= {"Args", "Returns", "Raises", "Example"}
    else:
        assert f"as in :func:`{name[:-2]}2d`." in function.__doc__


def test_every_public_name_has_one_place() -> None:
    """All other names, also those of files that help() lists, begin with an underscore."""
    said = pydoc.plain(pydoc.render_doc(maxunpool_cuda))
    files = re.search("^PACKAGE CONTENTS\n((?:    .+\n)+)", said, re.M)
    modules = {name for name in files.group(1).split() if not name.startswith("_")}
    assert modules == {"export", "functional", "modules"}
    names = {name for name in dir(maxunpool_cuda) if not name.startswith("_")}
    assert names == {*maxunpool_cuda.__all__} | modules


# Names that only one feature needs: patched in functions, branches and regions that PyTorch traces;
# the short way of a call.
OPTIONAL_NAMES = """
import importlib
import torch

for module, name in (
    ("torch._functorch.autograd_function", "custom_function_call"),
    ("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder"),
    ("torch._ops", "HigherOrderOperator"),
    ("torch.autograd.forward_ad", "_current_level"),
    ("torch._C", "_is_tracing"),
):
    delattr(importlib.import_module(module), name)

import maxunpool_cuda
x = torch.tensor([[1.0, 3.0, 2.0]])
assert not maxunpool_cuda._operators.has_short_way  # so these go through the dispatcher
assert maxunpool_cuda.AdaptiveMaxPool1d(2)(x).tolist() == [[3.0, 3.0]]
with maxunpool_cuda.patched(index_dtype=torch.int32):
    values, indices = torch.nn.functional.max_pool1d(x, 3, return_indices=True)
assert (values.tolist(), indices.tolist(), indices.dtype) == ([[3.0]], [[1]], torch.int32)
"""


def test_import_without_private_names_of_pytorch() -> None:
    subprocess.run([sys.executable, "-c", OPTIONAL_NAMES], check=True, cwd=Path(__file__).parent)


def test_functional_says_what_is_public() -> None:
    functions = [value for value in vars(functional).values() if isinstance(value, FunctionType)]
    own = [f.__name__ for f in functions if f.__module__ == functional.__name__]
    assert sorted(functional.__all__) == sorted(own)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of Python 3.11")
@pytest.mark.parametrize("name", POOLS)
def test_overloads_of_return_indices(name: str) -> None:
    """They differ from the function in this argument and in the result, in nothing else."""
    function = getattr(functional, name)
    hints = typing.get_type_hints(function)
    overloads = typing.get_overloads(function)
    results: dict[Any, Any] = {}
    for overload in overloads:
        own = typing.get_type_hints(overload)
        results[own.pop("return_indices")] = own.pop("return")
        assert own == {key: hints[key] for key in own}
        parameters = inspect.signature(overload).parameters.values()
        for parameter, expected in zip(
            parameters, inspect.signature(function).parameters.values(), strict=True
        ):
            assert (parameter.name, parameter.kind) == (expected.name, expected.kind)
            assert parameter.default in (expected.default, ...)
    assert results == {
        Literal[False]: Tensor,
        Literal[True]: tuple[Tensor, Tensor],
        bool: Pooled,
    }
    assert (hints["return_indices"], hints["return"]) == (bool, Pooled)
    # A call without the argument is of the first overload.
    assert typing.get_type_hints(overloads[0])["return"] is Tensor
