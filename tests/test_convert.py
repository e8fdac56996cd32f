"""Models whose pools and unpools are replaced do what they did."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES, same
from networks import NETWORKS, POOLS, UNPOOLS, PoolAndUnpool, returned_dtypes
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


@pytest.fixture(autouse=True)
def reproducible(poisoned_memory: None) -> Iterator[None]:
    """What torch.nn's modules and convolutions run under, to the same bits every time."""
    torch.use_deterministic_algorithms(False)  # under which torch.nn's raise
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more make small networks slower
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    out = model(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=x.dtype, device=x.device)
    given = [x, *model.parameters()]
    return [out, *torch.autograd.grad((out * weight.view_as(out)).sum(), given)]


def agree(got: list[Tensor], expected: list[Tensor], exact: int | None = None) -> None:
    """Bit for bit, or so many of them, and others but for the order in which sums are added up."""
    # Of the output and the input's gradient: a bias before a batch norm gets nothing but rounding.
    assert all(bool(tensor.any()) for tensor in expected[:2])
    exact = len(expected) if exact is None else exact
    assert all(map(same, got[:exact], expected[:exact]))
    torch.testing.assert_close(got[exact:], expected[exact:], check_stride=False)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, layout: str, device: str) -> None:
    make, shape = NETWORKS[name]
    model, x = make().to(device), torch.randn(shape, device=device)
    if layout == "channels_last":
        if len(shape) != 4:
            pytest.skip("of two dimensions")
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    # The unpools' gradients are channels_last here and contiguous in torch.nn, and convolutions
    # add up the two in another order; on a GPU those of the forward as well.
    exact = 0 if device == "cuda" else 1 if layout == "channels_last" else None
    if exact is not None:
        model, x = model.double(), x.double()
    converted, tried = copy.deepcopy(model), copy.deepcopy(model)
    assert replace_max_pooling(converted) == {}
    agree(results(converted, x), results(model, x), exact)
    assert set(returned_dtypes(model).values()) == {torch.int64}
    assert set(returned_dtypes(converted).values()) == {torch.uint8}
    for module, other in zip(model.modules(), converted.modules(), strict=True):
        plain = isinstance(module, POOLS) and not module.return_indices
        assert (type(other) in OURS) == (type(module) in THEIRS and not plain)
    model.load_state_dict(converted.state_dict())
    assert replace_max_pooling(tried, example=(x,)) == {}
    assert returned_dtypes(tried) == returned_dtypes(converted)


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
# By the reason why the first module, and no other, returns no uint8 indices, but int32 ones.
NO_UINT8 = {
    "kernel_size (17, 17) has more than 256 elements": (pool(17, 2), nn.MaxUnpool2d(17, 2)),
    "dilation (1, 2) is not 1": (pool(3, 2, 1, (1, 2)), nn.MaxUnpool2d((3, 5), 2, 1)),
    **{
        f"no MaxUnpool2d has kernel_size {window[0]}, stride {window[1]} and padding {window[2]}": (
            pool(*window),
            unpool,
            pool(unpool.kernel_size, unpool.stride, unpool.padding),
        )
        for window, unpool in (
            (((2, 2), (2, 2), (0, 0)), nn.MaxUnpool2d((2, 3), 2)),
            (((3, 2), (3, 2), (0, 0)), nn.MaxUnpool2d((3, 2), (3, 3))),
            (((3, 3), (2, 2), (1, 1)), nn.MaxUnpool2d(3, 2)),
        )
    },
}
# The same, where it returns no int32 indices either. A subclass concerns the pools of its rank.
NEITHER = {
    "OwnUnpool, a subclass of MaxUnpool2d, may want int64 indices": (
        *(EVERY_POOL[1], EVERY_POOL[0], EVERY_POOL[2]),
        *EVERY_UNPOOL,
        OwnUnpool(2),
    ),
    "Foreign, a subclass of _MaxUnpoolNd, may want int64 indices": (pool(2), Foreign()),
    "OwnPool, a subclass, is left alone": (pool(2, of=OwnPool), pool(2), nn.MaxUnpool2d(2)),
    **{
        f"there is no MaxUnpool{dims + 1}d to take the indices": (
            EVERY_POOL[dims],
            *(EVERY_UNPOOL[:dims] + EVERY_UNPOOL[dims + 1 :]),
        )
        for dims in range(3)
    },
}
# Windows are the same however they are written; None is in pickles of old modules.
FINE = {
    "one of several unpools": (nn.MaxUnpool2d(3), pool(2), nn.MaxUnpool2d(2)),
    "a tuple of one int": (pool((3,)), nn.MaxUnpool2d(3)),
    "no stride": (with_stride(pool((3, 3)), None), nn.MaxUnpool2d(3)),
    "an empty stride": (with_stride(pool([3], 3, (0,)), []), nn.MaxUnpool2d(3)),
    "all forms": (pool(3, (3, 3), [0, 0]), nn.MaxUnpool2d(3)),
    **{
        f"our own, of {dtype}": (pool(2, of=MaxPool2d, index_dtype=dtype), MaxUnpool2d(2))
        for dtype in INDEX_DTYPES
    },
}


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("case", NO_UINT8 | NEITHER | FINE)
def test_which_pools_return_what(case: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(*copy.deepcopy((NO_UINT8 | NEITHER | FINE)[case]))
    types = list(map(type, model))
    refused = case in {torch.uint8: NO_UINT8 | NEITHER, torch.int32: NEITHER}.get(dtype, ())
    for _ in range(2):
        assert replace_max_pooling(model, dtype) == ({"0": case} if refused else {})
        returned = returned_dtypes(model)
        assert returned == {n: torch.int64 if refused and n == "0" else dtype for n in returned}
    for module, before in zip(model, types, strict=True):
        assert type(module) is (OURS[THEIRS.index(before)] if before in THEIRS else before)


def test_an_unpool_of_unknown_rank_concerns_every_pool() -> None:
    model = nn.Sequential(*copy.deepcopy((*EVERY_POOL, *EVERY_UNPOOL)), Foreign())
    for dtype in (torch.uint8, torch.int32):
        assert replace_max_pooling(model, dtype).keys() == {"0", "1", "2"}


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


class Shared(nn.Module):
    """One pool and one unpool, each used twice and known by other names as well."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.again = nn.MaxPool2d(2, return_indices=True)
        self.deep = nn.ModuleDict({"unpool": nn.MaxUnpool2d(2)})
        self.listed = [self.pool, self.deep["unpool"]]

    def forward(self, x: Tensor) -> Tensor:
        once, inner = self.pool(x)
        twice, outer = self.again(once)
        unpool = self.listed[1]
        once = self.deep["unpool"](twice, outer, output_size=once.shape)
        return unpool(once, inner, output_size=x.shape)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_modules_stay_the_same_objects_and_can_be_copied() -> None:
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
    model.pool._forward_hooks.clear()  # a lambda has no pickle
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)):
        assert same(other(x), expected)
        assert returned_dtypes(other) == {"pool": torch.uint8}
        assert repr(other) == repr(model)


@pytest.mark.parametrize("how", ["model", "in place", "each", "after"])
def test_compiled_models(how: str) -> None:
    """What was compiled is compiled anew."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            pooled, indices = self[0](x)
            return self[1](pooled, indices, output_size=x.shape), indices

    model = Net(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2))
    x = torch.rand(1, 2, 5, 5)
    expected, _ = model(x)
    called: Callable[..., Any] = model
    if how == "model":
        called = torch.compile(model, backend="eager")
    elif how != "after":
        for module in [model] if how == "in place" else model:
            module.compile(backend="eager")
    assert called(x)[1].dtype == torch.int64
    for dtype in (torch.uint8, torch.int32):
        assert replace_max_pooling(model if how == "after" else called, dtype) == {}
        if how == "after":
            called = torch.compile(model, backend="aot_eager", fullgraph=True)
        out, indices = called(x)
        assert same(out, expected)
        assert indices.dtype == dtype


