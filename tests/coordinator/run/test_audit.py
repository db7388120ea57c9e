"""The coordinator's audit: what it asks for, whom it names, and what the state machine makes of it."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import pytest

from coordinator.run.audit import CellRepeated, RunAudit
from ringtune.errors import CapacityError, FrameError, InterruptedRunError, PeerLostError, RingTuneError
from ringtune.job.job import Job, Model
from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.schedule.course import COLLABORATION, HelperSettings
from ringtune.schedule.turns import StartPoint, Turn, turn_sequence
from ringtune.techniques.audit import NOTHING, Cell, cell_exchanges, cells, question, state_digest, statement, work_of
from ringtune.techniques.offload import helped
from ringtune.transport.identity import sign, signature_problem
from ringtune.transport.parties import node_party
from ringtune.v1 import control_pb2
from tests.suites.test_recovery_on_virtual_clock import placing
from tests.support.audit_trails import Ends, trail_of
from tests.support.planner_rings import device
from tests.support.plans import make_plan
from tests.support.recovering_ring import RecoveringRing
from tests.support.trust_parts import AUTHORITY, credentials_of

PLAN: Final = make_plan([("a", 0, 1), ("b", 1, 2), ("c", 2, 4)], ["o"], microbatches=2, method="all", eval_rows=0)
TWO: Final = make_plan([("a", 0, 1), ("b", 1, 4)], ["o"], microbatches=2, method="all", eval_rows=0)
CELL: Final = Cell("b", 1, 1)


class Calls:
    """Notes what a node is asked to repeat."""

    def __init__(self) -> None:
        self.asked: list[tuple[control_pb2.RepeatRequest, Any, Any]] = []

    def repeat(self, request: control_pb2.RepeatRequest, *, on_result: Any, on_failed: Any) -> None:
        """Answered by the test."""
        self.asked.append((request, on_result, on_failed))


class Audit:
    """An audit whose only drawn cell is ``CELL``, and the answers to it."""

    def __init__(self, plan: Any = PLAN, *, signers: Mapping[str, str] | None = None) -> None:
        self.facts = {node: device(node, num_blocks=4) for node in plan.nodes}
        self.calls = {node: Calls() for node in plan.nodes}
        self.put: list[Any] = []
        job = Job(model=Model(path="m")).with_overrides({"audit.share": 1.0})
        self.repeats: list[tuple[str, ...]] = []
        queue = SimpleNamespace(put=self._put)
        participants: Any = SimpleNamespace(run_id="r", calls=self.calls, queue=queue)
        self.plan, self.signers = plan, signers or {}
        authorities = (AUTHORITY.certificate_pem,) if signers else ()
        random_numbers, trusted = random.Random(0), lambda: authorities
        self.run = RunAudit(
            participants, job, lambda: self.facts, queue.put, authorities=trusted, source=random_numbers
        )
        self.turn: Turn = next(turn_sequence(plan.course))
        self.kept = self.run.granted(plan, [self.turn])
        self.opened = self.run._open[self.turn.index]
        self.opened.drawn = (CELL,)
        self.trails = {node: trail_of(plan, self.turn, node) for node in plan.nodes}

    def _put(self, event: Any) -> None:
        if isinstance(event, rd.TurnRepeated):
            self.repeats.append(event.nodes)
        else:
            self.put.append(event)

    def told(self, *nodes: str) -> None:
        """These nodes have told their trails."""
        for node in nodes or self.plan.nodes:
            request = control_pb2.ReportRequest(node=node)
            message = request.trails.add(turn=self.turn.index, digests_json=json.dumps(self.trails[node]))
            if who := self.signers.get(node):
                says = statement("r", self.plan, self.turn, node, self.trails[node]).encode()
                message.signature, message.certificate_pem = sign(says, credentials_of(who).identity)
            self.run.note(request)

    def check(self, *nodes: str) -> None:
        """The turn is done, and these nodes have told their trails."""
        self.told(*nodes)
        self.run.check(self.plan, self.turn)

    def answer(self, checker: str, cell: Cell = CELL, /, **changes: list[Any]) -> rd.NodeFailed | None:
        """A host repeats a cell; all is right without changes."""
        asked = question(self.plan, self.turn, cell, work_of(self.plan, self.turn, cell.node), self.trails)
        results = {name: [digest, 0.0] for name, digest in asked.told.items()}
        reply = control_pb2.RepeatReply(results_json=json.dumps({**results, **changes}))
        return self.reply(checker, reply, cell=cell)

    def reply(
        self, checker: str, reply: control_pb2.RepeatReply | None, error: Any = None, *, cell: Cell = CELL
    ) -> rd.NodeFailed | None:
        """A host answers, or can't."""
        return self.run.take(CellRepeated(self.run._last_call.get(cell, 0), cell, checker, reply, error))

    def asks(self) -> str:
        """The nodes that were asked to repeat the cell."""
        return "".join(node for node, calls in self.calls.items() for _ in calls.asked)

    @property
    def found(self) -> tuple[str, ...]:
        """The nodes that are named."""
        (checked,) = self.put
        return tuple(checked.nodes)


