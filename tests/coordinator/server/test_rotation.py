"""Rotation of the authority on a made-up clock: who trusts whom at each moment, who is waited for, and what is kept."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from coordinator.client import connection
from coordinator.run.members import Member
from coordinator.screen.listing import rotation_lines
from coordinator.server import certificate_authority
from coordinator.server.certificate_authority import NEXT, Authority, Register, TrustKeeper, init_trust, make_token
from coordinator.server.coordinator import Coordinator
from coordinator.server.database import Database
from coordinator.server.rotation import MAX_GONE, Phase, Rotation
from coordinator.server.server import CoordinatorServer, CoordinatorServicer
from edge.doctor import Level, check_coordinator
from ringtune import __version__
from ringtune.errors import InterruptedRunError, StorageError, TrustError, UsageError
from ringtune.transport.channels import open_channel
from ringtune.transport.credentials import Credentials, process_credentials, using_credentials
from ringtune.transport.enrollment import join, renew, renew_if_due, take_authorities
from ringtune.transport.identity import (
    Identity,
    facts_of,
    fingerprint,
    is_issued_by,
    key_pem,
    make_key,
    make_request,
    read_identity,
    write_identity,
)
from ringtune.transport.parties import COORDINATOR, VARIABLE, Party, node_party
from ringtune.transport.status import error_of_call
from ringtune.v1 import control_pb2, control_pb2_grpc, trust_pb2, trust_pb2_grpc
from tests.coordinator.server.test_certificate_authority import ALICE, invited, membership, running
from tests.support.failpoints import DroppedCallError

NOW_S = 1_800_000_000.0
BEAT_S = 2.0
HOUR_S = 3600.0
A, B, DEAF = node_party("a"), node_party("b"), node_party("deaf")


def test_rotation_introduces_before_it_issues_and_ends_in_time() -> None:
    """Nobody delays a phase beyond its end; a coordinator that was started again waits until its members are back."""
    rotation = Rotation(old=b"old", new=b"new", began_unix_s=0.0, ends_unix_s=100.0)
    go_on = functools.partial(Rotation.advanced, unconfirmed=(), waiting=())
    assert rotation.authorities == (b"old", b"new")
    assert go_on(rotation, 1.0, unconfirmed=["a"]) is rotation
    assert go_on(rotation, 1.0, is_settled=False) is rotation
    late = go_on(rotation, 50.0, unconfirmed=["a"], is_settled=False)
    issuing = go_on(rotation, 1.0)
    assert issuing is not None and issuing == late
    assert (issuing.phase, issuing.authorities) == (Phase.ISSUING, (b"new", b"old"))
    assert go_on(issuing, 99.0, waiting=["a"]) is issuing
    assert go_on(issuing, 99.0, is_settled=False) is issuing
    assert go_on(issuing, 2.0) is None
    assert go_on(issuing, 100.0, waiting=["a"], is_settled=False) is None
    moved = issuing.heard("node a", is_of_new=True)
    assert Rotation.parse(moved.to_text()) == moved != issuing
    assert moved.heard("node a", is_of_new=False) == issuing


@pytest.mark.promise("7 bounded memory")
def test_rotation_forgets_guests_that_have_left(tmp_path: Path) -> None:
    """A user may invite any number of them within days; each that calls is written to the disk, with all before it."""
    ring = Ring(tmp_path, A, B)
    ring.present.remove(B)  # it is waited for
    ring.keeper.rotate(HOUR_S)
    ring.until("issuing")
    names = [f"eval-{number:08x}" for number in range(MAX_GONE + 2)]
    after = ring.keeper.rotation_state(names)
    assert after is not None
    rotation = dataclasses.replace(after.rotation, moved=frozenset(["node a", *map(str, map(node_party, names))]))
    assert rotation.without_gone(names[1:]) is rotation.without_gone(names[2:]) is rotation
    assert rotation.without_gone(names[:1]).moved == {"node a", "node eval-00000000"}
    ring.keeper._change(rotation)
    ring.keeper._versions |= dict.fromkeys(names, "version")
    ring.now_unix_s += 2.0
    ring.go_on()
    kept = Rotation.parse(Register(ring.trust).noted("rotation"))
    assert not kept.moved - {"node a"} and not ring.keeper._versions.keys() - {"a"}


class Ring:
    """A keeper, and nodes and users whose calls are made here, if certificates and authorities let them through."""

    def __init__(self, folder: Path, *parties: Party) -> None:
        self.now_unix_s = NOW_S
        self.folder, self.trust = folder, folder / "trust"
        init_trust(self.trust, NOW_S)
        shutil.rmtree(self.trust / "admin")
        register = Register(self.trust)
        register.remove(Party("submitter", "admin"), "it takes no part here")
        self.keeper = self.restarted()
        self.parties = {
            party: self.joined(party, str(make_token(self.trust, party, NOW_S + HOUR_S).secret)) for party in parties
        }
        self.present = [party for party in parties if party.role == "node"]
        self.told: list[str] = []
        self.is_settled = True
        self.lost = 0

    def restarted(self) -> TrustKeeper:
        """The keeper of a coordinator that is started again."""
        self.keeper = TrustKeeper(self.trust, clock=lambda: self.now_unix_s)
        return self.keeper

    def joined(self, party: Party, secret: str) -> Credentials:
        """Who gets a certificate for a token; ``DEAF`` never takes another authority, nor a certificate of it."""
        key = make_key()
        pem = self.keeper.certify(secret, make_request(key))
        return Credentials(Identity.of(key_pem(key), pem, *self.keeper.authorities))

    def call(self, party: Party) -> bool:
        """Let somebody beat, or a user make a command; whether the coordinator takes it."""
        who, keeper = self.parties[party], self.keeper
        if not trusts(who, keeper.credentials) or not trusts(keeper.credentials, who):
            return False
        said = who.identity.authorities_version if party.role == "node" else ""
        keeper.heard(who.identity.facts, said)
        self.go_on()
        if party == DEAF:
            return True

        def certify(request: trust_pb2.RenewRequest, *, timeout: float) -> trust_pb2.CertifyReply:
            pem = keeper.renew(who.identity.facts, request.request_pem)
            if self.lost:
                self.lost -= 1
                raise DroppedCallError("Socket closed")
            return trust_pb2.CertifyReply(certificate_pem=pem, authorities_pem=keeper.authorities)

        stub: Any = SimpleNamespace(Renew=certify)
        take_authorities(keeper.authorities, who, self.folder / party.name)
        if renew_if_due(stub, who, self.folder / party.name, self.now_unix_s) and party.role != "node":
            keeper.heard(who.identity.facts, "")
        return True

    def come_back(self, party: Party) -> None:
        """Let a node that was away join again; the answer has the authorities."""
        assert trusts(self.parties[party], self.keeper.credentials)
        take_authorities(self.keeper.authorities, self.parties[party], self.folder / party.name)
        self.present.append(party)

    def go_on(self) -> None:
        """Let the rotation go on if it is time."""
        names = [party.name for party in self.present]
        line = self.keeper.advance(names, is_settled=self.is_settled)
        self.told += [line] if line else []

    def round(self) -> None:
        """Let all who are present beat once; those that take authorities can reach each other all the time."""
        for party in self.present:
            self.now_unix_s += BEAT_S / len(self.present)
            assert self.call(party) or party == DEAF
            able = [self.parties[each] for each in self.present if each != DEAF]
            assert all(trusts(one, other) for one, other in permutations(able, 2))
        self.go_on()

    @property
    def phase(self) -> str:
        """Of the rotation; empty = none."""
        state = self.keeper.rotation_state(())
        return state.rotation.phase if state else ""

    def until(self, phase: str, most: int = 6) -> None:
        """Let rounds pass until a phase."""
        for _ in range(most):
            if self.phase == phase:
                return
            self.round()
        assert self.phase == phase, self.keeper.rotation_state([each.name for each in self.present])


def trusts(one: Credentials, other: Credentials) -> bool:
    """Whether one process takes the certificate of another one."""
    return not one.refusal(other.identity.facts)


def test_rotation_of_members_that_are_there_takes_a_few_heartbeats(tmp_path: Path) -> None:
    """In the end there is one authority, in the folder too, and the old one's certificates are refused."""
    ring = Ring(tmp_path, A, B)
    before, old = Credentials(ring.parties[A].identity), ring.keeper.authority_pem
    ring.keeper.rotate(HOUR_S)
    with pytest.raises(UsageError, match=r"is rotated already, since 2027.*--status"):
        ring.keeper.rotate(HOUR_S)
    ring.until(Phase.ISSUING)
    assert trusts(ring.keeper.credentials, before)
    ring.until("")
    assert ring.keeper.authorities == (Authority.read(ring.trust).certificate_pem,) != (old,)
    assert not (ring.trust / NEXT).exists()
    assert not trusts(ring.keeper.credentials, before)
    ring.round()
    assert {who.identity.authorities for who in ring.parties.values()} == {ring.keeper.authorities}
    assert read_identity(tmp_path / "a", NOW_S) == ring.parties[A].identity
    assert ring.told == ["certificates are of the new authority from now on", "the old authority is trusted no longer"]
    ring.keeper.rotate(HOUR_S)  # once more, with an answer that gets lost
    ring.until(Phase.ISSUING)
    ring.lost = 1
    ring.until("", most=15)
    assert ring.lost == 0


