# SPDX-License-Identifier: BSD-3-Clause
"""Modules: torch.nn's own, but for what they call."""

from typing import Any

import pytest
import torch
from cases import all_same
from torch import nn

import maxunpool_cuda

# A name and arguments that torch.nn's module takes, too. Each class and each argument is there.
MODULES = [
    ("MaxUnpool1d", (2,)),
    ("MaxUnpool2d", (3, 2, 1)),
    ("MaxUnpool3d", (4, None)),
    ("MaxPool1d", (3, 2, 0, 1, False, True)),
    ("MaxPool2d", (3, 2, 1, 2, True)),
    ("MaxPool3d", (4, None)),
    ("AdaptiveMaxPool1d", (2,)),
    ("AdaptiveMaxPool2d", (2, True)),
    ("AdaptiveMaxPool3d", (3,)),
]
# The argument that torch.nn's module lacks.
OWN = {
    "MaxUnpool": {"reduce": "sum"},
    "MaxPool": {"index_dtype": torch.uint8},
    "AdaptiveMaxPool": {"index_dtype": torch.int32},
}
every_module = pytest.mark.parametrize(("name", "arguments"), MODULES, ids=str)


@every_module
def test_modules_are_torch_modules(name: str, arguments: tuple[Any, ...]) -> None:
    module, other = (getattr(of, name)(*arguments) for of in (maxunpool_cuda, nn))
    assert isinstance(module, getattr(nn, name))
    (own,) = vars(module).keys() - vars(other).keys()
    ending = f", {own}={getattr(module, own)!r})"
    assert repr(module) == f"maxunpool_cuda.{repr(other)[:-1]}{ending}"
    assert vars(other).items() <= vars(module).items()
    assert module.state_dict() == {}
    # A pickle of torch.nn's has not the argument that torch.nn's module lacks.
    unpickled = type(module).__new__(type(module))
    unpickled.__setstate__(vars(other))
    assert repr(unpickled) == repr(module)
    of_user = type("OfUser", (type(module),), {})(*arguments)
    assert repr(of_user).startswith("OfUser(")


@pytest.mark.usefixtures("single_threaded_torch")
@every_module
def test_modules_do_what_torch_nns_do(name: str, arguments: tuple[Any, ...]) -> None:
    """They hand on every argument. No index occurs twice."""
    dims, unpools = int(name[-2]), "Unpool" in name
    x = torch.rand(2, 3, *[4 if unpools else 8] * dims)
    indices = torch.arange(4**dims).reshape([4] * dims).expand(2, 3, *[4] * dims)
    tensors = (x, indices) if unpools else (x,)
    results, expected = (getattr(of, name)(*arguments)(*tensors) for of in (maxunpool_cuda, nn))
    assert all_same(results, expected)


@pytest.mark.parametrize("name", [name for name, _ in MODULES])
def test_repr_and_errors_name_the_class_and_its_own_argument(name: str) -> None:
    make = getattr(maxunpool_cuda, name)
    ((own, value),) = OWN[name[:-2]].items()
    module = make(2, **{own: value})
    assert repr(module).endswith(f", {own}={value!r})")
    with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) missing 1 required"):
        make()
    with pytest.raises(TypeError, match=rf"^{name}\.forward\(\) missing \d required"):
        module()
    with pytest.raises(NotImplementedError, match=rf"^{name}: .*torch\.jit\.script"):
        torch.jit.script(module)


def test_a_graph_may_make_modules() -> None:
    """Of sizes that it leaves open, which constructors check like others."""

    def pool_all(x: torch.Tensor) -> torch.Tensor:
        pool = maxunpool_cuda.MaxPool2d(x.shape[-2:], return_indices=True)
        values, indices = pool(x)
        unpooled: torch.Tensor = maxunpool_cuda.MaxUnpool2d(x.shape[-2:])(values, indices)
        return unpooled

    compiled = torch.compile(pool_all, backend="aot_eager", fullgraph=True, dynamic=True)
    for height in (5, 6, 9):
        x = torch.rand(1, 2, height, height + 2)
        assert torch.equal(compiled(x), pool_all(x))
