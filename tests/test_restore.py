"""Models whose pools and unpools were replaced are what they were before, where it is undone."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES, same
from networks import NETWORKS, POOLS, UNPOOLS, results, returned_dtypes
from torch import Tensor, nn

import maxunpool_cuda
from maxunpool_cuda import (
    MaxPool2d,
    MaxUnpool2d,
    converted,
    replace_max_pooling,
    replace_max_unpool,
    restore_max_pooling,
)

THEIRS = POOLS + UNPOOLS
OURS = tuple(getattr(maxunpool_cuda, theirs.__name__) for theirs in THEIRS)

pytestmark = pytest.mark.usefixtures("as_torch_runs")


def state(model: nn.Module) -> list[Any]:
    """Of all its modules: which they are, their classes and their attributes, hooks among them."""

    def inside(value: Any) -> Any:
        return list(value.items()) if isinstance(value, dict) else value

    return [
        (id(module), type(module), {name: inside(value) for name, value in vars(module).items()})
        for module in model.modules()
    ]


def round_trip() -> nn.Sequential:
    """A pool with indices, one without, and an unpool."""
    return nn.Sequential(
        nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2), nn.MaxPool2d(3, 2)
    )


class RoundTrip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        values, indices = self.pool(x)
        out: Tensor = self.unpool(values, indices)
        return out


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    make, shape = NETWORKS[name]
    model, x = make().eval(), torch.randn(shape)
    next(iter(model.children())).train()
    for module in model.modules():
        if isinstance(module, THEIRS):
            module.note = "mine"  # type: ignore[assignment]
            module.register_forward_hook(lambda *_: None)
    before, expected = state(model), results(model, x)
    for dtype in INDEX_DTYPES:
        assert replace_max_pooling(model, dtype, plain_pools=True) == {}
        assert all(type(m) in OURS for m in model.modules() if isinstance(m, THEIRS))
        assert restore_max_pooling(model) is model
        assert state(model) == before
        with converted(model, dtype) as given:
            assert given is model
            assert set(returned_dtypes(model).values()) == {dtype}
        assert state(model) == before
    assert all(map(same, results(model, x), expected))


def test_what_was_never_converted(recwarn: pytest.WarningsRecorder) -> None:
    class Own(MaxPool2d):
        pass

    for model in (round_trip(), nn.Linear(1, 1), nn.MaxPool2d(2), Own(2, index_dtype=torch.uint8)):
        before = state(model)
        assert restore_max_pooling(model) is model
        assert state(model) == before
    assert not recwarn.list


def test_what_was_not_torchs_to_begin_with() -> None:
    """By hand, in part, or from the start: as torch.nn makes it."""
    model, other = round_trip(), round_trip()
    model[0].__class__ = MaxPool2d
    model[1] = MaxUnpool2d(2)
    model[2] = MaxPool2d(3, 2, index_dtype=torch.uint8)
    restore_max_pooling(model)
    for module, wanted in zip(model, other, strict=True):
        assert type(module) is type(wanted)
        assert vars(module) == vars(wanted)
        assert repr(module) == repr(wanted)
    replace_max_unpool(model, reduce="last")
    assert vars(restore_max_pooling(model)[1]) == vars(other[1])


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_reduce_of_none_of_torchs(reduce: Any) -> None:
    model = nn.Sequential(nn.ModuleDict({"up": MaxUnpool2d(2, reduce=reduce)}), *round_trip())
    replace_max_pooling(model)
    before = state(model)
    words = rf"^restore_max_pooling: expected .* but got \{{'0\.up': '{reduce}'\}}$"
    with pytest.raises(ValueError, match=words):
        restore_max_pooling(model)
    assert state(model) == before
    with converted(model):  # which has nothing to undo
        pass
    assert state(model) == before


def test_what_is_no_model() -> None:
    for function in (restore_max_pooling, lambda model: converted(model).__enter__()):
        with pytest.raises(TypeError, match=r"^(restore_max_pooling|converted): expected model"):
            function([nn.MaxPool2d(2)])


WRONG = [
    ({"index_dtype": torch.int16}, ValueError, "index_dtype to be torch.int64"),
    ({"index_dtype": "uint8"}, ValueError, "index_dtype to be torch.int64"),
]


@pytest.mark.parametrize(("wrong", "exception", "words"), WRONG)
def test_nothing_is_half_converted(
    wrong: dict[str, Any], exception: type[Exception], words: str
) -> None:
    model = RoundTrip()
    before = state(model)
    with (
        pytest.raises(exception, match=f"^converted: expected {words}"),
        converted(model, **wrong),
    ):
        pytest.fail("it is not entered")
    assert state(model) == before


def test_a_warning_where_there_is_nothing_to_convert() -> None:
    with (
        pytest.warns(UserWarning, match=r"^converted: .* but got Linear ") as warned,
        converted(nn.Linear(1, 1)),
    ):
        pass
    assert [warning.filename for warning in warned] == [__file__]


def test_only_what_was_done_is_undone() -> None:
    """Also after an exception, and whatever the body has done to the model."""
    model = nn.Sequential(*round_trip(), MaxPool2d(2, return_indices=True, index_dtype=torch.int32))
    model.append(MaxUnpool2d(3, reduce="sum"))
    before = state(model)

    def fails() -> None:
        with converted(model, plain_pools=True):
            assert {type(module) for module in model} <= set(OURS)
            assert model[3].index_dtype == torch.uint8
            added = [MaxPool2d(2), nn.MaxPool2d(2)]
            model.extend(added)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert [type(module) for module in model[5:]] == [MaxPool2d, nn.MaxPool2d]
    del model[5:]
    assert state(model) == before
    with converted(model):
        removed = model.pop(0)
        model[0].reduce = "sum"  # which was converted, and
        model[3].reduce = "mean"  # which was not
    assert type(removed) is nn.MaxPool2d
    assert model[3].reduce == "mean"
    model[3].reduce = "sum"
    model.insert(0, removed)
    assert state(model) == before


def test_conversion_inside_of_conversion() -> None:
    model = round_trip()
    before = state(model)
    with converted(model, torch.int32):
        outer = state(model)
        with converted(model, torch.uint8):
            assert model[0].index_dtype == torch.uint8
        assert state(model) == outer
        restore_max_pooling(model)
        assert state(model) == before
    assert state(model) == before
    replace_max_pooling(model, torch.int32)
    outer = state(model)
    with converted(model):
        pass
    assert state(model) == outer


def test_what_was_compiled_of_it() -> None:
    model, x = RoundTrip(), torch.rand(1, 1, 4, 4)
    model.pool.register_forward_hook(lambda _, __, out: seen.append(out[1].dtype))
    seen: list[torch.dtype] = []
    compiled, expected = torch.compile(model, backend="eager"), model(x)
    for _ in range(2):
        assert same(compiled(x), expected)
        with converted(model):
            assert same(compiled(x), expected)
    restore_max_pooling(model)
    assert seen == [torch.int64, *[torch.int64, torch.uint8] * 2]


def back(model: nn.Module) -> nn.Module:
    replace_max_pooling(model, plain_pools=True)
    return restore_max_pooling(model)


def after(model: nn.Module) -> nn.Module:
    with converted(model, plain_pools=True):
        pass
    return model


both_ways = pytest.mark.parametrize("way", [back, after])


@both_ways
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(way: Callable[[nn.Module], nn.Module]) -> None:
    """PyTorch cannot script any MaxUnpool, its own neither."""
    model, x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)), torch.rand(1, 4, 4)
    expected = model(x)
    with converted(model), pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(model)
    assert all(map(same, torch.jit.script(way(model))(x), expected))


@both_ways
def test_tools_that_look_up_the_class(way: Callable[[nn.Module], nn.Module]) -> None:
    """As captum's rules do."""
    rules = {nn.MaxPool2d: "pool", nn.MaxUnpool2d: "unpool"}
    model = RoundTrip()
    with converted(model):
        assert not any(type(module) in rules for module in model.modules())
    found = [rules[type(module)] for module in way(model).children()]  # type: ignore[index]
    assert found == ["pool", "unpool"]


