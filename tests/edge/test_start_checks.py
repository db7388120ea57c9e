"""What a node is started with is checked when it starts, not in the run of somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edge import commands
from edge.agent_options import AgentOptions
from edge.start_checks import check_cuda, check_memory, check_model, check_rows, check_start, check_state
from ringtune.errors import CapacityError, DataError, ModelError, StorageError, UsageError
from ringtune.machine.memory import MemoryLimit
from tests.support.tiny import write_model


def options(**changes: Any) -> AgentOptions:
    """Options of a local node."""
    return AgentOptions(**{"coordinator": "127.0.0.1:7000", "name": "a", **changes})


def test_start_checks_name_rows_that_are_not_there(tmp_path: Path) -> None:
    """A mistyped path of rows is told with its option, before the node joins anything."""
    (tmp_path / "here.csv").write_text("text,label\n", encoding="utf-8")
    check_rows(options(data=tmp_path / "here.csv", eval_data=tmp_path))
    with pytest.raises(DataError, match=r"--data .*away\.csv is not there"):
        check_rows(options(data=tmp_path / "away.csv"))
    with pytest.raises(DataError, match=r"--eval-data .*away\.csv is not there"):
        check_rows(options(data=tmp_path / "here.csv", eval_data=tmp_path / "away.csv"))


def test_start_checks_refuse_a_model_that_can_not_be_sliced(tmp_path: Path) -> None:
    """A folder that is missing, of an unknown family or without weights is told with --model and exit code 5."""
    with pytest.raises(ModelError, match=r"--model .*is not there; give the folder"):
        check_model(tmp_path / "none")
    folder = write_model(tmp_path / "model")
    check_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"--model .*can't be used"):
        check_model(folder)
    (folder / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    with pytest.raises(ModelError, match="'t5' is not supported") as caught:
        check_model(folder)
    assert caught.value.exit_code == 5


def test_start_checks_refuse_a_state_folder_that_can_not_be_written(tmp_path: Path) -> None:
    """The folder for parts of checkpoints is made and tried; a file in its place is exit code 9."""
    check_state(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match=r"--state .*can't be written: Not a directory; give a folder") as caught:
        check_state(tmp_path / "file" / "state")
    assert caught.value.exit_code == 9


def test_start_checks_refuse_a_memory_limit_below_what_the_libraries_take() -> None:
    """Both figures and exit code 6, before it joins: the kernel would kill it while it loads them."""
    check_memory([])
    check_memory([MemoryLimit(limit_bytes=1 << 30, used_bytes=1 << 29)])
    with pytest.raises(CapacityError, match=r"is 248 MiB, .* need 259 MiB") as caught:
        check_memory([MemoryLimit(limit_bytes=1 << 30, used_bytes=0), MemoryLimit(limit_bytes=248 << 20, used_bytes=0)])
    assert caught.value.exit_code == 6


def test_start_checks_refuse_a_device_that_is_not_there() -> None:
    """Torch is asked, because a wheel without CUDA sees none whatever the machine has."""
    check_cuda(lambda: True)
    with pytest.raises(UsageError, match="--device cuda, but torch sees no such device here; use --device cpu"):
        check_cuda(lambda: False)


@pytest.mark.parametrize("option", ["--model", "--data"])
def test_start_checks_come_before_a_node_joins(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command checks; nobody was asked to let it join."""
    monkeypatch.setattr("edge.agent.process.run_agent", lambda _: pytest.fail("it tried to join"))
    given = ["--coordinator", "127.0.0.1:1", "--name", "a", option, str(tmp_path / "none")]
    found = CliRunner().invoke(commands.app, given)
    assert isinstance(found.exception, DataError | ModelError)


def test_start_checks_refuse_a_folder_of_somebody_else_as_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the node has a certificate there; one that is its own gets the marker."""
    monkeypatch.setattr("edge.agent.process.run_agent", lambda *_, **_more: 0)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "main.tex").write_text("mine", encoding="utf-8")
    given = ["--coordinator", "127.0.0.1:1", "--name", "a", "--state"]
    found = CliRunner().invoke(commands.app, [*given, str(tmp_path / "thesis")])
    assert isinstance(found.exception, UsageError) and "it holds main.tex" in str(found.exception)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["main.tex"]
    assert CliRunner().invoke(commands.app, [*given, str(tmp_path / "state")]).exit_code == 0
    assert (tmp_path / "state" / ".ringtune-node").is_file()


def test_start_checks_try_the_state_folder_of_every_node(tmp_path: Path) -> None:
    """A node keeps its parts of checkpoints somewhere, named or not."""
    check_start(options(state=tmp_path / "state"))
    assert (tmp_path / "state").is_dir()
