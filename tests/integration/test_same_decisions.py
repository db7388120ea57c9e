"""Real nodes and virtual ones decide alike: recordings replay, and weights change in the same order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from ringtune.schedule.actions import Action, Op, Payload, op_of
from sim.ring import VirtualRing
from tests.support.cluster import Cluster
from tests.support.replay import replay

pytestmark = pytest.mark.slow
_CHANGES_WEIGHTS = (Op.UPDATE,)


def commands_of(lines: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Each command of a recording with its fields, in order."""
    for line in lines[1:]:
        for name, *fields in json.loads(line)["commands"]:
            yield name, fields


def decisions_of(lines: list[str]) -> list[Action]:
    """What a recording's engine decided, in its order: actions, what it sent to whom, what it took in from whom."""
    found = []
    for name, fields in commands_of(lines):
        match name, fields:
            case "RunAction", [[letter, *rest]]:
                found.append(Action(op_of(letter), *rest))
            case "SendTensor" | "Accept", [[payload, seq, micro, boundary], peer]:
                op = Op.SEND if name == "SendTensor" else Op.RECEIVE
                found.append(Action(op, seq, micro, boundary, 0, peer, payload))
            case "SendHead" | "AcceptHead", [turn, peer]:
                op = Op.SEND if name == "SendHead" else Op.RECEIVE
                found.append(Action(op, 0, -1, turn, 0, peer, Payload.HEAD))
    return found


def weight_changes(decisions: list[Action]) -> list[Action]:
    """The actions that change weights, in their order."""
    return [action for action in decisions if action.op in _CHANGES_WEIGHTS]


def versions_seen(decisions: list[Action]) -> Counter[tuple[Action, int, int]]:
    """Each action with each unit that it computes and how often that unit was updated before."""
    updates: Counter[int] = Counter()
    found: Counter[tuple[Action, int, int]] = Counter()
    for action in decisions:
        units = range(action.start, action.stop)
        if action.op in _CHANGES_WEIGHTS:
            updates.update(units)
        elif action.op not in (Op.SEND, Op.RECEIVE):
            found.update((action, unit, updates[unit]) for unit in units)
    return found


def by_unit(actions: list[Action], head: int) -> dict[bool, list[Action]]:
    """The head's updates and the slice's, each in their order."""
    found: dict[bool, list[Action]] = {}
    for action in actions:
        found.setdefault(action.start == head, []).append(action)
    return found


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("method", ["ringada", "all", "pipeadapter"])
@pytest.mark.sampled(1)
def test_same_decisions_in_a_real_run_and_in_the_simulator(cluster: Cluster, method: str) -> None:
    """The engine gives the recorded commands again, and decides all that the virtual one does.

    The same actions and messages, each computed with the same versions of its units, and updates in the same order;
    the order of what does not depend on one another is timing's. In PipeAdapter an owner's head runs ahead of its own
    slice as far as timing lets it, so the updates of head and slice are compared each for itself there.
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
        real, simulated = decisions_of(lines), virtual.order[node]
        assert Counter(real) == Counter(simulated)
        assert versions_seen(real) == versions_seen(simulated)
        assert len(weight_changes(real)) > 0
        if method == "pipeadapter":
            assert by_unit(weight_changes(real), head) == by_unit(weight_changes(simulated), head)
        else:
            assert weight_changes(real) == weight_changes(simulated)
