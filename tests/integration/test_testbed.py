"""A testbed on this machine, for real: limits hold, a ring trains in it, and nothing is left of it in any case.

Skipped, with the reason, where the machine can't: without root, network namespaces, shaping or control groups.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.testbed import Board, Layout, Testbed, groups
from deploy.testbed.agents import AgentSetup
from deploy.testbed.capabilities import Capabilities, find_capabilities
from deploy.testbed.cleanup import LEDGERS
from deploy.testbed.network import NAMESPACES
from deploy.testbed.verify import verify
from ringtune.errors import BusyError, DeadlineError, PeerLostError
from tests.support import tiny
from tests.support.processes import source_environment

# Not the default one: a testbed in use stays as it is.
NAME = f"rt{os.getpid()}"
START_S = 120.0
MBIT = 125_000


@pytest.fixture(scope="module")
def here() -> Capabilities:
    """What this machine can do; skips if that is not enough."""
    found = find_capabilities()
    if found.missing:
        pytest.skip(f"no testbed is possible here: {'; '.join(found.missing)}")
    return found


@pytest.fixture(autouse=True)
def nothing_of_it_left(here: Capabilities) -> Iterator[None]:
    """Namespaces, interfaces, control groups and the ledger are as before, whatever the test did."""
    interfaces = sorted(psutil.net_if_addrs())
    yield
    assert left_behind(here) == []
    assert sorted(psutil.net_if_addrs()) == interfaces


def left_behind(here: Capabilities) -> list[str]:
    """Whatever there is of this module's testbed."""
    assert here.mounts is not None
    paths = [*here.mounts.folders(NAME), LEDGERS / f"{NAME}.jsonl", *NAMESPACES.glob(f"{NAME}*")]
    return [str(path) for path in paths if path.exists()]


def board(name: str, **changes: object) -> Board:
    """A small board."""
    values: dict[str, object] = {
        "cpu_cores": 0.3,
        "memory_bytes": 1 << 30,
        "up_bytes_per_s": 100 * MBIT,
        "down_bytes_per_s": 100 * MBIT,
    }
    return Board(name=name, **{**values, **changes})  # type: ignore[arg-type]


def python(code: str) -> list[str]:
    """A command that runs ``code``."""
    return [sys.executable, "-I", "-S", "-c", code]


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_boards_get_what_they_were_given(here: Capabilities, tmp_path: Path) -> None:
    """Shares, both rates of each link, and the way between boards: of a machine that has nothing else to do."""
    fast = board("fast", cpu_cores=0.5, up_bytes_per_s=80 * MBIT, down_bytes_per_s=20 * MBIT)
    slow = board("slow", cpu_cores=0.2, up_bytes_per_s=8 * MBIT, down_bytes_per_s=40 * MBIT)
    with Testbed(Layout(boards=(fast, slow), name=NAME), folder=tmp_path, capabilities=here) as bed:
        measured = verify(bed, duration_s=2.0)
    assert [one.board for one in measured] == ["fast", "slow"]
    for one in measured:
        assert one.cpu_cores == pytest.approx(one.wanted_cores, rel=0.15)
        assert one.up_bytes_per_s == pytest.approx(one.wanted_up_bytes_per_s, rel=0.15)
        assert one.down_bytes_per_s == pytest.approx(one.wanted_down_bytes_per_s, rel=0.15)
        assert one.neighbour_round_trip_s is not None


def test_latency_holds_both_ways(here: Capabilities, tmp_path: Path) -> None:
    """A round trip takes twice the latency, where the kernel has netem."""
    if here.reason("netem"):
        pytest.skip(f"no added latency is possible here: {here.reason('netem')}")
    late = board("late", latency_s=0.02)
    with Testbed(Layout(boards=(late,), name=NAME), folder=tmp_path, capabilities=here) as bed:
        (measured,) = verify(bed, duration_s=1.0)
    assert measured.round_trip_s == pytest.approx(0.04, rel=0.15)
    assert measured.up_bytes_per_s == pytest.approx(measured.wanted_up_bytes_per_s, rel=0.15)


