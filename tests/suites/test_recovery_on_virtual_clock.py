"""What must hold for a run that goes on when hosts are lost, whatever the moment: on a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ringtune.run_control import events as rd
from ringtune.run_control.recovery import (
    MAX_OPENINGS,
    RESUME,
    DisputedCopies,
    LinkOpenings,
    RecoveryPolicy,
    loss_outcome,
)
from ringtune.schedule.course import Generation
from ringtune.schedule.lowering import links
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.placement import Placement, Rack
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import no_replicas
from tests.features.plans import moving_plan, with_helpers
from tests.support.choosing import DrawnTables
from tests.support.moves import moving, moving_at_random, random_placement, random_slices, with_slices
from tests.support.plans import changed, make_plan
from tests.support.recorded_ring import RecordedResult
from tests.support.recovering_ring import RecoveringRing

SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
MOMENTS = (
    "prepare",
    "embedding",
    "forward without graph",
    "forward with graph",
    "head",
    "backward",
    "update",
    "save",
    "hand-over",
    "copy",
    "move",
    "halt",
    "collect",
)


def placing(rng: random.Random, names: Sequence[str]) -> Any:
    """Any placement on the nodes that live, with any helpers if there were some."""

    def place(asked: rd.FindPlacement) -> Placement | None:
        placement = asked.part.placement
        living = [name for name in names if name not in asked.lost]
        course = asked.part.course
        may_repeat = not (no_replicas(course) or placement.helpers)
        pieces = random_slices(rng, living, placement.private_blocks, course.num_blocks, with_replicas=may_repeat)
        fits = len(living) > (1 if course.helper_settings.needs_helpers else 0)
        return with_slices(rng, asked.part, pieces, living) if fits else None

    return place


def ring_of(plan: Plan, rng: random.Random, **values: Any) -> RecoveringRing:
    """The run with random times of everything."""
    speeds = {node: rng.choice([0.1, 1.0, 3.0]) for node in plan.nodes}
    return RecoveringRing(
        plan,
        action_s=lambda node, action: speeds.get(node, 1.0) * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 0.1, 2.0]) * rng.random(),
        control_s=lambda node: rng.random(),
        move_s=lambda move: 5 * rng.random(),
        notice_s=lambda: 3 * rng.random(),
        copy_s=lambda: rng.choice([0.0, 0.5, 20.0]) * rng.random(),
        **{
            "place": placing(rng, plan.nodes),
            "chooser": DrawnTables(plan),
            "choose_s": lambda: 5 * rng.random(),
            **values,
        },
    )


def recoveries(result: RecordedResult) -> list[rd.LogRecovery]:
    """What the log says of recoveries."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogRecovery)]


def story(result: RecordedResult) -> list[tuple[Any, ...]]:
    """What was logged of steps, evaluations, checkpoints and decisions, without how items are numbered."""
    found: list[tuple[Any, ...]] = []
    for entry in result.logged:
        match entry:
            case rd.LogStep(turn, seq, step, depth):
                found.append(("step", turn.kind, turn.owner, step, turn.first_batch + seq - turn.first_seq, depth))
            case rd.LogTurn(turn):
                found.append(("turn", turn.kind, turn.owner, turn.first_step, turn.round))
            case rd.LogEvaluation() | rd.LogUnfreeze() | rd.LogOperations():
                found.append(tuple(entry))
            case rd.LogCheckpoint(step, holder, unfreezing):
                found.append(("checkpoint", step, holder, unfreezing))
    return sorted(found, key=repr)


def check_kept(result: RecordedResult, plan: Plan) -> None:
    """Each turn that is committed is told once, right after its lines, with what is known of the losses then."""
    kept = [at for at, entry in enumerate(result.logged) if isinstance(entry, rd.LogKept)]
    turns = [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn) and entry.turn.kind.has_update]
    assert len(kept) == len(turns)
    for at in kept:
        entry, before = result.logged[at], result.logged[at - 1]
        assert isinstance(entry, rd.LogKept) and isinstance(before, rd.LogTurn)
        assert (entry.step, entry.holder) == (before.turn.end_step, before.turn.owner)
        entry.unfreezing.check(plan.course, entry.step)


def plan_of(rng: random.Random) -> Plan:
    """Any plan that may move, of several nodes; some move by themselves, and some have helpers."""
    while True:
        plan = moving_plan(rng)
        if rng.random() < 0.6:
            plan = plan.at(0)
        if rng.random() < 0.3 and not (plan.course.may_skip or plan.placement.has_replicas or plan.course.invertible):
            helped = with_helpers(plan.at(0), rng, interval=rng.choice([1, 3]), overlap=rng.random() < 0.3)
            plan = moving_at_random(rng, helped) if plan.moves else helped
        hosts = [node for node in plan.nodes if plan.owner(node) is None]
        if hosts and len(plan.nodes) > 2 and not stay_reason(plan.course):
            return with_texts(plan) if rng.random() < 0.3 else plan


def drawn_runs(block: int) -> Iterator[tuple[int, random.Random, Plan, RecordedResult]]:
    """Yield fifteen seeds, each with its generator, a plan, and the undisturbed run."""
    for seed in range(block * 15, block * 15 + 15):
        rng = random.Random(seed)
        plan = plan_of(rng)
        yield seed, rng, plan, ring_of(plan, random.Random(seed)).run()


