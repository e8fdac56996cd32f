# SPDX-License-Identifier: BSD-3-Clause
"""A watch for :func:`exact_attributions`: does the model rest on changes in place?

While captum or shap compute DeepLIFT's attributions, an activation with ``inplace=True`` returns a
new tensor and leaves its input as it was. That makes a difference if the input is read later. In
``self.relu(x); return self.conv(x)``, for example, the convolution would read the old values, so
there it raises an error. ``return self.conv(self.relu(x))`` is the same with either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._deep_lift import Uncopied

# References compare by the address of the storage. No other storage gets it while they live.
_Storages: TypeAlias = set[StorageWeakRef]


@dataclasses.dataclass
class _Memory:
    """Storages that would be one, had the modules worked in place."""

    storages: _Storages
    current: _Storages  # those with the values that the one would have
    module: str  # that got one of them and returned another
    change: str  # what has changed the current ones, and not the others


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, an operator that reads values which should have changed raises an error.

    It sees all operators that PyTorch dispatches.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[StorageWeakRef, _Memory] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _storages((args, kwargs))
        # To make a view reads nothing. In inference mode a reshape that copies is_view, too.
        is_view = getattr(func, "is_view", False) and _storages(result) <= given
        if not is_view:
            self.check(given, str(func))
        for storage in _storages([*_written(func, args, kwargs)]) & self._memories.keys():
            memory = self._memories[storage]
            memory.current = {storage}
            memory.change = f"{func}, which changes the input of {memory.module},"
        return result

    def overwrite(self, module: str, x: torch.Tensor, output: torch.Tensor) -> None:
        """Take note that ``module`` should have written ``output`` to the memory of ``x``."""
        new = _storages(output)
        aliases = _storages(x)
        for storage in aliases & self._memories.keys():
            aliases = aliases | self._memories[storage].storages
        # Nothing changes by ReLU after ReLU, for example.
        current = aliases | new if torch.equal(x, output) else new
        memory = _Memory(aliases | new, current, module, f"{module}, which changes its input,")
        self._memories |= dict.fromkeys(memory.storages, memory)

    def check(self, storages: _Storages, reader: str) -> None:
        """Raise an error if a storage has old values. ``reader`` is who reads them."""
        for storage in storages & self._memories.keys():
            memory = self._memories[storage]
            if storage not in memory.current:
                raise RuntimeError(
                    "exact_attributions: expected a model that does not rest on changes in place "
                    f"but got {memory.change} and then {reader}, which would read old values: "
                    "captum and shap need modules that return new tensors. Let the model use what "
                    "they return, as in x = self.relu(x), and no longer what they got, or let the "
                    "module have inplace=False"
                )


class WatchedCalls(Uncopied, threading.local):
    """The calls of modules that have begun and not ended. Each thread has its own.

    They are those of a run by captum or shap. Each outermost one has a watch. ``begin`` and ``end``
    are hooks of every module.
    """

    def __init__(self, is_run: Callable[[], bool]) -> None:
        self._is_run = is_run
        self._begun: list[torch.nn.Module] = []
        self._watch: Any = None

    def begin(self, module: torch.nn.Module, args: Any) -> None:
        if not self._is_run():
            return
        if self._watch is None:
            self._watch = _Watch()
            self._watch.__enter__()
        self._begun.append(module)

    def end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._is_run() or not self._begun or self._begun[-1] is not module:
            return  # another hook has failed before the call began
        self._begun.pop()
        if not self._begun:
            watch = self._watch
            self.end_all()
            watch.check(_storages(output), "the model itself")

    def overwrite(self, module: str, x: torch.Tensor, output: torch.Tensor) -> None:
        """Take note that ``module`` should have written ``output`` to the memory of ``x``."""
        if self._watch is not None:
            self._watch.overwrite(module, x, output)

    def end_all(self) -> None:
        """After a KeyboardInterrupt, too, for which PyTorch runs no hook."""
        self._begun.clear()
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None


def _storages(tree: Any) -> _Storages:
    """The storages of all tensors in lists, tuples and dictionaries."""
    storages = set()
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            with contextlib.suppress(NotImplementedError):  # sparse ones have none
                storages.add(StorageWeakRef(leaf.untyped_storage()))  # type: ignore[no-untyped-call]
    return storages


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator changes, by its schema."""
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)
