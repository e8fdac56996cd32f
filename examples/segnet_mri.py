# SPDX-License-Identifier: BSD-3-Clause
"""A small SegNet learns grey and white matter from the MNI152 brain, with deterministic unpooling.

The encoder's pools hand their indices to the decoder's unpools; the windows of the middle one
overlap. The network is written with torch.nn, and one call puts this package's pools and unpools in
their places, with indices of one byte. It trains twice from one seed, and the losses are equal bit
for bit. At the end: Dice on slices it has not seen, a picture, and what torch.nn does there.

    python examples/segnet_mri.py [--dims 3] [--device cpu]

It runs on the GPU if PyTorch sees one and this package was built with CUDA kernels.
"""

import argparse
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import matplotlib
import nibabel
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import maxunpool_cuda
from maxunpool_cuda import functional

CLASSES = ("background", "grey matter", "white matter")
SEED = 0
console = Console()


@dataclass(frozen=True)
class Setup:
    """What depends on the number of dimensions."""

    step: int  # of the 1 mm template's voxels
    size: tuple[int, ...]  # of a sample
    held_out: tuple[int, int]  # slices kept for the test, away from those trained on
    margin: int
    channels: tuple[int, int, int]
    batch: int
    iterations: int


SETUPS = {
    2: Setup(2, (112, 96), (36, 56), 2, (16, 24, 32), 12, 150),
    3: Setup(3, (8, 72, 64), (34, 42), 1, (16, 24, 32), 3, 200),
}


def load_brain(step: int) -> tuple[Tensor, Tensor]:
    """The T1-weighted MNI152 template and its tissue labels, (slices, height, width).

    The three files are part of the nilearn package.
    """

    def volume(kind: str) -> np.ndarray:
        name = f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz"
        image = nibabel.load(str(files("nilearn") / "datasets" / "data" / name))
        axial = np.asarray(image.dataobj).transpose(2, 1, 0)[:, ::-1]
        return axial[::step, ::step, ::step].astype(np.float32) / 255

    grey, white = volume("gm"), volume("wm")
    labels = np.stack((1 - grey - white, grey, white)).argmax(0)
    return torch.from_numpy(volume("t1")), torch.from_numpy(labels)


