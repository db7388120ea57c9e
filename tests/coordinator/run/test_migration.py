"""A run looks for another placement when the pace of its nodes has changed, and says what it found."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.planner.replan import PlacementProposal
from coordinator.run import migration
from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.migration import FIRST_MOVE_S, MigrationDriver, ReplanOutcome, ReplanSearch
from coordinator.run.report import RunLedger
from ringtune.costs.links import RecordedLinks
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import IntegrityError, PlanError
from ringtune.job.job import Job, parse_job
from ringtune.run_control import events as rd
from ringtune.schedule.access import NOT_PLANNED
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn, turn_sequence
from ringtune.v1 import control_pb2
from tests.support.plans import changed, make_plan
from tests.support.profiles import all_pairs, profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=20, local_iterations=2, method="all")
TURN: Turn = next(turn for turn in turn_sequence(PLAN.course) if turn.first_step)
OTHER = changed(PLAN, slices=(("a", 0, 3), ("b", 3, 4))).placement


def job_of(**changes: object) -> Job:
    """Any job: what counts of it is ``[placement]``."""
    wanted = parse_job('[model]\npath = "model"', source="test")
    return wanted.with_overrides({name.replace("__", "."): value for name, value in changes.items()})


def measured(*, assumed: bool = False) -> Profile:
    """The plan's nodes with measured links, or assumed ones."""
    profile = profile_of(PLAN, links=all_pairs(PLAN.nodes, 1e8, 1e-3))
    links = tuple(dataclasses.replace(link, is_assumed=assumed) for link in profile.links)
    return dataclasses.replace(profile, links=links)


def moved(seconds: float, part: Plan = PLAN, *, placement_number: int = 0, problem: str = "") -> rd.LogMove:
    """What the state machine logs of a move."""
    return rd.LogMove(TURN.end_step, placement_number or part.placement.placement_number, part, seconds, (), problem)


class Run:
    """A run's part in replanning: what came into its queue, and what the user was told."""

    def __init__(
        self, *, job: Job | None = None, plan: Plan = PLAN, placement_number: int = 0, assumed: bool = False
    ) -> None:
        self.answers: queue.Queue[ReplanOutcome] = queue.Queue()
        self.notes: list[str] = []
        self.replanning = ReplanSearch(
            plan,
            plan.at(placement_number),
            job or job_of(),
            measured(assumed=assumed),
            put=self.answers.put,
            note=self.notes.append,
        )

    def consider(
        self,
        changed_nodes: dict[str, float],
        *,
        links: dict[tuple[str, str], float] | None = None,
        part: Plan = PLAN,
        end_step: int = 0,
        living: Sequence[str] = "ab",
    ) -> None:
        """Look for a placement after these nodes and links have changed, with turns granted up to this step."""
        pace: Any = self.replanning.pace
        pace.changed = lambda: changed_nodes
        pace.links.changed = lambda: links or {}
        self.replanning.turn_done(part, TURN, end_step, RecordedLinks(), prepare_s=1.0, living=frozenset(living))

    def take(self, living: Sequence[str] = "ab") -> rd.Replanned | None:
        """Take what was found."""
        return self.replanning.take(self.answers.get(timeout=20), frozenset(living))


def found(
    patch: pytest.MonkeyPatch, stays_s: float, moves_s: float, *, step: int = TURN.end_step, nodes: str = "ab"
) -> list[float]:
    """Let the planner find the other placement with these seconds; the list gets the costs that it was told."""
    costs: list[float] = []
    wanted = (step, set(nodes))

    def planned(
        part: Plan, job: Job, profile: Profile, *, step: int, move_s: float, **more: object
    ) -> PlacementProposal:
        assert (step, set(profile.by_name)) == wanted
        costs.append(move_s)
        return PlacementProposal(OTHER, "the other one", stays_s, moves_s, move_s)

    patch.setattr(migration, "replanned", planned)
    return costs


