"""The parts of the model that only an owner has: the embedding and the head.

The head is the one trained part that moves: at a hand-over it travels with its optimizer state, so that the result
is that of one process.

B rows of a micro-batch, T tokens, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from edge.data.tokens import Batch
from edge.model.dropout import HEAD_UNIT, seed_unit
from edge.model.heads import Task
from edge.model.optimizers import apply_update, drop_state, make_optimizer
from edge.model.skeleton import Skeleton
from edge.model.slice import set_mode
from edge.model.tensor_bytes import is_finite
from edge.model.training_state import Prefixes, TrainingState
from ringtune.engine.diverged import LOWER_THE_RATE
from ringtune.errors import DivergedError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorFile, write_tensors
from ringtune.jobs.job import Train

_PREFIXES = Prefixes(value="param/", state="state/")
_HANDED_OVER = "the head that was handed over"


class HeadResult(NamedTuple):
    """Loss, counts and gradient of the head for one micro-batch.

    Attributes:
        values: ``loss_sum``, ``count`` and what the task counts.
        grad: of the hidden state (B, T, D), None without backward.
        predictions: what an evaluation scores row by row, None if there is nothing more than ``values``.
    """

    values: tuple[tuple[str, float], ...]
    grad: torch.Tensor | None
    predictions: torch.Tensor | None = None


class OwnerParts:
    """Runs and trains the embedding and head of one owner.

    Args:
        skeleton: after ``materialise``.
        head: the head module of the skeleton.
        task: its loss.
        train: optimizer, dropout and seed.

    Attributes:
        head: the module.
        parameters: those of it that train, by name.
    """

    def __init__(self, skeleton: Skeleton, head: torch.nn.Module, task: Task, train: Train) -> None:
        self._skeleton = skeleton
        self.head = head
        self._task = task
        self._train = train
        self.parameters = {name: value for name, value in head.named_parameters() if value.requires_grad}
        self._optimizer = make_optimizer(train, list(self.parameters.values()))

    def embed(self, batch: Batch) -> torch.Tensor:
        """Embed token ids or images as the hidden state (B, T, D) that enters block 0; frozen, without dropout."""
        from adapters.context import ForwardContext

        base = self._skeleton.base
        with torch.no_grad(), ForwardContext(base, input_ids=batch.ids, attention_mask=batch.mask):
            return self._skeleton.family.embed(base, batch)

    def num_targets(self, batch: Batch) -> int:
        """Number of valid targets of a whole batch."""
        return self._task.num_targets(batch)

    def evaluate(self, hidden_BTD: torch.Tensor, batch: Batch) -> HeadResult:
        """Compute loss and hits without graph and dropout."""
        set_mode(self.head, train=False)
        with torch.no_grad():
            return self._result(hidden_BTD, batch, None, 1)

    def train_step(
        self,
        hidden_BTD: torch.Tensor,
        batch: Batch,
        *,
        num_targets: int,
        at: tuple[int, int] | None,
    ) -> HeadResult:
        """Compute the loss and the gradient of the hidden state, and add the head's own gradients up.

        Args:
            hidden_BTD: leaves the last block.
            batch: the rows of this micro-batch.
            num_targets: valid targets of the whole batch, which the loss is divided by.
            at: (step, micro-batch), for dropout; None = without.
        """
        set_mode(self.head, train=at is not None)
        if at is not None and self._train.dropout > 0:
            seed_unit(self._train.seed, *at, HEAD_UNIT)
        with torch.enable_grad():
            leaf_BTD = hidden_BTD.detach().requires_grad_(True)
            return self._result(leaf_BTD, batch, leaf_BTD, num_targets)

    def _result(
        self,
        hidden_BTD: torch.Tensor,
        batch: Batch,
        leaf: torch.Tensor | None,
        num_targets: int,
    ) -> HeadResult:
        last_BTD, more = self._skeleton.family.finish(self._skeleton.base, hidden_BTD, batch)
        counts = self._task.run(self.head, last_BTD, batch, more)
        if leaf is not None:
            torch.autograd.backward(counts.loss_sum / num_targets)
        values = (("loss_sum", float(counts.loss_sum.detach())), ("count", float(counts.num_targets)), *counts.more)
        if leaf is not None:
            return HeadResult(values=values, grad=leaf.grad)
        return HeadResult(values=values, grad=None, predictions=counts.predictions)

    def update(self, learning_rate: float) -> None:
        """Do one optimizer step of the head."""
        if self._optimizer is not None:
            apply_update(self._optimizer, learning_rate)

    def drop_grads(self) -> None:
        """Drop the head's gradients, which no update will use."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def to_blob(self) -> Pieces:
        """Return parameters, moments and step counts as one safetensors file, without frozen tensors.

        Every node has the frozen ones already. The content is read when it is gone through: the head must not change
        before.
        """
        return write_tensors(self._state().tensors())

    def load_blob(self, data: Pieces, *, where: str = _HANDED_OVER) -> None:
        """Replace parameters, moments and step counts by those that ``to_blob`` of another owner gave.

        What is held of ``data`` in memory is let go of on the way.

        Args:
            data: the file.
            where: names it in errors.

        Raises:
            IntegrityError: unreadable, or tensors with other names, shapes or types than a head of this run.
            DivergedError: numbers that are not finite.
        """
        state, file = self._state(where), TensorFile(data, where=where)
        state.check(file)
        for name in file.infos:
            if not is_finite(file.tensor(name)):
                raise DivergedError(
                    f"the training diverged: {where} has {name} with numbers that are not finite; {LOWER_THE_RATE}"
                )
        state.load(file)

    def drop_state(self) -> None:
        """Free moments and step counts of a head that was handed over: it comes back with those of others."""
        if self._optimizer is not None:
            drop_state(self._optimizer)

    def _state(self, where: str = _HANDED_OVER) -> TrainingState:
        return TrainingState(
            values=self._travelling(),
            parameters=self.parameters,
            optimizer=self._optimizer,
            prefixes=_PREFIXES,
            where=where,
            part="head",
        )

    def _travelling(self) -> dict[str, torch.Tensor]:
        """Return the head's tensors without the frozen ones, by name."""
        frozen = {name for name, value in self.head.named_parameters() if not value.requires_grad}
        return {name: value for name, value in self.head.state_dict().items() if name not in frozen}