def test_pickles_that_do_without_this_package(tmp_path: Path) -> None:
    models, x = (
        [way(nn.Sequential(nn.MaxPool2d(2), nn.ReLU())) for way in (back, after)],
        torch.rand(1, 4, 4),
    )
    torch.save((models, x, models[0](x)), tmp_path / "model.pt")
    code = f"""if True:
        import sys, torch
        sys.modules["maxunpool_cuda"] = None
        models, x, expected = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        assert all(torch.equal(model(x), expected) for model in models)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    with converted(models[0], plain_pools=True):
        assert b"maxunpool_cuda" in pickle.dumps(models[0])


@both_ways
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_legacy_onnx_exporter(way: Callable[[nn.Module], nn.Module]) -> None:
    """It takes torch.nn's pools, and knows nothing of this package's; nor of any unpooling."""

    def export(model: nn.Module) -> bytes:
        file = io.BytesIO()
        torch.onnx.export(model, (torch.rand(1, 1, 4, 4),), file, dynamo=False)
        return file.getvalue()

    model = nn.Sequential(nn.MaxPool2d(2, return_indices=True))
    expected = export(copy.deepcopy(model))
    with converted(model), pytest.raises(RuntimeError, match="maxunpool_cuda::max_pool"):
        export(model)
    assert export(way(model)) == expected
