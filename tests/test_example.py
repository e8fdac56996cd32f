"""replace_max_pooling with an example: pools whose offsets change the results keep flat indices."""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from cases import same
from networks import NETWORKS
from torch import Tensor, nn

from maxunpool_cuda import MaxPool2d, MaxUnpool2d, _trial, replace_max_pooling

CHANGES = "uint8 indices change what the model returns"


class Net(nn.Module):
    """Two stages; ``between`` is what happens to the indices on the way to the unpools."""

    def __init__(self, inner: Callable[[Tensor], Any], outer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(3)
        self.outer = nn.MaxPool2d(2, return_indices=True)
        self.inner = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.on_inner, self.on_outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        size = x.shape
        x, outer = self.outer(x)
        x = self.middle(x)
        inner_size = x.shape
        x, inner = self.inner(x)
        x = self.unpool(x, self.on_inner(inner), output_size=inner_size)
        return self.last(self.unpool(x, self.on_outer(outer), output_size=size))


def as_is(indices: Tensor) -> Tensor:
    return indices


def refuses(indices: Tensor) -> Tensor:
    if indices.dtype != torch.int64:
        raise TypeError(f"int64 wanted\nand not {indices.dtype}")
    return indices


def returned_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {
        name: getattr(module, "index_dtype", torch.int64)
        for name, module in model.named_modules()
        if getattr(module, "return_indices", False)
    }


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a trial may touch, in a form that compares."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if not isinstance(v, dict)}
        plain = {k: list(v) if isinstance(v, list) else v for k, v in attributes.items()}
        buffers = {k: (id(v), v.tolist()) for k, v in module.named_buffers(recurse=False)}
        state[name] = (type(module), plain, buffers)
    return state


@pytest.fixture(autouse=True)
def seeded(rng: random.Random, poisoned_memory: None) -> None:
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(rng.randrange(2**31))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_get_offsets(name: str, device: str) -> None:
    make, shape = NETWORKS[name]
    model, x = make().to(device), torch.randn(shape, device=device)
    assert replace_max_pooling(model, example=(x,)) == {}
    assert set(returned_dtypes(model).values()) == {torch.uint8}


@pytest.mark.parametrize(
    ("inner", "outer", "reasons"),
    [
        (Tensor.long, as_is, {"inner": CHANGES}),
        (as_is, Tensor.long, {"outer": CHANGES}),
        (Tensor.long, Tensor.long, {"inner": CHANGES, "outer": CHANGES}),
        (
            Tensor.long,
            refuses,
            {
                "inner": CHANGES,
                "outer": "with uint8 indices the model raises TypeError: int64 wanted",
            },
        ),
    ],
)
def test_only_pools_whose_offsets_change_nothing_get_them(
    inner: Callable[[Tensor], Any], outer: Callable[[Tensor], Any], reasons: dict[str, str]
) -> None:
    model, x = Net(inner, outer), torch.randn(2, 3, 12, 12)
    model.eval()
    expected = model(x)
    model.train()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert replace_max_pooling(model, example=(x,)) == reasons
    assert len(calls) == 3 + 2
    assert returned_dtypes(model) == {
        name: torch.int64 if name in reasons else torch.uint8 for name in ("outer", "inner")
    }
    assert type(model.inner) is type(model.outer) is MaxPool2d
    assert same(model.eval()(x), expected)


def test_without_an_example_they_are_wrong() -> None:
    model, x = Net(Tensor.long, as_is), torch.randn(2, 3, 12, 12)
    model.eval()
    expected = model(x)
    assert replace_max_pooling(model) == {}
    assert not same(model(x), expected)
    # What an earlier call did is checked as well.
    assert replace_max_pooling(model, example=x) == {"inner": CHANGES}
    assert same(model(x), expected)


def test_int32() -> None:
    model, x = Net(as_is, refuses), torch.randn(2, 3, 12, 12)
    reason = "with int32 indices the model raises TypeError: int64 wanted"
    assert replace_max_pooling(model, torch.int32, example=x) == {"outer": reason}
    assert returned_dtypes(model) == {"outer": torch.int64, "inner": torch.int32}
    # And those stay where offsets are no good.
    model.on_inner = Tensor.long
    assert replace_max_pooling(model, example=x).keys() == {"outer", "inner"}
    assert returned_dtypes(model) == {"outer": torch.int64, "inner": torch.int32}
    assert replace_max_pooling(model, torch.int64, example=x) == {}
    assert set(returned_dtypes(model).values()) == {torch.int64}


def test_offsets_that_right_an_output_size_are_a_change() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.unpool(*self.pool(x))

    x = torch.rand(1, 4, 5)
    x[0, 3] = 0  # so that none of the flat indices is beyond 4x4
    x[0, 2, :4] = 1
    assert replace_max_pooling(Silent(), example=x) == {"pool": CHANGES}
    assert replace_max_pooling(Silent(), example=x[..., :4]) == {}


@dataclasses.dataclass
class Output:
    scores: Tensor
    extra: Any = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("scores",)
    scores: Any


class Holder:
    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda t: (None, "name", [t]),
    "dict": lambda t: {"out": {"deep": t}},
    "dataclass": lambda t: Output(t * 0, extra=[t]),
    "slots": Slotted,
    "object": Holder,
    "array": lambda t: [t.numpy()],
    "number": lambda t: t.double().square().sum().item(),
    "sparse": Tensor.to_sparse,
    "complex": lambda t: torch.complex(t, t).conj(),
    "NaN": lambda t: (t / 0 * 0, t, float("nan"), numpy.float64("nan")),
    "view": lambda t: t.mT[:, ::2],
}


