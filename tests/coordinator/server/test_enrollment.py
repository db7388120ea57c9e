"""Joining over a real connection: the token is shown to the right coordinator only, and gives one certificate."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator.server.certificate_authority import Authority, TrustKeeper, init_trust, make_token
from coordinator.server.server import CoordinatorServer
from ringtune.errors import ConnectionFailedError, TokenError, TrustError
from ringtune.transport.channels import Server, open_channel
from ringtune.transport.enrollment import join, renew, renew_if_due
from ringtune.transport.identity import read_certificate, read_identity, write_identity
from ringtune.transport.parties import COORDINATOR, INVALID, Party, Token, node_party, parse_token
from ringtune.transport.speaker import Speaker, speaking_as
from ringtune.v1 import trust_pb2, trust_pb2_grpc
from tests.support.failing_calls import DroppedCallError
from tests.support.trust_parts import DAY_S

HOUR_S = 3600.0
PI = node_party("pi")
ALICE = Party("submitter", "alice")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[TrustKeeper, str]]:
    """A coordinator with a trust folder, and its address."""
    init_trust(folder, time.time())
    keeper = TrustKeeper(folder)
    with speaking_as(keeper.speaker):
        server = CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper)
    with server:
        yield keeper, server.address


def invited(folder: Path, party: Party = PI, ttl_s: float = HOUR_S) -> Token:
    """A token of a running coordinator."""
    return make_token(folder, party, time.time() + ttl_s)


@contextlib.contextmanager
def membership(address: str, speaker: Speaker) -> Iterator[trust_pb2_grpc.MembershipStub]:
    """The calls of somebody who has joined."""
    with speaking_as(speaker), open_channel(address, peer=COORDINATOR) as channel:
        yield trust_pb2_grpc.MembershipStub(channel)


def test_joining_gives_an_identity_of_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the disk, is the token's party, and holds; a proxy of this machine has no say in it."""
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with running(tmp_path / "trust") as (_, address):
        identity = join(address, invited(tmp_path / "trust"), tmp_path / "node")
    assert read_identity(tmp_path / "node", time.time()) == identity
    assert identity.party == PI


@pytest.mark.parametrize("kind", ["wrong", "used", "expired"])
def test_joining_with_a_bad_token_has_one_answer(tmp_path: Path, kind: str) -> None:
    """Wrong, used and expired read alike; nothing is written, and the token is in no log."""
    trust = tmp_path / "trust"
    with running(trust) as (_, address):
        token = invited(trust, ttl_s=-1.0 if kind == "expired" else HOUR_S)
        if kind == "wrong":
            token = Token(token.party, token.port, token.authority_sha256, "x" * 43)
        if kind == "used":
            join(address, token, tmp_path / "first")
        with pytest.raises(TokenError) as refused:
            join(address, token, tmp_path / "node")
    assert str(refused.value) == INVALID
    assert not (tmp_path / "node").exists()


