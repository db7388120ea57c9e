"""What a failed call to a node means."""

from __future__ import annotations

import pytest

from coordinator.drive.agent_calls import node_error
from ringtune.errors import DataError, DeadlineError, PeerLostError
from ringtune.rpc.statuses import status_of_error


@pytest.mark.parametrize("status", ["UNAVAILABLE", "DEADLINE_EXCEEDED"])
def test_node_error_of_silence_is_a_lost_node(status: str) -> None:
    """If the node itself said nothing, it is lost; the name and address are in the message."""
    error = node_error(status, "socket closed", node="pi", address="10.0.0.2:1")
    assert type(error) is PeerLostError
    assert "node pi at 10.0.0.2:1" in str(error)


def test_node_error_keeps_what_the_node_said() -> None:
    """The node's own error keeps its class, and its name is added if it is missing."""
    said = status_of_error(DataError("train.csv has no rows"))
    error = node_error(said.name, said.details, node="pi", address="x:1")
    assert type(error) is DataError
    assert str(error) == "node pi: train.csv has no rows"
    waited = status_of_error(DeadlineError("node pi waited for b"))
    assert type(node_error(waited.name, waited.details, node="pi", address="x:1")) is DeadlineError


def test_node_error_names_its_node_though_a_path_has_the_same_letters() -> None:
    """A path that contains the node's name does not say which node it is."""
    said = status_of_error(DataError("/data/pi/train.csv has no rows"))
    assert str(node_error(said.name, said.details, node="pi", address="x:1")).startswith("node pi: ")
