"""Modules: torch.nn's own, but for what they call; and what else of the package is no operator."""

import copy
import pickle

import pytest
import torch
from cases import INDEX_DTYPES, REDUCES, same
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.functional as F

POOLS = ["MaxPool1d", "MaxPool2d", "MaxPool3d"]
UNPOOLS = ["MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d"]
# What a module of ours may be told and torch.nn's may not, as its repr has it.
OWN = {
    **dict.fromkeys(UNPOOLS, ({"reduce": "mean"}, "reduce='mean'")),
    **dict.fromkeys(POOLS, ({"index_dtype": torch.uint8}, "index_dtype=torch.uint8")),
}


@pytest.mark.parametrize("name", [*POOLS, *UNPOOLS])
def test_modules_are_torch_modules(name: str) -> None:
    ours, theirs = getattr(maxunpool_cuda, name), getattr(nn, name)
    forms = [((2,), {}), ((3, 2, 1), {}), ((4, None), {}), ((), {"kernel_size": 3, "padding": 1})]
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
    for module in (ours(3, 2, 1), ours(2, **own)):
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is ours
            assert vars(other) == vars(module)
            assert repr(other) == repr(module)
    assert text in repr(module)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(module)


def tensors_for(name: str, index_dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    """Of a module, with a kernel_size of 3 and a stride of 2."""
    dims = int(name[-2])
    if name in POOLS:
        return (torch.rand(2, 3, *[10] * dims),)  # where ceil_mode matters
    x = torch.rand(2, 3, *[4] * dims)
    return x, torch.randint(3 if index_dtype == torch.uint8 else 9, x.shape, dtype=index_dtype)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("name", [*POOLS, *UNPOOLS])
def test_modules_call_the_functions(name: str, index_dtype: torch.dtype) -> None:
    function = getattr(F, name.replace("MaxUnpool", "max_unpool").replace("MaxPool", "max_pool"))
    module, tensors = getattr(maxunpool_cuda, name), tensors_for(name, index_dtype)
    if name in POOLS:
        options = {"dilation": 1, "return_indices": True, "ceil_mode": True}
        options["index_dtype"] = index_dtype
        results = module(3, 2, 1, **options)(*tensors)
        assert all(map(same, results, function(*tensors, 3, 2, 1, **options)))
        return
    for reduce in REDUCES:
        unpool = module(3, 2, reduce=reduce)
        assert same(unpool(*tensors), function(*tensors, 3, 2, 0, reduce=reduce))
        x, indices = tensors
        size = [10] * (x.dim() - 2)
        expected = function(*tensors, 3, 2, 0, size, reduce=reduce)
        assert same(unpool(*tensors, size), expected)
        assert same(unpool(input=x, indices=indices, output_size=size), expected)


@pytest.mark.parametrize("name", [*POOLS, *UNPOOLS])
def test_a_module_made_by_torch_is_still_one_here(name: str) -> None:
    """Pickles of torch.nn's modules have no `reduce` and no `index_dtype`."""
    ours, theirs = getattr(maxunpool_cuda, name), getattr(nn, name)(3, 2)
    module = ours.__new__(ours)
    module.__setstate__(vars(theirs))
    tensors = tensors_for(name)
    assert same(module(*tensors), ours(3, 2)(*tensors))


def test_version_and_build_info() -> None:
    assert maxunpool_cuda.__version__.count(".") == 2
    info = maxunpool_cuda.build_info()
    assert set(info) == {"cuda", "cuda_version", "arch_list", "compiler", "torch_version"}
    assert info["torch_version"] == torch.__version__.split("+")[0]
    assert (info["cuda_version"] is not None) == info["cuda"]