def test_replanning_looks_for_a_placement_when_a_link_has_changed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told which, once, and again when it changes anew or a node does."""
    _, run = found(monkeypatch, 60.0, 58.0), Run()
    run.consider({}, links={("a", "b"): 4.0})
    assert run.take() is None
    assert (
        run.notes[0]
        == "after step 4 messages take, compared with earlier turns of the same work: a to b 4.00 times as long"
    )
    run.consider({}, links={("a", "b"): 4.1})
    assert len(run.notes) == 2
    run.consider({"b": 2.0}, links={("a", "b"): 4.1})
    assert run.take() is None
    assert [note.split(", ")[0] for note in run.notes[2:4]] == [
        "after step 4 actions of nodes take",
        "after step 4 messages take",
    ]


def test_replanning_stays_where_the_gain_is_less_than_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told who changed, with both numbers, and not looked for again until nodes change anew."""
    found(monkeypatch, 60.0, 58.0)
    run = Run()
    run.consider({"b": 2.0})
    assert run.take() is None
    said, stays = run.notes
    assert said == (
        "after step 4 actions of nodes take, compared with earlier turns of the same work: b 2.00 times as long"
    )
    assert stays.startswith("the run stays on its placement: the other one: gains 2") and "costs 5" in stays
    run.consider({"b": 2.1})
    assert len(run.notes) == 2
    run.consider({"b": 4.0})
    assert run.take() is None
    assert len(run.notes) == 4


def test_replanning_after_a_move_watches_anew_and_knows_what_a_move_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of the last move count from then on."""
    costs, run = found(monkeypatch, 60.0, 40.0), Run()
    run.consider({"b": 2.0})
    run.take()
    first = run.replanning.pace
    assert run.replanning.moved(moved(7.5)) is run.replanning.pace is not first
    run.consider({"a": 3.0})
    run.answers.get(timeout=20)
    assert costs == [FIRST_MOVE_S, 7.5]


def test_replanning_follows_what_the_losses_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``placement.follow`` a placement is looked for when another block trains, once for each decision."""
    costs = found(monkeypatch, 60.0, 40.0)
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=20, local_iterations=2, unfreeze="auto")
    decided = dataclasses.replace(TURN, unfreeze_at=(2,))
    for follow, looked in (("never", 0), ("auto", 1)):
        run = Run(plan=plan, job=job_of(placement__follow=follow))
        for turn in (TURN, decided, decided):
            run.replanning.turn_done(plan, turn, 0, RecordedLinks(), prepare_s=9.0, living=frozenset("ab"))
            if turn is decided and looked and run.replanning._is_thinking:
                assert run.take() is not None
        assert costs == [9.0] * looked


def test_replanning_that_finds_nothing_leaves_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other placement fits, or looking for one fails."""

    def fails(*arguments: object, **options: object) -> PlacementProposal:
        raise PlanError("a link is missing")

    monkeypatch.setattr(migration, "replanned", fails)
    run = Run()
    run.consider({"b": 2.0})
    assert run.take() is None
    assert run.notes[-1] == "no other placement was found: a link is missing; the run stays on its placement"
    monkeypatch.setattr(migration, "replanned", lambda *arguments, **options: None)
    run.consider({"b": 4.0})
    assert run.take() is None
    assert run.notes[-1] == "there is no other placement that fits the nodes; the run stays on its placement"


def test_run_that_stays_anyway_is_not_watched() -> None:
    """Nothing is watched, and nobody may join, where the job says so, links were assumed, or the course can't move."""
    pipeadapter = make_plan([("a", 0, 4)], ["a"], method="pipeadapter").course.method
    rows: list[tuple[Run, str]] = [
        (Run(job=job_of(placement__replan="never")), "placement.replan is 'never'"),
        (Run(assumed=True), "its nodes share a machine"),
        (Run(plan=make_plan([("a", 0, 4)], ["a"])), ""),
        (Run(plan=changed(PLAN, method=pipeadapter)), "the run stays on its placement"),
    ]
    for run, why in rows:
        assert run.replanning.pace is None and run.replanning.why_closed.startswith(why)
        run.replanning.turn_done(PLAN, TURN, 0, RecordedLinks(), prepare_s=1.0, living=frozenset("ab"))
        assert run.replanning.moved(moved(1.0)) is None
        assert run.notes == []


