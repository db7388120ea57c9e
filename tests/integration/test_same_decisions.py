"""Real nodes and virtual ones decide alike: recordings replay, and weights change in the same order."""

from __future__ import annotations

import json

import pytest

from edge.run.recorder import replay
from ringtune.schedule.lowering import Action, Op
from sim.ring import VirtualRing
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow
_CHANGES_WEIGHTS = (Op.UPDATE,)


def weight_changes(lines: list[str]) -> list[Action]:
    """The actions of a recording that change weights, in their order."""
    found = []
    for line in lines[1:]:
        for name, *fields in json.loads(line)["commands"]:
            if name == "RunAction" and fields[0][0] in _CHANGES_WEIGHTS:
                found.append(Action(Op(fields[0][0]), *fields[0][1:]))
    return found


def by_unit(actions: list[Action]) -> dict[int, list[Action]]:
    """The head's updates and the slice's, each in their order."""
    found: dict[int, list[Action]] = {}
    for action in actions:
        found.setdefault(int(action.start == action.stop), []).append(action)
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
            assert by_unit(real) == by_unit(simulated)
        else:
            assert real == simulated
