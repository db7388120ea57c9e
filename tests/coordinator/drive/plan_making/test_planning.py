"""Planning beside the run's thread: the run can be watched, stopped and lost while its plan is made."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.drive.plan_making import planning
from coordinator.drive.requests import RunRequest
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from coordinator.screen.progress import Progress
from coordinator.submit.client import Client
from ringtune.errors import InterruptedRunError, PeerLostError
from tests.support.fake_agents import CALL_S, FakeCluster, job


class SlowPlanner:
    """Plans when it is let go on; sees when nobody waits for its plan any more."""

    def __init__(self) -> None:
        self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.was_cancelled = False

    def __call__(self, *args: Any, **options: Any) -> Planned:
        """Wait, then plan as ever; the look before anything is measured, which has no links, goes on at once."""
        if not options["links"]:
            return make_plan(*args, **options)
        self.began.set()
        self.may_end.wait(4 * CALL_S)
        self.was_cancelled = options["effort"].is_cancelled()
        self.ended.set()
        return make_plan(*args, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPlanner]:
    """A planner in the place of the real one."""
    planner = SlowPlanner()
    monkeypatch.setattr(planning, "make_plan", planner)
    yield planner
    planner.may_end.set()
    assert not planner.began.is_set() or planner.ended.wait(CALL_S)


def test_run_is_stopped_while_it_is_planned(slow: SlowPlanner) -> None:
    """A Ctrl-C ends the run at once, and the planner hears that nobody waits for it."""
    with FakeCluster("a", "b") as cluster:
        run = cluster.server.coordinator.run(RunRequest(job=job(), plan_only=False, num_nodes=2, join_s=CALL_S))
        assert slow.began.wait(CALL_S)
        with Client(cluster.server.address) as client:
            status = client.status()
        assert (status.run.phase, [node.state for node in status.nodes]) == ("planning", ["running", "running"])
        run.drain("Ctrl-C")
        assert run.join(CALL_S)
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        slow.may_end.set()
        assert slow.ended.wait(CALL_S) and slow.was_cancelled
    assert run.board.read().message.startswith("Ctrl-C")


@pytest.mark.promise("6 every wait ends")
def test_run_loses_a_node_while_it_is_planned(slow: SlowPlanner) -> None:
    """A node that fails during planning is named at once, not after the plan."""
    with FakeCluster("a", "b") as cluster:
        run = cluster.server.coordinator.run(RunRequest(job=job(), plan_only=False, num_nodes=2, join_s=CALL_S))
        assert slow.began.wait(CALL_S)
        run.node_failed("b", PeerLostError("node b is gone"))
        assert run.join(CALL_S)
    assert run.board.read().message == "node b is gone"


def test_run_says_that_the_clock_cut_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The submitter hears what a plan that was cut means."""

    def cut(*args: Any, **options: Any) -> Planned:
        made = make_plan(*args, **options)
        assert made.choice is not None
        return dataclasses.replace(made, choice=dataclasses.replace(made.choice, cut_after_s=60.0))

    class Notes(Progress):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def note(self, text: str) -> None:
            self.texts.append(text)

    monkeypatch.setattr(planning, "make_plan", cut)
    notes = Notes()
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
        client.run(RunRequest(job=job(), num_nodes=2), progress=notes, folder=None)
    assert [text for text in notes.texts if text.startswith("planning was cut after 60 s")]


def test_given_up_planning_raises() -> None:
    """The planner itself ends where it would look at its clock."""
    from coordinator.planner.effort import Effort
    from tests.support.fake_agents import facts

    members = {name: facts(name) for name in "ab"}
    with pytest.raises(InterruptedRunError, match="given up"):
        make_plan(job(), members, effort=Effort(is_cancelled=lambda: True))
