"""Published models, made this package's in every way, and called, kept or handed on in every way.

Outputs, and gradients of the input and of every parameter, are equal to the definition's.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from cases import INDEX_DTYPES
from published import OPERATORS, PUBLISHED, Published, Results, drawn, pooling_in, results
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import maxunpool_cuda.onnx
from maxunpool_cuda import converted, patched, replace_max_pooling, restore_max_pooling

# How a model becomes this package's, until the end of a stack of contexts.


def replaced(end: ExitStack, published: Published, model: nn.Module, dtype: torch.dtype) -> None:
    """By parts, as those who have nothing but a part would do."""
    reasons: dict[str, str] = {}
    for part in published.parts:
        reasons |= replace_max_pooling(model.get_submodule(part), dtype)
    assert reasons == ({} if dtype == torch.int64 else published.reasons)
    end.callback(restore_max_pooling, model)


def restored(_: ExitStack, *how: Any) -> None:
    with ExitStack() as end:
        replaced(end, *how)


def within_converted(
    end: ExitStack, published: Published, model: nn.Module, dtype: torch.dtype
) -> None:
    for part in published.parts:
        end.enter_context(converted(model.get_submodule(part), dtype))


def within_patched(end: ExitStack, _: Published, __: nn.Module, dtype: torch.dtype) -> None:
    end.enter_context(patched(dtype))


def decorated(end: ExitStack, _: Published, model: nn.Module, dtype: torch.dtype) -> None:
    model.forward = patched(dtype)(model.forward)
    end.callback(delattr, model, "forward")


PATCHED = (within_patched, decorated)
CONVERSIONS = {
    f"{conversion.__name__} {dtype}": (conversion, dtype)
    for conversion in (replaced, restored, within_converted, *PATCHED)
    for dtype in INDEX_DTYPES
}

# How it is called, kept or handed on meanwhile.


def in_channels_last(model: nn.Module, x: Tensor) -> Results:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    format = formats.get(x.dim(), torch.contiguous_format)
    return results(model.to(memory_format=format), x.contiguous(memory_format=format))


def from_state_dict(model: nn.Module, x: Tensor) -> Results:
    """What torch.nn's model has saved, loaded by one that was converted."""
    file = io.BytesIO()
    torch.save(restore_max_pooling(copy.deepcopy(model)).state_dict(), file)
    file.seek(0)
    for tensor in model.state_dict().values():
        tensor.zero_()
    model.load_state_dict(torch.load(file))
    return results(model, x)


def from_threads(model: nn.Module, x: Tensor) -> Results:
    """Of the caller, at the same time."""
    with ThreadPoolExecutor(4) as threads:
        copies = [copy.deepcopy(model) for _ in range(4)]
        found = [*threads.map(lambda own: [results(own, x) for _ in range(5)], copies)]
    first, *others = [one for each in found for one in each]
    for other in others:
        assert_equal(other, first)
    return first


def in_inference_mode(model: nn.Module, x: Tensor) -> Results:
    with torch.inference_mode():
        output = model(x)
    assert output.is_inference()
    return {"output": output.cpu()}


def under_deterministic_algorithms(model: nn.Module, x: Tensor) -> Results:
    """Where torch.nn's unpooling raises an error. Fixtures set all back."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(4)
    return results(model, x)


def with_saved_tensors_copied(model: nn.Module, x: Tensor) -> Results:
    """The backward reads copies of the indices."""
    saved: set[torch.dtype] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.dtype)
        return tensor.detach().clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found = results(model, x)
    assert len(saved & {*INDEX_DTYPES}) == 1
    return found


def checkpointed(use_reentrant: bool) -> Callable[[nn.Module, Tensor], Results]:
    return lambda model, x: results(
        model, x, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)
    )


def exported(model: nn.Module, x: Tensor, strict: bool = False) -> Results:
    program = torch.export.export(model, (x,), strict=strict)
    assert pooling_in(program.graph_module) == OPERATORS
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return results(torch.export.load(file).module(), x)


def through_onnx(model: nn.Module, x: Tensor) -> Results:
    """In float32, as ONNX Runtime has no convolutions of float64; of the same whole numbers."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="PyTorch exports with one and runs with the other")
    table = maxunpool_cuda.onnx.translation_table()
    model, x = model.float(), x.float()
    program: Any = torch.onnx.export(
        model, (x,), dynamo=True, verbose=False, custom_translation_table=table
    )
    return {"output": program(x.cpu())[0].double()}