def ends_for_lack(result: RecordedResult, seed: int, *more: str) -> bool:
    """Whether a run ended with an error: that nodes or copies are missing, or with one of these texts."""
    assert result.finish is not None, seed
    texts = ("no living node", "nothing fits", *more)
    assert not result.finish.error or any(text in result.finish.message for text in texts), (seed, result.finish)
    return bool(result.finish.error)


def with_texts(plan: Plan) -> Plan:
    """Copy a plan with texts that are written at each evaluation, two or one at once."""
    generation = Generation(rows=3, max_new_tokens=3, at_once=2)
    return dataclasses.replace(plan, course=dataclasses.replace(plan.course, generation=generation))


OWN_ERRORS = ("CapacityError", "StorageError", "RingTuneError", "IntegrityError", "ModelError")
"""Classes of errors that nodes report of themselves."""


def own_errors(result: RecordedResult) -> list[rd.LogNodeError]:
    """What the log says of errors of nodes."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogNodeError)]


def lose_at(ring: RecoveringRing, rng: random.Random, due: list[int], *, owners: bool = False) -> None:
    """Lose any host that owns nothing at the moments of these numbers; with ``owners`` also those, but not the last."""

    def when(what: str, node: str) -> str | None:
        owning = [owner.node for owner in ring.plan.course.owners if owner.node not in ring.lost]
        stay = {*ring.lost, *([] if owners and len(owning) > 1 else owning)}
        left = [each for each in ring.plan.nodes if each not in stay]
        if due and left and len(ring.moments) >= due[0]:
            due.pop(0)
            return rng.choice(left)
        return None

    ring.when = when


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("block", range(20))
@pytest.mark.sampled(1)
def test_runs_that_lose_hosts_at_any_moment_log_what_undisturbed_ones_do(block: int) -> None:
    """No step is lost and none is logged twice, wherever a host is lost or tells an error, and where a second one."""
    recovered = told = 0
    for seed, rng, plan, wanted in drawn_runs(block):
        assert wanted.finish == rd.Finish("", ""), seed
        ring = ring_of(plan, rng)
        lose_at(ring, rng, sorted(rng.choices(range(1, 400), k=rng.choice([1, 1, 2]))))
        ring.error = rng.sample([*OWN_ERRORS, "PeerLostError", "PeerLostError"], k=2).pop
        result = ring.run()
        assert result.finish is not None, (seed, ring.lost, ring.waiting_for(plan.nodes[0]))
        told += len(own_errors(result))
        assert all(one.error != "PeerLostError" and one.message.endswith(one.error) for one in own_errors(result))
        if ends_for_lack(result, seed):
            assert result.finish.error in ("PeerLostError", *OWN_ERRORS), (seed, result.finish)
            continue
        recovered += bool(recoveries(result))
        assert story(result) == story(wanted), seed
        check_kept(result, plan)
        assert ring.surprises == [], seed
    assert recovered >= 2 and told


def test_all_nodes_have_done_what_was_granted_before_the_last_two_grants() -> None:
    """So a message of such a turn that waits is of no slow node; also of a run that is stopped while it goes back."""
    most_open = 0
    for seed in range(40):
        rng = random.Random(seed)
        plan = changed(plan_of(rng), eval_every=2)
        ring = ring_of(plan, rng)
        lose_at(ring, rng, rng.choices(range(1, 200), k=1))
        obey, ends = ring._obey_rounds, list[int]()

        def watched(command: rd.Command, ring: Any = ring, obey: Any = obey, ends: list[int] = ends) -> None:
            nonlocal most_open
            match command:
                case rd.LogMove() | rd.LogRecovery():
                    ends.clear()
                    ring.clock.at(ring.clock.now_s + 1.0, ring._tell_rounds, rd.DrainRequested("Ctrl-C"))
                case rd.Grant(turns):
                    opened = ring._rounds._grants.open._open
                    assert not ends[:-1] or min(opened) >= ends[-2]
                    most_open = max(most_open, len(opened.keys() - {turn.index for turn in turns}))
                    ends.append(turns[-1].index)
            obey(command)

        ring._obey_rounds = watched  # type: ignore[method-assign]
        ring.run()
    assert most_open > 2


OWNING: dict[str, Any] = {"num_blocks": 6, "num_steps": 24, "local_iterations": 2}


def failing(owners: list[str], due: list[tuple[int, str]], error: str, **values: Any) -> RecordedResult:
    """A run of three hosts of which these report an error, each after so many logged steps."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], owners, **OWNING)
    ring = ring_of(plan, random.Random(0), **values)
    ring.error = lambda: error

    def when(what: str, node: str) -> str | None:
        steps = [one for one in ring.result.logged if isinstance(one, rd.LogStep)]
        is_there = len(recoveries(ring.result)) == len(ring.lost)
        return due.pop(0)[1] if due and is_there and len(steps) >= due[0][0] else None

    ring.when = when
    return ring.run()


