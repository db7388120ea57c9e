"""The template forks agents that are as a process of their own would be; a stand-in without torch tells what it got."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.client.local_nodes import AgentTemplate
from edge import template as module
from ringtune.errors import RingTuneError
from tests.support.processes import source_environment

WAIT_S = 120.0

# Serves as the real one does; what is forked tells what it finds, or waits for the end of its input.
STAND_IN = """
import json, os, random, secrets, signal, sys, threading, types
import edge.cli.node as agent
from edge import template
from edge.template import count_threads

def be_agent():
    if "wait" in sys.argv:
        print("waiting", flush=True)
        sys.stdin.read()
        return 3
    if "fail" in sys.argv:
        raise ValueError("no such thing")
    if "hang" in sys.argv:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        print("waiting", flush=True)
        threading.Event().wait(600)
    print(json.dumps({
        "arguments": sys.argv[1:], "session": os.getsid(0), "pid": os.getpid(), "threads": count_threads(),
        "variable": os.environ.get("RINGTUNE_TEST"), "handler": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "drawn": [random.random(), secrets.token_hex(8)], "files": sorted(os.listdir("/proc/self/fd")),
    }), flush=True)
    sys.stderr.write("on the other stream\\n")
    return 7

agent.main = be_agent
template.require_libraries = template.load_everything = lambda: None
template.END_S = 0.5
if "spoiled" in sys.argv:
    sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
if "thread" in sys.argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.exit(template.main())
"""


def stand_in(folder: Path, *options: str) -> AgentTemplate:
    """A template whose agents only tell what they find."""
    command = [sys.executable, "-c", STAND_IN, *options, "_" * 100]
    return AgentTemplate(folder / "template.log", source_environment(RINGTUNE_TEST="template"), command=command)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentTemplate]:
    """A stand-in that serves all tests that do not end it."""
    with stand_in(tmp_path_factory.mktemp("template")) as serving:
        yield serving


def facts(log: Path) -> dict[str, Any]:
    """What an agent told of itself."""
    told: dict[str, Any] = json.loads(log.read_text().splitlines()[0])
    return told


def wait_for_line(log: Path) -> None:
    """Wait until an agent has printed something."""
    deadline_s = time.monotonic() + WAIT_S
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline_s, f"nothing in {log}"
        time.sleep(0.005)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process that is nobody's child here ends; one that only waits to be counted has ended."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:  # between the two questions
            return True
        time.sleep(0.005)
    return False


def test_template_gives_an_agent_what_a_process_has(template: AgentTemplate, tmp_path: Path) -> None:
    """Arguments, variables, session, descriptors and output of its own; its exit code comes back."""
    log = tmp_path / "a.log"
    log.write_text("")
    agent = template.start(["--name", "a"], log=log, environment={"RINGTUNE_TEST": "own"})
    assert agent.wait(WAIT_S) == 7
    told = facts(log)
    assert told["arguments"] == ["--name", "a"]
    assert told["session"] == told["pid"] == agent.pid
    assert (told["variable"], told["threads"], told["handler"]) == ("own", 1, True)
    assert len(told["files"]) == 4, "input, both outputs, and the folder that is listed"
    assert "on the other stream" in log.read_text()
    agent.close_input()


def test_template_agents_draw_different_numbers(template: AgentTemplate, tmp_path: Path) -> None:
    """Nothing random is forked with the rest; variables are the template's where none is given.

    An unexpected error is in the agent's own log.
    """
    agents = [template.start(words, log=tmp_path / name) for name, words in (("a", []), ("b", []), ("c", ["fail"]))]
    assert [agent.wait(WAIT_S) for agent in agents] == [7, 7, 1]
    for agent in agents:
        agent.close_input()
    one, other = (facts(tmp_path / name) for name in ("a", "b"))
    assert not set(one["drawn"]) & set(other["drawn"])
    assert one["variable"] == "template"
    assert "ValueError: no such thing" in (tmp_path / "c").read_text()


def test_template_shows_each_agent_under_its_own_command_line(template: AgentTemplate, tmp_path: Path) -> None:
    """Whoever lists processes sees which node each is."""
    agent = template.start(["--name", "node-1", "wait"], log=tmp_path / "a")
    wait_for_line(tmp_path / "a")
    assert psutil.Process(agent.pid).cmdline()[1:6] == ["-m", "edge", "--name", "node-1", "wait"]
    assert psutil.Process(template.pid).cmdline()[1:3] == ["-m", "edge.template"]
    agent.close_input()
    assert agent.wait(WAIT_S) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_template_tells_of_an_agent_that_a_signal_ended(
    template: AgentTemplate, tmp_path: Path, number: signal.Signals
) -> None:
    """Through the template or past it: the code is negative, others go on, and a second signal hits nobody."""
    agents = [template.start(["wait"], log=tmp_path / name) for name in ("a", "b", "c")]
    agents[0].send_signal(number)
    os.kill(agents[1].pid, number)
    assert [agent.wait(WAIT_S) for agent in agents[:2]] == [-number, -number]
    agents[0].send_signal(number)
    assert agents[2].wait(0.0) is None
    for agent in agents:
        agent.close_input()
    assert agents[2].wait(WAIT_S) == 3


def test_template_takes_its_agents_along(tmp_path: Path) -> None:
    """Whatever ends the template ends agents that listen to nothing; they and the template count as killed."""
    with stand_in(tmp_path) as serving:
        agent = serving.start(["hang"], log=tmp_path / "a")
        wait_for_line(tmp_path / "a")
        process = psutil.Process(agent.pid)
        os.kill(serving.pid, signal.SIGKILL)
        assert agent.wait(WAIT_S) == -signal.SIGKILL
        assert "the template of the local nodes was ended by SIGKILL" in str(serving.error())
        assert is_gone(process)
        with pytest.raises(RingTuneError, match="ended by SIGKILL"):
            serving.start([], log=tmp_path / "b")
        agent.close_input()


LAUNCHER = """
import sys
from pathlib import Path
from tests.edge.test_template import stand_in, wait_for_line
folder = Path(sys.argv[1])
with stand_in(folder) as serving:
    pids = [serving.pid]
    for kind in ("wait", "hang"):
        pids.append(serving.start([kind], log=folder / kind).pid)
        wait_for_line(folder / kind)
    print(*pids, flush=True)
    sys.stdin.read()
