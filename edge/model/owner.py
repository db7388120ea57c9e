"""Embedding and head of an owner, and the names of their trained tensors.

With adapters, a trained head travels with its optimizer state at a hand-over, so that the result is that of one
process, and so does an invertible adapter, which is the embedding's unit then. Where all parameters train, every owner
keeps copies of embedding and head, and gets the gradients of the other owners instead (``edge.model.unit_grads``). The
units are then::

    embedding   token table, positions, their norm                    wte.weight, embeddings.LayerNorm.bias, ...
    head        last norm, decoder of its own, or a new head          ln_f.weight, lm_head.weight, heads.ringtune.1.bias

A tied tensor belongs to the embedding. The head computes with a stand-in, another parameter on the same memory, so that
the two gradients are separate: their sum has the same bits in whatever order the backwards run. So does the inverse of
an invertible adapter, before a language model's decoder.

B rows of a micro-batch, T tokens, D model width.

Source: HiFT, section III-A (the embedding is the bottom unit, the head the top one).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from edge.data.tokens import Batch, check_ids
from edge.model.heads import Task, text_logits
from edge.model.optimizers import NamePrefixes, TrainingState, UnitOptimizers
from edge.model.prediction_heads import HEAD, Head
from edge.model.skeleton import ADAPTER, EMBEDDING_UNIT, HEAD_UNIT, Skeleton, owner_modules, seed_unit
from edge.model.slice import set_mode
from edge.model.tensor_files import digest_of, first_not_finite, is_finite, require_finite_values
from edge.model.unit_grads import collect_sparse, complete, grad_blob
from ringtune.engine.failure_texts import LOWER_THE_RATE
from ringtune.errors import DivergedError, ModelError
from ringtune.job.job import Train
from ringtune.models.adapter_config import INVERTIBLE
from ringtune.schedule.units import EMBEDDING, Units, head_of
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, write_tensors

_PREFIXES = NamePrefixes(value="param/", state="state/")
_HANDED_OVER = "the head that was handed over"


class HeadResult(NamedTuple):
    """Loss, counts and gradient of the head for one micro-batch.

    Attributes:
        values: ``loss_sum``, ``count`` and the task's counts.
        grad: of the hidden state (B, T, D), None without backward.
        predictions: for row-by-row scores of an evaluation; None if ``values`` suffice.
    """

    values: tuple[tuple[str, float], ...]
    grad: torch.Tensor | None
    predictions: torch.Tensor | None = None


class OwnerParts:
    """Runs and trains the embedding and head of one owner.

    Args:
        skeleton: after ``materialise``.
        train: optimizer, dropout and seed.

    Attributes:
        units: trained parameters of embedding and head, by unit and name; see ``owner_units``.
        parameters: of both units, by name.
    """

    def __init__(self, skeleton: Skeleton, head: Head, task: Task, train: Train) -> None:
        self._skeleton, self.head, self.task = skeleton, head, task
        self._train = train
        self.units = owner_units(skeleton, head)
        self.parameters = {name: value for unit in self.units.values() for name, value in unit.items()}
        self._head_unit = head_of(len(skeleton.blocks))
        top = skeleton.layout.blocks_path.partition(".")[0]
        self._embedding = [child for name, child in skeleton.base.named_children() if name != top]
        self._inverse = inverse_of(skeleton, head)
        self._tied = (*tied_table(skeleton, head), *_stand_ins(skeleton, self._inverse))
        self.optimizers = UnitOptimizers(train, self.units)
        if skeleton.full_parameters:
            collect_sparse(module for _, module in owner_modules(skeleton))

    def embed(self, batch: Batch) -> torch.Tensor:
        """Embed token ids or images as the hidden state (B, T, D) of block 0, without graph and dropout."""
        self._set_embedding_mode(train=False)
        with torch.no_grad():
            return self._embed(batch)

    def embed_to_train(self, batch: Batch, at: tuple[int, int] | None) -> torch.Tensor:
        """Embed as ``embed``, with a graph; ``at`` is (step, micro-batch) for dropout, None = without."""
        self._set_embedding_mode(train=at is not None)
        if at is not None and self._train.dropout > 0:
            seed_unit(self._train.seed, *at, EMBEDDING_UNIT)
        with torch.enable_grad():
            return self._embed(batch)

    def _embed(self, batch: Batch) -> torch.Tensor:
        base = self._skeleton.base
        check_ids(batch.ids, base, batch.token_type_ids)
        hidden_BTD = self._skeleton.family.embed(base, batch)
        self._require_finite(hidden_BTD)
        return hidden_BTD

    def _require_finite(self, hidden_BTD: torch.Tensor) -> None:
        """Refuse a non-finite hidden state that a frozen tensor causes, where no learning rate would help."""
        if not first_not_finite({"hidden": hidden_BTD.detach()}):
            return
        for path, module in owner_modules(self._skeleton):
            frozen = {f"{path}.{name}": value for name, value in module.named_parameters() if not value.requires_grad}
            if name := first_not_finite(frozen):
                raise ModelError(
                    f"the model {self._skeleton.model.config.name_or_path}: tensor {name} has numbers that are not "
                    "finite; it is damaged: fetch it again or give another one"
                )

    def _set_embedding_mode(self, *, train: bool) -> None:
        for module in self._embedding:
            set_mode(module, train=train)

    def next_logits(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Compute the logits (V) of the token after a text, from the hidden state of its newest token; on the CPU."""
        set_mode(self.head, train=False)
        ids_BT = torch.zeros((1, 1), dtype=torch.int64, device=hidden_BTD.device)
        batch = Batch(ids=ids_BT, mask=torch.ones_like(ids_BT), token_type_ids=ids_BT, labels=ids_BT)
        with torch.no_grad():
            last_BTD, _ = head_input(self._skeleton, self._inverse, hidden_BTD[:, -1:], batch)
            return text_logits(self.head, last_BTD)[-1]

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
        weights: Units,
        goes_down: bool,
    ) -> HeadResult:
        """Compute the loss and the gradient of the hidden state, and accumulate the head's gradients.

        ``num_targets`` of all micro-batches of the step divide the loss. ``at`` is (step, micro-batch), for
        dropout; None = without. ``weights``: units that collect gradients: the head, and with stand-ins the
        embedding. ``goes_down``: the hidden state gets a gradient.
        """
        set_mode(self.head, train=at is not None)
        if at is not None and self._train.dropout > 0:
            seed_unit(self._train.seed, *at, HEAD_UNIT)
        with torch.enable_grad(), self._collecting(weights):
            leaf_BTD = hidden_BTD.detach().requires_grad_(goes_down)
            return self._result(leaf_BTD, batch, leaf_BTD, num_targets)

    @contextmanager
    def _collecting(self, weights: Units) -> Iterator[None]:
        """Let only these units of the head's weights collect gradients inside the context."""
        resting = [] if weights.has_head else list(self.units[self._head_unit].values())
        if not weights.has_embedding:
            resting += [stand_in for _, stand_in in self._tied]
        for parameter in resting:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in resting:
                parameter.requires_grad_(True)

    def _result(
        self, hidden_BTD: torch.Tensor, batch: Batch, leaf: torch.Tensor | None, num_targets: int
    ) -> HeadResult:
        last_BTD, more = head_input(self._skeleton, self._inverse, hidden_BTD, batch)
        counts = self.task.run(self.head, last_BTD, batch, more)
        if counts.loss_sum.requires_grad:
            torch.autograd.backward(counts.loss_sum / num_targets)
        values = (("loss_sum", float(counts.loss_sum.detach())), ("count", float(counts.num_targets)), *counts.more)
        if leaf is not None:
            return HeadResult(values=values, grad=leaf.grad)
        return HeadResult(values=values, grad=None, predictions=counts.predictions)

    def complete(self, unit: int) -> None:
        """Make the gradient of a unit complete and dense, right before its update."""
        complete(self.units[unit], self._tied_in(unit))

    def digest(self, unit: int) -> str:
        """Return the hex SHA-256 of a unit's parameters; see ``digest_of``."""
        return digest_of(self.units[unit])

    def unit_grad(self, unit: int) -> Pieces:
        """Return the gradient of a unit, after all backwards of the item, as a safetensors file, read when iterated."""
        return grad_blob(self.units[unit], self._tied_in(unit))

    def _tied_in(self, unit: int) -> tuple[Pair, ...]:
        return self._tied if unit == EMBEDDING else ()

    def to_blob(self) -> Pieces:
        """Return parameters and optimizer state as one safetensors file, without frozen tensors.

        It is read when iterated: the head must not change before. Raises ``DivergedError`` for weights not finite.
        """
        require_finite_values(self._travelling(), "the head")
        return write_tensors(self._state().tensors())

    def load_blob(self, data: Pieces, *, where: str = _HANDED_OVER) -> None:
        """Replace parameters and optimizer state by ``to_blob`` of another owner; ``where`` names it in errors.

        Memory of ``data`` is freed while it is read. Raises ``IntegrityError`` for other tensors than those of this
        run's head, ``DivergedError`` for numbers that are not finite.
        """
        state, file = self._state(where), TensorFile(data, where=where)
        state.check(file)
        for name in file.infos:
            if not is_finite(file.tensor(name)):
                raise DivergedError(
                    f"the training diverged: {where} has {name} with numbers that are not finite; {LOWER_THE_RATE}"
                )
        state.check_numbers(file)
        state.load(file)

    def _state(self, where: str = _HANDED_OVER) -> TrainingState:
        return TrainingState(
            values=self._travelling(),
            parameters=self.parameters,
            optimizers=self.optimizers,
            prefixes=_PREFIXES,
            where=where,
            part="head",
        )

    def _travelling(self) -> dict[str, torch.Tensor]:
        """Return the tensors of ``to_blob``: of the head without frozen ones, or of all that an owner trains."""
        if self._skeleton.full_parameters:
            return dict(self.parameters)
        # a head that trains later in the run travels too
        frozen = {name for name, _ in self.head.named_parameters()} - self.parameters.keys()
        state = {name: value for name, value in self.head.state_dict().items() if name not in frozen}
        return {**state, **self.units[EMBEDDING]}


