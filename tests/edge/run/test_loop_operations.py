"""One node's loop in a run that chooses its operations: scores go out, tables come in and are recorded."""

from __future__ import annotations

import dataclasses
import json

import pytest

from edge.run import reporter as rp
from edge.run.recorder import record_line
from ringtune.engine.handled import Handled
from ringtune.rounds.turns.turn_scores import check_scores
from ringtune.rpc.codecs.scores_codec import scores_from_proto
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind, Turn, turn_sequence
from tests.support.choosing import DrawnTables, make_choice, table_of
from tests.support.fakes import FakeExecutor, FakeRing
from tests.support.plans import changed, make_plan
from tests.support.replay import replay

PLAN = changed(
    make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, eval_every=4), choice=make_choice(refresh_steps=4)
)


def decided_turns(plan: Plan) -> list[Turn]:
    """The turns of a run with a table from the first train turn on, and another one from step 4 on."""
    tables = {0: table_of(plan.course, 0), 4: table_of(plan.course, 4)}
    table, found = None, []
    for turn in turn_sequence(plan.course):
        if turn.kind is StepKind.TRAIN:
            table = tables.get(turn.first_step, table)
        found.append(dataclasses.replace(turn, operations=table))
    return found


def finished(*, record: bool = False) -> tuple[FakeRing, list[Turn]]:
    """A ring that has done a whole run."""
    turns = decided_turns(PLAN)
    by_index = {turn.index: turn for turn in turns}
    tools = DrawnTables(PLAN)
    executors = {
        node: FakeExecutor(scores=lambda index, node=node: tools.scores(node, by_index[index]))  # type: ignore[misc]
        for node in PLAN.nodes
    }
    ring = FakeRing(PLAN, executors=executors, record=record)
    ring.start()
    for run in ring.runs.values():
        run.grant(turns)
    assert ring.wait_done(len(turns))
    assert ring.close()
    return ring, turns


def test_loop_reports_scores_before_the_end_of_their_turn() -> None:
    """All that the node owes, and nothing for other turns."""
    ring, turns = finished()
    for node in PLAN.nodes:
        scores: dict[int, list[object]] = {}
        for entry in ring.reports[node].entries:
            match entry:
                case rp.Scored(message):
                    scores.setdefault(message.turn, []).extend(scores_from_proto(message))
                case rp.TurnDone(index):
                    turn = next(turn for turn in turns if turn.index == index)
                    check_scores(PLAN, turn, node, scores.pop(index, []))  # type: ignore[arg-type]
        assert not scores


@pytest.mark.parametrize("node", PLAN.nodes)
def test_loop_records_each_table_once_and_the_recording_replays(node: str) -> None:
    """Turns name their table by its digest; the table stands before the first of them."""
    ring, turns = finished(record=True)
    lines = []
    for entry in ring.reports[node].entries:
        if isinstance(entry, rp.HeaderLine):
            lines.append(entry.line)
        elif isinstance(entry, Handled):
            lines.append(record_line(*entry))
    tables = [json.loads(line)["digest"] for line in lines if line.startswith('{"table"')]
    assert tables == list(dict.fromkeys(turn.operations.digest for turn in turns if turn.operations))
    assert len(tables) == 2
    assert replay(lines, PLAN, node) == len(lines) - 3
