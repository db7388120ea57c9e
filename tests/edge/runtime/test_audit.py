"""Repeated work of hosts on real tensors: equal bits of honest hosts, and the name of one that computes otherwise."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from edge.runtime.audit import AuditRecorder, NodeAudit, WorkRepeater
from edge.runtime.executor import NodeExecutor
from edge.transport.tensors import WIRE_TYPES
from ringtune.errors import FrameError, IntegrityError
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn, turn_sequence
from ringtune.techniques.audit import (
    Cell,
    CellPlace,
    Compared,
    Finding,
    Trail,
    cells,
    checked_by,
    checker_of,
    draw,
    ends,
    exchanges,
    judge,
    keys_to_keep,
    micro_order,
    read_trail,
    tensor_name,
    way_of,
)
from tests.features.feature import inputs
from tests.suites.test_recovery_on_virtual_clock import ring_of
from tests.support.torch_ring import Case, TorchCarrier, make_executor

SLICES = (("a", 0, 1), ("b", 1, 3), ("c", 3, 4))
Cheat = Callable[[str, Action, NodeExecutor], None]


def honest(node: str, action: Action, executor: NodeExecutor) -> None:
    """Do nothing."""


class AuditedCarrier(TorchCarrier):
    """Executors with their trails; each turn is checked as soon as every node has done it.

    Attributes:
        cheat: called after an action, before the node notes what it did.
        findings: of all turns.
        repeated: all results of repeated cells.
    """

    def __init__(self, case: Case, plan: Plan, cheat: Cheat) -> None:
        executors = {node: make_executor(case, plan.at(0), node) for node in plan.nodes}
        super().__init__(executors, case=case, plan=plan)
        self.part, self.cheat = plan.at(0), cheat
        self.findings: list[Finding] = []
        self.repeated: list[tuple[Cell, Mapping[str, Compared]]] = []
        self.agreed: dict[int, str] = {}
        self.audits: dict[str, NodeAudit] = {}
        self._drawn: dict[int, tuple[Cell, ...]] = {}
        self._trails: dict[int, dict[str, Trail]] = {}
        for node in self.part.nodes:
            other = checked_by(self.part.placement, node)

            def make(alias_plan: Plan, alias: str) -> NodeExecutor:
                return NodeExecutor(alias_plan, alias, case.node_job, case.folder / "model", None)

            repeater = WorkRepeater(self.part, other, make) if other else None
            self.audits[node] = NodeAudit(AuditRecorder(self.part, node, executors[node]), repeater)

    def granted(self, node: str, turn: Turn) -> None:
        """What is drawn is the same for all nodes."""
        if turn.index not in self._drawn:
            self._drawn[turn.index] = draw(self.part, turn, 1.0, random.Random(turn.index))
        super().granted(node, turn)
        recorder = self.audits[node].recorder
        recorder.keep(keys_to_keep(self.part, turn, self._drawn[turn.index]).get(node, ()))
        recorder.grant(turn)

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """With torch; the node may cheat."""
        values = super().run(node, action)
        self.cheat(node, action, self.executors[node])
        self.audits[node].recorder.after(action)
        return values

    def take(self, node: str, key: TensorKey) -> Any:
        """Noted."""
        content = super().take(node, key)
        self.audits[node].recorder.exchanged(key, *content)
        return content

    def put(self, node: str, key: TensorKey, content: Any) -> None:
        """Rounded as on the wire, and noted."""
        tensor, mask = content
        content = (tensor.to(WIRE_TYPES[self.part.course.wire_dtype]).to(tensor.dtype), mask)
        self.audits[node].recorder.exchanged(key, *content)
        super().put(node, key, content)

    def ended(self, node: str, turn: int) -> str:
        """Checked by the last node."""
        if text := self.audits[node].recorder.take(turn):
            trails = self._trails.setdefault(turn, {})
            trails[node] = read_trail(text, node)
            if len(trails) == len(self.part.nodes):
                self._check(turn, trails)
        return super().ended(node, turn)

    def _check(self, index: int, trails: Mapping[str, Trail]) -> None:
        turn = self.audits["a"].recorder.turn(index)
        for node, trail in trails.items():
            for block, begin, end in ends(self.part, turn, trail, node):
                assert self.agreed.setdefault(block, begin) == begin
                self.agreed[block] = end
        for cell in self._drawn[index]:
            results = self.repeat(turn, cell, trails)
            self.repeated.append((cell, results))
            peers = {tensor_name(one.key): one.peer for one in exchanges(way_of(self.part, turn, cell), cell)}
            if finding := judge(cell, peers, trails, results, 0.0):
                self.findings.append(finding)

    def repeat(self, turn: Turn, cell: Cell, trails: Mapping[str, Trail]) -> Mapping[str, Compared]:
        """What the checker of a host finds, with what crosses a wire as files."""
        audit = self.audits[checker_of(self.part.placement, cell.node)]
        order = micro_order(trails[cell.node], cell.seq)
        at = order.index(cell.micro) if cell.micro in order else -1
        place = CellPlace(turn.index, cell.seq, cell.micro, order[at - 1] if at > 0 else -1, order[-1] if order else -1)
        tensors = {key: self.audits[peer].tensor_file(key) for key, peer in audit.sources(place).items()}
        return audit.repeat(place, tensors, self.audits[cell.node].work_file(place))


def case_of(**changes: Any) -> Case:
    """Three hosts, one of them an owner, and an owner that hosts nothing."""
    values: dict[str, Any] = {
        "owners": ("a", "o"),
        "microbatches": 2,
        "num_steps": 6,
        "local_iterations": 2,
        "every_steps": 1,
    }
    return Case(folder=inputs(), **values | changes)


def audited(cheat: Cheat = honest, **changes: Any) -> AuditedCarrier:
    """A run of which each cell is repeated."""
    case = case_of(**changes)
    plan = case.plan(SLICES)
    carrier = AuditedCarrier(case, plan, cheat)
    ring = ring_of(plan, random.Random(1), carrier=carrier)
    assert ring.run().finish == rd.Finish("", "")
    return carrier


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "all", "dropout": 0.2, "dtype": "float32", "wire": "bfloat16"},
        {"method": "all", "optimizer": "sgd", "adapter": "lora", "eval_every": 2, "checkpoint_every": 2},
    ],
)
def test_repeated_work_of_honest_hosts_has_equal_bits(changes: dict[str, Any]) -> None:
    """Every cell of every turn of another owner, forward, backward and update, whatever depth, dropout or wire."""
    carrier = audited(**changes)
    assert not carrier.findings
    assert {cell.node for cell, _ in carrier.repeated} == {"a", "b", "c"}
    kinds = {name.split()[0] for _, results in carrier.repeated for name in results}
    assert kinds == {"h", "g", "sum", "state", "begin"}
    assert all(result.found in ("", result.given) for _, results in carrier.repeated for result in results.values())


def scaled(name: str, action: Action, executor: NodeExecutor) -> None:
    """A host that scales its gradients by 1.001."""
    if name == "b" and action.op is Op.BACKWARD:
        for parameter in executor.part.trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1.001)


def shifted(name: str, action: Action, executor: NodeExecutor) -> None:
    """A host whose update is another one than its gradients give."""
    if name == "b" and action.op is Op.UPDATE:
        with torch.no_grad():
            for parameter in executor.part.trained.values():
                parameter.mul_(1.0001)


def sends_otherwise(name: str, action: Action, executor: NodeExecutor) -> None:
    """A host that sends another hidden state than it should."""
    if name == "b" and action.op is Op.FORWARD and action.stop == 3:
        flow = executor._flows.of(action)
        assert flow.hidden is not None
        flow.hidden = flow.hidden * 1.001


@pytest.mark.parametrize("cheat", [scaled, shifted, sends_otherwise])
def test_host_that_computes_otherwise_is_named(cheat: Cheat) -> None:
    """A gradient, an update, or what it sends; no other node is."""
    carrier = audited(cheat, method="all")
    assert {finding.nodes for finding in carrier.findings} == {("b",)}
    assert len(carrier.findings) == sum(cell.node == "b" for cell, _ in carrier.repeated)


def first_turn(plan: Plan) -> Turn:
    """The first turn, one of a."""
    return next(turn_sequence(plan.course))


def test_what_is_not_kept_is_refused() -> None:
    """Turns that are closed, tensors that were not named, a file that lacks something, and a node without a slice."""
    carrier = AuditedCarrier(case_of(method="all"), case_of(method="all").plan(SLICES), honest)
    turn, place = first_turn(carrier.part), CellPlace(0, 0, 0)
    for node in "bco":
        carrier.audits[node].recorder.grant(turn)
    with pytest.raises(FrameError, match="turn 7"):
        carrier.audits["b"].recorder.turn(7)
    with pytest.raises(FrameError, match="keeps no hidden state"):
        carrier.audits["b"].tensor_file(TensorKey("h", 0, 0, 1))
    with pytest.raises(FrameError, match="has nothing"):
        carrier.audits["o"].work_file(place)
    with pytest.raises(FrameError, match="repeats no work"):
        carrier.audits["o"].sources(place)
    repeater = carrier.audits["c"].repeater
    assert repeater is not None and repeater.node == "b"
    with pytest.raises(IntegrityError, match="lacks 'before'"):
        repeater.repeat(turn, place, {}, {})
    later = dataclasses.replace(turn, index=2, first_seq=4)
    carrier.audits["b"].recorder.grant(later)
    with pytest.raises(FrameError, match="turn 0"):
        carrier.audits["b"].recorder.turn(0)


def test_only_what_is_drawn_of_others_is_kept() -> None:
    """Tensors of cells that were not drawn are dropped at once: with nothing drawn none is kept."""
    case = case_of(method="all")
    plan = case.plan(SLICES)
    recorder = AuditRecorder(plan, "b", make_executor(case, plan, "b"))
    turn = first_turn(plan)
    recorder.grant(turn)
    drawn = cells(plan, turn, "c")[:1]
    recorder.keep(keys_to_keep(plan, turn, drawn)["b"])
    hidden = torch.ones(2, 3, 4, dtype=torch.float64)
    for micro in (0, 1):
        recorder.exchanged(TensorKey("h", 0, micro, 3), hidden, None)
    assert [*recorder._tensors] == [TensorKey("h", 0, 0, 3)]
