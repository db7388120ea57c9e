"""What must hold for a run that waits for lost nodes, and for nodes that come in mid-run: on a virtual clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from ringtune.run_control import events as rd
from ringtune.run_control.recovery import Recovery, RecoveryPolicy
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from tests.suites.test_recovery_on_virtual_clock import MOMENTS, SEEDS, recoveries, ring_of, story
from tests.support.moves import slices_of
from tests.support.plans import make_plan
from tests.support.recorded_ring import RecordedResult
from tests.support.recovering_ring import RecoveringRing

WAIT_S = 50.0
WAITS = RecoveryPolicy(awaits_s=WAIT_S)
COURSE: dict[str, Any] = {"num_blocks": 6, "num_steps": 18, "eval_every": 4, "checkpoint_every": 4}
PLAN = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a", "d", "c"], **COURSE)


def waits(result: RecordedResult) -> list[rd.AwaitNodes]:
    """For whom the log says that the run waited."""
    return [entry for entry in result.logged if isinstance(entry, rd.AwaitNodes)]


def phases(result: RecordedResult) -> list[str]:
    """The phases, in order."""
    return [entry.phase for entry in result.logged if isinstance(entry, rd.EnterPhase)]


def lose_some(ring: RecoveringRing, due: list[tuple[int, str]]) -> None:
    """Lose these nodes once so many things have begun."""

    def when(what: str, node: str) -> str | None:
        return due.pop(0)[1] if due and len(ring.moments) >= due[0][0] else None

    ring.when = when


def once(ring: RecoveringRing, is_due: Callable[[], bool], act: Callable[[], object]) -> None:
    """Do something as soon as the state machine is in some state."""
    done = list[bool]()

    def watch(event: rd.Event) -> None:
        if not done and is_due():
            done.append(True)
            act()

    ring.after_event = watch


def is_waiting(ring: RecoveringRing) -> Callable[[], bool]:
    """Whether the run waits."""
    return lambda: ring._rounds.phase == "waiting"


@pytest.mark.parametrize("owner", ["a", "d", "c"])
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment not in ("move", "halt")])
@pytest.mark.sampled(6)
def test_owner_that_is_lost_at_every_kind_of_moment_is_waited_for(moment: str, owner: str) -> None:
    """With the head or without: it comes back, has its old place, and the run does what it would have done."""
    rng = random.Random(f"{moment} {owner}")
    wanted = ring_of(PLAN, rng).run()
    ring = ring_of(PLAN, rng, recovery=WAITS, back_s=lambda node: 10.0)
    after = {"prepare": -1, "collect": 0}.get(moment, rng.randint(0, 60))
    ring.when = lambda what, node: owner if what == moment and len(ring.moments) > after and not ring.came else None
    result = ring.run()
    assert ring.came == [owner], ring.moments
    assert result.finish == rd.Finish("", "")
    (waited,) = waits(result)
    assert waited.nodes == (owner,) and f"{owner} owns rows" in waited.why
    (recovery,) = recoveries(result)
    assert recovery.lost == recovery.back == (owner,) and recovery.left_out == ()
    assert recovery.part.placement.slices == PLAN.placement.slices
    assert recovery.seconds >= 10.0
    assert story(result) == story(wanted)
    assert ring.surprises == []


def test_run_that_waits_in_vain_ends_and_can_be_resumed() -> None:
    """When time is up it says for whom it waited, why, and what to do."""
    ring = ring_of(PLAN, random.Random(0), recovery=WAITS)
    lose_some(ring, [(60, "d")])
    ended: list[float] = []
    once(ring, lambda: ring._rounds.phase == "failed", lambda: ended.append(ring.clock.now_s))
    result = ring.run()
    assert result.finish == rd.Finish(
        "PeerLostError",
        "waited 50 s (recovery.wait_s) for node d: d owns rows, which no other node has; start it again and --resume "
        "the run",
    )
    (waited,) = waits(result)
    assert phases(result)[-2:] == ["waiting", "failed"]
    assert ended == [waited.until_s]


def test_run_without_time_to_wait_ends_at_once() -> None:
    """As before there was waiting: awaits_s is 0."""
    ring = ring_of(PLAN, random.Random(0), back_s=lambda node: 1.0)
    lose_some(ring, [(60, "d")])
    result = ring.run()
    assert result.finish is not None and result.finish.error == "PeerLostError"
    assert "d owns rows, which no other node has" in result.finish.message and not waits(result)


@SEEDS
def test_second_owner_that_is_lost_while_the_first_is_awaited_is_awaited_too(seed: int) -> None:
    """Each has its own time; the run goes on once both are there."""
    rng = random.Random(seed)
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["d", "e", "f"], **COURSE)
    wanted = ring_of(plan, rng).run()
    ring = ring_of(plan, rng, recovery=WAITS, back_s=lambda node: {"d": 30.0, "f": 35.0}[node])
    lose_some(ring, [(rng.randint(20, 90), "d")])
    once(ring, is_waiting(ring), lambda: ring.clock.at(ring.clock.now_s + 10.0, ring.lose, "f"))
    result = ring.run()
    if result.finish and result.finish.error:  # d had the head, and f its copy
        assert "no living node has a copy of the head" in result.finish.message
        return
    assert [waited.nodes for waited in waits(result)] == [("d",), ("d", "f"), ("f",)]
    (recovery,) = recoveries(result)
    assert set(recovery.back) == {"d", "f"}
    assert story(result) == story(wanted)


def test_owner_that_is_back_and_lost_again_is_not_told_as_back() -> None:
    """The recovery that replaces the first one inherits the loss, not the return."""
    first = Recovery(placement_number=1, lost=("d",), nodes=("a", "b"), began_s=0.0, step=3)
    first.join("d")
    assert first.back == ("d",)
    again = Recovery(placement_number=1, lost=("d",), nodes=("a", "b"), began_s=1.0, step=3, before=first)
    assert again.lost == ("d",) and again.back == ()


def test_host_that_is_lost_while_an_owner_is_awaited_is_placed_around() -> None:
    """The owner comes back, and the run goes on without the host."""
    rng = random.Random(1)
    wanted = ring_of(PLAN, rng).run()
    ring = ring_of(PLAN, rng, recovery=WAITS, back_s=lambda node: 30.0 if node == "d" else None)
    lose_some(ring, [(60, "d")])
    once(ring, is_waiting(ring), lambda: ring.lose("b"))
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    (recovery,) = recoveries(result)
    assert recovery.lost == ("d", "b") and recovery.back == ("d",)
    assert "b" not in recovery.part.nodes
    assert story(result) == story(wanted)


@pytest.mark.parametrize(
    "event", [rd.DrainRequested("stopped by the user"), rd.RunStopRequested("stopped by the user")]
)
def test_run_that_waits_can_be_stopped(event: rd.Event) -> None:
    """At once: nothing is under way that could be saved, and the last checkpoint is there."""
    ring = ring_of(PLAN, random.Random(0), recovery=WAITS)
    lose_some(ring, [(60, "d")])
    once(ring, is_waiting(ring), lambda: ring._tell_rounds(event))
    assert ring.run().finish == rd.Finish("InterruptedRunError", "stopped by the user")


def test_run_that_is_being_stopped_waits_for_nobody() -> None:
    """Ctrl-C came before the loss: the turns under way can't end, so the run ends."""
    ring = ring_of(PLAN, random.Random(0), recovery=WAITS, drain_at_s=15.0)
    once(ring, lambda: bool(ring._rounds._drain_reason), lambda: ring.lose("d"))
    result = ring.run()
    assert result.finish is not None and result.finish.error == "InterruptedRunError" and not waits(result)


