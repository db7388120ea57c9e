"""The extent of a run: its blocks, owners and steps, which is all that a method may ask."""

from __future__ import annotations

from dataclasses import dataclass

from ringtune.schedule.units import Range, Units, head_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A node with data: how many rows it trains on and evaluates on."""

    node: str
    train_rows: int
    eval_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The part of a course that says which unit may train at which step.

    Attributes:
        num_blocks: transformer blocks of the model, N.
        owners: in initiator order.
        num_steps: optimizer steps of the whole run; 0 = only an evaluation.
        local_iterations: steps of one turn.
        frozen_blocks: blocks ``[0, frozen_blocks)`` never train.
    """

    num_blocks: int
    owners: tuple[Owner, ...]
    num_steps: int
    local_iterations: int
    frozen_blocks: int = 0

    @property
    def head(self) -> int:
        """The unit of the head."""
        return head_of(self.num_blocks)

    @property
    def trainable(self) -> Units:
        """The units that may train: the blocks that are not frozen, and the head.

        Where all parameters train (``Method.full_parameters``) a course has the embedding among them.
        """
        return Units(self.num_blocks, (Range(self.frozen_blocks, self.head + 1),))
