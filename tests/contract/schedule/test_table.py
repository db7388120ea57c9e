"""The action table: printing, parsing, and what its validator refuses."""

from __future__ import annotations

import random

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op, Scope, format_action, ops, parse_action
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import turn_sequence
from tests.support.cases import cases
from tests.support.plans import make_plan, random_plan
from tests.support.validate import parse_table, validate_table

TWO_HOSTS = [("a", 0, 2), ("b", 2, 4)]
ONE_STEP = make_plan(TWO_HOSTS, ["c"], num_steps=1, every_steps=1, microbatches=1, eval_rows=0)
ONE_STEP_TABLE = """\
     a          b          c
------------------------------------
  0  .          .          E0.0
  1  .          .          >h0.0#0@a
  2  <h0.0#0@c  .          .
  3  f0.0[0,1)  .          .
  4  f0.0[1,2)  .          .
  5  >h0.0#2@b  .          .
  6  .          <h0.0#2@a  .
  7  .          f0.0[2,3)  .
  8  .          F0.0[3,4)  .
  9  .          >h0.0#4@c  .
 10  .          .          <h0.0#4@b
 11  .          .          H0.0
 12  .          .          >g0.0#4@b
 13  .          <g0.0#4@c  U0[head]
 14  .          B0.0[3,4)  .
 15  .          U0[3,4)    .
"""


THREE_STEPS = make_plan(
    TWO_HOSTS, ["b"], num_steps=3, local_iterations=3, microbatches=1, eval_rows=0, method="pipeadapter"
)
THREE_STEPS_TABLE = """\
     a          b
-------------------------
  0  .          E0.0
  1  .          >h0.0#0@a
  2  <h0.0#0@b  E1.0
  3  F0.0[0,2)  >h1.0#0@a
  4  >h0.0#2@b  .
  5  <h1.0#0@b  <h0.0#2@a
  6  F1.0[0,2)  F0.0[2,4)
  7  >h1.0#2@b  H0.0
  8  .          B0.0[2,4)
  9  .          >g0.0#2@a
 10  <g0.0#2@b  U0[head]
 11  B0.0[0,2)  U0[2,4)
 12  U0[0,2)    E2.0
 13  .          >h2.0#0@a
 14  <h2.0#0@b  <h1.0#2@a
 15  F2.0[0,2)  F1.0[2,4)
 16  >h2.0#2@b  H1.0
 17  .          B1.0[2,4)
 18  .          >g1.0#2@a
 19  <g1.0#2@b  U1[head]
 20  B1.0[0,2)  U1[2,4)
 21  U1[0,2)    <h2.0#2@a
 22  .          F2.0[2,4)
 23  .          H2.0
 24  .          B2.0[2,4)
 25  .          >g2.0#2@a
 26  <g2.0#2@b  U2[head]
 27  B2.0[0,2)  U2[2,4)
 28  U2[0,2)    .
"""


@cases(("plan", "drawn"), [(ONE_STEP, ONE_STEP_TABLE), (THREE_STEPS, THREE_STEPS_TABLE)])
def test_table_prints_as_drawn(plan: Plan, drawn: str) -> None:
    """Backward stops at the lowest trainable block, and the lower host gets no gradient.

    With PipeAdapter that host has two items in flight, the upper one, and everything is updated at the end.
    """
    assert format_table(build_table(plan, turn_sequence(plan.course)), plan.course.num_blocks) == drawn


@cases("seed", range(15))
def test_table_parses_back_to_itself(seed: int) -> None:
    """Whatever is printed is read back action by action."""
    plan = random_plan(random.Random(seed))
    table = build_table(plan, turn_sequence(plan.course))
    assert parse_table(format_table(table, plan.course.num_blocks), plan.course.num_blocks) == table


@cases("text", ["E1", "f1.0", "f1.0[2,1", "x1.0", "U1", ">h1.0@b", "<t@a", "H1.0[0,1)", "", ">h1.0#2@B!"])
def test_table_word_that_is_no_action_is_refused(text: str) -> None:
    """A cell that is not an action is named in the error."""
    with pytest.raises(PlanError, match="is not an action"):
        parse_action(text, 4)


