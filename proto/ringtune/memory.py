"""How much memory a plan takes on a node, as a pure function of plan and measured sizes.

An upper bound that the planner compares with the node's budget; what the interpreter and the libraries
take before a run is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringtune.plan import Plan
from ringtune.profile import ModelFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one node at the moment of the run when it holds most.

    Attributes:
        weights_bytes: frozen blocks, and the embedding of an owner.
        adapters_bytes: adapters of its blocks.
        optimizer_bytes: gradients and moments of what it trains.
        activations_bytes: what forwards keep for backward.
        head_bytes: head of an owner with gradients, moments and activations.
        buffers_bytes: tensors that wait to be sent or used.
    """

    weights_bytes: int = 0
    adapters_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    head_bytes: int = 0
    buffers_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        parts = (self.weights_bytes, self.adapters_bytes, self.optimizer_bytes)
        return sum(parts) + self.activations_bytes + self.head_bytes + self.buffers_bytes


def node_memory(
    plan: Plan,
    node: str,
    model: ModelFacts,
    *,
    optimizer: str,
    activation_block_bytes: int,
    dtype: str = "float32",
) -> MemoryEstimate:
    """What ``node`` holds at most during the run of ``plan``.

    Args:
        plan: the plan; the largest micro-batch follows from it.
        node: which node.
        model: sizes of the model.
        optimizer: ``adamw`` or ``sgd``.
        activation_block_bytes: kept for backward by one block for one micro-batch of full length; measured.
        dtype: of the computation, ``float32`` or ``float64``.
    """
    raise NotImplementedError
