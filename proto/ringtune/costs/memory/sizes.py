"""Bytes of each thing that a run holds: of a unit, of its state, of tensors and activations."""

from __future__ import annotations

import math
from typing import Final

from ringtune.costs.memory.operations import (
    largest_gradient_bytes,
    score_token_bytes,
    subnet_token_bytes,
    tables_bytes,
)
from ringtune.costs.memory.tensors.dropout_masks import drawn_token_bytes
from ringtune.costs.memory.tensors.frozen import frozen_bytes, widened_bytes
from ringtune.costs.memory.tensors.logits import logits_peak_bytes
from ringtune.costs.memory.units.unit_grads import ROW_NUMBER_BYTES, embedding_grad_bytes
from ringtune.costs.memory.units.unit_state import state_bytes
from ringtune.costs.offload.set_bytes import kinds_of_users, set_bytes
from ringtune.costs.offload.traffic import pair_token_bytes, wire_of
from ringtune.costs.profile import ModelFacts, NodeFacts
from ringtune.models.adapters.adapter_config import trains_own_weights
from ringtune.schedule.course import Course
from ringtune.schedule.helping.offload import EXACT
from ringtune.schedule.saving import RANDOM, num_subtokens
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.whose_rows.users import user_sets

DTYPE_BYTES: Final = {"float32": 4, "float64": 8}

CONTEXT_BYTES: Final = 815 << 20
"""What a process takes of a CUDA device before it has a tensor there: context, code of kernels, work space of cuBLAS.

Measured on one NVIDIA H200 with torch 2.11.0+cu130 and driver 580: 527 MiB of context, 751 MiB once the kernels of a
transformer are loaded, and 64 MiB for cuBLAS. A smaller device may load less; no other one was measured.
"""


