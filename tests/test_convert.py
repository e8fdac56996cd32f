# SPDX-License-Identifier: BSD-3-Clause
"""Which modules of a model are replaced and put back, how, and why others are not."""

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
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
)
from maxunpool_cuda import restore_max_pooling as restore

pytestmark = pytest.mark.filterwarnings("error::UserWarning")

NAMES = [f"{kind}{n}d" for kind in ("MaxPool", "AdaptiveMaxPool", "MaxUnpool") for n in (1, 2, 3)]
OURS = {getattr(nn, name): getattr(maxunpool_cuda, name) for name in NAMES}

OwnPool = type("OwnPool", (nn.MaxPool2d,), {})
OwnOfOurs = type("OwnOfOurs", (MaxPool2d,), {})
OwnSum = type("OwnSum", (MaxUnpool2d,), {})
# An unpool of another library, which derives from none of torch.nn's three.
Foreign = type("Foreign", (nn.modules.pooling._MaxUnpoolNd,), {})


def state(model: nn.Module) -> list[Any]:
    """The identity, class and attributes of every module, the model and all in it."""
    return [(id(module), type(module), vars(module).copy()) for module in model.modules()]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """At the end, the model is as it was at the beginning."""
    before = state(model)
    yield
    assert state(model) == before


def warning_of(name: str, model: nn.Module, reasons: dict[str, str]) -> Any:
    """Inside, the function of this name warns of these reasons, if there are any."""
    if not reasons:
        return nullcontext([])
    text = f"{name}: expected to convert all max pooling of the model as asked but got "
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


UINT8, SMALL = {torch.uint8}, {torch.uint8, torch.int32}
# Why a pool keeps the indices that it returns; the dtypes, if asked for, with which it does; the
# pool, and the other modules of the model.
KEPT = {
    "kernel_size (17, 17) has more than 256 elements": (UINT8, pool(17, 2), nn.MaxUnpool2d(17, 2)),
    "dilation (1, 2) is not 1": (UINT8, pool(3, 2, 1, (1, 2)), nn.MaxUnpool2d(3, 2, 1)),
    "no MaxUnpool2d has kernel_size (3, 3), stride (2, 2) and padding (1, 1)": (
        UINT8,
        pool(3, 2, 1),
        nn.MaxUnpool2d((2, 3), 2, 1),
        nn.MaxUnpool2d(3, (2, 3), 1),
        nn.MaxUnpool2d(3, 2, (1, 0)),
    ),
    "adaptive windows, of many sizes, have no offsets": (
        UINT8,
        with_own_forward(pool(2, of=maxunpool_cuda.AdaptiveMaxPool1d)),
        nn.MaxUnpool1d(2),
    ),
    "there is no MaxUnpool1d to take the indices": (
        SMALL,
        pool(2, of=nn.MaxPool1d),
        nn.MaxUnpool2d(2),
        nn.MaxUnpool3d(2),
    ),
    # These two return int32 indices already.
    "there is no MaxUnpool2d to take the indices": (
        UINT8,
        pool(2, of=MaxPool2d, index_dtype=torch.int32),
    ),
    "OwnOfOurs, a subclass of MaxPool2d, is left alone": (
        {torch.uint8, torch.int64},
        pool(2, of=OwnOfOurs, index_dtype=torch.int32),
        MaxUnpool2d(2),
    ),
}


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("reason", KEPT)
def test_which_pools_keep_their_indices(reason: str, dtype: torch.dtype) -> None:
    """The second time, the model is converted already."""
    kept_for, first, *others = copy.deepcopy(KEPT[reason])
    model = nn.Sequential(first, *others)
    classes = [OURS.get(type(module), type(module)) for module in model]
    is_kept = dtype in kept_for
    returned = getattr(first, "index_dtype", torch.int64) if is_kept else dtype
    reasons = {"0": reason} if is_kept else {}
    for _ in range(2):
        with unchanged(model):
            assert explain_conversion(model, index_dtype=dtype) == reasons
        with warning_of("convert_max_pooling", model, reasons):
            assert convert_max_pooling(model, index_dtype=dtype) is model
        assert first.index_dtype == returned
        assert [*map(type, model)] == classes


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_conversion_and_back(dtype: torch.dtype) -> None:
    """Modules stay the same objects. They keep their attributes and get only index_dtype."""
    in_many_ways = pool((3, 3)), pool([3], [], (0,)), pool(3, np.array([3, 3]), [0, 0])
    in_many_ways[0].stride = None  # as in pickles of old modules
    each = (kind(2) for kind in OURS)
    model = nn.Sequential(round_trip(), *each, *in_many_ways, nn.MaxUnpool2d(3))
    before = state(model)
    assert convert_max_pooling(model, index_dtype=dtype) is model
    for (identity, kind, attributes), now in zip(before, state(model), strict=True):
        added = {"index_dtype": dtype} if attributes.get("return_indices") else {}
        assert now == (identity, OURS.get(kind, kind), attributes | added)
    assert restore(model) is model
    assert state(model) == before


