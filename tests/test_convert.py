"""Models whose pools and unpools are replaced do what they did."""

import copy
import pickle
import random
from collections.abc import Iterator

import pytest
import torch
from cases import INDEX_DTYPES, same
from networks import NETWORKS, PoolAndUnpool
from torch import Tensor, nn

from maxunpool_cuda import (
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
    replace_max_pooling,
    replace_max_unpool,
)

OURS = (MaxPool1d, MaxPool2d, MaxPool3d, MaxUnpool1d, MaxUnpool2d, MaxUnpool3d)
THEIRS = tuple(getattr(nn, ours.__name__) for ours in OURS)


@pytest.fixture(autouse=True)
def reproducible(poisoned_memory: None) -> Iterator[None]:
    """What torch.nn's modules and convolutions run under, to the same bits every time."""
    torch.use_deterministic_algorithms(False)  # under which torch.nn's raise
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more make small networks slower
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def returned_dtypes(model: nn.Module) -> list[torch.dtype]:
    """Filled, as the model runs, with the dtypes of the indices that its pools return."""
    dtypes: list[torch.dtype] = []
    for module in model.modules():
        if getattr(module, "return_indices", False):
            module.register_forward_hook(lambda _, __, out: dtypes.append(out[1].dtype))
    return dtypes


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
def test_networks(name: str, layout: str, device: str, rng: random.Random) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(rng.randrange(2**31))
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
    dtypes = returned_dtypes(model)
    expected = results(copy.deepcopy(model), x)
    assert set(dtypes) == {torch.int64}
    dtypes.clear()
    assert replace_max_pooling(model) == {}
    agree(results(model, x), expected, exact)
    assert set(dtypes) == {torch.uint8}
    assert {type(module) for module in model.modules()} & set(OURS)
    theirs = [module for module in model.modules() if type(module) in THEIRS]
    assert theirs == ([model.first_pool] if name == "ENet" else [])  # which returns no indices


@pytest.mark.parametrize("name", NETWORKS)
def test_training(name: str, rng: random.Random) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(rng.randrange(2**31))
    model = make()
    converted = copy.deepcopy(model)
    replace_max_pooling(converted)
    before = copy.deepcopy(model.state_dict())
    assert converted.state_dict().keys() == before.keys()
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9) for net in (model, converted)
    ]
    for _ in range(3):
        x = torch.randn(shape)
        losses = []
        for net, optimizer in zip((model, converted), optimizers, strict=True):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert same(*losses)
    after = model.state_dict()
    assert all(same(after[key], value) for key, value in converted.state_dict().items())
    assert not all(same(before[key], value) for key, value in model.named_parameters())
    converted.load_state_dict(before)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_overlapping_windows(dims: int, rng: random.Random) -> None:
    """torch.nn's output, and where it gives losers a gradient, that of unpooling int64 indices."""
    torch.manual_seed(rng.randrange(2**31))
    pool = THEIRS[dims - 1](3, 2, 1, return_indices=True)
    model = PoolAndUnpool(dims, pool, THEIRS[dims + 2](3, 2, 1))
    x = torch.randn(2, 3, *(40, 9, 6)[:dims])
    with_torch = results(model, x)
    dtypes = returned_dtypes(model)
    given: dict[torch.dtype, list[Tensor]] = {}
    for dtype in INDEX_DTYPES:
        assert replace_max_pooling(model, dtype) == {}
        given[dtype] = results(model, x)
    assert dtypes == list(INDEX_DTYPES)
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

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = self.stride = (kernel_size, kernel_size)
        self.padding = (0, 0)

    def forward(self, x: Tensor, indices: Tensor, output_size: torch.Size) -> Tensor:
        zeros = x.new_zeros(*x.shape[:2], output_size.numel())
        return zeros.scatter(2, indices.flatten(2), x.flatten(2)).view(*x.shape[:2], *output_size)


