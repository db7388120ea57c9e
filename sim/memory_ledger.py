"""Bytes that each node holds, counted while a virtual run goes on; the peak is what the simulator reports.

The planner's bound (``ringtune.memory``) has to lie above it for any timing. What is counted: weights, adapters and
the head with their optimizer state, gradients, what forwards keep for backward, the work space of the block that
runs, and tensors on their way or in the inbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringtune.memory import DTYPE_BYTES, MOMENTS
from ringtune.plan import Plan
from ringtune.profile import NodeFacts
from ringtune.schedule import Action, Op
from sim.action_times import ItemKind

_LOGIT_COPIES = 3


@dataclass(slots=True)
class Held:
    """One node's account.

    Attributes:
        now_bytes: held at the moment.
        peak_bytes: the most that was held.
        gradients: blocks (N: the head) whose gradient waits for the update.
        moments: blocks whose optimizer state exists.
    """

    now_bytes: float = 0.0
    peak_bytes: float = 0.0
    gradients: set[int] = field(default_factory=set)
    moments: set[int] = field(default_factory=set)

    def add(self, num_bytes: float) -> None:
        """Take or free bytes."""
        self.now_bytes += num_bytes
        self.touch(0.0)

    def touch(self, num_bytes: float) -> None:
        """Hold so many bytes more for a moment."""
        self.peak_bytes = max(self.peak_bytes, self.now_bytes + num_bytes)


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
        for node in plan.nodes:
            self._held[node] = Held()
            self._held[node].add(self._fixed_bytes(node, embedding_bytes))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that each node held."""
        return {node: round(held.peak_bytes) for node, held in self._held.items()}

    def ran(self, node: str, action: Action, item: ItemKind) -> None:
        """An action is done: at its end all that it took was there."""
        held, block_bytes = self._held[node], self._facts[node].activation_block_bytes
        op, _, micro, start, stop, _, _ = action
        if op is Op.UPDATE:
            self._update(node, held, start, stop)
            return
        if micro < 0:
            return
        size = item.sizes[micro]
        work_bytes = block_bytes * size / self._full_size
        if op is Op.FORWARD_FREE:
            held.touch(work_bytes)
        elif op is Op.FORWARD:
            held.add((stop - start) * work_bytes)
            held.touch(work_bytes)
        elif op is Op.BACKWARD:
            self._take_gradients(node, held, range(start, stop))
            held.touch(work_bytes)
            held.add(-(stop - start) * work_bytes)
        elif op is Op.HEAD:
            if item.kind.has_backward:
                self._take_gradients(node, held, (self._plan.num_blocks,))
            model = self._facts[node].model
            held.touch(size * self._item_bytes * (2 * model.hidden_size + _LOGIT_COPIES * model.head_token_logits))

    def moved(self, node: str, size: float, sign: int) -> None:
        """A tensor of ``size`` padded tokens comes to lie at a node (``sign`` 1), or leaves it (-1)."""
        self._held[node].add(sign * size * self._facts[node].model.hidden_size * self._item_bytes)

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

    def _take_gradients(self, node: str, held: Held, blocks: range | tuple[int, ...]) -> None:
        for block in blocks:
            if block not in held.gradients:
                held.gradients.add(block)
                held.add(self._weights_bytes(node, block))

    def _update(self, node: str, held: Held, start: int, stop: int) -> None:
        for block in (start,) if start == self._plan.num_blocks else range(start, stop):
            weights = self._weights_bytes(node, block)
            if block not in held.moments:
                held.moments.add(block)
                held.add(self._moments * weights)
            if block in held.gradients:
                held.gradients.discard(block)
                held.add(-weights)
