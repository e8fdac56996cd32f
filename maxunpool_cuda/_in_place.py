# SPDX-License-Identifier: BSD-3-Clause
"""A watch for :func:`exact_attributions`: does the model rest on changes in place?

Outside, some tensors share memory that do not inside: there a module gets a clone of its input, and
what worked in place returns another tensor. That makes a difference only if one of them is changed
and another one is read later. For example, in ``self.relu(x); return self.conv(x)``, where ReLU
works in place, the convolution reads what ReLU has written. Inside it would read the old values, so
there it raises an error. ``return self.conv(self.relu(x))`` is the same outside and inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# References compare by the address of the storage. No other storage gets it while they live.
_Storages: TypeAlias = set[StorageWeakRef]


@dataclasses.dataclass
class _Memory:
    """What is one memory outside, and may be several storages inside."""

    storages: _Storages = dataclasses.field(default_factory=set)
    current: _Storages = dataclasses.field(default_factory=set)  # those with the values of outside
    modules: dict[str, None] = dataclasses.field(default_factory=dict)  # whose input it was
    change: str = ""  # what has changed the current ones, and not the others

    def add(self, other: _Memory) -> None:
        self.storages |= other.storages
        self.current |= other.current
        self.modules |= other.modules
        self.change = other.change or self.change


class InPlaceWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, an operator that would read other values outside raises an error.

    It sees all operators that PyTorch dispatches.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[StorageWeakRef, _Memory] = {}  # those that have been shared

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _storages((args, kwargs))
        # To make a view is not to read. In inference mode a reshape that copies is_view, too.
        is_view = getattr(func, "is_view", False) and _storages(result) <= given
        if not is_view:
            self._check(given, str(func))
        for storage in _storages([*_written(func, args, kwargs)]) & self._memories.keys():
            memory = self._memories[storage]
            memory.current = {storage}
            modules = " and ".join(memory.modules)
            memory.change = f"{func}, which changes the input of {modules}, or a view of it,"
        return result

    def share(self, module: str, tensors: Any) -> _Memory:
        """Take note that outside ``tensors`` are one memory, which ``module`` gets."""
        memory = _Memory(modules={module: None})
        for storage in _storages(tensors):
            memory.add(self._memories.get(storage) or _Memory({storage}, {storage}))
        self._memories |= dict.fromkeys(memory.storages, memory)
        return memory

    def overwrite(self, module: str, x: torch.Tensor, output: Any) -> None:
        """Take note that outside ``module`` has written its output to the memory of its input."""
        if not _storages(x) or self._old(_storages(output)):  # who reads that is told
            return
        is_old = self._old(_storages(x))
        is_equal = not is_old and any(torch.equal(x, each.to(x)) for each in _tensors(output))
        memory = self.share(module, (x, output))
        if not is_equal:  # as it is of dropout in evaluation, and of ReLU after ReLU
            memory.current = _storages(output)
            memory.change = f"{module}, which changes its input,"

    def check(self, output: Any) -> None:
        """Raise an error if what the model returns would have other values outside."""
        self._check(_storages(output), "the model itself")

    def _old(self, storages: _Storages) -> list[_Memory]:
        """Of those with other values than outside: the memory."""
        known = [(storage, self._memories[storage]) for storage in storages & self._memories.keys()]
        return [memory for storage, memory in known if storage not in memory.current]

    def _check(self, storages: _Storages, reader: str) -> None:
        for memory in self._old(storages):
            raise RuntimeError(
                "exact_attributions: expected a model that does not rest on changes in place but "
                f"got {memory.change} and then {reader}, which would read old values: inside, "
                "modules return new tensors. Let the model use what they return, as in "
                "x = self.relu(x), and no longer what they got"
            )


@dataclasses.dataclass
class _Call:
    """A call of a module."""

    module: str
    overwritten: torch.Tensor | None  # the input, if the module writes to it outside


class Calls(threading.local):
    """The calls of modules that have begun and not ended. Each thread has its own.

    While there is one, the watch is on. Each outermost call has a new watch: a second call of a
    model that changes its input has other outputs outside, too.
    """

    watch: Any  # an InPlaceWatch

    def __init__(self) -> None:
        self._begun: list[_Call] = []

    def begin(self, module: str, overwritten: torch.Tensor | None) -> None:
        if not self._begun:
            self.watch = InPlaceWatch()
            self.watch.__enter__()
        self._begun.append(_Call(module, overwritten))

    def end(self, module: str, output: Any) -> None:
        if not self._begun or self._begun[-1].module != module:
            return  # another hook has failed before the call began
        overwritten = self._begun[-1].overwritten
        try:
            if overwritten is not None:
                self.watch.overwrite(module, overwritten, output)
            if len(self._begun) == 1:
                self.watch.check(output)
        finally:
            self._begun.pop()
            if not self._begun:
                self.watch.__exit__(None, None, None)

    def end_all(self) -> None:
        """After a KeyboardInterrupt, for which PyTorch runs no hook."""
        if self._begun:
            self._begun.clear()
            self.watch.__exit__(None, None, None)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _storages(tree: Any) -> _Storages:
    """The storages of all tensors in lists, tuples and dictionaries."""
    storages = set()
    for tensor in _tensors(tree):
        with contextlib.suppress(NotImplementedError):  # sparse ones have none
            storages.add(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
    return storages


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator changes, by its schema."""
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)
