"""Prediction heads by task: AdapterHub's head, the loss that is summed over micro-batches, and what is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from edge.data.tokens import IGNORED, Batch
from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import Skeleton, without_weights
from edge.model.token_loss import token_loss
from ringtune.costs.memory import MOST_LOGIT_BYTES, logits_fit
from ringtune.errors import JobError, ModelError
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION, IMAGE_CLASSIFICATION, LM_HEAD, QUESTION_ANSWERING

HEAD = "ringtune"


class HeadCounts(NamedTuple):
    """What one micro-batch yields.

    Attributes:
        loss_sum: scalar tensor, sum over valid targets; keeps its graph.
        num_targets: valid targets.
        more: what else is counted, by name; summed over micro-batches, batches and owners.
        predictions: what an evaluation scores row by row; None if ``more`` says all.
    """

    loss_sum: torch.Tensor
    num_targets: int
    more: tuple[tuple[str, float], ...] = ()
    predictions: torch.Tensor | None = None


class Task(Protocol):
    """One task's head."""

    def add(self, model: Any, labels: Sequence[str]) -> nn.Module:
        """Add the head to an ``AutoAdapterModel`` and return it; consumes torch's generator as the library does."""

    def connect(self, skeleton: Skeleton, head: nn.Module, weights: SafetensorsFiles) -> None:
        """Read or share what the head has from the pretrained model, after the embedding is real."""

    def num_targets(self, batch: Batch) -> int:
        """Valid targets of a whole batch: what the summed loss is divided by."""

    def run(self, head: Any, last_BTD: torch.Tensor, batch: Batch, more: Mapping[str, Any]) -> HeadCounts:
        """Loss and hits of a micro-batch.

        Args:
            head: what ``add`` gave.
            last_BTD: the model's last hidden state.
            batch: the rows.
            more: keyword arguments that the family has for the head.
        """


class _OneOutput:
    """A task whose head may compute all that it has for a micro-batch at once."""

    def run(self, head: Any, last_BTD: torch.Tensor, batch: Batch, more: Mapping[str, Any]) -> HeadCounts:
        """The head as AdapterHub calls it; its output gets no name here, so that logits end before backward."""
        from transformers.modeling_outputs import BaseModelOutput

        outputs = BaseModelOutput(last_hidden_state=last_BTD)
        return self.evaluate(head(outputs, attention_mask=batch.mask, return_dict=True, **more), batch)

    def evaluate(self, output: Any, batch: Batch) -> HeadCounts:
        """Loss and hits of a micro-batch from the head's output."""
        raise NotImplementedError


class SequenceClassification(_OneOutput):
    """One class per row."""

    def add(self, model: Any, labels: Sequence[str]) -> nn.Module:
        """AdapterHub's default classification head, with the class names in it."""
        names = dict(enumerate(labels))
        model.add_classification_head(HEAD, num_labels=len(names), id2label=names)
        return _head(model)

    def connect(self, skeleton: Skeleton, head: nn.Module, weights: SafetensorsFiles) -> None:
        """Nothing: the head is new."""

    def num_targets(self, batch: Batch) -> int:
        """Rows with a label."""
        return int((batch.labels != IGNORED).sum())

    def evaluate(self, output: Any, batch: Batch) -> HeadCounts:
        """Summed cross entropy."""
        logits_BC, labels_B = output.logits, batch.labels  # B rows, C classes
        loss = nn.functional.cross_entropy(logits_BC, labels_B, ignore_index=IGNORED, reduction="sum")
        correct = int((logits_BC.detach().argmax(dim=-1) == labels_B).sum())
        return HeadCounts(loss_sum=loss, num_targets=self.num_targets(batch), more=(("correct", float(correct)),))


class ImageClassification(SequenceClassification):
    """One class per image."""

    def add(self, model: Any, labels: Sequence[str]) -> nn.Module:
        """AdapterHub's default image head, with the class names in it."""
        names = dict(enumerate(labels))
        model.add_image_classification_head(HEAD, num_labels=len(names), id2label=names)
        return _head(model)


class QuestionAnswering(_OneOutput):
    """Where an answer begins and ends in each window; a window without it points at its first token."""

    def add(self, model: Any, labels: Sequence[str]) -> nn.Module:
        """AdapterHub's default head for spans."""
        model.add_qa_head(HEAD)
        return _head(model)

    def connect(self, skeleton: Skeleton, head: nn.Module, weights: SafetensorsFiles) -> None:
        """Nothing: the head is new."""

    def num_targets(self, batch: Batch) -> int:
        """Windows."""
        return int((batch.labels[:, 0] != IGNORED).sum())

    def evaluate(self, output: Any, batch: Batch) -> HeadCounts:
        """Half the summed cross entropies of start and end; the logits are scored against the answers' texts."""
        both = ((output.start_logits, batch.labels[:, 0]), (output.end_logits, batch.labels[:, 1]))
        losses = [
            nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            for logits, labels in both
        ]
        return HeadCounts(
            loss_sum=(losses[0] + losses[1]) / 2,
            num_targets=self.num_targets(batch),
            predictions=torch.stack([output.start_logits.detach(), output.end_logits.detach()], dim=-1),
        )


