"""Gradients of embedding and head travel from an item's initiator to every other owner, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from edge.transport import frames
from edge.transport.admission import FrameCheck
from ringtune.engine.events import ParcelArrived
from ringtune.errors import FrameError
from ringtune.schedule.actions import Payload, format_action
from ringtune.schedule.lowering import WAITING, credit_boundary
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import unit_grad_key
from ringtune.schedule.units import EMBEDDING
from ringtune.storage.pieces import Pieces
from ringtune.v1 import ring_pb2
from tests.support.wire_parts import WAIT_S, expectation, hello, plan, receiver, sender

HEAD = 4
DATA = bytes(range(256)) * 20_000  # two chunks


def hift_plan(**changes: Any) -> Plan:
    """Six units in three groups: item 0 trains the embedding, item 2 the head, 3 and 5 likewise."""
    return plan(**{"method": Hift(group_size=2), "local_iterations": 4, **changes})


def header(of: Plan, seq: int, unit: int, source: str = "c", data: bytes = b"x") -> ring_pb2.FrameHeader:
    """The header of a unit's gradient."""
    return frames.parcel_header(hello(of, source), unit_grad_key(seq, unit), Pieces.of(data))


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


def test_unit_grad_that_no_item_gives_is_refused() -> None:
    """Item, unit, initiator and receiver all have to be what they must be; where only adapters train heads travel."""
    for of, source, node, seq, unit in (
        (hift_plan(), "c", "d", 1, EMBEDDING),  # trains blocks
        (hift_plan(), "c", "d", 0, HEAD),  # trains the embedding, not the head
        (hift_plan(), "c", "d", 0, 2),  # a block is not copied
        (hift_plan(), "d", "c", 0, EMBEDDING),  # an item of the other owner
        (hift_plan(), "c", "b", 0, EMBEDDING),  # to a node that owns nothing
        (plan(), "c", "d", 0, HEAD),
    ):
        with pytest.raises(FrameError, match="not in the plan"):
            FrameCheck(expectation(of, node), source).admit(header(of, seq, unit, source))


def test_unit_grad_comes_once_and_with_credit_only() -> None:
    """A dropped payload may come again; more than the credits may not wait."""
    of = hift_plan(local_iterations=12)
    check = FrameCheck(expectation(of, "d"), "c")
    first = header(of, 0, EMBEDDING)
    check.admit(first)
    with pytest.raises(FrameError, match="arrived twice"):
        check.admit(first)
    check.revoke(first)
    check.admit(first)
    check.admit(header(of, 2, HEAD))
    with pytest.raises(
        FrameError, match=f"without credit: {WAITING[Payload.UNIT_GRAD]} of {WAITING[Payload.UNIT_GRAD]}"
    ):
        check.admit(header(of, 3, EMBEDDING))
    check.credit_returned(credit_boundary(of.course, Payload.UNIT_GRAD), 1)
    check.admit(header(of, 3, EMBEDDING))


def test_unit_grad_that_is_too_large_or_far_ahead_is_refused() -> None:
    """Before anything is allocated, as a head is; no turn is derived further than a node can lag."""
    large = header(hift_plan(), 0, EMBEDDING)
    large.payload_bytes = 2**50
    with pytest.raises(FrameError, match="the limit is"):
        FrameCheck(expectation(hift_plan(), "d"), "c").admit(large)
    of = hift_plan(num_steps=4000, local_iterations=1)
    with pytest.raises(FrameError, match="are accepted now"):
        FrameCheck(expectation(of, "d"), "c").admit(header(of, 3000, EMBEDDING))
