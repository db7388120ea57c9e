"""A PostgreSQL server of its own for a test, where one is installed."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.cluster import free_port
from tests.support.processes import RUN_S

_USER: Final = "postgres"
"""Whom PostgreSQL's package makes; its programs refuse root."""


class PostgreSql:
    """A server that runs."""

    def __init__(self, port: int) -> None:
        self._place = f"ringtune@127.0.0.1:{port}"
        self._numbers = itertools.count(1)

    def new_database(self) -> str:
        """The URL of an empty one."""
        import psycopg

        name = f"test_{next(self._numbers)}"
        with psycopg.connect(f"postgresql://{self._place}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://{self._place}/{name}"


def _tools() -> Path:
    """The folder of PostgreSQL's programs; skips the test without one."""
    found = shutil.which("initdb")
    places = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not places or not (places[-1] / "initdb").is_file():
        pytest.skip("no PostgreSQL server is installed here (initdb)")
    if os.getuid() == 0 and _USER not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip(f"PostgreSQL refuses root, and there is no user {_USER}")
    return places[-1]


@contextlib.contextmanager
def postgresql() -> Iterator[PostgreSql]:
    """Start one, with its data in a temporary folder; end it with the context."""
    tools, port = _tools(), free_port()
    # Not subprocess's ``user``: its child runs gRPC's handlers of forks, whose thread may end it before it executes.
    as_user = ["runuser", "-u", _USER, "--"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:  # other users may enter those above it
        if as_user:
            shutil.chown(folder, _USER)
        data = f"{folder}/data"

        def run(name: str, *arguments: str) -> None:
            command = [*as_user, str(tools / name), "-D", data, *arguments]
            subprocess.run(command, check=True, timeout=RUN_S, cwd=folder, stdout=subprocess.DEVNULL)  # noqa: S603

        run("initdb", "-U", "ringtune", "--auth=trust", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-l", f"{folder}/log", "-o", options, "-w", "start")
        try:
            yield PostgreSql(port)
        finally:
            run("pg_ctl", "-m", "immediate", "-w", "stop")
