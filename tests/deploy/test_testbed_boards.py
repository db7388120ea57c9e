"""The testbed as values: its file, its command lines, its groups. Nothing here needs root."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.testbed import agents, groups, network, processes, verify
from deploy.testbed.boards import Board, Layout, load_layout, parse_layout
from deploy.testbed.capabilities import Capabilities, Capability, MissingCapability, describe_capabilities
from deploy.testbed.groups import GroupMounts
from deploy.testbed.network import Shaper
from ringtune.errors import CapacityError, InvalidInputError, RingTuneError
from tests.support.cases import cases

EXAMPLE = Path(__file__).parents[2] / "deploy/testbed/boards.toml"
TEXT = """
[testbed]
name = "bed"
cpu_period_ms = 20
[[board]]
name = "a"
cpu_cores = 0.5
memory = "64MiB"
up_mbit_per_s = 100
down_mbit_per_s = 40
latency_ms = 2
data = "a.csv"
[[board]]
name = "b"
cpu_cores = 0.25
memory = "32MiB"
up_mbit_per_s = 8
down_mbit_per_s = 8
"""
A = Board(name="a", cpu_cores=0.5, memory_bytes=64 << 20, up_bytes_per_s=12.5e6, down_bytes_per_s=5e6)
B = Board(name="b", cpu_cores=0.25, memory_bytes=32 << 20, up_bytes_per_s=1e6, down_bytes_per_s=1e6)
AB = Layout(boards=(A, B), name="bed")
TBF = Shaper(rate="tbf", has_delay=True)
ONE = GroupMounts(version=1, cpu=Path("/c/cpu"), memory=Path("/c/memory"))
TWO = GroupMounts(version=2, cpu=Path("/c"), memory=Path("/c"))


def parse(text: str) -> Layout:
    """A layout from a text."""
    return parse_layout(text, folder=Path("/boards"), source="boards.toml")


# ---- the file ------------------------------------------------------------------------------------


def test_layout_has_what_the_file_says() -> None:
    """Every key ends in its value, in base units."""
    a = replace(A, latency_s=0.002, data=Path("/boards/a.csv"))
    assert parse(TEXT) == Layout(boards=(a, B), name="bed", cpu_period_s=0.02)


def test_example_has_four_unequal_boards_for_two_cores() -> None:
    """The example leaves room for coordinator and command on two cores, and its boards differ."""
    layout = load_layout(EXAMPLE)
    assert len({board.cpu_cores for board in layout.boards}) == 4
    assert layout.cpu_cores <= 1.6
    assert layout.check_fits(num_cores=2, free_bytes=16 << 30) == []


@cases(
    ("old", "new", "message"),
    [
        ('name = "b"', 'name = "a"', "two boards are called 'a'"),
        ('name = "b"', 'name = "B!"', "node name 'B!' is not allowed"),
        ("up_mbit_per_s = 100", "up_mbit_per_s = 0", "board a: up_mbit_per_s is 0, it has to be greater than 0"),
        ("down_mbit_per_s = 40", "down_mbit_per_s = -3", "board a: down_mbit_per_s is -3"),
        ("cpu_cores = 0.5", "cpu_cores = 0.0", "board a: cpu_cores is 0"),
        ("cpu_cores = 0.5", 'cpu_cores = "half"', "board[0].cpu_cores has to be a number"),
        ("cpu_cores = 0.5", "cpu_cores = 0.04", "less than the kernel's 1 ms; set testbed.cpu_period_ms to 25"),
        ('memory = "64MiB"', 'memory = "much"', "board a: memory: 'much' is not a size"),
        ('memory = "64MiB"', 'memory = "0MiB"', "board a: memory is 0"),
        ("latency_ms = 2", "latency_ms = -2", "board a: latency_ms is -2"),
        ("latency_ms = 2", "latncy_ms = 2", "unknown key 'board[0].latncy_ms'; did you mean 'latency_ms'?"),
        ("up_mbit_per_s = 100\n", "", "board[0].up_mbit_per_s is missing"),
        ('name = "bed"', 'name = "../bed"', "testbed.name '../bed'"),
        ("cpu_period_ms = 20", "cpu_period_ms = 2000", "cpu_period_ms is 2000"),
        ("[[board]]", "[[board]", "not valid TOML"),
    ],
)
def test_file_with_a_fault_is_refused_with_its_place(old: str, new: str, message: str) -> None:
    """The message names the file, the board and the key, and the bad value."""
    assert old in TEXT
    with pytest.raises(InvalidInputError) as caught:
        parse(TEXT.replace(old, new, 1))
    assert str(caught.value).startswith("boards.toml: ")
    assert message in str(caught.value)


def test_file_without_boards_is_refused() -> None:
    """Neither no list nor an empty one."""
    with pytest.raises(InvalidInputError, match="board is missing"):
        parse("")
    with pytest.raises(InvalidInputError, match="there are 0 boards"):
        parse("board = []")


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(InvalidInputError, match=r"none\.toml"):
        load_layout(tmp_path / "none.toml")


def test_more_cores_than_there_are_is_an_error_with_both_numbers() -> None:
    """No share would hold."""
    with pytest.raises(CapacityError, match=r"ask for 0\.75 cores together, but this machine has 0"):
        AB.check_fits(num_cores=0, free_bytes=1 << 30)


def test_little_room_is_a_note_with_both_numbers() -> None:
    """Nearly all cores, or more memory than is free."""
    assert AB.check_fits(num_cores=1, free_bytes=1 << 20) == [
        "the boards may take 96.0 MiB together, but 1.0 MiB are free here: the machine may run out before a board "
        "reaches its limit"
    ]
    tight = replace(AB, boards=(replace(A, cpu_cores=0.9),))
    assert "0.9 of 1 cores" in tight.check_fits(num_cores=1, free_bytes=1 << 30)[0]


# ---- the network ---------------------------------------------------------------------------------


def test_each_link_is_shaped_at_both_ends() -> None:
    """The board's own interface holds the up rate, the bridge's port the down rate."""
    shaping = [" ".join(command) for command in network.build_commands(AB, TBF) if command[0] == "tc"]
    assert shaping == [
        "tc -n bed-a qdisc add dev eth0 root handle 10: tbf rate 100000000bit burst 50000b latency 50ms",
        "tc -n bed.hub qdisc add dev p0 root handle 10: tbf rate 40000000bit burst 20000b latency 50ms",
        "tc -n bed-b qdisc add dev eth0 root handle 10: tbf rate 8000000bit burst 16384b latency 50ms",
        "tc -n bed.hub qdisc add dev p1 root handle 10: tbf rate 8000000bit burst 16384b latency 50ms",
    ]


def test_every_board_has_an_address_of_its_own() -> None:
    """Beside the hub's."""
    assert [network.address(AB, board) for board in AB.boards] == ["10.117.0.2", "10.117.0.3"]
    built = [command for command in network.build_commands(AB, TBF) if "addr" in command]
    assert [command[5] for command in built] == ["10.117.0.1/24", "10.117.0.2/24", "10.117.0.3/24"]


