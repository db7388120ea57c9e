"""Prediction heads by task: AdapterHub's head, its summed loss, and the counts of an evaluation.

A language model never has the logits of many tokens at once: for 512 tokens over 32,000 words they take 65 MB, and
three times that with probabilities and gradient. So the loss is computed by chunks of tokens, and a chunk's logits
become its gradient in place::

    logits  ->  minus the largest  ->  exp, over the sum  ->  minus 1 at the target  ->  times the table = gradient

With a cap each logit is ``cap * tanh(logit / cap)``, and the factor of its gradient, ``1 - tanh ** 2``, is kept in a
second chunk.

The gradients of hidden state and table are ready with the loss, because only a factor follows the sum. Tokens without a
target cost nothing.

N tokens, V words, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from edge.data.tokens import IGNORED, Batch
from edge.model.frozen_weights import mm_into
from edge.model.prediction_heads import Head, ModelWithHead
from edge.model.skeleton import Skeleton, without_weights
from edge.model.tensor_files import SafetensorsFiles, first_not_finite
from ringtune.costs.memory_sizes import MAX_LOGIT_BYTES, logits_fit
from ringtune.errors import DivergedError, ModelError
from ringtune.models.families import family_named
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.models.folder import has_head_bias


class TokenLoss(NamedTuple):
    """Summed loss and number of hits of some tokens.

    Attributes:
        loss_sum: scalar tensor with graph, summed cross entropy.
        num_correct: number of tokens with the largest logit at the target.
    """

    loss_sum: torch.Tensor
    num_correct: int


def token_loss(
    hidden_ND: torch.Tensor,
    table_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    chunk: int,
    cap: float = 0.0,
    bias_V: torch.Tensor | None = None,
) -> TokenLoss:
    """Sum the cross entropy of ``hidden_ND @ table_VD.T`` over the tokens with a target, chunk by chunk.

    ``chunk`` tokens have logits in memory at once. ``cap`` limits the logits' magnitude; 0 = none. ``bias_V`` is added
    to them.
    """
    places = (labels_N != IGNORED).nonzero().squeeze(-1)
    wants = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (hidden_ND, table_VD, bias_V)
    ]
    loss, correct = _Chunked.apply(hidden_ND, table_VD, labels_N, places, chunk, cap, bias_V, *wants)  # type: ignore[no-untyped-call]
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
        bias_V: torch.Tensor | None,
        wants_hidden: bool,
        wants_table: bool,
        wants_bias: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the losses and hits of all chunks, which share one buffer."""
        grad_ND = torch.zeros_like(hidden_ND) if wants_hidden else None
        grad_VD = torch.zeros_like(table_VD) if wants_table else None
        grad_V = torch.zeros_like(bias_V) if wants_bias and bias_V is not None else None
        loss = hidden_ND.new_zeros(())
        correct = torch.zeros((), dtype=torch.int64, device=hidden_ND.device)
        work_CV = hidden_ND.new_empty(min(chunk, len(places)), table_VD.shape[0])  # C tokens of a chunk
        slope_CV = torch.empty_like(work_CV) if cap else work_CV
        for first in range(0, len(places), chunk):
            some = places[first : first + chunk]
            labels_C1 = labels_N[some].unsqueeze(-1)
            values_CV = work_CV[: len(some)]
            mm_into(values_CV, hidden_ND[some], table_VD.T)
            if bias_V is not None:
                values_CV += bias_V
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
            if wants_hidden or wants_table or wants_bias:
                values_CV /= sums_C1
                values_CV.scatter_add_(-1, labels_C1, -torch.ones_like(at_target_C1))
                if cap:
                    values_CV *= slope_CV[: len(some)].neg_().add_(1)
            if grad_ND is not None:
                grad_ND[some] = values_CV @ table_VD  # a ``FrozenMatrix`` multiplies without a float32 copy
            if grad_VD is not None:
                grad_VD.addmm_(values_CV.T, hidden_ND[some])
            if grad_V is not None:
                grad_V += values_CV.sum(dim=0)
        ctx.grads = (grad_ND, grad_VD, grad_V)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the computed gradients by the loss's gradient; a second call is refused."""
        ready, ctx.grads = ctx.grads, (None, None, None)
        if all(grad is None for grad in ready):
            raise RuntimeError("the loss of these tokens was computed without a gradient, or went backward already")
        hidden, table, bias = (grad if grad is None else grad.mul_(grads[0]) for grad in ready)
        return (hidden, table, *(None,) * 4, bias, *(None,) * 3)


