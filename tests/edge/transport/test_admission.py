"""What the plan foresees is admitted, all of it, and nothing else, whatever turns are known."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from edge.transport import admission, frames, tensors
from edge.transport.admission import FrameCheck, KnownTurns
from ringtune.errors import FrameError, TrustError
from ringtune.schedule.access import CopyBytes
from ringtune.schedule.actions import Op, Payload, TensorKey
from ringtune.schedule.course import Generation
from ringtune.schedule.lowering import legs, possible_arrivals
from ringtune.schedule.methods import Everything, Hift, RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import ITEMS_AHEAD, StartPoint, StepKind, Turn, checkpoint_turn, items, turn_sequence
from ringtune.storage.pieces import Pieces
from ringtune.transport.parties import node_party
from ringtune.v1 import ring_pb2
from tests.contract.techniques.test_replicas import hift_plan
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan, random_operations, random_plan
from tests.support.wire_parts import expectation, hello, plan, tensor_header


def _header(of: Plan | None = None, source: str = "a", **changes: Any) -> ring_pb2.FrameHeader:
    """The hidden state of item 0, micro-batch 0, that enters block 2 of the plan: a good header for node b."""
    of = of or plan()
    mask = torch.ones(2, 6, dtype=torch.int64)
    encoded = tensors.encode(torch.zeros(2, 6, 8), mask, of.course.wire_dtype)
    header = frames.tensor_header(hello(of, source), TensorKey(Payload.HIDDEN, 0, 0, 2), encoded)
    for name, value in changes.items():
        if name == "shape":
            del header.shape[:]
            header.shape.extend(value)
        else:
            setattr(header, name, value)
    return header


def _check(
    of: Plan | None = None, source: str = "a", node: str = "b", *, turns: KnownTurns | None = None
) -> FrameCheck:
    return FrameCheck(expectation(of, node), source, turns)


def _known(of: Plan) -> KnownTurns:
    """The turns of a run from its beginning, none of them granted."""
    return KnownTurns(of, StartPoint.of(of.course))


def _begin(turns: KnownTurns, turn: Turn) -> None:
    """The coordinator grants a turn, and the node is done with all before it."""
    turns.granted(turn)
    turns.done_before(turn.index)


def _num_known(turns: KnownTurns) -> int:
    first, last = turns.span()
    return last + 1 - first


def _sent(of: Plan, node: str, source: str, turns: KnownTurns | None = None) -> Iterator[ring_pb2.FrameHeader]:
    """Every tensor that ``source`` sends to ``node`` in a run, item by item, in the lowering's order.

    With ``turns`` each turn begins before its first tensor.
    """
    for turn in turn_sequence(of.course):
        if turns is not None:
            _begin(turns, turn)
        for item in items(of.course, turn):
            for micro, found in enumerate(legs(of, item, node)):
                for leg in found:
                    if leg.op is Op.RECEIVE and leg.peer == source:
                        key = TensorKey(leg.payload, item.seq, micro, leg.start)
                        yield tensor_header(of, source, key, of.course.microbatch_sizes(item.rows)[micro])


WIDE: dict[str, Any] = {"entering": (20, 18, 18, 14, 8), "returning": (8, 8, 12, 12, 8)}
"""Blocks that pass on more than a hidden state."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wire_dtype": "int8"},
        {"private_blocks": 1, "slices": [("b", 1, 4)]},
        {"batch_size": 5, "microbatches": 3, "local_iterations": 1, "eval_every": 1},
        {"owners": tuple(Owner(node=name, train_rows=4, eval_rows=3) for name in "abcdef"), "eval_every": 1},
        {"method": Everything()},
        {"method": RingAda(every_steps=0, at=(3, 4))},
        {"operations": random_operations(random.Random(0), plan().course)},
        WIDE,
    ],
)
def test_checks_admit_all_that_the_plan_foresees(changes: dict[str, Any]) -> None:
    """Every tensor of a whole run passes the check of its receiver, for any node and source."""
    of = plan(**changes)
    admitted = 0
    for node in of.nodes:
        for source in of.nodes:
            turns = _known(of)
            check = _check(of, source, node, turns=turns)
            for header in _sent(of, node, source, turns):
                check.admit(header)
                admitted += 1
                if header.kind == ring_pb2.FRAME_KIND_HIDDEN:
                    check.credit_returned(header.boundary, 1)
    assert admitted > of.course.num_steps


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"run_id": "run-0"}, "run 'run-0'"),
    ({"placement_number": 0}, "placement 0"),
    ({"source": "c"}, "has the source node 'c'"),
    ({"kind": ring_pb2.FRAME_KIND_HELLO}, "kind 1"),
    ({"kind": ring_pb2.FRAME_KIND_GRAD}, "not in the plan"),
    ({"kind": 99}, "kind 99"),
    ({"seq": -1}, "is of a turn that is none of turns 0 to 6"),
    ({"seq": 10**12}, "is of a turn that is none of turns 0 to 6"),
    ({"boundary": 1}, "not in the plan"),
    ({"micro": 2}, "has 2 micro-batches"),
    ({"micro": 2**32 - 1}, "micro-batches"),
    ({"shape": (3, 6, 8)}, "shape [3, 6, 8], expected [2, 1..6, 8]"),
    ({"shape": (2, 7, 8)}, "shape [2, 7, 8]"),
    ({"shape": (2, 0, 8)}, "shape [2, 0, 8]"),
    ({"shape": (2, 6, 9)}, "shape [2, 6, 9]"),
    ({"shape": (2, 48)}, "shape [2, 48]"),
    ({"shape": (2**31, 2**31, 2**31)}, "shape"),
    ({"dtype": ring_pb2.DTYPE_BFLOAT16}, "is in bfloat16, the plan says float32"),
    ({"dtype": ring_pb2.DTYPE_BYTES}, "the plan says float32"),
    ({"dtype": 77}, "is in 77"),
    ({"mask_bytes": 0}, "0 bytes of mask, expected 12"),
    ({"mask_bytes": 13}, "13 bytes of mask"),
    ({"payload_bytes": 2**40}, "claims 1099511627776 bytes, its shape has 396"),
    ({"payload_bytes": 0}, "claims 0 bytes"),
    ({"exponent": 1}, "in float32 with exponent 1"),
)


