"""What a virtual run tells: its result with all recordings, and an observer that sees things while they happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ringtune.engine.handled import Handled
from ringtune.engine.spans import Span
from ringtune.rounds import rounds as rd
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.turns.turns import Turn


class Message(NamedTuple):
    """A tensor or head that travelled, with its virtual times in seconds."""

    key: TensorKey
    source: str
    target: str
    sent_s: float
    arrived_s: float

    @property
    def payload(self) -> str:
        """What the message carries."""
        return self.key.payload


class Observer(Protocol):
    """Sees what happens in a virtual run, in the order of virtual time."""

    def granted(self, turn: Turn) -> None:
        """Note that the coordinator granted a turn, to every node."""

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """Note that a compute action is done."""

    def sent(self, key: TensorKey, source: str, target: str, sent_s: float, arrival_s: float) -> None:
        """Note that a message is on its way."""

    def arrived(self, key: TensorKey, source: str, target: str, now_s: float) -> None:
        """Note that a message is in the inbox."""

    def accepted(self, node: str, key: TensorKey) -> None:
        """Note that a tensor went from the inbox to its micro-batch."""

    def logged(self, command: rd.Command, now_s: float) -> None:
        """Note what the coordinator logged: a step, a turn, an evaluation, a phase."""


@dataclass(slots=True)
class RingResult:
    """What happened in a virtual run; the recordings are empty where ``record`` was off.

    Attributes:
        order: everything each node did, in order, as table actions.
        spans: compute actions per node, in virtual seconds.
        messages: tensors and heads between nodes.
        handled: the recording of every engine.
        logged: what the rounds logged, in order.
        finish: how the run ended; None if it never did.
        wall_s: end of the last compute action.
        num_actions: compute actions of all nodes.
        peak_inbox: most tensors that waited in each node's inbox at once.
    """

    order: dict[str, list[Action]] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    handled: dict[str, list[Handled]] = field(default_factory=dict)
    logged: list[rd.Command] = field(default_factory=list)
    finish: rd.Finish | None = None
    wall_s: float = 0.0
    num_actions: int = 0
    peak_inbox: dict[str, int] = field(default_factory=dict)