_NO_SHARE = -1e4
"""Logit of padding: its exponential is 0, and a target there, as in measured batches, has a finite loss."""
NUMBER = "number"
"""Label of the single output of a regression head; a config with one label is a regression."""


class HeadCounts(NamedTuple):
    """Summed loss and counts of one micro-batch.

    Attributes:
        loss_sum: scalar tensor with graph, sum over valid targets.
        more: further counts by name, summed over micro-batches, batches and owners.
        predictions: for row-by-row scores of an evaluation; None if ``more`` suffices.
    """

    loss_sum: torch.Tensor
    num_targets: int
    more: tuple[tuple[str, float], ...] = ()
    predictions: torch.Tensor | None = None


class Task(NamedTuple):
    """Head of one task: construction, loss and counts.

    Attributes:
        add: (model, labels) -> head, added to the model; a new one draws from torch's generator.
        num_targets: (batch) -> number of valid targets of a whole batch, the divisor of the summed loss.
        evaluate: (logits, batch) -> loss and hits of a micro-batch.
        set_pretrained: (skeleton, head, weights); of a head that is not new; None = it is.
        in_chunks: (head, last hidden state, batch) -> the same as ``evaluate`` by chunks, or None where logits are
            small; None = always all logits at once.
    """

    add: Callable[[ModelWithHead, Sequence[str]], Head]
    num_targets: Callable[[Batch], int]
    evaluate: Callable[[torch.Tensor, Batch], HeadCounts]
    set_pretrained: Callable[[Skeleton, Head, SafetensorsFiles], None] | None = None
    in_chunks: Callable[[Any, torch.Tensor, Batch], HeadCounts | None] | None = None

    def connect(self, skeleton: Skeleton, head: Head, weights: SafetensorsFiles) -> None:
        """Set the pretrained tensors of a head that is not new, after the embedding is real."""
        if self.set_pretrained is not None:
            self.set_pretrained(skeleton, head, weights)

    def run(self, head: Any, last_BTD: torch.Tensor, batch: Batch, more: Mapping[str, Any]) -> HeadCounts:
        """Compute loss and hits of a micro-batch; ``more`` are the keyword arguments of ``FamilyForward.finish``.

        The logits have no name here, so that they are freed before backward.
        """
        counts = self.in_chunks(head, last_BTD, batch) if self.in_chunks is not None else None
        return self.evaluate(head(last_BTD, **more), batch) if counts is None else counts


def text_logits(head: Head, last_BTD: torch.Tensor) -> torch.Tensor:
    """Compute the logits (T, V) of the token after each of a text of one row, float32 on the CPU.

    Raises ``DivergedError``: none of a token's is the largest.
    """
    logits_BTV, cap = head(last_BTD), head.logit_cap
    capped_BTV = cap * torch.tanh(logits_BTV / cap) if cap else logits_BTV
    logits: torch.Tensor = capped_BTV[0].float().cpu()
    return require_largest(logits)