def test_rotation_tells_of_an_authority_when_the_coordinator_shows_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats are answered while its new certificate is made: nobody is to trust only what it does not show yet."""
    ring = Ring(tmp_path, A, B)
    ring.keeper.rotate(HOUR_S)
    found: list[bool] = []

    def write(folder: Path, identity: Identity) -> None:
        told, shown = ring.keeper.authorities, ring.keeper.credentials.identity.certificate_pem
        found.append(any(is_issued_by(shown, authority) for authority in told))
        write_identity(folder, identity)

    monkeypatch.setattr(certificate_authority, "write_identity", write)
    ring.until("")
    assert found == [True, True]  # the other authority signs, and the old one is gone


def test_rotation_waits_for_who_is_away_and_for_open_tokens_until_its_end(tmp_path: Path) -> None:
    """They come while the old authority is trusted; a user's command and a token of before move with one call."""
    ring = Ring(tmp_path, A, B, ALICE)
    late = node_party("late")
    token = make_token(ring.trust, late, NOW_S + HOUR_S)
    ring.present = [A]
    ring.keeper.rotate(HOUR_S)
    ring.until(Phase.ISSUING)
    ring.round()
    state = ring.keeper.rotation_state(["a"])
    assert state is not None
    assert state.waiting == ["node b", "submitter alice", "the token of node late"]
    ring.come_back(B)
    ring.round()
    assert ring.call(ALICE)
    ring.parties[late] = ring.joined(late, token.secret)
    assert ring.phase == Phase.ISSUING
    ring.present.append(late)
    ring.until("")
    assert all(map(ring.call, (ALICE, late)))


