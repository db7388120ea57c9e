"""Names in certificates: one form for each role, and nothing else is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtune.errors import TrustError, UsageError
from ringtune.ids import NODE_NAME
from ringtune.trust.parties import ANY_MEMBER, COORDINATOR, ROLES, Party, Role, node_party, party_of

NAMES = st.from_regex(NODE_NAME, fullmatch=True).filter(lambda name: ".." not in name)


@given(role=st.sampled_from(ROLES), name=NAMES)
def test_parties_come_back_from_their_server_name(role: Role, name: str) -> None:
    """Whatever a node may be called: role and name are read from the certificate as they were written."""
    party = Party(role, name)
    assert party_of([party.server_name]) == party


@given(first=st.tuples(st.sampled_from(ROLES), NAMES), second=st.tuples(st.sampled_from(ROLES), NAMES))
def test_parties_share_no_server_name(first: tuple[Role, str], second: tuple[Role, str]) -> None:
    """A node ``alice.submitter`` is no user ``alice``: two parties never have one name."""
    one, other = Party(*first), Party(*second)
    assert (one.server_name == other.server_name) == (one == other)
    assert ANY_MEMBER not in (one.server_name, other.server_name)


@pytest.mark.parametrize(
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


def test_parties_have_allowed_names_only() -> None:
    """What may be no node's name may be no party's."""
    with pytest.raises(UsageError):
        node_party("../etc")


def test_parties_that_serve() -> None:
    """Nobody connects to a submitter."""
    assert COORDINATOR.serves
    assert node_party("pi").serves
    assert not Party("submitter", "alice").serves