WRONG: Final = {"sum 1.1": ["x", 1e-3]}


def test_drawn_cell_is_repeated_by_the_next_host_and_the_turn_is_checked() -> None:
    """Its neighbours keep what they exchange with it, each with a ticket; the host is asked with the order of sums."""
    audit = Audit()
    tickets = {node: {*keys.values()} for node, keys in audit.kept.items()}
    assert {*tickets} == {"a", "b", "c", "o"}
    assert len(set.union(*tickets.values())) == sum(map(len, audit.kept.values()))
    audit.check()
    assert audit.asks() == "c"
    ((request, _, _),) = audit.calls["c"].asked
    assert (request.node, request.cell.seq, request.cell.micro) == ("b", 1, 1)
    assert (request.cell.before, request.cell.last) == (-1, 0)
    assert {*request.tickets} == {"h 1.1 1", "h 1.1 2", "g 1.1 2", "g 1.1 1"}
    for name, ticket in request.tickets.items():
        assert ticket in tickets["a" if name.endswith("1 1") else "c"]
    assert {one.peer for one in cell_exchanges(PLAN, audit.turn, CELL)} == {"a", "c"} and request.given[
        "sum 1.0"
    ] == "s"
    audit.answer("c")
    assert audit.put == [rd.TurnChecked(audit.turn.index)] and audit.asks() == "c"
    assert audit.run.figures["drawn"] == audit.run.figures["checked"] == 1 and not audit.run.figures["disagreed"]


@pytest.mark.parametrize(
    ("first", "second", "nodes"),
    [
        (WRONG, WRONG, ("b",)),
        (WRONG, {}, ("c",)),
        (WRONG, control_pb2.RepeatReply(node="b", problem="gone"), ("b",)),
        (control_pb2.RepeatReply(node="b", problem="gone"), control_pb2.RepeatReply(node="b"), ("b",)),
        (control_pb2.RepeatReply(node="b", problem="gone"), {}, ()),
    ],
)
def test_third_host_decides_between_a_host_and_its_checker(first: Any, second: Any, nodes: tuple[str, ...]) -> None:
    """The host computed otherwise; the checker lies; the host hides; it hands in nothing to both, or to one of them."""
    audit = Audit()
    audit.check()
    for checker, says in (("c", first), ("a", second)):
        assert audit.repeats[-1:] == [(checker,)]
        assert not audit.put and audit.asks() == "".join(sorted({"c", checker}))
        _ = audit.answer(checker, **says) if isinstance(says, dict) else audit.reply(checker, says)
    assert audit.found == nodes and bool(audit.put[0].problem)
    assert audit.run.figures["disagreed"] == 1