def test_checks_refuse_what_differs_in_one_field() -> None:
    """A good header with one wrong field is refused, and the message names what is wrong; then it passes, once."""
    check = _check()
    for changes, message in WRONG:
        with pytest.raises(FrameError) as caught:
            check.admit(_header(**changes))
        assert message in str(caught.value), changes
        check.admit(_header())
        with pytest.raises(FrameError, match="arrived twice"):
            check.admit(_header())
        check.revoke(_header())


def test_checks_know_the_width_of_each_boundary() -> None:
    """What enters block 2 may be 18 wide, its gradient 12."""
    of = plan(**WIDE, method=Everything())
    with pytest.raises(FrameError, match=r"expected \[2, 1..6, 18\]"):
        _check(of).admit(_header(of))
    forward, back = TensorKey(Payload.HIDDEN, 0, 0, 2), TensorKey(Payload.GRAD, 0, 0, 2)
    for key, source, node in ((forward, "a", "b"), (back, "b", "a")):
        _check(of, source, node).admit(tensor_header(of, source, key, 2))
    wide = tensor_header(of, "a", forward, 2)
    wide.kind, wide.source, wide.mask_bytes = ring_pb2.FRAME_KIND_GRAD, "b", 0
    with pytest.raises(FrameError, match=r"shape \[2, 3, 18\], expected \[2, 1..6, 12\]"):
        _check(of, "b", "a").admit(wide)


@pytest.mark.promise("7 bounded memory")
def test_checks_hold_the_sender_to_its_credits() -> None:
    """No more hidden states than credits are in the inbox; a returned credit lets one more in."""
    of = plan(credits=2, num_steps=12, local_iterations=12)
    check = _check(of)
    places = [(seq, micro) for seq in range(3) for micro in range(2)]
    for seq, micro in places[:2]:
        check.admit(_header(of, seq=seq, micro=micro))
    with pytest.raises(FrameError, match="without credit: 2 of 2 are taken"):
        check.admit(_header(of, seq=1, micro=0))
    check.credit_returned(2, 1)
    check.admit(_header(of, seq=1, micro=0))


