"""PipeAdapter's order on a virtual clock: 1F1B, a fixed fill, and a flush at the end of every turn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.schedule.actions import Action, Op
from ringtune.schedule.methods import Everything, PipeAdapter
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table
from ringtune.schedule.turns import items, turn_sequence
from ringtune.schedule.versions import forward_version, in_flight
from sim.ring import RingResult, VirtualRing
from tests.suites.test_ring_on_virtual_clock import run_with_random_delays, weight_changes
from tests.support.plans import changed, make_plan, random_plan
from tests.support.validate import validate_table

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


def pipe_plan(rng: random.Random) -> Plan:
    """Any shape of run, with turns long enough to fill the ring."""
    return changed(random_plan(rng), method=PipeAdapter(), local_iterations=rng.randint(1, 7))


def test_pipe_hosts_do_one_forward_one_backward_once_filled() -> None:
    """With equal actions host p of 3 does 3 - p forwards, then F and B in turn, then what is left of B."""
    plan = even_plan(num_steps=5, local_iterations=5)
    order = VirtualRing(plan, action_s=equal_actions).run().order
    assert {node: words(plan, order[node]) for node in "abc"} == {
        "a": "F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 B3 U3 B4 U4",
        "b": "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 B4 U4",
        "c": "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4",
    }


def test_pipe_order_of_equal_actions_is_that_of_the_printed_table() -> None:
    """The table is what the engines do where all actions take equally long."""
    plan = even_plan(num_steps=11, local_iterations=6)
    order = VirtualRing(plan, action_s=equal_actions).run().order
    table = build_table(plan, turn_sequence(plan.course))
    for node in "abc":
        assert [a for a in order[node] if a.op in COMPUTED] == [a for a in table[node] if a.op in COMPUTED]


@pytest.mark.parametrize("num_steps", [8, 20])
def test_pipe_takes_the_time_of_an_ideal_1f1b_pipeline(num_steps: int) -> None:
    """A step takes F + B of one host, filling and draining a turn 2 (P - 1); without staleness a step takes 2 P."""
    plan = even_plan(num_steps=num_steps, local_iterations=num_steps)
    assert VirtualRing(plan, action_s=equal_actions).run().wall_s == 2 * num_steps + 2 * (3 - 1)
    fresh = changed(plan, method=Everything())
    assert VirtualRing(fresh, action_s=equal_actions).run().wall_s == 6 * num_steps


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_pipe_is_full_with_credits_for_one_item(microbatches: int) -> None:
    """As many credits as micro-batches keep every host busy in the steady state; one credit is slower, but ends."""
    plan = even_plan(num_steps=20, local_iterations=20, microbatches=microbatches, credits_per_channel=microbatches)
    full = VirtualRing(plan, action_s=equal_actions).run()
    busy_s = 2 * 20 * microbatches
    assert busy_s <= full.wall_s <= busy_s + 2 * 3 * microbatches
    tight = VirtualRing(changed(plan, credits=1), action_s=equal_actions).run()
    assert tight.finish is not None and tight.finish.error == ""
    assert tight.wall_s >= full.wall_s


@pytest.mark.promise("2 right version")
@given(st.integers(min_value=0))
def test_pipe_any_plan_and_any_delays_carry_out_a_valid_table(seed: int) -> None:
    """With as little as one credit every run ends, and every forward saw its version."""
    rng = random.Random(seed)
    plan = pipe_plan(rng)
    result = run_with_random_delays(plan, rng)
    assert result.finish is not None and result.finish.error == "", result.finish
    validate_table(plan, turn_sequence(plan.course), result.order)
    turns = list(turn_sequence(plan.course))
    validate_table(plan, turns, build_table(plan, turns))


def versions_seen(plan: Plan, result: RingResult) -> dict[tuple[str, int], int]:
    """Updates of the slice that each forward with graph saw, counted from the order of a run."""
    seen: dict[tuple[str, int], int] = {}
    for node, order in result.order.items():
        updates = 0
        for action in order:
            if action.op is Op.FORWARD:
                assert seen.setdefault((node, action.seq), updates) == updates
            elif action.op is Op.UPDATE and action.start < plan.course.num_blocks:
                updates += 1
    return seen


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(8)
def test_pipe_delays_never_change_what_a_forward_sees(seed: int) -> None:
    """Item k of a turn sees max(0, k - w + 1) of its updates; backwards and updates keep their order."""
    plan = pipe_plan(random.Random(seed))
    first = run_with_random_delays(plan, random.Random(1))
    hosts = [piece.node for piece in plan.placement.slices if piece.num_blocks]
    by_seq = {item.seq: (item, turn) for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    for (node, seq), version in versions_seen(plan, first).items():
        item, turn = by_seq[seq]
        w, k = len(hosts) - hosts.index(node), item.seq - turn.first_seq
        assert version == turn.first_step + max(0, k - w + 1)
        assert version == forward_version(plan.course, plan.slice_of(node).start, item)
    for other in range(2, 5):
        again = run_with_random_delays(plan, random.Random(other))
        assert versions_seen(plan, again) == versions_seen(plan, first)
        assert weight_changes(plan, again) == weight_changes(plan, first)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_pipe_no_more_than_the_fill_holds_graphs(seed: int) -> None:
    """At host p at most P - p items are between forward and update; each turn of enough steps reaches it."""
    rng = random.Random(seed)
    plan = pipe_plan(rng)
    result = run_with_random_delays(plan, rng)
    for node, actions in result.order.items():
        most, peak = in_flight(plan.course, plan.slice_of(node).start), 0
        waiting: set[int] = set()
        for action in actions:
            if action.op is Op.FORWARD:
                waiting.add(action.seq)
            elif action.op is Op.UPDATE and action.start < plan.course.num_blocks:
                waiting.discard(action.seq)
            peak = max(peak, len(waiting))
        assert peak <= most
        if plan.slice_of(node).num_blocks and plan.course.num_steps >= plan.course.local_iterations:
            assert peak == most


def test_pipe_turn_ends_with_everything_updated() -> None:
    """No node begins the next turn's forwards or saves before its last update of this one, whatever the delays."""
    plan = even_plan(num_steps=12, local_iterations=4, eval_rows=3, eval_every=4, checkpoint_every=4)
    by_seq = {item.seq: item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    for seed in range(20):
        for order in run_with_random_delays(plan, random.Random(seed)).order.values():
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
    for seed in range(60):
        result = run_with_random_delays(plan, random.Random(seed))
        assert result.finish is not None
        assert not result.finish.error, (seed, result.finish.message)