def disputing(
    says: Callable[[str], bool], *, holder: str = "d", fits_without: bool = True
) -> tuple[RecordedResult, list[rd.FindPlacement]]:
    """A run that loses host c, whose only copy is at d, and has e take it over; nodes that ``says`` accuse d.

    Or another ``holder``.
    """
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8), ("e", 8, 10)],
        ["a"],
        **{**OWNING, "num_blocks": 10, "method": "all"},
    )
    asked = list[rd.FindPlacement]()
    layouts: dict[str, list[Any]] = {
        "c": [("a", 0, 2), ("b", 2, 4), ("e", 4, 6), ("d", 6, 10)],
        "ced": [("a", 0, 2), ("b", 2, 10)],
        "ce": [("a", 0, 2), ("b", 2, 4), ("d", 4, 10)],
    }

    def place(command: rd.FindPlacement) -> Placement | None:
        asked.append(command)
        without = {*command.lost, *command.doubted}
        if command.doubted and not fits_without:
            return None
        slices = next(pieces for nodes, pieces in layouts.items() if {*nodes} == without)
        return changed(Plan(command.part.course, (command.part.placement,)), slices=slices).placement

    ring = ring_of(plan, random.Random(0), place=place)
    ring.when = lambda what, node: "c" if len(ring.result.logged) > 20 and not ring.lost else None
    obey = ring._obey_rounds

    def dispute(command: rd.Command) -> None:
        sources = {one.node for one in command.sources} if isinstance(command, rd.Move) else set[str]()
        if isinstance(command, rd.Move) and "d" in sources - {command.node} and says(command.node):
            number = command.part.placement.placement_number
            failed = rd.MoveFailed(command.node, number, "IntegrityError", "node d keeps another state", holder)
            ring._answer_rounds(command.node, failed)
        else:
            obey(command)

    ring._obey_rounds = dispute  # type: ignore[method-assign]
    return ring.run(), asked


@pytest.mark.parametrize(("error", "node"), [("CapacityError", "c"), ("FrameError", "c"), ("FrameError", "a")])
def test_host_that_neither_moves_nor_goes_back_leaves(error: str, node: str) -> None:
    """The run has copies of its blocks, and does not end with its error; with that of an owner of rows it does."""
    pieces = [("a", 0, 2), ("b", 2, 4), ("c", 4, 6)]
    plan = moving(make_plan(pieces, ["a"], **OWNING), (5, [("a", 0, 3), ("b", 3, 4), ("c", 4, 6)]))
    ring = ring_of(plan, random.Random(0))
    obey = ring._obey_rounds

    def refuse(command: rd.Command) -> None:
        if isinstance(command, rd.Move) and command.node == node and command.from_step is None:
            failed = rd.MoveFailed(node, command.part.placement.placement_number, error, f"node {node}: no")
            ring._answer_rounds(node, failed)
        else:
            obey(command)

    ring._obey_rounds = refuse  # type: ignore[method-assign]
    result = ring.run()
    if plan.owner(node) is not None:
        assert result.finish == rd.Finish(error, "node a: no") and recoveries(result) == []
        return
    assert result.finish == rd.Finish("", "") and [one.lost for one in recoveries(result)] == [(node,)]
    wanted = [one for one in story(ring_of(plan.at(0), random.Random(0)).run()) if one[0] == "step"]
    assert [one for one in story(result) if one[0] == "step"] == wanted


def test_mover_that_disputes_a_right_copy_leaves_alone() -> None:
    """A third node takes the copy from its holder, which hosts nothing until then, and stays in the run."""
    result, asked = disputing(lambda node: node == "e")
    assert result.finish == rd.Finish("", "") and [one.node for one in own_errors(result)] == ["e"]
    assert [({*one.lost}, one.doubted) for one in asked] == [({"c"}, ()), ({"c", "e"}, ("d",))]
    (recovery,) = recoveries(result)
    assert recovery.lost == ("c", "e") and recovery.part.nodes == ("a", "b")
    # Where nothing fits without the holder it hosts the blocks
    result, asked = disputing(lambda node: node == "e", fits_without=False)
    assert result.finish == rd.Finish("", "")
    assert [one.doubted for one in asked] == [(), ("d",), ()]
    assert recoveries(result)[0].part.nodes == ("a", "b", "d")


def test_holder_whose_copy_two_nodes_dispute_leaves_in_place_of_the_second() -> None:
    """Nobody else has the copy, so the run ends, with all three names; the holder's word is not taken."""
    result, asked = disputing(lambda node: True)
    assert len(asked) == 2 and [one.node for one in own_errors(result)] == ["e"]
    why = "node d keeps another state; node e has said so of node d too; no living node has a copy of blocks 4, "
    assert result.finish is not None and result.finish.message.startswith(why)


def test_mover_disputes_the_copies_alone_that_it_was_to_fetch() -> None:
    """What it says of a node that was to give it nothing costs that one nothing."""
    result, asked = disputing(lambda node: node == "e", holder="b")
    assert result.finish == rd.Finish("", "") and [one.node for one in own_errors(result)] == ["e"]
    assert [({*one.lost}, one.doubted) for one in asked] == [({"c"}, ()), ({"c", "e"}, ())]


@pytest.mark.parametrize(
    ("said", "leaves"),
    [
        ("e:d f:d", "ed"),  # in one recovery, or in two: the holder that gives the third a right copy is believed once
        ("e:d e:d f:d", "eed"),  # who comes back and says it again has said it once
        ("e:d e:c f:c", "eef"),  # who finds fault with each holder is no witness against the second one
        ("e:d e:c f:c g:c", "eefc"),
        ("f:c e:d e:c", "fee"),
        ("e:d f:d e:c g:c", "edec"),  # what another one has found too does not count against the one that said it
        ("e:d f:d g:d", "edd"),
    ],
)
def test_word_of_a_node_counts_against_one_holder_until_another_one_says_the_same(said: str, leaves: str) -> None:
    """Who accuses whom, one after the other, and who leaves: so a node that lies makes one other leave at most."""
    disputed, left = DisputedCopies(), ""
    for mover, holder in (words.split(":") for words in said.split()):
        first = disputed.take(mover, holder)
        left += holder if first else mover
        assert disputed.doubted == (() if first else (holder,))
        disputed.trust()
    assert left == leaves


