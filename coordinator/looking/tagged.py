"""Look at texts whose words have tags: how many, how long, and which tags there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.looking.table import Column
from ringtune.errors import DataError
from ringtune.files.row_account import RowAccount
from ringtune.files.tagged import tagged_rows

_MOST_TAGS: Final = 1000
_SHOWN_TAGS: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """Tagged texts that were looked at.

    Attributes:
        path: of the file.
        rows: number of texts.
        words: number of their words.
        text: lengths of the texts, with a blank between two words.
        tags: names of the tags, sorted.
    """

    path: Path
    rows: int
    words: int
    text: Column
    tags: tuple[str, ...]

    def in_words(self) -> str:
        """Describe the texts: ``train.conll has 3 texts with 20 words and the tags B-PER, O``."""
        more = ", ..." if len(self.tags) > _SHOWN_TAGS else ""
        names = ", ".join(self.tags[:_SHOWN_TAGS])
        return f"{self.path} has {self.rows:,} texts with {self.words:,} words and the tags {names}{more}"


def look_at_tagged(path: Path, *, words: str, tags: str) -> Tagged:
    """Look at every text of a jsonl or CoNLL file once.

    Args:
        path: of the file.
        words: column of the words; a CoNLL file has none.
        tags: column of the tags.

    Raises:
        DataError: a row can't be used, there are none, or so many tags that they are none; says where.
    """
    account = RowAccount(path, is_own=True)
    text, names, rows, num_words = Column(words), set[str](), 0, 0
    for row in tagged_rows(path, account, words=words, tags=tags):
        rows, num_words = rows + 1, num_words + len(row.words)
        text.add(" ".join(row.words))
        names.update(row.tags)
        if len(names) > _MOST_TAGS:
            raise DataError(
                f"{path}, line {row.record[0]}: there are more than {_MOST_TAGS:,} tags; name the right column with "
                "--column tags=NAME"
            )
    if not rows:
        account.check()
        raise DataError(f"{path} has no rows; give it a text, or another file with --data")
    return Tagged(path=path, rows=rows, words=num_words, text=text, tags=tuple(sorted(names)))
