"""replace_max_pooling with an example: pools whose offsets change the results keep flat indices."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from cases import same
from networks import PoolAndUnpool, returned_dtypes, unchanged
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as leaves

from maxunpool_cuda import MaxPool2d, MaxUnpool2d, replace_max_pooling

OUTER, INNER = "pool", "middle.pool"
CHANGES = "uint8 indices change what the model returns"


@pytest.fixture(autouse=True)
def without_determinism(poisoned_memory: None) -> None:
    """Under which torch.nn's modules raise."""
    torch.use_deterministic_algorithms(False)


class Net(PoolAndUnpool):
    """Two stages; ``inner`` and ``outer`` are what happens to indices on the way to the unpools."""

    def __init__(
        self,
        inner: Callable[[Tensor], Any] = unchanged,
        outer: Callable[[Tensor], Any] = unchanged,
        returned: Callable[[Any, Tensor], Any] = lambda _, result: result,
    ) -> None:
        super().__init__(2, 2, middle=PoolAndUnpool(2, 2, handed_on=inner), handed_on=outer)
        self.norm = nn.BatchNorm2d(3)
        self.returned = returned
        self.register_buffer("result", torch.zeros(2, 3, 12, 12))

    def forward(self, x: Tensor) -> Any:
        return self.returned(self, super().forward(self.norm(x)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 12, 12)


def refuses(indices: Tensor) -> Tensor:
    if indices.dtype != torch.int64:
        raise TypeError(f"int64 wanted\nand not {indices.dtype}")
    return indices


RAISES = "with {} indices the model raises TypeError: int64 wanted"
RETURNED = {"returned": lambda model, result: (result, model.pool(result)[1])}


@pytest.mark.parametrize(
    ("dtype", "parts", "reasons"),
    [
        (torch.uint8, {"inner": Tensor.long}, {INNER: CHANGES}),
        (torch.uint8, {"outer": Tensor.long}, {OUTER: CHANGES}),
        (
            torch.uint8,
            {"inner": Tensor.long, "outer": Tensor.long},
            {OUTER: CHANGES, INNER: CHANGES},
        ),
        (
            torch.uint8,
            {"inner": Tensor.long, "outer": refuses},
            {OUTER: RAISES.format("uint8"), INNER: CHANGES},
        ),
        (torch.int32, {"outer": refuses}, {OUTER: RAISES.format("int32")}),
        (torch.uint8, RETURNED, {OUTER: CHANGES}),
        (torch.int32, RETURNED, {OUTER: CHANGES.replace("uint8", "int32")}),
    ],
)
def test_only_pools_whose_indices_change_nothing_return_them(
    dtype: torch.dtype, parts: dict[str, Callable], reasons: dict[str, str], x: Tensor
) -> None:
    model = Net(**parts).eval()
    expected = model(x)
    model.train()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert replace_max_pooling(model, dtype, example=(x,)) == reasons
    assert len(calls) == 3 + 2
    dtypes = {name: torch.int64 if name in reasons else dtype for name in (OUTER, INNER)}
    assert returned_dtypes(model) == dtypes
    assert type(model.pool) is type(model.middle.pool) is MaxPool2d
    assert all(map(same, leaves(model.eval()(x)), leaves(expected)))


def test_what_an_earlier_call_did_is_checked(x: Tensor) -> None:
    model = Net(inner=Tensor.long).eval()
    expected = model(x)
    assert replace_max_pooling(model) == {}
    assert not same(model(x), expected)
    assert replace_max_pooling(model, example=x) == {INNER: CHANGES}
    assert same(model(x), expected)
    # int32 indices stay where offsets are no good.
    assert replace_max_pooling(model, torch.int32, example=x) == {}
    assert replace_max_pooling(model, example=x) == {INNER: CHANGES}
    assert returned_dtypes(model) == {OUTER: torch.uint8, INNER: torch.int32}
    assert replace_max_pooling(model, torch.int64, example=x) == {}
    assert set(returned_dtypes(model).values()) == {torch.int64}


def test_offsets_that_right_an_output_size_are_a_change() -> None:
    """Of a row of five, pooled to two and unpooled to four: flat indices go astray."""

    class Silent(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](*self[0](x))

    model = Silent(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2))
    x = torch.zeros(1, 4, 5)  # its last row so that none of the flat indices is beyond 4x4
    x[0, 2, :4] = x[0, 0, 3] = 1
    astray = model(x)
    for example, reasons in ((x, {"0": CHANGES}), (x[..., :4], {})):
        assert replace_max_pooling(copy.deepcopy(model), example=example) == reasons
    assert replace_max_pooling(model) == {}
    expected = nn.MaxUnpool2d(2)(*nn.MaxPool2d(2, return_indices=True)(x[..., :4]))
    assert same(model(x), expected)
    assert not same(astray, expected)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("scores",)
    scores: Any


