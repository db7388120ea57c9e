"""What an owner's rows and tokenizer take is counted from the sizes of its files."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

from ringtune.costs.memory_sizes import ROW_BYTES, TOKEN_BYTES, VOCABULARY_ENTRY_BYTES, data_bytes, held_bytes
from tests.support.fake_agents import MODEL

TEXT_BYTES, NUM_ROWS, TOKENS = 10_000, 100, 16


def test_texts_count_their_share_of_the_file_their_rows_and_the_vocabulary(tmp_path: Path) -> None:
    """Four owners share a file; each has the whole tokenizer."""
    path = tmp_path / "rows.csv"
    path.write_bytes(bytes(TEXT_BYTES))
    found = data_bytes(MODEL, (path,), num_owners=4, rows=NUM_ROWS // 4, max_length=TOKENS)
    own = TEXT_BYTES // 4 + NUM_ROWS // 4 * (ROW_BYTES + TOKENS * TOKEN_BYTES)
    assert found == own + MODEL.vocab_size * VOCABULARY_ENTRY_BYTES


def test_images_have_no_tokens_and_count_as_they_are_unpacked(tmp_path: Path) -> None:
    """A file that is small because it is compressed is large in memory; images of a folder stay on the disk."""
    path = tmp_path / "rows.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", bytes(TEXT_BYTES))
    images = dataclasses.replace(MODEL, fixed_tokens=50)
    assert path.stat().st_size < TEXT_BYTES / 10
    assert data_bytes(images, (path,), num_owners=1, rows=7, max_length=50) == TEXT_BYTES + 7 * ROW_BYTES
    assert held_bytes(tmp_path) == 0


def test_files_that_can_not_be_read_count_nothing(tmp_path: Path) -> None:
    """Whoever reads the rows says what is wrong with them."""
    (tmp_path / "bad.npz").write_text("no archive")
    assert [held_bytes(tmp_path / name) for name in ("bad.npz", "none.csv")] == [0, 0]
