# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/export.md: each cell in 1d to 3d, by values or by the words of an error."""

import importlib
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import all_same
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as leaves

import maxunpool_cuda

PAGE = Path(__file__).parent.parent.joinpath("docs/export.md").read_text(encoding="utf-8")
SIZES = (8, 12, 4)
Run = Callable[[Tensor], Sequence[Tensor]]


class RoundTrip(nn.Module):
    """Pools, and unpools other values with the indices."""

    def __init__(self, dims: int, *window: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(*window, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(*window)

    def forward(self, x: Tensor) -> Tensor:
        values, indices = self.pool(x)
        return self.unpool(values * 2 + 1, indices, output_size=x.shape[2:])


def module(kind: str, *arguments: Any, **options: Any) -> Callable[[int], nn.Module]:
    return lambda dims: getattr(nn, f"{kind}{dims}d")(*arguments, **options)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "pool": module("MaxPool", 3, 2, 1),
    "pool with indices": module("MaxPool", 3, 2, 1, return_indices=True),
    "unpool 2x2, stride 2": lambda dims: RoundTrip(dims, 2, 2, 0),
    "unpool 3x3, stride 2": lambda dims: RoundTrip(dims, 3, 2, 1),
    "adaptive, sizes divide": module("AdaptiveMaxPool", 4),
    "adaptive, any sizes": module("AdaptiveMaxPool", 3),
    "adaptive with indices": module("AdaptiveMaxPool", 3, return_indices=True),
}


# What runtimes get


def exported(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,))


def decomposed(model: nn.Module, x: Tensor) -> Any:
    program = exported(model, x).run_decompositions(maxunpool_cuda.export.decompositions())
    assert "maxunpool_cuda" not in str(program.graph)
    return program


def traced(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, x)


def onnx_file(model: nn.Module, x: Tensor) -> Any:
    return torch.onnx.export(decomposed(model, x), verbose=False)


def onnx_file_as_it_is(model: nn.Module, x: Tensor) -> Any:
    return torch.onnx.export(model, (x,), verbose=False)


def onnx_file_with_unpool(model: nn.Module, x: Tensor) -> Any:
    table = maxunpool_cuda.export.onnx_translation_table()
    program: Any = torch.onnx.export(model, (x,), verbose=False, custom_translation_table=table)
    unpools = any(isinstance(part, nn.MaxUnpool2d) for part in model.modules())
    assert not unpools or "MaxUnpool" in {node.op_type for node in program.model.graph}
    return program


# Runtimes


def onnx_runtime(make: Callable[..., Any], model: nn.Module, x: Tensor) -> Run:
    program: Run = make(model, x)
    return program


def openvino(make: Callable[..., Any], model: nn.Module, x: Tensor) -> Run:
    runtime: Any = importlib.import_module("openvino")
    made = make(model, x)
    if make is onnx_file:
        converted = runtime.Core().read_model(made.model_proto.SerializeToString())
    else:
        converted = runtime.convert_model(made, example_input=x if make is traced else None)
    compiled = runtime.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(x: Tensor) -> list[Tensor]:
        results = compiled([x.numpy()])
        return [torch.from_numpy(results[output].copy()) for output in compiled.outputs]

    return run


