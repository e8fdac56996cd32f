"""Which modules of a model are replaced and put back, how, and why others are not.

What a converted model computes: test_published.
"""

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES
from torch import nn

import maxunpool_cuda
from maxunpool_cuda import (
    MaxPool1d,
    MaxPool2d,
    MaxUnpool1d,
    MaxUnpool2d,
    converted,
    replace_max_pooling,
    restore_max_pooling,
)

# Classes of one, two and three dimensions.
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
ADAPTIVE = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
UNPOOLS = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)
OURS = {kind: getattr(maxunpool_cuda, kind.__name__) for kind in (*POOLS, *ADAPTIVE, *UNPOOLS)}

OwnPool = type("OwnPool", (nn.MaxPool2d,), {})
OwnUnpool = type("OwnUnpool", (nn.MaxUnpool2d,), {})
OwnAdaptive = type("OwnAdaptive", (nn.AdaptiveMaxPool2d,), {})
OwnOfOurs = type("OwnOfOurs", (MaxPool2d,), {})
OwnSum = type("OwnSum", (MaxUnpool1d,), {})
# An unpool of another library, which derives from none of torch.nn's three.
Foreign = type("Foreign", (nn.modules.pooling._MaxUnpoolNd,), {})


def state(model: nn.Module) -> list[Any]:
    """The identity, class and attributes of every module, hooks and children among them."""
    copied = lambda value: copy.copy(value) if isinstance(value, dict) else value  # noqa: E731
    each = ((m, {name: copied(value) for name, value in vars(m).items()}) for m in model.modules())
    return [(id(m), type(m), attributes) for m, attributes in each]


@contextlib.contextmanager
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


FINE, ALONE = "fine", "there is no MaxUnpool{}d to take the indices".format
LEFT = "{}, a subclass of {}, is left alone".format
OLD = pool((3, 3))
OLD.stride = None  # pickles of old modules have none
EVERY_UNPOOL = [unpool(2) for unpool in UNPOOLS]
ELEMENTS = "kernel_size (17, 17) has more than 256 elements"
NO_OFFSETS = "adaptive windows, of many sizes, have no offsets"
NO_SUCH = "no MaxUnpool2d has kernel_size {}, stride {} and padding {}".format
MAY_WANT = "{}, a subclass of {}, may want int64 indices".format
UINT8, SMALL = {torch.uint8}, {torch.uint8, torch.int32}
OWN_INT32 = pool(2, of=OwnOfOurs, index_dtype=torch.int32)
# A reason, the dtypes for which the first module has it and keeps its indices, and the modules.
CASES: list[tuple[Any, ...]] = [
    (ELEMENTS, UINT8, pool(17, 2), nn.MaxUnpool2d(17, 2)),
    ("dilation (1, 2) is not 1", UINT8, pool(3, 2, 1, (1, 2)), nn.MaxUnpool2d((3, 5), 2, 1)),
    (NO_SUCH((2, 2), (2, 2), (0, 0)), UINT8, pool(2), nn.MaxUnpool2d((2, 3), 2), pool((2, 3), 2)),
    (NO_SUCH((3, 3), (3, 3), (0, 0)), UINT8, pool(3), nn.MaxUnpool2d(3, 2), pool(3, 2)),
    (NO_SUCH((3, 3), (2, 2), (1, 1)), UINT8, pool(3, 2, 1), nn.MaxUnpool2d(3, 2), pool(3, 2)),
    *((NO_OFFSETS, UINT8, pool(2, of=of), u) for of, u in zip(ADAPTIVE, EVERY_UNPOOL, strict=True)),
    # Unpools of other dimensions than a pool's do not matter to it.
    (
        *(MAY_WANT("OwnUnpool", "MaxUnpool2d"), SMALL),
        *(pool(2), pool(2, of=nn.MaxPool1d), pool(2, of=nn.MaxPool3d), *EVERY_UNPOOL, OwnUnpool(2)),
    ),
    (MAY_WANT("Foreign", "_MaxUnpoolNd"), SMALL, pool(2), *EVERY_UNPOOL, Foreign()),
    (ALONE(1), SMALL, pool(2, of=nn.MaxPool1d), nn.MaxUnpool2d(2), nn.MaxUnpool3d(2)),
    (ALONE(2), SMALL, pool(2), nn.MaxUnpool1d(2), nn.MaxUnpool3d(2)),
    (ALONE(3), SMALL, pool(2, of=nn.MaxPool3d), nn.MaxUnpool1d(2), nn.MaxUnpool2d(2)),
    # A pool that nothing unpools keeps what it returns; so does a subclass of this package's.
    *((ALONE(2), SMALL - {t}, pool(2, of=MaxPool2d, index_dtype=t)) for t in INDEX_DTYPES),
    *((FINE, set(), pool(2, of=MaxPool2d, index_dtype=t), MaxUnpool2d(2)) for t in INDEX_DTYPES),
    (LEFT("OwnOfOurs", "MaxPool2d"), {torch.int64, torch.uint8}, OWN_INT32, MaxUnpool2d(2)),
    (FINE, set(), nn.MaxUnpool2d(3), pool(2), nn.MaxUnpool2d(2), OwnPool(2)),
    (FINE, set(), pool(2, of=OwnPool), OwnUnpool(2), Foreign(), nn.MaxPool2d(2)),
    (FINE, set(), nn.MaxPool1d(2), MaxPool1d(2, index_dtype=torch.int32), nn.AdaptiveMaxPool3d(2)),
    (FINE, set(), nn.MaxUnpool3d(2)),
    # Windows are the same however they are written.
    (FINE, set(), pool((3,)), nn.MaxUnpool2d(3)),
    (FINE, set(), OLD, nn.MaxUnpool2d(3)),
    (FINE, set(), pool([3], [], (0,)), nn.MaxUnpool2d(3)),
    (FINE, set(), pool(3, (3, 3), [0, 0]), nn.MaxUnpool2d(3)),
]


