"""A function that another thread wants to be run on the loop's thread, between two actions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A function to run on the loop's thread, with the future that gets its result."""

    function: Callable[[], Any]
    future: Future[Any]

    def answer(self) -> None:
        """Run the function, unless nobody waits for it any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except Exception as error:
            self.future.set_exception(error)
