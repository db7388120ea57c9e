"""Repeated work of hosts on real tensors: equal bits of honest hosts, and the name of one that computes otherwise."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from coordinator.api.audit import head_digests, weights_of
from edge.model.tensor_files import pieces_of
from edge.runtime.audit import (
    AuditRecorder,
    NodeAudit,
    Repeated,
    State,
    Tagger,
    distance,
    pairs_distance,
    tensor_digest,
)
from edge.runtime.executor import NodeExecutor
from edge.transport.tensors import as_received
from ringtune.errors import FrameError, IntegrityError
from ringtune.job.job import kinds_of
from ringtune.models.result_files import HEAD_FILE
from ringtune.run_control import events as rd
from ringtune.schedule.access import NOT_PLANNED
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import HelperSettings
from ringtune.schedule.operation_tables import Choice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import UserRows
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.turns import Turn, turn_sequence
from ringtune.schedule.units import Range
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, write_tensors
from ringtune.techniques.audit import (
    EQUAL_BITS,
    TAG_KEY,
    Cell,
    CellPlace,
    Finding,
    RepeatResult,
    RepeatTask,
    Trail,
    cells,
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
    tag_name,
    tensor_name,
    tolerance,
    trail_problem,
    work_of,
)
from ringtune.techniques.offload import helped
from tests.features.feature import inputs
from tests.features.operations import random_table, with_idle
from tests.suites.test_recovery_on_virtual_clock import ring_of
from tests.support.choosing import make_choice
from tests.support.plans import make_plan
from tests.support.torch_ring import Case, TorchCarrier, make_executor

TABLE = with_idle(random_table(3, ("a", "o"), "11123"))
SLICES = (("a", 0, 1), ("b", 1, 3), ("c", 3, 4))
Cheat = Callable[[str, Action, NodeExecutor], None]


def honest(node: str, action: Action, executor: NodeExecutor) -> None:
    """Do nothing."""


class AuditedCarrier(TorchCarrier):
    """Executors with their trails; each turn is checked as soon as every node has done it.

    Attributes:
        with_third: whether the third repeats each cell too.
        share: of the cells that are repeated.
        in_transit: factor of the hidden states that b receives and does not keep.
        cheat: called after an action, before the node notes what it did.
        findings: of all turns, and those of the third.
        repeated: all results of repeated cells.
        handed_in: for the last repeated cell of each host: question, work, tensors.
    """

    with_third, share, in_transit = False, 1.0, 1.0

    def __init__(self, case: Case, plan: Plan, cheat: Cheat) -> None:
        executors = {node: make_executor(case, plan.at(0), node) for node in plan.nodes}
        super().__init__(executors, case=case, plan=plan)
        self.part, self.cheat = plan.at(0), cheat
        self.findings: list[Finding] = []
        self.repeated: list[tuple[RepeatTask, Mapping[str, RepeatResult]]] = []
        self.handed_in: dict[str, tuple[RepeatTask, bytes, dict[TensorKey, bytes]]] = {}
        self.agreed: dict[int, str] = {}
        self._adapters = [kind.config for kind in kinds_of(case.job, self.part.course.user_sets)]
        self.audits: dict[str, NodeAudit] = {}
        self._drawn: dict[int, tuple[Cell, ...]] = {}
        self._trails: dict[int, dict[str, Trail]] = {}
        for node in self.part.nodes:

            def make(alias_plan: Plan, alias: str) -> NodeExecutor:
                return NodeExecutor(alias_plan, alias, case.node_job, case.folder / "model", None)

            recorder = AuditRecorder(self.part, node, executors[node], run_id="r", sign=lambda text: (text, b""))
            self.audits[node] = NodeAudit(recorder, self.part, make)

    def granted(self, node: str, turn: Turn) -> None:
        """What is drawn is the same for all nodes."""
        if turn.index not in self._drawn:
            self._drawn[turn.index] = draw(self.part, turn, self.share, random.Random(turn.index))
        super().granted(node, turn)
        recorder = self.audits[node].recorder
        recorder.keep(dict.fromkeys(keys_to_keep(self.part, turn, self._drawn[turn.index]).get(node, ()), node))
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
        self.audits[node].recorder.exchanged(key, *content, is_sent=True)
        return content

    def put(self, node: str, key: TensorKey, content: Any) -> None:
        """Rounded as on the wire, and noted."""
        tensor, mask = content
        if node == "b" and key.is_hidden and key not in self.audits[node].recorder._tickets:
            tensor = tensor * self.in_transit
        content = (as_received(tensor, self.part.course.wire_dtype).to(tensor.dtype), mask)
        self.audits[node].recorder.exchanged(key, *content, is_sent=False)
        super().put(node, key, content)

    def take_parcel(self, node: str, key: TensorKey) -> Any:
        """Noted."""
        content = super().take_parcel(node, key)
        self.audits[node].recorder.exchanged(key, content, None, is_sent=True)
        return content

    def put_parcel(self, node: str, key: TensorKey, content: Any) -> None:
        """Noted."""
        self.audits[node].recorder.exchanged(key, content, None, is_sent=False)
        super().put_parcel(node, key, content)

    def ended(self, node: str, turn: int) -> str:
        """Checked by the last node."""
        if told := self.audits[node].recorder.take(turn):
            trails = self._trails.setdefault(turn, {})
            trails[node] = read_trail(told.digests_json, node)
            if len(trails) == len(self.part.nodes):
                self._check(turn, trails)
        return super().ended(node, turn)

    def _check(self, index: int, trails: Mapping[str, Trail]) -> None:
        turn = self.audits["a"].recorder.turn(index)
        works = {node: work_of(self.part, turn, node) for node in trails}
        for node, trail in trails.items():
            assert not trail_problem(self.part, works[node], trail, node, adapters=self._adapters)
            for block, begin, end in ends(self.part, trail, node):
                assert self.agreed.setdefault(block, begin) == begin
                self.agreed[block] = end
        if finding := ends_differ(works, trails) or held_differ(self.part.placement, works, trails):
            self.findings.append(finding)
            return
        for cell in self._drawn[index]:
            asked = question(self.part, turn, cell, works[cell.node], trails)
            for checker in checkers_of_cell(self.part.placement, cell)[: 1 + self.with_third]:
                if any(name.startswith("shown") for name in asked.told):  # nothing is left of another cell
                    self.audits[checker]._repeater = None
                results = self.repeat(asked, checker)
                self.repeated.append((asked, results))
                if finding := judge(asked, results, EQUAL_BITS):
                    self.findings.append(finding)

    def repeat(self, asked: RepeatTask, checker: str) -> Mapping[str, RepeatResult]:
        """What a host finds in a cell of another one, with what crosses a wire as files and text."""
        audit, cell, place = self.audits[checker], asked.cell, asked.place
        file = bytes(self.audits[cell.node].recorder.work_file(place))
        tensors = {}
        exchanges = audit.recorder.exchanges(cell, place.turn)
        files = {one.key: bytes(self.audits[one.peer].recorder.tensor_file(one.key, one.peer)) for one in exchanges}
        self.handed_in[cell.node] = asked, file, files
        for key, peer, _ in exchanges:
            tensors[key] = audit.read_tensor(Pieces.of(files[key]), key, asked.given, is_own=peer == cell.node)
        work, came = audit.read_work(Pieces.of(file), place, asked.given), {one.key for one in exchanges if one.comes}
        repeated = audit.repeat(cell, place, work, {key: tensors[key] for key in came}, asked.given)
        for key in repeated.differing:
            repeated.compare(key, tensors[key])
        return read_results(json.dumps(repeated.results), checker, asked)


def case_of(**changes: Any) -> Case:
    """Three hosts, one of them an owner, and an owner that hosts nothing."""
    values: dict[str, Any] = {
        "owners": ("a", "o"),
        "microbatches": 2,
        "num_steps": 4,
        "local_iterations": 2,
        "every_steps": 1,
    }
    return Case(folder=inputs(), **values | changes)


def audited(
    cheat: Cheat = honest,
    *,
    with_third: bool = False,
    share: float = 1.0,
    in_transit: float = 1.0,
    choice: Choice | None = None,
    velora: Velora | None = None,
    recompute: tuple[Range, ...] = (),
    helper_of: Mapping[str, str] = {},
    manner: Mapping[str, Any] = {},
    without: Collection[int] = (),
    slices: tuple[tuple[str, int, int], ...] = SLICES,
    **changes: Any,
) -> AuditedCarrier:
    """A run of which each cell is repeated."""
    case = case_of(**changes)
    plan = case.plan(slices)
    placement = dataclasses.replace(plan.placement, recompute=recompute)
    plan = Plan(dataclasses.replace(plan.course, choice=choice, velora=velora), (placement,))
    if helper_of:
        if "users" in manner:
            plan = with_users(plan)
            case.datasets()["a"].users = plan.course.owners[0].users
        plan = helped(plan, helper_of, HelperSettings(**manner))
        left = tuple(one for one in plan.placement.helpers if one.start not in without)
        plan = Plan(plan.course, (dataclasses.replace(plan.placement, helpers=left),))
    carrier = AuditedCarrier(case, plan, cheat)
    carrier.with_third, carrier.share, carrier.in_transit = with_third, share, in_transit
    ring = ring_of(plan, random.Random(1), carrier=carrier)
    assert ring.run().finish == rd.Finish("", "")
    return carrier


def with_users(plan: Plan) -> Plan:
    """Two users at the first owner, whose batches mix them."""
    first, *others = plan.course.owners
    third = first.train_rows // 3
    users = (
        UserRows(name="anna", train_rows=third, eval_rows=first.eval_rows),
        UserRows(name="ben", train_rows=first.train_rows - third),
    )
    mixed = dataclasses.replace(first, users=users)
    return Plan(dataclasses.replace(plan.course, owners=(mixed, *others)), plan.placements)


def projected(init: str) -> Velora:
    """VeLoRA in LoRA of all blocks."""
    return Velora(blocks=(Range(0, 4),), layers=("adapter_down",), parts=8, init=init)


ROUNDED = {"dtype": "float32", "compute": "bfloat16"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "all", "dropout": 0.2, "dtype": "float32", "wire": "bfloat16", "recompute": (Range(1, 4),)},
        {"method": "all", "optimizer": "sgd", "adapter": "lora", "eval_every": 2, "checkpoint_every": 2},
        {"method": "all", "microbatches": 4, "adapter": "lora", "operations": TABLE},
        {"method": "all", "owners": ("c", "b"), **ROUNDED, "wire": "bfloat16", "adapter": "lora"},
        {"owners": ("c", "a"), "private_blocks": 1, "slices": (("a", 1, 2), ("b", 2, 3), ("c", 3, 4))},
        {"method": "all", "num_steps": 2, "adapter": "lora[leave_out=[0]]|seq_bn[leave_out=[0,2]]"},
        {
            "owners": ("a",),
            "method": "all",
            "num_steps": 2,
            "adapter": "seq_bn_inv",
            "dtype": "float32",
            "wire": "int8",
        },
        {"microbatches": 4, "choice": make_choice(subnets=2, refresh_steps=2), **ROUNDED},
        {"adapter": "lora", "velora": projected("average"), "microbatches": 3, "num_steps": 4, **ROUNDED},
        {"adapter": "lora", "velora": projected("running"), "microbatches": 4, "method": "all", "operations": TABLE},
    ],
)
def test_repeated_work_of_honest_hosts_has_equal_bits(changes: dict[str, Any]) -> None:
    """Every cell of every turn, forward, backward and update, whatever depth, dropout or wire.

    Also of owners in their own turns, whose slices are first, in the middle or last, or begin above private blocks; and
    where operation tables, given or chosen, let a micro-batch pass a host without a gradient, or not at all.
    """
    carrier = audited(**changes)
    assert not carrier.findings
    assert {asked.cell.node for asked, _ in carrier.repeated} == {"a", "b", "c"}
    kinds = {name.split()[0] for _, results in carrier.repeated for name in results}
    assert kinds - {"tag"} == {"h", "g", "sum", "state", *(["vectors"] if "velora" in changes else [])}
    own = {asked.cell.node for asked, _ in carrier.repeated if asked.cell.node in asked.peers.values()}
    assert own >= {*"ac"} & {one.node for one in carrier.part.course.owners}
    for asked, results in carrier.repeated:
        assert asked.told.items() <= {name: found for name, (found, _) in results.items()}.items()


HELPED: dict[str, Any] = {"method": "all", "num_steps": 2, "helper_of": {"a": "z", "b": "z", "c": "o"}}
LORA, LINEAR = "lora[r=4,alpha=16]", "linear[alpha=0.5]"
PROJECTED: dict[str, Any] = {
    "helper_of": {"a": "z", "c": "b"},
    "manner": {"pairs": "velora", "projected": "all", "overlap": True},
    "num_steps": 4,
    "adapter": LORA,
}
KINDS = 'mode = "auto"\nusers = "alone"\nadapters = { ben = "linear" }'


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "changes",
    [
        HELPED,
        {**HELPED, "helper_of": {"a": "c", "c": "b"}, "adapter": LORA, "dropout": 0.2, "checkpoint_every": 2},
        {"helper_of": {"b": "z"}, "optimizer": "sgd", "owners": ("b", "o"), "microbatches": 3, **ROUNDED},
        {**HELPED, "manner": {"interval": 3}, "num_steps": 8, "local_iterations": 4},
        {"helper_of": {"a": "z", "b": "z"}, "without": {0, 2}, "manner": {"interval": 3}, "num_steps": 8},
        {**HELPED, "manner": {"pairs": "bfloat16"}, "dtype": "float32", "wire": "bfloat16", "helper_of": {"b": "a"}},
        {**HELPED, "manner": {"overlap": True, "interval": 2}, "num_steps": 4, "local_iterations": 4},
        {**PROJECTED, "owners": ("b", "o"), "helper_of": {"b": "z", "c": "z"}},
        {**PROJECTED, "microbatches": 4, "method": "all", "operations": TABLE, **ROUNDED},
        pytest.param(
            {**HELPED, "manner": {"overlap": True}, "num_steps": 4, "local_iterations": 4, "recompute": (Range(1, 4),)},
            marks=pytest.mark.thorough,
        ),
        pytest.param({**HELPED, "manner": {"merged": True}, "adapter": LINEAR}, marks=pytest.mark.thorough),
        {**HELPED, "microbatches": 4, "adapter": LINEAR, "operations": TABLE, "helper_of": {"b": "z", "c": "z"}},
        pytest.param(
            {**HELPED, "adapter": "lora[leave_out=[0]]", "helper_of": {"a": "z", "c": "z"}, "microbatches": 1},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {**HELPED, "manner": {"users": "alone"}, "adapter": "double_seq_bn", "microbatches": 1},
            marks=pytest.mark.thorough,
        ),
        {**HELPED, "manner": {"users": "alone"}, "adapter": LORA, "offload": KINDS},
        {**HELPED, "manner": {"users": "collaboration", "merged": True}, "adapter": LORA},
    ],
)
def test_repeated_work_of_honest_helpers_has_equal_bits(changes: dict[str, Any]) -> None:
    """Every fit of every turn, and every cell of their hosts, whatever the helpers' manner."""
    carrier = audited(**changes)
    assert not carrier.findings
    fits = [asked for asked, _ in carrier.repeated if asked.cell.is_fit]
    assert {asked.cell.node for asked in fits} == {*changes["helper_of"].values()}
    assert {asked.cell.node for asked, _ in carrier.repeated if not asked.cell.is_fit} == {"a", "b", "c"}
    kinds = {name.split()[0] for _, results in carrier.repeated for name in results}
    shown = {"shown"} if changes.get("manner", {}).get("pairs") == "velora" else set[str]()
    assert kinds - {"tag"} == {"h", "g", "c", "sum", "fit", "held", "state", *shown}
    for asked, results in carrier.repeated:
        assert asked.told.items() <= {name: found for name, (found, _) in results.items()}.items()


