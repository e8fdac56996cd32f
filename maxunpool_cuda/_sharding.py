"""How DTensor may shard the operators: over the batch and over the channels."""

from __future__ import annotations

import functools
import sys
from typing import Any

from . import _ops


def register() -> None:
    """Make the operators known to DTensor; to be called before one of them meets a DTensor.

    Importing DTensor takes half a second, which most programs need not spend: who has a DTensor has
    imported it.
    """
    if "torch.distributed.tensor" in sys.modules:
        _register()


# What torch.compiler.assume_constant_result sets, which imports the compiler: Dynamo, as it traces
# a caller, calls this function rather than trace it.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register() -> None:
    """By the rule API that PyTorch's own operators use, the same in 2.11 to 2.15.

    The public one, register_sharding, is of no use in any of them: DTensor remembers what a rule
    said, and the shapes of the results, by the tensors alone, for windows of every size. Here, by
    all arguments from the first behind the tensors.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    pairs = (_ops.max_unpool, 2), (_ops.max_unpool_backward, 2), (_ops.max_pool, 1)
    for operator, tensors in pairs:
        info = RuntimeSchemaInfo(static_argnum=tensors)
        propagator.register_op_strategy(operator, _strategy, info)


def _strategy(call: Any) -> Any:
    """The placements that an operator takes, of its tensors and its results alike.

    Planes are independent of one another. DTensor redistributes what is placed in any other way, or
    is a batch of fewer than there are processes.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    tensors, results = call.args_strategy, len(call.op._schema.returns)
    dims = len(call.args_schema[len(tensors)])
    channels = tensors[0].ndim - dims - 1
    placements = [Replicate(), *(Shard(dim) for dim in range(channels + 1))]
    strategy: Any = expand_to_full_mesh_op_strategy(
        call.get_mesh_from_args(),
        call,
        [[placement] * (results + len(tensors)) for placement in placements],
        input_index=results,
    )
    strategy.strategies = [
        each for each in strategy.strategies if _none_empty(each.input_specs[0], channels)
    ]
    return strategy


def _none_empty(spec: Any, dim: int) -> bool:
    """Whether every process has some of a dimension: the kernels take no tensor without channels.

    DTensor cuts a dimension as torch.chunk does, into equal parts but for the last, which may be
    left with nothing, or with what would be less.
    """
    parts = [spec.shape[dim]]
    for processes, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if placement.is_shard(dim):
            equal = [-(-part // processes) for part in parts]
            last = [part - (processes - 1) * size for part, size in zip(parts, equal, strict=True)]
            parts = equal + last
    return bool(min(parts) > 0)
