"""Modules, and what else of the package is not an operator."""

import copy
import pickle

import pytest
import torch
from cases import INDEX_DTYPES
from torch import nn

import maxunpool_cuda
import maxunpool_cuda.functional as F
from maxunpool_cuda import MaxUnpool1d, MaxUnpool2d, MaxUnpool3d

PAIRS = [
    (MaxUnpool1d, nn.MaxUnpool1d),
    (MaxUnpool2d, nn.MaxUnpool2d),
    (MaxUnpool3d, nn.MaxUnpool3d),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_modules_are_torch_modules(ours: type, theirs: type) -> None:
    for arguments in ((2,), (3, 2, 1), (4, None)):
        module = ours(*arguments)
        assert isinstance(module, theirs)
        assert repr(module) == repr(theirs(*arguments))
        assert module.state_dict() == {}
        assert not list(module.parameters())
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is ours
            assert vars(other).keys() == vars(module).keys()
            assert repr(other) == repr(module)
    assert "reduce='mean'" in repr(ours(2, reduce="mean"))
    assert pickle.loads(pickle.dumps(ours(2, reduce="mean"))).reduce == "mean"
    assert ours(kernel_size=3, stride=2, padding=1).padding == theirs(3, 2, 1).padding


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["last", "sum", "mean"])
def test_modules_call_the_functions(reduce: str, index_dtype: torch.dtype) -> None:
    x = torch.rand(2, 3, 2, 2)
    most = 9 if index_dtype == torch.uint8 else 25
    indices = torch.randint(0, most, x.shape, dtype=index_dtype)
    for module, function, tensors in (
        (MaxUnpool1d, F.max_unpool1d, (x[0], indices[0] % 3)),
        (MaxUnpool2d, F.max_unpool2d, (x, indices)),
        (MaxUnpool3d, F.max_unpool3d, (x[None], indices[None])),
    ):
        expected = function(*tensors, 3, 2, 0, reduce=reduce)
        assert torch.equal(module(3, 2, reduce=reduce)(*tensors), expected)
    assert MaxUnpool2d(2)(x, indices % 4, [5, 4]).shape == (2, 3, 5, 4)
    assert MaxUnpool2d(2)(input=x, indices=indices % 4, output_size=(4, 5)).shape == (2, 3, 4, 5)


def test_a_module_made_by_torch_is_still_one_here() -> None:
    """Pickles of torch.nn's modules have no `reduce`."""
    module = MaxUnpool2d.__new__(MaxUnpool2d)
    module.__setstate__(vars(nn.MaxUnpool2d(2)))
    assert module(torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64)).shape == (1, 2, 2)


def test_version_and_build_info() -> None:
    assert maxunpool_cuda.__version__.count(".") == 2
    info = maxunpool_cuda.build_info()
    assert set(info) == {"cuda", "cuda_version", "arch_list", "compiler", "torch_version"}
    assert info["torch_version"] == torch.__version__.split("+")[0]
    assert (info["cuda_version"] is not None) == info["cuda"]
