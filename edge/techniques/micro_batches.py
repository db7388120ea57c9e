"""Tensors of the open items and micro-batches at a node, and the versions of weights that their graphs need.

A micro-batch is at one place at a time, so a node has at most one hidden state and one gradient of it, besides the
graphs that wait for their backward. A tensor is dropped once it is sent or used.

Under PipeAdapter a node updates its slice while later items wait for their backward. Autograd needs the tensors of the
forward unchanged: an update in place would make the backward fail, and ``tensor.data = ...`` would make it silently
wrong. So if another item uses the newest version, an update first gives the modules new tensors. Otherwise nothing is
copied.

::

    item 0  F ------ B U             both forwards use v0; the update of item 0 makes v1 and leaves v0 to item 1
    item 1    F -------- B U         F of item 2 uses v1; the update of item 1 takes its gradient from v0 to a new v2
    item 2           F ------ B U

Source: RingAda, section IV, baseline PipeAdapter (several stored versions of the adapters).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from edge.data.dataset import OwnerDataset
from edge.data.tokens import Batch
from edge.model.key_values import KeyValueCache
from edge.model.optimizers import UnitOptimizers
from edge.model.owner import OwnerParts
from edge.model.slice import BlockRunner
from edge.techniques.activation_checkpointing import SavedActivations
from ringtune.errors import FrameError, PlanError
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import lowest_units, subnet_rows, takes_part
from ringtune.schedule.operation_tables import pattern_of
from ringtune.schedule.turns import Item, StepKind, microbatch_rows
from ringtune.schedule.units import Units
from ringtune.schedule.versions import trained


@dataclass(slots=True)
class MicroBatch:
    """The tensors of one micro-batch at this node (B rows, T tokens, D model width).

    Attributes:
        hidden: (B, T, D), not part of a graph.
        mask: (B, T), None where the hidden state enters the head.
        grad: gradient of the hidden state that left this node, or entered the head here.
        graphs: unit range -> saved activations of a forward until its backward.
        pairs: block -> pairs recorded for its helper.
    """

    hidden: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    graphs: dict[tuple[int, int], SavedActivations] = field(default_factory=dict)
    pairs: dict[int, Any] = field(default_factory=dict)
    _context: Any = None
    _has_context: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no hidden state, gradient, graph or pair is held."""
        return self.hidden is None and self.grad is None and not self.graphs and not self.pairs

    def drop_hidden(self) -> None:
        """Drop the hidden state with its mask and context, after its sending or the head."""
        self.hidden = self.mask = self._context = None
        self._has_context = False

    def block_inputs(
        self, action: Action, blocks: BlockRunner, cache: Callable[[], KeyValueCache] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return hidden state, mask, and the context that all blocks of this node share; ``cache`` is of its text."""
        hidden = self.head_input(action)
        if self.mask is None:
            raise PlanError(f"{action} has a hidden state without attention mask")
        if not self._has_context:
            with torch.no_grad():
                given = () if cache is None else (cache(),)
                self._context, self._has_context = blocks.context(hidden, self.mask, *given), True
        return hidden, self.mask, self._context

    def head_input(self, action: Action) -> torch.Tensor:
        """Return the hidden state; raises ``PlanError``."""
        if self.hidden is None:
            raise PlanError(f"{action} has no hidden state here")
        return self.hidden

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every held tensor, including those that graphs keep for backward."""
        yield from (item for item in (self.hidden, self.mask, self.grad) if item is not None)
        yield from tensors_in(self._context)
        for graph in self.graphs.values():
            yield from graph.tensors()
        for pairs in self.pairs.values():
            yield from pairs.tensors()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a context, which may be in tuples and mappings."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


@dataclass(slots=True)
class OpenItem:
    """A granted item with its batch and gradients.

    Attributes:
        lowest: the lowest such unit, per micro-batch.
        offsets: first row of each micro-batch in the batch, and the number of rows.
        batch: at the owner, from the first embedding or head to the last head.
        operations: of all subnets, per micro-batch; empty = all full.
        takes_part: whether each micro-batch does anything.
        num_targets: valid targets of the micro-batches that take part.
    """

    item: Item
    trained: Units
    lowest: tuple[int, ...]
    offsets: tuple[int, ...]
    takes_part: tuple[bool, ...]
    operations: tuple[str, ...] = ()
    subnets: int = 1
    batch: Batch | None = None
    num_targets: int = 0
    heads_left: int = 0

    @staticmethod
    def of(course: Course, item: Item) -> OpenItem:
        """Open an item before its first action; ``course`` is that of the item's turn."""
        sizes, active = microbatch_rows(course, item), takes_part(course, item)
        return OpenItem(
            item=item,
            trained=trained(course, item.kind, item.step),
            lowest=lowest_units(course, item),
            offsets=tuple(sum(sizes[:index]) for index in range(len(sizes) + 1)),
            operations=subnet_rows(course, item),
            subnets=course.subnets,
            takes_part=active,
            heads_left=sum(active),
        )

    def patterns(self, action: Action) -> dict[int, str]:
        """Operations of the subnets of the action's blocks for its micro-batch; empty = all full."""
        if not self.operations:
            return {}
        row = self.operations[action.micro]
        return {block: pattern_of(row, block, self.subnets) for block in range(action.start, action.stop)}

    def dropout_at(self, action: Action) -> tuple[int, int] | None:
        """Seed of dropout as (step, micro-batch); None for score items, which have no dropout."""
        return None if self.item.kind is StepKind.SCORE else (self.item.step, action.micro)

    def own_rows(
        self, action: Action | TensorKey, course: Course, dataset: OwnerDataset, owner: OwnerParts, device: torch.device
    ) -> Batch:
        """Return the rows of the action's micro-batch at their owner; the first action of an item makes the batch."""
        if self.batch is None:
            batch = dataset.batch(course, self.item)
            parts = zip(itertools.pairwise(self.offsets), self.takes_part, strict=True)
            self.num_targets = sum(owner.task.num_targets(batch.rows(*rows)) for rows, is_active in parts if is_active)
            self.batch = batch.to(device)
        return self.batch.rows(self.offsets[action.micro], self.offsets[action.micro + 1])


Handler = Callable[[Action, OpenItem], tuple[tuple[str, float], ...]]
"""Runs an action; returns numbers for the report, summed by name."""


class MicroBatches:
    """The micro-batches of one node; an empty one is dropped.

    Args:
        course: decides which tokens the head does not read; these are not sent, and have a gradient of zero.
    """

    def __init__(self, course: Course, *, dtype: torch.dtype, device: torch.device) -> None:
        self._course, self._dtype, self._device = course, dtype, device
        self._flows: dict[tuple[int, int], MicroBatch] = {}
        self._tokens: dict[tuple[int, int], int] = {}  # T of hidden states that were sent, or entered the head here

    def begin(self, action: Action, flow: MicroBatch) -> None:
        """Add a micro-batch that begins at this node."""
        self._flows[action.seq, action.micro] = flow

    def of(self, action: Action) -> MicroBatch:
        """Return the micro-batch of an action; raises ``PlanError``."""
        flow = self._flows.get((action.seq, action.micro))
        if flow is None:
            raise PlanError(f"{action} comes before its input")
        return flow

    def drop_if_empty(self, action: Action) -> None:
        """Drop the micro-batch of an action if it is empty."""
        if self.of(action).is_empty:
            del self._flows[action.seq, action.micro]

    def forget(self, seqs: set[int]) -> None:
        """Drop the micro-batches of these items."""
        self._flows = {key: flow for key, flow in self._flows.items() if key[0] not in seqs}
        self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] not in seqs}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every held tensor."""
        for flow in self._flows.values():
            yield from flow.tensors()

    def whole_grad(self, action: Action) -> torch.Tensor | None:
        """Return the gradient of a micro-batch for a backward, with zeros for what was not sent.

        That are tokens that the head did not read, and inputs of blocks, which have no gradient.
        """
        grad = self.of(action).grad
        if grad is None or (self._course.top_tokens and action.stop == self._course.head):
            return grad
        tokens = max(0, self._tokens.get((action.seq, action.micro), 0) - grad.shape[1])
        values = self._course.width(action.stop) - grad.shape[2]
        return nn.functional.pad(grad, (0, values, 0, tokens)) if tokens or values else grad

    def enter_head(self, action: Action) -> torch.Tensor:
        """Take a micro-batch's hidden state for the head as after a transfer: contiguous, with the sent tokens only.

        An accelerator's dropout depends on the place of a number in memory, so a view would get another mask.

        Raises ``PlanError``: there is no hidden state.
        """
        flow = self.of(action)
        hidden = self._sent((action.seq, action.micro), self._course.head, flow.head_input(action))
        flow.drop_hidden()
        return hidden

    def _sent(self, at: tuple[int, int], boundary: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sent tokens of a hidden state, contiguous; note the number of all tokens for what comes back."""
        self._tokens.setdefault(at, hidden.shape[1])  # one that returns for the head may have been cut before
        return self._cut(boundary, hidden)

    def _sent_grad(self, key: TensorKey, grad: torch.Tensor) -> torch.Tensor:
        """Return the part of a gradient that is sent: not of inputs of blocks, which have none."""
        return self._cut(key.boundary, grad[..., : self._course.width(key.boundary, is_gradient=True)])

    def _cut(self, boundary: int, tensor: torch.Tensor) -> torch.Tensor:
        sent = self._course.sent_tokens(boundary, tensor.shape[1])
        return tensor.contiguous() if sent == tensor.shape[1] else tensor[:, :sent].clone()

    def check_tokens(self, key: TensorKey, tensor: torch.Tensor, own_tokens: int = 0) -> None:
        """Refuse a tensor (B, T, D) with another T than this node has sent of its micro-batch; raises ``FrameError``.

        A gradient comes back so, and a hidden state to blocks of a node that has sent one before, or to the head at its
        owner; ``own_tokens`` are those of the owner's rows, for what comes from an activation cache. A gradient has the
        tokens that the head read where every block above passes the micro-batch.
        """
        known = self._tokens.get((key.seq, key.micro), 0) or own_tokens or tensor.shape[1]
        boundaries = (key.boundary,) if key.is_hidden else (key.boundary, self._course.head)
        expected = [self._course.sent_tokens(boundary, known) for boundary in boundaries]
        if (tokens := tensor.shape[1]) not in expected:
            raise FrameError(f"the {key} has {tokens} tokens a row, and {expected[0]} were sent; it is dropped")

    def put(self, key: TensorKey, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Set the received hidden state (B, T, D) or gradient of a micro-batch.

        Args:
            key: item, micro-batch, kind and boundary.
            tensor: any float dtype, on the CPU; between last block and head it may have the first tokens only.
            mask: (B, T) integers with a hidden state that enters a block; None with one that enters the head.
        """
        flow = self._flows.setdefault((key.seq, key.micro), MicroBatch())
        moved = tensor.to(device=self._device, dtype=self._dtype)
        if not key.is_hidden:
            flow.grad = moved
            return
        flow.drop_hidden()
        flow.hidden = moved
        flow.mask = None if mask is None else mask.to(device=self._device, dtype=torch.int64)

    def take(self, key: TensorKey) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a micro-batch's hidden state or gradient for sending, and drop it; raises ``PlanError``.

        Returns:
            A tensor (B, T, D) on the CPU in the compute dtype, cut to the sent tokens and not written to afterwards;
            and the mask (B, T) of a hidden state that enters a block, otherwise None.
        """
        flow, tensor, mask = self._held(key)
        if key.is_hidden:
            tensor = self._sent((key.seq, key.micro), key.boundary, tensor)
            flow.drop_hidden()
        else:
            tensor = self._sent_grad(key, tensor)
            flow.grad = None
        if flow.is_empty:
            del self._flows[key.seq, key.micro]
        return tensor.cpu(), None if mask is None else mask.cpu()

    def copy(self, key: TensorKey) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return copies of what ``take`` would return, and drop nothing; errors as for ``take``."""
        _, tensor, mask = self._held(key)
        tensor = tensor.detach()
        sent = self._cut(key.boundary, tensor) if key.is_hidden else self._sent_grad(key, tensor)
        return sent.cpu().clone(), None if mask is None else mask.cpu().clone()

    def _held(self, key: TensorKey) -> tuple[MicroBatch, torch.Tensor, torch.Tensor | None]:
        flow = self._flows.get((key.seq, key.micro))
        tensor = None if flow is None else flow.hidden if key.is_hidden else flow.grad
        if flow is None or tensor is None:
            raise PlanError(f"there is nothing to send as {key}")
        return flow, tensor, flow.mask if key.is_hidden and key.boundary < self._course.head else None


Version = tuple[nn.Parameter, ...]


class VersionStore:
    """Stores the version of some blocks' trained tensors that the graphs of each item use.

    Args:
        blocks: with the trainable parameters; modules of one block may share some.
        optimizers: over these parameters; they always hold the newest version.

    Attributes:
        peak_versions: most versions stored at once, including the newest.
    """

    def __init__(self, blocks: Iterable[nn.Module], optimizers: UnitOptimizers) -> None:
        self._places = [
            (module, name)
            for block in blocks
            for module in block.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.requires_grad
        ]
        self._optimizers = optimizers
        self._newest: Version = tuple(getattr(module, name) for module, name in self._places)
        self._used: dict[int, Version] = {}
        self.peak_versions = 1 if self._places else 0

    @property
    def num_versions(self) -> int:
        """Number of versions stored now, including the newest."""
        return len({id(version) for version in (self._newest, *self._used.values())}) if self._places else 0

    @property
    def peak_extra_bytes(self) -> int:
        """Peak bytes of all versions but the newest."""
        distinct = {id(parameter): parameter.nbytes for parameter in self._newest}
        return max(0, self.peak_versions - 1) * sum(distinct.values())

    def use(self, seq: int) -> None:
        """Keep the newest version for the forwards of this item until ``release``; raises ``PlanError``."""
        if not self._places:
            return
        if self._used.setdefault(seq, self._newest) is not self._newest:
            raise PlanError(f"item {seq}: the weights were updated between two of its micro-batches")

    @contextlib.contextmanager
    def at(self, seq: int) -> Iterator[None]:
        """Put the version of an item's forward back into the modules inside the context."""
        version = self._used.get(seq, self._newest)
        if version is self._newest:
            yield
            return
        self._put(version)
        try:
            yield
        finally:
            self._put(self._newest)

    def release(self, seq: int) -> None:
        """Move the gradients of an item to the newest version, so that it can be updated.

        All backwards of the item have to be done. If another item's graphs use the newest version, the modules get new
        tensors first.
        """
        version = self._used.pop(seq, self._newest)
        grads = [parameter.grad for parameter in version]
        for parameter in version:
            parameter.grad = None
        del version  # gone before another one is made
        if any(used is self._newest for used in self._used.values()):
            self._renew()
        for parameter, grad in zip(self._newest, grads, strict=True):
            parameter.grad = grad

    def _renew(self) -> None:
        """Put new tensors of the same values into modules and optimizers."""
        fresh: dict[int, nn.Parameter] = {}
        for parameter in self._newest:
            if id(parameter) not in fresh:
                fresh[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        self._optimizers.exchange(fresh)
        self._newest = tuple(fresh[id(parameter)] for parameter in self._newest)
        self._put(self._newest)
        self.peak_versions = max(self.peak_versions, self.num_versions)

    def _put(self, version: Version) -> None:
        for (module, name), parameter in zip(self._places, version, strict=True):
            setattr(module, name, parameter)