class Sizes:
    """Bytes of each thing that a run of ``course`` holds: of a unit, of its state, of tensors and activations.

    Args:
        course: the run.
        model: sizes of the model.
        optimizer: one of ``ringtune.jobs.optimizers.OPTIMIZERS``.
        dtype: of the computation, a key of ``DTYPE_BYTES``.
        activation_token_bytes: what one block keeps for backward, for each padded token of a micro-batch; measured, or
            from ``estimate_activation_token_bytes``.
        data_bytes: of the node's rows and tokenizer.
        lowest_token_bytes: as ``activation_token_bytes``, of the lowest block that trains; 0 = as much as others.
        trains_own_weights: whether the blocks' own weights train instead of adapters.
        has_dropout: whether blocks drop anything.
        adapter: configuration; counts where users have adapters of their own.
        device: that computes, ``cpu`` or ``cuda``.

    Attributes:
        context_bytes: of the device that hold no tensor; 0 on a processor, whose libraries are off the budget already.
        helped: bytes of a block's adapters where a helper fits them.
    """

    def __init__(
        self,
        course: Course,
        model: ModelFacts,
        *,
        optimizer: str,
        dtype: str,
        activation_token_bytes: float,
        data_bytes: int = 0,
        lowest_token_bytes: float = 0.0,
        trains_own_weights: bool = False,
        has_dropout: bool = False,
        adapter: str = "",
        device: str = "cpu",
    ) -> None:
        self.context_bytes = CONTEXT_BYTES if device == "cuda" else 0
        if user_sets(course):
            activation_token_bytes += max((kind.more_activation_token_bytes for kind in model.kinds), default=0.0)
        self._item_bytes = DTYPE_BYTES[dtype]
        self._token_logits = model.head_token_logits + model.head_class_token_logits * len(course.labels)
        self._activation_token_bytes = activation_token_bytes
        self.lowest_token_bytes = min(lowest_token_bytes, activation_token_bytes)
        self.block_bytes = frozen_bytes(
            model.block_bytes,
            params=model.block_matrix_params,
            rows=model.block_matrix_rows,
            item_bytes=self._item_bytes,
            frozen=course.frozen,
        )
        self.embedding_bytes = frozen_bytes(
            model.embedding_bytes,
            params=model.embedding_matrix_params,
            rows=model.embedding_matrix_rows,
            item_bytes=self._item_bytes,
            frozen=course.frozen,
        )
        self._largest_params = (model.largest_matrix_params, model.head_token_logits * model.hidden_size)
        self._frozen = course.frozen
        self.optimizer = optimizer
        self.adapter_bytes = model.adapter_block_bytes
        self.helped = set_bytes(course, model, adapter=adapter)
        self.head_bytes = model.head_bytes + model.head_class_bytes * len(course.labels)
        head_factors = model.head_factor_bytes + model.head_class_factor_bytes * len(course.labels)
        self.head_state_bytes = state_bytes(optimizer, self.head_bytes, head_factors)
        self.adapter_state_bytes = state_bytes(optimizer, self.adapter_bytes, model.adapter_block_factor_bytes)
        kinds = kinds_of_users(model, user_sets(course))
        self.sets_state_bytes = sum(
            state_bytes(optimizer, kind.adapter_block_bytes, kind.adapter_block_factor_bytes) for kind in kinds
        )
        self.token_bytes = course.hidden_size * self._item_bytes
        self.data_bytes = data_bytes
        self._embedding_train_bytes = model.embedding_train_bytes
        self._embedding_state_bytes = state_bytes(optimizer, model.embedding_train_bytes, model.embedding_factor_bytes)
        batch_tokens = course.batch_size * course.max_length
        self._embedding_grad_bytes = math.ceil(embedding_grad_bytes(model, batch_tokens))
        self.is_tied = model.is_tied
        self._token_table_bytes = model.token_table_bytes or model.embedding_train_bytes
        micro_tokens = course.microbatch_sizes()[0] * course.max_length
        most_rows = math.ceil(self._token_table_bytes / self.token_bytes) + micro_tokens
        self._embedding_rows_bytes = min(batch_tokens, most_rows) * (self.token_bytes + ROW_NUMBER_BYTES)
        inputs = score_token_bytes(model, self._item_bytes)
        self._passing_token_bytes = max(0.0, activation_token_bytes - inputs)
        self._drawn_token_bytes = drawn_token_bytes(model, course.max_length) if has_dropout else 0.0
        self._pair_token_bytes = pair_token_bytes(model, EXACT)
        self._sent_pair_token_bytes = pair_token_bytes(model, wire_of(course.offload))
        self._has_mask = not model.fixed_tokens
        self._head = course.head
        in_subnets = subnet_token_bytes(model, self._item_bytes, trains_own_weights=trains_own_weights)
        self._subnet_token_bytes = min(in_subnets, activation_token_bytes)
        self._projected_token_bytes = self._item_bytes * _projected_values(course, model)
        self._score_token_bytes = 0 if trains_own_weights else score_token_bytes(model, self._item_bytes)
        self.gradient_bytes = largest_gradient_bytes(model, self._item_bytes)
        self.tables_bytes = tables_bytes(course)

    @staticmethod
    def at(course: Course, node: NodeFacts, *, optimizer: str, dtype: str) -> Sizes:
        """Sizes of a run at one node: of its model, its rows, and what it measured."""
        return Sizes(
            course,
            node.model,
            optimizer=optimizer,
            dtype=dtype,
            activation_token_bytes=node.activation_token_bytes,
            data_bytes=node.data_bytes,
            lowest_token_bytes=node.lowest_token_bytes,
            trains_own_weights=trains_own_weights(node.shape.adapter),
            has_dropout=node.shape.dropout > 0,
            adapter=node.shape.adapter,
            device=node.device,
        )

    def trained_bytes(self, unit: int) -> int:
        """Bytes of what trains in a unit: the adapter or own weights of a block, the head, or the embedding."""
        if unit == EMBEDDING:
            return self._embedding_train_bytes
        return self.head_bytes if unit == self._head else self.adapter_bytes

    def largest_tensor_bytes(self, unit: int) -> int:
        """Bytes of the largest trained tensor of a unit, at most."""
        if unit == EMBEDDING:
            return self._token_table_bytes
        return self.head_bytes if unit == self._head else min(self.adapter_bytes, self.gradient_bytes)

    def unit_grad_bytes(self, unit: int) -> int:
        """Bytes of the gradient of embedding or head, as it goes to another owner, at most."""
        return self._embedding_grad_bytes if unit == EMBEDDING else self.head_bytes

    @property
    def decoder_bytes(self) -> int:
        """Bytes of the matrix that makes logits of every token, such as a language model's decoder."""
        return self._largest_params[1] * self._item_bytes

    def embedding_rows_bytes(self) -> int:
        """Bytes of a batch's rows in the embedding's gradient: at most its table's and those of a micro-batch."""
        return self._embedding_rows_bytes

    def widened_bytes(self, *, is_owner: bool) -> int:
        """Bytes of the room in which a frozen matrix is widened: of a block, or the decoder of a language model."""
        largest = max(self._largest_params) if is_owner else self._largest_params[0]
        return widened_bytes(largest, item_bytes=self._item_bytes, frozen=self._frozen)

    def state_bytes(self, unit: int) -> int:
        """Bytes that the optimizer keeps of a unit: of the adapter of a block, of the head, or of the embedding."""
        if unit == EMBEDDING:
            return self._embedding_state_bytes
        return self.head_state_bytes if unit == self._head else self.adapter_state_bytes

    def largest_state_bytes(self, unit: int) -> int:
        """Bytes of these that belong to one trained tensor of a unit, at most."""
        return min(self.state_bytes(unit), state_bytes(self.optimizer, self.largest_tensor_bytes(unit)))

    def tensor_bytes(self, tokens: float) -> float:
        """Bytes of a hidden state or gradient of so many padded tokens."""
        return tokens * self.token_bytes

    def run_again_bytes(self, tokens: float) -> float:
        """Bytes that one block keeps which runs again: its input, and the masks that its dropout drew."""
        return tokens * (self.token_bytes + self._drawn_token_bytes)

    def kept_bytes(self, tokens: float) -> float:
        """Bytes that one block keeps for its backward of so many padded tokens.

        The block's work space is taken as just as large.
        """
        return tokens * self._activation_token_bytes

    def projected_bytes(self, tokens: float) -> float:
        """Bytes that one block keeps for its backward where VeLoRA holds for it; of all of them without VeLoRA."""
        return max(0.0, self.kept_bytes(tokens) - tokens * self._projected_token_bytes)

    def kept_passing_bytes(self, tokens: float) -> float:
        """Bytes of these that a block keeps where its weights do not train, so that it only passes gradients on.

        Its linear layers then keep no inputs.
        """
        return tokens * self._passing_token_bytes

    def kept_in_subnets_bytes(self, tokens: float) -> float:
        """Bytes of these that all subnets of the block keep together; the rest is there whatever their share."""
        return tokens * self._subnet_token_bytes

    def kept_for_scores_bytes(self, tokens: float) -> float:
        """Bytes that one block keeps besides, of so many padded tokens, while scores are gathered."""
        return tokens * self._score_token_bytes

    def pair_bytes(self, tokens: float) -> float:
        """Bytes of one block's pairs for a helper, of so many padded tokens, as they were computed."""
        return tokens * self._pair_token_bytes

    def sent_pair_bytes(self, tokens: float) -> float:
        """Bytes of the same as they travel."""
        return tokens * self._sent_pair_token_bytes

    def mask_bytes(self, rows: int, max_length: int) -> int:
        """Bytes of what tells the blocks which tokens of a micro-batch see which: a number for every two of a row."""
        return rows * max_length**2 * self._item_bytes if self._has_mask else 0

    def head_work_bytes(self, tokens: float) -> float:
        """Bytes that the head holds while it runs: the hidden state with its gradient, and the logits."""
        logits = logits_peak_bytes(math.ceil(tokens), self._token_logits, self._item_bytes)
        return 2 * self.tensor_bytes(tokens) + logits


def _projected_values(course: Course, model: ModelFacts) -> int:
    """Values of a token that one block need not keep because VeLoRA keeps projections of them.

    Example: 3,072 inputs in 32 parts are 32 numbers, so 3,040 values less. Random vectors differ by layer: three layers
    that read 768 values keep 96.
    """
    velora = course.velora
    if velora is None:
        return 0
    chosen = [kept for kept in model.kept_inputs if set(kept.layers) & set(velora.layers)]
    freed = [kept for kept in chosen if not (kept.kept_anyway or kept.always_kept)]
    vectors = [(kept.width, kept.readers if velora.init == RANDOM else 1) for kept in freed]
    return sum(max(0, width - number * num_subtokens(width, velora.parts)) for width, number in vectors)
