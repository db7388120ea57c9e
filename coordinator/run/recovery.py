"""Reports of a run's nodes, and the choice of the lost node from complaints about broken links.

Neighbours of a failed node may report broken links before the node reports its failure, so complaints wait for
``GRACE_S``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.recorder import RunRecorder
from ringtune.errors import IntegrityError, PeerLostError
from ringtune.ids import naming_node
from ringtune.run_control import events as rd
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BlockScores
from ringtune.schedule.plan import Plan
from ringtune.techniques.replicas import CopyDigest
from ringtune.texts import printable
from ringtune.transport.codecs import check_report, numbers_from_proto, scores_from_proto
from ringtune.v1 import control_pb2

GRACE_S = 1.0
"""Seconds for a node's own report of a failure after a complaint about it."""


class PeerSuspicions:
    """Complaints of nodes about lost peers."""

    def __init__(self) -> None:
        self._complaints: dict[str, tuple[float, rd.NodeFailed]] = {}
        self._complainers: set[str] = set()
        self._peers: dict[str, set[str]] = {}  # of each node, those with which it had a broken link in this run
        self._dead: set[str] = set()

    def add(self, failed: rd.NodeFailed, lost_peer: str, now_s: float) -> None:
        """Note a complaint of ``failed.node`` about ``lost_peer``; only the first one about a peer is kept."""
        self._complainers.add(failed.node)
        for node, peer in ((failed.node, lost_peer), (lost_peer, failed.node)):
            self._peers.setdefault(node, set()).add(peer)
        self._complaints.setdefault(lost_peer, (now_s + GRACE_S, failed))

    def verdict(self, now_s: float) -> rd.NodeFailed | None:
        """Take out a complaint that is ``GRACE_S`` old, first one about a peer that has not complained itself.

        Example: a complains about b, and b about c. Only c has not complained, so b's complaint about c is chosen.
        """
        due = {peer: failed for peer, (until_s, failed) in self._complaints.items() if now_s >= until_s}
        silent = [failed for peer, failed in due.items() if peer not in self._complainers]
        verdict = next(iter([*silent, *due.values()]), None)
        if verdict is not None:  # it is returned once
            self._complaints = {peer: kept for peer, kept in self._complaints.items() if kept[1] is not verdict}
        return verdict

    def died(self, node: str) -> None:
        """Note that a node is lost, and not a link to it: who has noticed that is no suspect for it."""
        self._dead.add(node)

    def forgive(self) -> None:
        """Drop all complaints, but not which links between living nodes were broken."""
        self._complaints, self._complainers = {}, set()
        self._peers = {node: peers - self._dead for node, peers in self._peers.items() if node not in self._dead}
        self._dead = set()

    def suspect(self, failed: rd.NodeFailed) -> str:
        """Return the end of a broken link that had broken links with more nodes; of equal ones the node that reports.

        So a node that reports what no other one notices takes out itself, one that all others report is found, and
        one that breaks links itself takes out one other at most.
        """
        return max((failed.node, failed.lost), key=lambda node: len(self._peers.get(node, ())))


def with_role(message: str, node: str, plan: Plan) -> str:
    """Add to the message of a lost node its role and the remedy, if it was only a helper."""
    helped = plan.placement.joined_helpers(node)
    if not helped or plan.slice_of(node).num_blocks or plan.owner(node) is not None:
        return message
    blocks = ", ".join(f"{plan.placement.host_of(helper.start)}'s blocks {helper.text}" for helper in helped)
    return (
        f"{message}; helper {node} fits the adapters of {blocks}: start it again and --resume the run, or train anew "
        "with another helper in [offload]"
    )


_MAX_COPIES: Final = 2
_MAX_TURNS: Final = 1 << 10
"""Most turns of which a node has reported digests and not the end: those that are open, and come again."""


