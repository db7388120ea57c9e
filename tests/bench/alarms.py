"""``python -m tests.bench.alarms``: how often a run looks for another placement, on boards whose quota nobody sees.

Runs of four boards and six blocks on the virtual clock, one more block every eight steps. Each board may compute for 45
of every 100 ms, so that it takes 1.0 for work before which it rested and up to 2.2 times as long without rest. Whatever
it does drifts, as this machine does (``tests.bench.machine_drift``), and is sometimes beside a burst of other work.
Counted are runs in which a board counts as changed: where none has, and where one is at half its speed from a turn on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from ringtune.costs.measured.pace import PaceWatch
from ringtune.costs.profile import Profile
from ringtune.costs.times.seconds import CourseCosts
from ringtune.engine.spans import Span
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.turns.turns import StepKind, turn_sequence
from sim.accounts.action_times import ProfileTimes
from sim.accounts.items import Items
from sim.links import MeasuredLinks
from sim.ring import VirtualRing
from tests.support.plans import make_plan
from tests.support.profiles import all_pairs, profile_of

OUT = Path("build/bench")
PERIOD_S, QUOTA_S = 0.1, 0.045
PLAN = make_plan(
    [("b0", 0, 2), ("b1", 2, 4), ("b2", 4, 5), ("b3", 5, 6)],
    ["b0", "b1", "b2", "b3"],
    num_blocks=6,
    num_steps=96,
    local_iterations=4,
    every_steps=8,
    microbatches=2,
)
TURNS = [turn for turn in turn_sequence(PLAN.course) if turn.kind is StepKind.TRAIN]
WORK_S = 0.04
"""Seconds that the longest work of the profile is scaled to, so that a turn takes some seconds, as on real boards."""


class Throttled:
    """Seconds of actions on boards with a quota, drift and bursts; one board may be slower from an item on."""

    def __init__(self, rng: random.Random, times: ProfileTimes, scale: float, *, slow: str, since_seq: int) -> None:
        self._rng, self._times, self._scale = rng, times, scale
        self._slow, self._since_seq = slow, since_seq
        self.ring: VirtualRing | None = None
        self._drift: dict[tuple[str, int], float] = {}
        self._left: dict[str, tuple[int, float]] = {}

    def __call__(self, node: str, action: Action) -> float:
        """Seconds on the clock of an action that begins now."""
        now_s = self.ring.clock.now_s if self.ring is not None else 0.0
        window = (node, int(now_s / 2))
        if window not in self._drift:
            burst = self._rng.uniform(1.2, 2.0) if self._rng.random() < 0.05 else 1.0
            self._drift[window] = burst * self._rng.gauss(1.0, 0.07)
        work_s = self._scale * self._times(node, action) * max(0.5, self._drift[window])
        if node == self._slow and action.seq >= self._since_seq:
            work_s *= 2
        return self._on_the_clock(node, now_s, work_s) - now_s

    def _on_the_clock(self, node: str, now_s: float, work_s: float) -> float:
        """When work of so many processor seconds ends that begins now."""
        while True:
            period, left_s = self._left.get(node, (-1, 0.0))
            current = int(now_s / PERIOD_S + 1e-9)
            left_s = left_s if period == current else QUOTA_S
            until_s = min(left_s, (current + 1) * PERIOD_S - now_s)
            if work_s <= until_s:
                self._left[node] = (current, left_s - work_s)
                return now_s + work_s
            work_s -= max(0.0, until_s)
            now_s = (current + 1) * PERIOD_S
            self._left[node] = (current + 1, QUOTA_S)


def alarms(seed: int, profile: Profile, *, is_slow: bool) -> list[tuple[int, dict[str, float]]]:
    """The turns after which boards count as changed in one run, counted from the one with which one became slower."""
    rng = random.Random(f"{seed} {is_slow}")
    since = rng.randint(12, 17)
    costs = CourseCosts.of(PLAN, profile)
    granted = Items(costs)
    times = ProfileTimes(costs, granted)
    longest_s = max(time.median_s for node in profile.nodes for time in node.work_times)
    slow = rng.choice(PLAN.nodes) if is_slow else ""
    throttled = Throttled(rng, times, WORK_S / longest_s, slow=slow, since_seq=TURNS[since].first_seq)
    ring = VirtualRing(
        PLAN, action_s=throttled, transport=MeasuredLinks(costs, profile, granted=granted), observer=_Granting(granted)
    )
    throttled.ring = ring
    result = ring.run()
    watch, found = PaceWatch(PLAN, profile), list[tuple[int, dict[str, float]]]()
    spans: dict[int, list[tuple[str, Span]]] = {}
    for node, own in result.spans.items():
        for span in own:
            spans.setdefault(span.action.seq, []).append((node, span))
    for number, turn in enumerate(TURNS):
        watch.granted(turn)
        for seq in range(turn.first_seq, turn.end_seq):
            for node, span in spans.get(seq, ()):
                if span.action.op not in (Op.SEND, Op.RECEIVE):
                    watch.add(node, span.action, span.end_s - span.start_s)
        watch.turn_done(turn)
        if changed := watch.changed():
            found.append((number - since + 1, changed))
    return found


class _Granting:
    """An observer that tells the items what is granted."""

    def __init__(self, granted: Items) -> None:
        self.granted = granted.granted

    def ran(self, *seen: object) -> None:
        """Ignore it."""

    sent = arrived = accepted = logged = ran


def main() -> int:
    """Count, print, and write ``build/bench/alarms.json``; 1 if over 2 % are false, or few are found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=100, help="of each kind")
    runs = parser.parse_args().runs
    profile = profile_of(PLAN, links=all_pairs(PLAN.nodes, 12.5e6, 0.001))
    false = [found for seed in range(runs) if (found := alarms(seed, profile, is_slow=False))]
    after = [found[0][0] for seed in range(runs) if (found := alarms(seed, profile, is_slow=True))]
    within = sum(0 < turns <= 7 for turns in after)
    figures = {"runs": runs, "false_alarms": len(false), "found": len(after), "found_within_7_turns": within}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "alarms.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))  # noqa: T201
    return 0 if len(false) <= 0.02 * runs and within >= 0.9 * runs else 1


if __name__ == "__main__":
    sys.exit(main())