def require_largest(logits: torch.Tensor) -> torch.Tensor:
    """Return logits; raises ``DivergedError`` where the largest along the last dimension is NaN or infinite."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise DivergedError(
            "logits of the head are NaN or infinite, which predict nothing; set model.dtype = 'float32' in the run's "
            "job.toml if that is float16, or train again with a lower train.learning_rate"
        )
    return logits


def _of_classes(head_type: str, counted: str = "") -> Task:
    """Make the task to predict one class per row of text or image, or the tag of each word at its first token.

    Args:
        head_type: AdapterHub's name of the head.
        counted: name of the number of targets in the counts; empty where it is the number of rows.
    """

    def evaluate(logits: torch.Tensor, batch: Batch) -> HeadCounts:
        logits_NC, labels_N = logits.flatten(0, -2), batch.labels.flatten()  # N rows or tokens, C classes
        loss = nn.functional.cross_entropy(logits_NC, labels_N, ignore_index=IGNORED, reduction="sum")
        predicted = logits.detach().argmax(dim=-1)
        count, correct = _with_label(batch), int((predicted == batch.labels).sum())
        more = {"correct": float(correct), **({counted: float(count)} if counted else {})}
        return HeadCounts(loss, count, tuple(more.items()), predicted)

    return Task(lambda model, labels: model.add_classes(head_type, labels), _with_label, evaluate)


def _with_label(batch: Batch) -> int:
    return int((batch.labels != IGNORED).sum())


def _add_number(model: ModelWithHead, labels: Sequence[str]) -> Head:
    """Add a classification head with one output, AdapterHub's regression head."""
    return model.add_classes("classification", (NUMBER,))


def _errors(logits: torch.Tensor, batch: Batch) -> HeadCounts:
    """Sum the squared and the absolute errors of one number per row of text, or pair of texts."""
    said_B = logits.squeeze(-1)  # B rows
    errors_B = said_B - batch.labels.to(said_B.dtype)
    absolute = float(errors_B.detach().abs().sum())
    return HeadCounts(errors_B.square().sum(), len(batch.labels), (("absolute_sum", absolute),), said_B.detach())


def _add_span(model: ModelWithHead, labels: Sequence[str]) -> Head:
    """Add a head for the first and last token of an answer, with AdapterHub's default names of its two outputs."""
    return model.add_classes("question_answering", ("LABEL_0", "LABEL_1"))


def _windows(batch: Batch) -> int:
    return int((batch.labels[:, 0] != IGNORED).sum())


def _spans(logits: torch.Tensor, batch: Batch) -> HeadCounts:
    """Sum half the cross entropies of start and end; return the logits, to be scored against the answers' texts.

    Without an answer both are token 0. Padding gets no probability, because its amount depends on the neighbours of a
    row.
    """
    losses = [
        nn.functional.cross_entropy(
            logits_BT1.squeeze(-1).masked_fill(batch.mask == 0, _NO_SHARE),
            batch.labels[:, which],
            ignore_index=IGNORED,
            reduction="sum",
        )
        for which, logits_BT1 in enumerate(torch.split(logits, 1, dim=-1))
    ]
    return HeadCounts((losses[0] + losses[1]) / 2, _windows(batch), predictions=logits.detach())


def _add_decoder(model: ModelWithHead, labels: Sequence[str]) -> Head:
    """Add the pretrained decoder, without weights until it is connected; it is frozen unless all parameters train."""
    bias = has_head_bias(family_named(model.config.model_type), model.config.to_dict())
    with without_weights():
        return model.add_decoder(bias=bias)


