"""Loop of a run at a node: it feeds events to the engine, and carries out the engine's commands.

::

    links in  --tensor--> inbox --event--.                      .--> executor (inline, one at a time)
    links out --credit-------------------+--> queue -> engine --+--> links out, acknowledgements
    coordinator --turns, stop------------'    (one thread)      '--> reporter

Only this loop touches the engine and the executor. Other threads put tensors into the inbox, or a ``Call``, which runs
between two actions, into the queue. Events that arrive during an action are handled before its end, so that the engine
then chooses among all inputs. All decisions are the engine's. The loop itself needs neither torch nor gRPC.

``CopyMonitor`` takes digests of equal weights on several nodes: of the owners' copies of embedding and head once a
sweep, and of a replica's blocks once a turn. It takes them right after the update, because the next turn's first update
may run before this turn ends here.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from edge.machine.libraries import drained
from edge.runtime import reporter as rp
from edge.runtime.reporter import CopyCompared, Totals, header_line, table_line
from ringtune.engine import events as ev
from ringtune.engine.events import Handled, Span
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import (
    DeadlineError,
    FrameError,
    PeerLostError,
    RingTuneError,
    StorageError,
    error_from_name,
    internal_error,
    sent_by,
)
from ringtune.machine.process import carry_out, result_within
from ringtune.quantities import format_seconds
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.lowering import credit_boundary
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.schedule.versions import in_flight
from ringtune.techniques.replicas import compared_at
from ringtune.transport.codecs import scores_to_proto

if TYPE_CHECKING:
    from edge.checkpoint.shard_saver import Saver
    from edge.checkpoint.turn_snapshots import CheckpointCopier, TurnSnapshotter
    from edge.runtime.audit import AuditRecorder
    from edge.runtime.executor import NodeExecutor
    from edge.transport.link import OutLink


class NoTrail:
    """Stands for an ``AuditRecorder`` in a run without audit."""

    def take(self, *_: Any, **__: Any) -> Any:
        """Return None: there is no trail."""

    grant = exchanged = after = take


NO_TRAIL: Final = NoTrail()


class Call(NamedTuple):
    """A function to run on the loop's thread, with the future that gets its result."""

    function: Callable[[], Any]
    future: Future[Any]


T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# Without a timer the loop still wakes now and then: every wait has a deadline.
_LONGEST_WAIT_S = 60.0
# A head is handed over to a turn that was granted at most so many turns ago.
_TURNS_KEPT = 1024


_Entry = ev.Event | Call


