"""The rules for arguments: what is remembered of them, and who sees a call that they were for."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import maxunpool_cuda.functional as F
from maxunpool_cuda import _C, MaxUnpool2d, _arguments, _ops

X, INDICES = torch.rand(1, 1, 2, 2), torch.tensor([[[[0, 3], [8, 11]]]])
IMAGE = torch.rand(1, 1, 8, 8)


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    _arguments._answer.cache_clear()
    yield
    _arguments._answer.cache_clear()


def refuse(*_: object) -> None:
    raise AssertionError("called")


def test_eager_calls_do_without_torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "max_unpool", refuse)
    monkeypatch.setattr(_ops, "max_pool", refuse)
    for size in (None, (4, 4), (1, 1, 4, 4), torch.Size((4, 4))):
        for module in (MaxUnpool2d(2), MaxUnpool2d(2, reduce="sum")):
            assert (
                module(X.clone().requires_grad_(), INDICES.int(), size).flatten()[INDICES].equal(X)
            )
    for window in ((2,), ((2, 3), (2, 1)), (torch.Size((3, 3)), None, 1, 1), (8, 1, 4, 1, True)):
        assert len(F.max_pool2d(IMAGE, *window, return_indices=True)) == 2
        assert F.max_pool2d(IMAGE.clone().requires_grad_(), *window).requires_grad
    with pytest.raises(AssertionError, match="called"):
        F.max_pool2d(IMAGE, [2, 2])


def test_calls_are_remembered_once() -> None:
    for _ in range(3):
        F.max_unpool2d(X, INDICES, 2)
        F.max_pool2d(IMAGE, (2, 2))
    info = _arguments._answer.cache_info()
    assert (info.misses, info.hits, info.currsize) == (2, 4, 2)
    assert info.maxsize is not None


@pytest.mark.parametrize("wrong", [2.0, (2.0, 2.0), (2, 2.0), np.float64(2), (np.float32(2), 2)])
def test_floats_that_equal_ints_are_refused(wrong: Any) -> None:
    calls: list[tuple[Callable[[Any], Tensor], Any, Any]] = [
        (lambda size: F.max_unpool2d(X, INDICES, size), 2, wrong),
        (lambda size: F.max_unpool2d(X, INDICES, 2, size), (2, 2), wrong),
        (lambda size: F.max_unpool2d(X, INDICES, 2, output_size=size), (4, 5), (4.0, 5.0)),
        (lambda size: F.max_pool2d(IMAGE, size), (2, 2), wrong),
        (lambda size: F.max_pool2d(IMAGE, 2, 2, 0, size), 2, wrong),
        (lambda ceil_mode: F.max_pool2d(IMAGE, 2, 2, 0, 1, ceil_mode), False, 0),
    ]
    for call, right, alike in calls:
        call(right)
        with pytest.raises(TypeError, match=r"to be 64-bit ints but got|must be bool, not int"):
            call(alike)


class Index:
    """An int, as Python has it, that changes."""

    value = 2

    def __index__(self) -> int:
        return self.value


def test_what_may_change_is_not_remembered() -> None:
    kernel, tensor, array, index = [2, 2], torch.tensor(2), np.array([2, 2]), Index()
    given = (kernel, tensor, (tensor, 2), array, index, (index, 2), iter((4, 4)))
    for each in given[:-1]:
        assert F.max_unpool2d(X, INDICES, each, 2).shape[2:] == (4, 4)
        assert F.max_pool2d(IMAGE, each, 2).shape[2:] == (4, 4)
    assert F.max_unpool2d(X, INDICES, 2, output_size=given[-1]).shape[2:] == (4, 4)
    kernel[0], index.value = 4, 4
    tensor.fill_(4)
    array[0] = 4
    for each in given[:-1]:
        assert F.max_unpool2d(X, INDICES, each, 2).shape[2] == 6
        assert F.max_pool2d(IMAGE, each, 2).shape[2] == 3
    assert _arguments._answer.cache_info().currsize == 0


def test_the_entry_takes_tensors_and_ints() -> None:
    window = ((2, 2), (2, 2), (0, 0))
    ready = _C.UnpoolArguments((4, 4), *window, "last")
    assert same(_C.max_unpool(X, INDICES, ready), F.max_unpool2d(X, INDICES, 2))
    for arguments in ((X, None, ready), (X.tolist(), INDICES, ready), (X, INDICES, window)):
        with pytest.raises(TypeError):
            _C.max_unpool(*arguments)  # type: ignore[arg-type]  # on purpose
    for sizes in ((4.0, 4.0), 4):
        with pytest.raises(TypeError):
            _C.UnpoolArguments(sizes, *window, "last")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError):
        _C.max_pool(None, _C.PoolArguments(*window, (1, 1), False, torch.int64), True)


# Observers. They are told of a call alike, whether its arguments are remembered or not.


def round_trip(x: Tensor) -> Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, 2, output_size=x.shape)


class Operators(TorchDispatchMode):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.seen.append((operator, *(a for a in args if not isinstance(a, Tensor))))
        return operator(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A subclass that only the dispatcher asks."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    seen: list[Any]

    @staticmethod
    def __new__(cls, inner, seen):  # noqa: ANN001, ANN205
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner, wrapper.seen = inner, seen
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        seen = next(a.seen for a in args if isinstance(a, cls))
        seen.append((operator, *(a for a in args if not isinstance(a, Tensor))))
        results = operator(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, lambda t: cls(t, seen), results)


def in_a_dispatch_mode(seen: list[Any]) -> Tensor:
    with Operators(seen):
        return round_trip(IMAGE)


def of_a_subclass(seen: list[Any]) -> Tensor:
    result = round_trip(Wrapped(IMAGE, seen))
    assert type(result) is Wrapped
    return result.inner


def of_fake_tensors(seen: list[Any]) -> Tensor:
    images = IMAGE.expand(5, 3, 8, 8)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        result = round_trip(mode.from_tensor(images))
    assert isinstance(result.shape[-1], torch.SymInt)
    seen.append([str(size) for size in result.shape])
    return round_trip(IMAGE)


def in_a_graph(seen: list[Any]) -> Tensor:
    graph = make_fx(torch.vmap(round_trip), tracing_mode="symbolic")(
        IMAGE[None].expand(5, 3, 1, 8, 8)
    )
    seen.append(graph.code)
    return graph(IMAGE[None])[0]


def under_transforms(seen: list[Any]) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return round_trip(x).pow(2).sum()

    seen.append(torch.func.vmap(torch.func.grad(loss))(IMAGE[None]).tolist())
    seen.append(torch.func.jvp(torch.func.grad(loss), (IMAGE,), (IMAGE,))[1].tolist())
    images = torch.stack((torch.rand_like(IMAGE), IMAGE))
    return torch.func.vmap(round_trip)(images)[1]


def with_a_tangent(seen: list[Any]) -> Tensor:
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        result, tangent = forward.unpack_dual(round_trip(forward.make_dual(IMAGE, IMAGE * 2)))
        seen.append(tangent.tolist())
        return result


@pytest.mark.parametrize(
    "observed",
    [
        in_a_dispatch_mode,
        of_a_subclass,
        of_fake_tensors,
        in_a_graph,
        under_transforms,
        with_a_tangent,
    ],
)
def test_observers(
    observed: Callable[[list[Any]], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = round_trip(IMAGE)
    seen: list[Any] = []
    assert same(observed(seen), expected)
    monkeypatch.setattr(_arguments, "remembered", lambda *_: None)
    seen_by_torch_ops: list[Any] = []
    assert same(observed(seen_by_torch_ops), expected)
    assert seen == seen_by_torch_ops
    assert seen


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", ["jit", "compile", "export"])
def test_tracers_see_the_rules_at_work(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = round_trip(IMAGE)
    monkeypatch.setattr(_arguments, "_answer", refuse)
    monkeypatch.setattr(_ops, "eager_max_unpool", refuse)
    monkeypatch.setattr(_ops, "eager_max_pool", refuse)
    if trace == "jit":
        traced: Any = torch.jit.trace(round_trip, IMAGE, check_trace=False)
        assert "maxunpool_cuda::max_unpool" in str(traced.graph)
    elif trace == "compile":
        traced = torch.compile(round_trip, fullgraph=True, backend="eager")
    else:

        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return round_trip(x)

        traced = torch.export.export(Model(), (IMAGE,), strict=False).module()
    assert same(traced(IMAGE), expected)