def test_checks_let_a_head_pass_to_the_next_initiator_only() -> None:
    """The head for turn 1 goes from c to d, once."""
    blob = frames.blob_header(hello(source="c"), Payload.HEAD, 1, Pieces.of(b"head"))
    check = _check(source="c", node="d")
    check.admit(blob)
    for blob.micro, blob.boundary in ((0, 0), (1, 0), (0, 1)):  # which a head does not have
        with pytest.raises(FrameError, match="arrived twice"):
            check.admit(blob)
    for source, node, turn in (("c", "d", 2), ("c", "d", 0), ("d", "c", 1), ("c", "b", 1)):
        header = frames.blob_header(hello(source=source), Payload.HEAD, turn, Pieces.of(b"head"))
        with pytest.raises(FrameError, match="that turn's head goes from"):
            _check(source=source, node=node).admit(header)
    copies = plan(method=Hift(group_size=2))  # every owner has its own
    with pytest.raises(FrameError, match="is not in the plan, where every owner has a copy"):
        _check(copies, "c", "d").admit(frames.blob_header(hello(copies, "c"), Payload.HEAD, 1, Pieces.of(b"head")))
    sizes = CopyBytes(head=4 << 10)  # and 64 KiB for names
    check = FrameCheck(expectation(node="d", sizes=sizes), "c")
    large = frames.blob_header(hello(source="c"), Payload.HEAD, 1, Pieces.of(bytes(69_633)))
    with pytest.raises(FrameError, match="has 69633 bytes, the limit is 69632"):
        check.admit(large)
    with pytest.raises(FrameError, match="is of turn 1000000000 that is none of turns 0 to 6"):
        _check(source="c", node="d").admit(frames.blob_header(hello(source="c"), Payload.HEAD, 10**9, Pieces.of(b"")))


def test_checks_of_a_run_that_decides_admit_what_any_decision_brings() -> None:
    """Frames may come before the grant that says what trains: gradients pass as deep as the loss could make it."""
    of = plan(
        method=RingAda(every_steps=0, auto=Patience(patience_steps=2)), num_steps=40
    )  # soonest at steps 8, 12, 16
    check = _check(of, "b", "a")
    late = list(_sent(of.decided((10, 14, 18)), "a", "b"))
    assert {header.seq for header in late} == set(range(14, 40))
    for header in late:
        check.admit(header)
    too_soon = next(_sent(of.decided((8, 10, 16)), "a", "b"))
    with pytest.raises(FrameError, match="not in the plan"):
        _check(of, "b", "a").admit(too_soon)


def test_checks_of_a_resumed_run_take_the_head_from_who_holds_it() -> None:
    """The first turn after a checkpoint may be another owner's: its head comes from the one that saved it."""
    of = plan()
    first, second = of.course.owners[0].node, of.course.owners[1].node
    start = StartPoint.of(of.course, step=of.course.local_iterations, holder=first)
    header = frames.blob_header(hello(of, first), Payload.HEAD, 0, Pieces.of(b"head"))
    FrameCheck(expectation(of, second, start=start), first).admit(header)
    with pytest.raises(FrameError, match="that turn's head goes from node"):
        FrameCheck(expectation(of, second), first).admit(header)


def test_links_that_the_plan_does_not_have_are_refused() -> None:
    """A link is for one pair of nodes that the plan names, and its certificate is of the sender."""
    expectation().require_link("a", None)
    expectation().require_link("a", node_party("a"))
    for source, caller in (("b", None), ("", None), ("z", node_party("z")), ("a", node_party("z"))):
        with pytest.raises(TrustError, match=rf"refuses Ring\.Link of node '{source}'|speaks as node 'a'"):
            expectation().require_link(source, caller)


@pytest.mark.promise("7 bounded memory")
def test_checks_of_a_long_run_stay_small_and_quick() -> None:
    """A run of a million steps is not expanded ahead: turns are kept around those that are on, none of long ago."""
    of = plan(num_steps=1_000_000, local_iterations=1)
    turns, most = _known(of), 0
    check = _check(of, turns=turns)
    began_s = time.process_time()
    for turn in itertools.islice(turn_sequence(of.course), 700):
        _begin(turns, turn)
        check.admit(_header(of, seq=turn.first_seq))
        check.credit_returned(2, 1)
        most = max(most, _num_known(turns))
    assert time.process_time() - began_s < 5.0
    assert len(check._seen) <= 30
    assert most < 200
    for seq, micro in ((3, 0), (3, 1), (1400, 0)):  # one that came, one that never did, one that is far ahead
        with pytest.raises(FrameError, match="none of turns 698 to 725, which are accepted now"):
            check.admit(_header(of, seq=seq, micro=micro))


