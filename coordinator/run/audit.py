"""The audit of a run by its coordinator: draws work of hosts, has it repeated, and compares what comes out.

::

    Grant      draws cells, tells neighbours of the hosts which tensors to keep, with a ticket for each of them
    report     the trail of each node, before the end of its turn; a second one is ignored
    CheckTurn  all trails are there: each has what the plan says, is signed, and agrees with the others of what is kept
    questions  each drawn cell is repeated by its checker, one after the other at each host; what that one says against
               a node, by the third too
    answers    TurnRepeated with those that are waited for; TurnChecked after the last one, or the first that is wrong
    LogTurn    the statements of the turn go into the ledger of the run

The rule is in ``ringtune.techniques.audit``. Results are equal in bits on hosts of one numeric class with equally many
threads, and within a tolerance on others.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from coordinator.run.driver import Participants
from ringtune.costs.measurement import numeric_class
from ringtune.costs.profile import NodeFacts
from ringtune.errors import FrameError, IntegrityError, InterruptedRunError, PeerLostError, RingTuneError
from ringtune.job.job import Job, kinds_of
from ringtune.run_control import events as rd
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.course import COLLABORATION, Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.schedule.units import unit_name
from ringtune.techniques.audit import (
    NOTHING,
    Cell,
    Finding,
    RepeatTask,
    Trail,
    checkers_of_cell,
    draw,
    ends,
    ends_differ,
    held_differ,
    judge,
    keys_to_keep,
    question,
    read_results,
    read_trail,
    settle,
    shown_name,
    shown_order,
    statement,
    tensor_name,
    tolerance,
    trail_problem,
    work_of,
)
from ringtune.texts import printable
from ringtune.transport.parties import node_party
from ringtune.v1 import control_pb2

_GONE: Final = (PeerLostError, FrameError, InterruptedRunError)
"""Errors of a host that is lost, was started again, or has given the run up: it may come back."""
_MAX_NOTES: Final = 8
"""Accusations of a turn that a third does not confirm, of which the text stands in the note; each has 4,000 letters."""


class CellRepeated(NamedTuple):
    """A host has repeated a cell, or can't: ``error`` is of the call to it, ``call`` the number of it."""

    call: int
    cell: Cell
    checker: str
    reply: control_pb2.RepeatReply | None
    error: RingTuneError | None = None


@dataclass(slots=True)
class _Open:
    """A granted turn: what is drawn, tickets by node and tensor that it keeps, trails as reported and as read."""

    drawn: tuple[Cell, ...]
    tickets: dict[tuple[str, str], str] = field(default_factory=dict)
    told: dict[str, control_pb2.AuditTrail] = field(default_factory=dict)
    trails: dict[str, Trail] = field(default_factory=dict)