def test_host_has_a_tag_of_what_it_exchanged_and_does_not_keep() -> None:
    """It fits what the neighbour hands in, or what was computed; a link that changes it names both ends."""
    values: dict[str, Any] = {"method": "all", "share": 0.01, "num_steps": 8, "local_iterations": 4}
    carrier = audited(**values)
    tags = [name for _, results in carrier.repeated for name in results if name.startswith("tag ")]
    assert not carrier.findings and tags and len(carrier.repeated) == 6
    for asked, results in carrier.repeated:
        assert asked.told.items() <= {name: found for name, (found, _) in results.items()}.items()
    carrier = audited(in_transit=1.001, with_third=True, **values)
    assert {finding.nodes for finding in carrier.findings} == {("b", "a")} and len(carrier.findings) == 4


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


def projects_otherwise(name: str, action: Action, executor: NodeExecutor) -> None:
    """A host that goes on with other vectors than its forward gives."""
    if name == "b" and action.op is Op.FORWARD:
        executor.part.load_vectors({one: value * 1.001 for one, value in executor.part.vectors.items()}, where="b")


def sends_otherwise(name: str, action: Action, executor: NodeExecutor) -> None:
    """A host that sends another hidden state than it should."""
    if name == "b" and action.op is Op.FORWARD and action.stop == 3:
        flow = executor._flows.of(action)
        assert flow.hidden is not None
        flow.hidden = flow.hidden * 1.001