def test_process_of_a_board_sees_its_own_limits(here: Capabilities, tmp_path: Path) -> None:
    """An agent that asks how much memory there is finds the board's, not the machine's."""
    code = "from ringtune.machine.resources import memory_limits; print(memory_limits()[0].limit_bytes)"
    small = board("small", memory_bytes=96 << 20, cpu_cores=0.5)
    with Testbed(Layout(boards=(small,), name=NAME), folder=tmp_path, capabilities=here) as bed:
        running = bed.start("ask", [sys.executable, "-c", code], on="small")
        assert running.wait(START_S) == 0, running.words()
    assert int(running.last_words()) == 96 << 20


def test_process_above_the_memory_limit_is_ended(here: Capabilities, tmp_path: Path) -> None:
    """By the kernel, and the testbed knows; the machine and the other board have room."""
    boards = (board("small", memory_bytes=48 << 20), board("large", memory_bytes=256 << 20))
    take = python("print(len(bytes(1) * (100 << 20)))")
    with Testbed(Layout(boards=boards, name=NAME), folder=tmp_path, capabilities=here) as bed:
        runs = {name: bed.start(f"take-{name}", take, on=name) for name in ("small", "large")}
        codes = {name: run.wait(START_S) for name, run in runs.items()}
        kills = {name: bed.times_out_of_memory(name) for name in runs}
    assert codes == {"small": -signal.SIGKILL, "large": 0}
    assert kills == {"small": 1, "large": 0}


def test_agent_that_does_not_fit_is_named_with_its_limit(here: Capabilities, tmp_path: Path) -> None:
    """Rather than a wait for somebody who will never come."""
    with Testbed(
        Layout(boards=(board("tiny", memory_bytes=16 << 20),), name=NAME), folder=tmp_path, capabilities=here
    ) as bed:
        bed.start_coordinator()
        with pytest.raises(PeerLostError, match=r"board tiny: the kernel ended it at its limit of 16\.0 MiB"):
            bed.start_agents(join_s=START_S)


# ---- commands ------------------------------------------------------------------------------------


def test_command_ends_with_its_own_code_and_in_time(here: Capabilities, tmp_path: Path) -> None:
    """On the hub or on a board, with the variables that it needs."""
    with Testbed(Layout(boards=(board("a"),), name=NAME), folder=tmp_path, capabilities=here) as bed:
        assert bed.run(python("raise SystemExit(7)"), on="a", timeout_s=START_S) == 7
        assert bed.run(python("import os; os.kill(os.getpid(), 9)"), timeout_s=START_S) == 137
        assert bed.run(["no-such-command"], timeout_s=START_S) == 127
        with pytest.raises(DeadlineError, match=r"did not end within 0\.2 s"):
            bed.run(["sleep", "60"], timeout_s=0.2)


def test_second_testbed_of_one_name_is_refused(here: Capabilities, tmp_path: Path) -> None:
    """And the first one stays whole."""
    layout = Layout(boards=(board("a"),), name=NAME)
    with Testbed(layout, folder=tmp_path, capabilities=here) as bed:
        with pytest.raises(BusyError, match="in use by process"), Testbed(layout, folder=tmp_path, capabilities=here):
            pass
        assert bed.run(["true"], on="a", timeout_s=START_S) == 0


def test_namespace_of_somebody_else_is_left_alone(here: Capabilities, tmp_path: Path) -> None:
    """A clash of names ends the building; what was built goes, what was there stays."""
    taken = f"{NAME}-a"
    subprocess.run(["ip", "netns", "add", taken], check=True, timeout=START_S)  # noqa: S603, S607
    try:
        layout = Layout(boards=(board("a"),), name=NAME)
        with (
            pytest.raises(BusyError, match=f"network namespace '{taken}' that no testbed has listed"),
            Testbed(layout, folder=tmp_path, capabilities=here),
        ):
            pass
        assert left_behind(here) == [str(NAMESPACES / taken)]
    finally:
        subprocess.run(["ip", "netns", "del", taken], check=True, timeout=START_S)  # noqa: S603, S607


# ---- the end of a testbed --------------------------------------------------------------------------

FILE = f"""
[testbed]
name = "{NAME}"
[[board]]
name = "a"
cpu_cores = 0.4
memory = "1GiB"
up_mbit_per_s = 100
down_mbit_per_s = 100
"""