def test_run_is_watched_once_its_last_placement_holds() -> None:
    """Where another one is to come, the plan says when the run moves; after it a slow board is worth a move again."""
    plan = PLAN.extended(OTHER, first_turn=1)
    assert Run(plan=plan).replanning.pace is None
    assert Run(plan=plan, placement_number=1).replanning.pace is not None
    # Whether the last of them was made or failed: no other one is to come
    plan = PLAN.extended(OTHER, first_turn=1).extended(PLAN.placement, first_turn=2)
    for last in (moved(2.0, plan.at(2)), moved(2.0, plan.at(1), placement_number=2, problem="node b has no room")):
        run = Run(plan=plan)
        assert run.replanning.moved(moved(2.0, plan.at(1))) is None
        assert run.replanning.moved(last) is run.replanning.pace is not None


def test_replanning_counts_the_steps_and_nodes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that are granted are done where the run is; where no other is left nothing is looked for."""
    found(monkeypatch, 60.0, 40.0, step=10)
    run = Run()
    run.consider({"b": 2.0}, end_step=9)
    assert run.take() is not None
    run.consider({"b": 4.0}, end_step=19)
    assert run.answers.empty() and len(run.notes) == 2
    # A node that the placement does not need may be lost, before the search or while it goes on
    found(monkeypatch, 60.0, 40.0, nodes="a")
    run = Run()
    run.consider({"a": 2.0}, living="a")
    assert run.take("a") is None
    assert run.notes[-1].endswith("as predicted from the newest turns, and node b is lost")


def test_replanning_forgets_what_it_looked_for_before_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was judged beside a placement that the run has no longer, with times of a node that is lost."""
    found(monkeypatch, 60.0, 40.0)
    run = Run()
    run.consider({"b": 2.0})
    plan = PLAN.extended(OTHER, first_turn=1, placement_number=3)
    told = len(run.notes)
    recovered = rd.LogRecovery(2, ("c",), plan, plan.at(3), 9.0, ())
    assert run.replanning.recovered(recovered) is run.replanning.pace is not None
    assert run.take() is None and len(run.notes) == told
    assert not run.replanning._is_thinking and run.replanning._move_s == 0.0


def test_recovery_does_without_a_doubted_node_this_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost one is gone from the profile; the doubted one is not, so that a later placement may have it."""
    asked = list[tuple[set[str], set[str]]]()

    def place(part: Plan, job: Job, profile: Profile, lost: Sequence[str], effort: object) -> Any:
        asked.append(({*lost}, {node.node for node in profile.nodes}))
        return OTHER

    monkeypatch.setattr(migration, "placed_without", place)
    run, answers = Run(), queue.Queue[Any]()
    for doubted in (("b",), ()):
        run.replanning.find_placement(rd.FindPlacement(3, PLAN, ("c",), 2, doubted), answers.put)
        assert answers.get(timeout=30.0) == rd.PlacementFound(3, OTHER)
    assert asked == [({"b", "c"}, {"a"}), ({"c"}, {"a", "b"})]


def comer() -> tuple[Any, list[LinkFacts]]:
    """A third node, with its links to the others."""
    plan = make_plan([("a", 0, 2), ("b", 2, 3), ("c", 3, 4)], ["a"], num_steps=20, local_iterations=2, method="all")
    profile = profile_of(plan, links=all_pairs(plan.nodes, 1e8, 1e-3))
    return profile.by_name["c"], [link for link in profile.links if "c" in (link.source, link.target)]


def test_replanning_looks_once_for_a_placement_with_a_node_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the next turn, without any other change; both numbers are told, and who it was for."""
    found(monkeypatch, 60.0, 40.0, nodes="abc")
    run = Run()
    assert run.replanning.why_closed == ""
    facts, links = comer()
    run.replanning.joined(facts, links, looks=True)
    run.consider({}, living="abc")
    assert run.take("abc") == rd.Replanned(OTHER, 60.0, 40.0, FIRST_MOVE_S)
    assert run.notes[-1].startswith("with node c: the run will move: the other one: gains 20")
    run.consider({}, living="abc")
    assert run.answers.empty() and not run.replanning._is_thinking


