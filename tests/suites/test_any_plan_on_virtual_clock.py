"""What must hold for every kind of plan and every timing, on a virtual clock: each law looks at the same runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from ringtune.costs.memory_estimate import node_memory
from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Graph, Op, Payload
from ringtune.schedule.lowering import legs, links, max_waiting
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import Item, StepKind, items, turn_sequence
from ringtune.schedule.units import EMBEDDING
from tests.features.plans import KINDS, AnyRun, start_of
from tests.support.moves import by_placement
from tests.support.profiles import WEIGHTLESS
from tests.support.recorded_ring import RecordedResult
from tests.support.validate import parse_table, validate_table

SEEDS = 4
"""Plans of a kind in the gate; --all has eighteen times as many."""
FEW = 3
"""Of those, for laws that carry out more runs of each."""
CASES = [
    pytest.param((kind, block), id=f"{kind.name}-{block}", marks=pytest.mark.thorough if block else ())
    for kind in KINDS
    for block in range(18)
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> list[AnyRun]:
    """The runs of a kind, made once for all laws."""
    kind, block = request.param
    return [AnyRun(kind, seed) for seed in range(block * SEEDS, (block + 1) * SEEDS)]


def cases_of(*left_out: str) -> pytest.MarkDecorator:
    """The runs of all kinds but some."""
    cases = [case for case in CASES if case.values[0][0].name not in left_out]  # type: ignore[index]
    return pytest.mark.parametrize("runs", cases, indirect=True, scope="module")


of_all_kinds = cases_of()
in_one_placement = cases_of("moves")
without_a_cache = cases_of("moves", "cache")
"""What is kept in a cache is not there after a checkpoint, so the rest of a run is not that of the whole."""


def item_of(one: AnyRun) -> Iterator[tuple[Item, Plan]]:
    """Each item of a run, and the plan with what was decided when its turn was granted."""
    for turn in one.turns:
        decided = one.plan.decided(turn.unfreeze_at, turn.operations)
        yield from ((item, decided) for item in items(decided.course, turn))


@pytest.mark.promise("2 right version")
@of_all_kinds
def test_any_plan_and_any_delays_carry_out_a_valid_table(runs: list[AnyRun]) -> None:
    """The run ends, every forward saw its version, and in each placement just its own turns were carried out."""
    for one in runs:
        assert one.result.finish == rd.Finish("", ""), (one, one.result.finish)
        assert [turn.index for turn in one.turns] == [turn.index for turn in turn_sequence(one.plan.course)], one
        moved = [(move.placement_number, move.problem) for move in one.result.logged if isinstance(move, rd.LogMove)]
        assert moved == [(placement.placement_number, "") for placement in one.plan.placements[1:]], one
        for part, own, table, start in by_placement(one.plan, one.turns, one.result.order):
            validate_table(part, own, table, start=start)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.promise("5 timing changes nothing")
@of_all_kinds
def test_order_of_weight_changes_and_decisions_are_equal_for_any_delays(runs: list[AnyRun]) -> None:
    """Gradients are added up and applied in one order at each unit, so that weights have equal bits."""
    for one in runs:
        other = one.again(one.seed + 1000)
        assert weight_changes(other) == weight_changes(one.result), one
        assert decisions(other) == decisions(one.result), one


def weight_changes(result: RecordedResult) -> dict[tuple[str, int], list[Action]]:
    """Per node and unit the actions that add to its gradients, change or save it, in their order."""
    changes: dict[tuple[str, int], list[Action]] = {}
    for node, order in result.order.items():
        for action in order:
            if action.op in (Op.BACKWARD, Op.FIT, Op.HEAD, Op.UPDATE, Op.SAVE):
                for unit in range(action.start, max(action.stop, action.start + 1)):
                    changes.setdefault((node, unit), []).append(action)
    return changes


def decisions(result: RecordedResult) -> list[list[rd.Command]]:
    """What was decided, evaluated and saved, each in order."""
    kinds = (rd.LogUnfreeze, rd.LogOperations, rd.LogEvaluation, rd.LogCheckpoint)
    return [[entry for entry in result.logged if isinstance(entry, kind)] for kind in kinds]


@in_one_placement
def test_table_of_any_plan_is_valid_and_read_back(runs: list[AnyRun]) -> None:
    """What is printed of a plan is an order that could be carried out."""
    for one in runs:
        table = build_table(one.plan, one.turns)
        validate_table(one.plan, one.turns, table)
        num_blocks = one.plan.course.num_blocks
        assert parse_table(format_table(table, num_blocks), num_blocks) == table, one


@in_one_placement
def test_recorded_events_give_the_same_commands(runs: list[AnyRun]) -> None:
    """A fresh engine that is fed the events of a run answers with the very commands of that run."""
    for one in runs[:FEW]:
        for node, handled in one.result.handled.items():
            engine = NodeEngine(one.plan, node, wait_s=1e6)
            for entry in handled:
                assert engine.handle(entry.event, entry.now_s) == entry.commands, (one, node)


@pytest.mark.promise("7 bounded memory")
@in_one_placement
def test_credits_bound_what_is_in_flight(runs: list[AnyRun]) -> None:
    """Hidden states of a link and boundary, and parcels of a link and kind, that are sent and not yet taken."""
    for one in runs:
        under_way: Counter[tuple[Any, ...]] = Counter()
        for _, change, way in sorted(sent_and_taken(one.result), key=lambda event: event[:2]):
            under_way[way] += change
            payload, source, target, _ = way
            most = one.plan.placement.credits
            if payload != Payload.HIDDEN:
                most = max_waiting(one.plan, payload, source, target)
            assert under_way[way] <= most, (one, way)
        assert not +under_way, one


def sent_and_taken(result: RecordedResult) -> Iterator[tuple[float, int, tuple[str, str, str, int]]]:
    """(seconds, +1 where it is sent and -1 where it is taken, (kind, source, target, boundary if that counts))."""
    parcels = (Payload.PAIRS, Payload.WEIGHTS, Payload.REPLICA_GRAD, Payload.UNIT_GRAD)
    by_boundary = (Payload.HIDDEN, Payload.UNIT_GRAD)
    for message in result.messages:
        if message.payload == Payload.HIDDEN or message.payload in parcels:
            boundary = message.key.boundary if message.payload in by_boundary else 0
            yield message.sent_s, 1, (message.payload, message.source, message.target, boundary)
    for node, handled in result.handled.items():
        for entry in handled:
            for command in entry.commands:
                if isinstance(command, ev.AcceptParcel) or (isinstance(command, ev.Accept) and command.key.is_hidden):
                    boundary = command.key.boundary if command.key.payload in by_boundary else 0
                    yield entry.now_s, -1, (command.key.payload, command.source, node, boundary)


@pytest.mark.promise("7 bounded memory")
@cases_of("moves", "helpers")
def test_no_node_holds_more_than_the_planner_counted(runs: list[AnyRun]) -> None:
    """No timing makes a node hold more tensors or graphs at once; at the end it keeps no graph.

    What waits at hosts that are helped is bounded by a prediction: ``test_memory_on_virtual_clock``.
    """
    for one in runs:
        course = one.plan.course
        tokens = course.microbatch_sizes()[0] * course.max_length
        for node in one.plan.nodes:
            estimate = node_memory(one.plan, node, WEIGHTLESS, optimizer="sgd", activation_token_bytes=1)
            waiting = peak_waiting(one, node)
            assert waiting * tokens * course.hidden_size * 4 <= estimate.parts()["buffers"], (one, node)
            assert peak_graphs(one.result.order[node]) * tokens <= estimate.parts()["activations"], (one, node)


def peak_waiting(one: AnyRun, node: str) -> int:
    """Most hidden states and gradients that one node held at once, in its inbox or between two actions."""
    last: set[Action] = set()  # after each of which nothing of its micro-batch is needed here
    for item, decided in item_of(one):
        for micro, way in enumerate(legs(decided, item, node)):
            last.update(leg.bind(item.seq, micro) for leg in way[-1:])
    inbox = peak = 0
    held: set[tuple[int, int]] = set()
    for _, event, commands in one.result.handled[node]:
        if isinstance(event, ev.TensorArrived):
            inbox += 1
        if isinstance(event, ev.ActionDone):
            action = event.action
            if action.op is Op.EMBED:
                held.add((action.seq, action.micro))
            elif action in last:
                held.discard((action.seq, action.micro))
        peak = max(peak, inbox + len(held))
        for command in commands:
            if isinstance(command, ev.Accept):
                inbox -= 1
                held.add((command.key.seq, command.key.micro))
            elif isinstance(command, ev.SendTensor):
                held.discard((command.key.seq, command.key.micro))
            peak = max(peak, inbox + len(held))
    return peak


def peak_graphs(order: list[Action]) -> int:
    """Most graphs of a block and a micro-batch that a node kept at once; at the end it keeps none."""
    kept = peak = 0
    for action in order:
        if action.op.graph is not Graph.NONE and action.start > EMBEDDING:
            kept += (action.stop - action.start) * (1 if action.op.graph is Graph.KEEPS else -1)
        peak = max(peak, kept)
    assert kept == 0
    return peak


@without_a_cache
def test_run_that_goes_on_from_a_checkpoint_does_the_rest(runs: list[AnyRun]) -> None:
    """The same work of each step and the same decisions, in a valid order, over links that the plan has."""
    checked = 0
    for one in runs[:FEW]:
        plan, work = one.plan, train_actions(one.result)
        assert {(message.source, message.target) for message in one.result.messages} <= links(plan), one
        for saved in dict.fromkeys([*one.checkpoints[:1], *one.checkpoints[-2:-1]]):
            start = start_of(plan, saved)
            rest = one.again(one.seed + 1, start=start)
            assert rest.finish == rd.Finish("", ""), (one, saved, rest.finish)
            left = {node: [entry for entry in actions if entry[0] >= saved.step] for node, actions in work.items()}
            assert train_actions(rest) == left, (one, saved)
            turns = [entry.turn for entry in rest.logged if isinstance(entry, rd.LogTurn)]
            if turns:
                validate_table(plan, turns, rest.order, start=start)
            assert {(message.source, message.target) for message in rest.messages} <= links(plan, start), one
            checked += 1
    assert checked


@without_a_cache
def test_drained_run_goes_on_as_if_nobody_had_stopped_it(runs: list[AnyRun]) -> None:
    """Stopped anywhere, also while it scores or chooses: both parts together do every step once."""
    drained = 0
    for one in runs[:FEW]:
        at_s = 0.9 * random.Random(one.seed).random() * one.result.wall_s
        stopped = one.again(one.seed, drain_at_s=at_s)
        assert stopped.finish is not None
        if not stopped.finish.error:
            continue
        assert stopped.finish == rd.Finish("InterruptedRunError", "stopped by the user"), one
        saved = [entry for entry in stopped.logged if isinstance(entry, rd.LogCheckpoint)]
        start = start_of(one.plan, saved[-1]) if saved else None
        first, second = train_actions(stopped), train_actions(one.again(one.seed + 1, start=start))
        assert {node: first[node] + second[node] for node in first} == train_actions(one.result), one
        drained += 1
    assert drained


def train_actions(result: RecordedResult) -> dict[str, list[tuple[int, Action]]]:
    """Per node what it did for train items, with the step instead of ``seq``."""
    steps = {
        turn.first_seq + offset: turn.first_step + offset
        for turn in (entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn))
        if turn.kind is StepKind.TRAIN
        for offset in range(turn.num_items)
    }
    return {
        node: sorted(
            (steps[action.seq], action._replace(seq=0))
            for action in order
            if action.seq in steps and action.payload != Payload.HEAD
        )
        for node, order in result.order.items()
    }
