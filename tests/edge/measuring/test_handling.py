"""What surrounds an action is timed with a run's own loop and reporter."""

from __future__ import annotations

import pytest

from edge.measuring.handling import handling_s
from tests.support.plans import make_plan


def test_handling_is_the_time_of_a_run_over_its_actions() -> None:
    """A clock that says 0 s before and 9 s after: all actions of the plan together took 9 s, so each takes a part."""
    plan = make_plan([("a", 0, 4)], ["a"], num_steps=2)
    times = iter((0.0, 9.0))
    found = handling_s(plan, "a", lambda: next(times))
    actions = 9.0 / found
    assert actions == pytest.approx(round(actions))
    assert actions > 2 * (1 + 4 + 1 + 1)