@pytest.mark.parametrize("error", [*OWN_ERRORS, "TrustError", "AnErrorOfANewerBuild"])
def test_error_of_a_second_node_is_that_of_the_job_until_the_steps_are_trained_again(error: str) -> None:
    """Then the run ends with it, and the first one was told; later it is the second node's own."""
    result = failing(["a"], [(4, "b"), (4, "c")], error)
    assert [one.node for one in own_errors(result)] == ["b"]
    assert result.finish == rd.Finish(error, f"node c is lost, {error}")
    result = failing(["a"], [(4, "b"), (12, "c")], error)
    assert result.finish == rd.Finish("", "")
    assert [one[:2] for one in own_errors(result)] == [("b", error), ("c", error)]


@pytest.mark.parametrize(
    ("error", "node", "goes_on"),
    [
        ("StorageError", "a", False),  # it is awaited if it is lost, but it is there, and fails
        ("StorageError", "c", True),
        ("DataError", "c", False),
        ("DeadlineError", "b", True),
    ],
)
def test_error_of_an_owner_of_rows_is_its_own_where_its_rows_may_be_left_out(
    error: str, node: str, goes_on: bool
) -> None:
    """Unless it is of its rows, which is the user's."""
    policy = RecoveryPolicy(leaves_out=node == "c", awaits_s=1e5)
    result = failing(["a", "c"], [(4, node)], error, recovery=policy)
    assert [one.node for one in own_errors(result)] == ([node] if goes_on else [])
    assert result.finish is not None and result.finish.error == ("" if goes_on else error)
    assert not any(isinstance(one, rd.AwaitNodes) for one in result.logged)


def test_error_of_a_node_without_which_nothing_fits_ends_the_run_with_it() -> None:
    """Nobody waits for a node that is there; the error says both."""
    result = failing(["a"], [(4, "b")], "StorageError", recovery=RecoveryPolicy(awaits_s=1e5), place=lambda asked: None)
    assert result.finish is not None and result.finish.error == "StorageError"
    assert result.finish.message.startswith("node b is lost, StorageError; node b is lost, and nothing fits any more")


@pytest.mark.parametrize("block", range(6))
@pytest.mark.sampled(1)
def test_runs_in_which_a_link_between_living_nodes_is_lost_log_what_undisturbed_ones_do(block: int) -> None:
    """All go back with all nodes; if it is lost again before a turn is committed, without an end of it.

    That is the one that reports what nobody else has noticed, unless only the accused one owns no rows.
    That the accused one was too slow to answer about the first loss is heard when all is open again, and changes
    nothing.
    """
    with_all = without = 0
    for seed, rng, plan, wanted in drawn_runs(block):
        ring, due, is_twice = ring_of(plan, rng), rng.randint(1, 300), rng.random() < 0.5
        accused = rng.choice([node for node in plan.nodes if plan.owner(node) is None])
        complainer = rng.choice([node for node in plan.nodes if node != accused])
        is_late = rng.random() < 0.2  # it is lost when results are collected
        reports, told = list[int](), list[rd.LinkFailed]()  # committed turns at each report

        def when(what: str, node: str) -> None:
            kept = ring.num_kept  # noqa: B023
            again = is_twice and len(recoveries(ring.result)) == 1 == len(reports) and reports[0] == kept  # noqa: B023
            is_due = what == "collect" if is_late else len(ring.moments) >= due  # noqa: B023
            if again or (not reports and is_due):  # noqa: B023
                reports.append(kept)  # noqa: B023
                told.append(ring.lose_link(complainer, accused))  # noqa: B023
            elif len(told) == len(recoveries(ring.result)) == 1:  # noqa: B023
                late = told[0]._replace(answers=False)  # noqa: B023
                ring.clock.at(ring.clock.now_s, ring._tell_rounds, late)  # noqa: B023

        ring.when = when
        result = ring.run()
        if ends_for_lack(result, seed):
            assert is_twice, seed
            continue
        assert story(result) == story(wanted), seed
        found = recoveries(result)
        assert not found or (found[0].lost == () and found[0].link != ""), seed
        with_all += bool(found)
        suspect = complainer if plan.owner(complainer) is None else accused
        assert len(found) < 2 or found[1].lost == (suspect,), seed
        without += len(found) == 2
        assert ring.surprises == [], seed
    assert with_all >= 2 and without >= 1


@pytest.mark.parametrize("block", range(6))
@pytest.mark.sampled(1)
def test_runs_in_which_a_link_stays_broken_go_on_without_an_end_of_it_that_owns_no_rows(block: int) -> None:
    """Both ends live, and whichever reports the other: the nodes can't all go back with all links."""
    without = 0
    for seed, rng, plan, wanted in drawn_runs(block):
        ring, due = ring_of(plan, rng), rng.randint(1, 200)
        found = [ends for ends in sorted(links(plan)) if not all(plan.owner(node) for node in ends)]
        if not found:
            continue
        ends = rng.choice(found)
        reporter, accused = rng.sample(ends, 2)

        def when(what: str, node: str) -> None:
            if not any(ring.cut) and len(ring.moments) >= due:  # noqa: B023
                ring.cut = ends  # noqa: B023
                ring.lose_link(reporter, accused)  # noqa: B023

        ring.when = when
        result = ring.run()
        if ends_for_lack(result, seed):
            continue
        assert story(result) == story(wanted), seed
        lost = [node for one in recoveries(result) for node in one.lost]
        assert {*lost} <= {node for node in ends if plan.owner(node) is None}, seed
        without += len(lost) == 1
    assert without >= 1