def needs(ring: RecoveringRing, count: int) -> None:
    """Let no placement fit on fewer nodes than that, new ones counted."""
    place = ring._place

    def placed(asked: rd.FindPlacement) -> Placement | None:
        names = [name for name in ring._nodes if name not in asked.lost]
        if len(names) < count:
            return None
        found = place(asked)
        pieces = [(name, number, number + 1) for number, name in enumerate(names[:5])]
        last = pieces[-1]
        pieces[-1] = (last[0], last[1], asked.part.course.num_blocks)
        assert found is not None
        return dataclasses.replace(found, slices=slices_of(pieces))

    ring._place = placed


@pytest.mark.parametrize("comer", ["b", "new"])
def test_run_waits_for_any_node_with_room_where_nothing_fits(comer: str) -> None:
    """The host that was lost, or a new one: the others place the blocks on it."""
    rng = random.Random(3)
    wanted = ring_of(PLAN, rng).run()
    ring = ring_of(PLAN, rng, recovery=WAITS)
    needs(ring, 4)
    lose_some(ring, [(60, "b")])
    once(ring, is_waiting(ring), lambda: ring.come(comer))
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    (waited,) = waits(result)
    assert waited.nodes == ("b",)
    assert waited.why == "node b is lost, and nothing fits any more; another node with room can take its place"
    (recovery,) = recoveries(result)
    assert comer in recovery.part.nodes
    assert story(result) == story(wanted)