def test_checks_know_who_held_the_head_before_the_turns_that_are_kept() -> None:
    """Late in a run the head still has to come from the owner of the turn before."""
    of = plan(num_steps=1000, local_iterations=1)
    turns = _known(of)
    check = _check(of, source="c", node="d", turns=turns)
    heads = [turn for turn in turn_sequence(of.course) if turn.owner == "d"]
    for turn in turn_sequence(of.course):
        if turn.index > heads[299].index:
            break
        _begin(turns, turn)
        if turn.owner == "d":
            check.admit(frames.blob_header(hello(of, "c"), Payload.HEAD, turn.index, Pieces.of(b"head")))
    assert _num_known(turns) < 200
    with pytest.raises(FrameError, match="that turn's head goes from"):
        check.admit(frames.blob_header(hello(of, "c"), Payload.HEAD, heads[300].index - 1, Pieces.of(b"head")))


def test_checks_admit_of_the_way_to_the_head_only_what_it_reads() -> None:
    """Where it reads the first token, a longer row is refused."""
    of = plan()
    of = Plan(dataclasses.replace(of.course, head_tokens=1), of.placements)
    owner, last = of.course.owners[0].node, of.placement.hosts[-1].node
    source, node, payload = (last, owner, Payload.HIDDEN) if owner != last else (owner, last, Payload.HIDDEN)
    rows, width = of.course.microbatch_sizes()[0], of.course.hidden_size
    key = TensorKey(payload, 0, 0, of.course.head)
    for tokens, is_good in ((1, True), (2, False)):
        encoded = tensors.encode(torch.zeros(rows, tokens, width), None, of.course.wire_dtype)
        header = frames.tensor_header(hello(of, source), key, encoded)
        check = _check(of, source, node)
        if is_good:
            check.admit(header)
            continue
        with pytest.raises(FrameError, match=rf"shape \[{rows}, 2, {width}\], expected \[{rows}, 1..1, {width}\]"):
            check.admit(header)


def test_checks_admit_of_a_text_its_prompt_and_then_token_by_token() -> None:
    """More of them would be kept by the host than is planned."""
    generation = Generation(rows=2, max_new_tokens=2, at_once=2, alone=True)
    of = changed(make_plan([("x", 0, 2), ("y", 2, 4)], ["a"], eval_rows=2, num_steps=0), generation=generation)
    check = _check(of, "a", "x")
    for seq, tokens, is_good in ((0, of.course.max_length, True), (1, 2, False), (1, 1, True)):
        shape = (1, tokens, of.course.hidden_size)
        encoded = tensors.encode(torch.zeros(shape), torch.ones(shape[:2], dtype=torch.int64), of.course.wire_dtype)
        header = frames.tensor_header(hello(of, "a"), TensorKey(Payload.HIDDEN, seq, 0, 0), encoded)
        if is_good:
            check.admit(header)
            continue
        with pytest.raises(FrameError, match=r"has shape \[1, 2, \d+\], expected \[1, 1..1, "):
            check.admit(header)


def test_possible_arrivals_are_those_of_every_table() -> None:
    """Whatever is chosen, nothing else comes; of runs of any shape that choose their operations."""
    for seed in range(10):
        rng = random.Random(seed)
        plan = random_plan(rng)
        of = changed(plan, choice=make_choice(subnets=rng.choice([1, 2]), refresh_steps=rng.choice([0, 2])))
        turns = [turn for turn in turn_sequence(of.course) if turn.kind is StepKind.TRAIN]
        for turn, node in itertools.product(turns, of.nodes):
            possible = possible_arrivals(of.soonest(), turn.owner, node)
            for table in range(4):
                decided = dataclasses.replace(turn, operations=table_of(of.course, table))
                assert {
                    (leg.peer, leg.start, leg.payload)
                    for item in items(of.course, decided)
                    for found in legs(decided.settled(of), item, node)
                    for leg in found
                    if leg.op is Op.RECEIVE
                } <= possible, (seed, turn.index, node)


