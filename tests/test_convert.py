# SPDX-License-Identifier: BSD-3-Clause
"""Which modules of a model are replaced and put back, how, and why others are not."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES
from torch import nn

import maxunpool_cuda
from maxunpool_cuda import (
    MaxPool2d,
    MaxUnpool2d,
    convert_max_pooling,
    patched,
    restore_max_pooling,
)

pytestmark = pytest.mark.filterwarnings("error::UserWarning")

NAMES = [f"{kind}{n}d" for kind in ("MaxPool", "AdaptiveMaxPool", "MaxUnpool") for n in (1, 2, 3)]
OURS = {getattr(nn, name): getattr(maxunpool_cuda, name) for name in NAMES}

OwnPool = type("OwnPool", (nn.MaxPool2d,), {})
OwnOfOurs = type("OwnOfOurs", (MaxPool2d,), {})
# An unpool of another library, which derives from none of torch.nn's three.
Foreign = type("Foreign", (nn.modules.pooling._MaxUnpoolNd,), {})


def state(model: nn.Module) -> list[tuple[nn.Module, type, dict[str, Any]]]:
    """Every module, the model and all in it, with its class and its attributes."""
    return [(module, type(module), vars(module).copy()) for module in model.modules()]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = state(model)
    yield
    assert state(model) == before


def pool(*window: Any, of: type = nn.MaxPool2d, **options: Any) -> nn.Module:
    return of(*window, return_indices=True, **options)


def with_own_forward(module: nn.Module) -> nn.Module:
    """The module. Its forward is set on the instance, though it is the class's."""
    module.forward = module.forward
    return module


# Why a pool keeps the indices that it returns; the pool, and the other modules of the model.
KEPT = {
    "kernel_size (17, 17) has more than 256 elements": [pool(17, 2), nn.MaxUnpool2d(17, 2)],
    "dilation (1, 2) is not 1": [pool(3, 2, 1, (1, 2)), nn.MaxUnpool2d(3, 2, 1)],
    "no MaxUnpool2d has kernel_size (3, 3), stride (2, 2) and padding (1, 1)": [
        pool(3, 2, 1),
        nn.MaxUnpool2d((2, 3), 2, 1),
        nn.MaxUnpool2d(3, (2, 3), 1),
        nn.MaxUnpool2d(3, 2, (1, 0)),
    ],
    "adaptive windows, of many sizes, have no offsets": [
        pool(2, of=nn.AdaptiveMaxPool1d),
        nn.MaxUnpool1d(2),
    ],
    "there is no MaxUnpool1d to take the indices": [
        pool(2, of=nn.MaxPool1d),
        nn.MaxUnpool2d(2),
        nn.MaxUnpool3d(2),
    ],
}


def warning_of(model: nn.Module, **options: Any) -> str:
    """What the one warning of a conversion names. Where it is an error, the model is as it was."""
    with unchanged(model), pytest.raises(UserWarning, match=r"inside maxunpool_cuda\.patched\(\)$"):
        convert_max_pooling(model, **options)
    with pytest.warns(UserWarning, match="^convert_max_pooling: expected ") as caught:
        convert_max_pooling(model, **options)
    assert [warning.filename for warning in caught] == [__file__]
    return str(caught[0].message).split("; ")[0].split(" with ", 1)[1]


@pytest.mark.parametrize("reason", KEPT)
def test_which_pools_keep_their_indices(reason: str) -> None:
    """The second time, the model is converted already."""
    model = nn.Sequential(*KEPT[reason])
    for _ in range(2):
        assert warning_of(model, index_dtype=torch.uint8) == str({"0": reason})
        assert type(model[0]) in OURS.values()
        assert model[0].index_dtype == torch.int64


@pytest.mark.parametrize("options", [{}, *({"index_dtype": dtype} for dtype in INDEX_DTYPES)])
def test_indices_need_an_unpool(options: dict[str, Any]) -> None:
    """A model that returns indices may unpool them by a function, which is not seen.

    Only int64 is given to such a pool, whatever it had.
    """
    reasons = "{'0': 'there is no MaxUnpool2d to take the indices'}"
    model = nn.Sequential(pool(2), nn.MaxPool2d(2))
    assert warning_of(model, **options) == reasons
    model[0].index_dtype = torch.int32
    assert warning_of(model, **options) == reasons
    is_flat = options == {"index_dtype": torch.int64}
    assert model[0].index_dtype == (torch.int64 if is_flat else torch.int32)


class PadsAndUnpools(nn.Module):
    """What conversion does not reach: a subclass of a pool, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(2, of=OwnPool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = self.pool(nn.functional.pad(x, (0, 1, 0, 1)))
        return nn.functional.max_unpool2d(values, indices, 2)


def test_the_way_out() -> None:
    """The warning's last words end the error that conversion leaves."""
    x, model = torch.rand(1, 2, 5, 7), PadsAndUnpools()
    torch.use_deterministic_algorithms(False)
    expected = model(x)
    assert "'pool': 'OwnPool, a subclass of MaxPool2d, is left alone'" in warning_of(model)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        model(x)
    with patched():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", [None, *INDEX_DTYPES], ids=str)