def changes_parcels(op: Op, node: str, factor: float) -> Cheat:
    """A node whose parcels have other numbers after an action."""

    def cheat(name: str, action: Action, executor: NodeExecutor) -> None:
        shipped = executor.offloading._shipped
        for key in [*shipped] if name == node and action.op is op else ():
            tensors, of = shipped[key]
            shipped[key] = {one: value * factor for one, value in tensors.items()}, of

    return cheat


def fits_otherwise(op: Op, factor: float) -> Cheat:
    """A helper whose gradients or weights are scaled after an action; of both of its blocks."""

    def cheat(name: str, action: Action, executor: NodeExecutor) -> None:
        if name == "z" and action.op is op:
            for one in executor._hosted.parts.fitted().values():
                if op is Op.FIT and one.grad is not None:
                    one.grad.mul_(factor)
                elif op is Op.UPDATE:
                    with torch.no_grad():
                        one.mul_(factor)

    return cheat


def projects_pairs_otherwise(name: str, action: Action, executor: NodeExecutor) -> None:
    """A host that projects its pairs on other vectors than those of the first micro-batch, from the first one on."""
    own = executor.offloading._wire.vectors
    if name == "b" and action.op is Op.FORWARD and own is not None:
        own.load({site: torch.full((own._sizes[site],), 0.1, dtype=torch.float64) for site in own.tensors()})


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("cheat", "named", "manner"),
    [
        (changes_parcels(Op.SHIP, "b", 1.001), ("b",), {}),
        (changes_parcels(Op.UPDATE, "z", 1.001), ("z", "b"), {}),
        (fits_otherwise(Op.FIT, 1.001), ("z",), {"interval": 2}),
        (fits_otherwise(Op.UPDATE, 1.0001), ("z",), {"pairs": "bfloat16"}),
        (fits_otherwise(Op.FIT, 1.001), ("z",), {"users": "alone"}),
        (projects_pairs_otherwise, ("b",), {"pairs": "velora", "projected": "all"}),
        (fits_otherwise(Op.FIT, 1.001), ("z",), {"users": "collaboration", "merged": True}),
    ],
)
def test_helper_that_fits_otherwise_and_host_that_sends_other_pairs_are_named(
    cheat: Cheat, named: tuple[str, ...], manner: dict[str, Any]
) -> None:
    """In the turn in which it happens, where each micro-batch of the turn is wrong; what is between two names both."""
    values: dict[str, Any] = {"method": "all", "adapter": LORA, "helper_of": {"b": "z"}, "manner": manner}
    if "users" in manner:
        values["helper_of"] = {"a": "z", "b": "z", "c": "z"}
    carrier = audited(cheat, with_third=True, share=0.01, num_steps=2, **values)
    assert {finding.nodes for finding in carrier.findings} == {named}
    assert len(carrier.findings) > 1 or len(named) > 1