def test_rotation_names_and_shuts_out_who_does_not_come_in_time(tmp_path: Path) -> None:
    """A node that is called and takes nothing is served to the end."""
    ring = Ring(tmp_path, A, DEAF, B)
    ring.present = [A, DEAF]
    ring.keeper.rotate(100.0)
    ring.round()
    ring.round()
    state = ring.keeper.rotation_state(["a", "deaf"])
    assert state is not None and state.unconfirmed == ["deaf"]
    ring.until(Phase.ISSUING, most=30)
    assert ring.now_unix_s >= NOW_S + 50.0
    assert ring.told == ["certificates are of the new authority from now on; not confirmed by deaf"]
    ring.until("", most=30)
    assert ring.now_unix_s >= NOW_S + 100.0
    assert ring.told[1:] == [
        "the old authority is trusted no longer; shut out until they join with a new token: node b, node deaf"
    ]
    assert [ring.call(party) for party in (A, DEAF, B)] == [True, False, False]


@pytest.mark.parametrize("kept", [Phase.INTRODUCING, Phase.ISSUING])
def test_rotation_goes_on_where_it_was_when_the_coordinator_starts_again(tmp_path: Path, kept: Phase) -> None:
    """With what was saved of its folder, in each phase; not before its members are back."""
    ring = Ring(tmp_path, A, B)
    ring.keeper.rotate(HOUR_S)
    ring.until(kept)
    (ring.trust / "identity.pem").unlink()  # what is not saved
    ring.restarted()
    ring.present, ring.is_settled = [A], False
    for _ in range(3):
        ring.round()
    assert ring.phase == kept
    ring.come_back(B)
    ring.is_settled = True
    ring.until("")
    assert ring.restarted().authorities == (Authority.read(ring.trust).certificate_pem,)
    ring.round()
    assert ring.call(A) and ring.call(B)


