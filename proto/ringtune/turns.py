"""Which batch of which owner comes when: turns, and the items they consist of.

A *turn* is one initiator's ``local_iterations`` steps, or one owner's evaluation. The coordinator grants
turns; nodes expand them into *items*. An item is one pass of one batch through the ring; ``seq`` counts
all items of a run from 0, ``step`` counts optimizer steps only.

Source: RingAda, Algorithm 1 and section III-B.3.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from ringtune.plan import Plan


class StepKind(enum.StrEnum):
    """What a pass through the ring is for."""

    TRAIN = "train"  # forward, backward, update
    EVALUATE = "evaluate"  # forward and counts
    SCORE = "score"  # forward and backward of everything, no update (D2FT)
    MEASURE = "measure"  # forward and backward as at this step, no update

    @property
    def has_backward(self) -> bool:
        """Whether gradients flow."""
        return self is not StepKind.EVALUATE

    @property
    def has_update(self) -> bool:
        """Whether weights change."""
        return self is StepKind.TRAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One owner's consecutive items.

    Attributes:
        index: counts all turns of a run from 0.
        kind: of every item of the turn.
        owner: the initiator.
        round: the round it belongs to.
        first_seq: ``seq`` of its first item.
        num_items: how many items.
        first_step: optimizer steps done before its first item.
        first_batch: index of its first batch in the owner's own stream of batches.
    """

    index: int
    kind: StepKind
    owner: str
    round: int
    first_seq: int
    num_items: int
    first_step: int
    first_batch: int

    @property
    def end_step(self) -> int:
        """Optimizer steps done after the turn."""
        return self.first_step + (self.num_items if self.kind.has_update else 0)

    @property
    def end_seq(self) -> int:
        """``seq`` of the first item after the turn."""
        return self.first_seq + self.num_items


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One batch's pass through the ring.

    Attributes:
        seq: position among all items of the run.
        step: for a train item its own step; otherwise the number of steps done before it.
        batch: index in the owner's stream of batches (training) or of evaluation batches.
        rows: rows of the batch.
        turn: index of its turn.
    """

    seq: int
    kind: StepKind
    step: int
    owner: str
    batch: int
    rows: int
    turn: int


def items(plan: Plan, turn: Turn) -> tuple[Item, ...]:
    """Expand a turn into its items."""
    owner = plan.owner(turn.owner)
    eval_rows = owner.eval_rows if owner else 0
    expanded = []
    for offset in range(turn.num_items):
        batch = turn.first_batch + offset
        evaluates = turn.kind is StepKind.EVALUATE
        rows = min(plan.batch_size, eval_rows - batch * plan.batch_size) if evaluates else plan.batch_size
        step = turn.first_step + (offset if turn.kind.has_update else 0)
        expanded.append(
            Item(
                seq=turn.first_seq + offset,
                kind=turn.kind,
                step=step,
                owner=turn.owner,
                batch=batch,
                rows=rows,
                turn=turn.index,
            )
        )
    return tuple(expanded)


def turn_sequence(plan: Plan) -> Iterator[Turn]:
    """All turns of a run, in order: rounds of training turns, with evaluations at turn boundaries.

    An evaluation comes after the turn in which a multiple of ``eval_every`` steps was passed, and always
    at the end; it starts at the owner that holds the head, then follows the initiator order.
    """
    index = seq = step = round_index = 0
    while step < plan.num_steps:
        for position, owner in enumerate(plan.owners):
            num_items = min(plan.local_iterations, plan.num_steps - step)
            if num_items == 0:
                break
            turn = Turn(
                index=index,
                kind=StepKind.TRAIN,
                owner=owner.node,
                round=round_index,
                first_seq=seq,
                num_items=num_items,
                first_step=step,
                first_batch=round_index * plan.local_iterations,
            )
            yield turn
            index, seq = index + 1, turn.end_seq
            if _evaluation_is_due(plan, step, turn.end_step):
                for evaluation in _evaluation(plan, turn, position):
                    yield evaluation
                    index, seq = evaluation.index + 1, evaluation.end_seq
            step = turn.end_step
        round_index += 1


def _evaluation_is_due(plan: Plan, before: int, after: int) -> bool:
    if after == plan.num_steps:
        return True
    return plan.eval_every > 0 and before // plan.eval_every != after // plan.eval_every


def _evaluation(plan: Plan, last: Turn, position: int) -> Iterator[Turn]:
    index, seq = last.index + 1, last.end_seq
    for owner in plan.owners[position:] + plan.owners[:position]:
        if owner.eval_rows == 0:
            continue
        turn = Turn(
            index=index,
            kind=StepKind.EVALUATE,
            owner=owner.node,
            round=last.round,
            first_seq=seq,
            num_items=plan.eval_batches(owner),
            first_step=last.end_step,
            first_batch=0,
        )
        yield turn
        index, seq = index + 1, turn.end_seq