def test_reduce() -> None:
    """Every unpool but subclasses gets the reduce. Without one, this package's keep theirs."""
    model = nn.Sequential(nn.MaxUnpool2d(2), MaxUnpool2d(2, reduce="sum"), Foreign())
    alone = {"2": "Foreign, a subclass of _MaxUnpoolNd, is left alone"}
    found = {}
    for reduce in (None, "sum", "last"):
        with warning_of("convert_max_pooling", model, alone):
            convert_max_pooling(model, reduce=reduce)
        found[reduce] = (model[0].reduce, model[1].reduce)
    assert found == {None: ("last", "sum"), "sum": ("sum", "sum"), "last": ("last", "last")}
    adds = OwnSum(2, reduce="sum")
    assert explain_conversion(adds) == explain_conversion(adds, reduce="sum") == {}
    alone = {"": "OwnSum, a subclass of MaxUnpool2d, is left alone"}
    with warning_of("convert_max_pooling", adds, alone):
        convert_max_pooling(adds, reduce="last")
    assert adds.reduce == "sum"


def test_a_warning_where_there_is_nothing_to_replace() -> None:
    """It names the caller's line. A model that has modules of this package gets no warning."""
    model, words = nn.ReLU(), ": .* but got ReLU with none among its modules.*functions that .*"
    with pytest.warns(UserWarning, match=f"^convert_max_pooling{words}") as first:
        convert_max_pooling(model)
    with pytest.warns(UserWarning, match=f"^converted{words}") as second, converted(model):
        pass
    assert [warning.filename for warning in (*first, *second)] == [__file__] * 2
    convert_max_pooling(nn.MaxPool1d(2))
    convert_max_pooling(OwnOfOurs(2))
    restore(model)


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), OwnPool(2))
    with unchanged(model):
        with pytest.raises(UserWarning, match="is left alone"):
            convert_max_pooling(model)
        with pytest.raises(UserWarning, match="is left alone"), converted(model):
            pass


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_one_warning_names_what_is_left_alone(dtype: torch.dtype) -> None:
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
    if dtype != torch.int64:  # unpools that are left alone take flat indices
        reasons["2"] = "MaxUnpool2d, whose forward is set on the instance, may want int64 indices"
        reasons["3"] = "Foreign, a subclass of _MaxUnpoolNd, may want int64 indices"
    with unchanged(model):
        with warning_of("convert_max_pooling", model, reasons) as caught:
            convert_max_pooling(model, index_dtype=dtype)
        assert len(caught) == 1
        assert [n for n, m in model.named_modules() if type(m) in OURS.values()] == ["2", "3"]
        restore(model)


def test_restoring_what_was_not_torchs_to_begin_with() -> None:
    """This package's modules become as torch.nn makes them, subclasses are left alone."""
    theirs, ours = (nn.ModuleList(kind(2) for kind in kinds) for kinds in (OURS, OURS.values()))
    own = OwnOfOurs(2, index_dtype=torch.uint8)
    with unchanged(own):
        restore(nn.Sequential(ours, own))
    assert [entry[1:] for entry in state(ours)[1:]] == [entry[1:] for entry in state(theirs)[1:]]
    assert type(restore(MaxPool2d(2))) is nn.MaxPool2d