def test_checks_admit_what_any_table_brings_before_the_grant_and_only_its_own_after() -> None:
    """A peer that heard first may pass this node's predecessor by; once the table is known, only that counts."""
    of = changed(plan(), choice=make_choice(subnets=1))
    sent = list(turn_sequence(of.course))
    first = next(turn for turn in sent if turn.kind is StepKind.TRAIN)
    owner, hosts = first.owner, [piece.node for piece in of.placement.hosts]
    node, before = hosts[-1], hosts[-2]
    course = of.course
    skipped = "3" * of.slice_of(node).start + "1" * (course.num_blocks - of.slice_of(node).start)
    rows = (skipped,) * course.microbatches
    batches = tuple(BatchOperations(owner=owner, batch_id=at, rows=rows) for at in range(2))
    table = Operations(batches=batches)
    boundary = of.slice_of(node).start

    def header(source: str) -> ring_pb2.FrameHeader:
        return tensor_header(of, source, TensorKey(Payload.HIDDEN, first.first_seq, 0, boundary), 2)

    for source in {owner, before} - {node}:
        FrameCheck(expectation(of, node), source).admit(header(source))
    turns = KnownTurns(of, StartPoint.of(of.course))
    for turn in sent[: first.index + 1]:
        turns.granted(dataclasses.replace(turn, operations=table if turn is first else None))
    FrameCheck(expectation(of, node), owner, turns).admit(header(owner))
    with pytest.raises(FrameError, match="not in the plan"):
        FrameCheck(expectation(of, node), before, turns).admit(header(before))


def test_checks_know_turns_ahead_through_scores() -> None:
    """From the grant of any turn on, a node knows its own next turn, whatever scores and evaluations come between."""
    of = changed(plan(eval_every=2, num_steps=24), choice=make_choice(subnets=1, refresh_steps=2))
    sent = list(turn_sequence(of.course))
    for node in [owner.node for owner in of.course.owners]:
        turns = KnownTurns(of, StartPoint.of(of.course))
        for turn in sent:
            own = next((later for later in sent[turn.index + 1 :] if later.owner == node), None)
            turns.granted(turn)
            assert own is None or turns.by_index(own.index) is not None


@pytest.mark.promise("7 bounded memory")
def test_checks_keep_nothing_of_rows_that_have_passed() -> None:
    """Other operations for every micro-batch of a long run: what a link keeps does not grow with them."""
    of = make_plan([("a", 0, 6), ("b", 6, 12)], ["c"], method="all", num_blocks=12, train_rows=400, num_steps=100)
    of = changed(of, operations=random_operations(random.Random(0), of.course))
    turns = KnownTurns(of, StartPoint.of(of.course))
    check, count = FrameCheck(expectation(of, "b"), "a", turns), 0
    for turn in turn_sequence(of.course):
        _begin(turns, turn)
        for item in items(of.course, turn) if turn.kind is StepKind.TRAIN else ():
            for micro, found in enumerate(legs(of, item, "b")):
                for leg in found:
                    if leg.op is Op.RECEIVE and leg.peer == "a" and leg.payload == Payload.HIDDEN:
                        key = TensorKey(Payload.HIDDEN, item.seq, micro, leg.start)
                        check.admit(tensor_header(of, "a", key, 2))
                        check.credit_returned(leg.start, 1)
                        count += 1
    kept = [len(value) for value in vars(check).values() if isinstance(value, dict)]
    assert sum(kept) < 10 < count / 10


@pytest.mark.parametrize("eval_every", [0, 100])
def test_window_admits_heads_of_sources_that_send_nothing_else(eval_every: int) -> None:
    """Only after an evaluation a head goes from f to d, long after the run began: node d knows the turn by then."""
    owners = tuple(Owner(node=name, train_rows=8, eval_rows=4) for name in "cdef")
    of = plan(owners=owners, num_steps=220, local_iterations=2, eval_every=eval_every)
    turns = {owner.node: KnownTurns(of, StartPoint.of(of.course)) for owner in owners}
    checks: dict[tuple[str, str], FrameCheck] = {}

    def check_of(source: str, node: str) -> FrameCheck:
        key = (source, node)
        return checks.setdefault(key, FrameCheck(expectation(of, node), source, turns[node]))

    holder, heads = "c", 0
    for turn in turn_sequence(of.course):
        for known in turns.values():
            known.granted(turn)
            known.done_before(turn.index)
        if turn.owner != holder:
            header = frames.blob_header(hello(of, holder), Payload.HEAD, turn.index, Pieces.of(b"head"))
            check_of(holder, turn.owner).admit(header)
            heads += 1
        holder = turn.owner
        for item in items(of.course, turn):
            rows = of.course.microbatch_sizes(item.rows)[0]
            check_of("b", holder).admit(
                tensor_header(of, "b", TensorKey(Payload.HIDDEN, item.seq, 0, of.course.num_blocks), rows)
            )
            checks["b", holder].credit_returned(of.course.num_blocks, 1)
    assert heads > 100


