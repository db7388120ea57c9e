"""What must hold for a run that goes from one placement to the next, whatever the timing: on a virtual clock."""

from __future__ import annotations

import random

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.actions import Scope
from ringtune.schedule.migration import due
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, turn_sequence
from tests.features.plans import Losses, moving_plan, run, unfreezing_plan
from tests.support.moves import by_placement, granted, moving, moving_at_random, random_placement
from tests.support.plans import make_plan
from tests.support.recorded_ring import RecordedResult, RecordedRing
from tests.support.validate import validate_table

TWO = [("a", 0, 3), ("b", 3, 6)]
MOVED = [("b", 0, 1), ("c", 1, 6)]


def moves_of(result: RecordedResult) -> list[rd.LogMove]:
    """What the log says of moves."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogMove)]


def validate(plan: Plan, result: RecordedResult, stays: frozenset[int] = frozenset()) -> None:
    """In each placement just its own turns were carried out, on just its own nodes."""
    turns = granted(result)  # with the tables that were chosen
    assert [turn.index for turn in turns] == [turn.index for turn in turn_sequence(plan.course)]
    for part, own, table, start in by_placement(plan, turns, result.order, stays):
        validate_table(part, own, table, start=start)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("block", range(10))
@pytest.mark.sampled(1)
def test_moves_that_are_found_in_mid_run_carry_out_a_valid_table_too(block: int) -> None:
    """Placements that come at any time hold from a turn that was not granted yet; the plan that is logged has them."""
    moved = 0
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        plan = moving_plan(rng)
        plan = Plan(plan.course, plan.placements[: rng.randint(1, len(plan.placements))])
        found = [random_placement(rng, plan, 0, 0) for _ in range(rng.randint(1, 3))]
        hosts = frozenset(plan.nodes)
        found = [one for one in found if {piece.node for piece in one.slices} <= hosts]
        result = run(plan, rng, replans=[(60 * rng.random(), one) for one in found])
        assert result.finish is not None and result.finish.error == "", (seed, result.finish)
        plans = [plan, *(entry.plan for entry in result.logged if isinstance(entry, rd.LogPlan))]
        assert [move.placement_number for move in moves_of(result)] == [
            one.placement_number for one in plans[-1].placements[1:]
        ], seed
        moved += len(plans) - 1
        validate(plans[-1], result)
    assert moved


def test_run_moves_to_a_found_placement_once_its_nodes_have_fetched_what_it_wants() -> None:
    """Until then it trains where it is, to the end if need be; a planned one is moved to at its turn."""
    plan = moving(make_plan(TWO, ["a"], num_blocks=6, num_steps=40), (4, MOVED))
    undisturbed = RecordedRing(plan, items_ahead=1).run()
    (planned,) = moves_of(undisturbed)
    assert planned.step == 8
    steps = {}
    for fetch_s in (0.0, 0.2 * undisturbed.wall_s, 10 * undisturbed.wall_s):

        def fetches(asked: rd.FetchAhead, fetch_s: float = fetch_s) -> rd.FetchedAhead:
            return rd.FetchedAhead(
                asked.node, asked.part.placement.placement_number, 7, fetch_s if asked.node == "b" else 0.0
            )

        found = RecordedRing(
            plan, items_ahead=1, fetches=fetches, replans=[(0.4 * undisturbed.wall_s, plan.placement)]
        ).run()
        assert found.finish == rd.Finish("", "")
        steps[fetch_s] = [(move.placement_number, move.step, move.problem) for move in moves_of(found)]
        fetched = [
            (entry.placement_number, entry.seconds) for entry in found.logged if isinstance(entry, rd.LogFetched)
        ]
        assert ((2, fetch_s) in fetched) is (len(steps[fetch_s]) == 2)
        plans = [plan, *(entry.plan for entry in found.logged if isinstance(entry, rd.LogPlan))]
        validate(plans[-1], found)
    (at_once, later, never) = steps.values()
    assert [move[:2] for move in (at_once[0], later[0], never[0])] == [(1, 8)] * 3
    assert len(at_once) == len(later) == 2 and len(never) == 1
    assert later[1][1] > at_once[1][1] > 8


def test_run_moves_once_to_a_placement_that_is_found_again() -> None:
    """A search that began before the run went there may find the same once more; going back is a move of its own."""
    plan = make_plan(TWO, ["a"], num_blocks=6, num_steps=40)
    (other,) = moving(plan, (4, [("a", 0, 1), ("b", 1, 6)])).placements[1:]
    wall_s = RecordedRing(plan, items_ahead=1).run().wall_s
    found = [(0.30, other), (0.32, other), (0.5, other), (0.6, plan.placement), (0.7, plan.placement), (0.8, other)]
    result = RecordedRing(plan, items_ahead=1, replans=[(share * wall_s, one) for share, one in found]).run()
    assert result.finish == rd.Finish("", "")
    hosts = [entry.part.placement.slices for entry in moves_of(result)]
    assert hosts == [other.slices, plan.placement.slices, other.slices]


def test_run_stays_where_it_is_if_a_node_can_not_fetch_what_a_found_placement_wants() -> None:
    """It says why; a planned placement is tried all the same, because the move fetches too."""
    plan = moving(make_plan(TWO, ["a"], num_blocks=6, num_steps=40), (4, MOVED))

    def fetches(asked: rd.FetchAhead) -> rd.FetchedAhead:
        placement_number = asked.part.placement.placement_number
        return rd.FetchedAhead(
            asked.node, placement_number, problem="node b has no room on its disk" if asked.node == "b" else ""
        )

    undisturbed = RecordedRing(plan).run()
    found = RecordedRing(plan, fetches=fetches, replans=[(0.4 * undisturbed.wall_s, plan.placement)]).run()
    assert found.finish == rd.Finish("", "")
    assert [(move.placement_number, move.problem) for move in moves_of(found)] == [
        (1, ""),
        (2, "node b has no room on its disk"),
    ]
    fetched = [entry for entry in found.logged if isinstance(entry, rd.LogFetched)]
    assert [entry.problems for entry in fetched] == [(("b", "node b has no room on its disk"),)] * 2


def test_move_that_takes_too_long_is_given_up() -> None:
    """A node that prepares for ever is waited for as long as for anything, then all go back."""
    plan = moving(make_plan(TWO, ["a"], num_blocks=6, num_steps=8), (2, MOVED))
    result = RecordedRing(
        plan, move_s=lambda move: 50.0 if (move.node, move.start.placement_number) == ("c", 1) else 1.0, wait_s=20
    )
    (move,) = moves_of(found := result.run())
    assert found.finish == rd.Finish("", "")
    assert (move.step, move.problem, move.part) == (4, "waited 30 s for node c to move", plan.at(0))
    assert move.seconds == pytest.approx(31)
    validate(plan, found, frozenset({1}))


def test_move_back_that_takes_too_long_ends_the_run() -> None:
    """Where a node can't go back either, the run ends, and says how it goes on."""
    plan = moving(make_plan(TWO, ["a"], num_blocks=6, num_steps=8), (2, MOVED))
    result = RecordedRing(plan, move_s=lambda move: 50.0 if move.node == "b" else 1.0, wait_s=20).run()
    message = "waited 30 s for node b to go back; start the run again with --resume"
    assert result.finish == rd.Finish("DeadlineError", message)