def test_conversion_and_back(dtype: torch.dtype | None) -> None:
    """Modules stay the same objects. They keep their attributes and get only index_dtype."""
    unpickled = pool(3)
    unpickled.stride = None  # as in pickles of old modules
    windows_of_3 = unpickled, pool([3], [], (0,)), nn.MaxUnpool2d(3)
    model = nn.Sequential(*(kind(2) for kind in OURS), *windows_of_3)
    before = state(model)
    assert convert_max_pooling(model, index_dtype=dtype) is model
    with unchanged(model):
        convert_max_pooling(model)  # which keeps what pools have
    for (module, kind, attributes), now in zip(before, state(model), strict=True):
        has_indices = dtype is not None and attributes.get("return_indices")
        added = {"index_dtype": dtype} if has_indices else {}
        assert now == (module, OURS.get(kind, kind), attributes | added)
    assert restore_max_pooling(model) is model
    assert state(model) == before


def test_reduce() -> None:
    """Every unpool but subclasses gets the reduce. Without one, this package's keep theirs."""
    own = type("OwnSum", (MaxUnpool2d,), {})(2, reduce="sum")
    model = nn.Sequential(nn.MaxUnpool2d(2), MaxUnpool2d(2, reduce="sum"), own)
    convert_max_pooling(model)
    assert [module.reduce for module in model] == ["last", "sum", "sum"]
    convert_max_pooling(model, reduce="sum")
    assert [module.reduce for module in model] == ["sum", "sum", "sum"]
    with pytest.warns(UserWarning, match="'2': 'OwnSum, a subclass of MaxUnpool2d, is left alone'"):
        convert_max_pooling(model, reduce="last")
    assert [module.reduce for module in model] == ["last", "last", "sum"]


def test_a_model_without_max_pooling() -> None:
    assert warning_of(nn.ReLU()) == "none among its modules"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_warning_names_what_is_left_alone() -> None:
    """And which pools keep their indices."""
    scripted = torch.jit.script(nn.Sequential(nn.AdaptiveMaxPool3d(2)))
    left_alone = with_own_forward(nn.MaxUnpool2d(2)), scripted, pool(2, of=OwnPool), Foreign()
    model = nn.Sequential(*left_alone, pool(2), pool(2, of=nn.MaxPool1d))
    reasons = {
        "0": "MaxUnpool2d, whose forward is set on the instance, is left alone",
        "1.0": "AdaptiveMaxPool3d, in TorchScript, is left alone, by patched() too",
        "2": "OwnPool, a subclass of MaxPool2d, is left alone",
        "3": "Foreign, a subclass of _MaxUnpoolNd, is left alone",
        # Unpools that are left alone take flat indices.
        "4": "MaxUnpool2d, whose forward is set on the instance, may want int64 indices",
        "5": "Foreign, a subclass of _MaxUnpoolNd, may want int64 indices",
    }
    assert warning_of(model, index_dtype=torch.uint8) == str(reasons)
    assert [name for name, m in model.named_modules() if type(m) in OURS.values()] == ["4", "5"]
    assert warning_of(model) == str(dict([*reasons.items()][:4]))


def test_restoring_what_was_not_torchs_to_begin_with() -> None:
    """This package's modules become as torch.nn makes them, subclasses are left alone."""
    ours = nn.Sequential(*(kind(2) for kind in OURS.values()))
    own = OwnOfOurs(2, index_dtype=torch.uint8)
    with unchanged(own):
        restore_max_pooling(nn.Sequential(ours, own))
    for module, kind in zip(ours, OURS, strict=True):
        assert type(module) is kind
        assert vars(module) == vars(kind(2))


UNRESTORABLE = {
    "torch.nn has no reduce='sum'": MaxUnpool2d(2, reduce="sum"),
    "MaxPool2d, whose forward is set on the instance, may call this package's": (
        with_own_forward(MaxPool2d(2))
    ),
    "OwnOfOurs, a subclass of MaxPool2d, would still return torch.int32 indices": (
        pool(2, of=OwnOfOurs, index_dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("reason", UNRESTORABLE)
def test_nothing_is_restored_where_something_cannot_be(reason: str) -> None:
    model = nn.Sequential(MaxPool2d(2), UNRESTORABLE[reason])
    expected = f"^restore_max_pooling: expected .* but got {re.escape(str({'1': reason}))}$"
    with unchanged(model), pytest.raises(ValueError, match=expected):
        restore_max_pooling(model)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"^convert_max_pooling: .* a Module but got list"):
        convert_max_pooling([MaxPool2d(2)])
    with pytest.raises(ValueError, match=r"^convert_max_pooling: expected index_dtype"):
        convert_max_pooling(MaxPool2d(2), index_dtype=torch.int16)
    with pytest.raises(ValueError, match=r"^convert_max_pooling: expected reduce"):
        convert_max_pooling(MaxPool2d(2), reduce="first")


def test_only_models_are_restored() -> None:
    with pytest.raises(TypeError, match=r"^restore_max_pooling: .* a Module but got list"):
        restore_max_pooling([MaxPool2d(2)])
