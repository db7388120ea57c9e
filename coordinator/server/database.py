"""The state of a coordinator in a database that several coordinators share, one of which acts at a time.

::

    active coordinator ---- beats ----> lease (number 7, beat 120) <---- looks ---- standby
            |                                                                       |  the beat stood still for a
            '---- writes, with number 7 ----> runs, register <---- copies the runs -'  lease: number 8 is its own

*Lease.* No clocks are compared: the standby measures by its own clock for how long the beat has stood still, the active
one for how long its last beat is ago, from before the call on. So the active one stops first. The number *fences*: each
transaction that writes locks the row of the lease and asks for its number, so what a former holder writes is refused,
however late it wakes. A lease that was lost does not come back to the same process.

*Runs.* A coordinator's folder of runs is a copy of the database: each write goes to the database first, and to the disk
after that. Before it acts a coordinator completes its copy, and what the database lacks is removed from it; then it
resumes the interrupted run as a coordinator that was started again does (``coordinator.server.restart``).

*Register.* Tokens and removals (``coordinator.server.certificate_authority``) are one row, a whole SQLite database of
some kilobytes: it is read, changed in memory and stored in one transaction, by whoever has the URL.

Source: C. Gray, D. Cheriton, "Leases", SOSP 1989; for fencing M. Kleppmann, "How to do distributed locking", 2016.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sql
from sqlalchemy import event as events

from ringtune.errors import InterruptedRunError, StorageError, UsageError
from ringtune.ids import RUN_ID
from ringtune.storage.durable import FileLock, make_private_folder, storage_errors, write_pieces_durably
from ringtune.storage.pieces import PIECE_BYTES, Piece
from ringtune.texts import shown

_LOG = logging.getLogger(__name__)
_CALL_S: Final = 10
"""Time limit of connecting, and of a statement."""
_PAUSE_S: Final = 0.25
"""Until a write that failed is repeated."""
_BEATS: Final = 4
"""Beats in each lease."""
_FORMAT: Final = 1
_FILE: Final = re.compile(r"[a-z_]+(\.[a-z_]+)*")
"""Names of a run's files, which become parts of a path."""