def test_links_are_made_inside_the_namespaces() -> None:
    """No command touches the machine's own network."""
    commands = network.build_commands(AB, TBF)
    assert {command[:2] for command in commands if command[0] != "nsenter"} == {("ip", "-n"), ("tc", "-n")}
    entered = [command[1] for command in commands if command[0] == "nsenter"]
    assert entered == [f"--net=/run/netns/{name}" for name in (AB.hub, *map(AB.namespace, AB.boards))]


def test_boards_have_the_congestion_control_of_boards() -> None:
    """Whatever this machine has: streams that come and go share a slow link otherwise under its bbr."""
    entered = [command for command in network.build_commands(AB, TBF) if command[0] == "nsenter"]
    assert {command[-1] for command in entered} == {"echo reno > /proc/sys/net/ipv4/tcp_congestion_control"}


def test_latency_comes_before_the_rate() -> None:
    """As tc-netem(8) has it: the delay at the root, the rate as its child."""
    delay, rate = network.shaping_commands("n", "eth0", 1e6, 0.005, TBF)
    assert " ".join(delay).endswith("root handle 1: netem delay 5000us limit 1036")
    assert " ".join(rate).endswith("parent 1:1 handle 10: tbf rate 8000000bit burst 16384b latency 50ms")


def test_htb_stands_in_for_tbf() -> None:
    """A class of that rate, with a bounded queue."""
    commands = network.shaping_commands("n", "eth0", 1e6, 0.0, Shaper(rate="htb", has_delay=False))
    assert [command[3:7] for command in commands] == [
        ("qdisc", "add", "dev", "eth0"),
        ("class", "add", "dev", "eth0"),
        ("qdisc", "add", "dev", "eth0"),
    ]
    assert "8000000bit" in commands[1]
    assert commands[2][-3:] == ("bfifo", "limit", "50000")


