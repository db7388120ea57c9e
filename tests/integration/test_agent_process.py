"""The agent's process from outside: start, refusals, exit codes, the end of its parent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.server.server import CoordinatorServer
from tests.support.cluster import START_S, free_port
from tests.support.processes import source_environment


def agent(*options: str) -> subprocess.Popen[str]:
    """An agent with piped input and output."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "edge", *options],
        env=source_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*options: str) -> tuple[int, str]:
    """Exit code and standard error of an agent that ends by itself."""
    with agent(*options) as process:
        _, errors = process.communicate(timeout=START_S)
    return process.returncode, errors


def test_process_without_a_coordinator_ends_with_3() -> None:
    """Nobody listens: one line that names the address, and the exit code of a failed connection."""
    address = f"127.0.0.1:{free_port()}"
    code, errors = run("--coordinator", address, "--name", "a", "--join-s", "0.2")
    assert code == 3
    assert address in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--coordinator", "10.0.0.1:7000", "--name", "a"), "--insecure"),
        (("--coordinator", "127.0.0.1:7000", "--name", "A b"), "node name"),
        (("--coordinator", "127.0.0.1:7000", "--memory", "much"), "not a size"),
        (("--coordinator", "127.0.0.1:7000", "--nonsense"), "nonsense"),
    ],
)
def test_process_refuses_options_with_2(options: tuple[str, ...], word: str) -> None:
    """What makes no sense on the command line is told without a traceback."""
    code, errors = run(*options)
    assert code == 2
    assert word in errors
    assert "Traceback" not in errors


def test_process_busy_port_ends_with_3() -> None:
    """A port that another server has is not shared silently."""
    with CoordinatorServer("127.0.0.1:0", lease_s=3.0) as server:
        code, errors = run("--coordinator", server.address, "--name", "a", "--bind", server.address)
    assert code == 3
    assert server.address in errors


def test_process_joins_before_it_loads_torch_and_ends_with_its_parent(tmp_path: Path) -> None:
    """Membership does not wait for torch; a second node of that name is refused with 8; without its parent it ends."""
    # a long lease: this is no test of it, and loading torch holds heartbeats up on a busy machine
    with CoordinatorServer("127.0.0.1:0", lease_s=60.0) as server:
        options = ("--coordinator", server.address, "--name", "a", "--memory", "64MiB", "--watch-parent")
        with agent(*options) as process:
            deadline_s = time.monotonic() + START_S
            loaded = Path(f"/proc/{process.pid}/maps")
            while True:
                assert time.monotonic() < deadline_s
                assert process.poll() is None
                has_torch = loaded.exists() and "libtorch_cpu" in loaded.read_text()
                if server.coordinator.living():
                    break  # from now on it may load
                assert not has_torch
                time.sleep(0.01)
            (member,) = server.coordinator.living()
            assert (member.node, member.memory_bytes, member.has_data) == ("a", 64 << 20, False)
            code, errors = run(*options[:4], "--join-s", "0.2")  # one attempt; its answer may take as long as it takes
            assert code == 8, errors
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(START_S) == 0
        assert server.coordinator.living() == ()