WAYS: dict[str, Callable[[nn.Module, Tensor], Results]] = {
    "called": results,
    "channels_last": in_channels_last,
    "deep copy": lambda model, x: results(copy.deepcopy(model), x),
    "pickle": lambda model, x: results(pickle.loads(pickle.dumps(model)), x),
    "state dict": from_state_dict,
    "threads": from_threads,
    "inference mode": in_inference_mode,
    "deterministic": under_deterministic_algorithms,
    "saved tensors": with_saved_tensors_copied,
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant checkpoint": checkpointed(use_reentrant=True),
    # For any batch, and the spatial sizes of the example.
    "traced": lambda model, x: results(torch.jit.trace(model, torch.cat((x, x))), x),
    "compiled": lambda model, x: results(
        torch.compile(model, backend="aot_eager", fullgraph=True), x
    ),
    "exported": exported,
    "exported strictly": lambda model, x: exported(model, x, strict=True),
    "onnx": through_onnx,
}
OUTPUT_ALONE = ("inference mode", "onnx")
SLOW = ("traced", "compiled", "exported", "exported strictly", "onnx")


def why_not(published: Published, conversion: str, way: str) -> str:
    """Why a cell of the table is empty, if it is."""
    converts, dtype = CONVERSIONS[conversion]
    around = converts is within_patched or (published.functions and converts is not decorated)
    if converts not in PATCHED and not published.modules:
        return "there are no modules, and nothing to replace"
    if converts in PATCHED and dtype == torch.uint8 and published.strays:
        return "indices outside the windows of the unpool have no offsets"
    if converts is restored and way not in ("called", "deep copy", "pickle"):
        return "the model is torch.nn's again"
    if converts is decorated and way in ("deep copy", "pickle", "state dict", "threads"):
        return "copies of the model would have its decorated function, and so its parameters"
    if around and way == "threads":
        return "patched() holds in the thread that enters it"
    if around and "checkpoint" in way and not hasattr(torch.overrides, "redispatch_function"):
        return "PyTorch 2.11 computes a checkpoint again outside of patched()"
    if converts is decorated and way == "exported strictly" and torch.__version__ < "2.9":
        return "PyTorch 2.8 exports a decorated forward as if it were not decorated"
    return ""


def cells() -> Iterator[Any]:
    """Every model in every way, each time after another conversion; all conversions with --all.

    The slow ways are left to --all for most models, and are tried after few conversions.
    """
    thorough = {f"{converts.__name__} {torch.uint8}" for converts in (replaced, *PATCHED)}
    for row, (name, published) in enumerate(PUBLISHED.items()):
        for column, way in enumerate(WAYS):
            possible = [c for c in CONVERSIONS if not why_not(published, c, way)]
            chosen = possible[(row + column) % len(possible)] if possible else None
            for conversion in possible:
                quick = conversion == chosen or way == "called"
                if way in SLOW:
                    if not quick and conversion not in thorough:
                        continue
                    quick = quick and (row + column) % 4 == 0
                marks = [] if quick else [pytest.mark.slow]
                yield pytest.param(name, conversion, way, marks=marks)


def assert_equal(got: Results, expected: Results) -> None:
    """A zero of either sign is a zero."""
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("name", "conversion", "way"), [*cells()])
@pytest.mark.usefixtures("single_threaded_torch")
def test_every_way(name: str, conversion: str, way: str, real_device: str) -> None:
    published, (converts, dtype) = PUBLISHED[name], CONVERSIONS[conversion]
    model, x, expected = drawn(published)
    kinds = [*map(type, model.modules())]
    with ExitStack() as end:
        converts(end, published, model.to(real_device), dtype)
        if published.functions and converts not in PATCHED:
            end.enter_context(patched())
        is_ours = [*map(type, model.modules())] != kinds
        assert is_ours == (converts in (replaced, within_converted))
        found = WAYS[way](model, x.to(real_device))
    assert [*map(type, model.modules())] == kinds
    # torch.nn's gradient is wrong where windows overlap.
    if way in OUTPUT_ALONE or (converts is restored and published.overlaps):
        found, expected = {"output": found["output"]}, {"output": expected["output"]}
    assert_equal(found, expected)


@pytest.mark.parametrize("converts", [replaced, within_converted, within_patched])
@pytest.mark.usefixtures("single_threaded_torch")
def test_what_was_compiled_is_compiled_anew(converts: Any) -> None:
    published = PUBLISHED["InceptionTime"]
    model, x, expected = drawn(published)
    compiled, theirs = torch.compile(model, backend="aot_eager"), results(model, x)
    assert not torch.equal(theirs["input"], expected["input"])
    for _ in range(2):
        assert_equal(results(compiled, x), theirs)
        with ExitStack() as end:
            converts(end, published, compiled, torch.uint8)
            assert_equal(results(compiled, x), expected)
