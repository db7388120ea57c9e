"""The books of a run: ledger, metrics, trace and recordings, sent as they grow."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from coordinator.run.events import EventSink, GrowingFile
from coordinator.run.report import NodeTotals, OperationsLedger, RunLedger
from coordinator.run.run_text import fetched_line, fetched_text, recovery_line, replan_line, rows_facts, stop_text
from coordinator.run.trace import Activity, TraceText
from ringtune.costs.calibration import PaceMonitor, RecordedProfile
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.engine.events import Span
from ringtune.errors import PlanError
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.schedule.actions import parse_action
from ringtune.schedule.operation_tables import ScheduledTable
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn, item_of, microbatch_rows
from ringtune.techniques.audit import LEDGER
from ringtune.techniques.operations import chosen_entry
from ringtune.texts import RepeatCounter, one_line, times
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
Logged = (
    rd.LogStep
    | rd.ShowStep
    | rd.LogTurn
    | rd.LogUnfreeze
    | rd.LogOperations
    | rd.LogTechniqueFailed
    | rd.LogNodeError
    | rd.LogEvaluation
    | rd.LogStop
    | rd.LogPlan
    | rd.LogFetched
)
"""Log commands of the state machine that the books take."""
_MAX_NOTES: Final = 1000
"""Most sentences of one node for the user."""
_ACTIONS: Final = 16
"""More actions than a node has for one block, or embedding or head, of a micro-batch, or of a batch beside these."""
_MAX_RECORDED_BYTES: Final = 1024
"""Most bytes of a recording for each of the actions that a node may have done."""
_MAX_HEADER_BYTES: Final = 1 << 16
"""Of its headers, which a node writes before it is granted anything; some 300 bytes for each placement."""


class RunRecorder:
    """The books of one run: ledger, trace, recordings, and times of its actions.

    Args:
        skipped_items: number of first items that do not count in the profile.
        part: of the plan with which the run begins or resumes; None = its first one.

    Attributes:
        operations: work done and saved by operations.
        pace: monitor of its nodes; None = they are not monitored.
        onlooker: takes the activity of the nodes after each turn; None = nobody asks.
        rows: left out and cut rows of the owners' files, for the report.
        end_seq: one past the last granted item.
        end_step: optimizer steps at the end of the granted turns.
    """

    def __init__(
        self,
        plan: Plan,
        job: Job,
        profile: Profile,
        emit: EventSink,
        *,
        skipped_items: int = 0,
        part: Plan | None = None,
    ) -> None:
        self.plan = plan
        self._job = job
        self._links = profile.links
        self.rows = rows_facts(profile.nodes, plan.course.max_length)
        self._emit = emit
        self._ends_unix_s: dict[int, float] = {}
        self._trace: tuple[GrowingFile, TraceText] | None = None
        self._recordings: dict[str, GrowingFile] = {}
        self._ledger_file: GrowingFile | None = None
        self._recorded = RecordedProfile(
            plan.course, profile, recompute=plan.placement.recompute, skipped_items=skipped_items
        )
        self.links = self._recorded.links  # with the run's own transfers so far
        self.operations = OperationsLedger(plan, profile)
        self.ledger = RunLedger(
            plan, job, placement_number=(part or plan).placement.placement_number if plan.moves else None
        )
        self.pace: PaceMonitor | None = None
        self.onlooker: EventSink | None = None
        self._activity = Activity()
        self.end_seq = self.end_step = self._most_spans = 0
        self._num_spans, self._recorded_bytes = Counter[str](), Counter[str]()
        self._left_out, self._num_notes = RepeatCounter(), Counter[str]()
        self._has_risen = False
        self._candidates: tuple[str, ...] = ()  # before the trace was begun

    def begin(self, started_unix_s: float) -> None:
        """Open the trace with the start of training as time zero."""
        self.ledger.begin(started_unix_s)
        num_blocks = self.plan.course.num_blocks
        nodes = dict.fromkeys((*self.plan.nodes, *self._candidates))
        text = TraceText(
            nodes, num_blocks=num_blocks, started_unix_s=started_unix_s, placement_number=self.ledger.placement_number
        )
        self._trace = GrowingFile("trace.json", self._emit), text
        self._add_to_trace(TraceText.begin)

    def _send(self, **value: dict[str, Any]) -> None:
        """Send one event with a JSON object."""
        texts: dict[str, Any] = {name: json.dumps(content) for name, content in value.items()}
        self._emit(control_pb2.RunEvent(**texts))

    def _note(self, text: str) -> None:
        self._emit(control_pb2.RunEvent(note=text))

    def _add_to_trace(self, piece: Callable[[TraceText], str]) -> None:
        if self._trace is not None:
            file, text = self._trace
            file.write(piece(text).encode())

    @property
    def is_open(self) -> bool:
        """Whether training has begun."""
        return self._trace is not None

    def moved(self, command: rd.LogMove, at_unix_s: float) -> None:
        """Record a move, or why it failed; send its line to the submitter."""
        line = self.ledger.moved(command, at_unix_s)
        self._send(metrics_json=line)
        self._add_to_trace(lambda text: text.move(command.part.nodes, command, at_unix_s))

    @property
    def nodes(self) -> Collection[str]:
        """The nodes of the run, those that have joined among them."""
        return self.ledger.nodes.keys()

    def joined(self, facts: NodeFacts, links: Sequence[LinkFacts]) -> None:
        """Add one more node with its links; the books of a returned node are continued."""
        if not self._recorded.has_node(facts.node):
            self._links = (*self._links, *links)
            self._recorded.joined(facts, links)
        if facts.node in self.ledger.nodes:  # it may be of a former placement, and was not there at the start
            return
        self.ledger.nodes[facts.node] = NodeTotals()
        self.operations.joined(facts.node)
        self._add_to_trace(lambda text: text.joined(facts.node))
        if not self.is_open:
            self._candidates = (*self._candidates, facts.node)

    def recovered(self, command: rd.LogRecovery, at_unix_s: float) -> None:
        """Record a recovery; send plan and line to the submitter."""
        self.plan = command.plan
        self.ledger.recovered(command.plan, command.part.placement.placement_number, at_unix_s)
        line = recovery_line(command)
        self._send(plan_json=command.plan.to_json())
        self._send(metrics_json=line)

    def add_report(self, request: control_pb2.ReportRequest) -> None:
        """Record bytes, spans and recording of a node's report; spans of unknown actions are left out.

        So is what a node says beyond all that it may have done in the granted items, as each span is a line of a file.
        """
        node = request.node
        for note in request.notes:
            self._num_notes[node] += 1
            if self._num_notes[node] <= _MAX_NOTES:
                self._note(one_line(note))
            elif self._num_notes[node] == _MAX_NOTES + 1:
                self._note(f"node {node} has more than {_MAX_NOTES:,} notes, left out here")
        for traffic in request.traffic:
            self.ledger.add_traffic(node, traffic.seq, traffic.target, traffic.payload, traffic.bytes)
            self.operations.add_traffic(traffic.seq, traffic.payload, traffic.bytes)
        for transfer in request.transfers:
            self.links.add(transfer.source, node, transfer.bytes, transfer.seconds, at_s=transfer.at_unix_s)
            if self.pace is not None:
                self.pace.links.add(transfer.source, node, transfer.bytes, transfer.seconds, at_s=transfer.at_unix_s)
        spans = list(itertools.islice(self._spans(request), self._most_spans - self._num_spans[node]))
        self._num_spans[node] += len(spans)
        self.ledger.add_spans(node, spans)
        self.operations.add_spans(spans)
        if self.onlooker is not None:
            self._activity.add(node, spans)
        for span in filter(lambda span: span.is_compute, spans):
            self._recorded.add(node, span.action, span.end_s - span.start_s, worked_s=span.worked_s)
            if self.pace is not None:
                self.pace.add(node, span.action, span.end_s - span.start_s)
        self._add_to_trace(lambda text: text.spans(node, spans))
        self._recorded_bytes[node] += len(request.recording)
        if (
            request.recording
            and self._job.runtime.record
            and self._recorded_bytes[node] <= _MAX_HEADER_BYTES + _MAX_RECORDED_BYTES * self._most_spans
        ):
            if node not in self._recordings:
                self._recordings[node] = GrowingFile(f"recordings/{node}.jsonl", self._emit)
            self._recordings[node].write(request.recording.encode())

    def _spans(self, request: control_pb2.ReportRequest) -> Iterator[Span]:
        """Yield the spans of a report with parsed actions; unknown actions are left out with a warning."""
        for span in request.spans:
            try:
                action = parse_action(span.action, self.plan.course.num_blocks)
            except PlanError as error:
                if count := self._left_out.told(request.node):
                    told = "node %s reports an invalid action, which is left out: %s%s"
                    _LOG.warning(told, request.node, error, times(count))
            else:
                yield Span(action, span.start_unix_s, span.end_unix_s, span.worked_s)

    def granted(self, turns: Sequence[Turn]) -> None:
        """Expect the actions of these turns."""
        if self.onlooker is not None:
            self._activity.granted(turns)
        course = self.plan.course
        for turn in turns:
            ways = 1 + len(microbatch_rows(course, item_of(course, turn, 0)))
            self._most_spans += turn.num_items * ways * _ACTIONS * (course.num_blocks + 2)
            self.end_seq, self.end_step = max(self.end_seq, turn.end_seq), turn.end_step
            self._recorded.granted(turn)
            if self.pace is not None:
                self.pace.granted(turn)

    def emit_profile(self) -> None:
        """Send the profile to the submitter."""
        self._send(profile_json=self.profile().to_json())

    def profile(self) -> Profile:
        """Make a profile from the times of the run's actions so far."""
        return self._recorded.profile()

    def shown_links(self) -> tuple[LinkFacts, ...]:
        """The links with a rate from the run's own transfers."""
        return self.links.shown(self._links)

    def note_end(self, seq: int, at_unix_s: float) -> None:
        """Note the end of an item, for the line that the state machine logs next."""
        self._ends_unix_s[seq] = at_unix_s

    def log(self, command: Logged) -> None:
        """Record a log command, and send it to the submitter."""
        match command:
            case rd.LogStep():
                self.ledger.step_done(command, self._ends_unix_s.pop(command.seq))
                if not self.plan.goes_back:  # else it was shown when it was done
                    self._send(step_json=self.ledger.progress_of(command))
            case rd.ShowStep():
                self._send(step_json=self.ledger.progress_of(command))
            case rd.LogTurn(turn):
                self._recorded.turn_done(turn)
                if self.pace is not None:
                    self.pace.turn_done(turn)
                self.operations.turn_done(turn)
                for line in self.ledger.turn_done(turn):
                    self._send(metrics_json=line)
                if self.onlooker is not None and (activity := self._activity.turn_done(turn, self.plan.nodes)):
                    self.onlooker(control_pb2.RunEvent(activity_json=json.dumps(activity)))
            case rd.LogPlan(plan, why):
                self.plan = plan
                self.ledger.replanned(plan)
                self._send(plan_json=plan.to_json())
                self._send(metrics_json=replan_line(plan, why))
            case rd.LogFetched():
                if told := fetched_text(command):
                    self._note(told)
                    self._send(metrics_json=fetched_line(command))
            case rd.LogUnfreeze(step, depth):
                entry = {"kind": "unfreeze", "step": step, "depth": depth}
                self._send(step_json=self.ledger.decided(entry))
            case rd.LogOperations(step, operations):
                entry = chosen_entry(self.plan.course, step, operations)
                self._send(step_json=self.ledger.decided(entry))
                chosen = ScheduledTable(step=step, operations=operations, origin=self.plan.course.table_origin)
                self._send(operations_json=chosen.to_json())
            case rd.LogNodeError(node, error, message):
                self._note(f"{message}; the run goes on without node {node}")
                line = self.ledger.node_failed(node, error, message)
                self._send(metrics_json={"kind": "node_error", **line})
            case rd.LogTechniqueFailed(_, problem):
                self._note(problem)
            case rd.LogStop(step, evaluations):
                self._note(stop_text(step, evaluations, keeps_best=bool(self._job.train.keep_best)))
                self._send(metrics_json=self.ledger.stopped(step, evaluations))
            case rd.LogEvaluation(step, values, is_best):
                line = self.ledger.evaluation_done(step, dict(values), is_best=is_best)
                self._send(step_json=line)
                self._send(metrics_json=line)
                if (risen := line.get("risen")) and not self._has_risen and step < self.plan.course.num_steps:
                    self._has_risen = True
                    self._note(risen)

    def add_to_ledger(self, text: str) -> None:
        """Send lines of the ledger of an audited run, so that a run that is killed has those of all closed turns."""
        if text and self._ledger_file is None:
            self._ledger_file = GrowingFile(LEDGER, self._emit)
        if self._ledger_file is not None:
            self._ledger_file.write(text.encode(), at_once=True)

    def close(self) -> None:
        """Complete the growing files, so that the trace of a failed run opens too."""
        self._add_to_trace(TraceText.end)
        if self._trace is not None:
            self._trace[0].close()
            self._trace = None
        for file in (*self._recordings.values(), *filter(None, [self._ledger_file])):
            file.close()