KEPT = {
    "large": (
        nn.MaxPool2d(17, 2, return_indices=True),
        nn.MaxUnpool2d(17, 2),
        "kernel_size (17, 17) has more than 256 elements",
    ),
    "dilated": (
        nn.MaxPool2d(3, 2, 1, (1, 2), return_indices=True),
        nn.MaxUnpool2d((3, 5), 2, 1),
        "dilation (1, 2) is not 1",
    ),
    "another kernel_size": (
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxUnpool2d((2, 3), 2),
        "no MaxUnpool2d has kernel_size (2, 2), stride (2, 2) and padding (0, 0)",
    ),
    "another stride": (
        nn.MaxPool2d((3, 2), (3, 2), return_indices=True),
        nn.MaxUnpool2d((3, 2), (3, 3)),
        "no MaxUnpool2d has kernel_size (3, 2), stride (3, 2) and padding (0, 0)",
    ),
    "another padding": (
        nn.MaxPool2d(3, 2, [1], return_indices=True),
        nn.MaxUnpool2d(3, 2),
        "no MaxUnpool2d has kernel_size (3, 3), stride (2, 2) and padding (1, 1)",
    ),
    "subclass": (
        nn.MaxPool2d(2, return_indices=True),
        OwnUnpool(2),
        "OwnUnpool, a subclass of MaxUnpool2d, may want int64 indices",
    ),
    "of another family": (
        nn.MaxPool2d(2, return_indices=True),
        Foreign(2),
        "Foreign, a subclass of _MaxUnpoolNd, may want int64 indices",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_pools_that_keep_their_indices(case: str, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(2**31))
    pool, unpool, reason = copy.deepcopy(KEPT[case])
    model = PoolAndUnpool(2, pool, unpool)
    # An unpool of another stride gives back few widths.
    x = torch.randn(2, 3, 22, 5 if case == "another stride" else 22)
    expected = model(x)
    dtypes = returned_dtypes(model)
    for _ in range(2):
        assert replace_max_pooling(model) == {"pool": reason}
        assert same(model(x), expected)
    assert dtypes == [torch.int64] * 2
    assert type(pool) is MaxPool2d
    own = type(unpool) in (OwnUnpool, Foreign)
    assert own or type(unpool) is MaxUnpool2d
    # Flat indices are as good in four bytes, for whoever is known to take them.
    assert (replace_max_pooling(model, torch.int32) == {}) == (not own)
    assert same(model(x), expected)
    assert dtypes[2] == (torch.int64 if own else torch.int32)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_unpool_of_the_same_rank_is_asked_for(dims: int) -> None:
    others = [unpool(2) for unpool in THEIRS[3:] if unpool is not THEIRS[dims + 2]]
    model = nn.Sequential(nn.Sequential(THEIRS[dims - 1](2, return_indices=True)), *others)
    for dtype in (torch.uint8, torch.int32):
        reasons = replace_max_pooling(model, dtype)
        assert reasons == {"0.0": f"there is no MaxUnpool{dims}d to take the indices"}
    assert replace_max_pooling(model, torch.int64) == {}
    assert model[0][0](torch.rand(3, *[2] * dims))[1].dtype == torch.int64
    model.append(THEIRS[dims + 2](2))
    assert replace_max_pooling(model) == {}
    assert model[0][0](torch.rand(3, *[2] * dims))[1].dtype == torch.uint8


def test_unpools_of_unknown_rank_concern_every_pool() -> None:
    pools = [pool(2, return_indices=True) for pool in THEIRS[:3]]
    model = nn.Sequential(*pools, *(unpool(2) for unpool in THEIRS[3:]), Foreign(2))
    for dtype in (torch.uint8, torch.int32):
        assert replace_max_pooling(model, dtype).keys() == {"0", "1", "2"}
    model[6] = OwnUnpool(2)
    assert replace_max_pooling(model).keys() == {"1"}


def test_subclasses_of_pools_are_left_alone() -> None:
    model = nn.Sequential(OwnPool(2, return_indices=True), nn.MaxUnpool2d(2))
    assert replace_max_pooling(model) == {"0": "OwnPool, a subclass, is left alone"}
    assert replace_max_pooling(model, torch.int64) == {}
    assert type(model[0]) is OwnPool
    assert model[0](torch.rand(1, 2, 2))[1].dtype == torch.int64


@pytest.mark.parametrize("window", [(3,), ((3, 3), None), ([3], [], (0,)), (3, (3, 3), [0, 0])])
def test_windows_are_the_same_however_they_are_written(window: tuple) -> None:
    pool = nn.MaxPool2d(*window, return_indices=True)
    if len(window) > 1:
        pool.stride = window[1]  # None, too, as a pickle of an old one may have it
    assert replace_max_pooling(nn.Sequential(pool, nn.MaxUnpool2d(3))) == {}
    assert pool.index_dtype == torch.uint8


def test_only_pools_of_that_window_change() -> None:
    names = {"a": 2, "b": 3, "c": 2}
    pools = {name: nn.MaxPool2d(size, return_indices=True) for name, size in names.items()}
    model = nn.ModuleDict({**pools, "unpool": nn.MaxUnpool2d(2)})
    assert replace_max_pooling(model).keys() == {"b"}
    x = torch.rand(1, 6, 6)
    dtypes = {name: model[name](x)[1].dtype for name in names}
    assert dtypes == {"a": torch.uint8, "b": torch.int64, "c": torch.uint8}


def test_offsets_need_no_output_size() -> None:
    """Of a row of five, pooled to two and unpooled to four: flat indices go astray."""
    model = nn.Sequential(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2))
    x = torch.zeros(1, 4, 5)
    x[0, 3, 0] = x[0, 0, 3] = 1
    astray = model[1](*model[0](x))
    replace_max_pooling(model)
    assert same(model[1](*model[0](x)), x[..., :4])
    assert not same(astray, x[..., :4])


def test_plain_pools_are_replaced_on_demand() -> None:
    """Without indices: the backward of ours keeps bytes."""
    pools = (nn.MaxPool1d(2), nn.MaxPool1d(2, return_indices=False), OwnPool(2))
    model = nn.Sequential(*pools, nn.MaxUnpool1d(2))
    assert replace_max_pooling(model) == {}
    assert [type(module) for module in model[:2]] == [nn.MaxPool1d] * 2
    assert type(model[3]) is MaxUnpool1d
    assert replace_max_pooling(model, torch.int32, plain_pools=True) == {}
    assert type(model[2]) is OwnPool
    model = model[:2]
    assert [type(module) for module in model] == [MaxPool1d] * 2
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.rand(1, 8, requires_grad=True))
    assert [t.dtype for t in kept] == [torch.uint8] * 2


