"""Tests of ``ringtune.transport.parties``: permissions, parties, places, and join tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.errors import TokenError, TrustError
from ringtune.ids import NODE_NAME
from ringtune.transport.parties import (
    ADMIN,
    ANY_MEMBER,
    COORDINATOR,
    IDENTITY,
    PERMISSIONS,
    ROLES,
    VARIABLE,
    Party,
    Role,
    Token,
    coordinator_trust,
    find_permission,
    find_user_trust,
    make_secret,
    node_party,
    parse_token,
    party_of,
    require_permission,
    require_sender,
    secret_hash,
    user_trust,
)
from ringtune.v1 import control_pb2, ring_pb2, trust_pb2, weights_pb2
from tests.support.cases import cases

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


@cases("call", sorted(calls()))
def test_permissions_of_agents_are_the_coordinators_alone(call: str) -> None:
    """Nobody else may grant, prepare, collect, measure or release; between nodes there are nodes only."""
    service = call.split("/")[1].removeprefix("ringtune.v1.")
    permission = find_permission(call)
    assert (permission is None) == (service == WITHOUT_CERTIFICATE)
    if permission is None:
        return
    roles = permission.roles
    assert roles <= set(ROLES)
    assert (roles == {"coordinator"}) == (service == "Agent")
    if service in ("Ring", "Probe", "Snapshots", "Weights"):
        assert roles == ({"node", "coordinator"} if call.endswith("/Manifest") else {"node"})


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


NAMES = st.from_regex(NODE_NAME, fullmatch=True).filter(lambda name: ".." not in name)


@settings(max_examples=40)
@given(role=st.sampled_from(ROLES), name=NAMES)
def test_parties_come_back_from_their_server_name(role: Role, name: str) -> None:
    """Whatever a node may be called: role and name are read from the certificate as they were written."""
    party = Party(role, name)
    assert party_of([party.server_name]) == party


@settings(max_examples=40)
@given(first=st.tuples(st.sampled_from(ROLES), NAMES), second=st.tuples(st.sampled_from(ROLES), NAMES))
def test_parties_share_no_server_name(first: tuple[Role, str], second: tuple[Role, str]) -> None:
    """A node ``alice.submitter`` is no user ``alice``: two parties never have one name."""
    one, other = Party(*first), Party(*second)
    assert (one.server_name == other.server_name) == (one == other)
    assert ANY_MEMBER not in (one.server_name, other.server_name)


@cases(
    "names",
    [
        [],
        [ANY_MEMBER],
        ["pi"],
        ["pi.ringtune"],
        ["pi.root.ringtune"],
        ["PI.node.ringtune"],
        ["*.node.ringtune"],
        ["a..b.node.ringtune"],
        ["pi.node.ringtune.evil.org"],
        ["pi.node.ringtune\n"],
        ["a.node.ringtune", "b.node.ringtune"],
    ],
)
def test_parties_of_other_names_are_refused(names: list[str]) -> None:
    """A certificate of nobody, of several, or of somebody elsewhere is of no member."""
    with pytest.raises(TrustError):
        party_of(names)


def identity_in(folder: Path) -> Path:
    """A folder with an identity."""
    folder.mkdir(parents=True)
    (folder / IDENTITY).touch()
    return folder


def test_user_joins_where_commands_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the variable names, and nowhere else; before that the error says how to get an identity."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own"))
    assert user_trust() == tmp_path / "own"
    with pytest.raises(TrustError, match=r"has no identity\.pem; .* 'ringtune join'"):
        find_user_trust()
    identity_in(user_trust())
    assert find_user_trust() == tmp_path / "own"


def test_user_without_a_variable_has_its_own_identity_before_the_admins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine of the coordinator its first user's serves, until the user joins."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert find_user_trust() is None
    admin = identity_in(coordinator_trust() / ADMIN)
    assert find_user_trust() == admin
    own = identity_in(user_trust())
    assert find_user_trust() == own != admin


HASH = "0123456789abcdef" * 4


@settings(max_examples=40)
@given(name=NAMES, port=st.integers(0, 65535))
def test_tokens_are_read_as_they_were_written(name: str, port: int) -> None:
    """White space of a file does not count."""
    token = Token(node_party(name), port, HASH, make_secret())
    assert parse_token(f" {token}\n") == token


@cases(
    "damage",
    [
        lambda text: text[:-1],
        lambda text: text + "x",
        lambda text: text.replace("ringtune1", "ringtune2"),
        lambda text: text.replace(":node:", ":coordinator:"),
        lambda text: text.replace(":pi:", ":../pi:"),
        lambda text: text.replace(":pi:", ":p..i:"),
        lambda text: text.replace(":7071:", ":65536:"),
        lambda text: text.replace(HASH, HASH.upper()),
        lambda text: f"{text}\n{text}",
        lambda text: "",
    ],
)
def test_tokens_that_are_damaged_are_refused_unseen(damage: object) -> None:
    """The error does not repeat what was given: it may be nearly a secret."""
    secret = make_secret()
    text = damage(str(Token(node_party("pi"), 7071, HASH, secret)))  # type: ignore[operator]
    with pytest.raises(TokenError) as refused:
        parse_token(text)
    assert secret[:8] not in str(refused.value)


def test_tokens_have_secrets_that_differ() -> None:
    """Every secret is new, and its hash tells nothing of it; nor does what a log or a traceback shows of a token."""
    token = Token(node_party("pi"), 7071, HASH, make_secret())
    assert token.secret not in f"{token!r} {[token]}" and token.secret in str(token)
    secrets = {make_secret() for _ in range(100)}
    assert len(secrets) == len({secret_hash(secret) for secret in secrets}) == 100
    assert min(map(len, secrets)) == 43
