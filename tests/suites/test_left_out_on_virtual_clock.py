"""What must hold for a run without owners that are lost, and with those that come back: on a virtual clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest

from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.course import Course, HelperSettings, Offload
from ringtune.schedule.lowering import links
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.migration import stay_reason, with_owner, without_owner
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NONE_DONE, NOTHING_KNOWN, StepKind, Turn, items, turn_sequence
from ringtune.schedule.units import Range
from ringtune.techniques.offload import helped
from tests.features.plans import Losses, loss_at, moving_plan, start_of
from tests.suites.test_recovery_on_virtual_clock import SEEDS, ends_for_lack, lose_at, recoveries, ring_of
from tests.support.plans import changed, make_plan
from tests.support.recorded_ring import RecordedResult
from tests.support.recovering_ring import RecoveringRing

SKIPS = RecoveryPolicy(leaves_out=True)


def taking_back(plan: Plan) -> RecoveryPolicy:
    """As ``SKIPS``, and an owner that is back is taken in."""
    return RecoveryPolicy(leaves_out=True, num_steps=lambda rows: plan.course.num_steps)


def train_items(course: Course) -> list[tuple[str, int]]:
    """The owner and its batch of each step of an undisturbed run."""
    turns = (turn for turn in turn_sequence(course) if turn.kind is StepKind.TRAIN)
    return [(item.owner, item.batch) for turn in turns for item in items(course, turn)]


def without_owners(wanted: list[tuple[str, int]], changes: Iterable[tuple[int, str]]) -> list[tuple[str, int]]:
    """The same without what owners would have done while they were away, as every second change of one is its return.

    A change counts after so many steps of the run; what comes after the last item that was done is not missed.
    """
    done, gone = list[tuple[str, int]](), set[str]()
    for step, owner in changes:
        while len(done) < step:
            item, *wanted = wanted
            done += [item] if item[0] not in gone else []
        gone ^= {owner}
    return [*done, *(item for item in wanted if item[0] not in gone)]


def left_out(result: RecordedResult) -> list[tuple[int, str]]:
    """After which step which owner is left out, as the log has it."""
    return [(entry.step, owner) for entry in recoveries(result) for owner in entry.left_out]


def changes(result: RecordedResult) -> list[tuple[int, str]]:
    """After which step which owner is left out or taken back, as the log has it."""
    return [(entry.step, owner) for entry in recoveries(result) for owner in (*entry.left_out, *entry.returned)]


def trained(result: RecordedResult) -> list[tuple[str, int]]:
    """The owner and its batch of each step, as the log has them, in the order of the steps."""
    steps = sorted(
        (entry.step, entry.turn.owner, entry.turn.first_batch + entry.seq - entry.turn.first_seq)
        for entry in result.logged
        if isinstance(entry, rd.LogStep) and entry.turn.kind is StepKind.TRAIN
    )
    assert [step for step, *_ in steps] == list(range(len(steps))), "every step once"
    return [(owner, batch) for _, owner, batch in steps]


def plan_of(rng: random.Random) -> Plan:
    """Any plan of several owners that may move."""
    while True:
        plan = moving_plan(rng)
        plan = plan.at(0) if rng.random() < 0.6 else plan
        several = len(plan.course.owners) > 1 and len(plan.nodes) > 2
        if several and not plan.course.may_skip and not stay_reason(plan.course):
            return plan


def check_left(
    ring: RecoveringRing, result: RecordedResult, plan: Plan, away: list[tuple[int, str]], seed: int
) -> None:
    """What is left without owners that were away was done, each step and evaluation once, in turns that nodes know."""
    assert trained(result) == without_owners(train_items(plan.course), away), seed
    assert ring.surprises == [], seed
    last = recoveries(result)[-1].plan.course if recoveries(result) else plan.course
    assert len(trained(result)) == last.num_steps
    evaluated = [entry for entry in result.logged if isinstance(entry, rd.LogEvaluation)]
    assert len({entry.step for entry in evaluated}) == len(evaluated), "every evaluation once"


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("block", range(20))
@pytest.mark.sampled(1)
def test_runs_that_lose_owners_at_any_moment_do_what_is_left(block: int) -> None:
    """Every step of the others once and in its order, none of the lost owner's after its loss, whenever that is."""
    skipped = 0
    for seed in range(block * 15, block * 15 + 15):
        rng = random.Random(f"left out {seed}")
        plan = plan_of(rng)
        ring = ring_of(plan, rng, recovery=SKIPS)
        lose_at(ring, rng, sorted(rng.choices(range(1, 300), k=rng.choice([1, 1, 2]))), owners=True)
        result = ring.run()
        if ends_for_lack(result, seed, "nothing is kept yet"):
            continue
        skipped += bool(left_out(result))
        check_left(ring, result, plan, left_out(result), seed)
    assert skipped >= 2


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("block", range(20))
@pytest.mark.sampled(1)
def test_runs_whose_lost_owners_come_back_do_what_is_left(block: int) -> None:
    """Owners and hosts are lost at any moment, more than once too; the turns of who is back are trained again."""
    returned = again = 0
    for seed in range(block * 15, block * 15 + 15):
        rng = random.Random(f"back {seed}")
        plan = plan_of(rng)
        ring = ring_of(
            plan, rng, recovery=taking_back(plan), back_s=lambda node, rng=rng: rng.choice([1.0, 15.0, None])
        )
        lose_at(ring, rng, sorted(rng.choices(range(1, 200), k=rng.choice([1, 2, 3]))), owners=True)
        result = ring.run()
        if ends_for_lack(result, seed, "nothing is kept yet", "no other node than"):
            continue
        back = [owner for entry in recoveries(result) for owner in entry.returned]
        returned, again = returned + bool(back), again + (len(left_out(result)) > 1)
        check_left(ring, result, plan, changes(result), seed)
        for entry in (one for one in recoveries(result) if one.returned):
            assert set(entry.returned) <= {owner.node for owner in entry.part.course.owners}
            assert not set(entry.returned) & set(entry.lost)
    assert returned and again


