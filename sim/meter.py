"""What a virtual run is measured by: busy seconds, steps, bytes and memory; optionally every span."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ringtune.rounds import rounds as rd
from ringtune.schedule.lowering import Action, Op, Payload
from ringtune.schedule.turns import StepKind, Turn
from sim.action_times import Items
from sim.memory_ledger import Effect, MemoryLedger
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


class _Tally:
    """Seconds and number of the actions of one kind, with what each does to memory."""

    __slots__ = ("busy_s", "count", "effect")

    def __init__(self, effect: Effect | None) -> None:
        self.effect = effect
        self.busy_s = 0.0
        self.count = 0


class Meter:
    """An observer of a virtual ring.

    Args:
        nodes: of the plan.
        granted: items; told here of every turn.
        ledger: memory accounts.
        keep_spans: whether to keep every action and message for a trace.
    """

    def __init__(self, nodes: Iterable[str], granted: Items, ledger: MemoryLedger, *, keep_spans: bool) -> None:
        self._nodes = tuple(nodes)
        self._tallies: dict[tuple[str, Op, int, int, int, int], _Tally] = {}
        self.spans: list[tuple[str, Action, float, float]] = []
        self.depth_s: dict[int, float] = {}
        self.depth_steps: dict[int, int] = {}
        self._items, self._by_seq = granted, granted.by_seq
        self._ledger, self._keep_spans = ledger, keep_spans
        self._last_item_s = 0.0

    def granted(self, turn: Turn) -> None:
        """Note its items."""
        self._items.granted(turn)

    @property
    def nodes(self) -> dict[str, NodeMeter]:
        """What each node did."""
        found = {node: NodeMeter() for node in self._nodes}
        for (node, op, *_), tally in self._tallies.items():
            meter = found[node]
            meter.actions += tally.count
            meter.busy_s[op] = meter.busy_s.get(op, 0.0) + tally.busy_s
        return found

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """Add an action up."""
        op, seq, micro, start, stop, _, _ = action
        item = self._by_seq[seq]
        key = (node, op, micro, start, stop, item.number)
        tally = self._tallies.get(key)
        if tally is None:
            self._tallies[key] = tally = _Tally(self._ledger.effect(node, action, item))
        tally.count += 1
        tally.busy_s += end_s - start_s
        if tally.effect is not None:
            self._ledger.apply(tally.effect)
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