UNRESTORABLE = {  # why each is
    "torch.nn has no reduce='sum'": MaxUnpool2d(2, reduce="sum"),
    "AdaptiveMaxPool1d, whose forward is set on the instance, may call this package's": (
        with_own_forward(maxunpool_cuda.AdaptiveMaxPool1d(2))
    ),
    # As FSDP's fully_shard makes one.
    "OwnOfOurs, a subclass of MaxPool2d, would still return torch.int32 indices": (
        pool(2, of=OwnOfOurs, index_dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("reason", UNRESTORABLE)
def test_nothing_is_restored_where_something_cannot_be(reason: str) -> None:
    model = nn.Sequential(*round_trip(), nn.Sequential(UNRESTORABLE[reason]))
    convert_max_pooling(model[:3])
    expected = f"^restore_max_pooling: expected .* but got {re.escape(str({'4.0': reason}))}$"
    with unchanged(model), pytest.raises(ValueError, match=expected):
        restore(model)
    with pytest.raises(TypeError, match=r"^restore_max_pooling: .* a Module but got list"):
        restore([model])


@pytest.mark.parametrize("function", [convert_max_pooling, explain_conversion, converted])
def test_arguments_are_checked(function: Any) -> None:
    model, beginning, enter = round_trip(), f"^{function.__name__}: ", ExitStack().enter_context
    with pytest.raises(TypeError, match=f"{beginning}.* a Module but got list"):
        enter(function([model]))
    words = f"{beginning}expected index_dtype to be torch.int64, .* but got torch.int16"
    with unchanged(model), pytest.raises(ValueError, match=words):
        enter(function(model, index_dtype=torch.int16))
    words = f"{beginning}expected reduce .* but got 'first'"
    with unchanged(model), pytest.raises(ValueError, match=words):
        enter(function(model, reduce="first"))


def test_converted_undoes_what_it_did() -> None:
    """It undoes nothing else, even after an exception, whatever the body did to the model."""
    ours = pool(2, of=MaxPool2d, index_dtype=torch.int32), MaxUnpool2d(3, reduce="sum")
    model = nn.Sequential(*round_trip(), *ours)
    options: Any = {"index_dtype": torch.uint8, "reduce": "last"}
    with unchanged(model):
        with suppress(ZeroDivisionError), converted(model, **options) as given:
            assert given is model
            assert (model[4].index_dtype, model[5].reduce) == (torch.uint8, "last")
            model.extend([MaxPool2d(2), nn.MaxPool2d(2)])
            raise ZeroDivisionError
        assert [type(module) for module in model[6:]] == [MaxPool2d, nn.MaxPool2d]
        del model[6:]
        with converted(model, index_dtype=torch.uint8):
            removed = model.pop(2)
            model[1].reduce = "sum"  # a module that was converted
            model[4].reduce = "last"  # a module that was not
        assert (type(removed), model[4].reduce) == (nn.MaxPool2d, "last")
        model[4].reduce = "sum"
        model.insert(2, removed)


@pytest.mark.parametrize(
    ("earlier", "later"), [(converted, exact_attributions), (exact_attributions, converted)]
)
def test_contexts_that_cross(earlier: Any, later: Any) -> None:
    """As two threads with one model may enter and leave them."""
    model = nn.Sequential(nn.MaxPool2d(2))
    contexts = ExitStack(), ExitStack()
    contexts[0].enter_context(earlier(model))
    contexts[1].enter_context(later(model))
    expected = f"^{earlier.__name__}: expected contexts to be left in the reverse order but got "
    with pytest.raises(ValueError, match=expected):
        contexts[0].close()
    contexts[1].close()
    with earlier(model), later(model):
        pass


def test_conversion_inside_of_conversion() -> None:
    """A class that converted did not give, as from FSDP2's fully_shard, is an error at its end."""
    model, words = round_trip(), r"^converted: .* but got \{'0': 'OwnOfOurs'\}$"
    with unchanged(model), converted(model, index_dtype=torch.int32):
        with unchanged(model), converted(model, index_dtype=torch.uint8, reduce="sum"):
            assert (model[0].index_dtype, model[1].reduce) == (torch.uint8, "sum")
        with converted(model):
            restore(model)
        assert type(model[0]) is nn.MaxPool2d
    with pytest.raises(ValueError, match=words), converted(model, index_dtype=torch.uint8):
        model[0].__class__ = OwnOfOurs
    assert [*map(type, model[:3])] == [OwnOfOurs, MaxUnpool2d, MaxPool2d]  # it undid nothing
