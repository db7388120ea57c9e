"""Bytes that each node holds, counted while a virtual run goes on; the peak is what the simulator reports.

The planner's bound (``ringtune.costs.memory``) has to lie above it for any timing. What is counted: weights, adapters
and the head with their optimizer state, gradients, what forwards keep for backward, the work space of the block that
runs, and tensors on their way or in the inbox.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ringtune.costs.memory import Share, Sizes
from ringtune.costs.profile import NodeFacts
from ringtune.schedule.actions import Action, Graph, Op, Payload, Scope, TensorKey
from ringtune.schedule.plan import Plan
from sim.items import ItemKind, Items


class Held:
    """The bytes that one node holds, and the most that it held.

    Args:
        sizes: of what it trains.

    Attributes:
        now_bytes: held at the moment.
        peak_bytes: the most that was held.
    """

    __slots__ = ("_gradients", "_moments", "_sizes", "now_bytes", "peak_bytes")

    def __init__(self, sizes: Sizes) -> None:
        self.now_bytes = self.peak_bytes = 0.0
        self._sizes = sizes
        self._gradients: set[int] = set()  # units whose gradient waits for their update
        self._moments: set[int] = set()  # units whose optimizer state exists

    def add(self, num_bytes: float) -> None:
        """Add bytes to those that are held; negative bytes are freed."""
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def give(self, units: Iterable[int]) -> None:
        """Add a gradient for each of these units that has none yet."""
        for unit in units:
            if unit not in self._gradients:
                self._gradients.add(unit)
                self.add(self._sizes.trained_bytes(unit))

    def use_up(self, units: Iterable[int]) -> None:
        """Free the gradients of these units; the first update of a unit adds its moments.

        A unit without a gradient is left alone.
        """
        for unit in units:
            if unit in self._gradients:
                if unit not in self._moments:
                    self._moments.add(unit)
                    self.add(self._sizes.moments * self._sizes.trained_bytes(unit))
                self._gradients.remove(unit)
                self.add(-self._sizes.trained_bytes(unit))


class Effect:
    """What a kind of action does to its node's account.

    Args:
        held: that account.
        takes: bytes that it takes.
        touches: bytes besides that it holds for a moment.
        frees: bytes that it frees in the end.
        gradient: units that get a gradient.
        updates: units whose gradient is used up.
    """

    __slots__ = ("frees", "gradient", "held", "takes", "touches", "updates")

    def __init__(
        self,
        held: Held,
        *,
        takes: float = 0.0,
        touches: float = 0.0,
        frees: float = 0.0,
        gradient: tuple[int, ...] = (),
        updates: tuple[int, ...] = (),
    ) -> None:
        self.held, self.takes, self.touches, self.frees = held, takes, touches, frees
        self.gradient, self.updates = gradient, updates

    def apply(self) -> None:
        """Change the account by one action that is done.

        The peak has all that the action took and touched, before it frees anything.
        """
        held = self.held
        if self.gradient or self.updates:
            held.use_up(self.updates)
            held.give(self.gradient)
        held.now_bytes = now_bytes = held.now_bytes + self.takes
        if now_bytes + self.touches > held.peak_bytes:
            held.peak_bytes = now_bytes + self.touches
        held.now_bytes -= self.frees


class MemoryLedger:
    """Accounts of every node of a plan.

    Args:
        plan: the plan.
        facts: of its nodes.
        granted: the items of the run.
        optimizer: of the job.
        dtype: of the computation.
        embedding_bytes: what an owner's embedding takes, where it is not the whole table (rows as touched).
    """

    def __init__(
        self,
        plan: Plan,
        facts: Mapping[str, NodeFacts],
        granted: Items,
        *,
        optimizer: str,
        dtype: str,
        embedding_bytes: float | None = None,
    ) -> None:
        self._head, self._by_seq = plan.course.head, granted.by_seq
        self._sizes = {
            node: Sizes(
                plan.course,
                facts[node].model,
                optimizer=optimizer,
                dtype=dtype,
                activation_token_bytes=facts[node].activation_token_bytes,
            )
            for node in plan.nodes
        }
        self._token_bytes = next(iter(self._sizes.values())).token_bytes
        self._held: dict[str, Held] = {}
        for node, sizes in self._sizes.items():
            self._held[node] = held = Held(sizes)
            held.add(_fixed_bytes(sizes, Share.of(plan, node), embedding_bytes))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that each node held."""
        return {node: round(held.peak_bytes) for node, held in self._held.items()}

    def sent(self, key: TensorKey, source: str, target: str, sent_s: float, arrival_s: float) -> None:
        """Add a tensor that lies at its sender until it arrives; a head is counted with its owner."""
        payload, seq, micro, _ = key
        if payload == Payload.HEAD:
            return
        held = self._held[source]
        held.now_bytes = now_bytes = held.now_bytes + self._by_seq[seq].sizes[micro] * self._token_bytes
        if now_bytes > held.peak_bytes:
            held.peak_bytes = now_bytes

    def arrived(self, key: TensorKey, source: str, target: str, now_s: float) -> None:
        """Move a tensor from its sender to the inbox of its target; a head is counted with its owner."""
        payload, seq, micro, _ = key
        if payload == Payload.HEAD:
            return
        num_bytes = self._by_seq[seq].sizes[micro] * self._token_bytes
        self._held[source].now_bytes -= num_bytes
        held = self._held[target]
        held.now_bytes = now_bytes = held.now_bytes + num_bytes
        if now_bytes > held.peak_bytes:
            held.peak_bytes = now_bytes

    def accepted(self, node: str, key: TensorKey) -> None:
        """Free a tensor that its micro-batch has taken out of the inbox."""
        self._held[node].now_bytes -= self._by_seq[key[1]].sizes[key[2]] * self._token_bytes

    def effect(self, node: str, action: Action, item: ItemKind) -> Effect | None:
        """The effect of an action on memory, equal for all actions of its kind; None if there is none."""
        op, _, micro, start, stop, _, _ = action
        held, sizes = self._held[node], self._sizes[node]
        if op.scope is Scope.UNITS:
            return Effect(held, updates=tuple(range(start, stop)))
        if op is Op.HEAD:
            work_bytes = sizes.head_work_bytes(item.sizes[micro])
            return Effect(held, touches=work_bytes, gradient=(self._head,) if item.trained.has_head else ())
        if not op.has_work_space:
            return None
        block_bytes = sizes.kept_bytes(item.sizes[micro])
        all_bytes = (stop - start) * block_bytes
        if op.graph is Graph.KEEPS:
            return Effect(held, takes=all_bytes, touches=block_bytes)
        if op.graph is Graph.FREES:
            units = tuple(unit for unit in range(start, stop) if unit in item.trained)
            return Effect(held, touches=block_bytes, frees=all_bytes, gradient=units)
        return Effect(held, touches=block_bytes)


def _fixed_bytes(sizes: Sizes, share: Share, embedding_bytes: float | None) -> float:
    """Bytes that a node holds throughout: hosted blocks and adapters; an owner's head and embedding."""
    blocks = share.stop - share.start + (share.private_blocks if share.is_owner else 0)
    fixed = blocks * (sizes.block_bytes + sizes.adapter_bytes)
    if not share.is_owner:
        return fixed
    return fixed + sizes.head_bytes + (sizes.embedding_bytes if embedding_bytes is None else embedding_bytes)