def test_placement_on_a_node_that_was_lost_meanwhile_is_not_taken_into_the_plan() -> None:
    """A node that the present placement does not need may die; no placement that comes later has it."""
    plan = moving(make_plan(TWO, ["b"], num_blocks=6, num_steps=20), (2, MOVED))
    lost = rd.NodeFailed("a", "PeerLostError", "node a is lost")
    for is_lost in (False, True):
        undisturbed = RecordedRing(plan).run()
        (move,) = moves_of(undisturbed)
        ring = RecordedRing(plan, items_ahead=1, replans=[(0.5 * undisturbed.wall_s, plan.placement)])
        if is_lost:
            ring.clock.at(0.4 * undisturbed.wall_s, ring._tell_rounds, lost)
        found = ring.run()
        assert found.finish == rd.Finish("", "") and move.step == 4
        assert any(isinstance(entry, rd.LogPlan) for entry in found.logged) is not is_lost


def test_moves_begin_at_the_first_turn_of_the_next_placement_and_not_before() -> None:
    """Evaluations and checkpoints after the last turn are of the old placement still."""
    course = {"num_blocks": 6, "num_steps": 8, "eval_every": 4, "checkpoint_every": 4}
    plan = moving(make_plan(TWO, ["a", "b"], **course), (2, MOVED))  # type: ignore[arg-type]
    numbers = [
        (turn.kind, turn.first_step, due(plan.course, plan.placements, turn)) for turn in turn_sequence(plan.course)
    ]
    train, save, evaluate = StepKind.TRAIN, StepKind.CHECKPOINT, StepKind.EVALUATE
    assert numbers == [
        (train, 0, 0),
        (train, 2, 0),
        (save, 4, 0),
        (evaluate, 4, 0),
        (evaluate, 4, 0),
        (train, 4, 1),
        (train, 6, 1),
        (save, 8, 1),
        (evaluate, 8, 1),
        (evaluate, 8, 1),
    ]


