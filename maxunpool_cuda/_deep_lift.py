# SPDX-License-Identifier: BSD-3-Clause
"""DeepLIFT's rule for max pools and for activations, as the gradient of a call.

DeepLIFT runs a model on a batch whose first half are inputs and whose second half are baselines. In
its backward each call of a module hands back *multipliers* in place of gradients. For each element
of the first half, the multiplier times the difference to the baseline is its contribution. The
contributions of a module's inputs add up to those of its outputs.

For example, ReLU maps the input 3 to 3 and the baseline -1 to 0. With a multiplier of 1 above, the
difference of the outputs contributes 3, the inputs differ by 4, and the multiplier is 3 / 4.

This is the Rescale rule of Shrikumar, Greenside and Kundaje, "Learning Important Features Through
Propagating Activation Differences" (2017), section 3.5.1, and for max pooling that of Lundberg and
Lee's package shap. No private name of captum or shap is needed for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Values that differ by no more than this many eps of their size differ by rounding alone.
_ROUNDING_STEPS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of a max pool or of an activation.

    ``output`` was computed from ``leaf``, and its graph ends there. Both have the inputs in the
    first half of the batch and the baselines in the second.
    """

    name: str  # of the module
    leaf: Tensor
    output: Tensor
    is_pool: bool

    def multiplier(self, grad_output: Tensor) -> Tensor:
        """From the multipliers of ``output`` those of ``leaf``, the same for both halves.

        If those of ``output`` differ between the halves, as below a module without a rule, those of
        the inputs count. Where an input equals its baseline, its multiplier contributes nothing,
        and is the input's gradient, for both halves: with another one for the baseline,
        contributions below would not add up.
        """
        if self.leaf.dim() == 0 or len(self.leaf) % 2:
            raise ValueError(
                f"exact_attributions: expected {self.name} to get inputs and as many baselines but "
                f"got a tensor of shape {[*self.leaf.shape]}"
            )
        grad_output, _ = grad_output.chunk(2)
        x, baseline = self.leaf.detach().chunk(2)
        difference = x - baseline
        output, output_of_baseline = self.output.detach().chunk(2)
        of_outputs = grad_output * (output - output_of_baseline)
        if self.is_pool:
            is_equal = x == baseline
            contribution = self._contribution_of_pool(grad_output)
            # In a max pool no element that equals its baseline has one. A subclass may do more.
            self._check_sum(contribution.masked_fill(is_equal, 0), of_outputs)
        else:
            contribution = of_outputs
            step = torch.finfo(x.dtype).eps * torch.maximum(x.abs(), baseline.abs())
            is_equal = (x == baseline) | (difference.abs() <= _ROUNDING_STEPS * step)
        gradient, _ = self._gradients(grad_output, torch.zeros_like(grad_output))
        multiplier = torch.where(is_equal, gradient, contribution / difference)
        return torch.cat([multiplier, multiplier])

    def _contribution_of_pool(self, grad_output: Tensor) -> Tensor:
        """Hand the difference of each window's maxima to the element that makes it.

        That is the input's maximum if it is the larger one, and the baseline's otherwise. For
        example, the windows 1 9 and 9 2 of the input have the maxima 9 and 9, and those of the
        baseline, 0 5 and 5 4, have 5 and 5: the element of 9 gets 4 + 4.
        """
        output, output_of_baseline = self.output.detach().chunk(2)
        larger = torch.maximum(output, output_of_baseline)
        of_inputs, of_baselines = self._gradients(
            grad_output * (larger - output_of_baseline), grad_output * (output - larger)
        )
        return of_inputs + of_baselines

    def _check_sum(self, contribution: Tensor, of_outputs: Tensor) -> None:
        """Raise a ValueError if the sums differ, for an example, by more than their rounding."""
        terms = torch.cat([contribution.flatten(1), -of_outputs.flatten(1)], 1)
        rounding = torch.finfo(terms.dtype).eps ** 0.5
        if (terms.sum(1).abs() > rounding * terms.abs().sum(1)).any():
            raise ValueError(
                f"exact_attributions: expected {self.name} to be a max pool but got other outputs "
                "than maxima of its input"
            )

    def _gradients(self, of_inputs: Tensor, of_baselines: Tensor) -> tuple[Tensor, Tensor]:
        """From gradients of both halves of ``output`` those of ``leaf``, which is not changed."""
        grad_output = torch.cat([of_inputs, of_baselines])
        (grad,) = torch.autograd.grad(self.output, self.leaf, grad_output, retain_graph=True)
        x, baseline = grad.chunk(2)
        return x, baseline


class _Multiplied(torch.autograd.Function):
    """The output of a call. Its gradient for ``x`` and for ``given`` is the call's multiplier."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return call.output.detach().clone()  # what comes next may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        multiplier = ctx.call.multiplier(grad_output)
        return multiplier, multiplier, None


def with_multiplier(x: Tensor, given: Tensor, call: Call) -> Tensor:
    """``call.output`` as a function of ``x`` and of a copy of it, with the multiplier as gradient.

    captum and shap ask for that of the copy, if they attribute to the input of a layer.
    """
    result: Tensor = _Multiplied.apply(x, given, call)
    return result


class Uncopied:
    """For hooks of a context: a copy of the model would keep them."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "exact_attributions: expected a model that is copied or pickled outside but got a copy "
            "inside, which would stay as the model is inside"
        )
