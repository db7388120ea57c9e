"""What a command waits for is said, on the standard error output, once it takes long."""

from __future__ import annotations

import io
import threading

import pytest

from coordinator.screen.waiting import Waiting

WAIT_S = 30.0


class Screen(io.StringIO):
    """A stream that knows when something was written, and may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Take a text, and tell."""
        count = super().write(text)
        self.written.set()
        return count


def test_waiting_says_each_thing_once_where_nothing_can_be_redrawn() -> None:
    """A line for each thing that takes long; the result of the work is not touched."""
    screen = Screen(is_terminal=False)
    with Waiting("reading train.csv", stream=screen, quiet_s=0.0) as waiting:
        assert screen.written.wait(WAIT_S)
        screen.written.clear()
        waiting.state("joining")
        assert screen.written.wait(WAIT_S)
    assert screen.getvalue() == "reading train.csv ...\nwaiting for nodes to join ...\n"


def test_waiting_leaves_a_terminal_as_it_was() -> None:
    """The line with the seconds is written over with blanks in the end."""
    screen = Screen(is_terminal=True)
    with Waiting("planning", stream=screen, quiet_s=0.0):
        assert screen.written.wait(WAIT_S)
    first, *_, blank, end = screen.getvalue().split("\r")[1:]
    assert first.startswith("planning ... ") and blank.isspace() and end == ""


def test_waiting_for_what_is_quick_says_nothing() -> None:
    """Nothing is written before the quiet time is over, whatever ends it."""
    screen = Screen(is_terminal=True)
    with pytest.raises(ValueError, match="wrong"), Waiting("planning", stream=screen, quiet_s=WAIT_S):
        raise ValueError("wrong")
    assert screen.getvalue() == ""
