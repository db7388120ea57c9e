"""A coordinator's state in a database: one of two acts, and the other one goes on with the same run."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy

from coordinator.cli.coordinator import begin_again
from coordinator.server import database
from coordinator.server.certificate_authority import ADMIN, Register, TrustKeeper, init_trust, make_token
from coordinator.server.database import Database, copy_folder, stand_by
from coordinator.server.run_store import RunStore, copy_runs
from ringtune.errors import BusyError, InterruptedRunError, StorageError, TokenError, UsageError
from ringtune.storage.pieces import Pieces
from ringtune.techniques.initial_adapter import INITIAL_FILE
from ringtune.transport.identity import facts_of, make_key, make_request
from ringtune.transport.parties import node_party
from ringtune.v1 import control_pb2
from tests.coordinator.server.test_run_record import ONE, THREE, TWO, record
from tests.support.cases import cases
from tests.support.postgresql import PostgreSql, postgresql

LEASE_S = 10.0


class Pair:
    """Two coordinators of one database, each with a clock of its own that a test sets, and with beats that it calls.

    Attributes:
        beating: who has begun to beat. Beats by the clock of this machine would renew a lease on the test's clock.
    """

    def __init__(self, url: str) -> None:
        self.now_s = {"a": 1000.0, "b": 5.0}
        self.lost: list[str] = []
        self.beating: list[str] = []
        self.a, self.b = self._coordinator(url, "a"), self._coordinator(url, "b")
        self.a.on_lost = self.lost.append

    def _coordinator(self, url: str, name: str) -> Database:
        made = Database(url, lease_s=LEASE_S, holder=name, clock=functools.partial(self._clock, name))
        thread: Any = SimpleNamespace(start=lambda: self.beating.append(name), is_alive=lambda: False)
        made._thread = thread
        return made

    def _clock(self, name: str) -> float:
        return self.now_s[name]

    def passes(self, seconds: float, *names: str) -> None:
        """Let time pass on some clocks; a process that is stopped has none."""
        for name in names or self.now_s:
            self.now_s[name] += seconds


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSql]:
    """One for all tests here."""
    with postgresql() as made:
        yield made


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """With a new database of each kind."""
    is_small = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/state.sqlite" if is_small else request.getfixturevalue("server").new_database()
    made = Pair(url)
    with made.a, made.b:
        yield made


def note(text: str) -> control_pb2.RunEvent:
    """An event that changes no record."""
    return control_pb2.RunEvent(note=text)


def files_of(folder: Path) -> dict[str, bytes]:
    """All files of the runs in a folder, but the records, which have the times of their ends."""
    found = (path for path in (folder / "runs").rglob("*") if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_lease_is_taken_only_after_its_holder_has_ended_by_its_own_clock(pair: Pair) -> None:
    """Whatever the clocks say: the holder may act for a lease after its last beat, the other one acts after that."""
    assert (pair.a.take(), pair.b.take()) == ("", "a")
    for _ in range(3):
        pair.passes(0.9 * LEASE_S)
        assert pair.b.take() == "a"
        pair.a.beat()
    assert pair.b.take() == "a"
    pair.passes(0.99 * LEASE_S)
    assert pair.b.take() == "a"
    pair.a.require_lease()
    pair.passes(0.01 * LEASE_S)
    with pytest.raises(InterruptedRunError, match=r"lost its lease: .* took no beat for 10 s; start it again"):
        pair.a.require_lease()
    assert pair.b.take() == ""
    pair.passes(-5.0, "a")
    with pytest.raises(InterruptedRunError):
        pair.a.beat()
    assert len(pair.lost) == 1


@pytest.mark.parametrize("pair", [pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_lease_is_measured_from_when_its_beat_was_seen(pair: Pair) -> None:
    """Not from when the database was asked, which may be slow: a beat that came meanwhile began later."""
    assert (pair.a.take(), pair.b.take()) == ("", "a")

    def beat(*_: object) -> None:
        pair.passes(0.3 * LEASE_S)
        pair.a.beat()

    sqlalchemy.event.listen(pair.b._engine, "before_cursor_execute", beat, once=True)
    assert pair.b.take() == "a"
    pair.passes(0.9 * LEASE_S)
    pair.a.require_lease()
    assert pair.b.take() == "a"
    pair.passes(0.1 * LEASE_S)
    assert pair.b.take() == ""


def test_writes_of_a_former_holder_are_refused_by_number(pair: Pair) -> None:
    """A process that was stopped, whose clock shows nothing, changes no run; who was never holder neither."""
    with pytest.raises(InterruptedRunError, match="standby"):
        pair.b.append(ONE, 0, b"x")
    assert (pair.a.take(), pair.b.take()) == ("", "a")
    pair.passes(LEASE_S, "b")
    assert pair.b.take() == ""
    for name in ("append", "put", "remove", "beat"):
        arguments: dict[str, tuple[object, ...]] = {
            "append": (ONE, 0, b"x"),
            "put": (ONE, "x", [b"x"]),
            "remove": (ONE,),
        }
        with pytest.raises(InterruptedRunError, match="coordinator b has taken over"):
            getattr(pair.a, name)(*arguments.get(name, ()))
    assert pair.lost == ["coordinator b has taken over"]
    pair.b.append(ONE, 0, b"x")


def test_write_outlasts_a_database_that_is_away_for_less_than_a_lease(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while it is started again: nothing is lost or doubled, also if only the answer of a commit was lost."""
    monkeypatch.setattr(database, "_PAUSE_S", 0.0)
    pair.a.take()
    wrong = {"begin": 2, "committed": 3}

    def fail(place: str, *_: object) -> None:
        if wrong[place]:
            wrong[place] -= 1
            pair.passes(0.5)
            raise sqlalchemy.exc.OperationalError("", {}, Exception("the server closed the connection"))

    with contextlib.closing(RunStore(tmp_path / "a", database=pair.a)) as kept:
        sqlalchemy.event.listen(pair.a._engine, "begin", functools.partial(fail, "begin"))
        inner = pair.a.writing

        @contextlib.contextmanager
        def writing() -> Iterator[sqlalchemy.Connection]:
            with pair.a._errors():
                with inner() as connection:
                    yield connection
                fail("committed")

        monkeypatch.setattr(pair.a, "writing", writing)
        content = Pieces(9, lambda: iter([b"12345", b"6789"]))
        kept.begin(record(), request=b"request", initial=content, on_saved=lambda step: None)(note("first"))
        wrong |= {"begin": 1, "committed": 1}
        kept._runs[ONE](note("second"))
        copy_runs(pair.b, tmp_path / "b")
        assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
        assert not any(wrong.values())
        wrong["begin"] = 1000
        with pytest.raises(InterruptedRunError, match="took no beat for 10 s"):
            kept._runs[ONE](note("third"))