@pytest.mark.parametrize("before", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("after", INDEX_DTYPES, ids=str)
def test_our_own_are_given_the_dtype(before: torch.dtype, after: torch.dtype) -> None:
    pool = MaxPool2d(2, return_indices=True, index_dtype=before)
    model = nn.Sequential(pool, MaxUnpool2d(2, reduce="mean"))
    assert replace_max_pooling(model, after) == {}
    assert pool(torch.rand(1, 4, 4))[1].dtype == after
    assert model[1].reduce == "mean"
    # One that nobody is seen to take the indices of keeps what it has.
    lonely = MaxPool2d(2, return_indices=True, index_dtype=before)
    reasons = replace_max_pooling(lonely, after)
    assert (reasons == {}) == (after in (before, torch.int64))
    assert lonely(torch.rand(1, 4, 4))[1].dtype == (before if reasons else after)


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
        pool, unpool = self.listed
        once = self.deep["unpool"](twice, outer, output_size=once.shape)
        assert pool(x)[1].dtype == inner.dtype
        return unpool(once, inner, output_size=x.shape)


def test_modules_stay_the_same_objects() -> None:
    model = Shared().eval()
    model.pool.note = "mine"
    x = torch.rand(2, 3, 11, 9)
    dtypes, expected, modules = returned_dtypes(model), model(x), list(model.modules())
    dtypes.clear()
    assert replace_max_pooling(model) == {}
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [type(module) for module in model.listed] == [MaxPool2d, MaxUnpool2d]
    assert model.again is model.pool
    assert model.pool.note == "mine"
    assert not any(module.training for module in model.modules())
    assert same(model(x), expected)
    assert dtypes == [torch.uint8] * 3
    model.pool = nn.MaxPool2d(3, return_indices=True)
    model.late = model.pool
    assert list(replace_max_pooling(model)) == ["pool"]  # once, by the first of its names


def test_a_model_that_is_a_pool() -> None:
    pool, unpool = nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)
    assert list(replace_max_pooling(pool)) == [""]
    assert type(pool) is MaxPool3d
    assert replace_max_pooling(unpool) == {}
    assert type(unpool) is MaxUnpool3d


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(copied: object) -> None:
    model, x = Shared(), torch.rand(2, 3, 12, 10)
    expected = model(x)
    replace_max_pooling(model)
    other = copied(model)
    dtypes = returned_dtypes(other)
    assert same(other(x), expected)
    assert set(dtypes) == {torch.uint8}
    assert repr(other) == repr(model)