def test_replanning_leaves_a_comer_where_it_does_not_pay_and_counts_on_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next search, for another reason, has it too; one that was lost meanwhile is in none."""
    found(monkeypatch, 60.0, 58.0, nodes="abc")
    run = Run()
    run.replanning.joined(*comer(), looks=True)
    run.consider({}, living="abc")
    assert run.take("abc") is None
    assert run.notes[-1].startswith("with node c: the run stays on its placement: the other one: gains 2")
    run.consider({"b": 2.0}, living="abc")
    assert run.take("abc") is None
    found(monkeypatch, 60.0, 58.0)
    run.consider({"b": 4.0}, living="ab")
    assert run.take("ab") is None


def test_replanning_has_a_node_that_came_back_with_its_new_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of what was known of it; nobody looks for its sake where the run has waited for it."""
    run = Run()
    before = run.replanning.profile.by_name["b"]
    now = dataclasses.replace(before, memory_bytes=before.memory_bytes + 1)
    links = [link for link in run.replanning.profile.links if "b" in (link.source, link.target)]
    run.replanning.joined(now, links, looks=False)
    assert run.replanning.profile.by_name["b"] == now
    assert len(run.replanning.profile.links) == 2
    run.consider({})
    assert run.answers.empty() and not run.replanning._is_thinking


def test_figures_of_a_node_that_is_prepared_rests_and_moves_are_in_the_books() -> None:
    """They come with its answers, which are events of the run; totals that are none are the node's failure."""
    totals = '{"peak_rss_bytes": 9, "hosted_bytes": 8, "cpu_s": 2, "peak_versions": 1, "peak_version_bytes": 0}'
    replies = iter((totals, "none"))
    calls: Any = SimpleNamespace(
        place=lambda number: None,
        prepare=lambda _, on_result, **__: on_result(5),
        rest=lambda _, on_result, **__: on_result(control_pb2.RestReply(totals_json=next(replies))),
        move=lambda _, on_result, **__: on_result(control_pb2.MoveReply(fetched_bytes=3, hosted_bytes=7)),
    )
    heard: list[Iterator[rd.Event]] = []
    books, checkpoints = RunLedger(PLAN, job_of()), CheckpointManager("r", job_of(), None)
    participants: Any = SimpleNamespace(
        calls=dict.fromkeys("ab", calls), queue=queue.SimpleQueue(), hear=lambda node, events: heard.append(events)
    )
    driver = MigrationDriver(participants, PLAN, job_of(), checkpoints, {}, NOT_PLANNED, books)
    driver.prepare(rd.Prepare("b", PLAN), None)
    found = books.nodes["b"].figures
    assert found["hosted_bytes"] == 0, "the run's thread reads it"
    assert next(heard[-1]) == rd.Prepared("b") and found["hosted_bytes"] == 5
    driver.tell(rd.Rest("b"))
    assert next(heard[-1]) == rd.Rested("b", 0) and (found["cpu_s"], found["hosted_bytes"]) == (2, 8)
    driver.tell(rd.Move("b", PLAN, StartPoint.of(PLAN.course), 0, ()))
    assert next(heard[-1]) == rd.Moved("b", 0, 3) and found["hosted_bytes"] == 7
    driver.tell(rd.Rest("b"))
    with pytest.raises(IntegrityError, match=r"totals\.json of node b"):
        next(heard[-1])
