"""Models whose pools and unpools are replaced do what they did."""

import copy
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES, same
from networks import NETWORKS, POOLS, UNPOOLS, PoolAndUnpool, Shared, results, returned_dtypes
from torch import Tensor, nn

import maxunpool_cuda
from maxunpool_cuda import (
    MaxPool1d,
    MaxPool2d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
    replace_max_pooling,
    replace_max_unpool,
)

THEIRS = POOLS + UNPOOLS
OURS = tuple(getattr(maxunpool_cuda, theirs.__name__) for theirs in THEIRS)

pytestmark = pytest.mark.usefixtures("as_torch_runs")


def agree(got: list[Tensor], expected: list[Tensor], exact: int | None = None) -> None:
    """Bit for bit, or so many of them, and others but for the order in which sums are added up."""
    # Of the output and the input's gradient: a bias before a batch norm gets nothing but rounding.
    assert all(bool(tensor.any()) for tensor in expected[:2])
    exact = len(expected) if exact is None else exact
    assert all(map(same, got[:exact], expected[:exact]))
    torch.testing.assert_close(got[exact:], expected[exact:], check_stride=False)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "contiguous") for name in NETWORKS),
        *((name, "channels_last") for name, (_, shape) in NETWORKS.items() if len(shape) == 4),
    ],
)
def test_networks(name: str, layout: str, device: str) -> None:
    make, shape = NETWORKS[name]
    model, x = make().to(device), torch.randn(shape, device=device)
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    # The unpools' gradients are channels_last here and contiguous in torch.nn, and convolutions
    # add up the two in another order; on a GPU those of the forward as well.
    exact = 0 if device == "cuda" else 1 if layout == "channels_last" else None
    if exact is not None:
        model, x = model.double(), x.double()
    converted = copy.deepcopy(model)
    assert replace_max_pooling(converted) == {}
    agree(results(converted, x), results(model, x), exact)
    assert set(returned_dtypes(model).values()) == {torch.int64}
    assert set(returned_dtypes(converted).values()) == {torch.uint8}
    for module, other in zip(model.modules(), converted.modules(), strict=True):
        plain = isinstance(module, POOLS) and not module.return_indices
        assert (type(other) in OURS) == (type(module) in THEIRS and not plain)
    model.load_state_dict(converted.state_dict())


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_overlapping_windows(dims: int) -> None:
    """torch.nn's output, and where it gives losers a gradient, that of unpooling int64 indices."""
    model, x = PoolAndUnpool(dims, 3, 2, 1), torch.randn(2, 3, *(40, 9, 6)[:dims])
    with_torch = results(model, x)
    given: dict[torch.dtype, list[Tensor]] = {}
    for dtype in INDEX_DTYPES:
        assert replace_max_pooling(model, dtype) == {}
        assert returned_dtypes(model) == {"pool": dtype}
        given[dtype] = results(model, x)
    assert same(given[torch.int64][0], with_torch[0])
    assert not all(map(torch.allclose, given[torch.int64], with_torch))
    agree(given[torch.int32], given[torch.int64])
    agree(given[torch.uint8], given[torch.int64])


class OwnUnpool(nn.MaxUnpool2d):
    pass


class OwnPool(nn.MaxPool2d):
    pass


class Foreign(nn.modules.pooling._MaxUnpoolNd):
    """As another library's, none of torch.nn's three."""

    kernel_size = stride = (2, 2)
    padding = (0, 0)


def pool(*window: Any, of: type = nn.MaxPool2d, **options: Any) -> nn.Module:
    return of(*window, return_indices=True, **options)


def with_stride(module: nn.Module, stride: Any) -> nn.Module:
    module.stride = stride
    return module