def test_compiled_after(fresh_dynamo: None) -> None:
    make, shape = NETWORKS["ENet"]
    model, x = make().eval(), torch.randn(shape)
    expected = model(x)
    replace_max_pooling(model)
    dtypes = returned_dtypes(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected)
    assert set(dtypes) == {torch.uint8}


@pytest.mark.parametrize("how", ["model", "in place", "each"])
def test_compiled_before(how: str, fresh_dynamo: None) -> None:
    """What was compiled is compiled anew."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            pooled, indices = self[0](x)
            return self[1](pooled, indices, output_size=x.shape), indices

    model = Net(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2))
    compiled: nn.Module = model
    if how == "model":
        compiled = torch.compile(model, backend="eager")
    else:
        for module in [model] if how == "in place" else model:
            module.compile(backend="eager")
    x = torch.rand(1, 2, 5, 5)
    expected, indices = compiled(x)
    assert indices.dtype == torch.int64
    for dtype in (torch.uint8, torch.int32):
        assert replace_max_pooling(compiled, dtype) == {}
        out, indices = compiled(x)
        assert same(out, expected)
        assert indices.dtype == dtype


def test_what_is_no_model_or_index_dtype() -> None:
    model = nn.Sequential(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2))
    for dtype in (torch.int16, torch.float32, "uint8", None):
        with pytest.raises(
            ValueError,
            match=r"^replace_max_pooling: expected index_dtype to be torch.int64, .* but got ",
        ):
            replace_max_pooling(model, dtype)
    with pytest.raises(
        ValueError, match=r"^replace_max_unpool: expected reduce .* but got 'first'"
    ):
        replace_max_unpool(model, reduce="first")
    assert [type(module) for module in model] == [nn.MaxPool2d, nn.MaxUnpool2d]
    for function in (replace_max_pooling, replace_max_unpool):
        message = f"^{function.__name__}: expected model to be a Module but got list"
        with pytest.raises(TypeError, match=message):
            function([model])


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


def test_a_reduce_that_is_given_is_given_to_our_own() -> None:
    model = nn.Sequential(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2))
    assert replace_max_pooling(model) == {}
    assert model[1].reduce == "last"
    for reduce in ("sum", "last", "mean"):
        assert replace_max_unpool(model, reduce=reduce)[1].reduce == reduce
    replace_max_unpool(model.append(nn.MaxUnpool1d(2)))
    assert [model[1].reduce, model[2].reduce] == ["mean", "last"]
    assert replace_max_pooling(model) == {}
    assert model[1].reduce == "mean"


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, indices, 2)


NOTHING = {
    "functional": Functional,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.MaxPool2d(2, return_indices=True))),
    "subclasses": lambda: nn.Sequential(OwnPool(2, return_indices=True), OwnUnpool(2)),
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


def test_replace_max_unpool_leaves_subclasses_alone() -> None:
    class Own(nn.MaxUnpool2d):
        pass

    model = nn.Sequential(Own(2), MaxUnpool2d(2, reduce="mean"))
    replace_max_unpool(model)
    assert type(model[0]) is Own
    assert model[1].reduce == "mean"
    replace_max_unpool(model, reduce="sum")
    assert not hasattr(model[0], "reduce")
