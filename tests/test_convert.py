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
from cases import INDEX_DTYPES, same
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import maxunpool_cuda
from maxunpool_cuda import (
    MaxPool1d,
    MaxPool2d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
    converted,
    replace_max_pooling,
    restore_max_pooling,
)

# Of one, two and three dimensions.
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
ADAPTIVE = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
UNPOOLS = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)
THEIRS = POOLS + ADAPTIVE + UNPOOLS
OURS = tuple(getattr(maxunpool_cuda, theirs.__name__) for theirs in THEIRS)

pytestmark = pytest.mark.usefixtures("single_threaded_torch")


OwnPool = type("OwnPool", (nn.MaxPool2d,), {})
OwnUnpool = type("OwnUnpool", (nn.MaxUnpool2d,), {})
OwnOfOurs = type("OwnOfOurs", (MaxPool2d,), {})
OwnSum = type("OwnSum", (MaxUnpool1d,), {})
OwnAdaptive = type("OwnAdaptive", (nn.AdaptiveMaxPool2d,), {})


class Foreign(nn.modules.pooling._MaxUnpoolNd):
    """As another library's, none of torch.nn's three."""

    kernel_size = stride = (2, 2)
    padding = (0, 0)


def state(model: nn.Module) -> list[Any]:
    """Of all its modules: which they are, their classes and attributes, hooks and children too."""
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
OLD = pool((3, 3))
OLD.stride = None  # as in pickles of old modules
EVERY_UNPOOL = [unpool(2) for unpool in UNPOOLS]
ELEMENTS = "kernel_size (17, 17) has more than 256 elements"
NO_OFFSETS = "adaptive windows, of many sizes, have no offsets"
NO_SUCH = "no MaxUnpool2d has kernel_size {}, stride {} and padding {}".format
MAY_WANT = "{}, a subclass of {}, may want int64 indices".format
UINT8, SMALL = {torch.uint8}, {torch.uint8, torch.int32}
# Why the first of some modules, and no other, returns no indices of some dtypes; the modules.
CASES: list[tuple[Any, ...]] = [
    (ELEMENTS, UINT8, pool(17, 2), nn.MaxUnpool2d(17, 2)),
    ("dilation (1, 2) is not 1", UINT8, pool(3, 2, 1, (1, 2)), nn.MaxUnpool2d((3, 5), 2, 1)),
    (NO_SUCH((2, 2), (2, 2), (0, 0)), UINT8, pool(2), nn.MaxUnpool2d((2, 3), 2), pool((2, 3), 2)),
    (NO_SUCH((3, 3), (3, 3), (0, 0)), UINT8, pool(3), nn.MaxUnpool2d(3, 2), pool(3, 2)),
    (NO_SUCH((3, 3), (2, 2), (1, 1)), UINT8, pool(3, 2, 1), nn.MaxUnpool2d(3, 2), pool(3, 2)),
    *((NO_OFFSETS, UINT8, pool(2, of=of), u) for of, u in zip(ADAPTIVE, EVERY_UNPOOL, strict=True)),
    # What concerns one number of dimensions leaves pools of another alone.
    (
        *(MAY_WANT("OwnUnpool", "MaxUnpool2d"), SMALL),
        *(pool(2), pool(2, of=nn.MaxPool1d), pool(2, of=nn.MaxPool3d), *EVERY_UNPOOL, OwnUnpool(2)),
    ),
    (MAY_WANT("Foreign", "_MaxUnpoolNd"), SMALL, pool(2), *EVERY_UNPOOL, Foreign()),
    (ALONE(1), SMALL, pool(2, of=nn.MaxPool1d), nn.MaxUnpool2d(2), nn.MaxUnpool3d(2)),
    (ALONE(2), SMALL, pool(2), nn.MaxUnpool1d(2), nn.MaxUnpool3d(2)),
    (ALONE(3), SMALL, pool(2, of=nn.MaxPool3d), nn.MaxUnpool1d(2), nn.MaxUnpool2d(2)),
    # A pool that nothing unpools keeps what it returns.
    *((ALONE(2), SMALL - {t}, pool(2, of=MaxPool2d, index_dtype=t)) for t in INDEX_DTYPES),
    *((FINE, set(), pool(2, of=MaxPool2d, index_dtype=t), MaxUnpool2d(2)) for t in INDEX_DTYPES),
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
    """The reasons of subclasses, which hold for every dtype."""
    bases = {OwnPool: "MaxPool2d", OwnUnpool: "MaxUnpool2d", Foreign: "_MaxUnpoolNd"}
    return {
        path: f"{type(module).__name__}, a subclass of {bases[type(module)]}, is left alone"
        for path, module in model.named_children()
        if type(module) in bases and getattr(module, "return_indices", True)
    }


def returned_dtypes(model: nn.Sequential) -> dict[str, torch.dtype]:
    """Of the indices of every pool that returns any."""
    return {
        name: module(torch.rand(1, *[20] * dims))[1].dtype
        for name, module in model.named_children()
        for dims, kinds in enumerate(zip(POOLS, ADAPTIVE, strict=True), 1)
        if isinstance(module, kinds) and module.return_indices
    }


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
    for module, kind in zip(model, map(type, modules), strict=True):
        assert type(module) is (OURS[THEIRS.index(kind)] if kind in THEIRS else kind)
    if all(type(module) not in OURS for module in modules):
        assert restore_max_pooling(model) is model
        assert state(model) == before


def test_subclasses_of_this_packages() -> None:
    """They are named if they do not do what is asked for, and are left as they are."""
    reason = "{}, a subclass of {}, is left alone"
    own = pool(2, of=OwnOfOurs, index_dtype=torch.int32)
    assert replace_max_pooling(own, torch.int32) == {}
    assert replace_max_pooling(own) == {"": reason.format("OwnOfOurs", "MaxPool2d")}
    assert own.index_dtype == torch.int32
    adds = OwnSum(2, reduce="sum")
    assert replace_max_pooling(adds) == replace_max_pooling(adds, reduce="sum") == {}
    assert replace_max_pooling(adds, reduce="last") == {"": reason.format("OwnSum", "MaxUnpool1d")}
    assert adds.reduce == "sum"


def test_paths_in_reasons() -> None:
    """A shared module has one; that of the model itself is empty."""
    model = nn.Module()
    model.first = model.second = nn.Sequential(pool(2))
    assert replace_max_pooling(model, torch.uint8) == {"first.0": ALONE(2)}
    assert replace_max_pooling(nn.AdaptiveMaxPool1d(2, True), torch.int32) == {"": ALONE(1)}


def test_reduce() -> None:
    """It is given to all unpools but subclasses; without it, this package's keep theirs."""
    model = nn.Sequential(nn.MaxUnpool2d(2), nn.Sequential(nn.MaxUnpool1d(3)), OwnUnpool(2))
    model.append(MaxUnpool3d(2, reduce="sum"))
    assert replace_max_pooling(model) == left_alone(model)
    unpools = [model[0], model[1][0], model[3]]
    assert [unpool.reduce for unpool in unpools] == ["last", "last", "sum"]
    for reduce in ("sum", "last"):
        assert replace_max_pooling(model, reduce=reduce) == left_alone(model)
        assert [unpool.reduce for unpool in unpools] == [reduce] * 3
    assert not hasattr(model[2], "reduce")


def test_modules_stay_the_same_objects() -> None:
    """With their hooks and all else, replaced, restored and meanwhile; shared ones, too."""
    model = nn.ModuleDict({"pool": pool(2), "deep": nn.Sequential(nn.MaxUnpool2d(2))}).eval()
    model["again"], model["pool"].note = model["pool"], "mine"
    calls: list[torch.dtype] = []
    model["pool"].register_forward_hook(lambda _, __, out: calls.append(out[1].dtype))
    identities = [id(module) for module in model.modules()]

    def check_replaced() -> None:
        assert [id(module) for module in model.modules()] == identities
        assert [type(model["again"]), type(model["deep"][0])] == [MaxPool2d, MaxUnpool2d]
        assert (model["again"].training, model["again"].note) == (False, "mine")
        model["again"](torch.rand(1, 4, 4))

    for dtype in INDEX_DTYPES:
        with unchanged(model):
            assert replace_max_pooling(model, dtype) == {}
            check_replaced()
            assert restore_max_pooling(model) is model
        with unchanged(model), converted(model, dtype) as given:
            assert given is model
            check_replaced()
    assert calls == [dtype for dtype in INDEX_DTYPES for _ in range(2)]


@pytest.mark.parametrize(
    ("wrong", "exception", "words"),
    [
        ({"index_dtype": torch.int16}, ValueError, "index_dtype to be .* but got torch.int16"),
        ({"model": [nn.MaxPool2d(2)]}, TypeError, "model to be a Module but got list"),
        ({"reduce": "first"}, ValueError, "reduce .* but got 'first'"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], exception: type[Exception], words: str) -> None:
    """Which dtypes are wrong: test_patched."""
    model = round_trip()
    functions: list[Any] = [replace_max_pooling, converted]
    for function in [*functions, restore_max_pooling] if "model" in wrong else functions:
        expected = pytest.raises(exception, match=f"^{function.__name__}: expected {words}")
        with unchanged(model), expected, contextlib.ExitStack() as end:
            end.enter_context(function(**{"model": model, **wrong}))


def test_a_warning_where_there_is_nothing_to_replace() -> None:
    """Which names the caller's line; and none where something is this package's."""
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


def test_restoring_what_was_not_torchs_to_begin_with() -> None:
    """By hand, in part, or from the start: as torch.nn makes it. Subclasses are left alone."""
    model, other, own = round_trip(), round_trip(), OwnOfOurs(2, index_dtype=torch.uint8)
    model[0].__class__ = MaxPool2d
    model[1] = MaxUnpool2d(2)
    model[2] = MaxPool2d(3, 2, index_dtype=torch.uint8)
    restore_max_pooling(model)
    assert [entry[1:] for entry in state(model)[1:]] == [entry[1:] for entry in state(other)[1:]]
    with unchanged(own):
        restore_max_pooling(own)


@pytest.fixture
def alone_in_the_world() -> Any:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_what_cannot_be_restored(alone_in_the_world: Any) -> None:
    """It is refused by name before anything is changed."""
    sharded = nn.Sequential(*round_trip(), nn.AdaptiveMaxPool2d(2, True))
    replace_max_pooling(sharded, torch.int32)
    for module in (sharded[0], sharded[3]):
        fully_shard(module, mesh=alone_in_the_world)
    own = nn.Sequential(pool(2, of=OwnOfOurs, index_dtype=torch.uint8), nn.MaxUnpool2d(2))
    adds = nn.Sequential(*round_trip(), nn.ModuleDict({"up": MaxUnpool2d(2, reduce="sum")}))
    replace_max_pooling(adds)
    own_forward = nn.Sequential(MaxPool1d(2), maxunpool_cuda.AdaptiveMaxPool1d(2))
    own_forward[1].forward = own_forward[1].forward  # which may be that of this package's class
    may_call = "AdaptiveMaxPool1d, whose forward is set on the instance, may call this package's"
    returns = "{}, a subclass of {}, would still return {} indices".format
    fsdp = {
        "0": returns("FSDPMaxPool2d", "MaxPool2d", torch.int32),
        "3": returns("FSDPAdaptiveMaxPool2d", "AdaptiveMaxPool2d", torch.int32),
    }
    for model, reasons in (
        (adds, {"3.up": "torch.nn has no reduce='sum'"}),
        (own, {"0": returns("OwnOfOurs", "MaxPool2d", torch.uint8)}),
        (own_forward, {"1": may_call}),
        (sharded, fsdp),
    ):
        words = re.escape(f"but got {reasons}")
        with (
            unchanged(model),
            pytest.raises(ValueError, match=f"^restore_max_pooling: expected .*{words}$"),
        ):
            restore_max_pooling(model)
    with converted(adds, torch.uint8):  # whose end has nothing to do with that
        pass
    sharded[0].index_dtype = sharded[3].index_dtype = torch.int64
    restore_max_pooling(sharded)
    assert [*map(type, sharded[1:3])] == [nn.MaxUnpool2d, nn.MaxPool2d]
    x = torch.rand(1, 3, 4, 4)
    assert all(map(same, sharded[3](x), nn.AdaptiveMaxPool2d(2, True)(x)))
    model, conversion = round_trip(), contextlib.ExitStack()
    conversion.enter_context(converted(model, torch.uint8))
    fully_shard(model[0], mesh=alone_in_the_world)
    words = r"^converted: .* but got \{'0': 'FSDPMaxPool2d'\}$"
    with unchanged(model), pytest.raises(ValueError, match=words):
        conversion.close()


def test_only_what_was_done_is_undone() -> None:
    """Also after an exception, and whatever the body has done to the model."""
    model = nn.Sequential(*round_trip(), pool(2, of=MaxPool2d, index_dtype=torch.int32))
    model.append(MaxUnpool2d(3, reduce="sum"))

    def fails() -> None:
        with converted(model, torch.uint8, reduce="last"):
            assert {type(module) for module in model} <= set(OURS)
            assert (model[3].index_dtype, model[4].reduce) == (torch.uint8, "last")
            model.extend([MaxPool2d(2), nn.MaxPool2d(2)])
            raise ZeroDivisionError

    with unchanged(model):
        with pytest.raises(ZeroDivisionError):
            fails()
        assert [type(module) for module in model[5:]] == [MaxPool2d, nn.MaxPool2d]
        del model[5:]
    with unchanged(model):
        with converted(model, torch.uint8):
            removed = model.pop(0)
            model[0].reduce = "sum"  # which was converted, and
            model[3].reduce = "last"  # which was not
        assert type(removed) is nn.MaxPool2d
        assert model[3].reduce == "last"
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_warning_names_what_is_left_alone() -> None:
    """With the path and the reason, whether or not it has to do with indices."""
    own_forward = (nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), pool(2), nn.MaxUnpool2d(2))
    for module in own_forward:
        module.forward = module.forward
    scripted = torch.jit.script(nn.Sequential(nn.AdaptiveMaxPool3d(2), nn.ReLU()))
    subclasses = nn.Sequential(OwnPool(2), OwnAdaptive(2))
    model = nn.Sequential(nn.MaxPool3d(2), subclasses, scripted, *own_forward, pool(2))
    on_instance = "whose forward is set on the instance, is left alone"
    left = {
        "1.0": "OwnPool, a subclass of MaxPool2d, is left alone",
        "1.1": "OwnAdaptive, a subclass of AdaptiveMaxPool2d, is left alone",
        "2.0": "AdaptiveMaxPool3d, in TorchScript, is left alone",
        **{str(n): f"{type(m).__name__}, {on_instance}" for n, m in enumerate(own_forward, 3)},
    }
    before = state(model)
    with pytest.warns(UserWarning, match="^replace_max_pooling: expected ") as caught:
        reasons = replace_max_pooling(model, torch.uint8)
    (warning,) = caught
    assert f"but got Sequential with {left}" in str(warning.message)
    # An unpool that is left alone takes flat indices.
    wants = "MaxUnpool2d, whose forward is set on the instance, may want int64 indices"
    assert reasons == {"5": left["5"], "6": left["6"], "7": wants}
    changed = [a[1] for a, b in zip(state(model), before, strict=True) if a[1] != b[1]]
    assert changed == [maxunpool_cuda.MaxPool3d, MaxPool2d]
    restore_max_pooling(model)
    assert state(model) == before
