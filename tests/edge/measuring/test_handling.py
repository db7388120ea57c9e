"""What surrounds an action is timed with a run's own loop and reporter."""

from __future__ import annotations

import pytest

from edge.measuring import handling
from edge.measuring.handling import handling_s
from edge.run.reporter import Reporter
from ringtune.errors import DeadlineError, PlanError, RingTuneError
from ringtune.schedule.actions import Action
from tests.support.plans import make_plan


def test_handling_is_the_time_of_a_run_over_its_actions() -> None:
    """A clock that says 0 s before and 9 s after: all actions of the plan together took 9 s, so each takes a part."""
    plan = make_plan([("a", 0, 4)], ["a"], num_steps=2)
    times = iter((0.0, 9.0))
    found = handling_s(plan, "a", lambda: next(times))
    actions = 9.0 / found
    assert actions == pytest.approx(round(actions))
    assert actions > 2 * (1 + 4 + 1 + 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("error", "told"),
    [(PlanError("no such action"), "no such action"), (ZeroDivisionError("by zero"), "ZeroDivisionError at ")],
)
def test_handling_that_fails_ends_with_its_error(monkeypatch: pytest.MonkeyPatch, error: Exception, told: str) -> None:
    """An error in the loop ends the measurement; nobody waits for a last turn that never comes."""

    def run(self: object, action: Action) -> None:
        raise error

    monkeypatch.setattr(handling._Idle, "run", run)
    kind = type(error) if isinstance(error, RingTuneError) else RingTuneError
    with pytest.raises(kind, match=told):
        handling_s(make_plan([("a", 0, 4)], ["a"], num_steps=2), "a", lambda: 0.0)


def test_handling_is_no_time_of_reports_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports that take too long are an error, not five seconds for every action."""
    monkeypatch.setattr(Reporter, "flush", lambda self, timeout_s: False)
    with pytest.raises(DeadlineError, match="5 s for the reports"):
        handling_s(make_plan([("a", 0, 4)], ["a"], num_steps=2), "a", lambda: 0.0)