@pytest.mark.parametrize("how", WRAPPED)
def test_whatever_the_model_returns(how: str) -> None:
    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return WRAPPED[how](super().forward(x))

    x = torch.randn(2, 3, 12, 12)
    assert replace_max_pooling(Wrapped(as_is, as_is), example=(x,)) == {}
    assert replace_max_pooling(Wrapped(as_is, Tensor.long), example=(x,)) == {"outer": CHANGES}


def test_a_result_that_is_kept_in_a_buffer() -> None:
    class Kept(Net):
        def __init__(self, on_outer: Callable[[Tensor], Any]) -> None:
            super().__init__(as_is, on_outer)
            self.register_buffer("result", torch.zeros(2, 3, 12, 12))

        def forward(self, x: Tensor) -> Tensor:
            return self.result.copy_(super().forward(x))

    x = torch.randn(2, 3, 12, 12)
    assert replace_max_pooling(Kept(as_is), example=x) == {}
    model = Kept(Tensor.long)
    assert replace_max_pooling(model, example=x) == {"outer": CHANGES}
    assert not model.result.any()


def test_nans_are_equal_and_zeros_are_not() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0, -(2**31)], dtype=torch.int32)
    nan, other_nan, zero, negative_zero = bits.view(torch.float32).split(1)
    assert _trial.same([torch.cat((nan, zero))], [torch.cat((other_nan, zero))])
    assert not _trial.same([torch.cat((nan, zero))], [torch.cat((nan, negative_zero))])
    assert not _trial.same([nan], [zero])
    assert not _trial.same([zero], [zero.double()])
    assert not _trial.same([zero], [])


def test_each_pool_is_checked_with_those_before_it() -> None:
    model = Net(as_is, as_is)
    seen: list[torch.dtype] = []
    model.on_inner = lambda indices: seen.append(indices.dtype) or indices
    model.on_outer = lambda indices: indices.long() if seen[-1] == torch.uint8 else indices
    x = torch.randn(2, 3, 12, 12)
    assert replace_max_pooling(model, example=x) == {"inner": CHANGES}
    assert returned_dtypes(model) == {"outer": torch.uint8, "inner": torch.int64}


def test_indices_that_leave_the_model_stay_flat() -> None:
    class Encoder(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.outer(x)[1]

    x = torch.randn(2, 3, 12, 12)
    for dtype in ("uint8", "int32"):
        model = Encoder(as_is, as_is)
        reasons = replace_max_pooling(model, getattr(torch, dtype), example=(x,))
        assert reasons == {"outer": f"{dtype} indices change what the model returns"}


class Restless(Net):
    """Changes whatever it can, also in eval mode, and its input."""

    def __init__(self, on_outer: Callable[[Tensor], Any]) -> None:
        super().__init__(as_is, on_outer)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((3, 1, 1), float("nan")))
        self.register_buffer("replaced", torch.zeros(2))
        self.calls, self.log, self.recent = 0, ["first"], deque([1], 3)
        self.memory = torch.ones(3)
        self.frozen = nn.Dropout().eval()

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
        return super().forward(x + noise)


