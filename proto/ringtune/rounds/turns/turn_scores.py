"""Which scores a node owes for a score turn, and whether it has sent just these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ringtune.errors import IntegrityError
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind, Turn, items


class ScoreKey(NamedTuple):
    """What one entry of scores is of."""

    batch_id: int
    micro: int
    block: int


def score_keys(plan: Plan, turn: Turn, node: str) -> tuple[ScoreKey, ...]:
    """What a node owes at the end of a turn: each block of its slice for each micro-batch of the turn, in order.

    Blocks that never train are not scored. At the end of a turn that scores nothing, a node owes nothing.
    """
    course, piece = plan.course, plan.slice_of(node)
    if turn.kind is not StepKind.SCORE or course.choice is None:
        return ()
    return tuple(
        sorted(
            ScoreKey(course.batch_id(item.owner, item.batch), micro, block)
            for item in items(course, turn)
            for micro in range(len(course.microbatch_sizes(item.rows)))
            for start, stop in course.trainable.ranges_within(piece.start, piece.stop)
            for block in range(start, stop)
        )
    )


def check_scores(plan: Plan, turn: Turn, node: str, scores: Sequence[BlockScores]) -> None:
    """Refuse scores that are not just those that a node owes; a number itself may be anything.

    Raises:
        IntegrityError: names node, turn, and the entry that is missing, doubled or not asked for.
    """
    choice, owed = plan.course.choice, score_keys(plan, turn, node)
    if not owed and not scores:
        return
    where = f"node {node} reports scores at the end of turn {turn.index} of node {turn.owner}"
    anew = "use one version on all machines"
    others = sorted({entry.owner for entry in scores} - {turn.owner})
    if others:
        raise IntegrityError(f"{where} that are of node {', '.join(others)}; {anew}")
    sent = Counter(ScoreKey(entry.batch_id, entry.micro, entry.block) for entry in scores)
    for problem, keys in (
        ("that it does not owe", sent.keys() - set(owed)),
        ("twice", {key for key, count in sent.items() if count > 1}),
        ("without some that it owes", set(owed) - sent.keys()),
    ):
        if keys:
            first = min(keys)
            entry = f"batch {first.batch_id}, micro-batch {first.micro}, block {first.block}"
            raise IntegrityError(f"{where} {problem}: {len(keys)}, the first is of {entry}; {anew}")
    if choice is None:
        return
    shape = [choice.subnets] * len(choice.scores)
    wrong = next((entry for entry in scores if [len(values) for values in entry.values] != shape), None)
    if wrong is not None:
        raise IntegrityError(
            f"{where} with {[len(values) for values in wrong.values]} numbers for block {wrong.block}, expected are "
            f"{choice.subnets} subnets for each of {len(choice.scores)} scores; {anew}"
        )
