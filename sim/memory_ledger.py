"""Bytes that each node holds, counted while a virtual run goes on; the peak is what the simulator reports.

The planner's bound (``ringtune.costs.memory``) has to lie above it for any timing. What is counted: weights, adapters
and the head with their optimizer state, gradients, what forwards keep for backward, the work space of the block that
runs, and tensors on their way or in the inbox.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ringtune.costs.memory import DTYPE_BYTES, MOMENTS, logits_peak_bytes
from ringtune.costs.profile import NodeFacts
from ringtune.schedule.lowering import Action, Op
from ringtune.schedule.plan import Plan
from sim.action_times import ItemKind


@dataclass(slots=True)
class Held:
    """One node's account.

    Attributes:
        now_bytes: held at the moment.
        peak_bytes: the most that was held.
        gradients: bytes of the gradients that wait for their update, by range of blocks ([N, N): the head).
        moments: blocks (N: the head) whose optimizer state exists.
    """

    now_bytes: float = 0.0
    peak_bytes: float = 0.0
    gradients: dict[tuple[int, int], int] = field(default_factory=dict)
    moments: set[int] = field(default_factory=set)

    def add(self, num_bytes: float) -> None:
        """Take or free bytes."""
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


class Effect(NamedTuple):
    """What a kind of action does to its node's account.

    Attributes:
        node: whose.
        held: that account.
        takes: bytes that it takes.
        touches: bytes besides that it holds for a moment.
        frees: bytes that it frees in the end.
        gradient: blocks that get a gradient, as a range.
        updates: blocks whose gradient is used up, as a range.
    """

    node: str
    held: Held
    takes: float = 0.0
    touches: float = 0.0
    frees: float = 0.0
    gradient: tuple[int, int] | None = None
    updates: tuple[int, int] | None = None


class MemoryLedger:
    """Accounts of every node of a plan.

    Args:
        plan: the plan.
        facts: of its nodes.
        optimizer: of the job.
        dtype: of the computation.
        embedding_bytes: what an owner's embedding takes, where it is not the whole table (rows as touched).
    """

    def __init__(
        self,
        plan: Plan,
        facts: Mapping[str, NodeFacts],
        *,
        optimizer: str,
        dtype: str,
        embedding_bytes: float | None = None,
    ) -> None:
        self._plan, self._facts = plan, facts
        self._moments, self._item_bytes = MOMENTS[optimizer], DTYPE_BYTES[dtype]
        self._full_size = plan.microbatch_sizes()[0] * plan.max_length
        self._held: dict[str, Held] = {}
        self._token_bytes = plan.hidden_size * self._item_bytes
        for node in plan.nodes:
            self._held[node] = held = Held()
            held.add(self._fixed_bytes(node, embedding_bytes))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that each node held."""
        return {node: round(held.peak_bytes) for node, held in self._held.items()}

    def apply(self, effect: Effect) -> None:
        """An action of that kind is done: at its end all that it took was there."""
        node, held, takes, touches, frees, gradient, updates = effect
        if gradient is not None and gradient not in held.gradients:
            held.gradients[gradient] = num_bytes = sum(self._weights_bytes(node, block) for block in _blocks(*gradient))
            held.add(num_bytes)
        if updates is not None:
            self._update(node, held, *updates)
        held.now_bytes = now_bytes = held.now_bytes + takes
        if now_bytes + touches > held.peak_bytes:
            held.peak_bytes = now_bytes + touches
        held.now_bytes -= frees

    def took(self, node: str, size: float) -> None:
        """A tensor of ``size`` padded tokens comes to lie at a node."""
        held = self._held[node]
        held.now_bytes = now_bytes = held.now_bytes + size * self._token_bytes
        if now_bytes > held.peak_bytes:
            held.peak_bytes = now_bytes

    def freed(self, node: str, size: float) -> None:
        """It is gone from there."""
        self._held[node].now_bytes -= size * self._token_bytes

    def moved(self, source: str, target: str, size: float) -> None:
        """It lies at the target in place of the source."""
        num_bytes = size * self._token_bytes
        self._held[source].now_bytes -= num_bytes
        held = self._held[target]
        held.now_bytes = now_bytes = held.now_bytes + num_bytes
        if now_bytes > held.peak_bytes:
            held.peak_bytes = now_bytes

    def effect(self, node: str, action: Action, item: ItemKind) -> Effect | None:
        """What an action does; None if it holds nothing that is not counted elsewhere. Equal for all of its kind."""
        op, _, micro, start, stop, _, _ = action
        held = self._held[node]
        if op is Op.UPDATE:
            return Effect(node, held, updates=(start, stop))
        if micro < 0:
            return None
        work_bytes = self._facts[node].activation_block_bytes * item.sizes[micro] / self._full_size
        if op is Op.FORWARD_FREE:
            return Effect(node, held, touches=work_bytes)
        if op is Op.FORWARD:
            return Effect(node, held, takes=(stop - start) * work_bytes, touches=work_bytes)
        if op is Op.BACKWARD:
            return Effect(node, held, touches=work_bytes, frees=(stop - start) * work_bytes, gradient=(start, stop))
        if op is Op.HEAD:
            model, head = self._facts[node].model, self._plan.num_blocks
            size = item.sizes[micro]
            logits = logits_peak_bytes(math.ceil(size), model.head_token_logits, self._item_bytes)
            return Effect(
                node,
                held,
                touches=size * self._item_bytes * 2 * model.hidden_size + logits,
                gradient=(head, head) if item.kind.has_backward else None,
            )
        return None

    def _fixed_bytes(self, node: str, embedding_bytes: float | None) -> float:
        plan, model = self._plan, self._facts[node].model
        is_owner = plan.owner(node) is not None
        blocks = plan.slice_of(node).num_blocks + (plan.private_blocks if is_owner else 0)
        fixed = blocks * (model.block_bytes + model.adapter_block_bytes)
        if not is_owner:
            return fixed
        table = model.embedding_bytes if embedding_bytes is None else embedding_bytes
        return fixed + table + self._weights_bytes(node, plan.num_blocks)

    def _weights_bytes(self, node: str, block: int) -> int:
        model = self._facts[node].model
        if block < self._plan.num_blocks:
            return model.adapter_block_bytes
        return model.head_bytes + model.head_class_bytes * len(self._plan.labels)

    def _update(self, node: str, held: Held, start: int, stop: int) -> None:
        for block in _blocks(start, stop):
            if block not in held.moments:
                held.moments.add(block)
                held.add(self._moments * self._weights_bytes(node, block))
        held.add(-held.gradients.pop((start, stop), 0))


def _blocks(start: int, stop: int) -> range:
    """The blocks of a range; of an empty one, which stands for the head, its number."""
    return range(start, max(stop, start + 1))
