"""What a virtual run is measured by: busy seconds, steps, bytes and memory; optionally every span."""

from __future__ import annotations

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
        first_s: start of its first action.
        last_s: end of its last one.
        actions: how many.
    """

    busy_s: dict[Op, float] = field(default_factory=dict)
    first_s: float = 0.0
    last_s: float = 0.0
    actions: int = 0


class Meter:
    """An observer of a virtual ring.

    Args:
        nodes: of the plan.
        granted: items; told here of every turn.
        ledger: memory accounts.
        keep_spans: whether to keep every action and message for a trace.
    """

    def __init__(self, nodes: tuple[str, ...], granted: Items, ledger: MemoryLedger, *, keep_spans: bool) -> None:
        self.nodes = {node: NodeMeter() for node in nodes}
        self.spans: list[tuple[str, Action, float, float]] = []
        self.depth_s: dict[int, float] = {}
        self.depth_steps: dict[int, int] = {}
        self.evaluation_s = 0.0
        self._items, self._ledger, self._keep_spans = granted, ledger, keep_spans
        self._last_step_s = 0.0

    def granted(self, turn: Turn) -> None:
        """Note its items."""
        self._items.granted(turn)

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """Add an action up."""
        meter = self.nodes[node]
        if not meter.actions:
            meter.first_s = start_s
        meter.actions += 1
        meter.last_s = end_s
        meter.busy_s[action.op] = meter.busy_s.get(action.op, 0.0) + end_s - start_s
        self._ledger.ran(node, action, self._items[action.seq])
        if self._keep_spans:
            self.spans.append((node, action, start_s, end_s))

    def sent(self, parcel: Parcel, sent_s: float, arrival_s: float) -> None:
        """A tensor lies at its sender until it is there."""
        payload, source, target, seq, micro, boundary = parcel
        if payload != Payload.HEAD:
            self._ledger.moved(source, self._items.size(payload, seq, micro), 1)
        if self._keep_spans:
            action = Action(Op.SEND, seq, micro, boundary, 0, target, payload)
            self.spans.append((source, action, sent_s, arrival_s))

    def arrived(self, parcel: Parcel, now_s: float) -> None:
        """It lies in the inbox now."""
        if parcel.payload != Payload.HEAD:
            size = self._items.size(parcel.payload, parcel.seq, parcel.micro)
            self._ledger.moved(parcel.source, size, -1)
            self._ledger.moved(parcel.target, size, 1)

    def accepted(self, node: str, payload: str, seq: int, micro: int, boundary: int) -> None:
        """The micro-batch has it."""
        self._ledger.moved(node, self._items.size(payload, seq, micro), -1)

    def logged(self, command: rd.Command, now_s: float) -> None:
        """Seconds of a step run from the end of the item before it."""
        if isinstance(command, rd.LogStep):
            passed_s, self._last_step_s = now_s - self._last_step_s, now_s
            if command.turn.kind is StepKind.TRAIN:
                self.depth_s[command.depth] = self.depth_s.get(command.depth, 0.0) + passed_s
                self.depth_steps[command.depth] = self.depth_steps.get(command.depth, 0) + 1
            else:
                self.evaluation_s += passed_s
        elif isinstance(command, rd.LogTurn):
            self._items.forget(command.turn)
