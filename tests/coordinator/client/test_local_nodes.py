"""Local nodes: their shares of this machine, a template that does not come up, and their end."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.client import local_nodes
from coordinator.client import local_nodes as agent_template
from coordinator.client.local_nodes import AgentTemplate, LocalNodes, LocalSetup, node_name
from ringtune.errors import (
    CapacityError,
    DataError,
    DeadlineError,
    InvalidInputError,
    JobError,
    PeerLostError,
    StorageError,
    UsageError,
)
from ringtune.machine.process import exit_error
from ringtune.machine.resources import LIBRARY_BYTES, free_bytes, usable_cores
from tests.support.fake_agents import job
from tests.support.fake_system import fake_system


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


def descriptors() -> set[str]:
    """Files, pipes and sockets that this process has open; those of earlier tests may be closed at any time."""
    found = set[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of this listing, or closed meanwhile
            found.add(f"{entry.name} {entry.readlink()}")
    return found


def test_template_that_can_not_log_leaves_no_descriptor(tmp_path: Path) -> None:
    """The error names the file; what was opened before is closed."""
    before = descriptors()
    with pytest.raises(StorageError, match="none"):
        AgentTemplate(tmp_path / "none" / "template.log", os.environ, command=["true"]).__enter__()
    code = "import socket, time; s = socket.socket(fileno=0); s.send(b'{\"ready\": true}'); time.sleep(60)"
    with template(tmp_path, code) as started:
        inside = descriptors()
        for _ in range(3):
            with pytest.raises(StorageError, match="none"):
                started.start([], log=tmp_path / "none" / "a.log")
        assert descriptors() <= inside
    assert descriptors() <= before


def test_template_on_another_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents would outlive their launcher there."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="need Linux"):
        template(tmp_path, "").__enter__()


GIB = 2**30
WAIT_S = 30.0
LOG = Path("run/logs/node-1.log")


def test_local_setup_shares_memory_and_threads() -> None:
    """Each node gets its part of the free memory, less what a process takes anyway."""
    setup = LocalSetup.of(job(data__train="x.csv", runtime__threads=3), 4, available_bytes=4 * GIB)
    assert setup.memory_bytes == GIB - LIBRARY_BYTES
    assert (setup.num_owners, setup.threads) == (4, 3)
    # No nodes, no data, more owners than nodes
    with pytest.raises(UsageError, match="--local 0"):
        LocalSetup.of(job(data__train="x.csv"), 0)
    with pytest.raises(JobError, match=r"data\.train is empty"):
        LocalSetup.of(job(), 2)
    with pytest.raises(JobError, match=r"data\.owners = 3 is more than --local 2"):
        LocalSetup.of(job(data__train="x.csv", data__owners=3), 2, available_bytes=8 * GIB)
    # The ring order is the order of names
    names = [node_name(index, 12) for index in range(12)]
    assert names == sorted(names)
    assert names[:2] == ["node-00", "node-01"]
    assert node_name(0, 1) == "node-0"


@pytest.mark.promise("7 bounded memory")
def test_local_setup_refuses_more_nodes_than_memory_allows() -> None:
    """Both numbers and a number that would fit are in the message."""
    with pytest.raises(
        CapacityError, match=r"64 local nodes need .* but 2,048 MiB are free here; use at most --local 6"
    ):
        LocalSetup.of(job(data__train="x.csv"), 64, available_bytes=2 * GIB)


def test_local_setup_asks_the_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the limits of its groups count, not the machine's memory and cores."""
    proc, cgroup = fake_system(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {64 * GIB >> 10} kB\n",
            "proc/self/cgroup": "0::/a\n",
            "cgroup/a/memory.max": f"{5 * GIB}\n",
            "cgroup/a/memory.current": f"{2 * GIB}\n",
            "cgroup/a/memory.stat": f"inactive_file {GIB}\n",
            "cgroup/a/cpu.max": "50000 100000\n",
        },
    )
    of_group = (
        functools.partial(free_bytes, proc=proc, cgroup=cgroup),
        functools.partial(usable_cores, proc=proc, cgroup=cgroup),
    )
    monkeypatch.setattr(local_nodes, "free_bytes", of_group[0])
    monkeypatch.setattr(local_nodes, "usable_cores", of_group[1])
    setup = LocalSetup.of(job(data__train="x.csv"), 2)
    assert (setup.memory_bytes, setup.threads) == (2 * GIB - LIBRARY_BYTES, 1)
    monkeypatch.setattr(local_nodes, "usable_cores", lambda: 7)
    assert LocalSetup.of(job(data__train="x.csv"), 2).threads == 3


