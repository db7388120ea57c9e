"""A new operation is one more row of the table (and a method of the executor): everybody else reads the row.

The new one stands in for the forward with graph, under another letter and name. So every figure that is read from the
row has to be that of the forward with graph, and what no row says would show as a difference.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.run.trace import TraceText
from ringtune.costs.calibration import RecordedProfile
from ringtune.costs.profile import Work
from ringtune.engine.events import Span
from ringtune.errors import PlanError
from ringtune.schedule import lowering
from ringtune.schedule.actions import Action, Graph, Leg, Op, Scope, Timing, format_action, ops, parse_action
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import turn_sequence
from sim.prediction import Prediction, predict
from sim.recorded_run import read_trace
from tests.support.plans import make_plan
from tests.support.profiles import all_pairs, profile_of
from tests.support.recorded_ring import RecordedRing
from tests.support.torch_ring import Case, TorchCarrier, make_carrier, write_inputs
from tests.support.validate import parse_table, validate_table

SLICES = [("a", 0, 2), ("b", 2, 4)]


@pytest.fixture
def half() -> Iterator[Op]:
    """One row, taken out again at the end."""
    row = Op(
        letter="P",
        name="partial forward",
        scope=Scope.RANGE,
        rank=3,
        is_forward=True,
        graph=Graph.KEEPS,
        has_work_space=True,
        timing=Timing(work="graph", lowest="graph_lowest"),
    )
    yield row
    row.forget()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch, half: Op) -> Iterator[Callable[[], None]]:
    """Calling it makes the lowering say the new operation where it said forward with graph."""
    plan_of_checkpoint = lowering._forward

    def with_new(*arguments: Any) -> Iterator[Leg]:
        for leg in plan_of_checkpoint(*arguments):
            yield leg._replace(op=half) if leg.op is Op.FORWARD else leg

    def begin() -> None:
        monkeypatch.setattr(lowering, "_forward", with_new)
        lowering.lower.cache_clear()

    lowering.lower.cache_clear()
    yield begin
    lowering.lower.cache_clear()


def plan_of(**changes: Any) -> Plan:
    """Two hosts, two owners, one of which hosts nothing; unfreezing during the run."""
    return make_plan(SLICES, ["a", "c"], **{"num_steps": 6, "eval_every": 2, "checkpoint_every": 3, **changes})


def test_new_operation_is_printed_and_read(half: Op) -> None:
    """Its letter and its scope say how; without the row it is refused."""
    action = Action(half, 12, 1, 0, 3)
    assert format_action(action, 4) == "P12.1[0,3)"
    assert parse_action("P12.1[0,3)", 4) == action
    assert half in ops()
    with pytest.raises(PlanError, match="is not an action"):
        parse_action("Q12.1[0,3)", 4)


def test_new_operation_runs_through_engine_and_table(half: Op, lowered: Callable[[], None]) -> None:
    """Engines carry it out in an order that is valid, backward follows it, and the table prints it."""
    lowered()
    plan = plan_of()
    rng = random.Random(1)
    result = RecordedRing(plan, action_s=lambda node, action: rng.random()).run()
    assert result.finish is not None
    assert result.finish.error == ""
    turns = tuple(turn_sequence(plan.course))
    validate_table(plan, turns, result.order)
    table = build_table(plan, turns)
    validate_table(plan, turns, table)
    text = format_table(table, plan.course.num_blocks)
    assert parse_table(text, plan.course.num_blocks) == table
    found = [action.op for actions in result.order.values() for action in actions]
    assert found.count(half) == found.count(Op.BACKWARD) > 0
    assert Op.FORWARD not in found


def predicted(plan: Plan) -> Prediction:
    """On nodes whose works take different times."""
    return predict(plan, profile_of(plan, links=all_pairs(plan.nodes, 1e5, 0.01)), keep_spans=True)


def test_new_operation_costs_and_holds_what_its_row_says(half: Op, lowered: Callable[[], None]) -> None:
    """Time, bytes and the order of all actions are those of the operation that it stands in for."""
    before = predicted(plan_of(seed=1))
    lowered()
    after = predicted(plan_of(seed=1))
    assert after.wall_s == before.wall_s
    assert [node.peak_memory_bytes for node in after.nodes] == [node.peak_memory_bytes for node in before.nodes]
    for node, then in zip(after.nodes, before.nodes, strict=True):
        assert node.busy_by_op_s.get("P", 0.0) == then.busy_by_op_s.get("F", 0.0)
    assert any(node.busy_by_op_s.get("P") for node in after.nodes)


def test_new_operation_is_learnt_from(half: Op, lowered: Callable[[], None]) -> None:
    """Recorded seconds of it move the work that its row names."""
    plan = plan_of()
    profile = profile_of(plan)
    run = predicted(plan)
    lowered()
    recorded = RecordedProfile(plan.course, profile)
    for turn in turn_sequence(plan.course):
        recorded.granted(turn)
    for node, action, start_s, end_s in run.spans:
        if action.op is Op.FORWARD:
            recorded.add(node, action._replace(op=half), 3 * (end_s - start_s))
    times = {time.work: time.median_s for time in recorded.profile().by_name["b"].work_times if time.samples > 3}
    then = {time.work: time.median_s for time in profile.by_name["b"].work_times}
    assert times[Work.GRAPH_LOWEST] == pytest.approx(3 * then[Work.GRAPH_LOWEST])


def test_new_operation_is_traced_and_replayed(tmp_path: Path, half: Op, lowered: Callable[[], None]) -> None:
    """A trace names it, is read back, and its replay takes as long as the run did."""
    lowered()
    plan = plan_of()
    run = predicted(plan)
    text = TraceText(plan.nodes, num_blocks=4, started_unix_s=0.0)
    path = tmp_path / "trace.json"
    pieces = [text.spans(node, [Span(action, start_s, end_s)]) for node, action, start_s, end_s in run.spans]
    path.write_text(text.begin() + "".join(pieces) + text.end())
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["name"].startswith("partial forward ")} == {"partial forward"}
    recording = read_trace(path, 4)
    again = predict(
        plan, profile_of(plan, links=all_pairs(plan.nodes, 1e5, 0.01)), samples=recording.samples, same_run=True
    )
    assert again.wall_s == pytest.approx(run.wall_s, rel=1e-5)


class CarrierThatKnows(TorchCarrier):
    """Executors with one more method: here the one that they have for a forward with graph."""

    def teach(self, op: Op) -> None:
        """The method for an operation."""
        for executor in self.executors.values():
            executor._handlers[op] = executor._forward


def test_new_operation_trains_with_one_more_method_of_the_executor(
    tmp_path: Path, half: Op, lowered: Callable[[], None]
) -> None:
    """The result has the bits of the operation that it stands in for."""
    case = Case(folder=write_inputs(tmp_path), num_steps=6, every_steps=2, dtype="float32", microbatches=2)

    def trained() -> dict[str, torch.Tensor]:
        plan = case.plan((("a", 0, 2), ("b", 2, 4)))
        carrier = CarrierThatKnows(make_carrier(case, plan).executors)
        carrier.teach(half)
        assert RecordedRing(plan, carrier=carrier).run().finish is not None
        return carrier.collected(plan, "a")

    before = trained()
    lowered()
    after = trained()
    assert all(torch.equal(before[name], after[name]) for name in before)
