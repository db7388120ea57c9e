"""The sizes of a model all of whose parameters train: of a block, of the embedding unit and of the head unit.

A tensor that embedding and head share belongs to the embedding. What a hidden state passes after the last block, and a
decoder of its own, belong to the head; parts that nobody hosts (a pooler) count nowhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from ringtune.costs.memory.units.unit_state import factor_numbers
from ringtune.costs.profile import ModelFacts
from ringtune.models.family import CAUSAL_LM, LM_HEAD, Family
from ringtune.models.tensors import StoredTensor


def with_full_parameters(
    facts: ModelFacts, family: Family, tensors: Mapping[str, StoredTensor], *, task: str, item_bytes: int
) -> ModelFacts:
    """Change the facts of a model with adapters to those of one whose parameters all train.

    Args:
        facts: of the model, with the bytes of a head that the task adds.
        family: of the model.
        tensors: of its folder, by their names in the base model, with a decoder that is no token table.
        task: of the job.
        item_bytes: of a number of the computation.
    """
    shapes = {name: stored.shape for name, stored in tensors.items()}
    block = [shape for name, shape in shapes.items() if name.startswith(f"{family.block_prefix}0.")]
    in_head = (*(f"{path}." for path in family.head_paths), LM_HEAD)
    left_out = (family.block_prefix, *(f"{path}." for path in family.unused_paths))
    head = [shape for name, shape in shapes.items() if name.startswith(in_head)]
    embedding = [shape for name, shape in shapes.items() if not name.startswith((*left_out, *in_head))]
    table = next((shape for shape in embedding if facts.vocab_size and shape[0] == facts.vocab_size), (0,))
    return dataclasses.replace(
        facts,
        block_bytes=0,
        adapter_block_bytes=_bytes(block, item_bytes),
        adapter_block_factor_bytes=factor_numbers(block) * item_bytes,
        embedding_bytes=0,
        embedding_train_bytes=_bytes(embedding, item_bytes),
        embedding_factor_bytes=factor_numbers(embedding) * item_bytes,
        token_table_bytes=math.prod(table) * item_bytes,
        is_tied=task == CAUSAL_LM and LM_HEAD not in shapes,
        head_bytes=facts.head_bytes + _bytes(head, item_bytes),
        head_factor_bytes=facts.head_factor_bytes + factor_numbers(head) * item_bytes,
        block_matrix_params=0,
        block_matrix_rows=0,
        embedding_matrix_params=0,
        embedding_matrix_rows=0,
        largest_matrix_params=0,
    )


def _bytes(shapes: Iterable[tuple[int, ...]], item_bytes: int) -> int:
    return sum(math.prod(shape) for shape in shapes) * item_bytes