@pytest.mark.parametrize("starts_again", [True, False])
def test_rotation_survives_a_crash_at_its_begin_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts_again: bool
) -> None:
    """What is stored in the register counts: a key without it is made anew, and one that counts is put in place."""
    ring = Ring(tmp_path, A)

    def crash(*_: object) -> None:
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Register, "change_notes", crash)
        with pytest.raises(StorageError):
            ring.keeper.rotate(HOUR_S)
    assert (ring.trust / NEXT).exists() and not ring.restarted().rotation_state(())
    ring.keeper.rotate(HOUR_S)
    ring.until(Phase.ISSUING)
    with monkeypatch.context() as patched:
        patched.setattr(TrustKeeper, "_put_in_place", crash)
        with pytest.raises(StorageError):
            ring.until("")
    after = Authority.read(ring.trust, NEXT).certificate_pem
    assert make_token(ring.trust, B, NOW_S).authority_sha256 == fingerprint(after)
    if starts_again:
        ring.restarted()
    else:
        ring.round()
    assert ring.keeper.authorities == (after,) == (Authority.read(ring.trust).certificate_pem,)
    assert ring.call(A)


@pytest.mark.parametrize("phase", [Phase.INTRODUCING, Phase.ISSUING])
def test_rotation_keeps_who_was_removed_out(tmp_path: Path, phase: Phase) -> None:
    """Before it, in it and after it, with the certificates of both authorities; and nobody waits for them."""
    ring = Ring(tmp_path, A, B)
    ring.keeper.rotate(HOUR_S)
    ring.until(phase)
    ring.round()
    ring.keeper.remove(B, "it was stolen")
    ring.present = [A]
    assert not ring.call(B)
    ring.until("")
    assert ring.keeper.credentials.refusal(ring.parties[B].identity.facts)
    assert ring.restarted().credentials.refusal(ring.parties[B].identity.facts)


def test_rotation_gives_nothing_to_who_has_a_copy_of_the_old_key(tmp_path: Path) -> None:
    """Certificates that it makes, of members too, end with the old authority, also if they were renewed before."""
    ring = Ring(tmp_path, A, B)
    facts = ring.parties[A].identity.facts
    forged = ring.keeper._authority.identity(ALICE, NOW_S).facts
    given = [forged, facts_of(ring.keeper.renew(forged, make_request(make_key())))]
    ring.keeper.rotate(HOUR_S)
    ring.until(Phase.ISSUING)
    given.append(dataclasses.replace(forged, party=A, serial=facts.serial))  # of a copy of the register
    for caller in given:
        with pytest.raises(TrustError, match=r"is not in the register.*join with a new token"):
            ring.keeper.renew(caller, make_request(make_key()))


