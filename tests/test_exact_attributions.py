# SPDX-License-Identifier: BSD-3-Clause
"""What exact_attributions does to a model, seen without captum and shap."""

import contextlib
import copy
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import all_same
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import maxunpool_cuda
from maxunpool_cuda import exact_attributions


def state(model: nn.Module) -> list[Any]:
    """All that exact_attributions may change in a model."""
    hooks = [
        [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for module in model.modules()
    ]
    return [(type(m), {**vars(m)}, own) for m, own in zip(model.modules(), hooks, strict=True)]


def network(pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(inplace=True), pool, nn.Flatten())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(nn.MaxPool1d(5, 2), id="torch.nn"),
        pytest.param(maxunpool_cuda.MaxPool1d(5, 2), id="this package"),
        pytest.param(nn.AdaptiveMaxPool1d(4), id="adaptive"),
        pytest.param(maxunpool_cuda.AdaptiveMaxPool1d(4), id="this package, adaptive"),
    ],
)
def test_nothing_is_left_afterwards(pool: nn.Module, fails: bool) -> None:
    """The model has another state inside, the same output, and its old state afterwards."""
    model = network(pool)
    model[1].register_forward_pre_hook(lambda module, inputs: None)
    x = torch.randn(3, 1, 26)
    before, expected = state(model), model(x)
    error = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with error, exact_attributions(model) as same:
        assert same is model
        assert type(model[2]) is nn.MaxPool1d
        assert not model[1].inplace
        assert [len(module._forward_pre_hooks) for module in model[1:]][0::2] == [2, 1]
        assert torch.equal(model(x), expected)
        if fails:
            raise ZeroDivisionError
    assert state(model) == before
    assert repr(model) == repr(network(pool))
    assert torch.equal(model(x), expected)


def test_torchs_unpooling_adds_up_inside() -> None:
    """Also a model's own. Unpools of this package keep their ``reduce``."""
    pooled, indices = torch.tensor([[[2.0, 3]]]), torch.tensor([[[1, 1]]])
    unpools = nn.ModuleList([nn.MaxUnpool1d(2, 1), maxunpool_cuda.MaxUnpool1d(2, 1)])
    with exact_attributions(nn.Sequential(network(nn.MaxPool1d(3, 1)), unpools)):
        inside = nn.functional.max_unpool1d(pooled, indices, 2, 1)
        of_modules = [unpool(pooled, indices).tolist() for unpool in unpools]
    assert inside.tolist() == [[[0, 5, 0]]]
    assert of_modules == [[[[0, 5, 0]]], [[[0, 3, 0]]]]


