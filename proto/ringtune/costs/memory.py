"""How much memory a plan takes on a node, as a pure function of plan and measured sizes.

An upper bound that the planner compares with the node's budget. What the interpreter and the libraries take
before a run is not in it. Depth only grows, so the last training step is the moment of the maximum; where the run
decides the depth, it is the deepest that it can reach.

What the engine's rules bound, and where it shows here:

* ``warm_up`` items at a time keep graphs (one, except for PipeAdapter): ``microbatches`` of them per trained block;
* each of those items may see another version of the adapters: ``warm_up - 1`` besides the newest;
* credits bound the hidden states of a (link, boundary), whether they wait at the sender or the receiver;
* gradients come back for those items only: ``microbatches`` of each per boundary;
* an owner that hosts the bottom embeds without a credit, but only ``credits`` per segment of its route.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringtune.costs.profile import ModelFacts
from ringtune.quantities import format_bytes
from ringtune.schedule.lowering import Leg, Op, Payload, lower, lowest_trainable, route, warm_up
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind
from ringtune.schedule.unfreezing import unfrozen_soonest

MOMENTS = {"adamw": 2, "sgd": 0}
DTYPE_BYTES = {"float32": 4, "float64": 8}
MOST_LOGIT_BYTES = 16 << 20
"""What the logits of a micro-batch may take; a head with more takes its tokens in chunks of so many bytes."""

_LOGIT_COPIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one node at the moment of the run when it holds most.

    Attributes:
        weights_bytes: frozen blocks, and the embedding of an owner.
        adapters_bytes: adapters of its blocks, with the versions that items in flight need.
        optimizer_bytes: gradients and moments of what it trains.
        activations_bytes: what forwards keep for backward, and the work space of one block.
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
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by name of the part, in the order of the attributes."""
        return {
            "weights": self.weights_bytes,
            "adapters": self.adapters_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
            "head": self.head_bytes,
            "buffers": self.buffers_bytes,
        }

    def __str__(self) -> str:
        """The total and its parts, for people."""
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts().items() if size)
        return f"{format_bytes(self.total_bytes)} ({parts})"


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
        optimizer: a key of ``MOMENTS``.
        activation_block_bytes: kept for backward by one block for one micro-batch of full length; measured
            there, or from ``estimate_activation_block_bytes``.
        dtype: of the computation, a key of ``DTYPE_BYTES``.
    """
    piece, is_owner = plan.slice_of(node), plan.owner(node) is not None
    lowest = lowest_trainable(unfrozen_soonest(plan), plan.num_steps - 1)
    private = plan.private_blocks if is_owner else 0
    hosted = piece.num_blocks + private
    trained = max(0, piece.stop - max(piece.start, lowest)) if piece.num_blocks else 0
    state = 1 + MOMENTS[optimizer]
    largest = plan.microbatch_sizes()[0]
    tensor = largest * plan.max_length * plan.hidden_size * DTYPE_BYTES[dtype]
    in_flight = warm_up(plan, piece.start)
    graphs = in_flight * trained * len(plan.microbatch_sizes()) * activation_block_bytes
    return MemoryEstimate(
        weights_bytes=hosted * model.block_bytes + (model.embedding_bytes if is_owner else 0),
        adapters_bytes=(hosted + (in_flight - 1) * trained) * model.adapter_block_bytes,
        optimizer_bytes=trained * state * model.adapter_block_bytes,
        activations_bytes=graphs + (activation_block_bytes if hosted else 0),
        head_bytes=_head_bytes(plan, model, state, tensor, DTYPE_BYTES[dtype]) if is_owner else 0,
        buffers_bytes=_waiting_tensors(plan, node, lowest) * tensor,
    )


def estimate_activation_block_bytes(
    model: ModelFacts, *, rows: int, tokens: int, dropout: float, dtype: str = "float32"
) -> int:
    """What one block keeps for backward, where nothing was measured; about 10 % above measurements of BERT.

    In units of the hidden state (rows x tokens x width): queries, keys, values and attention output 4, inputs of
    the layer norms 3, adapter 2, and of the feed-forward part ``inner_kept * intermediate / hidden``. With dropout
    the attention probabilities are kept three times, and the masks 2.

    Args:
        model: sizes of the model.
        rows: of the micro-batch.
        tokens: of the longest row.
        dropout: probability; above 0 it disables the attention kernel that keeps no probabilities.
        dtype: of the computation.

    Source: saved tensors of one MiniLM block at 16 x 128 tokens: 37.3 MiB without, 75.2 MiB with dropout.
    """
    inner_units = model.inner_kept * model.intermediate_size / model.hidden_size
    hidden_units = 4 + 3 + 2 + inner_units + (2 if dropout > 0 else 0)
    hidden_state = rows * tokens * model.hidden_size
    probabilities = 3 * rows * model.num_heads * tokens * tokens if dropout > 0 else 0
    return round((hidden_units * hidden_state + probabilities) * DTYPE_BYTES[dtype])


def logits_fit(num_tokens: int, token_logits: int, item_bytes: int) -> bool:
    """Whether a head may compute the logits of so many padded tokens at once.

    They are there three times then: as such, as probabilities, and as gradient. A chunk changes in place instead.

    Args:
        num_tokens: of the micro-batch.
        token_logits: numbers for each token; 0 if the head looks at one token of a row.
        item_bytes: of a number.
    """
    return _LOGIT_COPIES * num_tokens * token_logits * item_bytes <= MOST_LOGIT_BYTES


def logits_peak_bytes(num_tokens: int, token_logits: int, item_bytes: int) -> int:
    """What the logits of a micro-batch of at most so many tokens take at their peak; see ``logits_fit``."""
    each = token_logits * item_bytes
    return min(_LOGIT_COPIES * num_tokens * each, max(MOST_LOGIT_BYTES, each))


def _head_bytes(plan: Plan, model: ModelFacts, state: int, tensor: int, item_bytes: int) -> int:
    """Weights, gradients and moments, logits, and the hidden state with its gradient of one micro-batch."""
    weights = model.head_bytes + model.head_class_bytes * len(plan.labels)
    num_tokens = plan.microbatch_sizes()[0] * plan.max_length
    logits = logits_peak_bytes(num_tokens, model.head_token_logits, item_bytes)
    return weights * (1 + state) + 2 * tensor + logits


def _waiting_tensors(plan: Plan, node: str, lowest: int) -> int:
    """How many tensors of full size can wait at ``node``, sent or to be used, plus one being encoded or decoded."""
    legs = {leg for owner in plan.owners for leg in lower(plan, owner.node, StepKind.TRAIN, lowest).get(node, ())}
    moved = sum(_bound(plan, leg) for leg in legs if leg.op in (Op.SEND, Op.RECEIVE))
    path = route(plan, node)
    embeds_ahead = plan.owner(node) is not None and path[0].node == node and path[0].stop > plan.private_blocks
    return moved + (1 if moved else 0) + (plan.credits * len(path) if embeds_ahead else 0)


def _bound(plan: Plan, leg: Leg) -> int:
    """Of a gradient no more than its receiver, which hosts the block below, has items that wait for it."""
    if leg.payload == Payload.HIDDEN:
        return plan.credits
    return warm_up(plan, leg.start - 1) * len(plan.microbatch_sizes())
