# SPDX-License-Identifier: BSD-3-Clause
"""Which modules of a model are replaced and put back, how, and why others are not."""

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
    explain_conversion,
)
from maxunpool_cuda import restore_max_pooling as restore

NAMES = [f"{kind}{n}d" for kind in ("MaxPool", "AdaptiveMaxPool", "MaxUnpool") for n in (1, 2, 3)]
OURS = {getattr(nn, name): getattr(maxunpool_cuda, name) for name in NAMES}

OwnPool = type("OwnPool", (nn.MaxPool2d,), {})
OwnAdaptive = type("OwnAdaptive", (nn.AdaptiveMaxPool2d,), {})
OwnOfOurs = type("OwnOfOurs", (MaxPool2d,), {})
OwnSum = type("OwnSum", (MaxUnpool2d,), {})
# An unpool of another library, which derives from none of torch.nn's three.
Foreign = type("Foreign", (nn.modules.pooling._MaxUnpoolNd,), {})


def state(model: nn.Module) -> list[Any]:
    """The identity, class and attributes of every module, the model and all in it."""
    return [(id(module), type(module), vars(module).copy()) for module in model.modules()]


@contextmanager
def warned_of(name: str, model: nn.Module, reasons: dict[str, str]) -> Iterator[None]:
    """Inside, the function of this name warns of these reasons, if there are any, and of no more.

    The warning names the line here that called it.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    expected = f"{name}: expected to convert all max pooling of the model as asked but got "
    expected += f"{type(model).__name__} with {reasons}. "
    found = [(str(each.message)[: len(expected)], each.filename) for each in caught]
    assert found == ([(expected, __file__)] if reasons else [])


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """At the end, the model is as it was at the beginning."""
    before = state(model)
    yield
    assert state(model) == before


def pool(*window: Any, of: type = nn.MaxPool2d, **options: Any) -> nn.Module:
    return of(*window, return_indices=True, **options)


def round_trip() -> nn.Sequential:
    """A pool with indices, an unpool and a pool without."""
    return nn.Sequential(pool(2), nn.MaxUnpool2d(2), nn.MaxPool2d(3, 2))


def left_alone(name: str, parent: str) -> str:
    return f"{name}, a subclass of {parent}, is left alone"


def alone(dims: int) -> str:
    return f"there is no MaxUnpool{dims}d to take the indices"


def with_own_forward() -> nn.Module:
    """Its forward is set on the instance, though it is the class's."""
    module = pool(2, of=maxunpool_cuda.AdaptiveMaxPool1d)
    module.forward = module.forward
    return module


def without_stride() -> nn.Module:
    """As pickles of old modules are."""
    module = pool((3, 3))
    module.stride = None
    return module


ALL_DTYPES = frozenset(INDEX_DTYPES)


@dataclass(frozen=True)
class Conversion:
    """A model, of which the first module may keep the indices that it returns.

    Attributes:
        modules: make the modules of the model.
        reason: why the first keeps its indices, as explain_conversion returns it.
        kept_for: the index dtypes, as asked for, with which it does.
    """

    modules: Callable[[], Sequence[nn.Module]]
    reason: str = ""
    kept_for: frozenset[torch.dtype] = frozenset()

    @property
    def is_undone(self) -> bool:
        """Whether restore_max_pooling leads back to it: it is torch.nn's, and all is replaced."""
        return not self.kept_for and {*map(type, self.modules())} <= OURS.keys()