MOMENTS = ("prepare", "embedding", "head", "backward", "update", "save", "hand-over", "copy", "move", "halt", "collect")


@SEEDS
@pytest.mark.parametrize("moment", MOMENTS)
def test_owner_that_is_lost_at_every_kind_of_moment(moment: str, seed: int) -> None:
    """Whichever owner it is, with the head or without: the run goes on, and saves at once where it has checkpoints."""
    rng = random.Random(f"{moment} {seed}")
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4), ("c", 4, 6)],
        ["a", "d", "c"],
        num_blocks=6,
        num_steps=18,
        eval_every=4,
        checkpoint_every=4,
    )
    ring = ring_of(plan, rng, recovery=SKIPS)
    after = {"prepare": -1, "collect": 0}.get(moment, rng.randint(0, 60))
    first = rng.choice(["a", "d", "c"])

    def when(what: str, node: str) -> str | None:
        if moment in ("move", "halt") and not ring.lost and len(ring.moments) > after:
            return "b"
        limit = 2 if moment in ("move", "halt") else 1
        return first if what == moment and len(ring.moments) > after and len(ring.lost) < limit else None

    ring.when = when
    result = ring.run()
    assert first in ring.lost, ring.moments
    assert result.finish is not None
    if result.finish.error and len(ring.lost) == 2:
        assert "no living node" in result.finish.message
        return
    assert result.finish == rd.Finish("", "")
    assert [owner for _, owner in left_out(result)] == [first]
    assert trained(result) == without_owners(train_items(plan.course), left_out(result))
    recovery = recoveries(result)[-1]
    if recovery.step:
        assert recovery.step in [entry.step for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert first not in recovery.part.nodes


@SEEDS
@pytest.mark.parametrize(("interval", "keeps_best", "step"), [(1, False, 12), (5, False, 20), (5, True, 12)])
def test_run_that_has_ended_early_trains_no_more_without_a_lost_owner(
    seed: int, interval: int, keeps_best: bool, step: int
) -> None:
    """The decision to end holds: the owner is lost while results are collected, and all others only send theirs.

    It ends with an evaluation before which helpers have applied all gradients, unless it keeps an earlier result.
    """
    slices, owners = [("a", 0, 2), ("b", 2, 4)], ["a", "c"]
    plan = make_plan(slices, owners, num_blocks=4, num_steps=40, local_iterations=2, eval_every=4, method="all")
    plan = helped(plan, {"a": "b"}, HelperSettings(interval=interval))
    ring = ring_of(plan, random.Random(seed), recovery=SKIPS, rounds={"patience_evals": 2, "keeps_best": keeps_best})
    ring.when = lambda what, node: "c" if what == "collect" and not ring.lost else None
    result = ring.run()
    assert result.finish == rd.Finish("", "") and ring.lost == ["c"]
    (stop,) = [entry for entry in result.logged if isinstance(entry, rd.LogStop)]
    assert max(entry.step for entry in result.logged if isinstance(entry, rd.LogStep)) == stop.step == step


@pytest.mark.parametrize("seed", range(8))
def test_owner_that_is_back_and_has_no_way_to_another_node_is_left_out_again(seed: int) -> None:
    """Time is up for its return, and the others go on as before."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "c", "d"], num_blocks=4, num_steps=24, local_iterations=2)
    ring = ring_of(plan, random.Random(seed), recovery=taking_back(plan), back_s=lambda node: 5.0, wait_s=1000.0)

    def when(what: str, node: str) -> str | None:
        if len(ring.moments) < 60 or ring.came:
            return None
        ring.cut = random.Random(seed).choice([ends for ends in sorted(links(plan)) if "c" in ends])
        return "c"

    ring.when = when
    result = ring.run()
    assert result.finish == rd.Finish("", "") and ring.came == ["c"]
    assert trained(result) == without_owners(train_items(plan.course), left_out(result))
    assert [entry.lost for entry in recoveries(result)] == [("c",)] * 2


@pytest.mark.parametrize("back_s", [None, 20.0])
@pytest.mark.parametrize("turns", ["equal", "rows"])
def test_losses_of_a_lost_owner_are_forgotten_where_losses_decide(turns: str, back_s: float | None) -> None:
    """With unfreeze.at = "auto" each turn has the decisions that follow from the losses of whoever is there.

    An owner that is back counts from its first turn on.
    """
    slices, owners = [("a", 0, 2), ("c", 2, 5)], ["a", "b", "c"]
    plan = make_plan(slices, owners, num_blocks=5, num_steps=60, local_iterations=2, unfreeze="auto", patience_steps=2)
    plan = changed(plan, turns=turns)
    decided = after = 0
    for seed in range(5):
        back = {"recovery": taking_back(plan), "back_s": lambda node: back_s}
        ring = ring_of(plan, random.Random(seed), carrier=Losses(plan, seed), **back)
        ring.when = lambda what, node, ring=ring: "b" if len(ring.moments) == 250 else None  # type: ignore[misc]
        result = ring.run()
        assert result.finish == rd.Finish("", ""), seed
        assert trained(result) == without_owners(train_items(plan.course), changes(result)), seed
        assert len(changes(result)) == (1 if back_s is None else 2), seed
        course, known = plan.course, NOTHING_KNOWN
        found: list[Turn] = []
        for entry in result.logged:
            if isinstance(entry, rd.LogRecovery):
                known, course = known.without(course, entry.plan.course), entry.plan.course
                after += len(known.unfreeze_at)
            elif isinstance(entry, rd.LogTurn) and entry.turn.kind is StepKind.TRAIN:
                steps = range(entry.turn.first_step, entry.turn.end_step)
                known = known.after(course, sum(loss_at(step, seed) for step in steps) / len(steps))
                found.append(entry.turn)
        assert [turn.unfreeze_at for turn in found] == [known.holding(turn.first_step) for turn in found], seed
        assert left_out(result)
        decided += len(known.unfreeze_at)
    assert decided > after > 0, "some decisions before the loss, some after it"


class AnyLosses(Losses):
    """Gives every item any loss, which is that of its step."""

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """A head gives count and sum."""
        if action.op is not Op.HEAD:
            return ()
        return (("count", 2.0), ("loss_sum", random.Random(f"{self._seed}/{self._steps[action.seq]}").random()))


@pytest.mark.parametrize("back_s", [None, 15.0])
@pytest.mark.parametrize("eval_rows", [5, 0])
@pytest.mark.parametrize("seed", range(4))
def test_best_evaluation_is_that_of_the_same_rows(seed: int, eval_rows: int, back_s: float | None) -> None:
    """Evaluations before an owner is left out, or back, count no more, unless it has no part in them."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)], ["a", "c", "b"], num_blocks=4, num_steps=40, local_iterations=2, eval_every=4
    )
    owners = [dataclasses.replace(one, eval_rows=eval_rows if one.node == "c" else 5) for one in plan.course.owners]
    plan = changed(plan, owners=tuple(owners))
    rng = random.Random(f"best {seed}")
    back = {"recovery": taking_back(plan), "back_s": lambda node: back_s}
    ring = ring_of(plan, rng, rounds={"keeps_best": True}, carrier=AnyLosses(plan, seed), **back)
    asks = rng.randint(2, 4)
    moment = rng.choice(["collect best", "backward"])
    ring.when = lambda what, node: "c" if (what, ring.best[0] >= 4 * asks) == (moment, True) and not ring.came else None
    result = ring.run()
    assert result.finish == rd.Finish("", "") and [owner for _, owner in left_out(result)] == ["c"]
    assert [entry.returned for entry in recoveries(result)[1:]] == [("c",)] * (back_s is not None)
    best, found = NONE_DONE, list[tuple[bool | None, bool]]()
    for entry in result.logged:
        if isinstance(entry, rd.LogRecovery) and eval_rows:
            best = NONE_DONE
        elif isinstance(entry, rd.LogEvaluation):
            values = dict(entry.values)
            best = best.after(entry.step, values["loss_sum"] / values["count"])
            found.append((entry.is_best, best.best_step == entry.step))
    assert found and all(told == wanted for told, wanted in found)
    assert ring.collected_best <= {best.best_step, 0}


