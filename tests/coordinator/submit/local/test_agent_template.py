"""The launcher's end of a template that does not come up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from coordinator.submit.local import agent_template
from coordinator.submit.local.agent_template import AgentTemplate
from ringtune.errors import DeadlineError, PeerLostError, StorageError, UsageError


def template(folder: Path, code: str) -> AgentTemplate:
    """A process of one's own instead of a template."""
    return AgentTemplate(folder / "template.log", os.environ, command=[sys.executable, "-I", "-S", "-c", code])


def test_template_that_refuses_to_start_says_why(tmp_path: Path) -> None:
    """Its own words and the kind of its exit code."""
    code = "import sys; print('error: a node needs torch'); sys.exit(2)"
    with template(tmp_path, code) as started, pytest.raises(UsageError) as caught:
        started.start([], log=tmp_path / "a.log")
    assert str(caught.value) == "the template of the local nodes: a node needs torch"


def test_template_that_breaks_names_its_log(tmp_path: Path) -> None:
    """What nobody foresaw is shown, and where the rest of it is."""
    with template(tmp_path, "raise SystemError('boom')") as started, pytest.raises(PeerLostError) as caught:
        started.start([], log=tmp_path / "a.log")
    assert "exit code 1 (SystemError: boom)" in str(caught.value)
    assert str(tmp_path / "template.log") in str(caught.value)


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize(
    ("code", "awaited"),
    [
        ("import time; time.sleep(600)", "to load the libraries"),
        ("import os, time; os.write(0, b'{\"ready\": true}'); time.sleep(600)", "to fork a node"),
    ],
)
def test_template_that_hangs_costs_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, awaited: str
) -> None:
    """Neither the libraries nor a fork is waited for without end."""
    monkeypatch.setattr(agent_template, "_FORK_S", 0.05)
    if "ready" not in code:
        monkeypatch.setattr(agent_template, "LOAD_S", 0.05)
    with template(tmp_path, code) as started, pytest.raises(DeadlineError, match=awaited):
        started.start([], log=tmp_path / "a.log")


def num_descriptors() -> int:
    """Files, pipes and sockets that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_template_that_can_not_log_leaves_no_descriptor(tmp_path: Path) -> None:
    """The error names the file; what was opened before is closed."""
    before = num_descriptors()
    with pytest.raises(StorageError, match="none"):
        AgentTemplate(tmp_path / "none" / "template.log", os.environ, command=["true"]).__enter__()
    code = "import socket, time; s = socket.socket(fileno=0); s.send(b'{\"ready\": true}'); time.sleep(60)"
    with template(tmp_path, code) as started:
        inside = num_descriptors()
        for _ in range(3):
            with pytest.raises(StorageError, match="none"):
                started.start([], log=tmp_path / "none" / "a.log")
        assert num_descriptors() == inside
    assert num_descriptors() == before


def test_template_on_another_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents would outlive their launcher there."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="need Linux"):
        template(tmp_path, "").__enter__()