class RunAudit:
    """The audit of one run; called on the run's thread.

    Args:
        facts: returns those of the run's nodes, also of nodes that have joined since, by name.
        authorities: returns the authorities of the nodes' certificates, PEM, two while the authority is rotated; none =
            plain text, where nothing is signed.
        source: of random numbers that no node can predict.
        repeated: gets answers, from any thread; they have to be passed to ``take``.

    Attributes:
        figures: cells that were drawn, checked, and that two hosts disagreed on; seconds that turns waited for it.
    """

    def __init__(
        self,
        participants: Participants,
        job: Job,
        facts: Callable[[], Mapping[str, NodeFacts]],
        repeated: Callable[[CellRepeated], None],
        *,
        authorities: Callable[[], tuple[bytes, ...]] = tuple,
        source: random.Random | None = None,
    ) -> None:
        self._participants, self._job, self._facts, self._repeated = participants, job, facts, repeated
        self._authorities, self._source = authorities, source or random.SystemRandom()
        self.figures = {"drawn": 0, "checked": 0, "disagreed": 0, "seconds": 0.0}
        self._open: dict[int, _Open] = {}
        self._agreed: dict[int, tuple[str, str]] = {}  # by block: its host, and its state at the end of a turn
        self._shown: dict[int, tuple[str, str]] = {}  # by block: its host, and the last vectors of pairs that it showed
        self._turn: Turn | None = None
        self._part: Plan | None = None
        self._since_s = 0.0
        self._waiting: dict[Cell, RepeatTask] = {}
        self._against: dict[Cell, Finding] = {}
        self._num_calls = 0
        self._last_call: dict[Cell, int] = {}
        self._asked: dict[str, list[Cell]] = {}  # by host that repeats them: the first one is under way
        self._notes: list[str] = []
        self._checked: dict[int, tuple[Plan, _Open]] = {}
        self._certificates: dict[str, bytes] = {}
        self._trusted: dict[bytes, None] = {}
        self._sent: dict[int, int] = {}  # by block: placement in which its host got it of its helper in a closed turn
        self._num_told = -1  # authorities that the ledger has

    def granted(self, part: Plan, turns: Sequence[Turn]) -> dict[str, dict[TensorKey, str]]:
        """Draw cells of granted turns; return by node the tensors that it has to keep, with their tickets."""
        tickets_of: dict[str, dict[TensorKey, str]] = {}
        for turn in turns:
            drawn = draw(part, turn, self._job.audit_share, self._source, shown=self._shown)
            now = self._open[turn.index] = _Open(drawn)
            for node, keys in keys_to_keep(part, turn, now.drawn).items():
                tickets = {key: f"{self._source.getrandbits(128):032x}" for key in keys}
                now.tickets |= {(node, tensor_name(key)): ticket for key, ticket in tickets.items()}
                tickets_of.setdefault(node, {}).update(tickets)
        return tickets_of

    def note(self, request: control_pb2.ReportRequest) -> None:
        """Take the trails of a report; one that a node has told before counts.

        Trails of turns that are not open are left out: the run may have gone back since.
        """
        for message in request.trails:
            if message.turn in self._open:
                self._open[message.turn].told.setdefault(request.node, message)

    def forget(self) -> None:
        """Check nothing more: the run goes back."""
        self._turn, self._waiting, self._against, self._open = None, {}, {}, {}
        self._notes, self._checked, self._last_call, self._asked = [], {}, {}, {}

    def check(self, part: Plan, turn: Turn) -> None:
        """Begin to check a turn that every node has done."""
        self._turn, self._part, self._since_s = turn, part, time.monotonic()
        now = self._open.setdefault(turn.index, _Open(()))
        works = {node: work_of(part, turn, node) for node in part.nodes}
        adapters = [kind.config for kind in kinds_of(self._job, part.course.user_sets)]
        for node, work in works.items():
            try:
                now.trails[node] = read_trail(now.told[node].digests_json, node)
                kept = {name for keeper, name in now.tickets if keeper == node}
                problem = trail_problem(part, work, now.trails[node], node, adapters=adapters, kept=kept)
            except KeyError:
                problem = f"node {node} does not tell what it did in turn {turn.index}"
            except IntegrityError as error:
                problem = str(error)
            if problem := problem or self._signature_problem(part, turn, node):
                return self._end(Finding((node,), problem))
            if finding := self._other_state(part, node, turn):
                return self._end(finding)
        but_begin: set[int] = set()
        if part.course.helper_settings.users == COLLABORATION:
            number = part.placement.placement_number
            but_begin = {helper.start for helper in part.placement.helpers if self._sent.get(helper.start) != number}
        held = functools.partial(held_differ, part.placement, works, now.trails, but_begin=but_begin)
        if finding := ends_differ(works, now.trails) or held():
            return self._end(finding)
        self.figures["drawn"] += len(now.drawn)
        self._waiting = {cell: question(part, turn, cell, works[cell.node], now.trails) for cell in now.drawn}
        if not self._waiting:
            return self._end(None)
        for cell in now.drawn:
            self._ask(cell, checkers_of_cell(part.placement, cell)[0])
        return self._tell_who_repeats(turn)

    def _tell_who_repeats(self, turn: Turn) -> None:
        """Name the hosts that are waited for: a third is asked when the time of the others is nearly over."""
        nodes = tuple(sorted(node for node, cells in self._asked.items() if cells))
        self._participants.queue.put(rd.TurnRepeated(turn.index, nodes))

    def _other_state(self, part: Plan, node: str, turn: Turn) -> Finding | None:
        """Find a block with which a node began in another state than the closed turn before ended with.

        If another host had it then, that one may have handed on something else than it said.
        """
        began = {block: begin for block, begin, _ in ends(part, self._open[turn.index].trails[node], node)}
        for block in {*part.placement.trained_at(node), *began}:
            before, digest = self._agreed.get(block, (node, began.get(block)))
            if digest != began.get(block):
                told = "" if before == node else f" than node {before} ended with"
                what = unit_name(block, part.course.head)
                text = f"node {node} began turn {turn.index} with another state of {what}{told}"
                return Finding(tuple(dict.fromkeys((node, before))), text)
        trail, first = self._open[turn.index].trails[node], NOTHING if not turn.first_step else ""
        for block in {helper.start for helper in part.placement.helpers_of(node)}:
            name, (before, digest) = shown_name(-1, 0, block), self._shown.get(block, (node, first))
            if digest and trail.get(name, digest) != digest:
                text = f"node {node} began turn {turn.index} with other vectors of the pairs of block {block}"
                return Finding(tuple(dict.fromkeys((node, before))), text)
        return None

    def _signature_problem(self, part: Plan, turn: Turn, node: str) -> str:
        self._trusted |= dict.fromkeys(self._authorities())  # a trail may come when its authority is replaced already
        if not self._trusted:
            return ""
        from ringtune.transport.identity import signature_problem

        now = self._open[turn.index]
        told, text = now.told[node], statement(self._participants.run_id, part, turn, node, now.trails[node])
        signed = (text.encode(), told.signature, told.certificate_pem)
        why = signature_problem(*signed, self._trusted, node_party(node))
        return f"node {node} does not sign what it did in turn {turn.index}: {why}" if why else ""

    def _ask(self, cell: Cell, checker: str) -> None:
        """Let a host repeat a cell once it has repeated all others: the plan counts the memory of one."""
        cells = self._asked.setdefault(checker, [])
        cells.append(cell)
        if len(cells) == 1:
            self._call(cell, checker)

    def _ask_next(self, checker: str) -> None:
        cells = self._asked[checker] = self._asked[checker][1:]
        if cells:
            self._call(cells[0], checker)

    def _call(self, cell: Cell, checker: str) -> None:
        query = self._waiting[cell]
        now = self._open[query.place.turn]
        self._num_calls += 1
        self._last_call[cell] = call = self._num_calls
        self._participants.calls[checker].repeat(
            control_pb2.RepeatRequest(
                node=cell.node,
                cell=control_pb2.AuditedCell(**query.place._asdict()),
                given=query.given,
                tickets={name: now.tickets[peer, name] for name, peer in query.peers.items()},
            ),
            on_result=lambda reply: self._repeated(CellRepeated(call, cell, checker, reply)),
            on_failed=lambda error: self._repeated(CellRepeated(call, cell, checker, None, error)),
        )

    def take(self, answer: CellRepeated) -> rd.NodeFailed | None:
        """Take a host's answer; return the failure of a host that is lost, or that it could not reach."""
        part, turn, cell = self._part, self._turn, answer.cell
        if part is None or turn is None or answer.call != self._last_call.get(cell):
            return None
        del self._last_call[cell]  # the answer may come again
        if isinstance(answer.error, _GONE):
            self.forget()
            return rd.NodeFailed(answer.checker, PeerLostError.__name__, str(answer.error))
        if answer.reply is not None and answer.reply.is_lost and answer.reply.node in self._sources(cell):
            text, lost = printable(answer.reply.problem), answer.reply.node
            self.forget()
            return rd.NodeFailed(answer.checker, PeerLostError.__name__, text, lost)
        first = self._against.pop(cell, None)
        checker, *third = checkers_of_cell(part.placement, cell)
        try:
            finding = self._compared(part.course, self._waiting[cell], answer)
        except RingTuneError as error:
            text = f"node {answer.checker} can't repeat work of node {cell.node}: {error}"
            if first is not None and answer.reply is None:  # a third that lacks memory is not to blame
                self._end(_undecided(first, checker, text))
            else:
                self._end(Finding((answer.checker,), text))
            return None
        if first is not None:
            finding = settle(first, finding, checker)
        elif finding is not None:
            self.figures["disagreed"] += 1
            if third and third[0] not in finding.nodes:
                self._against[cell] = finding
                self._ask(cell, third[0])
                self._ask_next(answer.checker)
                self._tell_who_repeats(turn)
                return None
            finding = _undecided(finding, checker, "no third host can repeat it")
        del self._waiting[cell]
        self.figures["checked"] += 1
        if finding is not None and not finding.nodes:
            self._notes.append(finding.text)
            finding = None
        if finding is not None or not self._waiting:
            self._end(finding)
        else:
            self._ask_next(answer.checker)
            self._tell_who_repeats(turn)
        return None

    def _sources(self, cell: Cell) -> tuple[str, ...]:
        """Return the nodes that hand something in for a cell."""
        return (cell.node, *self._waiting[cell].peers.values())

    def _compared(self, course: Course, query: RepeatTask, answer: CellRepeated) -> Finding | None:
        """Judge an answer; raises ``RingTuneError`` where it is none, which speaks against who gives it."""
        node, host = answer.checker, query.cell.node
        if answer.reply is None:
            raise answer.error or IntegrityError("there is no answer")
        if accused := answer.reply.node:
            if accused not in self._sources(query.cell):
                raise IntegrityError(f"it accuses node {printable(accused)}, which has no part in it")
            return Finding(
                (accused,), f"node {accused} does not hand in what it told: {printable(answer.reply.problem)}"
            )
        results = read_results(answer.reply.results_json, node, query)
        facts = self._facts()
        classes = [(numeric_class(facts[name], course), facts[name].threads) for name in (host, node)]
        return judge(query, results, tolerance(self._job.model.dtype, course, *classes))

    def _end(self, finding: Finding | None) -> None:
        """Say what was found."""
        turn, part = self._turn, self._part
        if turn is None or part is None:
            return
        if finding is None:
            self._checked[turn.index] = part, self._open[turn.index]
        more = [f"and {len(self._notes) - _MAX_NOTES:,} more"] * (len(self._notes) > _MAX_NOTES)
        nodes, text = (finding.nodes, finding.text) if finding else ((), "; ".join(self._notes[:_MAX_NOTES] + more))
        self.figures["seconds"] += time.monotonic() - self._since_s
        self._turn, self._waiting, self._against, self._notes = None, {}, {}, []
        self._last_call, self._asked = {}, {}
        self._open = {index: entry for index, entry in self._open.items() if index > turn.index}
        self._participants.queue.put(rd.TurnChecked(turn.index, nodes, text))

    # ---- closed turns -----------------------------------------------------------------------------

    def closed(self, turn: Turn) -> str:
        """Note the states at the end of a closed turn; return its line of the ledger, with the head of the file."""
        if turn.index not in self._checked:
            return ""
        part, now = self._checked.pop(turn.index)
        self._sent |= {
            int(name.rpartition(" ")[2]): part.placement.placement_number
            for trail in now.trails.values()
            for name in trail
            if name.startswith("held ") and not name.startswith("held begin ")
        }
        self._agreed |= {
            block: (node, end) for node in part.nodes for block, _, end in ends(part, now.trails[node], node)
        }
        for node in part.nodes:
            for helper in part.placement.helpers_of(node):
                last = now.trails[node].get(shown_order(now.trails[node], helper.start)[-1], NOTHING)
                self._shown |= {helper.start: (node, last)} if last != NOTHING else {}
        lines = [self._line(part, turn, now)]
        if len(self._trusted) != self._num_told:  # at the begin, and when the authority is rotated
            self._num_told = len(self._trusted)
            texts = [authority.decode() for authority in self._trusted]
            lines.insert(0, {"line": "run", "run": self._participants.run_id, "authorities": texts})
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)

    def _line(self, part: Plan, turn: Turn, now: _Open) -> dict[str, Any]:
        """Return the statements of a checked turn, each with its signature, and with its certificate if that is new."""
        nodes: dict[str, dict[str, str]] = {}
        for node, trail in now.trails.items():  # what a node without a part in the turn tells of it is left out
            told = now.told[node]
            nodes[node] = {"says": statement(self._participants.run_id, part, turn, node, trail)}
            if not self._trusted:  # plain text: what looks like a signature was not checked
                continue
            nodes[node]["signature"] = told.signature.hex()
            if self._certificates.get(node) != told.certificate_pem:
                self._certificates[node] = told.certificate_pem
                nodes[node]["certificate"] = told.certificate_pem.decode()
        drawn = [
            [*cell[:3], *checkers_of_cell(part.placement, cell)[:1], *([cell.block] if cell.is_fit else [])]
            for cell in now.drawn
        ]
        return {"line": "turn", "turn": turn.index, "drawn": drawn, "nodes": nodes}


def _undecided(finding: Finding, checker: str, why: str) -> Finding:
    """Name both sides where no third host decides between a checker and what it says."""
    return Finding(tuple(dict.fromkeys((*finding.nodes, checker))), f"{finding.text}, says node {checker}, and {why}")