def with_lost_links(
    num_steps: int, link: Callable[[int, bool], tuple[str, str] | None], **more: Any
) -> tuple[RecordedResult, RecordedResult, int]:
    """A run that hears of lost links, the undisturbed one, and how many links were lost.

    ``link`` says which is lost next, after so many, and whether a turn was kept since the last one.
    """
    hosts = [("a", 0, 1), ("c", 1, 3), ("d", 3, 4), ("b", 4, 5)]
    plan = make_plan(hosts, ["a", "b"], num_blocks=5, num_steps=num_steps, local_iterations=2)
    ring, reports = ring_of(plan, random.Random(0), **more), list[int]()

    def when(what: str, node: str) -> None:
        kept = ring.num_kept
        lost = link(len(reports), kept > max(reports, default=0))
        if lost is not None and len(recoveries(ring.result)) == len(reports):
            reports.append(kept)
            ring.lose_link(*lost)

    ring.when = when
    return ring.run(), ring_of(plan, random.Random(0)).run(), len(reports)


def test_host_that_reports_a_lost_link_after_each_turn_is_left_out() -> None:
    """Whichever living node it accuses, five times within 50 turns; until then each time one turn is done again.

    What it said does not count against the host that it accused: a link of that one is opened anew once more.
    """
    accused = [*[("c", "d")] * (MAX_OPENINGS + 1), ("d", "b")]
    result, wanted, _ = with_lost_links(24, lambda at, is_new: accused[at] if is_new and at < len(accused) else None)
    assert story(result) == story(wanted)
    assert [one.lost for one in recoveries(result)] == [()] * MAX_OPENINGS + [("c",), ()]


def test_host_that_has_left_for_a_link_leaves_again_for_it() -> None:
    """It joins again and accuses the same owner, which has cost no other host: the run ended."""
    layouts: dict[str, list[Any]] = {
        "c": [("a", 0, 1), ("d", 1, 4), ("b", 4, 5)],
        "d": [("a", 0, 1), ("c", 1, 4), ("b", 4, 5)],
        "cd": [("a", 0, 1), ("b", 1, 5)],
    }

    def place(command: rd.FindPlacement) -> Placement:
        slices = layouts["".join(sorted(command.lost))]
        return changed(Plan(command.part.course, (command.part.placement,)), slices=slices).placement

    plan = make_plan(
        [("a", 0, 1), ("c", 1, 3), ("d", 3, 4), ("b", 4, 5)], ["a", "b"], num_blocks=5, num_steps=24, local_iterations=2
    )
    ring, done = ring_of(plan, random.Random(0), place=place), list[int]()

    def when(what: str, node: str) -> None:
        num = len(recoveries(ring.result))
        if num > 4 or num < len(done) or (num in (0, 2, 3) and ring.num_kept < num + 1):
            return
        done.append(num)
        if num == 2:
            ring.come("c")
            ring.lose("d")
        else:
            ring.lose_link("c", "a")

    ring.when = when
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    assert [one.lost for one in recoveries(result)] == [(), ("c",), ("d",), (), ("c",)]
    assert story(result) == story(ring_of(plan, random.Random(0)).run())


def test_hosts_stay_with_which_an_owner_loses_its_links_in_turn() -> None:
    """The run needs the owner, and each host has fewer such links than it."""
    most = 2 * MAX_OPENINGS + 2
    result, wanted, _ = with_lost_links(32, lambda at, is_new: ("a", "dc"[at % 2]) if is_new and at < most else None)
    assert story(result) == story(wanted)
    assert [one.lost for one in recoveries(result)] == [()] * most


@pytest.mark.parametrize("lies", [4, 10_000])
def test_owner_that_reports_links_twice_makes_one_host_leave(lies: int) -> None:
    """A second host stays for fifty turns: its link is opened anew as long as a node is awaited, then the run ends.

    So does a run whose owner stops in time, with all that it trains.
    """

    def link(at: int, is_new: bool) -> tuple[str, str] | None:
        return ("a", "c" if at < 2 else "d") if at < 2 + lies and (is_new or at != 2) else None

    result, wanted, reports = with_lost_links(24, link, recovery=RecoveryPolicy(awaits_s=100.0))
    assert [one.lost for one in recoveries(result)] == [
        (),
        ("c",),
        *[()] * (reports - 2 - bool(result.finish.error)),
    ]
    if lies > 4:
        assert result.finish.message.endswith(
            "; the link between a and d was opened anew for 100 s (recovery.wait_s); node a, for a link with which a "
            f"node has left the run, owns rows, which no other node has; mend the network, {RESUME}"
        )
        return
    assert story(result) == story(wanted) and reports == 6