class Holder:
    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


WRAPPED: dict[str, Callable[[Any, Tensor], Any]] = {
    "tuple": lambda _, t: (None, "name", [t]),
    "dict": lambda _, t: {"out": {"deep": t}},
    "dataclass": lambda _, t: Slotted([t * 0, t]),
    "object": lambda _, t: Holder(t),
    "array": lambda _, t: [t.numpy()],
    "number": lambda _, t: t.double().square().sum().item(),
    "sparse": lambda _, t: t.to_sparse(),
    "complex": lambda _, t: torch.complex(t, t).conj(),
    "NaN": lambda _, t: (t / 0 * 0, t, float("nan"), numpy.float64("nan")),
    "view": lambda _, t: t.mT[:, ::2],
    "buffer": lambda model, t: model.result.copy_(t),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_whatever_the_model_returns(how: str, x: Tensor) -> None:
    assert replace_max_pooling(Net(returned=WRAPPED[how]), example=(x,)) == {}
    model = Net(outer=Tensor.long, returned=WRAPPED[how])
    assert replace_max_pooling(model, example=(x,)) == {OUTER: CHANGES}
    assert not model.result.any()


NAN, OTHER_NAN, ZERO = torch.tensor([0x7FC00000, 0x7FC00001, 0]).int().view(torch.float32)


@pytest.mark.parametrize(
    ("flat", "offsets", "equal"),
    [
        (torch.stack((NAN, ZERO)), torch.stack((OTHER_NAN, ZERO)), True),
        (torch.stack((NAN, ZERO)), torch.stack((NAN, -ZERO)), False),
        (ZERO, NAN, False),
        (ZERO, ZERO.double(), False),
        ([ZERO], [ZERO, ZERO], False),
    ],
)
def test_what_is_equal(flat: Any, offsets: Any, equal: bool, x: Tensor) -> None:
    seen: list[torch.dtype] = []
    model = Net(
        outer=lambda indices: seen.append(indices.dtype) or indices,
        returned=lambda *_: flat if seen[-1] == torch.int64 else offsets,
    )
    assert replace_max_pooling(model, example=x) == ({} if equal else {OUTER: CHANGES})


def test_each_pool_is_checked_with_those_before_it(x: Tensor) -> None:
    seen: list[torch.dtype] = []
    model = Net(
        inner=lambda indices: seen.append(indices.dtype) or indices,
        outer=lambda indices: indices.long() if seen[-1] == torch.uint8 else indices,
    )
    assert replace_max_pooling(model, example=x) == {INNER: CHANGES}
    assert returned_dtypes(model) == {OUTER: torch.uint8, INNER: torch.int64}


class Restless(Net):
    """Changes whatever it can, also in eval mode, and its input."""

    def __init__(self, outer: Callable[[Tensor], Any]) -> None:
        super().__init__(outer=outer)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((3, 1, 1), float("nan")))
        self.register_buffer("replaced", torch.zeros(2))
        self.calls, self.log, self.recent = 0, ["first"], deque([1], 3)
        self.memory = torch.ones(3)
        self.frozen = nn.Dropout().eval()
        self.scripted = torch.jit.script(nn.Sequential(nn.BatchNorm2d(3), nn.Dropout()))

    def forward(self, x: Tensor) -> Tensor:
        assert not any(module.training for module in self.modules())
        assert not torch.is_grad_enabled()
        self.calls += 1
        self.steps += 1
        self.log.append("again")
        self.recent.append(2)
        self.memory.mul_(2)
        self.late = x.mul_(2)
        self.mean.copy_(x.mean((0, 2, 3))[:, None, None])
        self.replaced = self.replaced + 1
        noise = torch.rand_like(x) * self.calls * self.steps * self.memory[0] * len(self.log)
        return super().forward(self.scripted(x) + noise)


