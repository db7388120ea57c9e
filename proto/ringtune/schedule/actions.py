"""Actions of nodes: the table of ops with their properties, and the text form of an action.

Printing, costs, recorded times, the memory ledger and the engine read the properties of an op here. A new op is a row
of ``Op``, and a handler in the executor.

============ ====== =========== ==== ===== ============================================================
op           letter scope       rank graph effect
============ ====== =========== ==== ===== ============================================================
EMBED        E      micro-batch 4          owner: token ids to hidden state
FORWARD_FREE f      range       4          forward without graph
FORWARD      F      range       3    keeps forward with graph
SKIP         S      range       4          skipped blocks: the hidden state is unchanged
KEEP         W      range       4          host: write the hidden state that enters a block to a file
READ         R      range       4          host: read such a hidden state from its file
HEAD         H      micro-batch 1          owner: head, loss, and the head's backward
BACKWARD     B      range       2    frees backward through the graph of F
SHIP         C      range       2          host: pack pairs of its adapters for a helper
FIT          A      range       2          helper: add up gradients of adapters from such pairs
UPDATE       U      units       0          one optimizer step of the units in its range
SAVE         K      item        0          checkpoint: this node's trained units with optimizer state
SEND         >      message                send a tensor
RECEIVE      <      message                take a received tensor
============ ====== =========== ==== ===== ============================================================

One action is one word::

    E12.0        embed micro-batch 0 of item 12       f12.0[0,1)   forward of block 0 without graph
    F12.0[3,4)   forward with graph                   B12.0[3,4)   backward
    S12.0[1,3)   skip blocks                          H12.0        head and loss
    U12[3,4)     update of blocks, U12[head]          K12          save trained units
    >h12.0#2@b   send the hidden state that enters block 2 to node b       <h12.0#2@a   receive it
    >g12.0#4@b   send the gradient of that hidden state                    >t3@b  <t3@a  hand the head over
    >u12#embedding@b  send the gradient of the embedding to another owner, >u12#head@b that of the head
    C12.0[0,2)   pack pairs of adapters for a helper  >c12.0#0@z   send them
    A12.0[0,2)   gradients of adapters from pairs     >w12#0@a     send updated adapters to their host
    >r12.0#2@b   send the gradients of a replica, of the blocks from 2 on, to another host of the same blocks
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

from ringtune.errors import PlanError
from ringtune.schedule.units import EMBEDDING, head_of, unit_name


class Scope(enum.Enum):
    """Scope of an action; it determines the text form."""

    MICRO = enum.auto()  # a micro-batch: E12.0
    RANGE = enum.auto()  # a micro-batch and a range of blocks: f12.0[0,1)
    UNITS = enum.auto()  # a whole item and a range of units: U12[3,4), U12[head]
    ITEM = enum.auto()  # a whole item: K12
    MESSAGE = enum.auto()  # a tensor between two nodes: >h12.0#2@b


class Graph(enum.Enum):
    """Effect of an action on the graphs of its micro-batch."""

    NONE = enum.auto()
    KEEPS = enum.auto()  # keeps a graph of its blocks until backward
    FREES = enum.auto()  # frees that graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Names of the measured works (``costs.profile``) that give the seconds of an action.

    Attributes:
        work: of each block in the range, or of the whole action if it has no range; empty: no time.
        lowest: of the lowest block with a graph, which begins at the block's adapter; empty: as ``work``.
        evaluating: in an item without backward; empty: as ``work``.
        head: of the head; empty: as ``work``.
        is_sized: whether the seconds grow with the tokens of the micro-batch.
        is_optional: whether the action takes no time at a node that did not measure the work.
        is_shared: whether the first action of an item works for all actions of the item; then only their mean is used.
        beside: of forward-only subnets in a block with full subnets; empty: they have no time of their own.
        scoring: added where scores are gathered, since gradients of frozen weights take as many multiplications as
            the forward.
    """

    work: str = ""
    lowest: str = ""
    evaluating: str = ""
    head: str = ""
    is_sized: bool = True
    is_optional: bool = False
    is_shared: bool = False
    beside: str = ""
    scoring: str = ""