def test_run_that_waits_for_room_in_vain_ends_with_what_is_missing() -> None:
    """A node that comes and does not help changes neither the time nor the end."""
    ring = ring_of(PLAN, random.Random(3), recovery=WAITS)
    needs(ring, 5)
    lose_some(ring, [(60, "b")])
    ring.clock.at(70.0, ring.come, "small")
    result = ring.run()
    assert result.finish is not None and result.finish.error == "CapacityError"
    assert result.finish.message == (
        "waited 50 s (recovery.wait_s) for node b: node b is lost, and nothing fits any more; start it again and "
        "--resume the run"
    )
    assert len({waited.until_s for waited in waits(result)}) == 1 and "small" in ring.came


def with_comer(plan: Plan, name: str) -> Placement:
    """A placement of the plan's course that begins with this node."""
    return dataclasses.replace(plan.placement, slices=slices_of([(name, 0, 3), ("a", 3, 5), ("c", 5, 6)]), copies=True)


@pytest.mark.parametrize("lost", ["", "before", "moving", "after"])
def test_new_node_takes_blocks_and_its_loss_never_ends_the_run(lost: str) -> None:
    """It comes, the planner finds a placement with it, the run moves; where it dies the run stays or goes back."""
    rng = random.Random(f"new {lost}")
    wanted = ring_of(PLAN, rng).run()
    ring = ring_of(PLAN, rng, recovery=WAITS, replans=[(wanted.wall_s * 0.3, with_comer(PLAN, "new"))])
    ring.clock.at(wanted.wall_s * 0.25, ring.come, "new")

    def when(what: str, node: str) -> str | None:
        moment = {
            "before": ring.came and what != "move",
            "moving": what == "move",
            "after": node == "new" and what != "move",
        }
        return "new" if lost and moment[lost] and ring.came and "new" not in ring.lost else None

    ring.when = when
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    moved = [entry for entry in result.logged if isinstance(entry, rd.LogMove) and not entry.problem]
    assert bool(moved) == (lost in ("", "after"))
    assert story(result) == story(wanted)
    assert bool(recoveries(result)) == (lost == "after")


def test_host_that_was_lost_takes_blocks_again() -> None:
    """The run goes on without it; it comes back, and a placement may name it again."""
    rng = random.Random(5)
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a", "c"], **COURSE)
    wanted = ring_of(plan, rng).run()
    ring = ring_of(plan, rng, recovery=WAITS, back_s=lambda node: 8.0)
    lose_some(ring, [(60, "b")])
    is_back = lambda: ring.came == ["b"] and ring._rounds.phase == "training"  # noqa: E731
    once(ring, is_back, lambda: ring._tell_rounds(rd.Replanned(ring.plan.placement)))
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    (recovery,) = recoveries(result)
    assert "b" not in recovery.part.nodes and not waits(result)
    moved = [entry for entry in result.logged if isinstance(entry, rd.LogMove) and not entry.problem]
    assert [entry.part.placement.slices for entry in moved] == [plan.placement.slices]
    assert story(result) == story(wanted)


def test_placement_with_a_node_that_is_still_lost_is_not_taken() -> None:
    """Only who has come may have blocks."""
    rng = random.Random(5)
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a", "c"], **COURSE)
    at_s = ring_of(plan, rng).run().wall_s
    ring = ring_of(plan, rng, recovery=WAITS, replans=[(at_s * 0.8, plan.placement)])
    lose_some(ring, [(60, "b")])
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    assert not [entry for entry in result.logged if isinstance(entry, rd.LogPlan)]