@pytest.mark.parametrize("order", [(nn.ReLU, nn.MaxPool1d), (nn.MaxPool1d, nn.ReLU)])
def test_a_module_is_handed_another_tensor(order: tuple[type, type]) -> None:
    """Hooks that are registered inside see two tensors, whichever of the two comes first."""
    seen: list[Tensor] = []
    model = nn.Sequential(*(kind(*[2] * (kind is nn.MaxPool1d)) for kind in order))
    with exact_attributions(model):
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        model[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(torch.randn(1, 1, 4))
    assert seen[0] is not seen[1]
    assert torch.equal(*seen)


def test_modules_with_several_inputs_get_them() -> None:
    """As they are: attention takes a faster way if they are one tensor."""

    class Pair(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> bool:
            return one is other

    class OnlyByKeyword(nn.Module):
        def forward(self, *, x: Tensor) -> Tensor:
            return x

    model = nn.ModuleList([Pair(), OnlyByKeyword(), nn.MaxPool1d(2)])
    x = torch.zeros(2)
    with exact_attributions(model):
        assert model[0](x, x)
        assert model[0](x, other=x)
        assert model[0](one=x, other=x)
        assert model[1](x=x) is x


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("output_size", [1, 3, "mixed"])
@pytest.mark.parametrize("place", [nn, maxunpool_cuda])
def test_a_max_pool_stands_in(dims: int, output_size: Any, place: Any) -> None:
    """For an adaptive one, in whatever sizes the inputs come."""
    output_size = (2, None, 3)[:dims] if output_size == "mixed" else output_size
    pool = getattr(place, f"AdaptiveMaxPool{dims}d")(output_size, return_indices=True)
    with exact_attributions(nn.Sequential(pool)):
        assert "kernel_size=None" in repr(pool)
        assert type(pool) is getattr(nn, f"MaxPool{dims}d")
        inputs = [torch.randn(2, *[6 * n] * dims) for n in (1, 2)]
        inside = [pool(x) for x in inputs]
    assert all_same(inside, [pool(x) for x in inputs])


@pytest.mark.parametrize(("output_size", "wanted"), [((2, 3), [2, 3]), (14, [14, 14])])
def test_adaptive_windows_of_many_sizes_raise(output_size: Any, wanted: list[int]) -> None:
    message = (
        f"^exact_attributions: expected AdaptiveMaxPool2d .*{re.escape(f'got {wanted} for [7, 6]')}"
    )
    pool = nn.AdaptiveMaxPool2d(output_size)
    with exact_attributions(pool), pytest.raises(ValueError, match=message):
        pool(torch.randn(1, 7, 6))
    assert type(pool) is nn.AdaptiveMaxPool2d


class Subclass(nn.MaxPool2d):
    pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    SCRIPTED = torch.jit.script(nn.Sequential(nn.MaxPool2d(2)))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        pytest.param(nn.Sequential(nn.ReLU()), "none", id="no pool"),
        pytest.param(nn.FractionalMaxPool2d(2, 3), "{'': 'FractionalMaxPool2d'}", id="fractional"),
        pytest.param(
            nn.Sequential(nn.MaxPool2d(2), Subclass(2)), "{'1': 'Subclass'}", id="a subclass"
        ),
        pytest.param(SCRIPTED, "{'0': 'MaxPool2d'}", id="scripted"),
    ],
)
def test_pools_without_a_rule_are_named(model: nn.Module, named: str) -> None:
    with (
        pytest.warns(UserWarning, match="^exact_attributions: expected ") as warned,
        exact_attributions(model),
    ):
        pass
    (warning,) = warned
    assert f"but got {type(model).__name__} with {named}. captum" in str(warning.message)
    assert warning.filename == __file__


def test_models_are_modules() -> None:
    message = "^exact_attributions: expected model to be a Module but got function"
    with pytest.raises(TypeError, match=message), exact_attributions(lambda x: x):
        pass


def test_it_nests() -> None:
    model = network(maxunpool_cuda.MaxPool1d(3))
    before = state(model)
    with exact_attributions(model), exact_attributions(model):
        pass
    assert state(model) == before


