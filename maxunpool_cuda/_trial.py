"""Runs of a model on an example, which leave the model as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._ops import check_errors

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class Trial:
    """Runs ``model`` on ``example``, in eval mode, without gradients and without compiling it.

    After each run, also one that raises, classes and attributes of its modules are as before, and
    so are tensors among these, parameters apart, and the states of PyTorch's random numbers.
    """

    def __init__(self, model: torch.nn.Module, example: tuple[Any, ...]) -> None:
        self.model, self.example = model, example
        self._modules = [
            (module, type(module), getattr(module, "training", False)) for module in model.modules()
        ]
        self._containers: list[tuple[Any, list[Any]]] = []
        tensors: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
        for module, *_ in self._modules:
            attributes = vars(module)
            for container in (attributes, *attributes.values()):
                if type(container) not in _CONTAINERS:
                    continue
                is_dict = isinstance(container, dict)
                self._containers.append(
                    (container, list(container.items() if is_dict else container))
                )
                for value in container.values() if is_dict else container:
                    if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
                        tensors[id(value)] = value
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._random = torch.get_rng_state()
        cuda: Any = torch.cuda
        self._cuda = cuda.get_rng_state_all() if cuda.is_initialized() else None

    def run(self, prepare: Callable[[], None] = lambda: None) -> list[Any]:
        """What the model returns, as a list for :func:`same`, once ``prepare`` has changed it."""
        example = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), self.example)
        with torch.no_grad(), _eager():
            try:
                prepare()
                for module, _, training in self._modules:
                    if training:
                        module.training = False
                result = list(_leaves(self.model(*example), set()))
                check_errors()
            finally:
                self._restore()
        return result

    def _restore(self) -> None:
        for container, contents in self._containers:
            container.clear()
            if isinstance(container, dict | set):
                container.update(contents)
            else:
                container.extend(contents)
        for module, kind, training in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            if training:
                module.training = True  # a scripted module does not keep it among its attributes
        for tensor, value in self._tensors:
            if not _same_tensors(tensor.detach(), value):
                tensor.copy_(value)
        torch.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def _eager() -> Any:
    # Nothing has been compiled before this was imported, which takes seconds.
    if "torch._dynamo" in sys.modules:
        compiler: Any = torch.compiler
        return compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """What there is to compare in a result, with copies of its tensors."""
    leaves, structure = pytree.tree_flatten(value)
    yield structure
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf.detach().clone()
        elif hasattr(leaf, "tobytes"):  # NumPy's
            yield getattr(leaf, "dtype", None), getattr(leaf, "shape", None), leaf.tobytes()
        elif isinstance(leaf, type) or not (
            dataclasses.is_dataclass(leaf) or hasattr(leaf, "__dict__")
        ):
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            yield type(leaf)
            if dataclasses.is_dataclass(leaf):  # which may have slots
                names = [field.name for field in dataclasses.fields(leaf)]
                attributes = {name: getattr(leaf, name) for name in names}
            else:
                attributes = dict(vars(leaf))
            yield from _leaves(attributes, seen)


def same(results: list[Any], others: list[Any]) -> bool:
    """Whether two results of :meth:`Trial.run` are equal, to the bit; a NaN equals any other."""
    return len(results) == len(others) and all(map(_same, results, others))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensors(a, b)
    try:
        return type(a) is type(b) and bool(a == b or (a != a and b != b))
    except Exception:
        return False  # what does not compare is not known to be the same


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    try:
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if torch.equal(_bytes(a), _bytes(b)):
            return True
        none = a.isnan()
        rest = (tensor.masked_fill(none, 0) for tensor in (a, b))
        return torch.equal(none, b.isnan()) and torch.equal(*map(_bytes, rest))
    except (RuntimeError, TypeError):
        return False  # as in _same


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