@pytest.mark.parametrize("times", [2, MAX_OPENINGS + 1])
def test_owner_whose_rows_may_be_left_out_makes_one_host_leave(times: int) -> None:
    """For the second host it leaves itself; with a link that it loses twice in a turn, or once in each of six turns."""
    hosts = [("a", 0, 1), ("c", 1, 2), ("d", 2, 3), ("e", 3, 4), ("b", 4, 5)]
    plan = make_plan(hosts, ["a", "b"], num_blocks=5, num_steps=48, local_iterations=2)
    ring = ring_of(plan, random.Random(0), recovery=RecoveryPolicy(leaves_out=True))
    reports = list[int]()

    def when(what: str, node: str) -> None:
        kept = ring.num_kept
        is_again = times == 2 and len(reports) % 2 == 1 and reports[-1] == kept
        is_due = what.startswith("forward") and (is_again or kept > max(reports, default=0))
        if len(recoveries(ring.result)) == len(reports) < 2 * times and is_due:
            reports.append(kept)
            ring.lose_link("a", "d" if len(reports) <= times else "e")

    ring.when = when
    result = ring.run()
    assert not result.finish.error
    assert [one.lost for one in recoveries(result)] == [*[()] * (times - 1), ("d",), *[()] * (times - 1), ("a",)]


def test_links_that_are_opened_anew_now_and_then_are_not_too_many() -> None:
    """Of five, the first counts for 50 turns; those of other nodes do not count."""
    openings, found = LinkOpenings(), list[bool]()
    for turn in range(100):
        if turn % 12 == 0 and turn < 60:
            openings.note(("c", f"o{turn}"))
        found.append(openings.are_too_many("c", ("c", "d")))
        assert not openings.are_too_many(f"o{turn}", (f"o{turn}", "d"))
        openings.commit()
    assert [turn for turn, is_found in enumerate(found) if is_found] == [48, 49]


@pytest.mark.parametrize(("mended_s", "awaits_s"), [(0.0, 100.0), (50.0, 100.0), (math.inf, 100.0), (math.inf, 0.0)])
def test_run_whose_link_between_two_owners_stays_broken_opens_it_again_as_long_as_it_waits(
    mended_s: float, awaits_s: float
) -> None:
    """Both live and own rows, so that neither can be done without; a link that is mended is used at once.

    Where no node is awaited, it is opened anew once. At the end both are named: which one is wrong is not known.
    """
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_blocks=4, num_steps=12, local_iterations=2)
    wanted = ring_of(plan, random.Random(0)).run()
    ring = ring_of(plan, random.Random(0), recovery=RecoveryPolicy(awaits_s=awaits_s))
    cut_s, moments_s = list[float](), list[float]()

    def when(what: str, node: str) -> None:
        moments_s.append(ring.clock.now_s)
        if not cut_s and what == "backward" and len(ring.moments) > 40:
            cut_s.append(ring.clock.now_s)
            ring.cut = ("a", "b")
            ring.lose_link("a", "b")
        if cut_s and ring.clock.now_s >= cut_s[0] + mended_s:
            ring.cut = ("", "")

    ring.when = when
    result = ring.run()
    assert cut_s
    if math.isinf(mended_s):
        tried = "for 100 s (recovery.wait_s)" if awaits_s else "in vain"
        assert f"the link between a and b was opened anew {tried}; both own rows" in result.finish.message
        assert awaits_s - 10.0 <= moments_s[-1] - cut_s[0] < awaits_s + 10.0
        return
    assert story(result) == story(wanted)
    assert [(one.lost, one.link) for one in recoveries(result)] == [((), "node a has lost node b")]
    assert result.wall_s - wanted.wall_s < mended_s + 60.0


@pytest.mark.parametrize("block", range(6))
@pytest.mark.sampled(1)
def test_runs_that_recover_with_a_host_that_can_not_reach_another_node_go_on_without_it(block: int) -> None:
    """Both live, so that nobody misses them: the host is left out once time is up."""
    without = 0
    for seed in range(block * 15, block * 15 + 15):
        rng = random.Random(seed)
        plan = plan_of(rng).at(0)
        wanted = ring_of(plan, random.Random(seed)).run()
        hosts = [node for node in plan.nodes if plan.owner(node) is None]
        if len(hosts) < 2:
            continue
        ring, due, (lost, stuck) = ring_of(plan, rng, wait_s=1000.0), rng.randint(1, 100), rng.sample(hosts, 2)
        other = rng.choice([node for node in plan.nodes if node not in (lost, stuck)])

        def when(what: str, node: str) -> str | None:
            if len(ring.moments) < due or any(ring.cut):  # noqa: B023
                return None
            ring.cut = (stuck, other)  # noqa: B023
            return lost  # noqa: B023

        ring.when = when
        result = ring.run()
        if ends_for_lack(result, seed):
            continue
        assert story(result) == story(wanted), seed
        without += any(stuck in one.lost and len(one.lost) == 2 for one in recoveries(result))
    assert without >= 1


