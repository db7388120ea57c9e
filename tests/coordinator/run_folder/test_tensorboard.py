"""Metrics for TensorBoard: the numbers of ``metrics.jsonl``, in files that TensorBoard reads."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from coordinator.run_folder.tensorboard import TensorBoardLog, require_tensorboard, scalars
from ringtune.errors import UsageError
from ringtune.v1 import control_pb2
from tests.support.page_runs import metrics, step_line


def written(folder: Path) -> list[Event]:
    """The events of the files, each a record with its length and two checksums."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_scalars_of_lines() -> None:
    """Figures of steps and evaluations; other lines have none."""
    assert dict(scalars(step_line(2)))["train/loss"] == 1.5
    assert dict(scalars(step_line(2)))["train/sent_bytes"] == 1010
    assert dict(scalars({"kind": "evaluation", "step": 2, "accuracy": 0.5, "loss": None})) == {"eval/accuracy": 0.5}
    assert dict(scalars({"kind": "move", "step": 2})) == {}


def test_tensorboard_has_the_runs_losses(tmp_path: Path) -> None:
    """Each at its step."""
    log = TensorBoardLog(tmp_path)
    for step in (1, 2):
        log(metrics(step_line(step)))
    log.close()
    found = [
        (event.step, round(value.simple_value, 6))
        for event in written(tmp_path)
        for value in event.summary.value
        if value.tag == "train/loss"
    ]
    assert found == [(1, 2.0), (2, 1.5)]


def test_tensorboard_of_a_resumed_run_hides_what_is_done_again(tmp_path: Path) -> None:
    """Its file says from which step on older ones do not count."""
    log = TensorBoardLog(tmp_path)
    log(control_pb2.RunEvent(resumed_json=json.dumps({"step": 4, "passed_over": []})))
    log(metrics(step_line(5)))
    log.close()
    assert [event.step for event in written(tmp_path) if event.HasField("session_log")] == [5]


def test_tensorboard_of_a_run_without_steps_writes_nothing(tmp_path: Path) -> None:
    """Not even its library is loaded."""
    TensorBoardLog(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_require_tensorboard_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another log, or the extra."""
    with pytest.raises(UsageError, match="is not one of tensorboard"):
        require_tensorboard("wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"\[tensorboard\]"):
        require_tensorboard("tensorboard")
