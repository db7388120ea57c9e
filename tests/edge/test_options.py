"""Options of an agent, and what it is started with: refused before anything starts."""

from __future__ import annotations

import fcntl
import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edge.cli import node
from edge.options import (
    AgentOptions,
    advertised_address,
    bind_address,
    check_cuda,
    check_memory,
    check_model,
    check_rows,
    check_state,
    parse_share,
)
from ringtune.errors import CapacityError, ConnectionFailedError, DataError, ModelError, StorageError, UsageError
from ringtune.machine.resources import MemoryLimit
from ringtune.transport import endpoints
from tests.support.tiny import write_model


def options(**changes: Any) -> AgentOptions:
    """Options of a local node."""
    return AgentOptions(**{"coordinator": "127.0.0.1:7000", "name": "a", **changes})


def test_agent_options_other_machines_need_insecure() -> None:
    """Nothing leaves this machine unencrypted by accident; every form of loopback is fine."""
    for option, address in itertools.product(
        ("coordinator", "bind"), ("0.0.0.0:7000", "10.0.0.3:7000", "board.local:7000", "[::]:7000")
    ):
        with pytest.raises(UsageError, match="--insecure"):
            options(**{option: address})
        assert getattr(options(**{option: address}, insecure=True), option) == address
    for address in ("127.0.0.1:0", "localhost:1", "[::1]:7000"):
        assert options(bind=address).bind == address


def test_agent_options_nonsense_is_refused() -> None:
    """With the option named; ``1/4`` is the second of four."""
    for changes in (
        {"name": "Node 1"},
        {"coordinator": "127.0.0.1"},
        {"coordinator": ":7000"},
        {"bind": "127.0.0.1:99999"},
        {"device": "tpu"},
        {"threads": -1},
        {"share": (4, 4)},
    ):
        with pytest.raises(UsageError):
            options(**changes)
    assert parse_share("1/4") == (1, 4)
    for text in ("1", "1/", "a/b", "-1/4"):
        with pytest.raises(UsageError):
            parse_share(text)


def test_agent_options_advertised_address_can_be_reached() -> None:
    """As told; else as bound; else the address on the way to the coordinator."""
    for changes, address in (
        ({}, "127.0.0.1:5"),
        ({"bind": "[::1]:0"}, "[::1]:5"),
        ({"advertise": "board"}, "board:5"),
        ({"advertise": "board:9"}, "board:9"),
        ({"bind": "0.0.0.0:0", "insecure": True}, "127.0.0.1:5"),
        ({"bind": "10.0.0.7:0", "insecure": True}, "10.0.0.7:5"),
    ):
        assert advertised_address(options(**changes), 5) == address


def test_agent_options_bind_is_where_the_coordinator_reaches_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --bind a node of a coordinator on another machine serves at an address that peers can reach."""
    monkeypatch.setattr("edge.options.address_towards", lambda host, port: {"10.0.0.1": "10.0.0.7"}[host])
    far = options(coordinator="10.0.0.1:7000", insecure=True)
    assert bind_address(far) == "10.0.0.7:0"
    assert advertised_address(far, 5) == "10.0.0.7:5"


def test_agent_options_bind_without_a_way_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board whose network is not up yet exits with 3, so that its service starts it again."""

    class NoNetwork(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", NoNetwork)
    monkeypatch.setattr(socket, "if_nameindex", list)
    with pytest.raises(ConnectionFailedError, match=r"no way to 10\.0\.0\.1: Network is unreachable"):
        bind_address(options(coordinator="10.0.0.1:7000", insecure=True))
    assert endpoints.machine_address() == ""


def test_agent_options_refuse_an_address_that_no_peer_reaches() -> None:
    """The coordinator is on another machine: a node that only its own machine reaches would join for nothing."""
    for changes, option in (
        ({"bind": "127.0.0.1:0"}, "--bind"),
        ({"advertise": "localhost"}, "--advertise"),
        ({"bind": "10.0.0.7:0", "advertise": "127.0.0.1:9"}, "--advertise"),
    ):
        with pytest.raises(UsageError, match=f"{option} .*this machine only.*leave {option} out, or give --bind"):
            options(coordinator="10.0.0.1:7000", insecure=True, **changes)
    options(coordinator="10.0.0.1:7000", insecure=True, bind="127.0.0.1:0", advertise="10.0.0.7:9")


def test_own_host_of_a_network_without_a_router_is_that_of_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two boards on one switch have no way to anywhere else; their coordinator still names itself."""
    held = {b"lo": "127.0.0.1", b"eth0": "192.168.1.10"}

    def no_way(host: str, port: int) -> str:
        raise ConnectionFailedError("no way")

    def ioctl(_: object, request: int, name: bytes) -> bytes:
        assert request == 0x8915
        found = held.get(name.rstrip(b"\0"))
        if found is None:
            raise OSError(99, "Cannot assign requested address")
        return bytes(20) + socket.inet_aton(found)

    monkeypatch.setattr(endpoints, "address_towards", no_way)
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "down0"), (3, "eth0")])
    assert endpoints.machine_address() == "192.168.1.10"


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
    with pytest.raises(CapacityError, match=r"is 184 MiB, .* need 192 MiB") as caught:
        check_memory([MemoryLimit(limit_bytes=1 << 30, used_bytes=0), MemoryLimit(limit_bytes=184 << 20, used_bytes=0)])
    assert caught.value.exit_code == 6


def test_start_checks_refuse_a_device_that_is_not_there() -> None:
    """Torch is asked, because a wheel without CUDA sees none whatever the machine has."""
    check_cuda(lambda: True)
    with pytest.raises(UsageError, match="--device cuda, but torch sees no such device here; use --device cpu"):
        check_cuda(lambda: False)


def test_start_checks_refuse_a_folder_of_somebody_else_as_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the node has a certificate there; one that is its own gets the marker."""
    monkeypatch.setattr("edge.agent.process.run_agent", lambda *_, **_more: 0)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "main.tex").write_text("mine", encoding="utf-8")
    given = ["--coordinator", "127.0.0.1:1", "--name", "a", "--state"]
    found = CliRunner().invoke(node.app, [*given, str(tmp_path / "thesis")])
    assert isinstance(found.exception, UsageError) and "it holds main.tex" in str(found.exception)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["main.tex"]
    assert CliRunner().invoke(node.app, [*given, str(tmp_path / "state")]).exit_code == 0
    assert (tmp_path / "state" / ".ringtune-node").is_file()
