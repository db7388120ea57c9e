"""What a virtual run is measured by: busy seconds, steps, bytes and memory; optionally every span."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ringtune.rounds import rounds as rd
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.turns.turns import StepKind, Turn
from sim.accounts.action_times import ProfileTimes
from sim.accounts.items import Items
from sim.accounts.memory_ledger import MemoryLedger


@dataclass(slots=True)
class NodeMeter:
    """Busy seconds and number of actions of one node.

    Attributes:
        busy_s: by op.
        actions: how many ended.
    """

    busy_s: dict[Op, float] = field(default_factory=dict)
    actions: int = 0


class TimedStep(NamedTuple):
    """A train step, its depth, and its seconds from the end of the item before it."""

    step: int
    depth: int
    seconds: float


class Meter:
    """An observer of a virtual ring that adds up what it sees.

    Args:
        nodes: of the plan.
        granted: items; told here of every turn.
        times: what every action begins with.
        ledger: memory accounts.
        keep_spans: whether to keep every action and message for a trace.
        begins_s: when it begins to see; the first step takes its seconds from then on.

    Attributes:
        steps: train steps, in the order of their ends.
        moves_s: seconds of the move that it saw in the end.
        spans: (node, action, start_s, end_s) of everything, if it keeps them.
    """

    def __init__(
        self,
        nodes: Iterable[str],
        granted: Items,
        times: ProfileTimes,
        ledger: MemoryLedger,
        *,
        keep_spans: bool,
        begins_s: float = 0.0,
    ) -> None:
        self._nodes = tuple(nodes)
        self._times, self._running = times, times.running
        self.spans: list[tuple[str, Action, float, float]] = []
        self.steps: list[TimedStep] = []
        self.moves_s = 0.0
        self._items, self._ledger, self._keep_spans = granted, ledger, keep_spans
        # of messages nothing but their memory is measured
        self.sent = self._sent if keep_spans else ledger.sent
        self.arrived, self.accepted = ledger.arrived, ledger.accepted
        self._last_item_s = begins_s

    def granted(self, turn: Turn) -> None:
        """Note the items of a granted turn."""
        self._items.granted(turn)

    @property
    def nodes(self) -> dict[str, NodeMeter]:
        """What each node did."""
        found = {node: NodeMeter() for node in self._nodes}
        for kind in self._times.kinds.values():
            meter = found[kind.node]
            meter.actions += kind.count
            meter.busy_s[kind.op] = meter.busy_s.get(kind.op, 0.0) + kind.busy_s
        return found

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """Add a finished action to the count, seconds and memory of its kind."""
        kind = self._running[node]
        kind.count += 1
        kind.busy_s += end_s - start_s
        if kind.effect is not None:
            kind.effect.apply(action[1], action[2])
        if self._keep_spans:
            self.spans.append((node, action, start_s, end_s))

    def _sent(self, key: TensorKey, source: str, target: str, sent_s: float, arrival_s: float) -> None:
        self._ledger.sent(key, source, target, sent_s, arrival_s)
        payload, seq, micro, boundary = key
        numbers = (0, -1, seq) if payload == Payload.HEAD else (seq, micro, boundary)
        self.spans.append((source, Action(Op.SEND, *numbers, 0, target, payload), sent_s, arrival_s))

    def logged(self, command: rd.Command, now_s: float) -> None:
        """Add the seconds of a finished step, which run from the end of the item before it.

        At the end of a turn its items are forgotten.
        """
        if isinstance(command, rd.LogStep):
            passed_s, self._last_item_s = now_s - self._last_item_s, now_s
            if command.turn.kind is StepKind.TRAIN:
                self.steps.append(TimedStep(command.step, command.depth, passed_s))
        elif isinstance(command, rd.LogTurn):
            self._items.forget(command.turn)
            if command.turn.kind is StepKind.SCORE:  # its last backward ends after its last loss; no step begins before
                self._last_item_s = now_s
        elif isinstance(command, rd.LogMove):
            self.moves_s += command.seconds