def test_rotation_notes_few_calls_of_who_has_certificates_of_both(tmp_path: Path) -> None:
    """Each is a write, for which heartbeats wait."""
    ring = Ring(tmp_path, A, B)
    old = ring.parties[A].identity.facts
    ring.present = [A]
    ring.keeper.rotate(HOUR_S)
    ring.until(Phase.ISSUING)
    ring.round()
    new, written = ring.parties[A].identity.facts, 0
    for _ in range(20):
        for facts in (old, new):
            state = ring.keeper.rotation_state(())
            ring.keeper.heard(facts, "")
            after = ring.keeper.rotation_state(())
            assert state is not None and after is not None
            written += state.rotation != after.rotation
    assert 0 < written < 7


def test_authorities_that_leave_out_the_own_one_are_not_taken(tmp_path: Path) -> None:
    """Nobody would take its certificate then; those with it are kept on the disk, if that is possible."""
    old, new = Authority.make(NOW_S), Authority.make(NOW_S)
    who = Credentials(old.identity(A, NOW_S))
    before = who.identity
    for given in ([], [new.certificate_pem], [b"nothing"], [old.certificate_pem, b"nothing"]):
        take_authorities(given, who, tmp_path)
        assert who.identity is before
    take_authorities([new.certificate_pem, old.certificate_pem], who, tmp_path)
    assert read_identity(tmp_path, NOW_S) == who.identity != before
    assert not who.identity.is_of_signing_authority
    take_authorities([old.certificate_pem], who, tmp_path / "identity.pem")
    assert (read_identity(tmp_path, NOW_S) != who.identity, who.identity) == (True, before)


# ---- coordinators ----------------------------------------------------------------------------------


def test_rotation_of_coordinators_of_a_database_needs_the_key_at_the_one_that_acts(tmp_path: Path) -> None:
    """A standby can't begin one. Once it acts it goes on with that of the former one as soon as it has the key."""
    init_trust(tmp_path / "first", NOW_S)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    url, now_unix_s, now_s = f"sqlite:///{tmp_path}/state.sqlite", [NOW_S], [0.0]
    one, other = (Database(url, lease_s=HOUR_S, clock=lambda: now_s[0]) for _ in range(2))
    with one, other:
        first, second = (
            TrustKeeper(tmp_path / name, clock=lambda: now_unix_s[0], shared=shared)
            for name, shared in (("first", one), ("second", other))
        )
        assert one.take() == "" and first.begin_to_act() == ""
        assert other.take() != ""
        with pytest.raises(InterruptedRunError, match="is a standby"):
            second.rotate(100.0)
        assert not (tmp_path / "second" / NEXT).exists()
        first.rotate(2 * HOUR_S)
        now_s[0] += HOUR_S
        assert other.take() == ""
        assert f"second has no {NEXT}; copy it" in second.begin_to_act()
        assert second.authorities == first.authorities
        with pytest.raises(InterruptedRunError, match="has lost its lease"):
            first.advance([], is_settled=True)
        now_unix_s[0] += 2 * HOUR_S  # without the key it does not end
        assert second.advance([], is_settled=True) == ""
        shutil.copytree(tmp_path / "second", tmp_path / "third")  # which gets no key
        third = TrustKeeper(tmp_path / "third", clock=lambda: now_unix_s[0], shared=one)
        shutil.copy2(tmp_path / "first" / NEXT, tmp_path / "second")
        lines, problems = [], [third.takeover_problem()]
        for _ in range(3):
            now_unix_s[0] += 2.0
            lines.append(second.advance([], is_settled=True))
            problems.append(third.takeover_problem().partition("lacks; ")[2])
        whence = "from the trust folder of the coordinator that acts, or acted last"
        assert problems == ["", f"copy {NEXT} {whence}", *2 * [f"copy authority.pem {whence}"]]
        assert [first.takeover_problem(), second.takeover_problem()] == ["", ""]
        half = (tmp_path / "second" / "authority.pem").read_bytes()[:-200]
        (tmp_path / "third" / "authority.pem").write_bytes(half)
        assert "can't be read; copy it again" in third.takeover_problem()
        shutil.copy2(tmp_path / "second" / "authority.pem", tmp_path / "third")
        assert third.takeover_problem() == ""
        assert lines[0].startswith("certificates are of the new") and "submitter admin" in lines[1]
        assert second.authorities == first.authorities[1:]
        assert "is not that of the coordinator" not in first.begin_to_act()
        assert first.authorities == second.authorities