@pytest.mark.parametrize("cheat", [scaled, shifted, projects_otherwise, sends_otherwise])
def test_host_that_computes_otherwise_is_named(cheat: Cheat) -> None:
    """A gradient, an update, vectors, or what it sends; no other node is, by the checker and by the third."""
    changes: dict[str, Any] = {"method": "all", "num_steps": 2, "adapter": "lora", "velora": projected("average")}
    carrier = audited(cheat, with_third=True, **changes)
    assert {finding.nodes for finding in carrier.findings} == {("b",)}
    assert len(carrier.findings) == sum(asked.cell.node == "b" for asked, _ in carrier.repeated)


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
        carrier.audits["b"].recorder.tensor_file(TensorKey("h", 0, 0, 1), "b")
    with pytest.raises(FrameError, match="has not told yet"):  # a checker may ask while the turn is computed
        carrier.audits["o"].recorder.work_file(place)
    carrier.audits["o"].recorder.take(0)
    with pytest.raises(FrameError, match="has nothing"):
        carrier.audits["o"].recorder.work_file(place)
    with pytest.raises(IntegrityError, match="lacks 'before'"):
        carrier.audits["c"].repeat(Cell("b", 0, 0), place, {}, {}, {})
    later = dataclasses.replace(turn, index=2, first_seq=4)
    carrier.audits["b"].recorder.grant(later)
    with pytest.raises(FrameError, match="turn 0"):
        carrier.audits["b"].recorder.turn(0)