def _connect_decoder(skeleton: Skeleton, head: Head, weights: SafetensorsFiles) -> None:
    """Use the token table as the decoder's weight, or read the decoder from the files if they are not tied.

    A tied decoder that trains is a parameter of its own on the table's memory, with a gradient of its own.
    """
    decoder: Any = head.get_output_embeddings()
    table = skeleton.model.get_input_embeddings().weight
    weight, name = table, "of the token table"
    if not skeleton.model.config.tie_word_embeddings:
        name = f"{skeleton.layout.head}.weight"
        stored = weights.find(name, skeleton.layout)
        if stored is None:
            raise ModelError(
                f"{weights.folder} has no tensor {name}: it was saved without its decoder; fetch the "
                "language model, not its base"
            )
        if skeleton.full_parameters:
            weight = weights.read(stored, table.dtype, private=True)
        else:
            weight = weights.read_frozen(stored, table.dtype)
        weight = weight.to(table.device)
        if weight.shape != table.shape:
            raise ModelError(
                f"{weights.folder}: tensor {name} has shape {list(weight.shape)}, config.json asks for "
                f"{list(table.shape)}; fetch the model again"
            )
    if first_not_finite({name: weight.detach()}):
        raise ModelError(
            f"{weights.folder}: tensor {name} has numbers that are not finite; the model is damaged: fetch it "
            "again or give another one"
        )
    shares = weight is table and not skeleton.full_parameters
    trains = skeleton.full_parameters
    decoder.weight = weight if shares else nn.Parameter(weight.detach(), requires_grad=trains)
    decoder.weight.requires_grad_(trains)
    if decoder.bias is not None:
        if (stored := weights.find(name := f"{skeleton.layout.head}.bias", skeleton.layout)) is None:
            raise ModelError(f"{weights.folder} has no tensor {name}; fetch the language model again")
        bias = weights.read(stored, table.dtype, private=True)
        decoder.bias = nn.Parameter(bias.to(table.device), requires_grad=trains)


def _with_token_before(batch: Batch) -> int:
    return int((batch.labels[:, 1:] != IGNORED).sum())


def _by_chunks(head: Any, last_BTD: torch.Tensor, batch: Batch) -> HeadCounts | None:
    """Compute the loss of the next tokens by chunks, if all logits are large.

    Capped logits are always computed by chunks, of half the size, because each needs a second number.
    """
    decoder: Any = head.get_output_embeddings()
    table_VD = decoder.weight  # V vocabulary
    vocabulary, item_bytes = table_VD.shape[0], last_BTD.element_size()
    cap = head.logit_cap
    if not cap and logits_fit(last_BTD.shape[:2].numel(), vocabulary, item_bytes):
        return None
    chunk = max(1, MAX_LOGIT_BYTES // (vocabulary * item_bytes) // (2 if cap else 1))
    labels_N, hidden_ND = _next_tokens(batch), last_BTD.flatten(0, 1)
    loss = token_loss(hidden_ND, table_VD, labels_N, chunk=chunk, cap=cap, bias_V=decoder.bias)
    return _token_counts(loss.loss_sum, loss.num_correct, batch)


def _tokens(logits: torch.Tensor, batch: Batch) -> HeadCounts:
    """Sum the cross entropy of the next tokens. Labels are shifted, as logits without the last token are a copy."""
    logits_NV = logits.flatten(0, 1)  # N tokens, V vocabulary
    labels_N = _next_tokens(batch)
    loss = nn.functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    return _token_counts(loss, int((logits_NV.detach().argmax(dim=-1) == labels_N).sum()), batch)


def _token_counts(loss_sum: torch.Tensor, correct: int, batch: Batch) -> HeadCounts:
    count = _with_token_before(batch)
    return HeadCounts(loss_sum, count, (("correct", float(correct)), ("tokens", float(count))))


def _next_tokens(batch: Batch) -> torch.Tensor:
    """Return the target of each token (N): a row 5, 6, 7 gives 6, 7, ``IGNORED``."""
    return nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten()


_LANGUAGE: Final = Task(_add_decoder, _with_token_before, _tokens, _connect_decoder, _by_chunks)
TASKS: Final[Mapping[str, Task]] = {
    CLASSIFICATION: _of_classes("classification"),
    REGRESSION: Task(_add_number, lambda batch: len(batch.labels), _errors),
    TAGGING: _of_classes("tagging", "words"),
    QUESTION_ANSWERING: Task(_add_span, _windows, _spans),
    CAUSAL_LM: _LANGUAGE,
    CHAT: _LANGUAGE,
    IMAGE_CLASSIFICATION: _of_classes("image_classification"),
}


def task_of(name: str) -> Task:
    """Return the task of a job's ``model.task``."""
    return TASKS[name]
