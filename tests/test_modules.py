# SPDX-License-Identifier: BSD-3-Clause
"""Modules: torch.nn's own, but for what they call."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import all_same
from torch import nn

import maxunpool_cuda


@dataclass(frozen=True)
class Module:
    """A module of this package, beside torch.nn's of the same name."""

    own: str  # the argument that torch.nn's lacks
    value: Any  # of that argument
    forms: tuple[tuple[Any, ...], ...]  # arguments that both take


MODULES = {
    "MaxUnpool": Module("reduce", "sum", forms=((2,), (3, 2, 1), (4, None))),
    "MaxPool": Module(
        "index_dtype", torch.uint8, forms=((2,), (4, None), (3, 2, 1, 2, True, True))
    ),
    "AdaptiveMaxPool": Module("index_dtype", torch.int32, forms=((2,), (2, True))),
}
every_module = pytest.mark.parametrize("name", MODULES)
every_rank = pytest.mark.parametrize("dims", [1, 2, 3])
FORMS = [
    pytest.param(name, arguments, id=f"{name}{arguments}")
    for name, module in MODULES.items()
    for arguments in module.forms
]


def classes(name: str, dims: int) -> tuple[type[nn.Module], type[nn.Module]]:
    """This package's class and torch.nn's."""
    ours, theirs = (getattr(of, f"{name}{dims}d") for of in (maxunpool_cuda, nn))
    return ours, theirs


@every_rank
@pytest.mark.parametrize(("name", "arguments"), FORMS)
def test_modules_are_torch_modules(name: str, arguments: tuple[Any, ...], dims: int) -> None:
    ours, theirs = classes(name, dims)
    module, other = ours(*arguments), theirs(*arguments)
    assert isinstance(module, theirs)
    assert repr(module) == repr(other)
    assert vars(other).items() <= vars(module).items()
    assert module.state_dict() == {}


@pytest.mark.usefixtures("single_threaded_torch")
@every_rank
@pytest.mark.parametrize(("name", "arguments"), FORMS)
def test_modules_do_what_torch_nns_do(name: str, arguments: tuple[Any, ...], dims: int) -> None:
    """They hand on every argument. No index occurs twice."""
    x = torch.rand(2, 3, *[4 if name == "MaxUnpool" else 8] * dims)
    tensors = [x]
    if name == "MaxUnpool":
        tensors.append(torch.arange(4**dims).reshape([4] * dims).expand_as(x))
    results, expected = (each(*arguments)(*tensors) for each in classes(name, dims))
    assert all_same(results, expected)


@every_rank
@every_module
def test_errors_of_missing_arguments_name_the_class(name: str, dims: int) -> None:
    ours, _ = classes(name, dims)
    with pytest.raises(TypeError, match=rf"^{name}{dims}d\.__init__\(\) missing 1 required"):
        ours()
    with pytest.raises(TypeError, match=rf"^{name}{dims}d\.forward\(\) missing \d required"):
        ours(2)()


@every_rank
@pytest.mark.parametrize("argument", ["kernel_size", "stride", "padding"])
@pytest.mark.parametrize("value", [2.0, True, "2"], ids=repr)
def test_unpools_show_a_window_as_it_was_passed(argument: str, value: Any, dims: int) -> None:
    """torch.nn's class keeps (2.0, 2.0) for 2.0."""
    ours, _ = classes("MaxUnpool", dims)
    expected = f"{argument} to be an int or a sequence of ints but got {value!r}"
    with pytest.raises(TypeError, match=f"^MaxUnpool{dims}d: expected {expected}$"):
        ours(**{"kernel_size": 2, argument: value})


@every_rank
@every_module
def test_modules_show_their_own_argument(name: str, dims: int) -> None:
    ours, _ = classes(name, dims)
    own, value = MODULES[name].own, MODULES[name].value
    assert repr(ours(2, **{own: value})).endswith(f", {own}={value!r})")


@every_rank
@every_module
def test_modules_are_not_scripted(name: str, dims: int) -> None:
    ours, _ = classes(name, dims)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(ours(2, **{MODULES[name].own: MODULES[name].value}))


@every_rank
@every_module
def test_modules_from_pickles_of_torch_nns(name: str, dims: int) -> None:
    """These have not the argument that torch.nn's module lacks."""
    ours, theirs = classes(name, dims)
    unpickled = ours.__new__(ours)
    unpickled.__setstate__(vars(theirs(3)))
    assert repr(unpickled) == repr(theirs(3))
