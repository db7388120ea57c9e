"""Texts of other machines: printable and bounded wherever they are shown or logged."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.predict import RowPrediction, Summary
from coordinator.client.follow import show_file
from coordinator.client.run_folder import LOG
from coordinator.client.saved_run import RunLocation
from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.node_client import node_error
from coordinator.run.recovery import Reports
from coordinator.screen.progress import PlainProgress
from coordinator.screen.tables import table_lines
from coordinator.server.coordinator import Coordinator
from coordinator.server.server import member_of
from ringtune import cli, options
from ringtune.errors import DataError, error_from_name
from ringtune.machine.process import exit_code_of
from ringtune.run_control import events as rd
from ringtune.texts import (
    LIBRARY_LOGS,
    MAX_CHARACTERS,
    PlainFormatter,
    RepeatCounter,
    log_to_stderr,
    one_line,
    printable,
    shown,
    times,
)
from ringtune.v1 import control_pb2
from tests.support.cases import cases
from tests.support.fake_agents import job
from tests.support.plans import make_plan

ESCAPES = "gone\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eok\x7f\x00"
LONG = "x" * 70_000


@given(st.text())
def test_printable_text_has_no_control(text: str) -> None:
    """Line ends stay; what is printable already is left as it is."""
    found = printable(text, most=10**6)
    assert "\x1b" not in found and "\r" not in found and "\x9b" not in found and "\u202e" not in found
    assert found.count("\n") == text.count("\n")
    if text.isprintable() and not any(letter.isspace() and letter != " " for letter in text):
        assert found == text


@given(st.text(min_size=30), st.integers(20, 200))
def test_printable_text_is_bounded(text: str, most: int) -> None:
    """Of a longer one the two ends are left, and how much is not shown."""
    found = printable(text.encode("utf-8", "replace").decode(), most=most)
    assert len(found) <= 10 * most + 60


def test_names_are_shown_on_one_short_line() -> None:
    """In quotes, as ``repr`` writes them."""
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown(LONG)) < 200


@cases("text", [ESCAPES, LONG])
def test_errors_of_others_are_printable_and_bounded(text: str) -> None:
    """As a call's status, as a run's failure, as part of an error of our own."""
    errors = [
        error_from_name("DataError", text),
        node_error("DATA_LOSS", f"ringtune.DataError: {text}", node="b", address="10.0.0.1:1"),
        node_error("INTERNAL", text, node="b", address="10.0.0.1:1"),
        DataError(f"can't read the column {text}"),
    ]
    for error in errors:
        assert len(str(error)) < MAX_CHARACTERS + 200
        assert str(error).isprintable()


@cases("text", [ESCAPES, LONG])
def test_logs_screens_and_lists_show_no_control_and_no_endless_line(text: str) -> None:
    """Whatever a node says of itself or of its failure."""
    line = PlainFormatter("%(message)s").format(logging.makeLogRecord({"msg": "node b: %s", "args": (text,)}))
    screen = io.StringIO()
    PlainProgress(screen).note(text)
    (_, row) = table_lines(("node", "system"), [("b", text)])
    member = member_of(control_pb2.JoinRequest(node="b", system=text, version=text, device=text, address=text))
    found = [line, screen.getvalue().removesuffix("\n"), row, member.system, member.version, member.device]
    assert all(entry.isprintable() and len(entry) < MAX_CHARACTERS + 200 for entry in [*found, member.address])


FORGED = "pi\n2026-01-01 00:00:00,000 ERROR edge: node c is broken"


def _raise(error: Exception) -> None:
    raise error


def test_no_text_forges_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In errors, in the log, in a table, in the coordinator's lines and in the description of a member."""
    line = PlainFormatter("%(asctime)s %(message)s").format(logging.makeLogRecord({"msg": FORGED}))
    assert line.splitlines()[1].startswith("  2026")
    error = DataError("node b: x\nerror: y")
    cli._show(error)
    assert exit_code_of(lambda: _raise(error)) == error.exit_code
    assert capsys.readouterr().err == "error: node b: x\n  error: y\n" * 2
    assert len(table_lines(("node", "system"), [("b", FORGED)])) == 2
    assert "\n" not in member_of(control_pb2.JoinRequest(node="b", system=FORGED)).system
    coordinator, said = Coordinator(lease_s=1.0), list[str]()
    coordinator.say = said.append
    coordinator.tell(f"run r of {FORGED} started")
    assert said == [f"run r of {one_line(FORGED)} started"] and "\n" not in said[0]


