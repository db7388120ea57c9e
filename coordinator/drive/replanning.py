"""Watch whether the nodes of a run keep their pace, and look for another placement where they do not.

::

    reports of nodes --> PaceWatch --a node's pace has lastingly changed--> planning on a thread of its own
                                                                                 |
    notes with both numbers <-- Replanned through the run's queue <--------------'
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from coordinator.planner.effort import Effort
from coordinator.planner.recover import placed_without, without
from coordinator.planner.replanning import Replanned, replanned
from ringtune.costs.links.recorded import RecordedLinks
from ringtune.costs.pace import CHANGED, PaceWatch
from ringtune.costs.profile import Profile
from ringtune.errors import RingTuneError
from ringtune.jobs.job import Job
from ringtune.jobs.placement import NEVER
from ringtune.rounds import rounds
from ringtune.schedule.epochs import why_it_stays
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn

_LOG = logging.getLogger(__name__)


FIRST_MOVE_S: Final = 5.0
"""Seconds that a move is taken to cost before the run has made one; from ``tests.bench.sim``, part ``slowed``."""


class Considered(NamedTuple):
    """What was found for changed nodes: another placement, or None, and the times that it was judged with."""

    found: Replanned | None
    profile: Profile


class Replanning:
    """The search for another placement during one run.

    Args:
        plan: of the run.
        part: of it that holds; where another placement is to come, none is looked for.
        job: of the run.
        profile: that it was planned with.
        put: takes what was found, on a thread of its own.
        note: tells the user something.

    Attributes:
        pace: of the nodes on the placement that holds; None where the run stays on it anyway.
    """

    def __init__(
        self,
        plan: Plan,
        part: Plan,
        job: Job,
        profile: Profile,
        *,
        put: Callable[[Considered], None],
        note: Callable[[str], None],
    ) -> None:
        self._course, self._job, self._put, self._note = plan.course, job, put, note
        nodes = set(plan.nodes)
        self._profile = Profile(
            nodes=tuple(node for node in profile.nodes if node.node in nodes),
            links=tuple(link for link in profile.links if {link.source, link.target} <= nodes),
        )
        is_shared = all(link.is_assumed for link in profile.links)
        self._follows = job.placement.follow != NEVER and plan.course.decides
        self._watches = job.placement.replan != NEVER
        is_wanted = (self._watches or self._follows) and not is_shared and len(nodes) > 1
        may_move = (
            is_wanted and part.placement == plan.placements[-1] and not why_it_stays(plan.course, plan.placements)
        )
        self._recompute = part.placement.recompute
        self.pace = self._watch() if may_move else None
        self._is_thinking = False
        self._told: Mapping[str, float] = {}
        self._decided: tuple[int, ...] = ()
        self._next: Profile | None = None
        self._move_s = 0.0

    def turn_done(self, part: Plan, turn: Turn, links: RecordedLinks, *, prepare_s: float) -> None:
        """Look for another placement if nodes have changed their pace, or more blocks train and slices follow that.

        Args:
            part: of the plan that holds now.
            turn: that is done.
            links: with the transfers of the run.
            prepare_s: seconds in which the nodes built their slices at the start.
        """
        has_decided = self._follows and turn.unfreeze_at != self._decided
        if self.pace is None or self._is_thinking:
            return
        changed = self.pace.changed() if self._watches else {}
        if changed and _differ(changed, self._told):
            self._told = changed
            said = ", ".join(f"{node} {ratio:.2f} times as long" for node, ratio in sorted(changed.items()))
            self._note(f"after step {turn.end_step} actions of nodes take, compared with the first turns: {said}")
            self._think_beside(part, self.pace.profile(links), turn, prepare_s)
        elif has_decided:
            self._decided = turn.unfreeze_at
            profile = dataclasses.replace(self._profile, links=links.links(self._profile.links))
            self._think_beside(part, profile, turn, prepare_s)

    def _think_beside(self, part: Plan, profile: Profile, turn: Turn, prepare_s: float) -> None:
        self._is_thinking = True
        work = (part, profile, turn, self._move_s or max(prepare_s, FIRST_MOVE_S))
        threading.Thread(target=self._think, args=work, name="replan", daemon=True).start()

    def take(self, answer: Considered) -> rounds.Replanned | None:
        """Tell the user what was found, and return what the state machine is told; None if the run stays."""
        self._is_thinking, found = False, answer.found
        if found is None:
            self._note("there is no other placement that fits the nodes; the run stays on its own")
            return None
        if not found.is_worth_it:
            self._note(f"the run stays on its placement: {found.line()}")
            return None
        self._note(f"the run is to move: {found.line()}")
        self._next = answer.profile
        return rounds.Replanned(found.placement, found.stays_s, found.moves_s, found.cost_s)

    def place_again(self, command: rounds.PlaceAgain, put: Callable[[rounds.Placed | rounds.NotPlaced], None]) -> None:
        """Look for a placement without lost nodes, on a thread of its own; ``put`` takes it."""
        self._profile = without(self._profile, command.lost)
        profile, epoch = self._profile, command.epoch

        def think() -> None:
            try:
                effort = Effort(seconds=self._job.runtime.plan_s)
                put(rounds.Placed(epoch, placed_without(command.part, self._job, profile, command.lost, effort)))
            except RingTuneError as error:
                put(rounds.NotPlaced(epoch, type(error).__name__, str(error)))
            except Exception as error:
                _LOG.exception("looking for a placement without lost nodes failed by a bug")
                put(rounds.NotPlaced(epoch, RingTuneError.__name__, f"planning failed by a bug: {error}"))

        threading.Thread(target=think, name="recover", daemon=True).start()

    def moved(self, seconds: float, *, has_moved: bool) -> PaceWatch | None:
        """Begin to watch anew after a move, and return the watch; its placement was planned with the newest times."""
        if self.pace is None:
            return None
        if has_moved and self._next is not None:
            self._profile, self._told, self._move_s = self._next, {}, seconds
        self._next = None
        self.pace = self._watch()
        return self.pace

    def _watch(self) -> PaceWatch:
        return PaceWatch(self._course, self._profile, recompute=self._recompute)

    def _think(self, part: Plan, profile: Profile, turn: Turn, move_s: float) -> None:
        found = None
        try:
            effort = Effort(seconds=self._job.runtime.plan_s)
            found = replanned(
                part,
                self._job,
                profile,
                step=turn.end_step,
                move_s=move_s,
                effort=effort,
                unfreeze_at=turn.unfreeze_at,
            )
        except RingTuneError as error:
            _LOG.warning("no other placement was found: %s", error)
        except Exception:
            _LOG.exception("looking for another placement failed by a bug")
        self._put(Considered(found, profile))


def _differ(now: Mapping[str, float], told: Mapping[str, float]) -> bool:
    """Whether other nodes have changed than was told, or one of them by much more or less."""
    return now.keys() != told.keys() or any(
        max(now[node] / told[node], told[node] / now[node]) >= CHANGED for node in now
    )