class OfConstant(nn.Module):
    """The model of an image that is a constant, which coremltools folds, and of any input."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("x", x)

    def forward(self, other: Tensor) -> tuple[Tensor, ...]:
        return *leaves(self.model(self.x)), other + 1


# coremltools folds no pools, so a program that has one is taken to be right if it has no more than
# what gathers the windows' elements.
POOLS = {"max_pool", "reduce_max"}
AROUND_POOLS = {"cast", "concat", "expand_dims", "gather", "reshape", "slice_by_index", "squeeze"}


def coreml(make: Callable[..., Any], model: nn.Module, x: Tensor) -> Run:
    tools: Any = importlib.import_module("coremltools")
    other = torch.zeros(1)

    def convert(model: nn.Module, x: Tensor, to: str) -> Any:
        made = make(model, x)
        options = {"inputs": [tools.TensorType(shape=x.shape)]} if make is traced else {}
        made = made.run_decompositions({}) if make is exported else made
        target = tools.target.iOS17
        return tools.convert(made, convert_to=to, minimum_deployment_target=target, **options)

    program = convert(model, x, "mlprogram")._mil_program.functions["main"]
    operators = {operation.op_type for operation in program.operations} - {"const"}
    if operators & POOLS:
        assert operators <= POOLS | AROUND_POOLS
        return model  # type: ignore[return-value]
    folded = convert(OfConstant(model, x), other, "milinternal").functions["main"].outputs
    results = [torch.from_numpy(output.val) for output in folded[:-1]]
    return lambda _: results


def executorch(make: Callable[..., Any], model: nn.Module, x: Tensor) -> Run:
    if torch.__version__ < "2.13":
        pytest.skip("the runtime of ExecuTorch 1.5.1 is not built for this PyTorch")
    exir: Any = pytest.importorskip("executorch.exir", reason="only make test-all installs it")
    runtime: Any = importlib.import_module("executorch.runtime")
    file = exir.to_edge_transform_and_lower(make(model, x)).to_executorch().buffer
    program = runtime.Runtime.get().load_program(file)
    program.load_method("forward")  # or its error
    # A method reads the program's memory as it runs, and does not keep it.
    return lambda x: program.load_method("forward").execute([x])


def pytorch(make: Callable[..., Any], model: nn.Module, x: Tensor) -> Run:
    made = make(model, x)
    run: Run = made if make is traced else made.module()
    return run


ROWS: dict[tuple[str, str], tuple[Callable[..., Run], Callable[..., Any]]] = {
    ("ONNX Runtime", "torch.onnx.export of a program after decompositions"): (
        onnx_runtime,
        onnx_file,
    ),
    ("ONNX Runtime", "torch.onnx.export"): (onnx_runtime, onnx_file_as_it_is),
    ("ONNX Runtime on a CPU", "the same with MaxUnpool, which is faster"): (
        onnx_runtime,
        onnx_file_with_unpool,
    ),
    ("OpenVINO", "the ONNX file of the first row"): (openvino, onnx_file),
    ("OpenVINO", "a program after decompositions"): (openvino, decomposed),
    ("OpenVINO", "an exported program"): (openvino, exported),
    ("OpenVINO", "a trace"): (openvino, traced),
    ("CoreML", "a program after decompositions"): (coreml, decomposed),
    ("CoreML", "an exported program"): (coreml, exported),
    ("CoreML", "a trace"): (coreml, traced),
    ("ExecuTorch", "a program after decompositions"): (executorch, decomposed),
    ("ExecuTorch", "an exported program"): (executorch, exported),
    ("PyTorch, C++, AOTInductor", "a program after decompositions"): (pytorch, decomposed),
    ("PyTorch", "an exported program"): (pytorch, exported),
    ("PyTorch", "a trace"): (pytorch, traced),
}


class Cell(NamedTuple):
    """What the page says of a model in a runtime."""

    row: tuple[str, str]
    model: str
    says: str


def cells() -> list[Cell]:
    """The page's table, without the row of TensorRT, which nobody ran."""
    table = [line.strip("| \n").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    head, *rows = itertools.takewhile(lambda row: len(row) == len(table[0]), table)
    found = []
    for runtime, given, *said in rows:
        runtime, given = (re.sub(r"[`\[\]]|\(.*\)", "", text) for text in (runtime, given))
        if runtime == "TensorRT":
            assert set(said) == {"not run"}
            continue
        found += [Cell((runtime, given), *pair) for pair in zip(head[2:], said, strict=True)]
    assert {cell.row for cell in found} == ROWS.keys()
    return found


def words_of(error: str) -> str:
    """A pattern for the words that the page has for a letter."""
    (line,) = re.findall(rf"^- \*\*{error}\*\*: (.*)$", PAGE, re.MULTILINE)
    return "|".join(map(re.escape, re.findall("`([^`]+)`", line)))


def has_own_operators(made: Any, make: Callable[..., Any]) -> bool:
    graph = made.inlined_graph if make is traced else made.graph
    return re.search(r"maxunpool_cuda::max|ops\.maxunpool_cuda\.max", str(graph)) is not None


# make test installs none of the three.
def is_slow(cell: Cell, dims: int) -> bool:
    return dims != 2 or cell.row[0] in ("OpenVINO", "CoreML", "ExecuTorch")


@pytest.mark.parametrize(
    ("cell", "dims"),
    [
        pytest.param(
            cell,
            dims,
            marks=[pytest.mark.slow] if is_slow(cell, dims) else [],
            id=f"{', '.join(cell.row)}: {cell.model}, {dims}d",
        )
        for cell in cells()
        for dims in (1, 2, 3)
    ],
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:::coremltools")
def test_every_cell(cell: Cell, dims: int) -> None:
    """Where an exporter meets an operator of this package, a warning says the ways out."""
    runtime, make = ROWS[cell.row]
    model = maxunpool_cuda.convert_max_pooling(MODELS[cell.model](dims).eval())
    x = torch.randint(-4, 5, (2, 3, *SIZES[:dims])).float()
    expected = leaves(model(x))
    says, _, in_3d = cell.says.partition(", not 3d: ")
    says = in_3d if in_3d and dims == 3 else says
    if make in (exported, traced):
        is_own = has_own_operators(make(model, x), make)
        assert is_own == (says in ("with this package", "A", "B", "E"))
    if says in ("yes", "with this package"):
        run = runtime(make, model, x)
        found = [got.to(right.dtype) for got, right in zip(leaves(run(x)), expected, strict=True)]
        assert all_same(found, expected)
    elif says in ("A", "B", "D", "E"):
        ways_out = r"\.decompositions\(\).*\.onnx_translation_table\(\).*\.restore_max_pooling\("
        with pytest.warns(match=ways_out), pytest.raises(Exception, match=words_of(says)):
            runtime(make, model, x)
    else:
        with pytest.raises(Exception, match=words_of(says)):
            runtime(make, model, x)


def test_an_export_with_the_table_of_onnx_is_not_warned_of() -> None:
    """One without it is, though somebody has asked for the table."""
    pool = maxunpool_cuda.MaxPool2d(2, return_indices=True).eval()
    x = torch.rand(1, 1, 4, 4)
    table = maxunpool_cuda.export.onnx_translation_table()
    with pytest.warns(match="this program calls"), pytest.raises(Exception, match=words_of("D")):
        torch.onnx.export(pool, (x,), verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.onnx.export(pool, (x,), verbose=False, custom_translation_table=table)
    assert not [each for each in caught if "this program calls" in str(each.message)]
