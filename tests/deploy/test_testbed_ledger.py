"""The ledger of a testbed: what it lists, whom it keeps out, what is removed by it. Nothing here needs root."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.testbed.cleanup import Ledger, MakerProcess, clean
from ringtune.errors import BusyError, IntegrityError


def test_ledger_lists_what_was_added(tmp_path: Path) -> None:
    """In order; a line that a kill cut short does not count, since nothing was created yet."""
    ledger = Ledger("bed", folder=tmp_path)
    ledger.open()
    ledger.add_namespace("bed-none-such")
    ledger.add_folder(tmp_path / "group")
    with ledger.path.open("a") as file:
        file.write('{"folder": "/ha')
    left = ledger.read()
    assert (left.maker.pid, left.namespaces, left.folders) == (os.getpid(), ("bed-none-such",), (tmp_path / "group",))
    assert left.maker.is_alive


def test_testbed_that_is_there_is_not_built_twice(tmp_path: Path) -> None:
    """The message tells one in use from one that was left over."""
    ledger = Ledger("bed", folder=tmp_path)
    ledger.open()
    with pytest.raises(BusyError, match=f"in use by process {os.getpid()}"):
        Ledger("bed", folder=tmp_path).open()
    ledger.path.write_text(json.dumps({"pid": os.getpid(), "started_unix_s": 1.0}) + "\n")
    with pytest.raises(BusyError, match=r"has ended, is still there; remove it: python -m deploy\.testbed clean"):
        Ledger("bed", folder=tmp_path).open()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bed.jsonl"]


def test_what_somebody_else_has_made_is_not_taken_over(tmp_path: Path) -> None:
    """A group of that name that no ledger lists is refused, and so never removed."""
    ledger = Ledger("bed", folder=tmp_path / "ledgers")
    ledger.open()
    (tmp_path / "group").mkdir()
    with pytest.raises(BusyError, match="no testbed has listed"):
        ledger.add_folder(tmp_path / "group")
    ledger.remove_all()
    assert (tmp_path / "group").is_dir()


def test_clean_leaves_alone_what_is_in_use(tmp_path: Path) -> None:
    """Of two testbeds only the one whose process has ended is removed, with its groups, innermost first."""
    Ledger("alive", folder=tmp_path).open()
    dead = Ledger("dead", folder=tmp_path)
    dead.open()
    for folder in (tmp_path / "group", tmp_path / "group/board"):
        dead.add_folder(folder)
        folder.mkdir()
    _, *rest = dead.path.read_text().splitlines(keepends=True)
    dead.path.write_text("".join([json.dumps({"pid": os.getpid(), "started_unix_s": 1.0}) + "\n", *rest]))
    assert clean(folder=tmp_path) == [
        f"alive: in use by process {os.getpid()}, left alone; --force removes it",
        "dead: removed 0 namespaces and 2 groups",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive.jsonl"]


def test_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    """Rather than taken for an empty one."""
    (tmp_path / "bed.jsonl").write_text("{}\n")
    with pytest.raises(IntegrityError, match="is no ledger"):
        clean(folder=tmp_path)


def test_owner_is_told_from_a_later_process_of_its_number() -> None:
    """By the time of its start."""
    this = MakerProcess.this()
    assert this.is_alive
    assert not replace(this, started_unix_s=this.started_unix_s - 60).is_alive