def rotate(stub: trust_pb2_grpc.MembershipStub, within_s: float | None = None) -> trust_pb2.RotateReply:
    """Begin a rotation, or only look; raises what the coordinator answers."""
    try:
        return stub.Rotate(trust_pb2.RotateRequest(within_s=within_s or 0.0, only_looks=within_s is None), timeout=30)
    except grpc.RpcError as error:
        raise error_of_call(error, peer="the coordinator") from error


def test_rotation_is_for_administrators_of_a_coordinator_with_an_authority(tmp_path: Path) -> None:
    """What is asked of it, and who asks; and the answer in words."""
    init_trust(tmp_path / "trust", time.time())
    keeper = TrustKeeper(tmp_path / "trust")
    with using_credentials(keeper.credentials):
        server = CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper)
    with server:
        admin = Credentials(read_identity(tmp_path / "trust" / "admin", time.time()))
        user = Credentials(keeper._authority.identity(ALICE, time.time(), has_own_runs_only=True))
        with membership(server.address, user) as stub, pytest.raises(TrustError, match="is no administrator"):
            rotate(stub, HOUR_S)
        with membership(server.address, admin) as stub:
            assert rotation_lines(rotate(stub))[0].endswith("no rotation is under way")
            for wrong in (99.0, float("nan"), float("inf")):
                with pytest.raises(UsageError, match="--within has to be 1 min 40 s to"):
                    rotate(stub, wrong)
            lines = rotation_lines(rotate(stub, HOUR_S))
        assert lines[2].endswith("UTC; shut out if that were now: submitter admin")
        assert f"{NEXT} and register.sqlite of {tmp_path}" in lines[3]
        with using_credentials(keeper.credentials):  # the doctor on the coordinator's machine
            found = check_coordinator(server.address)
        assert [check.level for check in found] == [*3 * [Level.PASS], Level.WARN], found
        named = f"{fingerprint(keeper.authority_pem)[:16]} is replaced by .* UTC at most; 1 nodes, users or tokens need"
        assert re.match(named, found[3].found)
        alice = Credentials(join(server.address, invited(tmp_path / "trust", ALICE), tmp_path / "alice"))
        assert alice.identity.authorities == keeper.authorities != (keeper.authority_pem,)
        with membership(server.address, alice) as stub:
            renew(stub, alice, tmp_path / "alice")
    with (
        CoordinatorServer("127.0.0.1:0", lease_s=10.0) as plain,
        membership(plain.address, None) as stub,
        pytest.raises(UsageError, match="gives no certificates; start it with a trust folder"),
    ):
        rotate(stub, HOUR_S)