class SegNet(nn.Module):
    """Three stages down and up; the second pools with overlapping windows.

    Written out, so that this file can be read, copied and run alone.
    """

    windows = ((2, 2, 0), (3, 2, 1), (2, 2, 0))  # kernel_size, stride, padding

    def __init__(self, dims: int, channels: tuple[int, int, int]) -> None:
        super().__init__()
        convolution = getattr(nn, f"Conv{dims}d")
        pool, unpool = getattr(nn, f"MaxPool{dims}d"), getattr(nn, f"MaxUnpool{dims}d")
        norm = getattr(nn, f"BatchNorm{dims}d")

        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                convolution(inputs, outputs, 3, padding=1, bias=False), norm(outputs), nn.ReLU()
            )

        a, b, c = channels
        self.encoder = nn.ModuleList((block(1, a), block(a, b), block(b, c)))
        self.decoder = nn.ModuleList((block(c, b), block(b, a), block(a, a)))
        self.pools = nn.ModuleList(pool(*window, return_indices=True) for window in self.windows)
        self.unpools = nn.ModuleList(unpool(*window) for window in reversed(self.windows))
        self.head = convolution(a, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block, pool in zip(self.encoder, self.pools, strict=True):
            x = block(x)
            size = x.shape
            x, indices = pool(x)
            kept.append((indices, size))
        for block, unpool in zip(self.decoder, self.unpools, strict=True):
            indices, size = kept.pop()
            x = block(unpool(x, indices, output_size=size))
        return self.head(x)


def samples(setup: Setup, brain: Tensor, held_out: bool) -> list[slice]:
    """Where along the slices samples start and end: single slices in 2d, slabs in 3d."""
    low, high = setup.held_out
    if held_out:
        return [slice(low, high)]
    thick = setup.size[0] if len(setup.size) == 3 else 1
    starts = (
        *range(low - setup.margin - thick + 1),
        *range(high + setup.margin, len(brain) - thick + 1),
    )
    return [slice(start, start + thick) for start in starts]


def crop(volume: Tensor, where: slice, setup: Setup) -> Tensor:
    """Slices of a volume, cut about their centre to the size of a sample."""
    height, width = setup.size[-2:]
    top, left = (volume.shape[1] - height) // 2, (volume.shape[2] - width) // 2
    return volume[where, top : top + height, left : left + width]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, by a sum whose gradient is deterministic on CUDA too."""
    wanted = nn.functional.one_hot(labels, len(CLASSES)).movedim(-1, 1)
    return -(logits.log_softmax(1) * wanted).sum(1).mean()


def train(setup: Setup, brain: Tensor, labels: Tensor, title: str) -> tuple[SegNet, list[float]]:
    """A network trained from SEED, and its losses."""
    torch.manual_seed(SEED)
    dims = len(setup.size)
    model = SegNet(dims, setup.channels).to(brain.device)
    maxunpool_cuda.convert_max_pooling(model, index_dtype=torch.uint8)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, setup.iterations)
    places = samples(setup, brain, held_out=False)
    losses = []
    for _ in track(range(setup.iterations), title, console=console):
        chosen = [places[i] for i in torch.randperm(len(places))[: setup.batch]]
        x, y = (torch.stack([crop(v, where, setup) for where in chosen]) for v in (brain, labels))
        x, y = (x[:, None], y) if dims == 3 else (x, y[:, 0])
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    console.print(f"The loss went from {losses[0]:.4f} to {losses[-1]:.4f}.")
    return model, losses


def predict(
    model: SegNet, setup: Setup, brain: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Held-out slices, their labels, the predictions and what the last unpool put out."""
    (where,) = samples(setup, brain, held_out=True)
    x, y = crop(brain, where, setup), crop(labels, where, setup)
    features = []
    hook = model.unpools[-1].register_forward_hook(lambda _, __, out: features.append(out))
    batch = x[:, None] if len(setup.size) == 2 else x[None, None]
    with torch.no_grad():
        predicted = model.eval()(batch).argmax(1)
    hook.remove()
    # As (slices, height, width) in both cases, and the busiest of the channels.
    unpooled = features[0] if len(setup.size) == 2 else features[0][0].movedim(0, 1)
    busiest = unpooled.abs().sum((0, 2, 3)).argmax()
    return x, y, predicted.reshape(y.shape), unpooled[:, busiest]


def dice(predicted: Tensor, labels: Tensor) -> list[float]:
    """Per class, twice the overlap over the sum of the sizes."""
    both = [(predicted == c, labels == c) for c in range(len(CLASSES))]
    return [float(2 * (p & y).sum() / (p.sum() + y.sum())) for p, y in both]


def draw(path: Path, x: Tensor, y: Tensor, predicted: Tensor, features: Tensor) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    middle = len(x) // 2
    tissue = matplotlib.colors.ListedColormap(["#101418", "#8aa0b4", "#f4efe6"])
    panels = (
        ("held-out slice", x, {"cmap": "gray"}),
        ("label", y, {"cmap": tissue, "vmin": 0, "vmax": 2, "interpolation": "nearest"}),
        ("prediction", predicted, {"cmap": tissue, "vmin": 0, "vmax": 2}),
        ("unpooled feature map", features, {"cmap": "magma"}),
    )
    # So narrow that a telephone, which shows the picture 5 inches wide, keeps the titles legible.
    figure, axes = plt.subplots(2, 2, figsize=(5.4, 6.4), facecolor="#101418")
    for axis, (title, volume, options) in zip(axes.flat, panels, strict=True):
        axis.imshow(volume[middle].cpu(), **options)
        axis.set_title(title, color="#f4efe6", fontsize=11)
        axis.axis("off")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def show_torch(dims: int, device: torch.device) -> None:
    """What torch.nn does in the same place: a row of five, whose three windows share a maximum."""
    flat = (1,) * (dims - 1)
    kernel, name = (*flat, 3), f"max_unpool{dims}d"
    x = torch.tensor([0.0, 0, 9, 0, 0], device=device).reshape(1, 1, *flat, 5)
    pooled, indices = getattr(nn.functional, f"max_pool{dims}d")(x, kernel, 1, return_indices=True)
    theirs, ours = getattr(nn.functional, name), getattr(functional, name)
    try:
        theirs(pooled, indices, kernel, 1)
        console.print(f"torch.nn.functional.{name} ran under deterministic algorithms")
    except RuntimeError as error:
        reason = str(error).split(", but")[0]
        console.print(f"[bold]torch.nn.functional.{name}[/] raises: {reason}.")
    torch.use_deterministic_algorithms(False)

    def gradient(unpool) -> list[float]:
        leaf = pooled.detach().requires_grad_()
        unpool(leaf, indices, kernel, 1).sum().backward()
        return leaf.grad.flatten().tolist()

    steps = torch.eye(pooled.numel(), device=device).reshape(-1, *pooled.shape)
    sums = [float(ours(pooled + step, indices, kernel, 1).sum()) for step in (0, *steps)]
    table = Table("gradient of the sum", "three windows that hold one maximum")
    table.add_row(f"torch.nn.functional.{name}", str(gradient(theirs)))
    table.add_row("maxunpool_cuda", str(gradient(ours)))
    table.add_row("finite differences", str([changed - sums[0] for changed in sums[1:]]))
    console.print(table)


def choose_device(asked: str | None) -> torch.device:
    """The device asked for, else the GPU if there is one that this build can use. Says which."""
    device, reason = torch.device(asked or "cpu"), ""
    if asked is None and not torch.cuda.is_available():
        reason = " (PyTorch sees no GPU)"
    elif asked is None and not maxunpool_cuda.build_info()["cuda"]:
        reason = " (this build has no CUDA kernels)"
    elif asked is None:
        device = torch.device("cuda")
    name = f"the {device.type.upper()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    console.print(f"Training on {name}{reason}, with PyTorch {torch.__version__}.")
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, choices=SETUPS, default=2)
    parser.add_argument("--device", help="by default the GPU, if there is one")
    parser.add_argument("--iterations", type=int, help="of each training run")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    options = parser.parse_args()

    device = choose_device(options.device)
    torch.use_deterministic_algorithms(True)
    setup = SETUPS[options.dims]
    if options.iterations is not None:
        setup = Setup(**{**vars(setup), "iterations": options.iterations})
    brain, labels = (volume.to(device) for volume in load_brain(setup.step))

    model, losses = train(setup, brain, labels, "first run ")
    _, again = train(setup, brain, labels, "second run")
    if losses != again:
        raise SystemExit("the two runs differ")
    console.print(f"[green]{len(losses)} losses of two runs are equal, bit for bit.[/]")

    kept: list[Tensor] = []
    for pool in model.pools:
        pool.register_forward_hook(lambda _, __, results: kept.append(results[1]))
    x, y, predicted, features = predict(model, setup, brain, labels)
    size, flat = sum(t.nbytes for t in kept), sum(8 * t.numel() for t in kept)
    console.print(f"The indices take {size / 2**20:.2f} MiB; int64 ones take {flat / 2**20:.2f}.")
    table = Table("tissue", "Dice on held-out slices")
    for name, score in zip(CLASSES, dice(predicted, y), strict=True):
        table.add_row(name, f"{score:.3f}")
    console.print(table)
    picture = options.out / f"segnet_mri_{options.dims}d.png"
    draw(picture, x, y, predicted, features)
    show_torch(options.dims, device)
    console.print(f"The picture is in {picture}.")


if __name__ == "__main__":
    main()
