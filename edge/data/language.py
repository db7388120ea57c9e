"""Read texts for a language model: a text a row, or one plain text cut into blocks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge.data.examples import Rows, Unscored
from edge.data.tokens import IGNORED, Batch, Encoder, Padder, TokenRow, load_tokenizer
from ringtune.errors import DataError
from ringtune.files.tables import read_table, text_of
from ringtune.jobs.job import Job
from ringtune.jobs.parts.users import refuse_plain_text, user_column, users_of_table

_PIECE_CHARACTERS = 100_000
_LEAST_TOKENS = 2  # one to predict, and one before it


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
        """Read the texts of a csv or jsonl file, or the blocks of a ``.txt`` file."""
        if path.suffix.lower() == ".txt":
            refuse_plain_text(path, self._data)
            return Rows(rows=self._blocks(path))
        data = self._data
        records = read_table(path, {"data.text": data.text, **user_column(data)})
        texts = [text_of(path, record, data.text) for record in records]
        return Rows(rows=texts, users=users_of_table(path, records, data))

    def examples(self, rows: Sequence[str | TokenRow], labels: Sequence[str]) -> LanguageExamples:
        """Make one example of each text or block."""
        texts = [row for row in rows if isinstance(row, str)]
        blocks = [row for row in rows if not isinstance(row, str)]
        return LanguageExamples(blocks or Encoder(self._tokenizer, texts), self._padder, self._max_length)

    def _blocks(self, path: Path) -> list[TokenRow]:
        """Cut all tokens of a text, without special ones, into blocks of ``max_length``.

        A rest of one token is left out: there is nothing to predict in it. Example: 257 tokens with ``max_length`` 128
        are two blocks.

        The text is encoded in pieces that end with a line, to bound what the tokenizer holds at once.
        """
        ids: array[int] = array("i")
        for piece in _pieces(path):
            ids.extend(self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        size = self._max_length
        blocks = [ids[first : first + size] for first in range(0, len(ids), size)]
        blocks = [block for block in blocks if len(block) >= _LEAST_TOKENS]
        if not blocks:
            raise DataError(f"{path} has {len(ids)} tokens; a block needs {_LEAST_TOKENS} at least")
        return [TokenRow(block, array("i", bytes(block.itemsize * len(block)))) for block in blocks]


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


def _pieces(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it") from error
    pieces: list[str] = []
    first = 0
    while first < len(text):
        last = text.rfind("\n", first, first + _PIECE_CHARACTERS) + 1 or first + _PIECE_CHARACTERS
        last = len(text) if first + _PIECE_CHARACTERS >= len(text) else last
        pieces.append(text[first:last])
        first = last
    return pieces