def test_two_hosts_that_disagree_are_both_named_where_no_third_decides() -> None:
    """In a ring of two, where the third has no memory for it, and where it is itself the accused."""
    audit = Audit()
    audit.check()
    audit.answer("c", **WRONG)
    audit.reply("a", None, CapacityError("no memory"))
    assert {*audit.found} == {"b", "c"} and "node a can't repeat work of node b" in audit.put[0].problem
    audit = Audit(TWO)
    audit.check()
    audit.answer("a", **WRONG)
    assert {*audit.found} == {"a", "b"} and "no third host" in audit.put[0].problem
    audit = Audit()
    audit.check()
    audit.reply("c", control_pb2.RepeatReply(node="a", problem="gone"))
    assert {*audit.found} == {"a", "c"}


def test_answer_to_an_earlier_call_is_not_that_of_the_third() -> None:
    """A checker's word counts once, also where its answer comes again."""
    audit = Audit()
    audit.check()
    ((_, on_result, _),) = audit.calls["c"].asked
    audit.answer("c", **WRONG)
    on_result(control_pb2.RepeatReply(node="b", problem="gone"))
    late = audit.put.pop()
    assert audit.run.take(late) is None and not audit.put
    audit.answer("a")
    assert audit.found == ("c",) and not audit.run._last_call


@pytest.mark.parametrize(
    "reply",
    [
        control_pb2.RepeatReply(results_json="{}"),
        control_pb2.RepeatReply(results_json="["),
        control_pb2.RepeatReply(results_json='{"sum 1.1": ["s", NaN]}'),
        control_pb2.RepeatReply(results_json='{"\\u001b[2J": ["s", 1.0]}'),
        control_pb2.RepeatReply(results_json=json.dumps({"x" * 1000: ["s", 1.0]})),
        control_pb2.RepeatReply(node="o", problem="accused without a part in it"),
        None,
    ],
)
def test_answer_that_is_none_speaks_against_who_gives_it(reply: control_pb2.RepeatReply | None) -> None:
    """As does an error of the call, but not the loss of the node, which may come back."""
    audit = Audit()
    audit.check()
    assert audit.reply("c", reply, CapacityError("no memory")) is None
    assert audit.found == ("c",) and len(audit.put[0].problem) < 200


def test_host_repeats_one_cell_after_the_other() -> None:
    """The plan counts the memory of one, and a node refuses the 65th call at once, by which an honest one was named.

    What a host repeats as the third waits in the same row.
    """
    audit = Audit()
    audit.opened.drawn = cells = (CELL, Cell("b", 0, 0), Cell("a", 0, 0), Cell("b", 1, 0))
    audit.check()
    assert (audit.asks(), audit.repeats) == ("bc", [("b", "c")])
    audit.answer("c", cells[0], **WRONG)
    assert (audit.asks(), audit.repeats[1:]) == ("abcc", [("a", "b", "c")])
    audit.answer("b", cells[2], **{"state 0 0": ["x", 1.0]})  # its third is c, which repeats another one
    assert (audit.asks(), audit.repeats[2:]) == ("abcc", [("a", "c")])
    audit.answer("a", cells[0])
    assert audit.found == ("c",)
    audit = Audit()
    audit.opened.drawn = cells
    audit.check()
    for checker, cell in zip("bccc", (cells[2], *cells[:2], cells[3]), strict=True):
        assert not audit.put
        for _ in range(2):  # an answer that comes again is none to the next question
            audit.answer(checker, cell)
    assert audit.put == [rd.TurnChecked(audit.turn.index)] and audit.asks() == "bccc"


def test_accusations_that_a_third_does_not_confirm_make_one_short_note() -> None:
    """A checker may accuse in each cell of a turn of thousands, and a message has 8 MiB."""
    audit = Audit()
    audit.opened.drawn = drawn = cells(PLAN, audit.turn, "b")
    audit.run._notes = ["an earlier one"] * 5000
    audit.check()
    for cell in drawn:
        audit.reply("c", control_pb2.RepeatReply(node="b", problem="gone"), cell=cell)
        audit.answer("a", cell)
    assert audit.found == () and audit.put[0].problem.endswith(f"; and {5000 + len(drawn) - 8:,} more")


