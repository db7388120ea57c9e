"""Error texts of an engine: what a micro-batch waits for and from whom, and training that diverged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ringtune.engine.paths import MicroBatchState
from ringtune.errors import DivergedError
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.course import Course
from ringtune.schedule.turns import Item, StepKind, rows_of
from ringtune.texts import listed

_NAMES: Final[Mapping[str, str]] = {
    Payload.HIDDEN: "hidden state",
    Payload.GRAD: "gradient",
    Payload.PAIRS: "pairs of adapters",
}


class Awaited(NamedTuple):
    """What a node awaits, in words, and the ``peer`` that has to send it; empty = none."""

    text: str
    peer: str = ""


def awaited_by(flow: MicroBatchState, *, has_head: bool, head_from: str) -> Awaited:
    """Describe the message, credit or head that the next action of a micro-batch awaits.

    Example: ``the gradient of step 7 (train), micro-batch 0, at block 4, from node c``. ``has_head`` says whether the
    head that it needs is here; else ``head_from`` sends it (empty = it waits for an update here).
    """
    place, item = flow.place, flow.state.item
    where = f"of step {item.step} ({item.kind.value}), micro-batch {flow.micro}"
    if place is None:
        return Awaited(f"nothing more {where}")
    if place.receive is not None and flow.arrived is None:
        payload, boundary, peer = place.receive
        name = _NAMES[payload]
        return Awaited(f"the {name} {where}, at block {boundary}, from node {peer}", peer)
    if place.credit is not None and place.credit.left <= 0:
        name = _NAMES[Payload.PAIRS if place.op is Op.SHIP else Payload.HIDDEN]
        target = place.credit.target
        return Awaited(f"room in the inbox of node {target} for the {name} {where}", target)
    if place.op is Op.HEAD and not has_head:
        if head_from:
            return Awaited(f"the head {where}, from node {head_from}", head_from)
        return Awaited(f"the update of the head before that {where}")
    return Awaited(f"{place.op.name} {where} to become possible")


LOWER_THE_RATE = "lower train.learning_rate and train anew"
_MAX_ROWS: Final = 16


def diverged(item: Item, what: str, *, course: Course | None = None, micro: int | None = None) -> DivergedError:
    """Make the error for an item with a value that is not finite.

    ``what`` names the value, ``course`` adds the numbers of the rows, ``micro`` restricts them to one micro-batch.
    Example: the training diverged at step 13, a batch of owner a: the loss is nan (micro-batch 1, training rows 3 and
    8, counted from 0); lower train.learning_rate ...
    """
    when = "at" if item.kind.has_update else "in the evaluation after"
    where = f"{when} step {item.step + item.kind.has_update}, a batch of owner {item.owner}"
    rows = "" if course is None else f" ({_rows_in_words(course, item, micro)})"
    return DivergedError(f"the training diverged {where}: {what}{rows}; {LOWER_THE_RATE}")


def may_diverge(item: Item) -> bool:
    """Whether a value of the item that is not finite is the training's fault: in train and evaluation items."""
    return item.kind in (StepKind.TRAIN, StepKind.EVALUATE)


def _rows_in_words(course: Course, item: Item, micro: int | None) -> str:
    micro = None if micro is None or micro < 0 else micro
    rows = sorted(rows_of(course, item, micro))
    part = "" if micro is None else f"micro-batch {micro}, "
    name = "evaluation" if item.kind.evaluates else "training"
    return f"{part}{name} rows {listed([*map(str, rows)], _MAX_ROWS)}, counted from 0"
