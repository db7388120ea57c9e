"""The command ``ringtune coordinator``: what stands ready before the first call is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator.kept_runs import kept_runs
from coordinator.server.ending import Ending
from ringtune import cli
from ringtune.rpc.connections import open_channel
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.fake_agents import CALL_S

SOON_S = 0.2


def test_coordinator_answers_nobody_before_it_has_found_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks meanwhile waits: 'keeps no runs' would be taken for nothing to fetch."""
    addresses: list[str] = []
    channels: list[grpc.Channel] = []
    calls: list[Any] = []

    def folder(address: str) -> Path:
        addresses.append(address)
        return tmp_path

    class AskedWhileItReads(kept_runs.KeptRuns):
        def __init__(self, folder: Path, **options: Any) -> None:
            channel = open_channel(addresses[0])
            channels.append(channel)
            calls.append(control_pb2_grpc.CoordinatorStub(channel).Runs.future(control_pb2.Empty(), timeout=CALL_S))
            with pytest.raises(grpc.FutureTimeoutError):
                calls[0].exception(SOON_S)
            super().__init__(folder, **options)

    monkeypatch.setattr(kept_runs, "default_folder", folder)
    monkeypatch.setattr(kept_runs, "KeptRuns", AskedWhileItReads)
    monkeypatch.setattr(Ending, "wait", lambda _: calls[0].result(CALL_S) is not None)
    result = CliRunner().invoke(cli.app, ["coordinator", "--bind", "127.0.0.1:0"])
    channels[0].close()
    assert result.exit_code == 0, result.output
    assert list(calls[0].result().runs) == []
