"""The page's view of what goes on: events wait in a short box, members are asked for, and both become the state.

The run's thread only puts an event into the box. Everything else happens on the page's own thread, which calls
``tick`` a few times a second.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from coordinator.web.event_lines import EventLine
from coordinator.web.frames import Framer
from coordinator.web.page_state import PageState
from ringtune.errors import RingTuneError
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_KINDS: Final = frozenset(
    (
        *("run_id", "state", "job_toml", "profile_json", "plan_json", "metrics_json", "step_json", "report_json"),
        *("failure", "done", "checkpoint_json", "note", "resumed_json", "activity_json"),
    )
)
MOST_WAITING: Final = 50_000
"""Events that may wait for the page's thread, which takes them four times a second."""
_LEAST_BETWEEN_S: Final = 1.0


class MemberNow(NamedTuple):
    """A member of a coordinator as it is now.

    Attributes:
        state: idle, running, drained, draining or lost.
        rss_bytes: resident memory at its last sign of life.
        memory_bytes: what it lets a run use.
        device: cpu or cuda.
    """

    state: str
    rss_bytes: int
    memory_bytes: int
    device: str


Feed = Callable[[], Iterable[control_pb2.RunEvent]]


class Watching:
    """What the page knows.

    Args:
        members: lists the members by name; must not wait long.
        feed: returns further events, where they are read and not heard.
        clock: unix seconds.
        most_waiting: events that may wait for the next tick; of more the oldest are dropped.

    Attributes:
        state: of the newest run.
        framer: makes frames of the state and the members.
        changes: counts the ticks that changed something.
    """

    def __init__(
        self,
        *,
        members: Callable[[], Mapping[str, MemberNow]] = dict,
        feed: Feed = tuple,
        clock: Callable[[], float] = time.time,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.state = PageState()
        self.framer = Framer(self.state, lambda: (self._members_version, self._shown_members))
        self.changes = 0
        self.members: Mapping[str, MemberNow] = {}
        self._ask_members, self._feed, self._clock = members, feed, clock
        self._box: deque[tuple[float | None, control_pb2.RunEvent]] = deque(maxlen=most_waiting)
        self._members_version = 1
        self._shown_members: Mapping[str, Sequence[Any]] = {}
        self._asked_at_s = -_LEAST_BETWEEN_S

    def hear(self, event: control_pb2.RunEvent) -> None:
        """Take an event from any thread, without waiting; files and what else the page does not show are left out."""
        if event.WhichOneof("event") in _KINDS:
            self._box.append((self._clock(), event))

    def tick(self, now_s: float) -> bool:
        """Bring the state up to date; whether anything changed.

        Args:
            now_s: monotonic seconds.
        """
        changed = False
        while self._box:
            at_unix_s, event = self._box.popleft()
            self._take(event, at_unix_s)
            changed = True
        if now_s - self._asked_at_s >= _LEAST_BETWEEN_S:
            self._asked_at_s = now_s
            for event in self._feed():
                self._take(event, None)
                changed = True
            changed |= self._note_members(self._ask_members())
        self.changes += changed
        return changed

    def _take(self, event: control_pb2.RunEvent, at_unix_s: float | None) -> None:
        try:
            self.state.take(event, at_unix_s)
        except (RingTuneError, KeyError, TypeError, ValueError):
            _LOG.warning("the page can't show an event of the run", exc_info=True)

    def _note_members(self, members: Mapping[str, MemberNow]) -> bool:
        if members == self.members:
            return False
        at_unix_s = self._clock()
        for line in member_lines(self.members, members):
            self.state.tell(line._replace(at_unix_s=at_unix_s))
        self.members = dict(members)  # the one that is asked may go on changing its own
        self._shown_members = {node: list(one) for node, one in members.items()}
        self._members_version += 1
        return True


def member_lines(before: Mapping[str, MemberNow], now: Mapping[str, MemberNow]) -> list[EventLine]:
    """Say who came, was lost, came back and left."""
    found = []
    for node in sorted(before.keys() | now.keys()):
        was, has = before.get(node), now.get(node)
        if has is None:
            found.append(EventLine("left", f"node {node} left"))
            continue
        is_lost, was_lost = has.state == "lost", was is not None and was.state == "lost"
        if was is None:
            found.append(EventLine("joined", f"node {node} joined"))
        if is_lost and not was_lost:  # one that is seen for the first time may be, too
            found.append(EventLine("lost", f"node {node} is lost: it is silent"))
        elif was_lost and not is_lost:
            found.append(EventLine("joined", f"node {node} is back"))
    return found