class Network(nn.Module):
    """Modules with a ``forward`` that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


class Doubles(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.mul_(2).sum()


class Nests(nn.Module):
    """Works in place by a child, and returns what the child has changed or what it got itself."""

    def __init__(self, *, returns_input: bool) -> None:
        super().__init__()
        self.inplace, self.child, self.returns_input = True, nn.ReLU(inplace=True), returns_input

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        return x if self.returns_input else y


def forgets(net: Any, x: Tensor) -> Tensor:
    net.part(x)
    return x


def forgets_by_keyword(net: Any, x: Tensor) -> Tensor:
    net.part(input=x)
    return 2 * x


def reads_both(net: Any, x: Tensor) -> Tensor:
    return torch.cat([net.part(x).flatten(), x.flatten()])


def changes_the_result(net: Any, x: Tensor) -> Tensor:
    y = net.part(x)
    y += 1
    return y.sum() + x


def changes_the_input(net: Any, x: Tensor) -> Tensor:
    y = net.part(x)
    x[0] = 0
    return y


def changes_by_a_list(net: Any, x: Tensor) -> Tensor:
    y = net.part(x)
    torch._foreach_add_([y], 1)
    return y.sum() + x


def changes_out(net: Any, x: Tensor) -> Tensor:
    y = net.part(x)
    torch.mul(y, 2, out=y)
    return y.sum() + x


def forgets_and_copies(net: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    net.part(x)
    return x.reshape(-1)


# What two tensors hold that are one memory outside and two inside.
RESTS_ON_CHANGES_IN_PLACE = [
    pytest.param(forgets, nn.ReLU(inplace=True), id="a result that is dropped"),
    pytest.param(forgets_by_keyword, nn.ReLU(inplace=True), id="by keyword"),
    pytest.param(forgets_and_copies, nn.ReLU(inplace=True), id="a reshape that copies"),
    pytest.param(reads_both, nn.ReLU(inplace=True), id="a shortcut"),
    pytest.param(reads_both, nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), id="in a row"),
    pytest.param(reads_both, Nests(returns_input=False), id="a module with children"),
    pytest.param(reads_both, Nests(returns_input=True), id="a module that returns its input"),
    pytest.param(forgets_by_keyword, Doubles(), id="a module that writes to its input"),
    pytest.param(changes_the_result, nn.Flatten(), id="a view is changed"),
    pytest.param(changes_the_input, nn.Flatten(), id="what a view is of is changed"),
    pytest.param(changes_the_result, nn.Dropout(inplace=True), id="dropout changed nothing"),
    pytest.param(changes_by_a_list, nn.Identity(), id="a list is changed"),
    pytest.param(changes_out, nn.Identity(), id="out is changed"),
]


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.inference_mode], ids=["grad", "inference"]
)
@pytest.mark.parametrize(("forward", "part"), RESTS_ON_CHANGES_IN_PLACE)
def test_outputs_that_rest_on_changes_in_place_raise(
    forward: Callable[[Any, Tensor], Tensor], part: nn.Module, mode: Any
) -> None:
    """The error names the module. Nothing is left of the call, and the model is as before."""
    model = Network(lambda net, x: forward(net, x * 1), part=part, pool=nn.MaxPool1d(2)).eval()
    x = torch.randn(2, 3, 4)
    before = state(model)
    with mode():
        expected = model(x)
        with exact_attributions(model):
            message = rf"^exact_attributions: .*'part(\.\w+)?' \(({kinds(part)})\)"
            with pytest.raises(RuntimeError, match=message):
                model(x)
            assert _python_dispatch._get_current_dispatch_mode() is None
        assert torch.equal(model(x), expected)
    assert state(model) == before


def kinds(part: nn.Module) -> str:
    return "|".join(type(module).__name__ for module in part.modules())


@pytest.mark.parametrize(
    ("forward", "part"),
    [
        pytest.param(reads_both, nn.Dropout(inplace=True), id="dropout changes nothing"),
        pytest.param(
            lambda net, x: reads_both(net, x.abs()),
            nn.ReLU(inplace=True),
            id="ReLU changes nothing",
        ),
        pytest.param(lambda net, x: net.part(x), Nests(returns_input=False), id="with children"),
        pytest.param(
            lambda net, x: net.part(x).view(x.flatten().shape), nn.ReLU(inplace=True), id="shapes"
        ),
        pytest.param(lambda net, x: net.part(x).add_(1), nn.Flatten(), id="a view is changed"),
        pytest.param(
            lambda net, x: net.part(x)[1],
            Network(lambda net, x: (x, net.relu(x)), relu=nn.ReLU(inplace=True)),
            id="handed on",
        ),
    ],
)
def test_changes_in_place_that_nobody_reads(
    forward: Callable[[Any, Tensor], Tensor], part: nn.Module
) -> None:
    model = Network(lambda net, x: forward(net, x * 1), part=part, pool=nn.MaxPool1d(2)).eval()
    x = torch.randn(2, 3, 4)
    expected = model(x)
    with exact_attributions(model):
        assert torch.equal(model(x), expected)


def test_what_a_hook_of_the_model_returns_is_not_the_input() -> None:
    """But for the hook, a change of the result would change the input, as ReLU changes nothing."""
    part = nn.ReLU(inplace=True)
    part.register_forward_hook(lambda module, inputs, output: output.clone())
    model = Network(changes_the_result, part=part, pool=nn.MaxPool1d(2))
    x = torch.rand(2, 3, 4)
    expected = model(x)
    with exact_attributions(model):
        assert torch.equal(model(x), expected)


def residual(net: Any, x: Tensor) -> Tensor:
    out = net.second(net.relu(net.first(x)))
    out += x
    return net.last_relu(out)


def fire(net: Any, x: Tensor) -> Tensor:
    x = net.relu(net.squeeze(x))
    return torch.cat([net.relu_1(net.one(x)), net.relu_2(net.two(x))], 1)


def skips(net: Any, x: Tensor) -> Tensor:
    x = net.relu(net.conv(x))
    return torch.cat([x, net.up(net.pool(x))], 1)


def conv() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


def relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def usual_block(kind: str) -> nn.Module:
    """Part of a usual network, with modules that work in place."""
    pre_activated = {"norm": nn.BatchNorm2d(4), "relu": relu(), "conv": conv()}
    blocks = {
        "VGG": nn.Sequential(conv(), relu(), conv(), relu(), nn.MaxPool2d(3, 1), nn.Identity()),
        "ResNet": Network(residual, first=conv(), relu=relu(), second=conv(), last_relu=relu()),
        "pre-activation": Network(lambda n, x: x + n.conv(n.relu(n.norm(x))), **pre_activated),
        "DenseNet": Network(
            lambda n, x: torch.cat([x, n.conv(n.relu(n.norm(x)))], 1), **pre_activated
        ),
        "SqueezeNet": Network(
            fire, squeeze=conv(), relu=relu(), one=conv(), two=conv(), relu_1=relu(), relu_2=relu()
        ),
        "U-Net": Network(
            skips, conv=conv(), relu=relu(), pool=nn.MaxPool2d(2), up=nn.Upsample(None, 2)
        ),
        "by keyword": Network(
            lambda n, x: n.pool(input=n.relu(input=n.conv(x))),
            conv=conv(),
            relu=relu(),
            pool=nn.AdaptiveMaxPool2d(4),
        ),
    }
    return blocks[kind]


USUAL = ["VGG", "ResNet", "pre-activation", "DenseNet", "SqueezeNet", "U-Net", "by keyword"]


def usual_network(kind: str) -> nn.Sequential:
    """For inputs of shape (batch, 4, 8, 8)."""
    head = [nn.MaxPool2d(3, 1), nn.Flatten(), nn.Dropout(inplace=True), nn.LazyLinear(1)]
    net = nn.Sequential(conv(), usual_block(kind), *head).double()
    net(torch.randn(8, 4, 8, 8).double())  # statistics of the BatchNorm
    return net.eval()


@pytest.mark.parametrize("kind", USUAL)
def test_usual_networks_have_the_same_outputs(kind: str) -> None:
    net = usual_network(kind)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    expected = net(x)
    with exact_attributions(net):
        assert torch.equal(net(x), expected)
        assert _python_dispatch._get_current_dispatch_mode() is None


def test_each_call_is_watched_alone() -> None:
    """A model may change what it gets, and get it again."""
    model = Network(lambda net, x: net.relu(x), relu=relu(), pool=nn.MaxPool1d(2))
    x = torch.randn(2, 3)
    with exact_attributions(model):
        assert all_same([model(x), model(x)], [x.relu()] * 2)


def test_threads_are_watched_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins a call, then each ends its own."""
    # A flag of the process says that a mode is on. If the thread that begins first also ends first,
    # the flag stays set, and PyTorch 2.10 compiles nothing from then on.
    flag = "_is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(_python_dispatch, flag, False)
    barrier = threading.Barrier(2)

    def forward(net: Any, x: Tensor) -> Tensor:
        barrier.wait(60)
        x = net.relu(x)
        barrier.wait(60)
        return x

    model = Network(forward, relu=relu(), pool=nn.MaxPool1d(2))
    inputs = [*torch.randn(2, 3, 4)]
    results: list[Any] = [None, None]

    def call(place: int) -> None:
        results[place] = model(inputs[place])
        assert _python_dispatch._get_current_dispatch_mode() is None

    with exact_attributions(model):
        threads = [threading.Thread(target=call, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all_same(results, [x.relu() for x in inputs])


@pytest.mark.filterwarnings("error")  # PyTorch warns of a hook that fails, too
@pytest.mark.parametrize("in_a_hook", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_ends_the_watch(error: type[BaseException], in_a_hook: bool) -> None:
    """Of a forward, or of a hook that runs before those of the context."""

    def fails(net: Any, x: Any) -> Tensor:
        raise error

    model = nn.Sequential(nn.MaxPool1d(2), nn.Identity() if in_a_hook else Network(fails))
    if in_a_hook:
        model.register_forward_pre_hook(fails)
    before = state(model)
    with pytest.raises(error), exact_attributions(model):
        model(torch.randn(1, 1, 4))
    assert state(model) == before
    assert _python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda model, x: torch.vmap(model)(x[:, None])[:, 0], id="vmap"),
        pytest.param(lambda model, x: torch.export.export(model, (x,)).module()(x), id="export"),
        pytest.param(lambda model, x: torch.jit.trace(model, x)(x), id="trace"),
        pytest.param(lambda model, x: torch.compile(model, backend="eager")(x), id="compile"),
        pytest.param(lambda model, x: checkpoint(model, x, use_reentrant=False), id="checkpoint"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_makes_a_program_of_a_model_may_be_called_inside(call: Any) -> None:
    model = network(nn.MaxPool1d(3, 2)).eval()
    x = torch.randn(2, 1, 20)
    expected = model(x)
    with exact_attributions(model):
        torch.testing.assert_close(call(model, x), expected)


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied_inside(copies: Callable[[nn.Module], object]) -> None:
    """A copy would stay as the model is inside."""
    model = network(nn.AdaptiveMaxPool1d(4))
    with exact_attributions(model), pytest.raises(RuntimeError, match=r"^exact_attributions: "):
        copies(model)
    copies(model)


def test_contexts_are_left_in_reverse_order() -> None:
    """If they share a module. Otherwise an error is raised, and all is undone."""
    model = network(maxunpool_cuda.AdaptiveMaxPool1d(4))
    before, unpool = state(model), nn.functional.max_unpool1d
    for other, names_it in ((model, True), (nn.MaxPool1d(2), False)):
        first = exact_attributions(model)
        first.__enter__()
        refusal = pytest.raises(ValueError, match=r"^exact_attributions: .* Sequential ")
        with exact_attributions(other), refusal if names_it else contextlib.nullcontext():
            first.__exit__(None, None, None)
        assert state(model) == before
        assert nn.functional.max_unpool1d is unpool


def test_a_pool_that_is_converted_inside_is_named() -> None:
    """A stand-in is, for an adaptive pool, which would not be one afterwards."""
    model = network(nn.AdaptiveMaxPool1d(4))
    refusal = pytest.raises(ValueError, match=r"^exact_attributions: expected '2' .*\.MaxPool1d;")
    with refusal, exact_attributions(model):
        maxunpool_cuda.convert_max_pooling(model)
    assert type(model[2]) is nn.AdaptiveMaxPool1d
    assert not model[2]._forward_pre_hooks