def round_trip() -> nn.Module:
    return nn.Sequential(pool(2), nn.MaxUnpool2d(2))


DTYPES = r"^replace_max_pooling: expected index_dtype to be torch.int64, .* but got "
MODULE = "^{}: expected model to be a Module but got list"
EXAMPLE = (
    "^replace_max_pooling: expected example to be a tuple of the model's positional arguments, "
    "or a Tensor, but got {}$"
)
REFUSED: dict[str, tuple[Callable[[nn.Module], object], type[Exception], str]] = {
    **{
        f"index_dtype {dtype}": (lambda m, d=dtype: replace_max_pooling(m, d), ValueError, DTYPES)
        for dtype in (torch.int16, torch.float32, "uint8", None)
    },
    **{
        f"an example {type(wrong).__name__}": (
            lambda m, wrong=wrong: replace_max_pooling(m, example=wrong),
            TypeError,
            EXAMPLE.format(type(wrong).__name__),
        )
        for wrong in ([torch.rand(1, 4, 4)], {"x": 1}, "x", 3)
    },
    **{
        f"a list of models, {function.__name__}": (
            lambda m, function=function: function([m]),
            TypeError,
            MODULE.format(function.__name__),
        )
        for function in (replace_max_pooling, replace_max_unpool)
    },
    "reduce": (
        lambda m: replace_max_unpool(m, reduce="first"),
        ValueError,
        r"^replace_max_unpool: expected reduce .* but got 'first'",
    ),
    "a lazy model": (
        lambda m: replace_max_pooling(m.append(nn.LazyConv2d(3, 1)), example=torch.rand(1, 4, 4)),
        ValueError,
        "but got one with uninitialized parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, exception, words = REFUSED[case]
    model = round_trip()
    with pytest.raises(exception, match=words):
        call(model)
    assert [*map(type, model)][:2] == [nn.MaxPool2d, nn.MaxUnpool2d]


def test_replace_max_unpool() -> None:
    model = nn.Sequential(
        nn.MaxUnpool2d(2),
        nn.Sequential(nn.MaxUnpool1d(3, 2, 1), nn.ReLU()),
        MaxUnpool3d(2, reduce="mean"),
        OwnUnpool(2),
    ).eval()
    modules, calls = list(model.modules()), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    assert replace_max_unpool(model) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    types = [nn.Sequential, MaxUnpool2d, nn.Sequential, MaxUnpool1d, nn.ReLU, MaxUnpool3d]
    assert [*map(type, modules)] == [*types, OwnUnpool]
    assert not any(module.training for module in modules)
    replaced = [model[0], model[1][0], model[2]]
    assert (replaced[1].stride, replaced[1].padding) == ((2,), (1,))
    model[0](torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64))
    assert calls == [1]
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