# ---- groups --------------------------------------------------------------------------------------


def test_groups_of_version_1_have_the_limits() -> None:
    """Period before quota, since the kernel checks one against the other; the burst after both."""
    written = [(str(one.path), one.text) for one in groups.board_settings(ONE, AB, B)]
    assert written == [
        ("/c/cpu/bed/board-b/cpu.cfs_period_us", "10000"),
        ("/c/cpu/bed/board-b/cpu.cfs_quota_us", "2500"),
        ("/c/cpu/bed/board-b/cpu.cfs_burst_us", "2500"),
        ("/c/memory/bed/board-b/memory.limit_in_bytes", f"{32 << 20}"),
        ("/c/memory/bed/board-b/memory.memsw.limit_in_bytes", f"{32 << 20}"),
    ]
    assert ONE.folders("bed", "hub") == (Path("/c/cpu/bed/hub"), Path("/c/memory/bed/hub"))


def test_groups_of_version_2_have_the_limits() -> None:
    """One folder, with both controllers handed down."""
    written = [(str(one.path), one.text) for one in groups.board_settings(TWO, AB, B)]
    assert written == [
        ("/c/bed/board-b/cpu.max", "2500 10000"),
        ("/c/bed/board-b/cpu.max.burst", "2500"),
        ("/c/bed/board-b/memory.max", f"{32 << 20}"),
        ("/c/bed/board-b/memory.swap.max", "0"),
    ]
    assert [one.text for one in groups.bed_settings(TWO, "bed")] == ["10000", "+cpu +memory"]
    assert TWO.folders("bed", "hub") == (Path("/c/bed/hub"),)


def test_limit_that_is_raised_is_raised_for_memory_with_swap_first() -> None:
    """Both together may never be less than memory alone, which the kernel checks at each write."""
    settings = groups.memory_settings(ONE, Path("/c/memory/b"), 64 << 20)
    assert [one.path.name for one in reversed(settings)] == ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"]


