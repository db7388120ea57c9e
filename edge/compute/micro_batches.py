"""The items and micro-batches that are under way at a node, with the tensors that it holds of each.

A micro-batch is at one place at a time, so one hidden state and one gradient are all that it can have at a node,
besides the graphs that wait for their backward. What was handed out or used up is dropped at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from edge.compute.capturing.captures import PairsByKind
from edge.compute.saving.block_forward import Saved
from edge.data.rows import OwnerDataset
from edge.data.tokens import Batch
from edge.model.owner import OwnerParts
from edge.model.slice import BlockRunner
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import lowest_units
from ringtune.schedule.operations.codes import pattern_of
from ringtune.schedule.turns.turns import Item, StepKind
from ringtune.schedule.turns.versions import trained
from ringtune.schedule.units import Units


@dataclass(slots=True)
class MicroBatch:
    """The tensors of one micro-batch at this node (B rows, T tokens, D model width).

    Attributes:
        hidden: (B, T, D), not part of a graph.
        mask: (B, T), None where the hidden state enters the head.
        grad: of the hidden state that left this node, or that the head here saw.
        graphs: unit range -> what a forward keeps for the backward that it waits for.
        pairs: block -> what was recorded for its helper.
    """

    hidden: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    graphs: dict[tuple[int, int], Saved] = field(default_factory=dict)
    pairs: dict[int, PairsByKind] = field(default_factory=dict)
    _context: Any = None
    _has_context: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether neither hidden state nor gradient, graph nor pairs are held."""
        return self.hidden is None and self.grad is None and not self.graphs and not self.pairs

    def drop_hidden(self) -> None:
        """Drop the hidden state with its mask and context: it was sent on, or the head made a loss of it."""
        self.hidden = self.mask = self._context = None
        self._has_context = False

    def block_inputs(self, action: Action, blocks: BlockRunner) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return hidden state, mask, and the context that all blocks of this node share.

        Raises:
            PlanError: nothing came for ``action``.
        """
        hidden = self.head_input(action)
        if self.mask is None:
            raise PlanError(f"{action} has a hidden state without attention mask")
        if not self._has_context:
            with torch.no_grad():
                self._context, self._has_context = blocks.context(hidden, self.mask), True
        return hidden, self.mask, self._context

    def head_input(self, action: Action) -> torch.Tensor:
        """Return the hidden state.

        Raises:
            PlanError: nothing came for ``action``.
        """
        if self.hidden is None:
            raise PlanError(f"{action} has no hidden state here")
        return self.hidden

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that is held, those that graphs keep for backward included."""
        yield from (item for item in (self.hidden, self.mask, self.grad) if item is not None)
        yield from _tensors_in(self._context)
        for graph in self.graphs.values():
            yield from graph.tensors()
        for pairs in self.pairs.values():
            yield from pairs.tensors()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a context, which may be a nested tuple."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_in(item)


@dataclass(slots=True)
class OpenItem:
    """A granted item with what is known of its batch and gradients.

    Attributes:
        item: the item.
        trained: the units whose weights get a gradient.
        lowest: per micro-batch the lowest unit that gets one.
        offsets: where each micro-batch starts in the batch, and the end.
        batch: at the owner, from the first embedding or head to the last head.
        operations: per micro-batch the operations of all subnets; empty = all full.
        subnets: of each block in them.
        num_targets: valid targets of the batch.
        heads_left: heads that are still to come.
    """

    item: Item
    trained: Units
    lowest: tuple[int, ...]
    offsets: tuple[int, ...]
    operations: tuple[str, ...] = ()
    subnets: int = 1
    batch: Batch | None = None
    num_targets: int = 0
    heads_left: int = 0

    @staticmethod
    def of(course: Course, item: Item) -> OpenItem:
        """Open an item of which no action has run; ``course`` is that of the item's turn."""
        sizes = course.microbatch_sizes(item.rows)
        return OpenItem(
            item=item,
            trained=trained(course, item.kind, item.step),
            lowest=lowest_units(course, item),
            offsets=tuple(sum(sizes[:index]) for index in range(len(sizes) + 1)),
            operations=course.subnet_operations_of(item.owner, item.batch) if item.kind.has_update else (),
            subnets=course.subnets,
            heads_left=len(sizes),
        )

    def patterns(self, action: Action) -> dict[int, str]:
        """What the subnets of the action's blocks do for its micro-batch; empty = all full."""
        if not self.operations:
            return {}
        row = self.operations[action.micro]
        return {block: pattern_of(row, block, self.subnets) for block in range(action.start, action.stop)}

    def dropout_at(self, action: Action) -> tuple[int, int] | None:
        """The (step, micro-batch) that dropout is drawn at; None for scores, which are gathered without."""
        return None if self.item.kind is StepKind.SCORE else (self.item.step, action.micro)

    def own_rows(
        self, action: Action, course: Course, dataset: OwnerDataset, owner: OwnerParts, device: torch.device
    ) -> Batch:
        """Return the rows of the action's micro-batch at their owner; the first action of an item makes its batch."""
        if self.batch is None:
            batch = dataset.batch(course, self.item)
            self.num_targets = owner.num_targets(batch)
            self.batch = batch.to(device)
        return self.batch.rows(self.offsets[action.micro], self.offsets[action.micro + 1])
