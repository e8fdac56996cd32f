# SPDX-License-Identifier: BSD-3-Clause
"""Which modules of a model are replaced and put back, how, and why others are not."""

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from cases import INDEX_DTYPES
from torch import nn

import maxunpool_cuda
from maxunpool_cuda import (
    MaxPool2d,
    MaxUnpool2d,
    convert_max_pooling,
    converted,
    exact_attributions,
    explain_conversion,
    restore_max_pooling,
)

pytestmark = pytest.mark.filterwarnings("error::UserWarning")

NAMES = [f"{kind}{n}d" for kind in ("MaxPool", "AdaptiveMaxPool", "MaxUnpool") for n in (1, 2, 3)]
OURS = {getattr(nn, name): getattr(maxunpool_cuda, name) for name in NAMES}

OwnPool = type("OwnPool", (nn.MaxPool2d,), {})
OwnOfOurs = type("OwnOfOurs", (MaxPool2d,), {})
# An unpool of another library, which derives from none of torch.nn's three.
Foreign = type("Foreign", (nn.modules.pooling._MaxUnpoolNd,), {})


def state(model: nn.Module) -> list[Any]:
    """The identity, class and attributes of every module, the model and all in it."""
    return [(id(module), type(module), vars(module).copy()) for module in model.modules()]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = state(model)
    yield
    assert state(model) == before


def warning_of(model: nn.Module, reasons: dict[str, str]) -> Any:
    """Inside, convert_max_pooling warns of these reasons."""
    text = "convert_max_pooling: expected to convert all max pooling of the model as asked but got "
    text += f"{type(model).__name__} with {reasons}. "
    return pytest.warns(UserWarning, match=f"^{re.escape(text)}")


def pool(*window: Any, of: type = nn.MaxPool2d, **options: Any) -> nn.Module:
    return of(*window, return_indices=True, **options)


def round_trip() -> nn.Sequential:
    """A pool with indices, an unpool, a pool without, and the first pool again."""
    first = pool(2)
    return nn.Sequential(first, nn.MaxUnpool2d(2), nn.MaxPool2d(3, 2), first)


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
        with_own_forward(pool(2, of=maxunpool_cuda.AdaptiveMaxPool1d)),
        nn.MaxUnpool1d(2),
    ],
    "there is no MaxUnpool1d to take the indices": [
        pool(2, of=nn.MaxPool1d),
        nn.MaxUnpool2d(2),
        nn.MaxUnpool3d(2),
    ],
}


@pytest.mark.parametrize("reason", KEPT)
def test_which_pools_keep_their_indices(reason: str) -> None:
    """The second time, the model is converted already."""
    model = nn.Sequential(*copy.deepcopy(KEPT[reason]))
    classes = [OURS.get(type(module), type(module)) for module in model]
    for _ in range(2):
        with unchanged(model):
            assert explain_conversion(model, index_dtype=torch.uint8) == {"0": reason}
        with warning_of(model, {"0": reason}):
            convert_max_pooling(model, index_dtype=torch.uint8)
        assert model[0].index_dtype == torch.int64
        assert [*map(type, model)] == classes


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_conversion_and_back(dtype: torch.dtype) -> None:
    """Modules stay the same objects. They keep their attributes and get only index_dtype."""
    in_many_ways = pool((3, 3)), pool([3], [], (0,)), pool(3, np.array([3, 3]), [0, 0])
    in_many_ways[0].stride = None  # as in pickles of old modules
    each = (kind(2) for kind in OURS)
    model = nn.Sequential(round_trip(), *each, *in_many_ways, nn.MaxUnpool2d(3))
    if dtype != torch.uint8:
        model.append(pool(17, dilation=2))
    before = state(model)
    assert convert_max_pooling(model, index_dtype=dtype) is model
    for (identity, kind, attributes), now in zip(before, state(model), strict=True):
        added = {"index_dtype": dtype} if attributes.get("return_indices") else {}
        assert now == (identity, OURS.get(kind, kind), attributes | added)
    assert restore_max_pooling(model) is model
    assert state(model) == before


def test_small_flat_indices_need_an_unpool() -> None:
    reasons = explain_conversion(pool(2), index_dtype=torch.int32)
    assert reasons == {"": "there is no MaxUnpool2d to take the indices"}


def test_reduce() -> None:
    """Every unpool but subclasses gets the reduce. Without one, this package's keep theirs."""
    own = type("OwnSum", (MaxUnpool2d,), {})(2, reduce="sum")
    model = nn.Sequential(nn.MaxUnpool2d(2), MaxUnpool2d(2, reduce="sum"), own)
    convert_max_pooling(model)
    assert [module.reduce for module in model] == ["last", "sum", "sum"]
    convert_max_pooling(model, reduce="sum")
    assert [module.reduce for module in model] == ["sum", "sum", "sum"]
    with warning_of(model, {"2": "OwnSum, a subclass of MaxUnpool2d, is left alone"}):
        convert_max_pooling(model, reduce="last")
    assert [module.reduce for module in model] == ["last", "last", "sum"]