def test_joining_shows_its_token_to_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another authority answers in the coordinator's name: it hears of no secret."""
    shown: list[str] = []
    claimed: list[bytes] = []

    class Imposter(trust_pb2_grpc.JoiningServicer):
        def Authority(
            self, request: trust_pb2.AuthorityRequest, context: grpc.ServicerContext
        ) -> trust_pb2.AuthorityReply:
            return trust_pb2.AuthorityReply(authority_pem=claimed[-1])

        def Certify(self, request: trust_pb2.CertifyRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply:
            shown.append(request.secret)
            return trust_pb2.CertifyReply()

    mine = Authority.make(time.time())
    init_trust(tmp_path / "trust", time.time())
    token = invited(tmp_path / "trust")
    with speaking_as(Speaker(mine.identity(COORDINATOR, time.time()))):
        server = Server(
            "127.0.0.1:0", lambda made: trust_pb2_grpc.add_JoiningServicer_to_server(Imposter(), made), is_public=True
        )
    real = Authority.read(tmp_path / "trust").certificate_pem
    try:
        for claim in (mine.certificate_pem, real, b"", b"not a certificate"):
            claimed.append(claim)
            there = Token(token.party, server.port, token.authority_sha256, token.secret)
            with caplog.at_level(logging.DEBUG), pytest.raises(TrustError, match="is not the coordinator that made"):
                join(server.address, there, tmp_path / "node")
    finally:
        server.stop(0.0)
    assert shown == []
    assert token.secret not in caplog.text


def test_joining_where_nobody_gives_certificates(tmp_path: Path) -> None:
    """Nobody, plain text, or a port that wants certificates: each in a line that says what to look at."""
    trust = tmp_path / "trust"
    with running(trust) as (_, address):
        token = invited(trust)
        main_port = int(address.rpartition(":")[2])
        with pytest.raises(ConnectionFailedError, match="no coordinator gives certificates"):
            join(address, Token(token.party, main_port, token.authority_sha256, token.secret), tmp_path / "node")
    with pytest.raises(ConnectionFailedError, match="nobody answers at"):
        join(address, token, tmp_path / "node")
    plain = Server("127.0.0.1:0", lambda server: None)
    try:
        with pytest.raises(ConnectionFailedError, match="shows no certificate"):
            join(plain.address, Token(token.party, plain.port, token.authority_sha256, token.secret), tmp_path / "node")
    finally:
        plain.stop(0.0)


def test_joining_again_after_a_lost_answer_gives_the_same_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer gets lost on its way once: the second try with the same key does not need a second token."""
    trust = tmp_path / "trust"
    with running(trust) as (keeper, address):
        token, real, issued = invited(trust), keeper.certify, []

        def certify(secret: str, request_pem: bytes) -> bytes:
            issued.append(real(secret, request_pem))
            if len(issued) == 1:
                raise ConnectionFailedError("the answer is lost")
            return issued[-1]

        monkeypatch.setattr(keeper, "certify", certify)
        identity = join(address, token, tmp_path / "node")
    assert issued == [identity.certificate_pem] * 2


def test_joining_with_a_clock_of_another_year_names_the_clock(tmp_path: Path) -> None:
    """Two hours do not matter; a year does, and it is said before anything else fails."""
    trust = tmp_path / "trust"
    with running(trust) as (_, address):
        now = time.time()
        with pytest.raises(TrustError, match=r"is not valid before .* clock says"):
            join(address, invited(trust), tmp_path / "node", clock=lambda: now - 400 * DAY_S)
        join(address, invited(trust), tmp_path / "node", clock=lambda: now - 2 * HOUR_S)


# ---- later -----------------------------------------------------------------------------------------


def test_joining_renews_what_ends_within_90_days(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not before; then with a new key, in the folder and in the process. A coordinator that is away ends nothing."""
    trust, folder = tmp_path / "trust", tmp_path / "node"
    with running(trust) as (_, address):
        first = join(address, invited(trust), folder)
        speaker, due_unix_s = Speaker(first), first.facts.ends_unix_s - 90 * DAY_S
        with membership(address, speaker) as stub:
            assert not renew_if_due(stub, speaker, folder, due_unix_s - 1)
            assert read_identity(folder, time.time()) == speaker.identity == first
            assert renew_if_due(stub, speaker, folder, due_unix_s + 1)
    second = read_identity(folder, time.time())
    assert second == speaker.identity
    assert (second.party, second.key_pem != first.key_pem) == (PI, True)
    speaker = Speaker(first)
    with membership(address, speaker) as stub:
        for at_unix_s in (due_unix_s + 1, due_unix_s + 2):  # the second one asks nobody: it would not be answered soon
            assert not renew_if_due(stub, speaker, folder, at_unix_s)
    assert caplog.text.count("can't be renewed yet") == 1
    assert (read_identity(folder, time.time()), speaker.identity) == (second, first)


def test_joining_holds_for_a_run_of_years(tmp_path: Path) -> None:
    """On a made-up clock, a node that is never restarted, and does not reach its coordinator for two months a year.

    No certificate of either ends: connections are opened and answered with 30 days left at least.
    """
    now_unix_s = time.time()
    init_trust(tmp_path, now_unix_s)
    keeper = TrustKeeper(tmp_path, clock=lambda: now_unix_s)
    speaker = Speaker(Authority.read(tmp_path).identity(PI, now_unix_s))
    serials, least_s, is_away = set[str](), math.inf, False

    def renew(request: trust_pb2.RenewRequest, *, timeout: float) -> trust_pb2.CertifyReply:
        if is_away:
            raise DroppedCallError("Socket closed")
        return trust_pb2.CertifyReply(certificate_pem=keeper.renew(speaker.identity.facts, request.request_pem))

    stub: Any = SimpleNamespace(Renew=renew)
    for day in range(3 * 365):
        is_away = 270 <= day % 365 < 331
        renew_if_due(stub, speaker, tmp_path / "node", now_unix_s)
        for identity in (speaker.identity, keeper.speaker.identity):
            assert not identity.facts.problem_at(now_unix_s)
            least_s = min(least_s, identity.facts.ends_unix_s - now_unix_s)
        serials.add(speaker.identity.facts.serial)
        now_unix_s += DAY_S
    assert least_s > 30 * DAY_S
    assert len(serials) == 4
    assert TrustKeeper(tmp_path, clock=lambda: now_unix_s).speaker.identity == keeper.speaker.identity


def test_joining_ends_with_a_removal(tmp_path: Path) -> None:
    """A removed node can't renew; with a new token it joins again."""
    trust, folder = tmp_path / "trust", tmp_path / "node"
    with running(trust) as (keeper, address):
        speaker, user = (Speaker(join(address, invited(trust, party), tmp_path / party.name)) for party in (PI, ALICE))
        with membership(address, user) as stub:
            assert stub.Remove(trust_pb2.RemoveRequest(node="pi", reason="stolen")).certificates == 1
        with membership(address, speaker) as stub, pytest.raises(TrustError, match="node pi was removed: stolen"):
            renew(stub, speaker, folder)
        again = Speaker(join(address, invited(trust), folder))
        with membership(address, again) as stub:
            renew(stub, again, folder)
        assert TrustKeeper(trust).speaker.removed == keeper.speaker.removed != {}


def test_joining_of_guests_is_by_invitation_of_a_user(tmp_path: Path) -> None:
    """Their names are of one form, and their certificates hold for a day, renewed ones too."""
    trust = tmp_path / "trust"
    with running(trust) as (keeper, address):
        guest = node_party("eval-0123abcd")
        with pytest.raises(TrustError, match="node pi is no guest"):
            keeper.invite("pi")
        identity = join(address, parse_token(keeper.invite(guest.name)), tmp_path / "guest")
        assert identity.party == guest
        assert identity.facts.ends_unix_s - time.time() == pytest.approx(DAY_S, abs=60)
        speaker = Speaker(identity)
        with membership(address, speaker) as stub:
            renew(stub, speaker, tmp_path / "guest")
        assert speaker.identity.facts.ends_unix_s - time.time() == pytest.approx(DAY_S, abs=60)


@pytest.mark.parametrize("days", [20.0, -400.0])
def test_keeper_makes_itself_a_new_certificate_where_its_own_ends_soon(tmp_path: Path, days: float) -> None:
    """One that has expired, or ends within 90 days: the new one lasts as long as the authority, and is kept."""
    init_trust(tmp_path, time.time())
    authority = Authority.read(tmp_path)
    write_identity(tmp_path, authority.identity(COORDINATOR, time.time() - 600 * DAY_S, days=600 + days))
    found = TrustKeeper(tmp_path).speaker.identity
    last = read_certificate(authority.certificate_pem).not_valid_after_utc.timestamp()
    assert found.facts.ends_unix_s == pytest.approx(last, abs=2)
    assert read_identity(tmp_path, time.time()) == TrustKeeper(tmp_path).speaker.identity == found


def test_keeper_needs_an_authority(tmp_path: Path) -> None:
    """A folder without one is named, with the command that makes it."""
    with pytest.raises(TrustError, match="has no authority; make one with 'ringtune coordinator init'"):
        TrustKeeper(tmp_path)


def test_joining_port_that_is_taken_names_its_option(tmp_path: Path) -> None:
    """The port of the coordinator itself is free: it is not --bind that has to change, and nothing stays behind."""
    init_trust(tmp_path, time.time())
    keeper = TrustKeeper(tmp_path)
    taken = Server("127.0.0.1:0", lambda server: None)
    try:
        with speaking_as(keeper.speaker), pytest.raises(ConnectionFailedError, match="take another --join-port"):
            CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper, join_port=taken.port)
    finally:
        taken.stop(0.0)


def test_joining_with_a_token_from_before_the_first_start(tmp_path: Path) -> None:
    """The coordinator's port is not known yet when it is made: those who join look at the one after it."""
    init_trust(tmp_path / "trust", time.time())
    token = invited(tmp_path / "trust")
    assert token.port == 0
    keeper = TrustKeeper(tmp_path / "trust")
    with speaking_as(keeper.speaker):
        server = CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper)
    with server:
        joins_at = invited(tmp_path / "trust").port
        assert joins_at > 0
        assert join(f"127.0.0.1:{joins_at - 1}", token, tmp_path / "node").party == PI