Parameters = dict[str, nn.Parameter]
Pair = tuple[nn.Parameter, nn.Parameter]
"""A trained parameter of the embedding, and its stand-in at the head."""


def owner_units(skeleton: Skeleton, head: Head) -> dict[int, Parameters]:
    """Return the trained parameters of the embedding and of the head, each by name.

    Names are those in the base model, of a decoder ``lm_head.weight``, of a new head ``heads.ringtune.<name>``. Where
    adapters train, those of the head are names inside it, and those of an invertible adapter begin with its path.
    """
    top = head_of(len(skeleton.blocks))
    trained = {name: value for name, value in head.named_parameters() if value.requires_grad}
    if not skeleton.full_parameters:
        named = () if skeleton.invertible is None else skeleton.invertible.named_parameters()
        return {EMBEDDING: {f"{INVERTIBLE}.{ADAPTER}.{name}": value for name, value in named}, top: trained}
    units: dict[int, Parameters] = {EMBEDDING: {}, top: {}}
    for path, part in owner_modules(skeleton):
        unit = top if path in skeleton.layout.head_paths else EMBEDDING
        units[unit] |= {f"{path}.{name}": value for name, value in part.named_parameters() if value.requires_grad}
    units[top] |= _head(skeleton, head, trained)
    return units


