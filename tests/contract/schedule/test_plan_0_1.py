"""Plans that ringtune 0.1 wrote: what they say now, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.extent import Owner
from ringtune.schedule.methods import Everything, Method, PipeAdapter, RingAda, Single
from ringtune.schedule.methods.patience import Patience
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.plan_0_1 import read_any_plan
from tests.support.version_0_1 import SLICES, WRITTEN


def test_plan_of_0_1_reads_with_all_its_fields() -> None:
    """Every field of the flat table has its place in course or placement."""
    plan = read_any_plan(json.loads(json.dumps(WRITTEN)))
    course, placement = plan.course, plan.placement
    assert placement.slices == tuple(Slice(node=node, start=start, stop=stop) for node, start, stop in SLICES)
    assert (placement.credits, placement.private_blocks) == (8, 0)
    assert course.owners == (
        Owner(node="node-0", train_rows=30, eval_rows=10),
        Owner(node="node-1", train_rows=31, eval_rows=11),
    )
    same = set(WRITTEN) - {"method", "phases", "owners", "credits", "private_blocks", "digest", "labels"}
    same -= {"every_steps", "unfreeze", "unfreeze_at", "patience_steps", "min_improvement"}
    assert {name: getattr(course, name) for name in same} == {name: WRITTEN[name] for name in same}
    assert course.labels == ("bad", "good")
    assert course.method == RingAda(every_steps=4)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def changed(**changes: Any) -> dict[str, Any]:
    """The plan with other fields; without a digest, which 0.1 would have computed."""
    return {key: value for key, value in {**WRITTEN, **changes}.items() if key != "digest"}


def test_plan_of_0_1_that_was_edited_is_refused() -> None:
    """Other class names under the same digest would give other answers."""
    with pytest.raises(PlanError, match="digest of this plan"):
        read_any_plan({**WRITTEN, "labels": ["good", "bad"]})


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"unfreeze": "at", "unfreeze_at": [3, 8]}, RingAda(every_steps=0, at=(3, 8))),
        ({"unfreeze": "at"}, RingAda(every_steps=0)),
        (
            {"unfreeze": "auto", "patience_steps": 7, "min_improvement": 0.2},
            RingAda(every_steps=0, auto=Patience(patience_steps=7, min_improvement=0.2)),
        ),
        ({"method": "all"}, Everything()),
        ({"method": "pipeadapter"}, PipeAdapter(hosts_above=(3, 3, 2, 1))),
    ],
)
def test_plan_of_0_1_has_the_method_that_it_meant(changes: dict[str, Any], method: Method) -> None:
    """Settings that lay flat in the plan are the method's own; those of another method are dropped."""
    assert read_any_plan(changed(**changes)).course.method == method


def test_plan_of_0_1_with_private_blocks_freezes_them() -> None:
    """What every owner runs itself never trains."""
    phases = [{"slices": [{"node": "node-1", "start": 1, "stop": 4}]}]
    plan = read_any_plan(changed(private_blocks=1, phases=phases, method="single"))
    assert (plan.course.frozen_blocks, plan.placement.private_blocks) == (1, 1)
    assert plan.course.method == Single()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"colour": "red"}, "colour"),
        ({"phases": []}, "exactly one phase"),
        ({"phases": [{"slices": "all"}]}, "phases[0].slices"),
        ({"method": "rinada"}, "did you mean 'ringada'"),
        ({"every_steps": None}, "every_steps"),
        ({"num_blocks": 5}, "blocks [4, 5) have no host"),
    ],
)
def test_plan_of_0_1_that_is_damaged_is_refused(changes: dict[str, Any], said: str) -> None:
    """One error that names the field."""
    with pytest.raises(PlanError) as caught:
        read_any_plan(changed(**changes))
    assert said in str(caught.value)


@pytest.mark.parametrize("value", [{}, {"schema": 3}, 7, [WRITTEN]])
def test_plan_of_no_version_is_refused(value: object) -> None:
    """What is no plan of 0.1 is held against today's rules."""
    with pytest.raises(PlanError):
        read_any_plan(value)
