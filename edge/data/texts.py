"""Texts with a label, a number or neither: classification, regression, and causal language modelling.

Rows of a language model are texts of a table, or blocks of one plain text.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from edge.data.examples import ClassCounts, Labels, SummedScores, TextExamples, Values, class_labels
from edge.data.tokens import IGNORED, Batch, Encoder, Padder, Text, TokenRow, load_tokenizer
from ringtune.errors import DataError, ModelError
from ringtune.job.job import Job
from ringtune.job.rows import Rows, is_plain_text, read_rows, refuse_plain_text
from ringtune.models.family import CAUSAL_LM, REGRESSION
from ringtune.models.folder import read_config
from ringtune.run_control.evaluation import number_sums
from ringtune.storage.text_files import read_text


class LabelledTexts:
    """The ``Source`` of sequence classification, and of regression: a number for each text, or pair of texts.

    A decoder classifies by the last token of a row that is no padding. AdapterHub and transformers, which load the
    result, find it by the padding id, so config and tokenizer have to name the same id.

    Raises ``ModelError``: no tokenizer, no padding token, or two different padding ids.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._task, self._data = job.model.task, job.data
        self._max_length = job.train.max_length
        self._tokenizer = load_tokenizer(folder)
        if self._tokenizer.pad_token_id is None:
            raise ModelError(f"the tokenizer in {folder} has no padding token; add one to tokenizer_config.json")
        _check_padding(folder, self._tokenizer)
        self._padder = Padder(self._tokenizer)

    def read(self, path: Path) -> Rows:
        """Read texts, or pairs of texts, with their class names or, for regression, numbers."""
        return read_rows(path, self._task, self._data)

    def examples(self, rows: Sequence[Text], labels: Sequence[Any]) -> TextExamples:
        """Make one example of each text."""
        made, sums = (_number_labels, _NumberSums) if self._task == REGRESSION else (class_labels, ClassCounts)
        scores = SummedScores(len(rows), sums)
        return TextExamples(Encoder(self._tokenizer, rows, self._max_length), made(labels), self._padder, scores=scores)


def _number_labels(numbers: Sequence[Any]) -> Labels:
    """Label each example with its number."""

    def labels(chosen: Sequence[int], *_: object) -> torch.Tensor:
        return torch.tensor([float(numbers[index]) for index in chosen], dtype=torch.float64)

    return labels


class _NumberSums:
    """True and predicted numbers of an evaluation, until all rows are there."""

    def __init__(self) -> None:
        self._true: list[float] = []
        self._predicted: list[float] = []

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        self._true += batch.labels.tolist()
        self._predicted += predictions.double().tolist()

    def values(self, *, are_few: bool) -> Values:
        """Return the sums by the names of ``ringtune.run_control.evaluation``; none of few rows."""
        return () if are_few else number_sums(self._true, self._predicted)


def _check_padding(folder: Path, tokenizer: Any) -> None:
    config = read_config(folder)
    is_decoder = "tie_word_embeddings" in config
    if is_decoder and config["pad_token_id"] != tokenizer.pad_token_id:
        raise ModelError(
            f"{folder}: pad_token_id is {config['pad_token_id']} in config.json and {tokenizer.pad_token_id} in the "
            "tokenizer; a decoder classifies by the last token that is no padding, make them equal"
        )


_PIECE_CHARACTERS = 100_000
MIN_TOKENS = 2  # one to predict, and one before it


class Language:
    """The ``Source`` of causal language modelling; raises ``ModelError``."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._data = job.data
        self._max_length = job.train.max_length
        self._tokenizer = load_tokenizer(folder)
        self._padder = Padder(self._tokenizer)

    def read(self, path: Path) -> Rows:
        """Read the texts of a table, or the blocks of a plain text."""
        if is_plain_text(path):
            refuse_plain_text(path, self._data)
            return self._blocks(path)
        rows = read_rows(path, CAUSAL_LM, self._data)
        if not self._data.append_eos:
            return rows
        end = self._tokenizer.eos_token
        note = (
            f"{path}: each row ends with {end}, as data.append_eos says"
            if end
            else (f"{path}: rows have no end to learn, as the tokenizer has no end-of-text token")
        )
        return dataclasses.replace(rows, notes=(*rows.notes, note))

    def examples(self, rows: Sequence[str | TokenRow], labels: Sequence[str]) -> TextExamples:
        """Make one example of each text or block."""
        texts = [row for row in rows if isinstance(row, str)]
        blocks = [row for row in rows if not isinstance(row, str)]
        end = self._tokenizer.eos_token_id if self._data.append_eos else None
        encoded = blocks or Encoder(self._tokenizer, texts, self._max_length, end=end)
        return TextExamples(encoded, next_tokens, self._padder)

    def _blocks(self, path: Path) -> Rows:
        """Cut all tokens of a plain text, without special ones, into blocks of ``max_length``.

        A last block of one token is left out: it has no token to predict. Example: 257 tokens with ``max_length`` 128
        are two blocks.

        The text is encoded in pieces of whole lines, to bound the tokenizer's memory.
        """
        text, note = read_text(path, self._data.encoding)
        ids: array[int] = array("i")
        for piece in _pieces(text):
            ids.extend(self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        size = self._max_length
        blocks = [ids[first : first + size] for first in range(0, len(ids), size)]
        rows = [TokenRow(block, array("i", bytes(block.itemsize * len(block)))) for block in blocks]
        rows = [row for row in rows if len(row.ids) >= MIN_TOKENS]
        if not rows:
            raise DataError(f"{path} has {len(ids)} tokens; a block needs {MIN_TOKENS} at least")
        left_out = {"blocks of one token": len(blocks) - len(rows)} if len(blocks) > len(rows) else {}
        return Rows(rows=rows, left_out=left_out, notes=(note,) if note else ())


def next_tokens(_: Sequence[int], __: Mapping[str, int], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Label a language model's texts: every token but a row's first is a target at its own position."""
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, 0] = IGNORED
    return labels


def _pieces(text: str) -> Iterator[str]:
    first = 0
    while first < len(text):
        last = text.rfind("\n", first, first + _PIECE_CHARACTERS) + 1 or first + _PIECE_CHARACTERS
        last = len(text) if first + _PIECE_CHARACTERS >= len(text) else last
        yield text[first:last]
        first = last
