"""What a micro-batch waits for, and from whom: the words of an error of a deadline."""

from __future__ import annotations

from collections.abc import Container

from ringtune.engine.flows import Flow
from ringtune.schedule.lowering import Op, Payload

TensorKey = tuple[str, int, int, int]
"""Payload, item, micro-batch and boundary of a tensor in the inbox."""


def awaited_by(flow: Flow, *, inbox: Container[TensorKey], has_credit: bool, has_head: bool, head_from: str) -> str:
    """What the next leg of ``flow`` needs.

    Args:
        flow: a micro-batch that is not through.
        inbox: the tensors that are here.
        has_credit: whether its hidden state has room where it goes.
        has_head: whether the head that it needs is here.
        head_from: who sends it otherwise.
    """
    leg, place, item = flow.leg, flow.place, flow.state.item
    where = f"of step {item.step} ({item.kind.value}), micro-batch {flow.micro}"
    if leg is None:
        return f"nothing more {where}"
    if leg.op is Op.RECEIVE and (leg.payload, flow.seq, flow.micro, leg.start) not in inbox:
        name = "hidden state" if leg.payload == Payload.HIDDEN else "gradient"
        return f"the {name} {where}, at block {leg.start}, from node {leg.peer}"
    if place is None:
        return f"{leg.op.name} {where} to become possible"
    if place.credit is not None and not has_credit:
        return f"room in the inbox of node {place.credit[0]} for the hidden state {where}"
    if place.op is Op.HEAD and not has_head:
        return f"the head {where}, from node {head_from}"
    return f"{place.op.name} {where} to become possible"