def test_commands_print_no_control(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a result, of a line beside it, of a log, and of names of classes, which may be those of other nodes."""
    (tmp_path / LOG).write_text(ESCAPES, encoding="utf-8")
    place = RunLocation(run_id="r20260101-000000-00000000", coordinator="x", is_local=True, pid=0, local_nodes=1)
    show_file(tmp_path, place, follow=False)
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    summary = Summary(job())
    summary.add(RowPrediction(row={}, said={"predicted": ESCAPES}))
    summary.add(RowPrediction(row={}, said={"predicted": FORGED}))
    options.show({}, [ESCAPES], as_json=False)
    options.echo(ESCAPES, err=True)
    for told in summary.lines():
        options.echo(told)
    found = capsys.readouterr()
    assert (found.out + found.err).replace("\n", "").isprintable()
    assert len(found.out.splitlines()) == 2


def test_traceback_of_a_bug_is_logged_whole() -> None:
    """It is how a bug is found; only the escapes in it are taken away."""
    try:
        raise ValueError(ESCAPES + "y" * 6000)
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)})
    found = PlainFormatter("%(message)s").format(record)
    assert "y" * 6000 in found and "\x1b" not in found and "test_texts.py" in found


def test_many_alike_lines_are_few_with_a_count() -> None:
    """Of 20,000 refused frames of a peer the 1st, 10th, ... is logged; another peer or kind has its own count."""
    repeats = RepeatCounter()
    assert [count for _ in range(20_000) if (count := repeats.told("b"))] == [1, 10, 100, 1000, 10_000]
    assert repeats.told("c") == 1
    for number in range(5000):
        repeats.told(number)
    assert len(repeats._counts) <= 1002
    assert times(1) == "" and times(1000) == " (1,000 times by now)"


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What this process logs as a command does; its handlers are those of before in the end."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    level, stream = root.level, io.StringIO()
    for _ in range(2):  # as if commands ran one after the other in this process
        log_to_stderr(logging.WARNING, stream)
        root.handlers = root.handlers[-1:]
    yield stream
    root.handlers = before
    root.setLevel(level)
    for name in LIBRARY_LOGS:
        logging.getLogger(name).filters.clear()


def test_log_of_a_library_is_not_flooded_by_a_stranger(logged: io.StringIO) -> None:
    """Each message that can't be read is a traceback of gRPC's own; few of many are written."""
    for number in range(1200):
        logging.getLogger("grpc._common").error("Exception deserializing message! %s", number)
    assert len(logged.getvalue().splitlines()) == 4
    assert "Exception deserializing message! 999 (1,000 times by now)" in logged.getvalue()
    logging.getLogger("edge").warning("from %s", ESCAPES)
    assert "\x1b" not in logged.getvalue()


class _Books:
    """Books of a run into which nothing is written."""

    plan, nodes, end_seq = make_plan([("a", 0, 4)], ["a"]), ("a",), 1

    def add_report(self, request: control_pb2.ReportRequest) -> None:
        """Ignore it."""


@cases("text", [ESCAPES, LONG])
def test_failures_and_problems_in_reports_are_printable(text: str) -> None:
    """They go to the submitter's screen, to the record of the run and to the log."""
    request = control_pb2.ReportRequest(node="a", number=1, error="DataError", message=text, cache_problem=text)
    (lost, failed) = Reports(CheckpointManager("r", job(), None)).take(request, _Books())  # type: ignore[arg-type]
    assert isinstance(lost, rd.TechniqueFailed) and isinstance(failed, rd.NodeFailed)
    for told in (lost.problem, failed.message):
        assert told.isprintable() and len(told) < MAX_CHARACTERS + 200