def test_head_is_refused_where_every_owner_has_a_copy() -> None:
    """None is handed over, so that the receiver has no version for one."""
    of = hift_plan()
    header = frames.blob_header(hello(of, "a"), Payload.HEAD, 1, Pieces.of(b"head"))
    with pytest.raises(FrameError, match="every owner has a copy"):
        FrameCheck(expectation(of, "c"), "a").admit(header)


def test_window_admits_what_was_granted_ahead_and_nothing_farther() -> None:
    """With turns of one item, frozen work of many turns comes before the gradient of the first of them.

    Beyond what can have been granted a frame is refused, so what a peer can make a node keep is bounded.
    """
    of = _ahead(num_steps=1000)
    check = FrameCheck(expectation(of, "b"), "a")
    sent = [turn for turn in itertools.islice(turn_sequence(of.course), ITEMS_AHEAD) if turn.kind is StepKind.TRAIN]
    assert sent[-1].index == ITEMS_AHEAD - 1
    for turn in sent:
        check.admit(tensor_header(of, "a", TensorKey(Payload.HIDDEN, turn.first_seq, 0, 2), 4))
        check.credit_returned(2, 1)
    check.admit(tensor_header(of, "a", TensorKey(Payload.GRAD, 0, 0, of.course.num_blocks), 4))
    with pytest.raises(FrameError, match="of a turn that is none of turns 0 to"):
        check.admit(tensor_header(of, "a", TensorKey(Payload.HIDDEN, 500, 0, 2), 4))


def test_window_goes_by_what_a_grant_says() -> None:
    """A gradient that some decision could bring is refused once the grant of its turn says what was decided."""
    of = plan(method=RingAda(every_steps=0, auto=Patience(patience_steps=2)), num_steps=40)  # soonest at 8, 12, 16
    turns = KnownTurns(of, StartPoint.of(of.course))
    check = FrameCheck(expectation(of, "a"), "b", turns)
    unfrozen = TensorKey(Payload.GRAD, 12, 0, 2)
    check.admit(tensor_header(of, "b", unfrozen, 2))
    for turn in turn_sequence(of.course):
        turns.granted(dataclasses.replace(turn, unfreeze_at=(8, 14) if turn.first_step >= 8 else ()))
    with pytest.raises(FrameError, match="not in the plan"):
        check.admit(tensor_header(of, "b", unfrozen._replace(micro=1), 2))
    check.admit(tensor_header(of, "b", unfrozen._replace(seq=14), 2))


def test_window_knows_a_granted_turn_that_no_course_foresees() -> None:
    """The checkpoint because the user stops takes the place of the turn that would have come, or follows the last."""
    of = _ahead(num_steps=3)
    known = list(turn_sequence(of.course))
    for last in (known[1], known[-1]):
        turns = KnownTurns(of, StartPoint.of(of.course))
        for turn in (*known[: last.index + 1], checkpoint := checkpoint_turn(last, holder="a")):
            turns.granted(turn)
        found = turns.by_index(checkpoint.index)
        assert found is not None
        assert found == turns.by_seq(checkpoint.first_seq)
        assert found.turn == checkpoint


def test_window_is_bounded_where_an_evaluation_writes_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a turn, and who asks for an evaluation says how many rows the node of the own machine has."""
    monkeypatch.setattr(admission, "MAX_TURNS_AHEAD", 100)
    texts = Generation(rows=1000, max_new_tokens=2, at_once=1, alone=True)
    of = _ahead(num_steps=0, owners=(Owner(node="a", train_rows=8, eval_rows=1000),), generation=texts)
    turns = KnownTurns(of, StartPoint.of(of.course))
    granted = list(turn_sequence(of.course))
    assert len(granted) == 1000 and turns.by_seq(0) is not None and turns.span() == (0, 99)
    turns.granted(granted[500])
    assert turns.by_index(600) is not None and turns.span() == (0, 600)


def _ahead(**changes: Any) -> Plan:
    """One owner that hosts the lower half itself, one micro-batch a step, one step a turn."""
    values: dict[str, Any] = {
        "owners": (Owner(node="a", train_rows=8),),
        "slices": [("a", 0, 2), ("b", 2, 4)],
        "num_steps": 100,
        "local_iterations": 1,
        "method": RingAda(every_steps=1000),
        "microbatches": 1,
    }
    return plan(**{**values, **changes})