def testbed(*words: str) -> subprocess.Popen[str]:
    """``python -m deploy.testbed``."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "deploy.testbed", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=source_environment(),
    )


testbed.__test__ = False  # type: ignore[attr-defined]


def start_and_wait(folder: Path, command: str) -> subprocess.Popen[str]:
    """A testbed of one board whose command under test runs; its shell leaves a file as it begins."""
    (folder / "boards.toml").write_text(FILE)
    begun = folder / "begun"
    shell = f": >{begun}; {command}"
    process = testbed("run", str(folder / "boards.toml"), "--folder", str(folder / "bed"), "--", "sh", "-c", shell)
    deadline_s = time.monotonic() + START_S
    while not begun.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, "the command under test does not begin"
        time.sleep(0.05)
    return process


def test_killed_testbed_is_removed_by_clean(here: Capabilities, tmp_path: Path) -> None:
    """``kill -9`` leaves agents, namespaces and groups; the next one says so, and ``clean`` ends and removes all."""
    assert here.mounts is not None
    process = start_and_wait(tmp_path, "exec sleep 300")
    folders = [path for part in ("hub", "board-a") for path in here.mounts.folders(NAME, part)]
    running = groups.members(folders)
    process.kill()
    process.wait(START_S)
    try:
        assert len(running) >= 3  # coordinator, command and agent
        assert groups.members(folders) == running
        again = testbed("run", str(tmp_path / "boards.toml"), "--", "true")
        output = again.communicate(timeout=START_S)[0]
        assert (again.returncode, "has ended, is still there" in output) == (8, True), output
    finally:
        cleaning = testbed("clean")
        output = cleaning.communicate(timeout=START_S)[0]
        if process.stdout is not None:
            process.stdout.close()
    num_groups = 3 * len(here.mounts.folders(NAME))
    assert f"{NAME}: removed 2 namespaces and {num_groups} groups" in output
    assert not [pid for pid in running if psutil.pid_exists(pid) and not is_zombie(pid)]


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and nobody has asked for its code."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_testbed_leaves_interrupts_to_its_command_and_removes_itself_when_it_is_told_to_end(
    here: Capabilities, tmp_path: Path
) -> None:
    """A command that goes on after Ctrl-C is waited for; SIGTERM goes to the command, whose code is the testbed's."""
    until_go = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; touch {tmp_path}/went; exec sleep 300"
    process = start_and_wait(tmp_path, until_go)
    process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    deadline_s = time.monotonic() + START_S
    while not (tmp_path / "went").exists():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=START_S)[0]
    assert (process.returncode, output.count("error")) == (143, 0), output
    assert left_behind(here) == []


# ---- a ring --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_ring_trains_on_boards(here: Capabilities, tmp_path: Path) -> None:
    """A real run over the shaped links: three agents, each with its share of the rows, one adapter."""
    model = tiny.write_model(tmp_path / "model", num_blocks=4)
    rows, held_out = (
        tiny.write_rows(tmp_path / f"{name}.csv", count, seed=count) for name, count in (("t", 48), ("e", 12))
    )
    (tmp_path / "job.toml").write_text(
        f'[model]\npath = "{model}"\ntask = "sequence-classification"\n'
        "[train]\nmax_steps = 8\nbatch_size = 4\nmicrobatches = 2\nmax_length = 16\nlocal_iterations = 2\n"
        "[unfreeze]\nevery_steps = 2\n[runtime]\nlease_s = 20\n"
    )
    cores = {"a": 0.5, "b": 0.4, "c": 0.3}
    layout = Layout(boards=tuple(board(name, cpu_cores=share) for name, share in cores.items()), name=NAME)
    with Testbed(layout, folder=tmp_path / "bed", capabilities=here) as bed:
        bed.start_coordinator(lease_s=20)
        bed.start_agents(AgentSetup(data=rows, eval_data=held_out))
        command = ["ringtune", "train", str(tmp_path / "job.toml"), "--coordinator", "{coordinator}", "--insecure"]
        assert bed.run([*command, "--out", str(tmp_path / "run")], timeout_s=200) == 0
        assert bed.ended() == []
    report = json.loads((tmp_path / "run/report.json").read_text())
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert report["steps"] == 8
    assert sorted(report["nodes"]) == sorted(cores)
    assert {owner["node"]: owner["train_rows"] for owner in plan["course"]["owners"]} == dict.fromkeys(cores, 16)
    assert (tmp_path / "run/adapter").is_dir()
