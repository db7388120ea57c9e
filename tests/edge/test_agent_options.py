"""Options of an agent: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge.agent_options import AgentOptions, advertised_address, parse_share
from ringtune.errors import DataError, UsageError


def options(**changes: Any) -> AgentOptions:
    """Options of a local node."""
    return AgentOptions(**{"coordinator": "127.0.0.1:7000", "name": "a", **changes})


@pytest.mark.parametrize("option", ["coordinator", "bind"])
@pytest.mark.parametrize("address", ["0.0.0.0:7000", "10.0.0.3:7000", "board.local:7000", "[::]:7000"])
def test_agent_options_other_machines_need_insecure(option: str, address: str) -> None:
    """Nothing leaves this machine unencrypted by accident."""
    with pytest.raises(UsageError, match="--insecure"):
        options(**{option: address})
    assert getattr(options(**{option: address}, insecure=True), option) == address


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:1", "[::1]:7000"])
def test_agent_options_this_machine_needs_nothing(address: str) -> None:
    """Every form of loopback is fine."""
    assert options(bind=address).bind == address


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Node 1"},
        {"coordinator": "127.0.0.1"},
        {"coordinator": ":7000"},
        {"bind": "127.0.0.1:99999"},
        {"device": "tpu"},
        {"threads": -1},
        {"share": (4, 4)},
    ],
)
def test_agent_options_nonsense_is_refused(changes: dict[str, Any]) -> None:
    """With the option named."""
    with pytest.raises(UsageError):
        options(**changes)


def test_agent_options_rows_that_are_not_there_are_named(tmp_path: Path) -> None:
    """A mistyped path of rows is told with its option, before the node joins anything."""
    (tmp_path / "here.csv").write_text("text,label\n", encoding="utf-8")
    options(data=tmp_path / "here.csv", eval_data=tmp_path).check_rows()
    with pytest.raises(DataError, match=r"--data .*away\.csv is not there"):
        options(data=tmp_path / "away.csv").check_rows()
    with pytest.raises(DataError, match=r"--eval-data .*away\.csv is not there"):
        options(data=tmp_path / "here.csv", eval_data=tmp_path / "away.csv").check_rows()


def test_agent_options_share_reads_index_and_count() -> None:
    """``1/4`` is the second of four."""
    assert parse_share("1/4") == (1, 4)
    for text in ("1", "1/", "a/b", "-1/4"):
        with pytest.raises(UsageError):
            parse_share(text)


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, "127.0.0.1:5"),
        ({"bind": "[::1]:0"}, "[::1]:5"),
        ({"advertise": "board"}, "board:5"),
        ({"advertise": "board:9"}, "board:9"),
        ({"bind": "0.0.0.0:0", "insecure": True}, "127.0.0.1:5"),
    ],
)
def test_agent_options_advertised_address_can_be_reached(changes: dict[str, Any], address: str) -> None:
    """As told; else as bound; else the address on the way to the coordinator."""
    assert advertised_address(options(**changes), 5) == address
