# SPDX-License-Identifier: BSD-3-Clause
"""Published models, made this package's in every way, and called, kept or handed on in every way.

Outputs, and gradients of the input and of every parameter, are equal to the definition's.
"""

import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES
from published import OPERATORS, PUBLISHED, Published, Results, drawn, pooling_in, results
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maxunpool_cuda
from maxunpool_cuda import convert_max_pooling, explain_conversion, patched, restore_max_pooling


@contextmanager
def replaced(published: Published, model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Parts are converted one by one, as by someone who has only a part."""
    reasons: dict[str, str] = {}
    for part in published.parts:
        submodule = model.get_submodule(part)
        reasons |= explain_conversion(submodule, index_dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of these reasons
            convert_max_pooling(submodule, index_dtype=dtype)
    assert reasons == ({} if dtype == torch.int64 else (published.reasons or {}))
    with patched():  # SegResNet unpools by a function
        yield
    restore_max_pooling(model)


def within_patched(_: Published, __: nn.Module, dtype: torch.dtype) -> patched:
    return patched(index_dtype=dtype)


def under_deterministic_algorithms(model: nn.Module, x: Tensor) -> Results:
    """torch.nn's unpooling raises an error here. Fixtures reset the settings."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(4)
    return results(model, x)


def exported(model: nn.Module, x: Tensor, strict: bool = False) -> Results:
    program = torch.export.export(model, (x,), strict=strict)
    assert pooling_in(program.graph_module) == OPERATORS
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return results(torch.export.load(file).module(), x)


def through_onnx(model: nn.Module, x: Tensor) -> Results:
    """ONNX Runtime has no float64 convolutions; in float32 the whole numbers are exact, too."""
    table = maxunpool_cuda.export.onnx_translation_table()
    model, x = model.float(), x.float()
    program: Any = torch.onnx.export(
        model, (x,), dynamo=True, verbose=False, custom_translation_table=table
    )
    return {"output": program(x.cpu())[0].double()}


WAYS: dict[str, Callable[[nn.Module, Tensor], Results]] = {
    "called": results,
    "pickle": lambda model, x: results(pickle.loads(pickle.dumps(model)), x),
    "inference mode": lambda model, x: {"output": torch.inference_mode()(model)(x).cpu()},
    "deterministic": under_deterministic_algorithms,
    "checkpoint": lambda model, x: results(
        model, x, partial(checkpoint, model, use_reentrant=False)
    ),
    "reentrant checkpoint": lambda model, x: results(
        model, x, partial(checkpoint, model, use_reentrant=True)
    ),
    # A trace holds for any batch, and for the spatial sizes of the example.
    "traced": lambda model, x: results(torch.jit.trace(model, torch.cat((x, x))), x),
    "compiled": lambda model, x: results(
        torch.compile(model, backend="aot_eager", fullgraph=True), x
    ),
    "exported": exported,
    "exported strictly": lambda model, x: exported(model, x, strict=True),
    "onnx": through_onnx,
}
SLOW = ("traced", "compiled", "exported", "exported strictly", "onnx")


def cells() -> Iterator[Any]:
    """Every model in every way after both conversions. Index dtypes take turns: all pairs occur."""
    dtypes = itertools.cycle(INDEX_DTYPES)
    for name, way, converts in itertools.product(PUBLISHED, WAYS, (replaced, within_patched)):
        dtype = next(dtypes)
        if name == "SegResNet" and converts is within_patched and dtype == torch.uint8:
            dtype = torch.int64  # indices leave the unpool's windows, where offsets mean nothing
        marks = [pytest.mark.slow] if way in SLOW and name != "PhotoWCT" else []
        label = f"{name}-{converts.__name__}-{dtype}-{way}"
        yield pytest.param(name, converts, dtype, way, marks=marks, id=label)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("name", "converts", "dtype", "way"), [*cells()])
@pytest.mark.usefixtures("single_threaded_torch")
def test_every_way(
    name: str, converts: Any, dtype: torch.dtype, way: str, real_device: str
) -> None:
    """A zero of either sign is a zero."""
    needs_patched = converts is within_patched or name == "SegResNet"
    if (
        "checkpoint" in way
        and needs_patched
        and not hasattr(torch.overrides, "redispatch_function")
    ):
        pytest.skip("PyTorch 2.11 computes a checkpoint again outside of patched()")
    published = PUBLISHED[name]
    model, x, expected = drawn(published)
    kinds = [*map(type, model.modules())]
    with converts(published, model.to(real_device), dtype):
        assert ([*map(type, model.modules())] != kinds) == (converts is replaced)
        found = WAYS[way](model, x.to(real_device))
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    assert found.keys() == ({"output"} if way in ("inference mode", "onnx") else expected.keys())
    assert [*map(type, model.modules())] == kinds
    torch.use_deterministic_algorithms(False)
    assert torch.equal(model.to(x)(x), expected["output"])