def test_a_warning_where_there_is_nothing_to_replace() -> None:
    """It names the caller's line. A model that has modules of this package gets no warning."""
    model = nn.ReLU()
    words = "but got ReLU with none among its modules.*functions that "
    with pytest.warns(UserWarning, match=f"^convert_max_pooling: .* {words}") as first:
        convert_max_pooling(model)
    with pytest.warns(UserWarning, match=f"^converted: .* {words}") as second, converted(model):
        pass
    assert [warning.filename for warning in (*first, *second)] == [__file__] * 2
    convert_max_pooling(OwnOfOurs(2))


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), OwnPool(2))
    with unchanged(model), pytest.raises(UserWarning, match="is left alone"):
        convert_max_pooling(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_warning_names_what_is_left_alone() -> None:
    """And which pools keep their indices: it has the path and the reason of each."""
    scripted = torch.jit.script(nn.Sequential(nn.AdaptiveMaxPool3d(2), nn.ReLU()))
    other = nn.Identity()
    other.return_indices = True  # it pools nothing
    left_alone = with_own_forward(nn.MaxUnpool2d(2)), scripted, pool(2, of=OwnPool), Foreign()
    model = nn.Sequential(nn.Sequential(*left_alone), other, pool(2), pool(2, of=nn.MaxPool1d))
    reasons = {
        "0.0": "MaxUnpool2d, whose forward is set on the instance, is left alone",
        "0.1.0": "AdaptiveMaxPool3d, in TorchScript, is left alone",
        "0.2": "OwnPool, a subclass of MaxPool2d, is left alone",
        "0.3": "Foreign, a subclass of _MaxUnpoolNd, is left alone",
    }
    assert explain_conversion(model) == reasons
    # Unpools that are left alone take flat indices.
    reasons["2"] = "MaxUnpool2d, whose forward is set on the instance, may want int64 indices"
    reasons["3"] = "Foreign, a subclass of _MaxUnpoolNd, may want int64 indices"
    with unchanged(model):
        with warning_of(model, reasons) as caught:
            convert_max_pooling(model, index_dtype=torch.uint8)
        assert len(caught) == 1
        assert [n for n, m in model.named_modules() if type(m) in OURS.values()] == ["2", "3"]
        restore_max_pooling(model)


def test_restoring_what_was_not_torchs_to_begin_with() -> None:
    """This package's modules become as torch.nn makes them, subclasses are left alone."""
    theirs, ours = (nn.ModuleList(kind(2) for kind in kinds) for kinds in (OURS, OURS.values()))
    own = OwnOfOurs(2, index_dtype=torch.uint8)
    with unchanged(own):
        restore_max_pooling(nn.Sequential(ours, own))
    assert [entry[1:] for entry in state(ours)[1:]] == [entry[1:] for entry in state(theirs)[1:]]
    assert type(restore_max_pooling(MaxPool2d(2))) is nn.MaxPool2d


# Why each cannot be. The last one is as FSDP's fully_shard makes it.
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
    model = nn.Sequential(MaxPool2d(2), nn.Sequential(UNRESTORABLE[reason]))
    expected = f"^restore_max_pooling: expected .* but got {re.escape(str({'1.0': reason}))}$"
    with unchanged(model), pytest.raises(ValueError, match=expected):
        restore_max_pooling(model)


@pytest.mark.parametrize("function", [convert_max_pooling, explain_conversion, converted])
def test_arguments_are_checked(function: Any) -> None:
    model = round_trip()
    with ExitStack() as stack, unchanged(model):
        with pytest.raises(TypeError, match=f"^{function.__name__}: .* a Module but got list"):
            stack.enter_context(function([model]))
        with pytest.raises(ValueError, match=f"^{function.__name__}: expected index_dtype"):
            stack.enter_context(function(model, index_dtype=torch.int16))
        with pytest.raises(ValueError, match=f"^{function.__name__}: expected reduce"):
            stack.enter_context(function(model, reduce="first"))
    with pytest.raises(TypeError, match=r"^restore_max_pooling: .* a Module but got list"):
        restore_max_pooling([model])


def test_converted_undoes_what_it_did() -> None:
    """It undoes nothing else, even after an exception, whatever the body did to the model."""
    ours = pool(2, of=MaxPool2d, index_dtype=torch.int32), MaxUnpool2d(3, reduce="sum")
    model = nn.Sequential(*round_trip(), *ours)
    with unchanged(model):
        options: Any = {"index_dtype": torch.uint8, "reduce": "last"}
        with suppress(ZeroDivisionError), converted(model, **options) as given:
            assert given is model
            assert (model[4].index_dtype, model[5].reduce) == (torch.uint8, "last")
            model[1].reduce = "sum"  # a module that was converted
            model.append(MaxPool2d(2))
            raise ZeroDivisionError
        assert type(model[6]) is MaxPool2d
        del model[6:]
    with converted(model):
        removed = model.pop(2)
        model[4].reduce = "last"  # a module that was not
    assert type(removed) is nn.MaxPool2d
    assert model[4].reduce == "last"


@pytest.mark.parametrize("context", [converted, exact_attributions])
def test_contexts_that_cross(context: Any) -> None:
    """As two threads with one model may enter and leave them."""
    model = nn.Sequential(nn.MaxPool2d(2))
    earlier, later = ExitStack(), ExitStack()
    earlier.enter_context(context(model))
    later.enter_context(converted(model))
    expected = f"^{context.__name__}: expected contexts to be left in the reverse order but got "
    with pytest.raises(ValueError, match=expected):
        earlier.close()
    later.close()


def test_conversion_inside_of_conversion() -> None:
    """A class that converted did not give, as from FSDP2's fully_shard, is an error at its end."""
    model, words = round_trip(), r"^converted: .* but got \{'0': 'OwnOfOurs'\}$"
    with unchanged(model), converted(model, index_dtype=torch.int32):
        with unchanged(model), converted(model, index_dtype=torch.uint8, reduce="sum"):
            assert (model[0].index_dtype, model[1].reduce) == (torch.uint8, "sum")
        with converted(model):
            restore_max_pooling(model)
        assert type(model[0]) is nn.MaxPool2d
    with pytest.raises(ValueError, match=words), converted(model, index_dtype=torch.uint8):
        model[0].__class__ = OwnOfOurs
    assert [*map(type, model[:3])] == [OwnOfOurs, MaxUnpool2d, MaxPool2d]  # it undid nothing