_META = sql.MetaData()
_LEASE = sql.Table(
    "ringtune_lease",
    _META,
    sql.Column("id", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("format", sql.Integer, nullable=False),
    sql.Column("database_id", sql.String, nullable=False),
    sql.Column("number", sql.BigInteger, nullable=False),
    sql.Column("beat", sql.BigInteger, nullable=False),
    sql.Column("lease_s", sql.Double, nullable=False),
    sql.Column("holder", sql.String, nullable=False),
)
"""One row; ``lease_s`` 0 = the lease was given back."""
_FILES = sql.Table(
    "ringtune_files",
    _META,
    sql.Column("run_id", sql.String, primary_key=True),
    sql.Column("name", sql.String, primary_key=True),
    sql.Column("number", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("content", sql.LargeBinary, nullable=False),
)
"""Files in pieces, numbered from 0."""
_EVENTS = sql.Table(
    "ringtune_events",
    _META,
    sql.Column("run_id", sql.String, primary_key=True),
    sql.Column("position", sql.BigInteger, primary_key=True, autoincrement=False),
    sql.Column("written_unix_s", sql.Double, nullable=False),
    sql.Column("content", sql.LargeBinary, nullable=False),
)
"""Events as in the file of events; ``position`` is the byte there."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The lease at a look, and the first look since which it is unchanged."""

    number: int
    beat: int
    since_s: float


class Database:
    """The database of one URL, and this coordinator's lease; safe for threads.

    Args:
        url: of SQLAlchemy, such as ``sqlite:////srv/ringtune.sqlite`` or ``postgresql+psycopg://user@host/ringtune``;
            the tables are made if they are missing.
        lease_s: seconds without a beat after which another coordinator takes over.
        holder: name of this coordinator, for the lines of others.
        clock: monotonic seconds.
        on_lost: called once if the lease is lost, from the thread that finds it.

    Attributes:
        where: the URL without its password.
        database_id: random id, given when the tables were made.

    Raises:
        UsageError: wrong URL, or a library that it needs is missing.
        StorageError: the database does not answer, or is of another version.
    """

    def __init__(
        self,
        url: str,
        *,
        lease_s: float,
        holder: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[str], object] = lambda why: None,
    ) -> None:
        self.lease_s, self._clock, self.on_lost = lease_s, clock, on_lost
        self._holder = holder or f"process {os.getpid()} of {platform.node()}"
        self._lock = threading.Lock()
        self._number, self._renewed_s, self._seen = 0, 0.0, _Seen(-1, -1, 0.0)
        self._why_lost = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._engine = _engine(url)
        self.where = self._engine.url.render_as_string(hide_password=True)
        with self._errors():
            try:
                _META.create_all(self._engine)
            except (sql.exc.IntegrityError, sql.exc.ProgrammingError):  # another one has made the tables meanwhile
                _META.create_all(self._engine)
        self.database_id = self._begin_lease()

    def _begin_lease(self) -> str:
        values = {"id": 1, "format": _FORMAT, "number": 0, "beat": 0, "lease_s": 0.0, "holder": ""}
        with contextlib.suppress(sql.exc.IntegrityError), self.transaction() as database:  # another one has made it
            if database.execute(sql.select(_LEASE.c.id)).first() is None:
                database.execute(_LEASE.insert().values(**values, database_id=secrets.token_hex(8)))
        with self.transaction() as database:
            row = self._lease_row(database)
        if row.format != _FORMAT:
            raise StorageError(f"{self.where} is of version {row.format}, here is {_FORMAT}; use one ringtune for both")
        return str(row.database_id)

    def _lease_row(self, connection: sql.Connection) -> sql.Row[Any]:
        """Read the lease; SQLite takes values of any type into a column."""
        rows = connection.execute(sql.select(_LEASE)).all()
        numbers = (rows[0].format, rows[0].number, rows[0].beat) if len(rows) == 1 else ("",)
        if any(type(number) is not int for number in numbers) or not isinstance(rows[0].lease_s, int | float):
            shown_rows = shown(str([tuple(row) for row in rows]))
            raise StorageError(
                f"the table {_LEASE.name} of {self.where} is damaged: {shown_rows}; stop all coordinators and empty "
                "it, the next one makes its row anew"
            )
        return rows[0]

    def _bytes(self, value: object, run_id: str, name: str) -> bytes:
        """Return a stored content, which SQLite takes as text or number too."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise StorageError(
                f"{name} of {f'run {run_id}' if run_id else 'all coordinators'} in {self.where} is damaged: "
                f"{type(value).__name__} in place of bytes; restore the database, or delete its rows"
            )
        return bytes(value)

    def close(self) -> None:
        """Give the lease back, if it is held, and close the connections."""
        self.on_lost = lambda why: None
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CALL_S)
        try:
            with self.writing() as database:
                database.execute(_LEASE.update().values(lease_s=0.0))
        except (InterruptedRunError, StorageError) as error:
            _LOG.debug("the lease is not given back: %s", error)
        self._engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lease back."""
        self.close()

    # ---- transactions -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, *, reads_only: bool = False) -> Iterator[sql.Connection]:
        """Yield a connection in a transaction, rolled back after an exception; raises ``StorageError``."""
        engine = self._engine.execution_options(ringtune_reads=reads_only)
        with self._errors(), engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sql.Connection]:
        """Yield a connection as ``transaction``, to the holder of the lease; else raises ``InterruptedRunError``."""
        self.require_lease()
        with self.transaction() as connection:
            # a fence: the row of the lease is locked, so that nobody takes it before this transaction ends
            own_row = _LEASE.c.number == self._number
            if connection.execute(_LEASE.update().where(own_row).values(number=_LEASE.c.number)).rowcount == 0:
                holder = connection.execute(sql.select(_LEASE.c.holder)).scalar_one()
                self._lose(f"coordinator {holder} has taken over")
            yield connection

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sql.exc.IntegrityError:
            raise
        except sql.exc.SQLAlchemyError as error:
            why = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise StorageError(
                f"can't use the database {self.where}: {why}; check that it runs, and its URL"
            ) from error

    @contextlib.contextmanager
    def small_database(self, name: str, first: Callable[[], bytes]) -> Iterator[sqlite3.Connection]:
        """Yield the SQLite database that is one row here, in a transaction, also to who does not hold the lease.

        Args:
            name: of the row.
            first: returns the content, in the form of ``sqlite3.Connection.serialize``, while there is no row; may be
                empty.

        Raises:
            StorageError: the database does not answer or refuses.
        """
        is_it = (_FILES.c.run_id == "") & (_FILES.c.name == name)
        with (
            self.transaction() as outer,
            contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as inner,
        ):
            outer.execute(_LEASE.update().values(format=_LEASE.c.format))  # one at a time
            before = outer.execute(sql.select(_raw(_FILES.c.content)).where(is_it)).scalar()
            content = self._bytes(before, "", name) if before is not None else first()
            if content:
                inner.deserialize(content)
            inner.execute("BEGIN IMMEDIATE")
            with inner:
                yield inner
            after = inner.serialize()
            if after != before:
                outer.execute(_FILES.delete().where(is_it))
                outer.execute(_FILES.insert().values(run_id="", name=name, number=0, content=after))

    # ---- lease ------------------------------------------------------------------------------------

    def take(self) -> str:
        """Take the lease if it is free or over; return its holder, empty = this one; raises ``StorageError``."""
        with self.transaction() as database:
            now_s = self._clock()
            row = self._lease_row(database)
            if (row.number, row.beat) != (self._seen.number, self._seen.beat):
                seen_s = self._clock()  # not now_s: the beat may be younger, as the answer may be slow
                self._seen = _Seen(row.number, row.beat, seen_s)
            if row.lease_s and now_s - self._seen.since_s < row.lease_s:
                return str(row.holder)
            is_same = (_LEASE.c.number == row.number) & (_LEASE.c.beat == row.beat)
            values = {"number": row.number + 1, "beat": 0, "lease_s": self.lease_s, "holder": self._holder}
            if database.execute(_LEASE.update().where(is_same).values(**values)).rowcount == 0:
                return "another one"  # that was faster
        self._renewed_s, self._number = now_s, row.number + 1
        self._thread.start()
        return ""

    def require_lease(self) -> None:
        """Refuse to act without the lease; raises ``InterruptedRunError``."""
        if not self._number:
            raise InterruptedRunError(f"this coordinator is a standby of {self.where}")
        if self._why_lost or self._clock() - self._renewed_s >= self.lease_s:
            self._lose(f"the database {self.where} took no beat for {self.lease_s:g} s")

    def beat(self) -> None:
        """Renew the lease; raises ``InterruptedRunError`` or ``StorageError``."""
        began_s = self._clock()
        with self.writing() as database:
            database.execute(_LEASE.update().values(beat=_LEASE.c.beat + 1))
        self._renewed_s = began_s

    def _beat(self) -> None:
        pause_s = self.lease_s / _BEATS
        while not self._closing.wait(pause_s):
            pause_s = self.lease_s / _BEATS
            try:
                self.beat()
            except StorageError as error:
                _LOG.warning("%s", error)
                pause_s /= _BEATS  # the database may be back just before the lease is over
            except InterruptedRunError:
                return

    def _lose(self, why: str) -> None:
        with self._lock:
            is_news, self._why_lost = not self._why_lost, self._why_lost or why
        if is_news:
            self.on_lost(self._why_lost)
        raise InterruptedRunError(f"this coordinator has lost its lease: {self._why_lost}; start it again as a standby")

    # ---- runs -------------------------------------------------------------------------------------

    def _write(self, write: Callable[[sql.Connection], object]) -> None:
        """Carry out a transaction of the holder, again for a lease where the database does not answer.

        ``write`` may be called again after a transaction that was committed without an answer. Raises as ``writing``.
        """
        until_s = self._clock() + self.lease_s
        while True:
            try:
                with self.writing() as database:
                    write(database)
                return
            except StorageError as error:
                if self._clock() >= until_s or self._closing.wait(_PAUSE_S):
                    raise
                _LOG.warning("%s; the write is repeated", error)

    def put(self, run_id: str, name: str, content: Iterable[Piece]) -> None:
        """Replace a file of a run, in one step if it is of one piece; raises as ``writing``."""
        is_it = (_FILES.c.run_id == run_id) & (_FILES.c.name == name)

        def write(number: int, piece: Piece, database: sql.Connection) -> None:
            database.execute(_FILES.delete().where(is_it & (_FILES.c.number >= number)))
            database.execute(_FILES.insert().values(run_id=run_id, name=name, number=number, content=bytes(piece)))

        for number, piece in enumerate(content):  # a transaction each: beats wait for it
            self._write(functools.partial(write, number, piece))

    def append(self, run_id: str, position: int, content: bytes) -> None:
        """Store one event at a position of its file, in place of what is there or after it; raises as ``writing``."""
        is_later = (_EVENTS.c.run_id == run_id) & (_EVENTS.c.position >= position)
        row = {"run_id": run_id, "position": position, "written_unix_s": time.time(), "content": content}

        def write(database: sql.Connection) -> None:
            database.execute(_EVENTS.delete().where(is_later))
            database.execute(_EVENTS.insert().values(**row))

        self._write(write)

    def remove(self, run_id: str) -> None:
        """Delete a run; raises as ``writing``."""

        def write(database: sql.Connection) -> None:
            for table in (_FILES, _EVENTS):
                database.execute(table.delete().where(table.c.run_id == run_id))

        self._write(write)

    def copy_to(self, folder: Path, *, record: str, log: str) -> None:
        """Complete a copy of all runs: new files, all records, and the events that were added since the last time.

        Args:
            folder: of the runs; a run that the database lacks is removed from it.
            record: name of a run's file that is replaced as the run continues; the others never change.
            log: name of a run's file of events.

        Raises:
            StorageError: the database or the disk does not take part.
        """
        with self.transaction(reads_only=True) as database:
            names = database.execute(sql.select(_FILES.c.run_id, _FILES.c.name).distinct()).all()
        runs = {run_id for run_id, name in names if name == record and RUN_ID.fullmatch(run_id)}
        with storage_errors(folder):
            for old in folder.iterdir():
                if RUN_ID.fullmatch(old.name) and old.name not in runs:
                    shutil.rmtree(old)
        for run_id, name in names:
            if run_id in runs and not _FILE.fullmatch(name):
                raise StorageError(
                    f"the database {self.where} has a file {shown(name)} of run {run_id}, which no coordinator writes; "
                    "remove its row, and look who else has the URL"
                )
            path = folder / run_id / name
            if run_id in runs and (name == record or not path.exists()):
                write_pieces_durably(path, self._pieces(run_id, name))
        for run_id in runs:
            self._copy_events(run_id, folder / run_id / log)

    def _pieces(self, run_id: str, name: str) -> Iterator[bytes]:
        is_it = (_FILES.c.run_id == run_id) & (_FILES.c.name == name)
        chosen = sql.select(_raw(_FILES.c.content), _FILES.c.number).where(is_it).order_by(_FILES.c.number)
        for value in self._contents(chosen):
            yield self._bytes(value, run_id, name)

    def _copy_events(self, run_id: str, path: Path) -> None:
        """Add the events that a file lacks; its last one is written again, as a crash may have left a part of it."""
        is_run = _EVENTS.c.run_id == run_id
        with self.transaction(reads_only=True) as database:
            last = database.execute(
                sql.select(_EVENTS.c.position, _EVENTS.c.written_unix_s, sql.func.length(_EVENTS.c.content))
                .where(is_run)
                .order_by(_EVENTS.c.position.desc())
                .limit(1)
            ).first()
            if not path.exists():
                with storage_errors(path):
                    path.touch()
            size_bytes = path.stat().st_size
            if last is None or size_bytes == last[0] + last[2]:
                return
            is_before = is_run & (_EVENTS.c.position <= size_bytes)
            start = database.execute(sql.select(sql.func.max(_EVENTS.c.position)).where(is_before)).scalar_one()
        chosen = sql.select(_raw(_EVENTS.c.content), _EVENTS.c.position).where(is_run & (_EVENTS.c.position >= start))
        with storage_errors(path), path.open("r+b") as file:
            file.truncate(start)
            file.seek(start)
            for content in self._contents(chosen.order_by(_EVENTS.c.position)):
                file.write(self._bytes(content, run_id, path.name))
            file.flush()
            os.fsync(file.fileno())
            os.utime(path, (last[1], last[1]))  # when it was written says when the run was interrupted

    def _contents(self, chosen: sql.Select[Any]) -> Iterator[object]:
        """Yield the first column of the rows, of which a few at a time are in memory."""
        with self.transaction(reads_only=True) as database:
            rows = database.execution_options(yield_per=_ROWS).execute(chosen)
            for row in rows:
                yield row[0]


