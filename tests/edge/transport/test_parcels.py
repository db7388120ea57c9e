"""Parcels of the plan travel, and nothing else of the kind does: pairs and weights of helpers, gradients of owners.

Gradients of embedding and head go from an item's initiator to every other owner.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from edge.transport import frames
from edge.transport.admission import FrameCheck
from ringtune.costs.links import MAX_BLOB_BYTES
from ringtune.engine.events import ParcelArrived
from ringtune.errors import FrameError
from ringtune.schedule.access import CopyBytes
from ringtune.schedule.actions import Payload, TensorKey, format_action
from ringtune.schedule.course import Offload
from ringtune.schedule.lowering import credit_boundary, parcels
from ringtune.schedule.methods import Everything, Hift
from ringtune.schedule.placement import Helper, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import unit_grad_key
from ringtune.schedule.turns import items, turn_sequence
from ringtune.schedule.units import EMBEDDING, Range
from ringtune.storage.pieces import Pieces
from ringtune.v1 import ring_pb2
from tests.support.wire_parts import WAIT_S, expectation, hello, plan, receiver, sender

HELPERS = (Helper(node="z", start=0, stop=1), Helper(node="z", start=1, stop=2), Helper(node="c", start=2, stop=4))


def helped(**changes: Any) -> Plan:
    """Hosts a and b; z only helps a, owner c helps b."""
    return plan(**{"method": Everything(), "local_iterations": 4, "helpers": HELPERS, **changes})


def pairs(seq: int, micro: int, block: int) -> TensorKey:
    """The pairs of some blocks, from this one on."""
    return TensorKey(Payload.PAIRS, seq, micro, block)


def weights(seq: int, block: int) -> TensorKey:
    """The updated adapters of some blocks, from this one on."""
    return TensorKey(Payload.WEIGHTS, seq, -1, block)


def header(of: Plan, source: str, key: TensorKey) -> ring_pb2.FrameHeader:
    """The header of a parcel."""
    return frames.parcel_header(hello(of, source), key, Pieces.of(b"x"))


HEAD = 4
DATA = bytes(range(256)) * 20_000  # two chunks


def hift_plan(**changes: Any) -> Plan:
    """Six units in three groups: item 0 trains the embedding, item 2 the head, 3 and 5 likewise."""
    return plan(**{"method": Hift(group_size=2), "local_iterations": 4, **changes})


def test_parcels_of_an_item_are_those_that_the_plan_foresees() -> None:
    """Pairs of each micro-batch and helper, weights of each update."""
    of = helped()
    item = items(of.course, next(iter(turn_sequence(of.course))))[1]
    assert parcels(of, item, "a", "z") == {pairs(1, micro, block) for micro in (0, 1) for block in (0, 1)}
    assert parcels(of, item, "z", "a") == {weights(1, 0), weights(1, 1)}
    assert parcels(of, item, "b", "c") == {pairs(1, 0, 2), pairs(1, 1, 2)}
    assert parcels(of, item, "c", "b") == {weights(1, 2)}
    assert not parcels(of, item, "a", "c")


def test_parcels_have_weights_once_an_interval() -> None:
    """The helper sends what it has updated, after the fourth step and not before."""
    of = helped(offload=Offload(blocks=(Range(0, 4),), interval=4))
    first, *_, fourth = items(of.course, next(iter(turn_sequence(of.course))))
    assert parcels(of, first, "a", "z") and not parcels(of, first, "z", "a")
    assert parcels(of, fourth, "z", "a") == {weights(3, 0), weights(3, 1)}


def test_parcels_that_the_plan_does_not_foresee_are_refused() -> None:
    """Item, micro-batch, unit, sender and receiver all have to be what they must be."""
    of, hift, grad = helped(), hift_plan(), unit_grad_key
    for plan_of, source, node, key in (
        (of, "a", "z", pairs(0, 2, 0)),  # a third micro-batch
        (of, "a", "z", pairs(0, 0, 2)),  # blocks of another host
        (of, "b", "z", pairs(0, 0, 2)),  # to a helper of other blocks
        (of, "z", "a", weights(0, 2)),  # blocks of another host
        (of, "c", "a", weights(0, 0)),  # from a node that does not help it
        (of, "a", "z", weights(0, 0)),  # from the host
        (hift, "c", "d", grad(1, EMBEDDING)),  # trains blocks
        (hift, "c", "d", grad(0, HEAD)),  # trains the embedding, not the head
        (hift, "c", "d", grad(0, 2)),  # a block is not copied
        (hift, "d", "c", grad(0, EMBEDDING)),  # an item of the other owner
        (hift, "c", "b", grad(0, EMBEDDING)),  # to a node that owns nothing
        (plan(), "c", "d", grad(0, HEAD)),  # where only adapters train heads travel
    ):
        with pytest.raises(FrameError, match="not in the plan"):
            FrameCheck(expectation(plan_of, node), source).admit(header(plan_of, source, key))
    far = hift_plan(num_steps=4000, local_iterations=1)
    with pytest.raises(FrameError, match="are accepted now"):  # no turn is derived further than a node can lag
        FrameCheck(expectation(far, "d"), "c").admit(header(far, "c", grad(3000, EMBEDDING)))


@pytest.mark.promise("7 bounded memory")
def test_parcels_are_no_larger_than_planned_copies() -> None:
    """A helper could send its host a GiB in place of some kilobytes; each block has 64 KiB more for names.

    Before anything is allocated, as a head is; a gradient has the limit of all blobs.
    """
    copies = 2 * (4 << 10) + 3 * (64 << 10)
    halves = (Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=4), Slice(node="e", start=2, stop=4))
    shared = plan(method=Everything(), slices=halves)
    for of, source, node, key, most in (
        (helped(), "z", "a", weights(0, 0), copies),
        (helped(), "c", "b", weights(0, 2), copies),
        (shared, "e", "b", TensorKey(Payload.REPLICA_GRAD, 0, 1, 2), copies),
        (hift_plan(), "c", "d", unit_grad_key(0, EMBEDDING), MAX_BLOB_BYTES),
    ):
        check = FrameCheck(expectation(of, node, sizes=CopyBytes(block=4 << 10)), source)
        for size, refused in ((most + 1, True), (most, False)):
            parcel = header(of, source, key)
            parcel.payload_bytes = size
            with pytest.raises(FrameError, match=f"the limit is {most}") if refused else nullcontext():
                check.admit(parcel)


def test_parcels_come_once_and_with_credit_only() -> None:
    """Two pairs and gradients may wait, and the weights of each range once: memory is bounded.

    A dropped payload may come again.
    """
    of, hift, grad = helped(), hift_plan(local_iterations=12), unit_grad_key
    for plan_of, source, node, keys in (
        (of, "a", "z", [pairs(0, 0, 1), pairs(0, 0, 0), pairs(0, 1, 1)]),
        (of, "c", "b", [weights(0, 2), weights(1, 2)]),
        (of, "z", "a", [weights(0, 0), weights(0, 1), weights(1, 0)]),
        (hift, "c", "d", [grad(0, EMBEDDING), grad(2, HEAD), grad(3, EMBEDDING)]),
    ):
        check = FrameCheck(expectation(plan_of, node), source)
        *first, last = (header(plan_of, source, key) for key in keys)
        for parcel in first:
            check.admit(parcel)
        with pytest.raises(FrameError, match="arrived twice"):
            check.admit(first[0])
        check.revoke(first[0])
        check.admit(first[0])
        with pytest.raises(FrameError, match=f"without credit: {len(first)} of {len(first)}"):
            check.admit(last)
        check.credit_returned(credit_boundary(plan_of.course, keys[-1].payload), 1)
        check.admit(last)


def test_unit_grad_arrives_with_item_unit_and_bytes() -> None:
    """From one owner to another, in the order of sending; each is a span of its link.

    Credits of hidden states travel a quarter at a time, those of gradients are too few.
    """
    of = hift_plan(credits=8)
    boundary = credit_boundary(of.course, Payload.UNIT_GRAD)
    with receiver(expectation(of, "d")) as node, sender(node.address, hello(of, "c"), "d") as out:
        assert out.link.send_parcel(unit_grad_key(0, EMBEDDING), Pieces.of(DATA)) == len(DATA)
        out.link.send_parcel(unit_grad_key(2, HEAD), Pieces.of(b"two"))
        assert node.sink.next() == (ParcelArrived(unit_grad_key(0, EMBEDDING), "c"), DATA)
        assert node.sink.next() == (ParcelArrived(unit_grad_key(2, HEAD), "c"), b"two")
        assert format_action(out.sent.get(timeout=WAIT_S).action, HEAD) == ">u0#embedding@d"
        node.servicer.ack("c", boundary)
        assert out.acks.get(timeout=WAIT_S) == ("d", frames.Ack(1, boundary))
