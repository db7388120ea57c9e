"""One run at one node: what it holds, what its links deliver, their opening, and its release.

``ActiveRun`` alone refers to all threads, links and tensors of a run, so dropping it frees them. Tensors that links
deliver before the preparation or after the release are dropped. Tests run an agent without torch by another
``TorchBackend``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from edge.checkpoint.shard_saver import Saver
from edge.checkpoint.snapshot_servicer import open_stub
from edge.checkpoint.snapshots import MigratedState, Snapshot
from edge.checkpoint.turn_snapshots import CheckpointCopier, TurnSnapshotter
from edge.machine.resources import keep_freed_memory, peak_rss_bytes, release_memory
from edge.options import AgentOptions
from edge.profiler.timing import TimingRequest
from edge.runtime.loop import AgentRun
from edge.runtime.reporter import Arrived, Note, Reporter, SharedClock
from edge.transport.access import RunAccess
from ringtune.engine.events import Arrival, Span
from ringtune.errors import (
    ConnectionFailedError,
    FrameError,
    InterruptedRunError,
    PlanError,
    RingTuneError,
    TrustError,
    error_from_name,
)
from ringtune.job.job import Job
from ringtune.models.result_files import NO_RESULT, Result
from ringtune.schedule.access import NOT_PLANNED, CopyBytes
from ringtune.schedule.lowering import links as plan_links
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint
from ringtune.texts import RepeatCounter, times
from ringtune.transport.channels import MAX_WORKERS
from ringtune.transport.codecs import GrantReader
from ringtune.transport.credentials import process_credentials
from ringtune.transport.endpoints import is_allowed
from ringtune.transport.parties import node_party
from ringtune.transport.tls import handshake_problem

if TYPE_CHECKING:
    from edge.transport.frames import Ack

_LOG = logging.getLogger(__name__)
# When a run fails or is stopped, all nodes are released one after another; a released peer closes its
# links. A broken link counts only if the run is still active after this time.
_LOST_GRACE_S = 0.25
_CLOSE_S = 2.0
# An action on a slow board takes longer; the rest of the run then ends in the background.
_END_S = 1.0


@dataclass(slots=True, eq=False)
class ActiveRun:
    """All resources of one run at this node: executor, links, loop, reporter, saver.

    ``num_loads`` counts the calls with a saved result, of which only the newest one is loaded; ``sizes`` are planned.
    """

    run_id: str
    node: str
    placement_number: int
    plan: Plan
    start: StartPoint | None = None
    sizes: CopyBytes = NOT_PLANNED
    result: Result = NO_RESULT
    is_collected: bool = False
    is_resting: bool = False
    is_finished: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    executor: Any = None
    saver: Saver | None = None
    inactive_state: Any = None
    access: RunAccess | None = None
    lease_s: float = 0.0
    links: dict[str, Any] = field(default_factory=dict)
    run: AgentRun | None = None
    reporter: Reporter | None = None
    clock: SharedClock = field(default_factory=SharedClock)
    keeper: TurnSnapshotter | CheckpointCopier | None = None
    audit: Any = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    grants: GrantReader = field(init=False)
    num_loads: int = 0
    _channels: dict[str, tuple[grpc.Channel, Any]] = field(default_factory=dict)
    _received_s: dict[str, float] = field(default_factory=dict)
    _refused: RepeatCounter = field(default_factory=RepeatCounter)
    _reopened: RepeatCounter = field(default_factory=RepeatCounter)

    def __post_init__(self) -> None:
        self.grants = GrantReader(self.plan.course)

    def check_wanted(self) -> None:
        """Stop the preparation of a released run; raises ``InterruptedRunError``."""
        if self.cancelled.is_set():
            raise InterruptedRunError(f"run {self.run_id} was released while node {self.node} prepared it")

    def audit_stub(self, node: str, address: str) -> Any:
        """Return what fetches from another node what it keeps for the audit, on one channel until the run ends.

        Raises ``InterruptedRunError``: the run was released.
        """
        held = self._channels.get(node)
        if held is None:
            held = self._channels[node] = open_stub(node, address)
        if self.cancelled.is_set():  # after the entry is made: ``drop`` closes those that it finds
            self._close_channels()
            raise InterruptedRunError(f"run {self.run_id} was released while node {self.node} repeated work of it")
        return held[1]

    def _close_channels(self) -> None:
        for node in list(self._channels):
            if (held := self._channels.pop(node, None)) is not None:
                held[0].close()

    def figures(self) -> dict[str, Any]:
        """Return this node's figures of the current run, for JSON; raises ``InterruptedRunError`` after its release."""
        run, executor = self.run, self.executor
        if run is None or executor is None:
            raise InterruptedRunError(f"run {self.run_id} was released while node {self.node} counted its figures")
        return {
            "node": self.node,
            **run.totals.as_json(),
            "hosted_bytes": int(executor.hosted_bytes),
            **executor.run_figures,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    # ---- what links deliver, from their threads ---------------------------------------------------

    def on_arrival(self, event: Arrival, content: Any) -> None:
        """Pass a received, checked payload to the loop; drop it if the run was released."""
        run = self._wanted()
        if run is not None:
            run.on_arrival(event, content)

    def on_received(self, source: str, num_bytes: int, sent_unix_s: float) -> None:
        """Report the seconds of a message: from its sending, or from the message before it on the same link."""
        now_s, before_s = self.clock.now_unix_s(), self._received_s.get(source, 0.0)
        self._received_s[source] = now_s
        reporter = self.reporter
        if reporter is not None and self._wanted() is not None:
            reporter.put(Arrived(source, num_bytes, max(0.0, now_s - max(sent_unix_s, before_s)), now_s))

    def on_refused(self, source: str, error: RingTuneError) -> None:
        """Log the refusal of a frame of ``source``, with few lines for many; the run continues."""
        count = self._refused.told((source, type(error)))
        if count:
            _LOG.warning("node %s refused a frame from %s: %s%s", self.node, source, error, times(count))

    def on_ack(self, target: str, ack: Ack) -> None:
        """Pass credits of ``target`` to the loop; fail the run if ``target`` refused a frame of this node."""
        run = self._wanted()
        if run is None:
            return
        if ack.refusal:  # the frame is lost, so the run can't end
            text = f"node {target} refused a frame of node {self.node}: {ack.refusal}"
            run.fail(error_from_name(ack.error or FrameError.__name__, text), lost_peer=target)
        elif ack.credits:
            run.on_credits(target, ack.boundary, ack.credits)

    def on_sent(self, span: Span) -> None:
        """Report a sent message, for the trace."""
        reporter = self.reporter
        if reporter is not None:
            reporter.put(span)

    def on_link_reopened(self, target: str, seconds: float) -> None:
        """Count a link to ``target`` that was opened again; tell it, with few lines for many."""
        run, reporter = self._wanted(), self.reporter
        if run is None or reporter is None:
            return
        run.totals.links_reopened += 1
        if count := self._reopened.told(target):
            text = f"the link from node {self.node} to node {target} broke, and was opened again after {seconds:.1f} s"
            _LOG.warning("%s%s", text, times(count))
            reporter.put(Note(f"{text}{times(count)}; the run continues"))

    def on_link_lost(self, peer: str, reason: str) -> None:
        """Fail the run ``_LOST_GRACE_S`` after a link with ``peer``, in or out, broke, unless the run is over by then.

        Ignored during a move, because other nodes may have moved already.
        """
        if self.run is None or self.is_collected or self.is_resting or self.cancelled.is_set():
            return
        _LOG.info("node %s: link with %s broke: %s", self.node, peer, reason)
        timer = threading.Timer(_LOST_GRACE_S, self._report_lost, (peer, reason))
        timer.daemon = True
        timer.start()

    def fail(self, error: RingTuneError) -> None:
        """Fail the run with an error of this node, unless it was released."""
        run = self._wanted()
        if run is not None:
            run.fail(error)

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
        """Free everything that the run holds; on the compute thread, after the loop's end."""
        if self.inactive_state is not None:
            self.inactive_state.close()
        if self.saver is not None:
            self.saver.close(is_finished=self.is_finished)
        self.executor = self.run = self.reporter = self.saver = self.inactive_state = self.keeper = None
        self.audit = None
        self.links.clear()
        self._close_channels()
        keep_freed_memory()  # the next run is measured as in a new process
        release_memory()


class TorchBackend(Protocol):
    """The part of an agent that needs torch; ``edge.agent.torch_backend``, loaded at its first use."""

    def preload(self) -> None:
        """Load the libraries that a run needs."""

    def inspect(
        self, options: AgentOptions, job: Job, *, timing: TimingRequest | None, memory_bytes: int, dataset: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Return the node's facts as JSON, and its dataset or None; a given dataset is not loaded again."""

    def build(self, options: AgentOptions, job: Job, plan: Plan, dataset: Any) -> Any:
        """Build the executor of this node."""

    def audit(self, options: AgentOptions, run_id: str, job: Job, plan: Plan, executor: Any) -> Any:
        """Make what an audited run needs at a node, an ``edge.runtime.audit.NodeAudit``."""

    def snapshot(self, active: ActiveRun, metadata: Mapping[str, str]) -> Snapshot:
        """Make a snapshot of the slice's trained tensors, and at an owner of the head; on the compute thread."""

    def kept_file(self, executor: Any, blocks: tuple[int, ...], of: Mapping[str, str]) -> bytes:
        """Copy the trained tensors of some blocks into a file; on the compute thread."""

    def load_migrated(self, executor: Any, taken: MigratedState) -> None:
        """Load the trained tensors of its blocks into an executor."""

    def working_clock(self, executor: Any) -> Callable[[], float]:
        """Make the clock of the executor's computing at this node's quota alone."""

    def ring_servicer(self) -> Any:
        """Make the servicer that receives frames; one per process."""

    def expect(self, servicer: Any, active: ActiveRun, job: Job) -> None:
        """Let the servicer receive the run's frames and deliver them to ``active``."""

    def connect(self, active: ActiveRun, target: str, address: str) -> Any:
        """Make an unopened link: an ``edge.transport.link.OutLink``."""


ANSWER_SHARE = 0.9
"""Part of a call's time after which a node gives up: the rest is for the answer, which names what it waited for."""
_LINK_RETRY_S = 0.1
MAX_INCOMING = MAX_WORKERS - 64
"""Most links to one node; the other workers serve the coordinator's calls and nodes that fetch weights."""


def open_links(
    active: ActiveRun, options: AgentOptions, backend: TorchBackend, addresses: Mapping[str, str], deadline_s: float
) -> None:
    """Open a link to each node to which this one sends.

    Raises:
        ConnectionFailedError, FrameError: a node can't be reached in time, or only without encryption, or does not take
            the link; with that node as ``peer``.
        TrustError: the certificate of this node is not valid now.
        PlanError: more nodes send to this one than it can serve.
        InterruptedRunError: the run was released meanwhile.
    """
    name = options.name
    pairs = plan_links(active.plan, active.start)
    incoming = sum(target == name for _, target in pairs)
    if incoming > MAX_INCOMING:
        raise PlanError(
            f"{incoming} nodes would send to node {name}, which can serve {MAX_INCOMING}; take fewer owners"
        )
    for target in sorted(target for source, target in pairs if source == name):
        address = addresses.get(target, "")
        if not address:
            raise ConnectionFailedError(f"node {name} got no address of node {target}; let it join again")
        check_private(options, target, address)
        _open_link(backend, active, target, address, deadline_s)


def check_private(options: AgentOptions, target: str, address: str) -> None:
    """Refuse to send tensors to another machine without encryption, unless ``--insecure`` allows it."""
    if not is_allowed(address, insecure=options.insecure):
        raise ConnectionFailedError(
            f"node {options.name} won't send tensors unencrypted to {target} at {address}; "
            "let every node join with a token, or start all with --insecure if the network is trusted"
        )


def _open_link(backend: TorchBackend, active: ActiveRun, target: str, address: str, deadline_s: float) -> None:
    """Open one link; retry until the deadline, because a peer refuses links until it has the plan."""
    while True:
        # set before it opens, so that the end of the run closes it and ends the wait
        link = active.links[target] = backend.connect(active, target, address)
        active.check_wanted()
        try:
            link.open(max(0.1, deadline_s - time.monotonic()))
            return
        except RingTuneError as error:  # of a class that the peer may have chosen
            link.close()
            active.check_wanted()
            may_pass = isinstance(error, FrameError | ConnectionFailedError)
            if not may_pass or time.monotonic() + _LINK_RETRY_S > deadline_s:
                raise _link_error(active.node, target, address, error) from error
            _LOG.debug("link to %s not open yet: %s", target, error)
        active.cancelled.wait(_LINK_RETRY_S)


def _link_error(node: str, target: str, address: str, error: RingTuneError) -> RingTuneError:
    """Return the error of a link that does not open: of links, with the peer, or of this node's certificate alone."""
    kind: type[RingTuneError] = FrameError if isinstance(error, FrameError) else ConnectionFailedError
    why, peer, speaks_for = str(error), target, process_credentials()
    if speaks_for is not None and kind is ConnectionFailedError:
        why = handshake_problem(why, address, node_party(target)) or why
        if speaks_for.identity.facts.problem_at(time.time()):
            kind, peer = TrustError, ""
    failed = kind(f"node {node} can't send to node {target}: {why}")
    failed.peer = peer
    return failed