def state_of(model: nn.Module) -> str:
    """All that a trial may touch, in a form that compares, NaNs too."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if not isinstance(v, dict)}
        plain = {k: list(v) if isinstance(v, list) else v for k, v in attributes.items()}
        tensors = (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))
        values = {k: (id(v), v.tolist(), v.grad) for k, v in tensors}
        state[name] = (type(module), module.training, plain, values)
    return str(state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize("fails", ["", "offsets", "always"])
def test_the_model_is_left_as_it_was(fails: str, device: str, x: Tensor) -> None:
    def outer(indices: Tensor) -> Tensor:
        if fails == "always" or (fails and indices.dtype == torch.uint8):
            raise KeyError(fails)
        return indices

    model, x = Restless(outer).to(device), x.to(device)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before, random_state, kept = state_of(model), torch.get_rng_state(), x.clone()
    if fails == "always":
        message = r"^replace_max_pooling: expected an example that .* but got KeyError: 'always'$"
        with pytest.raises(ValueError, match=message) as caught:
            replace_max_pooling(model, example=(x,))
        assert isinstance(caught.value.__cause__, KeyError)
    else:
        reasons = replace_max_pooling(model, example=(x,))
        assert list(reasons) == ([OUTER] if fails else [])
        for stage in (model, model.middle):
            assert (type(stage.pool), type(stage.unpool)) == (MaxPool2d, MaxUnpool2d)
            stage.pool.__class__, stage.unpool.__class__ = nn.MaxPool2d, nn.MaxUnpool2d
            vars(stage.pool).pop("index_dtype", None)
    assert state_of(model) == before
    assert same(x, kept)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_model_of_chance(x: Tensor) -> None:
    """What PyTorch's generator gives is given again; other chance cannot be checked."""
    assert replace_max_pooling(Net(returned=lambda _, t: t + torch.rand_like(t)), example=x) == {}
    numbers = iter(range(9))
    model = Net(returned=lambda _, t: t + next(numbers))
    reason = "two runs of the model differ, so uint8 indices cannot be checked"
    assert replace_max_pooling(model, example=x) == {OUTER: reason, INNER: reason}
    assert type(model.pool) is MaxPool2d
    assert set(returned_dtypes(model).values()) == {torch.int64}


def test_arguments(x: Tensor) -> None:
    class Named(Net):
        def forward(self, inputs: dict[str, Tensor], *more: Tensor, scale: float = 1) -> Tensor:
            return super().forward(inputs["x"] * scale + sum(more))

    assert replace_max_pooling(Named(), example=({"x": x}, x, x)) == {}


def test_a_model_that_does_not_run(x: Tensor) -> None:
    """On the example; or with this package's modules, which take no negative padding, say."""
    runs, torchs = Net(), Net()
    torchs.unpool = nn.MaxUnpool2d(2, 2, -1)
    torchs.forward = lambda x: torchs.unpool(*torchs.pool(x))
    torchs(x[..., :4, :4] * 0)
    wrong = "expected an example that .* but got {}: "
    for model, example, words in (
        (runs, (), wrong.format("TypeError")),
        (runs, (x, x), wrong.format("TypeError")),
        (runs, (x[:, :1],), wrong.format("RuntimeError")),
        (torchs, x[..., :4, :4] * 0, "expected a model that runs with this package's modules"),
    ):
        before = state_of(model)
        with pytest.raises(ValueError, match=words):
            replace_max_pooling(model, example=example)
        assert state_of(model) == before
    lazy = nn.Sequential(runs, nn.LazyConv2d(3, 1))
    with pytest.raises(ValueError, match="but got one with uninitialized parameters"):
        replace_max_pooling(lazy, example=x)
    assert type(runs.pool) is nn.MaxPool2d


@pytest.mark.parametrize("how", ["model", "in place", "its pool", "parallel"])
def test_wrapped_models(how: str, x: Tensor) -> None:
    """The trial compiles nothing; what was compiled is compiled anew."""
    model = Net(inner=Tensor.long).eval()
    wrapped: nn.Module = model
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compilations.append(1)
        return graph.forward

    if how == "model":
        wrapped = torch.compile(model, backend=backend)
    elif how == "parallel":
        wrapped = nn.DataParallel(model)
    else:
        (model if how == "in place" else model.pool).compile(backend=backend)
    expected = wrapped(x)
    for dtype, reasons in ((torch.uint8, [CHANGES]), (torch.int32, [])):
        before = len(compilations)
        assert list(replace_max_pooling(wrapped, dtype, example=x).values()) == reasons
        assert len(compilations) == before
        assert same(wrapped(x), expected)
        assert (len(compilations) > before) == (how != "parallel")
        assert returned_dtypes(model) == {OUTER: dtype, INNER: torch.int64 if reasons else dtype}