@pytest.mark.parametrize("step", [4, 6])
def test_run_that_goes_on_from_a_checkpoint_of_an_earlier_placement_moves_first(step: int) -> None:
    """A checkpoint at the boundary, or after a move that failed, is of the old placement: the run moves from there."""
    plan = moving(make_plan(TWO, ["a"], num_blocks=6, num_steps=8, checkpoint_every=2), (2, MOVED))
    start = StartPoint.of(plan.course, step=step)
    result = RecordedRing(plan, start=start).run()
    assert result.finish == rd.Finish("", "")
    (move,) = moves_of(result)
    assert (move.step, move.placement_number, move.problem) == (step, 1, "")
    computed = [action for action in result.order["a"] if action.op.scope is Scope.RANGE]
    assert not [action for action in computed if 0 <= action.start < 6]  # it hosts nothing any more


def test_run_that_goes_on_in_a_later_placement_begins_there() -> None:
    """A checkpoint after a move is of the placement to which the run had moved."""
    plan = moving(make_plan(TWO, ["a"], num_blocks=6, num_steps=8, checkpoint_every=2), (2, MOVED))
    start = StartPoint(step=6, holder="a", placement_number=1)
    result = RecordedRing(plan, start=start).run()
    assert result.finish == rd.Finish("", "") and not moves_of(result)
    turns = list(turn_sequence(plan.course, start=start))
    validate_table(plan.at(1), turns, {node: result.order[node] for node in plan.at(1).nodes}, start=start)


@pytest.mark.parametrize("block", range(8))
@pytest.mark.sampled(1)
def test_moves_that_fail_leave_the_run_where_it_was(block: int) -> None:
    """A node that can't prepare keeps all on the placement that they have; the run ends well and says why."""
    for seed in range(block * 8, block * 8 + 8):
        rng = random.Random(seed)
        plan = moving_plan(rng)
        stays = frozenset(one.placement_number for one in plan.placements[1:] if rng.random() < 0.6)
        bad = {number: rng.choice(plan.at(number).nodes) for number in stays}

        def fails(move: rd.Move, bad: dict[int, str] = bad) -> str:
            is_bad = bad.get(move.part.placement.placement_number) == move.node
            return f"node {move.node} has no room" if is_bad else ""

        result = run(plan, rng, fails_to_move=fails)
        assert result.finish == rd.Finish("", ""), seed
        validate(plan, result, stays)
        told = {move.placement_number: move.problem for move in moves_of(result)}
        problems = {number: f"node {bad[number]} has no room" if number in bad else "" for number in plan_numbers(plan)}
        assert told == problems, seed


def plan_numbers(plan: Plan) -> list[int]:
    """The placements that a plan moves to."""
    return [one.placement_number for one in plan.placements[1:]]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled(2)
def test_moves_where_the_losses_decide_what_trains(seed: int) -> None:
    """A decision is carried over a move, and what travels follows from the decisions so far."""
    rng = random.Random(seed)
    plan = moving_at_random(rng, unfreezing_plan(seed))
    result = run(plan, rng, carrier=Losses(plan, seed))
    assert result.finish == rd.Finish("", "")
    still = run(plan.at(0), rng, carrier=Losses(plan, seed))
    decided = [entry for entry in result.logged if isinstance(entry, rd.LogUnfreeze)]
    assert decided == [entry for entry in still.logged if isinstance(entry, rd.LogUnfreeze)]
    for part, own, table, start in by_placement(plan, granted(result), result.order):
        validate_table(part, own, table, start=start)


@pytest.mark.parametrize("block", range(5))
@pytest.mark.sampled(1)
def test_stop_at_any_moment_ends_a_moving_run_with_what_was_granted(block: int) -> None:
    """Also while it moves: then it is saved where the move ends, and the run goes on from there."""
    for seed in range(block * 8, block * 8 + 8):
        rng = random.Random(seed)
        plan = moving_at_random(rng, make_plan(TWO, ["a", "b"], num_blocks=6, num_steps=20, eval_rows=0))
        end_s = run(plan, random.Random(seed)).wall_s
        result = run(plan, random.Random(seed), drain_at_s=rng.random() * 1.2 * end_s)
        assert result.finish is not None
        saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
        if result.finish.error:
            assert result.finish == rd.Finish("InterruptedRunError", "stopped by the user"), seed
            done = granted(result)
            assert [turn.kind for turn in done].count(StepKind.CHECKPOINT) == len(saved) <= 1
            assert not saved or saved[0].step == done[-1].end_step == done[-2].end_step
