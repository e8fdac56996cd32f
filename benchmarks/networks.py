# SPDX-License-Identifier: BSD-3-Clause
"""Whole networks: how long SqueezeNet and VGG take, eager and compiled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import maxunpool_cuda

from . import architectures
from .cases import Case
from .contenders import INDUCTOR, OURS, TORCH, Call

NETWORKS = {"squeezenet": architectures.squeezenet, "vgg": architectures.vgg11}


def call_of(case: Case, device: str, name: str) -> Call:
    """The network's output, and in training the gradients of its parameters.

    If OURS is in the name, the network is converted; if INDUCTOR is, it is compiled.
    """
    torch.manual_seed(0)
    model = NETWORKS[case.layer.partition("-")[0]]().train(case.direction == "training")
    image = torch.randn(case.shape)
    layout = torch.channels_last if case.layout == "channels_last" else torch.contiguous_format
    options = {"device": device, "dtype": getattr(torch, case.dtype), "memory_format": layout}
    model, image = model.to(**options), image.to(**options)
    if OURS in name:
        maxunpool_cuda.convert_max_pooling(model, index_dtype=getattr(torch, case.index_dtype))
    forward = torch.compile(model, dynamic=False) if INDUCTOR in name else model

    def call() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(model.training):
            output = forward(image)
        grads = torch.autograd.grad(output.sum(), [*model.parameters()]) if model.training else ()
        return output.detach(), *grads

    return call


@contextmanager
def reproducible_convolutions(deterministic: bool = True) -> Iterator[None]:
    """Inside, cuDNN computes in float32, and a gradient to the same bits each time.

    By default it rounds factors to TF32's 11 bits, and the signs of some activations change.
    ``torch.backends.cudnn.flags`` would also set what is not named, differently in each release.

    Args:
        deterministic: False leaves alone which algorithms cuDNN chooses.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, deterministic or cudnn.deterministic
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


def calls(case: Case, device: str) -> tuple[dict[str, list[Call]], str]:
    """Everyone's call. Eager results must be equal; in compiled ones rounding moves some maxima.

    Returns:
        The calls, and why a compiled one is left out, if one is.
    """
    torch.compiler.reset()  # after eight compilations of a module's forward all others stay eager
    made = {TORCH: [call_of(case, device, TORCH)]}
    with reproducible_convolutions():
        expected = made[TORCH][0]()
    left_out = ""
    for name in (OURS, INDUCTOR, f"{OURS}, {INDUCTOR}"):
        call = call_of(case, device, name)
        is_eager = name == OURS
        try:
            with reproducible_convolutions(deterministic=is_eager):
                require_close(call(), expected, share=0 if is_eager else 0.05)
        except Exception as error:
            if is_eager:
                raise
            left_out = f"{name}: {error}"
        else:
            made[name] = [call]
    return made, left_out


def require_close(results: Sequence[Tensor], expected: Sequence[Tensor], share: float) -> None:
    """Raise a RuntimeError if results are farther from torch.nn's than this share of their norm."""
    for result, right in zip(results, expected, strict=True):
        if not (result - right).norm() <= share * right.norm():
            raise RuntimeError("the network does not return torch.nn's result")
