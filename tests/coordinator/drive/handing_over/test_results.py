"""What nodes hand in at the end of a run: where it lies, what is read of it, and that nothing of it stays."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load, save

from coordinator.drive.handing_over.results import Results
from ringtune.errors import IntegrityError
from ringtune.files.pieces import Pieces
from tests.support.fake_agents import job


def test_results_lie_in_a_folder_for_each_node_until_they_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes have two empty folders below one temporary folder, which is gone in the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = Results()
    folders = [results.folder_of(node) for node in ("a", "b")]
    (folders[0] / "adapter.safetensors").write_bytes(b"x")
    assert [folder.name[:2] for folder in folders] == ["a-", "b-"]
    assert len(list(tmp_path.iterdir())) == 1
    results.drop()
    assert list(tmp_path.iterdir()) == []
    Results().drop()


def test_results_of_own_weights_are_merged_blocks() -> None:
    """Blocks of all nodes in one file beside the head; no adapter is asked for."""
    results = Results()
    files: dict[str, bytes] = defaultdict(bytes)

    def take(event: Any) -> None:
        files[event.file.path] += event.file.chunk

    head = {"head_config.json": b"{}", "model_head.safetensors": save({"h": numpy.ones(1, dtype=numpy.float32)})}
    for node, more in (("a", head), ("b", {})):
        blocks = save({f"bert.encoder.layer.{node}": numpy.ones(2, dtype=numpy.float32)})
        results.take(node, {name: Pieces.of(part) for name, part in {"blocks.safetensors": blocks, **more}.items()})
    wanted = job(adapter__config="full")
    results.send(wanted, take)
    assert files.keys() == {"adapter/blocks.safetensors", "adapter/head_config.json", "adapter/model_head.safetensors"}
    assert load(files["adapter/blocks.safetensors"]).keys() == {f"bert.encoder.layer.{node}" for node in "ab"}


def _adapters(users: dict[str, list[str]]) -> dict[str, Pieces]:
    """Files of users with these tensors."""
    return {
        f"users/{user}/adapter.safetensors": Pieces.of(save({name: numpy.ones(2) for name in names}))
        for user, names in users.items()
    }


def test_results_of_users_are_a_whole_folder_each() -> None:
    """The blocks of all nodes in each user's own file; the head and the configs, which came once, beside each."""
    results = Results()
    files: dict[str, bytes] = defaultdict(bytes)

    def take(event: Any) -> None:
        files[event.file.path] += event.file.chunk

    head = {"head_config.json": b"{}", "model_head.safetensors": save({"h": numpy.ones(1)})}
    common = {name: Pieces.of(content) for name, content in {"adapter_config.json": b"{}", **head}.items()}
    results.take("a", {**_adapters({"anna": ["b.0"], "ben": ["b.0"]}), **common})
    results.take("b", _adapters({"anna": ["b.1"], "ben": ["b.1"]}))
    results.send(job(), take, users=("anna", "ben"))
    names = ("adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors")
    assert files.keys() == {f"users/{user}/{name}" for user in ("anna", "ben") for name in names}
    for user in ("anna", "ben"):
        assert load(files[f"users/{user}/adapter.safetensors"]).keys() == {"b.0", "b.1"}
        assert load(files[f"users/{user}/model_head.safetensors"]).keys() == {"h"}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"anna": ["b.0"]}, "no node sent users/ben/adapter.safetensors; use one version"),
        ({"anna": ["b.0", "b.1"], "ben": ["b.1"]}, "no node sent b.0 of users/ben/adapter.safetensors"),
    ],
)
def test_results_without_a_user_or_a_block_of_theirs_are_refused(sent: dict[str, list[str]], message: str) -> None:
    """Named before anything is sent: a user gets all blocks or the run has no result."""
    results = Results()
    results.take("a", {"adapter_config.json": Pieces.of(b"{}"), **_adapters(sent)})
    with pytest.raises(IntegrityError, match=re.escape(message)):
        results.send(job(model__task="causal-lm"), lambda event: pytest.fail(str(event)), users=("anna", "ben"))


def test_results_have_the_totals_of_each_node() -> None:
    """As they were sent; a node without any is named."""
    results = Results()
    results.take("a", {"totals.json": Pieces.of(b'{"peak_rss_bytes": 7}')})
    assert dict(results.totals()) == {"a": {"peak_rss_bytes": 7}}
    results.take("b", {})
    with pytest.raises(IntegrityError, match=r"totals\.json of node b is not JSON"):
        dict(results.totals())