class AgentRun:
    """Drives a ``NodeEngine`` until ``stop``.

    Args:
        ack: returns a credit to (source, boundary).
        done_before: called with the index of the first unfinished turn.
        record: whether events and commands are reported as a recording.
        start: the item from which the run continues; None = the first.
        keeper: copies the ends of turns, or checkpoints; None = nothing is copied.
        worked: seconds of the calling thread's computing at the node's quota alone; constant without a quota.
        totals: of the run so far; None = zero.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        node: str,
        executor: NodeExecutor,
        links: Mapping[str, OutLink],
        ack: Callable[[str, int], None],
        done_before: Callable[[int], None] = lambda index: None,
        reports: rp.Reporter,
        wait_s: float = 300.0,
        record: bool = False,
        start: StartPoint | None = None,
        saver: Saver | None = None,
        keeper: TurnSnapshotter | CheckpointCopier | None = None,
        trail: AuditRecorder | NoTrail = NO_TRAIL,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = lambda: 0.0,
        totals: Totals | None = None,
    ) -> None:
        self.totals = totals or Totals()
        self._plan, self._node, self._executor = plan, node, executor
        self._links = dict(links)
        self._ack, self._done_before = ack, done_before
        self._reports, self._record = reports, record
        self._clock, self._worked = clock, worked
        self._saver, self._keeper, self._trail = saver, keeper, trail
        self._copies = CopyMonitor(plan, node, executor.copy_digest)
        self._engine = NodeEngine(plan, node, wait_s=wait_s, start=start)
        self._queue: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        # received and not accepted yet: tensors with masks and parcels by key, heads by turn
        self._inbox: dict[TensorKey | int, Any] = {}
        course, slices = plan.course, plan.placement.slices
        self._max_going_down = 1 + sum(in_flight(course, piece.start) for piece in slices if piece.num_blocks)
        self._timers: dict[str, float] = {}
        self._turns: dict[int, Turn] = {}
        self._first_seqs: dict[int, int] = {}
        self._granted = -1
        self._last_turns = (-1, -1)  # of the last two grants
        self._table: Operations | None = None
        self._head_went_for: int | None = None
        self._saves_of_head: set[int] = set()
        self._lock = threading.Lock()
        self._failed = False
        self._stopping = threading.Event()
        self._ended = threading.Event()
        if record:
            reports.put(rp.HeaderLine(header_line(plan, node, wait_s, start)))

    # ---- from other threads -----------------------------------------------------------------------

    def grant(self, turns: Sequence[Turn]) -> None:
        """Queue turns that are granted at once; the engine ignores a turn that it has already."""
        if turns and turns[0].index > self._last_turns[1]:
            if self._plan.goes_back:
                self._check_read(self._last_turns[0])
            self._last_turns = (self._last_turns[1], turns[-1].index)
        for turn in turns:
            self._queue.put(ev.TurnGranted(turn))

    def _check_read(self, first: int) -> None:
        """Lose a node that has said that it has done turns before ``first``, and has not read a message of them.

        Messages without credits would wait here without end for a node that reads none. Where the run can go back, a
        grant comes when one turn at most is not done by all; only the first of a placement may be of many turns, and
        only the last one, of a run that the user stops, may come sooner. So all have done the turns before ``first``,
        the last turn of the grant before the last one.
        """
        first_seq = self._first_seqs.get(first, 0)
        for target, link in self._links.items():
            waits = link.waiting
            if waits is not None and (waits.start < first if waits.payload == Payload.HEAD else waits.seq < first_seq):
                self.on_peer_lost(target, f"it has not read what was sent to it before turn {first}")

    def keep_shards_from(self, step: int) -> None:
        """Queue the deletion of shards of steps before ``step``."""
        saver = self._saver
        if saver is not None:
            self._queue.put(Call(lambda: saver.keep_from(step), Future()))

    def on_arrival(self, event: ev.Arrival, content: Any) -> None:
        """Put a received, checked payload into the inbox, unless the run has failed or stops.

        ``content`` is a tensor with its mask, or the ``Pieces`` of a head or parcel. Raises ``FrameError``: an honest
        sender can't have so much on its way of what has no credits.
        """
        if self._failed or self._stopping.is_set():
            return
        self._require_room(event)
        self._inbox[event.turn if isinstance(event, ev.HeadArrived) else event.key] = content
        self._queue.put(event)

    def _require_room(self, event: ev.Arrival) -> None:
        """Refuse a second head, and gradients of more items than hosts can have graphs of.

        A head for a later own turn has to pass this node before. Other payloads have credits.
        """
        if isinstance(event, ev.HeadArrived):
            what, most = "heads", 1
            waiting = {key for key in list(self._inbox) if not isinstance(key, TensorKey)} - {event.turn}
        elif event.key.payload == Payload.GRAD:
            what, most = "gradients of items", self._max_going_down
            grads = (key for key in list(self._inbox) if isinstance(key, TensorKey) and key.payload == Payload.GRAD)
            waiting = {key.seq for key in grads} - {event.key.seq}
        else:
            return
        if len(waiting) >= most:
            raise FrameError(
                f"node {event.source} sends more {what} while {len(waiting)} wait at node {self._node}, at most {most} "
                "can; remove it with 'ringtune nodes remove NAME', or install one version of ringtune on all machines"
            )

    def on_credits(self, source: str, boundary: int, count: int) -> None:
        """Queue ``count`` credits of ``source``, which accepted as many hidden states of this node.

        More credits than the plan has are dropped.
        """
        for _ in range(min(count, self._plan.placement.credits)):
            self._queue.put(ev.CreditArrived(boundary, source))

    def on_peer_lost(self, peer: str, reason: str) -> None:
        """End the run here because the link with ``peer`` broke."""
        self.fail(PeerLostError(f"node {self._node} lost its link with node {peer}: {reason}"), lost_peer=peer)

    def fail(self, error: BaseException, *, lost_peer: str = "") -> None:
        """Report the first error of the run here, and stop the engine."""
        with self._lock:
            if self._failed or self._stopping.is_set():
                return
            self._failed = True
        told = error if isinstance(error, RingTuneError) else internal_error(error)
        text = str(told)
        message = text if f"node {self._node}" in text else f"node {self._node}: {text}"
        _LOG.error("%s", message, exc_info=None if told is error else error)
        self._reports.put(rp.Failed(type(told).__name__, message, lost_peer or told.peer))
        self._queue.put(ev.StopRequested("the run failed"))

    def call(self, function: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """Run ``function`` on the loop's thread between two actions, and return its result.

        Raises ``DeadlineError``: not done after ``timeout_s`` seconds, or the run ended.
        """
        future: Future[T] = Future()
        self._queue.put(Call(function, future))
        if self._ended.is_set():
            self._refuse_calls()
        return result_within(future, timeout_s, f"node {self._node}: waited {format_seconds(timeout_s)} for {what}")

    def stop(self, reason: str) -> None:
        """Stop the loop after the current action."""
        self._stopping.set()
        self._queue.put(ev.StopRequested(reason))

    def wait(self, timeout_s: float) -> bool:
        """Wait until the loop has ended; False if it still runs after ``timeout_s`` seconds."""
        return self._ended.wait(timeout_s)

    # ---- the loop's thread ------------------------------------------------------------------------

    def loop(self) -> None:
        """Handle events until ``stop`` is called."""
        try:
            while not self._stopping.is_set():
                self._next()
        finally:
            self._ended.set()
            self._refuse_calls()
            self._inbox.clear()

    def _next(self) -> None:
        try:
            entry = self._queue.get(timeout=self._longest_wait())
        except queue.Empty:
            self._fire_timers()
            return
        try:
            self._take(entry)
        except Exception as error:
            self.fail(error)

    def _take(self, entry: _Entry) -> None:
        # an action's time includes taking its input, and sending the output of the action before
        start_s, worked_s = self._clock(), self._worked()
        action = self._handle(entry)
        while action is not None and not self._stopping.is_set() and not self._failed:
            values = self._save(action) if action.op is Op.SAVE else self._executor.run(action)
            self._copies.after(action)
            self._trail.after(action)
            end_s, total_s = self._clock(), self._worked()
            self.totals.actions += 1
            self.totals.busy_s += end_s - start_s
            self._reports.put(Span(action, start_s, end_s, total_s - worked_s))
            start_s, worked_s = end_s, total_s
            self._drain()
            action = self._handle(ev.ActionDone(action, values))

    def _save(self, action: Action) -> tuple[tuple[str, float], ...]:
        turn = next(turn for turn in self._turns.values() if turn.first_seq == action.seq)
        if self._saver is None:
            raise StorageError(f"node {self._node} has no folder for checkpoints; start it with --state DIR")
        with_head = saves_head(self._plan.course, self._node, turn.owner)
        saved = self._saver.save(turn.first_step, self._executor, with_head=with_head)
        self._saves_of_head.discard(turn.index)
        self._drop_head_state()
        self._reports.put(rp.ShardSaved(turn.index, turn.first_step, *saved))
        return ()

    def _drop_head_state(self) -> None:
        """Free the optimizer state of a head after its hand-over, unless a later checkpoint needs it here.

        The head returns with a new state; the link keeps the old one until it is sent.
        """
        went_for = self._head_went_for
        if went_for is not None and all(index > went_for for index in self._saves_of_head):
            self._executor.drop_head_state()

    def _drain(self) -> None:
        """Handle every event that arrived during an action; the engine starts no other action before this one's end."""
        for entry in drained(self._queue):
            self._handle(entry)

    def _handle(self, entry: _Entry) -> Action | None:
        """Feed one event to the engine and carry out its commands; return the action to run, if any."""
        if isinstance(entry, Call):
            carry_out(*entry)
            return None
        if self._failed and not isinstance(entry, ev.StopRequested):
            return None
        if isinstance(entry, ev.TurnGranted):
            self._on_turn(entry.turn)
        now_s = self._clock()
        commands = self._engine.handle(entry, now_s)
        if self._record:
            self._reports.put(Handled(now_s, entry, tuple(commands)))
        action = None
        for command in commands:
            if isinstance(command, ev.RunAction):
                action = command.action  # after the other commands: sends must not wait for it
            else:
                self._carry_out(command)
        return action

    def _turn_done(self, turn: int, digests: Mapping[int, str]) -> None:
        for unit, sha256 in digests.items():
            self._reports.put(rp.CopySent(turn, unit, sha256))
        self._reports.put(rp.TurnDone(turn))

    def _on_turn(self, turn: Turn) -> None:
        if turn.index <= self._granted:
            return
        self._granted = turn.index
        before, self._turns[turn.index] = self._table, turn
        if self._record and turn.operations is not None and turn.operations != before:
            self._reports.put(rp.HeaderLine(table_line(turn.operations)))
        self._table = turn.operations
        self._first_seqs[turn.index] = turn.first_seq
        self._first_seqs.pop(turn.index - _TURNS_KEPT, None)
        if turn.kind is StepKind.CHECKPOINT and turn.owner == self._node:
            self._saves_of_head.add(turn.index)
        self._copies.expect(turn)
        self._executor.grant(turn)
        self._trail.grant(turn)

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.SendTensor(key, target):
                tensor, mask = self._executor.take_tensor(key)
                self._trail.exchanged(key, tensor, mask, is_sent=True)
                self._count(key.seq, target, key.payload, self._links[target].send_tensor(key, tensor, mask))
            case ev.Accept(key, source):
                tensor, mask = self._inbox.pop(key)
                self._trail.exchanged(key, tensor, mask, is_sent=False)
                with sent_by(source):
                    self._executor.put_tensor(key, tensor, mask)
                if key.is_hidden:
                    self._ack(source, key.boundary)
            case ev.SendHead(turn, target):
                if self._keeper is not None:
                    self._keeper.copy_outgoing_head(turn, self._turns.values())
                sent = self._links[target].send_head(turn, self._executor.head_blob())
                self._head_went_for = turn
                self._drop_head_state()
                self._count(self._first_seqs[turn], target, Payload.HEAD, sent)
            case ev.AcceptHead(turn, source):
                self._head_went_for = None
                with sent_by(source):
                    self._executor.load_head_blob(self._inbox.pop(turn))
            case ev.SendParcel(key, target):
                parcel = self._executor.take_parcel(key)
                self._trail.exchanged(key, parcel, None, is_sent=True)
                sent = self._links[target].send_parcel(key, parcel)
                self._count(key.seq, target, key.payload, sent)
            case ev.AcceptParcel(key, source):
                parcel = self._inbox.pop(key)
                self._trail.exchanged(key, parcel, None, is_sent=False)
                with sent_by(source):
                    self._executor.put_parcel(key, parcel)
                self._ack(source, credit_boundary(self._plan.course, key.payload))
            case ev.SetTimer(timer, at_s):
                self._timers[timer] = at_s
            case ev.ReportStep():
                self._reports.put(rp.StepDone(command, self._clock()))
            case ev.ReportTurn(turn):
                if self._turns[turn].kind is StepKind.SCORE:
                    for message in scores_to_proto(turn, self._executor.take_scores(turn)):
                        self._reports.put(rp.Scored(message))
                for entry in self._copies.take(turn):
                    self._reports.put(entry)
                done = self._turns[turn]
                if trail := self._trail.take(turn):
                    self._reports.put(rp.AuditTrail(turn, *trail))
                self._forget(turn)
                if self._keeper is None:
                    self._turn_done(turn, {})
                else:
                    self._keeper.end(done, functools.partial(self._turn_done, turn))
            case ev.Fail(error, message):
                awaited = self._engine.awaited()
                self.fail(error_from_name(error, message), lost_peer=awaited.peer if awaited is not None else "")

    def _count(self, seq: int, target: str, payload: str, num_bytes: int) -> None:
        self.totals.sent_bytes[target] = self.totals.sent_bytes.get(target, 0) + num_bytes
        self._reports.put(rp.Sent(seq, target, payload, num_bytes))

    def _forget(self, index: int) -> None:
        """Drop the data of a finished turn, and duplicate tensors of it."""
        if problem := self._executor.forget_turn(index):
            self._reports.put(rp.TechniqueFailed(problem))
        turn = self._turns.pop(index)
        for key in list(self._inbox):
            if isinstance(key, TensorKey) and turn.first_seq <= key.seq < turn.end_seq:
                del self._inbox[key]
        self._done_before(min(self._turns, default=self._granted + 1))

    # ---- time -------------------------------------------------------------------------------------

    def _longest_wait(self) -> float:
        if not self._timers or self._failed:
            return _LONGEST_WAIT_S
        return min(_LONGEST_WAIT_S, max(0.0, min(self._timers.values()) - self._clock()))

    def _fire_timers(self) -> None:
        now_s = self._clock()
        for timer in [timer for timer, at_s in self._timers.items() if at_s <= now_s]:
            del self._timers[timer]
            self._queue.put(ev.TimerFired(timer))

    def _refuse_calls(self) -> None:
        for entry in drained(self._queue):
            if isinstance(entry, Call) and entry.future.set_running_or_notify_cancel():
                entry.future.set_exception(DeadlineError(f"node {self._node}: the run has ended; start it anew"))


class CopyMonitor:
    """Takes digests of equal weights at one node; none at a node without such weights."""

    def __init__(self, plan: Plan, node: str, digest: Callable[[int, int], str]) -> None:
        self._plan, self._node = plan, node
        self._digest = digest
        self._wanted: dict[tuple[int, int], int] = {}
        self._found: dict[int, list[CopyCompared]] = {}

    def expect(self, turn: Turn) -> None:
        """Note the updates of a granted turn that need a digest."""
        compared = compared_at(self._plan, turn, self._node)
        self._wanted |= {(seq, unit): turn.index for unit, seq in compared.items()}

    def after(self, action: Action) -> None:
        """Take a digest if this action is a noted update."""
        turn = self._wanted.pop((action.seq, action.start), None) if action.op is Op.UPDATE else None
        if turn is not None:
            entry = CopyCompared(turn, action.start, self._digest(action.start, action.stop))
            self._found.setdefault(turn, []).append(entry)

    def take(self, turn: int) -> Iterator[CopyCompared]:
        """Return and drop the digests of a finished turn."""
        yield from self._found.pop(turn, ())
