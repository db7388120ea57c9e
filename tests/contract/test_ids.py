"""Names of nodes and runs: what may become part of a path or an address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import UsageError
from ringtune.ids import check_node_name, check_run_id, make_run_id, naming_node, node_name_from_host
from tests.support.cases import cases


@cases("name", ["a", "0", "jetson-2", "node.local", "a_b", "x" * 63])
def test_node_name_allows_host_like_names(name: str) -> None:
    """Small letters, digits, dot, dash, underscore."""
    assert check_node_name(name) == name


@cases("name", ["", "A", "-a", ".a", "_a", "a b", "a/b", "../a", "a..b", "a\n", "ä", "x" * 64, "a@b", "a:1", "a\x00"])
def test_node_name_refuses_what_could_leave_a_folder(name: str) -> None:
    """A name is never a path, an address, or a second line in a log."""
    with pytest.raises(UsageError, match="is not allowed; use 1 to 63 small letters"):
        check_node_name(name)


@given(host=st.text())
def test_node_name_from_any_host_is_allowed(host: str) -> None:
    """Whatever the machine is called."""
    assert check_node_name(node_name_from_host(host))


@cases(("host", "name"), [("Jetson-2.local", "jetson-2"), ("my host", "my-host"), ("", "node"), ("ÄÖ", "node")])
def test_node_name_from_host_stays_recognisable(host: str, name: str) -> None:
    """The first part of the host name, in small letters."""
    assert node_name_from_host(host) == name


def test_run_id_sorts_by_time_and_passes_its_check() -> None:
    """Start time in UTC and eight random digits."""
    run_id = make_run_id(1_767_323_045.9, bytes.fromhex("0a1b2c3d"))
    assert run_id == "r20260102-030405-0a1b2c3d"
    assert check_run_id(run_id) == run_id
    assert run_id < make_run_id(1_767_323_046.0, bytes(4))
    with pytest.raises(ValueError, match="needs four random bytes"):  # two runs in one second
        make_run_id(0, b"abc")


@cases("run_id", ["", "r2026", "../r20260102-030405-0a1b2c3d", "r20260102-030405-0A1B2C3D"])
def test_run_id_refuses_other_forms(run_id: str) -> None:
    """What arrives as a run id may become a folder."""
    with pytest.raises(UsageError, match="is not of the form"):
        check_run_id(run_id)


@cases(
    ("message", "named"),
    [
        ("can't read /data/pi/train.csv", "node pi: can't read /data/pi/train.csv"),
        ("node pi-3 does not answer", "node pi: node pi-3 does not answer"),
        ("node pi.local is lost", "node pi: node pi.local is lost"),
        ("happiness", "node pi: happiness"),
        ("node pi needs 3 MiB", "node pi needs 3 MiB"),
        ("no data at node pi. Give --data", "no data at node pi. Give --data"),
        ("it is node pi", "it is node pi"),
    ],
)
def test_naming_node_adds_the_name_unless_the_message_says_it(message: str, named: str) -> None:
    """A path or another node's name that merely contains the letters does not name the node."""
    assert naming_node("pi", message) == named
    assert naming_node("pi", named) == named
