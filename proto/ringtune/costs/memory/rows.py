"""How much memory an owner's rows and their tokenizer take, from the sizes of its files: nothing is read.

Source: resident bytes of an agent before and after, measured with MiniLM's tokenizer (word pieces, 30,522 entries:
8.8 MiB), one of byte pairs (50,000 entries: 14.2 MiB), and 7,464 rows of texts (4.1 MiB; 2.1 MiB more once they were
encoded to 16 tokens each).
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

from ringtune.costs.profile import ModelFacts

VOCABULARY_ENTRY_BYTES: Final = 300
ROW_BYTES: Final = 650
"""What a row takes besides its characters and its tokens: objects of its text, label and tokens."""

TOKEN_BYTES: Final = 8
"""A token of an encoded row: its id and its type."""


def data_bytes(model: ModelFacts, files: tuple[Path, ...], *, num_owners: int, rows: int, max_length: int) -> int:
    """Bytes of an owner's rows, encoded, and of the tokenizer.

    Args:
        model: whose tokenizer; images have none.
        files: of the rows of all owners that share them.
        num_owners: who share these files evenly.
        rows: that the owner has, for training and evaluation.
        max_length: tokens that a row is cut at.
    """
    own = sum(map(held_bytes, files)) // max(1, num_owners) + rows * ROW_BYTES
    if model.fixed_tokens:
        return own
    return own + VOCABULARY_ENTRY_BYTES * model.vocab_size + rows * max_length * TOKEN_BYTES


def held_bytes(path: Path) -> int:
    """Bytes of the rows of a file in memory: of its text, or of its unpacked arrays; images of a folder stay there."""
    if not path.is_file():
        return 0
    if path.suffix.lower() == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                return sum(entry.file_size for entry in archive.infolist())
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
            return 0  # whoever reads the rows says what is wrong
    return path.stat().st_size