@cases(
    "word",
    [
        "S3.1[2,4)",
        "U7[head]",
        "U7[embedding]",
        "U7[1,2)",
        "K12",
        "C3.1[2,4)",
        "A3.1[2,4)",
        ">c3.0#2@z",
        "<w3#2@z",
        "B3.1[-1,0)",
        "<t12@node-1",
        ">g3.0#4@a.b_c",
    ],
)
def test_table_every_kind_of_word_round_trips(word: str) -> None:
    """Whatever its scope."""
    assert format_action(parse_action(word, 4), 4) == word


def test_table_every_operation_has_a_word() -> None:
    """Also those of later parts: an operation is a row of one table, and prints and parses as its scope says."""
    ship = Op(letter="Z", name="ship", scope=Scope.RANGE)
    try:
        action = Action(ship, 3, 1, 2, 4)
        assert (format_action(action, 4), parse_action("Z3.1[2,4)", 4)) == ("Z3.1[2,4)", action)
        assert ship in ops()
        with pytest.raises(ValueError, match="operation 'Z' is there already"):
            Op(letter="Z", name="ship again", scope=Scope.ITEM)
    finally:
        ship.forget()
    with pytest.raises(PlanError, match=r"'Z3.1\[2,4\)' is not an action"):
        parse_action("Z3.1[2,4)", 4)
    assert [str(op) for op in ops()] == list("EfFSWRHBCAUK><")


def test_table_validator_refuses_a_missing_send() -> None:
    """Without its send a run is incomplete."""
    changed = ONE_STEP_TABLE.replace(">h0.0#2@b", ".        ")
    with pytest.raises(PlanError) as error:
        validate_table(ONE_STEP, turn_sequence(ONE_STEP.course), parse_table(changed, ONE_STEP.course.num_blocks))
    assert "<-- here" in str(error.value)
    assert ">h0.0#2@b is missing" in str(error.value)


def test_table_validator_refuses_deadlock() -> None:
    """Two nodes that wait for each other are found, and the first stuck cell is marked."""
    table = build_table(ONE_STEP, turn_sequence(ONE_STEP.course))
    receive = next(action for action in table["c"] if action.op is Op.RECEIVE)
    table["c"].remove(receive)
    table["c"].insert(0, receive)
    with pytest.raises(PlanError, match="deadlock"):
        validate_table(ONE_STEP, turn_sequence(ONE_STEP.course), table)


def test_table_validator_refuses_a_stale_forward() -> None:
    """A forward of step 1 before the update of step 0 sees the wrong version."""
    plan = make_plan(TWO_HOSTS, ["c"], num_steps=2, every_steps=9, microbatches=1, eval_rows=0)
    table = build_table(plan, turn_sequence(plan.course))
    column = table["b"]
    early = column.index(Action(Op.FORWARD, 1, 0, 3, 4))
    update = column.index(Action(Op.UPDATE, 0, -1, 3, 4))
    column.insert(early, column.pop(update))
    with pytest.raises(PlanError, match="block 3 has version 0, step 1 must see 1"):
        validate_table(plan, turn_sequence(plan.course), table)


@cases(
    ("moved", "before", "message"),
    [
        ("<h1.0#0@b F1.0[0,2) >h1.0#2@b", "<h2.0#0@b", "block 0 has version 1, step 1 must see 0"),
        ("U0[0,2)", "<g1.0#2@b", "block 0 has version 0, step 2 must see 1"),
        ("<g1.0#2@b B1.0[0,2)", "U0[0,2)", "backward before the update of the item before"),
    ],
)
def test_table_validator_refuses_what_breaks_pipeadapters_rule(moved: str, before: str, message: str) -> None:
    """A forward sees neither more nor fewer updates than the rule says, and gradients of two items never mix."""
    table = build_table(THREE_STEPS, turn_sequence(THREE_STEPS.course))
    words = [format_action(action, 4) for action in table["a"] if format_action(action, 4) not in moved.split()]
    at = words.index(before)
    table["a"] = [parse_action(word, 4) for word in [*words[:at], *moved.split(), *words[at:]]]
    with pytest.raises(PlanError, match=message):
        validate_table(THREE_STEPS, turn_sequence(THREE_STEPS.course), table)
