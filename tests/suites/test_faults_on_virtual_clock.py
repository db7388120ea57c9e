"""Engines and rounds under any faults, as hypothesis draws them: what is trained and logged never changes.

``RINGTUNE_FAULT_EXAMPLES=5000`` tries so many runs instead of forty, as ``make faults`` does.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.schedule.turns import Turn
from sim.ring import VirtualNode
from tests.suites.test_recovery_on_virtual_clock import placing, plan_of, story
from tests.support.recovering_ring import RecoveringRing

EXAMPLES = int(os.environ.get("RINGTUNE_FAULT_EXAMPLES", "40"))
KINDS = ("lose", "pause", "late message", "late call", "repeated grant")
LEASE_S = 30.0
WAIT_S = 4 * LEASE_S


class Fault(NamedTuple):
    """One fault.

    Attributes:
        at: how many things have begun in the run by then: actions, copies, hand-overs, moves.
        kind: one of ``KINDS``.
        who: which node, by its number in the plan, or of those that live.
        much: seconds that a pause or a delay takes, or that a lost node is away.
        returns: whether a lost node comes back.
    """

    at: int
    kind: str
    who: int
    much: float
    returns: bool


FAULTS = st.lists(
    st.builds(
        Fault,
        at=st.integers(0, 400),
        kind=st.sampled_from(KINDS),
        who=st.integers(0, 9),
        much=st.sampled_from([0.5, 5.0, LEASE_S, 10 * LEASE_S]),
        returns=st.booleans(),
    ),
    max_size=6,
)


class FaultyRing(RecoveringRing):
    """A ``RecoveringRing`` to which faults happen.

    Args:
        plan: of the run.
        faults: in any order.
        rng: of everything else that takes time.
    """

    def __init__(self, plan: Any, faults: Sequence[Fault], rng: random.Random) -> None:
        self._due = sorted(faults, key=lambda fault: fault.at)
        self._waits = {kind: dict[str, float]() for kind in KINDS}
        self._away_s: dict[str, float | None] = {}
        super().__init__(
            plan,
            action_s=lambda node, action: rng.random() + self._taken("pause", node),
            message_s=lambda source, target, payload: rng.random() + self._taken("late message", source),
            control_s=lambda node: rng.random() + self._taken("late call", node),
            move_s=lambda move: 5 * rng.random() + self._taken("pause", move.node),
            notice_s=lambda: 3 * rng.random(),
            copy_s=lambda: rng.choice([0.0, 0.5, 20.0]) * rng.random(),
            place=placing(rng, plan.nodes),
            back_s=lambda node: self._away_s[node],
            recovery=RecoveryPolicy(awaits_s=WAIT_S),
        )
        self.when = self._happens

    def _happens(self, what: str, node: str) -> str | None:
        while self._due and len(self.moments) > self._due[0].at:
            fault = self._due.pop(0)
            nodes = self.plan.nodes
            if fault.kind == "lose":
                living = [name for name in nodes if name not in self.lost]
                if living:
                    lost = living[fault.who % len(living)]
                    self._away_s[lost] = fault.much if fault.returns else None
                    return lost
            else:
                self._waits[fault.kind][nodes[fault.who % len(nodes)]] = fault.much
        return None

    def _taken(self, kind: str, node: str) -> float:
        return self._waits[kind].pop(node, 0.0)

    def _grant(self, node: VirtualNode, turns: tuple[Turn, ...]) -> None:
        super()._grant(node, turns)
        again_s = self._taken("repeated grant", node.name)
        if again_s:  # the node's answer was lost, so it is told once more
            self.clock.at(self.clock.now_s + again_s, super()._grant, node, turns)


@pytest.mark.promise("5 timing changes nothing")
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 10_000), faults=FAULTS)
def test_faults_change_nothing_that_is_trained_or_logged(seed: int, faults: list[Fault]) -> None:
    """Losses, returns, pauses longer than any lease, late messages and calls, grants that come again, in any order."""
    plan = plan_of(random.Random(seed))
    wanted = FaultyRing(plan, [], random.Random(seed)).run()
    assert wanted.finish == rd.Finish("", "")
    ring = FaultyRing(plan, faults, random.Random(seed))
    found = ring.run()
    assert found.finish is not None, "the run stands still"
    assert ring.surprises == []
    if found.finish.error:  # only losses end a run, and only where nothing is left to go on from, or nobody comes back
        assert ring.lost or ring.came, found.finish
        ends = ("no living node", "nothing fits", f"waited {WAIT_S:g} s (recovery.wait_s) for node")
        assert any(text in found.finish.message for text in ends), found.finish
        return
    assert story(found) == story(wanted)
