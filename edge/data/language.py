"""Read texts for a language model: a text a row, or one plain text cut into blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from edge.data.examples import Unscored
from edge.data.tokens import IGNORED, Batch, Encoder, Padder, TokenRow, load_tokenizer
from ringtune.errors import DataError
from ringtune.files.text_files import read_text
from ringtune.jobs.job import Job
from ringtune.jobs.parts.users import refuse_plain_text
from ringtune.jobs.rows import Rows, is_plain_text, read_rows
from ringtune.models.family import CAUSAL_LM

_PIECE_CHARACTERS = 100_000
LEAST_TOKENS = 2  # one to predict, and one before it


class Language:
    """The ``Source`` of causal language modelling.

    Args:
        job: name of the column, longest text.
        folder: of the model, with its tokenizer.

    Raises:
        ModelError: no tokenizer.
    """

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
        return read_rows(path, CAUSAL_LM, self._data)

    def examples(self, rows: Sequence[str | TokenRow], labels: Sequence[str]) -> LanguageExamples:
        """Make one example of each text or block."""
        texts = [row for row in rows if isinstance(row, str)]
        blocks = [row for row in rows if not isinstance(row, str)]
        return LanguageExamples(blocks or Encoder(self._tokenizer, texts), self._padder, self._max_length)

    def _blocks(self, path: Path) -> Rows:
        """Cut all tokens of a text, without special ones, into blocks of ``max_length``.

        A rest of one token is left out: there is nothing to predict in it. Example: 257 tokens with ``max_length`` 128
        are two blocks.

        The text is encoded in pieces that end with a line, to bound what the tokenizer holds at once.
        """
        text, note = read_text(path, self._data.encoding)
        ids: array[int] = array("i")
        for piece in _pieces(text):
            ids.extend(self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        size = self._max_length
        blocks = [ids[first : first + size] for first in range(0, len(ids), size)]
        rows = [TokenRow(block, array("i", bytes(block.itemsize * len(block)))) for block in blocks]
        rows = [row for row in rows if len(row.ids) >= LEAST_TOKENS]
        if not rows:
            raise DataError(f"{path} has {len(ids)} tokens; a block needs {LEAST_TOKENS} at least")
        left_out = {"blocks of one token": len(blocks) - len(rows)} if len(blocks) > len(rows) else {}
        return Rows(rows=rows, left_out=left_out, notes=(note,) if note else ())


class LanguageExamples(Unscored):
    """The ``Examples`` of causal language modelling.

    Args:
        rows: encoder of texts, or blocks that are encoded.
        padder: how rows become batches.
        max_length: tokens, special ones included.
    """

    def __init__(self, rows: Encoder | Sequence[TokenRow], padder: Padder, max_length: int) -> None:
        self._rows = rows
        self._padder = padder
        self._max_length = max_length

    def __len__(self) -> int:
        """Number of texts or blocks."""
        return len(self._rows)

    @property
    def cut_rows(self) -> int:
        """How many texts that were encoded are cut; blocks of a plain text are not."""
        return self._rows.cut_rows if isinstance(self._rows, Encoder) else 0

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of the chosen texts; every token but a row's first is a target at its own place."""
        encoded = self._encoded(chosen)
        ids, mask, types = self._padder.pad(encoded)
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, 0] = IGNORED
        return Batch(ids=ids, mask=mask, token_type_ids=types, labels=labels)

    def width(self, chosen: Sequence[int]) -> int:
        """Number of tokens of the longest chosen text or block."""
        return max(len(row.ids) for row in self._encoded(chosen))

    def _encoded(self, chosen: Sequence[int]) -> Sequence[TokenRow]:
        if isinstance(self._rows, Encoder):
            return self._rows.rows(chosen, max_length=self._max_length)
        return [self._rows[index] for index in chosen]


def _pieces(text: str) -> Iterator[str]:
    first = 0
    while first < len(text):
        last = text.rfind("\n", first, first + _PIECE_CHARACTERS) + 1 or first + _PIECE_CHARACTERS
        last = len(text) if first + _PIECE_CHARACTERS >= len(text) else last
        yield text[first:last]
        first = last
