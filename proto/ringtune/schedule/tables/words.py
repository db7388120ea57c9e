"""The word of an action: how it is printed, and read back.

One action is one word::

    E12.0        embed micro-batch 0 of item 12       f12.0[0,1)   forward of block 0 without graph
    F12.0[3,4)   forward with graph                   B12.0[3,4)   backward
    S12.0[1,3)   pass blocks by                       H12.0        head and loss
    U12[3,4)     update of blocks, U12[head]          K12          save what this node trained
    >h12.0#2@b   send the hidden state that enters block 2 to node b       <h12.0#2@a   receive it
    >g12.0#4@b   send the gradient of that hidden state                    >t3@b  <t3@a  hand the head over
    >u12#embedding@b  send the gradient of the embedding to another owner, >u12#head@b that of the head
    C12.0[0,2)   pack pairs of adapters for a helper  >c12.0#0@z   send them
    A12.0[0,2)   fit adapters to such pairs           >w12#0@a     send updated adapters to their host
    >r12.0#2@b   send the gradients of a replica, of the blocks from 2 on, to another host of the same blocks
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op, Payload, Scope, op_of
from ringtune.schedule.units import EMBEDDING, head_of, unit_name

_LONGEST = 200
_NUMBER = r"\d{1,18}"
_LETTER = r"(?P<op>[A-Za-z<>])"
_NODE = r"(?P<peer>[a-z0-9][a-z0-9._-]*)"
_RANGE = rf"\[(?P<start>-?{_NUMBER}),(?P<stop>{_NUMBER})\)"
_FORMS = {
    Scope.ITEM: (re.compile(rf"{_LETTER}(?P<seq>{_NUMBER})"),),
    Scope.MICRO: (re.compile(rf"{_LETTER}(?P<seq>{_NUMBER})\.(?P<micro>{_NUMBER})"),),
    Scope.RANGE: (re.compile(rf"{_LETTER}(?P<seq>{_NUMBER})\.(?P<micro>{_NUMBER}){_RANGE}"),),
    Scope.UNITS: (
        re.compile(rf"{_LETTER}(?P<seq>{_NUMBER}){_RANGE}"),
        re.compile(rf"{_LETTER}(?P<seq>{_NUMBER})\[(?P<unit>head|embedding)\]"),
    ),
    Scope.MESSAGE: (
        re.compile(
            rf"{_LETTER}(?P<payload>[hgcr])(?P<seq>{_NUMBER})\.(?P<micro>{_NUMBER})#(?P<start>{_NUMBER})@{_NODE}"
        ),
        re.compile(rf"{_LETTER}(?P<payload>t)(?P<start>{_NUMBER})@{_NODE}"),
        re.compile(rf"{_LETTER}(?P<payload>w)(?P<seq>{_NUMBER})#(?P<start>{_NUMBER})@{_NODE}"),
        re.compile(rf"{_LETTER}(?P<payload>u)(?P<seq>{_NUMBER})#(?P<unit>head|embedding)@{_NODE}"),
    ),
}

_PAYLOADS: Mapping[str, str] = {
    Payload.HIDDEN: "hidden state",
    Payload.GRAD: "gradient",
    Payload.HEAD: "head",
    Payload.PAIRS: "pairs of adapters",
    Payload.WEIGHTS: "updated adapters",
    Payload.REPLICA_GRAD: "gradients of a replica",
}


def format_action(action: Action, num_blocks: int) -> str:
    """Print one action; ``num_blocks`` tells the head from a block."""
    op, seq, micro, start, stop, peer, payload = action
    match op.scope:
        case Scope.ITEM:
            return f"{op}{seq}"
        case Scope.MICRO:
            return f"{op}{seq}.{micro}"
        case Scope.RANGE:
            return f"{op}{seq}.{micro}[{start},{stop})"
        case Scope.UNITS if start == head_of(num_blocks):
            return f"{op}{seq}[head]"
        case Scope.UNITS if start == EMBEDDING:
            return f"{op}{seq}[embedding]"
        case Scope.UNITS:
            return f"{op}{seq}[{start},{stop})"
        case Scope.MESSAGE if payload == Payload.HEAD:
            return f"{op}t{start}@{peer}"
        case Scope.MESSAGE if payload == Payload.UNIT_GRAD:
            return f"{op}u{seq}#{unit_name(start, num_blocks)}@{peer}"
        case Scope.MESSAGE if payload == Payload.WEIGHTS:
            return f"{op}w{seq}#{start}@{peer}"
    return f"{op}{payload}{seq}.{micro}#{start}@{peer}"


def action_title(action: Action, num_blocks: int) -> str:
    """Name an action in words, without item and micro-batch, so that equal work has one name.

    Examples: ``forward with graph [2,4)``, ``update head``, ``send gradient to b``.
    """
    op = action.op
    match op.scope:
        case Scope.ITEM | Scope.MICRO:
            return op.name
        case Scope.MESSAGE if action.payload == Payload.UNIT_GRAD:
            name = f"gradient of the {unit_name(action.start, num_blocks)}"
            return f"{op.name} {name} {'to' if op is Op.SEND else 'from'} {action.peer}"
        case Scope.MESSAGE:
            return f"{op.name} {_PAYLOADS[action.payload]} {'to' if op is Op.SEND else 'from'} {action.peer}"
        case Scope.UNITS if action.start in (EMBEDDING, head_of(num_blocks)):
            return f"{op.name} {unit_name(action.start, num_blocks)}"
    return f"{op.name} [{action.start},{action.stop})"


def parse_action(text: str, num_blocks: int) -> Action:
    """Read what ``format_action`` printed.

    Raises:
        PlanError: the word is not an action.
    """
    try:
        op = op_of(text[:1])
    except PlanError:
        raise _no_action(text) from None
    if len(text) > _LONGEST:
        raise _no_action(text[:_LONGEST])
    for pattern in _FORMS[op.scope]:
        match = pattern.fullmatch(text)
        if match:
            action = _action(op, match.groupdict(), num_blocks)
            if op.scope not in (Scope.RANGE, Scope.UNITS) or EMBEDDING <= action.start < action.stop:
                return action
    raise _no_action(text)


def _no_action(text: str) -> PlanError:
    return PlanError(f"{text!r} is not an action; one looks like f12.0[0,1) or >h12.0#2@node-1")


def _action(op: Op, part: Mapping[str, str | None], num_blocks: int) -> Action:
    start, stop = int(part.get("start") or 0), int(part.get("stop") or 0)
    if op is Op.EMBED or part.get("unit") == "embedding":
        start, stop = EMBEDDING, EMBEDDING + 1
    elif op is Op.HEAD or part.get("unit") == "head":
        start, stop = head_of(num_blocks), head_of(num_blocks) + 1
    if op.scope is Scope.MESSAGE:
        stop = 0
    micro = part.get("micro")
    return Action(
        op=op,
        seq=int(part.get("seq") or 0),
        micro=int(micro) if micro else -1,
        start=start,
        stop=stop,
        peer=part.get("peer") or "",
        payload=part.get("payload") or "",
    )
