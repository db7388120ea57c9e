"""What a virtual run is measured by: busy seconds, steps, bytes and memory; optionally every span."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ringtune import rounds as rd
from ringtune.schedule import Action, Op, Payload
from ringtune.turns import StepKind, Turn
from sim.action_times import Items
from sim.memory_ledger import MemoryLedger
from sim.transport import Parcel


@dataclass(slots=True)
class NodeMeter:
    """Seconds of one node.

    Attributes:
        busy_s: by operation.
        actions: how many.
    """

    busy_s: dict[Op, float] = field(default_factory=dict)
    actions: int = 0


class Meter:
    """An observer of a virtual ring.

    Args:
        nodes: of the plan.
        granted: items; told here of every turn.
        ledger: memory accounts.
        keep_spans: whether to keep every action and message for a trace.
    """

    def __init__(self, nodes: Iterable[str], granted: Items, ledger: MemoryLedger, *, keep_spans: bool) -> None:
        self.nodes = {node: NodeMeter() for node in nodes}
        self.spans: list[tuple[str, Action, float, float]] = []
        self.depth_s: dict[int, float] = {}
        self.depth_steps: dict[int, int] = {}
        self._items, self._by_seq = granted, granted.by_seq
        self._ledger, self._keep_spans = ledger, keep_spans
        self._last_item_s = 0.0

    def granted(self, turn: Turn) -> None:
        """Note its items."""
        self._items.granted(turn)

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """Add an action up."""
        meter = self.nodes[node]
        meter.actions += 1
        op = action.op
        busy_s = meter.busy_s
        busy_s[op] = busy_s.get(op, 0.0) + end_s - start_s
        self._ledger.ran(node, action, self._by_seq[action.seq])
        if self._keep_spans:
            self.spans.append((node, action, start_s, end_s))

    def sent(self, parcel: Parcel, sent_s: float, arrival_s: float) -> None:
        """A tensor lies at its sender until it is there."""
        payload, source, target, seq, micro, boundary = parcel
        is_head = payload == Payload.HEAD  # its ``seq`` is a turn; what it holds is counted with its owner
        if not is_head:
            self._ledger.took(source, self._by_seq[seq].sizes[micro])
        if self._keep_spans:
            numbers = (0, -1, seq) if is_head else (seq, micro, boundary)
            self.spans.append((source, Action(Op.SEND, *numbers, 0, target, payload), sent_s, arrival_s))

    def arrived(self, parcel: Parcel, now_s: float) -> None:
        """It lies in the inbox now."""
        payload, source, target, seq, micro, _ = parcel
        if payload != Payload.HEAD:
            self._ledger.moved(source, target, self._by_seq[seq].sizes[micro])

    def accepted(self, node: str, payload: str, seq: int, micro: int, boundary: int) -> None:
        """The micro-batch has it."""
        self._ledger.freed(node, self._by_seq[seq].sizes[micro])

    def logged(self, command: rd.Command, now_s: float) -> None:
        """Seconds of a step run from the end of the item before it."""
        if isinstance(command, rd.LogStep):
            passed_s, self._last_item_s = now_s - self._last_item_s, now_s
            if command.turn.kind is StepKind.TRAIN:
                self.depth_s[command.depth] = self.depth_s.get(command.depth, 0.0) + passed_s
                self.depth_steps[command.depth] = self.depth_steps.get(command.depth, 0) + 1
        elif isinstance(command, rd.LogTurn):
            self._items.forget(command.turn)
