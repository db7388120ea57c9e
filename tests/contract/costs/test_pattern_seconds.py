"""What a block takes with a part of its subnets active, by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ringtune.costs.action_costs import NodeCosts
from ringtune.costs.profile import NodeFacts, Work
from ringtune.schedule.actions import Op
from ringtune.schedule.turns import StepKind
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, node, part

PLAN = make_plan([("a", 0, 4)], ["a"])
PARTS = {Work.FORWARD: 1.2, Work.GRAPH: 2.4, Work.GRAPH_LOWEST: 1.9, Work.BACKWARD: 2.8, Work.BACKWARD_LOWEST: 3.5}
"""With half of the subnets. So all subnets take 1.6, 3.2, 2.2, 4.4 and 0.0 s of ``TIMES``."""


def costs(*, parts: bool = True, adapter: str = "seq_bn", scores_adapters: bool = False) -> NodeCosts:
    """A node whose blocks take ``TIMES``, and ``PARTS`` with half of their subnets."""
    facts = node(PLAN, "a")
    more = tuple(part(work, seconds, share=0.5) for work, seconds in PARTS.items()) if parts else ()
    shape = dataclasses.replace(facts.shape, adapter=adapter)
    facts = dataclasses.replace(facts, work_times=facts.work_times + more, shape=shape)
    return NodeCosts(facts, PLAN.course.head, scores_adapters=scores_adapters)


def seconds(op: Op, patterns: tuple[str, ...], *, parts: bool = True, start: int = 1, lowest: int = 0) -> float:
    """Seconds of an action over blocks with these patterns."""
    stop = start + len(patterns)
    return costs(parts=parts).seconds(op, start, stop, size=8.0, lowest=lowest, kind=StepKind.TRAIN, patterns=patterns)


@cases(
    ("op", "pattern", "expected"),
    [
        (Op.FORWARD_FREE, "2222", 2.0),
        (Op.FORWARD_FREE, "2233", 1.2),
        (Op.FORWARD_FREE, "1233", 1.2),  # below the lowest block with a graph a full subnet is forward-only
        (Op.FORWARD_FREE, "2333", 0.8),
        (Op.FORWARD, "1111", 4.0),
        (Op.FORWARD, "1133", 2.4),
        (Op.FORWARD, "1333", 1.6),
        (Op.FORWARD, "1122", 2.4 + 0.8),
        (Op.FORWARD, "1233", 1.6 + 0.4),
        (Op.BACKWARD, "1111", 5.0),
        (Op.BACKWARD, "1122", 2.8),
        (Op.BACKWARD, "1133", 2.8),
        (Op.BACKWARD, "1223", 1.7),
        (Op.SKIP, "3333", 0.0),
    ],
)
def test_a_block_takes_the_part_of_its_active_subnets(op: Op, pattern: str, expected: float) -> None:
    """Time is linear from the measured half to the whole; forward-only subnets beside full ones add a forward."""
    assert seconds(op, (pattern,)) == pytest.approx(expected, rel=1e-12)


def test_patterns_of_several_blocks_add_up() -> None:
    """The first of three is the lowest with a graph; an empty pattern is all full."""
    assert seconds(Op.FORWARD, ("1133", "", "1122"), start=0) == pytest.approx(1.9 + 4.0 + 3.2)
    assert seconds(Op.BACKWARD, ("1133", "1111"), start=0) == pytest.approx(3.5 + 5.0)


@cases(("pattern", "share"), [("1133", 0.5), ("1333", 0.25), ("1122", 0.5), ("1111", 1.0)])
def test_a_profile_without_parts_scales_in_proportion(pattern: str, share: float) -> None:
    """An old profile has whole blocks only."""
    assert seconds(Op.BACKWARD, (pattern,), parts=False) == pytest.approx(share * TIMES[Work.BACKWARD])


def test_scores_take_the_gradients_of_frozen_weights_too() -> None:
    """A weight's gradient takes as many multiplications as its forward; what trains has it in its backward."""

    def scored(adapter: str, op: Op, **more: bool) -> float:
        return costs(adapter=adapter, **more).seconds(op, 0, 2, size=8.0, lowest=0, kind=StepKind.SCORE)

    assert scored("seq_bn", Op.BACKWARD) == pytest.approx(2 * (5.0 + 2.0))
    for trained in (scored("full", Op.BACKWARD), scored("seq_bn", Op.BACKWARD, scores_adapters=True)):
        assert trained == pytest.approx(3.5 + 5.0)
    assert scored("seq_bn", Op.FORWARD) == pytest.approx(3.0 + 4.0)


def test_a_profile_keeps_parts_and_reads_points_without_a_share() -> None:
    """What an earlier version wrote has no share: the whole block."""
    facts = node(PLAN, "a")
    facts = dataclasses.replace(facts, work_times=(*facts.work_times, part(Work.GRAPH, 1.0, share=0.5)))
    assert NodeFacts.from_message(json.loads(json.dumps(facts.to_message()))) == facts
    old = json.loads(json.dumps(facts.to_message()))
    old["work_times"] = [
        {key: value for key, value in entry.items() if key != "share"} for entry in old["work_times"][:-1]
    ]
    assert NodeFacts.from_message(old).work_times == facts.work_times[:-1]