def tied_table(skeleton: Skeleton, head: Head) -> tuple[Pair, ...]:
    """Return the token table that is also the decoder, with the head's stand-in; none unless a tied table trains."""
    table = skeleton.model.get_input_embeddings() if skeleton.full_parameters else None
    if not isinstance(table, nn.Embedding):
        return ()
    weight = table.get_parameter("weight")
    return tuple((weight, value) for value in head.parameters() if value.data_ptr() == weight.data_ptr())


def inverse_of(skeleton: Skeleton, head: Head) -> nn.Module | None:
    """Copy the invertible adapter, on the same memory, for its inverse before a decoder; None before other heads.

    Source: adapters 1.3.0, ``CausalLMHead.forward``.
    """
    if skeleton.invertible is None or head.get_output_embeddings() is None:
        return None
    shared = {id(value): nn.Parameter(value.detach()) for value in skeleton.invertible.parameters()}
    return copy.deepcopy(skeleton.invertible, shared)


def _stand_ins(skeleton: Skeleton, inverse: nn.Module | None) -> Iterator[Pair]:
    if inverse is not None and skeleton.invertible is not None:
        yield from zip(skeleton.invertible.parameters(), inverse.parameters(), strict=True)


def head_input(
    skeleton: Skeleton, inverse: nn.Module | None, hidden_BTD: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the arguments of the head as ``FamilyForward.finish``; the last hidden state goes through an inverse."""
    last_BTD, more = skeleton.family.finish(skeleton.base, hidden_BTD, batch)
    return (last_BTD if inverse is None else inverse(last_BTD, rev=True)), more


def _head(skeleton: Skeleton, head: Head, trained: Mapping[str, nn.Parameter]) -> Parameters:
    """Return the head's parameters without a tied one, by their names in the whole model."""
    tied = [stand_in for _, stand_in in tied_table(skeleton, head)]
    is_decoder = head.get_output_embeddings() is not None
    return {
        f"lm_head.{name.partition('.')[2]}" if is_decoder else f"heads.{HEAD}.{name}": value
        for name, value in trained.items()
        if not any(value is stand_in for stand_in in tied)
    }
