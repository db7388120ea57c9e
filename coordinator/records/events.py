"""Events of a run, and who hears them.

A run says what happens as ``RunEvent`` messages. Both ends hand each of them to a list of sinks: at the coordinator the
status board and the way to the submitter, at the submitter the outcome, the run's folder and the screen. A further
reader is a further sink; driver and client stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ringtune.errors import IntegrityError
from ringtune.v1 import control_pb2

EventSink = Callable[[control_pb2.RunEvent], None]
"""Takes one event; hears all of them, in order."""


def read_object(content: str | bytes, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        content: its text.
        what: for the message.

    Raises:
        IntegrityError: ``content`` is no JSON object.
    """
    try:
        value = json.loads(content)
    except ValueError as error:
        raise IntegrityError(f"{what} is not JSON: {error}; use one version on all machines") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{what} is not a JSON object; use one version on all machines")
    return value