@pytest.mark.parametrize("error", [PeerLostError, FrameError, InterruptedRunError])
def test_lost_checker_is_a_lost_node(error: type[RingTuneError]) -> None:
    """Also one that was started again just now, or stopped. The run goes back; what comes then counts for nothing."""
    audit = Audit()
    audit.check()
    assert audit.reply("c", None, error("gone")) == rd.NodeFailed("c", "PeerLostError", "gone")
    assert audit.answer("c") is None and not audit.put


def test_node_that_a_checker_could_not_reach_is_a_lost_node() -> None:
    """It is asked whether it lives, as after a complaint of a neighbour; one without a part can't be accused."""
    audit = Audit()
    audit.check()
    failed = audit.reply("c", control_pb2.RepeatReply(node="a", problem="no answer", is_lost=True))
    assert failed == rd.NodeFailed("c", "PeerLostError", "no answer", "a") and not audit.put
    audit = Audit()
    audit.check()
    assert audit.reply("c", control_pb2.RepeatReply(node="o", problem="no answer", is_lost=True)) is None
    assert audit.found == ("c",)


def test_nodes_with_no_or_another_trail_than_the_plan_says_are_named() -> None:
    """None, one that can't be read, one without sums, another state at the beginning; two ends that differ."""
    audit = Audit()
    audit.check("a", "c", "o")
    assert audit.found == ("b",)
    odd = {**audit.trails["b"], "h 0.0 1": "\ud800"}
    for wrong in ("[", '{"a": 1}', "{}", json.dumps(odd)):
        audit = Audit()
        request = control_pb2.ReportRequest(node="b")
        request.trails.add(turn=audit.turn.index, digests_json=wrong)
        audit.run.note(request)
        audit.check()
        assert audit.found == ("b",)
    for host, named in (("b", ("b",)), ("d", ("b", "d"))):  # d had the block before, and may have handed on another one
        audit = Audit()
        audit.run._agreed = {1: (host, "other")}
        audit.check()
        assert audit.found == named and "another state of block 1" in audit.put[0].problem
    audit = Audit()
    audit.run._agreed = {4: ("p", "other")}  # the owner of the turn before hands on another head than it ended with
    audit.check()
    assert audit.found == ("o", "p") and "another state of head than node p ended with" in audit.put[0].problem
    audit = Audit()
    audit.trails["b"]["h 0.0 1"] = "x"
    audit.check()
    assert {*audit.found} == {"a", "b"}


def test_statement_that_a_node_has_not_signed_names_it() -> None:
    """With another node's key, not at all, or with more than a certificate; signed ones go into the ledger.

    Each certificate goes there once.
    """
    own = {node: node for node in PLAN.nodes}
    for signers in ({**own, "b": "a"}, {**own, "b": ""}):
        audit = Audit(signers=signers)
        audit.check()
        assert audit.found == ("b",) and "does not sign" in audit.put[0].problem
    for before, after in ((b"\xff\n", b""), (b"", b"\xff"), (b"# x\n", b"")):  # text around a certificate is permitted
        audit = Audit(signers=own)
        audit.told()
        told = audit.opened.told["b"]
        told.certificate_pem = before + told.certificate_pem + after
        audit.check()
        assert audit.found == ("b",) and "not one of node b" in audit.put[0].problem
    audit = Audit(signers=own)
    audit.check()
    audit.answer("c")
    (_, line) = (json.loads(text) for text in audit.run.closed(audit.turn).splitlines())
    for node, entry in line["nodes"].items():
        signed = (entry["says"].encode(), bytes.fromhex(entry["signature"]), entry["certificate"].encode())
        assert signature_problem(*signed, [AUTHORITY.certificate_pem], node_party(node)) == ""
    assert "certificate" not in audit.run._line(PLAN, audit.turn, audit.opened)["nodes"]["b"]


