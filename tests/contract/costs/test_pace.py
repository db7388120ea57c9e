"""A node's pace counts as changed when its actions take lastingly longer, or shorter, than in the first turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.calibration import LASTING_TURNS, USUAL_TURNS, PaceMonitor, kinds_of_work
from ringtune.costs.links import RecordedLinks
from ringtune.costs.profile import NodeFacts, Work
from ringtune.schedule.actions import Op, Scope
from ringtune.schedule.methods import RingAda
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table
from ringtune.schedule.turns import StepKind, turn_sequence
from ringtune.schedule.units import Range
from tests.support.plans import changed, make_plan
from tests.support.profiles import all_pairs, profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=20, local_iterations=2, method="all", eval_every=4)
TURNS = list(turn_sequence(PLAN.course))


def watched(
    paces: dict[str, list[float]],
    *,
    turns: int,
    plan: Plan = PLAN,
    lowest: Callable[[int], int] = lambda step: 0,
    wrong: Mapping[Op, float] = MappingProxyType({}),
) -> PaceMonitor:
    """A watch that has seen so many train turns in which a node's actions took so many times the profile's seconds."""
    profile = profile_of(plan)
    watch = PaceMonitor(plan, profile)
    costs, done = CourseCosts.of(plan, profile), 0
    for turn in turn_sequence(plan.course):
        if done == turns:
            break
        watch.granted(turn)
        for node, actions in build_table(plan, [turn]).items():
            pace = paces.get(node, [])[done : done + 1] or [1.0]
            for action in actions:
                if action.op.scope is Scope.MESSAGE:
                    continue
                size = costs.size("a", 2, turn.kind) if action.micro >= 0 else 0.0
                took_s = costs.action_s(node, action, size=size, lowest=lowest(turn.first_step), kind=turn.kind)
                watch.add(node, action, pace[0] * wrong.get(action.op, 1.0) * took_s)
        watch.turn_done(turn)
        done += turn.kind is StepKind.TRAIN
    return watch


def test_a_node_that_lasts_at_half_its_speed_is_told_with_its_ratio() -> None:
    """Two usual turns after the first, then three slow ones; evaluations between do not count."""
    slow = [3.0, 1.1, 1.1, 2.2, 2.2, 2.2]
    assert watched({"b": slow}, turns=5).changed() == {}
    assert watched({"b": slow}, turns=6).changed() == pytest.approx({"b": 2.0})
    assert 1 + USUAL_TURNS + LASTING_TURNS == 6


def seconds(facts: Mapping[str, NodeFacts], node: str, work: Work = Work.BACKWARD) -> float:
    """What a work takes at a node by the first of its points."""
    return next(time.median_s for time in facts[node].work_times if time.work == work)


def test_slow_node_is_slow_in_works_too_that_it_had_none_of() -> None:
    """It has frozen blocks alone; what trains could go to it, and would take it twice as long as was measured."""
    plan = changed(PLAN, method=RingAda(every_steps=20))
    watch = watched({"a": [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]}, turns=6, plan=plan, lowest=lambda step: 3)
    before, now = profile_of(plan).by_name, watch.profile(RecordedLinks()).by_name
    for work in (Work.FORWARD, Work.GRAPH, Work.BACKWARD, Work.UPDATE):
        assert seconds(now, "a", work) == pytest.approx(2 * seconds(before, "a", work)), work
        assert seconds(now, "b", work) == pytest.approx(seconds(before, "b", work)), work
    assert now["a"].block_backward_s == pytest.approx(2 * before["a"].block_backward_s)


def test_more_that_trains_is_no_change_of_pace() -> None:
    """The profile has forwards of frozen blocks wrong by half; what trains instead takes what it says.

    A change is seen all the same, once the node has done the same for two turns before it and three turns since.
    """
    plan = changed(PLAN, method=RingAda(every_steps=4), num_steps=24)

    def lowest(step: int) -> int:
        return 3 - min(3, step // 4)

    wrong = {Op.FORWARD_FREE: 1.5}
    for turns in range(6, 11):
        assert watched({}, turns=turns, plan=plan, lowest=lowest, wrong=wrong).changed() == {}, turns
    slow = [1.0] * 8 + [2.0] * 3
    found = watched({"a": slow}, turns=11, plan=plan, lowest=lowest, wrong=wrong).changed()
    assert found == pytest.approx({"a": 2.0}, rel=0.2)


def test_what_a_node_has_to_do_is_what_trains_of_its_blocks_and_below() -> None:
    """Until its own blocks begin to train, a node does the same at every depth; the initiator does more."""
    plan = changed(PLAN, method=RingAda(every_steps=4), num_steps=20)
    turns = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.TRAIN]
    kinds = [kinds_of_work(plan, turn) for turn in turns]
    bottoms = [(0, False)] * 4 + [(1, False)] * 2 + [(2, False)] * 4
    assert [own["a"] for _, own in kinds] == [(True, bottom, bottom) for bottom in bottoms]
    tops = [(1, False)] * 2 + [(2, False)] * 2 + [(2, True)] * 6
    assert [own["b"] for _, own in kinds] == [(False, top, top) for top in tops]
    assert len({depth for depth, _ in kinds}) == 4


def test_blocks_that_run_again_are_no_slower_backwards() -> None:
    """The backward of such a block has a forward in it, which is not a time of its backward."""
    plan = changed(PLAN, recompute=(Range(0, 4),))
    watch = watched({}, turns=6, plan=plan)
    before, now = profile_of(plan).by_name, watch.profile(RecordedLinks()).by_name
    for node in "ab":
        assert seconds(now, node) == pytest.approx(seconds(before, node))


def test_profile_has_the_newest_rate_of_a_link_that_has_changed() -> None:
    """And what the whole run showed of the others."""
    profile = profile_of(PLAN, links=all_pairs(PLAN.nodes, 1e6, 1e-3))
    watch, whole = PaceMonitor(PLAN, profile), RecordedLinks()
    turns = [turn for turn in TURNS if turn.kind is StepKind.TRAIN][:9]
    for number, turn in enumerate(turns):
        watch.granted(turn)
        for message in range(8):
            for source, target, rate in (("a", "b", 1e6 if number < 6 else 2e5), ("b", "a", 5e5)):
                for links in (watch.links, whole):
                    links.add(source, target, 20_000, 1e-3 + 20_000 / rate, at_s=100.0 * number + message)
        watch.turn_done(turn)
    assert watch.changed() == {}
    assert watch.links.changed() == pytest.approx({("a", "b"): 5.0})
    rates = {(link.source, link.target): link.rate_bytes_per_s for link in watch.profile(whole).links}
    assert rates == pytest.approx({("a", "b"): 2e5, ("b", "a"): 5e5})