_OPS: dict[str, Op] = {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Op:
    """An op: a row of the table. Rows are compared by identity, which makes them fast keys.

    Attributes:
        letter: its name in tables and files.
        rank: of the actions that could start now, one with the lowest rank starts; see ``engine``.
        is_forward: whether the op moves the hidden state up; micro-batches pass each unit in order.
        is_downward: whether the op is ordered with the backwards of its micro-batch.
        has_work_space: whether the op holds about one block's activations while it runs.
        is_of_cache: whether the op only writes the input of a block to a file, or reads it.
    """

    EMBED: ClassVar[Op]
    FORWARD_FREE: ClassVar[Op]
    FORWARD: ClassVar[Op]
    SKIP: ClassVar[Op]
    KEEP: ClassVar[Op]
    READ: ClassVar[Op]
    HEAD: ClassVar[Op]
    BACKWARD: ClassVar[Op]
    SHIP: ClassVar[Op]
    FIT: ClassVar[Op]
    UPDATE: ClassVar[Op]
    SAVE: ClassVar[Op]
    SEND: ClassVar[Op]
    RECEIVE: ClassVar[Op]

    letter: str
    name: str
    scope: Scope
    rank: int = 0
    is_forward: bool = False
    is_downward: bool = False
    graph: Graph = Graph.NONE
    has_work_space: bool = False
    is_of_cache: bool = False
    timing: Timing = field(default=Timing())

    def __post_init__(self) -> None:
        """Register the op under its letter; raises ``ValueError`` if another op has it."""
        if self.letter in _OPS:
            raise ValueError(f"operation {self.letter!r} is there already")
        _OPS[self.letter] = self

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Pickle the letter, so that another process gets its own row of the table."""
        return op_of, (self.letter,)

    def __lt__(self, other: Op) -> bool:
        return self.letter < other.letter

    def __str__(self) -> str:
        return self.letter

    def forget(self) -> None:
        """Remove the op from the table; for tests that added a row."""
        del _OPS[self.letter]


def op_of(letter: str) -> Op:
    """Return the op with a letter; raises ``PlanError`` if there is none."""
    op = _OPS.get(letter)
    if op is None:
        raise PlanError(f"{letter!r} is not an operation; known are {' '.join(sorted(_OPS))}")
    return op


def ops() -> tuple[Op, ...]:
    """Return every op, in the order of the table."""
    return tuple(_OPS.values())


Op.EMBED = Op(
    letter="E",
    name="embedding",
    scope=Scope.MICRO,
    rank=4,
    is_forward=True,
    timing=Timing(work="embed", is_shared=True),
)
Op.FORWARD_FREE = Op(
    letter="f",
    name="forward without graph",
    scope=Scope.RANGE,
    rank=4,
    is_forward=True,
    has_work_space=True,
    timing=Timing(work="forward"),
)
Op.FORWARD = Op(
    letter="F",
    name="forward with graph",
    scope=Scope.RANGE,
    rank=3,
    is_forward=True,
    graph=Graph.KEEPS,
    has_work_space=True,
    timing=Timing(work="graph", lowest="graph_lowest", beside="forward"),
)
Op.SKIP = Op(letter="S", name="skip", scope=Scope.RANGE, rank=4, is_forward=True)
Op.KEEP = Op(
    letter="W",
    name="keep input",
    scope=Scope.RANGE,
    rank=4,
    is_forward=True,
    is_of_cache=True,
    timing=Timing(work="encode", is_optional=True),
)
Op.READ = Op(
    letter="R",
    name="read input",
    scope=Scope.RANGE,
    rank=4,
    is_forward=True,
    is_of_cache=True,
    timing=Timing(work="decode", is_optional=True),
)
Op.HEAD = Op(
    letter="H",
    name="head",
    scope=Scope.MICRO,
    rank=1,
    is_forward=True,
    timing=Timing(work="head", evaluating="head_free"),
)
Op.BACKWARD = Op(
    letter="B",
    name="backward",
    scope=Scope.RANGE,
    rank=2,
    is_downward=True,
    graph=Graph.FREES,
    has_work_space=True,
    timing=Timing(work="backward", lowest="backward_lowest", scoring="forward"),
)
Op.SHIP = Op(letter="C", name="ship pairs", scope=Scope.RANGE, rank=2, is_downward=True)
Op.FIT = Op(
    letter="A",
    name="fit adapters",
    scope=Scope.RANGE,
    rank=2,
    is_downward=True,
    timing=Timing(work="fit", is_optional=True),
)
Op.UPDATE = Op(
    letter="U", name="update", scope=Scope.UNITS, timing=Timing(work="update", head="update_head", is_sized=False)
)
Op.SAVE = Op(letter="K", name="save", scope=Scope.ITEM, timing=Timing(work="save", is_sized=False, is_optional=True))
Op.SEND = Op(letter=">", name="send", scope=Scope.MESSAGE)
Op.RECEIVE = Op(letter="<", name="receive", scope=Scope.MESSAGE)


class Payload(enum.StrEnum):
    """Content of a message."""

    __hash__ = str.__hash__  # equal to its letter, so of the same hash; and a fast one

    HIDDEN = "h"
    GRAD = "g"
    HEAD = "t"  # head, moments and step counts, at a hand-over
    UNIT_GRAD = "u"  # of embedding or head, of a whole batch, from its initiator to every other owner
    PAIRS = "c"  # inputs and output gradients of adapters, from their host to a helper
    WEIGHTS = "w"  # adapters with their updates, from a helper to their host
    REPLICA_GRAD = "r"  # of adapters, of the micro-batches of one host, to every other host of its stage


class TensorKey(NamedTuple):
    """Name of one tensor: unique in a run, and equal at its sender and its receiver.

    Attributes:
        payload: content of the message, a value of ``Payload``.
        boundary: the unit that a hidden state enters; the gradient of that hidden state, which is sent to the blocks
            below, has the same boundary; the gradient of a unit has that unit.
    """

    payload: str
    seq: int
    micro: int
    boundary: int

    @property
    def is_hidden(self) -> bool:
        """Whether the tensor is a hidden state; only hidden states use a credit."""
        return self.payload == Payload.HIDDEN

    def __str__(self) -> str:
        name = "hidden state" if self.is_hidden else "gradient"
        return f"{name} {self.seq}.{self.micro} at block {self.boundary}"


class Action(NamedTuple):
    """One action of one node.

    ``micro`` is -1 for an action of the whole item. ``[start, stop)`` are the units that are computed or updated; the
    embedding is [-1, 0), the head [N, N + 1). For a message ``start`` is its boundary, for a hand-over the index of the
    turn, and for the gradient of a unit that unit.
    """

    op: Op
    seq: int
    micro: int = -1
    start: int = 0
    stop: int = 0
    peer: str = ""
    payload: str = ""

    @property
    def key(self) -> TensorKey:
        """Tensor that a message carries."""
        return TensorKey(self.payload, self.seq, self.micro, self.start)


def message(op: Op, key: TensorKey, peer: str) -> Action:
    """Make the action that sends or receives a tensor or a parcel."""
    return Action(op, key.seq, key.micro, key.boundary, 0, peer, key.payload)


_NEW: Final = tuple.__new__


class Leg(NamedTuple):
    """An action of a micro-batch's way through one node, without item and micro-batch."""

    op: Op
    start: int = 0
    stop: int = 0
    peer: str = ""
    payload: str = ""

    def bind(self, seq: int, micro: int) -> Action:
        """Make the action of this leg for one micro-batch of an item."""
        op, start, stop, peer, payload = self
        # the same as Action(...) in a third of the time: every action of every node is made here
        return _NEW(Action, (op, seq, micro, start, stop, peer, payload))


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
    """Write one action as a word; ``num_blocks`` is the number of the head's unit."""
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
    """Describe an action without item and micro-batch, so that equal work has one name.

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
    """Parse the output of ``format_action``; raises ``PlanError`` for another text."""
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