def test_signature_is_not_stored_where_none_is_checked() -> None:
    """In plain text it may be any bytes, and its certificate no text: the run would end, or the ledger grow."""
    audit = Audit()
    audit.told()
    audit.opened.told["b"].signature = audit.opened.told["b"].certificate_pem = b"\xff" * 9
    audit.check()
    audit.answer("c")
    (_, line) = (json.loads(text) for text in audit.run.closed(audit.turn).splitlines())
    assert [[*entry] for entry in line["nodes"].values()] == [["says"]] * len(PLAN.nodes)


def test_trail_counts_once_and_for_open_turns_only() -> None:
    """What a node tells after it may know what was drawn changes nothing."""
    audit = Audit()
    audit.told()
    audit.trails["b"] = {}
    audit.check("b")
    assert not audit.put and audit.asks() == "c"
    audit.run.forget()
    audit.told("b")  # a report that was on its way when the run went back
    assert not audit.run._open


def test_state_counts_once_its_turn_is_closed() -> None:
    """A run that goes back between check and close begins from the state before; a closed turn is in its ledger."""
    audit = Audit()
    audit.check()
    audit.answer("c")
    audit.run.forget()
    assert audit.run.closed(audit.turn) == "" and not audit.run._agreed
    audit = Audit()
    audit.trails["z"] = {}  # a node of the run without a part in the turn
    audit.told("z")
    audit.check()
    audit.answer("c")
    lines = [json.loads(line) for line in audit.run.closed(audit.turn).splitlines()]
    assert [line["line"] for line in lines] == ["run", "turn"] and {*lines[1]["nodes"]} == {*"abco"}
    blocks = {block: ("abcc"[block], state_digest("w", "r")) for block in range(4)}
    assert audit.run._agreed == blocks | {4: ("o", state_digest("v", "q"))}
    assert audit.run.closed(audit.turn) == ""


def test_vectors_of_pairs_begin_with_those_of_the_turn_before() -> None:
    """A run begins with none; a host of which the vectors change between two turns is named, by block."""
    audit = Audit(helped(TWO, {"b": "z"}, HelperSettings(pairs="velora")))
    for at, turn in enumerate(itertools.islice(turn_sequence(audit.plan.course), 3)):
        audit.turn, begin = turn, ("w", "r") if at else ("v", "q")
        audit.run.granted(audit.plan, [turn])
        audit.run._open[turn.index].drawn = ()
        both: Ends = dict.fromkeys(range(4), begin).__getitem__
        audit.trails = {node: trail_of(audit.plan, turn, node, begin=both) for node in audit.plan.nodes}
        shown = sorted(name for name in audit.trails["b"] if name.startswith("shown"))
        own = {name: audit.trails["b"].pop(name) for name in shown}  # in the order of shipping
        own |= {f"shown begin {block}": "s" if at else NOTHING for block in (1, 2, 3)}
        audit.run._agreed.pop(4, None)
        for wrong, nodes in ((dict.fromkeys((name for name in shown if name.endswith(" 2")), "x"), ("b",)), ({}, ())):
            audit.trails["b"] |= own | wrong
            audit.run._open[turn.index].told = {}
            audit.check()
            checked = audit.put.pop()
            assert checked.nodes == nodes and ("pairs of block 2" in checked.problem) == bool(wrong)
            audit.run._open.setdefault(turn.index, audit.opened).drawn = ()
        audit.run.closed(turn)
        assert {*audit.run._shown} == {1, 2, 3}


