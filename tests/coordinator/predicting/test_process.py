"""The process that predicts: its lines, its errors, and that it is gone afterwards."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.predicting.process import _read
from ringtune.errors import DeadlineError, InvalidInputError, PeerLostError

LINE = 'print(\'{"row": {"text": "a"}, "predicted": {"predicted": "pos"}}\', flush=True)\n'


def started(code: str, log: Path) -> subprocess.Popen[str]:
    """Start Python with some code in place of a model."""
    with log.open("w", encoding="utf-8") as errors:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )


def read(code: str, folder: Path, *, wait_s: float = 60.0, most: int = 10) -> list[str]:
    """Read what is predicted, at most so many rows; the process has ended then."""
    process = started(code, folder / "log")
    lines = _read(process, folder / "log", wait_s=wait_s)
    try:
        return [found.said["predicted"] for found in itertools.islice(lines, most)]
    finally:
        lines.close()  # type: ignore[attr-defined]
        assert process.wait(10) is not None
        process.stdout.close()


def test_process_gives_every_line_and_ends(tmp_path: Path) -> None:
    """More lines than are read ahead; and whoever reads no more leaves no process behind."""
    assert read(LINE * 3, tmp_path) == ["pos"] * 3
    assert read(f"while True: {LINE}", tmp_path, most=700) == ["pos"] * 700
    told = list[str]()
    process = started(LINE + """print('{"told": "1 of 1 rows"}')""", tmp_path / "log")
    assert len(list(_read(process, tmp_path / "log", wait_s=60.0, tell=told.append))) == 1 and told == ["1 of 1 rows"]
    assert process.stdout is not None
    process.stdout.close()


def test_process_that_fails_tells_its_own_error(tmp_path: Path) -> None:
    """After the rows before it; with the class that its exit code says, or as one that was lost."""
    code = LINE + "import sys; sys.stderr.write('error: a column is missing\\n'); sys.exit(5)"
    with pytest.raises(InvalidInputError, match="column is missing"):
        read(code, tmp_path)
    with pytest.raises(PeerLostError, match="predicting was ended by SIGTERM"):
        read("import os; os.kill(os.getpid(), 15)", tmp_path)


def test_process_that_says_nothing_has_a_deadline(tmp_path: Path) -> None:
    """What was waited for, how long, and which key is the remedy; the process is ended."""
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for the next row .* raise runtime\.wait_s"):
        read("import time; time.sleep(600)", tmp_path, wait_s=0.2)