UINT8 = frozenset({torch.uint8})
ALL_BUT_INT64 = frozenset({torch.uint8, torch.int32})
CONVERSIONS = {
    "windows of more than 256 elements": Conversion(
        lambda: [pool(17, 2), nn.MaxUnpool2d(17, 2)],
        reason="kernel_size (17, 17) has more than 256 elements",
        kept_for=UINT8,
    ),
    "dilated": Conversion(
        lambda: [pool(3, 2, 1, (1, 2)), nn.MaxUnpool2d(3, 2, 1)],
        reason="dilation (1, 2) is not 1",
        kept_for=UINT8,
    ),
    "no unpool of this window": Conversion(
        lambda: [
            pool(3, 2, 1),
            nn.MaxUnpool2d((2, 3), 2, 1),  # another kernel_size
            nn.MaxUnpool2d(3, (2, 3), 1),  # another stride
            nn.MaxUnpool2d(3, 2, (1, 0)),  # another padding
        ],
        reason="no MaxUnpool2d has kernel_size (3, 3), stride (2, 2) and padding (1, 1)",
        kept_for=UINT8,
    ),
    "adaptive": Conversion(
        lambda: [with_own_forward(), nn.MaxUnpool1d(2)],
        reason="adaptive windows, of many sizes, have no offsets",
        kept_for=UINT8,
    ),
    "no unpool of 1d": Conversion(
        lambda: [pool(2, of=nn.MaxPool1d), nn.MaxUnpool2d(2), nn.MaxUnpool3d(2)],
        reason=alone(1),
        kept_for=ALL_BUT_INT64,
    ),
    **{
        f"this package's {dtype} pool, alone": Conversion(
            functools.partial(lambda t: [pool(2, of=MaxPool2d, index_dtype=t)], dtype),
            reason=alone(2),
            kept_for=ALL_BUT_INT64 - {dtype},
        )
        for dtype in INDEX_DTYPES
    },
    **{
        f"this package's {dtype} pool and unpool": Conversion(
            functools.partial(
                lambda t: [pool(2, of=MaxPool2d, index_dtype=t), MaxUnpool2d(2)], dtype
            )
        )
        for dtype in INDEX_DTYPES
    },
    "a subclass of this package's": Conversion(
        lambda: [pool(2, of=OwnOfOurs, index_dtype=torch.int32), MaxUnpool2d(2)],
        reason=left_alone("OwnOfOurs", "MaxPool2d"),
        kept_for=ALL_DTYPES - {torch.int32},
    ),
    "one of each of torch.nn's": Conversion(lambda: [kind(2) for kind in OURS]),
    "the second unpool fits": Conversion(
        lambda: [nn.MaxUnpool1d(2), nn.MaxUnpool1d(3), pool(3, of=nn.MaxPool1d)]
    ),
    "one window, written in many ways": Conversion(
        lambda: [
            without_stride(),
            pool([3], [], (0,)),
            pool(3, (3, 3), [0, 0]),
            nn.MaxUnpool2d(3),
        ]
    ),
}


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_which_pools_return_what(name: str, dtype: torch.dtype) -> None:
    """Modules stay the same objects, and keep their attributes, hooks among them."""
    conversion = CONVERSIONS[name]
    modules = conversion.modules()
    kinds = [*map(type, modules)]
    model = nn.Sequential(*modules)
    before = state(model)
    is_kept = dtype in conversion.kept_for
    returned = [dtype for module in modules if getattr(module, "return_indices", False)]
    if is_kept:
        returned[0] = getattr(modules[0], "index_dtype", torch.int64)
    for _ in range(2):
        reasons = {"0": conversion.reason} if is_kept else {}
        with unchanged(model):
            assert explain_conversion(model, index_dtype=dtype) == reasons
        with warned_of("convert_max_pooling", model, reasons):
            assert convert_max_pooling(model, index_dtype=dtype) is model
        assert returned == [m.index_dtype for m in model if getattr(m, "return_indices", False)]
    assert [*map(type, model)] == [OURS.get(kind, kind) for kind in kinds]
    if conversion.is_undone:
        added = [
            attributes | ({"index_dtype": dtype} if attributes.get("return_indices") else {})
            for _, _, attributes in before
        ]
        assert [attributes for _, _, attributes in state(model)] == added
        assert [module for module, _, _ in state(model)] == [module for module, _, _ in before]
        assert restore(model) is model
        assert state(model) == before