def test_rotation_waits_for_a_node_that_was_silent_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trusts the old authority only, and would meet certificates of the new one in its next call to another node."""
    init_trust(tmp_path / "trust", NOW_S)
    now_unix_s, now_s = [NOW_S], [0.0]
    keeper, coordinator = TrustKeeper(tmp_path / "trust", clock=lambda: now_unix_s[0]), Coordinator(lease_s=10.0)
    monkeypatch.setattr(coordinator, "_now_s", lambda: now_s[0])
    service = CoordinatorServicer(coordinator, keeper)
    monkeypatch.setattr(service, "_began_s", -HOUR_S)  # all members have joined
    coordinator.join(Member(node="pi", address="127.0.0.1:1", instance="1", version=__version__))
    keeper.rotate(HOUR_S)
    phases = []
    for now_s[0] in (11.0, 299.0, 301.0):  # lost after one lease, forgotten after 30
        now_unix_s[0] += BEAT_S
        service.advance_rotation()
        phases += [state.rotation.phase for state in (keeper.rotation_state(()),) if state is not None]
    assert phases == [Phase.INTRODUCING, Phase.INTRODUCING, Phase.ISSUING]


def test_rotation_that_the_disk_prevents_fails_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and goes on with a later call."""

    def full(*_: object, **named: object) -> None:
        raise StorageError("the disk is full")

    with running(tmp_path / "trust") as (keeper, address):
        pi = Credentials(join(address, invited(tmp_path / "trust"), tmp_path / "pi"))
        keeper.rotate(HOUR_S)
        with using_credentials(pi), open_channel(address, peer=COORDINATOR) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)
            beat = control_pb2.HeartbeatRequest(node="pi", instance="one", authorities_version="0" * 1_000_000)
            stub.Heartbeat(beat, timeout=30)
            assert len(keeper._versions["pi"] or "") < 100
            with monkeypatch.context() as patched:
                patched.setattr(TrustKeeper, "heard", full)
                patched.setattr(TrustKeeper, "advance", full)
                replies = [stub.Heartbeat(beat, timeout=30) for _ in range(2)]
            assert [list(reply.authorities_pem) for reply in replies] == [list(keeper.authorities)] * 2
    assert caplog.text.count("does not go on now: the disk is full") < 4


def test_rotation_reaches_a_command_that_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While events arrive it asks from time to time, on the same connection, and has the new certificate in the end."""
    monkeypatch.setattr(connection, "_RENEW_S", -1.0)
    admin, now_unix_s = tmp_path / "trust" / "admin", [time.time()]
    monkeypatch.setenv(VARIABLE, str(admin))
    init_trust(tmp_path / "trust", now_unix_s[0])
    keeper = TrustKeeper(tmp_path / "trust", clock=lambda: now_unix_s[0])
    with using_credentials(keeper.credentials):
        server = CoordinatorServer("127.0.0.1:0", lease_s=0.001, keeper=keeper)

    def events() -> Iterator[control_pb2.RunEvent]:
        keeper.rotate(HOUR_S)
        for _ in range(6):
            yield control_pb2.RunEvent(note="a step")
            now_unix_s[0] += 2.0

    with server, using_credentials(None), connection.Connection(server.address, insecure=False) as client:
        assert len(list(client.heard(events()))) == 6
        assert not client.rotate(None).phase
    assert read_identity(admin, time.time()).authorities == keeper.authorities


def test_rotation_that_other_commands_of_a_user_have_moved_with_does_not_end_one_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events end with the old authority, between two of its looks; it asks again with the certificate on disk."""
    now_unix_s = [time.time()]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trust" / "admin"))
    init_trust(tmp_path / "trust", now_unix_s[0])
    keeper = TrustKeeper(tmp_path / "trust", clock=lambda: now_unix_s[0])
    with using_credentials(keeper.credentials):
        server = CoordinatorServer("127.0.0.1:0", lease_s=0.001, keeper=keeper)
    with server, using_credentials(None), connection.Connection(server.address, insecure=False) as client:
        keeper.rotate(HOUR_S)
        for _ in range(6):
            now_unix_s[0] += BEAT_S
            with using_credentials(process_credentials()), connection.Connection(server.address, insecure=False):
                pass
        assert len(keeper.authorities) == 1
        silences: list[str] = []
        client.await_answer(30.0, on_silence=lambda: silences.append("silent"))
        assert not silences