def test_only_what_is_drawn_of_others_is_kept_and_for_the_ticket_only() -> None:
    """Tensors of cells that were not drawn are dropped at once; a host can't ask its neighbour what is drawn of it."""
    case = case_of(method="all")
    plan = case.plan(SLICES)
    recorder = AuditRecorder(plan, "b", make_executor(case, plan, "b"), run_id="r", sign=lambda text: (text, b""))
    turn = first_turn(plan)
    recorder.grant(turn)
    drawn = cells(plan, turn, "c")[:1]
    recorder.keep(dict.fromkeys(keys_to_keep(plan, turn, drawn)["b"], "secret"))
    hidden = torch.ones(2, 3, 4, dtype=torch.float64)
    for micro in (0, 1):
        recorder.exchanged(TensorKey("h", 0, micro, 3), hidden, None, is_sent=True)
        recorder.exchanged(TensorKey("g", 0, micro, 3), hidden, None, is_sent=False)
    assert [*recorder._tensors] == [TensorKey("h", 0, 0, 3), TensorKey("g", 0, 0, 3)]
    trail, digest = recorder._turns[0].trail, tensor_digest(hidden, None)
    assert trail == {
        "h 0.0 3": digest,
        "g 0.0 3": digest,
        "h 0.1 3": Tagger(trail[TAG_KEY]).tag("h 0.1 3", hidden, None),
        "g 0.1 3": Tagger(trail[TAG_KEY]).tag("g 0.1 3", hidden, None),
        TAG_KEY: trail[TAG_KEY],
    }
    told = set()
    for key, ticket in (
        (TensorKey("h", 0, 0, 3), ""),
        (TensorKey("h", 0, 0, 3), "other"),
        (TensorKey("h", 0, 1, 3), ""),
    ):
        with pytest.raises(FrameError) as refused:
            recorder.tensor_file(key, ticket)
        told.add(str(refused.value).replace(str(key), "key"))
    assert len(told) == 1  # which one is kept can't be told apart
    assert recorder.tensor_file(TensorKey("h", 0, 0, 3), "secret").size_bytes


