"""Hold one run at one node, from the first step of its preparation to its release.

Whatever a run holds (threads, links, tensors) is reachable from here only, so dropping it drops all. It is
also where links deliver: what comes before the node is prepared or after it was released goes nowhere.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge.machine.memory_budget import give_memory_back, peak_rss_bytes
from edge.run.loop import AgentRun
from edge.run.partners import Keeper
from edge.run.reporter import Arrived, Reporter
from edge.run.shared_clock import SharedClock
from edge.shards.saver import Saver
from ringtune.engine.spans import Span
from ringtune.errors import DivergedError, FrameError, InterruptedRunError, RingTuneError, error_from_name
from ringtune.files.pieces import Pieces
from ringtune.models.result_files import NO_RESULT, Result
from ringtune.rpc.codecs.grants import GrantReader
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint
from ringtune.texts import Repeats, times

if TYPE_CHECKING:
    from edge.wire.frames import Ack  # loads torch

_LOG = logging.getLogger(__name__)
# When a run fails or is stopped, all nodes are released one after another; a peer that was first closes its
# links. Only a link that is still missed after so long is a failure.
_LOST_GRACE_S = 0.25
_CLOSE_S = 2.0
# An action on a slow board takes longer; what is left of the run then ends behind the caller's back.
_END_S = 1.0


@dataclass(slots=True, eq=False)
class ActiveRun:
    """Everything that one run holds at this node: executor, links, loop, reporter, saver."""

    run_id: str
    node: str
    placement_number: int
    plan: Plan
    start: StartPoint | None = None
    result: Result = NO_RESULT
    is_collected: bool = False
    is_resting: bool = False
    is_finished: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    executor: Any = None
    saver: Saver | None = None
    inactive_state: Any = None
    links: dict[str, Any] = field(default_factory=dict)
    run: AgentRun | None = None
    reporter: Reporter | None = None
    clock: SharedClock = field(default_factory=SharedClock)
    keeper: Keeper | None = None
    grants: GrantReader = field(init=False)
    _num_loads: int = 0
    _received_s: dict[str, float] = field(default_factory=dict)
    _refused: Repeats = field(default_factory=Repeats)

    def __post_init__(self) -> None:
        """Make the reader of the run's grants."""
        self.grants = GrantReader(self.plan.course)

    def check_wanted(self) -> None:
        """Refuse to go on with the preparation of a run that was released.

        Raises:
            InterruptedRunError: the run was released.
        """
        if self.cancelled.is_set():
            raise InterruptedRunError(f"run {self.run_id} was released while node {self.node} prepared it")

    def next_load(self) -> int:
        """Count the calls that bring a saved result; only the newest one counts."""
        self._num_loads += 1
        return self._num_loads

    def check_load(self, number: int) -> None:
        """Refuse a saved result that is late: it came again meanwhile, and turns may have begun.

        Raises:
            InterruptedRunError: it came again.
        """
        if number != self._num_loads:
            raise InterruptedRunError(f"node {self.node} was given the saved result once more")

    def figures(self) -> dict[str, Any]:
        """Return the figures of this node so far, as JSON has them; the run is under way."""
        counted = self.run.totals.as_json() if self.run is not None else {}
        return {
            "node": self.node,
            **counted,
            "hosted_bytes": int(self.executor.hosted_bytes),
            **self.executor.run_figures,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    # ---- what links deliver, from their threads ---------------------------------------------------

    def on_tensor(self, key: TensorKey, source: str, tensor: Any, mask: Any) -> None:
        """Pass a checked tensor on to the loop, if the run is wanted."""
        run = self._wanted()
        if run is not None:
            run.on_tensor(key, source, tensor, mask)

    def on_blob(self, kind: str, seq: int, source: str, data: Pieces) -> None:
        """Pass the head for turn ``seq`` on to the loop, if the run is wanted; drop a probe."""
        run = self._wanted()
        if run is not None and kind == Payload.HEAD:
            run.on_head(seq, source, data)

    def on_parcel(self, key: TensorKey, source: str, data: Pieces) -> None:
        """Pass a parcel on to the loop, if the run is wanted."""
        run = self._wanted()
        if run is not None:
            run.on_parcel(key, source, data)

    def on_received(self, source: str, num_bytes: int, sent_unix_s: float) -> None:
        """Report how long a message took: from its sending, or from the message before it on the same link."""
        now_s, before_s = self.clock.now_unix_s(), self._received_s.get(source, 0.0)
        self._received_s[source] = now_s
        if self.reporter is not None and self._wanted() is not None:
            self.reporter.put(Arrived(source, num_bytes, max(0.0, now_s - max(sent_unix_s, before_s)), now_s))

    def on_refused(self, source: str, error: RingTuneError) -> None:
        """Log that a frame of ``source`` was refused, few lines for many; the ring goes on."""
        count = self._refused.told((source, type(error)))
        if count:
            _LOG.warning("node %s refused a frame from %s: %s%s", self.node, source, error, times(count))

    def on_ack(self, target: str, ack: Ack) -> None:
        """Pass credits of ``target`` on to the loop; fail the run if ``target`` refused a frame of this node."""
        run = self._wanted()
        if run is None:
            return
        if ack.refusal:  # it will never come, so the run can't end
            name, by_whom = ack.error or FrameError.__name__, f"node {target} refused a frame of node {self.node}: "
            is_damaged = name != DivergedError.__name__
            run.fail(error_from_name(name, f"{by_whom if is_damaged else ''}{ack.refusal}"))
        elif ack.credits:
            run.on_credits(target, ack.boundary, ack.credits)

    def on_sent(self, span: Span) -> None:
        """Report a message that went out, for the trace."""
        reporter = self.reporter
        if reporter is not None:
            reporter.put(span)

    def on_link_lost(self, peer: str, reason: str) -> None:
        """Fail the run ``_LOST_GRACE_S`` after a link with ``peer``, in or out, broke, unless it is over by then.

        While the run moves, other nodes may have moved already.
        """
        if self.run is None or self.is_collected or self.is_resting or self.cancelled.is_set():
            return
        _LOG.info("node %s: link with %s broke: %s", self.node, peer, reason)
        timer = threading.Timer(_LOST_GRACE_S, self._report_lost, (peer, reason))
        timer.daemon = True
        timer.start()

    def _report_lost(self, peer: str, reason: str) -> None:
        run = self._wanted()
        if run is not None and not self.is_collected and not self.is_resting:
            run.on_peer_lost(peer, reason)

    def _wanted(self) -> AgentRun | None:
        return None if self.cancelled.is_set() else self.run

    # ---- the end ----------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Stop the loop and close the links, within seconds; ``cancelled`` has to be set before."""
        if self.run is not None:
            self.run.stop(reason)
        closers = [threading.Thread(target=link.close, daemon=True) for link in list(self.links.values())]
        for closer in closers:
            closer.start()
        if self.keeper is not None:
            self.keeper.close()
        if self.reporter is not None:
            self.reporter.close()
        for closer in closers:
            closer.join(_CLOSE_S)
        if self.run is not None:
            self.run.wait(_END_S)

    def drop(self) -> None:
        """Drop everything that the run holds; on the compute thread, after the loop has ended."""
        if self.inactive_state is not None:
            self.inactive_state.close()
        if self.saver is not None:
            self.saver.close(is_finished=self.is_finished)
        self.executor = self.run = self.reporter = self.saver = self.inactive_state = self.keeper = None
        self.links.clear()
        give_memory_back()
