"""Texts to token ids, with the model's own tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringtune.errors import ModelError


class Batch(NamedTuple):
    """One batch as the embedding and the head need it (B rows, T tokens)."""

    ids: torch.Tensor  # (B, T) int64
    mask: torch.Tensor  # (B, T) int64, 1 = token, 0 = padding
    token_type_ids: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B,) int64, -100 = no target

    def rows(self, start: int, stop: int) -> Batch:
        """Rows ``[start, stop)``; still as wide as the whole batch."""
        return Batch(*(tensor[start:stop] for tensor in self))

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(tensor.to(device) for tensor in self))


class Encoder:
    """Turns texts into padded batches; each text is encoded once, when it is first used.

    Args:
        folder: with the tokenizer's files.
        texts: of all rows.

    Raises:
        ModelError: the folder has no tokenizer, or one without a padding token.
    """

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._texts = texts
        self._encoded: dict[tuple[int, int], tuple[array[int], array[int]]] = {}

    def batch(self, rows: Sequence[int], labels: Sequence[int], *, max_length: int) -> Batch:
        """These rows, each cut at ``max_length`` tokens, padded to the longest.

        Args:
            rows: indices into the texts.
            labels: target of each of these rows.
            max_length: tokens, special ones included.
        """
        encoded = [self._encode(row, max_length) for row in rows]
        shape = (len(rows), max(len(ids) for ids, _ in encoded))
        ids = torch.full(shape, int(self._tokenizer.pad_token_id), dtype=torch.int64)
        types = torch.full(shape, int(self._tokenizer.pad_token_type_id), dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for index, (row_ids, row_types) in enumerate(encoded):
            length = len(row_ids)
            ids[index, :length] = torch.tensor(row_ids)
            types[index, :length] = torch.tensor(row_types)
            mask[index, :length] = 1
        return Batch(ids=ids, mask=mask, token_type_ids=types, labels=torch.tensor(labels, dtype=torch.int64))

    def _encode(self, row: int, max_length: int) -> tuple[array[int], array[int]]:
        key = (row, max_length)
        if key not in self._encoded:
            # One text at a time: a list would start a thread pool on every core.
            found = self._tokenizer(self._texts[row], truncation=True, max_length=max_length)
            ids = array("i", found["input_ids"])
            types = array("i", found.get("token_type_ids", [0] * len(ids)))
            self._encoded[key] = (ids, types)
        return self._encoded[key]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, from local files only.

    Raises:
        ModelError: there is none, or it has no padding token.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; set model.path, or fetch the model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} has no tokenizer that can be read ({error}); fetch the model again") from error
    if tokenizer.pad_token_id is None:
        raise ModelError(f"the tokenizer in {folder} has no padding token; add one to tokenizer_config.json")
    return tokenizer
