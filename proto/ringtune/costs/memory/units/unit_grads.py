"""How many bytes the gradient of a unit has that goes from its initiator to another owner (``schedule.replicas``)."""

from __future__ import annotations

from typing import Final

from ringtune.costs.profile import ModelFacts

ROW_NUMBER_BYTES: Final = 8
"""Bytes of the number of a row, beside the row."""


def embedding_grad_bytes(model: ModelFacts, tokens: float) -> float:
    """Bytes of the embedding's gradient of a batch of so many padded tokens, as it goes to another owner, at most.

    Of a token table only the rows that a batch uses have a gradient; each goes with its number. One that is tied to the
    head has all rows. Example: 1,024 tokens of width 768 are 3.2 MB, where the whole table of 30,522 rows is 94 MB.
    """
    whole = model.embedding_train_bytes
    if model.is_tied or not model.token_table_bytes:
        return whole
    row_bytes = model.token_table_bytes / model.vocab_size + ROW_NUMBER_BYTES
    return min(whole, whole - model.token_table_bytes + tokens * row_bytes)
