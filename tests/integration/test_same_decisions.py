"""Real nodes and virtual ones decide alike: recordings replay, and weights change in the same order."""

from __future__ import annotations

import json

import pytest

from ringtune.schedule.actions import Action, Op, op_of
from sim.ring import VirtualRing
from tests.support.cluster import Cluster
from tests.support.replay import replay

pytestmark = pytest.mark.slow
_CHANGES_WEIGHTS = (Op.UPDATE,)


def weight_changes(lines: list[str]) -> list[Action]:
    """The actions of a recording that change weights, in their order."""
    found = []
    for line in lines[1:]:
        for name, *fields in json.loads(line)["commands"]:
            if name == "RunAction" and op_of(fields[0][0]) in _CHANGES_WEIGHTS:
                found.append(Action(op_of(fields[0][0]), *fields[0][1:]))
    return found


def by_unit(actions: list[Action], head: int) -> dict[bool, list[Action]]:
    """The head's updates and the slice's, each in their order."""
    found: dict[bool, list[Action]] = {}
    for action in actions:
        found.setdefault(action.start == head, []).append(action)
    return found


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("method", ["ringada", "all", "pipeadapter"])
def test_same_decisions_in_a_real_run_and_in_the_simulator(cluster: Cluster, method: str) -> None:
    """The engine gives the recorded commands again; each node's updates have the order of the virtual run.

    In PipeAdapter an owner's head runs ahead of its own slice as far as timing lets it, so head and slice are
    compared each for itself there.
    """
    outcome = cluster.run(
        cluster.job(train__method=method, runtime__record=True, train__microbatches=2, runtime__lease_s=8.0)
    )
    assert outcome.is_done, outcome.message
    assert outcome.plan is not None
    head = outcome.plan.course.head
    virtual = VirtualRing(outcome.plan).run()
    for node in outcome.plan.nodes:
        lines = outcome.files[f"recordings/{node}.jsonl"].decode().splitlines()
        assert replay(lines, outcome.plan, node) == len(lines) - 1 > 0
        real, simulated = (
            weight_changes(lines),
            [action for action in virtual.order[node] if action.op in _CHANGES_WEIGHTS],
        )
        assert len(real) > 0
        if method == "pipeadapter":
            assert by_unit(real, head) == by_unit(simulated, head)
        else:
            assert real == simulated
