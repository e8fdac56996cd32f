"""Export to ONNX, run by ONNX Runtime, against eager."""

import io

import pytest
import torch
from torch import Tensor, nn

import maxunpool_cuda
import maxunpool_cuda.onnx

onnxruntime = pytest.importorskip("onnxruntime", reason="the exports are run by ONNX Runtime")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX through onnxscript")


class Stage(nn.Module):
    def __init__(self, dims: int, window: tuple[int, int, int], with_size: bool) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(*window, return_indices=True)
        self.unpool = getattr(maxunpool_cuda, f"MaxUnpool{dims}d")(*window)
        self.with_size = with_size

    def forward(self, x: Tensor) -> Tensor:
        pooled, indices = self.pool(x)
        return self.unpool(pooled, indices, x.shape if self.with_size else None)


class SegNet(nn.Module):
    """Two stages down and up, the inner one with overlapping windows, and int32 indices."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(*channels, 3, padding=1) for channels in ((1, 4), (4, 4), (4, 4), (4, 2))
        )
        self.outer = nn.MaxPool2d(2, return_indices=True)
        self.inner = nn.MaxPool2d(3, 2, 1, return_indices=True)
        self.unpools = nn.ModuleList(
            (maxunpool_cuda.MaxUnpool2d(3, 2, 1), maxunpool_cuda.MaxUnpool2d(2))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions[0](x).relu()
        outer_size = x.shape
        x, outer = self.outer(x)
        x = self.convolutions[1](x).relu()
        inner_size = x.shape
        x, inner = self.inner(x)
        x = self.convolutions[2](self.unpools[0](x, inner.int(), inner_size)).relu()
        return self.convolutions[3](self.unpools[1](x, outer.int(), outer_size))


def export(model: nn.Module, *inputs: Tensor, dynamic: bool = False) -> torch.onnx.ONNXProgram:
    sizes = {"dynamic_shapes": [{0: torch.export.Dim.DYNAMIC}] * len(inputs)} if dynamic else {}
    return torch.onnx.export(
        model,
        inputs,
        dynamo=True,
        verbose=False,
        custom_translation_table=maxunpool_cuda.onnx.translation_table(),
        **sizes,
    )


def run(program: torch.onnx.ONNXProgram, *inputs: Tensor) -> Tensor:
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [described.name for described in session.get_inputs()]
    fed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, fed)[0])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("window", "with_size"), [((2, 2, 0), False), ((3, 2, 1), True)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_stage(dims: int, window: tuple[int, int, int], with_size: bool, dynamic: bool) -> None:
    model, x = Stage(dims, window, with_size), torch.rand(2, 3, *[8] * dims)
    program = export(model, x, dynamic=dynamic)
    assert [n.op_type for n in program.model.graph].count("MaxUnpool") == 1
    other = torch.rand(5, *x.shape[1:]) if dynamic else x
    assert torch.equal(run(program, other), model(other))


@pytest.mark.parametrize("dynamic", [False, True])
def test_segnet(dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = SegNet().eval(), torch.rand(2, 1, 16, 24)
    other = torch.rand(3, 1, 16, 24) if dynamic else x
    result = run(export(model, x, dynamic=dynamic), other)
    torch.testing.assert_close(result, model(other), rtol=1e-4, atol=1e-5)


def test_duplicates_and_unbatched_input() -> None:
    model = maxunpool_cuda.MaxUnpool2d(2)
    x, indices = torch.rand(3, 2, 2), torch.randint(0, 3, (3, 2, 2))
    assert torch.equal(run(export(model, x, indices), x, indices), model(x, indices))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_what_onnx_cannot_say_is_refused(reduce: str) -> None:
    x, indices = torch.rand(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    with pytest.raises(Exception, match=r"expected reduce='last' for ONNX but got") as caught:
        export(maxunpool_cuda.MaxUnpool2d(2, reduce=reduce), x, indices)
    assert reduce in str(caught.value)