@pytest.mark.parametrize(
    ("unopened", "leaves"),
    [
        ("ac bc ec", "c"),  # c takes no links, and says that it has moved
        ("bc", "b"),  # nobody knows which end is at fault
        ("ab", "b"),  # the rows of a are needed
        ("ab ac ae", "b"),  # and what a says costs one host; then the run ends
    ],
)
def test_host_that_takes_no_links_in_a_recovery_leaves(unopened: str, leaves: str) -> None:
    """All live, so that nobody misses them: the end leaves with which more nodes have no link, once time is up."""
    pieces = [("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8), ("e", 8, 10)]
    plan = make_plan(pieces, ["a"], **{**OWNING, "num_blocks": 10})
    asked, pairs = list[rd.FindPlacement](), unopened.split()

    def place(command: rd.FindPlacement) -> Placement:
        asked.append(command)
        living = [node for node in plan.nodes if node not in command.lost]
        ends = [10 * at // len(living) for at in range(len(living) + 1)]
        slices = [(node, ends[at], ends[at + 1]) for at, node in enumerate(living)]
        return changed(Plan(command.part.course, (command.part.placement,)), slices=slices).placement

    ring = ring_of(plan, random.Random(0), place=place, wait_s=300.0)
    ring.when = lambda what, node: "d" if len(ring.result.logged) > 20 and not ring.lost else None
    obey = ring._obey_rounds

    def open_links(command: rd.Command) -> None:
        node, part = (command.node, command.part) if isinstance(command, rd.Move) else ("", plan)
        number, there = part.placement.placement_number, [pair for pair in pairs if {*pair} <= {*part.nodes}]
        if lost := next((pair[1] for pair in there if pair[0] == node), ""):
            ring._answer_rounds(node, rd.MoveFailed(node, number, "ConnectionFailedError", "no link", lost=lost))
        elif any(pair[1] == node for pair in there):
            ring._answer_rounds(node, rd.Moved(node, number, 0))
        else:
            obey(command)

    ring._obey_rounds = open_links  # type: ignore[method-assign]
    result = ring.run()
    assert asked[-1].lost == tuple(sorted(("d", leaves)))
    assert result.finish is not None and result.finish.error == ("DeadlineError" if "ab ac" in unopened else "")


def test_node_that_does_not_open_its_links_anew_costs_no_end_of_the_broken_one() -> None:
    """Links are opened anew because of others; who says then that it can't leaves itself."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8)], ["a"], **{**OWNING, "num_blocks": 8})
    asked = list[rd.FindPlacement]()

    def place(command: rd.FindPlacement) -> Placement:
        asked.append(command)
        return changed(
            Plan(command.part.course, (command.part.placement,)), slices=[("a", 0, 4), ("b", 4, 8)]
        ).placement

    ring = ring_of(plan, random.Random(0), place=place, wait_s=300.0)
    obey, broken = ring._obey_rounds, list[rd.LinkFailed]()

    def when(what: str, node: str) -> None:
        if len(ring.result.logged) > 20 and not broken:
            broken.append(ring.lose_link("a", "b"))

    def refuse(command: rd.Command) -> None:
        if isinstance(command, rd.Move) and command.node == "d" and not asked:
            number = command.part.placement.placement_number
            ring._answer_rounds("d", rd.MoveFailed("d", number, "FrameError", "node d: no"))
        else:
            obey(command)

    ring.when, ring._obey_rounds = when, refuse  # type: ignore[method-assign]
    result = ring.run()
    assert result.finish == rd.Finish("", "") and [one.lost for one in asked] == [("d",)]


@pytest.mark.parametrize("is_bad", [False, True])
def test_run_that_has_no_copy_of_the_committed_turn_ends_when_it_has_to_go_back(is_bad: bool) -> None:
    """The hosts of the placement before are lost after a move, and no turn is committed since."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["o"], num_blocks=4, num_steps=12, local_iterations=2, method="all")
    plan = plan.extended(make_plan([("c", 0, 2), ("d", 2, 4)], ["o"], num_blocks=4).placement, 2)
    ring, due = ring_of(plan, random.Random(0)), [True]

    def when(what: str, node: str) -> str | None:
        if what == "backward" and node in "cd" and len(ring.lost) < 2:
            return "ab"[len(ring.lost)]
        if ring._rounds._kept.missing and due and not is_bad:
            due.clear()
            ring.lose_link("c", "d")
        return None

    ring.when = when
    ring.is_bad = lambda node, action: is_bad and bool(ring._rounds._kept.missing and due and [due.pop()])
    finish = ring.run().finish
    assert finish is not None and finish.error == ("DivergedError" if is_bad else "PeerLostError")
    assert "no living node has a copy of blocks 0, 1, 2, 3" in finish.message


@pytest.mark.parametrize("block", range(6))
@pytest.mark.sampled(1)
def test_runs_that_replan_and_lose_hosts_log_what_undisturbed_ones_do(block: int) -> None:
    """A recovery has a placement number of its own, also after a move found in mid-run; and the other way round."""
    both = 0
    for seed, rng, plan, wanted in drawn_runs(block):
        others = [random_placement(rng, plan, 0, 0) for _ in range(rng.randint(2, 4))]
        others = [one for one in others if {*one.members, *(piece.node for piece in one.slices)} <= set(plan.nodes)]
        ring = ring_of(plan, rng, replans=[(wanted.wall_s * rng.random(), one) for one in others])
        lose_at(ring, rng, sorted(rng.choices(range(1, 400), k=rng.choice([1, 1, 2]))))
        result = ring.run()
        if ends_for_lack(result, seed):
            continue
        both += bool(recoveries(result)) and any(isinstance(entry, rd.LogPlan) for entry in result.logged)
        assert story(result) == story(wanted), seed
    assert both >= 1


@SEEDS
@pytest.mark.parametrize("moment", MOMENTS)
def test_host_that_is_lost_at_every_kind_of_moment(moment: str, seed: int) -> None:
    """The first such moment of a random node after some turns, and the run goes on."""
    course = {"num_blocks": 6, "num_steps": 12, "eval_every": 4, "checkpoint_every": 4}
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a", "d"], **course)  # type: ignore[arg-type]
    rng = random.Random(f"{moment} {seed}")
    wanted = ring_of(plan, rng).run()
    ring = ring_of(plan, rng)
    after = {"prepare": -1, "collect": 0}.get(moment, rng.randint(0, 60))

    def when(what: str, node: str) -> str | None:
        living = [each for each in ("b", "c") if each not in ring.lost]
        if moment in ("move", "halt") and not ring.lost and len(ring.moments) > after:
            return rng.choice(living)
        limit = 1 if moment not in ("move", "halt") else 2
        if what == moment and len(ring.moments) > after and len(ring.lost) < limit:
            return rng.choice(living)
        return None

    ring.when = when
    result = ring.run()
    assert ring.lost, ring.moments
    assert result.finish is not None
    if result.finish.error and len(ring.lost) == 2:
        assert "no living node" in result.finish.message
        return
    assert result.finish == rd.Finish("", "")
    assert recoveries(result), ring.lost
    assert story(result) == story(wanted)
    assert ring.surprises == []
    placed = recoveries(result)[-1].part
    assert not set(ring.lost) & {piece.node for piece in placed.placement.slices}


def test_items_are_shown_when_they_are_done_and_once() -> None:
    """Each item of the run once, before its turn is logged, whatever is repeated."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a"], num_blocks=6, num_steps=12, eval_every=4)
    rng = random.Random(0)
    ring = ring_of(plan, rng)
    lose_at(ring, rng, [150])
    logged = ring.run().logged
    (recovery,) = [entry for entry in logged if isinstance(entry, rd.LogRecovery)]

    def items(of: type[rd.ShowStep] | type[rd.LogStep]) -> list[tuple[Any, ...]]:
        found = [entry for entry in logged if isinstance(entry, of)]
        return sorted((one.turn.kind, one.step, one.seq - one.turn.first_seq) for one in found)

    shown = items(rd.ShowStep)
    assert shown == items(rd.LogStep) and len(set(shown)) == len(shown)
    before = [entry for entry in logged[: logged.index(recovery)] if isinstance(entry, rd.ShowStep)]
    assert any(entry.step >= recovery.step for entry in before), "some step was done that had to be repeated"
    assert len(ring._rounds._log._shown) < len(shown) / 2, "what is committed is never repeated, so it is forgotten"


@pytest.mark.parametrize("seed", range(6))
def test_loss_of_nodes_at_once_is_foretold(seed: int) -> None:
    """Any hosts and copies on any racks: the run ends where that is said, and for that reason; else it goes on."""
    rng = random.Random(f"foretold {seed}")
    hosts = [(name, block, block + 1) for block, name in enumerate("wxyz")]
    plan = make_plan(hosts, ["a", "b"], num_steps=16, local_iterations=2, method="all")
    racks = tuple(Rack(name, rng.choice("123")) for name in "abwxyz")
    plan = plan.with_copies(True, seed % 3, racks if seed % 3 else ())
    outcomes = set[bool]()
    for lost in itertools.combinations("wxyz", rng.choice([2, 3]) if seed % 3 else 2):
        found = loss_outcome(plan, lost, RecoveryPolicy())
        ring = ring_of(plan, rng, num_copies=seed % 3)

        def when(what: str, node: str, ring: RecoveringRing = ring, lost: tuple[str, ...] = lost) -> str | None:
            if what == "backward" and sum(isinstance(entry, rd.LogTurn) for entry in ring.result.logged) > 2:
                for each in lost:
                    ring.lose(each)
            return None

        ring.when = when
        result = ring.run()
        assert result.finish is not None and set(ring.lost) == set(lost)
        assert bool(result.finish.error) == bool(found.ends), (lost, result.finish, found)
        assert not found.ends or "no living node has a copy of block" in result.finish.message
        assert not found.awaited
        outcomes.add(bool(found.ends))
    assert outcomes == {True, False} or seed % 3


def test_loss_of_owners_is_foretold_by_what_the_job_says() -> None:
    """They are awaited, or left out; the only one that is left is awaited, or the run ends."""
    plan = make_plan([("x", 0, 2), ("y", 2, 4)], ["a", "b"], num_steps=16).with_copies(True, 2)
    skips, waits = RecoveryPolicy(leaves_out=True, awaits_s=5.0), RecoveryPolicy(awaits_s=5.0)
    assert loss_outcome(plan, ("a", "x"), waits)[:2] == ("", ("a",))
    one = loss_outcome(plan, ("a", "x"), skips)
    assert one[:2] == ("", ()) and [owner.node for owner in one.course.owners] == ["b"]
    assert loss_outcome(plan, ("a", "b"), skips).awaited == ("b",)
    assert "no other node than b owns rows" in loss_outcome(plan, ("a", "b"), RecoveryPolicy(leaves_out=True)).ends
    assert "a owns rows" in loss_outcome(plan, ("a", "x"), RecoveryPolicy()).ends
    assert "keeps no copies of turns" in loss_outcome(plan.with_copies(False), ("x",), waits).ends
    # The head is at its owner and at the next one
    assert "copy of the head" in loss_outcome(plan.with_copies(True), ("a", "b"), waits).ends


def test_host_may_leave_for_a_link_with_an_owner_again_after_fifty_turns() -> None:
    """Of the owner itself; other owners may lose one meanwhile, and the host that has left may leave again."""
    openings, found = LinkOpenings(), list[bool]()
    openings.note_cost(("a",), "d")
    for _ in range(60):
        found.append(openings.has_cost(("c", "a"), "e"))
        assert not openings.has_cost(("c", "b"), "e") and not openings.has_cost(("a",), "d")
        openings.commit()
    assert found == [True] * 50 + [False] * 10
