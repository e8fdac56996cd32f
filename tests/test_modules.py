# SPDX-License-Identifier: BSD-3-Clause
"""Modules: torch.nn's own, but for what they call."""

from typing import Any

import pytest
import torch
from torch import nn

import maxunpool_cuda

# An argument that torch.nn's module lacks, its value, and arguments that both take.
MODULES: dict[str, tuple[Any, ...]] = {
    "MaxUnpool": ("reduce", "sum", (2,), (3, 2, 1), (4, None)),
    "MaxPool": ("index_dtype", torch.uint8, (2,), (4, None), (3, 2, 1, 2, True, True)),
    "AdaptiveMaxPool": ("index_dtype", torch.int32, (2,), (2, True)),
}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_torch_modules(name: str, dims: int) -> None:
    ours, theirs = (getattr(of, f"{name}{dims}d") for of in (maxunpool_cuda, nn))
    key, value, *forms = MODULES[name]
    for arguments in forms:
        module, other = ours(*arguments), theirs(*arguments)
        assert isinstance(module, theirs)
        assert repr(module) == repr(other)
        assert vars(other).items() <= vars(module).items()
        assert module.state_dict() == {}
    module = ours(2, **{key: value})
    assert repr(module).endswith(f", {key}={value!r})")
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(module)
    unpickled = ours.__new__(ours)  # from torch.nn's pickle, without what torch.nn's lacks
    unpickled.__setstate__(vars(theirs(3)))
    assert repr(unpickled) == repr(theirs(3))