def test_local_setup_says_where_not_even_one_node_fits() -> None:
    """It advises no number that does not fit either, and all that do."""
    wanted = job(data__train="x.csv")
    with pytest.raises(CapacityError, match=r"1 local node needs 316 MiB before .* 300 MiB are free .* not even one"):
        LocalSetup.of(wanted, 1, available_bytes=300 << 20)
    with pytest.raises(CapacityError, match="not even one fits"):
        LocalSetup.of(wanted, 4, available_bytes=LIBRARY_BYTES)
    with pytest.raises(CapacityError, match=r"use at most --local 2$"):
        LocalSetup.of(wanted, 3, available_bytes=3 * LIBRARY_BYTES)
    assert LocalSetup.of(wanted, 2, available_bytes=3 * LIBRARY_BYTES).memory_bytes == LIBRARY_BYTES // 2


def test_local_nodes_keep_their_parts_below_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--out run`` means this command's folder, wherever the template of its nodes was started."""
    monkeypatch.chdir(tmp_path)
    setup = LocalSetup(num_nodes=1, num_owners=0, memory_bytes=GIB, threads=1)
    nodes = LocalNodes(setup, job(), "127.0.0.1:1", logs=tmp_path, on_exit=lambda *_: None, states=Path("run/nodes"))
    arguments = nodes._arguments(0, "node-0")
    assert arguments[arguments.index("--state") + 1] == f"{tmp_path}/run/nodes/node-0"


def test_local_nodes_that_end_one_after_the_other_are_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on after a loss, and would find the next one only when its lease is over; each is told once."""
    codes: dict[str, int | None] = {"node-0": 1, "node-1": None, "node-2": None}
    told = queue.SimpleQueue[str]()

    class Template:
        """Its agents end as ``codes`` says."""

        __enter__ = __exit__ = lambda *_: None
        error = lambda _: None  # noqa: E731

        def __init__(self, *_: object) -> None:
            pass

        def start(self, arguments: object, *, log: Path) -> Any:
            """Start an agent, which ends with the first signal."""
            end = lambda *_: codes.update({log.stem: 0})  # noqa: E731
            return SimpleNamespace(poll=lambda: codes[log.stem], send_signal=end, wait=end, close_input=end)

    monkeypatch.setattr(local_nodes, "AgentTemplate", Template)
    setup = LocalSetup(num_nodes=3, num_owners=0, memory_bytes=GIB, threads=1)
    with LocalNodes(setup, job(), "127.0.0.1:1", logs=tmp_path, on_exit=lambda name, _: told.put(name)):
        first = told.get(timeout=WAIT_S)
        codes["node-2"] = 1
        second = told.get(timeout=WAIT_S)
    assert (first, second, told.empty()) == ("node-0", "node-2", True)


def test_exit_error_is_what_the_agent_printed() -> None:
    """The exit code names the kind of error, the last line that begins with error: is the message."""
    error = exit_error("node node-1", DataError.exit_code, "loading\nerror: x.csv has no rows\n", log=LOG)
    assert type(error) is InvalidInputError
    assert str(error) == "node node-1: x.csv has no rows"
    # A signal is named with its remedy; what it printed last is shown only where that tells why
    error = exit_error("node node-1", -signal.SIGKILL, "INFO edge.agent.agent: run r1 begins\n", log=LOG)
    assert type(error) is PeerLostError
    assert str(error).startswith("node node-1 was ended by SIGKILL; the system does so where memory runs out")
    assert str(error).endswith("then repeat or --resume the run")
    error = exit_error("node node-1", -signal.SIGBUS, "INFO edge.agent.agent: run r1 begins\n", log=LOG)
    assert str(error) == "node node-1 was ended by SIGBUS; see run/logs/node-1.log and repeat or --resume the run"
    assert "exit code 70 (boom); see run/logs/" in str(exit_error("node node-1", 70, "Traceback\nboom\n", log=LOG))
