"""Pairs travel from a host to its helper, weights back, and nothing else of the kind does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from edge.transport import frames
from edge.transport.admission import FrameCheck
from ringtune.errors import FrameError
from ringtune.schedule.access import CopyBytes
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.course import Offload
from ringtune.schedule.lowering import credit_boundary, parcels
from ringtune.schedule.methods import Everything
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import items, turn_sequence
from ringtune.schedule.units import Range
from ringtune.storage.pieces import Pieces
from ringtune.v1 import ring_pb2
from tests.support.wire_parts import expectation, hello, plan

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
    """Micro-batch, blocks, helper and host all have to be what they must be."""
    of = helped()
    for source, node, key in (
        ("a", "z", pairs(0, 2, 0)),  # a third micro-batch
        ("a", "z", pairs(0, 0, 2)),  # blocks of another host
        ("b", "z", pairs(0, 0, 2)),  # to a helper of other blocks
        ("z", "a", weights(0, 2)),  # blocks of another host
        ("c", "a", weights(0, 0)),  # from a node that does not help it
        ("a", "z", weights(0, 0)),  # from the host
    ):
        with pytest.raises(FrameError, match="not in the plan"):
            FrameCheck(expectation(of, node), source).admit(header(of, source, key))


@pytest.mark.promise("7 bounded memory")
def test_weights_and_gradients_are_no_larger_than_planned_copies() -> None:
    """A helper could send its host a GiB in place of some kilobytes; each block has 64 KiB more for names."""
    of, sizes = helped(), CopyBytes(block=4 << 10)
    for source, node, key, blocks in (("z", "a", weights(0, 0), 2), ("c", "b", weights(0, 2), 2)):
        most = blocks * (4 << 10) + (blocks + 1) * (64 << 10)
        check = FrameCheck(expectation(of, node, sizes=sizes), source)
        for size, refused in ((most + 1, True), (most, False)):
            found = header(of, source, key)
            found.payload_bytes = size
            with pytest.raises(FrameError, match=f"the limit is {most}") if refused else nullcontext():
                check.admit(found)


def test_parcels_come_once_and_with_credit_only() -> None:
    """Two pairs may wait, and the weights of each range once: a helper's memory is bounded."""
    of = helped()
    for source, node, keys in (
        ("a", "z", [pairs(0, 0, 1), pairs(0, 0, 0), pairs(0, 1, 1)]),
        ("c", "b", [weights(0, 2), weights(1, 2)]),
        ("z", "a", [weights(0, 0), weights(0, 1), weights(1, 0)]),
    ):
        check = FrameCheck(expectation(of, node), source)
        *first, last = keys
        for key in first:
            check.admit(header(of, source, key))
        with pytest.raises(FrameError, match="arrived twice"):
            check.admit(header(of, source, first[0]))
        with pytest.raises(FrameError, match=f"without credit: {len(first)} of {len(first)}"):
            check.admit(header(of, source, last))
        check.credit_returned(credit_boundary(of.course, last.payload), 1)
        check.admit(header(of, source, last))