def stand_by(
    database: Database,
    copy: Callable[[], object],
    *,
    say: Callable[[str], object],
    is_over: Callable[[], bool],
    problem: Callable[[], str] = lambda: "",
) -> bool:
    """Wait for the lease; return whether this coordinator has it now; raises ``StorageError``.

    ``copy`` completes the copy of the runs, which is a lease old at most. ``say`` takes a line about the coordinator
    that acts, or about what keeps this one from it. ``is_over`` waits a moment and returns whether this process is to
    end. ``problem`` returns why this coordinator can't act, empty = it can; it is asked once a lease.
    """
    why = problem()
    holder, copied_s, told = why or database.take(), -math.inf, ""
    while holder:
        if holder != told:
            told = holder
            acts = f"coordinator {holder} acts, this one takes over a lease after its last beat"
            say(f"standby: {f'this coordinator can not take over: {why}' if why else acts}")
        if is_over():
            return False
        try:
            if time.monotonic() - copied_s >= database.lease_s:
                copy()
                why, copied_s = problem(), time.monotonic()
            holder = why or database.take()
        except StorageError as error:
            _LOG.warning("%s", error)
    return True


def _raw(column: sql.Column[bytes]) -> sql.ColumnElement[Any]:
    """Return a column whose values come as they are stored, of whatever type."""
    return sql.type_coerce(column, sql.types.NullType())


