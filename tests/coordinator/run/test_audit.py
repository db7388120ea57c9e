"""The coordinator's audit: what it asks for, whom it names, and what the state machine makes of it."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import pytest

from coordinator.run.audit import CellRepeated, RunAudit, read_results
from ringtune.errors import FrameError, IntegrityError
from ringtune.job.job import Job, Model
from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.schedule.turns import Turn, turn_sequence
from ringtune.techniques.audit import Cell, Compared, begin_name, exchanges, state_name, sum_name, tensor_name, way_of
from ringtune.v1 import control_pb2
from tests.suites.test_recovery_on_virtual_clock import placing
from tests.support.planner_rings import device
from tests.support.plans import make_plan
from tests.support.recovering_ring import RecoveringRing

PLAN: Final = make_plan([("a", 0, 2), ("b", 2, 4)], ["o"], microbatches=2, method="all", eval_rows=0)
CELL: Final = Cell("b", 1, 1)


class Calls:
    """Notes what a node is asked to repeat."""

    def __init__(self) -> None:
        self.asked: list[tuple[control_pb2.RepeatRequest, Any, Any]] = []

    def repeat(self, request: control_pb2.RepeatRequest, *, timeout_s: float, on_result: Any, on_failed: Any) -> None:
        """Answered by the test."""
        assert timeout_s > 0
        self.asked.append((request, on_result, on_failed))


class Audit:
    """An audit whose only drawn cell is ``CELL``, and the answers to it."""

    def __init__(self) -> None:
        facts = {node: device(node, num_blocks=4) for node in "abo"}
        self.calls = {node: Calls() for node in "abo"}
        self.put: list[Any] = []
        job = Job(model=Model(path="m")).with_overrides({"audit.share": 1.0})
        calls: Any = self.calls
        self.run = RunAudit(job, 1.0, facts, calls, self.put.append, random.Random(0))
        self.turn: Turn = next(turn_sequence(PLAN.course))
        self.kept = self.run.granted(PLAN, [self.turn])
        self.run._drawn[self.turn.index] = (CELL,)
        self.keys = exchanges(way_of(PLAN, self.turn, CELL), CELL)
        shared = {tensor_name(one.key): "t" for one in self.keys}
        sums = {sum_name(1, micro): "s" for micro in (0, 1)}
        own = {state_name(1, block): "e" for block in (2, 3)} | {begin_name(block): "b" for block in (2, 3)}
        self.trails = {"a": {**shared, begin_name(0): "b"}, "b": {**shared, **sums, **own}, "o": shared}

    def told(self, *nodes: str) -> None:
        """These nodes have told their trails."""
        for node in nodes or "abo":
            request = control_pb2.ReportRequest(node=node)
            request.trails.add(turn=self.turn.index, digests_json=json.dumps(self.trails[node]))
            self.run.note(request)

    def answer(self, **changes: list[Any]) -> control_pb2.RepeatReply:
        """What the host finds that repeats the cell; all is right without changes."""
        results = {tensor_name(one.key): ["t"] if one.comes else ["t", "t"] for one in self.keys}
        results |= {sum_name(1, 1): ["s", "s"], sum_name(1, 0): ["s"], state_name(1, 2): ["e", "e"]}
        return control_pb2.RepeatReply(results_json=json.dumps({**results, **changes}))


def test_drawn_cell_is_repeated_by_the_next_host_and_the_turn_is_checked() -> None:
    """Its neighbours keep what they exchange with it; the host is asked with the order of its sums."""
    audit = Audit()
    assert {*audit.kept} == {"a", "b", "o"}  # each host is a neighbour of the other
    audit.told()
    audit.run.check(PLAN, audit.turn)
    ((request, on_result, _),) = audit.calls["a"].asked
    assert (request.node, request.cell.seq, request.cell.micro) == ("b", 1, 1)
    assert (request.cell.before, request.cell.last) == (0, 1)
    on_result(audit.answer())
    assert audit.run.take(audit.put.pop()) is None
    assert audit.put == [rd.TurnChecked(audit.turn.index)] and not audit.calls["b"].asked + audit.calls["o"].asked


@pytest.mark.parametrize(
    ("name", "value", "nodes"), [(sum_name(1, 1), ["s", "x", 1e-3], ("b",)), (sum_name(1, 0), ["x"], ("b",))]
)
def test_other_results_name_the_host(name: str, value: list[Any], nodes: tuple[str, ...]) -> None:
    """By what it computed, or what it hands in."""
    audit = Audit()
    audit.told()
    audit.run.check(PLAN, audit.turn)
    audit.run.take(CellRepeated(audit.turn.index, CELL, "a", audit.answer(**{name: value})))
    (found,) = audit.put
    assert found.nodes == nodes and "node b" in found.problem


def test_nodes_that_do_not_do_their_part_are_named() -> None:
    """No trail, another state at the beginning, nothing handed in, nothing repeated; and a call that fails."""
    audit = Audit()
    audit.told("a", "o")
    audit.run.check(PLAN, audit.turn)
    assert audit.put.pop().nodes == ("b",)

    audit = Audit()
    audit.run._agreed = {2: "other"}
    audit.told()
    audit.run.check(PLAN, audit.turn)
    found = audit.put.pop()
    assert found.nodes == ("b",) and "another state of block 2" in found.problem

    for reply, node in (
        (control_pb2.RepeatReply(node="o", problem="gone"), "o"),
        (control_pb2.RepeatReply(results_json="{}"), "a"),
    ):
        audit = Audit()
        audit.told()
        audit.run.check(PLAN, audit.turn)
        audit.run.take(CellRepeated(audit.turn.index, CELL, "a", reply))
        assert audit.put.pop().nodes == (node,)

    audit = Audit()
    audit.told()
    audit.run.check(PLAN, audit.turn)
    failed = audit.run.take(CellRepeated(audit.turn.index, CELL, "a", None, FrameError("no such run")))
    assert failed == rd.NodeFailed("a", "FrameError", "no such run")
    assert audit.run.take(CellRepeated(audit.turn.index, CELL, "a", audit.answer())) is None and not audit.put


def test_results_are_read_strictly() -> None:
    """Digests and a distance by name, of which the last two may be left out."""
    assert read_results('{"a": ["x"], "b": ["x", "y", 0.5]}', "a") == {"a": Compared("x"), "b": Compared("x", "y", 0.5)}
    for value in ('"x"', "[]", "[1]", '["x", "y", "z"]', '["x", "y", 0.5, 1]', "null"):
        with pytest.raises(IntegrityError, match="node a"):
            read_results(f'{{"a": {value}}}', "a")


def test_trail_counts_once_and_for_open_turns_only() -> None:
    """What a node tells after it may know what was drawn changes nothing."""
    audit = Audit()
    audit.told()
    audit.trails["b"] = {}
    audit.told("b")
    audit.run.check(PLAN, audit.turn)
    assert not audit.put and audit.calls["a"].asked
    audit.run.forget()
    audit.told("b")  # a report that was on its way when the run went back
    assert not audit.run._trails


class AuditedRing(RecoveringRing):
    """A run on the virtual clock whose turns are checked; ``wrong`` says what is found, by the step of a turn's end."""

    def __init__(self, wrong: dict[int, tuple[tuple[str, ...], str]], **values: Any) -> None:
        plan = make_plan([("a", 0, 1), ("c", 1, 3), ("b", 3, 4)], ["a", "b"], num_steps=12, method="all", eval_rows=0)
        rng = random.Random(0)
        super().__init__(plan, place=placing(rng, plan.nodes), rounds={"audits": True}, **values)
        self.wrong, self.checked = wrong, list[int]()

    def _obey_rounds(self, command: rd.Command) -> None:
        if not isinstance(command, rd.CheckTurn):
            super()._obey_rounds(command)
            return
        closed = [entry.turn.end_step for entry in self.result.logged if isinstance(entry, rd.LogTurn)]
        assert command.turn.end_step not in closed
        self.checked.append(command.turn.end_step)
        answer = rd.TurnChecked(command.turn.index, *self.wrong.pop(command.turn.end_step, ()))
        self.clock.at(self.clock.now_s + 0.5, self._tell_rounds, answer)