def test_reduce() -> None:
    """Every unpool but subclasses gets the reduce. Without one, this package's keep theirs."""
    model = nn.Sequential(nn.MaxUnpool2d(2), MaxUnpool2d(2, reduce="sum"), Foreign())
    found = {}
    for reduce in (None, "sum", "last"):
        with warned_of("convert_max_pooling", model, {"2": left_alone("Foreign", "_MaxUnpoolNd")}):
            convert_max_pooling(model, reduce=reduce)
        found[reduce] = (model[0].reduce, model[1].reduce)
    assert found == {None: ("last", "sum"), "sum": ("sum", "sum"), "last": ("last", "last")}
    adds = OwnSum(2, reduce="sum")
    assert explain_conversion(adds) == explain_conversion(adds, reduce="sum") == {}
    with warned_of("convert_max_pooling", adds, {"": left_alone("OwnSum", "MaxUnpool2d")}):
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_max_pooling(nn.MaxPool1d(2))
        convert_max_pooling(OwnOfOurs(2))
        restore(model)


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), OwnPool(2))
    with warnings.catch_warnings(), unchanged(model):
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is left alone"):
            convert_max_pooling(model)
        with pytest.raises(UserWarning, match="is left alone"), converted(model):
            pass


def test_a_stride_that_is_an_array() -> None:
    pool = nn.MaxPool2d(2, np.array([2, 2]), return_indices=True)
    convert_max_pooling(nn.Sequential(pool, nn.MaxUnpool2d(2)), index_dtype=torch.uint8)
    assert pool.index_dtype == torch.uint8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_one_warning_names_what_is_left_alone(dtype: torch.dtype) -> None:
    """And which pools keep their indices: it has the path and the reason of each."""
    own_forward = (nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), pool(2), nn.MaxUnpool2d(2))
    for module in own_forward:
        module.forward = module.forward
    scripted = torch.jit.script(nn.Sequential(nn.AdaptiveMaxPool3d(2), nn.ReLU()))
    subclasses = nn.Sequential(OwnPool(2), OwnAdaptive(2), pool(2, of=OwnPool), Foreign())
    other, pool_1d = nn.Identity(), pool(2, of=nn.MaxPool1d)
    other.return_indices = True  # it pools nothing
    model = nn.Sequential(*own_forward, scripted, subclasses, other, pool(2), pool_1d)
    on_instance = "whose forward is set on the instance, is left alone"
    reasons = {
        **{str(n): f"{type(m).__name__}, {on_instance}" for n, m in enumerate(own_forward)},
        "4.0": "AdaptiveMaxPool3d, in TorchScript, is left alone",
        "5.0": left_alone("OwnPool", "MaxPool2d"),
        "5.1": left_alone("OwnAdaptive", "AdaptiveMaxPool2d"),
        "5.2": left_alone("OwnPool", "MaxPool2d"),
        "5.3": left_alone("Foreign", "_MaxUnpoolNd"),
    }
    if dtype != torch.int64:  # unpools that are left alone take flat indices
        reasons["7"] = "MaxUnpool2d, whose forward is set on the instance, may want int64 indices"
        reasons["8"] = "Foreign, a subclass of _MaxUnpoolNd, may want int64 indices"
    with unchanged(model):
        with warned_of("convert_max_pooling", model, reasons):
            convert_max_pooling(model, index_dtype=dtype)
        assert [n for n, m in model.named_modules() if type(m) in OURS.values()] == ["7", "8"]
        restore(model)


def test_restoring_what_was_not_torchs_to_begin_with() -> None:
    """This package's modules become as torch.nn makes them, subclasses are left alone."""
    theirs, ours = (nn.ModuleList(kind(2) for kind in kinds) for kinds in (OURS, OURS.values()))
    own = OwnOfOurs(2, index_dtype=torch.uint8)
    with unchanged(own):
        restore(nn.Sequential(ours, own))
    assert [entry[1:] for entry in state(ours)[1:]] == [entry[1:] for entry in state(theirs)[1:]]