_ROWS: Final = max(1, (16 << 20) // PIECE_BYTES)


def _engine(url: str) -> sql.Engine:
    """Make the engine of a URL, with time limits; a transaction of SQLite locks the file from its beginning.

    A new file, which has the runs of all users, is this user's alone, whoever makes it first.

    Raises ``UsageError``: wrong URL, or a library that it needs is missing.
    """
    try:
        given = sql.make_url(url)
        kind = given.get_backend_name()
        if kind == "sqlite" and given.database in (None, "", ":memory:"):
            raise sql.exc.ArgumentError("it names no file, which coordinators could share")
        if kind == "sqlite":
            if "uri" not in given.query:
                with contextlib.suppress(OSError):  # it is there, or SQLite says what is wrong
                    os.close(os.open(str(given.database), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            engine = sql.create_engine(given, connect_args={"timeout": _CALL_S, "isolation_level": None})
            events.listen(engine, "connect", lambda opened, _: opened.execute("PRAGMA journal_mode = WAL"))
            events.listen(engine, "begin", _begin)
            return engine
        limits = {"connect_timeout": _CALL_S, "options": f"-c statement_timeout={_CALL_S * 1000}"}
        limits |= {"tcp_user_timeout": _CALL_S * 1000} if kind == "postgresql" else {}
        return sql.create_engine(given, pool_pre_ping=True, connect_args=limits)
    except (sql.exc.ArgumentError, ImportError) as error:
        raise UsageError(
            f"--database {url.partition('://')[0]}://... can't be used ({error}); give sqlite:///FILE or "
            "postgresql+psycopg://USER@HOST/NAME"
        ) from error


def _begin(connection: sql.Connection) -> None:
    is_reader = connection.get_execution_options().get("ringtune_reads")
    connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")


@contextlib.contextmanager
def copy_folder(parent: Path, database: Database) -> Iterator[Path]:
    """Make and lock the folder of a coordinator's copy of a database; raises ``BusyError`` or ``StorageError``."""
    folder = parent / f"database-{database.database_id}"
    make_private_folder(folder)
    busy = f"another coordinator, {{holder}}, has its copy of the runs in {folder}; give this one another port (--bind)"
    with FileLock(folder / "copy-lock", busy=busy):
        yield folder