@cases(
    ("version", "files"),
    [
        (
            1,
            {
                "memory.usage_in_bytes": "200\n",
                "memory.kmem.usage_in_bytes": "70\n",
                "memory.stat": "cache 9\nmapped_file 8\ntotal_mapped_file 50\n",
            },
        ),
        (2, {"memory.current": "200\n", "memory.stat": "anon 1\nkernel 70\nfile_mapped 50\n"}),
    ],
)
def test_use_of_a_group_is_read_in_either_version(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    """All of it, what the kernel keeps for its processes, and the files' pages that are charged to it."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    mounts = groups.GroupMounts(version=version, cpu=tmp_path, memory=tmp_path)
    assert groups.memory_use(mounts) == groups.GroupUse(all_bytes=200, kernel_bytes=70, mapped_bytes=50)


def test_mounts_are_found_in_either_version() -> None:
    """Version 2 only if it has both controllers."""
    old = "cgroup /x/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\ncgroup /x/memory cgroup rw,memory 0 0\n"
    new = "cgroup2 /x/unified cgroup2 rw 0 0\n"
    one = GroupMounts(version=1, cpu=Path("/x/cpu,cpuacct"), memory=Path("/x/memory"))
    two = GroupMounts(version=2, cpu=Path("/x/unified"), memory=Path("/x/unified"))
    assert groups.find_mounts(old + new, controllers="hugetlb") == one
    assert groups.find_mounts(new, controllers="cpuset cpu io memory") == two
    assert groups.find_mounts(new, controllers="cpu") == "no control groups with memory are mounted"


def test_setting_that_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    """With file and value; one that may be missing is left out."""
    groups.apply([groups.Setting(path=tmp_path / "none", text="1", is_optional=True)])
    with pytest.raises(RingTuneError, match=r"can't write '7' to .*: Is a directory"):
        groups.apply([groups.Setting(path=tmp_path, text="7")])


def test_process_joins_its_groups_before_it_becomes_the_command(tmp_path: Path) -> None:
    """The number that is written is that of the command itself."""
    command = processes.inside([tmp_path], "ns", ["echo"])
    assert command[-4:] == ("nsenter", "--net=/run/netns/ns", "--", "echo")
    shell = [*command[:-4], sys.executable, "-c", "import os; print(os.getpid())"]
    done = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=30)  # noqa: S603
    assert (tmp_path / "cgroup.procs").read_text() == done.stdout


def test_process_that_cannot_join_does_not_run(tmp_path: Path) -> None:
    """Rather no board than one without limits."""
    command = [*processes.inside([tmp_path / "none"], "ns", [])[:-3], "touch", str(tmp_path / "ran")]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)  # noqa: S603
    assert done.returncode == 125
    assert not (tmp_path / "ran").exists()


# ---- RingTune's processes ------------------------------------------------------------------------


def agent(layout: Layout, board: Board, setup: agents.AgentSetup) -> str:
    """The command line of an agent, from its first option."""
    command = agents.agent_command(layout, board, setup, coordinator="h:1", folder=Path("/f"), join_s=60)
    return " ".join(command[command.index("--coordinator") :])


def test_agent_serves_at_the_address_of_its_board() -> None:
    """So that the others reach it; its state and cache are its own."""
    assert agent(AB, B, agents.AgentSetup(model=Path("/m"), options=("--device", "cpu"))) == (
        "--coordinator h:1 --name b --bind 10.117.0.3:7071 --insecure --join-s 60 --threads 1 "
        "--state /f/state/b --cache /f/cache/b --model /m --device cpu"
    )


def test_agents_share_the_rows_unless_they_have_their_own() -> None:
    """A board with rows of its own takes no share of the others'."""
    own = replace(AB, boards=(A, replace(B, data=Path("/b.csv"), eval_data=Path("/be.csv")), replace(B, name="c")))
    setup = agents.AgentSetup(data=Path("/all.csv"), eval_data=Path("/e.csv"))
    rows = [agent(own, board, setup).split(" --data ")[1] for board in own.boards]
    shared = [agent(own, board, setup).partition(" --cache ")[2].partition(" ")[2] for board in own.boards]
    assert rows == [
        "/all.csv --share 0/2 --eval-data /e.csv",
        "/b.csv --eval-data /be.csv",
        "/all.csv --share 1/2 --eval-data /e.csv",
    ]
    assert all(text.startswith("--data ") for text in shared)


def test_command_gets_the_address_in_its_words_and_its_environment() -> None:
    """Both ways."""
    assert agents.fill_in(["x", "at={coordinator}"], "h:1") == ("x", "at=h:1")
    found = agents.environment({"PATH": "/bin", "HOME": "/h"}, coordinator="h:1")
    assert found["RINGTUNE_COORDINATOR"] == "h:1"
    assert found["HOME"] == "/h"
    assert found["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/bin"


# ---- what is missing -----------------------------------------------------------------------------


def capabilities(**reasons: str) -> Capabilities:
    """A machine that lacks what is given."""
    optional = {"tbf", "htb", "netem"}
    names = ("root", "namespaces", "bridge", "tbf", "htb", "netem", "groups")
    found = tuple(
        Capability(name=name, use="", reason=reasons.get(name, ""), is_needed=name not in optional) for name in names
    )
    return Capabilities(found=found, mounts=None if "groups" in reasons else ONE)


def test_missing_capability_is_named_with_its_reason() -> None:
    """What every testbed needs."""
    with pytest.raises(MissingCapability, match=r"^root: the user is not root$"):
        capabilities(root="the user is not root", groups="the user is not root").choose(AB)
    with pytest.raises(MissingCapability, match=r"^bridge: unknown; groups: none$"):
        capabilities(bridge="unknown", groups="none").choose(AB)
    with pytest.raises(MissingCapability, match="tbf and htb: unknown"):
        capabilities(tbf="unknown", htb="unknown").choose(AB)


def test_latency_needs_netem_and_nothing_else_does() -> None:
    """Only a layout that asks for it is refused."""
    without = capabilities(netem="unknown")
    assert without.choose(AB) == (ONE, Shaper(rate="tbf", has_delay=False))
    with pytest.raises(MissingCapability, match=r"latency_ms of b needs netem: unknown; set it to 0"):
        without.choose(replace(AB, boards=(A, replace(B, latency_s=0.001))))


def test_htb_is_taken_where_tbf_is_missing() -> None:
    """One of them is enough."""
    assert capabilities(tbf="unknown").choose(AB)[1] == Shaper(rate="htb", has_delay=True)


def test_check_says_whether_a_testbed_is_possible() -> None:
    """A line each; what may be missing does not fail it."""
    lines: list[str] = []
    assert describe_capabilities(capabilities(netem="unknown"), write=lines.append)
    assert [line[:4] for line in lines] == ["PASS", "PASS", "PASS", "PASS", "PASS", "LACK", "PASS"]
    assert not describe_capabilities(capabilities(groups="none"), write=lines.append)
    assert lines[-1] == "no testbed is possible here: groups: none"


# ---- verify --------------------------------------------------------------------------------------

AS_WANTED = verify.BoardCheck(
    board="a",
    wanted_cores=0.5,
    cpu_cores=0.49,
    wanted_up_bytes_per_s=12e6,
    up_bytes_per_s=11.9e6,
    wanted_down_bytes_per_s=5e6,
    down_bytes_per_s=5.1e6,
    wanted_round_trip_s=0.01,
    round_trip_s=0.0104,
    neighbour_round_trip_s=None,
)


def test_verify_names_what_is_not_as_wanted() -> None:
    """With both numbers; small differences are none."""
    assert AS_WANTED.deviations() == []
    slow = replace(AS_WANTED, cpu_cores=0.4, up_bytes_per_s=80e6, round_trip_s=0.001)
    assert slow.deviations() == [
        "board a: share is 0.400 cores, wanted are 0.500, more than 5% apart",
        "board a: up rate is 80.000 MB/s, wanted are 12.000, more than 5% apart",
        "board a: a round trip takes 1.00 ms, wanted are 10 ms",
    ]


def test_verify_shows_wanted_beside_measured() -> None:
    """A line a board."""
    assert verify.table([AS_WANTED])[2].split() == [
        *("a", "0.500", "0.490", "12.00", "11.90", "5.00", "5.10"),
        *("10", "ms", "10", "ms", "-"),
    ]
