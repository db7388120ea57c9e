"""How often a course trains on each row, against counting them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ringtune.rounds.row_use import row_uses
from ringtune.schedule.plan import Plan
from ringtune.schedule.rows.batches import BatchStream
from ringtune.schedule.turns.turns import StepKind, items, turn_sequence
from tests.support.plans import changed, make_plan, random_plan

SLICES = [("a", 0, 4)]


def counted(plan: Plan) -> dict[str, Counter[int]]:
    """How often each row of each owner is in a batch, by walking through all turns."""
    course = plan.course
    found = {owner.node: Counter(dict.fromkeys(range(owner.train_rows), 0)) for owner in course.owners}
    for turn in turn_sequence(course):
        if turn.kind is StepKind.TRAIN:
            owner = course.owner(turn.owner)
            assert owner is not None
            stream = BatchStream(owner.train_rows, course.batch_size, course.seed, owner.node)
            for item in items(course, turn):
                assert len(stream.rows(item.batch)) == item.rows
                found[turn.owner].update(stream.rows(item.batch))
    return found


@pytest.mark.parametrize("seed", range(80))
def test_row_use_is_what_all_turns_together_use(seed: int) -> None:
    """For any plan: steps, rows that are used at all, the least and the most used row."""
    rng = random.Random(seed)
    plan = changed(random_plan(rng), num_steps=rng.randint(1, 60), seed=seed)
    for use in row_uses(plan.course):
        counts = counted(plan)[use.owner]
        assert use.trained_rows == counts.total()
        assert use.used_rows == sum(count > 0 for count in counts.values())
        assert (use.least, use.most) == (min(counts.values()), max(counts.values()))


def test_row_use_of_a_small_owner_with_equal_turns_and_by_rows() -> None:
    """Equal turns use 30 rows three times as often as 90; turns by rows use both alike."""
    plan = make_plan(SLICES, ["a", "b"], num_steps=24, local_iterations=2, batch_size=10)
    small, large = (owner for owner in plan.course.owners)
    owners = (type(small)(node="a", train_rows=90), type(large)(node="b", train_rows=30))
    equal, by_rows = (row_uses(changed(plan, owners=owners, turns=turns).course) for turns in ("equal", "rows"))
    assert [(use.steps, round(use.epochs, 2)) for use in equal] == [(12, 1.33), (12, 4.0)]
    assert [(use.steps, round(use.epochs, 2)) for use in by_rows] == [(18, 2.0), (6, 2.0)]