class Reports:
    """Reader of the reports of one run's nodes."""

    def __init__(self, checkpoints: CheckpointManager, now_s: Callable[[], float] = time.monotonic) -> None:
        self._checkpoints, self._now_s = checkpoints, now_s
        self._num_reports: dict[str, int] = {}
        self._scores: dict[tuple[str, int], list[BlockScores]] = {}  # of turns that are not done at the node
        self._copies: dict[str, dict[int, list[CopyDigest]]] = {}  # by node, of turns that are not done there
        self._kept: dict[str, dict[int, list[CopyDigest]]] = {}  # the same
        self.suspicions = PeerSuspicions()

    def take(
        self, request: control_pb2.ReportRequest, recorder: RunRecorder, placement_number: int = 0
    ) -> Iterator[rd.Event]:
        """Write a report into the books and yield its events; a report with an old number is ignored.

        Each event has to be handled before the next is asked for. An error of a node without a role in
        ``placement_number`` is ignored: the run has continued without that node, which broke its links.

        Raises ``IntegrityError``: number, figures or scores are invalid.
        """
        if request.number < 1:
            raise IntegrityError(f"a report of node {request.node} has no number; use one version on all machines")
        if not self.is_new(request):
            return  # the node sent it again without our answer
        last = self._num_reports.get(request.node, 0)
        check_report(request, last=last, nodes=recorder.nodes, end_seq=recorder.end_seq)
        self._num_reports[request.node] = request.number
        recorder.add_report(request)
        for step in request.steps:
            recorder.note_end(step.seq, step.at_unix_s)
            values = numbers_from_proto(step.values)
            yield rd.StepReported(request.node, step.seq, step.step, step.kind, values)
        self._checkpoints.note_saved(request.node, request.saved)
        self._note_scores(request, recorder.plan.course)
        _note_digests(request.node, request.copies, self._copies, _MAX_COPIES)
        _note_digests(request.node, request.kept, self._kept, recorder.plan.course.num_blocks + 1)
        if request.cache_problem:
            yield rd.TechniqueFailed(request.node, printable(request.cache_problem))
        for turn in request.turns_done:
            key, scores = (request.node, turn), self._scores.pop((request.node, turn), ())
            copies, kept = (held.get(request.node, {}).pop(turn, ()) for held in (self._copies, self._kept))
            yield rd.TurnReported(*key, tuple(scores), tuple(copies), tuple(kept))
        if request.error and recorder.plan.has_role(request.node, placement_number):
            message = naming_node(request.node, printable(request.message))
            if request.lost_peer or request.error == PeerLostError.__name__:
                parts = (part for part in recorder.plan.parts if part.placement.placement_number == placement_number)
                message = with_role(message, request.lost_peer or request.node, next(parts, recorder.plan))
            failed = rd.NodeFailed(request.node, request.error, message, request.lost_peer)
            if request.lost_peer:
                self.suspicions.add(failed, request.lost_peer, self._now_s())
            else:
                yield failed

    def is_new(self, request: control_pb2.ReportRequest) -> bool:
        """Whether the node has not sent this report before."""
        return request.number > self._num_reports.get(request.node, 0)

    def _note_scores(self, request: control_pb2.ReportRequest, course: Course) -> None:
        """Keep scores until the end of their turn is reported; they are checked only then.

        No more than those of all batches that are scored, twice, each of the size that the run has.
        """
        choice = course.choice
        shape = (len(choice.scores), choice.subnets) if choice is not None else (0, 0)
        for message in request.scores:
            if (message.scores, message.subnets) != shape:
                raise IntegrityError(
                    f"node {request.node} reports {message.scores} scores of {message.subnets} subnets, the run has "
                    f"{shape[0]} of {shape[1]}; use one version on all machines"
                )
            self._scores.setdefault((request.node, message.turn), []).extend(scores_from_proto(message))
        of_node = (entries for (node, _), entries in self._scores.items() if node == request.node)
        held = sum(map(len, of_node)) if request.scores else 0
        scored = sum(map(course.num_scored, course.all_owners)) if held else 0
        if held > 2 * scored * course.microbatches * course.num_blocks:
            raise IntegrityError(
                f"node {request.node} reports too many scores: {held} of turns that have not ended; use "
                "one version on all machines"
            )

    def forget(self, node: str) -> None:
        """Expect report numbers of a node from 1 again: it is another process."""
        for of_node in (self._num_reports, self._copies, self._kept):
            of_node.pop(node, None)

    def forgive(self) -> None:
        """Drop all complaints, and what is kept of repeated turns: the run continues without the lost nodes."""
        self.suspicions.forgive()
        self._scores, self._copies, self._kept = {}, {}, {}


def _note_digests(
    node: str, messages: Iterable[control_pb2.CopyDigest], held: dict[str, dict[int, list[CopyDigest]]], most: int
) -> None:
    """Keep digests of units, ``most`` per node and turn, until the end of their turn is reported."""
    of_node = held.setdefault(node, {})  # what one node says too much is no fault of another one
    for message in messages:
        digests = of_node.setdefault(message.turn, [])
        digests.append(CopyDigest(message.unit, message.sha256))
        if len(digests) > most or len(of_node) > _MAX_TURNS:
            raise IntegrityError(f"node {node} reports too many digests of copies; use one version on all machines")
