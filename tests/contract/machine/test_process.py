"""Tests of ``ringtune.machine.process``: outputs, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.screen.progress import JsonProgress, PlainProgress
from ringtune import cli
from ringtune.errors import StorageError
from ringtune.machine.process import ENDS, handled, lost_output, unbreakable_stream
from tests.support.cases import cases
from tests.support.processes import source_environment

ENCODINGS = ("ascii", "iso-8859-1", "cp1252", "utf-8")
HELPS: tuple[list[str], ...] = ([], ["node"], ["train"], ["coordinator", "token"])
"""The command, the longest pages, and a command below a command."""


@contextmanager
def output(encoding: str, errors: str = "strict") -> Iterator[tuple[TextIO, Callable[[], bytes]]]:
    """A guarded output of some encoding, and what came out of it."""
    with TemporaryFile("w+b") as file, open(file.fileno(), "w", encoding=encoding, errors=errors, closefd=False) as own:
        stream = unbreakable_stream(own)

        def content() -> bytes:
            stream.flush()
            file.seek(0)
            return file.read()

        yield stream, content


@settings(max_examples=50)
@given(
    text=st.text(st.characters(exclude_characters="\r"), max_size=30),
    encoding=st.sampled_from(ENCODINGS),
    errors=st.sampled_from(["strict", "surrogateescape"]),
)
def test_any_text_is_written_to_any_output(text: str, encoding: str, errors: str) -> None:
    """Signs that the output has are as they were, others are escaped; a lone half of a sign too."""
    signs = []
    for sign in text:
        try:
            signs.append(sign.encode(encoding).decode(encoding))
        except UnicodeEncodeError:
            signs.append("..." if sign == "…" else sign.encode("ascii", "backslashreplace").decode())
    with output(encoding, errors) as (stream, content):
        stream.write(text)
        assert content().decode(encoding) == "".join(signs)


def test_long_helps_are_written_to_an_output_that_has_only_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames, long values and dots of the help, and classes that are emojis in what a run shows."""
    with output("ascii") as (stream, content):
        monkeypatch.setattr(sys, "stdout", stream)
        for words in HELPS:
            with pytest.raises(SystemExit) as ended:
                cli.app([*words, "--help"])
            assert not ended.value.code, words
        for shown in (PlainProgress(stream), JsonProgress(stream)):
            shown.note("classes: 😀, grün")
        text = content().decode("ascii")
    assert text.count("Usage:") == len(HELPS)
    assert r"classes: \U0001f600, gr\xfcn" in text


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The end of a pipe at which one writes, and nobody reads at the other."""
    reads, writes = os.pipe()
    os.close(reads)
    yield writes
    os.close(writes)


@pytest.mark.parametrize("kind", ["full disk", "closed pipe"])
def test_output_that_takes_nothing_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], closed_pipe: int, kind: str
) -> None:
    """Nothing is raised, however much is written; of a full disk the standard error has one line with the reason."""
    with Path("/dev/full").open("wb") as full:
        descriptor = full.fileno() if kind == "full disk" else closed_pipe
        stream = unbreakable_stream(open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - it can't be closed
        assert unbreakable_stream(stream) is stream
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(3):
            stream.write("x" * 100_000)
            stream.flush()
        lost = lost_output()
    assert lost is not None
    lines = capfd.readouterr().err.splitlines()
    assert [f"can't be written ({lost.strerror})" in line for line in lines] == [True] * (kind == "full disk")


@cases("module", ["ringtune.cli", "edge"])
def test_process_goes_on_without_its_output(module: str) -> None:
    """Commands and agents guard their outputs before they print: exit code 0, and one line of why."""
    command = [sys.executable, "-m", module, "--help"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(  # noqa: S603 - our own module
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=source_environment(), check=False
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr


@cases(("command", "code"), [("doctor", 9), ("train", 0), ("coordinator", 0)])
def test_command_whose_result_is_its_output_does_not_end_well_without_it(
    monkeypatch: pytest.MonkeyPatch, command: str, code: int
) -> None:
    """A list that nobody got is no success; a run is what became of it, and a reader that has read enough is none."""
    for error, wanted in ((OSError(28, "full"), code), (OSError(32, "pipe"), 0), (None, 0)):
        monkeypatch.setattr(cli, "lost_output", lambda error=error: error)
        try:
            cli._require_printed(command)
            found = 0
        except StorageError as refused:
            found = refused.exit_code
        assert found == wanted


@cases("number", ENDS)
def test_signals_are_handled_and_their_handlers_given_back(number: signal.Signals) -> None:
    """Also if what is done meanwhile fails."""
    before = [signal.getsignal(each) for each in ENDS]
    heard: list[int] = []

    def hear(got: int, _frame: object) -> None:
        heard.append(got)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), handled(hear):
        os.kill(os.getpid(), number)
    assert heard == [number]
    assert [signal.getsignal(each) for each in ENDS] == before


def test_signals_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """``nohup`` is for that; Ctrl-C and the end of a service are heard all the same."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard: list[int] = []
    try:
        with handled(lambda got, _: heard.append(got)):
            for number in ENDS:
                os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGINT, signal.SIGTERM]


def test_output_that_is_kept_has_nothing_of_processes_below(tmp_path: Path) -> None:
    """Nor of what libraries print, at import or a call, or past ``sys.stdout``; all that goes to standard error."""
    (tmp_path / "sitecustomize.py").write_text(f"import edge.runtime; edge.runtime.__path__ += [{str(tmp_path)!r}]\n")
    code = "import os, sys\nprint('at import')\ndef main(words, output):\n"
    code += " print('at a call'); os.system('echo below'); print('past', file=sys.__stdout__, flush=True)\n"
    code += " return output.write(words[0])"
    (tmp_path / "loud.py").write_text(code)
    environment = source_environment()
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    command = [sys.executable, "-P", "-m", "edge.runtime", "loud", "own"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # noqa: S603
    assert (done.returncode, done.stdout, done.stderr) == (3, "own", "at import\nat a call\nbelow\npast\n")