def checking(carrier: AuditedCarrier) -> tuple[NodeAudit, Turn]:
    """The audit of c, which keeps the turn of the last repeated cell of b once more."""
    audit, index = carrier.audits["c"], carrier.handed_in["b"][0].place.turn
    turn = next(turn for turn in turn_sequence(carrier.part.course) if turn.index == index)
    audit.recorder.grant(turn)
    return audit, turn


def test_other_hand_ins_than_told_are_refused_before_they_are_used() -> None:
    """A state, a sum or a tensor with one changed bit; a file that is no file."""
    carrier = audited(method="all", num_steps=2)
    asked, work, tensors = carrier.handed_in["b"]
    (audit, _), key = checking(carrier), next(iter(tensors))

    def read_tensor(content: bytes) -> object:
        return audit.read_tensor(Pieces.of(content), key, asked.given)

    def read_work(content: bytes) -> object:
        return audit.read_work(Pieces.of(content), asked.place, asked.given)

    tried = [(read_tensor, tensors[key], "tensor"), *((read_work, work, name) for name in ("before", "sum", "after"))]
    for read, content, name in tried:
        read(content)
        inner = bytes(TensorFile(Pieces.of(content), where="it").tensor(name).data)
        at = content.index(inner) + len(inner) - 1
        with pytest.raises(IntegrityError, match="something else than was told"):
            read(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(IntegrityError):
            read(b"no file")


def test_hand_in_of_the_same_bytes_in_another_shape_is_refused() -> None:
    """Their digest is what was told, and what is computed with them would speak against the host, or the checker."""
    carrier = audited(method="all", num_steps=2)
    asked, _, tensors = carrier.handed_in["b"]
    (audit, _), key = checking(carrier), next(key for key in tensors if key.is_hidden)
    tensor, mask = audit.read_tensor(Pieces.of(tensors[key]), key, asked.given)
    assert mask is not None and len(tensors[key]) <= audit.most_bytes(asked.cell, key, NOT_PLANNED) < 100_000
    rows, tokens, width = tensor.shape
    for other, others_mask in (
        (tensor.reshape(tokens, rows, width), mask.reshape(tokens, rows)),
        (tensor.reshape(rows, -1), mask),
        (tensor, mask.reshape(1, -1)),
        (tensor, mask.long() + 256),
    ):
        assert tensor_digest(other, others_mask) == asked.given[tensor_name(key)]
        content = bytes(write_tensors({"tensor": pieces_of(other), "mask": pieces_of(others_mask)}))
        with pytest.raises(IntegrityError, match="which is not that of the plan"):
            audit.read_tensor(Pieces.of(content), key, asked.given)


def test_hand_in_that_can_not_be_worked_with_speaks_against_who_told_of_it() -> None:
    """A sum with numbers that are not finite, and a state with a tensor of no block: it is no error of the checker.

    Nor that of the host, where its neighbour hands in something else than the host has got.
    """
    carrier = audited(method="all", microbatches=1)
    asked, content, tensors = carrier.handed_in["b"]
    audit, turn = checking(carrier)
    work = audit.read_work(Pieces.of(content), asked.place, asked.given)
    given = {key: audit.read_tensor(Pieces.of(one), key, asked.given) for key, one in tensors.items()}
    sums = TensorFile(Pieces.of(work["total"]), where="it")
    bad = {name: torch.full(info.shape, float("nan"), dtype=torch.float64) for name, info in sums.infos.items()}
    work["total"] = bytes(write_tensors({name: pieces_of(tensor) for name, tensor in bad.items()}))
    spoilt = audit.repeater("b")
    with pytest.raises(IntegrityError, match="not finite"):
        audit.repeat(asked.cell, asked.place, work, given, asked.given)
    assert audit.repeater("b") is not spoilt, "what is left of a state that can't be used is not used again"
    exchanges, under = audit.recorder.exchanges(asked.cell, turn.index), dict(asked.given) | {TAG_KEY: "ab" * 32}
    failed = audit.failed(exchanges, {one.key: given[one.key] for one in exchanges if one.comes}, under)
    for key in failed.differing:
        failed.compare(key, given[key])
    results = read_results(json.dumps(failed.results), "c", asked)
    found = judge(asked, results, EQUAL_BITS)
    assert found is not None and found.nodes == ("b",) and found.is_computed
    key = next(one.key for one in exchanges if one.comes)
    other = asked._replace(told=dict(asked.told) | {tag_name(tensor_name(key)): "another"})
    found = judge(other, results, EQUAL_BITS)
    assert found is not None and found.nodes == ("b", asked.peers[tensor_name(key)])
    odd = State.of(bytes(write_tensors({f"adapter/{'9' * 900}.weight": pieces_of(torch.ones(2))})))
    assert [*odd.digests] == [-1]


def test_distance_is_that_of_the_tensor_that_differs_most() -> None:
    """Of gradients a tensor that is small beside the others counts by its part in all of them."""
    theirs = {"weight": torch.full((100,), 1.0), "bias": torch.full((100,), 1e-9)}
    scaled = {"weight": theirs["weight"] * 1.001, "bias": theirs["bias"]}
    noise = {"weight": theirs["weight"], "bias": -theirs["bias"]}
    assert distance(theirs, theirs) == 0.0 and distance({}, {}) == 0.0
    assert distance(scaled, theirs) == pytest.approx(1e-3, rel=1e-3) == distance(scaled, theirs, least=1e-2)
    assert distance(noise, theirs) == 1.0 and distance(noise, theirs, least=1e-2) == pytest.approx(2e-7, rel=1e-3)
    assert distance({"weight": theirs["weight"]}, theirs) == 1.0
    assert distance(theirs, {name: torch.zeros(100) for name in theirs}) == 1.0


def test_wrong_hidden_state_is_seen_beside_large_inputs_of_later_blocks() -> None:
    """Of 200 values of a token 8 are the hidden state: wrong by 1 %, the tensor is wrong by 2e-5."""
    course = make_plan([("a", 0, 4)], ["a"], hidden_size=8).course
    course = dataclasses.replace(course, entering=(200,) * 4 + (8,), returning=(8,) * 5)
    sent = torch.cat([torch.ones(2, 3, 8), torch.full((2, 3, 192), 100.0)], dim=-1)
    for boundary, wrong in ((2, sent[..., :8]), (2, sent[..., 8:]), (4, sent[..., :8])):
        whole = sent if boundary == 2 else sent[..., :8]
        repeated, key = Repeated(course, None), TensorKey(Payload.HIDDEN, 0, 0, boundary)
        repeated.differing[key] = whole.clone()
        repeated.results[tensor_name(key)] = RepeatResult("digest", 1.0)
        wrong *= 1.01
        repeated.compare(key, (whole, None))
        wrong /= 1.01
        assert repeated.results[tensor_name(key)].distance == pytest.approx(0.01 / 1.01, rel=1e-3)
    repeated.compare(key, (torch.tensor(1.0), None))
    assert repeated.results[tensor_name(key)].distance == 1.0


@pytest.mark.parametrize(
    ("family", "adapter"),
    [("", "seq_bn[ln_before=True]"), ("gpt2", "lora"), ("smollm3", "full"), ("vit", "double_seq_bn")],
)
def test_weights_in_a_result_have_the_digest_that_a_node_signs(family: str, adapter: str, tmp_path: Path) -> None:
    """Block by block, and of the head, whatever the tensors are called around it."""
    task = "image-classification" if family == "vit" else "sequence-classification"
    case = Case(folder=inputs(family, task if family else ""), owners=("a",), task=task, adapter=adapter)
    executor = make_executor(case, case.plan((("b", 0, 2), ("a", 2, 4))), "b")
    state = State.of(bytes(write_tensors(executor.part.tensors())))
    (file,) = (file for name, file in executor.adapter_files(with_head=False).items() if name.endswith(".safetensors"))
    assert weights_of({"": TensorFile(file, where="it")}) == {block: both[0] for block, both in state.parts.items()}
    owner, path = make_executor(case, case.plan((("b", 0, 2), ("a", 2, 4))), "a"), tmp_path / HEAD_FILE
    path.write_bytes(bytes(owner.adapter_files(with_head=True)[HEAD_FILE]))
    assert owner.copy_digest(4, 5) in head_digests(path, task)


@pytest.mark.parametrize(("pairs", "factor"), [("float32", 1.001), ("bfloat16", 1.01)])
def test_pairs_of_an_honest_host_of_another_kind_of_processor_are_permitted(
    pairs: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checker whose products have other last bits: rounded, some elements fall to the other side."""
    plain, repeat = functional.linear, AuditedCarrier.repeat

    def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return plain(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)

    def elsewhere(self: AuditedCarrier, asked: RepeatTask, checker: str) -> Mapping[str, RepeatResult]:
        with monkeypatch.context() as patch:
            patch.setattr(functional, "linear", exact)
            return repeat(self, asked, checker)

    monkeypatch.setattr(AuditedCarrier, "repeat", elsewhere)
    values = {**HELPED, "dtype": "float32", "num_steps": 2, "manner": {"pairs": pairs}, "adapter": LORA}
    for cheat, named in ((honest, set()), (changes_parcels(Op.SHIP, "b", factor), {("b",)})):
        carrier = audited(cheat, **values)
        permitted = tolerance("float32", carrier.part.course, ("x", 1), ("y", 1))
        own = [(asked, results) for asked, results in carrier.repeated if not asked.cell.is_fit]
        assert len({name for _, results in own for name, one in results.items() if one.distance > 0}) > 5
        found = [judge(asked, results, permitted) for asked, results in own]
        assert {one.nodes for one in found if one is not None} == named


def test_distance_of_pairs_is_that_of_all_gradients_and_a_share_of_bits() -> None:
    """A query's gradient counts by the norm of all; one bit of 16 is a share of a sixteenth; other names are 1."""
    told = {
        "x": torch.ones(4),
        "q.grad": torch.tensor([1e-3]),
        "v.grad": torch.ones(1),
        "r.signs": torch.zeros(2).byte(),
    }
    assert pairs_distance(told, told) == 0.0
    assert pairs_distance({**told, "q.grad": torch.tensor([1.1e-3])}, told) == pytest.approx(1e-4, rel=1e-2)
    assert pairs_distance({**told, "r.signs": torch.tensor([0, 4]).byte()}, told) == 1 / 16
    assert pairs_distance({**told, "x": 1.5 * told["x"]}, told) == pytest.approx(0.5)
    for name in told:
        assert pairs_distance({one: value for one, value in told.items() if one != name}, told) == 1.0
