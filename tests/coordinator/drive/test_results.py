"""What nodes hand in at the end of a run: where it lies, what is read of it, and that nothing of it stays."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from coordinator.drive.results import Results
from ringtune.errors import IntegrityError
from ringtune.files.pieces import Pieces


def test_results_lie_in_a_folder_for_each_node_until_they_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes have two empty folders below one temporary folder, which is gone in the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = Results()
    folders = [results.folder_of(node) for node in ("a", "b")]
    (folders[0] / "adapter.safetensors").write_bytes(b"x")
    assert [folder.name for folder in folders] == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 1
    results.drop()
    assert list(tmp_path.iterdir()) == []
    Results().drop()


def test_results_have_the_totals_of_each_node() -> None:
    """As they were sent; a node without any is named."""
    results = Results()
    results.take("a", {"totals.json": Pieces.of(b'{"peak_rss_bytes": 7}')})
    assert dict(results.totals()) == {"a": {"peak_rss_bytes": 7}}
    results.take("b", {})
    with pytest.raises(IntegrityError, match=r"totals\.json of node b is not JSON"):
        dict(results.totals())
