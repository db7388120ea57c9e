"""Says what a micro-batch waits for and from whom, in the words of a deadline's error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringtune.engine.flows import Flow
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.turns.turns import Item
from ringtune.schedule.units import unit_name

_NAMES: Final[Mapping[str, str]] = {
    Payload.HIDDEN: "hidden state",
    Payload.GRAD: "gradient",
    Payload.PAIRS: "pairs of adapters",
}


def awaited_by(flow: Flow, *, has_head: bool, head_from: str) -> str:
    """Say what the next action of ``flow`` needs.

    Example: ``the gradient of step 7 (train), micro-batch 0, at block 4, from node c``.

    Args:
        flow: a micro-batch that is not through.
        has_head: whether the head that it needs is here.
        head_from: who sends it otherwise; empty = nobody, it waits for an update.
    """
    place, item = flow.place, flow.state.item
    where = f"of step {item.step} ({item.kind.value}), micro-batch {flow.micro}"
    if place is None:
        return f"nothing more {where}"
    if place.receive is not None and flow.arrived is None:
        payload, boundary, peer = place.receive
        name = _NAMES[payload]
        return f"the {name} {where}, at block {boundary}, from node {peer}"
    if place.credit is not None and place.credit.left <= 0:
        name = _NAMES[Payload.PAIRS if place.op is Op.SHIP else Payload.HIDDEN]
        return f"room in the inbox of node {place.credit.target} for the {name} {where}"
    if place.op is Op.HEAD and not has_head:
        return (
            f"the head {where}, from node {head_from}" if head_from else f"the update of the head before that {where}"
        )
    return f"{place.op.name} {where} to become possible"


def awaited_weights(item: Item, block: int, helper: str) -> str:
    """Say which updated adapters a host waits for.

    Example: ``the updated adapters of step 7 (train), from block 2 on, from helper z``.
    """
    return f"the updated adapters of step {item.step} ({item.kind.value}), from block {block} on, from helper {helper}"


def awaited_grads(item: Item, block: int, replica: str) -> str:
    """Say which gradients a host waits for that another host of its stage sends.

    Example: ``the gradients of step 7 (train), from block 2 on, of the replica on node b``.
    """
    where = f"of step {item.step} ({item.kind.value}), from block {block} on"
    return f"the gradients {where}, of the replica on node {replica}"


def awaited_copy(item: Item, unit: int, num_blocks: int) -> str:
    """Say which gradient a copy of embedding or head waits for.

    Example: ``the gradient of the embedding of step 7 (train), from node c``.
    """
    name = unit_name(unit, num_blocks)
    return f"the gradient of the {name} of step {item.step} ({item.kind.value}), from node {item.owner}"
