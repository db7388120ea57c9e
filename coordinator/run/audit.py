"""The audit of a run by its coordinator: draws work of hosts, has it repeated, and compares what comes out.

::

    Grant      draws cells, tells neighbours of the hosts which tensors to keep
    report     the trail of each node, before the end of its turn; a second one is ignored
    CheckTurn  all trails are there: each drawn cell is repeated by the next host in the ring
    answers    compared with the trails; TurnChecked after the last one, or with the first that is wrong

The rule is in ``ringtune.techniques.audit``. Results are equal in bits on hosts of one numeric class with equally many
threads, and within a tolerance on others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from coordinator.run.node_client import AgentCalls
from ringtune.costs.measurement import numeric_class
from ringtune.costs.profile import NodeFacts
from ringtune.errors import IntegrityError, RingTuneError
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.storage.strict import read_object
from ringtune.techniques.audit import (
    Cell,
    Compared,
    Finding,
    Trail,
    checker_of,
    draw,
    ends,
    exchanges,
    judge,
    keys_to_keep,
    micro_order,
    read_trail,
    tensor_name,
    tolerance,
    way_of,
)
from ringtune.v1 import control_pb2


class CellRepeated(NamedTuple):
    """A host has repeated a cell, or can't: ``error`` is of the call to it."""

    turn: int
    cell: Cell
    checker: str
    reply: control_pb2.RepeatReply | None
    error: RingTuneError | None = None


