"""The path of a micro-batch through a node, and what is said of a step that is not finite."""

from __future__ import annotations

from ringtune.engine.failure_texts import diverged
from ringtune.engine.paths import Channel, Credits, Path, PathAction
from ringtune.schedule.actions import Leg, Op, Payload
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.turns import StepKind, items, rows_of, turn_sequence
from tests.support.plans import make_plan


def test_credits_come_back_but_never_exceed_the_bound() -> None:
    """One that comes twice, or unasked, makes no more room than there was."""
    channel = Credits(1).channel("b", 2)
    channel.return_credit()
    assert channel.left == 1
    channel.left -= 1
    assert channel.left == 0
    channel.return_credit()
    channel.return_credit()
    assert channel.left == 1


def test_credits_are_not_needed_without_a_channel() -> None:
    """A stretch that sends no hidden state takes none: of three, only the first hosted block of the first one does."""
    room = Credits(1)
    legs = (
        Leg(Op.EMBED, -1, 0),
        Leg(Op.FORWARD_FREE, 0, 1),  # private
        Leg(Op.FORWARD, 1, 4),
        Leg(Op.SEND, 4, 0, "b", Payload.HIDDEN),
        Leg(Op.RECEIVE, 8, 0, "b", Payload.HIDDEN),
        Leg(Op.HEAD, 8, 9),
        Leg(Op.SEND, 8, 0, "b", Payload.GRAD),
        Leg(Op.RECEIVE, 4, 0, "b", Payload.GRAD),
        Leg(Op.BACKWARD, 1, 4),
    )
    found: dict[Op, Channel | None] = {}
    place: PathAction | None = Path(legs, 1, room).first
    while place is not None:
        found[place.op] = place.credit
        place = place.next
    assert found == {
        Op.EMBED: None,
        Op.FORWARD_FREE: None,
        Op.FORWARD: room.channel("b", 4),
        Op.HEAD: None,
        Op.BACKWARD: None,
    }


def test_rows_are_those_that_the_owner_takes() -> None:
    """The batch at the item's position of the owner's stream, and of it what each micro-batch gets."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "c"], num_steps=8, local_iterations=2, microbatches=2)
    course = plan.course
    turn = [turn for turn in turn_sequence(course) if turn.kind is StepKind.TRAIN and turn.owner == "c"][-1]
    item = items(course, turn)[1]
    owner = course.owner("c")
    assert owner is not None
    wanted = BatchStream(owner.train_rows, course.batch_size, course.seed, "c").rows(item.batch)
    assert rows_of(course, item, None) == wanted
    parts = [rows_of(course, item, micro) for micro in range(2)]
    assert parts[0] + parts[1] == wanted
    assert all(parts)
    text = str(diverged(item, "the loss is nan", course=course, micro=1))
    rows = ", ".join(map(str, sorted(parts[1])))
    assert text.startswith(f"the training diverged at step {item.step + 1}, a batch of owner c: the loss is nan ")
    assert f"(micro-batch 1, training rows {rows}, counted from 0); lower train.learning_rate" in text


def test_rows_of_an_evaluation_are_in_the_order_of_the_file() -> None:
    """Many rows are cut short, and the number of the others is said."""
    plan = make_plan([("a", 0, 2)], ["a"], num_blocks=2, num_steps=4, batch_size=40, eval_every=4)
    turn = next(turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.EVALUATE)
    item = items(plan.course, turn)[0]
    rows = rows_of(plan.course, item, None)
    assert rows == tuple(range(len(rows)))
    text = str(diverged(item, "the loss is inf", course=plan.course))
    assert "in the evaluation after step 4, a batch of owner a" in text
    assert "evaluation rows 0, 1, 2" in text
    assert len(rows) <= 16 or f"15 and {len(rows) - 16} more" in text