class CausalLanguageModel(_OneOutput):
    """The next token, with the pretrained decoder as head: frozen, so that nothing of it ever travels."""

    def add(self, model: Any, labels: Sequence[str]) -> nn.Module:
        """The decoder as AdapterHub keeps it for a loaded language model; without weights until ``connect``."""
        from adapters.heads import CausalLMHead

        with without_weights():
            head = CausalLMHead(model, HEAD, layers=1, activation_function=None, layer_norm=False, bias=False)
        model.add_prediction_head(head)
        return _head(model)

    def connect(self, skeleton: Skeleton, head: nn.Module, weights: SafetensorsFiles) -> None:
        """Take the token table itself, or the decoder that the files have."""
        decoder, table = head.get_output_embeddings(), skeleton.model.get_input_embeddings().weight  # type: ignore[operator]
        weight = table
        if not skeleton.model.config.tie_word_embeddings:
            stored = weights.find(LM_HEAD)
            if stored is None:
                raise ModelError(
                    f"{weights.folder} has no tensor {LM_HEAD}: it was saved without its decoder; fetch the "
                    "language model, not its base"
                )
            weight = weights.read(stored).to(device=table.device, dtype=table.dtype)
            if weight.shape != table.shape:
                raise ModelError(
                    f"{weights.folder}: tensor {LM_HEAD} has shape {list(weight.shape)}, config.json asks for "
                    f"{list(table.shape)}; fetch the model again"
                )
        decoder.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
        decoder.weight.requires_grad_(False)

    def num_targets(self, batch: Batch) -> int:
        """Tokens that have a token before them in their row."""
        return int((batch.labels[:, 1:] != IGNORED).sum())

    def run(self, head: Any, last_BTD: torch.Tensor, batch: Batch, more: Mapping[str, Any]) -> HeadCounts:
        """Logits of all tokens at once if they are few, otherwise a chunk of tokens at a time."""
        table_VD = head.get_output_embeddings().weight  # V vocabulary
        vocabulary, item_bytes = table_VD.shape[0], table_VD.element_size()
        if logits_fit(last_BTD.shape[:2].numel(), vocabulary, item_bytes):
            return super().run(head, last_BTD, batch, more)
        chunk = max(1, MOST_LOGIT_BYTES // (vocabulary * item_bytes))
        found = token_loss(last_BTD.flatten(0, 1), table_VD, _next_tokens(batch), chunk=chunk, ignored=IGNORED)
        return self._counts(found.loss_sum, found.num_correct, batch)

    def evaluate(self, output: Any, batch: Batch) -> HeadCounts:
        """Summed cross entropy of the next tokens.

        The labels are moved and not the logits: cutting the last token off would copy a vocabulary's worth of
        numbers for every token, twice with the gradient.
        """
        logits_NV = output.logits.flatten(0, 1)  # N tokens, V vocabulary
        labels_N = _next_tokens(batch)
        loss = nn.functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
        return self._counts(loss, int((logits_NV.detach().argmax(dim=-1) == labels_N).sum()), batch)

    def _counts(self, loss_sum: torch.Tensor, correct: int, batch: Batch) -> HeadCounts:
        count = self.num_targets(batch)
        return HeadCounts(
            loss_sum=loss_sum, num_targets=count, more=(("correct", float(correct)), ("tokens", float(count)))
        )


def _next_tokens(batch: Batch) -> torch.Tensor:
    """What each token is to predict (N); the last one of a row predicts nothing."""
    return nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten()


TASKS: Mapping[str, Task] = {
    CLASSIFICATION: SequenceClassification(),
    QUESTION_ANSWERING: QuestionAnswering(),
    CAUSAL_LM: CausalLanguageModel(),
    IMAGE_CLASSIFICATION: ImageClassification(),
}


def task_of(name: str) -> Task:
    """The task of ``model.task``.

    Raises:
        JobError: not supported.
    """
    if name not in TASKS:
        raise JobError(f"model.task = {name!r} is not supported yet; use one of {', '.join(sorted(TASKS))}")
    return TASKS[name]


def _head(model: Any) -> nn.Module:
    head: nn.Module = model.heads[HEAD]
    return head