def test_sums_of_users_are_compared_once_their_helper_has_sent_one() -> None:
    """Until then a host has what it or another helper computed, perhaps in other bits, over any number of turns."""
    adds_up = HelperSettings(users=COLLABORATION, merged=True, interval=4)
    audit = Audit(helped(TWO, {"a": "z", "b": "z"}, adds_up))
    first, second, third = itertools.islice(turn_sequence(audit.plan.course), 3)
    assert (first.end_step, second.end_step) == (2, 4)
    for turn, nodes in ((first, ()), (second, ()), (third, ("z", "b"))):
        audit.turn, begin = turn, ("v", "q") if turn == first else ("w", "r")
        audit.run.granted(audit.plan, [turn])
        audit.run._open[turn.index].drawn = ()
        both: Ends = dict.fromkeys(range(4), begin).__getitem__
        audit.trails = {node: trail_of(audit.plan, turn, node, begin=both) for node in audit.plan.nodes}
        audit.trails["b"]["held begin 3"] = "x"
        audit.run._agreed.pop(4, None)
        audit.check()
        assert audit.put.pop().nodes == nodes
        audit.run.closed(turn)


class AuditedRing(RecoveringRing):
    """A run on the virtual clock whose turns are checked; ``wrong`` says what is found, by the step of a turn's end."""

    def __init__(self, wrong: dict[int, tuple[tuple[str, ...], str]], *, step: int = 0, **values: Any) -> None:
        plan = make_plan([("a", 0, 1), ("c", 1, 3), ("b", 3, 4)], ["a", "b"], num_steps=12, method="all", eval_rows=0)
        rng, start = random.Random(0), StartPoint.of(plan.course, step=step) if step else None
        super().__init__(plan, place=placing(rng, plan.nodes), rounds={"audits": True}, start=start, **values)
        self.wrong, self.checked = wrong, list[int]()
        self.awaited: Callable[[rd.AwaitNodes], object] = lambda command: None

    def _obey_rounds(self, command: rd.Command) -> None:
        if isinstance(command, rd.AwaitNodes):
            self.awaited(command)
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


@pytest.mark.parametrize("wait_s", [0.0, 50.0])
def test_run_that_fits_nowhere_without_the_host_waits_for_another_node(wait_s: float) -> None:
    """That host would be refused, so it is not what the user is asked for."""
    told: list[rd.AwaitNodes] = []
    ring = AuditedRing({6: (("c",), "node c computed another result")}, recovery=RecoveryPolicy(awaits_s=wait_s))
    ring._place = lambda asked: None
    ring.awaited = told.append
    finish = ring.run().finish
    assert finish is not None and finish.error == "CapacityError"
    text = "node c is left out, and nothing fits any more; start another node with room and --resume the run"
    assert finish.message == ("waited 50 s (recovery.wait_s) for a node with room: " if wait_s else "") + text
    assert [nodes for nodes, _, _ in told] == [()] * bool(wait_s)


def test_run_that_needs_the_host_that_computed_otherwise_does_not_ask_for_it_again() -> None:
    """Nothing is kept yet to go back to; a resumed run would not take that host."""
    ring = AuditedRing({4: (("c",), "node c computed another result")}, step=2)
    finish = ring.run().finish
    assert finish is not None and finish.message.endswith("nothing is kept yet; remove it and train anew")
    assert not ring._rounds.lost


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


