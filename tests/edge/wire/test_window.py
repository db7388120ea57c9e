"""How far from the granted turns a frame may be: seldom senders and work that is granted ahead have to pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edge.wire import frames
from edge.wire.checks import FrameCheck
from edge.wire.known_turns import KnownTurns
from ringtune.errors import FrameError
from ringtune.files.pieces import Pieces
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.extent import Owner
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.patience import Patience
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import ITEMS_AHEAD, StartPoint, StepKind, checkpoint_turn, items, turn_sequence
from tests.support.wire_parts import expectation, hello, plan, tensor_header


@pytest.mark.parametrize("eval_every", [0, 100])
def test_window_admits_heads_of_sources_that_send_nothing_else(eval_every: int) -> None:
    """Only after an evaluation a head goes from f to d, long after the run began: node d knows the turn by then."""
    owners = tuple(Owner(node=name, train_rows=8, eval_rows=4) for name in "cdef")
    of = plan(owners=owners, num_steps=300, local_iterations=2, eval_every=eval_every)
    turns = {owner.node: KnownTurns(of, StartPoint.of(of.course)) for owner in owners}
    checks: dict[tuple[str, str], FrameCheck] = {}

    def check_of(source: str, node: str) -> FrameCheck:
        key = (source, node)
        return checks.setdefault(key, FrameCheck(expectation(of, node), source, turns[node]))

    holder, heads = "c", 0
    for turn in turn_sequence(of.course):
        for known in turns.values():
            known.granted(turn)
            known.done_before(turn.index)
        if turn.owner != holder:
            header = frames.blob_header(hello(of, holder), Payload.HEAD, turn.index, Pieces.of(b"head"))
            check_of(holder, turn.owner).admit(header)
            heads += 1
        holder = turn.owner
        for item in items(of.course, turn):
            rows = of.course.microbatch_sizes(item.rows)[0]
            check_of("b", holder).admit(
                tensor_header(of, "b", TensorKey(Payload.HIDDEN, item.seq, 0, of.course.num_blocks), rows)
            )
            checks["b", holder].credit_returned(of.course.num_blocks, 1)
    assert heads > 140


def test_window_admits_what_was_granted_ahead() -> None:
    """With turns of one item, frozen work of many turns comes before the gradient of the first of them."""
    of = _ahead()
    check = FrameCheck(expectation(of, "b"), "a")
    last = -1
    for turn in turn_sequence(of.course):
        if turn.kind is StepKind.TRAIN and turn.index < ITEMS_AHEAD:
            check.admit(tensor_header(of, "a", TensorKey(Payload.HIDDEN, turn.first_seq, 0, 2), 4))
            check.credit_returned(2, 1)
            last = turn.index
    check.admit(tensor_header(of, "a", TensorKey(Payload.GRAD, 0, 0, of.course.num_blocks), 4))
    assert last == ITEMS_AHEAD - 1


def test_window_refuses_what_is_farther() -> None:
    """Beyond what can have been granted a frame is refused, so what a peer can make a node keep is bounded."""
    of = _ahead(num_steps=1000)
    check = FrameCheck(expectation(of, "b"), "a")
    with pytest.raises(FrameError, match="of a turn that is none of turns 0 to"):
        check.admit(tensor_header(of, "a", TensorKey(Payload.HIDDEN, 500, 0, 2), 4))


def test_window_goes_by_what_a_grant_says() -> None:
    """A gradient that some decision could bring is refused once the grant of its turn says what was decided."""
    of = plan(method=RingAda(every_steps=0, auto=Patience(patience_steps=2)), num_steps=40)  # soonest at 8, 12, 16
    turns = KnownTurns(of, StartPoint.of(of.course))
    check = FrameCheck(expectation(of, "a"), "b", turns)
    unfrozen = TensorKey(Payload.GRAD, 12, 0, 2)
    check.admit(tensor_header(of, "b", unfrozen, 2))
    for turn in turn_sequence(of.course):
        turns.granted(dataclasses.replace(turn, unfreeze_at=(8, 14) if turn.first_step >= 8 else ()))
    with pytest.raises(FrameError, match="not foreseen"):
        check.admit(tensor_header(of, "b", unfrozen._replace(micro=1), 2))
    check.admit(tensor_header(of, "b", unfrozen._replace(seq=14), 2))


def test_window_knows_a_granted_turn_that_no_course_foresees() -> None:
    """The checkpoint because the user stops takes the place of the turn that would have come, or follows the last."""
    of = _ahead(num_steps=3)
    known = list(turn_sequence(of.course))
    for last in (known[1], known[-1]):
        turns = KnownTurns(of, StartPoint.of(of.course))
        for turn in (*known[: last.index + 1], checkpoint := checkpoint_turn(last, holder="a")):
            turns.granted(turn)
        found = turns.by_index(checkpoint.index)
        assert found is not None
        assert found == turns.by_seq(checkpoint.first_seq)
        assert found.turn == checkpoint


def _ahead(**changes: Any) -> Plan:
    """One owner that hosts the lower half itself, one micro-batch a step, one step a turn."""
    values: dict[str, Any] = {
        "owners": (Owner(node="a", train_rows=8),),
        "slices": [("a", 0, 2), ("b", 2, 4)],
        "num_steps": 100,
        "local_iterations": 1,
        "method": RingAda(every_steps=1000),
        "microbatches": 1,
    }
    return plan(**{**values, **changes})
