"""Refuse a job that no plan fits before anything is measured: sizes need no measurement.

Nodes are asked twice. The first answers have sizes, rows and budgets, and what a forward keeps is computed from the
model's sizes; only if a plan fits them are the nodes asked to time themselves, which builds a block and runs it. The
run is planned here with all that it may choose from, so nothing is refused that it could carry out.

The nodes' answers, this look and their measurements share one wait (``runtime.wait_s``). The look takes no more than
half of what the first answers leave of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from coordinator.drive.plan_making.planning import plan_run, run_profile
from coordinator.drive.requests import RunRequest
from coordinator.planner.effort import Effort
from coordinator.planner.planned import Planned
from ringtune.costs.profile import NodeFacts
from ringtune.errors import DeadlineError, RingTuneError, internal_error
from ringtune.schedule.frozen_weights import FrozenWeights

_LOG = logging.getLogger(__name__)
_SHARE_OF_WAIT = 0.5


class Looked(NamedTuple):
    """The first answers of all nodes were looked at.

    Attributes:
        error: why no plan is possible, None if one is.
        frozen: how the plan that is possible holds frozen weights; the nodes time themselves so.
    """

    error: RingTuneError | None
    frozen: FrozenWeights | None = None


class FirstLook:
    """The answers of all nodes before they measure; made when the nodes are asked.

    Args:
        request: what is asked for.
        nodes: whose answers are awaited.
        on_done: takes the verdict; called from a thread of its own.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        request: RunRequest,
        nodes: tuple[str, ...],
        on_done: Callable[[Looked], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._now_s, self._end_s = now_s, now_s() + request.job.runtime.wait_s
        self._awaited = set(nodes)
        self._facts: dict[str, NodeFacts] = {}
        self._on_done = on_done
        self._cancelled = threading.Event()

    @staticmethod
    def is_wanted(request: RunRequest) -> bool:
        """Whether nodes will measure for a plan that is not made yet; the plan of a run that goes on has run before."""
        return request.needs_times and request.resume is None

    def take(self, facts: NodeFacts) -> None:
        """Take the answer of one node; with the last one begin to look whether a plan fits."""
        self._facts[facts.node] = facts
        self._awaited.discard(facts.node)
        if not self._awaited:
            threading.Thread(target=self._look, name="first-look", daemon=True).start()

    def cancel(self) -> None:
        """Let the thread end soon: nobody waits for the verdict any more."""
        self._cancelled.set()

    def _look(self) -> None:
        try:
            planned = self._plan()
        except DeadlineError as error:  # the planner that knows all will say what is wrong
            _LOG.info("the first look took too long: %s", error)
            self._on_done(Looked(None))
        except RingTuneError as error:
            self._on_done(Looked(error))
        except Exception as error:
            _LOG.exception("the first look failed by a bug")
            self._on_done(Looked(internal_error(error)))
        else:
            self._on_done(Looked(None, planned.plan.course.frozen))

    def _plan(self) -> Planned:
        left_s = max(0.0, self._end_s - self._now_s())
        seconds = min(self._request.job.runtime.plan_s, _SHARE_OF_WAIT * left_s)
        effort = Effort(seconds=seconds, is_cancelled=self._cancelled.is_set, judged_actions=0)
        return plan_run(self._request, run_profile(self._request, self._facts), None, effort)