"""


def test_template_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    """Agents get time to end by themselves; those that do not are killed, and the template is gone too."""
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=source_environment(),
    ) as launcher:
        assert launcher.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        launcher.kill()
    assert len(processes) == 3
    assert all(is_gone(process) for process in processes)


@pytest.mark.parametrize(("what", "said"), [("thread", "2 run where a fork may have 1"), ("spoiled", "accelerator")])
def test_template_that_can_not_fork_starts_agents_afresh(tmp_path: Path, what: str, said: str) -> None:
    """A lock of another thread would stay locked, and the device would not work: the agent is ``ringtune node``."""
    with stand_in(tmp_path, what) as serving:
        names = ("a", "b") if what == "thread" else ("a",)
        agents = [serving.start(["--nonsense"], log=tmp_path / name) for name in names]
        assert [agent.wait(WAIT_S) for agent in agents] == [2] * len(names)
        for agent in agents:
            agent.close_input()
        (line,) = serving._log.read_text().splitlines()
    assert said in line and "nodes load the libraries each for itself" in line
    assert "nonsense" in (tmp_path / names[-1]).read_text()


def test_agent_that_is_started_afresh_ends_with_its_template(tmp_path: Path) -> None:
    """It is a session of its own, shown as the node that it is, and killed with the process that it belongs to."""
    wait = "import sys, edge.cli.node as agent; agent.main = lambda: print('on', flush=True) or sys.stdin.read()\n"
    begin = f"{wait}from edge import template; template.main()"
    lines = [
        "import os, subprocess, sys",
        f"command = [sys.executable, '-c', {begin!r}, 'agent', str(os.getpid()), '--name', 'a']",
        "child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)",
        "child.wait()",
    ]
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True, env=source_environment()
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "on\n"
        (agent,) = psutil.Process(parent.pid).children()
        assert agent.cmdline()[1:5] == ["-m", "edge", "--name", "a"]
        assert os.getsid(agent.pid) == agent.pid
        parent.kill()
    assert is_gone(agent)


def test_template_can_fork_once_torch_is_loaded() -> None:
    """Loading torch touches no device; a thread that a package starts is counted."""
    import torch  # noqa: F401

    assert "accelerator" not in module.no_fork_reason()
