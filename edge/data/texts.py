"""Read labelled texts: one class per text, or pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from edge.data.examples import Classified, Sums, Values
from edge.data.tokens import IGNORED, Batch, Encoder, Padder, Text, load_tokenizer
from ringtune.errors import ModelError
from ringtune.jobs.job import Job
from ringtune.jobs.rows import Rows, read_rows
from ringtune.models.folder import read_config
from ringtune.rounds.number_sums import number_sums


class LabelledTexts:
    """The ``Source`` of sequence classification.

    A decoder classifies by the last token of a row. AdapterHub and transformers, which load the result, find it by
    the padding id, so config and tokenizer have to name the same.

    Args:
        job: names of the columns, longest text.
        folder: of the model, with its tokenizer.

    Raises:
        ModelError: no tokenizer, or no padding token.
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
        """Read texts, or pairs of texts, with their class names, or for regression their numbers."""
        return read_rows(path, self._task, self._data)

    def examples(self, rows: Sequence[Text], labels: Sequence[str]) -> LabelledExamples:
        """Make one example of each text."""
        return LabelledExamples(Encoder(self._tokenizer, rows), labels, self._padder, self._max_length)


class LabelledExamples(Classified):
    """The ``Examples`` of sequence classification.

    Args:
        encoder: of the texts.
        labels: class name of each.
        padder: how rows become batches.
        max_length: tokens, special ones included.
    """

    def __init__(self, encoder: Encoder, labels: Sequence[str], padder: Padder, max_length: int) -> None:
        self._encoder = encoder
        self._labels = labels
        self._padder = padder
        self._max_length = max_length

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._encoder)

    @property
    def cut_rows(self) -> int:
        """How many texts that were encoded are cut."""
        return self._encoder.cut_rows

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of the chosen texts and the indices of their classes."""
        ids, mask, types = self._padder.pad(self._encoder.rows(chosen, max_length=self._max_length))
        labels = [targets.get(self._labels[row], IGNORED) for row in chosen]
        return Batch(ids=ids, mask=mask, token_type_ids=types, labels=torch.tensor(labels, dtype=torch.int64))

    def width(self, chosen: Sequence[int]) -> int:
        """Number of tokens of the longest chosen text."""
        return max(len(row.ids) for row in self._encoder.rows(chosen, max_length=self._max_length))


class NumberedTexts(LabelledTexts):
    """The ``Source`` of regression: a number for each text, or pair of texts; arguments as ``LabelledTexts``."""

    def examples(self, rows: Sequence[Text], labels: Sequence[Any]) -> NumberedExamples:
        """Make one example of each text."""
        return NumberedExamples(Encoder(self._tokenizer, rows), labels, self._padder, self._max_length)


class NumberedExamples(LabelledExamples):
    """The ``Examples`` of regression; ``labels`` are numbers."""

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of the chosen texts and their numbers."""
        ids, mask, types = self._padder.pad(self._encoder.rows(chosen, max_length=self._max_length))
        numbers = torch.tensor([float(self._labels[row]) for row in chosen], dtype=torch.float64)
        return Batch(ids=ids, mask=mask, token_type_ids=types, labels=numbers)

    def no_sums(self) -> Sums:
        """Make the sums of no rows."""
        return _NumberSums()


class _NumberSums:
    """The numbers of an evaluation, and what was predicted for them, until all rows are in."""

    def __init__(self) -> None:
        self._true: list[float] = []
        self._predicted: list[float] = []

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        """Take the rows of a micro-batch."""
        self._true += batch.labels.tolist()
        self._predicted += predictions.double().tolist()

    def values(self, *, are_few: bool) -> Values:
        """Return the sums by the names of ``ringtune.rounds.number_sums``; none of few rows."""
        return () if are_few else number_sums(self._true, self._predicted)


def _check_padding(folder: Path, tokenizer: Any) -> None:
    config = read_config(folder)
    is_decoder = "tie_word_embeddings" in config
    if is_decoder and config["pad_token_id"] != tokenizer.pad_token_id:
        raise ModelError(
            f"{folder}: pad_token_id is {config['pad_token_id']} in config.json and {tokenizer.pad_token_id} in the "
            "tokenizer; a decoder classifies by the last token that is no padding, make them equal"
        )
