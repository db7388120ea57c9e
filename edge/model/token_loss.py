"""Compute the loss over a large vocabulary without the logits of all tokens at once.

Logits of 512 tokens over 32,000 words take 65 MB, and three times that with their probabilities and gradient: more than
the blocks of a small model. So tokens are taken a chunk at a time, and a chunk's logits become its gradient in place::

    logits  ->  minus the largest  ->  exp, over the sum  ->  minus 1 at the target  ->  times the table = gradient

Where a model caps its logits, ``cap * tanh(logit / cap)`` takes the place of each, and what the gradient is multiplied
by for it, ``1 - tanh ** 2``, is kept in a second chunk.

The gradients of the hidden state and of a table that trains are ready when the loss is, because nothing comes after a
sum but a factor. Tokens without a target cost nothing.

N tokens, V words, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from edge.model.frozen.matrix import mm_into


class TokenLoss(NamedTuple):
    """Summed loss and number of hits of some tokens.

    Attributes:
        loss_sum: scalar tensor, summed cross entropy; keeps its graph.
        num_correct: tokens whose largest logit is the target's.
    """

    loss_sum: torch.Tensor
    num_correct: int


def token_loss(
    hidden_ND: torch.Tensor,
    table_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    chunk: int,
    ignored: int,
    cap: float = 0.0,
) -> TokenLoss:
    """Sum the cross entropy of ``hidden_ND @ table_VD.T`` over the tokens with a target, a chunk at a time.

    Args:
        hidden_ND: what the decoder gets.
        table_VD: the decoder.
        labels_N: target of each token.
        chunk: tokens whose logits may be there at once.
        ignored: the label of a token without a target.
        cap: of the size of each logit; 0 = none.
    """
    places = (labels_N != ignored).nonzero().squeeze(-1)
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_ND, table_VD)]
    loss, correct = _Chunked.apply(hidden_ND, table_VD, labels_N, places, chunk, cap, *wants)  # type: ignore[no-untyped-call]
    return TokenLoss(loss_sum=loss, num_correct=int(correct))


class _Chunked(torch.autograd.Function):
    """Computes loss and gradient in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        table_VD: torch.Tensor,
        labels_N: torch.Tensor,
        places: torch.Tensor,
        chunk: int,
        cap: float,
        wants_hidden: bool,
        wants_table: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the chunks' losses and hits; all of them use the same memory."""
        grad_ND = torch.zeros_like(hidden_ND) if wants_hidden else None
        grad_VD = torch.zeros_like(table_VD) if wants_table else None
        loss = hidden_ND.new_zeros(())
        correct = torch.zeros((), dtype=torch.int64, device=hidden_ND.device)
        work_CV = hidden_ND.new_empty(min(chunk, len(places)), table_VD.shape[0])  # C tokens of a chunk
        slope_CV = torch.empty_like(work_CV) if cap else work_CV
        for first in range(0, len(places), chunk):
            some = places[first : first + chunk]
            labels_C1 = labels_N[some].unsqueeze(-1)
            values_CV = work_CV[: len(some)]
            mm_into(values_CV, hidden_ND[some], table_VD.T)
            if cap:
                torch.mul(values_CV.div_(cap).tanh_(), values_CV, out=slope_CV[: len(some)])
                values_CV *= cap
            largest_C1, found_C1 = values_CV.max(dim=-1, keepdim=True)
            correct += (found_C1 == labels_C1).sum()
            values_CV -= largest_C1
            at_target_C1 = values_CV.gather(-1, labels_C1)
            values_CV.exp_()
            sums_C1 = values_CV.sum(dim=-1, keepdim=True)
            loss += (sums_C1.log() - at_target_C1).sum()
            if wants_hidden or wants_table:
                values_CV /= sums_C1
                values_CV.scatter_add_(-1, labels_C1, -torch.ones_like(at_target_C1))
                if cap:
                    values_CV *= slope_CV[: len(some)].neg_().add_(1)
            if grad_ND is not None:
                grad_ND[some] = values_CV @ table_VD  # a table that is held small multiplies by itself
            if grad_VD is not None:
                grad_VD.addmm_(values_CV.T, hidden_ND[some])
        ctx.grads = (grad_ND, grad_VD)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Multiply the ready gradients by the loss's gradient; a second call is refused."""
        ready, ctx.grads = ctx.grads, (None, None)
        if all(grad is None for grad in ready):
            raise RuntimeError("the loss of these tokens was computed without a gradient, or went backward already")
        return (*(grad if grad is None else grad.mul_(grads[0]) for grad in ready), *(None,) * 6)