def test_evaluations_of_as_many_rows_of_another_owner_are_others() -> None:
    """As where one is lost while all stop to take another one back."""
    course = make_plan([("a", 0, 2)], ["a", "b", "c", "d"], num_blocks=2, num_steps=40).course
    whole = [dataclasses.replace(one, eval_rows=0 if one.node == "d" else 5) for one in course.owners]
    course = dataclasses.replace(course, owners=tuple(whole))
    some, known = without_owner(course, "b", 3), NONE_DONE.after(8, 0.5)
    assert known.without(some, with_owner(without_owner(some, "c", 6), "b", 6, 40)) == NONE_DONE
    assert known.without(some, without_owner(some, "d", 6)) == known.without(course, course) == known


def returning(steps: int = 24, **values: Any) -> RecoveringRing:
    """A run that loses owner c, which hosts nothing, after some turns, and has it back in 60 s."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "c", "d"], num_blocks=4, num_steps=steps, checkpoint_every=4)
    how = {"recovery": taking_back(plan), "back_s": lambda node: 60.0}
    ring = ring_of(plan, random.Random(1), **{**how, **values})
    ring.when = lambda what, node: "c" if what == "update" and len(ring.moments) > 90 and not ring.came else None
    return ring


def test_run_takes_an_owner_back_between_two_turns_and_repeats_none() -> None:
    """In the placement that there is: what was granted before is done first, and the new course is saved at once."""
    ring = returning()
    obey, granted = ring._obey_rounds, list[Turn]()

    def note(command: rd.Command) -> None:
        if isinstance(command, rd.Grant) and recoveries(ring.result):
            granted.extend(turn for turn in command.turns if turn.kind is StepKind.TRAIN)
        obey(command)

    ring._obey_rounds = note  # type: ignore[method-assign]
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    lost, back = recoveries(result)
    assert (lost.left_out, back.returned, back.lost) == (("c",), ("c",), ())
    assert back.part.placement.slices == lost.part.placement.slices
    assert set(back.part.nodes) == {"a", "b", "c", "d"}
    saved = [entry.step for entry in result.logged[result.logged.index(back) :] if isinstance(entry, rd.LogCheckpoint)]
    assert saved[0] == back.step
    steps = [turn.first_step for turn in granted]
    assert steps[0] == lost.step and steps == sorted(set(steps)) and lost.step < back.step < back.plan.course.num_steps


@pytest.mark.parametrize("error", ["CapacityError", "DataError"])
def test_owner_that_can_not_take_its_part_is_left_out_again(error: str) -> None:
    """It has less memory than before, or other rows: the others go on without it, and the run does not end."""
    ring = returning()
    obey = ring._obey_rounds

    def refuse(command: rd.Command) -> None:
        if isinstance(command, rd.Move) and command.node == "c":
            failed = rd.MoveFailed("c", command.part.placement.placement_number, error, "node c: it can't")
            ring.clock.at(ring.clock.now_s, ring._tell_rounds, failed)
            ring.lost.append("c")
        else:
            obey(command)

    ring._obey_rounds = refuse  # type: ignore[method-assign]
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    assert [(entry.left_out, entry.returned) for entry in recoveries(result)] == [(("c",), ()), ((), ())]
    assert trained(result) == without_owners(train_items(ring.plan.course), changes(result))


def test_run_says_why_an_owner_stays_out() -> None:
    """It was not asked to leave owners out, it ends, or the owner has no turn any more."""
    reasons = {
        "recovery.owners is not 'skip'": returning(recovery=SKIPS),
        "the last turns of this run are granted already": returning(steps=13, back_s=lambda node: 60.0),
        "none of its turns is left": returning(steps=8, back_s=lambda node: 1.0),
    }
    for why, ring in reasons.items():
        told = list[str]()

        def watch(event: rd.Event, ring: RecoveringRing = ring, told: list[str] = told) -> None:
            if isinstance(event, rd.NodeJoined):
                assert ring._rounds.left_out == ("c",)
                told.append(ring._rounds.return_reason("c"))

        ring.before_event = watch
        result = ring.run()
        assert result.finish == rd.Finish("", "") and len(recoveries(result)) == 1, why
        assert told == [why]


def test_run_that_is_being_stopped_takes_nobody_back() -> None:
    """It ends with a checkpoint, as without the owner."""
    ring = returning(drain_at_s=0.0)
    tell = ring._tell_rounds

    def watch(event: rd.Event) -> None:
        if not (isinstance(event, rd.DrainRequested) and not ring.came):
            tell(event)
        if isinstance(event, rd.NodeJoined):
            tell(rd.DrainRequested("stopped by the user"))

    ring._tell_rounds = watch  # type: ignore[method-assign]
    result = ring.run()
    assert result.finish == rd.Finish("InterruptedRunError", "stopped by the user")
    assert len(recoveries(result)) == 1
    assert isinstance(result.logged[-1], rd.LogCheckpoint | rd.EnterPhase | rd.LogTurn)


@pytest.mark.parametrize("awaits_s", [0.0, 1e3])
def test_owner_of_all_turns_that_are_left_is_not_left_out_while_gradients_are_added_up(awaits_s: float) -> None:
    """Its last turn ends with the update of an interval that began before it: the run waits, or ends resumable."""
    plan = make_plan([("x", 0, 4)], ["a", "b"], num_steps=10, local_iterations=2, microbatches=1, method="all")
    plan = changed(
        plan, helpers=(Helper(node="z", start=0, stop=4),), offload=Offload(blocks=(Range(0, 4),), interval=3)
    )
    policy = RecoveryPolicy(leaves_out=True, awaits_s=awaits_s)
    ring = RecoveringRing(plan, place=lambda command: None, recovery=policy, back_s=lambda node: 5.0)

    def when(what: str, node: str) -> str | None:
        ended = [entry.turn.end_step for entry in ring.result.logged if isinstance(entry, rd.LogTurn)]
        return "a" if ended and ended[-1] == 8 and not ring.came else None

    ring.when = when
    result = ring.run()
    assert result.finish is not None and ring.moments and not left_out(result)
    assert [entry.step for entry in recoveries(result)] == ([8] if awaits_s else [])
    assert ("gradients are added up" in result.finish.message) == (not awaits_s)


def without_c(plan: Plan, rng: random.Random) -> RecoveringRing:
    """A run of all parameters that begins without owner c, which is there after some steps."""
    part = Plan(without_owner(plan.course, "c", 0), plan.placements)
    ring = ring_of(part, rng, recovery=taking_back(plan))
    joins_after = rng.randint(0, 20)
    ring.when = lambda what, node: (
        ring.come("c") if what == "update" and len(ring.moments) > joins_after and not ring.came else None
    )
    return ring


def of_all_parameters(rng: random.Random, *, checkpoint_every: int = 6) -> Plan:
    """Owners a, c and d; 20 turns of 2 steps."""
    owners = rng.sample("acd", 3)
    return make_plan(
        [("a", 0, 2), ("b", 2, 4)],
        owners,
        method=Hift(),
        num_steps=40,
        eval_every=rng.choice([0, 4, 6]),
        checkpoint_every=checkpoint_every,
    )


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(5))
def test_run_of_all_parameters_ends_with_the_next_checkpoint_and_another_one_takes_the_owner_back(seed: int) -> None:
    """No step is done after the checkpoint; from there on the owner's turns have the batches that they would have."""
    rng = random.Random(f"all parameters {seed}")
    plan = of_all_parameters(rng)
    ring, granted = without_c(plan, rng), list[int]()
    ring.before_event = lambda event: granted.extend([ring._rounds.last_step] * isinstance(event, rd.NodeJoined))
    first = ring.run()
    assert first.finish == rd.Finish("InterruptedRunError", "node c is back")
    assert ring._rounds.continues_with == ("c",)
    saved = next(entry for entry in reversed(first.logged) if isinstance(entry, rd.LogCheckpoint))
    assert len(trained(first)) == saved.step == max(6, -(-granted[0] // 6) * 6)
    course = with_owner(ring.plan.course, "c", saved.step // 2, 40)
    after = Plan(course, plan.placements)
    second = ring_of(after, rng, recovery=taking_back(plan), start=start_of(after, saved)).run()
    assert second.finish == rd.Finish("", "")
    both = dataclasses.replace(first, logged=[*first.logged, *second.logged])
    assert trained(both) == without_owners(train_items(plan.course), [(0, "c"), (saved.step, "c")])
    assert len(trained(both)) == course.num_steps > ring.plan.course.num_steps


@pytest.mark.parametrize(
    ("checkpoint_every", "why"),
    [(6, ""), (38, "the run takes owners back at a checkpoint, and none is left before its end"), (0, "none is left")],
)
def test_run_of_all_parameters_goes_on_without_an_owner_that_is_lost_again_or_comes_late(
    checkpoint_every: int, why: str
) -> None:
    """It does not end for an owner that is gone when the checkpoint is through, or without a checkpoint."""
    rng = random.Random(checkpoint_every)
    plan = of_all_parameters(rng, checkpoint_every=checkpoint_every)
    ring, told = without_c(plan, rng), list[str]()
    ring._notice_s = lambda: 0.0
    ring.before_event = lambda event: (
        told.append(ring._rounds.return_reason("c")) if isinstance(event, rd.NodeJoined) else None
    )
    ring.after_event = lambda event: ring.lose("c") if isinstance(event, rd.NodeJoined) and not why else None
    result = ring.run()
    assert result.finish == rd.Finish("", "") and ring._rounds.continues_with == ()
    assert len(told) == 1 and why in told[0] and bool(told[0]) == bool(why)
    assert trained(result) == without_owners(train_items(plan.course), [(0, "c")])
