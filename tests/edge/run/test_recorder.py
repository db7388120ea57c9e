"""Recordings: lines out, values in, and a replay that notices any difference."""

from __future__ import annotations

import dataclasses
import json

import pytest

from edge.run.recorder import header_line, record_line, to_json
from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import IntegrityError
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.turns.turns import StartPoint, turn_sequence
from tests.support.plans import changed, make_plan
from tests.support.replay import event_from_json, replay

PLAN = make_plan([("a", 0, 4)], ["a"], num_steps=2)


def recording() -> list[str]:
    """A complete recording of one node that does everything itself."""
    engine = NodeEngine(PLAN, "a", wait_s=9.0)
    lines = [header_line(PLAN, "a", 9.0)]
    waiting: list[ev.Event] = [ev.TurnGranted(turn) for turn in turn_sequence(PLAN.course)]
    now_s = 0.25
    while waiting:
        event = waiting.pop(0)
        commands = engine.handle(event, now_s)
        lines.append(record_line(now_s, event, commands))
        actions = [command.action for command in commands if isinstance(command, ev.RunAction)]
        waiting += [ev.ActionDone(action, (("loss_sum", 0.1),)) for action in actions]
        now_s += 0.1
    return lines


@pytest.mark.parametrize(
    "event",
    [
        ev.TurnGranted(next(turn_sequence(PLAN.course))),
        ev.TurnGranted(dataclasses.replace(next(turn_sequence(PLAN.course)), unfreeze_at=(4, 8))),
        ev.TensorArrived(TensorKey("h", 3, 1, 2), "b"),
        ev.HeadArrived(2, "b"),
        ev.CreditArrived(2, "b"),
        ev.ActionDone(Action(Op.HEAD, 3, 1), (("count", 4.0), ("loss_sum", 1 / 3))),
        ev.TimerFired("wait"),
        ev.StopRequested("enough"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_recorder_event_survives_json(event: ev.Event) -> None:
    """Every kind of event comes back equal, floats to the last bit."""
    assert event_from_json(json.loads(json.dumps(to_json(event)))) == event


def test_recorder_replays_its_own_recording() -> None:
    """All events of a whole run are replayed."""
    lines = recording()
    assert replay(lines, PLAN, "a") == len(lines) - 1 > 20


@pytest.mark.parametrize("key", ["placement_number", "epoch"])
def test_recorder_replays_a_recording_that_begins_after_a_move(key: str) -> None:
    """Recordings of version 0.2.0 call the placement number ``epoch``."""
    moved = changed(PLAN, placement_number=1, first_turn=1)
    start = StartPoint(step=1, holder="a", first_turn=1, placement_number=1)
    header = json.loads(header_line(moved, "a", 9.0, start))
    header["start"][key] = header["start"].pop("placement_number")
    assert replay([json.dumps(header)], moved, "a") == 0


def test_recorder_replay_notices_a_lost_event() -> None:
    """Without one action's end the engine answers otherwise, and the line is named."""
    lines = recording()
    del lines[5]
    with pytest.raises(IntegrityError, match="line 6"):
        replay(lines, PLAN, "a")


def test_recorder_replay_notices_another_command() -> None:
    """A command that differs in one number is shown with the line."""
    lines = recording()
    lines[3] = lines[3].replace('"RunAction",["', '"RunAction",["?')
    with pytest.raises(IntegrityError, match="line 4: the engine gave"):
        replay(lines, PLAN, "a")


def test_recorder_replay_refuses_another_plan() -> None:
    """A recording belongs to one plan and node."""
    other = make_plan([("a", 0, 4)], ["a"], num_steps=3)
    with pytest.raises(IntegrityError, match="is of node a"):
        replay(recording(), other, "a")


@pytest.mark.parametrize("line", ["{", "[]", '{"now_s": 1}', '{"now_s": 1, "event": ["Nothing"], "commands": []}'])
def test_recorder_replay_refuses_a_damaged_line(line: str) -> None:
    """Whatever is not a recorded event is refused, not skipped."""
    lines = recording()
    lines[2] = line
    with pytest.raises(IntegrityError):
        replay(lines, PLAN, "a")
