"""Take each report of a node once, write it down, and turn it into events of ``ringtune.rounds``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from coordinator.drive.checkpointing import Checkpointing
from coordinator.drive.hearing.lost_peers import Blame, with_role
from coordinator.records.books import RunBooks
from ringtune.errors import IntegrityError, PeerLostError
from ringtune.ids import naming_node
from ringtune.rounds import rounds
from ringtune.rounds.copy_digests import CopyDigest
from ringtune.rpc.codecs.codec import numbers_from_proto
from ringtune.rpc.codecs.report_checks import check_report
from ringtune.rpc.codecs.scores_codec import scores_from_proto
from ringtune.schedule.operations.scores import BlockScores
from ringtune.texts import printable
from ringtune.v1 import control_pb2

_MOST_SCORES: Final = 1 << 22
"""Most entries of scores that are kept for turns under way; a million batches of four micro-batches have so many."""
_MOST_COPIES: Final = 2
_MOST_TURNS: Final = 1 << 16


class Reports:
    """Reads the reports of one run's nodes.

    Args:
        checkpoints: of the run; they hear of shards that were saved.
        now_s: the clock by which ``verdict`` is asked.
    """

    def __init__(self, checkpoints: Checkpointing, now_s: Callable[[], float] = time.monotonic) -> None:
        self._checkpoints, self._now_s = checkpoints, now_s
        self._num_reports: dict[str, int] = {}
        self._scores: dict[tuple[str, int], list[BlockScores]] = {}  # of turns that are not done at the node
        self._copies: dict[tuple[str, int], list[CopyDigest]] = {}  # of turns that are not done at the node
        self._blame = Blame()

    def take(
        self, request: control_pb2.ReportRequest, books: RunBooks, placement_number: int = 0
    ) -> Iterator[rounds.Event]:
        """Write a report into the books; a report whose number came before is ignored.

        Args:
            request: the report.
            books: of the run.
            placement_number: of the placement that holds. An error of a node that has no role in it ends nothing: the
                run has gone on without that node, and its links broke because of that.

        Yields:
            What happened, in order; each has to be handled before the next is asked for.

        Raises:
            IntegrityError: it has no number, figures that are none, or scores that are not readable.
        """
        if request.number < 1:
            raise IntegrityError(f"a report of node {request.node} has no number; use one version on all machines")
        last = self._num_reports.get(request.node, 0)
        if request.number <= last:
            return  # the node did not hear that it had arrived
        check_report(request, last=last, nodes=books.plan.nodes, end_seq=books.end_seq)
        self._num_reports[request.node] = request.number
        books.add_report(request)
        for step in request.steps:
            books.note_end(step.seq, step.at_unix_s)
            values = numbers_from_proto(step.values)
            yield rounds.StepReported(request.node, step.seq, step.step, step.kind, values)
        self._checkpoints.note_saved(request.node, request.saved)
        self._note_scores(request)
        self._note_copies(request)
        if request.cache_problem:
            yield rounds.CacheLost(request.node, printable(request.cache_problem))
        for turn in request.turns_done:
            yield self._turn_reported(request.node, turn)
        if request.error and books.plan.has_role(request.node, placement_number):
            message = naming_node(request.node, printable(request.message))
            if request.lost_peer or request.error == PeerLostError.__name__:
                message = with_role(message, request.lost_peer or request.node, books.plan)
            failed = rounds.NodeFailed(request.node, request.error, message, request.lost_peer)
            if request.lost_peer:
                self._blame.add(failed, request.lost_peer, self._now_s())
            else:
                yield failed

    def _note_scores(self, request: control_pb2.ReportRequest) -> None:
        """Keep scores until the end of their turn is reported, within bounds: they are checked only then."""
        for message in request.scores:
            self._scores.setdefault((request.node, message.turn), []).extend(scores_from_proto(message))
        held = sum(len(entries) for entries in self._scores.values()) if request.scores else 0
        if held > _MOST_SCORES:
            raise IntegrityError(
                f"node {request.node} reports scores without end: {held} are here of turns that nobody has ended; use "
                "one version on all machines"
            )

    def _note_copies(self, request: control_pb2.ReportRequest) -> None:
        """Keep digests of copies until the end of their turn is reported; a node has two copies at most."""
        for message in request.copies:
            copies = self._copies.setdefault((request.node, message.turn), [])
            copies.append(CopyDigest(message.unit, message.sha256))
            if len(copies) > _MOST_COPIES or len(self._copies) > _MOST_TURNS:
                raise IntegrityError(
                    f"node {request.node} reports digests of copies without end; use one version on all machines"
                )

    def _turn_reported(self, node: str, turn: int) -> rounds.TurnReported:
        scores, copies = self._scores.pop((node, turn), ()), self._copies.pop((node, turn), ())
        return rounds.TurnReported(node, turn, tuple(scores), tuple(copies))

    def forget(self, node: str) -> None:
        """Count the reports of a node from 1 again: another process of its name sends them."""
        self._num_reports.pop(node, None)

    def forgive(self) -> None:
        """Forget who complained about whom: the run goes on without those that were lost."""
        self._blame = Blame()

    def verdict(self, now_s: float) -> rounds.NodeFailed | None:
        """Return the failure of a node that others complain about, once its time to report itself is up."""
        return self._blame.verdict(now_s)
