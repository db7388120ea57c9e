"""The receiving end of all links of a node, for one run at a time.

A frame that the plan does not foresee is refused (the sender and the sink are told) and dropped; the ring
goes on. A link of another run or plan is refused as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Final

import grpc

from edge.wire.checks import FrameCheck, RunExpectation, check_hello
from edge.wire.inbound import HELLO_WAIT_S, InLink, Sink, refusal
from ringtune.errors import DeadlineError, FrameError
from ringtune.rpc.guard import caller_of
from ringtune.schedule.turns.turns import Turn
from ringtune.trust.parties import Party
from ringtune.trust.permissions import require_sender
from ringtune.v1 import ring_pb2

_OLD_LINK_WAIT_S: Final = 2.0
_MOST_WAITING: Final = 64
"""Links that may wait for their HELLO or their run, each with two threads.

Of more than these the oldest goes that has said nothing: who opens many and is silent keeps nobody else out.
"""

__all__ = ["RingServicer", "RunExpectation", "Sink"]


class _Run:
    """The links, checks, known turns and credits of one run at this node."""

    def __init__(self, expectation: RunExpectation, sink: Sink) -> None:
        self.expectation = expectation
        self.sink = sink
        self.links: dict[str, InLink] = {}
        self._checks: dict[str, FrameCheck] = {}
        self.turns = expectation.known_turns()
        self._held: dict[tuple[str, int], int] = {}
        self._batch = max(1, expectation.plan.placement.credits // 4)

    def check_of(self, source: str) -> FrameCheck:
        check = self._checks.get(source)
        if check is None:
            check = self._checks.setdefault(source, FrameCheck(self.expectation, source, self.turns))
        return check

    def credits_due(self, source: str, boundary: int, count: int) -> int:
        """Number of credits to send now: all that were held back, once they are a batch, else 0.

        A batch is a quarter of the plan's credits: with 8 credits one due credit gives 0, the next one 2. Those of unit
        gradients are few, and go at once.
        """
        if boundary > self.expectation.plan.course.head:
            return count
        held = self._held.pop((source, boundary), 0) + count
        if held >= self._batch:
            return held
        self._held[source, boundary] = held
        return 0


class RingServicer:
    """Serves ``ringtune.v1.Ring``: ``add_to(server)`` once, then ``expect`` and ``forget`` per run.

    Safe for threads.

    Args:
        hello_wait_s: how long a link waits here for its HELLO and until its run is expected.
    """

    def __init__(self, *, hello_wait_s: float = HELLO_WAIT_S) -> None:
        self._hello_wait_s = hello_wait_s
        self._changed = threading.Condition()
        self._run: _Run | None = None
        self._waiting: dict[InLink, None] = {}

    def add_to(self, server: grpc.Server) -> None:
        """Register the service with a gRPC server.

        Messages stay bytes on the way in: they are read without protobuf's copy (``edge.wire.frames``).
        """
        link: grpc.RpcMethodHandler[bytes, ring_pb2.Ack] = grpc.stream_stream_rpc_method_handler(
            self._link, request_deserializer=None, response_serializer=ring_pb2.Ack.SerializeToString
        )
        service = ring_pb2.DESCRIPTOR.services_by_name["Ring"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Link": link}),))

    def expect(self, expectation: RunExpectation, sink: Sink) -> None:
        """Take links of this run from now on, and forget the former run."""
        self.forget()
        with self._changed:
            self._run = _Run(expectation, sink)
            self._changed.notify_all()

    def forget(self, sink: Sink | None = None) -> None:
        """Forget the run and end its links; no call to its sink comes after this returned.

        Args:
            sink: forget only the run with this sink: another run may have begun meanwhile. None = any run.
        """
        with self._changed:
            if sink is not None and self._run is not None and self._run.sink is not sink:
                return
            run, self._run = self._run, None
            links = list(run.links.values()) if run else []
        for link in links:
            link.forget()
        for link in links:
            link.wait()

    def granted(self, turns: Iterable[Turn]) -> None:
        """Admit frames of these turns from now on."""
        with self._changed:
            run = self._run
        if run is not None:
            for turn in turns:
                run.turns.granted(turn)

    def done_before(self, index: int) -> None:
        """Admit no more frames of turns before ``index``: this node has done them."""
        with self._changed:
            run = self._run
        if run is not None:
            run.turns.done_before(index)

    def ack(self, source: str, boundary: int, credits: int = 1) -> None:  # noqa: A002 - the wire's word
        """Return credits for hidden states of ``source`` at ``boundary``; nothing happens if its link is gone.

        Credits travel together, a quarter of the plan's credits at a time: the sender always has the rest.
        """
        with self._changed:
            run = self._run
            link = run.links.get(source) if run else None
            if run is None or link is None:
                return
            due = run.credits_due(source, boundary, credits)
        if due:
            run.check_of(source).credit_returned(boundary, due)
            link.credit(boundary, due)

    # ---- one link -------------------------------------------------------------------------------------

    def _link(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[ring_pb2.Ack]:
        caller = caller_of(context)

        def join(link: InLink, header: ring_pb2.FrameHeader | None) -> tuple[str, _Run]:
            return self._join(link, header, caller.party if caller else None)

        link = InLink(messages, join=join, changed=self._on_changed, hello_wait_s=self._hello_wait_s)
        with self._changed:
            silent = [one for one in self._waiting if not one.has_spoken]
            is_full = len(self._waiting) >= _MOST_WAITING
            if is_full and not silent:
                return iter([refusal(FrameError(f"{_MOST_WAITING} links wait here for their run; try again"))])
            self._waiting[link] = None
            if is_full:
                del self._waiting[silent[0]]
        if is_full:
            silent[0].forget()
        return self._acks(link, context)

    def _acks(self, link: InLink, context: grpc.ServicerContext) -> Iterator[ring_pb2.Ack]:
        try:
            yield from link.acks(context)
        finally:
            with self._changed:
                self._waiting.pop(link, None)

    def _join(self, link: InLink, header: ring_pb2.FrameHeader | None, caller: Party | None) -> tuple[str, _Run]:
        with self._changed:
            self._changed.wait_for(lambda: self._run is not None or link.is_over, self._hello_wait_s)
            run = self._run
            if run is None:
                raise DeadlineError(f"this node expected no run within {self._hello_wait_s:g} s; start the run again")
            source = check_hello(run.expectation, header)
            require_sender(caller, source)
            if not self._changed.wait_for(lambda: source not in run.links, _OLD_LINK_WAIT_S):
                raise FrameError(f"node {source} has a link to node {run.expectation.node} already; close it first")
            if self._run is not run:
                raise FrameError(f"run {run.expectation.run_id!r} has ended at node {run.expectation.node}")
            run.links[source] = link
            self._waiting.pop(link, None)
            return source, run

    def _on_changed(self, link: InLink) -> None:
        with self._changed:
            if self._run is not None and link.is_done:
                self._run.links = {name: other for name, other in self._run.links.items() if other is not link}
            self._changed.notify_all()
