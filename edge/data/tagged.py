"""Texts with a tag for each word, for token classification; the first token of a word has its tag.

Further tokens of a word have no tag. Words beyond ``train.max_length``, and words without a token, are left out and
counted.

Source: Devlin et al. 2019, section 5.3.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edge.data.examples import ClassCounts, SummedScores, TextExamples, Values
from edge.data.tokens import IGNORED, Batch, NoTokenError, Padder, TokenRow, begins_with_blank, load_tokenizer
from ringtune.errors import ModelError
from ringtune.job.job import Job
from ringtune.job.rows import Rows, read_rows
from ringtune.models.family import TAGGING
from ringtune.run_control.evaluation import PREDICTED, RIGHT, TRUE, count_name, entities_of, entity_types

_LOG = logging.getLogger(__name__)
CUT_WORDS = "cut_words"


class TaggedRow(NamedTuple):
    """One example: a text as tokens.

    Attributes:
        words: index of each word that has a token, ascending.
        starts: position of the first token of each of these words.
        num_words: of the text, with words that have no token.
    """

    tokens: TokenRow
    words: array[int]
    starts: array[int]
    num_words: int

    @property
    def num_cut(self) -> int:
        """Number of words that are left out."""
        return self.num_words - len(self.words)


class TaggedTexts:
    """The ``Source`` of token classification; raises ``ModelError``."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._data = job.data
        self._max_length = job.train.max_length
        self._tokenizer = load_tokenizer(folder)
        if not self._tokenizer.is_fast:
            raise ModelError(f"the tokenizer in {folder} does not say of which word a token is; add its tokenizer.json")
        self._blank = " " if _joins_blanks(self._tokenizer) else ""
        if self._blank:
            self._tokenizer.add_prefix_space = True  # else GPT-2's and RoBERTa's classes refuse separate words
        self._padder = Padder(self._tokenizer)

    def read(self, path: Path) -> Rows:
        """Read the words and tags of a jsonl or CoNLL file."""
        return read_rows(path, TAGGING, self._data)

    def examples(self, rows: Sequence[tuple[str, ...]], labels: Sequence[tuple[str, ...]]) -> TextExamples:
        """Make one example of each text; warn of words that are left out; raises ``NoTokenError``."""
        encoded = [self.encode(words) for words in rows]
        for index, row in enumerate(encoded):
            if not row.words:
                raise NoTokenError(index, f"{row.num_words} words")
        if num_cut := sum(row.num_cut for row in encoded):
            _LOG.warning(
                "%d of %d words are left out: they are beyond train.max_length = %d tokens, or have no token",
                num_cut,
                sum(row.num_words for row in encoded),
                self._max_length,
            )
        return self.made(encoded, labels)

    def made(self, rows: Sequence[TaggedRow], tags: Sequence[tuple[str, ...]]) -> TextExamples:
        """Make examples of encoded texts."""
        labels = _TagLabels(rows, tags)
        return TextExamples(
            [row.tokens for row in rows],
            labels,
            self._padder,
            scores=SummedScores(len(rows), labels.no_sums),
            cut_rows=sum(row.num_cut > 0 for row in rows),
        )

    def encode(self, words: Sequence[str]) -> TaggedRow:
        """Turn words into tokens, special ones included, cut at ``train.max_length``."""
        words = [word if word.startswith(" ") else self._blank + word for word in words]
        encoding = self._tokenizer(words, is_split_into_words=True, truncation=True, max_length=self._max_length)
        ids = array("i", encoding["input_ids"])
        first: dict[int, int] = {}
        for token, word in enumerate(encoding.word_ids(0)):
            if word is not None:
                first.setdefault(word, token)
        types = array("i", encoding.get("token_type_ids", [0] * len(ids)))
        return TaggedRow(TokenRow(ids, types), array("i", first.keys()), array("i", first.values()), len(words))


class _TagLabels:
    """Labels of words at their first tokens; keeps the names of the run's tags, by which entities are counted."""

    def __init__(self, rows: Sequence[TaggedRow], tags: Sequence[tuple[str, ...]]) -> None:
        self._rows, self._tags = rows, tags
        self._names: tuple[str, ...] = ()

    def __call__(
        self, chosen: Sequence[int], targets: Mapping[str, int], ids: torch.Tensor, _: torch.Tensor
    ) -> torch.Tensor:
        labels = torch.full_like(ids, IGNORED)
        for place, index in enumerate(chosen):
            row, tags = self._rows[index], self._tags[index]
            for word, start in zip(row.words, row.starts, strict=True):
                labels[place, start] = targets.get(tags[word], IGNORED)
        self._names = tuple(sorted(targets, key=targets.__getitem__))
        return labels

    def no_sums(self) -> _TagCounts:
        """Make empty counts."""
        return _TagCounts(self._names, sum(row.num_cut for row in self._rows))


class _TagCounts:
    """Confusion counts of tags, and counts of entities by type."""

    def __init__(self, labels: Sequence[str], num_cut: int) -> None:
        self._tags = ClassCounts()
        self._labels, self._num_cut = labels, num_cut
        self._types = {name: index for index, name in enumerate(entity_types(labels))}
        self._entities = Counter[str]()

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        """Count the words of a micro-batch, and the entities of their tags."""
        self._tags.add(batch, predictions)
        if not self._types:
            return
        for labels, said in zip(batch.labels.cpu(), predictions.cpu(), strict=True):
            places = labels != IGNORED
            true, predicted = (
                entities_of([self._labels[index] for index in values[places].tolist()]) for values in (labels, said)
            )
            for kind, entities in ((TRUE, true), (PREDICTED, predicted), (RIGHT, true & predicted)):
                self._entities.update(count_name(self._types[entity.kind], kind) for entity in entities)

    def values(self, *, are_few: bool) -> Values:
        """Return the counts by name, and the number of words left out; of few texts this number alone."""
        counts = () if are_few else sorted(self._entities.items())
        entities = tuple((name, float(count)) for name, count in counts)
        return (*self._tags.values(are_few=are_few), *entities, (CUT_WORDS, float(self._num_cut)))


def _joins_blanks(tokenizer: Any) -> bool:
    """Whether a blank belongs to a word's first token, and so has to be put before each of separate words.

    So it is with a byte-level tokenizer, alone or in a sequence behind other dividers, that puts none there itself.
    """
    divider = tokenizer.backend_tokenizer.pre_tokenizer
    return divider is not None and b'"ByteLevel"' in divider.__getstate__() and not begins_with_blank(tokenizer)