def left_alone(model: nn.Sequential) -> dict[str, str]:
    """The reasons for subclasses of torch.nn's, which are the same for every dtype."""
    bases = {OwnPool: "MaxPool2d", OwnUnpool: "MaxUnpool2d", Foreign: "_MaxUnpoolNd"}
    return {
        path: LEFT(type(module).__name__, bases[type(module)])
        for path, module in model.named_children()
        if type(module) in bases and getattr(module, "return_indices", True)
    }


def returned_dtypes(model: nn.Sequential) -> dict[str, torch.dtype]:
    """The dtype of the indices of every pool that returns any."""
    each = ((path, m) for path, m in model.named_children() if getattr(m, "return_indices", False))
    return {path: getattr(module, "index_dtype", torch.int64) for path, module in each}


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_which_pools_return_what(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    reason, refused, *modules = case
    model = nn.Sequential(*copy.deepcopy(modules))
    before, returned = state(model), returned_dtypes(model)
    reasons = ({"0": reason} if dtype in refused else {}) | left_alone(model)
    returned |= dict.fromkeys(returned.keys() - reasons.keys(), dtype)
    for _ in range(2):
        assert replace_max_pooling(model, dtype) == reasons
        assert returned_dtypes(model) == returned
    assert [*map(type, model)] == [OURS.get(type(module), type(module)) for module in modules]
    if not any(isinstance(module, (*OURS.values(),)) for module in modules):
        assert restore_max_pooling(model) is model
        assert state(model) == before


def test_reduce() -> None:
    """Every unpool but subclasses gets the reduce. Without one, this package's keep theirs."""
    model = nn.Sequential(nn.MaxUnpool2d(2), MaxUnpool2d(2, reduce="sum"), OwnUnpool(2))
    for reduce, given in (None, ["last", "sum"]), ("sum", ["sum"] * 2), ("last", ["last"] * 2):
        assert replace_max_pooling(model, reduce=reduce) == left_alone(model)
        assert [model[0].reduce, model[1].reduce] == given
    assert not hasattr(model[2], "reduce")
    adds = OwnSum(2, reduce="sum")
    assert replace_max_pooling(adds) == replace_max_pooling(adds, reduce="sum") == {}
    assert replace_max_pooling(adds, reduce="last") == {"": LEFT("OwnSum", "MaxUnpool1d")}
    assert adds.reduce == "sum"


def test_modules_stay_the_same_objects() -> None:
    """A module keeps its identity, hooks and attributes while it is replaced and restored."""
    model = nn.ModuleDict({"pool": pool(2), "deep": nn.Sequential(nn.MaxUnpool2d(2))}).eval()
    model["again"], model["pool"].note = model["pool"], "mine"
    model["pool"].register_forward_hook(lambda *_: None)
    before = state(model)
    for dtype in INDEX_DTYPES:
        with unchanged(model):
            assert replace_max_pooling(model, dtype) == {}
            replaced = state(model)
            assert restore_max_pooling(model) is model
        with unchanged(model), converted(model, dtype) as given:
            assert given is model
            assert state(model) == replaced
        for (kept, _, theirs), (module, kind, ours) in zip(before, replaced, strict=True):
            assert (kept, theirs.items() <= ours.items()) == (module, True)
            assert kind in (nn.ModuleDict, nn.Sequential, MaxPool2d, MaxUnpool2d)
    del model["deep"]  # the path of a shared module is its first
    assert replace_max_pooling(model, torch.uint8) == {"pool": ALONE(2)}


def test_a_warning_where_there_is_nothing_to_replace() -> None:
    """It names the caller's line. A model that has modules of this package gets no warning."""
    model, words = nn.ReLU(), ": .* but got ReLU with none among its modules.*functions that .*"
    with unchanged(model):
        with pytest.warns(UserWarning, match=f"^replace_max_pooling{words}") as first:
            assert replace_max_pooling(model) == {}
        with pytest.warns(UserWarning, match=f"^converted{words}") as second, converted(model):
            pass
    assert [warning.filename for warning in (*first, *second)] == [__file__] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (nn.MaxUnpool1d(2), nn.MaxPool1d(2), MaxUnpool1d(2), OwnOfOurs(2)):
            for _ in range(2):
                replace_max_pooling(other)
            restore_max_pooling(other)
        restore_max_pooling(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_warning_names_what_is_left_alone() -> None:
    """The warning has the path and the reason of each, also of those without indices."""
    own_forward = (nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), pool(2), nn.MaxUnpool2d(2))
    for module in own_forward:
        module.forward = module.forward
    scripted = torch.jit.script(nn.Sequential(nn.AdaptiveMaxPool3d(2), nn.ReLU()))
    subclasses = nn.Sequential(OwnPool(2), OwnAdaptive(2))
    model = nn.Sequential(nn.MaxPool3d(2), subclasses, scripted, *own_forward, pool(2))
    on_instance = "whose forward is set on the instance, is left alone"
    left = {
        "1.0": LEFT("OwnPool", "MaxPool2d"),
        "1.1": LEFT("OwnAdaptive", "AdaptiveMaxPool2d"),
        "2.0": "AdaptiveMaxPool3d, in TorchScript, is left alone",
        **{str(n): f"{type(m).__name__}, {on_instance}" for n, m in enumerate(own_forward, 3)},
    }
    with unchanged(model):
        with pytest.warns(UserWarning, match="^replace_max_pooling: expected ") as caught:
            reasons = replace_max_pooling(model, torch.uint8)
        changed = [path for path, module in model.named_modules() if type(module) in OURS.values()]
        restore_max_pooling(model)
    (warning,) = caught
    assert f"but got Sequential with {left}" in str(warning.message)
    # An unpool that is left alone takes flat indices.
    wants = "MaxUnpool2d, whose forward is set on the instance, may want int64 indices"
    assert reasons == {"5": left["5"], "6": left["6"], "7": wants}
    assert changed == ["0", "7"]


def test_restoring_what_was_not_torchs_to_begin_with() -> None:
    """This package's modules become as torch.nn makes them, subclasses are left alone."""
    model, other, own = round_trip(), round_trip(), OwnOfOurs(2, index_dtype=torch.uint8)
    model[0].__class__ = MaxPool2d
    model[1] = MaxUnpool2d(2)
    model[2] = MaxPool2d(3, 2, index_dtype=torch.uint8)
    restore_max_pooling(model)
    assert [entry[1:] for entry in state(model)[1:]] == [entry[1:] for entry in state(other)[1:]]
    with unchanged(own):
        restore_max_pooling(own)


OWN_FORWARD = maxunpool_cuda.AdaptiveMaxPool1d(2)
OWN_FORWARD.forward = OWN_FORWARD.forward  # set on the instance, though it is the class's
RETURNS = "OwnOfOurs, a subclass of MaxPool2d, would still return torch.int32 indices"
MAY_CALL = "AdaptiveMaxPool1d, whose forward is set on the instance, may call this package's"
REDUCE = "torch.nn has no reduce='sum'"
DTYPE = "index_dtype to be torch.int64, .* but got torch.int16"
# The function that refuses, its arguments, a module, and words of the error.
REFUSED: list[tuple[Any, dict[str, Any], nn.Module, str]] = [
    (replace_max_pooling, {"index_dtype": torch.int16}, nn.ReLU(), DTYPE),
    (converted, {"index_dtype": torch.int16}, nn.ReLU(), DTYPE),
    (replace_max_pooling, {"reduce": "first"}, nn.ReLU(), "reduce .* but got 'first'"),
    (converted, {"reduce": "first"}, nn.ReLU(), "reduce .* but got 'first'"),
    # FSDP's fully_shard makes such subclasses.
    (restore_max_pooling, {}, OWN_INT32, re.escape(f"got { {'3.0': RETURNS} }")),
    (restore_max_pooling, {}, OWN_FORWARD, re.escape(f"got { {'3.0': MAY_CALL} }")),
    (restore_max_pooling, {}, MaxUnpool2d(2, reduce="sum"), re.escape(f"got { {'3.0': REDUCE} }")),
]


@pytest.mark.parametrize(("function", "wrong", "other", "words"), REFUSED)
def test_refusals(function: Any, wrong: dict[str, Any], other: nn.Module, words: str) -> None:
    """A refusal changes nothing. Modules that cannot be restored can still be converted."""
    model = nn.Sequential(*round_trip(), nn.Sequential(other))
    replace_max_pooling(model[:3])
    refused = pytest.raises(ValueError, match=f"^{function.__name__}: expected .*{words}")
    with unchanged(model), converted(model, torch.uint8):
        pass
    with unchanged(model), refused, contextlib.ExitStack() as end:
        end.enter_context(function(model, **wrong))
    with pytest.raises(TypeError, match=f"^{function.__name__}: .* a Module but got list"):
        contextlib.ExitStack().enter_context(function([model]))


def test_converted_undoes_what_it_did() -> None:
    """It undoes nothing else, even after an exception, whatever the body did to the model."""
    model = nn.Sequential(*round_trip(), pool(2, of=MaxPool2d, index_dtype=torch.int32))
    model.append(MaxUnpool2d(3, reduce="sum"))
    with unchanged(model):
        with (
            contextlib.suppress(ZeroDivisionError),
            converted(model, torch.uint8, reduce="last"),
        ):
            assert {type(module) for module in model} <= {*OURS.values()}
            assert (model[3].index_dtype, model[4].reduce) == (torch.uint8, "last")
            model.extend([MaxPool2d(2), nn.MaxPool2d(2)])
            raise ZeroDivisionError
        assert [type(module) for module in model[5:]] == [MaxPool2d, nn.MaxPool2d]
        del model[5:]
        with converted(model, torch.uint8):
            removed = model.pop(0)
            model[0].reduce = "sum"  # a module that was converted
            model[3].reduce = "last"  # a module that was not
        assert (type(removed), model[3].reduce) == (nn.MaxPool2d, "last")
        model[3].reduce = "sum"
        model.insert(0, removed)


def test_conversion_inside_of_conversion() -> None:
    model = round_trip()
    with unchanged(model):
        with converted(model, torch.int32):
            with unchanged(model), converted(model, torch.uint8, reduce="sum"):
                assert (model[0].index_dtype, model[1].reduce) == (torch.uint8, "sum")
            restore_max_pooling(model)
        replace_max_pooling(model, torch.int32)
        with converted(model):
            restore_max_pooling(model)


def test_converted_refuses_classes_that_it_did_not_give() -> None:
    """FSDP2's fully_shard gives modules such classes."""
    model, conversion = round_trip(), contextlib.ExitStack()
    conversion.enter_context(converted(model, torch.uint8))
    model[0].__class__ = OwnOfOurs
    words = r"^converted: .* but got \{'0': 'OwnOfOurs'\}$"
    with unchanged(model), pytest.raises(ValueError, match=words):
        conversion.close()