EVERY_POOL = tuple(pool(2, of=rank) for rank in POOLS)
EVERY_UNPOOL = tuple(unpool(2) for unpool in UNPOOLS)
NO_PLACE = "no MaxUnpool2d has kernel_size {}, stride {} and padding {}".format
FOREIGN = "Foreign, a subclass of _MaxUnpoolNd, may want int64 indices"
NO_UINT8, NO_INT32 = {torch.uint8}, {torch.uint8, torch.int32}
# Modules; and why the first, and no other, does not return indices of which dtypes.
CASES: list[tuple[tuple[nn.Module, ...], str, set[torch.dtype]]] = [
    (
        (pool(17, 2), nn.MaxUnpool2d(17, 2)),
        "kernel_size (17, 17) has more than 256 elements",
        NO_UINT8,
    ),
    ((pool(3, 2, 1, (1, 2)), nn.MaxUnpool2d((3, 5), 2, 1)), "dilation (1, 2) is not 1", NO_UINT8),
    *(
        (
            (pool(*window), unpool, pool(unpool.kernel_size, unpool.stride, unpool.padding)),
            NO_PLACE(*window),
            NO_UINT8,
        )
        for window, unpool in (
            (((2, 2), (2, 2), (0, 0)), nn.MaxUnpool2d((2, 3), 2)),
            (((3, 2), (3, 2), (0, 0)), nn.MaxUnpool2d((3, 2), (3, 3))),
            (((3, 3), (2, 2), (1, 1)), nn.MaxUnpool2d(3, 2)),
        )
    ),
    (  # which concerns the pools of its rank
        (EVERY_POOL[1], EVERY_POOL[0], EVERY_POOL[2], *EVERY_UNPOOL, OwnUnpool(2)),
        "OwnUnpool, a subclass of MaxUnpool2d, may want int64 indices",
        NO_INT32,
    ),
    *(((each, *EVERY_UNPOOL, Foreign()), FOREIGN, NO_INT32) for each in EVERY_POOL),
    (
        (pool(2, of=OwnPool), pool(2), nn.MaxUnpool2d(2)),
        "OwnPool, a subclass, is left alone",
        NO_INT32,
    ),
    *(
        (
            (EVERY_POOL[dims], *EVERY_UNPOOL[:dims], *EVERY_UNPOOL[dims + 1 :]),
            f"there is no MaxUnpool{dims + 1}d to take the indices",
            NO_INT32,
        )
        for dims in range(3)
    ),
    # Windows are the same however they are written; None is in pickles of old modules.
    *(
        (modules, "", set())
        for modules in (
            (nn.MaxUnpool2d(3), pool(2), nn.MaxUnpool2d(2)),
            (pool((3,)), nn.MaxUnpool2d(3)),
            (with_stride(pool((3, 3)), None), nn.MaxUnpool2d(3)),
            (with_stride(pool([3], 3, (0,)), []), nn.MaxUnpool2d(3)),
            (pool(3, (3, 3), [0, 0]), nn.MaxUnpool2d(3)),
            *((pool(2, of=MaxPool2d, index_dtype=t), MaxUnpool2d(2)) for t in INDEX_DTYPES),
        )
    ),
]


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("modules", "reason", "refused"), CASES, ids=[reason or "fine" for _, reason, _ in CASES]
)
def test_which_pools_return_what(
    modules: tuple[nn.Module, ...], reason: str, refused: set[torch.dtype], dtype: torch.dtype
) -> None:
    model = nn.Sequential(*copy.deepcopy(modules))
    reasons = {"0": reason} if dtype in refused else {}
    for _ in range(2):
        assert replace_max_pooling(model, dtype) == reasons
        returned = returned_dtypes(model)
        assert returned == {n: torch.int64 if n in reasons else dtype for n in returned}
    for module, before in zip(model, map(type, modules), strict=True):
        assert type(module) is (OURS[THEIRS.index(before)] if before in THEIRS else before)


def test_pools_that_nobody_is_seen_to_take_the_indices_of() -> None:
    """They keep what they return, which is not always int64; in a list or alone, by one name."""
    for before in INDEX_DTYPES:
        lonely = pool(2, of=MaxPool2d, index_dtype=before)
        for after in INDEX_DTYPES:
            kept = after not in (before, torch.int64)
            assert list(replace_max_pooling(copied := copy.deepcopy(lonely), after)) == [""] * kept
            assert copied.index_dtype == (before if kept else after)
    model = nn.Module()
    model.first = model.second = nn.Sequential(pool(2))
    assert list(replace_max_pooling(model)) == ["first.0"]
    unpool = nn.MaxUnpool3d(2)
    assert replace_max_pooling(unpool) == {}
    assert type(unpool) is MaxUnpool3d


def test_plain_pools_are_replaced_on_demand() -> None:
    """Without indices: the backward of ours keeps bytes."""
    pools = (nn.MaxPool1d(2), nn.MaxPool1d(2, return_indices=False), OwnPool(2))
    model = nn.Sequential(*pools, nn.MaxUnpool1d(2))
    assert replace_max_pooling(model) == {}
    assert [*map(type, model)] == [nn.MaxPool1d, nn.MaxPool1d, OwnPool, MaxUnpool1d]
    assert replace_max_pooling(model, torch.int32, plain_pools=True) == {}
    assert [*map(type, model)] == [MaxPool1d, MaxPool1d, OwnPool, MaxUnpool1d]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model[:2](torch.rand(1, 8, requires_grad=True))
    assert [t.dtype for t in kept] == [torch.uint8] * 2