def test_turn_is_closed_once_it_is_checked_and_the_run_goes_on_without_the_host() -> None:
    """From the turn before; the host may come back to the coordinator, not to this run."""
    ring = AuditedRing({6: (("c",), "node c computed another result")})
    assert ring.run().finish == rd.Finish("", "")
    (recovery,) = [entry for entry in ring.result.logged if isinstance(entry, rd.LogRecovery)]
    assert (recovery.lost, recovery.step) == (("c",), 4)
    assert ring.checked == [2, 4, 6, 6, 8, 10, 12]
    assert ring._rounds.excluded == {"c"} and "c" not in recovery.part.placement.members
    machine = ring._rounds
    machine.phase = "training"
    machine.handle(rd.NodeJoined("c"), 0.0)
    assert "c" not in machine._nodes


@pytest.mark.parametrize(
    ("nodes", "policy", "remedy"),
    [
        (("b", "c"), RecoveryPolicy(), "without the one that you trust less"),
        (("b",), RecoveryPolicy(awaits_s=100.0), "recovery.owners = 'skip'"),
    ],
)
def test_run_ends_where_nobody_can_take_the_place(nodes: tuple[str, ...], policy: RecoveryPolicy, remedy: str) -> None:
    """One of two nodes lies, or it owns rows that no other node has; no turn after the agreed one is written."""
    ring = AuditedRing({6: (nodes, "the audit found it")}, recovery=policy)
    finish = ring.run().finish
    assert finish is not None and finish.error == "IntegrityError" and remedy in finish.message
    assert max(entry.turn.end_step for entry in ring.result.logged if isinstance(entry, rd.LogTurn)) == 4