class RepeatingRing(RecoveringRing):
    """A run on the virtual clock with a real audit, of host b's work in the turn that ends with step 6.

    ``answers`` has for each host of a, c that is asked there the part of ``wait_s`` after which it answers, and whether
    it finds something wrong; without an entry nothing arrives until its call ends with the time limit.
    """

    def __init__(self, answers: dict[str, tuple[float, bool]], *, ends_calls: bool = True) -> None:
        plan = make_plan([("a", 0, 1), ("b", 1, 2), ("c", 2, 4)], ["o"], num_steps=12, method="all", eval_rows=0)
        rounds, place = {"audits": True}, placing(random.Random(0), plan.nodes)
        super().__init__(plan, place=place, rounds=rounds, wait_s=100.0, recovery=RecoveryPolicy(awaits_s=50.0))
        self.answers, self.ends_calls, self.asked = answers, ends_calls, list[str]()
        participants: Any = SimpleNamespace(
            run_id="r",
            calls={node: SimpleNamespace(repeat=self._repeater(node)) for node in plan.nodes},
            queue=SimpleNamespace(put=lambda event: self.clock.at(self.clock.now_s, self._tell_rounds, event)),
        )
        facts = {node: device(node, num_blocks=4) for node in plan.nodes}
        job = Job(model=Model(path="m")).with_overrides({"audit.share": 0.01})
        self.audit = RunAudit(participants, job, lambda: facts, self._take, source=random.Random(0))

    def _repeater(self, node: str) -> Any:
        def repeat(request: control_pb2.RepeatRequest, *, on_result: Any, on_failed: Any) -> None:
            self.asked.append(node)
            results = {name: [digest, 0.0] for name, digest in self.task.told.items()}
            after, is_wrong = self.answers.get(node, (1.0, False))
            if is_wrong:
                results |= {name: ["x", 1.0] for name in results if name.startswith("sum ")}
            answer = functools.partial(on_result, control_pb2.RepeatReply(results_json=json.dumps(results)))
            if node not in self.answers:
                answer = functools.partial(on_failed, PeerLostError(f"node {node} does not answer"))
            if node in self.answers or self.ends_calls:
                self.clock.at(self.clock.now_s + 100.0 * after, answer)

        return repeat

    def _take(self, answer: CellRepeated) -> None:
        if (failed := self.audit.take(answer)) is not None:
            self._tell_rounds(failed)

    def _obey_rounds(self, command: rd.Command) -> None:
        if not isinstance(command, rd.CheckTurn):
            if isinstance(command, rd.Halt):
                self.audit.forget()
            super()._obey_rounds(command)
            return
        part, turn = self._part, command.turn
        self.audit.granted(part, [turn])
        is_drawn = turn.end_step == 6 and not self.asked
        drawn = self.audit._open[turn.index].drawn
        self.audit._open[turn.index].drawn = tuple(cell for cell in drawn if is_drawn and cell.node == "b")
        trails = {node: trail_of(part, turn, node) for node in part.nodes}
        for node, trail in trails.items():
            request = control_pb2.ReportRequest(node=node)
            request.trails.add(turn=turn.index, digests_json=json.dumps(trail))
            self.audit.note(request)
        for cell in self.audit._open[turn.index].drawn:
            self.task = question(part, turn, cell, work_of(part, turn, "b"), trails)
        self.audit.check(part, turn)


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        ({"c": (0.95, True)}, "a"),
        ({"c": (0.95, True), "a": (0.9, False)}, "c"),
        ({"c": (0.95, True), "a": (0.9, True)}, "b"),
        ({}, "c"),
    ],
)
def test_third_host_has_its_own_time_to_answer(answers: dict[str, tuple[float, bool]], lost: str) -> None:
    """A checker that disagrees late ends nothing: the run goes on without who lies, or does not answer."""
    ring = RepeatingRing(answers)
    assert ring.run().finish == rd.Finish("", "")
    (recovery,) = [entry for entry in ring.result.logged if isinstance(entry, rd.LogRecovery)]
    assert (recovery.lost, recovery.step) == ((lost,), 4) and ring.asked == (["c", "a"] if answers else ["c"])


def test_host_for_whose_repeated_work_a_phase_waits_is_named() -> None:
    """Where even the end of its call is not told; the owner of the turn has done all of it."""
    ring = RepeatingRing({"c": (0.95, True)}, ends_calls=False)
    assert ring.run().finish == rd.Finish("", "")
    (error,) = [entry for entry in ring.result.logged if isinstance(entry, rd.LogNodeError)]
    assert error.node == "a" and "not checked by a" in error.message
