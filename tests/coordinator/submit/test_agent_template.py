"""The launcher's end of a template that does not come up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from coordinator.submit import agent_template
from coordinator.submit.agent_template import AgentTemplate
from ringtune.errors import DeadlineError, PeerLostError, UsageError


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