class RunAudit:
    """The audit of one run; called on the run's thread.

    Args:
        facts: by node.
        calls: to the nodes.
        put: takes answers, from any thread.
        source: of random numbers that no node can predict.
    """

    def __init__(
        self,
        job: Job,
        share: float,
        facts: Mapping[str, NodeFacts],
        calls: Mapping[str, AgentCalls],
        put: Callable[[CellRepeated | rd.TurnChecked], None],
        source: random.Random | None = None,
    ) -> None:
        self._job, self._share, self._facts, self._calls, self._put = job, share, facts, calls, put
        self._source = source or random.SystemRandom()
        self._drawn: dict[int, tuple[Cell, ...]] = {}
        self._trails: dict[int, dict[str, Trail]] = {}
        self._agreed: dict[int, str] = {}
        self._turn: Turn | None = None
        self._part: Plan | None = None
        self._waiting: set[Cell] = set()

    def granted(self, part: Plan, turns: Sequence[Turn]) -> dict[str, list[TensorKey]]:
        """Draw cells of granted turns; return by node the tensors that it has to keep."""
        found: dict[str, list[TensorKey]] = {}
        for turn in turns:
            self._drawn[turn.index] = draw(part, turn, self._share, self._source)
            for node, keys in keys_to_keep(part, turn, self._drawn[turn.index]).items():
                found.setdefault(node, []).extend(keys)
        return found

    def note(self, request: control_pb2.ReportRequest) -> None:
        """Take the trails of a report; one that a node has told before counts.

        Trails of turns that are not open are left out: the run may have gone back since.

        Raises:
            IntegrityError: one is not readable.
        """
        for message in request.trails:
            if message.turn not in self._drawn:
                continue
            trails = self._trails.setdefault(message.turn, {})
            trails.setdefault(request.node, read_trail(message.digests_json, request.node))

    def forget(self) -> None:
        """Check nothing more: the run goes back."""
        self._turn, self._waiting, self._drawn, self._trails = None, set(), {}, {}

    def check(self, part: Plan, turn: Turn) -> None:
        """Begin to check a turn that every node has done."""
        self._turn, self._part = turn, part
        trails, drawn = self._trails.get(turn.index, {}), self._drawn.get(turn.index, ())
        if finding := self._of_trails(part, turn, trails):
            self._end(finding)
            return
        self._waiting = {*drawn}
        if not drawn:
            self._end(None)
        for cell in drawn:
            self._ask(part, turn, cell, trails[cell.node])

    def _of_trails(self, part: Plan, turn: Turn, trails: Mapping[str, Trail]) -> Finding | None:
        """Say which node has no trail, or began with another state than it ended the turn before with."""
        for node in part.nodes:
            if node not in trails:
                return Finding((node,), f"node {node} does not tell what it did in turn {turn.index}")
            for block, begin, _ in ends(part, turn, trails[node], node):
                if self._agreed.get(block, begin) != begin:
                    return Finding((node,), f"node {node} began turn {turn.index} with another state of block {block}")
        return None

    def _ask(self, part: Plan, turn: Turn, cell: Cell, trail: Trail) -> None:
        checker, order = checker_of(part.placement, cell.node), micro_order(trail, cell.seq)
        at = order.index(cell.micro) if cell.micro in order else -1
        place = control_pb2.AuditedCell(
            turn=turn.index,
            seq=cell.seq,
            micro=cell.micro,
            before=order[at - 1] if at > 0 else -1,
            last=order[-1] if order else -1,
        )
        self._calls[checker].repeat(
            control_pb2.RepeatRequest(node=cell.node, cell=place),
            timeout_s=self._job.runtime.wait_s,
            on_result=lambda reply: self._put(CellRepeated(turn.index, cell, checker, reply)),
            on_failed=lambda error: self._put(CellRepeated(turn.index, cell, checker, None, error)),
        )

    def take(self, answer: CellRepeated) -> rd.NodeFailed | None:
        """Take a host's answer; return the failure of a host that did not repeat a cell."""
        turn, part = self._turn, self._part
        if turn is None or part is None or answer.turn != turn.index or answer.cell not in self._waiting:
            return None
        if answer.error is not None or answer.reply is None:
            self.forget()
            return rd.NodeFailed(answer.checker, type(answer.error).__name__, str(answer.error))
        self._waiting.discard(answer.cell)
        finding = self._compared(part, turn, answer.cell, answer.checker, answer.reply)
        if finding is not None or not self._waiting:
            self._end(finding)
        return None

    def _compared(
        self, part: Plan, turn: Turn, cell: Cell, checker: str, reply: control_pb2.RepeatReply
    ) -> Finding | None:
        if reply.node:
            return Finding((reply.node,), f"node {reply.node} hands in nothing for the audit: {reply.problem}")
        results = read_results(reply.results_json, checker)
        peers = {tensor_name(one.key): one.peer for one in exchanges(way_of(part, turn, cell), cell)}
        missing = [name for name in peers if name not in results]
        if missing:
            return Finding((checker,), f"node {checker} has not repeated {missing[0]} of node {cell.node}")
        classes = [(numeric_class(self._facts[node]), self._facts[node].threads) for node in (cell.node, checker)]
        permitted = tolerance(self._job.model.dtype, classes[0], classes[1])
        return judge(cell, peers, self._trails[turn.index], results, permitted)

    def _end(self, finding: Finding | None) -> None:
        """Say what was found; note the state of each block if nothing was."""
        turn, part = self._turn, self._part
        if turn is None or part is None:
            return
        if finding is None:
            trails = self._trails.get(turn.index, {})
            self._agreed |= {
                block: end for node in part.nodes for block, _, end in ends(part, turn, trails.get(node, {}), node)
            }
        self._turn, self._waiting = None, set()
        self._drawn = {index: drawn for index, drawn in self._drawn.items() if index > turn.index}
        self._trails = {index: trails for index, trails in self._trails.items() if index > turn.index}
        self._put(rd.TurnChecked(turn.index, *(finding or ())))


def read_results(text: str, node: str) -> dict[str, Compared]:
    """Parse what a host has repeated; raises ``IntegrityError``."""
    found: dict[str, Compared] = {}
    for name, value in read_object(text, f"what node {node} has repeated").items():
        fields = [*value, *Compared("")[len(value) :]] if isinstance(value, list) and value else []
        if [type(one) for one in fields] != [str, str, float]:
            raise IntegrityError(f"node {node} answers {name} with no digests; use one version on all machines")
        found[name] = Compared(*fields)
    return found
