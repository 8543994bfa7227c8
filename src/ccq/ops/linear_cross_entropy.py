"""The loss of the next token without all logits at once.

Legend: N targets, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import accumulation_dtype
from ccq.ops.operators import differentiable_once

LOGITS = 2**27
"""Logits that are held at a time: half a GiB in float32, 4,194 targets of a vocabulary of 32,000."""


class WeightedLoss(NamedTuple):
    total: Tensor
    """Scalar: sum over targets of weight times loss; the gradient comes from it."""
    each: Tensor
    """[N], the loss of every target in nats; without gradient, and 0 where the weight is."""


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, *, logits: int = LOGITS
) -> WeightedLoss:
    """Weighted sum of -log softmax(head @ hidden_i)[target_i].

    The targets are taken in pieces of at most `logits` logits. The gradient of a piece is computed while its logits are
    there, and only its products with head and hidden are kept: the logits are computed once, and the backward pass of
    the head is done when the forward pass ends. This way of fusing the two is that of P.-L. Hsu et al., Liger Kernel,
    arXiv:2410.10989.

    Written here because the well-kept ones do not fit: Liger's and flash-linear-attention's need a GPU, torch's own
    comes with 2.13, and none takes a weight for each target, with which a loss can be the mean over all targets of
    all micro-batches and processes, or the sum of two such means.

    Args:
        hidden: [N, hidden size].
        head: [V, hidden size], the dtype of hidden.
        targets: [N] int64 in 0 ... V - 1; anything where the weight is 0.
        weights: [N] float32, or float64 for float64 hidden; not differentiated.
        logits: most logits held at a time.

    The sums are float32 (float64 for float64 input), whatever the dtype of the products.
    """
    gradients = None
    if torch.is_grad_enabled():
        gradients = _Gradients(hidden.shape, head.detach(), hidden.requires_grad, head.requires_grad)
    total, each = _LinearCrossEntropy.apply(hidden, head, targets, weights, logits, gradients)
    return WeightedLoss(total, each)


class _Gradients:
    """What the gradients are gathered in; None for one that nobody wants."""

    def __init__(self, shape: torch.Size, head: Tensor, for_hidden: bool, for_head: bool) -> None:
        self.hidden = head.new_empty(shape) if for_hidden else None
        self.head = torch.zeros_like(head, dtype=accumulation_dtype(head.dtype)) if for_head else None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        logits: int,
        gradients: _Gradients | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(hidden.dtype)
        counted = weights != 0
        # Whatever stands at a target that does not count must be no index out of range.
        targets = torch.where(counted, targets, 0)
        each = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        rows = max(logits // head.shape[0], 1)
        for start in range(0, len(targets), rows):
            piece = slice(start, start + rows)
            scores = (hidden[piece] @ head.t()).to(dtype)
            target = targets[piece, None]
            highest = scores.logsumexp(1, keepdim=True)
            each[piece] = (highest - scores.gather(1, target)).squeeze(1)
            if gradients is None:
                continue
            probabilities = scores.sub_(highest).exp_()
            probabilities.scatter_add_(1, target, torch.full_like(highest, -1))
            difference = probabilities.mul_(weights[piece, None]).to(hidden.dtype)
            if gradients.hidden is not None:
                gradients.hidden[piece] = difference @ head
            if gradients.head is not None:
                gradients.head += difference.t() @ hidden[piece]
        each.masked_fill_(~counted, 0)
        ctx.gradients, ctx.dtype = gradients, hidden.dtype
        ctx.mark_non_differentiable(each)
        return torch.dot(each, weights.to(dtype)), each

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(ctx: Any, total: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        gradients = ctx.gradients
        hidden = None if gradients.hidden is None else gradients.hidden * total.to(ctx.dtype)
        head = None if gradients.head is None else (gradients.head * total).to(ctx.dtype)
        return hidden, head, None, None, None, None
