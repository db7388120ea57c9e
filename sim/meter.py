"""Measures of a virtual run: seconds of actions, busy seconds, steps, memory, and optionally every span.

Seconds of an action are a profile's medians, or recorded ones. A recording of the same plan is replayed action by
action, stragglers included. For another plan an action takes a random sample of its node and kind, per block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, Payload, Scope, TensorKey
from ringtune.schedule.turns import StepKind, Turn
from sim.ledger import Effect, ItemKind, Items, MemoryLedger


class ActionKind:
    """All actions of a node with equal op, units, micro-batch and kind of item.

    Attributes:
        seconds: of one, the profile's median; None until it is looked up.
        effect: their effect on memory; None if there is none.
    """

    def __init__(self, node: str, op: Op, effect: Effect | None) -> None:
        self.node, self.op, self.effect = node, op, effect
        self.seconds: float | None = None
        self.busy_s = 0.0
        self.count = 0


class ProfileTimes:
    """Seconds of actions from the medians of a profile; callable with node and action.

    Args:
        effect: returns the effect of an action on memory; by default memory is not counted.

    Attributes:
        kinds: by node, op, micro-batch, start, stop, and number of the item's kind.
        running: by node, the kind of the action that began last.
    """

    def __init__(
        self,
        granted: Items,
        effect: Callable[[str, Action, ItemKind], Effect | None] = lambda node, action, item: None,
    ) -> None:
        self._costs, self._by_seq, self._effect = granted.costs, granted.by_seq, effect
        self.kinds: dict[tuple[str, Op, int, int, int, int], ActionKind] = {}
        self.running: dict[str, ActionKind] = {}

    def __call__(self, node: str, action: Action) -> float:
        """Return the seconds of an action that begins now; raises ``PlanError``."""
        op, seq, micro, start, stop, _, _ = action
        kind = self.kinds.get((node, op, micro, start, stop, self._by_seq[seq].number))
        if kind is None or kind.seconds is None:
            kind = self.begins(node, action)
            if kind.seconds is None:
                kind.seconds = self._seconds(node, action)
        self.running[node] = kind
        return kind.seconds

    def begins(self, node: str, action: Action) -> ActionKind:
        """Record the kind of an action that begins now."""
        op, seq, micro, start, stop, _, _ = action
        item = self._by_seq[seq]
        key = (node, op, micro, start, stop, item.number)
        kind = self.kinds.get(key)
        if kind is None:
            alike = self.kinds.get((node, op, item.alike[micro], start, stop, item.number)) if micro >= 0 else None
            effect = alike.effect if alike is not None else self._effect(node, action, item)
            kind = self.kinds[key] = ActionKind(node, op, effect)
            kind.seconds = alike.seconds if alike is not None else None
        self.running[node] = kind
        return kind

    def _seconds(self, node: str, action: Action) -> float:
        item, micro = self._by_seq[action.seq], action.micro
        if micro < 0:
            return self._costs.action_s(node, action, size=0.0, lowest=self._costs.course.head, kind=item.kind)
        return self._costs.action_s(
            node,
            action,
            size=item.sizes[micro],
            lowest=item.lowest[micro],
            kind=item.kind,
            patterns=item.patterns(micro, action.start, action.stop) if item.rows else (),
            trained=item.trained,
        )


class RecordedTimes:
    """Seconds of actions from a recording; from ``medians`` where it has no sample.

    Args:
        samples: (node, action, seconds) in the order of the recording.
        medians: of a profile; it records the kind of every action.
        same_run: whether the recording is of this plan, so that actions are equal.
    """

    def __init__(
        self,
        samples: Iterable[tuple[str, Action, float]],
        medians: ProfileTimes,
        granted: Items,
        *,
        same_run: bool,
        seed: int = 0,
    ) -> None:
        self._head, self._by_seq = granted.costs.course.head, granted.by_seq
        self._medians, self._same_run = medians, same_run
        self._pools: dict[tuple[str, Op, bool, bool], list[float]] = {}
        self._random = random.Random(seed)  # noqa: S311 - draws samples, guards nothing
        timed = tuple(samples)
        self._exact = {(node, action): seconds for node, action, seconds in timed}
        trained = {action.seq for _, action, _ in timed if action.op is Op.UPDATE}
        for node, action, seconds in timed:
            kind = self._kind(node, action, action.seq in trained)
            self._pools.setdefault(kind, []).append(seconds / self._units(action))

    def __call__(self, node: str, action: Action) -> float:
        """Return the seconds of an action that begins now.

        These are the recorded ones in a replay of the same plan, else a random sample, else the median.
        """
        self._medians.begins(node, action)
        if self._same_run:
            exact = self._exact.get((node, action))
            if exact is not None:
                return exact
        pool = self._pools.get(self._kind(node, action, self._by_seq[action.seq].kind.has_update))
        return self._random.choice(pool) * self._units(action) if pool else self._medians(node, action)

    def _kind(self, node: str, action: Action, is_trained: bool) -> tuple[str, Op, bool, bool]:
        """The pool of an action. Heads of evaluations have no backward, and the head's update is no block's."""
        return node, action.op, is_trained, action.start == self._head

    def _units(self, action: Action) -> int:
        return action.stop - action.start if action.op.scope in (Scope.RANGE, Scope.UNITS) else 1


@dataclass(slots=True)
class NodeMeter:
    """Busy seconds by op, and number of ended actions, of one node."""

    busy_s: dict[Op, float] = field(default_factory=dict)
    actions: int = 0


class TimedStep(NamedTuple):
    """A train step with its depth, and its seconds since the end of the item before it."""

    step: int
    depth: int
    seconds: float


class Meter:
    """An observer of a virtual ring that sums seconds, actions and memory.

    Args:
        granted: items; those of every granted turn are added.
        keep_spans: whether to keep every action and message for a trace.
        begins_s: start of the observation, from which the first step is timed.

    Attributes:
        steps: train steps, in the order of their ends.
        spans: (node, action, start_s, end_s) of all actions and messages, if kept.
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
        """Add the items of a granted turn."""
        self._items.granted(turn)

    @property
    def nodes(self) -> dict[str, NodeMeter]:
        """The sums of each node."""
        meters = {node: NodeMeter() for node in self._nodes}
        for kind in self._times.kinds.values():
            meter = meters[kind.node]
            meter.actions += kind.count
            meter.busy_s[kind.op] = meter.busy_s.get(kind.op, 0.0) + kind.busy_s
        return meters

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
        """Add a finished step or move; drop the items of a finished turn."""
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
