"""A node of the virtual ring: its engine, its inboxes, and when its processor is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ringtune.costs.times.rest import Rest
from ringtune.engine import events as ev
from ringtune.engine.handled import Handled
from ringtune.engine.node_engine import NodeEngine
from ringtune.engine.spans import Span
from ringtune.schedule.actions import Action, TensorKey

NO_REST: Final = Rest(0.0, 1.0)


def _nothing(event: ev.Event, now_s: float) -> list[ev.Command]:
    return []


class VirtualNode:
    """One node's engine with its inboxes and recordings, and how its processor rests.

    Args:
        name: of the node.
        engine: its state machine; None while the placement does not need the node.
    """

    __slots__ = (
        "commands",
        "ends_s",
        "engine",
        "free_s",
        "handle",
        "handled",
        "heads",
        "inbox",
        "is_running",
        "last_s",
        "left_s",
        "name",
        "order",
        "peak_inbox",
        "rest",
        "spans",
    )

    def __init__(self, name: str, engine: NodeEngine | None) -> None:
        self.name = name
        self.engine = engine
        self.handle: Callable[[ev.Event, float], list[ev.Command]] = engine.handle if engine is not None else _nothing
        self.inbox: dict[TensorKey, Any] = {}
        self.heads: dict[int, Any] = {}
        self.order: list[Action] = []
        self.spans: list[Span] = []
        self.handled: list[Handled] = []
        self.peak_inbox = 0
        self.is_running = False
        self.commands: list[ev.Command] = []  # what the engine said last
        self.last_s: dict[str, float] = {}  # when the last message of each source came
        self.ends_s = 0.0  # of the action that runs; messages may put it off
        self.rest, self.left_s = NO_REST, 0.0
        self.free_s = 0.0  # since when it rests; in the future: until when messages keep the processor

    def moved(self, engine: NodeEngine | None) -> VirtualNode:
        """The node with the engine of its next placement; recordings and the processor go on."""
        node = VirtualNode(self.name, engine)
        node.order, node.spans, node.handled, node.peak_inbox = self.order, self.spans, self.handled, self.peak_inbox
        node.rest, node.free_s, node.left_s = self.rest, self.free_s, self.left_s
        return node

    def take(self, seconds: float, now_s: float) -> None:
        """A message takes processor time: from the action that runs, or from the rest before the next one."""
        if self.is_running:
            self.ends_s += seconds
        else:
            self.free_s = max(self.free_s, now_s - self.rest.most_s) + seconds

    def disturb(self, seconds: float, now_s: float) -> None:
        """A message takes processor time from a node that rests: nothing waits, but the rest was shorter."""
        if self.rest.most_s:
            self.free_s = min(now_s, max(self.free_s, now_s - self.rest.most_s) + seconds)

    def begin(self, seconds: float, now_s: float) -> None:
        """An action of so many seconds begins: later if messages keep the processor, shorter after a rest."""
        self.is_running = True
        rested_s = min(now_s - self.free_s, self.rest.most_s)
        if rested_s <= 0:
            self.ends_s = max(now_s, self.free_s) + seconds
            self.left_s = 0.0
            return
        saved_s = min(rested_s, (1 - self.rest.least_share) * seconds)
        self.ends_s, self.left_s = now_s + seconds - saved_s, rested_s - saved_s

    def end(self, now_s: float) -> None:
        """The action is over; what it left of its rest is there for the next one."""
        self.is_running = False
        self.free_s = now_s - self.left_s
