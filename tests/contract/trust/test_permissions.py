"""Who may call what: every call of the wire has its row, and only the right roles are in it."""

from __future__ import annotations

import pytest

from ringtune.errors import TrustError
from ringtune.trust.parties import COORDINATOR, ROLES, Party, node_party
from ringtune.trust.permissions import PERMISSIONS, permission_of, require_permission, require_sender
from ringtune.v1 import control_pb2, ring_pb2, trust_pb2, weights_pb2

WITHOUT_CERTIFICATE = "Joining"
USER = Party("submitter", "alice")
PI = node_party("pi")


def calls() -> dict[str, str]:
    """Every call of the wire as gRPC names it, with the name of its request."""
    found = {}
    for module in (control_pb2, ring_pb2, trust_pb2, weights_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found[f"/{service.full_name}/{method.name}"] = method.input_type.name
    return found


def test_permissions_are_of_every_call_and_no_other() -> None:
    """A new call has to say who may make it; the service for strangers stands alone."""
    rows = {f"/ringtune.v1.{service}/{call}" for service, found in PERMISSIONS.items() for call in found}
    assert rows == {call for call in calls() if f".{WITHOUT_CERTIFICATE}/" not in call}


def test_permissions_name_fields_that_requests_have() -> None:
    """A sender is looked up in a field that is there; and whatever names its node has to be that node."""
    messages = control_pb2.DESCRIPTOR.message_types_by_name
    for service in ("Coordinator",):
        for call, permission in PERMISSIONS[service].items():
            request = messages[calls()[f"/ringtune.v1.{service}/{call}"]]
            assert ("node" in request.fields_by_name) == (permission.sender == "node"), call


@pytest.mark.parametrize("call", sorted(calls()))
def test_permissions_of_agents_are_the_coordinators_alone(call: str) -> None:
    """Nobody else may grant, prepare, collect, measure or release; between nodes there are nodes only."""
    service = call.split("/")[1].removeprefix("ringtune.v1.")
    if service == WITHOUT_CERTIFICATE:
        with pytest.raises(TrustError):
            permission_of(call)
        return
    roles = permission_of(call).roles
    assert roles <= set(ROLES)
    assert (roles == {"coordinator"}) == (service == "Agent")
    if service in ("Ring", "Probe", "Snapshots", "Weights"):
        assert roles == {"node"}


def test_permissions_refuse_with_both_names() -> None:
    """The one who is refused learns who may."""
    require_permission(COORDINATOR, "/ringtune.v1.Agent/Grant")
    for caller in (USER, PI):
        with pytest.raises(TrustError, match=rf"{caller} may not call Agent/Grant, only a coordinator may"):
            require_permission(caller, "/ringtune.v1.Agent/Grant")
    for unknown in ("/ringtune.v1.Agent/Format", "/evil.Agent/Grant", "Grant", ""):
        with pytest.raises(TrustError):
            require_permission(COORDINATOR, unknown)


def test_permissions_let_nobody_speak_as_another() -> None:
    """Only the node itself, and in plain text nobody knows."""
    require_sender(PI, "pi")
    require_sender(None, "pi")
    for caller in (node_party("jetson"), Party("submitter", "pi"), COORDINATOR):
        with pytest.raises(TrustError, match="speaks as node 'pi'"):
            require_sender(caller, "pi")