def test_modules_stay_the_same_objects() -> None:
    model, x = Shared().eval(), torch.rand(2, 3, 11, 9)
    model.pool.note = "mine"
    calls: list[torch.dtype] = []
    model.pool.register_forward_hook(lambda _, __, out: calls.append(out[1].dtype))
    expected, modules = model(x), list(model.modules())
    assert replace_max_pooling(model) == {}
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [model.again, model.deep["unpool"]] == model.listed == [model.pool, modules[-1]]
    assert (model.pool.note, model.training, model.pool.training) == ("mine", False, False)
    assert same(model(x), expected)
    assert calls == [torch.int64] * 2 + [torch.uint8] * 2


DTYPES = "index_dtype to be torch.int64, .* but got "
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *(
        (replace_max_pooling, {"index_dtype": wrong}, ValueError, DTYPES)
        for wrong in (torch.int16, torch.float32, "uint8", None)
    ),
    *(
        (function, {"model": [nn.MaxPool2d(2)]}, TypeError, "model to be a Module but got list")
        for function in (replace_max_pooling, replace_max_unpool)
    ),
    (replace_max_unpool, {"reduce": "first"}, ValueError, "reduce .* but got 'first'"),
]


@pytest.mark.parametrize(("function", "wrong", "exception", "words"), REFUSED)
def test_what_is_refused(
    function: Any, wrong: dict[str, Any], exception: type[Exception], words: str
) -> None:
    model = nn.Sequential(pool(2), nn.MaxUnpool2d(2))
    with pytest.raises(exception, match=f"^{function.__name__}: expected {words}"):
        function(**{"model": model, **wrong})
    assert [*map(type, model)] == [nn.MaxPool2d, nn.MaxUnpool2d]


def test_replace_max_unpool() -> None:
    model = nn.Sequential(
        nn.MaxUnpool2d(2),
        nn.Sequential(nn.MaxUnpool1d(3, 2, 1), nn.ReLU()),
        MaxUnpool3d(2, reduce="mean"),
        OwnUnpool(2),
    )
    modules = list(model.modules())
    assert replace_max_unpool(model) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    types = [nn.Sequential, MaxUnpool2d, nn.Sequential, MaxUnpool1d, nn.ReLU, MaxUnpool3d]
    assert [*map(type, modules)] == [*types, OwnUnpool]
    replaced = [model[0], model[1][0], model[2]]
    assert (replaced[1].stride, replaced[1].padding) == ((2,), (1,))
    # A reduce that is given is given to our own as well, else these keep theirs.
    assert [module.reduce for module in replaced] == ["last", "last", "mean"]
    for reduce in ("sum", "last"):
        replace_max_unpool(model, reduce=reduce)
        assert [module.reduce for module in replaced] == [reduce] * 3
    assert not hasattr(model[3], "reduce")
    replace_max_pooling(replace_max_unpool(model[2], reduce="mean"))
    assert model[2].reduce == "mean"


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, indices, 2)


NOTHING = {
    "functional": Functional,
    "scripted": lambda: torch.jit.script(nn.Sequential(pool(2))),
    "subclasses": lambda: nn.Sequential(pool(2, of=OwnPool), OwnUnpool(2)),
    "plain": lambda: nn.Sequential(nn.MaxPool2d(2)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", NOTHING)
def test_a_warning_where_there_is_nothing_to_replace(case: str) -> None:
    model = NOTHING[case]()
    types = [type(module) for module in model.modules()]
    with pytest.warns(UserWarning, match=r"^replace_max_unpool: .* but got ") as unpools:
        assert replace_max_unpool(model) is model
    with pytest.warns(UserWarning, match=r"^replace_max_pooling: .* but got ") as pools:
        assert (replace_max_pooling(model) == {}) == (case != "subclasses")
    assert [type(module) for module in model.modules()] == types
    for warned, names in ((unpools, "torch.nn.MaxUnpool1d/2d/3d"), (pools, "MaxPool1d/2d/3d with")):
        (warning,) = warned
        assert warning.filename == __file__
        assert type(model).__name__ in str(warning.message)
        assert names in str(warning.message)
        assert "functions that a forward calls, and scripted modules" in str(warning.message)
    assert ("plain_pools=True" in str(pools[0].message)) == (case == "plain")
    assert "plain_pools" not in str(unpools[0].message)


def test_no_warning_where_something_is_ours(recwarn: pytest.WarningsRecorder) -> None:
    for model in (nn.MaxUnpool1d(2), MaxUnpool1d(2), MaxPool1d(2)):
        for _ in range(2):
            replace_max_pooling(model)
    replace_max_unpool(MaxUnpool2d(2))
    replace_max_pooling(nn.MaxPool1d(2), plain_pools=True)
    assert not recwarn.list
