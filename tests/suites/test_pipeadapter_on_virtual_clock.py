"""PipeAdapter's order on a virtual clock: 1F1B, a fixed fill, and a flush at the end of every turn.

That every forward sees the version of this order is a law of any plan: ``test_any_plan_on_virtual_clock``.
"""

from __future__ import annotations

import random

import pytest

from ringtune.schedule.actions import Action, Op
from ringtune.schedule.methods import Everything, Method, PipeAdapter, RingAda
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table
from ringtune.schedule.turns import items, turn_sequence
from ringtune.schedule.versions import in_flight
from tests.features.plans import pipe_plan, run
from tests.support.plans import changed, make_plan
from tests.support.recorded_ring import RecordedRing

THREE = [("a", 0, 2), ("b", 2, 4), ("c", 4, 6)]
COMPUTED = (Op.EMBED, Op.FORWARD, Op.HEAD, Op.BACKWARD, Op.UPDATE)


def even_plan(**changes: object) -> Plan:
    """Three equal hosts and an owner that hosts nothing; one micro-batch."""
    values: dict[str, object] = {
        "num_blocks": 6,
        "num_steps": 8,
        "local_iterations": 8,
        "microbatches": 1,
        "eval_rows": 0,
        "method": "pipeadapter",
    }
    return make_plan(THREE, ["o"], **{**values, **changes})  # type: ignore[arg-type]


def equal_actions(node: str, action: Action) -> float:
    """Forward and backward of a slice take one second, all else nothing."""
    return 1.0 if action.op in (Op.FORWARD, Op.BACKWARD) else 0.0


def words(plan: Plan, actions: list[Action]) -> str:
    """Forwards, backwards and updates with their items."""
    kept = (Op.FORWARD, Op.BACKWARD, Op.UPDATE)
    return " ".join(f"{action.op}{action.seq}" for action in actions if action.op in kept)


def test_pipe_hosts_do_one_forward_one_backward_once_filled() -> None:
    """With equal actions host p of 3 does 3 - p forwards, then F and B in turn, then what is left of B."""
    plan = even_plan(num_steps=5, local_iterations=5)
    order = RecordedRing(plan, action_s=equal_actions).run().order
    assert {node: words(plan, order[node]) for node in "abc"} == {
        "a": "F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 B3 U3 B4 U4",
        "b": "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 B4 U4",
        "c": "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4",
    }


def test_pipe_order_of_equal_actions_is_that_of_the_printed_table() -> None:
    """The table is what the engines do where all actions take equally long."""
    plan = even_plan(num_steps=11, local_iterations=6)
    order = RecordedRing(plan, action_s=equal_actions).run().order
    table = build_table(plan, turn_sequence(plan.course))
    for node in "abc":
        assert [a for a in order[node] if a.op in COMPUTED] == [a for a in table[node] if a.op in COMPUTED]


@pytest.mark.parametrize("num_steps", [8, 20])
def test_pipe_takes_the_time_of_an_ideal_1f1b_pipeline(num_steps: int) -> None:
    """A step takes F + B of one host, filling and draining a turn 2 (P - 1); without staleness a step takes 2 P."""
    plan = even_plan(num_steps=num_steps, local_iterations=num_steps)
    assert RecordedRing(plan, action_s=equal_actions).run().wall_s == 2 * num_steps + 2 * (3 - 1)
    fresh = changed(plan, method=Everything())
    assert RecordedRing(fresh, action_s=equal_actions).run().wall_s == 6 * num_steps


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_pipe_is_full_with_credits_for_one_item(microbatches: int) -> None:
    """As many credits as micro-batches keep every host busy in the steady state; one credit is slower, but ends."""
    plan = even_plan(num_steps=20, local_iterations=20, microbatches=microbatches, credits_per_channel=microbatches)
    full = RecordedRing(plan, action_s=equal_actions).run()
    busy_s = 2 * 20 * microbatches
    assert busy_s <= full.wall_s <= busy_s + 2 * 3 * microbatches
    tight = RecordedRing(changed(plan, credits=1), action_s=equal_actions).run()
    assert tight.finish is not None and tight.finish.error == ""
    assert tight.wall_s >= full.wall_s


def test_pipe_turn_ends_with_everything_updated() -> None:
    """No node begins the next turn's forwards or saves before its last update of this one, whatever the delays."""
    plan = even_plan(num_steps=12, local_iterations=4, eval_rows=3, eval_every=4, checkpoint_every=4)
    by_seq = {item.seq: item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    for seed in range(6):
        for order in run(plan, random.Random(seed)).order.values():
            weights = (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD, Op.UPDATE, Op.SAVE)
            turns = [by_seq[action.seq].turn for action in order if action.op in weights]
            assert turns == sorted(turns)


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize("credits_per_channel", [2, 8])
def test_pipe_saves_before_later_updates_where_a_table_passes_slices_by(credits_per_channel: int) -> None:
    """A later item that passes a host by gets ahead of it; its head update waits for a save that is still to come."""
    rows = {0: "1111", 1: "3313", 2: "1111", 3: "3331"}
    table = Operations(batches=tuple(BatchOperations(owner="d", batch_id=at, rows=(row,)) for at, row in rows.items()))
    plan = make_plan(
        [("d", 0, 1), ("b", 1, 2), ("a", 2, 3), ("c", 3, 4)],
        ["d"],
        num_steps=7,
        local_iterations=4,
        batch_size=3,
        microbatches=1,
        train_rows=12,
        eval_rows=1,
        checkpoint_every=3,
        method="pipeadapter",
        credits_per_channel=credits_per_channel,
    )
    plan = changed(plan, operations=table)
    for seed in range(25):
        result = run(plan, random.Random(seed))
        assert result.finish is not None
        assert not result.finish.error, (seed, result.finish.message)


@pytest.mark.parametrize(
    "method", [PipeAdapter(), Everything(), RingAda(every_steps=2)], ids=lambda method: method.name
)
def test_no_more_items_than_the_fill_are_between_forward_and_update(method: Method) -> None:
    """At host p of P at most P - p, and turns of enough steps reach it; of other methods one."""
    for seed in range(6):
        plan = changed(pipe_plan(random.Random(seed)), method=method)
        for node, actions in run(plan, random.Random(seed)).order.items():
            most, peak = in_flight(plan.course, plan.slice_of(node).start), 0
            waiting: set[int] = set()
            for action in actions:
                if action.op is Op.FORWARD:
                    waiting.add(action.seq)
                elif action.op is Op.UPDATE and action.start < plan.course.num_blocks:
                    waiting.discard(action.seq)
                peak = max(peak, len(waiting))
            assert peak <= most, (seed, node)
            assert most == 1 or method.name == "pipeadapter"
            if plan.slice_of(node).num_blocks and plan.course.num_steps >= plan.course.local_iterations:
                assert peak == most or method.name == "ringada", (seed, node)
