"""Prediction heads by task: AdapterHub's head, the loss that is summed over micro-batches, and what is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from edge.data.tokens import Batch
from ringtune.errors import JobError

HEAD = "ringtune"
IGNORED = -100  # a target that doesn't count, as in torch.nn.functional.cross_entropy


class HeadCounts(NamedTuple):
    """What one micro-batch yields.

    Attributes:
        loss_sum: scalar tensor, sum over valid targets; keeps its graph.
        num_targets: valid targets.
        num_correct: of these, how many the largest logit hits.
    """

    loss_sum: torch.Tensor
    num_targets: int
    num_correct: int


class Task(Protocol):
    """One task's head."""

    def add(self, model: Any, labels: Sequence[str]) -> nn.Module:
        """Add the head to an ``AutoAdapterModel`` and return it; consumes torch's generator as the library does."""

    def num_targets(self, batch: Batch) -> int:
        """Valid targets of a whole batch: what the summed loss is divided by."""

    def evaluate(self, output: Any, batch: Batch) -> HeadCounts:
        """Loss and hits of a micro-batch from the head's output."""


class SequenceClassification:
    """One class per row."""

    def add(self, model: Any, labels: Sequence[str]) -> nn.Module:
        """AdapterHub's default classification head, with the class names in it."""
        names = dict(enumerate(labels))
        model.add_classification_head(HEAD, num_labels=len(names), id2label=names)
        head: nn.Module = model.heads[HEAD]
        return head

    def num_targets(self, batch: Batch) -> int:
        """Rows with a label."""
        return int((batch.labels != IGNORED).sum())

    def evaluate(self, output: Any, batch: Batch) -> HeadCounts:
        """Summed cross entropy."""
        logits_BC, labels_B = output.logits, batch.labels  # noqa: N806 - B rows, C classes
        loss = nn.functional.cross_entropy(logits_BC, labels_B, ignore_index=IGNORED, reduction="sum")
        correct = int((logits_BC.detach().argmax(dim=-1) == labels_B).sum())
        return HeadCounts(loss_sum=loss, num_targets=self.num_targets(batch), num_correct=correct)


TASKS: Mapping[str, Task] = {"sequence-classification": SequenceClassification()}


def task_of(name: str) -> Task:
    """The task of ``model.task``.

    Raises:
        JobError: not supported.
    """
    if name not in TASKS:
        raise JobError(f"model.task = {name!r} is not supported yet; use one of {', '.join(sorted(TASKS))}")
    return TASKS[name]