RETURNS = "OwnOfOurs, a subclass of MaxPool2d, would still return torch.int32 indices"
MAY_CALL = "AdaptiveMaxPool1d, whose forward is set on the instance, may call this package's"
DTYPE = "index_dtype to be torch.int64, .* but got torch.int16"
# Format: (the function that refuses, its arguments, words of the error, what makes a module).
REFUSED = [
    pytest.param(
        convert_max_pooling, {"index_dtype": torch.int16}, DTYPE, nn.ReLU, id="another index_dtype"
    ),
    pytest.param(
        converted, {"reduce": "first"}, "reduce .* but got 'first'", nn.ReLU, id="another reduce"
    ),
    pytest.param(
        restore,
        {},
        re.escape(f"got { {'3.0': RETURNS} }"),
        lambda: pool(2, of=OwnOfOurs, index_dtype=torch.int32),
        id="a subclass, as FSDP's fully_shard makes",
    ),
    pytest.param(
        restore,
        {},
        re.escape(f"got { {'3.0': MAY_CALL} }"),
        with_own_forward,
        id="a forward on the instance",
    ),
    pytest.param(
        restore,
        {},
        "torch.nn has no reduce='sum'",
        lambda: MaxUnpool2d(2, reduce="sum"),
        id="an unpool that adds up",
    ),
]


@pytest.mark.filterwarnings("ignore:converted")
@pytest.mark.parametrize(("function", "wrong", "words", "make"), REFUSED)
def test_refusals(
    function: Any, wrong: dict[str, Any], words: str, make: Callable[[], nn.Module]
) -> None:
    """A refusal changes nothing. Modules that cannot be restored can still be converted."""
    model = nn.Sequential(*round_trip(), nn.Sequential(make()))
    convert_max_pooling(model[:3])
    refused = pytest.raises(ValueError, match=f"^{function.__name__}: expected .*{words}")
    with unchanged(model), converted(model, index_dtype=torch.uint8):
        pass
    with unchanged(model), refused, ExitStack() as end:
        end.enter_context(function(model, **wrong))
    with pytest.raises(TypeError, match=f"^{function.__name__}: .* a Module but got list"):
        ExitStack().enter_context(function([model]))


def test_converted_undoes_what_it_did() -> None:
    """It undoes nothing else, even after an exception, whatever the body did to the model."""
    ours = pool(2, of=MaxPool2d, index_dtype=torch.int32), MaxUnpool2d(3, reduce="sum")
    model = nn.Sequential(*round_trip(), *ours)
    with unchanged(model):
        with (
            suppress(ZeroDivisionError),
            converted(model, index_dtype=torch.uint8, reduce="last") as given,
        ):
            assert given is model
            assert (model[3].index_dtype, model[4].reduce) == (torch.uint8, "last")
            model.extend([MaxPool2d(2), nn.MaxPool2d(2)])
            raise ZeroDivisionError
        assert [type(module) for module in model[5:]] == [MaxPool2d, nn.MaxPool2d]
        del model[5:]
        with converted(model, index_dtype=torch.uint8):
            removed = model.pop(0)
            model[0].reduce = "sum"  # a module that was converted
            model[3].reduce = "last"  # a module that was not
        assert (type(removed), model[3].reduce) == (nn.MaxPool2d, "last")
        model[3].reduce = "sum"
        model.insert(0, removed)


@pytest.mark.parametrize("later", [converted, maxunpool_cuda.exact_attributions])
@pytest.mark.parametrize("earlier", [converted, maxunpool_cuda.exact_attributions])
def test_contexts_that_cross(earlier: Any, later: Any) -> None:
    """As two threads with one model may enter and leave them."""
    model = nn.Sequential(nn.MaxPool2d(2))
    contexts = ExitStack(), ExitStack()
    for stack, function in zip(contexts, (earlier, later), strict=True):
        stack.enter_context(function(model))
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
    assert [*map(type, model)] == [OwnOfOurs, MaxUnpool2d, MaxPool2d]  # it undid nothing
