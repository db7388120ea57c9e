"""The phase in which a driver plans in its own time: the state machine waits, and still hears everything."""

from __future__ import annotations

from ringtune.engine.events import SetTimer, TimerFired
from ringtune.run_control import events as rd
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.turns import StartPoint
from tests.support.cases import cases
from tests.support.plans import make_plan

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, local_iterations=2)


def planning(**options: float) -> tuple[RunStateMachine, list[rd.Command]]:
    """Rounds that have just asked for a plan at second 2, and what they answered."""
    rounds = RunStateMachine(None, wait_s=10.0, **options)  # type: ignore[arg-type]
    rounds.handle(rd.Started(("a", "b", "z")), 1.0)
    rounds.handle(rd.Inspected("b", "of b"), 1.0)
    rounds.handle(rd.Inspected("z", "of z"), 1.0)
    return rounds, rounds.handle(rd.Inspected("a", "of a"), 2.0)


def test_rounds_ask_the_driver_for_a_plan() -> None:
    """The driver gets the facts sorted by name, and as long as it may plan beyond the usual patience."""
    _, commands = planning(plan_s=60.0)
    timer = next(command for command in commands if isinstance(command, SetTimer))
    asked = commands[-1]
    assert isinstance(asked, rd.MakePlan) and list(asked.facts.items()) == [("a", "of a"), ("b", "of b"), ("z", "of z")]
    assert timer.at_s == 72.0


def test_rounds_prepare_when_the_plan_comes() -> None:
    """The plan's nodes prepare, one that it leaves out is let go, and the deadline counts from then on."""
    rounds, _ = planning(plan_s=60.0)
    commands = rounds.handle(rd.PlanMade(PLAN), 50.0)
    assert [command.node for command in commands if isinstance(command, rd.Prepare)] == ["a", "b"]
    assert [command.node for command in commands if isinstance(command, rd.Release)] == ["z"]
    assert [command.at_s for command in commands if isinstance(command, SetTimer)] == [60.0]


def test_rounds_go_on_where_the_plan_says() -> None:
    """A plan of an earlier run comes with its start point: the first granted turn is the one after it."""
    rounds, _ = planning()
    start = StartPoint.of(PLAN.course, step=4, holder="b")
    rounds.handle(rd.PlanMade(PLAN, start), 3.0)
    rounds.handle(rd.Prepared("a"), 3.0)
    granted = [command for command in rounds.handle(rd.Prepared("b"), 3.0) if isinstance(command, rd.Grant)]
    assert granted[0].turns[0].first_step == 4


@cases(
    ("event", "error"),
    [
        (rd.PlanFailed("CapacityError", "it does not fit"), "CapacityError"),
        (rd.RunStopRequested("enough"), "InterruptedRunError"),
        (rd.DrainRequested("enough"), "InterruptedRunError"),
        (rd.NodeFailed("b", "PeerLostError", "node b is lost"), "PeerLostError"),
        (TimerFired("phase"), "DeadlineError"),
    ],
)
def test_rounds_end_while_the_driver_plans(event: rd.Event, error: str) -> None:
    """Whatever ends a run ends it during planning too, and a plan that comes later changes nothing."""
    rounds, _ = planning(plan_s=60.0)
    finish = rounds.handle(event, 3.0)[-1]
    assert isinstance(finish, rd.Finish) and finish.error == error
    assert rounds.handle(rd.PlanMade(PLAN), 4.0) == []
