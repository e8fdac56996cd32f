"""Modules: torch.nn's own, but for what they call; and what else of the package is no operator."""

import copy
import pickle

import pytest
import torch
from cases import same
from torch import nn

import maxunpool_cuda

POOLS = ["MaxPool1d", "MaxPool2d", "MaxPool3d"]
ADAPTIVE = ["AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "AdaptiveMaxPool3d"]
UNPOOLS = ["MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d"]
# What a module of ours may be told and torch.nn's may not, as its repr has it.
OWN = {
    **dict.fromkeys(UNPOOLS, ({"reduce": "sum"}, "reduce='sum'")),
    **dict.fromkeys(POOLS, ({"index_dtype": torch.uint8}, "index_dtype=torch.uint8")),
    **dict.fromkeys(ADAPTIVE, ({"index_dtype": torch.int32}, "index_dtype=torch.int32")),
}


@pytest.mark.parametrize("name", [*POOLS, *ADAPTIVE, *UNPOOLS])
def test_modules_are_torch_modules(name: str) -> None:
    ours, theirs = getattr(maxunpool_cuda, name), getattr(nn, name)
    forms = [((2,), {}), ((3, 2, 1), {}), ((4, None), {}), ((), {"kernel_size": 3, "padding": 1})]
    if name in ADAPTIVE:
        forms = [((2,), {}), (((3, None, 1),), {}), ((2, True), {}), ((), {"output_size": 3})]
    if name in POOLS:
        forms.append(((3, 2, 1, 2, True, True), {}))
    for arguments, named in forms:
        module, other = ours(*arguments, **named), theirs(*arguments, **named)
        assert isinstance(module, theirs)
        assert repr(module) == repr(other)
        assert vars(other).items() <= vars(module).items()
        assert module.state_dict() == {}
        assert not list(module.parameters())
    own, text = OWN[name]
    for module in (ours(3), ours(2, **own)):
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is ours
            assert vars(other) == vars(module)
            assert repr(other) == repr(module)
    assert text in repr(module)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(module)


@pytest.mark.parametrize("name", [*POOLS, *ADAPTIVE, *UNPOOLS])
def test_a_module_made_by_torch_is_still_one_here(name: str) -> None:
    """Pickles of torch.nn's modules have no `reduce` and no `index_dtype`."""
    ours = getattr(maxunpool_cuda, name)
    module = ours.__new__(ours)
    module.__setstate__(vars(getattr(nn, name)(3)))
    x = torch.rand(2, 3, *[4] * int(name[-2]))
    tensors = (x, torch.randint(9, x.shape)) if name in UNPOOLS else (x,)
    assert same(module(*tensors), ours(3)(*tensors))


def test_version_and_build_info() -> None:
    assert maxunpool_cuda.__version__.count(".") == 2
    info = maxunpool_cuda.build_info()
    assert set(info) == {"cuda", "cuda_version", "arch_list", "compiler", "torch_version"}
    assert info["torch_version"] == torch.__version__.split("+")[0]
    assert (info["cuda_version"] is not None) == info["cuda"]