@pytest.mark.parametrize("fails", ["", "offsets", "always"])
def test_the_model_is_left_as_it_was(fails: str, device: str) -> None:
    def on_outer(indices: Tensor) -> Tensor:
        if fails == "always" or (fails and indices.dtype == torch.uint8):
            raise KeyError(fails)
        return indices

    model = Restless(on_outer).to(device)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    x = torch.randn(2, 3, 12, 12, device=device)
    before, parameters, random_state = (
        state_of(model),
        list(model.parameters()),
        torch.get_rng_state(),
    )
    values = [parameter.clone() for parameter in parameters]
    kept = x.clone()
    if fails == "always":
        message = r"^replace_max_pooling: expected an example that .* but got KeyError: 'always'$"
        with pytest.raises(ValueError, match=message) as caught:
            replace_max_pooling(model, example=(x,))
        assert isinstance(caught.value.__cause__, KeyError)
    else:
        reasons = replace_max_pooling(model, example=(x,))
        assert list(reasons) == (["outer"] if fails else [])
        assert type(model.unpool) is MaxUnpool2d
        for pool in (model.inner, model.outer):
            assert type(pool) is MaxPool2d
            pool.__class__ = nn.MaxPool2d
            del pool.index_dtype
        model.unpool.__class__ = nn.MaxUnpool2d
    after = state_of(model)
    assert str(after) == str(before)  # for NaNs
    assert same(x, kept)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(map(same, parameters, values))
    assert same(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert model.last.weight.grad is None
    assert model.training
    assert not model.frozen.training


def test_a_model_of_chance() -> None:
    """What PyTorch's generator gives is given again; other chance cannot be checked."""

    class Noisy(Net):
        def __init__(self, noise: Callable[[Tensor], Any]) -> None:
            super().__init__(as_is, as_is)
            self.noise = noise

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.noise(x)

    x = torch.randn(2, 3, 12, 12)
    assert replace_max_pooling(Noisy(torch.rand_like), example=x) == {}
    numbers = iter(range(9))
    model = Noisy(lambda _: next(numbers))
    reason = "two runs of the model differ, so uint8 indices cannot be checked"
    assert replace_max_pooling(model, example=x) == {"outer": reason, "inner": reason}
    assert type(model.outer) is MaxPool2d
    assert set(returned_dtypes(model).values()) == {torch.int64}


def test_arguments() -> None:
    class Named(Net):
        def forward(self, inputs: dict[str, Tensor], *more: Tensor, scale: float = 1) -> Tensor:
            return super().forward(inputs["x"] * scale + sum(more))

    x = torch.randn(2, 3, 12, 12)
    assert replace_max_pooling(Named(as_is, as_is), example=({"x": x}, x, x)) == {}
    for wrong in ([x], {"x": x}, "x", 3):
        model = Net(as_is, as_is)
        message = (
            "^replace_max_pooling: expected example to be a tuple of the model's positional "
            f"arguments, or a Tensor, but got {type(wrong).__name__}$"
        )
        with pytest.raises(TypeError, match=message):
            replace_max_pooling(model, example=wrong)
        assert type(model.outer) is nn.MaxPool2d
    model = Net(as_is, as_is)
    before = str(state_of(model))
    for arguments, error in (
        ((), "TypeError"),
        ((x, x), "TypeError"),
        ((x[:, :1],), "RuntimeError"),
    ):
        with pytest.raises(ValueError, match=f"expected an example that .* but got {error}: "):
            replace_max_pooling(model, example=arguments)
        assert str(state_of(model)) == before


def test_a_model_that_only_torch_nn_runs() -> None:
    """A padding that is negative, say: the error says whose modules do not take it."""
    model = Net(as_is, as_is)
    model.unpool = nn.MaxUnpool2d(2, 2, -1)
    model.forward = lambda x: model.unpool(*model.outer(x))
    x = torch.zeros(1, 3, 4, 4)
    model(x)
    before = str(state_of(model))
    with pytest.raises(ValueError, match="expected a model that runs with this package's modules"):
        replace_max_pooling(model, example=x)
    assert str(state_of(model)) == before


def test_lazy_models_are_refused() -> None:
    model = nn.Sequential(nn.LazyConv2d(3, 1), nn.MaxPool2d(2, return_indices=True))
    with pytest.raises(ValueError, match="but got one with uninitialized parameters"):
        replace_max_pooling(model, example=torch.rand(1, 3, 4, 4))
    assert type(model[1]) is nn.MaxPool2d


@pytest.mark.parametrize("how", ["model", "in place", "parallel"])
def test_wrapped_models(how: str) -> None:
    torch._dynamo.reset()
    model, x = Net(Tensor.long, as_is).eval(), torch.randn(2, 3, 12, 12)
    wrapped: nn.Module = model
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compilations.append(1)
        return graph.forward

    if how == "model":
        wrapped = torch.compile(model, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)
    else:
        wrapped = nn.DataParallel(model)
    expected = wrapped(x)
    before = len(compilations)
    assert list(replace_max_pooling(wrapped, example=x).values()) == [CHANGES]
    assert len(compilations) == before
    assert returned_dtypes(model) == {"outer": torch.uint8, "inner": torch.int64}
    assert same(wrapped(x), expected)
    assert (len(compilations) > before) == (how != "parallel")
    torch._dynamo.reset()


def test_a_scripted_part_is_left_as_it_was() -> None:
    model = Net(as_is, as_is)
    model.first = torch.jit.script(
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout())
    )
    x = torch.randn(2, 3, 12, 12)
    mean = model.first[1].running_mean.clone()
    assert replace_max_pooling(model, example=x) == {}
    assert model.first.training
    assert model.first[1].training
    assert same(model.first[1].running_mean, mean)
    model(x)
    assert not same(model.first[1].running_mean, mean)