def test_beat_that_fails_is_soon_repeated(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that is away for most of a lease, and back before its end, costs nothing."""
    pair.a.take()
    assert pair.beating == ["a"]
    beat, waits = pair.a.beat, list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        pair.passes(seconds)
        return len(waits) > 14

    def away_until_9_s() -> None:
        if 2 < sum(waits) < 9:
            raise StorageError("it is away")
        beat()

    monkeypatch.setattr(pair.a, "beat", away_until_9_s)
    monkeypatch.setattr(pair.a, "_closing", SimpleNamespace(wait=wait, set=lambda: None))
    pair.a._beat()
    assert waits[:3] == [LEASE_S / 4, LEASE_S / 16, LEASE_S / 16] and waits[-1] == LEASE_S / 4
    assert pair.lost == []
    pair.a.require_lease()


def test_lease_that_was_given_back_is_free_at_once(pair: Pair) -> None:
    """A coordinator that ends in order lets no standby wait; the standby names who acts, once."""
    pair.a.take()
    lines: list[str] = []
    looks = iter(range(3))

    def is_over() -> bool:
        if next(looks) == 1:
            pair.a.close()
        return False

    assert stand_by(pair.b, lambda: None, say=lines.append, is_over=is_over)
    assert lines == ["standby: coordinator a acts, this one takes over a lease after its last beat"]
    pair.b.require_lease()


def test_standby_that_lacks_a_key_says_so_and_takes_a_free_lease_once_it_has_it(pair: Pair) -> None:
    """It is asked once a lease, with the copy of the runs."""
    pair.b.lease_s = 0.0
    problems, lines = iter(["copy the key", "copy the key", ""]), list[str]()
    assert stand_by(pair.b, lambda: None, say=lines.append, is_over=lambda: False, problem=lambda: next(problems))
    assert lines == ["standby: this coordinator can not take over: copy the key"]
    assert next(problems, None) is None


def test_runs_of_a_database_are_found_by_the_next_holder(pair: Pair, tmp_path: Path) -> None:
    """All bytes, however often a copy was begun or torn; what the database lacks goes; a run under way counts as ended.

    The former holder, which does not know of that yet, adds nothing to the copy.
    """
    pair.a.take()
    content = [b"12345", b"6789"]
    initial = Pieces(9, lambda: iter(content))
    a, b = tmp_path / "a", tmp_path / "b"
    with contextlib.closing(RunStore(a, database=pair.a)) as kept:
        done = kept.begin(record(TWO), request=b"two", on_saved=lambda step: None)
        kept.begin(record(THREE), request=b"three", on_saved=lambda step: None)
        run = kept.begin(record(), request=b"how it began", initial=initial, on_saved=lambda step: None)
        run(note("first"))
        copy_runs(pair.b, b)
        assert (b / "runs" / ONE / INITIAL_FILE).read_bytes() == b"123456789"
        for number in range(40):
            run(note(f"further {number}"))
        done(control_pb2.RunEvent(done=True))
        events = b / "runs" / ONE / "events"
        events.write_bytes(
            events.read_bytes() + (a / "runs" / ONE / "events").read_bytes()[events.stat().st_size :][:7]
        )
        (b / "runs" / "r20260102-000009-00000000").mkdir()
        pair.passes(LEASE_S, "b")
        assert pair.b.take() == "a"
        pair.passes(LEASE_S, "b")
        assert pair.b.take() == ""
        with pytest.raises(InterruptedRunError):
            run(note("too late"))
        with contextlib.closing(RunStore(b, database=pair.b)) as found:
            assert {run_id: one.state for run_id, one in found.records().items()} == {
                ONE: "interrupted",
                TWO: "done",
                THREE: "interrupted",
            }
            assert list(found.events(THREE, wait=False)) == []
            assert found.request(ONE) == b"how it began"
            assert [event.note for event in found.events(ONE, wait=False)][-1] == "further 39"
            assert files_of(b) == files_of(a)
            found.fetched(TWO)
    with contextlib.closing(RunStore(a, database=pair.b)) as again:
        assert (again.require(ONE).state, again.require(TWO).is_fetched) == ("interrupted", True)


def test_runs_that_are_deleted_are_gone_from_the_database(pair: Pair, tmp_path: Path) -> None:
    """Fetched runs beyond their days, and one that had no room to begin."""
    pair.a.take()
    with contextlib.closing(RunStore(tmp_path / "a", database=pair.a, keep_days=0.0)) as kept:
        kept.begin(record(), on_saved=lambda step: None)(control_pb2.RunEvent(done=True))
        (tmp_path / "a" / "runs" / TWO).mkdir()
        (tmp_path / "a" / "runs" / TWO / "events").touch()
        with pytest.raises(StorageError):
            kept.begin(record(TWO), on_saved=lambda step: None)
        kept.prune()
    copy_runs(pair.b, tmp_path / "b")
    assert list((tmp_path / "b" / "runs").iterdir()) == []


def test_file_of_a_database_with_a_path_as_its_name_is_not_written(pair: Pair, tmp_path: Path) -> None:
    """Who has the URL writes nothing else on the disk of a coordinator."""
    pair.a.take()
    with contextlib.closing(RunStore(tmp_path / "a", database=pair.a)) as kept:
        kept.begin(record(), on_saved=lambda step: None)
    for name in (f"{tmp_path}/absolute", "../../../above"):
        pair.a.put(ONE, name, [b"x"])
        with pytest.raises(StorageError, match="no coordinator writes"):
            copy_runs(pair.b, tmp_path / "b")
        assert not [*tmp_path.glob("ab*e")]
        with pair.a.transaction() as rows:
            rows.execute(database._FILES.delete().where(database._FILES.c.name == name))
    copy_runs(pair.b, tmp_path / "b")


def test_row_of_a_database_with_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    """SQLite stores text in any column; a standby says so, and goes on once it is mended."""
    with contextlib.closing(Pair(f"sqlite:///{tmp_path}/state.sqlite").a) as holder:
        lease, files = database._LEASE, database._FILES
        holder.take()
        with contextlib.closing(RunStore(tmp_path / "a", database=holder)) as kept:
            kept.begin(record(), on_saved=lambda step: None)
        holder.append(ONE, 0, b"x")
        for table, column, value, why in (
            (files, "content", "text", f"run {ONE} in sqlite.*str in place of bytes; restore"),
            (files, "content", 7, "int in place of bytes"),
            (database._EVENTS, "content", "text", "restore the database, or delete its rows"),
            (lease, "number", "many", r"ringtune_lease of sqlite:.* is damaged: .*'many'.* and empty it"),
            (lease, "lease_s", "long", "is damaged"),
        ):
            with holder.transaction() as rows:
                before = rows.execute(sqlalchemy.select(table)).mappings().all()
                rows.execute(table.update().values({column: sqlalchemy.literal(value)}))
            with pytest.raises(StorageError, match=why):
                holder.take() if table is lease else copy_runs(holder, tmp_path / "b")
            with holder.transaction() as rows:
                rows.execute(table.delete())
                for row in before:
                    rows.execute(table.insert().values(**row))
            copy_runs(holder, tmp_path / "b")
            shutil.rmtree(tmp_path / "b" / "runs")


@pytest.mark.slow
def test_two_coordinators_that_begin_with_an_empty_database_make_its_tables_once(server: PostgreSql) -> None:
    """The other one makes them after this one has seen that there are none; SQLite locks its file before."""
    url, ids = server.new_database(), list[str]()

    def make(*_: object, **__: object) -> None:
        with Database(url, lease_s=LEASE_S) as other:
            ids.append(other.database_id)

    sqlalchemy.event.listen(database._META, "before_create", make, once=True)
    with Database(url, lease_s=LEASE_S) as made:
        assert ids == [made.database_id]


@cases(
    ["url", "error", "why"],
    [
        ("oracel://x", UsageError, r"--database oracel://\.\.\. can't be used .*give sqlite"),
        ("sqlite:///", UsageError, "it names no file, which coordinators could share.*give sqlite:///FILE"),
        ("sqlite:///:memory:", UsageError, "it names no file"),
        ("postgresql+psycopg://ann:secret@127.0.0.1:1/x", StorageError, r"ann:\*\*\*@.*check that it runs"),
        ("sqlite:////nowhere/at/all.sqlite", StorageError, "can't use the database sqlite:"),
    ],
)
def test_database_that_can_not_be_used_is_named(url: str, error: type[Exception], why: str) -> None:
    """Without its password."""
    with pytest.raises(error, match=why) as caught:
        Database(url, lease_s=LEASE_S)
    assert "secret" not in str(caught.value)


def test_database_that_is_a_new_file_is_private(tmp_path: Path) -> None:
    """It has the runs of all users; a command that makes a token may be the first to make it."""
    before = os.umask(0o022)
    try:
        Database(f"sqlite:///{tmp_path}/state.sqlite", lease_s=1.0).close()
    finally:
        os.umask(before)
    assert (tmp_path / "state.sqlite").stat().st_mode & 0o777 == 0o600


def test_copy_has_one_coordinator_at_a_time(pair: Pair, tmp_path: Path) -> None:
    """Two of one machine have ports of their own, and so folders."""
    with (
        copy_folder(tmp_path / "7070", pair.a),
        copy_folder(tmp_path / "7071", pair.b),
        pytest.raises(BusyError, match="give this one another port"),
        copy_folder(tmp_path / "7070", pair.b),
    ):
        pass


def test_register_of_a_database_is_one_for_all_coordinators(pair: Pair, tmp_path: Path) -> None:
    """A token made at one is used at the other, once; a removal holds at both, also where folders were copied before.

    It begins with what the first folder had; an empty folder begins nothing anew.
    """
    folder, copied, now_s = tmp_path / "a", tmp_path / "b", time.time()
    init_trust(folder, now_s)
    shutil.copytree(folder, copied)
    empty = tmp_path / "empty"
    empty.mkdir()
    a, b = TrustKeeper(folder, shared=pair.a), TrustKeeper(copied, shared=pair.b)
    Register(empty, pair.b)
    token = make_token(folder, node_party("pi"), now_s + 3600, shared=pair.a)
    facts = facts_of(b.certify(token.secret, make_request(make_key())))
    with pytest.raises(TokenError):
        a.certify(token.secret, make_request(make_key()))
    assert a.remove(ADMIN, "gone") == 1, "it was in the folder"
    assert a.remove(node_party("pi"), "it was stolen") == 1
    assert not b.credentials.refusal(facts)
    assert (b.begin_to_act(), a.begin_to_act()) == ("", "")
    assert b.credentials.refusal(facts) == "it was stolen"
    other = tmp_path / "other"
    init_trust(other, now_s)
    assert "is not that of the coordinator that acted before" in TrustKeeper(other, shared=pair.b).begin_to_act()


def test_register_of_a_database_that_fails_half_way_is_as_before(tmp_path: Path, pair: Pair) -> None:
    """Also where there was nothing before."""
    register = Register(tmp_path, pair.a)
    register.note("a", "1")

    def fail() -> None:
        with pair.b.small_database("register.sqlite", bytes) as database:
            database.execute("DELETE FROM notes")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert Register(tmp_path, pair.b).noted("a") == "1"


@pytest.mark.parametrize(("is_ending", "is_gone"), [(False, False), (False, True), (True, False)])
def test_coordinator_that_loses_its_lease_begins_again_or_ends(
    monkeypatch: pytest.MonkeyPatch, *, is_ending: bool, is_gone: bool
) -> None:
    """It never goes on: it ends where a signal has told it to, or where its program is there no more."""
    done: list[str] = []

    class OverError(Exception):
        """What ends a process ends the test."""

    def execute(program: str, words: list[str]) -> None:
        if is_gone:
            raise FileNotFoundError(program)
        done.append(words[0])
        raise OverError

    def end(code: int) -> None:
        done.append(f"ends with {code}")
        raise OverError

    monkeypatch.setenv("RINGTUNE_BEGINS_AGAIN", "")  # put back at the end
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=Path("/").write_text))  # a terminal that is gone
    with pytest.raises(OverError):
        begin_again("another one acts", is_ending=is_ending)
    assert done == [f"ends with {StorageError.exit_code}" if is_ending or is_gone else sys.executable]
