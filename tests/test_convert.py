"""Models whose unpools are replaced do what they did."""

import pytest
import torch
from torch import nn

from maxunpool_cuda import MaxUnpool1d, MaxUnpool2d, MaxUnpool3d, replace_max_unpool


def test_modules_stay_the_same_objects() -> None:
    model = nn.Sequential(nn.MaxUnpool2d(2))
    unpool = model[0]
    assert replace_max_unpool(model) is model
    assert model[0] is unpool
    assert type(unpool) is MaxUnpool2d


def test_what_is_no_model_or_reduce() -> None:
    with pytest.raises(TypeError, match=r"^replace_max_unpool: expected model .* but got list"):
        replace_max_unpool([nn.MaxUnpool2d(2)])
    with pytest.raises(
        ValueError, match=r"^replace_max_unpool: expected reduce .* but got 'first'"
    ):
        replace_max_unpool(nn.MaxUnpool2d(2), reduce="first")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.MaxUnpool2d(2)
        self.again = self.one
        self.deep = nn.ModuleDict({"a": nn.Sequential(nn.MaxUnpool1d(3, 2, 1), nn.ReLU())})


def test_replace_max_unpool() -> None:
    model = Net().eval()
    calls = []
    model.one.register_forward_hook(lambda *_: calls.append(1))
    assert replace_max_unpool(model, reduce="sum") is model
    assert type(model.one) is MaxUnpool2d
    assert model.again is model.one
    assert not model.one.training
    assert type(model.deep["a"][0]) is MaxUnpool1d
    assert (model.deep["a"][0].stride, model.deep["a"][0].padding) == ((2,), (1,))
    assert model.one.reduce == model.deep["a"][0].reduce == "sum"
    assert type(model.deep["a"][1]) is nn.ReLU
    model.one(torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64))
    assert calls == [1]


def test_replace_max_unpool_of_a_model_that_is_one() -> None:
    assert type(replace_max_unpool(nn.MaxUnpool3d(2))) is MaxUnpool3d


def test_replace_max_unpool_leaves_subclasses_alone() -> None:
    class Own(nn.MaxUnpool2d):
        pass

    model = nn.Sequential(Own(2), MaxUnpool2d(2, reduce="mean"))
    replace_max_unpool(model)
    assert type(model[0]) is Own
    assert model[1].reduce == "mean"
